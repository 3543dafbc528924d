"""The brokers that report to a coordinator: where users reach them, and whether their names and settings are right."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from dynamoth.edge.control import BrokerReport, Stamp
from dynamoth_broker.coordinator.settings import CoordinatorOptions
from dynamoth_broker.events import Noted

BROKERS_MAX = 1000
"""Bound of the brokers whose reports are heard: each costs up to 200 KB, with what their reports name."""


ALIKE = "logs", "history", "presence"
"""The settings that all brokers need alike."""


def _hashes(report: BrokerReport) -> tuple[str, str, str]:
    """Return the hashes of the settings ``ALIKE``."""
    return report.logs_hash, report.history_hash, report.presence_hash


@dataclass(slots=True)
class _Broker:
    """What is known of a broker besides its loads."""

    report: BrokerReport
    incarnation: int
    number: int
    heard_at: float
    #: The incarnation that reported before; None where there was one only.
    former: int | None = None
    #: Whether two processes report in turns under this name.
    is_ambiguous: bool = False


class Roster:
    """The brokers that have reported lately. Memory: one report each, shared with the fleet."""

    def __init__(self, options: CoordinatorOptions, counters: Counter[str]) -> None:
        """Begin without brokers; the counters are those of the coordinator."""
        self._options = options
        self._counters = counters
        self._brokers: dict[str, _Broker] = {}
        #: The settings in which brokers differ, as far as that was noted.
        self._differing: set[str] = set()

    @property
    def names(self) -> list[str]:
        """The brokers, sorted."""
        return sorted(self._brokers)

    def url(self, broker: str) -> str:
        """Return where users reach a broker; empty where nobody knows."""
        known = self._brokers.get(broker)
        return "" if known is None else known.report.url

    def on_report(self, stamp: Stamp, report: BrokerReport, now: float) -> list[Noted] | None:
        """Add a report; return the notes for the log. None: it is old, or too many brokers report."""
        known = self._brokers.get(report.broker)
        if known is not None and known.incarnation == stamp.incarnation and stamp.number < known.number:
            return None
        if known is None and len(self._brokers) >= BROKERS_MAX:
            self._counters["events_refused"] += 1
            return None
        self._counters["reports"] += 1
        present = self._brokers[report.broker] = _Broker(report, stamp.incarnation, stamp.number, now)
        return [*self._compare(present, known), *self._compare_settings()]

    def _compare(self, present: _Broker, known: _Broker | None) -> list[Noted]:
        """Say what is new about a broker since its report before."""
        fields = {"subject": present.report.broker, "url": present.report.url}
        if known is None:
            return [Noted("a broker has begun to report", fields=fields)]
        if known.incarnation == present.incarnation:
            present.former, present.is_ambiguous = known.former, known.is_ambiguous
            return []
        self._counters["broker_restarts"] += 1
        present.former = known.incarnation
        present.is_ambiguous = known.former == present.incarnation
        if not present.is_ambiguous:
            return [Noted("a broker was restarted", fields=fields)]
        if known.is_ambiguous:
            return []
        why = "two processes report in turns: give each broker an id of its own"
        return [Noted("the name of a broker is ambiguous", why, fields, is_warning=True)]

    def _compare_settings(self) -> list[Noted]:
        """Say once that brokers differ in what all of them need alike."""
        notes: list[Noted] = []
        for setting, by_hash in self.differing().items():
            if setting not in self._differing:
                why = f"every broker needs the same broker.{setting}: users miss publications where they differ"
                notes.append(Noted(f"brokers differ in broker.{setting}", why, {"brokers": by_hash}, is_warning=True))
        self._differing = set(self.differing())
        return notes

    def differing(self) -> dict[str, dict[str, list[str]]]:
        """Return the settings in which brokers differ: the brokers by hash, of each. Unknown ones do not count."""
        found: dict[str, dict[str, list[str]]] = {setting: {} for setting in ALIKE}
        for id_, broker in sorted(self._brokers.items()):
            for setting, hashed in zip(ALIKE, _hashes(broker.report), strict=True):
                if hashed:
                    found[setting].setdefault(hashed, []).append(id_)
        return {setting: by_hash for setting, by_hash in found.items() if len(by_hash) > 1}

    def is_odd(self, id_: str) -> bool:
        """Return whether a broker differs in these settings from more brokers than it agrees with.

        One that does not say what it has, as it is older, does not count.
        """
        own = _hashes(self._brokers[id_].report)
        counts = Counter(hashes for broker in self._brokers.values() if all(hashes := _hashes(broker.report)))
        return all(own) and counts[own] < max(counts.values())

    def forget_silent(self, now: float) -> list[str]:
        """Forget the brokers that have not reported for long; return them."""
        silent = [id_ for id_, broker in self._brokers.items() if now - broker.heard_at > self._forget_s(broker)]
        for id_ in silent:
            del self._brokers[id_]
        return silent

    def _forget_s(self, broker: _Broker) -> float:
        return max(self._options.forget_s, 2 * self._options.suspect_s(broker.report.report_s))
