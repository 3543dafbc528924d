"""Replicates channels, and folds them back: Dynamoth, section III-B.1, Algorithm 1.

Theory of operation
-------------------
Dynamoth compares two ratios with thresholds: publications/s per subscriber, for all-subscribers replication, and
subscribers per publication/s, for all-publishers. Where both are many it takes all-subscribers. Its corrected faults:

* The figures are those of the channel, not the sums over replicas; so they do not depend on its mode (case 7 of the
  published protocol). See ``model``.
* A ratio is not a load. A channel is replicated only when it makes much of a server's load. The ratio asks for a number
  of servers; the load decides how many of them are taken: at least as many as it needs, and not so many that replicas
  have little to do.
* A channel between the thresholds may overload its server all the same. If it does so alone, it is replicated, by
  publications or by subscribers, whichever there are more of.
* All publications of one publisher go to one replica, so more replicas than publishers are useless.
* A replicated channel stays so while its figures are above ``replicate_keep_ratio`` of the thresholds: *strict* and
  *lax* below. Strict conditions imply lax ones and ask for fewer servers. So under constant load no decision undoes
  another: a mode that was entered strictly is kept laxly, and a number of replicas between the two stays.

Everything here is data and arithmetic; nothing depends on time. The ``decider`` chooses which channels may change now.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from dynamoth.names import in_quotes
from dynamoth.plan.plan import Assignment, Mode, single
from dynamoth_balancer.decide.cluster import ChannelFigures, Cluster, Finding, Move, ServerLoad
from dynamoth_balancer.decide.resources import NO_LOAD, Load
from dynamoth_balancer.options import BalancerOptions

REPLICAS_MIN = 2

PUBLICATIONS_PER_S_MIN = 1e-9
"""The smallest divisor: a channel without publications has very many subscribers for each."""


class Judgement:
    """The conditions of Algorithm 1 for a channel, with thresholds that are ``factor`` times those of the options.

    Args:
        figures: those of the channel.
        capacity: outgoing bytes/s of the largest server, more than 0. When a server of another size would do, the
            channel is to be moved there, not replicated.
        options: the thresholds.
        factor: 1 for the conditions to replicate a channel, less for those to keep it so.

    """

    def __init__(self, figures: ChannelFigures, capacity: float, options: BalancerOptions, factor: float = 1.0) -> None:
        publications, subscribers = figures.publications_per_s, figures.subscribers
        self._options = options
        self._factor = factor
        self._publishers = figures.publishers
        self._subscribers = subscribers
        #: The load ratio of the channel at one server.
        self.load_ratio = max(figures.total.outgoing_bytes_per_s / capacity, figures.total.cpu_ratio)
        #: How many times each threshold is reached.
        self._times = {
            Mode.ALL_SUBSCRIBERS: publications / max(subscribers, 1.0) / (options.all_subscribers_ratio_min * factor),
            Mode.ALL_PUBLISHERS: subscribers
            / max(publications, PUBLICATIONS_PER_S_MIN)
            / (options.all_publishers_ratio_min * factor),
        }
        large = self.load_ratio > options.replicate_load_ratio_min * factor
        self._many_publications = large and publications > options.replicate_publications_per_s_min * factor
        self._many_subscribers = large and subscribers > options.replicate_subscribers_min * factor
        self._more_publications = publications >= subscribers

    @property
    def all_subscribers(self) -> bool:
        """Whether there are many publications: for their subscribers, or besides many subscribers (the corner case)."""
        return self._many_publications and (self._times[Mode.ALL_SUBSCRIBERS] > 1 or self._many_subscribers)

    @property
    def all_publishers(self) -> bool:
        """Whether there are many subscribers for the publications that there are."""
        return self._many_subscribers and self._times[Mode.ALL_PUBLISHERS] > 1

    @property
    def outgrown(self) -> bool:
        """Whether the channel alone overloads a server."""
        return self.load_ratio > self._options.load_ratio_high * self._factor

    def entered(self) -> Mode:
        """Return the mode of a channel that is not replicated."""
        modes = [Mode.ALL_SUBSCRIBERS, Mode.ALL_PUBLISHERS]
        by_ratio = [mode for mode in modes if self.enters(mode)]
        by_load = [mode for mode in modes if self.outgrown and self._spreads(mode)]
        if not self._more_publications:
            by_load.reverse()
        return next(iter([*by_ratio, *by_load]), Mode.SINGLE)

    def enters(self, mode: Mode) -> bool:
        """Return whether the conditions of a mode hold, and replicas would have something to do."""
        return self.keeps(mode) and self._spreads(mode)

    def keeps(self, mode: Mode) -> bool:
        """Return whether the conditions of a mode hold."""
        return self.all_subscribers if mode is Mode.ALL_SUBSCRIBERS else self.all_publishers

    def _spreads(self, mode: Mode) -> bool:
        return self._useful_max(mode) >= REPLICAS_MIN

    def _useful_max(self, mode: Mode) -> int:
        """Return how many replicas can have anything to do: a publisher, or a subscriber, uses one of them."""
        users = self._publishers if mode is Mode.ALL_SUBSCRIBERS else self._subscribers
        return math.floor(users / self._factor)

    def replicas(self, mode: Mode) -> int:
        """Return N_servers: at least two, and as many as the load needs even if the ratio asks for fewer."""
        by_ratio = math.ceil(self._times[mode])
        by_load = math.ceil(self.load_ratio / (self._options.accept_ratio * self._factor))
        least_each = self._options.replicate_load_ratio_min / 2 * self._factor
        busy_max = math.floor(self.load_ratio / least_each) if least_each else by_ratio
        wanted = max(by_load, min(by_ratio, busy_max))
        return max(REPLICAS_MIN, min(wanted, self._useful_max(mode)))


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The mode and number of replicas that Algorithm 1 asks for."""

    mode: Mode
    #: 1 for a channel that belongs at one server.
    replicas: int


def wanted_change(figures: ChannelFigures, capacity: float, options: BalancerOptions) -> _Wanted | None:
    """Return the mode and replicas that Algorithm 1 asks for, given the present ones; None for no change."""
    strict = Judgement(figures, capacity, options)
    lax = Judgement(figures, capacity, options, options.replicate_keep_ratio)
    present, servers = figures.assignment.mode, figures.assignment.servers
    mode = _mode(present, strict, lax)
    if mode is Mode.SINGLE:
        return None if present is Mode.SINGLE else _Wanted(Mode.SINGLE, 1)
    if mode is not present:
        return _Wanted(mode, strict.replicas(mode))
    least, most = strict.replicas(mode), lax.replicas(mode)
    if least <= len(servers) <= most:
        return None
    return _Wanted(mode, least if least > len(servers) else most)


def _mode(present: Mode, strict: Judgement, lax: Judgement) -> Mode:
    if present is Mode.SINGLE:
        return strict.entered()
    other = Mode.ALL_PUBLISHERS if present is Mode.ALL_SUBSCRIBERS else Mode.ALL_SUBSCRIBERS
    if other is Mode.ALL_SUBSCRIBERS and strict.enters(other):
        return other  # the corner case: it goes before
    if lax.keeps(present):
        return present
    if strict.enters(other):
        return other
    return present if lax.outgrown else Mode.SINGLE


class Replicate:
    """Replicates channels that are too large for one server, over as many as they need, and folds others back."""

    name = "replicate"

    def propose(self, cluster: Cluster) -> list[Move]:
        """Propose to replicate, to fold back, to add and to free replicas, the busiest channels first."""
        if cluster.options.replicas_max < REPLICAS_MIN or not cluster.targets:
            return []
        moves: list[Move] = []
        for figures in sorted(cluster.figures, key=lambda each: (-each.total.outgoing_bytes_per_s, each.channel)):
            move = Change(cluster, figures).propose()
            if move is not None and cluster.take(move):
                moves.append(move)
        return moves

    def permits(self, cluster: Cluster, move: Move) -> bool:
        """Permit moves of channels that are at one server, and stay so; replicas leave only emptied servers."""
        stays_single = move.before.mode is Mode.SINGLE and move.after.mode is Mode.SINGLE
        return stays_single or not cluster.leaving.isdisjoint(move.before.servers)


class Change:
    """Chooses the servers for one channel, with regard to their room.

    The cluster must have at least one target; other servers are in no assignment that this makes.
    """

    def __init__(self, cluster: Cluster, figures: ChannelFigures) -> None:
        self._cluster = cluster
        self._figures = figures
        self._total = figures.total
        #: The servers that may have the channel, and those of its present ones that are among them.
        candidates = cluster.candidates(figures.assignment.servers)
        self._targets = [server.id for server in candidates]
        self._kept = [server for server in figures.assignment.servers if server in self._targets]
        self._capacity = max(server.outgoing_bytes_per_s_max for server in candidates)

    def propose(self) -> Move | None:
        """Return the change that Algorithm 1 asks for, None for no change."""
        figures, present = self._figures, self._figures.assignment
        wanted = wanted_change(figures, self._capacity, self._cluster.options)
        if wanted is None:
            return None
        if wanted.mode is Mode.SINGLE:
            return self._fold(self._kept)
        if wanted.mode is present.mode and wanted.replicas < len(present.servers):
            return self._shrink(wanted.replicas)
        return self._spread(wanted)

    def drained(self, reason: str) -> Move | None:
        """Return the change with which a replicated channel leaves servers that are being drained.

        Servers with room replace them, else there are fewer replicas; None if those would be too full.
        """
        present = self._figures.assignment
        accept = self._cluster.options.accept_ratio
        for count in range(min(len(present.servers), len(self._targets)), 0, -1):
            chosen = self._best(count)
            share = self._total / count
            grown = chosen if count < len(present.servers) else [name for name in chosen if name not in self._kept]
            if all(self._ratio_with(name, share) <= accept for name in grown):
                replicated = count >= REPLICAS_MIN
                return self._move(Assignment(present.mode, tuple(chosen)) if replicated else single(*chosen), reason)
        return None

    # Which servers.

    def _server(self, name: str) -> ServerLoad:
        return self._cluster.servers[name]

    def _ratio_with(self, name: str, share: Load) -> float:
        """Return the load ratio of a server if the channel made this load there instead of its present one."""
        return self._server(name).load_ratio_with(share - self._figures.load_at(name))

    def _least_loaded(self, names: Iterable[str], share: Load) -> list[str]:
        """Return servers in the order of their load with a share of the channel, the present ones first if equal."""
        present = self._figures.assignment.servers
        return sorted(names, key=lambda name: (self._ratio_with(name, share), name not in present, name))

    def _has_room(self, name: str, share: Load) -> bool:
        """Return whether a server has room for a share: as for any move, see ``Relieve``."""
        options = self._cluster.options
        busiest = max(self._server(server).load_ratio for server in self._figures.assignment.servers)
        after = self._ratio_with(name, share)
        return after <= options.accept_ratio or after <= busiest - options.much_better_ratio

    def _spread(self, wanted: _Wanted) -> Move | None:
        """Replicate the channel over the wanted number of servers, or as many as have room."""
        present = self._figures.assignment
        grows = wanted.mode is present.mode
        least = len(present.servers) + 1 if grows else REPLICAS_MIN
        most = min(wanted.replicas, self._cluster.options.replicas_max, len(self._targets))
        chosen = next((servers for n in range(most, least - 1, -1) if (servers := self._choose(n))), None)
        found = len(present.servers) if chosen is None else len(chosen)
        if found < wanted.replicas:
            self._find_too_few(wanted, found)
        if chosen is None:
            return None
        return self._move(Assignment(wanted.mode, tuple(chosen)), self._reason(wanted.mode, len(chosen)))

    def _choose(self, count: int) -> list[str] | None:
        """Return the best servers for the channel; None when they have no room for it."""
        share = self._total / count
        chosen = self._best(count)
        added = [name for name in chosen if name not in self._kept]
        return chosen if all(self._has_room(name, share) for name in added) else None

    def _best(self, count: int) -> list[str]:
        """Return the best servers for the channel regardless of room; present replicas are kept."""
        share = self._total / count
        if self._figures.assignment.mode is Mode.SINGLE:
            return self._least_loaded(self._targets, share)[:count]
        others = [name for name in self._targets if name not in self._kept]
        chosen = self._least_loaded(self._kept, share)[:count]
        return chosen + self._least_loaded(others, share)[: count - len(chosen)]

    def _shrink(self, count: int) -> Move | None:
        """Free the busiest replicas, as many as the others have room for."""
        present = self._figures.assignment
        busiest_last = sorted(self._kept, key=lambda name: (self._server(name).load_ratio, name))
        for number in range(count, min(len(self._kept) + 1, len(present.servers))):
            rest = busiest_last[:number]
            share = self._total / number
            if all(self._ratio_with(name, share) <= self._cluster.options.accept_ratio for name in rest):
                return self._move(Assignment(present.mode, tuple(rest)), self._reason(present.mode, number))
        return None

    def _fold(self, replicas: Iterable[str]) -> Move | None:
        """Put the channel at the least loaded of these replicas, if there is one with room."""
        target = next(iter(self._least_loaded(replicas, self._total)), None)
        if target is None or self._ratio_with(target, self._total) > self._cluster.options.accept_ratio:
            return None
        return self._move(single(target), self._reason(Mode.SINGLE, 1))

    # The proposals and their reasons.

    def _move(self, after: Assignment, reason: str) -> Move:
        figures = self._figures
        before = figures.assignment
        share = self._total / len(after.servers)
        loads = {
            name: (share if name in after.servers else NO_LOAD) - figures.load_at(name)
            for name in dict.fromkeys((*before.servers, *after.servers))
        }
        return self._cluster.change(figures.channel, before, after, loads, reason)

    def _reason(self, mode: Mode, count: int) -> str:
        figures = self._figures
        ratio = Judgement(figures, self._capacity, self._cluster.options).load_ratio
        what = "one server is enough" if mode is Mode.SINGLE else f"{count} servers share it"
        return (
            f"{figures.publications_per_s:.0f} publications/s to {figures.subscribers:.0f} subscribers make load ratio"
            f" {ratio:.2f}: {what}"
        )

    def _find_too_few(self, wanted: _Wanted, found: int) -> None:
        options, names = self._cluster.options, self._figures.assignment.servers
        busiest = max(map(self._server, names), key=lambda server: server.load_ratio)
        if found >= options.replicas_max:
            why = "no more are allowed: raise replicas_max"
        elif found >= len(self._targets):
            why = f"no more can take part: {self._cluster.more_servers}"
        else:
            why = "no other has room: add servers"
        text = f"channel {in_quotes(self._figures.channel)} needs {wanted.replicas} servers and has {found}, as {why}"
        self._cluster.findings.append(Finding(busiest.id, busiest.load_ratio, text, self._figures.channel))
