"""Empties servers that an operator wants to stop.

This goal comes last: an overloaded server is worse than one that is not empty yet, and a channel that is to be
replicated or folded back need not be moved first. Other goals cannot put channels at these servers either:
``Cluster.draining`` forbids it. So draining ends: each move leaves fewer channels there, and none comes back.
"""

from __future__ import annotations

from dynamoth.plan.plan import Mode
from dynamoth.plan.slots import is_slot
from dynamoth_balancer.decide.cluster import Cluster, Finding, Move, ServerLoad, busiest_first
from dynamoth_balancer.decide.relieve import why_they_stay
from dynamoth_balancer.decide.replicate import Change
from dynamoth_balancer.decide.spread import give_slots


class Drain:
    """Moves every channel and replica away from servers that are being drained.

    The busiest go first, each to the server with most room. A channel that would fill that server too much, which
    ``Relieve`` does not permit, stays, and smaller ones are tried.
    """

    name = "drain"

    def propose(self, cluster: Cluster) -> list[Move]:
        """Propose moves away from servers that are being drained, and add findings for the channels that stay."""
        moves = self._replicas(cluster)
        for name in sorted(cluster.draining):
            if name in cluster.servers:
                moves += self._channels(cluster, cluster.servers[name])
                moves += give_slots(cluster, cluster.servers[name], cluster.draining[name], _reason(name))
            self._find(cluster, name)
        return moves

    def permits(self, cluster: Cluster, move: Move) -> bool:
        """Permit all: no move brings anything back."""
        return True

    def _replicas(self, cluster: Cluster) -> list[Move]:
        moves: list[Move] = []
        for figures in cluster.figures if cluster.targets else ():
            leaves = sorted(cluster.draining.keys() & set(figures.assignment.servers))
            if figures.assignment.mode is not Mode.SINGLE and leaves:
                move = Change(cluster, figures).drained(_reason(*leaves))
                if move is not None and cluster.take(move):
                    moves.append(move)
        return moves

    def _channels(self, cluster: Cluster, source: ServerLoad) -> list[Move]:
        moves: list[Move] = []
        for load in busiest_first(cluster.draining[source.id], source):
            if is_slot(load.channel):
                continue
            target = cluster.roomiest(source.id)
            if target is None or cluster.is_full or cluster.has_given(source.id):
                break
            move = cluster.move(load, source, target, _reason(source.id))
            if cluster.take(move):
                moves.append(move)
        return moves

    def _find(self, cluster: Cluster, name: str) -> None:
        left = [load for load in cluster.draining[name] if load.channel not in cluster.moves]
        if not left:
            return
        server = cluster.servers.get(name)
        if server is None:
            ratio, why = 0.0, "it cannot take part in changes: see whether the server and its agent are up"
        else:
            ratio, why = server.load_ratio, why_they_stay(cluster, server, left)
        cluster.findings.append(Finding(name, ratio, f"it is not drained yet: {why}"))


def _reason(*servers: str) -> str:
    return f"{', '.join(servers)} {'is' if len(servers) == 1 else 'are'} being drained"
