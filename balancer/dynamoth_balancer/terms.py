"""Begins and ends the terms of a balancer: gets the lease, takes over from a predecessor, leads, and is suspended.

The stages are those of :mod:`dynamoth_balancer.machine`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from dynamoth.errors import AlreadyRunning, ConfigError, RequestRefused
from dynamoth.machine.lease import Lease
from dynamoth.plan.plan import Plan
from dynamoth_balancer.events import InnerAction, Note, PlanChanged, Stopped
from dynamoth_balancer.install.agents import Agents
from dynamoth_balancer.install.contention import Contention
from dynamoth_balancer.install.dead_servers import DeadServers
from dynamoth_balancer.install.installer import Installer
from dynamoth_balancer.install.leadership import Leadership, Stage
from dynamoth_balancer.install.membership import Membership
from dynamoth_balancer.install.quorum import Quorum
from dynamoth_balancer.install.recovery import Conflict
from dynamoth_balancer.install.servers import Servers
from dynamoth_balancer.install.takeover import Takeover
from dynamoth_balancer.options import BalancerOptions

SHUTDOWN_S_MAX = 1.0
"""A server that does not answer in this time keeps the lease until it expires."""


@dataclass(slots=True, kw_only=True)
class Terms:
    """The terms of one balancer process, one after the other."""

    incarnation: int
    options: BalancerOptions
    #: The stage, which is changed here only.
    leadership: Leadership
    #: Those of the plan; the owner keeps them up to date.
    servers: Servers
    lease: Lease
    contention: Contention
    quorum: Quorum
    dead_servers: DeadServers
    agents: Agents
    #: Changes of the list of servers, which end with a term.
    membership: Membership
    counters: Counter[str]
    #: Says in words what a balancer that does not lead waits for.
    why_not_leading: Callable[[], str]
    #: Goes by the servers that a stored plan lists.
    adopt: Callable[[Plan, float], list[InnerAction]]
    #: Called when a term has begun, with what installs its plans.
    begun: Callable[[Installer, float], None]
    #: Called when a term has ended.
    ended: Callable[[], None]
    #: When the process ends at the latest; None while it is not to end.
    _shutdown_at: float | None = field(default=None, init=False)

    def follow(self, now: float) -> list[InnerAction]:
        """Enter the stage that the lease allows."""
        if self.leadership.stage is Stage.STOPPED:
            return []
        if self._shutdown_at is not None:
            return self._stop_when_released(now)
        held = self.lease.is_held(now)
        if held and self.leadership.stage is Stage.CONTENDING:
            return self._begin_term(now)
        if held and self.leadership.stage is Stage.SUSPENDED:
            return self._resume(now)
        if held and self.leadership.stage is Stage.LEADING:
            return self._follow_fence(now)
        if not held and not self.leadership.waits:
            return self._suspend(now)
        if not held and self.leadership.stage is Stage.SUSPENDED and self.contention.others_at_work:
            return self._end_term(now, "another balancer is at work")
        if not held:
            self.leadership.resumption = None
            return self._contend(now)
        return []

    def _contend(self, now: float) -> list[InnerAction]:
        try:
            return list(self.contention.look(now))
        except AlreadyRunning as error:
            return self._stop(error)

    def _begin_term(self, now: float) -> list[InnerAction]:
        if self.quorum.may_give_up:  # it has the lease of more than half of the servers, so there is no need to
            refusal = self.quorum.refusal(len(self.servers.run_ids), len(self.servers.listed))
            return [*self.lease.release(now), *self._stop(refusal)]
        self.leadership.term += 1
        self.leadership.stage = Stage.RECOVERING
        servers = list(self.servers.listed.values())
        self.leadership.takeover = Takeover(
            servers,
            self.leadership.term,
            self.options.recovery_s,
            self.options.virtual_nodes,
            None if self.leadership.installer is None else self.leadership.installer.book,
            self.options.compatibility,
            self.quorum.voters(self.servers.listed),
        )
        details = {"incarnation": self.incarnation}
        actions: list[InnerAction] = [Note("info", "got the lease; reading the stored plans", details)]
        for server, run_id in self.servers.run_ids.items():
            actions += self.leadership.takeover.link_up(server, run_id)
        return actions

    def recover(self, now: float) -> list[InnerAction]:
        """Continue reading stored plans, and lead when that is done."""
        recovery = self.leadership.recovering
        if recovery is None:
            return []
        listing = recovery.listing(now)
        is_newer = listing is not None and listing.version >= self.servers.version
        if listing is not None and is_newer and listing.servers.keys() != self.servers.listed.keys():
            self.leadership.end(Stage.CONTENDING)
            self.contention.begin(now)
            return [*self.adopt(listing, now), *self.lease.tick(now)]
        sends = recovery.read(now)
        if sends is not None:
            return list(sends)
        missing = recovery.missing()
        try:
            book, found, conflicts = recovery.finish()
        except ConfigError as error:
            return [*self.lease.release(now), *self._stop(error)]
        self.leadership.takeover = None
        self.leadership.stage, self.leadership.since = Stage.LEADING, now
        self.agents.forget_acknowledgements()
        servers = list(self.servers.listed.values())
        installer = Installer(book, servers, self.agents, self.options, self.leadership.term, now, self.quorum)
        self.leadership.installer = installer
        self.begun(installer, now)
        details = {
            "version": book.plan.version,
            "entries": len(book.plan.entries),
            "transitions": len(installer.transitions),
            "not_read": missing,
        }
        actions: list[InnerAction] = [Note("warning" if missing else "info", "leading", details)]
        actions += self.servers.end_lookouts()
        actions += self._note_conflicts(conflicts)
        actions += [] if listing is None else self._note_urls(listing)
        reason = "recovered from the servers" if book.plan.version else "a new cluster"
        actions.append(PlanChanged(book.plan, reason, tuple(installer.transitions)))
        for server, run_id in self.servers.run_ids.items():
            actions += installer.link_up(server, run_id, now, found.get(server), is_doubtful=server in found)
        return [*actions, *self._drain_as_configured(installer, now)]

    def _drain_as_configured(self, installer: Installer, now: float) -> list[InnerAction]:
        """Drain the servers that the configuration names, if nobody has administered this cluster yet."""
        draining = self.options.draining
        if draining == installer.draining or not draining:
            return []
        details = {"configured": sorted(draining), "plan": sorted(installer.draining)}
        if installer.plan.administration.version:
            text = (
                "draining = true is not used: which servers are drained is in the stored plan; take it out of the"
                " configuration, and type 'dynamoth server drain' or 'undrain'"
            )
            return [Note("warning", text, details)]
        administration = replace(installer.plan.administration, draining=draining)
        try:
            return installer.administer(administration, None, "the configuration has draining = true", now)
        except RequestRefused as error:
            return [Note("error", "the configured draining cannot begin", {**details, "reason": str(error)})]

    def _note_conflicts(self, conflicts: Sequence[Conflict]) -> list[Note]:
        """Report copies that cannot be ours."""
        self.counters["copies_conflicting"] += len(conflicts)
        text = "a stored plan cannot be ours: it is not used, and written over; see who may write the key"
        return [Note("error", text, {"server": each.server, "reason": each.reason}) for each in conflicts]

    def _note_urls(self, stored: Plan) -> list[Note]:
        """Report the servers that had another URL in the stored plan. That of the configuration is stored now.

        A plan may be forged, and a server may have moved: only the operator's own file tells.
        """
        text = (
            "the stored plan had another URL for a server; it has that of this balancer's configuration now, which"
            " clients follow: if the file is old, correct it and restart the balancer"
        )
        known = self.servers.configured
        moved = [id_ for id_, each in stored.servers.items() if id_ in known and known[id_].url != each.url]
        return [Note("warning", text, {"server": server}) for server in moved]

    def _suspend(self, now: float) -> list[InnerAction]:
        """Change nothing, as the lease has expired before it was renewed."""
        self.leadership.suspend()
        self.contention.begin(now, has_led=True)
        details = {**self.contention.details(), "reason": self.why_not_leading()}
        text = "lost the lease: no decisions and no changes until it is back"
        return [*self.membership.end_term(), Note("error", text, details)]

    def _resume(self, now: float) -> list[InnerAction]:
        """Go on with the term, once it is known that no other balancer has begun one."""
        looked = self.leadership.resumption
        if looked is None:
            return [*self.leadership.look().read(self.servers.run_ids)]
        is_replaced = looked.is_replaced(self.quorum.voters(self.servers.listed))
        if is_replaced is None:
            return []
        if is_replaced:
            return self._end_term(now, "another balancer has led since it lost the lease")
        self.leadership.resume()
        actions: list[InnerAction] = [Note("info", "has the lease again, and goes on: no other balancer has led")]
        if (installer := self.leadership.at_work) is not None:
            self.agents.forget_acknowledgements()  # and replies were not taken meanwhile
            for server, run_id in self.servers.run_ids.items():
                found = looked.versions.get(server)
                is_ours = found is not None and installer.book.knows(found)
                actions += installer.link_up(server, run_id, now, found if is_ours else None)
        return actions

    def _follow_fence(self, now: float) -> list[InnerAction]:
        """End a term in which a server has refused a write, or which has no versions left."""
        installer = self.leadership.latest_installer()
        if server := installer.fenced_at:
            self.counters["writes_fenced"] += 1
            reason = f"server {server} refuses its writes: another balancer has begun a newer term"
        elif installer.is_used_up:
            reason = "it has used all versions of this term: the next one follows when the lease is confirmed"
        else:
            return []
        self.lease.doubt(now)
        return [*self._end_term(now, reason, "warning"), *self.lease.tick(now)]

    def _end_term(self, now: float, reason: str, level: str = "error") -> list[InnerAction]:
        self.leadership.end(Stage.CONTENDING)
        given_up = self.membership.end_term()
        self.ended()
        self.contention.begin(now)
        details = {**self.contention.details(), "reason": reason}
        return [*given_up, *self.servers.look_out(), Note(level, "ends its term", details)]

    def take_over(self, now: float) -> list[InnerAction]:
        """Give up dead servers, if an operator has started this balancer for that, once it is known which are alive."""
        servers, dead = self.servers.listed, self.dead_servers.dead
        alive = servers.keys() & self.servers.run_ids.keys() - dead
        if not self.quorum.may_give_up or self.leadership.stage is not Stage.CONTENDING or not alive:
            return []
        plan = self.contention.listing(self.servers.reachable, self.options.virtual_nodes, now)
        if plan is None or plan.servers.keys() != servers.keys():
            return []  # without a stored plan there is nothing to take over
        if not self.quorum.decides(alive, servers) and alive | dead != servers.keys():
            return []
        try:
            self.quorum.take_over(alive, servers)
        except ConfigError as error:
            return self._stop(error)
        self.lease.vote(self.quorum.voters(servers))
        text = "takes over, as an operator wants: only the servers that it can reach count"
        return [Note("warning", text, {"given_up": sorted(self.quorum.given_up)}), *self.lease.tick(now)]

    def count_all_again(self, now: float) -> list[InnerAction]:
        """Count the servers again that were given up, when the lease is held at more than half of all in the plan."""
        if not self.quorum.given_up or not self.lease.would_hold(self.servers.listed, now):
            return []
        if self.leadership.at_work is not None and not self.leadership.at_work.may_change_servers:
            return []
        self.quorum.given_up = frozenset()
        servers = list(self.servers.listed)
        self.lease.vote(servers)
        return [Note("info", "all servers of the plan count again", {"servers": servers})]

    def shut_down(self, now: float) -> list[InnerAction]:
        """Give the lease back, and end."""
        self._shutdown_at = now + SHUTDOWN_S_MAX
        return [*self.lease.release(now), *self._stop_when_released(now)]

    def _stop_when_released(self, now: float) -> list[InnerAction]:
        """End, once the servers have confirmed that the lease is given back."""
        assert self._shutdown_at is not None
        if self.leadership.stage is Stage.STOPPED or (self.lease.is_releasing and now < self._shutdown_at):
            return []
        return self._stop(None)

    def _stop(self, error: AlreadyRunning | ConfigError | None) -> list[InnerAction]:
        self.leadership.end(Stage.STOPPED)
        return [Stopped(error)]
