"""Moves channels that have gone silent back to their slots: then the plan need not name them (``install/folding.py``).

A channel gets an entry of its own because it is busy. When no report has shown a load of it for ``silent_s``, it is one
of many small ones again, and its place makes no difference. So this goal comes last, and waits for all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

from dynamoth.plan.plan import Assignment, Mode, Phase, Plan
from dynamoth.plan.slots import is_slot, slot_of
from dynamoth_balancer.decide.cluster import ChannelRate, Cluster, Move, Stray

LOOKS_MAX = 2000
"""Entries that are looked at each time: some 5 ms. All of a plan have their turn."""

SILENT_MAX = 100_000
"""Bound of the silent channels that are remembered; the others have their turn later."""

RETURNING_MAX = 1000
"""Bound of the channels that the goal gets at once."""


class SilentChannels:
    """Finds the channels of the plan of which no report has shown a load for long."""

    def __init__(self, silent_s: float) -> None:
        self._silent_s = silent_s
        #: The names that are to be looked at; then all begin again.
        self._names: Iterator[bytes] = iter(())
        #: Since when channels are known to be silent.
        self._since: dict[bytes, float] = {}

    def look(self, plan: Plan, is_busy: Callable[[str, bytes], bool], now: float) -> None:
        """Look at some entries. ``is_busy`` returns whether recent reports of a server show a load of a channel."""
        names = list(islice(self._names, LOOKS_MAX))
        if not names:
            self._names = iter(list(plan.entries))
        for channel in names:
            if self._returns(plan, channel) and not is_busy(plan.entries[channel].route.assignment.servers[0], channel):
                if len(self._since) < SILENT_MAX:
                    self._since.setdefault(channel, now)
            else:
                self._since.pop(channel, None)

    def returning(self, plan: Plan, now: float) -> list[Stray]:
        """Return some channels that have been silent for long, and where their slots are."""
        long_ago = now - self._silent_s
        silent = [
            channel for channel, since in self._since.items() if since <= long_ago and self._returns(plan, channel)
        ]
        return [
            Stray(ChannelRate(0.0, channel), plan.entry(channel).route.assignment, _slot_place(plan, channel))
            for channel in silent[:RETURNING_MAX]
        ]

    @staticmethod
    def _returns(plan: Plan, channel: bytes) -> bool:
        """Return whether a channel is elsewhere than its slot, at one server, and both have settled."""
        entry = plan.entries.get(channel)
        if entry is None or is_slot(channel) or entry.phase is not Phase.SETTLED or channel in plan.administration.pins:
            return False
        is_single = entry.route.assignment.mode is Mode.SINGLE
        slot = plan.entry(slot_of(channel))
        elsewhere = slot.phase is Phase.SETTLED and slot.route.assignment != entry.route.assignment
        return is_single and elsewhere and plan.compatibility.rule_of(channel) is None


class Tidy:
    """Moves silent channels to where their slots are."""

    name = "tidy"

    def propose(self, cluster: Cluster) -> list[Move]:
        """Propose to move some, if no earlier goal has a move."""
        if cluster.moves:
            return []
        moves: list[Move] = []
        for rate, present, slot in cluster.returning:
            source, target = (cluster.servers.get(each.servers[0]) for each in (present, slot))
            if source is None or target is None:
                continue
            move = cluster.move(rate, source, target, "it is silent, and returns to its slot")
            if cluster.take(move):
                moves.append(move)
        return moves

    def permits(self, cluster: Cluster, move: Move) -> bool:
        """Permit all."""
        return True


def _slot_place(plan: Plan, channel: bytes) -> Assignment:
    return plan.entry(slot_of(channel)).route.assignment
