"""Decides when the balancer makes a plan of its own: asks the goals about the modelled cluster.

There is at most one such plan per ``wait_s`` (T_wait of Dynamoth, section III-B), and none while an earlier change is
being installed. Only steps of slots do not wait: a server that is drained, or new, moves many of them, and each step
is bounded by load and subscriptions.
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from copy import deepcopy
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import overload

from dynamoth.errors import RequestRefused
from dynamoth.plan.plan import Assignment, Mode, Phase, single
from dynamoth.plan.slots import is_slot
from dynamoth_balancer.decide.cluster import (
    ChannelFigures,
    ChannelRate,
    Cluster,
    Decision,
    Finding,
    Goal,
    ServerLoad,
    Stray,
    decide,
)
from dynamoth_balancer.decide.history import History, MadeDecision
from dynamoth_balancer.decide.model import ClusterModel
from dynamoth_balancer.decide.pins import pinned_names
from dynamoth_balancer.decide.tidy import SilentChannels, Tidy
from dynamoth_balancer.install import book
from dynamoth_balancer.install.installer import Installer
from dynamoth_balancer.options import BalancerOptions

FINDING_REPEAT_S = 60.0
"""A decision without moves is repeated only when its findings change, or after this time."""

BLIND_MARGIN_RATIO = 0.01
"""A server with a blind agent counts as at least this much above ``load_ratio_high``."""

FIRST_REPORTS_S = 10.0
"""Decisions wait this long for the first reports of a server that can take part."""

HELD_MAX = 10_000
"""Bound of the channels that stay as administrators have replicated them; the oldest are forgotten."""

_DECIMALS = re.compile(r"\d+\.\d+")


class SlotLoads(Sequence[ChannelRate]):
    """The slots of a server. Their loads are worked out when a goal asks for one: few do, and for few servers."""

    def __init__(self, count: int, make: Callable[[], list[ChannelRate]]) -> None:
        self._count = count
        self._make = make

    @cached_property
    def _loads(self) -> list[ChannelRate]:
        return self._make()

    def __len__(self) -> int:
        """Return how many slots there are."""
        return self._count

    @overload
    def __getitem__(self, index: int) -> ChannelRate: ...
    @overload
    def __getitem__(self, index: slice) -> list[ChannelRate]: ...
    def __getitem__(self, index: int | slice) -> ChannelRate | list[ChannelRate]:
        """Return some of them, in any order."""
        return self._loads[index]

    def __iter__(self) -> Iterator[ChannelRate]:
        """Iterate over them, in any order."""
        return iter(self._loads)


class Decider:
    """Asks the goals when it is time."""

    def __init__(
        self,
        model: ClusterModel,
        urgent_goals: Sequence[Goal],
        goals: Sequence[Goal],
        slot_goals: Sequence[Goal],
        options: BalancerOptions,
    ) -> None:
        self._model = model
        self._goals = (*urgent_goals, *goals, *slot_goals)
        #: The goals that go on for an overloaded server while changes are under way.
        self._urgent_goals = tuple(urgent_goals)
        #: The goals that go on with slots while the others wait.
        self._slot_goals = tuple(slot_goals)
        self._options = options
        #: The latest decisions and moves, and what came of them.
        self.history = History(options.averaging_s)
        #: The findings when the goals were last asked.
        self.unreached: Sequence[Finding] = ()
        #: When that was.
        self.asked_at = -math.inf
        #: Since when servers that can take part have not reported often enough; None while all have.
        self._unmeasured_since: float | None = None
        #: Whether the latest plan or step moved slots or silent channels, so that more may have to move.
        self._goes_on = False
        self._silent_channels = SilentChannels(options.silent_s)
        self._look_at = -math.inf
        self._plan_at = -math.inf
        self._findings_at = -math.inf
        #: When each channel was moved last; channels that have rested are forgotten.
        self._moved_at: dict[bytes, float] = {}
        #: When the rest ends of each channel that is, or was, replicated; channels that have rested are forgotten.
        self._rested_at: dict[bytes, float] = {}
        #: The assignments of channels that administrators have replicated, the oldest first.
        self._held: OrderedDict[bytes, Assignment] = OrderedDict()
        #: When the term began, if there was a plan before.
        self._began_at = -math.inf

    def begin_term(self, installer: Installer, now: float) -> None:
        """Begin with a plan that another balancer may have changed just now."""
        if installer.plan.entries:
            self.wait(now)
            self._began_at = now
        self.unreached = ()

    def wait(self, now: float) -> None:
        """Make no plan for ``wait_s``."""
        self._plan_at = now + self._options.wait_s

    def on_moves(self, changes: Mapping[bytes, tuple[Assignment, Assignment]], now: float) -> None:
        """Start the rest of channels whose assignment was changed, by anybody: no move for ``channel_rest_s``."""
        self._moved_at.update(dict.fromkeys(changes, now))
        for channel, assignments in changes.items():
            self._held.pop(channel, None)
            if any(map(is_replicated, assignments)):
                self._rested_at[channel] = now + self._options.replication_rest_s

    def rests_s(self, channel: bytes, now: float) -> float:
        """Return for how long the balancer does not move a channel or slot, as it has moved lately."""
        moves_from = self._moved_at.get(channel, -math.inf) + self._options.channel_rest_s
        return max(0.0, moves_from - now, self._rested_at.get(channel, -math.inf) - now)

    def is_held(self, channel: bytes, assignment: Assignment) -> bool:
        """Return whether the balancer leaves a channel as an administrator has replicated it."""
        return self._held.get(channel) == assignment

    def hold(self, channel: bytes, assignment: Assignment) -> None:
        """Leave a channel as an administrator has replicated it, until somebody changes it or it must leave."""
        self._held[channel] = assignment
        if len(self._held) > HELD_MAX:
            self._held.popitem(last=False)

    def look(self, installer: Installer, now: float) -> MadeDecision | None:
        """Return a decision, if it is time and there are moves or new findings."""
        if now < self._look_at:
            return None
        self._look_at = now + self._options.decision_interval_s
        self._forget(now)
        self._silent_channels.look(installer.plan, self._model.is_busy, now)
        if installer.plan.administration.paused:
            return None
        if next(self._changes_under_way(installer, now), None) is not None:
            return self._decide_urgently(installer, now)
        if now < self._plan_at:
            return self._step(installer, now)
        decision, _ = self._ask_goals(self._goals, installer, now)
        if self._awaits_reports(installer, now) and not decision.moves:
            return None  # it is not known yet which goals can be reached
        self.unreached, self.asked_at = decision.findings, now
        if decision.moves:
            self._wait_after(decision, now)
        elif not decision.findings or not self._is_news(decision, now):
            return None
        self._findings_at = now
        return self.history.add(decision, now)

    def _decide_urgently(self, installer: Installer, now: float) -> MadeDecision | None:
        """Return a decision of the urgent goals while changes are under way, if a server is overloaded.

        Changes may take long at such a server, as subscribers there are behind: it cannot wait until all have settled.
        """
        if now < self._plan_at or installer.rules_rest(now) > 0:
            return None
        servers = (server for server in installer.plan.servers if installer.why_not(server, now) is None)
        loads = [self._model.load(server, now) for server in servers]
        if not any(load is not None and load.load_ratio > self._options.load_ratio_high for load in loads):
            return None
        decision, _ = self._ask_goals(self._urgent_goals, installer, now)
        if not decision.moves:
            return None
        self.wait(now)
        return self.history.add(replace(decision, findings=()), now)

    def _step(self, installer: Installer, now: float) -> MadeDecision | None:
        """Return the next step of slots, if there is one; the findings are those of the latest plan."""
        slots_named_at = installer.index.slots_named_at
        if not self._goes_on and not any(slots_named_at[server] for server in installer.leaving):
            return None
        decision, _ = self._ask_goals(self._slot_goals, installer, now)
        self._goes_on = bool(decision.moves)
        return self.history.add(replace(decision, findings=()), now) if decision.moves else None

    def _wait_after(self, decision: Decision, now: float) -> None:
        """Wait after a plan, unless it moves nothing but slots and silent channels."""
        steps = [is_slot(move.channel) or move.goal == Tidy.name for move in decision.moves]
        self._goes_on = any(steps)
        if not all(steps):
            self.wait(now)

    def decide_now(self, installer: Installer, now: float) -> tuple[MadeDecision, Cluster]:
        """Return a decision even while the balancer is paused or waits between two plans, and the cluster after it.

        Raises:
            RequestRefused: changes are under way, or may not begin yet.

        """
        for obstacle in self._changes_under_way(installer, now):
            raise RequestRefused(f"no plan can be made now: {obstacle}; try again then")
        decision, cluster = self._ask_goals(self._goals, installer, now)
        if not decision.moves:
            return MadeDecision(0, now, decision), cluster
        self._wait_after(decision, now)
        return self.history.add(decision, now), cluster

    def preview(self, installer: Installer, now: float) -> tuple[Decision, Cluster]:
        """Return the decision that ``look`` would make now if nothing was in its way, and the cluster after it.

        Nothing changes: the goals are copies.
        """
        cluster = self.cluster(installer, now)
        return decide(deepcopy(self._goals), cluster), cluster

    def obstacles(self, installer: Installer, now: float) -> Iterator[str]:
        """Yield why the balancer makes no plan of its own now, in words for people."""
        if installer.plan.administration.paused:
            yield "the balancer is paused: 'dynamoth resume' ends that"
        if now < self._plan_at:
            yield f"the balancer waits between two plans (wait_s): {self._plan_at - now:.1f} s are left"
        yield from self._changes_under_way(installer, now)

    def _changes_under_way(self, installer: Installer, now: float) -> Iterator[str]:
        if self._is_busy(installer, now):
            yield f"channels and slots are in transition ({len(installer.transitions)}), and must settle first"
        if (rest_s := installer.rules_rest(now)) > 0:
            yield f"the compatibility rules have changed, and publishers hear of it first: {rest_s:.1f} s are left"

    def _ask_goals(self, goals: Sequence[Goal], installer: Installer, now: float) -> tuple[Decision, Cluster]:
        cluster = self.cluster(installer, now)
        return decide(goals, cluster), cluster

    def cluster(self, installer: Installer, now: float) -> Cluster:
        """Return the servers that can take part in a plan, in the form for the goals."""
        options = self._options
        blind = self._model.blind.keys()
        loads = {
            server: self._at_least_high(load) if server in blind else load
            for server in installer.plan.servers
            if installer.why_not(server, now) is None
            and not installer.joins_in(server, now)
            and (self._model.reports(server) >= options.reports_min or server in blind)
            and (load := self._model.load(server, now)) is not None
        }
        entry_of = installer.plan.entry
        is_plain = installer.plan.compatibility.is_plain
        rests_since = now - options.channel_rest_s

        def movable(channel: bytes, server: str) -> bool:
            entry = entry_of(channel)
            return (
                entry.phase is Phase.SETTLED
                and entry.route.assignment.mode is Mode.SINGLE
                and entry.route.assignment.servers[0] == server
                and self._moved_at.get(channel, -math.inf) <= rests_since
                and not is_plain(channel)
            )

        figures = self._figures(installer, loads, blind, now)
        draining = {server: self._left_at(server, installer) for server in installer.draining}
        slots = {server: self._slots(server, installer) for server in loads}
        full = {server: why for server in loads if (why := self._model.why_full(server))}
        cluster = Cluster(loads, self._model.channels, movable, options, figures, draining, blind, slots, full)
        cluster.slot_subscriptions = cache(partial(self._slot_subscriptions, installer=installer))
        cluster.room = options.transitions_max - len(installer.transitions)
        released = sorted(installer.leaving - installer.draining)
        cluster.releasing = {server: self._left_at(server, installer) for server in released}
        cluster.pins, cluster.strays = pinned_names(installer.plan), self._strays(installer)
        cluster.returning = self._silent_channels.returning(installer.plan, now)
        return cluster

    def _strays(self, installer: Installer) -> list[Stray]:
        """Return the pinned channels that are at one other server, and settled: a failure may have moved them."""
        strays: list[Stray] = []
        for channel, pin in sorted(installer.plan.administration.pins.items()):
            entry = installer.plan.entry(channel)
            present = entry.route.assignment
            if entry.phase is Phase.SETTLED and present != pin and {present.mode, pin.mode} == {Mode.SINGLE}:
                strays.append(Stray(self.rate(channel, present.servers[0], installer), present, pin))
        return strays

    def _awaits_reports(self, installer: Installer, now: float) -> bool:
        """Return whether a server that can take part is not measured yet, as it or its agent has just begun."""
        if not any(
            self._model.reports(server) < self._options.reports_min
            for server in installer.plan.servers
            if server not in self._model.blind and installer.why_not(server, now) is None
        ):
            self._unmeasured_since = None
            return False
        if self._unmeasured_since is None:
            self._unmeasured_since = now
        return now - self._unmeasured_since < FIRST_REPORTS_S

    def _at_least_high(self, load: ServerLoad) -> ServerLoad:
        """Return the load of a server with a blind agent: overloaded, whatever was measured before."""
        high = self._options.load_ratio_high * (1 + BLIND_MARGIN_RATIO) * load.outgoing_bytes_per_s_max
        return replace(load, outgoing_bytes_per_s=max(load.outgoing_bytes_per_s, high))

    def _left_at(self, server: str, installer: Installer) -> list[ChannelRate]:
        """Return the channels and slots at a server being drained, also those on their way from there."""
        rates = {load.channel: load for load in (*self._model.channels(server), *self._slot_rates(server, installer))}
        names = (*installer.index.named_at[server], *installer.index.slots_named_at[server])
        return [rates.get(name, ChannelRate(0.0, name)) for name in names]

    def _slots(self, server: str, installer: Installer) -> SlotLoads:
        return SlotLoads(len(installer.index.slots_at[server]), lambda: self._slot_rates(server, installer))

    def _slot_rates(self, server: str, installer: Installer) -> list[ChannelRate]:
        """Return the slots of a server with their load: of channels with a name, of others, and a share of the rest."""
        slots, slot_above = installer.index.slots_at[server], installer.plan.slot_above
        rest = self._model.unnamed(server) / max(1, len(slots))
        rates, cpu = dict.fromkeys(slots, rest.outgoing_bytes_per_s), dict.fromkeys(slots, rest.cpu_ratio)
        for load in self._model.channels(server):
            slot = slot_above(load.channel)
            if slot in rates:
                rates[slot] += load.outgoing_bytes_per_s
                cpu[slot] += load.cpu_ratio
        for slot, others in self._model.slots(server).items():
            if slot in rates:
                rates[slot] += others.outgoing_bytes_per_s
                cpu[slot] += others.cpu_ratio
        return [ChannelRate(rate, slot, cpu[slot]) for slot, rate in rates.items()]

    def _slot_subscriptions(self, server: str, installer: Installer) -> dict[bytes, float]:
        """Return how many subscriptions each slot of a server has; those of unknown channels count evenly."""
        slots, slot_above = installer.index.slots_at[server], installer.plan.slot_above
        known, more = self._model.subscriptions(server)
        subscriptions = dict.fromkeys(slots, more / max(1, len(slots)))
        for name, count in known.items():
            slot = name if is_slot(name) else slot_above(name)
            if count and slot in subscriptions:
                subscriptions[slot] += count
        return subscriptions

    def rate(self, name: bytes, server: str, installer: Installer) -> ChannelRate:
        """Return the estimated load of a channel or slot at a server."""
        rates = self._slot_rates(server, installer) if is_slot(name) else self._model.channels(server)
        return next((rate for rate in rates if rate.channel == name), ChannelRate(0.0, name))

    def members(self, slots: Iterable[bytes], installer: Installer) -> dict[bytes, list[bytes]]:
        """Return the channels of slots that reports name at the servers where clients expect them."""
        members: dict[bytes, list[bytes]] = {slot: [] for slot in slots}
        entries, slot_above = installer.plan.entries, installer.plan.slot_above
        for server in {entries[slot].client_route.assignment.servers[0] for slot in members}:
            for channel in self._model.channel_names(server):
                if (slot := slot_above(channel)) in members:
                    members[slot].append(channel)
        return members

    def channels_left(self, server: str, installer: Installer) -> int | None:
        """Return how many channels are at a server that is being drained; None without measurements.

        Those that the plan names, and those that the agent has reported lately and that inherit from a slot there.
        """
        latest = self._model.latest(server)
        if latest is None:
            return None
        rest = latest.rest  # channels that reports have no room for
        unnamed = rest.channels if rest.subscribers or rest.publications else 0
        named, entry_of = installer.index.named_at[server], installer.plan.entry
        names = self._model.channel_names(server)
        reported = sum(channel not in named and book.follows(entry_of(channel), server) for channel in names)
        return len(named) + reported + unnamed

    # Replication.

    def _figures(
        self, installer: Installer, loads: Mapping[str, ServerLoad], blind: Set[str], now: float
    ) -> list[ChannelFigures]:
        """Return the figures of the channels whose replication may be changed now.

        Replicated channels with a replica at a server with a blind agent are left alone.
        """
        if now - self._began_at < self._options.averaging_s:
            return []  # what settled in the predecessor's time is not known to have done so before the reports
        wanted: dict[bytes, Assignment] = {}
        for channel in (*installer.index.replicated, *self._busy(installer, loads)):
            entry = installer.plan.entry(channel)
            assignment = entry.route.assignment
            if entry.phase is not Phase.SETTLED or self._rested_at.get(channel, now) > now:
                continue
            if is_replicated(assignment) and not blind.isdisjoint(assignment.servers):
                continue
            if channel in installer.plan.administration.pins:
                continue
            is_left = self._held.get(channel) == assignment and installer.draining.isdisjoint(assignment.servers)
            if not is_left and all(server in loads for server in assignment.servers):
                wanted[channel] = assignment
        return self._model.figures(wanted)

    def _busy(self, installer: Installer, loads: Mapping[str, ServerLoad]) -> list[bytes]:
        """Return the channels at one server that may be busy enough to be replicated."""
        if not loads:
            return []
        plan = installer.plan
        capacity = max(load.outgoing_bytes_per_s_max for load in loads.values())
        least = min(self._options.replicate_load_ratio_min, self._options.load_ratio_high)
        return [
            channel
            for server in loads
            for channel in self._model.busy(server, least * capacity, least)
            if plan.entry(channel).route.assignment == single(server) and not plan.compatibility.is_plain(channel)
        ]

    def _is_busy(self, installer: Installer, now: float) -> bool:
        """Return whether a change is being installed; one that is stuck does not count."""
        patience = self._options.move_timeout_s
        return any(now - transition.since < patience for transition in installer.transitions.values())

    def _is_news(self, decision: Decision, now: float) -> bool:
        if now - self._findings_at >= FINDING_REPEAT_S:
            return True
        made = self.history.decisions
        return not made or _summary(made[-1].decision) != _summary(decision)

    def _forget(self, now: float) -> None:
        rest = self._options.channel_rest_s
        self._moved_at = {channel: at for channel, at in self._moved_at.items() if now - at < rest}
        self._rested_at = {channel: at for channel, at in self._rested_at.items() if at > now}
        self._model.forget_proven(now)


def is_replicated(assignment: Assignment) -> bool:
    """Return whether a channel with this assignment has several servers."""
    return assignment.mode is not Mode.SINGLE


def _summary(decision: Decision) -> set[tuple[str, bytes | None, str]]:
    """Return the part of a decision that makes it news: without its figures, which always change."""
    return {(each.server, each.channel, _DECIMALS.sub("", each.reason)) for each in decision.findings}
