"""Mutations for the scenarios about components that fail. See ``mutations``."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager

from dynamoth.machine.events import CommandPart
from dynamoth_balancer.events import Note
from dynamoth_balancer.install import copies, lease
from dynamoth_balancer.install.book import PlanBook
from dynamoth_balancer.install.contention import Contention
from dynamoth_sim.mutations.mutation import Check, replaced


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


CHECKS: tuple[Check, ...] = (
    Check("90-stale-write", no_fence, "expected"),
    Check("91-balancer-dies", second_balancers_end, "expected"),
    Check("91-balancer-pauses", connected_balancers_count, "expected"),
    Check("92-clocks-jump", no_terms, "expected"),
)
