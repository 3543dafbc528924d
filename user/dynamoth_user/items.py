"""What the client gives to the application: publications, changes of presence, and the gaps between them."""

from __future__ import annotations

from dataclasses import dataclass

from dynamoth.edge.interests import Interest
from dynamoth.edge.publications import Position


@dataclass(frozen=True, slots=True)
class Item:
    """One publication."""

    interest: Interest
    data: bytes
    #: Its position in the log; None for a channel without a log.
    position: Position | None = None

    @property
    def text(self) -> str:
        """The payload as UTF-8. Raises UnicodeDecodeError."""
        return self.data.decode()


@dataclass(frozen=True, slots=True)
class Join:
    """Somebody has joined a channel. ``member`` is one session of ``user``: 22 characters, always the same."""

    member: str
    user: str


@dataclass(frozen=True, slots=True)
class Leave:
    """Somebody has left a channel."""

    member: str
    user: str


@dataclass(frozen=True, slots=True)
class Gap:
    """Publications are missing here: the log does not have them any more, or nobody stored them."""

    interest: Interest
    reason: str
    #: The offsets that are missing; None for unknown.
    first: int | None = None
    last: int | None = None
    #: How many publications of a channel without a log are missing; None for unknown.
    count: int | None = None
    #: Where a logged interest goes on.
    position: Position | None = None
