"""Which faults a run has, drawn from the seed.

A profile says with that which guarantees hold strictly: delays, pauses, plan storms, a balancer that comes and goes and
control messages that get lost or come twice must cost no message at all (G1-G4); where servers, links, agents or
clients fail, every loss must be reported (G5).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from dynamoth.plan.compatibility import CompatibilityRule
from dynamoth_sim.cluster import AMPLE_BYTES_PER_S
from dynamoth_sim.load import upgrade
from dynamoth_sim.load.workload import DEFAULT_WORKLOAD, WorkloadOptions
from dynamoth_sim.world.network import DEFAULT_DELAYS, Delays

SERVERS_MIN = 3
"""A balancer needs more than half of the servers, so one of three may be gone."""

LEAVER = "s1"
"""The server that leaves, where one does."""


@dataclass(frozen=True, slots=True)
class Profile:
    """The faults of a run."""

    name: str
    #: Whether losses may happen, as long as subscribers report them.
    losses_allowed: bool
    #: What goes wrong: names of faults of :class:`faults.Chaos`, or "meddle".
    faults: tuple[str, ...] = ()
    #: The mean time between two faults.
    interval_s: float = 0.3
    delays: Delays = DEFAULT_DELAYS
    workload: WorkloadOptions = DEFAULT_WORKLOAD
    #: How many copies for one server a dispatcher keeps; few make it lose some, and say so.
    forwards_max: int = 1000
    servers: int = 3
    #: What a server can send: little makes the balancer move channels by itself.
    outgoing_bytes_per_s_max: int = AMPLE_BYTES_PER_S
    #: How many servers the balancer itself spreads a channel over.
    replicas_max: int = 1
    #: Servers that the balancer drains.
    draining: frozenset[str] = frozenset()
    #: The compatibility rules with which the cluster begins.
    compatibility: tuple[CompatibilityRule, ...] = ()
    #: Faults that happen once each, early.
    once: tuple[str, ...] = ()
    #: How long applications work and things go wrong, in virtual time.
    work_s: float = 2.5
    #: How long clients use one server alone, at most, before agents and a balancer start; 0: from the first they are.
    alone_s: float = 0.0


SLOW = Delays(base_s=0.0005, jitter_s=0.005, spike_s=0.1, spike_ratio=0.03)

LOSSLESS_FAULTS = (
    "pause agent",
    "pause balancer",
    "pause client",
    "stall server",
    "crash balancer",
    "cut balancer",
    "rival balancer",
)
LOSSY_FAULTS = (
    "cut client",
    "cut agent",
    "restart server",
    "restore server",
    "crash agent",
    "crash client",
    "part agent",
    "part client",
    "freeze server",
    "overflow",
    "slow reader",
    "flood agent",
)

PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile("calm", losses_allowed=False),
        Profile("delays", losses_allowed=False, delays=SLOW),
        Profile(
            "storm", losses_allowed=False, delays=SLOW, workload=WorkloadOptions(move_interval_s=0.1, storm_ratio=0.5)
        ),
        Profile("pauses", losses_allowed=False, faults=LOSSLESS_FAULTS[:4], delays=SLOW),
        Profile("balancer", losses_allowed=False, faults=LOSSLESS_FAULTS[4:], delays=SLOW),
        Profile("control", losses_allowed=False, faults=("meddle",), delays=SLOW),
        Profile(
            "raw", losses_allowed=False, delays=SLOW, faults=("notify",), workload=WorkloadOptions(raw_publishers=2)
        ),
        Profile(
            "upgrade",
            losses_allowed=False,
            faults=("pause agent", "pause balancer", "pause client", "stall server", "crash balancer", "cut balancer"),
            delays=SLOW,
            interval_s=0.6,
            compatibility=upgrade.RULES,
            workload=WorkloadOptions(raw_publishers=1, plain_listeners=2),
            work_s=13.0,
        ),
        Profile(
            "game",
            losses_allowed=False,
            delays=SLOW,
            workload=WorkloadOptions(players=4, publishers=1, subscribers=1),
            outgoing_bytes_per_s_max=20_000,
            replicas_max=3,
        ),
        Profile(
            "draining",
            losses_allowed=False,
            faults=LOSSLESS_FAULTS,
            delays=SLOW,
            draining=frozenset({"s1"}),
            interval_s=0.6,
        ),
        Profile(
            "growing",
            losses_allowed=True,
            faults=("pause agent", "pause client", "stall server", "cut client", "crash client", "crash balancer"),
            delays=SLOW,
            interval_s=0.4,
            workload=WorkloadOptions(pattern_subscribers=1),
            alone_s=1.0,
            work_s=4.0,
        ),
        Profile(
            "joining",
            losses_allowed=False,
            faults=("pause agent", "pause client", "stall server", "crash balancer", "cut balancer"),
            delays=SLOW,
            interval_s=0.6,
            once=("add server",),
            workload=WorkloadOptions(pattern_subscribers=2),
            work_s=4.0,
        ),
        Profile(
            "leaving",
            losses_allowed=False,
            faults=("pause agent", "pause client", "stall server", "cut balancer"),
            delays=SLOW,
            interval_s=0.6,
            once=("drain server",),
            workload=WorkloadOptions(leaver=LEAVER, idle_ratio=0.4),
        ),
        Profile(
            "dying",
            losses_allowed=True,
            faults=("pause agent", "pause client", "stall server", "crash balancer", "cut balancer"),
            delays=SLOW,
            interval_s=0.6,
            once=("kill server",),
            workload=WorkloadOptions(leaver=LEAVER, pattern_subscribers=2, idle_ratio=0.4),
        ),
        Profile(
            "left",
            losses_allowed=True,
            faults=("pause agent", "pause client", "stall server", "crash balancer", "hang agent"),
            delays=SLOW,
            interval_s=0.6,
            once=("kill server",),
            workload=WorkloadOptions(idle_ratio=0.4, visit_interval_s=0.1, move_interval_s=0.4),
        ),
        Profile(
            "flushed",
            losses_allowed=True,
            faults=("flush server", "flush server", "crash balancer", "pause balancer", "cut balancer", "pause client"),
            delays=SLOW,
            once=("standby balancer",),
        ),
        Profile(
            "refusals",
            losses_allowed=False,
            faults=("refuse writes", "refuse writes", "crash balancer", "cut balancer", "pause client", "pause agent"),
            delays=SLOW,
            once=("standby balancer",),
        ),
        Profile(
            "parting",
            losses_allowed=True,
            faults=("last words",),
            interval_s=0.1,
            workload=WorkloadOptions(publishers=5, idle_ratio=0.8, move_interval_s=0.3, replicated_ratio=0.2),
        ),
        Profile("mixed", losses_allowed=False, faults=(*LOSSLESS_FAULTS, "meddle"), delays=SLOW, interval_s=0.2),
        Profile("connections", losses_allowed=True, faults=("cut client", "cut agent"), delays=SLOW),
        Profile(
            "servers", losses_allowed=True, faults=("restart server", "restore server", "freeze server"), interval_s=0.8
        ),
        Profile(
            "agents",
            losses_allowed=True,
            faults=("crash agent", "part agent", "pause agent"),
            interval_s=0.5,
            forwards_max=30,
        ),
        Profile(
            "visitors",
            losses_allowed=True,
            faults=("hang agent", "lag agent", "crash agent", "crash client"),
            interval_s=0.5,
            workload=WorkloadOptions(visit_interval_s=0.05, move_interval_s=0.6),
        ),
        Profile(
            "readers",
            losses_allowed=True,
            faults=("slow reader", "pause client", "pause agent"),
            workload=WorkloadOptions(move_interval_s=0.3),
        ),
        Profile(
            "flooded",
            losses_allowed=True,
            faults=("flood agent", "flood agent", "pause client", "cut balancer", "crash balancer"),
            interval_s=0.8,
            outgoing_bytes_per_s_max=20_000,
            work_s=4.0,
        ),
        Profile("clients", losses_allowed=True, faults=("crash client", "part client", "overflow", "pause client")),
        Profile(
            "everything",
            losses_allowed=True,
            faults=(*LOSSLESS_FAULTS, *LOSSY_FAULTS, "add server", "notify", "meddle"),
            delays=SLOW,
            interval_s=0.2,
            workload=WorkloadOptions(storm_ratio=0.2),
            forwards_max=30,
        ),
    )
}


def draw_profile(random: Random) -> Profile:
    """Choose a profile; the number of channels and the pace vary besides."""
    profile = random.choice(list(PROFILES.values()))
    workload = replace(
        profile.workload,
        channels=random.randint(2, 4),
        churn_interval_s=random.choice((0.0, 0.2, 0.6)),
        think_s_max=random.choice((0.03, 0.08, 0.2)),
    )
    servers = random.choice((2, 3, 3, 4))
    if profile.workload.leaver or "kill server" in profile.once:
        servers = max(servers, SERVERS_MIN)
    return replace(profile, workload=workload, servers=servers)
