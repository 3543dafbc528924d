"""The settings of a controller, and those of its parts. ``MigrationSettings`` declares them."""

from __future__ import annotations

from dataclasses import dataclass

from dynamoth.errors import ConfigError
from dynamoth.settings.declare import check_ranges
from dynamoth.settings.sections import MigrationSettings
from dynamoth_broker.coordinator.plan import Worth
from dynamoth_broker.coordinator.relieve import ReliefLimits, Scheme
from dynamoth_broker.coordinator.shuffle import ShuffleSettings


@dataclass(frozen=True, kw_only=True)
class CoordinatorSettings(MigrationSettings):
    """The settings of a :class:`~dynamoth_broker.coordinator.controller.Controller`.

    ``scheme``: which target relief tries first.

    Raises:
        ConfigError: a value is out of range, or a shuffle would begin before relief; the text says so.

    """

    scheme: Scheme = Scheme.SIMILARITY

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_ranges(self)
        if self.shuffle_cov_min <= self.cov_max:
            raise ConfigError(f"shuffle_cov_min must be more than cov_max ({self.cov_max:g})")
        if self.cov_target > self.cov_max:
            raise ConfigError(f"cov_target must be at most cov_max ({self.cov_max:g})")
        if self.shuffle_ratio_mean_min < self.ratio_mean_min:
            raise ConfigError(f"shuffle_ratio_mean_min must be at least ratio_mean_min ({self.ratio_mean_min:g})")

    def suspect_s(self, report_s: float) -> float:
        """Return the age of a report above which a broker is suspect that reports every ``report_s``; 0: unknown."""
        return self.suspect_reports * (report_s or self.report_s)

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


@dataclass(frozen=True, kw_only=True)
class CoordinatorOptions(CoordinatorSettings):
    """Options of a :class:`~dynamoth_broker.coordinator.machine.CoordinatorMachine`."""

    lease_s: float = 2.5
    forget_s: float = 30.0
    #: Which process this is, for people.
    process: str = ""
