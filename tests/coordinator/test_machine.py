"""Coordinators and brokers over simulated servers: who acts, what is asked for, and what happens without one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dynamoth.edge.control import BrokerReport, Stamp, pack_edge
from dynamoth.machine.events import ErrorReply, LinkUp, Pushed, Replied, Send, Start, Tick
from dynamoth.names import COORDINATOR_CHANNEL, COORDINATOR_LEASE_KEY, OPERATOR_EDGE_CHANNEL
from dynamoth.plan.plan import Server
from dynamoth.protocol.control import AdminRequest, pack_control
from dynamoth_broker.coordinator.controller import Stage
from dynamoth_broker.coordinator.machine import CoordinatorMachine, Stop, Stopped
from dynamoth_broker.coordinator.orders import CHECK_S
from dynamoth_broker.coordinator.requests import decision_as_data
from dynamoth_broker.edge_links import COPIES, RESUBSCRIBE_S, SUBSCRIBE, TAG
from dynamoth_broker.events import ControlLinkChanged, Noted
from tests.coordinator.sim_edge import OPTIONS, SimEdge, acting, result_of


def test_users_are_moved_until_the_loads_are_even() -> None:
    edge = SimEdge()
    edge.crowd()
    edge.until(lambda: edge.users()[1] >= 4, "users are moved")
    edge.run(3.0)
    assert min(edge.users()) >= 4 and sum(edge.users()) == 12
    decision = edge.plans()[0]
    assert decision.moved == len(decision.plan.moves) > 0 and decision.failed == 0
    assert decision.measured is not None and decision.measured.cov < decision.plan.before.cov
    data = decision_as_data(decision)
    assert data["moves"] == [{"from": "b1", "to": "b2", "users": decision.moved}] and data["kind"] == "relieve"


def test_users_who_stay_are_counted_as_failed_and_the_next_plan_comes() -> None:
    edge = SimEdge()
    edge.staying = {f"u{number}" for number in range(12)}
    edge.crowd()
    edge.until(lambda: len(edge.plans()) >= 2, "a second plan")
    first = edge.plans()[0]
    assert (first.moved, first.failed) == (0, len(first.plan.moves))
    assert edge.coordinator().counters["moves_deadline"] > 0 and edge.users() == [12, 0]


@pytest.mark.parametrize("seed", range(5))
def test_one_of_several_acts_and_another_one_takes_over(seed: int) -> None:
    edge = SimEdge(coordinators=3, seed=seed)
    edge.until(lambda: len(edge.leaders()) == 1, "one acts")
    for _ in range(20):
        edge.run(0.1)
        assert len(edge.leaders()) == 1
    [first] = edge.leaders()
    number = int(first[1]) - 1
    edge.coordinators[number].crash("crashes")
    edge.until(lambda: len(edge.leaders()) == 1, "another one takes over")
    assert edge.leaders() != [first]
    assert edge.coordinator(int(edge.leaders()[0][1]) - 1).brokers == ["b1", "b2"]
    edge.crowd()
    edge.until(lambda: edge.users()[1] >= 4, "the successor moves users")


def test_one_that_ends_gives_the_lease_back() -> None:
    edge = SimEdge()
    edge.until(lambda: edge.leaders() == ["c1"], "it acts")
    edge.coordinators[0].handle(Stop())
    edge.until(lambda: any(isinstance(each, Stopped) for each in edge.news), "it has ended", 0.5)
    for server in edge.servers.values():
        assert server.execute("test", b"GET", COORDINATOR_LEASE_KEY) is None
    edge.run(1.0)
    assert edge.leaders() == []


def test_without_the_majority_nobody_acts_and_brokers_go_on() -> None:
    edge = SimEdge()
    edge.until(lambda: edge.leaders() == ["c1"], "it acts")
    for id_ in ("s1", "s2"):
        edge.servers[id_].stop()
    edge.until(lambda: edge.leaders() == [], "it waits")
    edge.crowd()
    edge.run(5.0)
    assert edge.users() == [12, 0] and len(edge.coordinator().faults) == 2
    for id_ in ("s1", "s2"):
        edge.servers[id_].start()
    edge.until(lambda: edge.users()[1] >= 4, "it acts again")


def test_one_that_loses_the_lease_keeps_what_it_knows_and_forgets_its_plan() -> None:
    edge = SimEdge()
    edge.staying = {f"u{number}" for number in range(12)}
    edge.until(lambda: edge.leaders() == ["c1"], "it acts")
    edge.crowd()
    assert result_of(edge.ask("pin", 1, session="u3"))["pinned_users"] == 1
    edge.until(lambda: edge.coordinator().controller.stage is Stage.MOVING, "users are asked to move")
    first = next(iter(edge.brokers.values()))
    first.process.pause(3.0)  # it does not say that nobody moves
    for id_ in ("s1", "s2"):
        edge.servers[id_].stop()
    edge.until(lambda: edge.leaders() == [], "it waits", 1.9)
    controller = edge.coordinator().controller
    assert (controller.stage, controller.pinned, len(controller.fleet)) == (Stage.WATCHING, frozenset({"u3"}), 1)


def test_one_server_out_of_reach_of_the_coordinator_does_not_matter() -> None:
    edge = SimEdge()
    heal = edge.network.part(["c1"], ["s2"])
    edge.crowd()
    edge.until(lambda: edge.users()[1] >= 4, "users are moved")
    heal()


def test_a_broker_that_is_gone_is_forgotten() -> None:
    edge = SimEdge(brokers=3)
    edge.until(lambda: edge.coordinator().brokers == ["b1", "b2", "b3"], "all report")
    list(edge.brokers.values())[2].process.crash("crashes")
    edge.until(lambda: edge.coordinator().brokers == ["b1", "b2"], "one is forgotten", 3.0)
    assert len(edge.coordinator().controller.fleet) == 2
    assert any(isinstance(each, Noted) and each.fields == {"subject": "b3"} for each in edge.news)
    edge.crowd()
    edge.until(lambda: edge.users()[1] >= 4, "the others share the load")


def test_newcomers_are_sent_to_the_least_loaded_broker_and_know_the_others() -> None:
    edge = SimEdge()
    assert edge.coordinator().place("new", 0.0) == ()
    edge.crowd()
    edge.staying = {f"u{number}" for number in range(12)}
    edge.run(1.0)
    assert edge.coordinator().place("new", edge.world.now) == ("wss://b2/connect", "wss://b1/connect")
    first, second = edge.brokers.values()
    assert first.machine.control.alternates(edge.world.now) == (second.url,)
    second.machine.moves.drain(1.0, edge.world.now)
    edge.run(0.5)
    assert edge.coordinator().place("new", edge.world.now) == (first.url,)


def test_operators_pause_and_pin_at_all_coordinators_and_get_an_explanation() -> None:
    edge = SimEdge(coordinators=2)
    edge.until(lambda: len(edge.leaders()) == 1, "one acts")
    assert acting(edge.ask("pause", 1))["paused"]
    assert acting(edge.ask("pin", 2, session="u0"))["pinned_users"] == 1
    edge.crowd()
    edge.run(CHECK_S + 1.0)
    assert edge.users() == [12, 0]
    explanations = [reply.result["explanation"] for reply in edge.ask("explain", 3)]
    assert all(each["pinned"] == ["u0"] and "paused" in each["obstacles"][0] for each in explanations)
    edge.coordinators[int(edge.leaders()[0][1]) - 1].crash("crashes")
    edge.until(lambda: len(edge.leaders()) == 1, "another one takes over")
    edge.run(2.0)
    assert edge.users() == [12, 0], "paused it stays"
    assert result_of(edge.ask("resume", 4))["leading"]
    edge.until(lambda: edge.users()[1] >= 4, "users are moved")
    assert "u0" in next(iter(edge.brokers.values())).machine.sessions


@pytest.mark.parametrize(("command", "arguments"), [("fly", {}), ("pin", {}), ("pin", {"session": "x" * 513})])
def test_a_wrong_request_is_refused(command: str, arguments: dict[str, Any]) -> None:
    edge = SimEdge()
    edge.run(0.5)
    [reply] = edge.ask(command, 1, **arguments)
    assert reply.error is not None and reply.error.startswith("coordinator: ")


def test_newcomers_are_sent_to_the_nearest_broker_that_is_not_full() -> None:
    vienna, oslo, lima = (48.2, 16.4), (59.9, 10.8), (-12.0, -77.0)
    machine, number = alone(), 0

    def hear(id_: str, place: tuple[float, float], **fields: Any) -> None:
        nonlocal number
        number += 1
        report = replace(REPORT, broker=id_, url=f"wss://{id_}", location=place, report_s=60.0)
        report = replace(report, capacity_bytes_per_s=1000.0, users=99)
        heard(machine, Stamp(ord(id_[1]), number), replace(report, **fields))

    hear("b1", vienna, load_bytes_per_s=500.0)
    hear("b2", oslo, load_bytes_per_s=250.0)
    hear("b3", lima, load_bytes_per_s=100.0)
    prague = (50.1, 14.4)
    assert machine.place("u", 0.2, prague) == ("wss://b1", "wss://b2", "wss://b3")
    assert machine.place("u", 0.2, (-33.4, -70.7)) == ("wss://b3", "wss://b1", "wss://b2")
    assert machine.place("u", 0.2, (0.0, 179.9)) == ("wss://b3", "wss://b2", "wss://b1"), "on a globe, not on a map"
    assert machine.place("u", 0.2) == ("wss://b3", "wss://b2", "wss://b1"), "by load"
    hear("b1", vienna, is_admitting=False)
    assert machine.place("u", 2.0, prague) == ("wss://b2", "wss://b3"), "one that takes nobody is skipped"
    hear("b2", oslo, other_ratio_max=0.9)
    assert machine.place("u", 4.0, prague)[0] == "wss://b3", "and one above ratio_accept"
    hear("b3", lima, other_ratio_max=0.99)
    assert machine.place("u", 6.0, lima)[0] == "wss://b2", "where all are, the least loaded one"


def test_a_refused_subscription_is_asked_for_again_and_is_no_fault_for_good() -> None:
    machine = alone()
    refusal = Replied("s1", (TAG, SUBSCRIBE), ErrorReply("NOPERM no"))
    assert machine.handle(refusal, 1.0) == [ControlLinkChanged("s1", "NOPERM no")]
    assert machine.faults == {"s1": "NOPERM no"}
    again = machine.handle(Tick(), 1.0 + RESUBSCRIBE_S)
    channels = COORDINATOR_CHANNEL, OPERATOR_EDGE_CHANNEL
    assert Send("s1", (b"SUBSCRIBE", *channels), (TAG, SUBSCRIBE)) in again
    machine.handle(Pushed("s1", [[b"subscribe", channels[0], 1], [b"subscribe", channels[1], 2]]), 12.0)
    assert machine.faults == {}


# One machine alone.


def alone() -> CoordinatorMachine:
    machine = CoordinatorMachine([Server("s1", "redis://s1")], 7, OPTIONS)
    machine.handle(Start(), 0.0)
    machine.handle(LinkUp("s1"), 0.0)
    return machine


def heard(machine: CoordinatorMachine, stamp: Stamp, report: BrokerReport) -> int:
    """Let it hear a report; return how many it has counted so far."""
    machine.handle(Pushed("s1", [[b"message", COORDINATOR_CHANNEL, pack_edge(stamp, report)]]), 0.1)
    return machine.counters["reports"]


REPORT = BrokerReport(
    broker="b1", url="wss://b1", capacity_bytes_per_s=10.0, load_bytes_per_s=1.0, inbound_bytes_per_s=1.0, users=1
)


def test_copies_and_overtaken_reports_do_not_count() -> None:
    machine = alone()
    assert heard(machine, Stamp(5, 3), REPORT) == 1
    assert heard(machine, Stamp(5, 3), REPORT) == 1
    assert heard(machine, Stamp(5, 2), replace(REPORT, users=9)) == 1
    assert heard(machine, Stamp(5, 4), REPORT) == 2
    assert heard(machine, Stamp(6, 1), REPORT) == 3, "a broker that was restarted"
    assert machine.counters["broker_restarts"] == 1 and COPIES == 2


def test_two_brokers_with_one_name_are_noted_once() -> None:
    machine = alone()
    notes: list[str] = []
    for number in range(1, 6):
        for incarnation in (5, 6):
            data = pack_edge(Stamp(incarnation, number), REPORT)
            actions = machine.handle(Pushed("s1", [[b"message", COORDINATOR_CHANNEL, data]]), 0.1)
            notes += [action.message for action in actions if isinstance(action, Noted)]
    first, second, third = notes
    assert (first, second) == ("a broker has begun to report", "a broker was restarted")
    assert third == "the name of a broker is ambiguous"


def test_what_cannot_be_read_is_counted() -> None:
    machine = alone()
    for data in (b"\xc1", b"", pack_control(AdminRequest(1, "x", {}))):
        machine.handle(Pushed("s1", [[b"message", COORDINATOR_CHANNEL, data]]), 0.1)
    machine.handle(Pushed("s1", [[b"message", OPERATOR_EDGE_CHANNEL, b"\xc1"]]), 0.1)
    assert machine.counters["malformed"] == 4
