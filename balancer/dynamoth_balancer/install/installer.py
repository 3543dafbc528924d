"""Installs plans: takes each change through its three phases, and keeps every server's copy up to date.

Theory of operation
-------------------
An installer works for one *term*: from when its balancer got the lease and made its plan until it loses the lease. The
state of a transition is in the plan, so whatever happens to the balancer, its successor continues where it was::

    PREPARED -> ACTIVE    when every old and new server has stored the transition, and the *present* process of its
                          agent has acknowledged it
    PREPARED -> SETTLED   where it was, when one of these agents has failed, or one of these servers refuses the plan
    ACTIVE -> SETTLED     when the agent of every old server has said that nobody listens at the old location there,
                          and every old and new server has stored that the transition is ACTIVE

Dead servers are not waited for: their agents find out what they have missed when they are back.

Nothing is assumed to arrive: agents that do not answer are asked again, and their messages may come twice, late, or
from a process that is gone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

from dynamoth.errors import ConfigError, PlanError, RequestRefused
from dynamoth.machine.events import Send
from dynamoth.names import AGENT_CHANNEL, in_quotes
from dynamoth.plan.administration import Administration
from dynamoth.plan.compatibility import Compatibility, CompatibilityRule
from dynamoth.plan.plan import EPOCH_MAX, VERSIONS_IN_RESERVE, Assignment, Entry, Phase, Plan, Server
from dynamoth.protocol.control import PlanQuery, Vacated, pack_control
from dynamoth_balancer.admin.compatibility import why_not_moved
from dynamoth_balancer.events import InnerAction, Note, PlanChanged, TransitionsSettled
from dynamoth_balancer.install.agents import Agents
from dynamoth_balancer.install.book import PlanBook, PlanIndex
from dynamoth_balancer.install.copies import CopyAction, CopyFound, PlanCopy
from dynamoth_balancer.install.folding import Folding
from dynamoth_balancer.install.quorum import Quorum
from dynamoth_balancer.install.recovery import (
    VERSIONS_LOST_MAX,
    Copy,
    is_of_another_cluster,
    same_ring,
    version_after,
    why_not_ours,
)
from dynamoth_balancer.options import BalancerOptions

FOLDED_RATIO_MIN = 0.05
"""Entries are folded when they are this part of all, as every server gets the whole plan then: each of them costs some
twenty entries that are written once more, and no more of them are ever left."""

WhyNot = Callable[[str], str | None]
"""Returns why a server cannot take part in a change; None when it can."""

_LEAVE = "subscribers to leave"

LIST_STORED_S = 0.1
"""A new server gets no channel before most servers store the list with it, which takes about this long."""

PLAIN_STAYS = " (a plain Redis client that is subscribed there stays until it ends: see CLIENT LIST TYPE pubsub)"
"""Clients of Dynamoth leave by themselves."""


@dataclass(slots=True)
class Transition:
    """A channel whose change has not settled."""

    channel: bytes
    entry: Entry
    #: The version of the plan that brought it into its present phase, or a later one.
    version: int
    since: float
    #: Servers whose agents have said, in its present phase, that nobody listens at an old location.
    vacated: frozenset[str] = frozenset()
    #: Whether it began in this term, from a settled channel: while it is PREPARED, nobody can have used the new route.
    is_own: bool = False
    #: The servers of all routes that some subscriber may still follow.
    old: frozenset[str] = field(init=False)
    #: Old and new servers.
    involved: frozenset[str] = field(init=False)
    #: The servers with locations that subscribers leave.
    left: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        """Work out the servers once: they are asked for again and again."""
        self.old = frozenset(server for route in self.entry.previous for server in route.assignment.servers)
        self.involved = self.old.union(self.entry.route.assignment.servers)
        self.left = frozenset(location.server for location in self.entry.left(self.channel))

    @property
    def needs(self) -> tuple[Phase, int, frozenset[str], frozenset[str], frozenset[str]]:
        """What decides whether its phase is complete: it is for all that need the same, or for none of them."""
        return self.entry.phase, self.version, self.involved, self.left, self.vacated


class Installer:
    """Installs plans for one term. The owner checks before each call that it still holds the lease."""

    def __init__(
        self,
        book: PlanBook,
        servers: Sequence[Server],
        agents: Agents,
        options: BalancerOptions,
        term: int,
        now: float,
        quorum: Quorum | None = None,
    ) -> None:
        self.book = book
        self._quorum = quorum or Quorum()
        #: Of the present plan, with the channels at servers being drained.
        self.index = PlanIndex(book.plan, book.plan.administration.draining)
        #: The servers that the fleet gives up: they get no channels. Written by :meth:`close` only.
        self.closed: frozenset[str] = frozenset()
        #: The servers whose channels and slots are recorded by name, besides those being drained.
        self._watched: frozenset[str] = frozenset()
        self._servers = servers
        self._agents = agents
        self._options = options
        self.counters: Counter[str] = Counter()
        #: Counts the terms of this process.
        self.term = term
        self._copies = {server.id: self._new_copy(server.id) for server in servers}
        #: Copies at servers that have left the plan. They get no later version than the one in which they did.
        self._leaving: dict[str, PlanCopy] = {}
        #: The servers before the latest change of the list, until most of both lists store it; and its version.
        self._former: frozenset[str] = frozenset()
        self._list_version = self._first_version = book.plan.version
        unused = {server.id for server in servers} - book.plan.servers_in_use
        #: Until when servers without channels get none: clients with patterns may not listen there yet.
        self._joining = dict.fromkeys(unused, now + options.join_s)
        #: The channels in transition; written only here.
        self.transitions: dict[bytes, Transition] = {}
        self._note_transitions(book.plan.entries, now)
        #: Of the present plan.
        self._folding = Folding(book.plan)
        self._fold_at = now + options.fold_interval_s
        #: The plan whose index was checked.
        self._checked: Plan | None = None
        #: Whether something has happened that may complete a phase.
        self._due = True
        self._advance_at = now
        self._began_at = now
        #: When channels settled, for those within ``plain_rest_s``.
        self._settled_at: dict[bytes, float] = {}
        #: When the compatibility rules changed, or may have changed.
        self._rules_changed_at = now if book.plan.compatibility.version else float("-inf")
        #: A version that an agent holds and that we do not know; the plan must get above it. -1: none.
        self._jump_above = -1
        #: The servers that are not waited for; kept up to date by the owner, by :meth:`note_dead`.
        self.dead: frozenset[str] = frozenset()
        #: By server, the version that its agent claims to hold and that no balancer has issued.
        self.versions_refused: dict[str, int] = {}

    @property
    def plan(self) -> Plan:
        """The present plan."""
        return self.book.plan

    @property
    def draining(self) -> frozenset[str]:
        """The servers that are to give up all channels and slots."""
        return self.plan.administration.draining

    @property
    def leaving(self) -> frozenset[str]:
        """The servers that give up all channels and slots, whoever wants that."""
        return self.draining | self.closed & self.plan.servers.keys()

    def close(self, closed: frozenset[str], watched: frozenset[str]) -> None:
        """Let some servers get no more channels, and record the channels of these and of ``watched`` by name."""
        self.closed, self._watched = closed, closed | watched
        self._watch()

    def copy(self, server: str) -> PlanCopy:
        """Return the state of the copy at a server of the plan."""
        return self._copies[server]

    @property
    def refusing(self) -> frozenset[str]:
        """The servers that refuse to store the plan, as their disk or memory is full, for instance."""
        return frozenset(server for server, copy in self._copies.items() if copy.problem)

    @property
    def fenced_at(self) -> str:
        """The server that has refused a write, as another balancer has begun a newer term; empty for none."""
        return self.book.fenced_at

    @property
    def is_used_up(self) -> bool:
        """Whether the term has no versions left, so that nothing is written before the next one."""
        return self.book.is_used_up

    def deadline(self) -> float | None:
        """Return when :meth:`advance` may have something to do; None when that depends on messages."""
        return self._advance_at if self._due and self.transitions else None

    # Changes.

    def begin(self, assignments: Mapping[bytes, Assignment], reason: str, now: float) -> list[InnerAction]:
        """Begin a transition for each channel, in one version of the plan.

        Raises:
            RequestRefused: a channel is in transition or there already, a server cannot take part, or there are too
            many.

        """
        why_not, why_not_to = (cache(partial(ask, now=now)) for ask in (self.why_not, self.why_not_to))
        for channel, assignment in assignments.items():
            self._check(channel, assignment, now, why_not, why_not_to)
        if len(self.transitions) + len(assignments) > self._options.transitions_max:
            raise RequestRefused(
                f"{len(self.transitions)} channels are in transition, and at most"
                f" {self._options.transitions_max} may be; wait until some have settled"
            )
        self._check_versions()
        jumped = self._jump()
        plan = self.plan.begin(assignments)
        for channel in assignments:
            self.transitions[channel] = Transition(channel, plan.entries[channel], plan.version, now, is_own=True)
        return [*jumped, *self._changed(plan, assignments, reason, now)]

    def fail_over(self, assignments: Mapping[bytes, Assignment], reason: str, now: float) -> list[InnerAction]:
        """Begin to move channels that have lost a server, in one version of the plan, whatever their phase is.

        Raises:
            RequestRefused: the versions are used up.

        """
        self._check_versions()
        jumped = self._jump()
        plan = self.plan.fail_over(assignments)
        self._note_transitions({channel: plan.entries[channel] for channel in assignments}, now, plan.version)
        return [*jumped, *self._changed(plan, assignments, reason, now)]

    def roll_back(self, assignments: Mapping[bytes, Assignment], reason: str, now: float) -> list[InnerAction]:
        """Undo moves of this term that are PREPARED, in one version of the plan.

        Raises:
            RequestRefused: the versions are used up.

        """
        self._check_versions()
        jumped = self._jump()
        plan = self.plan.roll_back(assignments)
        self._note_transitions({channel: plan.entries[channel] for channel in assignments}, now, plan.version)
        settled = tuple(channel for channel in assignments if plan.entries[channel].phase is Phase.SETTLED)
        self._settled_at |= dict.fromkeys(settled, now)
        return [*jumped, *self._changed(plan, assignments, reason, now), TransitionsSettled(settled)]

    def note_dead(self, dead: frozenset[str]) -> None:
        """Wait for these servers no more, and for others again."""
        if dead != self.dead:
            self.dead = dead
            self._watch()
            self._due = True

    def _watch(self) -> None:
        """Record by name what is at the servers that are to have nothing."""
        self.index.watch(self.plan, (self.draining | self.dead | self._watched) & self.plan.servers.keys())

    def _check_versions(self) -> None:
        if self.plan.version > EPOCH_MAX - VERSIONS_IN_RESERVE:
            raise RequestRefused("the versions of the plan are used up; stop all clients and delete the stored plans")

    def change_rules(self, rules: tuple[CompatibilityRule, ...], reason: str, now: float) -> list[InnerAction]:
        """Put other compatibility rules into force, by which no channel moves.

        Raises:
            RequestRefused: some clients would not learn of them now.

        """
        for problem in filter(None, (self.why_not(server, now) for server in self._copies)):
            raise RequestRefused(f"all servers and agents must hear of it: {problem}")
        self._check_rest(Compatibility(self.plan.version + 1, rules), now)
        self._rules_changed_at = now
        jumped = self._jump()
        return [*jumped, *self._changed(self.plan.with_compatibility(rules), (), reason, now)]

    def administer(
        self, administration: Administration, servers: Iterable[Server] | None, reason: str, now: float
    ) -> list[InnerAction]:
        """Put what administrators have decided into the plan, and with ``servers`` another list of servers, too.

        The next version of the plan is that of the administration. Transitions go on.

        Raises:
            RequestRefused: the plan uses a server that is not listed any more, administration and servers do not fit
            each other, or there is no version left.

        """
        self._check_versions()
        try:
            self.plan.administered(administration, servers)
        except PlanError as error:
            raise RequestRefused(str(error)) from error
        jumped = self._jump()
        plan = self.plan.administered(administration, servers)
        if plan.servers.keys() != self.plan.servers.keys():
            self._former, self._list_version = frozenset(self.plan.servers), plan.version
        self._follow_list(plan, now)
        return [*jumped, *self._changed(plan, (), reason, now)]

    def stored_at(self, version: int) -> int:
        """Return how many servers store this version of the plan, or a later one."""
        return len(self._stored_among(self._copies, version))

    def _stored_among(self, servers: Iterable[str], version: int) -> list[str]:
        copies = [copy for server in servers if (copy := self._find(server)) is not None]
        return [copy.server for copy in copies if copy.version is not None and copy.version >= version]

    def _find(self, server: str) -> PlanCopy | None:
        """Return the copy at a server, also at one that is leaving the plan; None where there is none."""
        return self._copies.get(server) or self._leaving.get(server)

    @property
    def may_change_servers(self) -> bool:
        """Whether no balancer can believe in a list that differs from ours by more than one server."""
        return not self._former and self.is_stored(self._first_version)

    def is_leaving(self, server: str) -> bool:
        """Return whether a server has left the plan and does not store that yet."""
        copy = self._leaving.get(server)
        return copy is not None and (copy.version is None or copy.version < self._list_version)

    def left_at(self, server: str) -> str | None:
        """Return what of the plan still needs a server, in words; None for nothing."""
        if (used := sum(server in transition.involved for transition in self.transitions.values())) > 0:
            return f"{used} channels and slots are on their way from or to it: try again when they have settled"
        if server in self.plan.compatibility.servers:
            return "a compatibility rule names it: see 'dynamoth plan compatibility list'"
        if server in self.plan.administration.pinned_servers:
            return "channels are pinned there: unpin them, or pin them elsewhere"
        if server in self.plan.servers_in_use:
            return "channels or slots are left there: wait until 'dynamoth server list' shows nothing left there"
        return None

    def _follow_list(self, plan: Plan, now: float) -> None:
        """Begin a copy at each new server of a plan, and end those at servers that have left."""
        for server in plan.servers.keys() - self._copies.keys():
            self._copies[server] = self._new_copy(server)
            self._joining[server] = now + self._options.join_s
            self.index.add(server)
        for server in self._copies.keys() - plan.servers.keys():
            copy = self._copies.pop(server)
            if copy.is_up:
                self._leaving[server] = copy
            self._joining.pop(server, None)
            self.versions_refused.pop(server, None)
            self.index.remove(server)
        self._servers = list(plan.servers.values())

    def _new_copy(self, server: str) -> PlanCopy:
        options = self._options
        return PlanCopy(server, self.term, options.retry_s, options.verify_interval_s, self.counters)

    def _check_rest(self, new: Compatibility, now: float) -> None:
        """Refuse plain rules for channels that moved lately: numbered messages may be on their way, or held back."""
        is_plain = self.plan.compatibility.is_plain
        for channel in self.plan.entries:
            rest_s = self._settled_at.get(channel, self._began_at) + self._options.plain_rest_s - now
            if rest_s > 0 and new.is_plain(channel) and not is_plain(channel):
                raise RequestRefused(
                    f"channel {in_quotes(channel)} may have moved a moment ago, and some messages may still be on their"
                    f" way or held: try again in {rest_s:.1f} s"
                )

    def rules_wait_for(self, now: float) -> list[str]:
        """Return the servers and agents that the present compatibility rules have not reached, in words for people."""
        since = self.plan.compatibility.version
        unstored = [server for server, copy in self._copies.items() if copy.version is None or copy.version < since]
        unheard = [
            server
            for server in self._copies
            if self._agents.acked(server, now) < since or not self._agents.is_alive(server, now)
        ]
        return [
            *(f"{server} to store the rules" for server in unstored),
            *(f"the agent of {server} to acknowledge them" for server in unheard if server not in unstored),
        ]

    def rules_rest(self, now: float) -> float:
        """Return for how long no change may begin, as publishers may not know changed rules yet."""
        return max(0.0, self._rules_changed_at + self._options.rules_rest_s - now)

    def _check(self, channel: bytes, assignment: Assignment, now: float, why_not: WhyNot, why_not_to: WhyNot) -> None:
        """Refuse a change that cannot begin. ``why_not`` and ``why_not_to`` are those of now."""
        if (reason := why_not_moved(self.plan, channel)) is not None:
            raise RequestRefused(reason)
        if (rest_s := self.rules_rest(now)) > 0:
            raise RequestRefused(
                f"the compatibility rules have changed, and publishers hear of it first: try again in {rest_s:.1f} s"
            )
        entry = self.plan.entry(channel)
        if entry.phase is not Phase.SETTLED:
            raise RequestRefused(f"channel {in_quotes(channel)} is in transition; wait until it has settled")
        if entry.route.assignment == assignment:
            raise RequestRefused(f"channel {in_quotes(channel)} is there already")
        problems = [*map(why_not, entry.route.assignment.servers), *map(why_not_to, assignment.servers)]
        for problem in filter(None, problems):
            raise RequestRefused(problem)

    def why_not(self, server: str, now: float) -> str | None:
        """Return why a server cannot take part in new transitions; None when it can."""
        if server not in self._copies:
            return f"server {server!r:.80} is not known; known are {', '.join(self._copies)}"
        copy = self._copies[server]
        if copy.problem:
            return f"server {server} does not keep the plan: {copy.problem}"
        if copy.is_up and copy.version is None:
            return f"the plan stored at server {server} is being read: try again in a moment"
        if not copy.is_kept:
            return f"server {server} is not connected; see whether it is up and reachable from the balancer"
        return self._agents.why_not(server, now)

    def why_not_to(self, server: str, now: float) -> str | None:
        """Return why a server cannot get channels; None when it can."""
        if server in self.draining:
            return (
                f"server {server} is being drained and takes no channels: name another one, or type"
                f" 'dynamoth server undrain {server}'"
            )
        if server in self.closed:
            return f"server {server} takes no channels, as the load is low and it is being released: name another one"
        if (wait_s := self.joins_in(server, now)) > 0:
            return f"server {server} is new, and clients with patterns connect to it first: try again in {wait_s:.1f} s"
        if server in self._agents.blind:
            return f"server {server} takes no channels now: {self._agents.blind[server]}"
        return self.why_not(server, now)

    def joins_in(self, server: str, now: float) -> float:
        """Return for how long, at least, a new server gets no channel yet; 0 for most servers."""
        is_unsettled = bool(self._former) and server not in self._former
        return max(LIST_STORED_S if is_unsettled else 0.0, self._joining.get(server, now) - now)

    def is_stored(self, version: int) -> bool:
        """Return whether more than half of the servers that count store a version, or a later one.

        While the list of servers changes: more than half of the old ones, too.
        """
        lists: list[Collection[str]] = [self._copies]
        if self._former and version >= self._list_version:
            lists.append(self._former)
        return all(self._quorum.decides(self._stored_among(each, version), each) for each in lists)

    def _changed(self, plan: Plan, channels: Iterable[bytes], reason: str, now: float) -> list[InnerAction]:
        changed = tuple(channels)
        self.book.advance(plan, changed)
        self.index.update({channel: plan.entries[channel] for channel in changed})
        self._watch()
        self._folding.update(plan, changed)
        return [PlanChanged(plan, reason, changed), *self.sync(now)]

    def _fold(self, now: float) -> list[InnerAction]:
        """Fold the entries of channels that are where their slots are, when enough of them have rested."""
        ready, plan, options = self._folding.ready, self.plan, self._options
        least = max(1.0, FOLDED_RATIO_MIN * len(plan.entries))
        if now < self._fold_at or len(ready) < least or self.book.is_used_up:
            return []
        self._fold_at = now + options.fold_interval_s
        rested, pins = now - options.plain_rest_s, plan.administration.pins
        channels = [
            channel
            for channel in ready
            if channel not in pins and self._settled_at.get(channel, self._began_at) <= rested and plan.folds(channel)
        ]
        if len(channels) < least:
            return []
        folded = plan.fold(channels)
        slots = tuple(slot for slot, entry in folded.entries.items() if entry is not plan.entries.get(slot))
        self.book.replace(folded)
        self.index.forget(channels)
        self.index.update({slot: folded.entries[slot] for slot in slots})
        self._folding.update(folded, (*channels, *slots))
        self.counters["channels_folded"] += len(channels)
        return [PlanChanged(folded, f"{len(channels)} channels follow their slots again", slots), *self.sync(now)]

    def advance(self, now: float) -> list[InnerAction]:
        """Bring transitions into their next phase, all that can in one version of the plan."""
        if not self._due or now < self._advance_at:
            return []
        self._due = False
        changed: dict[bytes, Entry] = {}
        is_complete: dict[Any, bool] = {}  # a thousand slots that move together need the same few things
        for channel, transition in self.transitions.items():
            needs = transition.needs
            if needs not in is_complete:
                is_complete[needs] = next(self.waiting_for(transition, now), None) is None
            if is_complete[needs]:
                changed[channel] = _next_phase(transition.entry)
            if len(changed) >= self._options.changes_per_event_max:
                self._due = True  # for the others
                break
        if not changed:
            return []
        self._advance_at = now + self._options.step_interval_s
        plan = self.plan.with_entries(changed)
        settled = tuple(channel for channel, entry in changed.items() if entry.phase is Phase.SETTLED)
        self._note_transitions(changed, now, plan.version)
        if settled:
            recent = ((c, at) for c, at in self._settled_at.items() if now - at < self._options.plain_rest_s)
            self._settled_at = {**dict(recent), **dict.fromkeys(settled, now)}
        reason = f"{len(changed) - len(settled)} activated, {len(settled)} settled"
        actions = self._changed(plan, changed, reason, now)
        return [*actions, TransitionsSettled(settled)] if settled else actions

    def waiting_for(self, transition: Transition, now: float) -> Iterator[str]:
        """Yield what a transition waits for, in words for people."""
        prepared = transition.entry.phase is Phase.PREPARED
        for server in sorted(transition.involved - self.dead):
            stored = self._copies[server].version
            if stored is None or stored < transition.version:
                yield f"{server} to store the plan"
            elif prepared:
                if self._agents.acked(server, now) < transition.version or not self._agents.is_alive(server, now):
                    yield f"the agent of {server} to acknowledge"
            elif server in transition.left and server not in transition.vacated:
                yield f"{_LEAVE} {server}"

    def why_unsettled(self, transition: Transition, now: float) -> str:
        """Return all that a transition waits for, with the cure where people can help; empty for nothing."""
        waits = list(self.waiting_for(transition, now))
        return ", ".join(waits) + (PLAIN_STAYS if any(wait.startswith(_LEAVE) for wait in waits) else "")

    def _note_transitions(self, entries: Mapping[bytes, Entry], now: float, version: int | None = None) -> None:
        """Update the transitions to new entries."""
        for channel, entry in entries.items():
            known = self.transitions.pop(channel, None)
            if entry.phase is not Phase.SETTLED:
                since = now if known is None else known.since
                present = self.plan.version if version is None else version
                self.transitions[channel] = Transition(channel, entry, present, since)

    # What agents say.

    def on_acknowledgement(self, server: str, incarnation: int, version: int, now: float) -> None:
        """Record the acknowledgement of a process that speaks for a server."""
        if version <= self.plan.version:
            self.versions_refused.pop(server, None)
            if self._agents.acknowledge(server, incarnation, version):
                self._due = True
            return
        self.counters["acks_from_future"] += 1
        if self._agents.speaks_alone(server, incarnation, now) and self._may_exist(version):
            self._jump_above = max(self._jump_above, version)
        else:
            self.versions_refused[server] = version

    def _may_exist(self, version: int) -> bool:
        """Return whether a predecessor may have issued a version that is stored nowhere.

        Not where all its copies were read: the takeover has left out more versions than it can have written since. Else
        it may, up to a bound, so that a forged version does not use up all versions.
        """
        return not self.book.is_complete and version - self.plan.version <= VERSIONS_LOST_MAX

    def on_vacated(self, server: str, message: Vacated) -> None:
        """Record that nobody listens at old locations of a server, as its agent says."""
        for channel, epoch in message.channels:
            transition = self.transitions.get(channel)
            if transition is not None and transition.entry.route.epoch == epoch:
                self._due = self._due or server not in transition.vacated
                transition.vacated |= {server}
            else:
                self.counters["vacated_out_of_date"] += 1

    # Links and time.

    def link_up(
        self, server: str, run_id: str | None, now: float, found: int | None = None, *, is_doubtful: bool = False
    ) -> list[InnerAction]:
        """Continue at a server. ``found`` is the version that is stored there, if known.

        ``is_doubtful``: another balancer has written it, or somebody else, and the agent may have read it.
        """
        copy = self._copies[server]
        copy.link_up(run_id)
        if found is not None:
            copy.trust_version(found)
        if is_doubtful:
            copy.doubt()
        return self._carry_out(copy, copy.sync(self.book, now), now)

    def link_down(self, server: str) -> None:
        """Stop at a server, for good if it has left the plan; transitions that involve it wait for it."""
        self._leaving.pop(server, None)
        if (copy := self._copies.get(server)) is not None:
            copy.link_down()

    def on_reply(self, server: str, tag: tuple[str, int, int, str], value: Any, now: float) -> list[InnerAction]:
        """Handle the reply to a command of a copy."""
        if (copy := self._find(server)) is None:
            return []  # it has left the plan
        before = copy.version
        actions = self._carry_out(copy, copy.on_reply(tag, value, self.book, now), now)
        if copy.version != before:
            self._on_stored(server, now)
        return [*actions, *self.advance(now)]

    def _on_stored(self, server: str, now: float) -> None:
        """Note that the version of a copy has changed."""
        if server in self._copies:
            self._due = True
            self._agents[server].asked_at = now  # it has just got the change
        if self._former and self.is_stored(self._list_version):
            self._former = frozenset()

    def _carry_out(self, copy: PlanCopy, actions: Iterable[CopyAction], now: float) -> list[InnerAction]:
        done: list[InnerAction] = []
        for action in actions:
            if isinstance(action, CopyFound):
                done += self._take_in(copy, action.copy, now)
            else:
                done.append(action)
        return done

    def _take_in(self, copy: PlanCopy, found: Copy, now: float) -> list[InnerAction]:
        """Merge a copy that another balancer has left at a server that could not be read before."""
        details: dict[str, Any] = {"server": found.server, "version": found.plan.version}
        if not found.believed and not same_ring(found.plan, self.plan):
            note = Note("warning", "a server had loaded an old plan of another cluster; it is overwritten", details)
            return [note, *self._carry_out(copy, copy.overwrite(self.book), now)]
        reason = why_not_ours(self.plan, found.plan)
        if reason is not None and is_of_another_cluster(found, self.plan):
            text = (
                f"the plan stored at {found.server} is of another cluster: {reason}; delete it there"
                " (DEL __dynamoth__:plan) or correct the list of servers"
            )
            first = copy.problem != text
            copy.leave_alone(text, now)
            return [Note("error", text, details)] if first else []
        if reason is not None:
            self.counters["copies_conflicting"] += 1
            text = "a stored plan cannot be ours: it is not used, and written over; see who may write the key"
            note = Note("error", text, {**details, "reason": reason})
            return [note, *self._carry_out(copy, copy.overwrite(self.book), now)]
        try:
            version = version_after(max(found.plan.version, self.plan.version))
        except ConfigError as error:
            first = copy.problem != str(error)
            copy.leave_alone(str(error), now)
            return [Note("error", str(error), details)] if first else []
        before = self.plan.version
        newer = self.book.take_in(found.plan, version)
        self.index.update(newer)
        self._watch()
        self._folding.update(self.plan, newer)
        self._note_transitions(newer, now)
        copy.resume()
        details["entries_taken"] = len(newer)
        actions: list[InnerAction] = [Note("warning", "a server held a plan that was not known", details)]
        if self.plan.version != before:
            actions.append(PlanChanged(self.plan, f"merged with the plan found at {found.server}", tuple(newer)))
        if settled := tuple(channel for channel, entry in newer.items() if entry.phase is Phase.SETTLED):
            actions.append(TransitionsSettled(settled))
        self._due = True
        return [*actions, *self.sync(now)]

    def sync(self, now: float) -> list[InnerAction]:
        """Bring every copy to the present plan, as far as that is possible now."""
        actions: list[InnerAction] = []
        leaving = [copy for server, copy in self._leaving.items() if self.is_leaving(server)]
        for copy in (*self._copies.values(), *leaving):
            actions += self._carry_out(copy, copy.sync(self.book, now), now)
        return actions

    def check(self) -> None:
        """Assert the invariants between the plan, its transitions and its copies."""
        entries = self.plan.entries
        for copy in self._copies.values():
            assert copy.version is None or copy.version <= self.plan.version, f"{copy.server} has {copy.version}"
        for channel, transition in self.transitions.items():
            assert transition.entry is entries.get(channel), f"the transition of {channel!r} is not the plan's"
            assert transition.entry.phase is not Phase.SETTLED, f"{channel!r} has settled"
            assert transition.version <= self.plan.version, f"{channel!r} changed in version {transition.version}"
        unsettled = sum(entry.phase is not Phase.SETTLED for entry in entries.values())
        assert unsettled == len(self.transitions), f"{unsettled} entries, {len(self.transitions)} transitions"
        if self._checked is self.plan:
            return  # the rest takes milliseconds
        self._checked = self.plan
        index = PlanIndex(self.plan, self.index.named_at)
        assert index.slots_at == self.index.slots_at, "the index has the slots of each server"
        assert index.replicated == self.index.replicated, "the index has the replicated channels"
        assert index.named_at == self.index.named_at, "the index has the channels at servers being drained"
        assert index.slots_named_at == self.index.slots_named_at, "and their slots"
        assert Folding(self.plan).ready == self._folding.ready, "the channels that fold are known"

    def tick(self, now: float) -> list[InnerAction]:
        """Sync copies, ask silent agents, and advance transitions."""
        actions = self._jump()
        actions += self._fold(now)
        actions += self.sync(now)
        actions += self._ask(now)
        self._due = True
        return [*actions, *self.advance(now)]

    def _jump(self) -> list[InnerAction]:
        """Get above a version that an agent has from a plan that is stored nowhere.

        Also above our own, which may have reached that version since: what the agent has is still another plan.
        """
        above, self._jump_above = self._jump_above, -1
        if above < 0:
            return []
        try:
            self.book.advance(self.plan.with_entries({}, version_after(max(above, self.plan.version))), ())
        except ConfigError as error:
            details = {"version": above, "reason": str(error)}
            return [Note("error", "an agent holds an impossible version of the plan: restart it", details)]
        return [PlanChanged(self.plan, f"an agent holds version {above}, which no server stores")]

    def _ask(self, now: float) -> list[Send]:
        """Ask agents for their version that have not acknowledged, or are silent."""
        sends: list[Send] = []
        for server, copy in self._copies.items():
            stored = copy.version
            if stored is None or now - self._agents[server].asked_at < self._options.ack_timeout_s:
                continue
            silent_s = now - self._agents.heard_at(server)
            if self._agents.acked(server, now) < stored or silent_s > self._options.agent_stale_s / 2:
                self._agents[server].asked_at = now
                sends.append(Send(server, (b"PUBLISH", AGENT_CHANNEL, pack_control(PlanQuery(stored)))))
        return sends


def _next_phase(entry: Entry) -> Entry:
    if entry.phase is Phase.PREPARED:
        return replace(entry, phase=Phase.ACTIVE)
    return Entry(entry.route, Phase.SETTLED)
