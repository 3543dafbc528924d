"""The parts of a recorder process and its state."""

from __future__ import annotations

from dataclasses import dataclass

from dynamoth_recorder.machine import RecorderMachine
from dynamoth_recorder.process.backlog import Backlog
from dynamoth_recorder.process.store import Store


@dataclass(slots=True)
class RecorderState:
    """Rows go from the machine to the backlog, and then to the store. The rest is for log, readiness and metrics."""

    machine: RecorderMachine
    backlog: Backlog
    store: Store
    #: Why the servers of the cluster cannot be read; empty while they can.
    unreadable: str = ""
    #: Why the recording cannot be written; empty while it can.
    failure: str = ""
    #: When rows were last written, in seconds since 1970; 0: never.
    last_write: float = 0.0
