"""Keeps processors awake while clients are measured: their speed, and not how soon the machine wakes up.

Theory of operation
-------------------
A processor that has nothing to do goes to sleep, and one that a virtual machine is given may be away for milliseconds
when a message wakes it. Whoever waits for that message, and does nothing else meanwhile, loses all of that time;
whoever needs so much processor time for each message that the server always has work, loses nothing. So on every
processor a process of ours does nothing, at the priority (SCHED_IDLE) at which it stops at once for whatever else wants
to run there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager

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
