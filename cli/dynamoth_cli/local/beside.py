"""Runs a recorder as a process beside another daemon: the option ``--record``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from dynamoth.settings.load import declared_settings
from dynamoth_cli.local.child import Child, dynamoth_command

_SHARED_SECTIONS = ("cluster", "link", "log")


def add_record(parser: argparse.ArgumentParser) -> None:
    """Add ``--record``."""
    parser.add_argument(
        "--record", type=Path, metavar="DIR", help="record into this folder, as 'dynamoth record --out DIR' does"
    )


@contextmanager
def recorder_beside(arguments: argparse.Namespace) -> Generator[None]:
    """Run a recorder with the settings of this daemon, where ``--record`` is given. Its log goes to our stderr.

    The daemon does not depend on it: when it ends, it says why in the log, and all else goes on.
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
    child = Child("recorder", command, environment=os.environ, on_line=lambda line: print(line, file=sys.stderr))  # noqa: T201  # its log
    child.start()
    try:
        yield
    finally:
        child.stop()
