"""Mutations for the scenarios about who may speak for an agent. See ``mutations``."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager

from dynamoth.plan.plan import Entry
from dynamoth.protocol import stored_plan
from dynamoth_balancer.install.agents import Agents
from dynamoth_balancer.install.copies import PlanCopy
from dynamoth_dispatcher.followed_plan import FollowedPlan
from dynamoth_dispatcher.machine import DispatcherMachine
from dynamoth_sim.mutations.mutation import Check, no_actions, nothing, replaced


@contextmanager
def blind_is_believed() -> Generator[None]:
    """An agent that may not observe acknowledges all the same, and the balancer does not ask whether it observes."""
    with replaced(DispatcherMachine, why_blind=None), replaced(Agents, cannot_observe=nothing):
        yield


def any_voice_counts() -> AbstractContextManager[None]:
    """The balancer believes whoever acknowledges, whether or not others speak for the same server."""

    def acked(self: Agents, server: str, now: float) -> int:
        return max((voice.acked for voice in self[server].voices.values()), default=-1)

    return replaced(Agents, acked=acked)


def no_audit() -> AbstractContextManager[None]:
    """The balancer reads the header of a copy, and no entries."""
    return replaced(PlanCopy, _audit=no_actions)


def any_epoch_is_possible() -> AbstractContextManager[None]:
    """Stored entries are believed whatever epoch they have."""

    def possible(entry: Entry, _version: int) -> Entry:
        return entry

    return replaced(stored_plan, _possible=possible)


def agents_have_no_doubt() -> AbstractContextManager[None]:
    """Agents do not read a stored plan again that somebody else may have changed, and ask no listeners."""
    return replaced(FollowedPlan, doubt=no_actions)


def headers_are_believed() -> AbstractContextManager[None]:
    """At a takeover, the balancer does not doubt copies of which it has read the header only."""
    return replaced(PlanCopy, doubt=nothing)


CHECKS: tuple[Check, ...] = (
    Check("60-may-not-observe", blind_is_believed, "expected"),
    Check("61-forged-acknowledgement", any_voice_counts, "expected"),
    Check("64-forged-entry", no_audit, "expected"),
    Check("107-forged-epoch", any_epoch_is_possible, "expected"),
    Check("129-forged-copies", agents_have_no_doubt, "expected"),
    Check("129-forged-copies-read", agents_have_no_doubt, "expected"),
    Check("129-forged-copies-only", headers_are_believed, "expected"),
)
