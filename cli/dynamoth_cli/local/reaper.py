"""Stops the servers that a balancer has started on this machine, when the process that started the balancer ends.

Those servers outlive their balancer on purpose. So a cluster that must leave nothing behind, however its process ends,
runs this program beside it: it waits until its stdin is closed, which the kernel does at the end of that process.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

from dynamoth_balancer.process.local_servers import free_all

STOP_TIMEOUT_S = 30.0
"""Longer than two attempts to end each process of some servers."""


class Reaper:
    """A process that frees the servers of a folder in the end. It must be started before the balancer."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def reap(self) -> None:
        """Have all servers freed, and wait for that; the balancer has ended before."""
        assert self._process.stdin is not None, "its stdin is a pipe"
        self._process.stdin.close()
        self._process.wait(STOP_TIMEOUT_S)


def main(folder: Path) -> None:
    """Wait for the end of stdin, and free everything. Terminals and supervisors do not end this process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.read()
    asyncio.run(free_all(folder))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
