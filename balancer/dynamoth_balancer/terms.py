"""Begins and ends the terms of a balancer: gets the lease, takes over from a predecessor, leads, and is suspended.

The stages are those of :mod:`dynamoth_balancer.machine`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from dynamoth.errors import AlreadyRunning, ConfigError, RequestRefused
from dynamoth.plan.plan import Plan
from dynamoth_balancer.events import InnerAction, Note, PlanChanged, Stopped
from dynamoth_balancer.install.agents import Agents
from dynamoth_balancer.install.contention import Contention
from dynamoth_balancer.install.dead_servers import DeadServers
from dynamoth_balancer.install.installer import Installer
from dynamoth_balancer.install.leadership import Leadership, Stage
from dynamoth_balancer.install.lease import Lease
from dynamoth_balancer.install.membership import Membership
from dynamoth_balancer.install.quorum import Quorum
from dynamoth_balancer.install.recovery import Conflict
from dynamoth_balancer.install.servers import Servers
from dynamoth_balancer.install.takeover import Takeover
from dynamoth_balancer.options import BalancerOptions

SHUTDOWN_S_MAX = 1.0
"""A server that does not answer in this time keeps the lease until it expires."""


class Terms:
    """The terms of one balancer process, one after the other.

    Args:
        incarnation: that of the process.
        options: those of the balancer.
        leadership: the stage, which is changed here only.
        servers: those of the plan; the owner keeps them up to date.
        lease: who may lead.
        contention: how the balancer waits for the lease.
        quorum: which servers count.
        dead_servers: which of them are dead.
        agents: the agents of all servers.
        membership: changes of the list of servers, which end with a term.
        counters: those of the balancer.
        why_not_leading: says in words what a balancer that does not lead waits for.
        adopt: goes by the servers that a stored plan lists.
        begun: called when a term has begun, with what installs its plans.
        ended: called when a term has ended.

    """

    def __init__(
        self,
        *,
        incarnation: int,
        options: BalancerOptions,
        leadership: Leadership,
        servers: Servers,
        lease: Lease,
        contention: Contention,
        quorum: Quorum,
        dead_servers: DeadServers,
        agents: Agents,
        membership: Membership,
        counters: Counter[str],
        why_not_leading: Callable[[], str],
        adopt: Callable[[Plan, float], list[InnerAction]],
        begun: Callable[[Installer, float], None],
        ended: Callable[[], None],
    ) -> None:
        self._incarnation = incarnation
        self._options = options
        self._leadership = leadership
        self._servers = servers
        self._lease = lease
        self._contention = contention
        self._quorum = quorum
        self._dead_servers = dead_servers
        self._agents = agents
        self._membership = membership
        self._counters = counters
        self._why_not_leading = why_not_leading
        self._adopt = adopt
        self._begun = begun
        self._ended = ended
        #: When the process ends at the latest; None while it is not to end.
        self._shutdown_at: float | None = None

    def follow(self, now: float) -> list[InnerAction]:
        """Enter the stage that the lease allows."""
        if self._leadership.stage is Stage.STOPPED:
            return []
        if self._shutdown_at is not None:
            return self._stop_when_released(now)
        held = self._lease.is_held(now)
        if held and self._leadership.stage is Stage.CONTENDING:
            return self._begin_term(now)
        if held and self._leadership.stage is Stage.SUSPENDED:
            return self._resume(now)
        if held and self._leadership.stage is Stage.LEADING:
            return self._follow_fence(now)
        if not held and not self._leadership.waits:
            return self._suspend(now)
        if not held and self._leadership.stage is Stage.SUSPENDED and self._contention.others_at_work:
            return self._end_term(now, "another balancer is at work")
        if not held:
            self._leadership.resumption = None
            return self._contend(now)
        return []

    def _contend(self, now: float) -> list[InnerAction]:
        try:
            return list(self._contention.look(now))
        except AlreadyRunning as error:
            return self._stop(error)

    def _begin_term(self, now: float) -> list[InnerAction]:
        if self._quorum.may_give_up:  # it has the lease of more than half of the servers, so there is no need to
            refusal = self._quorum.refusal(len(self._servers.run_ids), len(self._servers.listed))
            return [*self._lease.release(now), *self._stop(refusal)]
        self._leadership.term += 1
        self._leadership.stage = Stage.RECOVERING
        servers = list(self._servers.listed.values())
        self._leadership.takeover = Takeover(
            servers,
            self._leadership.term,
            self._options.recovery_s,
            self._options.virtual_nodes,
            None if self._leadership.installer is None else self._leadership.installer.book,
            self._options.compatibility,
            self._quorum.voters(self._servers.listed),
        )
        details = {"incarnation": self._incarnation}
        actions: list[InnerAction] = [Note("info", "got the lease; reading the stored plans", details)]
        for server, run_id in self._servers.run_ids.items():
            actions += self._leadership.takeover.link_up(server, run_id)
        return actions

    def recover(self, now: float) -> list[InnerAction]:
        """Continue reading stored plans, and lead when that is done."""
        recovery = self._leadership.recovering
        if recovery is None:
            return []
        listing = recovery.listing(now)
        is_newer = listing is not None and listing.version >= self._servers.version
        if listing is not None and is_newer and listing.servers.keys() != self._servers.listed.keys():
            self._leadership.end(Stage.CONTENDING)
            self._contention.begin(now)
            return [*self._adopt(listing, now), *self._lease.tick(now)]
        sends = recovery.read(now)
        if sends is not None:
            return list(sends)
        missing = recovery.missing()
        try:
            book, found, conflicts = recovery.finish()
        except ConfigError as error:
            return [*self._lease.release(now), *self._stop(error)]
        self._leadership.takeover = None
        self._leadership.stage, self._leadership.since = Stage.LEADING, now
        self._agents.forget_acknowledgements()
        servers = list(self._servers.listed.values())
        installer = Installer(book, servers, self._agents, self._options, self._leadership.term, now, self._quorum)
        self._leadership.installer = installer
        self._begun(installer, now)
        details = {
            "version": book.plan.version,
            "entries": len(book.plan.entries),
            "transitions": len(installer.transitions),
            "not_read": missing,
        }
        actions: list[InnerAction] = [Note("warning" if missing else "info", "leading", details)]
        actions += self._servers.end_lookouts()
        actions += self._note_conflicts(conflicts)
        actions += [] if listing is None else self._note_urls(listing)
        reason = "recovered from the servers" if book.plan.version else "a new cluster"
        actions.append(PlanChanged(book.plan, reason, tuple(installer.transitions)))
        for server, run_id in self._servers.run_ids.items():
            actions += installer.link_up(server, run_id, now, found.get(server), is_doubtful=server in found)
        return [*actions, *self._drain_as_configured(installer, now)]

    def _drain_as_configured(self, installer: Installer, now: float) -> list[InnerAction]:
        """Drain the servers that the configuration names, if nobody has administered this cluster yet."""
        draining = self._options.draining
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
        self._counters["copies_conflicting"] += len(conflicts)
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
        known = self._servers.configured
        moved = [id_ for id_, each in stored.servers.items() if id_ in known and known[id_].url != each.url]
        return [Note("warning", text, {"server": server}) for server in moved]

    def _suspend(self, now: float) -> list[InnerAction]:
        """Change nothing, as the lease has expired before it was renewed."""
        self._leadership.suspend()
        self._contention.begin(now, has_led=True)
        details = {**self._contention.details(), "reason": self._why_not_leading()}
        text = "lost the lease: no decisions and no changes until it is back"
        return [*self._membership.end_term(), Note("error", text, details)]

    def _resume(self, now: float) -> list[InnerAction]:
        """Go on with the term, once it is known that no other balancer has begun one."""
        looked = self._leadership.resumption
        if looked is None:
            return [*self._leadership.look().read(self._servers.run_ids)]
        is_replaced = looked.is_replaced(self._quorum.voters(self._servers.listed))
        if is_replaced is None:
            return []
        if is_replaced:
            return self._end_term(now, "another balancer has led since it lost the lease")
        self._leadership.resume()
        actions: list[InnerAction] = [Note("info", "has the lease again, and goes on: no other balancer has led")]
        if (installer := self._leadership.at_work) is not None:
            self._agents.forget_acknowledgements()  # and replies were not taken meanwhile
            for server, run_id in self._servers.run_ids.items():
                found = looked.versions.get(server)
                is_ours = found is not None and installer.book.knows(found)
                actions += installer.link_up(server, run_id, now, found if is_ours else None)
        return actions

    def _follow_fence(self, now: float) -> list[InnerAction]:
        """End a term in which a server has refused a write, or which has no versions left."""
        installer = self._leadership.latest_installer()
        if server := installer.fenced_at:
            self._counters["writes_fenced"] += 1
            reason = f"server {server} refuses its writes: another balancer has begun a newer term"
        elif installer.is_used_up:
            reason = "it has used all versions of this term: the next one follows when the lease is confirmed"
        else:
            return []
        self._lease.doubt(now)
        return [*self._end_term(now, reason, "warning"), *self._lease.tick(now)]

    def _end_term(self, now: float, reason: str, level: str = "error") -> list[InnerAction]:
        self._leadership.end(Stage.CONTENDING)
        given_up = self._membership.end_term()
        self._ended()
        self._contention.begin(now)
        details = {**self._contention.details(), "reason": reason}
        return [*given_up, *self._servers.look_out(), Note(level, "ends its term", details)]

    def take_over(self, now: float) -> list[InnerAction]:
        """Give up dead servers, if an operator has started this balancer for that, once it is known which are alive."""
        servers, dead = self._servers.listed, self._dead_servers.dead
        alive = servers.keys() & self._servers.run_ids.keys() - dead
        if not self._quorum.may_give_up or self._leadership.stage is not Stage.CONTENDING or not alive:
            return []
        plan = self._contention.listing(self._servers.reachable, self._options.virtual_nodes, now)
        if plan is None or plan.servers.keys() != servers.keys():
            return []  # without a stored plan there is nothing to take over
        if not self._quorum.decides(alive, servers) and alive | dead != servers.keys():
            return []
        try:
            self._quorum.take_over(alive, servers)
        except ConfigError as error:
            return self._stop(error)
        self._lease.vote(self._quorum.voters(servers))
        text = "takes over, as an operator wants: only the servers that it can reach count"
        return [Note("warning", text, {"given_up": sorted(self._quorum.given_up)}), *self._lease.tick(now)]

    def count_all_again(self, now: float) -> list[InnerAction]:
        """Count the servers again that were given up, when the lease is held at more than half of all in the plan."""
        if not self._quorum.given_up or not self._lease.would_hold(self._servers.listed, now):
            return []
        if self._leadership.at_work is not None and not self._leadership.at_work.may_change_servers:
            return []
        self._quorum.given_up = frozenset()
        servers = list(self._servers.listed)
        self._lease.vote(servers)
        return [Note("info", "all servers of the plan count again", {"servers": servers})]

    def shut_down(self, now: float) -> list[InnerAction]:
        """Give the lease back, and end."""
        self._shutdown_at = now + SHUTDOWN_S_MAX
        return [*self._lease.release(now), *self._stop_when_released(now)]

    def _stop_when_released(self, now: float) -> list[InnerAction]:
        """End, once the servers have confirmed that the lease is given back."""
        assert self._shutdown_at is not None
        if self._leadership.stage is Stage.STOPPED or (self._lease.is_releasing and now < self._shutdown_at):
            return []
        return self._stop(None)

    def _stop(self, error: AlreadyRunning | ConfigError | None) -> list[InnerAction]:
        self._leadership.end(Stage.STOPPED)
        return [Stopped(error)]
