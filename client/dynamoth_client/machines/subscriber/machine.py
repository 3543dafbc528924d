"""The subscriber machine: listens in the right places, moves make-before-break, delivers once and in order.

Theory of operation
-------------------
For each channel there is a :class:`Subscription` (``subscription.py`` has the table of its states), with the route that
it follows and *places*, the locations where it listens. The parts of the machine share this state:

* :class:`Register`: what the application has subscribed to and ended, and the acknowledgements that it waits for;
* :class:`Routing`: which route a subscription follows, and how it moves to a newer one;
* :class:`Listening`: the links, and SUBSCRIBE and UNSUBSCRIBE on them;
* :class:`ChannelMessages`: the messages that come over the links, and go out as :class:`Deliver`;
* :class:`Barriers`: when everything from before a moment has come.

The machine itself begins and ends subscriptions. A subscription has ended when the servers of all its places have
acknowledged UNSUBSCRIBE: messages that were on their way are delivered before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, assert_never

from dynamoth.machine.events import ErrorReply, LinkDown, LinkUp, Pushed, Replied, Start, Tick
from dynamoth.machine.timers import Timers
from dynamoth.names import is_own_channel
from dynamoth.plan.plan import Location
from dynamoth_client.machines.local_plan import LocalPlan
from dynamoth_client.machines.register import Register, State
from dynamoth_client.machines.sequences import Sequences
from dynamoth_client.machines.subscriber.barriers import Barriers
from dynamoth_client.machines.subscriber.events import (
    GapDetected,
    RaiseBarrier,
    Subscribe,
    SubscriberAction,
    SubscriberEvent,
    SubscriberOptions,
    SubscriptionEnded,
    SubscriptionFailed,
    Unsubscribe,
)
from dynamoth_client.machines.subscriber.listening import Listening
from dynamoth_client.machines.subscriber.messages import ChannelMessages
from dynamoth_client.machines.subscriber.part import Shared
from dynamoth_client.machines.subscriber.routing import Routing
from dynamoth_client.machines.subscriber.subscription import Subscription


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
        self._timers: Timers[SubscriberAction] = Timers()
        #: Channel to subscription; remembers the numbers of delivered messages.
        self._register: Register[Subscription, Sequences] = Register(self.options.ended_max)
        #: Whether the timer runs that looks for a plan while a server is alone.
        self._looks_for_plan = False
        shared = Shared(client_id, local_plan, self.options, self.counters, self._register, self._timers)
        self._listening = Listening(shared)
        self._routing = Routing(shared, self._listening)
        self._messages = ChannelMessages(shared, self._listening, self._routing, self._on_acknowledgement)
        self._barriers = Barriers(shared, self._listening)
        #: The machine's :class:`~dynamoth.machine.events.DirectDelivery`.
        self.take_expected = self._messages.take_expected

    def handle(self, event: SubscriberEvent, now: float) -> list[SubscriberAction]:
        """Handle one event; return the actions to execute, in order."""
        actions = self._handle(event, now)
        if self._listening.unannounced:
            actions += self._listening.announce()
        return actions

    def _handle(self, event: SubscriberEvent, now: float) -> list[SubscriberAction]:
        match event:
            case Pushed():
                return self._messages.on_pushed(event, now)
            case Replied():
                return self._on_reply(event, now)
            case Subscribe():
                return [action for channel in event.channels for action in self._subscribe(channel, now)]
            case Unsubscribe():
                return [action for channel in event.channels for action in self._unsubscribe(channel, now)]
            case RaiseBarrier(channel):
                return self._barriers.begin(channel, now)
            case LinkUp():
                return self._listening.on_link_up(event.link, event.run_id)
            case LinkDown():
                return self._on_link_down(event, now)
            case Tick():
                return self._timers.run_due(now)
            case Start():
                return self._forget_idle(now)
            case _:
                assert_never(event)

    def deadline(self) -> float | None:
        """Return the time of the earliest timer."""
        return self._timers.next_at

    # The application.

    def _subscribe(self, channel: bytes, now: float) -> list[SubscriberAction]:
        if (acks := self._register.subscribe(channel)) is not None:
            return [*acks]
        if is_own_channel(channel):
            return [SubscriptionFailed(channel, "channels under this prefix are Dynamoth's own: choose another name")]
        sequences = self._register.recall(channel) or Sequences(self.options.hold_s_max)
        subscription = Subscription(channel, self._plan.route(channel), sequences, now)
        subscription.start_over()
        self._register.add(channel, subscription)
        self._plan.pin(channel)
        looks = self._begin_to_look(now)
        return [*looks, *self._routing.begin(subscription, now)]

    def _begin_to_look(self, now: float) -> list[SubscriberAction]:
        """While a server is alone, look for a plan from the first subscription on."""
        if not self._plan.is_alone or self._looks_for_plan:
            return []
        self._looks_for_plan = True
        return self._routing.look_for_plan(now)

    def _unsubscribe(self, channel: bytes, now: float) -> list[SubscriberAction]:
        if (acks := self._register.unsubscribe(channel)) is not None:
            return [*acks]
        subscription = self._register.current[channel]
        if subscription.state is State.JOINING:
            return [*self._end(subscription, now), SubscriptionEnded(channel)]
        actions = self._routing.report_missed(subscription)
        self._register.begin_to_end(channel, subscription.sequences)
        self._plan.unpin(channel, now)
        for place in subscription.places:
            if self._listening.is_up(place.location.server):
                actions += self._listening.unsubscribe(place.location)
            else:
                self._listening.forget(subscription, place, now)
        return [*actions, *self._end_if_left(subscription, now)]

    def _end(self, subscription: Subscription, now: float) -> list[SubscriberAction]:
        """End a subscription at once; messages that are on their way are dropped."""
        self._register.end(subscription.channel, subscription.sequences)
        self._plan.unpin(subscription.channel, now)
        return [action for place in subscription.places for action in self._listening.leave(subscription, place, now)]

    def _end_if_left(self, subscription: Subscription, now: float) -> list[SubscriberAction]:
        """End an ending subscription when no place is left, and subscribe again if the application has."""
        if subscription.places:
            return []
        channel = subscription.channel
        acks, again = self._register.on_ended(channel)
        return [*acks, *(action for _ in range(again) for action in self._subscribe(channel, now))]

    # Replies of servers.

    def _on_reply(self, event: Replied, now: float) -> list[SubscriberAction]:
        match event.tag:
            case ("verify", channel, location, attempt):
                actions = self._on_verification(channel, location, attempt, event.value, now)
                return [*actions, *self._barriers.on_reply(channel, now)]
            case ("elsewhere", channel, location):
                return self._on_entry_elsewhere(channel, location, event, now)
            case ("subscribe", channel):
                return self._on_subscribe_refused(channel, event, now)
            case ("unsubscribe", physical):
                self.counters["refused_commands"] += 1
                return self._on_unsubscribed(event.link, physical, now)
            case ("alone", name):
                return self._routing.on_alone_answer(name, now)
            case ("header",):
                return self._routing.on_header(event.link, event.value, now)
            case ("inbox",):
                self.counters["refused_commands"] += 1
                return []
            case _:
                raise AssertionError(f"not a tag of a subscriber: {event.tag!r}")

    def _on_verification(
        self, channel: bytes, location: Location, attempt: int, reply: Any, now: float
    ) -> list[SubscriberAction]:
        """Handle the entry that the server of a target stores, if it could be read."""
        subscription = self._register.current.get(channel)
        place = subscription.targets.get(location) if subscription is not None else None
        if subscription is None or place is None or place.attempt != attempt:
            return []
        place.answer()
        if not isinstance(reply, ErrorReply):
            return self._routing.on_verification(subscription, place, reply, now)
        self.counters["refused_commands"] += 1
        if reply.lacks_permission and subscription.state is State.JOINING:
            return self._fail(channel, f"the stored plan cannot be read: {reply}", now)
        return self._routing.verify_later(subscription, place, now)

    def _on_entry_elsewhere(
        self, channel: bytes, location: Location, event: Replied, now: float
    ) -> list[SubscriberAction]:
        """Handle an entry that was read at another server, if the place in question is still out of reach."""
        subscription = self._register.current.get(channel)
        if subscription is None or location not in subscription.targets or self._listening.is_up(location.server):
            return []
        if isinstance(event.value, ErrorReply):
            self.counters["refused_commands"] += 1
            return []
        return self._routing.on_entry_elsewhere(subscription, event.link, event.value, now)

    def _on_subscribe_refused(self, channel: bytes, event: Replied, now: float) -> list[SubscriberAction]:
        """Handle an error, SUBSCRIBE's only reply: final where permission is missing, else try again soon."""
        if event.value.lacks_permission:
            return self._fail(channel, str(event.value), now)
        self.counters["refused_commands"] += 1
        self._timers.add(now + self.options.verify_retry_s, self._listen_again, channel, event.link)
        return []

    def _fail(self, channel: bytes, reason: str, now: float) -> list[SubscriberAction]:
        subscription = self._register.current.get(channel)
        return [] if subscription is None else [*self._end(subscription, now), SubscriptionFailed(channel, reason)]

    def _listen_again(self, channel: bytes, server: str, _: float) -> list[SubscriberAction]:
        subscription = self._register.current.get(channel)
        return [] if subscription is None else self._listening.listen_again(subscription, server)

    def _on_acknowledgement(self, link: str, push: Sequence[Any], now: float) -> list[SubscriberAction]:
        if push[0] == b"subscribe":
            return self._on_subscribed(link, push[1])
        if push[0] == b"unsubscribe":
            return self._on_unsubscribed(link, push[1], now)
        return []

    def _on_subscribed(self, link: str, physical: bytes) -> list[SubscriberAction]:
        """A SUBSCRIBE has taken effect: earlier messages were of a former one, or before a gap."""
        subscription = self._listening.links[link].places.get(physical)
        if subscription is None:
            return []
        if subscription.state is State.JOINING:
            subscription.start_over()
            return []
        place = subscription.targets.get(Location(link, physical))
        lost = None if place is None else place.take_lost()
        return [] if lost is None else [GapDetected(subscription.channel, None, None, lost)]

    def _on_unsubscribed(self, link: str, physical: bytes, now: float) -> list[SubscriberAction]:
        """An UNSUBSCRIBE has taken effect, or was refused: nothing more comes to a place of an ending subscription."""
        subscription = self._listening.on_unsubscribed(link, physical)
        if subscription is None or subscription.state is not State.ENDING:
            return []
        return self._leave_ending(subscription, Location(link, physical), now)

    def _leave_ending(self, subscription: Subscription, location: Location, now: float) -> list[SubscriberAction]:
        self._listening.forget(subscription, subscription.place(location), now)
        return self._end_if_left(subscription, now)

    def _on_link_down(self, event: LinkDown, now: float) -> list[SubscriberAction]:
        if not self._listening.is_up(event.link):  # one more attempt has failed
            for subscription, location in self._listening.on_attempt_failed(event.link):
                self._routing.on_unreachable(subscription, location, now)
            return []
        self._routing.forget_hints()
        reason = f"the connection to server {event.link} was lost: {event.reason}"
        actions: list[SubscriberAction] = []
        for subscription, location in self._listening.on_link_down(event.link, now):
            if subscription.state is State.ENDING:  # nothing more comes from there
                actions += self._leave_ending(subscription, location, now)
            else:
                actions += self._routing.on_disconnect(subscription, subscription.place(location), reason, now)
        return [*actions, *self._barriers.on_link_down(event.link, now)]

    def _forget_idle(self, now: float) -> list[SubscriberAction]:
        """Forget, now and then, publishers that have been silent for long; at the start there is none."""
        for subscription in self._register.current.values():
            subscription.sequences.forget_idle()
        self._register.forget()
        self._timers.add(now + self.options.stream_idle_s, self._forget_idle)
        return []

    # Invariants.

    def check(self) -> None:
        """Assert the invariants that hold between events: for tests and for the simulator."""
        self._register.check()
        self._listening.check([*self._register.current.values(), *self._register.ending.values()])
        self._messages.check()
        self._plan.check()
        for subscription in self._register.current.values():
            self._routing.check(subscription)
            assert self._plan.is_pinned(subscription.channel), f"the route of {subscription.channel!r} may be forgotten"
