"""The settings of the fleet: its bounds, when it grows and shrinks, and how long a provisioner may take."""

from __future__ import annotations

from dataclasses import dataclass

from dynamoth.errors import ConfigError
from dynamoth.settings.declare import check_ranges, setting


@dataclass(frozen=True, kw_only=True)
class FleetOptions:
    """The options of a :class:`~dynamoth_balancer.provision.fleet.Fleet`.

    Loads are parts of the capacity of all servers that take part. ``grow_ratio`` and ``release_ratio`` leave a gap, so
    that a fleet that has just shrunk does not grow again at once.

    Raises:
        ConfigError: a value is out of range, or two of them contradict each other; the text names them.

    """

    servers_min: int = setting(1, "the fleet has at least this many servers that take part", minimum=1)
    servers_max: int = setting(8, "the fleet has at most this many servers, with those that are starting", minimum=1)
    grow_ratio: float = setting(
        0.6, "servers are added while the load ratio of all servers together is above this", above=0
    )
    grow_delay_s: float = setting(3.0, "the load is above grow_ratio for this time first", unit="s", minimum=0)
    release_ratio: float = setting(
        0.45, "a server is released if the others, without it, have at most this load ratio together", above=0
    )
    release_delay_s: float = setting(60.0, "the load is so low for this time first", unit="s", minimum=0)
    answer_timeout_s: float = setting(120.0, "a provisioner has this time to answer", unit="s", above=0)
    join_timeout_s: float = setting(
        60.0, "a server that was started reports its load within this time, or is given up", unit="s", above=0
    )
    retry_s: float = setting(
        2.0, "time before a failed request is repeated; each failure doubles it", unit="s", above=0
    )
    retry_s_max: float = setting(120.0, "longest such time", unit="s", above=0)

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
