"""What a balancer process may choose for itself: every threshold, interval and bound, in one place."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from dynamoth.errors import ConfigError
from dynamoth.plan.compatibility import CompatibilityRule
from dynamoth.plan.plan import JOIN_S
from dynamoth.plan.ring import VIRTUAL_NODES

INTERRUPTIONS_WINDOW_S = 30.0

_MAY_BE_ZERO = frozenset(
    {
        "wait_s",
        "channel_rest_s",
        "step_interval_s",
        "channel_ratio_min",
        "improvement_ratio_min",
        "replicate_publications_per_s_min",
        "replicate_subscribers_min",
        "replicate_load_ratio_min",
        "replication_rest_s",
        "replica_dead_s",
        "join_s",
        "rules_rest_s",
        "plain_rest_s",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BalancerOptions:
    """The settings of a :class:`~dynamoth_balancer.machine.BalancerMachine`.

    The load ratios of ``Relieve`` and ``wait_s`` are the values of the authors' code; a load ratio is of load over
    capacity (eq. 1 of the paper). The paper does not give the thresholds of Algorithm 1.

    Raises:
        ConfigError: a value is out of range; the text names it.

    """

    # Decisions.

    load_ratio_high: float = 0.80
    """LR_high: a server above it is relieved."""
    load_ratio_safe: float = 0.60
    """LR_safe: it is relieved to this. From 0 to ``load_ratio_high``."""
    load_ratio_accept: float | None = None
    """No server is filled above it, unless it stays ``much_better_ratio`` below the source. None:
    ``load_ratio_safe``."""
    much_better_ratio: float = 0.20
    """A target may pass ``load_ratio_accept`` when it stays this far below what the source had."""
    improvement_ratio_min: float = 0.05
    """A move makes the larger ratio of the two servers smaller, and leaves the target this far below what the source
    had."""
    channel_ratio_min: float = 0.001
    """Channels that make up less than this of their server are not worth a move."""
    wait_s: float = 20.0
    """T_wait: least time between two plans made by the balancer itself. 0: none."""
    averaging_s: float = 10.0
    """Loads are averaged over this time. More than 0."""
    reports_min: int = 3
    """A server takes part in decisions once this many of its reports are in the average. From 1."""
    decision_interval_s: float = 1.0
    """How often the balancer looks whether a decision is due. More than 0."""
    channel_rest_s: float = 30.0
    """A channel that was moved is not moved again by the balancer itself for this time. 0: none."""
    moves_per_plan_max: int = 500
    """Most channels that one plan moves. From 1."""
    moves_per_server_max: int = 100
    """Most channels that one plan moves away from, or to, one server. From 1."""
    transitions_max: int = 5000
    """Most channels in transition at once, those that administrators moved included. From 1."""

    # Replication: Algorithm 1.

    all_subscribers_ratio_min: float = 100.0
    """AllSubs_threshold: a channel with more publications/s per subscriber than this may be spread over servers at
    which all subscribers listen; and one replica for each time that it is reached. More than 0.

    Each subscriber then needs a connection to each replica. With 100 publications/s for each of them that is nothing.
    """
    all_publishers_ratio_min: float = 10.0
    """AllPubs_threshold: a channel with more subscribers per publication/s than this may be spread over servers at each
    of which a part of the subscribers listens; and one replica for each time that it is reached. More than 0.

    Each publication then goes to each replica. Where it goes to ten subscribers or more that is little besides.
    """
    replicate_publications_per_s_min: float = 1000.0
    """Publication_threshold: with fewer publications/s no channel is spread for their sake. 0: none.

    Below, each message has more than a millisecond of the thread with which Redis sends.
    """
    replicate_subscribers_min: int = 100
    """Subscriber_threshold: with fewer subscribers no channel is spread for their sake. 0: none.

    In the paper's Experiment 1 one server and three were equally quick up to this number.
    """
    replicate_load_ratio_min: float = 0.5
    """A channel that makes a smaller load ratio than this, if it were at one server of the largest capacity, is not
    spread; and no replica is added that would carry less than half of it. 0: none.

    Half of a server: below, the server has room for it and for others; and it is less than ``load_ratio_safe``, so that
    a channel is spread before it fills its server.
    """
    replicate_keep_ratio: float = 0.6
    """A replicated channel is folded back, or loses replicas, when its figures are below this share of what it takes to
    get there. More than 0, at most 1.

    With 0.6 figures may vary by a fourth around their mean without any change.
    """
    replicas_max: int = 16
    """Most servers that the balancer itself spreads a channel over, as subscribers or publishers have a connection to
    each. 1: it neither spreads channels nor folds them back by itself. From 1."""
    replication_rest_s: float = 30.0
    """Least time between two changes of the balancer to a channel that is, or was, replicated. 0: none."""
    replica_dead_s: float = 10.0
    """A server that is neither reached nor heard for this time is dead: its replicas are no longer wanted. 0: at
    once."""

    # Servers.

    draining: frozenset[str] = frozenset()
    """Ids of the servers that are to become empty: nothing is put there, and what is there is moved away."""

    join_s: float = JOIN_S
    """A server at which no channel is gets none for so long after a balancer with it in its list has come to work, as
    clients with patterns must subscribe there before. They count on ``JOIN_S``. 0: no wait."""
    interruptions_window_s: float = INTERRUPTIONS_WINDOW_S
    """An agent that loses its observing connection twice within this time counts as blind. More than 0."""

    # Agents.

    agent_stale_s: float = 5.0
    """An agent that was not heard for this time counts as down. More than 0."""
    ack_timeout_s: float = 1.0
    """An agent that has not acknowledged after this time is asked again. More than 0."""
    step_interval_s: float = 0.02
    """Phases of transitions that become due within this time are one version of the plan. 0: none are held."""

    # The plan.

    virtual_nodes: int = VIRTUAL_NODES
    """Points per server on the ring of a new cluster. A plan that is stored keeps its own. From 1."""

    compatibility: tuple[CompatibilityRule, ...] = ()
    """The compatibility rules of a new cluster. A plan that is stored keeps its own, which administrators change."""

    plain_rest_s: float = 6.0
    """A channel does not become plain for so long after it has moved, or a balancer has found it moved. Longer than
    clients look for messages that took another route (5 s), and hold those behind them (0.5 s). 0: none."""

    rules_rest_s: float = 5.0
    """No channel begins to move for so long after the compatibility rules were changed, or a balancer has found some.
    A publisher of plain messages reads them as often. 0: none."""

    recovery_s: float = 3.0
    """After a start, servers that cannot be read within this time are recovered when they come back. More than 0."""
    retry_s: float = 1.0
    """A server that refuses to store the plan is tried again after this time. More than 0."""
    verify_interval_s: float = 5.0
    """How often the balancer looks whether servers still store the plan. More than 0."""

    # The lease.

    lease_s: float = 5.0
    """Without renewal another balancer takes over after this time. At least 3 times ``lease_renew_s``."""
    lease_renew_s: float = 1.0
    """How often the lease is renewed. More than 0."""
    standby: bool = False
    """Whether to wait for the lease for as long as another balancer renews it, instead of ending."""

    # Administrators.

    move_timeout_s: float = 30.0
    """An administrator who asked for a move is told after this time that it has not settled. More than 0."""
    requests_max: int = 1000
    """Answered requests that are remembered, so that a repeated one is answered alike. From 1."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        for item in fields(self):
            value: Any = getattr(self, item.name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and not (value > 0 or (value == 0 and item.name in _MAY_BE_ZERO)):
                bound = "0 or more" if item.name in _MAY_BE_ZERO else "more than 0"
                raise ConfigError(f"{item.name} must be {bound}, not {value}")
        if self.load_ratio_safe > self.load_ratio_high:
            raise ConfigError(
                f"load_ratio_safe ({self.load_ratio_safe}) must be at most load_ratio_high ({self.load_ratio_high})"
            )
        if self.replicate_keep_ratio > 1:
            raise ConfigError(f"replicate_keep_ratio must be at most 1, not {self.replicate_keep_ratio}")
        if self.lease_s < 3 * self.lease_renew_s:
            raise ConfigError(
                f"lease_s must be at least 3 times lease_renew_s ({self.lease_renew_s}), not {self.lease_s}"
            )

    @property
    def accept_ratio(self) -> float:
        """Up to which load ratio a server is filled."""
        return self.load_ratio_safe if self.load_ratio_accept is None else self.load_ratio_accept
