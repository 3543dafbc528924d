"""Scripts about servers that freeze or die, and readers that do not read: how soon delivery goes on for everybody else.

See ``scenarios`` for the words; ``mutations`` has what must make each of them fail.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from dynamoth.plan.plan import Assignment, Mode, Phase, single
from dynamoth_sim.load.clients import PublisherApp, SubscriberApp
from dynamoth_sim.load.readers import QUEUE_MAX, SPILLED_MAX
from dynamoth_sim.scenarios.stage import Scenario, Stage
from dynamoth_sim.world.network import SILENCE_S_MAX

GO_ON_S_MAX = 0.2
"""How long after a connection is known to be lost a subscriber may be without messages: a tenth of what is promised for
real clients, as their other times are."""

PUBLISH_INTERVAL_S = 0.01

SUBSCRIBERS = 6
"""How many subscribers a channel has at least whose replica fails."""

SETTLE_S_MAX = 3.0
"""Longest time in which a move settles, whatever a reader does."""

NEVER_S = 1000.0
"""Longer than any scenario."""


def replica_gone(freezes: bool, stage: Stage) -> None:
    """Case 40. A replica of ALL_PUBLISHERS freezes, or dies, while everybody publishes.

    Its subscribers go on at another one as soon as they know that the connection is lost: at once when the server dies,
    after the silence that PINGs allow when it freezes. What they have missed is held for its usual time before.
    """
    channel = stage.channel_at("s1")
    stage.change(channel, Assignment(Mode.ALL_PUBLISHERS, ("s2", "s3")))
    [listened_as] = {place.physical for place in stage.entry(channel).route.locations(channel)}
    subscribers: list[SubscriberApp] = []
    # Each chooses a replica at random.
    while len(subscribers) < SUBSCRIBERS or not stage.cluster.servers["s3"].subscribers(listened_as):
        subscribers.append(stage.subscriber(f"S{len(subscribers)}", channel))
    publisher = stage.publisher("P", channel)
    stage.run(0.1)
    heal: Callable[[], None] | None = None
    if freezes:
        heal = stage.cluster.network.freeze("s3")
    else:
        stage.cluster.servers["s3"].stop()
    known_s = SILENCE_S_MAX if freezes else 0.0
    within_s = known_s + GO_ON_S_MAX + stage.cluster.options.client.subscriber.hold_s_max
    _publish_for(stage, publisher, channel, within_s)
    for app in subscribers:
        silent_s = stage.world.now - max(record.at for record in stage.records("DELIVERS", who=app.name))
        stage.expect(
            f"{app.name} has messages again after {within_s} s, and has had none for {silent_s:.2f} s",
            silent_s <= 5 * PUBLISH_INTERVAL_S,
            channel,
        )
    if heal is not None:
        heal()
    else:
        stage.cluster.servers["s3"].start()
    stage.run(1.0)
    stage.expect("subscribers report that something may be missing", stage.cluster.audit.totals.gaps > 0, channel)
    stage.cluster.audit.calm()
    stage.publish(publisher, channel)


def blocked_reader(published: int, stage: Stage) -> None:
    """Case 41. An application has stopped reading, and its queue is full. Its channel is moved twice all the same.

    Others are not disturbed. When it reads on, it gets what was kept, in order, and a gap in the place of the rest.
    """
    channel = stage.channel_at("s1")
    blocked, quick = stage.subscriber("S", channel), stage.subscriber("Q", channel)
    publisher = stage.publisher("P", channel)
    stage.run(0.1)
    blocked.read_slowly(NEVER_S)
    stage.publish(publisher, channel, times=published)
    began_at = stage.world.now
    for server in ("s2", "s3"):
        stage.cluster.change(channel, single(server))
        stage.wait(
            f"the move to {server} settles", partial(stage.holds, channel, single(server), Phase.SETTLED), SETTLE_S_MAX
        )
        stage.publish(publisher, channel)
    got = len(stage.records("DELIVERS", since=began_at, who=quick.name, channel=channel))
    stage.expect(f"the other subscriber gets everything, not {got} of 2 messages", got >= 2, channel)
    blocked.read_all()
    if published > QUEUE_MAX + SPILLED_MAX:
        gaps = stage.cluster.audit.totals.gaps
        stage.expect(f"the reader gets one gap in the place of what was skipped, not {gaps}", gaps == 1, channel)
    stage.cluster.audit.calm()
    stage.publish(publisher, channel)


def forward_link_dies(stage: Stage) -> None:
    """Case 16. D0's link to H1 dies with a forward in flight, after the PUBLISH at H0 has returned.

    A forward is kept until it is answered, and sent again.
    """
    channel = stage.channel_with_subscriber("s1")
    publisher = stage.trusting_publisher("P", channel)
    stage.move(channel, "s2")
    with stage.held("agent-s1", "s2", to_server=True):
        stage.publish(publisher, channel)
        stage.run(0.05)
        stage.cut("agent-s1", "s2")
        stage.run(0.5)
    stage.publish(publisher, channel, times=3)


def _publish_for(stage: Stage, publisher: PublisherApp, channel: bytes, duration_s: float) -> None:
    """Publish at a steady rate, whether the publishes end or not."""
    ends_at = stage.world.now + duration_s
    while stage.world.now < ends_at:
        publisher.publish(channel)
        stage.run(PUBLISH_INTERVAL_S)


SCENARIOS: dict[str, Scenario] = {
    "16-forward-link-dies": Scenario(forward_link_dies),
    "40-replica-freezes": Scenario(partial(replica_gone, True), losses_allowed=True),
    "40-replica-dies": Scenario(partial(replica_gone, False), losses_allowed=True),
    "41-blocked-reader": Scenario(partial(blocked_reader, QUEUE_MAX + SPILLED_MAX // 2)),
    "41-blocked-reader-skips": Scenario(partial(blocked_reader, 3 * (QUEUE_MAX + SPILLED_MAX)), losses_allowed=True),
}
