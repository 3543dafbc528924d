"""Mutations for the scenarios about components that fail. See ``mutations``."""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

from dynamoth.machine import lease
from dynamoth.machine.events import CommandPart
from dynamoth_agent import guard
from dynamoth_balancer import repair
from dynamoth_balancer.decide import failover
from dynamoth_balancer.events import Note
from dynamoth_balancer.install import copies
from dynamoth_balancer.install.book import PlanBook
from dynamoth_balancer.install.contention import Contention
from dynamoth_balancer.install.dead_servers import DeadServers
from dynamoth_balancer.install.installer import Installer
from dynamoth_balancer.install.quorum import Quorum
from dynamoth_balancer.install.resumption import Resumption
from dynamoth_sim.mutations.mutation import Check, nothing, replaced, returning
from dynamoth_sim.mutations.standalone import agents_do_not_look_back


def no_fence() -> AbstractContextManager[None]:
    """The plan is written whatever the term."""

    def unfenced(_term: int, command: Sequence[CommandPart]) -> tuple[CommandPart, ...]:
        return tuple(command)

    return replaced(copies, fenced=unfenced)


@contextmanager
def no_terms() -> Generator[None]:
    """Nor does a term end at a version that another one may own."""
    with no_fence(), replaced(PlanBook, is_used_up=False):
        yield


def second_balancers_end() -> AbstractContextManager[None]:
    """A balancer ends when it finds another one at work, as without ``standby``."""
    original = Contention.look

    def look(self: Contention, now: float) -> list[Note]:
        self._standby = False  # pyright: ignore[reportPrivateUsage]
        return original(self, now)

    return replaced(Contention, look=look)


def connected_balancers_count() -> AbstractContextManager[None]:
    """The lease is not taken for a long time while another balancer is connected, which may be paused."""
    return replaced(lease, FREE_RENEWALS=1000)


def hung_agents_keep_their_place() -> AbstractContextManager[None]:
    """An agent waits for an earlier one, even if that one has sent no report for long."""
    return replaced(guard, HUNG_INTERVALS=1e9)


def suspended_terms_end() -> AbstractContextManager[None]:
    """A balancer that has lost its lease for a moment ends its term, though nobody else has led."""
    return replaced(Resumption, is_replaced=returning(True))


def late_balancers_wait() -> AbstractContextManager[None]:
    """A lease that has expired is only taken after others have had the time to."""
    original = lease.Lease._may_take  # pyright: ignore[reportPrivateUsage]

    def may_take(self: lease.Lease, term: Any, now: float) -> bool:
        others_s = lease.FREE_RENEWALS * self._renew_s  # pyright: ignore[reportPrivateUsage]
        return original(self, replace(term, held_until=term.held_until - others_s), now)

    return replaced(lease.Lease, _may_take=may_take)


def dead_servers_keep_channels() -> AbstractContextManager[None]:
    """No server ever counts as dead: changes wait for it, and its channels for its return."""
    return replaced(DeadServers, dead=frozenset[str]())


def moves_are_not_replaced() -> AbstractContextManager[None]:
    """A channel in transition is not moved again before it has settled, even if its server dies."""
    original = failover.homeless

    def settled(installer: Installer) -> list[bytes]:
        return [name for name in original(installer) if name not in installer.transitions]

    return replaced(failover, homeless=settled)


def paused_balancers_rest() -> AbstractContextManager[None]:
    """A paused balancer leaves channels at dead servers."""
    original = failover.homeless

    def unless_paused(installer: Installer) -> list[bytes]:
        return [] if installer.plan.administration.paused else original(installer)

    return replaced(failover, homeless=unless_paused)


def nobody_takes_over() -> AbstractContextManager[None]:
    """A balancer that is to take over gives up no server."""
    return replaced(Quorum, take_over=nothing)


def minorities_lead() -> AbstractContextManager[None]:
    """The lease of any server is enough."""

    def until(self: lease.Lease, voters: Collection[str]) -> float:
        return max(self._terms[server].held_until for server in voters)  # pyright: ignore[reportPrivateUsage]

    return replaced(lease.Lease, _until=until)


def leases_stay() -> AbstractContextManager[None]:
    """A lease that nobody renews is left to the clocks of the servers."""
    return replaced(lease.Lease, _is_left=returning(False))


def moves_wait_for_agents() -> AbstractContextManager[None]:
    """A move that waits for a failed agent is never undone."""
    return replaced(repair, stuck=returning({}))


def moves_wait_for_servers() -> AbstractContextManager[None]:
    """A move that waits for a server that refuses the plan is never undone."""
    return replaced(repair, unstored=returning({}))


CHECKS: tuple[Check, ...] = (
    Check("90-stale-write", no_fence, "expected"),
    Check("91-balancer-dies", second_balancers_end, "expected"),
    Check("91-balancer-pauses", connected_balancers_count, "expected"),
    Check("128-renews-late", suspended_terms_end, "expected"),
    Check("130-is-held-up", late_balancers_wait, "expected"),
    Check("92-clocks-jump", no_terms, "expected"),
    Check("93-server-dies", dead_servers_keep_channels, "expected"),
    Check("93-server-freezes", dead_servers_keep_channels, "expected"),
    Check("94-cut-off", agents_do_not_look_back, "G1"),
    Check("127-cut-off-while-added", agents_do_not_look_back, "G1"),
    Check("95-dies-before-a-move", moves_are_not_replaced, "expected"),
    Check("95-dies-in-a-move", moves_are_not_replaced, "expected"),
    Check("96-most-servers-die", nobody_takes_over, "expected"),
    Check("96-most-servers-die", minorities_lead, "expected"),
    Check("96-paused", paused_balancers_rest, "expected"),
    Check("97-agent-dies", moves_wait_for_agents, "expected"),
    Check("97-agent-hangs", moves_wait_for_agents, "expected"),
    Check("97-agent-falls-behind", moves_wait_for_agents, "expected"),
    Check("97-agent-of-a-replica-dies", moves_wait_for_agents, "expected"),
    Check("97-server-refuses-the-plan", moves_wait_for_servers, "expected"),
    Check("97-old-server-refuses-the-plan", moves_wait_for_servers, "expected"),
    Check("97-hung-agent-is-replaced", hung_agents_keep_their_place, "expected"),
    Check("98-data-centres-part", minorities_lead, "expected"),
    Check("98-data-centres-part", dead_servers_keep_channels, "expected"),
    Check("99-clocks-are-set-back", leases_stay, "expected"),
)
