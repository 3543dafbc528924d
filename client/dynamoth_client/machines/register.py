"""The names that the application has subscribed to, and their acknowledgements; the same for channels and for patterns.

Theory of operation
-------------------
A name is *current* from its first subscribe on, however often the application subscribes to it. When the application
unsubscribes from a confirmed name, that is *ending* until nothing more can come from any server; an unconfirmed one
ends at once. Each subscribe is acknowledged by one confirmation, and each unsubscribe by one end. While a name is
ending, the application may subscribe to it again: it is joined again after its end, unless the application unsubscribes
once more.

The numbers of delivered messages outlive a subscription, so that a new one to the same name gets none of them again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from dynamoth_client.machines.subscriber.events import SubscriptionConfirmed, SubscriptionEnded


class State(Enum):
    """The life of a subscription.

    ========= =================================================== ====================================================
    state     meaning                                             left by
    ========= =================================================== ====================================================
    JOINING   not confirmed; messages wait for the confirmation   ``confirm``: LISTENING; ``end``: ENDED
    LISTENING confirmed; messages are delivered                   ``begin_to_end``: ENDING; ``end`` (refused): ENDED
    ENDING    unsubscribed; messages are delivered until all      ``end``: ENDED
              servers have acknowledged that
    ENDED     no message comes any more
    ========= =================================================== ====================================================
    """

    JOINING = "joining"
    LISTENING = "listening"
    ENDING = "ending"
    ENDED = "ended"


@dataclass(slots=True, kw_only=True, eq=False)
class Registered:
    """The part of a subscription that its :class:`Register` needs and changes."""

    state: State = State.JOINING
    #: When it was confirmed; infinity while JOINING.
    confirmed_at: float = float("inf")
    #: Confirmations that the application waits for. At least 1 while JOINING, 0 while LISTENING.
    subscribe_acks_pending: int = 1
    #: Ends that the application waits for. At least 1 while ENDING, else 0.
    unsubscribe_acks_pending: int = 0

    @property
    def is_current(self) -> bool:
        """Whether the application has not ended it, nor a server refused it."""
        return self.state is State.JOINING or self.state is State.LISTENING

    def confirm(self, now: float) -> int:
        """Note a confirmation, the first or a later one; return how many confirmations the application waits for."""
        pending, self.subscribe_acks_pending = self.subscribe_acks_pending, 0
        if self.state is State.JOINING:
            self.state = State.LISTENING
            self.confirmed_at = now
        return pending

    def subscribe_again(self) -> None:
        """Count one more subscribe, of a subscription that is JOINING or ENDING."""
        self.subscribe_acks_pending += 1

    def begin_to_end(self) -> None:
        """Become ENDING."""
        self.state = State.ENDING
        self.unsubscribe_acks_pending = 1

    def unsubscribe_again(self) -> None:
        """Count one more unsubscribe while ENDING. It takes back the subscribes since the first one."""
        self.subscribe_acks_pending = 0
        self.unsubscribe_acks_pending += 1

    def end(self) -> None:
        """Become ENDED."""
        self.state = State.ENDED

    def check(self) -> None:
        """Assert the invariants that hold between events."""
        assert (self.state is State.JOINING) == (self.confirmed_at == float("inf")), f"confirmed or not: {self}"
        assert (self.state is State.ENDING) == bool(self.unsubscribe_acks_pending), f"ending or not: {self}"
        if self.state is not State.ENDING:
            assert (self.state is State.JOINING) == bool(self.subscribe_acks_pending), f"acknowledged or not: {self}"


_Subscription = TypeVar("_Subscription", bound=Registered)
_Memory = TypeVar("_Memory")


class Register(Generic[_Subscription, _Memory]):
    """The subscriptions of one machine, by name."""

    def __init__(self, ended_max: int) -> None:
        """Begin without subscriptions.

        Args:
            ended_max: ended names whose delivered numbers are remembered, at most.

        """
        self._ended_max = ended_max
        #: Those that are JOINING or LISTENING.
        self.current: dict[bytes, _Subscription] = {}
        #: Those that are ENDING. None of these names is current.
        self.ending: dict[bytes, _Subscription] = {}
        #: The delivered numbers of ended names, oldest first.
        self._memories: dict[bytes, _Memory] = {}

    def subscribe(self, name: bytes) -> Sequence[SubscriptionConfirmed] | None:
        """Count a subscribe; return the confirmations that are due now, or None for a name that is to be added."""
        subscription = self.ending.get(name) or self.current.get(name)
        if subscription is None:
            return None
        if subscription.state is State.LISTENING:
            return [SubscriptionConfirmed(name)]
        subscription.subscribe_again()
        return []

    def unsubscribe(self, name: bytes) -> Sequence[SubscriptionEnded] | None:
        """Count an unsubscribe; return the ends that are due now, or None for a current name, which is to be ended."""
        if (ending := self.ending.get(name)) is not None:
            ending.unsubscribe_again()
            return []
        return None if name in self.current else [SubscriptionEnded(name)]

    def recall(self, name: bytes) -> _Memory | None:
        """Return, once, the delivered numbers of a name that is to be added."""
        return self._memories.pop(name, None)

    def add(self, name: bytes, subscription: _Subscription) -> None:
        """Make a subscription the current one of a name that has none."""
        self.current[name] = subscription

    def confirm(self, name: bytes, subscription: _Subscription, now: float) -> Sequence[SubscriptionConfirmed]:
        """Confirm a current subscription, for the first time or again; return the confirmations that are due."""
        return [SubscriptionConfirmed(name)] * subscription.confirm(now)

    def end(self, name: bytes, memory: _Memory) -> None:
        """End a current subscription at once."""
        self._remove(name, memory).end()

    def begin_to_end(self, name: bytes, memory: _Memory) -> None:
        """Make a current subscription an ending one."""
        subscription = self.ending[name] = self._remove(name, memory)
        subscription.begin_to_end()

    def _remove(self, name: bytes, memory: _Memory) -> _Subscription:
        self._memories[name] = memory
        if len(self._memories) > self._ended_max:
            del self._memories[next(iter(self._memories))]
        return self.current.pop(name)

    def on_ended(self, name: bytes) -> tuple[Sequence[SubscriptionEnded], int]:
        """End an ending subscription; return the ends that are due, and how often to subscribe again."""
        subscription = self.ending.pop(name)
        acks = [SubscriptionEnded(name)] * subscription.unsubscribe_acks_pending
        again = subscription.subscribe_acks_pending
        subscription.end()
        return acks, again

    def forget(self) -> None:
        """Forget the delivered numbers of ended names."""
        self._memories.clear()

    def check(self) -> None:
        """Assert the invariants that hold between events."""
        assert self.current.keys().isdisjoint(self.ending), "a name is both current and ending"
        assert len(self._memories) <= self._ended_max, f"{len(self._memories)} names are remembered"
        for name, subscription in self.current.items():
            assert subscription.is_current, f"{name!r} is current, and {subscription.state}"
            subscription.check()
        for name, subscription in self.ending.items():
            assert subscription.state is State.ENDING, f"{name!r} is ending, and {subscription.state}"
            subscription.check()


def acknowledge(unsubscribing: Counter[bytes], name: bytes) -> bool:
    """Count one acknowledged UNSUBSCRIBE of a name; return whether no other one is on its way."""
    if name in unsubscribing:
        unsubscribing[name] -= 1
        if unsubscribing[name]:
            return False
        del unsubscribing[name]
    return True
