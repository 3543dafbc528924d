"""Every threshold, interval and bound of a balancer machine: its settings, and options that no user needs to set."""

from __future__ import annotations

from dataclasses import dataclass

from dynamoth.errors import ConfigError
from dynamoth.plan.compatibility import CompatibilityRule
from dynamoth.plan.plan import JOIN_S
from dynamoth.plan.ring import VIRTUAL_NODES
from dynamoth.settings.declare import check_ranges, setting
from dynamoth.settings.sections import PlanningSettings
from dynamoth_balancer.decide.resources import Bounds

INTERRUPTIONS_WINDOW_S = 30.0


@dataclass(frozen=True, kw_only=True)
class BalancerOptions(PlanningSettings):
    """The options of a :class:`~dynamoth_balancer.machine.BalancerMachine`.

    ``draining``: ids of the servers to empty. They get no channels, and their channels are moved away.
    ``compatibility``: the compatibility rules of a new cluster. A stored plan has its own, which administrators change.
    ``take_over``: lead though half of the servers or more are dead; see ``install.quorum``.

    Raises:
        ConfigError: a value is out of range; the text names it.

    """

    draining: frozenset[str] = frozenset()
    compatibility: tuple[CompatibilityRule, ...] = ()
    take_over: bool = False

    # Decisions.

    load_ratio_accept: float | None = setting(
        None, "no server is filled above it, unless it stays much_better_ratio below the source; None: load_ratio_safe"
    )
    much_better_ratio: float = setting(
        0.20, "a target may pass load_ratio_accept if it stays this far below the source's ratio before", above=0
    )
    improvement_ratio_min: float = setting(
        0.05,
        "a move leaves its target this far below the source's load ratio before, and all moves away from a server lower"
        " its load ratio by this much",
        minimum=0,
    )
    channel_ratio_min: float = setting(0.001, "a channel with a smaller share of its server is not moved", minimum=0)
    slot_subscriptions_max: int = setting(
        2000, "about as many subscriptions move with the slots of one step, away from a server or to it", minimum=1
    )
    silent_s: float = setting(
        600.0,
        "a channel without load in reports for this time returns to its slot, so that the plan need not name it",
        unit="s",
        above=0,
    )
    slot_load_ratio_max: float = setting(
        0.1, "a step moves slots with at most this much load ratio away from a server, or to it; at least one", above=0
    )
    reports_min: int = setting(3, "a server takes part in decisions after this many reports", minimum=1)
    decision_interval_s: float = setting(1.0, "time between two looks whether a decision is due", unit="s", above=0)

    # Servers and agents.

    join_s: float = setting(
        JOIN_S,
        "a server without channels gets none for this time: pattern clients subscribe first",
        unit="s",
        minimum=0,
    )
    interruptions_window_s: float = setting(
        INTERRUPTIONS_WINDOW_S, "an agent disconnected twice within this time counts as blind", unit="s", above=0
    )
    ack_timeout_s: float = setting(1.0, "an agent that has not acknowledged is asked again", unit="s", above=0)

    # The plan.

    step_interval_s: float = setting(
        0.02, "phases of transitions that become due within this time share a version of the plan", unit="s", minimum=0
    )
    changes_per_event_max: int = setting(
        600,
        "most channels and slots that one event moves, activates or settles, so that the lease is renewed in between;"
        " a plan moves up to moves_per_plan_max channels all the same",
        minimum=1,
    )
    virtual_nodes: int = setting(VIRTUAL_NODES, "points per server on the ring of a new cluster", minimum=1)
    plain_rest_s: float = setting(
        8.0, "a channel does not become plain for this time after a (possible) move", unit="s", minimum=0
    )
    """Longer than clients look for messages that took another route (5 s) and hold later ones back (2 s)."""
    rules_rest_s: float = setting(
        5.0, "no channel begins to move for this time after the compatibility rules have changed", unit="s", minimum=0
    )
    """Publishers of plain messages read the rules this often."""
    fold_interval_s: float = setting(
        30.0,
        "least time between two plans from which channels that are where their slots are are dropped",
        unit="s",
        above=0,
    )
    recovery_s: float = setting(
        3.0, "a takeover waits this long for servers; others are recovered when they come back", unit="s", above=0
    )
    retry_s: float = setting(1.0, "a server that refuses the plan is tried again after this time", unit="s", above=0)
    verify_interval_s: float = setting(5.0, "time between two checks of a stored plan", unit="s", above=0)
    lease_renew_s: float = setting(0.5, "how often the lease is renewed; at most a third of lease_s", unit="s", above=0)

    # Administrators.

    move_timeout_s: float = setting(
        30.0, "the answer to a change that has not settled after this time says so", unit="s", above=0
    )
    requests_max: int = setting(1000, "latest answers that are kept for repeated requests", minimum=1)

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_ranges(self)
        if self.lease_s < 3 * self.lease_renew_s:
            raise ConfigError(f"lease_s must be at least {3 * self.lease_renew_s:g} (s), not {self.lease_s:g}")

    @property
    def bounds(self) -> Bounds:
        """What counts as all of each resource."""
        return Bounds(
            cpu_ratio_max=self.cpu_ratio_max, memory_bytes_max=self.memory_bytes_max, full_ratio=self.full_ratio
        )

    @property
    def accept_ratio(self) -> float:
        """The load ratio up to which moves fill a server."""
        return self.load_ratio_safe if self.load_ratio_accept is None else self.load_ratio_accept
