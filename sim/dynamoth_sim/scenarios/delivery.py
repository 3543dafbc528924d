"""Clients with a wrong route, while an agent or a server that could put that right lags, hangs or dies.

Trials with real processes found these. For the words see ``scenarios``.
"""

from __future__ import annotations

from dynamoth.plan.plan import Assignment, Mode, Phase, single
from dynamoth.protocol.control import RouteNotice
from dynamoth.protocol.envelope import CONTROL, FORWARDED, HEARTBEAT, QUIET_MS_MAX, open_envelope, seal
from dynamoth_client.machines.sequences import LATE_S
from dynamoth_sim.cluster import PUBLISH_TIMEOUT_S, VERSION_READ_INTERVAL_S
from dynamoth_sim.load.clients import PublisherApp
from dynamoth_sim.scenarios.stage import Scenario, Stage, control_in
from dynamoth_sim.world.network import SILENCE_S_MAX

HANGS_S = 5.0
"""How long an agent stands still: longer than anybody holds a message."""


IDLE_S = 1.0
"""How long a publisher is idle: it asks the next time how many agents there are."""

FORGED_NUMBER = 2**43
"""What no publisher of a scenario comes to, and a real one may."""

ELSEWHERE_S_MAX = 0.5
"""How soon a client of the simulation finds a channel whose server is gone: a third of what real clients take."""


def _first_messages(stage: Stage, channel: bytes, name: str) -> PublisherApp:
    """A new client publishes three messages at once, and one more: the number of receivers is always right."""
    publisher = stage.publisher(name)
    receivers: list[int | None] = []
    publisher.on_ended = lambda channel, number, count: receivers.append(count)
    publisher.publish_all([channel] * 3)
    stage.wait(f"{name} publishes", lambda: not publisher.pending(channel))
    stage.publish(publisher, channel)
    stage.expect(f"each message of {name} goes to one client, not {receivers}", receivers == [1] * 4, channel)
    return publisher


def _die_together(stage: Stage, *servers: str) -> None:
    """Kill the latest client and the agents of some servers, and start these agents again."""
    agents = [stage.cluster.agents[server] for server in servers]
    stage.cluster.clients[-1].crash()
    for agent in agents:
        agent.crash("is killed")
    stage.run(0.2)
    for agent in agents:
        agent.start()
    stage.run(1.0)


def first_message_agent_hangs(stage: Stage) -> None:
    """Case 34. The first messages of a new P wait in the socket of D0, which hangs and is killed. P dies, too.

    P reads the stored plan behind them, and sends them to H1 itself, before ``publish`` returns.
    """
    channel = stage.channel_with_subscriber("s1")
    stage.move(channel, "s2")
    stage.cluster.agents["s1"].pause(HANGS_S)
    _first_messages(stage, channel, "P")
    _die_together(stage, "s1")


def first_message_agent_lags(stage: Stage) -> None:
    """Case 35. Nothing fails, but D0 forwards the first messages of P later than S waits for them."""
    channel = stage.channel_with_subscriber("s1")
    stage.move(channel, "s2")
    stage.cluster.agents["s1"].pause(HANGS_S)
    publisher = _first_messages(stage, channel, "P")
    stage.run(HANGS_S)
    stage.publish(publisher, channel)
    stage.expect_gaps(0, channel)


def stale_and_gone(stage: Stage) -> None:
    """Case 47. P is idle while its channel moves; then D0 hangs, P publishes once at H0, and ends; D0 is killed.

    P knows the channel and D0 still counts as an observer, so only the version of the stored plan shows the move.
    """
    channel, other = stage.channel_at("s1"), stage.channel_at("s1", "d")
    stage.subscriber("S", channel, other)
    stale = stage.publisher("P")
    for _ in range(2):
        for name in (channel, other):
            stage.publish(stale, name)
    stage.run(IDLE_S)
    stage.move(channel, "s2")
    stage.move(other, "s2")
    stage.cluster.agents["s1"].pause(HANGS_S)
    stale.publish_all([channel, other, channel])
    stage.wait("P publishes", lambda: not (stale.pending(channel) or stale.pending(other)))
    _die_together(stage, "s1")


def stale_and_gone_replicated(stage: Stage) -> None:
    """Case 43. As case 47, but the channel was replicated at H0 and H1, of which one version tells P enough."""
    channel = stage.channel_at("s1")
    stage.change(channel, Assignment(Mode.ALL_PUBLISHERS, ("s1", "s2")))
    stage.subscriber("S", channel)
    stale = stage.publisher("P")
    stage.publish(stale, channel, times=2)
    stage.run(IDLE_S)
    stage.move(channel, "s3")
    for server in ("s1", "s2"):
        stage.cluster.agents[server].pause(HANGS_S)
    stage.publish(stale, channel)
    _die_together(stage, "s1", "s2")


def replica_hangs(stage: Stage) -> None:
    """Case 59. A replica hangs when P is to read the versions of the plan again: another one confirms its messages."""
    channel = stage.channel_at("s1")
    stage.change(channel, Assignment(Mode.ALL_PUBLISHERS, ("s1", "s2", "s3")))
    publisher = stage.publisher("P")
    stage.publish(publisher, channel, times=2)
    stage.run(IDLE_S)
    heal = stage.cluster.network.freeze("s1")
    straggler_s = stage.cluster.options.client.publisher.straggler_s
    for _ in range(3):
        publisher.publish(channel)
        stage.wait("P publishes", lambda: not publisher.pending(channel), patience_s=straggler_s + 0.05)
    heal()


def last_message_of_an_interval(stage: Stage) -> None:
    """Case 42. P has just read the version of the plan; its channel moves, D0 hangs, P publishes at H0, and ends.

    The move has not settled by then: when D0 is back, it tells S of the gap.
    """
    channel, other = stage.channel_at("s1"), stage.channel_at("s2", "d")
    subscriber = stage.subscriber("S", other)  # is connected to s2
    stale = stage.publisher("P", channel)
    stage.run(IDLE_S)
    stage.publish(stale, channel)
    stage.cluster.change(channel, single("s2"))
    stage.run(VERSION_READ_INTERVAL_S - 0.1)
    stage.join(subscriber, channel)
    agent = stage.cluster.agents["s1"]
    agent.pause(HANGS_S)
    stage.publish(stale, channel)
    stage.cluster.clients[-1].crash()
    stage.run(1.0)  # a move that could settle has
    agent.crash("is killed")
    stage.run(0.2)
    agent.start()
    stage.run(1.0)
    stage.expect_gaps(1, channel)


def sent_again_late(stage: Stage) -> None:
    """Case 58. H0 tells P late that its channel has moved. Then H1 hangs, where a newer message of P waits already."""
    channel, other = stage.channel_at("s1"), stage.channel_at("s2", "d")
    stale = stage.publisher("P")
    for name in (channel, other):
        stage.publish(stale, name)
    stage.move(channel, "s2")
    with stage.held("P", "s2", to_server=False):
        with stage.held("P", "s1", to_server=False):
            stale.publish(channel)
            stage.run(PUBLISH_TIMEOUT_S - 1.0)
            stale.publish(other)
        stage.wait("P's publish fails", lambda: not stale.pending(channel), patience_s=1.1)


def lost_before_it_was_known(stage: Stage) -> None:
    """Case 36. What a stale P publishes is lost with D0, and S, who is new, sees only what P publishes at H1 then.

    That says when its predecessor was published, after S subscribed: S reports the gap.
    """
    channel = stage.channel_at("s1")
    stale = stage.trusting_publisher("P", channel, for_s=0.8)
    stage.move(channel, "s2", Phase.SETTLED)
    stage.subscriber("S", channel)
    stage.run(0.2)
    agent = stage.cluster.agents["s1"]
    agent.pause(HANGS_S)
    stage.publish(stale, channel)
    stage.run(0.3)
    agent.crash("is killed")
    stage.run(0.5)
    stage.publish(stale, channel)  # P looks where the channel is
    stage.run(2.0)
    agent.start()
    stage.run(1.0)
    stage.expect_gaps(1, channel)


def not_due(stage: Stage) -> None:
    """Case 37. Nothing fails: S is new and P changes its route, but its earlier messages are from before S.

    There is no gap event, and S waits for nothing.
    """
    channel = stage.channel_at("s1")
    publisher = stage.publisher("P")
    stage.publish(publisher, channel, times=3)
    stage.move(channel, "s2", Phase.ACTIVE)
    stage.run(0.1)
    subscriber = stage.subscriber("S", channel)
    stage.run(0.1)
    stage.publish(publisher, channel)
    stage.publish(publisher, channel)
    stage.run(0.1)
    delivered = stage.records("DELIVERS", who=subscriber.name)
    stage.expect(f"S has both messages at once, not {len(delivered)}", len(delivered) == 2, channel)
    stage.expect_gaps(0, channel)


def old_server_dies(stage: Stage) -> None:
    """Case 38. P and T know a channel at H0; it has moved, and H0 dies. Every other server stores the plan.

    P has sent a message that H0 has answered and D0 has not forwarded: subscribers learn its number.
    """
    channel = stage.channel_with_subscriber("s1")
    stale = stage.trusting_publisher("P", channel)
    stage.move(channel, "s2")
    stage.cluster.agents["s1"].pause(HANGS_S)
    stage.publish(stale, channel)
    stage.cluster.stop_for_good("s1", orderly=False)
    stage.run(ELSEWHERE_S_MAX + stage.cluster.options.client.subscriber.hold_s_max)
    totals = stage.cluster.audit.totals
    stage.expect(f"S reports that a message is missing: {totals.gaps} gap events", totals.gaps > 0, channel)
    stage.cluster.audit.calm()
    _works_at_once(stage, stale, channel)


def old_server_hangs(stage: Stage) -> None:
    """Case 49. As case 38, but H0 hangs: P asks another server before its link finds out."""
    channel = stage.channel_with_subscriber("s1")
    stale = stage.trusting_publisher("P", silent_s=stage.cluster.options.client.publisher.silent_s)
    for name in (channel, stage.channel_at("s3", "d")):
        stage.publish(stale, name)
    stage.move(channel, "s2")
    heal = stage.cluster.network.freeze("s1")
    stale.publish_all([channel] * 3)
    stage.wait("P publishes", lambda: not stale.pending(channel), patience_s=SILENCE_S_MAX - 0.1)
    heal()


def home_is_down(stage: Stage) -> None:
    """Case 39. New clients use a channel whose home is down, and which the plan names at another server."""
    channel = stage.channel_with_subscriber("s1")
    stage.move(channel, "s2")
    stage.cluster.stop_for_good("s1", orderly=False)
    stage.run(0.5)
    stage.cluster.audit.calm()
    _works_at_once(stage, stage.publisher("N"), channel)
    listener = stage.client("M", 1).subscribers[0]
    listener.subscribe(channel)
    stage.wait(
        "M is confirmed", lambda: stage.cluster.audit.is_open(listener.name, channel), patience_s=ELSEWHERE_S_MAX
    )


def new_agent_is_gone(stage: Stage) -> None:
    """Case 65. C moves to H1, whose agent dies; S has not followed when a new P publishes once, and ends.

    S misses that: P reads the plan and publishes at H1, and nobody forwards it. No later message shows the loss, so S
    reports a gap when it has followed and the agent of H1 does not answer.
    """
    channel = stage.channel_with_subscriber("s3")
    stage.move(channel, "s1")
    with stage.losing("s1", lambda _, data: isinstance(control_in(data), RouteNotice)):
        stage.move(channel, "s2", Phase.ACTIVE)
        stage.cluster.agents["s2"].crash("is killed")
        stage.publisher("P", channel)
        stage.cluster.clients[-1].crash()
        totals = stage.cluster.audit.totals
        stage.expect(f"P's message is lost: {totals.delivered} delivered", totals.delivered == 0, channel)
    stage.run(2.0)
    stage.expect_gaps(1, channel)
    stage.cluster.agents["s2"].start()
    stage.wait_settled(channel)


def copied_id(stage: Stage) -> None:
    """Case 48. Somebody copies the id of P, and says with a heartbeat that its number is far ahead.

    S refuses that with a gap event, and gets all that P goes on to publish.
    """
    channel = stage.channel_at("s1")
    subscriber = stage.subscriber("S", channel)
    publisher = stage.publisher("P", channel)
    stage.run(0.1)
    [message] = [r.data for r in stage.records("gets", who=subscriber.name, channel=channel) if r.data][-1:]
    forged = seal(open_envelope(message).publisher, FORGED_NUMBER, 0, b"", HEARTBEAT, 0)
    stage.cluster.audit.has_forger = True
    stage.cluster.servers["s1"].inject(channel, forged)
    stage.run(0.1)
    for _ in range(3):
        stage.publish(publisher, channel)
        stage.run(1.0)
    totals = stage.cluster.audit.totals
    stage.expect(f"S has every message of P, not {totals.delivered} of 4", totals.delivered == 4, channel)
    stage.expect_gaps(1, channel)


def moved_ahead(stage: Stage) -> None:
    """Case 106. Somebody copies the id of P, and says with heartbeats, again and again, that P is ahead.

    They seem to be older than the subscription, so they are believed. P's messages are lost, as S takes them for
    copies. When that has gone on for long, a gap event says so, although the latest heartbeat is young.
    """
    channel = stage.channel_at("s1")
    subscriber = stage.subscriber("S", channel)
    publisher = stage.publisher("P", channel)
    stage.run(0.1)
    [message] = [r.data for r in stage.records("gets", who=subscriber.name, channel=channel) if r.data][-1:]
    stage.cluster.audit.has_forger = True
    for number in range(2, 6):
        ahead = seal(open_envelope(message).publisher, number, 0, b"", HEARTBEAT, QUIET_MS_MAX)
        stage.cluster.servers["s1"].inject(channel, ahead)
        stage.run(LATE_S * 0.3)
        stage.publish(publisher, channel)
    stage.expect_gaps(1, channel)


def forwarded_late(stage: Stage) -> None:
    """Case 57. The agent of s1 hangs for long; P's old route still names s1, which forwards P's messages when it wakes.

    Meanwhile S has subscribed at s2 and follows what P publishes there. S had all that was promised: there is no gap.
    """
    channel = stage.channel_at("s1")
    publisher = stage.trusting_publisher("P", channel, for_s=1.0)
    stage.move(channel, "s2")
    with stage.held("agent-s1", "s1", to_server=False):
        stage.publish(publisher, channel)
        subscriber = stage.subscriber("S", channel)
        for _ in range(4):
            stage.run(LATE_S / 3)
            stage.publish(publisher, channel)
    stage.run(1.0)
    late = [r for r in stage.records("gets", who=subscriber.name, channel=channel) if r.data and _is_forwarded(r.data)]
    stage.expect("a message of P comes late", bool(late), channel)
    stage.expect_gaps(0, channel)


def _is_forwarded(data: bytes) -> bool:
    envelope = open_envelope(data)
    return bool(envelope.flags & FORWARDED) and not envelope.flags & CONTROL


def _works_at_once(stage: Stage, publisher: PublisherApp, channel: bytes) -> None:
    """Publish three messages, which all must arrive, and which must have been answered soon."""
    publisher.publish_all([channel] * 3)
    stage.wait(f"{publisher.name} publishes", lambda: not publisher.pending(channel), patience_s=ELSEWHERE_S_MAX)


SCENARIOS: dict[str, Scenario] = {
    "34-first-message-agent-hangs": Scenario(first_message_agent_hangs),
    "35-first-message-agent-lags": Scenario(first_message_agent_lags),
    "36-lost-before-it-was-known": Scenario(lost_before_it_was_known, losses_allowed=True),
    "37-not-due": Scenario(not_due),
    "38-old-server-dies": Scenario(old_server_dies, losses_allowed=True),
    "39-home-is-down": Scenario(home_is_down, losses_allowed=True),
    "42-last-message-of-an-interval": Scenario(last_message_of_an_interval, losses_allowed=True),
    "43-stale-and-gone-replicated": Scenario(stale_and_gone_replicated),
    "47-stale-and-gone": Scenario(stale_and_gone),
    "48-copied-id": Scenario(copied_id, losses_allowed=True),
    "49-old-server-hangs": Scenario(old_server_hangs, losses_allowed=True),
    "57-forwarded-late": Scenario(forwarded_late),
    "106-moved-ahead": Scenario(moved_ahead, losses_allowed=True),
    "58-sent-again-late": Scenario(sent_again_late, losses_allowed=True),
    "59-replica-hangs": Scenario(replica_hangs, losses_allowed=True),
    "65-new-agent-is-gone": Scenario(new_agent_is_gone, losses_allowed=True),
}
