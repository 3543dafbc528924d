"""The pattern machine: listens to patterns at every server, delivers once and in order.

Theory of operation
-------------------
A channel can be at any server, and nobody knows which channels match a pattern. So a pattern is subscribed to at every
server of the plan's header, over links that serve patterns only, under several *names* (``globs.physical_patterns``):
one for replicated channels, whose physical names carry a prefix, and one or more for all others.

* Behind the PSUBSCRIBE, on the same connection, the header of the stored plan is read: it lists every server of the
  cluster at that moment, and one that was not known is joined, too. A server where both are done is *verified*. When
  all are, the pattern is confirmed to the application. A server that has been away for ``failover_s`` is *excused*: the
  pattern is confirmed without it, with a gap event.
* While there are patterns, the header is read again at every server now and then. A server that it lists newly carries
  no channel for ``join_s``, counted from the last header that did not list it. A subscription that the new server takes
  in this time misses nothing.
* Beside each pattern a channel that is named after it is subscribed to, for ``pubsub_numpat``.

Every message is published at some server, and seen there. So nothing depends on dispatchers, on notices or on where
channels are. ``messages.py`` decides which message is delivered to which pattern.

After a lost connection every pattern is subscribed to again. The application gets a gap event for each confirmed
pattern when the server has taken the subscription: before any message that comes after the gap. If the server stays
away for ``failover_s``, the application gets the gap event then, and another one when the server is back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, assert_never

from dynamoth.errors import MalformedMessage
from dynamoth.machine.events import (
    Connect,
    Disconnect,
    ErrorReply,
    LinkDown,
    LinkUp,
    Pushed,
    Replied,
    Send,
    Start,
    Tick,
)
from dynamoth.machine.timers import Timers
from dynamoth.names import PATTERN_PREFIX, RESERVED_PREFIX
from dynamoth.protocol import stored_plan
from dynamoth_client.machines.local_plan import LocalPlan
from dynamoth_client.machines.patterns.events import (
    DeliverMatched,
    PatternAction,
    PatternEvent,
    PatternGapDetected,
    PatternMessage,
    PatternOptions,
    SubscribePatterns,
    UnsubscribePatterns,
)
from dynamoth_client.machines.patterns.messages import PatternMessages
from dynamoth_client.machines.patterns.subscription import NEVER, MatchedChannel, PatternLink, PatternSubscription
from dynamoth_client.machines.register import Register, State, acknowledge
from dynamoth_client.machines.standalone import ALONE, LOOK_INTERVAL_S
from dynamoth_client.machines.subscriber.events import SubscriptionEnded, SubscriptionFailed


class PatternMachine:
    """Subscribes to patterns for one PubSub. See the module's text.

    Promises for each confirmed pattern what the :class:`SubscriberMachine` promises for a channel. Confirmations, ends
    and failures are that machine's actions; their ``channel`` is the pattern.
    """

    def __init__(self, local_plan: LocalPlan, options: PatternOptions | None = None) -> None:
        """Make a subscriber.

        Args:
            local_plan: shared by the machines of the client.
            options: see :class:`PatternOptions`.

        """
        self.options = options or PatternOptions()
        self.counters: Counter[str] = Counter()
        self._plan = local_plan
        self._timers: Timers[PatternAction] = Timers()
        #: Pattern to subscription; remembers the numbers of delivered messages.
        self._register: Register[PatternSubscription, dict[bytes, MatchedChannel]] = Register(self.options.ended_max)
        self._links: dict[str, PatternLink] = {}
        #: Readings of headers so far; each has a number.
        self._readings = 0
        #: Servers whose header is to be read at the end of the present event.
        self._to_read: dict[str, None] = {}
        #: When the last pattern ended; None while there are some.
        self._idle_since: float | None = None
        #: Whether the timer runs that reads headers again.
        self._reads_headers = False
        self._messages = PatternMessages(self.options, self.counters, self._timers)

    def handle(self, event: PatternEvent, now: float) -> list[PatternAction]:
        """Handle one event; return the actions to execute, in order."""
        actions = self._handle(event, now)
        if self._to_read:
            actions += self._read_headers(now)
        return actions

    def _handle(self, event: PatternEvent, now: float) -> list[PatternAction]:
        match event:
            case Pushed():
                return self._on_pushed(event, now)
            case Replied():
                return self._on_reply(event, now)
            case SubscribePatterns():
                return [action for pattern in event.patterns for action in self._subscribe(pattern, now)]
            case UnsubscribePatterns():
                return [action for pattern in event.patterns for action in self._unsubscribe(pattern, now)]
            case LinkUp():
                return self._on_link_up(event, now)
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

    def _subscribe(self, pattern: bytes, now: float) -> list[PatternAction]:
        if (acks := self._register.subscribe(pattern)) is not None:
            return [*acks]
        if pattern.startswith(RESERVED_PREFIX):
            return [SubscriptionFailed(pattern, "names under this prefix are Dynamoth's own: choose another pattern")]
        actions = self._follow_servers(now)
        subscription = PatternSubscription(pattern, self._register.recall(pattern) or {})
        subscription.start_over()
        self._register.add(pattern, subscription)
        self._messages.add(subscription)
        self._idle_since = None
        if not self._reads_headers:
            self._read_headers_later(now)
        return [*actions, *(action for server in self._links for action in self._join(subscription, server, now))]

    def _unsubscribe(self, pattern: bytes, now: float) -> list[PatternAction]:
        if (acks := self._register.unsubscribe(pattern)) is not None:
            return [*acks]
        subscription = self._register.current[pattern]
        if subscription.state is State.JOINING:
            return [*self._end(subscription, now), SubscriptionEnded(pattern)]
        self._register.begin_to_end(pattern, subscription.channels)
        self._note_idle(now)
        lost = [reason for place in subscription.places.values() if (reason := place.take_lost()) is not None]
        actions: list[PatternAction] = [_gap(pattern, reason) for reason in lost[:1]]
        names = self._messages.unshared(subscription)
        for server in list(subscription.places):
            is_up = self._links[server].up
            if is_up:
                actions += self._send_punsubscribe(server, pattern, names)
            if not (is_up and names):
                subscription.leave(server)
        return [*actions, *self._end_if_left(subscription, now)]

    def _end(self, subscription: PatternSubscription, now: float) -> list[PatternAction]:
        """End a pattern at once; messages that are on their way are dropped."""
        self._register.end(subscription.pattern, subscription.channels)
        self._note_idle(now)
        names = self._messages.unshared(subscription)
        self._messages.remove(subscription)
        servers = [server for server in subscription.places if self._links[server].up]
        return [action for server in servers for action in self._send_punsubscribe(server, subscription.pattern, names)]

    def _note_idle(self, now: float) -> None:
        """Close the links later if no pattern is left."""
        if not self._register.current:
            self._idle_since = now
            self._timers.add(now + self.options.link_idle_s, self._close_idle)

    def _end_if_left(self, subscription: PatternSubscription, now: float) -> list[PatternAction]:
        """End an ending pattern when no server is left, and subscribe again if the application has."""
        if subscription.places:
            return []
        pattern = subscription.pattern
        acks, again = self._register.on_ended(pattern)
        self._messages.remove(subscription)
        return [*acks, *(action for _ in range(again) for action in self._subscribe(pattern, now))]

    # Servers.

    def _follow_servers(self, now: float) -> list[PatternAction]:
        """Open a link to each server of the plan, and close all others."""
        servers = self._plan.servers
        unlisted_at = min((link.read_at for link in self._links.values() if link.up), default=float("-inf"))
        unlisted = self._links.keys() - servers.keys()
        actions: list[PatternAction] = []
        for id_, link in list(self._links.items()):
            is_listed = id_ in servers and servers[id_].url == link.url
            if not is_listed and self._links.get(id_) is link:  # leaving one may confirm a pattern, which calls this
                actions += self._leave_server(id_, now)
        if ALONE in unlisted:  # others may have followed the plan before
            unlisted_at = float("-inf")
        for id_, server in servers.items():
            if id_ in self._links:
                continue
            self._links[id_] = PatternLink(server.url, down_since=now)
            actions.append(Connect(id_, server.url))
            self._timers.add(now + self.options.failover_s, self._fail_over, id_)
            join_until = unlisted_at + self.options.join_s
            if self._register.current and join_until > now + self.options.failover_s:
                self._timers.add(join_until, self._fail_over, id_)
            for subscription in self._register.current.values():
                actions += self._join(subscription, id_, now, join_until)
        return actions

    def _leave_server(self, server: str, now: float) -> list[PatternAction]:
        """Close the link to a server that the plan does not list any more."""
        del self._links[server]
        self._to_read.pop(server, None)
        actions: list[PatternAction] = [Disconnect(server)]
        for subscription in list(self._register.current.values()):
            place = subscription.leave(server)
            if place is not None and place.lost is not None:
                actions.append(_gap(subscription.pattern, place.lost))
        for subscription in list(self._register.ending.values()):
            actions += self._leave_ending(subscription, server, now)
        return actions

    def _leave_ending(self, subscription: PatternSubscription, server: str, now: float) -> list[PatternAction]:
        """Note that nothing more of an ending pattern comes from a server."""
        return [] if subscription.leave(server) is None else self._end_if_left(subscription, now)

    def _join(
        self, subscription: PatternSubscription, server: str, now: float, join_until: float = float("inf")
    ) -> list[PatternAction]:
        link = self._links[server]
        is_away = not link.up and now - link.down_since >= self.options.failover_s
        subscription.join(server, excused=is_away, join_until=join_until)
        return self._listen(subscription, server) if link.up else []

    def _listen(self, subscription: PatternSubscription, server: str) -> list[PatternAction]:
        """Subscribe and read the header, in this order, on one connection."""
        subscription.places[server].listen(self._readings + 1)
        self._to_read[server] = None
        command = (b"PSUBSCRIBE", *subscription.names)
        name = (b"SUBSCRIBE", PATTERN_PREFIX + subscription.pattern)
        return [Send(server, command, ("psubscribe", subscription.pattern)), Send(server, name, ("name",))]

    def _read_headers(self, now: float) -> list[PatternAction]:
        self._readings += 1
        reads: list[PatternAction] = [
            Send(server, stored_plan.READ_HEADER, ("header", self._readings, now))
            for server in self._to_read
            if self._links[server].up
        ]
        self._to_read.clear()
        return reads

    def _send_punsubscribe(self, server: str, pattern: bytes, names: tuple[bytes, ...]) -> list[PatternAction]:
        """End a pattern at a server; ``names`` are those that no other pattern needs."""
        name = Send(server, (b"UNSUBSCRIBE", PATTERN_PREFIX + pattern), ("name",))
        if not names:
            return [name]
        self._links[server].unsubscribe(names)
        return [name, Send(server, (b"PUNSUBSCRIBE", *names), ("punsubscribe", names))]

    def _on_link_up(self, event: LinkUp, now: float) -> list[PatternAction]:
        self._links[event.link].connect(event.run_id, now)
        actions: list[PatternAction] = []
        for subscription in self._register.current.values():
            subscription.places[event.link].excuse(is_away=False)
            actions += self._listen(subscription, event.link)
        return actions

    def _on_link_down(self, event: LinkDown, now: float) -> list[PatternAction]:
        link = self._links[event.link]
        if not link.up:
            return []
        link.disconnect(now)
        for subscription in self._register.current.values():
            place = subscription.places[event.link]
            place.disconnect(subscription.names)
            if subscription.state is State.JOINING:
                subscription.start_over()
            else:
                place.lose(f"the connection to server {event.link} was lost: {event.reason}")
        self._timers.add(now + self.options.failover_s, self._fail_over, event.link)
        ending = list(self._register.ending.values())
        return [action for each in ending for action in self._leave_ending(each, event.link, now)]

    def _fail_over(self, server: str, now: float) -> list[PatternAction]:
        """A server is still away, and may be for good: confirm patterns without it, and report the gap of others."""
        link = self._links.get(server)
        if link is None or link.up or now - link.down_since < self.options.failover_s:
            return []
        actions: list[PatternAction] = []
        for subscription in list(self._register.current.values()):
            place = subscription.places[server]
            if subscription.state is State.JOINING:
                place.excuse()
                actions += self._confirm(subscription, now)
                continue
            place.lose_if_late(server, now)
            if place.lost is not None:
                actions.append(_gap(subscription.pattern, place.lost))
        return actions

    # Replies.

    def _on_reply(self, event: Replied, now: float) -> list[PatternAction]:
        match event.tag:
            case ("header", number, asked_at):
                return self._on_header(event, number, asked_at, now)
            case ("psubscribe", pattern):
                return self._on_refused(event, pattern, now)
            case ("punsubscribe", names):
                self.counters["refused_commands"] += 1
                return [action for name in names for action in self._on_unsubscribed(event.link, name, now)]
            case ("name",):
                self.counters["refused_commands"] += 1
                return []
            case _:
                raise AssertionError(f"not a tag of a pattern subscriber: {event.tag!r}")

    def _on_refused(self, event: Replied, pattern: bytes, now: float) -> list[PatternAction]:
        """Handle an error, PSUBSCRIBE's only reply: final where permission is missing, else try again soon."""
        subscription = self._register.current.get(pattern)
        if subscription is None:
            return []
        if event.value.lacks_permission:
            return [*self._end(subscription, now), SubscriptionFailed(pattern, str(event.value))]
        self.counters["refused_commands"] += 1
        self._timers.add(now + self.options.retry_s, self._listen_again, subscription, event.link)
        return []

    def _on_header(self, event: Replied, number: int, asked_at: float, now: float) -> list[PatternAction]:
        server = event.link
        link = self._links[server]
        header = None
        if isinstance(event.value, ErrorReply):
            self.counters["refused_commands"] += 1
            if event.value.lacks_permission:
                return self._unreadable(str(event.value), now)
        else:
            try:
                header = stored_plan.parse_header(event.value, link.run_id)
            except MalformedMessage:
                self.counters["malformed_plans"] += 1
        actions: list[PatternAction] = []
        if header is not None and header.believed:
            self._plan.update_header(header.plan)
            actions += self._follow_servers(now)
            link.note_read(asked_at)
            if server not in self._links:
                return [*actions, *self._confirm_all(now)]
        elif self._plan.is_alone and stored_plan.is_absent(event.value):
            link.note_read(asked_at)
        else:
            self.counters["no_plan_at_server"] += 1
            if now - link.up_since < self.options.failover_s:
                self._timers.add(now + self.options.retry_s, self._read_later, server)
                return []
        for subscription in self._register.current.values():
            subscription.places[server].verify(number)
        return [*actions, *self._confirm_all(now)]

    def _unreadable(self, error: str, now: float) -> list[PatternAction]:
        """Without permission to read the plan no pattern can be confirmed."""
        reason = f"the stored plan cannot be read: {error}"
        waiting = [each for each in self._register.current.values() if each.state is State.JOINING]
        return [a for each in waiting for a in (*self._end(each, now), SubscriptionFailed(each.pattern, reason))]

    def _confirm_all(self, now: float) -> list[PatternAction]:
        waiting = [each for each in self._register.current.values() if each.state is State.JOINING]
        return [action for subscription in waiting for action in self._confirm(subscription, now)]

    def _confirm(self, subscription: PatternSubscription, now: float) -> list[PatternAction]:
        """Confirm a pattern if every server is verified or excused."""
        if not subscription.is_joined:
            return []
        pattern = subscription.pattern
        actions: list[PatternAction] = [*self._register.confirm(pattern, subscription, now)]
        away = [server for server, place in subscription.places.items() if not place.verified]
        if away:
            reason = f"subscribed without what is published at {', '.join(away)}, which cannot be reached"
            actions.append(_gap(pattern, reason))
        for server in away:
            subscription.places[server].lose(f"server {server} could not be reached")
        if early := subscription.take_early():
            actions.append(DeliverMatched(early))
        return actions

    # Messages.

    def _on_pushed(self, event: Pushed, now: float) -> list[PatternAction]:
        actions: list[PatternAction] = []
        expected: list[PatternMessage] = []
        on_message = self._messages.on_message
        for push in event.messages:
            if push[0] == b"pmessage":
                more = on_message(push, now, expected)
            else:
                more = self._on_acknowledgement(event.link, push, now)
            if more:
                if expected:
                    actions.append(DeliverMatched(expected))
                    expected = []
                actions += more
        if expected:
            actions.append(DeliverMatched(expected))
        return actions

    # Acknowledgements.

    def _on_acknowledgement(self, link: str, push: Sequence[Any], now: float) -> list[PatternAction]:
        if push[0] == b"psubscribe":
            return self._on_subscribed(link, push[1], now)
        if push[0] == b"punsubscribe":
            return self._on_unsubscribed(link, push[1], now)
        return []

    def _on_subscribed(self, link: str, name: bytes, now: float) -> list[PatternAction]:
        """A PSUBSCRIBE has taken effect: earlier messages were of a former one, or before a gap."""
        actions: list[PatternAction] = []
        for subscription in self._messages.users(name):
            place = subscription.places.get(link)
            if place is None or subscription.state is State.ENDING:
                continue
            if subscription.state is State.LISTENING:
                place.lose_if_late(link, now)
            place.acknowledge(name)
            if subscription.state is State.JOINING:
                subscription.start_over()
            elif (lost := place.take_lost()) is not None:
                actions.append(_gap(subscription.pattern, lost))
        return actions

    def _on_unsubscribed(self, server: str, name: bytes, now: float) -> list[PatternAction]:
        """A PUNSUBSCRIBE has taken effect, or was refused: nothing more comes for ending patterns of this name."""
        unsubscribing = self._links[server].unsubscribing
        if not acknowledge(unsubscribing, name):
            return []
        ending = [user for user in self._messages.users(name) if user.state is State.ENDING]
        left = [user for user in ending if unsubscribing.keys().isdisjoint(user.names)]
        return [action for subscription in left for action in self._leave_ending(subscription, server, now)]

    # Time.

    def _read_again(self, now: float) -> list[PatternAction]:
        """Look everywhere for servers that have come or gone."""
        self._reads_headers = bool(self._register.current)
        if not self._register.current:
            return []
        self._read_headers_later(now)
        actions = self._follow_servers(now)
        self._to_read.update(dict.fromkeys(self._links))
        return actions

    def _read_headers_later(self, now: float) -> None:
        self._reads_headers = True
        interval_s = LOOK_INTERVAL_S if self._plan.is_alone else self.options.header_interval_s
        self._timers.add(now + interval_s, self._read_again)

    def _read_later(self, server: str, _: float) -> list[PatternAction]:
        """Ask again a server that held no plan."""
        if self._register.current and server in self._links:
            self._to_read[server] = None
        return []

    def _listen_again(self, subscription: PatternSubscription, server: str, _: float) -> list[PatternAction]:
        is_up = server in self._links and self._links[server].up
        return self._listen(subscription, server) if subscription.is_current and is_up else []

    def _close_idle(self, now: float) -> list[PatternAction]:
        if self._idle_since is None or now - self._idle_since < self.options.link_idle_s:
            return []
        if self._register.ending:
            self._timers.add(now + self.options.link_idle_s, self._close_idle)
            return []
        closed: list[PatternAction] = [Disconnect(server) for server in self._links]
        self._links.clear()
        return closed

    def _forget_idle(self, now: float) -> list[PatternAction]:
        """Forget, now and then, publishers that have been silent for long; at the start there is none."""
        for subscription in self._register.current.values():
            for matched in subscription.channels.values():
                matched.sequences.forget_idle()
        self._register.forget()
        self._timers.add(now + self.options.stream_idle_s, self._forget_idle)
        return []

    # Invariants.

    def check(self) -> None:
        """Assert the invariants that hold between events: for tests and for the simulator."""
        current, ending = self._register.current, self._register.ending
        self._register.check()
        self._messages.check([*current.values(), *ending.values()])
        self._plan.check()
        assert not self._to_read, f"not read: {self._to_read}"
        assert not current or (self._idle_since is None and self._reads_headers), "there are patterns, and nobody reads"
        for pattern, subscription in current.items():
            assert subscription.places.keys() == self._links.keys(), f"{pattern!r} is not at every server"
            for server, place in subscription.places.items():
                is_behind = place.attempt != NEVER
                assert self._links[server].up == is_behind, f"{pattern!r} at {server}, up or not: {place}"
                assert self._links[server].up or place.missing == {*subscription.names}, f"{server} is down: {place}"
        for pattern, subscription in ending.items():
            assert subscription.places, f"{pattern!r} is ending and listens nowhere"
            for server in subscription.places:
                assert self._links[server].unsubscribing, f"{server} has acknowledged the end of {pattern!r}"
        for server, link in self._links.items():
            assert link.up or not link.unsubscribing, f"{server} is down: {link}"


def _gap(pattern: bytes, reason: str) -> PatternGapDetected:
    """Return the gap of all channels of a pattern."""
    return PatternGapDetected(pattern, None, None, None, reason)
