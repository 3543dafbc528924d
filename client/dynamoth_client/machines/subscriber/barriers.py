"""Tells the application when everything that was published on a channel before a moment has come.

Redis executes the commands of a connection in order, and its pushes and replies go out in order. So the reply to a
PING, sent over the link of each place where a subscription listens, comes behind every message that was published at
that place before. A message that still waits for an earlier one of its publisher holds the barrier up, too.
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
"""How soon a barrier looks again whether messages still wait for earlier ones; these come within ``hold_s_max``."""


@dataclass(slots=True, eq=False)
class _Barrier:
    """A barrier of a channel, and the servers that have not answered."""

    channel: bytes
    subscription: Subscription
    servers: set[str]


class Barriers(Part):
    """The barriers of one subscriber."""

    def __init__(self, shared: Shared, listening: Listening) -> None:
        """Begin without barriers."""
        super().__init__(shared)
        self._listening = listening
        self._numbers = count(1)
        self._open: dict[int, _Barrier] = {}

    def begin(self, channel: bytes, now: float) -> list[SubscriberAction]:
        """Begin a barrier. One of a channel that is not subscribed to passes at once."""
        subscription = self._register.current.get(channel)
        if subscription is None or subscription.state is State.JOINING:
            return [BarrierPassed(channel)]
        servers = {place.location.server for place in subscription.places}
        up = {server for server in servers if self._listening.is_up(server)}
        barrier = _Barrier(channel, subscription, up)
        if not up:
            return [*self._look(barrier, now)]
        number = next(self._numbers)
        self._open[number] = barrier
        return [Send(server, (b"PING",), ("barrier", number)) for server in sorted(up)]

    def on_answer(self, number: int, server: str, now: float) -> list[SubscriberAction]:
        """Note that a server has sent everything from before the barrier."""
        barrier = self._open.get(number)
        if barrier is None:
            return []
        barrier.servers.discard(server)
        if barrier.servers:
            return []
        del self._open[number]
        return [*self._look(barrier, now)]

    def on_link_down(self, server: str, now: float) -> list[SubscriberAction]:
        """Do not wait for a server whose link was lost: the subscription reports a gap."""
        actions: list[SubscriberAction] = []
        for number in [number for number, barrier in self._open.items() if server in barrier.servers]:
            actions += self.on_answer(number, server, now)
        return actions

    def _look(self, barrier: _Barrier, now: float) -> Sequence[SubscriberAction]:
        """Pass the barrier, unless messages of the channel wait for earlier ones."""
        subscription = barrier.subscription
        if self._register.current.get(barrier.channel) is subscription and subscription.sequences.holds:
            self._timers.add(now + LOOK_AGAIN_S, self._look, barrier)
            return []
        return [BarrierPassed(barrier.channel)]
