"""Tells the application when everything that was published on a channel before a moment has come.

Redis executes the commands of a connection in order, and its pushes and replies go out in order. So the reply to a
command, sent over the link of a place where a subscription listens, comes behind every message that was published at
that place before. The command reads the channel's entry in the stored plan, as a message may have been published at
another place, and be on its way here through the agents:

* Others may follow a newer route already. The entry names it, because every server stores it before anybody follows it.
  The subscription follows it, too, and the barrier waits until it has left the former places.
* While the entry is not SETTLED, publishers that have not heard of the route still publish at the former places. As
  with a new subscription, ``join_moving_s`` is the time that agents need to forward what was published.

A place whose link is down is waited for: what was lost there shows as a gap when it is up again. A message that waits
for an earlier one of its publisher holds the barrier up, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynamoth.plan.plan import Phase
from dynamoth_client.machines.register import State
from dynamoth_client.machines.subscriber.events import BarrierPassed, SubscriberAction
from dynamoth_client.machines.subscriber.listening import Listening
from dynamoth_client.machines.subscriber.part import Part, Shared
from dynamoth_client.machines.subscriber.subscription import Place, Subscription

LOOK_AGAIN_S = 0.02
"""How soon a barrier looks again at a subscription that moves or has lost a link, and at messages that wait."""


@dataclass(slots=True, eq=False)
class _Barrier:
    """A barrier of a channel."""

    subscription: Subscription
    #: The servers that were asked in this round. Empty between rounds.
    asked: tuple[str, ...] = ()
    #: The epoch of the route that was seen in transition, and until when forwarded messages are waited for.
    moving_epoch: int = -1
    moving_until: float = 0.0


class Barriers(Part):
    """The barriers of one subscriber."""

    def __init__(self, shared: Shared, listening: Listening) -> None:
        """Begin without barriers."""
        super().__init__(shared)
        self._listening = listening
        #: Channel to its barriers with a round under way.
        self._rounds: dict[bytes, list[_Barrier]] = {}

    def begin(self, channel: bytes, now: float) -> list[SubscriberAction]:
        """Begin a barrier. One of a channel that is not subscribed to passes at once."""
        subscription = self._register.current.get(channel)
        if subscription is None or subscription.state is State.JOINING:
            return [BarrierPassed(channel)]
        return [*self._ask(_Barrier(subscription), now)]

    def _is_current(self, barrier: _Barrier) -> bool:
        subscription = barrier.subscription
        return self._register.current.get(subscription.channel) is subscription

    @staticmethod
    def _places(barrier: _Barrier) -> list[Place]:
        return [place for place in barrier.subscription.targets.values() if not place.excused]

    def _ask(self, barrier: _Barrier, now: float) -> Sequence[SubscriberAction]:
        """Begin a round when the subscription is at rest and all links are up."""
        subscription, places = barrier.subscription, self._places(barrier)
        if not self._is_current(barrier):
            return [BarrierPassed(subscription.channel)]
        servers = tuple(place.location.server for place in places)
        if subscription.leaving or not subscription.is_verified or not all(map(self._listening.is_up, servers)):
            self._timers.add(now + LOOK_AGAIN_S, self._ask, barrier)
            return []
        barrier.asked = servers
        self._rounds.setdefault(subscription.channel, []).append(barrier)
        return [self._listening.verify(subscription, place) for place in places]

    def on_reply(self, channel: bytes, now: float) -> list[SubscriberAction]:
        """Look at the barriers of a channel after the reply of a place was handled."""
        actions: list[SubscriberAction] = []
        for barrier in self._rounds.pop(channel, ()):
            if self._is_current(barrier) and any(place.attempt for place in self._places(barrier)):
                self._rounds.setdefault(channel, []).append(barrier)
            else:
                actions += self._end_round(barrier, now)
        return actions

    def on_link_down(self, server: str, now: float) -> list[SubscriberAction]:
        """End the rounds that a server takes part in; others begin when it is up, or left."""
        actions: list[SubscriberAction] = []
        for channel, barriers in list(self._rounds.items()):
            lost = [barrier for barrier in barriers if server in barrier.asked]
            self._rounds[channel] = [barrier for barrier in barriers if server not in barrier.asked]
            if not self._rounds[channel]:
                del self._rounds[channel]
            for barrier in lost:
                actions += self._ask(barrier, now)
        return actions

    def _end_round(self, barrier: _Barrier, now: float) -> Sequence[SubscriberAction]:
        """Pass a barrier if nothing can be on its way from other places; else begin another round later."""
        subscription = barrier.subscription
        if not self._is_current(barrier):
            return [BarrierPassed(subscription.channel)]
        phases = {place.phase for place in self._places(barrier)}
        again_at = now + LOOK_AGAIN_S
        if subscription.leaving or not subscription.is_verified or None in phases:
            barrier.moving_epoch = -1
        elif phases == {Phase.SETTLED}:
            return self._pass(barrier, now)
        elif barrier.moving_epoch != subscription.route.epoch:
            barrier.moving_epoch = subscription.route.epoch
            again_at = barrier.moving_until = now + self._options.join_moving_s
        elif now >= barrier.moving_until:
            return self._pass(barrier, now)
        self._timers.add(again_at, self._ask, barrier)
        return []

    def _pass(self, barrier: _Barrier, now: float) -> Sequence[SubscriberAction]:
        """Pass a barrier unless messages wait for earlier ones."""
        if self._is_current(barrier) and barrier.subscription.sequences.holds:
            self._timers.add(now + LOOK_AGAIN_S, self._pass, barrier)
            return []
        return [BarrierPassed(barrier.subscription.channel)]
