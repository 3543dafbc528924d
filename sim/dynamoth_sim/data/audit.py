"""Checks what users of standing queries get, from what they and reporters see.

Theory of operation
-------------------
The audit knows each record by the id that its reporter gave it, and each result set by query, execution and interest.
It does not ask how the data cluster works: it looks at the streams of the datasets, at the windows that executions
name, and at what users receive. ``Violation.guarantee`` is one of these:

* D1, nothing is lost: a user who was confirmed before a record was reported gets it, if the record was acknowledged
  and matches the user's interest. What is missing is announced: a gap lies between the executions around it, and came
  when the record had been reported.
* D2, exactly once and in order: the executions of one subscription grow, and no record is in two of them. After a gap
  that says that the log was lost, the last ones may come again, with the same content.
* D3, one result: an execution has one window, and for each interest one result set.
* D4, one window: the windows of a query follow each other, and each acknowledged record is in one.
* D5, nothing else: a result set has records that match, and none of a window that was sealed before the interest was
  asked for. A new user gets none of an execution that was done ``LATE_S`` before it asked.
* D6, users know: who was confirmed when a query was dropped gets a publication that says so, if the data cluster has
  ended the query.

A record that its server has lost is due to nobody, where ``records_may_be_lost``. Nor is one of a window that was
skipped: where records that were executed are lost, an operator has the query go on behind what there is. What was
reported while a query was dropped belongs to the execution that says so. Gaps are allowed where ``gaps_allowed``, and
for who was away for longer than interests are kept, until :meth:`calm`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from dynamoth.data.progress import Window, WindowEnd
from dynamoth.edge.interests import Interest
from dynamoth_sim.audit import Totals, Violation

VIOLATIONS_MAX = 30

FAR = 1e9
"""Later than every run."""

LATE_S = 1.5
"""A broker confirms a user where its own reading of the log is: it may be late where the log server is slow."""


@dataclass(slots=True)
class ReportedRecord:
    """A record that somebody reports."""

    id: str
    dataset: str
    type: str
    began_at: float
    acknowledged_at: float | None = None
    #: Whether its reporter has sent it again: what is lost together with the ids that are known may be stored twice.
    is_sent_again: bool = False


@dataclass(slots=True)
class _Subscription:
    """What one user gets of one interest, from its subscribing to its leaving."""

    user: str
    interest: Interest
    asked_at: float
    confirmed_at: float | None = None
    ended_at: float | None = None
    #: Executions that came, in order; None is a gap. And when they came.
    came: list[int | None] = field(default_factory=list["int | None"])
    came_at: list[float] = field(default_factory=list[float])
    #: Records that came, with their execution.
    records: dict[str, int] = field(default_factory=dict[str, int])

    def note(self, execution: int | None, at: float) -> None:
        """Note that an execution came, or a gap."""
        self.came.append(execution)
        self.came_at.append(at)

    def covers(self, execution: int, reported_at: float) -> bool:
        """Tell whether a gap lies where an execution is missing, with records that were reported before the gap."""
        before = 0
        for index, each in enumerate(self.came):
            if each is not None:
                before = max(before, each)
            elif before < execution and reported_at <= self.came_at[index]:
                after = next((other for other in self.came[index:] if other is not None), None)
                if after is None or execution < after:
                    return True
        return False


@dataclass(slots=True)
class _Execution:
    """One execution, as it was published first."""

    start: Mapping[str, int]
    end: Mapping[str, int]
    sealed_at: float
    done_at: float = FAR
    #: Whether its records were given up: the server had lost some, or the query was dropped.
    is_skipped: bool = False
    #: When the query was dropped that ends with it; None: it was not.
    dropped_at: float | None = None
    #: The content by interest.
    results: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(slots=True)
class _Era:
    """A time in which an interest was registered."""

    asked_at: float
    users: int = 0
    left_at: float = FAR


@dataclass(frozen=True, slots=True)
class AuditedQuery:
    """What the audit knows of a query: the dataset whose records it selects, and how long interests are kept."""

    dataset: str
    keep_s: float


class DataAudit:
    """Checks the guarantees while a run goes on.

    Args:
        now: tells the time.
        queries: by name.
        gaps_allowed: whether logs may be lost.
        records_may_be_lost: whether log servers may lose what they have acknowledged.
        skew_s: how far the clocks of log servers are apart, at most.

    """

    def __init__(
        self,
        now: Callable[[], float],
        queries: Mapping[str, AuditedQuery],
        *,
        gaps_allowed: bool,
        records_may_be_lost: bool,
        skew_s: float,
    ) -> None:
        self._now = now
        self._queries = queries
        self._gaps_allowed = gaps_allowed
        self._records_may_be_lost = records_may_be_lost
        self._skew_s = skew_s
        self._calm_at = FAR
        self.violations: list[Violation] = []
        self.totals = Totals()
        #: How often the records of a window were given up.
        self.skipped = 0
        self.records: dict[str, ReportedRecord] = {}
        self._open: dict[tuple[str, str], _Subscription] = {}
        self._all: list[_Subscription] = []
        self._eras: dict[str, list[_Era]] = {}
        self._sealed: dict[tuple[str, str], float] = {}
        self._executions: dict[str, dict[int, _Execution]] = {}
        #: When each query was dropped last, and the offsets behind which it was registered again.
        self._dropped_at: dict[str, float] = {}
        self._registered: dict[str, list[Mapping[str, int]]] = {}

    def calm(self) -> None:
        """From now on nothing fails any more: what is reported from here on has to come, without a gap."""
        self._calm_at = self._now()

    def _violate(self, guarantee: str, text: str, interest: Interest | None = None) -> None:
        if len(self.violations) < VIOLATIONS_MAX:
            channel = None if interest is None else interest.log_channel
            self.violations.append(Violation(guarantee, text, self._now(), channel))

    # Reporters.

    def reported(self, id_: str, dataset: str, type_: str) -> None:
        """A record is about to be sent for the first time."""
        self.records[id_] = ReportedRecord(id_, dataset, type_, self._now())
        self.totals.published += 1

    def acknowledged(self, id_: str) -> None:
        """A broker has said that a record is stored, or was."""
        record = self.records[id_]
        if record.acknowledged_at is None:
            record.acknowledged_at = self._now()

    def unacknowledged(self, id_: str) -> None:
        """The outcome for a record is unknown: it is about to be sent again."""
        self.records[id_].is_sent_again = True

    # Operators.

    def query_dropped(self, query: str) -> None:
        """A query was dropped."""
        self._dropped_at[query] = self._now()

    def query_registered(self, query: str, offsets: Mapping[str, int]) -> None:
        """A query that was dropped is registered again, behind these offsets."""
        self._registered.setdefault(query, []).append(offsets)

    def was_dropped(self, query: str) -> bool:
        """Return whether a query was dropped at some time."""
        return query in self._dropped_at

    # Users.

    def asked(self, user: str, interest: Interest) -> None:
        """A user is about to subscribe. Harmless when it was before."""
        if (user, interest.id) in self._open:
            return
        subscription = _Subscription(user, interest, self._now())
        self._open[user, interest.id] = subscription
        self._all.append(subscription)
        eras = self._eras.setdefault(interest.id, [])
        keep_s = self._queries[interest.name].keep_s
        if not eras or (not eras[-1].users and self._now() > eras[-1].left_at + keep_s):
            eras.append(_Era(self._now()))
        eras[-1].users += 1

    def confirmed(self, user: str, interest: Interest) -> None:
        """A subscription is confirmed: records that are reported from now on are due."""
        subscription = self._open[user, interest.id]
        if subscription.confirmed_at is None:
            subscription.confirmed_at = self._now()

    def left(self, user: str, interest: Interest) -> None:
        """A user has unsubscribed: what has not come yet is not due any more."""
        subscription = self._open.pop((user, interest.id), None)
        if subscription is None:
            return
        subscription.ended_at = self._now()
        era = self._eras[interest.id][-1]
        era.users -= 1
        era.left_at = self._now()

    def gap(self, user: str, interest: Interest, reason: str, *, was_away_long: bool) -> None:
        """A gap was announced to a user."""
        self.totals.gaps += 1
        self._open[user, interest.id].note(None, self._now())
        if (not self._gaps_allowed and not was_away_long) or self._now() > self._calm_at:
            self._violate("D1", f"{user} gets a gap of {interest.name} {interest.params}: {reason}", interest)

    def delivered(self, user: str, interest: Interest, payload: bytes) -> None:
        """A result set has come to a user's application."""
        self.totals.delivered += 1
        result: dict[str, Any] = json.loads(payload)
        execution, subscription = int(result["execution"]), self._open[user, interest.id]
        who = f"{user}, {interest.name} {interest.params}, execution {execution}"
        self._check_order(subscription, execution, who)
        subscription.note(execution, self._now())
        if result.get("dropped"):
            known = self._executions.get(interest.name, {}).get(execution)
            if known is None or known.dropped_at is None:
                self._violate("D6", f"{who}: nobody has dropped the query", interest)
            return
        self._check_result(interest, execution, payload.decode(), who)
        if interest.name != result["query"]:
            self._violate("D5", f"{who}: it is of query {result['query']}", interest)
        for row in result["rows"]:
            self._check_row(subscription, execution, row, who)
        self._check_age(subscription, execution, who)

    def _check_order(self, subscription: _Subscription, execution: int, who: str) -> None:
        """Check that executions grow; behind a gap some may come again."""
        came = [each for each in subscription.came if each is not None]
        if not came or execution > came[-1]:
            return
        last = len(subscription.came) - 1 - subscription.came[::-1].index(came[-1])
        if not self._gaps_allowed or None not in subscription.came[last:]:
            self.totals.duplicated += 1
            self._violate("D2", f"{who}: it comes behind execution {came[-1]}", subscription.interest)

    def _check_result(self, interest: Interest, execution: int, content: str, who: str) -> None:
        known = self._executions.get(interest.name, {}).get(execution)
        if known is None:
            self._violate("D3", f"{who}: nobody has executed it", interest)
            return
        first = known.results.setdefault(interest.id, content)
        if first != content and not (self._records_may_be_lost and self._is_part(first, content)):
            self._violate("D3", f"{who}: two results, {first} and {content}", interest)

    @staticmethod
    def _is_part(one: str, other: str) -> bool:
        """Tell whether one of two result sets has rows of the other one only, as the server has lost the rest."""
        first, second = ([row["id"] for row in json.loads(each)["rows"]] for each in (one, other))
        return set(first) <= set(second) or set(second) <= set(first)

    def _check_row(self, subscription: _Subscription, execution: int, row: Mapping[str, Any], who: str) -> None:
        interest, record = subscription.interest, self.records[row["id"]]
        is_of_query = record.dataset == self._queries[interest.name].dataset
        if not is_of_query or record.type != interest.values["type"] or row["type"] != record.type:
            self._violate("D5", f"{who}: {record} does not match", interest)
        before = subscription.records.setdefault(record.id, execution)
        if before != execution and not (self._records_may_be_lost and record.is_sent_again):
            self._violate("D2", f"{who}: record {record.id} came with execution {before}", interest)

    def _check_age(self, subscription: _Subscription, execution: int, who: str) -> None:
        known = self._executions.get(subscription.interest.name, {}).get(execution)
        if known is None:
            return
        keep_s = self._queries[subscription.interest.name].keep_s + 1.0
        eras = self._eras[subscription.interest.id]
        if not any(
            era.asked_at - self._skew_s <= known.sealed_at and (era.users or known.sealed_at <= era.left_at + keep_s)
            for era in eras
        ):
            self._violate("D5", f"{who}: it was sealed before anybody asked", subscription.interest)
        if known.done_at < subscription.asked_at - LATE_S and None not in subscription.came:
            self._violate("D5", f"{who}: it was done before the user asked", subscription.interest)

    # The data cluster.

    def sealed(self, query: str, end: WindowEnd, now: float) -> None:
        """Note that the end of a window has just been read."""
        self._sealed[query, json.dumps(end, sort_keys=True)] = now

    def executes(self, query: str, execution: int, window: Window, now: float) -> None:
        """Note that result sets of a window are about to be published."""
        start, end = window.start["offsets"], window.end["offsets"]
        executions = self._executions.setdefault(query, {})
        known = executions.get(execution)
        if known is None or known.is_skipped:  # who was to skip it died before that was stored
            sealed_at = self._sealed.get((query, json.dumps(window.end, sort_keys=True)), FAR)
            executions[execution] = _Execution(dict(start), dict(end), sealed_at)
        elif (known.start, known.end) != (start, end):
            text = f"{query}, execution {execution} has two windows: {known.start} to {known.end}, {start} to {end}"
            self._violate("D3", text)

    def drops(self, query: str, execution: int, window: Window) -> None:
        """Note that users are about to get a last publication with this number, as the query was dropped."""
        start, end = dict(window.start["offsets"]), dict(window.end["offsets"])
        ended = _Execution(start, end, FAR, is_skipped=True, dropped_at=self._dropped_at[query])
        self._executions.setdefault(query, {})[execution] = ended

    def skips(self, query: str, execution: int, window: Window) -> None:
        """Note that the records of a window are about to be given up; others have its number if that is not stored."""
        if not self._records_may_be_lost:
            self._violate("D4", f"{query}, execution {execution}: records are given up, and none were lost")
        self.skipped += 1
        start, end = dict(window.start["offsets"]), dict(window.end["offsets"])
        self._executions.setdefault(query, {})[execution] = _Execution(start, end, FAR, is_skipped=True)

    def executed(self, query: str, execution: int, now: float) -> None:
        """Note that an execution is done."""
        known = self._executions[query][execution]
        known.done_at = min(known.done_at, now)

    # The end.

    def finish(self, streams: Mapping[str, Mapping[str, Mapping[int, str]]]) -> list[Violation]:
        """Look for what is missing. Returns all violations.

        Args:
            streams: what log servers have in the end: by dataset and partition, the ids of records by offset.

        """
        stored = {name: self._stored(streams[name], name) for name in streams}
        for name, query in self._queries.items():
            windows = self._windows(name)
            executed_in = self._check_windows(name, stored[query.dataset], windows)
            for subscription in self._all:
                if subscription.interest.name == name:
                    self._check_missing(subscription, stored[query.dataset], executed_in)
                    self._check_dropped(subscription, windows)
        return self.violations

    def _stored(self, partitions: Mapping[str, Mapping[int, str]], dataset: str) -> dict[str, tuple[str, int]]:
        """Return partition and offset of each record of a dataset."""
        stored: dict[str, tuple[str, int]] = {}
        for partition, records in partitions.items():
            for offset, id_ in records.items():
                if id_ in stored:
                    self._violate("D2", f"record {id_} is stored twice, at {stored[id_]} and {partition, offset}")
                stored[id_] = partition, offset
        for record in self.records.values():
            is_due = record.dataset == dataset and record.acknowledged_at is not None
            may_be_lost = self._records_may_be_lost and record.began_at < self._calm_at
            if is_due and record.id not in stored and not may_be_lost:
                self._violate("D1", f"record {record.id} was acknowledged, and is not stored")
        return stored

    def _windows(self, query: str) -> list[tuple[int, _Execution]]:
        """Return the executions in order; each begins where the one before has ended. What was skipped begins there."""
        windows = sorted(self._executions.get(query, {}).items())
        for (number, before), (next_number, after) in pairwise(windows):
            if before.dropped_at is not None:
                before.end = after.start
                is_registered = after.dropped_at is not None or after.start in self._registered.get(query, [])
                if not is_registered and not self._records_may_be_lost:
                    self._violate(
                        "D4", f"{query}: execution {next_number} begins at {after.start}, not where registered"
                    )
            if after.is_skipped:
                after.start = before.end
            elif next_number != number + 1 or after.start != before.end:
                text = (
                    f"{query}: execution {next_number} begins at {after.start}, and {number} has ended at {before.end}"
                )
                self._violate("D4", text)
        return windows

    def _check_windows(
        self, query: str, stored: Mapping[str, tuple[str, int]], windows: list[tuple[int, _Execution]]
    ) -> dict[str, int]:
        """Return the execution of each record; it is in exactly one."""
        found: dict[str, int] = {}
        for id_, (partition, offset) in stored.items():
            numbers = [
                number
                for number, each in windows
                if each.start.get(partition, 0) < offset <= each.end.get(partition, 0)
            ]
            if len(numbers) == 1:
                found[id_] = numbers[0]
            elif self.records[id_].acknowledged_at is not None:
                self._violate("D4", f"{query}: record {id_} at {partition, offset} is in the windows {numbers}")
        return found

    def _is_given_up(self, query: str, execution: int) -> bool:
        """Tell whether an execution was skipped, or was given up unfinished as the next one was skipped."""
        known = [self._executions[query].get(each) for each in (execution, execution + 1)]
        first, second = (each is not None and each.is_skipped for each in known)
        unfinished = known[0] is not None and known[0].done_at == FAR
        return first or (second and unfinished)

    def _check_dropped(self, subscription: _Subscription, windows: list[tuple[int, _Execution]]) -> None:
        """Check that a user knows of each time that its query was dropped."""
        confirmed_at = subscription.confirmed_at
        if confirmed_at is None or subscription.ended_at is not None:
            return
        for index, (execution, each) in enumerate(windows):
            if each.dropped_at is None or each.dropped_at < confirmed_at:
                continue
            after = windows[index + 1 :]
            if each.done_at == FAR and (not after or after[0][1].dropped_at is not None):
                continue  # the data cluster is still at work on it, or the query was dropped again before it was done
            if execution not in subscription.came and not subscription.covers(execution, each.dropped_at):
                text = f"{subscription.user} does not know that {subscription.interest.name} was dropped at"
                self._violate("D6", f"{text} {each.dropped_at:.3f}, with execution {execution}", subscription.interest)

    def _check_missing(
        self, subscription: _Subscription, stored: Mapping[str, Any], executed_in: Mapping[str, int]
    ) -> None:
        """Look for records that a user should have."""
        confirmed_at = subscription.confirmed_at
        if confirmed_at is None or subscription.ended_at is not None:
            return
        interest = subscription.interest
        dataset = self._queries[interest.name].dataset
        for record in self.records.values():
            is_due = record.acknowledged_at is not None and record.began_at >= confirmed_at and record.id in stored
            if not is_due or record.dataset != dataset or record.type != interest.values["type"]:
                continue
            if record.id in subscription.records:
                continue
            execution = executed_in.get(record.id, 0)
            if record.began_at < self._calm_at and self._is_given_up(interest.name, execution):
                continue
            if record.began_at < self._calm_at and subscription.covers(execution, record.began_at):
                self.totals.covered_losses += 1
                continue
            self.totals.lost += 1
            text = (
                f"{subscription.user} never gets {record}, of execution {execution} of {interest.name}: {confirmed_at}"
            )
            self._violate("D1", text, interest)
