"""One query in the model of the data cluster: windows, progress and result sets, without Spark.

It does what ``windows.py``, ``query_runner.py``, ``executions.py`` and ``publishing.py`` of the data cluster do, in the
same order and with the same commands; and what ``dropping.py`` does once the query is dropped. There is no archive:
what a log server has lost is gone, and an operator has the query go on. Its SQL is one line: the records whose ``type``
is the parameter of that name.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from dynamoth.data.datasets import Dataset
from dynamoth.data.progress import (
    Checkpoint,
    Progress,
    Window,
    WindowEnd,
    begin_key,
    give_up,
    is_behind,
    latest_progress,
    parse_begin,
    parse_progress,
    progress_key,
    query_server,
    resumption,
    store_progress_command,
    with_new_datasets,
)
from dynamoth.data.queries import StandingQuery
from dynamoth.data.records import (
    Record,
    parse_records,
    parse_state,
    partition_names,
    partition_server,
    range_command,
    state_command,
)
from dynamoth.data.registrations import registration_keys
from dynamoth.data.results import dropped_payload, result_payload
from dynamoth.data.terms import TERM_KEY
from dynamoth.edge.interests import LOG_CHANNEL_PREFIX
from dynamoth.edge.log import LogOptions, append_many_command, is_fenced, log_server, parse_appended_many
from dynamoth.edge.publications import LoggedPublication, pack_publication
from dynamoth_sim.data.folder import Folder
from dynamoth_sim.data.interest_table import ModelTable
from dynamoth_sim.data.tasks import Ask, ProcessEnds, PublishResults, ServerFailed, Sleep, Task, TaskMachine, ask

POLL_S = 0.05
"""A query looks this often whether there are new records behind a tick."""

RETRY_S = 0.1
"""A query that has failed is started again after this time."""

APPEND_RETRY_S = 0.05
APPEND_RETRY_S_MAX = 0.3

APPENDS_PER_COMMAND = 2
RECORDS_PER_READ = 5
"""Few, so that a process can die in the middle of many an execution."""

Asking = Generator[Ask | Sleep | PublishResults, Any, Any]


class Witness(Protocol):
    """Who sees what the model does: the audit."""

    def sealed(self, query: str, end: WindowEnd, now: float) -> None:
        """Note that the end of a window has just been read."""
        ...

    def executes(self, query: str, execution: int, window: Window, now: float) -> None:
        """Note that result sets of a window are about to be published."""
        ...

    def executed(self, query: str, execution: int, now: float) -> None:
        """Note that an execution is done."""
        ...

    def drops(self, query: str, execution: int, window: Window) -> None:
        """Note that users are about to get a last publication with this number, as the query was dropped."""
        ...

    def skips(self, query: str, execution: int, window: Window) -> None:
        """Note that the records of a window are about to be given up, as an operator has ordered."""
        ...


class _RecordsLost(Exception):
    """Raised when a log server has lost records that were executed, or have to be."""


@dataclass(slots=True)
class Place:
    """What all queries of one process share."""

    machine: TaskMachine
    servers: tuple[str, ...]
    durable: bool
    witness: Witness
    #: Draws epochs of new logs.
    new_epoch: Any
    #: Its id among those that take terms.
    owner: str
    term: int = 0
    datasets: dict[str, Dataset] = field(default_factory=dict[str, Dataset])


class ModelQuery:
    """Executes one query, as long as its process lives.

    Args:
        place: what all queries share.
        query: its definition.
        period_s: between ticks, in place of the definition's: shorter than a second.
        folder: its checkpoint.

    """

    def __init__(self, place: Place, query: StandingQuery, period_s: float, folder: Folder) -> None:
        self._place = place
        self._query = query
        self._period_ms = round(period_s * 1000)
        self._folder = folder
        self._table = ModelTable(place.servers, query)
        self._progress: Progress | None = None
        self._first_end: WindowEnd | None = None
        #: The execution before the first one of the stream's checkpoint.
        self._base = 0
        #: Whether an operator has ordered to go on behind all records that there are.
        self._is_to_restart = False

    def run(self) -> Task:
        """Execute, and begin again after each failure."""
        while True:
            try:
                if self._is_to_restart:
                    yield from self._restart()
                yield from self._stream()
            except ServerFailed as error:
                self._end_if_fenced(error)
                self._is_to_restart |= is_behind(str(error))
            except _RecordsLost:
                self._is_to_restart = True
            yield Sleep(self._place.machine.now + RETRY_S)

    @staticmethod
    def _end_if_fenced(error: Exception) -> None:
        if is_fenced(str(error)):
            raise ProcessEnds("a newer data cluster is there")

    # The stream.

    def _stream(self) -> Asking:
        yield from self._prepare()
        execution, folder = self._folder.committed + 1, self._folder
        start, end = folder.end(execution - 1), folder.ends.get(execution)
        while True:
            window = Window(start, end or (yield from self._next_end(start)))
            yield from self._begin_window(execution, window)
            yield from self._execute(execution, window)
            folder.committed = execution
            execution, start, end = execution + 1, window.end, None

    def _prepare(self) -> Asking:
        """Make a checkpoint that fits the stored progress."""
        self._progress = yield from self._stored_progress()
        if self._progress is not None and self._progress.is_dropped and not self._progress.is_done:
            yield from self._publish_dropped(self._progress)
        checkpoint = self._folder.read()
        if checkpoint is None and self._progress is None:
            yield from self._give_up(None, None)
        elif self._progress is not None:
            yield from self._store_progress(self._progress)
        begin = resumption(self._progress, checkpoint, reads_the_same=True)
        if begin is not None:
            tips = yield from self._tips()
            now: WindowEnd = {"tick_ms": 0, "offsets": tips}
            start = with_new_datasets(begin.start or (yield from self._begin_again()) or now, tips)
            end = None if begin.first_end is None else with_new_datasets(begin.first_end, tips)
            self._folder.begin(begin.base, start, end)
        assert self._folder.base is not None, "it was begun"
        self._first_end, self._base = self._folder.first_end, self._folder.base

    def _begin_again(self) -> Asking:
        """Return behind which offsets a query begins that was dropped; None: not known."""
        name = self._query.name
        return parse_begin((yield from ask(query_server(name, self._place.servers), b"GET", begin_key(name))))

    def _next_end(self, start: WindowEnd) -> Asking:
        """Wait for new records behind a tick, and return the end of the next window."""
        if self._first_end is not None:
            first_end, self._first_end = self._first_end, None
            if first_end["tick_ms"] > start["tick_ms"]:
                return first_end
        while True:
            tick_ms = int(self._place.machine.now * 1000) // self._period_ms * self._period_ms
            if tick_ms > start["tick_ms"]:
                before = start["offsets"]
                end = yield from self._seal(tick_ms, before)
                if any(last > before.get(name, 0) for name, last in end["offsets"].items()):
                    return end
            yield Sleep(self._place.machine.now + POLL_S)

    def _seal(self, tick_ms: int, before: Mapping[str, int]) -> Asking:
        """Read where partitions end, and then the clocks."""
        ends = yield from self._ends(before)
        sealed_ms = yield from self._now_ms()
        end: WindowEnd = {"tick_ms": tick_ms, "sealed_ms": sealed_ms, "offsets": ends, "static": {}}
        self._place.witness.sealed(self._query.name, end, self._place.machine.now)
        return end

    def _ends(self, before: Mapping[str, int]) -> Asking:
        """Return where partitions end, of which everything up to ``before`` was executed. Raises _RecordsLost."""
        ends: dict[str, int] = {}
        for name in self._partitions():
            state = yield from self._state(name)
            last = before.get(name, 0)
            if state.has_forgotten(last):
                raise _RecordsLost
            ends[name] = max(last, state.offset)
        return ends

    def _state(self, name: str) -> Asking:
        return parse_state((yield from ask(partition_server(name, self._place.servers), *state_command(name))))

    def _tips(self) -> Asking:
        tips: dict[str, int] = {}
        for name in self._partitions():
            tips[name] = (yield from self._state(name)).offset
        return tips

    def _partitions(self) -> list[str]:
        return partition_names(self._place.datasets[self._query.on])

    def _now_ms(self) -> Asking:
        latest = 0
        for id_ in self._place.servers:
            seconds, microseconds = yield from ask(id_, b"TIME")
            latest = max(latest, int(seconds) * 1000 + int(microseconds) // 1000)
        return latest

    def _stored_progress(self) -> Asking:
        latest: Progress | None = None
        for id_ in self._place.servers:
            stored = parse_progress((yield from ask(id_, b"GET", progress_key(self._query.name))))
            latest = latest_progress([latest, stored])
        return latest

    def _restart(self) -> Asking:
        """Go on behind all records that there are. What is given up is an execution without results."""
        progress = yield from self._stored_progress()
        yield from self._give_up(progress, self._folder.read())
        self._is_to_restart = False

    def _give_up(self, progress: Progress | None, checkpoint: Checkpoint | None) -> Asking:
        """Go on behind all records that there are."""
        end: WindowEnd = {"tick_ms": 0, "offsets": (yield from self._tips())}
        skipped = give_up(progress, checkpoint, end, int(self._place.machine.now * 1000))
        self._place.witness.skips(self._query.name, skipped.execution, skipped.window)
        yield from self._store_progress(skipped, follows=False)

    # The end.

    def end_dropped(self, dropped_version: int) -> Task:
        """Publish to the interests of a dropped query that it was dropped, unless that is done."""
        try:
            progress = yield from self._stored_progress()
            is_stored = progress is not None and progress.dropped_version >= dropped_version
            if progress is None or (is_stored and progress.is_done):
                return
            if not is_stored:
                now_ms = int(self._place.machine.now * 1000)
                skipped = give_up(progress, None, progress.window.end, now_ms)
                progress = replace(skipped, is_done=False, dropped_version=dropped_version)
                self._place.witness.drops(self._query.name, progress.execution, progress.window)
                yield from self._store_progress(progress, follows=False)
            yield from self._publish_dropped(progress)
            self._folder.remove()
        except ServerFailed as error:
            self._end_if_fenced(error)
            raise

    def _publish_dropped(self, progress: Progress) -> Asking:
        query, now_ms = self._query, int(self._place.machine.now * 1000)
        payload = dropped_payload(query.name, progress.dropped_version - 1, progress.execution, now_ms)
        for server in self._place.servers:
            interests = yield from ask(server, b"HGETALL", registration_keys(query.name)[0])
            own = [(interest.decode(), payload) for interest in interests]
            for first in range(0, len(own), APPENDS_PER_COMMAND):
                yield from self._publish(server, own[first : first + APPENDS_PER_COMMAND], progress.execution)
        yield from self._store_progress(replace(progress, is_done=True), follows=False)
        self._place.witness.executed(query.name, progress.execution, self._place.machine.now)

    # An execution.

    def _begin_window(self, execution: int, window: Window) -> Asking:
        """Store a window, and then write its end to the checkpoint, which a former data cluster may still have."""
        if not self._is_done(execution):
            yield from self._store_progress(Progress(execution, window, is_done=False))
        self._folder.write_end(execution - self._base - 1, window.end)

    def _is_done(self, execution: int) -> bool:
        return self._progress is not None and self._progress.execution >= execution and self._progress.is_done

    def _execute(self, execution: int, window: Window) -> Asking:
        if self._is_done(execution):
            return
        yield from self._publish_results(execution, window)
        yield from self._store_progress(Progress(execution, window, is_done=True))
        self._place.witness.executed(self._query.name, execution, self._place.machine.now)

    def _store_progress(self, progress: Progress, *, follows: bool = True) -> Asking:
        self._progress, name, place = progress, self._query.name, self._place
        command = store_progress_command(name, progress, place.term, follows=follows and place.durable)
        for id_ in place.servers:
            yield from ask(id_, *command)

    def _publish_results(self, execution: int, window: Window) -> Asking:
        self._place.witness.executes(self._query.name, execution, window, self._place.machine.now)
        yield from self._table.refresh()
        records = yield from self._read(window)
        payloads = self._payloads(records, execution, window.end)
        for server in self._place.servers:
            own = [each for each in payloads if log_server(each[0], self._place.servers) == server]
            for first in range(0, len(own), APPENDS_PER_COMMAND):
                yield from self._publish(server, own[first : first + APPENDS_PER_COMMAND], execution)

    def _read(self, window: Window) -> Asking:
        records: list[Record] = []
        for name in self._partitions():
            after, until = window.start["offsets"].get(name, 0), window.end["offsets"].get(name, 0)
            records += yield from self._read_range(name, after, until)
        return records

    def _read_range(self, name: str, after: int, until: int) -> Asking:
        """Return the records of a partition. Raises _RecordsLost where some are missing."""
        records: list[Record] = []
        position = after
        while position < until:
            command = range_command(name, position, until, RECORDS_PER_READ)
            page = parse_records((yield from ask(partition_server(name, self._place.servers), *command)))
            if not page:
                raise _RecordsLost  # there was a record at the end
            for record in page:
                if record.offset > position + 1:
                    state = yield from self._state(name)
                    if state.given(position, record.offset - 1):
                        raise _RecordsLost
                position = record.offset
            records += page
        return records

    def _payloads(self, records: Sequence[Record], execution: int, end: WindowEnd) -> list[tuple[str, bytes]]:
        """Return the result sets that are not empty, by interest: what a job of Spark computes."""
        rows = [json.loads(record.value) for record in records]
        payloads: list[tuple[str, bytes]] = []
        for each in self._table.until(end.get("sealed_ms", end["tick_ms"])):
            wanted = json.loads(each.params or "{}")["type"]
            mine = [row for row in rows if row["type"] == wanted]
            if mine:
                query = self._query
                payload = result_payload(query.name, query.version, execution, end["tick_ms"], json.dumps(mine))
                payloads.append((each.interest_id, payload))
        return payloads

    def _publish(self, server: str, results: Sequence[tuple[str, bytes]], execution: int) -> Asking:
        appended = yield from self._append(server, results, execution)
        is_inline = self._query.delivery == "inline"
        messages: list[tuple[bytes, bytes]] = []
        for (interest, payload), place in zip(results, appended, strict=True):
            if place.is_exact:
                publication = LoggedPublication(place.epoch, place.offset, payload if is_inline else None)
                messages.append((LOG_CHANNEL_PREFIX + interest.encode(), pack_publication(publication)))
        yield PublishResults(messages)

    def _append(self, server: str, results: Sequence[tuple[str, bytes]], execution: int) -> Asking:
        place, query = self._place, self._query
        options = LogOptions(query.retained_min, durable=place.durable)
        deadline = place.machine.now + APPEND_RETRY_S_MAX
        while True:
            try:
                run_id = "" if place.durable else _run_id((yield from ask(server, b"INFO", b"server")))
                new = [(interest, payload, place.new_epoch()) for interest, payload in results]
                command = append_many_command(new, run_id, options, place.term, execution, TERM_KEY)
                return parse_appended_many((yield from ask(server, *command)))
            except ServerFailed as error:
                if is_fenced(str(error)) or place.machine.now > deadline:
                    raise
            yield Sleep(place.machine.now + APPEND_RETRY_S)


def _run_id(info: bytes | str) -> str:
    text = info.decode() if isinstance(info, bytes) else info
    return text.partition("run_id:")[2].split()[0]
