"""Scripts about processes without the rights that they need, and about those that speak in the name of others.

See ``scenarios`` for the words; ``mutations`` has what must make each of them fail.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from dynamoth.names import BALANCER_CHANNEL, PLAN_KEY
from dynamoth.plan.plan import EPOCH_MAX, Phase, Route, single
from dynamoth.protocol.control import PlanAck, pack_control
from dynamoth.protocol.plan_wire import pack_entry
from dynamoth_sim.scenarios.stage import Scenario, Stage

FORGED = 99
"""The incarnation of a process that is no agent."""


def may_not_observe(stage: Stage) -> None:
    """Case 60. The server s2 does not let its agent observe it, as its user has too few rights.

    The agent acknowledges nothing, and says so: no channel leaves or joins s2, as messages of publishers with an old
    route would be lost there. When the rights are mended, it works without a restart.
    """
    server = stage.cluster.servers["s2"]
    server.refuse = lambda _, words: "NOPERM no permissions to run it" if words[0] == b"PSUBSCRIBE" else None
    stage.open()
    channel = stage.channel_with_subscriber("s2")
    publisher = stage.publisher("P", channel)
    stage.cluster.change(channel, single("s1"))
    stage.run(1.0)
    refused = [reason for reason in stage.cluster.moves.refused if "does not observe it" in reason]
    stage.expect("the move is refused, with the reason", len(refused) == 1, channel)
    stage.publish(publisher, channel, times=3)
    server.refuse = None
    stage.wait("the agent observes", lambda: server.observed)
    stage.run(0.5)
    stage.move(channel, "s1")
    stage.publish(publisher, channel)


def forged_acknowledgement(stage: Stage) -> None:
    """Case 61. Somebody acknowledges a plan in the name of an agent that has not heard of it.

    The agent's own reports show that two processes speak for the server, so neither is believed.
    """
    channel = stage.channel_with_subscriber("s1")
    publisher = stage.publisher("P", channel)
    with stage.deaf_agent("s1"):
        stage.cluster.change(channel, single("s2"))
        for _ in range(40):
            plan = stage.cluster.stored_plan("s1")
            assert plan is not None
            forged = pack_control(PlanAck("s1", FORGED, plan.version))
            stage.cluster.servers["s1"].inject(BALANCER_CHANNEL, forged)
            stage.run(0.05)
        stage.expect("the move waits for the agent itself", stage.entry(channel).phase is Phase.PREPARED, channel)
    stage.wait_settled(channel)
    stage.publish(publisher, channel)


def forged_entry(stage: Stage) -> None:
    """Case 64. Somebody rewrites an entry of the plan that s1 stores, and leaves the version as it was.

    The balancer finds it, and writes the plan again: so a client that reads the plan there goes where others are.
    """
    channel = stage.channel_at("s1")
    stage.move(channel, "s2")
    plan = stage.cluster.stored_plan("s1")
    assert plan is not None
    forged = replace(plan.entries[channel], route=replace(plan.entries[channel].route, assignment=single("s3")))
    stage.cluster.servers["s1"].hash(PLAN_KEY)[b"c:" + channel] = pack_entry(forged)
    stage.expect("the entry is forged", stage.entry(channel, "s1") == forged, channel)
    stage.wait("the entry is right", lambda: stage.is_at(channel, "s2", Phase.SETTLED))
    stage.subscriber("S", channel)
    stage.publisher("P", channel)


def forged_epoch(stage: Stage) -> None:
    """Case 107. While no balancer runs, somebody writes an entry with the last of all epochs to every stored plan.

    Neither clients nor the next balancer follow it: no later change of the channel would be newer.
    """
    channel = stage.channel_at("s1")
    stage.move(channel, "s2")
    plan, balancer = stage.cluster.stored_plan("s1"), stage.cluster.balancer
    assert plan is not None
    balancer.crash()
    last = pack_entry(replace(plan.entries[channel], route=Route(EPOCH_MAX, single("s3"))))
    copies, field = [stage.cluster.servers[server].hash for server in stage.cluster.present], b"c:" + channel
    for copy in copies:
        copy(PLAN_KEY)[field] = last
    stage.run(1.0)
    balancer.start()
    stage.wait("the entry is overwritten", lambda: all(copy(PLAN_KEY).get(field) != last for copy in copies))
    stage.subscriber("S", channel)
    publisher = stage.publisher("P", channel)
    stage.move(channel, "s3")
    stage.publish(publisher, channel)


def forged_copies(servers: tuple[str, ...], stage: Stage) -> None:
    """Case 129. While no balancer runs, somebody writes another place into some stored plans, and a client believes it.

    Where the next balancer writes the plan again, the agent reads it and has listeners in the wrong place verify again.
    If the balancer reads a forged copy, that of s1, it goes on with it, and all agents must follow.
    """
    home = servers[0]
    channel = stage.channel_at(home)
    stage.move(channel, "s1" if home == "s2" else "s2")
    publisher = stage.publisher("P", channel)
    plan, balancer = stage.cluster.stored_plan("s1"), stage.cluster.balancer
    assert plan is not None
    balancer.crash()
    entry = plan.entries[channel]
    forged = pack_entry(replace(entry, route=replace(entry.route, assignment=single("s3"))))
    for server in servers:
        stage.cluster.servers[server].hash(PLAN_KEY)[b"c:" + channel] = forged
    subscriber = stage.subscriber("S", channel)
    stage.run(1.0)
    balancer.start()
    copies = [stage.cluster.servers[server].hash for server in stage.cluster.present]
    fields = (b"@version", b"c:" + channel)
    before = b"%d" % plan.version
    stage.wait(
        "the balancer writes all copies",
        lambda: (
            len(stored := {tuple(map(copy(PLAN_KEY).get, fields)) for copy in copies}) == 1
            and next(iter(stored))[0] != before
        ),
    )
    stage.run(1.0)
    stage.cluster.audit.calm()
    since = stage.world.now
    stage.publish(publisher, channel, times=3)
    stage.run(0.5)
    got = len(stage.records("DELIVERS", since=since, who=subscriber.name, channel=channel))
    stage.expect(f"the subscriber gets 3 messages, not {got}", got == 3, channel)


SCENARIOS: dict[str, Scenario] = {
    "60-may-not-observe": Scenario(may_not_observe, opened=False),
    "61-forged-acknowledgement": Scenario(forged_acknowledgement),
    "64-forged-entry": Scenario(forged_entry),
    "107-forged-epoch": Scenario(forged_epoch),
    "129-forged-copies": Scenario(partial(forged_copies, ("s2", "s3")), losses_allowed=True),
    "129-forged-copies-read": Scenario(partial(forged_copies, ("s1", "s3")), losses_allowed=True),
    "129-forged-copies-only": Scenario(partial(forged_copies, ("s1", "s2", "s3")), losses_allowed=True),
}
