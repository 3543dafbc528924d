"""A cluster under constant load, for goals: where channels are, and what they make their servers send."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from dynamoth.plan.plan import Assignment, Mode, single
from dynamoth_balancer.decide.cluster import (
    ChannelFigures,
    ChannelRate,
    Cluster,
    Decision,
    Goal,
    Move,
    ServerLoad,
    decide,
)
from dynamoth_balancer.options import BalancerOptions


@dataclass
class World:
    """The channels of a cluster. The load of a replicated channel is evenly spread over its servers."""

    capacities: dict[str, float]
    places: dict[bytes, Assignment]
    #: Outgoing bytes/s of each channel, over all its servers.
    loads: dict[bytes, float]
    #: Load of a server that is no channel's.
    rest: Mapping[str, float] = field(default_factory=dict[str, float])
    #: Channels that may not be moved now.
    fixed: set[bytes] = field(default_factory=set[bytes])
    options: BalancerOptions = field(default_factory=BalancerOptions)
    draining: frozenset[str] = frozenset()
    releasing: frozenset[str] = frozenset()
    down: frozenset[str] = frozenset()
    #: Channels with so many publications that they are spread at half of a server's load.
    hot: frozenset[bytes] = frozenset()

    def rates(self, server: str) -> list[ChannelRate]:
        """Return the channels at a server."""
        here = ((channel, place.servers) for channel, place in self.places.items() if server in place.servers)
        return [ChannelRate(self.loads[channel] / len(servers), channel) for channel, servers in here]

    def load(self, server: str) -> float:
        return self.rest.get(server, 0.0) + sum(rate.outgoing_bytes_per_s for rate in self.rates(server))

    def ratios(self) -> dict[str, float]:
        return {server: self.load(server) / capacity for server, capacity in self.capacities.items()}

    def _figures(self, channel: bytes) -> ChannelFigures:
        place = self.places[channel]
        loads = dict.fromkeys(place.servers, self.loads[channel] / len(place.servers))
        return ChannelFigures(channel, place, 3000 if channel in self.hot else 3, 100, 10, loads)

    def cluster(self) -> Cluster:
        free = [channel for channel in self.places if channel not in self.fixed]
        return Cluster(
            {
                id_: ServerLoad(id_, self.load(id_), size)
                for id_, size in self.capacities.items()
                if id_ not in self.down
            },
            lambda server: [rate for rate in self.rates(server) if rate.outgoing_bytes_per_s],
            lambda channel, server: channel in free and self.places[channel] == single(server),
            self.options,
            [self._figures(channel) for channel in free if self.down.isdisjoint(self.places[channel].servers)],
            draining={server: self.rates(server) for server in self.draining},
            releasing={server: self.rates(server) for server in self.releasing},
        )

    def decide(self, *goals: Goal) -> Decision:
        return decide(goals, self.cluster())

    def carry_out(self, decision: Decision) -> None:
        for move in decision.moves:
            assert self.places[move.channel] == move.before
            self.places[move.channel] = move.after


def replicated(mode: Mode, *numbers: int) -> Assignment:
    return Assignment(mode, tuple(f"s{number}" for number in numbers))


@dataclass
class Push:
    """A later goal that wants some moves, whatever the others want. Each is made when those before it were taken."""

    moves: Callable[[Cluster], Iterable[Move]]
    name = "push"

    def propose(self, cluster: Cluster) -> list[Move]:
        return [move for move in self.moves(cluster) if cluster.take(move)]

    def permits(self, cluster: Cluster, move: Move) -> bool:
        return True


def fill(server: str) -> Push:
    """Return a goal that moves everything to one server."""

    def moves(cluster: Cluster) -> Iterable[Move]:
        target = cluster.servers[server]
        for source in cluster.servers.values():
            for rate in cluster.channels(source.id) if source is not target else ():
                yield cluster.move(rate, source, target, "test")

    return Push(moves)
