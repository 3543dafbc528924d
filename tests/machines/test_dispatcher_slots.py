"""Slots at a dispatcher: their channels are forwarded, noticed and vacated together; losses come before markers."""

from __future__ import annotations

from typing import Any

from dynamoth.machine.events import ErrorReply, Replied, Tick
from dynamoth.names import BALANCER_CHANNEL, RELAY_PREFIX
from dynamoth.plan.plan import single
from dynamoth.plan.slots import slot_of
from dynamoth.protocol.control import LossNotice, Marker, RouteNotice, Vacated, unpack_control
from dynamoth.protocol.envelope import open_envelope
from dynamoth_dispatcher.events import LOCAL
from dynamoth_dispatcher.options import TransitionOptions
from tests.machines.agent import INCARNATION, Agent, copies, marks
from tests.machines.helpers import PLAN_0, C, commands, message, phases, published, tagged

PACE = TransitionOptions()
SLOT = slot_of(C)
PREPARED, ACTIVE, SETTLED = phases(PLAN_0, single("s2"), SLOT)
LISTED_S = PACE.settle_after_s + PACE.list_interval_s + 2 * PACE.tick_interval_s
"""After this time since its activation, the next list may show a slot as vacated."""


def controls(actions: list[Any], server: str) -> list[Any]:
    """Return the control messages to the listeners of C at another server, and the markers to a subscriber there."""
    at_c = [unpack_control(open_envelope(data).payload) for data in copies(actions, server)]
    return [*at_c, *(mark for link, mark in marks(actions) if link == f"to:{server}")]


def listing(agent: Agent, actions: list[Any], *channels: bytes) -> list[Any]:
    """Answer PUBSUB CHANNELS, which must have been asked for."""
    asked = [send for tag in ("list", "slot-listeners") for send in tagged(actions, tag)]
    assert asked
    return [action for send in asked for action in agent.tell(Replied(LOCAL, send.tag, [*channels]))]


def blinded(agent: Agent) -> list[Any]:
    """Cut the agent off from its server, and connect it again."""
    agent.down(LOCAL)
    agent.up(LOCAL)
    return agent.read(ACTIVE)


def test_prepared_messages_are_forwarded_both_ways_and_nobody_gets_a_notice() -> None:
    for server, other in (("s1", "s2"), ("s2", "s1")):
        agent = Agent(server).holding(PREPARED, other)
        actions = agent.observe(message(1))
        assert len(copies(actions, other)) == 1
        assert tagged(agent.pass_time(LISTED_S), "list") == [] and published(actions, C, LOCAL) == []


def test_active_listeners_on_the_list_get_the_new_route() -> None:
    agent = Agent("s1").holding(ACTIVE)
    actions = listing(agent, agent.pass_time(LISTED_S), C)
    notices = [unpack_control(open_envelope(data).payload) for data in published(actions, C, LOCAL)]
    assert notices == [RouteNotice(C, ACTIVE.entry(SLOT).route)]
    assert published(actions, BALANCER_CHANNEL, LOCAL) == [], "somebody listens"


def test_a_slot_without_listeners_is_vacated_whoever_listens_to_others() -> None:
    agent = Agent("s1").holding(ACTIVE)
    early = listing(agent, agent.pass_time(PACE.list_interval_s), b"another")
    assert published(early, BALANCER_CHANNEL, LOCAL) == [], "publishers may not have read the plan yet"
    actions = listing(agent, agent.pass_time(LISTED_S), b"another")
    vacated = [Vacated("s1", ((SLOT, 1),), INCARNATION)]
    assert [unpack_control(data) for data in published(actions, BALANCER_CHANNEL, LOCAL)] == vacated
    again = agent.pass_time(PACE.vacated_interval_s + PACE.list_interval_s)
    assert tagged(again, "list") == [], "one list proves it"
    assert [unpack_control(data) for data in published(again, BALANCER_CHANNEL, LOCAL)][:1] == vacated


def test_only_listed_channels_are_asked_for_until_nobody_listens_and_then_a_list_proves_it() -> None:
    agent = Agent("s1").holding(ACTIVE)
    listing(agent, agent.pass_time(PACE.list_interval_s), C, b"another")
    for listeners in (2, 0):
        actions = agent.pass_time(PACE.list_interval_s + PACE.tick_interval_s)
        assert tagged(actions, "list") == []
        [asked] = tagged(actions, "members")
        assert asked.args == (b"PUBSUB", b"NUMSUB", C)
        actions = agent.tell(Replied(LOCAL, asked.tag, [C, listeners]))
        assert len(published(actions, C, LOCAL)) == (1 if listeners else 0), "a notice for those who still listen"
        assert published(actions, BALANCER_CHANNEL, LOCAL) == []
    actions = listing(agent, agent.pass_time(LISTED_S), b"another")
    assert [type(unpack_control(data)) for data in published(actions, BALANCER_CHANNEL, LOCAL)] == [Vacated]


def test_a_numsub_that_is_refused_forgets_nobody() -> None:
    agent = Agent("s1").holding(ACTIVE)
    listing(agent, agent.pass_time(PACE.list_interval_s), C)
    for _ in range(2):
        [asked] = tagged(agent.pass_time(PACE.list_interval_s + PACE.tick_interval_s), "members")
        assert agent.tell(Replied(LOCAL, asked.tag, ErrorReply("NOPERM no"))) == []


def test_a_list_that_is_refused_vacates_nothing_and_is_asked_for_again() -> None:
    agent = Agent("s1").holding(ACTIVE)
    for send in tagged(agent.pass_time(LISTED_S), "list"):
        assert agent.tell(Replied(LOCAL, send.tag, ErrorReply("NOPERM no"))) == []
    assert agent.counters["refused_commands"] == 1
    assert tagged(agent.pass_time(LISTED_S), "list") != []


def test_settled_a_stale_message_is_forwarded_and_nothing_is_listed() -> None:
    agent = Agent("s1").holding(SETTLED)
    agent.observe(message(1))
    assert len(copies(agent.connect_all(), "s2")) == 1
    assert tagged(agent.pass_time(LISTED_S), "list") == []


def test_who_joins_a_channel_of_the_slot_is_sent_a_marker() -> None:
    agent = Agent("s2").holding(PREPARED, "s1")
    agent.change(PREPARED, ACTIVE)
    agent.announce(C)  # nothing was observed before the start: a loss
    assert controls(agent.announce(C, number=2), "s1") == [Marker(C, "s2", 2)]


def test_a_loss_reaches_the_listeners_of_a_channel_before_its_next_marker() -> None:
    agent = Agent("s2").holding(ACTIVE, "s1")
    relayed = commands(blinded(agent), b"PUBLISH", "to:s1")
    assert RELAY_PREFIX + SLOT in [channel for channel, *_ in relayed], "its dispatcher lists who listens"
    assert controls(agent.announce(C), "s1") == [LossNotice(C, None), Marker(C, "s2", 1)]
    assert controls(agent.announce(C), "s1") == [Marker(C, "s2", 1)], "they know"
    blinded(agent)
    assert controls(agent.announce(C), "s1") == [LossNotice(C, None), Marker(C, "s2", 1)], "another loss"


def test_losses_of_one_move_are_not_those_of_the_next() -> None:
    agent = Agent("s2").holding(ACTIVE, "s1")
    blinded(agent)
    agent.change(ACTIVE, SETTLED)
    back = phases(SETTLED, single("s1"), SLOT)
    again = phases(back[-1], single("s2"), SLOT)[:2]
    plan = SETTLED
    for newer in (*back, *again):
        agent.change(plan, newer)
        plan = newer
    assert controls(agent.announce(C), "s1") == [Marker(C, "s2", 1)]


def test_a_loss_before_the_slot_is_active_is_not_forgotten() -> None:
    agent = Agent("s2").holding(PREPARED, "s1")
    agent.change(PREPARED, ACTIVE)
    assert controls(agent.announce(C), "s1") == [LossNotice(C, None), Marker(C, "s2", 1)]


def test_a_dispatcher_hands_the_loss_of_a_slot_to_its_listeners() -> None:
    agent = Agent("s1").holding(ACTIVE)
    asked = agent.observe(b"", physical=RELAY_PREFIX + SLOT)
    actions = listing(agent, asked, C, b"another")
    assert [unpack_control(open_envelope(data).payload) for data in published(actions, C, LOCAL)] == [
        LossNotice(C, None)
    ]
    assert published(actions, b"another", LOCAL) == []


def test_an_agent_asks_nothing_while_its_link_is_down_and_asks_again_when_it_is_back() -> None:
    agent = Agent("s1").holding(ACTIVE)
    agent.down(LOCAL)
    agent.now += LISTED_S
    assert agent.tell(Tick()) == [], "a question would stay unanswered"
    agent.up(LOCAL)
    agent.read(ACTIVE)
    assert tagged(agent.pass_time(LISTED_S), "list"), "no answer is outstanding"
