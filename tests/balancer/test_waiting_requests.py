"""Many requests of operators that come in one read: a few are handled in each event, and all are answered in order."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from dynamoth.machine.events import Pushed, Send, Tick
from dynamoth.names import BALANCER_LEASE_KEY, OPERATOR_CHANNEL, operator_inbox
from dynamoth.protocol.control import AdminRequest, pack_control
from dynamoth_balancer.admin.changes import Changes
from dynamoth_balancer.admin.waiting import PER_EVENT_MAX, WAITING_MAX
from dynamoth_balancer.options import BalancerOptions
from tests.balancer.cluster import Balancer, SimCluster, started

EVENT_S = 0.2
"""How long an event takes on a busy machine."""

OPTIONS = BalancerOptions(wait_s=4.0, averaging_s=3.0, channel_rest_s=5.0)


def _request(number: int, command: str, **arguments: Any) -> list[Any]:
    return [b"message", OPERATOR_CHANNEL, pack_control(AdminRequest(number, command, arguments))]


def _answered(actions: list[Any], numbers: range) -> list[int]:
    """Return the numbers of the requests that these actions answer, in order."""
    inboxes = {operator_inbox(number): number for number in numbers}
    sent = [action.args[1] for action in actions if isinstance(action, Send) and action.args[0] == b"PUBLISH"]
    return [inboxes[channel] for channel in sent if channel in inboxes]


def _events(balancer: Balancer, requests: list[list[Any]], begin: float) -> list[list[Any]]:
    """Hand a machine requests that come in one read; return the actions of each event until none waits."""
    machine, now = balancer.machine, begin
    events: list[list[Any]] = [list(machine.handle(Pushed("s1", requests), now))]
    while (deadline := machine.deadline()) is not None and deadline <= begin:
        now += EVENT_S
        events.append(list(machine.handle(Tick(), now)))
        assert len(events) < WAITING_MAX, "they end"
    return events


def test_requests_that_come_together_are_answered_in_order_and_the_lease_is_renewed_meanwhile() -> None:
    cluster, balancer = started(1)
    numbers = range(100, 100 + 10 * PER_EVENT_MAX)
    events = _events(balancer, [_request(number, "status") for number in numbers], cluster.now)
    answered = [_answered(actions, numbers) for actions in events]
    assert [number for some in answered for number in some] == list(numbers)
    assert max(map(len, answered)) == PER_EVENT_MAX
    prolong = (b"PEXPIRE", BALANCER_LEASE_KEY)
    renewed = [any(isinstance(each, Send) and each.args[:2] == prolong for each in actions) for actions in events]
    assert any(renewed[:-1]), "a renewal does not wait for the last request"


def test_a_request_for_a_change_costs_no_look_at_the_changes_that_are_under_way() -> None:
    cluster, balancer = started(2)
    channels = balancer.at_home("s1", PER_EVENT_MAX)
    requests = [_request(number, "move", channel=channel, to="s2") for number, channel in enumerate(channels)]
    with patch.object(Changes, "state", side_effect=Changes.state) as looks:
        balancer.machine.handle(Pushed("s1", requests), cluster.now)
    assert looks.call_count == len(requests)


def test_many_changes_that_are_asked_for_in_one_read_are_carried_out() -> None:
    cluster, balancer = started(2)
    channels = balancer.at_home("s1", 5 * PER_EVENT_MAX)
    requests = [_request(number, "move", channel=channel, to="s2") for number, channel in enumerate(channels)]
    balancer.process.handle(Pushed("s1", requests))
    cluster.run_until(lambda: len(cluster.servers["s1"].replies) == len(channels))
    assert all(reply.error is None for reply in cluster.servers["s1"].replies)
    assert all(balancer.home(channel) == "s2" for channel in channels)


def test_a_request_that_is_repeated_while_it_waits_is_handled_once() -> None:
    cluster, balancer = started(1)
    numbers = range(100, 100 + 2 * PER_EVENT_MAX)
    requests = [_request(number, "status") for number in numbers]
    events = _events(balancer, [*requests, *requests], cluster.now)
    assert [number for actions in events for number in _answered(actions, numbers)] == list(numbers)


def test_the_requests_that_wait_are_bounded_and_an_operator_repeats_the_others() -> None:
    cluster, balancer = started(1)
    numbers = range(100, 100 + WAITING_MAX + 5)
    requests = [_request(number, "status") for number in numbers]
    events = _events(balancer, requests, cluster.now)
    assert sum(len(_answered(actions, numbers)) for actions in events) == WAITING_MAX
    assert balancer.machine.counters["requests_dropped"] == 5
    [answers] = _events(balancer, requests[-5:], cluster.now)
    assert _answered(answers, numbers) == list(numbers)[-5:]


def test_a_balancer_that_loses_its_lease_drops_the_changes_that_wait() -> None:
    cluster, balancer = started(1)
    requests = [_request(number, "pause") for number in range(2 * PER_EVENT_MAX)]
    machine = balancer.machine
    machine.handle(Pushed("s1", requests), cluster.now)
    assert machine.overview.paused
    handled, later = machine.counters["requests"], cluster.now + 2 * machine.options.lease_s
    for _ in range(2):  # the first one only looks after the lease
        machine.handle(Tick(), later)
    assert machine.counters["requests"] == handled == PER_EVENT_MAX
    assert (machine.deadline() or 0.0) > cluster.now, "none waits"


def test_a_server_is_removed_and_the_status_asked_for_in_one_read() -> None:
    cluster, balancer = started(3, OPTIONS)
    assert cluster.ask("server", {"action": "drain", "server": "s1"}, server="s2").error is None
    cluster.run_until(lambda: _has_nothing_left(cluster, "s1"), timeout_s=300)
    cluster.run_until(lambda: cluster.is_quiet(balancer))
    remove = _request(1, "server", action="remove", server="s1")
    balancer.process.handle(Pushed("s2", [remove, _request(2, "status")]))
    cluster.run_until(lambda: {1, 2} <= {reply.request for reply in cluster.servers["s2"].replies})
    status = next(reply for reply in cluster.servers["s2"].replies if reply.request == 2)
    assert set(status.result["servers"]) == {"s2", "s3"}


def _has_nothing_left(cluster: SimCluster, server: str) -> bool:
    status = cluster.ask("status", server="s2").result["servers"][server]
    return (status["channels_left"], status["slots_left"]) == (0, 0)
