"""What the commands share: lines that they print, the folder that they write to, and how each runs alone."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

from dynamoth.errors import ConfigError, DynamothError, printable
from dynamoth_analytics.files import check_name
from dynamoth_daemon.exit_codes import EXIT_CODES, EXIT_FAILED, EXIT_REFUSED


def say(line: str) -> None:
    """Print a line at once, so that people see the progress."""
    sys.stdout.write(f"{printable(line)}\n")
    sys.stdout.flush()


def new_folder(given: str | None, command: str) -> Path:
    """Return the folder for the results, which is made; None: one that is named after the command and the time.

    Raises:
        ConfigError: it cannot be written, or is not empty.

    """
    out = Path(given or f"{command}-{datetime.now(UTC):%Y%m%d-%H%M%S}").resolve()
    check_name(str(out))
    try:
        out.mkdir(parents=True, exist_ok=True)
        used = any(out.iterdir())
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}: give a folder that can be written") from error
    if used:
        raise ConfigError(f"--out {out} is not empty: give a new folder")
    return out


@contextmanager
def deleted_after_failure(out: Path) -> Generator[None]:
    """Delete a folder that was new when a run in it fails: its tables are incomplete, and a new run needs the name."""
    try:
        yield
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)
        raise


def end_at_signals(code: int, message: str) -> None:
    """Have SIGINT and SIGTERM end this process at once, with an exit code and a message.

    Python would raise KeyboardInterrupt anywhere. In the middle of an answer from Java, that breaks the connection.
    Tables that were being written are incomplete: a new run writes its own. Java ends with this process.
    """

    def end(number: int, frame: FrameType | None) -> None:
        os.write(2, f"dynamoth: {message}\n".encode())
        os._exit(code)

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, end)


def run_alone(
    prog: str, configure: Callable[[argparse.ArgumentParser], None], run: Callable[[argparse.Namespace], int]
) -> int:
    """Run a command without ``dynamoth``, as ``spark-submit`` does. Returns the exit code."""
    parser = argparse.ArgumentParser(prog=prog, epilog=EXIT_CODES, allow_abbrev=False)
    configure(parser)
    try:
        return run(parser.parse_args())
    except DynamothError as error:
        sys.stderr.write(f"dynamoth: {printable(str(error))}\n")
        return EXIT_REFUSED if isinstance(error, ConfigError) else EXIT_FAILED
