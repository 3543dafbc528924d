"""Scripts about slots: channels that the plan does not name move together.

See ``scenarios`` for the words; ``mutations`` has what must make each of them fail.
"""

from __future__ import annotations

from dynamoth.names import RELAY_PREFIX
from dynamoth.plan.plan import Phase
from dynamoth.plan.slots import slot_of
from dynamoth.protocol.control import RouteNotice
from dynamoth_sim.scenarios.stage import Scenario, Stage, control_in


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


SCENARIOS: dict[str, Scenario] = {
    "81-slot-idle-subscribers": Scenario(idle_subscribers),
    "82-slot-loss-before-marker": Scenario(loss_before_marker, losses_allowed=True),
}
