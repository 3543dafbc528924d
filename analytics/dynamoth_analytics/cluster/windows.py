"""Where the windows of a query end: at its ticks, with the offsets of all datasets that it reads."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from dynamoth.data.catalog import Catalog
from dynamoth.data.datasets import Dataset
from dynamoth.data.progress import WindowEnd
from dynamoth.data.records import PartitionState
from dynamoth_analytics.cluster.servers import LogServers
from dynamoth_analytics.cluster.storage.reading import RecordsLost

CONTINUOUS_MS = 1000
"""Ticks of a query without a period are this far apart."""


class Ticks:
    """The ticks of a query: the multiples of its period, and a phase behind them.

    Args:
        period_s: of the query; 0: it is continuous, and ticks are ``CONTINUOUS_MS`` apart.
        phase_s: seconds between a multiple of the period and the tick that belongs to it.

    """

    def __init__(self, period_s: float, phase_s: float = 0.0) -> None:
        self._period_ms = round(period_s * 1000) or CONTINUOUS_MS
        self._phase_ms = round(phase_s * 1000)

    def latest(self, now_ms: int) -> int:
        """Return the last tick that has passed, in ms since 1970."""
        return (now_ms - self._phase_ms) // self._period_ms * self._period_ms + self._phase_ms

    def next(self, after_ms: int, now_ms: int) -> int:
        """Return the first tick that is behind ``after_ms`` and has not passed yet, in ms since 1970."""
        return max(self.latest(now_ms), after_ms) + self._period_ms


class Windows:
    """Ends the windows of one query.

    The end of a window has ``tick_ms``, ``offsets`` (the last one of each partition), ``static`` (the load of each
    static dataset) and ``sealed_ms``, a time after the offsets were read, by the clocks of the log servers. An interest
    that was registered until then is part of the execution: so a record that came behind a registration is never in an
    execution without it.

    Args:
        servers: the log servers.
        on: the dataset whose new records the query is about.
        reads: the others.
        ticks: of the query.

    """

    def __init__(self, servers: LogServers, on: Dataset, reads: Sequence[Dataset], ticks: Ticks) -> None:
        self.ticks = ticks
        self._servers = servers
        self._counts = {each.stream: each.partitions for each in (on, *reads) if each.kind != "static"}
        self._static = [each.name for each in reads if each.kind == "static"]
        self._own = f"{on.stream}/"
        self._own_counts = {on.stream: on.partitions}

    def next_end(self, start: WindowEnd) -> WindowEnd | None:
        """Return the end of the window behind ``start``; None: no tick has passed, or there are no new records.

        Raises RecordsLost and LogServerFailed.
        """
        tick_ms = self.ticks.latest(int(time.time() * 1000))
        if tick_ms <= start["tick_ms"]:
            return None
        before = start["offsets"]
        states, given_up = self._servers.states(self._counts), start.get("given_up", [])
        ends = ends_of({name: each for name, each in states.items() if name not in given_up}, before)
        ends |= {name: max(before[name], states[name].offset) for name in given_up if name in states}
        if not any(name.startswith(self._own) and end > before.get(name, 0) for name, end in ends.items()):
            return None
        # A partition that an operator has taken away goes on where it was if it comes back.
        away = {name: last for name, last in before.items() if name.rpartition("/")[0] in self._counts}
        catalog = self._servers.catalog() if self._static else Catalog()
        loaded = {name: catalog.datasets[name].loaded for name in self._static if name in catalog.datasets}
        end: WindowEnd = {
            "tick_ms": tick_ms, "sealed_ms": self._servers.now_ms(), "offsets": away | ends, "static": loaded
        }  # fmt: skip
        if still := [name for name in given_up if name in states and states[name].offset < before[name]]:
            end["given_up"] = still
        return end

    def has_waiting(self, start: WindowEnd) -> bool:
        """Return whether a tick has ended a window behind ``start`` that has records. Raises LogServerFailed."""
        if self.ticks.latest(int(time.time() * 1000)) <= start["tick_ms"]:
            return False
        before = start["offsets"]
        return any(tip > before.get(name, 0) for name, tip in self._servers.tips(self._own_counts).items())

    def now(self, read: Mapping[str, int] = MappingProxyType({})) -> WindowEnd:
        """Return a beginning behind all records that there are. Raises LogServerFailed.

        ``read``: up to where partitions were read. A server that has lost that may be behind it, and even begin again:
        a beginning there would have the query read the archive again, and take keyed records for those of later.
        """
        tips = self._servers.tips(self._counts)
        behind = {name: last for name, last in read.items() if tips.get(name, last) < last}
        end: WindowEnd = {"tick_ms": 0, "offsets": tips | behind}
        if behind:
            end["given_up"] = sorted(behind)
        return end


def ends_of(
    states: Mapping[str, PartitionState], before: Mapping[str, int], *, fail_on_loss: bool = True
) -> dict[str, int]:
    """Return the last offset of each partition, which was read up to ``before``.

    Raises RecordsLost where a server has lost what was read already, unless ``fail_on_loss`` is false.
    """
    ends: dict[str, int] = {}
    for name, state in states.items():
        last = before.get(name, 0)
        if state.has_forgotten(last) and fail_on_loss:
            raise RecordsLost(
                f"partition {name} was read up to offset {last}, which is no longer there: its log server has lost"
                f" records, and is at {state.offset} now. Restore the server, or go on with what there is:"
                " `dynamoth query restart`; in your own job, option fail_on_loss=false"
            )
        ends[name] = max(last, state.offset)
    return ends
