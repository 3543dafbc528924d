"""Finds the entries that the plan need not have, so that it stays small however many channels were ever moved.

A channel that is where its slot is, both settled, needs no entry of its own (``Plan.folds``). Nobody can hold a later
epoch than the slot has then: folding gives the slot a new one, above that of the channel. So it is safe at any time,
and nobody has to be asked. Who still uses an older route is redirected by the entry of the slot, as by that of the
channel before.

A copy of the plan from before may turn up later, at a server that was away. Its entry for the channel is below the
epoch of the slot in the present plan, which does not name the channel. By that :func:`is_folded` knows that the entry
must not be revived.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dynamoth.plan.plan import Entry, Plan
from dynamoth.plan.slots import is_slot, slot_of


def is_folded(channel: bytes, entry: Entry, entries: Mapping[bytes, Entry]) -> bool:
    """Return whether an entry that another copy has was folded in a plan with these entries."""
    if channel in entries or is_slot(channel):
        return False
    slot = entries.get(slot_of(channel))
    return slot is not None and slot.route.epoch > entry.route.epoch


class Folding:
    """The channels of a plan that fold, kept up to date with each change. Takes 100 bytes per channel of the plan."""

    def __init__(self, plan: Plan) -> None:
        #: The channels with an entry of their own, by slot.
        self._by_slot: dict[bytes, set[bytes]] = {}
        #: Those that fold.
        self.ready: set[bytes] = set()
        #: The rules that they were judged by.
        self._compatibility = plan.compatibility
        self.update(plan, (name for name in plan.entries if not is_slot(name)))

    def update(self, plan: Plan, changed: Iterable[bytes]) -> None:
        """Take in the channels and slots whose entries are new, or gone."""
        for name in changed:
            if is_slot(name):
                self._judge(plan, self._by_slot.get(name, ()))
            elif name in plan.entries:
                self._by_slot.setdefault(slot_of(name), set()).add(name)
                self._judge(plan, (name,))
            else:
                self._by_slot.get(slot_of(name), set()).discard(name)
                self.ready.discard(name)
        if plan.compatibility is not self._compatibility:
            self._compatibility = plan.compatibility
            for channels in self._by_slot.values():
                self._judge(plan, channels)

    def _judge(self, plan: Plan, channels: Iterable[bytes]) -> None:
        for channel in channels:
            if plan.folds(channel):
                self.ready.add(channel)
            else:
                self.ready.discard(channel)
