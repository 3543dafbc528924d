"""What is stored about the executions of a query, and where they go on.

Theory of operation
-------------------
Before an execution its number and its window are stored, and after it that it is done: at each log server, besides
Spark's checkpoint in a folder. Each of these can be lost, or be older than the others (a server that has lost its last
seconds, a folder that came back from a backup, or that of another machine). The latest of the servers counts
(``latest_progress``). ``resumption`` compares it with the checkpoint: whichever is ahead counts, and a checkpoint that
does not fit is begun again. So the execution that may have been published in part is repeated with the same number and
the same window, or the next one goes on behind it.

A server that is *durable* loses nothing: when progress is stored, it has the one before (``BEHIND``). If not, it was
restored from an older copy, and gives offsets again that its partitions and logs had given before. So that is noticed
with the next window, and not only when offsets show it.

Only the newest data cluster may store progress (``terms``).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise
from typing import Any, NotRequired, TypedDict

from dynamoth.data.records import DATA_PREFIX
from dynamoth.data.terms import REFUSE_FORMER, TERM_KEY, store_command
from dynamoth.machine.events import CommandPart
from dynamoth.protocol.wire import parser, read_bytes

BEHIND = "BEHIND"
"""The first word of the error of a server that has an older progress than it should have."""

PROGRESS_SCRIPT = (
    REFUSE_FORMER
    + b"""local before, least = redis.call('GET', KEYS[2]), tonumber(ARGV[3])
if before and least > 0 then
  local known = cjson.decode(before)
  if 2 * known.execution + (known.done and 1 or 0) < least then
    return redis.error_reply('"""
    + BEHIND.encode()
    + b""" the progress that was stored here')
  end
end
redis.call('SET', KEYS[2], ARGV[2])
return redis.status_reply('OK')
"""
)
"""Stores the progress of a query, unless a newer data cluster is there, or the one before is missing."""


class WindowEnd(TypedDict):
    """Where one window ends and the next one begins: JSON, as it is stored."""

    #: The tick, in ms since 1970; 0 where no window ends.
    tick_ms: int
    #: The last offset of each partition of all datasets of the query.
    offsets: Mapping[str, int]
    #: Interests that were registered until then count, in ms since 1970 of the log servers' clock.
    sealed_ms: NotRequired[int]
    #: The number of the load of each static dataset.
    static: NotRequired[Mapping[str, int]]
    #: Partitions whose servers had lost what was read already when an operator had the query go on: they may be behind
    #: their offset here, up to which the archive has records that were executed.
    given_up: NotRequired[list[str]]


@dataclass(frozen=True, slots=True)
class Window:
    """The records of one execution: those behind ``start`` and up to ``end``."""

    start: WindowEnd
    end: WindowEnd


@dataclass(frozen=True, slots=True)
class Progress:
    """The last execution of a query that has begun."""

    execution: int
    window: Window
    is_done: bool
    #: The version of the catalog's entry that says that the query was dropped; 0: it was not. The last publication of
    #: its users has a number as an execution has; once all of their logs have it, this is done.
    dropped_version: int = 0

    @property
    def is_dropped(self) -> bool:
        """Whether the query was dropped."""
        return self.dropped_version > 0

    @property
    def step(self) -> int:
        """A number that grows by 1 with each progress that is stored: an execution begins, and is done."""
        return 2 * self.execution + self.is_done


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The contents of the checkpoint in the folder."""

    #: The execution before its first one.
    base: int
    #: Ends of windows that it has, by execution; the first one begins at ``start``.
    ends: Mapping[int, WindowEnd]
    #: The last execution that Spark has committed; ``base`` if there is none.
    committed: int
    start: WindowEnd
    #: The end that its first window has to have, where an execution is repeated; None: that of the next tick.
    first_end: WindowEnd | None = None

    @property
    def last(self) -> int:
        """The last execution of which it has the window; ``base`` if there is none."""
        return max(self.ends, default=self.base)

    def progress(self) -> Progress | None:
        """Return the last execution that it knows; None if it has the window of none."""
        last = self.last
        if last == self.base:
            return None
        return Progress(last, Window(self.ends.get(last - 1, self.start), self.ends[last]), self.committed >= last)

    @property
    def is_in_order(self) -> bool:
        """Whether each window ends behind the one before.

        A former data cluster with the same folder may have hung between storing a window at the log servers and writing
        it down here. When it goes on, the checkpoint is that of the newer one, and the window is an old one.
        """
        ticks = [self.start["tick_ms"], *(self.ends[execution]["tick_ms"] for execution in sorted(self.ends))]
        return all(before < after for before, after in pairwise(ticks))

    def fits(self, progress: Progress | None) -> bool:
        """Return whether it goes on where the stored progress ends, or is ahead of that."""
        if progress is None:
            return True
        if not self.is_in_order:
            return False
        if progress.is_dropped:
            return self.base == progress.execution  # it was begun after that
        if progress.execution <= self.base:
            return progress.execution < self.base or progress.is_done
        last = progress.execution
        start = self.start if last - 1 == self.base else self.ends.get(last - 1)
        known = (start, progress.window.start), (self.ends.get(last), progress.window.end)
        return last <= self.last and all(own is None or own == stored for own, stored in known)  # it forgets old ones


@dataclass(frozen=True, slots=True)
class Continuation:
    """Where a new checkpoint begins."""

    #: The execution before its first one.
    base: int
    #: Offsets before the first window; None: those of ``begin_key``, or else behind all records that there are.
    start: WindowEnd | None = None
    #: End of the first window; None: that of the next tick.
    first_end: WindowEnd | None = None


def continuation(progress: Progress) -> Continuation:
    """Return where a new checkpoint begins, given the last execution that is known."""
    if progress.is_dropped:
        return Continuation(progress.execution)  # it is registered again: see ``begin_key``
    if progress.is_done:
        return Continuation(progress.execution, progress.window.end)
    return Continuation(progress.execution - 1, progress.window.start, progress.window.end)


def resumption(
    progress: Progress | None, checkpoint: Checkpoint | None, *, reads_the_same: bool
) -> Continuation | None:
    """Return where a new checkpoint has to begin; None: the one that there is goes on.

    Args:
        progress: the latest that a log server has (``latest_progress``); None if there is none.
        checkpoint: of the folder; None if there is none. Where both are lost, ``give_up`` makes a new progress.
        reads_the_same: whether the query reads the same datasets as when the checkpoint was begun.

    """
    if checkpoint is None or not checkpoint.fits(progress):
        assert progress is not None, "one of both is there"
        return continuation(progress)
    if reads_the_same:
        return None
    last = checkpoint.progress()
    if last is None:
        return Continuation(checkpoint.base, checkpoint.start, checkpoint.first_end)
    return continuation(last if progress is None or last.execution > progress.execution else progress)


def give_up(progress: Progress | None, checkpoint: Checkpoint | None, end: WindowEnd, now_ms: int) -> Progress:
    """Return an execution without results: behind it, a query goes on that gives up its records up to ``end``.

    An execution that was not finished is given up, too; a part of it may have been published. Whichever of progress and
    checkpoint is ahead counts.

    If nothing is known of the query any more, logs may still know its former executions, and take smaller numbers for
    repeated ones. So the number is the time then, in ms since 1970: executions are rarer than that, and the number is
    ahead of theirs, also of those that were numbered so before.
    """
    known = [] if progress is None else [progress.execution]
    known += [] if checkpoint is None else [checkpoint.last]
    last = max(known, default=now_ms)
    before = farther(progress, checkpoint)
    start = end
    if before is not None:
        start = before.window.end if before.is_done else before.window.start
    return Progress(last + 1, Window(start, end), is_done=True)


def farther(progress: Progress | None, checkpoint: Checkpoint | None) -> Progress | None:
    """Return the last execution that is known to the log servers, or to a checkpoint that is ahead of them."""
    own = checkpoint.progress() if checkpoint is not None and checkpoint.fits(progress) else None
    return latest_progress([progress, own])


def with_new_datasets(end: WindowEnd, tips: Mapping[str, int]) -> WindowEnd:
    """Return an end with the present ends of those datasets that it does not know: a query has begun to read them.

    A partition that a known dataset has got since is read from its first record on.
    """
    known = {name.rpartition("/")[0] for name in end["offsets"]}
    new = {name: tip for name, tip in tips.items() if name.rpartition("/")[0] not in known}
    return {**end, "offsets": {**end["offsets"], **new}}


# Keys and commands.


def progress_key(query: str) -> bytes:
    """Return the key of a query's progress: a string, at every log server."""
    return DATA_PREFIX + b"{" + query.encode() + b"}:progress"


def query_server(query: str, servers: Sequence[str]) -> str:
    """Return which of the log servers has a query's status and orders (rendezvous hashing). All have its progress."""
    return max(servers, key=lambda server: blake2b(f"{server} query {query}".encode(), digest_size=8).digest())


def restart_key(query: str) -> bytes:
    """Return the key of an operator's order to begin again behind all stored records: a string, ms since 1970.

    It is at the query's server (``query_server``). The data cluster deletes it when it has carried it out.
    """
    return DATA_PREFIX + b"{" + query.encode() + b"}:restart"


def latest_progress(copies: Iterable[Progress | None]) -> Progress | None:
    """Return the latest of the copies of a query's progress; None: no server has any."""
    known = [each for each in copies if each is not None]
    return max(known, key=lambda each: (each.execution, each.is_done, each.dropped_version), default=None)


def begin_key(query: str) -> bytes:
    """Return the key of the offsets behind which a query begins that was dropped and is registered again: a string.

    It is at the query's server, and counts only where the progress says that the query was dropped.
    """
    return DATA_PREFIX + b"{" + query.encode() + b"}:begin"


def status_key(query: str) -> bytes:
    """Return the key of a query's status: a string, at the query's server."""
    return DATA_PREFIX + b"{" + query.encode() + b"}:status"


def store_progress_command(
    query: str, progress: Progress, term: int, *, follows: bool = False
) -> tuple[CommandPart, ...]:
    """Return the command that stores the progress of a query; refused with ``FENCED`` for a former data cluster.

    ``follows``: it is refused with ``BEHIND``, too, where the server has an older one than that right before it. A
    server that has none takes any.
    """
    step = progress.step - 1 if follows else 0
    arguments = b"%d" % term, _as_text(progress), b"%d" % step
    return b"EVAL", PROGRESS_SCRIPT, b"2", TERM_KEY, progress_key(query), *arguments


def is_behind(error: str) -> bool:
    """Return whether an error of a log server says that it has an older progress than it had."""
    return BEHIND in error.split()[:2]


def begin_progress_command(query: str, end: WindowEnd, execution: int = 0) -> tuple[CommandPart, ...]:
    """Return the command that has a query begin behind ``end``; it does nothing where progress is stored.

    The first execution has the number behind ``execution``: more than 0 where logs may know former ones.
    """
    return b"SET", progress_key(query), _as_text(Progress(execution, Window(end, end), is_done=True)), b"NX"


def begin_again_command(query: str, end: WindowEnd) -> tuple[CommandPart, ...]:
    """Return the command that has a dropped query begin behind ``end``, once it is registered again and executed.

    Call it before it is registered: a data cluster may write that it was dropped at any time until then, and later.
    """
    return b"SET", begin_key(query), json.dumps(end, separators=(",", ":")).encode()


@parser("where a query begins again")
def parse_begin(reply: Any) -> WindowEnd | None:
    """Read the reply of a GET of ``begin_key``; None where nothing is stored. Raises MalformedMessage."""
    if reply is None:
        return None
    end = json.loads(read_bytes(reply))
    return {"tick_ms": int(end["tick_ms"]), "offsets": {name: int(each) for name, each in end["offsets"].items()}}


def _as_text(progress: Progress) -> bytes:
    values = {
        "execution": progress.execution,
        "start": progress.window.start,
        "end": progress.window.end,
        "done": progress.is_done,
        "dropped_version": progress.dropped_version,
    }
    return json.dumps(values, separators=(",", ":")).encode()


@parser("the progress of a query")
def parse_progress(reply: Any) -> Progress | None:
    """Read the reply of a GET of ``progress_key``; None where nothing is stored. Raises MalformedMessage."""
    if reply is None:
        return None
    values = json.loads(read_bytes(reply))
    window = Window(values["start"], values["end"])
    return Progress(int(values["execution"]), window, bool(values["done"]), int(values.get("dropped_version", 0)))


# Status, for people.


@dataclass
class QueryStatus:
    """The state of a query, for people: ``dynamoth query list`` and ``show``."""

    #: ``running``, ``failing``, ``stalled`` (records wait, and no execution ends), ``refused`` (its definition cannot
    #: be executed) or ``dropped``.
    state: str = "running"
    #: Since when, in ms since 1970.
    since_ms: int = 0
    reason: str = ""
    version: int = 0
    #: The versions of its datasets, with which ``version`` was checked.
    datasets: dict[str, int] = field(default_factory=dict[str, int])
    interests: int = 0
    #: The last execution that has ended: its number, tick, end, and how long it took.
    execution: int = 0
    tick_ms: int = 0
    ended_ms: int = 0
    seconds: float = 0.0
    #: Counted since the query was registered: executions, failures, overruns, ticks missed, result sets ...
    counts: dict[str, int] = field(default_factory=dict[str, int])


def store_status_command(query: str, status: QueryStatus, term: int) -> tuple[CommandPart, ...]:
    """Return the command that stores the status of a query; refused with ``FENCED`` for a former data cluster."""
    text = json.dumps({name: getattr(status, name) for name in QueryStatus.__dataclass_fields__}).encode()
    return store_command(status_key(query), text, term)


@parser("the status of a query")
def parse_status(reply: Any) -> QueryStatus | None:
    """Read the reply of a GET of ``status_key``; None where nothing is stored. Raises MalformedMessage."""
    if reply is None:
        return None
    values = json.loads(read_bytes(reply))
    known = {name: values[name] for name in QueryStatus.__dataclass_fields__ if name in values}
    return QueryStatus(**known)


def ticks_missed(start_ms: int, end_ms: int, period_s: float, began_ms: int, ended_ms: int) -> int:
    """Return how many ticks a query has missed as its last execution took too long.

    Those are the ticks between the ends of the two windows that passed while it ran. A tick without new records is none
    of them, as there was nothing to execute; nor is one that passed while no data cluster ran.

    Args:
        start_ms: tick at which the window of the last execution ended, and the next one begins.
        end_ms: tick at which the next window ends.
        period_s: between ticks.
        began_ms: when the last execution began.
        ended_ms: when it ended.

    """
    if period_s <= 0 or end_ms <= start_ms:
        return 0
    period_ms = round(period_s * 1000)
    between = (end_ms - start_ms) // period_ms - 1
    passed = (ended_ms - start_ms) // period_ms - (began_ms - start_ms) // period_ms
    return max(0, min(between, passed))
