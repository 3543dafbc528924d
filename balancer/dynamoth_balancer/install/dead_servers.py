"""Decides which servers are dead: those that the balancer has not heard for long, by the time in which it ran itself.

A living server answers twice a second (``listeners``). A process that was stopped, or whose clock has jumped, finds old
answers only and can conclude nothing from that. So silence counts by ticks: at most ``STEP_S_MAX`` for each.
"""

from __future__ import annotations

from collections.abc import Iterable

STEP_S_MAX = 0.2
"""Twice the interval of ticks: a longer pause between two ticks is our own."""


class DeadServers:
    """Counts for how long each server has been silent.

    Args:
        servers: all servers.
        dead_s: a server that is silent for this time is dead until it is heard again.

    """

    def __init__(self, servers: Iterable[str], dead_s: float) -> None:
        self._dead_s = dead_s
        self._silent_s = dict.fromkeys(servers, 0.0)
        self._ticked_at: float | None = None

    def add(self, server: str) -> None:
        """Begin with a new server."""
        self._silent_s[server] = 0.0

    def remove(self, server: str) -> None:
        """Forget a server that has left the plan."""
        del self._silent_s[server]

    def hear(self, server: str) -> None:
        """Record a sign of life; one of a server that is not in the plan does not count."""
        if server in self._silent_s:
            self._silent_s[server] = 0.0

    def tick(self, now: float) -> None:
        """Let time pass."""
        elapsed_s = 0.0 if self._ticked_at is None else now - self._ticked_at
        self._ticked_at = now
        step_s = min(max(elapsed_s, 0.0), STEP_S_MAX)
        for server in self._silent_s:
            self._silent_s[server] += step_s

    @property
    def dead(self) -> frozenset[str]:
        """The servers that are dead."""
        return frozenset(server for server, silent_s in self._silent_s.items() if silent_s >= self._dead_s)
