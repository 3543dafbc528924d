"""The brokers that report: who is silent, whose name is not its own, and whose settings differ."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from dynamoth.edge.control import BrokerReport, Stamp
from dynamoth_broker.coordinator.fleet import Fleet
from dynamoth_broker.coordinator.model import Standing
from dynamoth_broker.coordinator.roster import Roster
from dynamoth_broker.coordinator.settings import CoordinatorOptions
from dynamoth_broker.events import Noted

OPTIONS = CoordinatorOptions(report_s=1.0, suspect_reports=3, forget_s=10.0)
REPORT = BrokerReport(
    broker="b1",
    url="wss://b1",
    capacity_bytes_per_s=10.0,
    load_bytes_per_s=1.0,
    inbound_bytes_per_s=1.0,
    users=1,
    logs_hash="aa",
    history_hash="cc",
)


class Reports:
    """Reports of brokers that a roster hears."""

    def __init__(self) -> None:
        self.roster = Roster(OPTIONS, Counter())
        self._number = 0

    def hear(self, report: BrokerReport, now: float = 0.0) -> list[Noted]:
        self._number += 1
        incarnation = sum(report.broker.encode())
        return self.roster.on_report(Stamp(incarnation, self._number), report, now) or []


def test_brokers_that_differ_are_noted_once() -> None:
    heard = Reports()
    second = replace(REPORT, broker="b2", history_hash="dd")
    assert [note.message for note in heard.hear(REPORT)] == ["a broker has begun to report"]
    assert [note.message for note in heard.hear(second)][1:] == ["brokers differ in broker.history"]
    assert heard.hear(second) == heard.hear(REPORT) == []
    assert heard.roster.differing() == {"history": {"cc": ["b1"], "dd": ["b2"]}}
    [note] = heard.hear(replace(REPORT, logs_hash="bb"))
    assert note.fields == {"brokers": {"aa": ["b2"], "bb": ["b1"]}} and "same broker.logs" in note.cause


def test_a_difference_that_comes_again_is_noted_again() -> None:
    heard = Reports()
    second = replace(REPORT, broker="b2")
    for report in (REPORT, second):
        heard.hear(report)
    wrong = replace(second, logs_hash="zz")
    assert [len(heard.hear(report)) for report in (wrong, wrong, second, second, wrong)] == [1, 0, 0, 0, 1]


def test_older_brokers_say_nothing_of_their_settings() -> None:
    heard = Reports()
    heard.hear(REPORT)
    heard.hear(replace(REPORT, broker="b2", logs_hash="", history_hash=""))
    assert heard.roster.differing() == {}


@pytest.mark.parametrize(
    ("report_s", "suspect_s", "forget_s"), [(0.0, 3.0, 10.0), (0.2, 0.6, 10.0), (20.0, 60.0, 120.0)]
)
def test_a_broker_is_silent_by_its_own_interval(report_s: float, suspect_s: float, forget_s: float) -> None:
    heard, fleet = Reports(), Fleet(OPTIONS)
    report = replace(REPORT, report_s=report_s)
    heard.hear(report)
    fleet.report(report, 0.0)
    assert fleet.standing("b1", suspect_s) is Standing.OPEN
    assert fleet.standing("b1", suspect_s + 0.01) is Standing.SUSPECT
    assert heard.roster.forget_silent(forget_s) == [] and heard.roster.url("b1") == "wss://b1"
    assert heard.roster.forget_silent(forget_s + 0.01) == ["b1"] and heard.roster.url("b1") == ""
