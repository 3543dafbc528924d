"""Scripts about the resources of servers, and about servers that come and go with the load.

See ``scenarios`` for the words; ``mutations`` has what must make each of them fail.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from dynamoth.plan.plan import Plan, single
from dynamoth_balancer.machine import BalancerMachine
from dynamoth_balancer.provision.fleet import AGENT_GONE, AGENT_GONE_S, Life, StartServer
from dynamoth_balancer.provision.options import FleetOptions
from dynamoth_sim.load.clients import PublisherApp
from dynamoth_sim.load.provisioner import Manner
from dynamoth_sim.scenarios.stage import Scenario, SceneFailed, Stage

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


CAPACITY_BYTES_PER_S = 1_200_000
"""Of each server: ten times what changes of the plan make it send."""

PERIOD_S = 0.05
HEAVY_BYTES, LIGHT_BYTES = 8500, 300
"""On each of ``CHANNELS`` channels, a message of this size per period makes load ratio 0.87 at two servers, or 0.05."""

CHANNELS = 6

FLEET = FleetOptions(
    servers_min=2,
    servers_max=3,
    grow_delay_s=0.5,
    release_delay_s=1.0,
    answer_timeout_s=1.0,
    join_timeout_s=7.0,
    retry_s=0.3,
    retry_s_max=2.4,
)

GROW_S = 8.0
"""A server that is needed takes part within this time: it joins for two seconds, and its channels move there."""

SHRINK_S = 12.0
"""A server that is not needed is freed within this time."""


class _Load:
    """Publishers and subscribers of some channels, and the load that they make."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        half = CHANNELS // 2
        self.channels = [stage.channel_at(server, f"{server}-{n}-") for server in ("s1", "s2") for n in range(half)]
        stage.subscriber("S", *self.channels)
        self.idle = stage.subscriber("I", *self.channels)
        self.publisher: PublisherApp = stage.publisher("P", *self.channels)
        self.bytes = HEAVY_BYTES

    def run(self, duration_s: float) -> None:
        """Publish on each channel once per period."""
        for _ in range(round(duration_s / PERIOD_S)):
            for channel in self.channels:
                self.publisher.publish(channel, size_bytes=self.bytes)
            self.stage.run(PERIOD_S)

    def until(self, what: str, condition: Callable[[], Any], patience_s: float) -> None:
        """Publish until a condition holds; if it does not in time, the scenario fails and ends."""
        for _ in range(round(patience_s / PERIOD_S)):
            if condition():
                return
            self.run(PERIOD_S)
        self.stage.expect(what, False, self.channels[0])
        raise SceneFailed(what)


def _plan(stage: Stage) -> Plan:
    plan = stage.cluster.newest_plan()
    assert plan is not None, "a cluster that was opened stores a plan"
    return plan


def _started(stage: Stage) -> list[str]:
    """Return the servers of the plan that the provisioner has started."""
    return [id_ for id_ in _plan(stage).servers if id_.startswith("auto-")]


def _at(stage: Stage, load: _Load, server: str) -> int:
    """Return how many of the channels are at a server."""
    return sum(_plan(stage).entry(channel).route.assignment == single(server) for channel in load.channels)


def _lives(stage: Stage) -> list[Life]:
    """Return the stages of the servers that the balancer has asked for."""
    balancer = stage.cluster.balancer.machine
    assert isinstance(balancer, BalancerMachine) and balancer.scaling is not None
    return list(balancer.scaling.fleet.lives.values())


def _grown(stage: Stage) -> tuple[_Load, str]:
    """Have a cluster grow under load; return the load, and the new server, which has channels."""
    load = _Load(stage)
    load.until("a server is added under load", lambda: _started(stage), GROW_S)
    [server] = _started(stage)
    load.until(f"{server} gets channels", lambda: _at(stage, load, server), GROW_S)
    return load, server


def grow_and_shrink(stage: Stage) -> None:
    """Case 110. A server is added under load and takes channels; when the load is low, it is emptied and freed.

    It is freed only after everybody has left it. An idle subscriber has moved there and back.
    """
    load, server = _grown(stage)
    load.run(1.0)
    stage.expect("no more servers than needed", _started(stage) == [server])
    load.bytes = LIGHT_BYTES
    load.until(f"{server} is freed", lambda: server in stage.cluster.gone, SHRINK_S)
    stage.expect("the plan forgets it", server not in _plan(stage).servers)
    stage.expect("nothing is left with the provisioner", not stage.cluster.provisioner.running)
    stage.expect_gaps(0, load.channels[0])


def release_abandoned(stage: Stage) -> None:
    """Case 111. While a server is emptied, the load rises again: it stays, and gets channels again."""
    load, server = _grown(stage)
    load.bytes = LIGHT_BYTES
    load.until(f"{server} is released", lambda: Life.DRAINING in _lives(stage), SHRINK_S)
    load.bytes = HEAVY_BYTES
    load.until("the release is abandoned", lambda: _lives(stage) == [Life.ACTIVE], GROW_S)
    load.until(f"{server} has channels again", lambda: _at(stage, load, server), GROW_S)
    load.run(2.0)
    stage.expect("it stays", _started(stage) == [server])
    asked = stage.cluster.provisioner.times(StartServer)
    stage.expect(f"no other server is asked for: {asked}", len(asked) == 1)


def provisioner_fails(stage: Stage) -> None:
    """Case 112. A provisioner that fails is asked ever more rarely, and reported; then it works."""
    _troubled(stage, Manner.FAILS, "no credit left")


def provisioner_hangs(stage: Stage) -> None:
    """Case 113. A provisioner that does not answer is asked again after a timeout, ever more rarely."""
    _troubled(stage, Manner.HANGS, "has not answered")


def provisioner_lies(stage: Stage) -> None:
    """Case 114. A provisioner announces a server that does not run. It is given up, freed, and tried again."""
    _troubled(stage, Manner.LIES, "cannot be added")


def without_agent(stage: Stage) -> None:
    """Case 115. A provisioner starts a server without an agent: that is taken out of the plan again."""
    _troubled(stage, Manner.HALF, "its agent does not report")


REPORTED_S = 13.0
"""The balancer reports a trouble within this time: it waits for a server's report for seven seconds."""

TROUBLE_S = 9.0
ASKED_MAX = 8
"""Without longer and longer pauses a provisioner would be asked 18 times in this time."""


def _troubled(stage: Stage, manner: Manner, reason: str) -> None:
    """Play a provisioner that does not do its work for a while; nothing else may suffer from that."""
    stage.cluster.provisioner.manner = manner
    load = _Load(stage)
    told: list[str] = []

    def is_reported() -> bool:
        balancer = stage.cluster.balancer.machine
        assert isinstance(balancer, BalancerMachine)
        told.extend(each.reason for each in balancer.health.problems if each.kind == "provisioner_failed")
        return any(reason in text for text in told)

    load.until(f"the balancer reports: {reason}", is_reported, REPORTED_S)
    load.run(TROUBLE_S)
    asked = len(stage.cluster.provisioner.times(StartServer))
    stage.expect(f"it is asked again, and not too often: {asked} times", 2 <= asked <= ASKED_MAX)
    stage.expect("the plan lists only servers that take part", not _started(stage) or manner is Manner.HALF)
    stage.cluster.provisioner.manner = Manner.WORKS
    load.until("a server takes part when it works again", lambda: _lives(stage).count(Life.ACTIVE) == 1, 2 * GROW_S)
    load.until(
        "and nothing else runs", lambda: len(stage.cluster.provisioner.running) == len(_started(stage)) == 1, SHRINK_S
    )


def balancer_dies_in_between(stage: Stage) -> None:
    """Case 116. The balancer dies after it has asked for a server: the next one frees that, and asks for another."""
    stage.cluster.provisioner.manner = Manner.FORGETS
    load = _Load(stage)
    load.until("a server is asked for", lambda: stage.cluster.provisioner.running, GROW_S)
    [orphan] = stage.cluster.provisioner.running
    stage.cluster.balancer.crash()
    stage.cluster.provisioner.manner = Manner.WORKS
    load.run(0.5)
    stage.cluster.balancer.start()
    load.until(f"{orphan} is freed", lambda: orphan in stage.cluster.gone, GROW_S)
    load.until("another server takes part", lambda: _lives(stage) == [Life.ACTIVE], GROW_S)
    stage.expect(f"{orphan} was never in the plan", orphan not in _plan(stage).administration.removed)


def successor_releases(stage: Stage) -> None:
    """Case 117. Another balancer than the one that added a server knows that it may be freed, and frees it."""
    load, server = _grown(stage)
    stage.cluster.restart_balancer()
    load.bytes = LIGHT_BYTES
    load.until(f"{server} is freed", lambda: server in stage.cluster.gone, 2 * SHRINK_S)


def successor_goes_on(stage: Stage) -> None:
    """Case 119. The balancer dies while a server is emptied: the next one goes on, and gives nothing back to it."""
    load, server = _grown(stage)
    load.bytes = LIGHT_BYTES
    load.until(f"{server} is released", lambda: Life.DRAINING in _lives(stage), 2 * SHRINK_S)
    load.until(f"a channel leaves {server}", lambda: _at(stage, load, server) < CHANNELS, GROW_S)
    stage.cluster.restart_balancer()
    load.until("the next one knows the server", lambda: _lives(stage), GROW_S)
    lives: set[Life] = set()

    def is_freed() -> bool:
        lives.update(_lives(stage))
        return server in stage.cluster.gone

    load.until(f"{server} is freed", is_freed, 2 * SHRINK_S)
    stage.expect(f"its release went on all the time: {lives}", Life.ACTIVE not in lives)


def dies_while_joining(stage: Stage) -> None:
    """Case 118. A server dies before it takes part: it leaves the plan again, and another one is started."""
    load = _Load(stage)
    load.until("a server is added under load", lambda: _started(stage), GROW_S)
    [dead] = _started(stage)
    stage.cluster.servers[dead].stop("it dies")
    stage.cluster.agents[dead].crash()
    load.until(f"{dead} is freed", lambda: dead in stage.cluster.gone, 2 * SHRINK_S)
    load.until("another server takes part", lambda: _lives(stage) == [Life.ACTIVE], 2 * GROW_S)
    stage.expect("the dead one has left the plan", dead not in _plan(stage).servers)


def _problems(stage: Stage) -> str:
    """Return the problems that the balancer shows."""
    balancer = stage.cluster.balancer.machine
    assert isinstance(balancer, BalancerMachine)
    return "; ".join(f"{problem.subject}: {problem.reason}" for problem in balancer.health.problems)


def _started_again(stage: Stage, server: str) -> int:
    """Return how often the provisioner was asked to start a server again whose agent was gone."""
    return [request for _, request in stage.cluster.provisioner.requests].count(StartServer(server, AGENT_GONE))


def _run_id(stage: Stage, server: str) -> str:
    """Return which run of Redis a server is."""
    return stage.cluster.servers[server].run_id


AGENT_TROUBLE_S = 5.0
"""So long the provisioner fails: without longer and longer pauses it would be asked 11 times."""


def agent_dies_later(stage: Stage) -> None:
    """Case 131. The agent of a server that takes part dies: the provisioner starts it again, whichever balancer leads.

    It may fail at first: that is reported, and it is asked again, not too often. Then channels can leave that server.
    """
    load, server = _grown(stage)
    agent, provisioner, run_id = stage.cluster.agents[server], stage.cluster.provisioner, _run_id(stage, server)
    for is_new_leader, manner in ((False, Manner.WORKS), (True, Manner.WORKS), (False, Manner.FAILS)):
        asked = _started_again(stage, server)
        provisioner.manner = manner
        agent.crash()
        if is_new_leader:
            stage.cluster.restart_balancer()
        if manner is Manner.FAILS:
            load.until("the failure is reported", lambda: f"{server}: its agent is gone" in _problems(stage), GROW_S)
            load.run(AGENT_TROUBLE_S)
            again = _started_again(stage, server) - asked
            stage.expect(f"it is asked again, and not too often: {again} times", 2 <= again <= ASKED_MAX)
            provisioner.manner = Manner.WORKS
        load.until(f"the agent of {server} runs again", lambda: agent.alive, GROW_S)
        load.until("no problem is left", lambda: not _problems(stage), GROW_S)
        if manner is Manner.WORKS:
            again = _started_again(stage, server) - asked
            stage.expect(f"the provisioner is asked once, not {again} times", again == 1)
    load.bytes = LIGHT_BYTES
    load.until(f"{server} is freed", lambda: server in stage.cluster.gone, 2 * SHRINK_S)
    stage.expect("its Redis server was never restarted", _run_id(stage, server) == run_id)


def server_dies_later(hangs: bool, stage: Stage) -> None:
    """Case 132. A server dies, or hangs, soon after its agent: it is not started again, as others take what it has."""
    load, server = _grown(stage)
    stage.cluster.agents[server].crash()
    load.run(AGENT_GONE_S / 2)
    with ExitStack() as stack:
        if hangs:
            stack.enter_context(stage.held("balancer", server, to_server=True))
        else:
            stage.cluster.servers[server].stop("it dies")
        load.until(f"{server} is freed", lambda: server in stage.cluster.gone, 2 * SHRINK_S)
    again = _started_again(stage, server)
    stage.expect(f"{server} is not started again, but {again} times", not again)


PATIENT = replace(FLEET, release_delay_s=4.0)
"""A balancer that has forgotten a release begins it anew after this time."""

WITHOUT_LOSSES: dict[str, Callable[[Stage], None]] = {
    "110-grow-and-shrink": grow_and_shrink,
    "111-release-abandoned": release_abandoned,
    "112-provisioner-fails": provisioner_fails,
    "113-provisioner-hangs": provisioner_hangs,
    "114-provisioner-lies": provisioner_lies,
    "115-server-without-agent": without_agent,
    "116-balancer-dies-in-between": balancer_dies_in_between,
    "117-successor-releases": successor_releases,
    "118-dies-while-joining": dies_while_joining,
    "119-successor-goes-on": successor_goes_on,
}

WITH_LOSSES: dict[str, Callable[[Stage], None]] = {
    "131-agent-dies-later": agent_dies_later,
    "132-server-dies-later": partial(server_dies_later, False),
    "132-server-hangs-later": partial(server_dies_later, True),
}
"""Here a server or an agent dies while it carries channels."""

SCENARIOS: dict[str, Scenario] = {
    "74-short-of-cpu": Scenario(short_of_cpu, cpu_ratio_max=CPU_RATIO_MAX),
    **{
        name: Scenario(
            play,
            servers=2,
            outgoing_bytes_per_s_max=CAPACITY_BYTES_PER_S,
            fleet=PATIENT if play is successor_goes_on else FLEET,
            report_interval_s=0.2,
            losses_allowed=name in WITH_LOSSES,
        )
        for name, play in {**WITHOUT_LOSSES, **WITH_LOSSES}.items()
    },
}
