"""Where a dispatcher sends what it observes, and whom it tells."""

from __future__ import annotations

from time import process_time
from typing import Any

import pytest

from dynamoth.machine.bounded import ENTRY_BYTES
from dynamoth.machine.events import Connect, ErrorReply, Pushed
from dynamoth.names import AGENT_CHANNEL, CLIENTS_CHANNEL, inbox
from dynamoth.plan.plan import Plan, Route, single
from dynamoth.protocol.control import LossNotice, ObservationGap, RouteNotice, pack_control, unpack_control
from dynamoth.protocol.envelope import (
    CONTROL,
    FIRST,
    FORWARDED,
    HEARTBEAT,
    ROUTE_CHANGED,
    Envelope,
    forwarded,
    open_envelope,
)
from dynamoth_dispatcher.events import LOCAL
from dynamoth_dispatcher.options import DispatcherOptions, ForwarderOptions
from tests.machines.agent import Agent, copies
from tests.machines.helpers import ACTIVE, PLAN_0, PREPARED, SETTLED, URLS, C, channel_at, message, published

ALL = ("s1", "s2", "s3")
FAR = SETTLED.begin({C: single("s3")})
OTHER = channel_at("s1", 1)
FAR_ACTIVE = FAR.activate([C])
FAR_SETTLED = FAR_ACTIVE.settle([C])


def agent(server: str, plan: Plan, options: DispatcherOptions | None = None) -> Agent:
    return Agent(server, options).holding(plan)


def targets(of: Agent, data: bytes, physical: bytes = C) -> list[str]:
    """Return the servers to which one message is forwarded."""
    actions = [*of.observe(data, physical=physical), *of.connect_all()]
    return [server for server in ALL if copies(actions, server, physical)]


# Which messages go where.


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (PLAN_0, {"s1": [], "s2": ["s1"], "s3": ["s1"]}),
        (PREPARED, {"s1": ["s2"], "s2": ["s1"], "s3": ["s1"]}),
        (ACTIVE, {"s1": ["s2"], "s2": ["s1"], "s3": ["s2"]}),
        (SETTLED, {"s1": ["s2"], "s2": [], "s3": ["s2"]}),
        (FAR, {"s1": ["s2"], "s2": ["s3"], "s3": ["s2"]}),
        (FAR_SETTLED, {"s1": ["s3"], "s2": ["s3"], "s3": []}),
    ],
    ids=["plan 0", "prepared", "active", "settled", "second move", "second move settled"],
)
def test_an_unforwarded_message_goes_where_a_follower_may_listen_or_to_who_knows(
    plan: Plan, expected: dict[str, list[str]]
) -> None:
    """Only old and new servers forward between themselves; a third one sends to where clients should be."""
    assert {server: targets(agent(server, plan), message(1)) for server in ALL} == expected


@pytest.mark.parametrize("index", [0, 3, 7])
def test_among_messages_of_channels_at_rest_the_one_that_needs_more_is_found(index: int) -> None:
    dispatcher = agent("s2", PREPARED)
    at_rest = channel_at("s2")
    names = [at_rest] * 8
    names[index] = C
    pushes = [[b"pmessage", b"*", name, message(number)] for number, name in enumerate(names, 1)]
    first = [*dispatcher.tell(Pushed(LOCAL, pushes)), *dispatcher.connect("s1")]
    dispatcher.answer(first)
    second = dispatcher.tell(Pushed(LOCAL, pushes))  # the others are known to be at rest by now
    for actions in (first, second):
        assert [open_envelope(copy).sequence for copy in copies(actions, "s1")] == [index + 1]


@pytest.mark.parametrize("physical", [AGENT_CHANNEL, inbox(7), b"__keyspace@0__:x"])
def test_messages_that_are_no_users_are_left_alone(physical: bytes) -> None:
    actions = agent("s2", PLAN_0).observe(message(1), physical=physical)
    assert [action for action in actions if action.tag != ("leave",)] == [], "notifications are left out from now on"


@pytest.mark.parametrize(("after_s", "flags"), [(0.0, FORWARDED | ROUTE_CHANGED), (5.1, FORWARDED)])
def test_copies_say_that_the_route_changed_for_a_while(after_s: float, flags: int) -> None:
    """Subscribers that meet a publisher would else wait for nothing, half a second each, until the next change."""
    dispatcher = Agent("s1", DispatcherOptions(route_change_window_s=5)).holding(PLAN_0)
    dispatcher.change(PLAN_0, PREPARED)
    dispatcher.connect("s2")
    dispatcher.pass_time(after_s)
    [copy] = copies(dispatcher.observe(message(5, flags=FIRST)), "s2")
    assert open_envelope(copy) == Envelope(FIRST | flags, 7, 5, 1, b"m5")


def test_copies_say_so_too_when_the_change_was_read_whole() -> None:
    dispatcher = agent("s1", PLAN_0)
    dispatcher.change(PREPARED, ACTIVE)
    dispatcher.read(ACTIVE)
    loss, copy = copies([*dispatcher.observe(message(1)), *dispatcher.connect("s2")], "s2")
    assert open_envelope(loss).flags == CONTROL, "it has not seen the change begin"
    assert open_envelope(copy).flags == FORWARDED | ROUTE_CHANGED


# Raw messages.


def test_dispatchers_number_raw_messages_as_publishers_of_their_own() -> None:
    def number(server: str) -> int:
        dispatcher = agent(server, SETTLED)
        [copy] = copies([*dispatcher.observe(b"one"), *dispatcher.connect("s2")], "s2")
        return open_envelope(copy).publisher

    assert number("s1") != number("s3")


def test_forgotten_raw_channels_begin_again_above_their_past() -> None:
    dispatcher = agent("s2", PLAN_0, DispatcherOptions(raw_channels_max=1))
    other = channel_at("s1", 1)
    dispatcher.observe(b"1", b"2", b"3")
    dispatcher.observe(b"1", physical=other)
    dispatcher.observe(b"4")
    sequences = [open_envelope(copy).sequence for copy in copies(dispatcher.connect("s1"), "s1")]
    assert sequences[:3] == [1, 2, 3]
    assert sequences[3] > 3


# Telling publishers.


def notices(actions: list[Any], publisher: int = 7) -> list[Any]:
    return [unpack_control(data) for data in published(actions, inbox(publisher), LOCAL)]


TOLD = [RouteNotice(C, Route(1, single("s2")))]


@pytest.mark.parametrize(
    ("server", "plan", "expected"),
    [("s1", PREPARED, []), ("s1", ACTIVE, TOLD), ("s1", SETTLED, TOLD), ("s2", ACTIVE, []), ("s3", SETTLED, TOLD)],
)
def test_a_publisher_hears_where_a_channel_is_unless_it_is_there(server: str, plan: Plan, expected: list[Any]) -> None:
    dispatcher = agent(server, plan)
    for data in (forwarded(message(1), 0), message(1, flags=HEARTBEAT), b"raw"):
        assert notices(dispatcher.observe(data)) == [], "nobody is notified because of that"
    assert dispatcher.counters["malformed_messages"] == 0
    assert notices(dispatcher.observe(message(1, epoch=9))) == expected, "even if it knows more: the plan may be lost"


def test_a_publisher_is_notified_once_per_channel_and_epoch_and_again_after_a_while() -> None:
    """Case 19: no redirect storms at an overloaded server."""
    dispatcher = agent("s1", SETTLED, DispatcherOptions(renotify_s=1))
    assert notices(dispatcher.observe(*map(message, range(1, 100)))) == TOLD
    assert notices(dispatcher.observe(message(1, publisher=8)), 8) == TOLD
    dispatcher.pass_time(0.9)
    assert notices(dispatcher.observe(message(2))) == []
    dispatcher.pass_time(0.2)
    assert notices(dispatcher.observe(message(3))) == TOLD
    dispatcher.change(SETTLED, FAR)
    dispatcher.change(FAR, FAR_ACTIVE)
    assert notices(dispatcher.observe(message(4))) == [RouteNotice(C, Route(4, single("s3")))]


def test_heartbeats_are_forwarded_and_control_messages_of_others_are_not() -> None:
    assert targets(agent("s1", SETTLED), message(4, b"", flags=HEARTBEAT)) == ["s2"]
    notice = message(0, pack_control(RouteNotice(C, Route(9, single("s3")))), flags=CONTROL)
    assert agent("s1", ACTIVE).observe(notice) == []


# Bounds.


@pytest.mark.parametrize("names_bytes", [2 * (len(C) + ENTRY_BYTES), len(C) + ENTRY_BYTES], ids=["count", "bytes"])
def test_a_full_outbox_costs_messages_and_says_so(names_bytes: int) -> None:
    """The losses at one location are counted; past that, publishers send heartbeats."""
    bounds = ForwarderOptions(forwards_max=2, lost_max=1, names_bytes_max=names_bytes)
    plan = SETTLED.begin({OTHER: single("s2")}).activate([OTHER])
    dispatcher = agent("s1", plan, DispatcherOptions(forwarder=bounds))
    dispatcher.observe(*map(message, range(1, 6)))
    dispatcher.observe(message(1), physical=OTHER)
    assert dispatcher.counters["forwards_lost"] == 4
    sent = dispatcher.connect("s2")
    assert [open_envelope(copy).sequence for copy in copies(sent, "s2")] == [1, 2]
    actions = dispatcher.answer(sent)
    assert unpack_control(open_envelope(copies(actions, "s2")[0]).payload) == LossNotice(C, 3)
    assert copies(actions, "s2", OTHER) == []
    assert published(actions, CLIENTS_CHANNEL) == [pack_control(ObservationGap("s1"))]


def test_refused_forwards_are_counted() -> None:
    dispatcher = agent("s1", SETTLED)
    dispatcher.observe(message(1))
    dispatcher.answer(dispatcher.connect("s2"), ErrorReply("NOPERM no"))
    assert dispatcher.counters["forwards_refused"] == 1
    assert dispatcher.dispatcher.forwarder.refusals == {"s2": "NOPERM no"}
    dispatcher.down("to:s2")
    dispatcher.connect("s2")
    assert dispatcher.dispatcher.forwarder.refusals == {}


def test_telling_of_many_lost_channels_costs_the_same_for_each() -> None:
    """While one server is down, the replies of every other one must stay cheap."""

    def cost_s(channels: int) -> float:
        dispatcher = agent("s3", PLAN_0, DispatcherOptions(forwarder=ForwarderOptions(forwards_max=1)))
        names = [channel for channel in map(b"%d".__mod__, range(4 * channels)) if PLAN_0.ring.home(channel) == "s1"]
        for name in names[:channels]:
            dispatcher.observe(message(1), physical=name)
        actions = dispatcher.connect("s1")
        started = process_time()
        while actions := dispatcher.answer(actions):
            pass
        return process_time() - started

    few, many = (min(cost_s(size) for _ in range(3)) for size in (500, 8000))
    assert many < 16 * few * 3, f"16 times the channels cost {many / few:.0f} times as much"


def test_links_are_opened_before_the_first_message_needs_them() -> None:
    dispatcher = agent("s1", PLAN_0)
    assert Connect("to:s2", URLS["s2"]) in dispatcher.change(PLAN_0, PREPARED)
