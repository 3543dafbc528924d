"""Measures how busy the processors are, and keeps them awake while clients are measured.

An idle processor goes to sleep, and that of a virtual machine may be away for milliseconds when a message wakes it. A
client that only waits for that message loses all of this time; one that always has work loses nothing. So
:func:`processors_awake` runs an empty loop on every processor, at the priority (SCHED_IDLE) that gives way at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from dynamoth_cli.local.child import Child

_DO_NOTHING = """\
import os, sys
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
os.sched_setaffinity(0, {int(sys.argv[1])})
while True:
    pass
"""


@contextmanager
def processors_awake() -> Generator[None]:
    """Keep every processor that this process may use awake.

    Where a quota bounds the processor time of a container, this takes from it: do not use it there. Raises OSError on
    other systems than Linux.
    """
    if sys.platform != "linux":
        raise OSError("processors are kept awake on Linux only: measure without --keep-awake")
    with ExitStack() as stack:
        for processor in os.sched_getaffinity(0):
            command = [sys.executable, "-I", "-S", "-c", _DO_NOTHING, str(processor)]
            child = Child(f"what keeps processor {processor} awake", command, environment=os.environ)
            child.start()
            stack.callback(child.stop)
        yield


class BusyMeter:
    """Measures how busy the whole machine is, all of its processors together, from its construction on."""

    def __init__(self) -> None:
        self._began = self._ticks()

    def ratio(self) -> float | None:
        """Return the share of the processors' time that was used; None where the system does not say (not Linux).

        Time at low priority (nice) counts as unused: it gives way.
        """
        now = self._ticks()
        if self._began is None or now is None:
            return None
        idle, total = (after - before for before, after in zip(self._began, now, strict=True))
        return 1.0 - idle / max(1, total)

    @staticmethod
    def _ticks() -> tuple[int, int] | None:
        try:
            line = Path("/proc/stat").read_text().partition("\n")[0]
        except OSError:
            return None
        user, nice, system, idle, waiting, *others = map(int, line.split()[1:9])
        unused = nice + idle + waiting
        return unused, user + system + unused + sum(others)


def resident_mib(process: int) -> float:
    """Return how much memory a process has, in MiB; 0 when it has ended (Linux)."""
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def cpu_s(process: int) -> float:
    """Return how much processor time a process has used, in seconds; 0 when it has ended (Linux)."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def family_cpu_s(process: int) -> float:
    """Return how much processor time a process and all that it has started have used, in seconds (Linux)."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        listed = [file.read_text() for file in Path(f"/proc/{process}/task").glob("*/children")]
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    own = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")  # with children that have ended
    return own + sum(family_cpu_s(int(child)) for line in listed for child in line.split())


def children_of_ours() -> dict[int, str]:
    """Return the command lines of the processes that this one has started and that have not ended, by id (Linux)."""
    found: dict[int, str] = {}
    for children in Path("/proc/self/task").glob("*/children"):
        for process in map(int, children.read_text().split()):
            found[process] = Path(f"/proc/{process}/cmdline").read_text().replace("\0", " ").strip()
    return found
