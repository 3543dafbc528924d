"""Which faults a run has, drawn from the seed.

So a profile says which guarantees hold strictly. Delays, pauses, plan storms, a balancer that comes and goes, and
control messages that get lost or come twice must cost no message (G1 to G4). Where servers, links, agents or clients
fail, every loss must be reported (G5).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

from dynamoth.plan.slots import SLOTS
from dynamoth_sim.cluster import Setting
from dynamoth_sim.load import upgrade
from dynamoth_sim.load.workload import DEFAULT_WORKLOAD, WorkloadOptions
from dynamoth_sim.world.network import DEFAULT_DELAYS, Delays

SERVERS_MIN = 3
"""A balancer needs more than half of the servers, so one of three may be gone."""

LEAVER = "s1"
"""The server that leaves, where one does."""


LITTLE_BYTES_PER_S = 20_000
"""The capacity of servers where the balancer is to have reasons to move channels."""

FEW_FORWARDS = 30
"""Dispatchers that keep no more copies for one server lose some."""

SLOW = Delays(base_s=0.0005, jitter_s=0.005, spike_s=0.1, spike_ratio=0.03)


@dataclass(frozen=True, slots=True)
class Profile(Setting):
    """The faults of a run."""

    name: str
    #: What goes wrong: names of faults of :class:`faults.Chaos`, or "meddle".
    faults: tuple[str, ...] = ()
    #: The mean time between two faults.
    interval_s: float = 0.3
    delays: Delays = field(default=SLOW, kw_only=True)
    workload: WorkloadOptions = DEFAULT_WORKLOAD
    #: Faults that happen once each, early.
    once: tuple[str, ...] = ()
    #: How long applications work and things go wrong, in virtual time.
    work_s: float = 2.5
    #: How long clients use one server alone, at most, before agents and a balancer start; 0: from the first they are.
    alone_s: float = 0.0


PAUSES = ("pause agent", "pause client", "stall server")
BALANCER_LOST = ("crash balancer", "cut balancer")
LOSSLESS_FAULTS = ("pause agent", "pause balancer", "pause client", "stall server", *BALANCER_LOST, "rival balancer")
LOSSY_FAULTS = (
    *("cut client", "cut agent", "restart server", "restore server", "crash agent", "crash client", "part agent"),
    *("part client", "freeze server", "overflow", "slow reader", "flood agent"),
)

LOSSLESS = (
    Profile("calm", delays=DEFAULT_DELAYS),
    Profile("delays"),
    Profile("storm", workload=WorkloadOptions(move_interval_s=0.1, storm_ratio=0.5)),
    Profile("pauses", LOSSLESS_FAULTS[:4]),
    Profile("balancer", LOSSLESS_FAULTS[4:]),
    Profile("control", ("meddle",)),
    Profile("raw", ("notify",), workload=WorkloadOptions(raw_publishers=2)),
    Profile(
        "upgrade",
        LOSSLESS_FAULTS[:6],
        interval_s=0.6,
        compatibility=upgrade.RULES,
        workload=WorkloadOptions(raw_publishers=1, plain_listeners=2),
        work_s=13.0,
    ),
    Profile(
        "game",
        workload=WorkloadOptions(players=4, publishers=1, subscribers=1),
        outgoing_bytes_per_s_max=LITTLE_BYTES_PER_S,
        replicas_max=3,
    ),
    Profile("draining", LOSSLESS_FAULTS, interval_s=0.6, draining=frozenset({LEAVER})),
    Profile(
        "joining",
        (*PAUSES, *BALANCER_LOST),
        interval_s=0.6,
        once=("add server",),
        workload=WorkloadOptions(pattern_subscribers=2),
        work_s=4.0,
    ),
    Profile(
        "leaving",
        (*PAUSES, "cut balancer"),
        interval_s=0.6,
        once=("drain server",),
        workload=WorkloadOptions(leaver=LEAVER, idle_ratio=0.4),
        changes_per_event_max=SLOTS,  # busy channels leave with the last slots
    ),
    Profile(
        "refusals",
        ("refuse writes", "refuse writes", *BALANCER_LOST, "pause client", "pause agent"),
        once=("standby balancer",),
    ),
    Profile("mixed", (*LOSSLESS_FAULTS, "meddle"), interval_s=0.2),
)
"""Profiles whose faults may lose no message."""

LOSSY = (
    Profile(
        "growing", (*PAUSES, "cut client", "crash client", "crash balancer"), interval_s=0.4, alone_s=1.0, work_s=4.0
    ),
    Profile(
        "dying",
        (*PAUSES, *BALANCER_LOST),
        interval_s=0.6,
        once=("kill server",),
        workload=WorkloadOptions(leaver=LEAVER, pattern_subscribers=2, idle_ratio=0.4),
    ),
    Profile(
        "left",
        (*PAUSES, "crash balancer", "hang agent"),
        interval_s=0.6,
        once=("kill server",),
        workload=WorkloadOptions(idle_ratio=0.4, visit_interval_s=0.1, move_interval_s=0.4),
    ),
    Profile(
        "flushed",
        ("flush server", "flush server", *BALANCER_LOST, "pause balancer", "pause client"),
        once=("standby balancer",),
    ),
    Profile(
        "parting",
        ("last words",),
        interval_s=0.1,
        delays=DEFAULT_DELAYS,
        workload=WorkloadOptions(publishers=5, idle_ratio=0.8, replicated_ratio=0.2),
    ),
    Profile("connections", ("cut client", "cut agent")),
    Profile("servers", ("restart server", "restore server", "freeze server"), interval_s=0.8, delays=DEFAULT_DELAYS),
    Profile(
        "agents",
        ("crash agent", "part agent", "pause agent"),
        interval_s=0.5,
        delays=DEFAULT_DELAYS,
        forwards_max=FEW_FORWARDS,
    ),
    Profile(
        "visitors",
        ("hang agent", "lag agent", "crash agent", "crash client"),
        interval_s=0.5,
        delays=DEFAULT_DELAYS,
        workload=WorkloadOptions(visit_interval_s=0.05, move_interval_s=0.6),
    ),
    Profile("readers", ("slow reader", "pause client", "pause agent"), delays=DEFAULT_DELAYS),
    Profile(
        "flooded",
        ("flood agent", "flood agent", "pause client", "cut balancer", "crash balancer"),
        interval_s=0.8,
        delays=DEFAULT_DELAYS,
        outgoing_bytes_per_s_max=LITTLE_BYTES_PER_S,
        report_interval_s=0.25,
        work_s=4.0,
    ),
    Profile("clients", ("crash client", "part client", "overflow", "pause client"), delays=DEFAULT_DELAYS),
    Profile(
        "everything",
        (*LOSSLESS_FAULTS, *LOSSY_FAULTS, "add server", "remove server", "notify", "meddle"),
        interval_s=0.2,
        workload=WorkloadOptions(storm_ratio=0.2),
        forwards_max=FEW_FORWARDS,
    ),
)
"""Profiles whose faults may lose messages; subscribers must report each loss."""

PROFILES: dict[str, Profile] = {
    profile.name: profile for profile in (*LOSSLESS, *(replace(profile, losses_allowed=True) for profile in LOSSY))
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
