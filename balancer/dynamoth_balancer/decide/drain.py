"""Empties servers that an operator wants to stop.

This goal comes last: an overloaded server is worse than one that is not empty yet, and a channel that is to be
replicated or folded back need not be moved first. Other goals cannot put channels at these servers either:
``Cluster.draining`` forbids it. So draining ends: each move leaves fewer channels there, and none comes back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set

from dynamoth.plan.plan import Mode
from dynamoth.plan.slots import is_slot
from dynamoth_balancer.decide.cluster import ChannelRate, Cluster, Finding, Move, ServerLoad, busiest_first
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
        moves = move_replicas(cluster, cluster.draining.keys(), _reason)
        for name in sorted(cluster.draining):
            if name in cluster.servers:
                moves += move_channels(cluster, cluster.servers[name], cluster.draining[name], _reason(name))
            self._find(cluster, name)
        return moves

    def permits(self, cluster: Cluster, move: Move) -> bool:
        """Permit all: no move brings anything back."""
        return True

    def _find(self, cluster: Cluster, name: str) -> None:
        left = [load for load in cluster.draining[name] if load.channel not in cluster.moves]
        channels = [load for load in left if not is_slot(load.channel)]
        server = cluster.servers.get(name)
        if left and server is None:
            why = "it cannot take part in changes: see whether the server and its agent are up"
            cluster.findings.append(Finding(name, 0.0, f"it is not drained yet: {why}"))
        elif channels and server is not None:
            why = why_they_stay(cluster, server, channels)
            cluster.findings.append(Finding(name, server.load_ratio, f"it is not drained yet: {why}"))


class DrainSlots:
    """Moves every slot away from servers that are being drained: all channels that the plan does not name.

    The busiest go first, each to the server with fewest slots for its size.
    """

    name = "drain"

    def propose(self, cluster: Cluster) -> list[Move]:
        """Propose the next step, and add a finding for each server of which no slot can leave."""
        moves: list[Move] = []
        for name in sorted(cluster.draining.keys() & cluster.servers.keys()):
            server = cluster.servers[name]
            given = give_slots(cluster, server, cluster.draining[name], _reason(name))
            moves += given
            left = [load for load in cluster.draining[name] if is_slot(load.channel)]
            is_told = any(finding.server == name for finding in cluster.findings)
            if left and not given and not is_told and not cluster.is_step_full:
                why = f"{len(left)} slots are in transition, or would overload any other server"
                if not cluster.targets:
                    why = f"there is no other server that could take slots: {cluster.more_servers}"
                cluster.findings.append(Finding(name, server.load_ratio, f"it is not drained yet: {why}"))
        return moves

    def permits(self, cluster: Cluster, move: Move) -> bool:
        """Permit all: no move brings anything back."""
        return True


def move_replicas(cluster: Cluster, sources: Set[str], reason: Callable[..., str]) -> list[Move]:
    """Propose that replicated channels leave some servers; ``reason`` makes a text of the names of those servers."""
    moves: list[Move] = []
    for figures in cluster.figures if cluster.targets else ():
        leaves = sorted(sources & set(figures.assignment.servers))
        if figures.assignment.mode is not Mode.SINGLE and leaves:
            move = Change(cluster, figures).drained(reason(*leaves))
            if move is not None and cluster.take(move):
                moves.append(move)
    return moves


def move_channels(cluster: Cluster, source: ServerLoad, loads: Iterable[ChannelRate], reason: str) -> list[Move]:
    """Propose to move the channels among ``loads`` away from a server, the busiest first."""
    moves: list[Move] = []
    for load in busiest_first(loads, source):
        if is_slot(load.channel):
            continue
        target = cluster.roomiest(source.id)
        if target is None or cluster.is_full or cluster.has_given(source.id):
            break
        move = cluster.move(load, source, target, reason)
        if cluster.take(move):
            moves.append(move)
    return moves


def _reason(*servers: str) -> str:
    return f"{', '.join(servers)} {'is' if len(servers) == 1 else 'are'} being drained"
