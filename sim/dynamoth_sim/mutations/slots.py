"""Mutations for the scenarios about slots. See ``mutations``."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from dynamoth.plan.plan import Phase, Plan
from dynamoth.plan.slots import is_slot
from dynamoth_balancer.decide.relieve import RelieveSlots
from dynamoth_balancer.decide.tidy import Tidy
from dynamoth_balancer.install import book
from dynamoth_dispatcher.transitions import Transition, Transitions
from dynamoth_lla import digest
from dynamoth_sim.mutations.mutation import Check, no_actions, replaced, returning, uncorrected


def nothing_is_listed() -> AbstractContextManager[None]:
    """A slot counts as vacated whoever listens to its channels."""
    on_list = Transitions.on_list

    def empty(self: Transitions, asked: list[tuple[bytes, int, bool]], reply: Any, now: float) -> Any:
        return on_list(self, asked, [], now)

    return replaced(Transitions, on_list=empty)


def markers_overtake_losses() -> AbstractContextManager[None]:
    """A marker is sent without the losses of its slot ahead of it."""

    def nothing(self: Transitions, transition: Transition) -> bool:
        return False

    return replaced(Transitions, take_loss=nothing)


def slots_do_not_relieve() -> AbstractContextManager[None]:
    """Only channels that reports name leave an overloaded server."""
    return replaced(RelieveSlots, propose=no_actions)


def slots_look_alike() -> AbstractContextManager[None]:
    """Agents do not report load by slot."""

    def one_sum(*_: Any) -> Generator[None]:
        yield

    return replaced(digest, _add_up_by_slot=one_sum)


def all_settled_fold() -> AbstractContextManager[None]:
    """A channel's entry is folded into that of its slot wherever the channel is."""

    def is_settled(self: Plan, channel: bytes) -> bool:
        entry = self.entries.get(channel)
        return entry is not None and entry.phase is Phase.SETTLED and not is_slot(channel)

    return replaced(Plan, folds=is_settled)


def epochs_go_back() -> AbstractContextManager[None]:
    """A slot keeps its epoch when later ones are folded into it."""

    def fold(self: Plan, channels: Iterable[bytes]) -> Plan:
        entries = {name: entry for name, entry in self.entries.items() if name not in set(channels)}
        return replace(self, version=self.version + 1, entries=MappingProxyType(entries))

    return replaced(Plan, fold=fold)


def silent_channels_stay() -> AbstractContextManager[None]:
    """Channels that have gone silent keep the entries that they got when they were busy."""
    return replaced(Tidy, propose=no_actions)


def old_copies_revive_entries() -> AbstractContextManager[None]:
    """An entry that another copy has and the present plan has not is always taken for a newer one."""
    return replaced(book, is_folded=returning(False))


CHECKS: tuple[Check, ...] = (
    Check("81-slot-idle-subscribers", nothing_is_listed, "G1"),
    Check("82-slot-loss-before-marker", markers_overtake_losses, "G5"),
    Check("83-long-tail", slots_do_not_relieve, "expected"),
    Check("83-long-tail", slots_look_alike, "expected"),
    Check("84-folded", uncorrected(all_settled_fold), "G1"),
    Check("85-silent", silent_channels_stay, "expected"),
    Check("86-not-revived", uncorrected(old_copies_revive_entries), "G1"),
)
