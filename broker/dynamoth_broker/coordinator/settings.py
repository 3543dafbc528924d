"""Every threshold, interval and bound of the coordinator. Letters are those of BAD, Algorithm 1."""

from __future__ import annotations

from dataclasses import dataclass

from dynamoth.errors import ConfigError
from dynamoth.settings.declare import check_ranges, setting
from dynamoth_broker.coordinator.plan import Worth
from dynamoth_broker.coordinator.relieve import ReliefLimits, Scheme
from dynamoth_broker.coordinator.shuffle import ShuffleSettings


@dataclass(frozen=True, kw_only=True)
class CoordinatorSettings:
    """The settings of a :class:`~dynamoth_broker.coordinator.controller.Controller`.

    ``scheme``: which target relief tries first.

    Raises:
        ConfigError: a value is out of range, or a shuffle would begin before relief; the text says so.

    """

    scheme: Scheme = Scheme.SIMILARITY
    dry_run: bool = setting(False, "decide and record, but move nobody")

    # When something is due.

    cov_max: float = setting(
        0.15, "alpha: relief is due above this cov of the load ratios; 0: at any unevenness", minimum=0
    )
    cov_target: float = setting(
        0.05, "relief goes on until the cov is at most this; at most cov_max; 0: until no move helps", minimum=0
    )
    ratio_mean_min: float = setting(0.3, "beta: and above this mean load ratio; 0: at any load", minimum=0)
    ratio_high: float = setting(
        0.9, "relief is also due while a broker is above this load ratio, whatever the cov; 0: always", minimum=0
    )
    shuffle_cov_min: float = setting(
        0.5, "gamma: a shuffle is due above this cov of the load ratios; more than cov_max", above=0
    )
    shuffle_ratio_mean_min: float = setting(
        0.3, "theta: and above this mean load ratio; at least ratio_mean_min", minimum=0
    )
    looks: int = setting(
        3, "relief or a shuffle begins when it was due at this many looks one after the other", minimum=1
    )

    # Times.

    report_s: float = setting(1.0, "T_report: brokers report this often", unit="s", above=0)
    suspect_reports: int = setting(
        3, "a broker is suspect while its latest report is older than this many times report_s", minimum=1
    )
    decide_s: float = setting(5.0, "T_decide: time between two looks", unit="s", above=0)
    wait_s: float = setting(
        20.0, "T_wait: time without decisions after a plan has settled; 0: until all have reported", unit="s", minimum=0
    )
    rest_s: float = setting(120.0, "a user who has moved stays for this time; 0: no rest", unit="s", minimum=0)
    ask_timeout_s: float = setting(2.0, "brokers have this time to answer with candidates", unit="s", above=0)
    batch_timeout_s: float = setting(
        60.0, "users of a batch who have not moved after this time count as failed", unit="s", above=0
    )
    fast_half_life_s: float = setting(
        10.0, "half-life of the average load that, where it is the larger, placement goes by", unit="s", above=0
    )
    slow_half_life_s: float = setting(60.0, "half-life of the average load that moves go by", unit="s", above=0)

    appear_s: float = setting(
        30.0,
        "a placed user counts as a mean user for this time, in which it connects, subscribes and shows in the averages;"
        " 0: until the next report",
        unit="s",
        minimum=0,
    )

    # Loads.

    connection_bytes_per_s: float = setting(
        64.0,
        "a user counts as this load besides its interests, in bytes/s; 0: users without interests are free",
        minimum=0,
    )
    ratio_accept: float = setting(
        0.85,
        "no move of a shuffle takes a broker above this load ratio, and relief of overloaded ones ends here",
        above=0,
    )
    margin_ratio: float = setting(
        0.001,
        "a move leaves its target this part below the load ratio that its source had; 0: anything below",
        minimum=0,
        maximum=1,
    )

    # Bounds.

    candidates_max: int = setting(10_000, "most users that one decision looks at", minimum=1)
    moves_per_plan_max: int = setting(500, "most moves of one plan of relief, and of one batch of a shuffle", minimum=1)
    moves_in_max: int = setting(200, "most of these into one broker", minimum=1)
    shuffle_moves_max: int = setting(20_000, "most moves of one shuffle", minimum=1)

    # What a shuffle must bring.

    gain_ratio_min: float = setting(
        0.1, "least gain of a shuffle, as a part of the largest load ratio; 0: any gain", minimum=0
    )
    egress_weight: float = setting(
        0.5, "a part of the Redis egress counts as this part of the largest load ratio; 0: it does not count", minimum=0
    )
    move_cost_ratio: float = setting(
        0.2, "to move every user costs this part of the largest load ratio; 0: moves are free", minimum=0
    )
    slack_ratio: float = setting(
        0.05, "a shuffle groups users within this part above the least load ratio; 0: not", minimum=0
    )
    stay_ratio: float = setting(
        0.05, "in a shuffle, a user stays unless that costs this part of the user's load; 0: moves are free", minimum=0
    )

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_ranges(self)
        if self.shuffle_cov_min <= self.cov_max:
            raise ConfigError(f"shuffle_cov_min must be more than cov_max ({self.cov_max:g})")
        if self.cov_target > self.cov_max:
            raise ConfigError(f"cov_target must be at most cov_max ({self.cov_max:g})")
        if self.shuffle_ratio_mean_min < self.ratio_mean_min:
            raise ConfigError(f"shuffle_ratio_mean_min must be at least ratio_mean_min ({self.ratio_mean_min:g})")

    @property
    def suspect_s(self) -> float:
        """The age of a report above which its broker is suspect."""
        return self.suspect_reports * self.report_s

    @property
    def relief(self) -> ReliefLimits:
        """The limits of one plan of relief. It goes on below what it begins at, so as not to begin again at once."""
        return ReliefLimits(
            cov_max=self.cov_target,
            ratio_mean_min=self.ratio_mean_min,
            ratio_high=min(self.ratio_high, self.ratio_accept),
            moves_max=self.moves_per_plan_max,
            moves_in_max=self.moves_in_max,
            margin_ratio=self.margin_ratio,
        )

    @property
    def shuffle(self) -> ShuffleSettings:
        """The settings of a shuffle."""
        return ShuffleSettings(
            slack_ratio=self.slack_ratio,
            stay_ratio=self.stay_ratio,
            ratio_accept=self.ratio_accept,
            batch_moves_max=self.moves_per_plan_max,
            batch_moves_in_max=self.moves_in_max,
            moves_max=self.shuffle_moves_max,
            worth=Worth(
                gain_ratio_min=self.gain_ratio_min,
                egress_weight=self.egress_weight,
                move_cost_ratio=self.move_cost_ratio,
            ),
        )
