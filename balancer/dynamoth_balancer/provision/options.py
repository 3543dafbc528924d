"""The options of the fleet: its bounds, when it grows and shrinks, and how long a provisioner may take."""

from __future__ import annotations

from dataclasses import dataclass

from dynamoth.errors import ConfigError
from dynamoth.settings.declare import check_ranges
from dynamoth.settings.sections import ScalingSettings


@dataclass(frozen=True, kw_only=True)
class FleetOptions(ScalingSettings):
    """The options of a :class:`~dynamoth_balancer.provision.fleet.Fleet`.

    Raises:
        ConfigError: a value is out of range, or two of them contradict each other; the text begins with the name of
            the one that may have to change.

    """

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_ranges(self)
        if self.servers_max < self.servers_min:
            raise ConfigError(
                f"servers_max must be at least servers_min ({self.servers_min}), not {self.servers_max}: raise the one"
                " or lower the other"
            )
        if self.release_ratio >= self.grow_ratio:
            raise ConfigError(
                f"release_ratio must be below grow_ratio ({self.grow_ratio:g}), not {self.release_ratio:g}: otherwise"
                " the fleet would shrink and grow by turns"
            )
        if self.retry_s_max < self.retry_s:
            raise ConfigError(f"retry_s_max must be at least retry_s ({self.retry_s:g}), not {self.retry_s_max:g}")
