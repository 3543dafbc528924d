"""What happens during a run: the data cluster is killed twice, once in the middle of an execution; a broker is drained.

Each event has its part of the run, but it also waits until the data cluster is ready for it: a slow or busy machine
needs minutes for the first executions of a cold Java, and a kill before them would prove nothing. What follows comes
later by the time that was waited: users and reporters go on until they are ended.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from dynamoth_demo.emergency.servers import TooSlow

KILLS_AT = (0.35, 0.65)
DRAIN_AT = 0.5
"""When things happen, as parts of the run."""

PATIENCE_S = 600.0
"""Longest time that the data cluster gets to be ready: many periods of the slowest queries, and a cold start."""

SHOW_S = 5.0
POLL_S = 0.02


class Stage(Protocol):
    """What a play needs of the servers: see ``Servers``."""

    def is_executing(self, query: str) -> bool:
        """Tell whether an execution of a query has begun and not ended."""
        ...

    def last_execution(self, query: str) -> int:
        """Return the number of the last execution of a query that is done."""
        ...

    def waiting(self, query: str, tips: Mapping[str, int]) -> int:
        """Return how many records up to these offsets no execution of a query has covered yet."""
        ...

    def tips(self, partitions: Mapping[str, int]) -> dict[str, int]:
        """Return the last offset of each partition of datasets, which have so many."""
        ...

    def restart_data_cluster(self) -> None:
        """Kill the data cluster, and start it again."""
        ...

    def drain(self, broker: str) -> None:
        """Have a broker move its users and end, and start it again."""
        ...


class Play:
    """One run.

    Args:
        servers: that are killed and drained.
        queries: the names of all queries.
        partitions: of each dataset that has new records, how many partitions it has.
        middle: queries in the middle of whose executions the data cluster is killed.
        show: shows what goes on, every ``SHOW_S``; raises what ends the run.
        clock: gives seconds.
        pause: waits for so many seconds.

    """

    def __init__(
        self,
        servers: Stage,
        queries: Sequence[str],
        partitions: Mapping[str, int],
        middle: Sequence[str],
        show: Callable[[], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._servers = servers
        self._queries = queries
        self._partitions = partitions
        self._middle = middle
        self._on_show = show
        self._clock = clock
        self._pause = pause
        self._begin_s = 0.0
        #: By how much everything comes later, as the data cluster was not ready.
        self._delay_s = 0.0
        #: The last execution of each query before the data cluster was started.
        self._before = dict.fromkeys(queries, 0)
        #: When it was killed last, and where the records ended then; None: it has got over that.
        self._killed: tuple[float, dict[str, int]] | None = None
        #: When it did not run, or caught up after that: begin and end, in s since 1970.
        self.outages: list[tuple[float, float]] = []

    def run(self, length_s: float) -> None:
        """Play it: for ``length_s``, and longer where the data cluster is not ready. Raises TooSlow."""
        self._begin_s = self._clock()
        self._wait_until(KILLS_AT[0] * length_s)
        self._wait_ready()
        say("the data cluster is killed, and started again")
        self._restart_data_cluster()
        self._wait_until(DRAIN_AT * length_s)
        say("b2 is drained: it moves its users, and ends; then it comes back")
        self._servers.drain("b2")
        self._wait_until(KILLS_AT[1] * length_s)
        self._wait_ready()
        self._wait_for_execution()
        say("the data cluster is killed in the middle of an execution, and started again")
        self._restart_data_cluster()
        self._wait_until(length_s)

    def catch_up(self) -> None:
        """Wait until every record was in an execution of each query. Raises TooSlow."""
        tips = self._servers.tips(self._partitions)
        self._wait_for(lambda: self._behind(tips))

    def _wait_until(self, seconds: float) -> None:
        """Wait until a time of the run, and show what goes on."""
        while (left_s := self._begin_s + self._delay_s + seconds - self._clock()) > 0:
            self._pause(min(SHOW_S, left_s))
            self._show()

    def _wait_ready(self) -> None:
        """Wait until the data cluster has executed each query since its start, and all that it was killed before."""
        begin = self._clock()
        self._wait_for(self._unready)
        self._delay_s += self._clock() - begin

    def _wait_for(self, behind: Callable[[], Mapping[str, int]]) -> None:
        """Wait until no query is behind. Raises TooSlow, which names those that are."""
        end = self._clock() + PATIENCE_S
        while waiting := behind():
            if self._clock() > end:
                raise TooSlow(f"after {PATIENCE_S:g} s the data cluster is still behind: {described(waiting)}")
            self._pause(SHOW_S)
            self._show()
            queries, records = f"{len(waiting)} of {len(self._queries)} queries", f"{max(waiting.values()):,} records"
            say(f"{'':7}  waiting for the data cluster: {queries} are behind, by up to {records}")
        self._note_recovery()

    def _wait_for_execution(self) -> None:
        """Wait for the middle of an execution."""
        begin = self._clock()
        shown = begin
        while not any(self._servers.is_executing(query) for query in self._middle):
            now = self._clock()
            if now > begin + PATIENCE_S:
                raise TooSlow(f"no execution of {' or '.join(self._middle)} has begun within {PATIENCE_S:g} s")
            if now > shown + SHOW_S:
                self._show()
                shown = now
            self._pause(POLL_S)
        self._delay_s += self._clock() - begin

    def _restart_data_cluster(self) -> None:
        self._killed = self._killed or (time.time(), self._servers.tips(self._partitions))
        self._servers.restart_data_cluster()
        self._before = {query: self._servers.last_execution(query) for query in self._queries}

    def _show(self) -> None:
        self._note_recovery()
        self._on_show()

    def _behind(self, tips: Mapping[str, int]) -> dict[str, int]:
        """Return how many records up to these offsets each query has still to execute; no query that has none."""
        waiting = {query: self._servers.waiting(query, tips) for query in self._queries}
        return {query: count for query, count in waiting.items() if count}

    def _unready(self) -> dict[str, int]:
        """Return the records that wait of each query for which the data cluster is not ready to be killed."""
        behind = self._behind(self._killed[1]) if self._killed is not None else {}
        idle = [query for query in self._queries if self._servers.last_execution(query) <= self._before[query]]
        if idle:
            tips = self._servers.tips(self._partitions)
            behind = {query: self._servers.waiting(query, tips) for query in idle} | behind
        return behind

    def _note_recovery(self) -> None:
        """Note when the data cluster has got over being killed."""
        if self._killed is not None and not self._unready():
            self.outages.append((self._killed[0], time.time()))
            self._killed = None


def described(behind: Mapping[str, int]) -> str:
    """Return how many records each query has still to execute, as text."""
    return ", ".join(f"{query} by {count:,} records" for query, count in behind.items())


def advice(log: str | None) -> str:
    """Return what may be the cause where something was too slow, and what helps.

    Args:
        log: the file with the log of the data cluster; None: it is not kept.

    """
    load, processors = os.getloadavg()[0], os.cpu_count()
    text = (
        f"the load of this machine is {load:.1f}, on {processors} processors: end other programs, or run the demo with"
    )
    text += " fewer --users, or more --minutes; "
    return text + (f"the log of the data cluster: {log}" if log else "--keep FOLDER keeps the log of the data cluster")


def say(text: str) -> None:
    """Print a line."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
