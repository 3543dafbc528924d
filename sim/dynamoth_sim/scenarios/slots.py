"""Scripts about slots: channels that the plan does not name move together.

See ``scenarios`` for the words; ``mutations`` has what must make each of them fail.
"""

from __future__ import annotations

from collections.abc import Mapping

from dynamoth.names import RELAY_PREFIX
from dynamoth.plan.plan import Entry, Phase, Plan, Route, single
from dynamoth.plan.slots import is_slot, slot_of
from dynamoth.protocol.control import RouteNotice
from dynamoth_sim.scenarios.stage import LITTLE_BYTES_PER_S, Scenario, Stage, control_in

TAIL_CHANNELS = 40
TAIL_BYTES = 1000
"""100 messages of this size per second make load ratio 0.9 at the only subscriber's server."""


def idle_subscribers(stage: Stage) -> None:
    """Case 81. The slot of a channel moves while nobody publishes; S only waits. Its old server stops for good.

    Nothing shows the agent that the channel exists but the list of what somebody listens to. S moves without a gap.
    """
    channel = stage.channel_with_subscriber("s1")
    stage.move(slot_of(channel), "s2")
    stage.publish(stage.publisher("P"), channel)
    stage.run(0.2)
    totals = stage.cluster.audit.totals
    stage.expect(f"S gets the message at the new server: {totals.delivered} of 1", totals.delivered == 1, channel)
    stage.expect_gaps(0, channel)


def loss_before_marker(stage: Stage) -> None:
    """Case 82. The agent of the new server is away when a new P publishes there once, and ends. S follows later.

    The agent says that messages of the slot may be lost, but the dispatcher of the old server does not get to list who
    listens before S leaves. So S learns of the loss with its marker.
    """
    channel = stage.channel_with_subscriber("s3")
    slot = slot_of(channel)
    stage.move(slot, "s1")
    relay = RELAY_PREFIX + slot
    with stage.losing("s1", lambda name, data: name == relay or isinstance(control_in(data), RouteNotice)):
        stage.move(slot, "s2", Phase.ACTIVE)
        stage.cluster.agents["s2"].crash("is killed")
        stage.publisher("P", channel)
        stage.cluster.clients[-1].crash()
        totals = stage.cluster.audit.totals
        stage.expect(f"P's message is lost: {totals.delivered} delivered", totals.delivered == 0, channel)
        stage.cluster.agents["s2"].start()
        stage.run(0.5)
    with stage.losing("s1", lambda name, _: name == relay):
        stage.wait_settled(slot)
    stage.expect("S reports that something may be missing", stage.cluster.audit.totals.gaps > 0, channel)


def long_tail(stage: Stage) -> None:
    """Case 83. Many small channels overload a server, and a report names one channel only.

    The balancer moves their slots away, those with load, until the server is safe. Then all rest.
    """
    channels = [stage.channel_at("s1", f"tail{number}-") for number in range(TAIL_CHANNELS)]
    app = stage.client("S", 1).subscribers[0]
    for channel in channels:
        app.subscribe(channel)
    stage.wait("S is confirmed", lambda: all(stage.cluster.audit.is_open(app.name, channel) for channel in channels))
    publisher = stage.publisher("P")
    for number in range(1000):
        publisher.publish(channels[number % TAIL_CHANNELS], size_bytes=TAIL_BYTES)
        stage.run(0.01)
    left = [channel for channel in channels if stage.entry(channel).route.assignment == single("s1")]
    ratio = len(left) / TAIL_CHANNELS
    stage.expect(f"some channels leave s1, and most stay: {ratio:.2f}", 0.4 <= ratio <= 0.8, channels[0])
    moves = [move.channel for record in stage.records("decides") for move in record.note.moves]
    slots = [name for name in moves if is_slot(name)]
    stage.expect(f"mostly slots move: {len(slots)} of {len(moves)}", len(slots) > len(moves) / 2)
    stage.expect("slots without load stay", set(slots) <= set(map(slot_of, channels)))
    stage.expect(f"no slot moves twice: {len(slots)}", len(slots) == len(set(slots)))


def folded(stage: Stage) -> None:
    """Case 84. A channel moves for itself, and its slot follows it. Then the plan drops its entry.

    From then on it moves with its slot again, as S, a stale P and newcomers find. A channel that is elsewhere than its
    slot keeps its entry, and others of that slot stay where they are.
    """
    channel, elsewhere = stage.channel_at("s1"), stage.channel_at("s1", "elsewhere")
    slot = slot_of(elsewhere)
    sibling = next(name for name in (b"sibling%d" % number for number in range(100_000)) if slot_of(name) == slot)
    stage.subscriber("S", channel, elsewhere, sibling)
    stale = stage.trusting_publisher("P", channel)
    for name in (channel, elsewhere, slot_of(channel)):
        stage.move(name, "s2")
    plans = stage.cluster.stored_plan
    servers = stage.cluster.servers
    stage.wait("the entry is dropped", lambda: all(channel not in _entries(plans(id_)) for id_ in servers))
    stage.run(1.0)
    stage.expect("the other one is not", elsewhere in _entries(plans("s1")), elsewhere)
    stage.expect(f"it stays at s2: {stage.entry(channel)}", stage.is_at(channel, "s2", Phase.SETTLED), channel)
    for name, app in ((channel, stale), (elsewhere, stage.publisher("Q")), (sibling, stage.publisher("R"))):
        stage.publish(app, name)
    stage.move(slot_of(channel), "s3")
    stage.subscriber("T", channel)
    stage.publish(stale, channel)
    stage.publish(stage.publisher("U"), channel)
    stage.expect_gaps(0, channel)


def silent(stage: Stage) -> None:
    """Case 85. A channel was moved for itself and is silent since; S only waits. It returns to its slot.

    Then the plan drops its entry.
    """
    channel = stage.channel_with_subscriber("s1")
    stage.move(channel, "s2")
    stored = stage.cluster.stored_plan
    stage.wait(
        "the entry is dropped",
        lambda: all(channel not in _entries(stored(id_)) for id_ in stage.cluster.servers),
        patience_s=20.0,
    )
    stage.expect("it is at home again", stage.is_at(channel, "s1", Phase.SETTLED), channel)
    stage.publish(stage.publisher("P"), channel)
    stage.expect_gaps(0, channel)


def not_revived(stage: Stage) -> None:
    """Case 86. A server is cut off from the balancer while an entry is dropped, and then the slot moves on.

    The next balancer finds the old copy there, and must not bring the entry back: S is elsewhere.
    """
    channel = stage.channel_with_subscriber("s1")
    slot, balancer = slot_of(channel), stage.cluster.balancer
    for name in (channel, slot):
        stage.move(name, "s2")
    heal = stage.cluster.network.part([balancer.name], ["s3"])
    stage.wait("the entry is dropped", lambda: channel not in _entries(stage.cluster.stored_plan("s1")))
    stage.cluster.change(slot, single("s4"))
    places = ("s1", "s2", "s4")
    stage.wait("the slot has moved", lambda: all(_settled_at(stage, slot, "s4", id_) for id_ in places))
    stage.expect("s3 still names the channel", channel in _entries(stage.cluster.stored_plan("s3")), channel)
    balancer.crash()
    heal()
    balancer.start()
    stage.wait("s3 stores the present plan", lambda: _settled_at(stage, slot, "s4", "s3"))
    stage.publish(stage.publisher("P"), channel)
    stage.expect(f"it is where its slot is: {stage.entry(channel)}", stage.is_at(channel, "s4", Phase.SETTLED), channel)


def _entries(plan: Plan | None) -> Mapping[bytes, Entry]:
    assert plan is not None, "every server stores a plan"
    return plan.entries


def _settled_at(stage: Stage, name: bytes, place: str, server: str) -> bool:
    return stage.entry(name, server) == Entry(
        Route(stage.entry(name, server).route.epoch, single(place)), Phase.SETTLED
    )


SCENARIOS: dict[str, Scenario] = {
    "81-slot-idle-subscribers": Scenario(idle_subscribers),
    "82-slot-loss-before-marker": Scenario(loss_before_marker, losses_allowed=True),
    "83-long-tail": Scenario(long_tail, outgoing_bytes_per_s_max=LITTLE_BYTES_PER_S, channels_per_report_max=1),
    "84-folded": Scenario(folded),
    "85-silent": Scenario(silent, silent_s=1.0),
    "86-not-revived": Scenario(not_revived, servers=4, server_dead_s=1000.0),
}
