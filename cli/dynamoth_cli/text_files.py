"""Reads small text files that a user has named, whatever is behind the name: a pipe, a device, a huge file."""

from __future__ import annotations

import os
import select
import time
from pathlib import Path

SETTINGS_BYTES_MAX = 1_000_000
"""Bound of a file of settings or passwords. One server takes some 60 bytes of it."""

WAIT_S_MAX = 5.0
"""Bound of the time to read a file. A pipe, as of ``<(...)`` in a shell, has its text when a program has written it."""


class UnreadableFile(ValueError):
    """Raised when a file cannot be used as text; the text says why."""


def read_text_file(name: str | Path) -> str:
    """Return the text of a file.

    Raises:
        UnreadableFile: it cannot be read within ``WAIT_S_MAX``, has more than ``SETTINGS_BYTES_MAX``, or is no text.

    """
    try:
        return _read(name).decode()
    except UnicodeDecodeError as error:
        raise UnreadableFile("it is no UTF-8 text") from error
    except ValueError as error:
        raise UnreadableFile(str(error)) from error
    except OSError as error:
        raise UnreadableFile(error.strerror or str(error)) from error


def _read(name: str | Path) -> bytes:
    ends_at = time.monotonic() + WAIT_S_MAX
    data = b""
    with open(name, "rb", buffering=0, opener=_open_at_once) as file:
        readable = select.poll()
        readable.register(file, select.POLLIN)
        while len(data) <= SETTINGS_BYTES_MAX:
            if not readable.poll(max(0.0, ends_at - time.monotonic()) * 1000):
                raise UnreadableFile(f"nobody has written it to its end within {WAIT_S_MAX:g} s")
            part = file.read(SETTINGS_BYTES_MAX + 1 - len(data))
            if part == b"":
                return data
            data += part or b""  # None: there is nothing to read yet
    raise UnreadableFile(f"it has more than {SETTINGS_BYTES_MAX} bytes")


def _open_at_once(name: str, flags: int) -> int:
    """Open a file without waiting for a program at the other end of a pipe."""
    return os.open(name, flags | os.O_NONBLOCK)
