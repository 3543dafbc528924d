"""What keeps processors awake gives way at once, and ends."""

from __future__ import annotations

import os
import sys
import time

import pytest

from bench.processors import processors_awake
from tests.processes import command_lines


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
def test_every_processor_has_a_process_of_the_lowest_priority_until_the_end() -> None:
    def spinning() -> dict[int, str]:
        children = command_lines("--ppid", str(os.getpid()))
        return {pid: line for pid, line in children.items() if "SCHED_IDLE" in line}

    processors = os.sched_getaffinity(0)
    with processors_awake():
        until_s = time.monotonic() + 30
        while {os.sched_getscheduler(pid) for pid in spinning()} != {os.SCHED_IDLE}:
            assert time.monotonic() < until_s, spinning()
        assert len(spinning()) == len(processors)
        while sorted(min(os.sched_getaffinity(pid)) for pid in spinning()) != sorted(processors):
            assert time.monotonic() < until_s, spinning()
    assert not spinning()
