"""Empties a server that is no longer needed: low-load rebalancing (Dynamoth, section III-B.4).

The fleet (``provision/fleet.py``) chooses the server, the least loaded one that a provisioner has started, and gives it
back to the provisioner when nothing is left there. There is no hurry: these goals propose moves only when no earlier
goal has any. They end when the load rises: then the fleet takes the server out of ``Cluster.releasing``.
"""

from __future__ import annotations

from dynamoth_balancer.decide.cluster import Cluster, Move
from dynamoth_balancer.decide.drain import move_channels, move_replicas
from dynamoth_balancer.decide.spread import give_slots


class Release:
    """Moves channels and replicas away from a server that is being released, step by step.

    They go to servers with room: none is filled above ``accept_ratio``, as ``Relieve`` permits no more. What fits
    nowhere stays, and so does the server.
    """

    name = "release"

    def propose(self, cluster: Cluster) -> list[Move]:
        """Propose moves away from servers that are being released, if no earlier goal has a move."""
        if cluster.moves:
            return []
        moves = move_replicas(cluster, cluster.releasing.keys(), _reason)
        for name in sorted(cluster.releasing.keys() & cluster.servers.keys()):
            moves += move_channels(cluster, cluster.servers[name], cluster.releasing[name], _reason(name))
        return moves

    def permits(self, cluster: Cluster, move: Move) -> bool:
        """Permit all: ``Cluster`` admits no move that brings something back."""
        return True


class ReleaseSlots:
    """Moves slots away from a server that is being released, each to the server with fewest for its size."""

    name = "release"

    def propose(self, cluster: Cluster) -> list[Move]:
        """Propose the next step, if no earlier goal has a move."""
        moves: list[Move] = []
        for name in sorted(cluster.releasing.keys() & cluster.servers.keys()) if not cluster.moves else ():
            moves += give_slots(cluster, cluster.servers[name], cluster.releasing[name], _reason(name))
        return moves

    def permits(self, cluster: Cluster, move: Move) -> bool:
        """Permit all: ``Cluster`` admits no move that brings something back."""
        return True


def _reason(*servers: str) -> str:
    return f"the load is low, and {', '.join(servers)} {'is' if len(servers) == 1 else 'are'} not needed"
