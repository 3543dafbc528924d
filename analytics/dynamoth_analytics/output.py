"""What the commands print, and the folder that they write to."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path

from dynamoth.errors import ConfigError


def say(line: str) -> None:
    """Print a line at once, so that people see the progress."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def new_folder(given: str | None, command: str) -> Path:
    """Return the folder for the results, which is made; None: one that is named after the command and the time.

    Raises:
        ConfigError: it cannot be written, or is not empty.

    """
    out = Path(given or f"{command}-{datetime.now(UTC):%Y%m%d-%H%M%S}").resolve()
    try:
        out.mkdir(parents=True, exist_ok=True)
        used = any(out.iterdir())
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}: give a folder that can be written") from error
    if used:
        raise ConfigError(f"--out {out} is not empty: give a new folder")
    return out
