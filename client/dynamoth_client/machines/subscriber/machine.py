"""The subscriber machine: listens in the right places, moves make-before-break, delivers once and in order.

Theory of operation
-------------------
For each channel there is a :class:`Subscription` (``subscription.py``) with a route that it follows and *places*, the
locations where it listens. The machine has a part for each question about it, and the parts share its state:

* what the application has asked for and is owed: :class:`Register`;
* which route it follows, whether that is right, and how it comes to a newer one: :class:`Routing`;
* the links, and SUBSCRIBE and UNSUBSCRIBE on them: :class:`Listening`;
* what is delivered of that which comes over the links: :class:`ChannelMessages`. A message is taken there, in ``take``,
  and comes out as :class:`Deliver`.

Here is what begins and ends a subscription. It has ended when the servers of all its places have acknowledged
UNSUBSCRIBE: what was on its way is delivered before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from dynamoth.machine.events import ErrorReply, LinkDown, LinkUp, Pushed, Replied, Start, Tick
from dynamoth.machine.timers import Timers
from dynamoth.names import is_own_channel
from dynamoth.plan.plan import Location
from dynamoth_client.machines.local_plan import LocalPlan
from dynamoth_client.machines.register import Register
from dynamoth_client.machines.sequences import Sequences
from dynamoth_client.machines.subscriber.events import (
    GapDetected,
    Subscribe,
    SubscriberOptions,
    SubscriptionEnded,
    SubscriptionFailed,
    Unsubscribe,
)
from dynamoth_client.machines.subscriber.listening import Listening
from dynamoth_client.machines.subscriber.messages import ChannelMessages
from dynamoth_client.machines.subscriber.routing import Routing
from dynamoth_client.machines.subscriber.subscription import Subscription, acknowledged


class SubscriberMachine:
    """Subscribes for one PubSub. See the module's text.

    Promises: G1, G2 and G3 for confirmed subscriptions while connections last, and a gap event where they do not.
    """

    def __init__(self, client_id: int, local_plan: LocalPlan, options: SubscriberOptions | None = None) -> None:
        """Make a subscriber.

        Args:
            client_id: 64-bit number, different for every subscriber; LLAs know it by this.
            local_plan: shared by the machines of the client.
            options: see :class:`SubscriberOptions`.

        """
        self.options = options or SubscriberOptions()
        self.counters: Counter[str] = Counter()
        self._plan = local_plan
        self._timers: Timers[Any] = Timers()
        #: Channel to subscription; remembers what was delivered.
        self._register: Register[Subscription, Sequences] = Register(self.options.ended_max)
        self._looks_for_plan = False
        self._listening = Listening(client_id, local_plan, self._timers, self.options.link_idle_s)
        self._routing = Routing(
            client_id, local_plan, self.options, self.counters, self._register, self._listening, self._timers
        )
        self._messages = ChannelMessages(
            local_plan, self.counters, self._register, self._listening, self._routing, self._timers, self._acknowledged
        )
        #: Takes the pushes of a link, from the first on, as long as there is nothing to be done but to deliver them, or
        #: to drop copies; returns how many. The others are for ``handle``, which would have done the same with these.
        self.take_expected = self._messages.take_expected

    def handle(self, event: Any, now: float) -> list[Any]:
        """Take one event; return the actions to execute, in order."""
        # Nearly all are messages.
        actions = self._messages.take(event, now) if type(event) is Pushed else self._decide(event, now)
        if self._listening.unannounced:
            actions += self._listening.announce()
        return actions

    def _decide(self, event: Any, now: float) -> list[Any]:
        match event:
            case Replied():
                return self._replied(event, now)
            case Subscribe():
                return [action for channel in event.channels for action in self._subscribe(channel, now)]
            case Unsubscribe():
                return [action for channel in event.channels for action in self._unsubscribe(channel, now)]
            case LinkUp():
                return self._listening.link_up(event.link, event.run_id)
            case LinkDown():
                return self._link_down(event, now)
            case Tick():
                return self._timers.run_due(now)
            case Start():
                return self._forget_idle(now)
            case _:
                raise AssertionError(f"not an event of a subscriber: {event!r}")

    def deadline(self) -> float | None:
        """Return the time of the earliest wish."""
        return self._timers.next_at

    # The application.

    def _subscribe(self, channel: bytes, now: float) -> list[Any]:
        if (told := self._register.subscribe(channel)) is not None:
            return told
        if is_own_channel(channel):
            return [SubscriptionFailed(channel, "channels under this prefix are Dynamoth's own: choose another name")]
        sequences = self._register.recall(channel) or Sequences(self.options.hold_s_max)
        subscription = Subscription(channel, self._plan.route(channel), sequences, followed_since=now)
        subscription.begin_anew()
        self._register.add(channel, subscription)
        self._plan.pin(channel)
        looks = self._begin_looking(now)
        return [*looks, *self._routing.begin(subscription, now)]

    def _begin_looking(self, now: float) -> list[Any]:
        """While a server is alone, look for a plan from the first subscription on."""
        if not self._plan.is_alone or self._looks_for_plan:
            return []
        self._looks_for_plan = True
        return self._routing.look_for_plan(now)

    def _unsubscribe(self, channel: bytes, now: float) -> list[Any]:
        if (told := self._register.unsubscribe(channel)) is not None:
            return told
        subscription = self._register.current[channel]
        if not subscription.confirmed:
            return [*self._drop(subscription, now), SubscriptionEnded(channel)]
        self._remove(subscription, now)
        actions = self._routing.tell_missed(subscription)
        self._register.begin_to_end(channel, subscription)
        subscription.ended_moving = bool(subscription.leaving)
        for place in subscription.places():
            if self._listening.is_up(place.location.server):
                actions += self._listening.unsubscribe(place.location)
            else:
                self._listening.forget(subscription, place, now)
        return [*actions, *self._ended_if_gone(subscription, now)]

    def _drop(self, subscription: Subscription, now: float) -> list[Any]:
        """End a subscription at once, whatever is on its way."""
        self._remove(subscription, now)
        return [action for place in subscription.places() for action in self._listening.leave(subscription, place, now)]

    def _remove(self, subscription: Subscription, now: float) -> None:
        self._register.remove(subscription.channel, subscription.sequences)
        self._plan.unpin(subscription.channel, now)

    def _ended_if_gone(self, subscription: Subscription, now: float) -> list[Any]:
        """Tell the application of the end when no place is left; begin anew if it has subscribed again."""
        if subscription.places():
            return []
        channel = subscription.channel
        ended, again = self._register.ended(channel)
        return [*ended, *(action for _ in range(again) for action in self._subscribe(channel, now))]

    # What servers answer.

    def _replied(self, event: Replied, now: float) -> list[Any]:
        match event.tag:
            case ("verify", channel, location, attempt):
                return self._verified(channel, location, attempt, event.value, now)
            case ("elsewhere", channel, location):
                return self._found_elsewhere(channel, location, event, now)
            case ("subscribe", channel):
                return self._subscribe_refused(channel, event, now)
            case ("unsubscribe", physical):
                self.counters["refused_commands"] += 1
                return self._unsubscribed(event.link, physical, now)
            case ("alone", name):
                return self._routing.left_alone(name, now)
            case ("header",):
                return self._routing.header_read(event.link, event.value, now)
            case ("inbox",):
                self.counters["refused_commands"] += 1
                return []
            case _:
                raise AssertionError(f"not a tag of a subscriber: {event.tag!r}")

    def _verified(self, channel: bytes, location: Location, attempt: int, reply: Any, now: float) -> list[Any]:
        """Let the plan that is stored at the server of a target be judged, if it could be read."""
        subscription = self._register.current.get(channel)
        place = subscription.targets.get(location) if subscription is not None else None
        if subscription is None or place is None or place.attempt != attempt:
            return []
        place.attempt = 0
        if not isinstance(reply, ErrorReply):
            return self._routing.verified(subscription, place, reply, now)
        self.counters["refused_commands"] += 1
        if reply.lacks_permission and not subscription.confirmed:
            return self._failed(channel, f"the stored plan cannot be read: {reply}", now)
        return self._routing.verify_later(subscription, place, now)

    def _found_elsewhere(self, channel: bytes, location: Location, event: Replied, now: float) -> list[Any]:
        """Let a route be judged that was read at another server, if the place in question is still out of reach."""
        subscription = self._register.current.get(channel)
        if subscription is None or location not in subscription.targets or self._listening.is_up(location.server):
            return []
        if isinstance(event.value, ErrorReply):
            self.counters["refused_commands"] += 1
            return []
        return self._routing.found_elsewhere(subscription, event.link, event.value, now)

    def _subscribe_refused(self, channel: bytes, event: Replied, now: float) -> list[Any]:
        """SUBSCRIBE has no reply but an error: final where permission is missing, for a while where it is busy."""
        if event.value.lacks_permission:
            return self._failed(channel, str(event.value), now)
        self.counters["refused_commands"] += 1
        self._timers.add(now + self.options.verify_retry_s, self._listen_again, channel, event.link)
        return []

    def _failed(self, channel: bytes, reason: str, now: float) -> list[Any]:
        subscription = self._register.current.get(channel)
        return [] if subscription is None else [*self._drop(subscription, now), SubscriptionFailed(channel, reason)]

    def _listen_again(self, channel: bytes, server: str, _: float) -> list[Any]:
        subscription = self._register.current.get(channel)
        return [] if subscription is None else self._listening.listen_again(subscription, server)

    def _acknowledged(self, link: str, push: Sequence[Any], now: float) -> list[Any]:
        if push[0] == b"subscribe":
            return self._subscribed(link, push[1])
        if push[0] == b"unsubscribe":
            return self._unsubscribed(link, push[1], now)
        return []

    def _subscribed(self, link: str, physical: bytes) -> list[Any]:
        """A subscription takes effect: what came before on its channel was of an earlier one, or before a gap."""
        subscription = self._listening.links[link].places.get(physical)
        if subscription is None:
            return []
        if not subscription.confirmed:
            subscription.begin_anew()
            return []
        place = subscription.targets.get(Location(link, physical))
        if place is None or place.lost is None or subscription.unsubscribe_acks_pending:
            return []
        lost, place.lost = place.lost, None
        return [GapDetected(subscription.channel, None, None, lost)]

    def _unsubscribed(self, link_name: str, physical: bytes, now: float) -> list[Any]:
        """Note that the server has done an UNSUBSCRIBE, or refuses it: nothing more comes to what is ending."""
        link = self._listening.links[link_name]
        if not acknowledged(link.unsubscribing, physical):
            return []
        subscription = link.places.get(physical)
        if subscription is None or not subscription.unsubscribe_acks_pending:
            return []
        self._listening.forget(subscription, subscription.place(Location(link_name, physical)), now)
        return self._ended_if_gone(subscription, now)

    def _link_down(self, event: LinkDown, now: float) -> list[Any]:
        if not self._listening.is_up(event.link):  # one more attempt has failed
            for subscription, location in self._listening.attempt_failed(event.link):
                self._routing.unreachable(subscription, location, now)
            return []
        self._routing.forget_hints()
        reason = f"the connection to server {event.link} was lost: {event.reason}"
        actions: list[Any] = []
        for subscription, location in self._listening.link_down(event.link, now):
            if subscription.unsubscribe_acks_pending:  # nothing more comes from there
                self._listening.forget(subscription, subscription.place(location), now)
                actions += self._ended_if_gone(subscription, now)
            else:
                actions += self._routing.disconnected(subscription, location, reason, now)
        return actions

    def _forget_idle(self, now: float) -> list[Any]:
        """Forget, now and then, publishers of which nothing came for long; at the start there is none."""
        for subscription in self._register.current.values():
            subscription.sequences.forget_idle()
        self._register.forget()
        self._timers.add(now + self.options.stream_idle_s, self._forget_idle)
        return []
