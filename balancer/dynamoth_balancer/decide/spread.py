"""Gives slots to servers that have too few: new ones, and those that an operator has drained and wants back.

The channels that the plan does not name are too many to be moved one by one. Their slots are what a server without load
gets first; relieving overloaded servers is the task of ``Relieve``.

A server begins to get slots when it has less than a quarter of its share, which the chance of the ring never does, and
stops when it has nearly all of it. So a cluster at rest stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable

from dynamoth.plan.slots import SLOTS, is_slot
from dynamoth_balancer.decide.cluster import ChannelRate, Cluster, Move, ServerLoad, busiest_first

BEGIN_RATIO = 0.25
"""A server with a smaller part of its share of the slots gets more."""

END_RATIO = 0.95
"""Until it has this part of its share."""


class Spread:
    """Moves slots from servers that have more than their share to those that have far less."""

    name = "spread"

    def __init__(self) -> None:
        #: The servers that get slots: until they have their share, or are to leave. One may be away for a while.
        self.growing: set[str] = set()

    def propose(self, cluster: Cluster) -> list[Move]:
        """Propose moves of slots to servers with too few, if no earlier goal has a move."""
        targets = {server.id: server for server in cluster.targets}
        capacity = sum(server.outgoing_bytes_per_s_max for server in targets.values())
        shares = {id_: SLOTS * server.outgoing_bytes_per_s_max / capacity for id_, server in targets.items()}
        for id_, share in shares.items():
            has = cluster.slots_with(id_)
            if has < BEGIN_RATIO * share:
                self.growing.add(id_)
            elif has >= END_RATIO * share:
                self.growing.discard(id_)
        self.growing -= cluster.leaving
        if cluster.moves:
            return []
        moves: list[Move] = []
        for id_ in sorted(self.growing & targets.keys()):
            givers = sorted(targets.keys() - self.growing, key=lambda each: cluster.slots_with(each) / shares[each])
            for giver in reversed(givers):
                wanted = int(shares[id_]) - cluster.slots_with(id_)
                spare = cluster.slots_with(giver) - int(shares[giver])
                moves += _give(cluster, targets[giver], targets[id_], min(wanted, spare), int(shares[id_]))
        return moves

    def permits(self, cluster: Cluster, move: Move) -> bool:
        """Permit all."""
        return True


def _give(cluster: Cluster, source: ServerLoad, target: ServerLoad, number: int, share: int) -> list[Move]:
    """Move up to ``number`` slots, as far as the target has room, the quietest first. ``share`` is the target's."""
    moves: list[Move] = []
    reason = f"{target.id} has {cluster.slots_with(target.id)} slots, and its share by size is {share} of {SLOTS}"
    for load in sorted(cluster.slots.get(source.id, ())):
        if len(moves) >= number or cluster.is_step_full:
            break
        move = cluster.move(load, source, target, reason)
        if _fits(cluster, move) and cluster.take(move):
            moves.append(move)
    return moves


def give_slots(cluster: Cluster, source: ServerLoad, loads: Iterable[ChannelRate], reason: str) -> list[Move]:
    """Propose to move all slots among ``loads`` away from a server, each to the one with fewest for its size."""
    moves: list[Move] = []
    others = [server for server in cluster.targets if server.id != source.id]
    for load in busiest_first(load for load in loads if is_slot(load.channel)):
        if cluster.is_step_full:
            break
        others.sort(key=lambda each: (cluster.slots_with(each.id) / each.outgoing_bytes_per_s_max, each.id))
        for target in others:
            move = cluster.move(load, source, target, reason)
            if _fits(cluster, move) and cluster.take(move):
                moves.append(move)
                break
    return moves


def _fits(cluster: Cluster, move: Move) -> bool:
    """Return whether a slot does not fill its target: one without load fits anywhere."""
    return not move.loads[move.target] or move.ratios[move.target].after <= cluster.options.accept_ratio
