"""Forked children, for tests of what they inherit."""

from __future__ import annotations

import gc
import os
import signal
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager

from tests.client.sync_helpers import PATIENCE_S


def in_child(test: Callable[[], object]) -> None:
    """Run a test in a forked child, where nothing may be complained of either when everything is collected."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            test()
            gc.collect()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    deadline = time.monotonic() + PATIENCE_S
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise AssertionError("the child hangs")
        time.sleep(0.002)
    assert os.waitstatus_to_exitcode(ended[1]) == 0


@contextmanager
def a_child_that_lives() -> Generator[None]:
    """Fork a child that does nothing, and lives as long as the context."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    os.close(reader)
    try:
        yield
    finally:
        os.close(writer)
        os.waitpid(child, 0)
