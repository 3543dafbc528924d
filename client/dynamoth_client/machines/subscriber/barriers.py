"""Tells the application when everything that was published on a channel before a moment has come.

Redis executes the commands of a connection in order, and its pushes and replies go out in order. So the reply to a
PING, sent over the link of each place where a subscription listens, comes behind every message that was published at
that place before. A place whose link is down is waited for: what was lost there shows as a gap when it is up again. A
message that waits for an earlier one of its publisher holds the barrier up, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from dynamoth.machine.events import Send
from dynamoth_client.machines.register import State
from dynamoth_client.machines.subscriber.events import BarrierPassed, SubscriberAction
from dynamoth_client.machines.subscriber.listening import Listening
from dynamoth_client.machines.subscriber.part import Part, Shared
from dynamoth_client.machines.subscriber.subscription import Subscription

LOOK_AGAIN_S = 0.02
"""How soon a barrier looks again whether links are up, and whether messages still wait for earlier ones."""


@dataclass(slots=True, eq=False)
class _Barrier:
    """A barrier of a channel, and one round of PINGs."""

    subscription: Subscription
    #: The servers of the round, and those that have not answered. Empty between rounds.
    asked: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


class Barriers(Part):
    """The barriers of one subscriber."""

    def __init__(self, shared: Shared, listening: Listening) -> None:
        """Begin without barriers."""
        super().__init__(shared)
        self._listening = listening
        self._numbers = count(1)
        #: Barriers with a round under way.
        self._rounds: dict[int, _Barrier] = {}

    def begin(self, channel: bytes, now: float) -> list[SubscriberAction]:
        """Begin a barrier. One of a channel that is not subscribed to passes at once."""
        subscription = self._register.current.get(channel)
        if subscription is None or subscription.state is State.JOINING:
            return [BarrierPassed(channel)]
        return [*self._ask(_Barrier(subscription), now)]

    def _servers(self, subscription: Subscription) -> tuple[str, ...]:
        return tuple(dict.fromkeys(place.location.server for place in subscription.places))

    def _is_current(self, barrier: _Barrier) -> bool:
        subscription = barrier.subscription
        return self._register.current.get(subscription.channel) is subscription

    def _ask(self, barrier: _Barrier, now: float) -> Sequence[SubscriberAction]:
        """Begin a round when all links are up."""
        if not self._is_current(barrier):
            return [BarrierPassed(barrier.subscription.channel)]
        servers = self._servers(barrier.subscription)
        if not servers or not all(map(self._listening.is_up, servers)):
            self._timers.add(now + LOOK_AGAIN_S, self._ask, barrier)
            return []
        barrier.asked = barrier.missing = servers
        number = next(self._numbers)
        self._rounds[number] = barrier
        return [Send(server, (b"PING",), ("barrier", number)) for server in servers]

    def on_answer(self, number: int, server: str, now: float) -> list[SubscriberAction]:
        """Note that a server has sent everything from before the round."""
        barrier = self._rounds.get(number)
        if barrier is None:
            return []
        barrier.missing = tuple(each for each in barrier.missing if each != server)
        if barrier.missing:
            return []
        del self._rounds[number]
        return [*self._look(barrier, now)]

    def on_link_down(self, server: str, now: float) -> list[SubscriberAction]:
        """End the rounds that a server takes part in; others begin when it is up, or left."""
        actions: list[SubscriberAction] = []
        for number in [number for number, barrier in self._rounds.items() if server in barrier.asked]:
            actions += self._ask(self._rounds.pop(number), now)
        return actions

    def _look(self, barrier: _Barrier, now: float) -> Sequence[SubscriberAction]:
        """Pass a barrier after its round, unless the subscription has joined other servers, or messages wait."""
        if self._is_current(barrier):
            if not set(self._servers(barrier.subscription)) <= set(barrier.asked):
                return self._ask(barrier, now)
            if barrier.subscription.sequences.holds:
                self._timers.add(now + LOOK_AGAIN_S, self._look, barrier)
                return []
        return [BarrierPassed(barrier.subscription.channel)]
