"""What the application has subscribed to and ended, and what it is owed; the same for channels and for patterns.

Theory of operation
-------------------
A name is *current* from the application's subscribing to it, once however often it does so. When the application
unsubscribes from a confirmed one, that is *ending*, until nothing of it can come any more; an unconfirmed one ends at
once. Each subscribing is owed a confirmation, and each unsubscribing an end. While a name is ending, the application
may subscribe to it again: then it begins anew when it has ended, unless the application changes its mind once more.

What was delivered of a name is remembered behind its end, as nothing of it may be delivered again to a new one.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from dynamoth_client.machines.subscriber.events import SubscriptionConfirmed, SubscriptionEnded


class Registered(Protocol):
    """What a register must know of a subscription."""

    #: Whether the application has been told. Never goes back.
    confirmed: bool
    #: When it was told first; infinity before.
    confirmed_at: float
    #: Confirmations that the application waits for.
    confirmations_owed: int
    #: How often the application is to be told that this has ended. Not 0: it is ending.
    unsubscribe_acks_pending: int


_Subscription = TypeVar("_Subscription", bound=Registered)
_Memory = TypeVar("_Memory")


class Register(Generic[_Subscription, _Memory]):
    """The subscriptions of one machine, by name."""

    def __init__(self, ended_max: int) -> None:
        """Begin without subscriptions.

        Args:
            ended_max: names of which is remembered what was delivered, at most.

        """
        self._ended_max = ended_max
        self.current: dict[bytes, _Subscription] = {}
        #: Those that the application has ended and that some server has not. None of these names is current.
        self.ending: dict[bytes, _Subscription] = {}
        #: What was delivered of names that were unsubscribed, oldest first.
        self._memories: dict[bytes, _Memory] = {}

    def subscribe(self, name: bytes) -> list[SubscriptionConfirmed] | None:
        """Note that the application subscribes; return what it is told, or None for a name that is to be added."""
        if (ending := self.ending.get(name)) is not None:
            ending.confirmations_owed += 1
            return []
        subscription = self.current.get(name)
        if subscription is None:
            return None
        if subscription.confirmed:
            return [SubscriptionConfirmed(name)]
        subscription.confirmations_owed += 1
        return []

    def unsubscribe(self, name: bytes) -> list[SubscriptionEnded] | None:
        """Note that the application unsubscribes; return what it is told, or None where ``current`` is to be ended."""
        if (ending := self.ending.get(name)) is not None:
            ending.confirmations_owed = 0
            ending.unsubscribe_acks_pending += 1
            return []
        return None if name in self.current else [SubscriptionEnded(name)]

    def recall(self, name: bytes) -> _Memory | None:
        """Return what is remembered of a name, which is going to be added."""
        return self._memories.pop(name, None)

    def add(self, name: bytes, subscription: _Subscription) -> None:
        """Make a subscription the current one of a name that has none."""
        self.current[name] = subscription

    def is_current(self, name: bytes, subscription: _Subscription) -> bool:
        """Tell whether a subscription has been added and not been removed."""
        return self.current.get(name) is subscription

    def confirm(self, name: bytes, subscription: _Subscription, now: float) -> list[SubscriptionConfirmed]:
        """Confirm a current subscription, for the first time or again; return what the application is told."""
        confirmations = [SubscriptionConfirmed(name)] * subscription.confirmations_owed
        subscription.confirmations_owed = 0
        if not subscription.confirmed:
            subscription.confirmed = True
            subscription.confirmed_at = now
        return confirmations

    def remove(self, name: bytes, memory: _Memory) -> None:
        """End a current subscription; it is for the caller to tell the application, or to let it be ending."""
        del self.current[name]
        self._memories[name] = memory
        if len(self._memories) > self._ended_max:
            del self._memories[next(iter(self._memories))]

    def begin_to_end(self, name: bytes, subscription: _Subscription) -> None:
        """Let a removed subscription be ending."""
        self.ending[name] = subscription
        subscription.unsubscribe_acks_pending = 1

    def ended(self, name: bytes) -> tuple[list[SubscriptionEnded], int]:
        """Note that nothing more comes of what is ending; return what the application is told.

        Also returns how often the application has subscribed meanwhile: so often it is to subscribe now.
        """
        subscription = self.ending.pop(name)
        return [SubscriptionEnded(name)] * subscription.unsubscribe_acks_pending, subscription.confirmations_owed

    def forget(self) -> None:
        """Forget what was delivered of names that were unsubscribed."""
        self._memories.clear()
