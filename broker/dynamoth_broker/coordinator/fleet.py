"""What the coordinator knows of the brokers: their latest reports, how old these are, and averages of their loads.

Two averages are kept, with half-lives of some 10 and 60 s. Placement goes by the larger of the two, so that a broker
whose load rises gets nobody; moves go by the slow one, so that a short peak moves nobody. When a user has moved, both
averages change at once by what the move was predicted to change, else the slow one would show the old load for minutes
and the next plan would move users for it again. An average that does not show all of the present load yet, as users are
new, loses the same part of the user's load: else it would hide the load of those who stay.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import isfinite

from dynamoth.edge.control import BrokerReport, Candidates
from dynamoth_broker.coordinator.model import LoadModel, Standing
from dynamoth_broker.coordinator.reports import Total, build_model
from dynamoth_broker.coordinator.settings import CoordinatorSettings

BYTES_PER_S_MAX = 1e13
"""A report beyond is no measurement: 100 times the fastest networks."""


@dataclass(slots=True)
class _Broker:
    """What is known of one broker."""

    report: BrokerReport
    #: When the latest report arrived.
    heard_at: float
    #: Averages of F_j, in bytes/s.
    fast: float
    slow: float
    #: The latest F_j, changed by the moves since, in bytes/s.
    present: float


class Fleet:
    """The brokers that have reported. Memory: one report each."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        self._settings = settings
        self._brokers: dict[str, _Broker] = {}

    def __len__(self) -> int:
        return len(self._brokers)

    def report(self, report: BrokerReport, now: float) -> bool:
        """Add a report; return whether it is plausible. One that is not changes nothing."""
        if not _is_plausible(report):
            return False
        known, load = self._brokers.get(report.broker), report.load_bytes_per_s
        if known is None:
            self._brokers[report.broker] = _Broker(report, now, load, load, load)
            return True
        age_s = max(0.0, now - known.heard_at)
        known.fast = _blend(known.fast, load, age_s, self._settings.fast_half_life_s)
        known.slow = _blend(known.slow, load, age_s, self._settings.slow_half_life_s)
        known.report, known.heard_at, known.present = report, now, load
        return True

    def forget(self, broker: str) -> None:
        """Forget a broker that is gone."""
        self._brokers.pop(broker, None)

    def shift(self, broker: str, load: float) -> None:
        """Change the averages of a broker by what a move changes, in bytes/s."""
        if (known := self._brokers.get(broker)) is not None:
            known.fast = _shifted(known.fast, load, known.present)
            known.slow = _shifted(known.slow, load, known.present)
            known.present = max(0.0, known.present + load)

    def standing(self, broker: str, now: float) -> Standing:
        """Return what a broker takes part in; SUSPECT for one that has never reported."""
        known = self._brokers.get(broker)
        if known is None or now - known.heard_at > self._settings.suspect_s(known.report.report_s):
            return Standing.SUSPECT
        if known.report.is_draining:
            return Standing.DRAINING
        is_full = not known.report.is_admitting or known.report.other_ratio_max >= 1
        return Standing.FULL if is_full else Standing.OPEN

    def suspects(self, now: float) -> list[str]:
        """Return the brokers whose reports are too old, sorted."""
        return sorted(broker for broker in self._brokers if self.standing(broker, now) is Standing.SUSPECT)

    def unheard_since(self, at: float, now: float) -> list[str]:
        """Return the brokers that count and have not reported since a time, sorted."""
        return sorted(
            broker
            for broker, known in self._brokers.items()
            if known.heard_at <= at and self.standing(broker, now).is_counted
        )

    def latest(self, broker: str) -> BrokerReport | None:
        """Return the latest report of a broker."""
        known = self._brokers.get(broker)
        return None if known is None else known.report

    def for_moves(self, now: float, answers: Collection[Candidates] = ()) -> LoadModel:
        """Return the model of a decision, with candidates."""
        totals = self._totals(now, is_for_placement=False)
        return build_model(totals, answers, connection_bytes_per_s=self._settings.connection_bytes_per_s)

    def for_placement(self, now: float) -> LoadModel:
        """Return a model for placements: it has the interests that reports name, and no users."""
        totals = self._totals(now, is_for_placement=True)
        return build_model(totals, connection_bytes_per_s=self._settings.connection_bytes_per_s, shared=True)

    def _totals(self, now: float, *, is_for_placement: bool) -> Iterator[Total]:
        for broker, known in self._brokers.items():
            load = max(known.fast, known.slow) if is_for_placement else known.slow
            yield Total(known.report, self.standing(broker, now), load)


def _blend(average: float, value: float, age_s: float, half_life_s: float) -> float:
    """Return an exponentially weighted average after another value."""
    weight: float = 0.5 ** (age_s / half_life_s)
    return value + (average - value) * weight


def _shifted(average: float, load: float, present: float) -> float:
    """Return an average after a change of the present load."""
    if load < 0 and average < present:
        load *= average / present
    return max(0.0, average + load)


def _is_plausible(report: BrokerReport) -> bool:
    numbers = (report.load_bytes_per_s, report.inbound_bytes_per_s, report.other_ratio_max, report.capacity_bytes_per_s)
    columns = report.interests
    return (
        all(isfinite(number) and 0 <= number <= BYTES_PER_S_MAX for number in (*numbers, *columns.rates))
        and report.capacity_bytes_per_s > 0
        and report.users >= 0
        and len(columns.ids) == len(columns.rates) == len(columns.users)
    )
