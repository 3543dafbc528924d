"""Scripts about agents that get more than they need, or more than they can read.

See ``scenarios`` for the words; ``mutations`` has what must make each of them fail.
"""

from __future__ import annotations

from dataclasses import replace

from dynamoth.names import NOTIFICATION_PREFIXES
from dynamoth.plan.plan import Phase, single
from dynamoth_dispatcher.observation import EVERYTHING, QUIET_PATTERNS
from dynamoth_sim.load.flood import Flood
from dynamoth_sim.scenarios.stage import LITTLE_BYTES_PER_S, Scenario, Stage

EVENT = NOTIFICATION_PREFIXES[0] + b"0__:key"

COMMANDS_BYTES_PER_S = 2000.0
"""So slow that what is published between two commands of an agent is published for some hundredths of a second."""

MESSAGES = 200
"""Published in as many milliseconds, while the agent changes its subscriptions."""


def keyspace_notifications(stage: Stage) -> None:
    """Case 62. A server begins to publish keyspace notifications, and its agent leaves them out.

    What is published between the two commands is observed twice, and forwarded once: a plain publisher's messages have
    no number that would tell subscribers. A new connection of the agent begins without the notifications.
    """
    server = stage.cluster.servers["s1"]
    channel = stage.channel_with_subscriber("s1")
    stage.move(channel, "s2")
    plain = stage.raw_publisher("R", "s1", channel)
    stage.expect("notifications reach the agent", server.inject(EVENT, b"set") == 1, channel)
    for pipe in stage.pipes("agent-s1", "s1", to_server=True):
        pipe.delays = replace(pipe.delays, bytes_per_s=COMMANDS_BYTES_PER_S)
    twice = 0
    for _ in range(MESSAGES):
        plain.publish()
        stage.run(0.001)
        patterns = next(c.patterns for c in stage.cluster.network.connections("agent-s1", "s1") if c.patterns)
        twice += EVERYTHING in patterns and QUIET_PATTERNS[0] in patterns
    stage.expect(f"some messages come twice to the agent, not {twice}", twice > 2, channel)
    stage.expect("the agent leaves the notifications out", server.inject(EVENT, b"set") == 0, channel)
    [connection] = [c for c in stage.cluster.network.connections("agent-s1", "s1") if c.patterns]
    stage.run(0.5)
    stage.cluster.network.break_connection(connection)
    stage.wait("the agent observes again", lambda: server.inject(channel, b"raw:0.") == 1)
    stage.expect("it begins without the notifications", server.inject(EVENT, b"set") == 0, channel)


def flooded_agent(stage: Stage) -> None:
    """Case 63. For seconds, more is published at s1 than its agent reads: Redis disconnects it, again and again.

    No report gets through on its observing connection. The balancer learns that the agent sees nothing, and relieves
    the server. A publisher with the old route publishes while its messages may be lost there: subscribers report a gap.
    """
    channel = stage.channel_with_subscriber("s1")
    publisher = stage.publisher("P")
    for _ in range(100):
        stage.publish(publisher, channel)
        stage.run(0.02)
    stage.expect("the balancer has moved nothing", stage.is_at(channel, "s1", Phase.SETTLED), channel)
    flood = Flood(stage.cluster, "s1")
    flood.start()
    stage.wait("the balancer relieves s1", lambda: stage.entry(channel, "s2").route.assignment != single("s1"))
    for _ in range(10):
        stage.publish(publisher, channel)
        stage.run(0.1)
    flood.stop()
    stage.run(2.0)
    stage.cluster.audit.calm()
    stage.publish(publisher, channel)


SCENARIOS: dict[str, Scenario] = {
    "62-keyspace-notifications": Scenario(keyspace_notifications),
    "63-flooded-agent": Scenario(
        flooded_agent, outgoing_bytes_per_s_max=LITTLE_BYTES_PER_S, report_interval_s=0.25, losses_allowed=True
    ),
}
