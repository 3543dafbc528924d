"""Scripts about the resources of servers, and about servers that come and go with the load.

See ``scenarios`` for the words; ``mutations`` has what must make each of them fail.
"""

from __future__ import annotations

from dynamoth.plan.plan import single
from dynamoth_sim.scenarios.stage import Scenario, Stage

PUSH_CPU_S = 10e-6
"""What a message to a subscriber costs a server: 400 messages/s to a subscriber and an agent take 0.009 cores."""

CPU_RATIO_MAX = 0.012
"""Cores of a server."""


def short_of_cpu(stage: Stage) -> None:
    """Case 90. A server sends few bytes, but so many messages that it is short of CPU.

    The balancer moves a channel with many small messages away, and not the one with few large ones, which has most of
    the bytes. The emptiest server is nearly out of connections, and gets no channel. Under steady load, that is all.
    """
    small, other = stage.channel_at("s1", "small"), stage.channel_at("s1", "other")
    large, elsewhere = stage.channel_at("s1", "large"), stage.channel_at("s2", "elsewhere")
    stage.subscriber("S", small, other, large, elsewhere)
    publisher = stage.publisher("P")
    for server in stage.cluster.servers.values():
        server.push_cpu_s = PUSH_CPU_S
    stage.cluster.servers["s3"].connections_max = 3
    for number in range(2400):
        publisher.publish((small, other)[number % 2])
        if number % 10 == 0:
            publisher.publish(large, size_bytes=20_000)
            publisher.publish(elsewhere)
        stage.run(0.0025)
    moved = [each for each in (small, other) if stage.entry(each).route.assignment != single("s1")]
    stage.expect(f"one of the channels with many messages leaves s1, not {moved}", len(moved) == 1, small)
    for each in moved:
        route = stage.entry(each).route
        stage.expect(f"it goes to s2, not to {route}, as s3 has no connections left", route.assignment == single("s2"))
    stage.expect("the channel with the most bytes stays", stage.entry(large).route.assignment == single("s1"), large)
    decided = [move for record in stage.records("decides") for move in record.note.moves]
    stage.expect(f"one move is enough, not {len(decided)}", len(decided) == 1)


SCENARIOS: dict[str, Scenario] = {
    "74-short-of-cpu": Scenario(short_of_cpu, cpu_ratio_max=CPU_RATIO_MAX),
}
