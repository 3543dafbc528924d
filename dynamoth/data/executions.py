"""What is stored about the executions of a query, and where they go on.

Before an execution its number and its window are stored, and after it that it is done: at the log server that has the
query (``executions_server``), besides Spark's checkpoint. So a data cluster that has lost its checkpoint repeats
exactly the execution that may have been published in part, or goes on behind the last one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from dynamoth.data.records import DATA_PREFIX
from dynamoth.machine.events import CommandPart
from dynamoth.protocol.wire import parser, read_bytes

TERM_KEY = DATA_PREFIX + b"term"
"""String at every log server: the term of the newest data cluster. One with a smaller term is refused by logs."""


@dataclass(frozen=True, slots=True)
class Window:
    """The records of one execution: those behind ``start`` and up to ``end``, both as the source gives them."""

    start: Mapping[str, Any]
    end: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Progress:
    """The last execution of a query that has begun."""

    execution: int
    window: Window
    is_done: bool
    #: How often the checkpoint was begun again.
    checkpoint: int = 1


@dataclass(frozen=True, slots=True)
class Continuation:
    """Where a new checkpoint begins."""

    #: The execution before its first one.
    base: int
    #: Offsets before the first window; None: those of the source.
    start: Mapping[str, Any] | None
    #: End of the first window; None: that of the next tick.
    first_end: Mapping[str, Any] | None


def continuation(progress: Progress | None) -> Continuation:
    """Return where a new checkpoint begins, given what is stored."""
    if progress is None:
        return Continuation(0, None, None)
    if progress.is_done:
        return Continuation(progress.execution, progress.window.end, None)
    return Continuation(progress.execution - 1, progress.window.start, progress.window.end)


def executions_key(query: str) -> bytes:
    """Return the key of a query's progress: a string."""
    return DATA_PREFIX + b"{" + query.encode() + b"}:progress"


def state_key(query: str) -> bytes:
    """Return the key of what people see of a query: JSON, which the data cluster renews while it runs."""
    return DATA_PREFIX + b"{" + query.encode() + b"}:state"


def executions_server(query: str, servers: Sequence[str]) -> str:
    """Return which of the log servers has a query's progress (rendezvous hashing, by id)."""
    return max(servers, key=lambda server: blake2b(f"{server} query {query}".encode(), digest_size=8).digest())


def store_progress_command(query: str, progress: Progress) -> tuple[CommandPart, ...]:
    """Return the command that stores the progress of a query."""
    values = {
        "execution": progress.execution,
        "start": progress.window.start,
        "end": progress.window.end,
        "done": progress.is_done,
        "checkpoint": progress.checkpoint,
    }
    return b"SET", executions_key(query), json.dumps(values, separators=(",", ":")).encode()


@parser("the progress of a query")
def parse_progress(reply: Any) -> Progress | None:
    """Read the reply of a GET of ``executions_key``; None where nothing is stored. Raises MalformedMessage."""
    if reply is None:
        return None
    values = json.loads(read_bytes(reply))
    window = Window(values["start"], values["end"])
    return Progress(int(values["execution"]), window, bool(values["done"]), int(values["checkpoint"]))


def ticks_missed(start_ms: int, end_ms: int, period_s: float, ended_ms: int) -> int:
    """Return how many ticks a query has missed as its last execution, which ended at ``ended_ms``, took too long.

    Those are the ticks between the ends of the two windows that had passed when it ended. A tick without new records
    is none of them: there was nothing to execute.
    """
    if period_s <= 0 or end_ms <= start_ms:
        return 0
    period_ms = round(period_s * 1000)
    between = (end_ms - start_ms) // period_ms - 1
    passed = (ended_ms - start_ms) // period_ms
    return max(0, min(between, passed))
