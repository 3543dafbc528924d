"""The brokers of a replay: what they would have reported if the users whom the replay has moved were elsewhere.

Theory of operation
-------------------
A report is taken as it was recorded, and changed by the users who are *displaced*: those whom the recorded coordinator
has moved since the begin of the window, who are put back, and those whom the replay has moved. A displaced user adds
its interests to the broker where the replay has it, and takes them from the broker where the recording has it. The load
follows from that: F_j is the sum of lambda_k * (1 + n_jk) over the interests that are held.

So loads that no move has changed are exactly those recorded. Interests that reports do not name stay where they were.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from dynamoth.edge.control import BrokerReport, Candidates, InterestColumns
from dynamoth_analytics.replay.brokers.population import USERS_MAX, make_users
from dynamoth_broker.candidates import bounded, choose_candidates
from dynamoth_broker.coordinator.events import AskCandidates


@dataclass(slots=True)
class _Displaced:
    """A user who is elsewhere than in the recording."""

    interests: tuple[str, ...]
    #: The broker where the recording has the user, and the one where the replay has.
    recorded: str
    place: str
    #: When the replay has moved the user; None: never.
    moved_at: float | None = None


@dataclass(slots=True)
class _Broker:
    """The latest report of a broker."""

    report: BrokerReport
    #: n_jk and lambda_k as recorded.
    counts: dict[str, int]
    rates: dict[str, float]
    #: What displaced users change of it, without zeros.
    change: Counter[str]
    #: And of the number of users.
    users: int = 0
    #: The report as changed; None: something has changed since.
    present: BrokerReport | None = None


class World:
    """The brokers of one replay."""

    def __init__(self) -> None:
        self._brokers: dict[str, _Broker] = {}
        #: lambda_k, as the latest report that names it says.
        self._rates: dict[str, float] = {}
        self._displaced: dict[str, _Displaced] = {}
        #: The interests of the candidates of the latest answers.
        self._offered: dict[str, tuple[str, ...]] = {}
        self._made = 0

    @property
    def brokers(self) -> list[str]:
        """Those that have reported."""
        return [*self._brokers]

    # What was recorded.

    def report(self, report: BrokerReport) -> BrokerReport:
        """Take a recorded report, and return what the broker would have reported.

        A report without interests keeps those of the report before it.
        """
        known = self._brokers.get(report.broker)
        if known is None:
            known = self._brokers[report.broker] = _Broker(report, {}, {}, Counter())
        columns = report.interests
        if columns.ids:
            known.counts = dict(zip(columns.ids, columns.users, strict=True))
            known.rates = dict(zip(columns.ids, columns.rates, strict=True))
            self._rates |= known.rates
        else:
            report = replace(report, interests=known.report.interests)
        known.report, known.present = report, None
        return self.present(report.broker)

    def put_back(self, session: str, source: str, target: str, interests: tuple[str, ...]) -> None:
        """Put a user back whom the recorded coordinator has moved: the replay has not."""
        known = self._displaced.get(session)
        if known is None:
            known = self._displaced[session] = _Displaced(interests, source, source)
        else:
            self._apply(known, -1)
        known.recorded = target
        self._place(session, known)

    # What the replay does.

    def move(self, user: str, source: str, target: str, now: float) -> None:
        """Move a user of the latest answers."""
        known = self._displaced.get(user)
        if known is None:
            known = self._displaced[user] = _Displaced(self._offered.get(user, ()), source, source)
        else:
            self._apply(known, -1)
        known.place, known.moved_at = target, now
        self._place(user, known)

    def _place(self, user: str, known: _Displaced) -> None:
        self._apply(known, 1)
        if known.place == known.recorded and known.moved_at is None:
            del self._displaced[user]

    def _apply(self, user: _Displaced, sign: int) -> None:
        """Add what a displaced user changes, or take it away. A user who is where it was recorded changes nothing."""
        if user.place == user.recorded:
            return
        for id_, change in ((user.place, sign), (user.recorded, -sign)):
            if (broker := self._brokers.get(id_)) is not None:
                broker.present = None
                broker.users += change
                for interest in user.interests:
                    broker.change[interest] += change
                    if not broker.change[interest]:
                        del broker.change[interest]

    def candidates(self, ask: AskCandidates, now: float) -> Candidates:
        """Return what a broker would have offered: users whom moves have brought there, and others that are made up."""
        report, broker = self.present(ask.broker), self._brokers[ask.broker]
        counts = self._counts(broker)
        here = {
            user: known.interests
            for user, known in self._displaced.items()
            if known.place == ask.broker and (known.moved_at is None or now - known.moved_at >= ask.rest_s)
        }
        brought = Counter[str]()
        everybody = 0
        for known in self._displaced.values():
            if known.place == ask.broker:
                everybody += 1
                brought.update(known.interests)
        others = max(0, report.users - everybody)
        made = min(others, USERS_MAX)
        share = made / others if others else 0.0
        held = {interest: share * max(0, count - brought[interest]) for interest, count in counts.items()}
        for interests in make_users(made, report.user_loads, held, self._rates):
            self._made += 1
            here[f"{ask.broker}~{self._made}"] = interests
        found = bounded(choose_candidates(ask.broker, here.items(), self._rates, counts, (ask.load, ask.users_max)))
        self._offered.update((each.user, each.interests) for each in found.users)
        return found

    def forget_offers(self) -> None:
        """Forget the candidates of whom no move is to come."""
        self._offered.clear()

    # Loads.

    def present(self, id_: str) -> BrokerReport:
        """Return what a broker would report now."""
        broker = self._brokers[id_]
        if broker.present is None:
            broker.present = self._changed(broker) if broker.change or broker.users else broker.report
        return broker.present

    def _changed(self, broker: _Broker) -> BrokerReport:
        report, load, inbound = broker.report, 0.0, 0.0
        for interest, change in broker.change.items():
            before = broker.counts.get(interest, 0)
            # Its own rate, if it has one: brokers measure the same interest a little differently.
            after, rate = max(0, before + change), broker.rates.get(interest, self._rates.get(interest, 0.0))
            fetched = (after > 0) - (before > 0)
            inbound += rate * fetched
            load += rate * (fetched + after - before)
        changed = max(0.0, report.load_bytes_per_s + load)
        grown = changed / report.load_bytes_per_s if report.load_bytes_per_s else 1.0
        return replace(
            report,
            load_bytes_per_s=changed,
            inbound_bytes_per_s=max(0.0, report.inbound_bytes_per_s + inbound),
            users=max(0, report.users + broker.users),
            other_ratio_max=report.other_ratio_max * grown,  # as the coordinator's model takes it
            interests=self._columns(self._counts(broker)),
        )

    def _counts(self, broker: _Broker) -> dict[str, int]:
        if not broker.change:
            return broker.counts
        counts = dict(broker.counts)
        for interest, change in broker.change.items():
            counts[interest] = max(0, counts.get(interest, 0) + change)
        return counts

    def _columns(self, counts: Mapping[str, int]) -> InterestColumns:
        held = [interest for interest, count in counts.items() if count]
        rates = tuple([self._rates.get(interest, 0.0) for interest in held])
        return InterestColumns(tuple(held), rates, tuple([counts[interest] for interest in held]))
