"""SIGTERM and SIGINT before the event loop of the daemon handles them, and in its Java.

To load this process and to start Spark takes long. A signal that comes meanwhile is noted, and the process ends in
order as soon as Spark has started; a second one ends it at once.

Java ignores SIGTERM. Where a whole process group or control group gets it, Java would else end before this process has
stopped the queries. It ends with this process, as it reads its standard input.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

_noted: list[int] = []
"""The signals that came, while they are noted."""

_starting_java: list[bool] = []
"""Not empty while processes that are forked are to ignore SIGTERM."""


@contextmanager
def noted_signals() -> Generator[None]:
    """Note SIGTERM and SIGINT, until an event loop handles them. For the main thread."""
    before = {number: signal.signal(number, _note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _noted.clear()


def is_asked_to_end() -> bool:
    """Return whether a signal was noted."""
    return bool(_noted)


def _note(number: int, _: FrameType | None) -> None:
    if _noted:
        raise KeyboardInterrupt
    _noted.append(number)


@contextmanager
def java_ignores_sigterm() -> Generator[None]:
    """Have the Java that is started in this context ignore SIGTERM: a process that executes Java still ignores it."""
    _starting_java.append(True)
    try:
        yield
    finally:
        _starting_java.pop()


def _ignore_sigterm() -> None:
    if _starting_java:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


os.register_at_fork(after_in_child=_ignore_sigterm)  # PySpark has a ``preexec_fn`` of its own, so Python code is run
