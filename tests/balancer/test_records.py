"""What the balancer tells recorders: its decisions with their outcome, each phase of each change, and its settings."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from dynamoth.errors import ConfigError
from dynamoth.plan.compatibility import Compatibility, CompatibilityRule
from dynamoth.plan.plan import Assignment, Mode, Plan, Server
from dynamoth.protocol.records import RecordedRows, unpack_rows
from dynamoth.recording import TEXT_CHARACTERS_MAX
from dynamoth_balancer.admin.records import (
    ROWS_PER_MESSAGE_MAX,
    SETTINGS_REPEAT_S,
    RecordedSettings,
    Records,
    describe_settings,
    read_settings,
)
from dynamoth_balancer.events import PlanChanged
from dynamoth_balancer.options import BalancerOptions
from tests.balancer.cluster import Balancer, SimCluster, started
from tests.balancer.traffic import CAPACITY

SERVERS = (Server("s1", "redis://user:secret@h:1/2"), Server("s2", "unix://:secret@/path?db=1"))

QUICK = BalancerOptions(wait_s=5.0, averaging_s=3.0, channel_rest_s=10.0)


def messages(cluster: SimCluster, balancer: Balancer, server: str = "s1") -> list[RecordedRows]:
    incarnation = balancer.machine.incarnation
    return [message for message in cluster.servers[server].records if message.sender == incarnation]


def rows(cluster: SimCluster, balancer: Balancer, table: str, **cells: Any) -> list[dict[str, Any]]:
    """Return the rows of a table that have these values."""
    found = [
        dict(zip(message.columns, row, strict=True))
        for message in messages(cluster, balancer)
        for row in message.rows
        if message.table == table
    ]
    return [row for row in found if cells.items() <= row.items()]


def overload(cluster: SimCluster, balancer: Balancer, *ratios: float) -> list[bytes]:
    channels = balancer.at_home("s1", len(ratios))
    cluster.follow.update({name: round(ratio * CAPACITY) for name, ratio in zip(channels, ratios, strict=True)})
    return channels


def test_a_decision_is_recorded_with_its_phases_and_its_outcome() -> None:
    cluster, balancer = started(options=QUICK)
    overload(cluster, balancer, 0.5, 0.4)
    cluster.run_until(lambda: bool(rows(cluster, balancer, "decisions", kind="outcome")))
    [move] = balancer.decided[0].decision.moves
    name, place = move.channel.decode(), {"from_servers": ("s1",), "to_servers": ("s2",), "to_mode": "single"}
    recorded = rows(cluster, balancer, "decisions", kind="move", decision=1, goal="relieve", channel=name, **place)
    ratios = {row["server"]: (row["ratio_before"], row["ratio_predicted"]) for row in recorded}
    assert ratios == move.ratios and ratios.keys() == {"s1", "s2"}
    changes = rows(cluster, balancer, "plans", channel=name, **place)
    assert [change["phase"] for change in changes] == ["prepared", "active", "settled"]
    assert changes[0]["reason"] == move.reason and len({change["epoch"] for change in changes}) == 1
    for outcome in rows(cluster, balancer, "decisions", kind="outcome", decision=1):
        assert (outcome["ratio_before"], outcome["ratio_predicted"]) == ratios[outcome["server"]]
        assert outcome["ratio_measured"] == pytest.approx(outcome["ratio_predicted"])
    sent = messages(cluster, balancer)
    assert messages(cluster, balancer, "s2") == sent, "every server gets the same"
    assert [message.number for message in sent] == list(range(1, len(sent) + 1))


def test_a_decision_is_recorded_with_what_it_rests_on() -> None:
    cluster, balancer = started(options=QUICK)
    overload(cluster, balancer, 0.5, 0.4)
    cluster.run_until(lambda: bool(rows(cluster, balancer, "decisions", kind="outcome")))
    first, *more = rows(cluster, balancer, "decisions", kind="move")
    heard = [text.split() for text in first["reports"]]
    for server in ("s1", "s2"):
        of_one = [(int(sequence), float(at)) for id_, _, sequence, at in heard if id_ == server]
        assert len(of_one) >= QUICK.reports_min and of_one == sorted(of_one)
        assert all(at <= first["clock_s"] for _, at in of_one)
    assert not first["settled"] and all(row["reports"] is None for row in more), "once per decision"
    overload(cluster, balancer, 0.5, 0.4, 0.5)
    cluster.run_until(lambda: len(balancer.decided) > 1)
    second = next(row for row in rows(cluster, balancer, "decisions", decision=2) if row["clock_s"] is not None)
    [(at, channel)] = [text.split(" ", 1) for text in second["settled"]]
    assert channel == first["channel"] and first["clock_s"] < float(at) < second["clock_s"]
    assert not {*first["reports"]} & {*second["reports"]}, "each report is named once"


def test_pauses_are_recorded() -> None:
    cluster, balancer = started(options=QUICK)
    cluster.ask("pause")
    cluster.ask("resume")
    assert [row["kind"] for row in rows(cluster, balancer, "decisions")] == ["paused", "resumed"]


def test_what_cannot_be_done_is_recorded_as_a_finding() -> None:
    cluster, balancer = started(options=QUICK)
    overload(cluster, balancer, 0.95)
    cluster.run_until(lambda: bool(balancer.decided))
    [finding] = rows(cluster, balancer, "decisions")
    assert (finding["kind"], finding["goal"], finding["server"]) == ("finding", "relieve", "s1")
    assert "one server is too small for it" in finding["reason"]


def test_a_successor_records_what_is_in_transition_and_no_outcome_of_its_predecessor() -> None:
    cluster, balancer = started(options=QUICK)
    channels = overload(cluster, balancer, 0.5, 0.4)
    cluster.agents["s1"].listened.update(channels)
    cluster.run_until(lambda: bool(rows(cluster, balancer, "plans", phase="active")))
    successor = cluster.succeed(balancer, QUICK)
    cluster.run()
    [found] = rows(cluster, successor, "plans")
    assert (found["phase"], found["from_servers"], found["to_servers"]) == ("active", ("s1",), ("s2",))
    cluster.agents["s1"].listened.clear()
    cluster.run_until(lambda: bool(rows(cluster, successor, "plans", phase="settled")))
    cluster.run(2 * QUICK.averaging_s)
    assert not rows(cluster, successor, "decisions", kind="outcome")


def test_large_changes_and_long_texts_are_cut_to_what_readers_take() -> None:
    records = Records(1, BalancerOptions(), deque())
    names = [b"%d\xff" % number + b"x" * TEXT_CHARACTERS_MAX for number in range(2 * ROWS_PER_MESSAGE_MAX + 1)]
    plan = Plan.initial(SERVERS).begin(dict.fromkeys(names, Assignment(Mode.ALL_SUBSCRIBERS, ("s1", "s2"))))
    records.on_plan(PlanChanged(plan, "\udcff" * TEXT_CHARACTERS_MAX, tuple(names)), 0.0)
    sent = [unpack_rows(bytes(send.args[2])) for send in records.publish(["s1"])]  # type: ignore[arg-type]
    assert [len(message.rows) for message in sent] == [ROWS_PER_MESSAGE_MAX, ROWS_PER_MESSAGE_MAX, 1]
    assert records.publish(["s1"]) == [], "once"


# Settings.


def test_settings_are_recorded_so_that_the_machine_can_run_again() -> None:
    options = BalancerOptions(draining=frozenset({"s2"}), load_ratio_high=0.7, virtual_nodes=8)
    cluster, balancer = started(options=options)
    cluster.run(SETTINGS_REPEAT_S + 1)
    first, second = (each.rows for each in messages(cluster, balancer) if each.table == "settings")
    assert first == second, "again for recorders that come late"
    urls = {"s1": "redis://s1", "s2": "redis://s2"}
    assert read_settings((row[0], row[1]) for row in first) == RecordedSettings(options, urls, ("s1", "s2"))


def test_settings_that_are_in_force_are_recorded_without_credentials() -> None:
    rules = tuple(CompatibilityRule(b"%d\xff*" % number + b"x" * 200, "s1", plain=False) for number in range(64))
    plan = Plan.initial(SERVERS, 8, Compatibility(0, rules))
    described = describe_settings(BalancerOptions(), plan)
    assert all(len(value) <= TEXT_CHARACTERS_MAX for _, value in described)
    settings = read_settings([("a_newer_setting", "1"), *described])
    assert settings.options == BalancerOptions(virtual_nodes=8, compatibility=rules)
    assert settings.servers == {"s1": "redis://h:1/2", "s2": "unix:///path"}


@pytest.mark.parametrize(
    "rows", [[("wait_s", "x")], [("wait_s", "-1")], [("draining", "1")], [("compatibility", "[1]")], [("servers", "1")]]
)
def test_settings_that_nobody_recorded_are_refused(rows: list[tuple[str, str]]) -> None:
    with pytest.raises(ConfigError):
        read_settings(rows)
