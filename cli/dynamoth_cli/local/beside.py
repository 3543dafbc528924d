"""Runs a recorder as a process beside another daemon: the option ``--record``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from dynamoth.settings.load import declared_settings
from dynamoth_cli.extras import what_is_missing
from dynamoth_cli.local.child import Child, dynamoth_command

_SHARED_SECTIONS = ("cluster", "link", "log")


def add_record(parser: argparse.ArgumentParser) -> None:
    """Add ``--record``."""
    parser.add_argument(
        "--record", type=_folder, metavar="DIR", help="record into this folder, as 'dynamoth record --out DIR' does"
    )


def _folder(text: str) -> Path:
    """Refuse at once what the recorder would only refuse once all else runs."""
    if missing := what_is_missing("record"):
        raise argparse.ArgumentTypeError(f"a recorder needs {missing}")
    if not text:
        raise argparse.ArgumentTypeError("the name of a folder expected, not an empty one")
    if (folder := Path(text)).is_file():
        raise argparse.ArgumentTypeError(f"{text} is a file: give the folder of a recording, or a new one")
    return folder


@contextmanager
def recorder_beside(arguments: argparse.Namespace) -> Generator[None]:
    """Run a recorder with the settings of this daemon, where ``--record`` is given. Its log goes to our stderr.

    The daemon does not depend on it: when the recorder ends, the log says so, and all else goes on.
    """
    if arguments.record is None:
        yield
        return
    command = dynamoth_command("record", "--out", str(arguments.record))
    if arguments.config:
        command += ["--config", arguments.config]
    for key, declared in declared_settings().items():
        value = getattr(arguments, key, None)
        if declared.section in _SHARED_SECTIONS and value is not None:
            command += [f"{declared.flag('recorder')}={value}"]
    child = Child("recorder", command, environment=os.environ, on_line=_write_line, on_end=say_recorder_ended)
    child.start()
    try:
        yield
    finally:
        child.stop()


def say_recorder_ended(how: str) -> None:
    """Say on stderr that a recorder has ended."""
    _write_line(f"dynamoth: {how}: nothing is recorded any more; all else goes on")


def _write_line(line: str) -> None:
    sys.stderr.write(f"{line}\n")
