"""Scripts about subscribers to patterns: T listens everywhere, wherever channels are and go.

See ``scenarios`` for the words; ``mutations`` has what must make each of them fail.
"""

from __future__ import annotations

from dynamoth.plan.plan import Assignment, Mode, Phase
from dynamoth_sim.scenarios.stage import Scenario, Stage

PATTERN = b"c*"
"""The pattern of T. It matches the channels of these scripts."""

RESUME_S_MAX = 2.0
"""Longest time until a lost connection is made again."""

CONFIRMED_S_MAX = 1.5
"""Longest time until clients ignore a server that is away (their ``failover_s``, and a little)."""


def pattern_moved(stage: Stage) -> None:
    """Case 27. A channel moves, and T hears late of what P publishes at H0; P is redirected in between.

    Its next messages overtake the first one and the copy of it that D0 forwards; and both of these come.
    """
    channel, other = stage.channel_at("s1"), stage.channel_at("s2", "other")
    stage.pattern_subscriber("T", PATTERN)
    stage.subscriber("S", channel, other)  # who keeps the move from settling
    known, unknown = stage.publisher("P"), stage.publisher("Q")
    stage.publish(known, channel)
    with stage.held("S", "s2", to_server=True), stage.held("T", "s1", to_server=False):
        stage.move(channel, "s2", Phase.ACTIVE)
        with stage.held("agent-s1", "s2", to_server=True):
            for _ in range(3):
                for publisher in (known, unknown):
                    stage.publish(publisher, channel)
                stage.run(0.1)
    where = [record.where for record in stage.records("publishes", channel=channel, who="P.p")]
    stage.expect(f"P has been redirected in between: {where}", where[0] == "s1" and where[-1] == "s2", channel)


def pattern_replicated(stage: Stage) -> None:
    """Case 28. A channel is split, and has another name then: T knows that one, and gets no message n times."""
    channel = stage.channel_at("s1")
    stage.pattern_subscriber("T", PATTERN)
    publisher = stage.publisher("P")
    for replicas in (("s1", "s2", "s3"), ("s2", "s3")):
        stage.publish(publisher, channel)
        stage.change(channel, Assignment(Mode.ALL_PUBLISHERS, replicas), Phase.ACTIVE)
        for _ in range(5):
            stage.publish(publisher, channel)
            stage.run(0.05)
        stage.wait_settled(channel)


def pattern_cut_off(stage: Stage) -> None:
    """Case 29. T's connection to a server is lost, with the only message of a P that T has never heard of.

    Numbers do not show it: T gets a gap event when the server has taken the subscription again.
    """
    channel = stage.channel_at("s2")
    app = stage.pattern_subscriber("T", PATTERN)
    publisher = stage.publisher("P")
    with stage.held("T", "s2", to_server=False):
        stage.publish(publisher, channel)
        stage.cut(app.process.name, "s2")
        stage.run(0.1)
    stage.cluster.clients[-1].crash()
    stage.run(RESUME_S_MAX)
    stage.cluster.audit.calm()
    stage.publisher("Q", channel)
    stage.expect("T is still subscribed", app.is_confirmed(PATTERN), channel)


def pattern_finds_servers(stage: Stage) -> None:
    """Case 30. A server is added while T listens, and a channel moves there."""
    channel = stage.channel_at("s1")
    stage.pattern_subscriber("T", PATTERN)
    publisher = stage.publisher("P", channel)
    added = stage.add_server()
    stage.run(RESUME_S_MAX)
    stage.move(channel, added)
    stage.publish(publisher, channel, times=3)


def pattern_server_leaves(stage: Stage) -> None:
    """Case 32. A server is drained while T listens, and is then stopped for good: T misses nothing.

    A pattern that is subscribed to afterwards does not wait for it for long.
    """
    channel = stage.channel_at("s2")
    stage.pattern_subscriber("T", PATTERN)
    publisher = stage.publisher("P")
    stage.move(channel, "s1")
    stage.publish(publisher, channel)
    stage.cluster.change_server("drain", "s1")

    def is_empty() -> bool:
        publisher.publish(channel)
        return stage.cluster.left_at("s1") == 0

    stage.wait("s1 is empty", is_empty)
    stage.cluster.stop_for_good("s1", orderly=True)
    stage.publish(publisher, channel)
    began = stage.world.now
    stage.pattern_subscriber("U", PATTERN)
    waited = stage.world.now - began
    stage.expect(f"U is confirmed soon, not after {waited:.1f} s", waited < CONFIRMED_S_MAX)


def pattern_server_dies(stage: Stage) -> None:
    """Case 33. A server dies for good, with a message that T was not sent any more; its publisher dies, too."""
    channel, other = stage.channel_at("s1"), stage.channel_at("s2")
    app = stage.pattern_subscriber("T", PATTERN)
    publisher = stage.publisher("P", channel)
    with stage.held("T", "s1", to_server=False):
        stage.publish(publisher, channel)
        stage.cut(app.process.name, "s1")
        stage.cluster.stop_for_good("s1", orderly=False)
        stage.cluster.clients[-1].crash()
    stage.run(CONFIRMED_S_MAX)
    stage.cluster.audit.calm()
    stage.publish(stage.publisher("Q"), other)
    stage.pattern_subscriber("U", PATTERN)


SCENARIOS: dict[str, Scenario] = {
    "27-pattern-moved": Scenario(pattern_moved),
    "28-pattern-replicated": Scenario(pattern_replicated),
    "29-pattern-cut-off": Scenario(pattern_cut_off, losses_allowed=True),
    "30-pattern-finds-servers": Scenario(pattern_finds_servers),
    "32-pattern-server-leaves": Scenario(pattern_server_leaves),
    "33-pattern-server-dies": Scenario(pattern_server_dies, losses_allowed=True, server_dead_s=5.0),
}
