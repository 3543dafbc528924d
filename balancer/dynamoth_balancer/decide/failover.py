"""Chooses other servers for the channels and slots of dead ones.

This is no goal: it goes on while the balancer is paused or waits between two plans, and it is not bounded by load. A
channel at an overloaded server is better than one at none.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from dynamoth.plan.plan import Assignment, single
from dynamoth.plan.slots import is_slot
from dynamoth_balancer.admin.compatibility import why_not_moved
from dynamoth_balancer.decide.model import ClusterModel
from dynamoth_balancer.install.installer import Installer


def homeless(installer: Installer) -> list[bytes]:
    """Return the channels and slots that are at dead servers, or on their way there.

    Those in transition come first, and slots before channels.
    """
    index, entry = installer.index, installer.plan.entry
    names = {name for at in (index.named_at, index.slots_named_at) for dead in installer.dead for name in at[dead]}
    return sorted(
        (name for name in names if not installer.dead.isdisjoint(entry(name).route.assignment.servers)),
        key=lambda name: (name not in installer.transitions, not is_slot(name), name),
    )


def fail_over(installer: Installer, model: ClusterModel, room: int, most: int, now: float) -> dict[bytes, Assignment]:
    """Return where channels and slots of dead servers go, ``most`` at most; nothing while no server can take any.

    A replicated channel keeps its other servers. Slots go to the servers with fewest slots for their size, channels to
    the least loaded ones. ``room`` is how many more may be in transition.
    """
    names = homeless(installer)
    targets = _targets(installer, model, now) if names else []
    if not targets:
        return {}
    loads = {server: model.load(server, now) for server in targets}
    sizes = {server: load.outgoing_bytes_per_s_max if load else 1.0 for server, load in loads.items()}
    largest = max(sizes.values())
    slots = _Places({server: (len(installer.index.slots_at[server]), largest / sizes[server]) for server in targets})
    ratios = {server: load.load_ratio if load else 0.0 for server, load in loads.items()}
    channels = _Places({server: (ratios[server], 1.0) for server in targets})
    rates = _rates(installer, model)
    moves: dict[bytes, Assignment] = {}
    for name in names:
        if len(moves) >= most:
            break
        if why_not_moved(installer.plan, name) is not None:
            continue
        if name not in installer.transitions:
            if room <= 0:
                break
            room -= 1
        assignment = installer.plan.entry(name).route.assignment
        left = tuple(server for server in assignment.servers if server not in installer.dead)
        if left:
            moves[name] = single(left[0]) if len(left) == 1 else Assignment(assignment.mode, left)
        elif is_slot(name):
            moves[name] = single(slots.take(1.0))
        else:
            moves[name] = single(channels.take(rates.get(name, 0.0) / largest))
    return moves


def _targets(installer: Installer, model: ClusterModel, now: float) -> list[str]:
    """Return the servers that can take channels: if there is no other one, also those that are drained or full."""
    alive = [server for server in installer.plan.servers if installer.why_not(server, now) is None]
    able = [server for server in alive if installer.why_not_to(server, now) is None and not model.why_full(server)]
    return able or [server for server in alive if not installer.joins_in(server, now)]


def _rates(installer: Installer, model: ClusterModel) -> Mapping[bytes, float]:
    """Return the outgoing bytes/s of channels at dead servers, by the last reports."""
    return {rate.channel: rate.outgoing_bytes_per_s for server in installer.dead for rate in model.channels(server)}


class _Places:
    """Gives each next channel to the server with least.

    Args:
        servers: by server, what it has, and by how much each channel counts there.

    """

    def __init__(self, servers: Mapping[str, tuple[float, float]]) -> None:
        self._weights = {server: weight for server, (_, weight) in servers.items()}
        self._heap = [(has * weight, server) for server, (has, weight) in servers.items()]
        heapq.heapify(self._heap)

    def take(self, amount: float) -> str:
        """Return a server, which has ``amount`` more from now on."""
        has, server = self._heap[0]
        heapq.heapreplace(self._heap, (has + amount * self._weights[server], server))
        return server
