"""Scripts about servers that freeze or die, and readers that do not read: how soon delivery goes on for everybody else.

See ``scenarios`` for the words; ``mutations`` has what must make each of them fail.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from dynamoth.plan import Assignment, Mode
from dynamoth_sim.clients import PublisherApp
from dynamoth_sim.network import SILENCE_S_MAX
from dynamoth_sim.stage import Stage

GO_ON_S_MAX = 0.2
"""How long after a connection is known to be lost a subscriber may be without messages: a tenth of what is promised for
real clients, as their other times are."""

PUBLISH_INTERVAL_S = 0.01


def replica_gone(freezes: bool, stage: Stage) -> None:
    """Case 40. A replica of ALL_PUBLISHERS freezes, or dies, while everybody publishes.

    Its subscribers go on at another one as soon as they know that the connection is lost: at once when the server dies,
    after the silence that PINGs allow when it freezes. What they have missed is held for its usual time before.
    """
    stage.open()
    channel = stage.channel_at("s1")
    stage.change(channel, Assignment(Mode.ALL_PUBLISHERS, ("s2", "s3")))
    subscribers = [stage.subscriber(f"S{number}", channel) for number in range(6)]
    publisher = stage.publisher("P")
    stage.publish(publisher, channel)
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
    stage.expect("subscribers are told that something may be missing", stage.cluster.audit.totals.gaps > 0, channel)
    stage.cluster.audit.calm()
    stage.publish(publisher, channel)
    stage.close(channel)


def _publish_for(stage: Stage, publisher: PublisherApp, channel: bytes, duration_s: float) -> None:
    """Publish at a steady rate, whether the publishes end or not."""
    ends_at = stage.world.now + duration_s
    while stage.world.now < ends_at:
        publisher.publish(channel)
        stage.run(PUBLISH_INTERVAL_S)


FAILURES: dict[str, Callable[[Stage], None]] = {
    "40-replica-freezes": partial(replica_gone, True),
    "40-replica-dies": partial(replica_gone, False),
}
"""Those in which a server fails, so that losses are in order where they are told."""
