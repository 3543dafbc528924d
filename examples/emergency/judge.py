"""Compares a run with the results that it should have had: pure, and on plain values.

Four things are judged. Every report that was acknowledged is stored once. Executions of a query follow each other
without a hole, up to the last record. Each log has exactly the result sets that ``evaluate`` gives. And each user got
what the log has, from the first position on: nothing is missing, twice or out of order, except where a gap says exactly
what is missing.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from typing import Any

from emergency.evaluate import History, Offsets, View, Window, evaluate, view_of
from emergency.journal import digest_of

FAULTS_MAX = 1000
"""With more, counting goes on, and their texts are dropped."""

TIMES = ("at",)
"""Columns that are times: ISO 8601 in results."""


@dataclass(frozen=True, slots=True)
class Execution:
    """One execution of a query, as the data cluster has recorded it."""

    query: str
    number: int
    tick_ms: int
    window: Window
    #: How long it took.
    seconds: float = 0.0
    #: Interests that were registered until then are part of it; None: until its tick.
    sealed_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Interest:
    """A query with parameters, as brokers have registered it."""

    id: str
    query: str
    params: Mapping[str, Any]
    registered_ms: int


@dataclass(frozen=True)
class Log:
    """The log of an interest: the payloads by offset, in the order of the log."""

    epoch: int
    tip: int
    payloads: Mapping[int, bytes]


@dataclass
class Faults:
    """The faults of a run: how many, and the texts of the first."""

    count: int = 0
    texts: list[str] = field(default_factory=list[str])

    def add(self, text: str) -> None:
        """Note a fault."""
        self.count += 1
        if len(self.texts) < FAULTS_MAX:
            self.texts.append(text)


# Reports.


def judge_reports(history: History, journal: Iterable[Mapping[str, Any]], faults: Faults) -> int:
    """Check that each acknowledged report is stored once, and nothing that nobody sent. Returns how many are stored."""
    stored = Counter(record["id"] for records in history.reports.values() for _, record in records)
    acknowledged: set[str] = set()
    doubtful: set[str] = set()
    for entry in journal:
        if entry["is"] == "report":
            acknowledged.add(entry["id"])
        elif entry["is"] == "doubtful":
            doubtful.add(entry["id"])
        elif entry["is"] == "refused":
            faults.add(f"a report was refused: {entry['what']}: {entry['reason']}")
    for id_ in sorted(acknowledged - stored.keys()):
        faults.add(f"report {id_} was acknowledged, and is not stored")
    for id_ in sorted(stored.keys() - acknowledged - doubtful):
        faults.add(f"report {id_} is stored, and nobody sent it")
    for id_, count in stored.items():
        if count > 1:
            faults.add(f"report {id_} is stored {count} times")
    return stored.total()


# Executions.


def judge_executions(executions: Sequence[Execution], history: History, period_s: int, faults: Faults) -> int:
    """Check that the executions of one query follow each other without a hole. Returns how many ticks were skipped."""
    skipped = 0
    for before, after in pairwise(executions):
        name = f"execution {after.number} of {after.query}"
        if after.number != before.number + 1:
            faults.add(f"{name} follows {before.number}")
        for partition in history.reports:
            begin, end = after.window.start.get(partition, 0), before.window.end.get(partition, 0)
            if begin != end:
                faults.add(f"{name} begins behind {begin} of {partition}, and the one before ended at {end}")
        skipped += max(0, round((after.tick_ms - before.tick_ms) / 1000 / period_s) - 1)
    for partition, records in history.reports.items():
        if executions and records and executions[-1].window.end.get(partition, 0) < records[-1][0]:
            faults.add(f"no execution of {executions[-1].query} is about the last records of {partition}")
    return skipped


# Logs.


class LogJudge:
    """Compares logs with the results of the queries in Python."""

    def __init__(self, history: History, executions: Mapping[str, Sequence[Execution]], faults: Faults) -> None:
        self._history = history
        self._executions = executions
        self._faults = faults
        self._views: dict[tuple[tuple[str, int], ...], View] = {}
        #: Rows that were compared, by query.
        self.rows: Counter[str] = Counter()
        self.result_sets: Counter[str] = Counter()

    def judge(self, interest: Interest, log: Log) -> None:
        """Compare one log."""
        expected: dict[int, list[dict[str, Any]]] = {}
        for execution in self._executions.get(interest.query, ()):
            sealed_ms = execution.tick_ms if execution.sealed_ms is None else execution.sealed_ms
            if sealed_ms >= interest.registered_ms:
                rows = evaluate(interest.query, interest.params, self._view(execution.window))
                if rows:
                    expected[execution.number] = rows
        self._compare(interest, expected, log)

    def _compare(self, interest: Interest, expected: Mapping[int, list[dict[str, Any]]], log: Log) -> None:
        name = f"{interest.query} {json.dumps(interest.params)}"
        last, seen = 0, set[int]()
        if list(log.payloads) != list(range(1, log.tip + 1)):
            self._faults.add(f"{name}: the log has not all offsets from 1 to {log.tip}")
        for offset, payload in log.payloads.items():
            result = json.loads(payload)
            number = result["execution"]
            if number <= last:
                self._faults.add(f"{name}: offset {offset} has execution {number} behind {last}")
            last = max(last, number)
            seen.add(number)
            if number not in expected:
                self._faults.add(f"{name}: execution {number} was to have no rows, and has {payload[:200]!r}")
            elif fault := row_fault(expected[number], result.get("rows")):
                self._faults.add(f"{name}: execution {number}: {fault}")
            else:
                self.rows[interest.query] += len(expected[number])
                self.result_sets[interest.query] += 1
        for number in sorted(expected.keys() - seen):
            self._faults.add(f"{name}: execution {number} is missing, with {len(expected[number])} rows")

    def _view(self, window: Window) -> View:
        key = (*sorted(window.start.items()), *sorted(window.end.items()))
        if key not in self._views:
            self._views[key] = view_of(self._history, window)
        return self._views[key]


def row_fault(expected: Sequence[Mapping[str, Any]], rows: Any) -> str | None:
    """Return what is wrong with the rows of a result set, None if nothing is."""
    if not isinstance(rows, list):
        return f"rows expected, not {rows!r}"
    if len(rows) != len(expected):
        return f"{len(expected)} rows expected, not {len(rows)}"
    for number, (wanted, row) in enumerate(zip(expected, rows, strict=True)):
        read = {name: to_ms(value) if name in TIMES else value for name, value in row.items()}
        if read != dict(wanted):
            return f"row {number} expected to be {dict(wanted)}, not {row}"
    return None


def to_ms(time: str | int) -> int:
    """Return milliseconds since 1970 of a time in a result."""
    if isinstance(time, int):
        return time // 1000
    return round(datetime.fromisoformat(time).timestamp() * 1000)


# Users.


@dataclass
class _Cursor:
    """Where a user is in one log."""

    epoch: int
    offset: int
    is_ended: bool = False


@dataclass
class UserTotals:
    """Counts of what users got."""

    subscriptions: int = 0
    delivered: int = 0
    gaps: int = 0
    missed_in_gaps: int = 0


class UserJudge:
    """Follows the users of journals through the logs."""

    def __init__(self, logs: Mapping[str, Log], faults: Faults) -> None:
        self._logs = logs
        self._digests = {
            (id_, offset): digest_of(payload) for id_, log in logs.items() for offset, payload in log.payloads.items()
        }
        self._faults = faults
        self.totals = UserTotals()

    def judge(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """Judge the journal of one process: all entries of its users, in their order."""
        cursors = self._begin(entries)
        for entry in entries:
            if entry["is"] == "refused":
                self._faults.add(f"{entry['user']} was refused {entry['what']}: {entry['reason']}")
            place = entry.get("user"), entry.get("interest")
            if (cursor := cursors.get(place)) is None:
                if entry["is"] in ("item", "same"):
                    self._faults.add(f"{place} got a result set of what was never subscribed to")
                continue
            match entry["is"]:
                case "item" | "same":
                    self._deliver(entry, cursor)
                case "gap":
                    self._skip(entry, cursor)
                case "ended":
                    cursor.is_ended = True
                case _:
                    pass  # it is not about deliveries
        for (user, interest), cursor in cursors.items():
            tip = self._logs[str(interest)].tip if interest in self._logs else 0
            if not cursor.is_ended and cursor.offset < tip:
                self._faults.add(f"{user} got {interest} up to {cursor.offset}, and the log goes up to {tip}")

    def _begin(self, entries: Sequence[Mapping[str, Any]]) -> dict[tuple[Any, Any], _Cursor]:
        """Return where each subscription begins. What comes at once may be noted before the confirmation."""
        cursors: dict[tuple[Any, Any], _Cursor] = {}
        for entry in entries:
            if entry["is"] == "subscribed":
                self.totals.subscriptions += 1
                cursors[entry["user"], entry["interest"]] = _Cursor(entry["epoch"], entry["offset"])
        return cursors

    def _deliver(self, entry: Mapping[str, Any], cursor: _Cursor) -> None:
        name = f"{entry['user']}, {entry['interest']}, offset {entry['offset']}"
        self.totals.delivered += 1
        if cursor.is_ended:
            self._faults.add(f"{name}: delivered after the end")
        if entry["epoch"] != cursor.epoch:
            self._faults.add(f"{name}: epoch {entry['epoch']} without a gap behind {cursor.epoch}")
        elif entry["offset"] <= cursor.offset:
            self._faults.add(f"{name}: delivered twice or late, behind {cursor.offset}")
        elif entry["offset"] > cursor.offset + 1:
            self._faults.add(f"{name}: {cursor.offset + 1} to {entry['offset'] - 1} are missing without a gap")
        digest = digest_of(entry["data"].encode()) if entry["is"] == "item" else entry["digest"]
        if digest != self._digests.get((entry["interest"], entry["offset"])):
            self._faults.add(f"{name}: this is not what the log has")
        cursor.epoch, cursor.offset = entry["epoch"], max(cursor.offset, entry["offset"])

    def _skip(self, entry: Mapping[str, Any], cursor: _Cursor) -> None:
        self.totals.gaps += 1
        name = f"{entry['user']}, {entry['interest']}"
        if entry["epoch"] == cursor.epoch:
            if entry["first"] != cursor.offset + 1 or entry["last"] != entry["offset"]:
                self._faults.add(f"{name}: a gap of {entry['first']} to {entry['last']} behind {cursor.offset}")
            self.totals.missed_in_gaps += entry["offset"] - cursor.offset
        cursor.epoch, cursor.offset = entry["epoch"], entry["offset"]


def judge_locations(history: History, journal: Iterable[Mapping[str, Any]], faults: Faults) -> int:
    """Check that as many locations of each user are stored as were acknowledged. Returns how many that were."""
    stored = Counter(record["user"] for records in history.locations.values() for _, record in records)
    acknowledged = 0
    for entry in journal:
        if entry["is"] != "location":
            continue
        sent, unknown = entry.get("stored", 0), entry.get("unknown", 0)
        acknowledged += sent
        if not sent <= stored[entry["user"]] <= sent + unknown:
            faults.add(
                f"{entry['user']}: {sent} locations were acknowledged and {unknown} are doubtful, and"
                f" {stored[entry['user']]} are stored"
            )
    return acknowledged


# Time.


def latencies_ms(
    entries: Iterable[Mapping[str, Any]], queries: Mapping[str, str]
) -> dict[str, list[tuple[float, float]]]:
    """Return, by query, when a report was made, and the time from then to the handler of each user who got it.

    What a user got late after an absence is left out.

    Args:
        entries: of the journal of one process, in their order.
        queries: of interests, by id.

    """
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    known: dict[tuple[str, int], tuple[int, list[int]]] = {}
    back_ms: dict[str, float] = {}
    for entry in entries:
        if entry["is"] == "back":
            back_ms[entry["user"]] = entry["at"] * 1000
        if entry["is"] not in ("item", "same"):
            continue
        place = entry["interest"], entry["offset"]
        if entry["is"] == "item":
            result = json.loads(entry["data"])
            times = [to_ms(row["at"]) for row in result.get("rows", ()) if "at" in row]
            known[place] = to_ms(result["until"]), times
        until_ms, times = known.get(place, (0, []))
        if until_ms >= back_ms.get(entry["user"], 0.0):
            found[queries[entry["interest"]]] += [(at, entry["at"] * 1000 - at) for at in times]
    return found


def quantile(values: Sequence[float], ratio: float) -> float:
    """Return a quantile of sorted values."""
    return values[min(len(values) - 1, int(ratio * len(values)))]


def offsets_of(values: Mapping[str, Any]) -> Offsets:
    """Read offsets by partition."""
    return {str(partition): int(offset) for partition, offset in values.items()}
