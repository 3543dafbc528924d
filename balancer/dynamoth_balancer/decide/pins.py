"""Keeps pinned channels where administrators want them.

No goal moves a pinned channel (``Cluster.pins``), however busy it is. One that is elsewhere, because its server had
failed, goes back as soon as that server takes channels again, even if that overloads it: administrators decide.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from dynamoth.names import in_quotes
from dynamoth.plan.plan import Assignment, Plan
from dynamoth_balancer.decide.cluster import Cluster, Finding, Move, Stray


def pinned_names(plan: Plan) -> Mapping[bytes, Assignment]:
    """Return the names that must not move: pinned channels, and the slots that pinned channels follow."""
    pins = plan.administration.pins
    if not pins:
        return pins
    names = dict(pins)
    for channel, pin in pins.items():
        slot = plan.slot_above(channel)
        if slot is not None and plan.entry(channel).route.assignment == pin:
            names[slot] = pin
    return MappingProxyType(names)


class Pin:
    """Moves pinned channels back to their servers."""

    name = "pin"

    def propose(self, cluster: Cluster) -> list[Move]:
        """Propose to move strays back, and add a finding for each that cannot."""
        moves: list[Move] = []
        for stray in cluster.strays:
            move = _move(cluster, stray)
            if move is not None and cluster.take(move):
                moves.append(move)
            else:
                cluster.findings.append(_not_there(cluster, stray))
        return moves

    def permits(self, cluster: Cluster, move: Move) -> bool:
        """Permit all: the cluster itself admits no move of a pinned channel."""
        return True


def _move(cluster: Cluster, stray: Stray) -> Move | None:
    source, target = (cluster.servers.get(each.servers[0]) for each in (stray.present, stray.pin))
    if source is None or target is None:
        return None
    return cluster.move(stray.rate, source, target, f"it is pinned to {target.id}")


def _not_there(cluster: Cluster, stray: Stray) -> Finding:
    [source], [target] = stray.present.servers, stray.pin.servers
    server = cluster.servers.get(target)
    name = in_quotes(stray.rate.channel)
    return Finding(
        target,
        0.0 if server is None else server.load_ratio,
        f"channel {name} is pinned to {target} and is at {source}: it goes back when it has rested and both servers"
        " take part in changes; 'dynamoth unpin' ends the pin",
        stray.rate.channel,
    )
