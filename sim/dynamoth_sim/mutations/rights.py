"""Mutations for the scenarios about who may speak for an agent. See ``mutations``."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager

from dynamoth.plan.plan import Plan
from dynamoth_balancer.install.agents import Agents
from dynamoth_balancer.install.copies import CopyAction, PlanCopy
from dynamoth_dispatcher.machine import DispatcherMachine
from dynamoth_sim.mutations.mutation import Check, replaced


def blind_is_believed() -> AbstractContextManager[None]:
    """An agent that may not observe acknowledges all the same, and the balancer does not ask whether it observes."""

    def note_nothing(self: Agents, server: str, incarnation: int, problem: str) -> None:
        pass

    @contextmanager
    def both() -> Generator[None]:
        with replaced(DispatcherMachine, why_blind=None), replaced(Agents, cannot_observe=note_nothing):
            yield

    return both()


def any_voice_counts() -> AbstractContextManager[None]:
    """The balancer believes whoever acknowledges, whether or not others speak for the same server."""

    def acked(self: Agents, server: str, now: float) -> int:
        return max((voice.acked for voice in self[server].voices.values()), default=-1)

    return replaced(Agents, acked=acked)


def no_audit() -> AbstractContextManager[None]:
    """The balancer reads the header of a copy, and no entries."""

    def audit_nothing(self: PlanCopy, plan: Plan) -> list[CopyAction]:
        return []

    return replaced(PlanCopy, _audit=audit_nothing)


CHECKS: tuple[Check, ...] = (
    Check("60-may-not-observe", blind_is_believed, "expected"),
    Check("61-forged-acknowledgement", any_voice_counts, "expected"),
    Check("64-forged-entry", no_audit, "expected"),
)
