"""Scripts about components that die, hang or come back: what replaces them, and what they may still do.

See ``scenarios`` for the words; ``mutations`` has what must make each of them fail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from dynamoth.plan.plan import Phase, single
from dynamoth_balancer.machine import BalancerMachine
from dynamoth_balancer.machine import Stage as BalancerStage
from dynamoth_sim.scenarios.stage import Scenario, Stage
from dynamoth_sim.world.process import Process

TAKEOVER_S_MAX = 2.2
"""How long nobody leads: the lease of 0.9 s, four renewals of 0.3 s, and 0.1 s for the rest."""

LONG_LEASE_S = 3.0

HOUR_S = 3600.0


def stale_write(stage: Stage) -> None:
    """Case 90. A write of a balancer is on its way to s1 while the balancer is paused for longer than its lease.

    A standby takes over and moves the same channel elsewhere. Then the write arrives: s1 refuses it.
    """
    _start_standby(stage)
    channel = stage.channel_with_subscriber("s1")
    publisher = stage.publisher("P", channel)
    balancer, rival = stage.cluster.balancer, stage.cluster.rival
    with stage.held("balancer", "s1", to_server=True):
        stage.cluster.change(channel, single("s2"))
        stage.wait("the change is stored at s2", lambda: stage.entry(channel, "s2").phase is Phase.PREPARED)
        balancer.pause()
        stage.wait("the standby leads", lambda: _leads(rival))
        stage.wait_settled(channel)
        stage.move(channel, "s3")
        stage.publish(publisher, channel)
        version = _version(stage, "s1")
    stage.run(0.02)
    stage.expect(
        f"s1 stores {_version(stage, 's1')}, not less than {version}", _version(stage, "s1") >= version, channel
    )
    stage.expect("the channel is at s3", stage.entry(channel).route.assignment == single("s3"), channel)
    balancer.resume()
    stage.run(1.0)
    stage.expect("the standby leads still, and alone", _leads(rival) and not _leads(balancer))
    stage.publish(publisher, channel)


def leader_fails(fail: Callable[[Process], None], stage: Stage) -> None:
    """Case 91. The balancer dies, or is paused, in the middle of a move. A standby leads soon, and ends the move."""
    _start_standby(stage)
    channel = stage.channel_with_subscriber("s1")
    publisher = stage.publisher("P", channel)
    stage.run(2.0)
    with stage.deaf_agent("s2"):
        stage.cluster.change(channel, single("s2"))
        stage.wait("the change is stored", lambda: stage.entry(channel, "s2").phase is Phase.PREPARED)
        fail(stage.cluster.balancer)
    rival = stage.cluster.rival
    stage.wait(f"the standby leads within {TAKEOVER_S_MAX} s", lambda: _leads(rival), TAKEOVER_S_MAX)
    stage.wait("the move settles", partial(stage.is_at, channel, "s2", Phase.SETTLED))
    stage.publish(publisher, channel)


def clocks_jump(stage: Stage) -> None:
    """Case 92. The clocks of all servers jump ahead while the balancer is paused, so that its lease expires early.

    When it goes on, it believes that it leads, and so does the standby. But it can write nothing, and its term ends.
    """
    options = stage.cluster.options
    stage.cluster.options = replace(options, balancer=replace(options.balancer, lease_s=LONG_LEASE_S))
    stage.open()
    _start_standby(stage)
    channel = stage.channel_with_subscriber("s1")
    publisher = stage.publisher("P", channel)
    balancer, rival = stage.cluster.balancer, stage.cluster.rival
    stage.run(1.0)
    balancer.pause()
    for server in stage.cluster.servers.values():
        server.clock_ahead_s = HOUR_S
    stage.wait("the standby leads", lambda: _leads(rival), LONG_LEASE_S / 2)
    stage.move(channel, "s2")
    machine = balancer.machine
    assert isinstance(machine, BalancerMachine)
    resumed_at = stage.world.now
    balancer.resume()
    stage.wait("the balancer ends its term", lambda: machine.stage is BalancerStage.CONTENDING, LONG_LEASE_S / 4)
    stage.run(1.0)
    stored = stage.records("stores plan", since=resumed_at, who="balancer")
    stage.expect(f"servers store {len(stored)} of its writes, not 0", not stored, channel)
    stage.expect("the standby leads still", _leads(rival))
    stage.publish(publisher, channel)


def _start_standby(stage: Stage) -> None:
    stage.cluster.rival_stands_by = True
    stage.cluster.rival.start()
    stage.run(0.5)


def _leads(process: Process) -> bool:
    return isinstance(process.machine, BalancerMachine) and process.machine.stage is BalancerStage.LEADING


def _version(stage: Stage, server: str) -> int:
    plan = stage.cluster.stored_plan(server)
    return -1 if plan is None else plan.version


SCENARIOS: dict[str, Scenario] = {
    "90-stale-write": Scenario(stale_write),
    "91-balancer-dies": Scenario(partial(leader_fails, Process.crash)),
    "91-balancer-pauses": Scenario(partial(leader_fails, Process.pause)),
    "92-clocks-jump": Scenario(clocks_jump, opened=False),
}
