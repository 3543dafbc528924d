"""Journals of a run: what each process of the application did, as JSON lines, for the audit.

Kinds of entries (``is``), with times in Unix seconds:

    subscribed   user, query, params, interest, epoch, offset: a broker has confirmed; delivery begins behind the offset
    back         user, at: the user is there, for the first time or after an absence
    ended        user, interest: the user has unsubscribed
    item         user, interest, epoch, offset, at, data: the handler got a result set
    same         user, interest, epoch, offset, at, digest: as item, of a result set that this journal has already
    gap          user, interest, first, last, reason, epoch, offset: the handler got a gap; it goes on behind the offset
    refused      user, what, reason: a broker has refused something
    location     user, stored, unknown, refused: how many locations were sent, at the user's end
    report       id, at: a report was stored
    doubtful     id: nobody knows whether a report was stored
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any


def digest_of(data: bytes) -> str:
    """Return a digest that names the content of a result set."""
    return blake2b(data, digest_size=12).hexdigest()


class Journal:
    """Writes the journal of one process. Entries reach the file at ``flush``, and at the end.

    Args:
        path: of the file; it must not exist.

    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("x", encoding="utf-8")
        #: Digests of the result sets that this journal has in full; their number is that of result sets.
        self._written: set[tuple[str, int, int]] = set()

    def write(self, kind: str, **fields: Any) -> None:
        """Write an entry."""
        self._file.write(json.dumps({"is": kind, **fields}, separators=(",", ":")) + "\n")

    def write_item(self, user: str, interest: str, epoch: int, offset: int, at_s: float, data: bytes) -> None:
        """Write that a handler got a result set: in full where it is new here."""
        place = interest, epoch, offset
        fields = {"user": user, "interest": interest, "epoch": epoch, "offset": offset, "at": round(at_s, 3)}
        if place in self._written:
            self.write("same", **fields, digest=digest_of(data))
        else:
            self._written.add(place)
            self.write("item", **fields, data=data.decode())

    def flush(self) -> None:
        """Hand everything to the system."""
        self._file.flush()

    def close(self) -> None:
        """Write the rest, and close the file."""
        self._file.close()


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the entries of a journal. A last line that is not complete, of a process that was killed, is left out."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)
