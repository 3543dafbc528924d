"""Floods of what anybody may publish: memory is bounded in bytes, and work in actions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from dynamoth.machine.bounded import BoundedTable
from dynamoth.machine.events import Send
from dynamoth.names import ANNOUNCE_CHANNEL, RELAY_PREFIX, forward_channel, relay_channel, replica_channel
from dynamoth.plan.plan import Plan, single
from dynamoth.protocol.control import Announcement, ForwardRequest, pack_control
from dynamoth.protocol.envelope import CONTROL, HEARTBEAT, seal
from dynamoth_dispatcher.events import LOCAL
from dynamoth_dispatcher.options import DispatcherOptions, ForwarderOptions
from dynamoth_dispatcher.tables import Backlog, RawNumbers
from tests.machines.agent import Agent
from tests.machines.helpers import ACTIVE, PLAN_0, C, kept_bytes, only

MB = 1024 * 1024
NAME_BYTES = 2000
FLOOD = 10_000
"""Messages of ``NAME_BYTES`` each: 20 MB of names."""

SMALL = DispatcherOptions(
    names_bytes_max=MB,
    forwarder=ForwarderOptions(names_bytes_max=MB, relayed_bytes_max=MB, forwards_bytes_max=MB, forwards_max=10**6),
)


def names(prefix: bytes = b"") -> Iterable[bytes]:
    return (prefix + b"%d:" % number + b"x" * NAME_BYTES for number in range(FLOOD))


def observe_all(agent: Agent, messages: Iterable[tuple[bytes, bytes]]) -> None:
    for physical, data in messages:
        agent.observe(data, physical=physical)


def agent_at(plan: Plan | None = PLAN_0) -> Agent:
    agent = Agent("s1", SMALL)
    return agent if plan is None else agent.holding(plan)


def test_relay_names() -> None:
    agent = agent_at()
    data = seal(7, 1, 0, b"x")
    assert kept_bytes(lambda: observe_all(agent, ((relay_channel(name), data) for name in names()))) < 6 * MB
    assert agent.counters["relayed_evicted"] > FLOOD / 2


@pytest.mark.parametrize("what", ["quiet", "raw", "stale publishers"])
def test_channels(what: str) -> None:
    agent = agent_at()
    data = b"raw" if what == "raw" else seal(7, 1, 0, b"x")
    counter = {"quiet": "at_rest_evicted", "raw": "raw_channels_evicted", "stale publishers": "redirected_publishers"}
    flood = names(b"flood")
    assert kept_bytes(lambda: observe_all(agent, ((name, data) for name in flood))) < 12 * MB
    assert agent.counters[counter[what]] > 1000


def test_messages_that_wait_for_the_plan() -> None:
    agent = Agent("s1", SMALL)
    agent.up(LOCAL)
    assert kept_bytes(lambda: observe_all(agent, ((b"c", name) for name in names()))) < 6 * MB
    assert agent.counters["backlog_dropped"] > FLOOD / 2


def test_messages_that_wait_to_be_forwarded() -> None:
    """To a server that is away: the bytes are bounded, and subscribers learn how many are lost."""
    agent = agent_at()
    away = next(b"%d" % n for n in range(100) if PLAN_0.entry(b"%d" % n).route.assignment == single("s2"))
    payload = b"x" * NAME_BYTES

    def flood() -> None:
        for number in range(1, FLOOD):
            agent.observe(seal(7, number, 0, payload + b"%d" % number), physical=away)

    assert kept_bytes(flood) < 6 * MB
    assert agent.counters["forwards_lost"] > FLOOD / 2


def test_a_large_message_is_forwarded_where_nothing_waits() -> None:
    agent = agent_at()
    away = next(b"%d" % n for n in range(100) if PLAN_0.entry(b"%d" % n).route.assignment == single("s2"))
    agent.observe(seal(7, 1, 0, b"small"), physical=away)
    agent.answer(agent.connect("s2"))
    for number in (2, 3):
        actions = agent.observe(seal(7, number, 0, b"x" * 3 * MB), physical=away)
        assert [len(repr(send.args[-1])) > 3 * MB for send in only(Send, actions) if send.link != LOCAL] == [True]
        agent.answer(actions)
    assert agent.counters["forwards_lost"] == 0


def test_heartbeats_that_wait() -> None:
    agent = agent_at()

    def flood() -> None:
        for number, name in enumerate(names()):
            heartbeat = pack_control(ForwardRequest((("s2", seal(number, 1, 0, b"y" * NAME_BYTES, HEARTBEAT)),)))
            agent.observe(heartbeat, physical=forward_channel(replica_channel(name, 1)))

    assert kept_bytes(flood) < 12 * MB
    assert agent.counters["heartbeats_evicted"] > FLOOD / 2


def test_a_relay_of_a_relay_is_refused() -> None:
    agent = agent_at()
    data = seal(7, 1, 0, b"x")
    for name in (RELAY_PREFIX, RELAY_PREFIX * 2500, ANNOUNCE_CHANNEL, b"__dynamoth__:balancer:to-agent"):
        assert agent.observe(data, physical=RELAY_PREFIX + name) == []
        assert agent.observe(seal(0, 0, 0, b"", CONTROL), physical=RELAY_PREFIX + name) == []
    assert agent.counters["relays_refused"] == 8


def test_an_announcement_costs_no_more_than_the_servers_of_the_plan() -> None:
    agent = agent_at(ACTIVE)
    new = ACTIVE.entries[C].route.locations(C)[0]
    agent = Agent(new.server, SMALL).holding(ACTIVE)
    leaving = tuple(f"s{number}" for number in range(2000))
    joined = (new.physical,) * 2000
    announcement = pack_control(Announcement(7, 1, joined, (), leaving))
    markers = only(Send, agent.observe(announcement, physical=ANNOUNCE_CHANNEL))
    assert len(markers) <= len(ACTIVE.servers)


# The tables themselves.


def _value(_: str, value: int) -> int:
    return value


def test_a_table_is_bounded_in_entries_and_in_bytes() -> None:
    gone: list[Any] = []
    table: BoundedTable[str, int] = BoundedTable(3, 100, _value, lambda key, value: gone.append((key, value)))
    for key, value in (("a", 10), ("b", 20), ("c", 30)):
        table.put(key, value)
    table.put("a", 15)  # the newest now
    table.put("d", 5)
    assert (list(table), gone, table.size_bytes, table.evicted) == (["c", "a", "d"], [("b", 20)], 50, 1)
    table.put("e", 90)
    assert (list(table), table.size_bytes, table.evicted) == (["d", "e"], 95, 3)
    table.put("f", 101)
    assert (list(table), table.size_bytes, len(table)) == ([], 0, 0)
    table.put("g", 1)
    assert (table.get("g"), table.get("h"), "g" in table, table.pop("g"), table.pop("g")) == (1, None, True, 1, None)
    assert table.size_bytes == 0


def test_a_backlog_keeps_the_newest() -> None:
    backlog = Backlog(3, 10**6)
    assert [backlog.put(b"c", b"%d" % number) for number in range(5)] == [0, 0, 0, 1, 1]
    assert [backlog.take()[1] for _ in range(len(backlog))] == [b"2", b"3", b"4"]
    assert backlog.size_bytes == 0
    assert backlog.put(b"c", b"x" * 10**7) == 0, "one message is kept however large it is"
    assert backlog.put(b"c", b"y") == 1


def test_numbers_of_a_forgotten_channel_go_on_above_it() -> None:
    counters = agent_at().dispatcher.counters
    numbers = RawNumbers(1, 10**6, counters)
    assert [numbers.next(name) for name in (b"a", b"a", b"b", b"a")] == [(1, True), (2, False), (1, True), (3, True)]
