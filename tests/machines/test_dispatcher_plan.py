"""How a dispatcher learns the plan, what it acknowledges, and how it accompanies a transition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dynamoth.machine.events import Connect, ErrorReply, Pushed, Replied, Send
from dynamoth.names import AGENT_CHANNEL, ANNOUNCE_CHANNEL, BALANCER_CHANNEL, CLIENTS_CHANNEL, replica_channel
from dynamoth.plan.plan import EPOCH_MAX, Entry, Phase, Plan, PlanDelta, Route, single
from dynamoth.protocol.control import (
    LossNotice,
    Marker,
    ObservationGap,
    PlanAck,
    PlanChange,
    PlanQuery,
    RouteNotice,
    Vacated,
    pack_control,
    unpack_control,
)
from dynamoth.protocol.envelope import CONTROL, open_envelope
from dynamoth.protocol.stored_plan import READ_WHOLE, VERSION_READ_INTERVAL_S
from dynamoth_dispatcher.events import LOCAL
from dynamoth_dispatcher.forwarder import forward_link
from dynamoth_dispatcher.options import DispatcherOptions, ForwarderOptions, TransitionOptions
from tests.machines.agent import INCARNATION, Agent, copies, marks
from tests.machines.helpers import (
    ACTIVE,
    GROWN,
    PLAN_0,
    PREPARED,
    SETTLED,
    TO_S4,
    C,
    channel_at,
    commands,
    message,
    only,
    phases,
    published,
    reply,
    tagged,
    whole_reply,
)

PACE = TransitionOptions()
POLLED_S = PACE.settle_after_s + 2 * PACE.tick_interval_s
"""Within this after its activation an old location is asked about."""
READ = Send(LOCAL, READ_WHOLE, ("plan",))


def told_balancer(actions: list[Any]) -> list[Any]:
    return [unpack_control(data) for data in published(actions, BALANCER_CHANNEL, LOCAL)]


def ack(version: int, server: str = "s1") -> PlanAck:
    return PlanAck(server, INCARNATION, version)


def said(actions: list[Any], link: str = LOCAL, physical: bytes = C) -> list[Any]:
    """Return the control messages that are published on the channel."""
    envelopes = [open_envelope(data) for data in published(actions, physical, link)]
    return [unpack_control(envelope.payload) for envelope in envelopes if envelope.flags & CONTROL]


# Learning the plan.


def test_notifies_subscribers_here_when_the_plan_has_lost_what_brought_them_here() -> None:
    """All servers have lost their copies while no balancer was at work, and a balancer has begun a new plan."""
    agent = Agent("s2").holding(SETTLED)
    assert asked_who_listens(agent.read(SETTLED)) == []
    [ask] = asked_who_listens(agent.read(PLAN_0.with_entries({}, SETTLED.version + 1000)))
    listened = [C, channel_at("s2", 1), AGENT_CHANNEL]
    got = agent.tell(reply(ask, listened))
    assert said(got) == [LossNotice(C, None)] and len(got) == 1


def test_notifies_subscribers_here_when_the_plan_was_begun_anew_with_another_ring() -> None:
    agent = Agent("s1").holding(PLAN_0)
    [ask] = asked_who_listens(agent.read(replace(PLAN_0, version=1000, base=("s2",))))
    assert said(agent.tell(reply(ask, [C]))) == [LossNotice(C, None)]
    assert agent.tell(reply(ask, ErrorReply("NOPERM"))) == []


def test_a_loss_is_reported_to_a_server_that_was_added_while_the_channel_moved_there() -> None:
    """Its server counted as dead meanwhile: it learns of both at once, from the whole plan or from one change."""
    moved = GROWN.with_entries({C: Entry(TO_S4, Phase.SETTLED, ())}, 4)
    read, changed = Agent("s1").holding(PLAN_0), Agent("s1").holding(PLAN_0)
    for actions in (read.read(moved), changed.change(PLAN_0, moved)):
        assert [connect.link for connect in only(Connect, actions)] == [forward_link("s4")]
    for agent in (read, changed):
        assert said(agent.up(forward_link("s4")), forward_link("s4")) == [LossNotice(C, None)]


def test_notifies_nobody_who_is_right_in_the_plan_that_has_lost_entries() -> None:
    agent = Agent("s1").holding(SETTLED)
    assert asked_who_listens(agent.read(PLAN_0.with_entries({}, SETTLED.version + 1000))) == []


def test_what_went_on_without_an_agent_is_reported_here_and_there() -> None:
    """Its server counted as dead: the channel has left, and messages may have been published here since."""
    agent = Agent("s1").holding(PLAN_0)
    [ask] = asked_who_listens(agent.change(PLAN_0, SETTLED))
    assert said(agent.connect("s2"), forward_link("s2")) == [LossNotice(C, None)]
    assert said(agent.tell(reply(ask, [C]))) == [LossNotice(C, None)]


def asked_who_listens(actions: list[Any]) -> list[Send]:
    return [send for send in only(Send, actions) if send.args == (b"PUBSUB", b"CHANNELS")]


@pytest.mark.parametrize(
    ("stored", "counter"),
    [
        ({}, None),
        (whole_reply(ACTIVE, "an earlier process"), None),
        (ErrorReply("LOADING"), "refused_commands"),
        ({b"@version": b"1", b"@run": b"", b"@cluster": b"\xc1"}, "malformed_plans"),
        (None, "malformed_plans"),
        (b"text", "malformed_plans"),
    ],
    ids=["none", "of an earlier process", "loading", "malformed", "nil", "text"],
)
def test_reads_again_after_what_is_no_plan(stored: Any, counter: str | None) -> None:
    agent = Agent(options=DispatcherOptions(plan_retry_s=0.5))
    agent.up(LOCAL)
    assert agent.change(PLAN_0, PREPARED) == [], "not acknowledged before the first plan"
    assert agent.tell(Replied(LOCAL, ("plan",), stored)) == []
    assert counter is None or agent.counters[counter] == 1
    assert agent.dispatcher.plan is None
    assert agent.pass_time(0.4) == []
    assert agent.pass_time(0.2) == [READ]
    assert told_balancer(agent.read(PLAN_0)) == [ack(0)]


def test_what_was_observed_before_the_plan_is_forwarded_after_it_and_what_was_too_much_is_reported() -> None:
    agent = Agent(options=DispatcherOptions(backlog_max=2))
    agent.up(LOCAL)
    assert agent.observe(*map(message, range(1, 5))) == []
    assert agent.counters["backlog_dropped"] == 2
    actions = [*agent.read(SETTLED), *agent.connect("s2")]
    assert [open_envelope(copy).sequence for copy in copies(actions, "s2")] == [3, 4]
    assert published(actions, CLIENTS_CHANNEL) == [pack_control(ObservationGap("s1"))]


# Changes.


def test_acts_on_a_change_and_acknowledges_it() -> None:
    agent = Agent().holding(PLAN_0)
    for older, newer in ((PLAN_0, PREPARED), (PREPARED, ACTIVE), (ACTIVE, SETTLED)):
        assert told_balancer(agent.change(older, newer)) == [ack(newer.version)]
        assert agent.dispatcher.plan == newer


def test_an_older_change_or_plan_or_none_does_not_replace_a_newer_one() -> None:
    agent = Agent().holding(ACTIVE)
    assert told_balancer(agent.change(PLAN_0, PREPARED)) == [ack(2)], "acknowledged again"
    agent.hear(PlanQuery(99))
    assert told_balancer(agent.read(PREPARED)) == [ack(2)]
    agent.down(LOCAL)
    agent.up(LOCAL)
    agent.read(None)
    assert agent.dispatcher.plan == ACTIVE
    assert copies([*agent.observe(message(1)), *agent.connect("s2")], "s2")


def test_a_change_that_does_not_fit_makes_it_read_the_whole_plan() -> None:
    agent = Agent().holding(PLAN_0)
    assert agent.change(PREPARED, ACTIVE) == [READ]
    assert agent.dispatcher.plan == PLAN_0
    assert agent.change(ACTIVE, SETTLED) == []
    assert told_balancer(agent.read(SETTLED)) == [ack(3)]


def test_answers_the_balancers_question_or_reads() -> None:
    agent = Agent().holding(PREPARED)
    assert told_balancer(agent.hear(PlanQuery(1))) == [ack(1)]
    assert agent.hear(PlanQuery(2)) == [READ]
    assert told_balancer(agent.read(ACTIVE)) == [ack(2)]


def test_a_doubtful_plan_is_read_again_and_listeners_in_the_wrong_place_verify_again() -> None:
    """Somebody has changed the copy, and the balancer has written it again: the agent may know the right plan only."""
    agent = Agent("s1").holding(SETTLED)
    assert agent.hear(PlanQuery(SETTLED.version, is_doubtful=True)) == [READ]
    actions = agent.read(SETTLED)
    assert told_balancer(actions) == [ack(SETTLED.version)]
    [ask] = asked_who_listens(actions)
    assert said(agent.tell(reply(ask, [C]))) == [LossNotice(C, None)]
    assert asked_who_listens(agent.hear(PlanQuery(SETTLED.version))) == [], "once"


def test_a_forged_plan_that_was_read_gives_way_to_the_one_that_the_balancer_doubts_no_more() -> None:
    agent = Agent("s1").holding(replace(SETTLED, version=SETTLED.version + 5))
    agent.hear(PlanQuery(PLAN_0.version, is_doubtful=True))
    assert told_balancer(agent.read(PLAN_0)) == [ack(PLAN_0.version)]
    assert agent.dispatcher.plan == PLAN_0


def test_a_reading_from_before_the_doubt_does_not_answer_it() -> None:
    agent, later = Agent("s1").holding(SETTLED), SETTLED.with_entries({}, SETTLED.version + 1)
    assert agent.hear(PlanQuery(later.version)) == [READ]
    assert agent.hear(PlanQuery(later.version, is_doubtful=True)) == []
    first = agent.read(later)
    assert READ in first and asked_who_listens(first) == []
    assert asked_who_listens(agent.read(later))


@pytest.mark.parametrize("is_lost", [False, True], ids=["unreadable", "link lost"])
def test_a_doubt_outlives_a_failed_reading(is_lost: bool) -> None:
    agent = Agent("s1", options=DispatcherOptions(plan_retry_s=0.5)).holding(SETTLED)
    agent.hear(PlanQuery(SETTLED.version, is_doubtful=True))
    if is_lost:
        agent.down(LOCAL)
        agent.up(LOCAL)
    else:
        agent.read(None)
        assert READ in agent.pass_time(0.5)
    assert asked_who_listens(agent.read(SETTLED))


@pytest.mark.parametrize(
    ("delta", "malformed"),
    [
        (PlanDelta(0, 1, {C: Entry(Route(1, single("s9")), Phase.SETTLED)}), 1),
        (PlanDelta(0, 1, {C: Entry(Route(1, single("s2")), Phase.PREPARED, (Route(0, single("s9")),))}), 1),
        (PlanDelta(0, EPOCH_MAX, {}), 0),
    ],
    ids=["to an unlisted server", "from an unlisted server", "over more versions than a balancer leaves out"],
)
def test_a_change_that_cannot_be_true_is_refused(delta: PlanDelta, malformed: int) -> None:
    """One forged message must not leave no versions for the real plan."""
    agent = Agent().holding(PLAN_0)
    assert agent.hear(PlanChange(delta)) == [READ]
    assert agent.counters["malformed_plans"] == malformed
    assert agent.dispatcher.plan == PLAN_0


def test_malformed_and_unexpected_messages_are_counted() -> None:
    agent = Agent("s2").holding(ACTIVE, "s1")
    assert agent.push(LOCAL, AGENT_CHANNEL, b"\xc1", pack_control(ack(1))) == []
    assert agent.observe(b"\xc1", pack_control(ack(1)), physical=ANNOUNCE_CHANNEL) == []
    assert (agent.counters["malformed_messages"], agent.counters["unexpected_messages"]) == (2, 1)


# Transitions: telling subscribers.

NOTICE = RouteNotice(C, Route(1, single("s2")))


def test_listeners_are_notified_with_the_first_publication_after_the_activation() -> None:
    agent = Agent().holding(PREPARED, "s2")
    assert said(agent.observe(message(1))) == []
    agent.change(PREPARED, ACTIVE)
    assert said(agent.observe(message(2), message(3))) == [NOTICE]
    assert agent.counters["route_notices"] == 1


def test_listeners_of_a_quiet_channel_are_notified_by_a_trickle() -> None:
    """Case 4: nobody publishes at the old server any more."""
    agent = Agent().holding(ACTIVE)
    assert said(agent.pass_time(PACE.trickle_delay_s - PACE.tick_interval_s)) == []
    assert said(agent.pass_time(2 * PACE.tick_interval_s)) == [NOTICE]
    assert said(agent.pass_time(PACE.notice_interval_s + PACE.tick_interval_s)) == [NOTICE]


@pytest.mark.parametrize("plan", [PREPARED, SETTLED, PLAN_0])
def test_nobody_is_notified_before_the_activation_or_after_the_end(plan: Plan) -> None:
    assert said(Agent().holding(plan).pass_time(3)) == []


# Transitions: markers.


@pytest.mark.parametrize("plan", [PREPARED, ACTIVE])
def test_who_joins_the_new_location_is_sent_a_marker_where_it_is_leaving(plan: Plan) -> None:
    agent = Agent("s2").holding(plan, "s1")
    assert marks(agent.announce(C, number=5, leaving=("s1", "s3", "unknown"))) == [("to:s1", Marker(C, "s2", 5))]
    assert marks(agent.announce(C, leaving=("s3",))) == []
    assert marks(agent.announce(C, leaving=())) == []


def test_who_joins_anything_else_is_sent_no_marker() -> None:
    assert marks(Agent("s2").holding(ACTIVE, "s1").announce(channel_at("s2"), b"", replica_channel(C, 1))) == []
    assert marks(Agent("s1").holding(ACTIVE, "s2").announce(C)) == [], "an old location"
    assert marks(Agent("s2").holding(SETTLED).announce(C)) == []


def test_no_marker_before_the_listeners_know_what_was_not_observed() -> None:
    """Until the plan has been read again, the loss is untold; a subscriber that left now would not hear of it (G5)."""
    agent = Agent("s2").holding(ACTIVE, "s1")
    agent.down(LOCAL)
    agent.up(LOCAL)
    assert marks(agent.announce(C)) == []
    got = agent.read(ACTIVE)
    assert LossNotice(C, None) in [unpack_control(open_envelope(data).payload) for data in copies(got, "s1")]
    assert marks(agent.announce(C)) == [("to:s1", Marker(C, "s2", 1))]


def test_a_marker_that_finds_no_room_is_no_loss() -> None:
    """The subscriber asks for it again."""
    agent = Agent("s2", DispatcherOptions(forwarder=ForwarderOptions(forwards_max=1))).holding(ACTIVE)
    agent.observe(message(1))
    assert marks(agent.announce(C)) == []
    assert agent.counters["forwards_lost"] == 0
    agent.answer(agent.connect("s1"))
    assert marks(agent.announce(C)) == [("to:s1", Marker(C, "s2", 1))]


# Transitions: vacated.


def test_an_old_location_where_nobody_listens_is_reported_until_it_is_settled() -> None:
    agent = Agent().holding(ACTIVE)
    asked = agent.pass_time(POLLED_S)
    assert (b"NUMSUB", C) in commands(asked, b"PUBSUB")
    assert told_balancer(agent.listeners(asked, 1)) == []
    for pause_s in (PACE.poll_interval_s, PACE.vacated_interval_s):
        asked = agent.pass_time(pause_s + PACE.tick_interval_s)
        assert Vacated("s1", ((C, 1),), INCARNATION) in told_balancer(agent.listeners(asked, 0))
    agent.change(ACTIVE, SETTLED)
    assert tagged(agent.pass_time(5), "numsub") == []


def test_no_location_is_vacated_before_every_publisher_has_read_the_plan() -> None:
    """Also if nobody ever listened there. Until then the successor of this agent tells subscribers of a gap."""
    agent = Agent().holding(PREPARED)
    agent.pass_time(5)
    agent.change(PREPARED, ACTIVE)
    assert tagged(agent.pass_time(VERSION_READ_INTERVAL_S + 0.2), "numsub") == []
    assert tagged(agent.pass_time(0.1), "numsub") != []


def test_an_answer_that_is_older_than_the_change_reports_nothing() -> None:
    """Case 10: NUMSUB was asked for an earlier change; in the meantime the channel was here again, and goes again."""
    agent = Agent().holding(ACTIVE)
    asked = agent.pass_time(POLLED_S)
    plan = ACTIVE
    steps = (SETTLED, *phases(SETTLED, single("s1")))
    for newer in (*steps, *phases(steps[-1], single("s3"))[:2]):
        agent.change(plan, newer)
        plan = newer
    assert told_balancer(agent.listeners(asked, 0)) == []
    assert told_balancer(agent.listeners(agent.pass_time(POLLED_S), 0)) == [Vacated("s1", ((C, 7),), INCARNATION)]


def test_a_refused_question_is_counted() -> None:
    agent = Agent().holding(ACTIVE)
    [numsub, *_] = tagged(agent.pass_time(POLLED_S), "numsub")
    assert agent.tell(Replied(LOCAL, numsub.tag, ErrorReply("NOPERM no"))) == []
    assert agent.counters["refused_commands"] == 1


def test_no_tick_asks_for_more_than_its_share_and_every_channel_has_its_turn() -> None:
    """Some channels may be listened to for ever (plain clients): the others must settle all the same."""
    names = [channel_at("s1", number) for number in range(12)]
    plan = PLAN_0.begin({name: single("s2") for name in names}).activate(names)
    agent = Agent(options=DispatcherOptions(TransitionOptions(per_tick_max=3))).holding(plan)
    questions = [send.args[2:] for send in tagged(agent.pass_time(3), "numsub")]
    assert max(map(len, questions)) == 3
    assert {name for asked in questions for name in asked} == set(names)


def test_acknowledges_nothing_before_the_server_has_confirmed_that_it_observes() -> None:
    """A change may come between SUBSCRIBE and PSUBSCRIBE: what is published meanwhile would not be forwarded."""
    agent = Agent().holding(PLAN_0)
    agent.down(LOCAL)
    begun = [send.args[:2] for send in only(Send, agent.up(LOCAL, confirmed=False))]
    assert begun == [(b"PSUBSCRIBE", b"*"), (b"SUBSCRIBE", AGENT_CHANNEL), READ_WHOLE], "the plan is read behind"
    assert told_balancer(agent.change(PLAN_0, phases(PLAN_0, single("s2"))[0])) == []
    agent.tell(Pushed(LOCAL, [[b"psubscribe", b"*", 1], [b"subscribe", AGENT_CHANNEL, 2]]))
    [ack] = told_balancer(agent.hear(PlanQuery(1)))
    assert ack == PlanAck("s1", INCARNATION, 1)


def test_a_refusal_to_observe_is_asked_about_again_and_what_was_missed_is_reported() -> None:
    """An agent that is deaf must not promise to forward."""
    agent = Agent()
    [psubscribe] = [send for send in only(Send, agent.up(LOCAL, confirmed=False)) if send.args[0] == b"PSUBSCRIBE"]
    agent.tell(Replied(LOCAL, psubscribe.tag, ErrorReply("NOPERM no")))
    agent.tell(Pushed(LOCAL, [[b"subscribe", AGENT_CHANNEL, 1]]))
    assert told_balancer(agent.read(PLAN_0)) == []
    again = agent.pass_time(DispatcherOptions().observe_retry_s)
    assert commands(again, b"PSUBSCRIBE") == [(b"*",)]
    assert "NOPERM" in (agent.dispatcher.why_blind or "")
    actions = agent.tell(Pushed(LOCAL, [[b"psubscribe", b"*", 1], [b"subscribe", AGENT_CHANNEL, 2]]))
    assert actions[-1] == READ and not agent.dispatcher.why_blind
    actions = agent.read(PLAN_0)
    assert told_balancer(actions) == [PlanAck("s1", INCARNATION, 0)]
    assert published(actions, CLIENTS_CHANNEL, LOCAL) == [pack_control(ObservationGap("s1"))]
