"""Relieves overloaded servers: Dynamoth, section III-B, Algorithm 2, with its faults corrected.

It always ends, as it looks at each overloaded server once, and at each of its channels once. It does not move a channel
back and forth, as each move makes the larger load ratio of the two servers smaller. So the load ratios of all servers,
sorted with the largest first, get smaller with each move (in lexicographic order), and under constant load no earlier
state comes back.
"""

from __future__ import annotations

from collections.abc import Sequence

from dynamoth.names import in_quotes
from dynamoth_balancer.decide.cluster import ChannelRate, Cluster, Finding, Move, ServerLoad, busiest_first
from dynamoth_balancer.decide.resources import NO_LOAD, Resource
from dynamoth_balancer.decide.worth import Worth, can_be_worth_it, is_worth_moves, judge

NO_FIGURES = "its agent has not seen which channels make the load: CLIENT LIST of the server shows who publishes"
"""Why nothing leaves a server whose agent has been blind from the first second on."""

OTHER_COMMANDS = (
    "most of its CPU is not used by channels, so moving them does not help: INFO commandstats of the server shows which"
    " commands take it"
)
"""Why channels cannot relieve a server whose CPU an application uses for something else."""

STUCK = "its channels and slots rest, are in transition, or would overload any other server: add servers"


class Relieve:
    """Moves channels away from servers above ``load_ratio_high``, while others have room (Algorithm 2).

    As published: the busiest channels of the most loaded server go to the least loaded one until ``load_ratio_safe`` is
    reached. Corrected: a channel that no other server could carry better stays, and smaller ones are tried; the least
    loaded server is the one with most room in bytes, as capacities differ. Load is that of the tighter resource: where
    it is CPU, the channels that use most of it are the busiest. And moves have a price: if all that can leave relieves
    the server by less than ``improvement_ratio_min``, nothing is moved.
    """

    name = "relieve"

    def propose(self, cluster: Cluster) -> list[Move]:
        """Propose moves away from overloaded servers, the most loaded first."""
        high = cluster.options.load_ratio_high
        overloaded = [server for server in cluster.servers.values() if server.load_ratio > high]
        overloaded.sort(key=lambda server: (-server.load_ratio, server.id))
        moves: list[Move] = []
        for server in overloaded:
            moves += self._relieve(cluster, server)
        return moves

    def permits(self, cluster: Cluster, move: Move) -> bool:
        """Permit moves that fill no server above ``accept_ratio``."""
        accept = cluster.options.accept_ratio
        return all(move.ratios[server].after <= accept for server in move.joined)

    def _relieve(self, cluster: Cluster, source: ServerLoad) -> list[Move]:
        options = cluster.options
        of_cpu = " (of its CPU)" if source.resource is Resource.CPU else ""
        reason = f"{source.id} has load ratio {source.load_ratio:.2f}{of_cpu}, above {options.load_ratio_high:.2f}"
        if source.id in cluster.blind:
            reason = f"the agent of {source.id} does not see what is published there, so {source.id} is overloaded"
        if _is_bounded(cluster, source):
            why, alone = why_they_stay(cluster, source, ()), all(server is source for server in cluster.targets)
            cluster.findings.append(Finding(source.id, source.load_ratio, why, short=alone))
            return []
        before = source.load_ratio
        moves = self._move_busiest(cluster, source, reason)
        ends_here = source.id not in cluster.blind and not _is_bounded(cluster, source)
        gain = before - source.load_ratio
        too_little = bool(moves) and ends_here and not is_worth_moves(gain, options)
        if source.load_ratio > options.load_ratio_high or too_little:
            stayed = [load for load in cluster.channels(source.id) if load.channel not in cluster.moves]
            why = why_they_stay(cluster, source, stayed) if stayed else _why_not_channels(cluster, source)
            if too_little:
                why = f"what could leave would relieve it by only {gain:.3f}, not worth the moves; {why}"
                cluster.give_up(moves)
                moves = []
            stuck = (*stayed, *cluster.slots.get(source.id, ()))
            short = any(_fits_elsewhere(cluster, source, load) for load in stuck)
            cluster.findings.append(Finding(source.id, source.load_ratio, why, short=short))
            if not _is_bounded(cluster, source):
                cluster.unrelieved.add(source.id)
        return moves

    @staticmethod
    def _move_busiest(cluster: Cluster, source: ServerLoad, reason: str) -> list[Move]:
        options = cluster.options
        moves: list[Move] = []
        for load in busiest_first(cluster.channels(source.id), source):
            done = source.load_ratio <= options.load_ratio_safe or source.share(load.load) < options.channel_ratio_min
            if done or cluster.is_full or cluster.has_given(source.id):
                break
            target = cluster.roomiest(source.id)
            if target is None or not can_be_worth_it(source, target, options):
                break
            move = cluster.move(load, source, target, reason)
            if judge(move, options) is Worth.WORTH_IT and cluster.take(move):
                moves.append(move)
        return moves


def _fits_elsewhere(cluster: Cluster, source: ServerLoad, load: ChannelRate) -> bool:
    """Return whether an empty server could take a channel or slot, and it may move now."""
    may_move = load.channel not in cluster.pins and cluster.movable(load.channel, source.id)
    return may_move and cluster.options.channel_ratio_min <= source.share(load.load) <= cluster.options.load_ratio_safe


class RelieveSlots:
    """Moves slots away from servers above ``load_ratio_high`` that ``Relieve`` could not relieve.

    Their load is that of many small channels, which move together. It goes on in steps until ``load_ratio_safe`` is
    reached, the busiest slots first, each judged as a channel is.
    """

    name = "relieve"

    def __init__(self) -> None:
        #: The servers that give slots.
        self._relieving: set[str] = set()

    def propose(self, cluster: Cluster) -> list[Move]:
        """Propose the next step."""
        safe = cluster.options.load_ratio_safe
        self._relieving |= cluster.unrelieved - cluster.blind
        self._relieving = {
            id_ for id_ in self._relieving & cluster.servers.keys() if cluster.servers[id_].load_ratio > safe
        }
        moves: list[Move] = []
        for id_ in sorted(self._relieving):
            given = self._relieve(cluster, cluster.servers[id_])
            moves += given
            if given:  # it is not stuck, whatever the goal for channels has found
                cluster.findings[:] = [f for f in cluster.findings if (f.server, f.goal) != (id_, self.name)]
        return moves

    def permits(self, cluster: Cluster, move: Move) -> bool:
        """Permit all: ``Relieve`` permits no move that overloads a server."""
        return True

    def _relieve(self, cluster: Cluster, source: ServerLoad) -> list[Move]:
        options = cluster.options
        moves: list[Move] = []
        roomiest = cluster.roomiest(source.id)
        if roomiest is None or not can_be_worth_it(source, roomiest, options):
            return moves
        loads = busiest_first(cluster.slots.get(source.id, ()), source)
        left = sum(source.share(load.load) for load in loads)
        for load in loads:
            target = cluster.roomiest(source.id)
            is_little = left < options.improvement_ratio_min  # all that have not been looked at
            if source.load_ratio <= options.load_ratio_safe or target is None or is_little or cluster.is_step_full:
                break
            left -= source.share(load.load)
            reason = f"{source.id} has load ratio {source.load_ratio:.2f}, and its busy channels do not explain it"
            move = cluster.move(load, source, target, reason)
            if judge(move, options) is Worth.WORTH_IT and cluster.take(move):
                moves.append(move)
        return moves


def _why_not_channels(cluster: Cluster, source: ServerLoad) -> str:
    """Return why no channel can leave an overloaded server that has none with a load."""
    if source.id in cluster.blind:
        return NO_FIGURES
    if 2 * source.share(sum((load.load for load in cluster.slots.get(source.id, ())), NO_LOAD)) > source.load_ratio:
        return STUCK
    return OTHER_COMMANDS if source.resource is Resource.CPU else "its load is not that of channels"


def _is_bounded(cluster: Cluster, source: ServerLoad) -> bool:
    """Return whether the bounds of a plan, and nothing else, end the relief of a server."""
    if cluster.is_full or cluster.has_given(source.id):
        return True
    return all(cluster.has_taken(server.id) for server in cluster.targets if server is not source)


def why_they_stay(cluster: Cluster, source: ServerLoad, stayed: Sequence[ChannelRate]) -> str:
    """Return why the ``stayed`` channels have not left a server that is overloaded or being drained, and the cure.

    There is at least one, unless the bounds of the plan keep them, or there is no other server.
    """
    others = [server.id for server in cluster.targets if server is not source]
    if not others:
        return f"there is no other server that could take channels: {cluster.more_servers}"
    if _is_bounded(cluster, source):
        return "this plan has as many moves as one may have; the next goes on"
    of_channels = sum(load.cpu_ratio for load in stayed)
    if source.resource is Resource.CPU and of_channels < source.cpu_ratio / 2 and source.id not in cluster.draining:
        return OTHER_COMMANDS
    busiest = busiest_first(stayed, source)[0]
    ratio = source.share(busiest.load)
    if busiest.channel in cluster.pins:
        what = f"channel {in_quotes(busiest.channel)} makes load ratio {ratio:.2f} here and is pinned"
        return f"{what}: 'dynamoth unpin' lets the balancer move it"
    if ratio > cluster.options.load_ratio_safe:
        what = f"channel {in_quotes(busiest.channel)} alone makes load ratio {ratio:.2f} here"
        return f"{what}: one server is too small for it, 'dynamoth plan replicate' spreads it over several"
    return "its channels rest, are in transition, or would overload any other server: add servers"
