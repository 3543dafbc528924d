"""The bounds and periods of a load analyzer."""

from __future__ import annotations

from dataclasses import dataclass

from dynamoth.settings.declare import check_ranges, required, setting
from dynamoth.settings.sections import OUTGOING_BYTES_PER_S_MAX, ReportSettings


@dataclass(frozen=True, kw_only=True)
class LoadAnalyzerOptions(ReportSettings):
    """The options of a load analyzer: the settings of its reports, and bounds.

    Raises:
        ConfigError: a value is out of range; the text names it.

    """

    outgoing_bytes_per_s_max: int = required(
        "what the server can send (T_i of Dynamoth, eq. 1)", minimum=1, maximum=OUTGOING_BYTES_PER_S_MAX
    )
    who_channels_max: int = setting(100, "channels whose publishers and subscribers a report names", minimum=0)
    who_per_channel_max: int = setting(16, "ids in such a list, 8 bytes each", minimum=0)
    channels_max: int = setting(250_000, "channels that are followed; messages of others are only summed", minimum=1)
    records_max: int = setting(500_000, "messages of an interval that are kept as records of 16 bytes", minimum=1)
    """Messages beyond are counted by publisher as they come: more time, less memory."""
    publishers_max: int = setting(
        200_000, "pairs of channel and publisher among those beyond, 200 bytes each", minimum=1
    )
    announced_clients_max: int = setting(200_000, "announced subscribers in all, 150 bytes each", minimum=0)
    announced_per_channel_max: int = setting(64, "announced subscribers per channel", minimum=0)
    numsub_per_round_max: int = setting(20_000, "channels per round whose subscribers are counted, in turn", minimum=1)
    discovery_interval_s: float = setting(10.0, "how often channels without messages are counted", unit="s", above=0)
    discovery_channels_max: int = setting(20_000, "with more channels, idle ones are not looked for", minimum=0)
    """The question costs the server about 0.2 us per channel, in which it does nothing else."""
    lag_s_max: float = setting(0.5, "an observation that is later raises an alarm", unit="s", above=0)

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_ranges(self)
