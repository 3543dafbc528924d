"""Keeps the requests of operators that wait for their turn.

Many may come in one read, and each may take milliseconds, on a busy machine ten times as long. So one event handles a
few of them, and the next events the others: the balancer renews its lease in between.
"""

from __future__ import annotations

from collections import Counter

from dynamoth.protocol.control import AdminRequest

PER_EVENT_MAX = 20
"""Requests that one event handles."""

WAITING_MAX = 1000
"""Bound of the requests that wait. Further ones are dropped: an operator repeats what is not answered."""


class WaitingRequests:
    """The requests that wait, first come, first served. One that is repeated meanwhile keeps its turn."""

    def __init__(self, counters: Counter[str]) -> None:
        self._counters = counters
        #: By number, each with where it came in last.
        self._requests: dict[int, tuple[str, AdminRequest]] = {}
        #: Since when there are some; None while there are none.
        self.since: float | None = None

    def put(self, server: str, request: AdminRequest, now: float) -> None:
        """Add a request that came in at a server."""
        if request.request not in self._requests and len(self._requests) >= WAITING_MAX:
            self._counters["requests_dropped"] += 1
            return
        self._requests[request.request] = (server, request)
        self.since = now if self.since is None else self.since

    def take(self) -> tuple[str, AdminRequest]:
        """Remove the first of the requests, and return where it came in, and itself. There must be one."""
        taken = self._requests.pop(next(iter(self._requests)))
        if not self._requests:
            self.since = None
        return taken
