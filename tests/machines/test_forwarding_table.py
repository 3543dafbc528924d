"""What a dispatcher remembers of the ways of messages: it does what it would do without a memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dynamoth.machine.events import Send, SendAll
from dynamoth.names import replica_channel
from dynamoth.plan.plan import Assignment, Entry, Mode, Phase, Plan, single
from dynamoth.protocol.envelope import FORWARDED, HEARTBEAT, ROUTE_CHANGED, seal
from dynamoth_dispatcher.events import LOCAL
from dynamoth_dispatcher.forwarding_table import Forwarding, ForwardingTable
from dynamoth_dispatcher.options import DispatcherOptions
from tests.machines.agent import Agent
from tests.machines.helpers import PLAN_0, C, channel_at

CHANNELS = (C, channel_at("s2"))
ASSIGNMENTS = (
    *map(single, ("s1", "s2", "s3")),
    Assignment(Mode.ALL_SUBSCRIBERS, ("s1", "s2")),
    Assignment(Mode.ALL_PUBLISHERS, ("s1", "s3")),
    Assignment(Mode.ALL_PUBLISHERS, ("s2", "s3")),
)
PUBLISHERS = (7, 8)
EPOCHS_MAX = 9

steps = st.one_of(
    st.tuples(st.just("change"), st.integers(0, 1), st.sampled_from(ASSIGNMENTS)),
    st.tuples(
        st.just("publish"),
        st.integers(0, 1),
        st.integers(0, EPOCHS_MAX),
        st.integers(0, EPOCHS_MAX),
        st.sampled_from([None, 0, FORWARDED, FORWARDED | ROUTE_CHANGED, HEARTBEAT]),
        st.sampled_from(PUBLISHERS),
    ),
)


def next_plan(plan: Plan, channel: bytes, assignment: Assignment) -> Plan:
    """Return what the balancer stores next for a channel: the next phase, or the beginning of a change."""
    phase = plan.entry(channel).phase
    if phase is Phase.PREPARED:
        return plan.activate([channel])
    if phase is Phase.ACTIVE:
        return plan.settle([channel])
    return plan if plan.entry(channel).route.assignment == assignment else plan.begin({channel: assignment})


def done(actions: Iterable[Any]) -> list[Any]:
    """Return actions as they can be compared: the tags are objects of the one dispatcher or the other."""
    return [
        (action.link, action.args if isinstance(action, Send) else tuple(action.commands))
        if isinstance(action, (Send, SendAll))
        else action
        for action in actions
    ]


@given(st.lists(steps, max_size=40), st.sampled_from(["s1", "s2"]))
def test_what_is_remembered_changes_nothing(script: Sequence[tuple[object, ...]], server: str) -> None:
    remembers, forgets = (Agent(server, DispatcherOptions(forwardings_max=bound)).holding(PLAN_0) for bound in (3, 0))
    plan = PLAN_0
    connected = {LOCAL}
    for number, step in enumerate(script):
        match step:
            case ("change", int(index), Assignment() as assignment):
                newer = next_plan(plan, CHANNELS[index], assignment)
                if newer is not plan:
                    assert done(remembers.change(plan, newer)) == done(forgets.change(plan, newer))
                plan = newer
            case ("publish", int(index), int(name_epoch), int(epoch), flags, int(publisher)):
                channel = CHANNELS[index]
                physical = replica_channel(channel, name_epoch) if name_epoch else channel
                data = b"raw" if not isinstance(flags, int) else seal(publisher, number + 1, epoch, b"x", flags)
                one, other = (agent.observe(data, physical=physical) for agent in (remembers, forgets))
                assert done(one) == done(other)
                assert done(remembers.send_later()) == done(forgets.send_later())
            case _:
                raise AssertionError(step)
        for link in set(remembers.links) - connected:
            assert done(remembers.up(link)) == done(forgets.up(link))
            connected.add(link)
    assert remembers.counters == forgets.counters


ENTRY = PLAN_0.begin({C: single("s2")}).activate([C]).entry(C)


def find(ways: ForwardingTable, physical: bytes = C, entry: Entry = ENTRY) -> Forwarding:
    return ways.find(C, physical, entry, None)


def test_no_more_ways_are_remembered_than_the_bound() -> None:
    ways = ForwardingTable("s1", 5, bound=2, names_bytes_max=10_000)
    kept = find(ways)
    assert ([place.server for place in kept.forwarded], bool(kept.stale)) == (["s2"], True)
    assert find(ways) is kept, "it is decided once"
    find(ways, b"a")
    assert ways.has(C, C)
    find(ways, b"b")
    assert not ways.has(C, C), "all were forgotten"
    assert ways.has(C, b"b")
    ways.forget(C)
    find(ways, b"a")
    find(ways, b"b")
    assert ways.has(C, b"a"), "what is forgotten makes room"
    assert find(ways) == kept
