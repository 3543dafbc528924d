"""What one load analyzer may choose."""

from __future__ import annotations

from dataclasses import dataclass

from dynamoth.errors import ConfigError
from dynamoth.protocol.reports import REPORT_CHANNELS_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadAnalyzerOptions:
    """The settings of a load analyzer. Raises ``ConfigError`` when one is out of range.

    ``outgoing_bytes_per_s_max``: T_i of eq. 1, what the server can send; from 1.
    ``report_interval_s``: the time unit; more than 0.
    ``channels_per_report_max``: how many of the busiest channels a report names; the others are in its sums.
    ``who_channels_max``, ``who_per_channel_max``: of how many of these it tells who published and who subscribes, and
    how many clients of each; 0 for none. 8 bytes for each of them.
    ``channels_max``: how many channels are followed; the messages of others are added up.
    ``records_max``: how many messages of an interval are kept as records, 16 bytes each; the publishers of those beyond
    are counted as they come, which costs more time and less memory.
    ``publishers_max``: how many pairs of channel and publisher are told apart of these. About 200 bytes each.
    ``announced_clients_max``, ``announced_per_channel_max``: how many announced subscribers are kept in all and per
    channel. About 150 bytes each.
    ``numsub_per_round_max``: of how many channels the subscribers are counted in one round; with more of them, in turn.
    ``discovery_interval_s``: how often channels without messages are looked for, and counted; more than 0.
    ``discovery_channels_max``: with more channels than this at the server they are not looked for: about 0.2 us of the
    server's time each, in which it does nothing else.
    ``lag_s_max``: an observation that is later than this is an alarm.
    """

    outgoing_bytes_per_s_max: int
    report_interval_s: float = 1.0
    channels_per_report_max: int = 1000
    who_channels_max: int = 100
    who_per_channel_max: int = 16
    channels_max: int = 100_000
    records_max: int = 500_000
    publishers_max: int = 200_000
    announced_clients_max: int = 200_000
    announced_per_channel_max: int = 64
    numsub_per_round_max: int = 20_000
    discovery_interval_s: float = 10.0
    discovery_channels_max: int = 20_000
    lag_s_max: float = 0.5

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name in ("report_interval_s", "discovery_interval_s", "lag_s_max"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be more than 0, not {getattr(self, name)}")
        counts = ("outgoing_bytes_per_s_max", "channels_max", "records_max", "publishers_max", "numsub_per_round_max")
        for name in counts:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not 1 <= self.channels_per_report_max <= REPORT_CHANNELS_MAX:
            raise ConfigError(
                f"channels_per_report_max must be from 1 to {REPORT_CHANNELS_MAX}, not {self.channels_per_report_max}"
            )
