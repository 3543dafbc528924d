"""The pattern machine: listens to patterns at every server, delivers once and in order.

Theory of operation
-------------------
A channel can be anywhere, and nobody says which channels match a pattern. So a pattern is subscribed to at every server
of the plan's header, over links that serve patterns only, under several *names* (``_glob.physical_patterns``): one for
replicated channels, whose physical names carry a prefix, and one or more for all others.

* Behind the PSUBSCRIBE, on the same connection, the header of the stored plan is read: it lists every server of the
  cluster at that moment, and one that was not known is joined, too. A server where both are done is *verified*. When
  all are, the pattern is confirmed to the application. One that has been away for ``failover_s`` is done without, and
  the application is told.
* While there are patterns, the header is read again at every server now and then. A server that it lists newly carries
  no channel for ``join_s``: who is subscribed there before that, counted from when no header listed it, misses nothing.
* Beside each pattern a channel that is named after it is subscribed to, for ``pubsub_numpat``.

Whatever is published reaches some server, where it is seen; so nothing depends on dispatchers, on notices or on where
channels are. Which message is delivered to which pattern is decided in ``pattern_messages.py``.

After a lost connection everything is subscribed to again. The application gets a gap event for each confirmed pattern
when the server has taken the subscription: before any message that comes after the gap. If that has not happened after
``failover_s``, it may never: the application is told then, and once more when the server is back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
from dynamoth.plan.plan import JOIN_S
from dynamoth.protocol import stored_plan
from dynamoth_client.machines.local_plan import LocalPlan
from dynamoth_client.machines.patterns.messages import DeliverMatched, PatternGapDetected, PatternMessages
from dynamoth_client.machines.patterns.subscription import (
    MatchedChannel,
    PatternLink,
    PatternMessage,
    PatternPlace,
    PatternSubscription,
)
from dynamoth_client.machines.register import Register
from dynamoth_client.machines.standalone import ALONE, LOOK_INTERVAL_S
from dynamoth_client.machines.subscriber.events import SubscriptionEnded, SubscriptionFailed
from dynamoth_client.machines.subscriber.subscription import acknowledged


@dataclass(frozen=True, slots=True)
class PatternOptions:
    """What a pattern subscriber may choose."""

    hold_s_max: float = 0.5
    """How long a message waits for an earlier one of its publisher before the gap is reported."""
    header_interval_s: float = 3.0
    """How often each server is asked for the servers of the plan."""
    retry_s: float = 0.1
    """How soon a server is asked again that held no plan, or refused for the moment."""
    failover_s: float = 5.0
    """How long a server may be away, or hold no plan, before a pattern is confirmed without it; and how long it may be
    away before the application is told of the gap."""
    join_s: float = JOIN_S
    """A server carries no channel for so long after the plan has listed it: who joins it in time has missed nothing."""
    link_idle_s: float = 30.0
    """The links are closed so long after the last pattern."""
    stream_idle_s: float = 600.0
    """A publisher of which nothing came for so long (up to twice that) is forgotten."""
    channels_max: int = 10_000
    """Channels per pattern of which is remembered what was delivered; past it the longest idle quarter is forgotten. A
    channel of which something is held is not: ``hold_s_max`` bounds that."""
    ended_max: int = 100
    """Patterns that were unsubscribed and whose numbers are remembered at most, for a new subscription."""


@dataclass(slots=True)
class SubscribePatterns:
    """Event: the application subscribes. Each pattern is confirmed once per time that it is named."""

    patterns: tuple[bytes, ...]


@dataclass(slots=True)
class UnsubscribePatterns:
    """Event: the application unsubscribes."""

    patterns: tuple[bytes, ...]


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
        self._timers: Timers[Any] = Timers()
        #: Pattern to subscription; remembers the channels that matched.
        self._register: Register[PatternSubscription, dict[bytes, MatchedChannel]] = Register(self.options.ended_max)
        self._links: dict[str, PatternLink] = {}
        #: Readings of headers so far; each has a number.
        self._readings = 0
        #: Servers whose header is to be read at the end of the present event.
        self._to_read: dict[str, None] = {}
        #: When the last pattern went; None while there are some.
        self._idle_since: float | None = None
        self._reads_headers = False
        self._messages = PatternMessages(
            self.options.hold_s_max, self.options.channels_max, self.counters, self._register, self._timers
        )

    def handle(self, event: Any, now: float) -> list[Any]:
        """Take one event; return the actions to execute, in order."""
        match event:
            case Pushed():
                actions = self._pushed(event, now)
            case Replied():
                actions = self._replied(event, now)
            case SubscribePatterns():
                actions = [action for pattern in event.patterns for action in self._subscribe(pattern, now)]
            case UnsubscribePatterns():
                actions = [action for pattern in event.patterns for action in self._unsubscribe(pattern, now)]
            case LinkUp():
                actions = self._link_up(event, now)
            case LinkDown():
                actions = self._link_down(event, now)
            case Tick():
                actions = self._timers.run_due(now)
            case Start():
                actions = self._forget_idle(now)
            case _:
                raise AssertionError(f"not an event of a pattern subscriber: {event!r}")
        if self._to_read:
            actions += self._read_headers(now)
        return actions

    def deadline(self) -> float | None:
        """Return the time of the earliest wish."""
        return self._timers.next_at

    # The application.

    def _subscribe(self, pattern: bytes, now: float) -> list[Any]:
        if (told := self._register.subscribe(pattern)) is not None:
            return told
        if pattern.startswith(RESERVED_PREFIX):
            return [SubscriptionFailed(pattern, "names under this prefix are Dynamoth's own: choose another pattern")]
        actions = self._follow_servers(now)
        subscription = PatternSubscription(pattern, self._register.recall(pattern) or {})
        subscription.begin_anew()
        self._register.add(pattern, subscription)
        self._messages.add(subscription)
        self._idle_since = None
        if not self._reads_headers:
            self._reads_headers = True
            interval_s = LOOK_INTERVAL_S if self._plan.is_alone else self.options.header_interval_s
            self._timers.add(now + interval_s, self._read_again)
        return [*actions, *(action for server in self._links for action in self._join(subscription, server, now))]

    def _unsubscribe(self, pattern: bytes, now: float) -> list[Any]:
        if (told := self._register.unsubscribe(pattern)) is not None:
            return told
        subscription = self._register.current[pattern]
        if not subscription.confirmed:
            return [*self._drop(subscription, now), SubscriptionEnded(pattern)]
        self._remove(subscription, now)
        self._register.begin_to_end(pattern, subscription)
        lost = next((place.lost for place in subscription.places.values() if place.lost is not None), None)
        actions: list[Any] = [] if lost is None else [PatternGapDetected(pattern, None, None, None, lost)]
        for server in list(subscription.places):
            names = self._messages.unshared(subscription)
            if self._links[server].up:
                actions += self._send_punsubscribe(server, pattern, names)
            if not (self._links[server].up and names):
                del subscription.places[server]
        return [*actions, *self._ended_if_gone(subscription, now)]

    def _drop(self, subscription: PatternSubscription, now: float) -> list[Any]:
        """End a pattern at once, whatever is on its way."""
        self._remove(subscription, now)
        names = self._messages.unshared(subscription)
        self._messages.remove(subscription)
        servers = [server for server in subscription.places if self._links[server].up]
        return [action for server in servers for action in self._send_punsubscribe(server, subscription.pattern, names)]

    def _remove(self, subscription: PatternSubscription, now: float) -> None:
        self._register.remove(subscription.pattern, subscription.channels)
        if not self._register.current:
            self._idle_since = now
            self._timers.add(now + self.options.link_idle_s, self._close_idle)

    def _ended_if_gone(self, subscription: PatternSubscription, now: float) -> list[Any]:
        """Tell the application of the end when no server is left; begin anew if it has subscribed again."""
        if subscription.places:
            return []
        pattern = subscription.pattern
        ended, again = self._register.ended(pattern)
        self._messages.remove(subscription)
        return [*ended, *(action for _ in range(again) for action in self._subscribe(pattern, now))]

    # Servers.

    def _follow_servers(self, now: float) -> list[Any]:
        """Have a link to each server of the plan, and to no other."""
        servers = self._plan.servers
        unlisted_at = min((link.read_at for link in self._links.values() if link.up), default=float("-inf"))
        unlisted = self._links.keys() - servers.keys()
        actions: list[Any] = []
        for id_, link in list(self._links.items()):
            is_listed = id_ in servers and servers[id_].url == link.url
            if (
                not is_listed and self._links.get(id_) is link
            ):  # leaving one may let a pattern begin anew, and call this
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
                actions += self._join(subscription, id_, now)
                subscription.places[id_].join_until = join_until
        return actions

    def _leave_server(self, server: str, now: float) -> list[Any]:
        """Close the link to a server that the plan does not list any more."""
        del self._links[server]
        self._to_read.pop(server, None)
        actions: list[Any] = [Disconnect(server)]
        for subscription in list(self._register.current.values()):
            place = subscription.places.pop(server)
            if subscription.confirmed and place.lost is not None:
                actions.append(PatternGapDetected(subscription.pattern, None, None, None, place.lost))
        for subscription in list(self._register.ending.values()):
            actions += self._left(subscription, server, now)
        return actions

    def _left(self, subscription: PatternSubscription, server: str, now: float) -> list[Any]:
        """Note that nothing more of an ending pattern comes from a server."""
        if subscription.places.pop(server, None) is None:
            return []
        return self._ended_if_gone(subscription, now)

    def _join(self, subscription: PatternSubscription, server: str, now: float) -> list[Any]:
        place = subscription.places[server] = PatternPlace(set(subscription.names))
        link = self._links[server]
        if link.up:
            return self._listen(subscription, server)
        place.excused = now - link.down_since >= self.options.failover_s
        return []

    def _listen(self, subscription: PatternSubscription, server: str) -> list[Any]:
        """Subscribe and read the header, in this order, on one connection."""
        subscription.places[server].attempt = self._readings + 1
        self._to_read[server] = None
        command = (b"PSUBSCRIBE", *subscription.names)
        name = (b"SUBSCRIBE", PATTERN_PREFIX + subscription.pattern)
        return [Send(server, command, ("psubscribe", subscription.pattern)), Send(server, name, ("name",))]

    def _read_headers(self, now: float) -> list[Any]:
        self._readings += 1
        reads = [
            Send(server, stored_plan.READ_HEADER, ("header", self._readings, now))
            for server in self._to_read
            if self._links[server].up
        ]
        self._to_read.clear()
        return reads

    def _send_punsubscribe(self, server: str, pattern: bytes, names: tuple[bytes, ...]) -> list[Any]:
        """End a pattern at a server; ``names`` are those that no other pattern needs."""
        name = Send(server, (b"UNSUBSCRIBE", PATTERN_PREFIX + pattern), ("name",))
        if not names:
            return [name]
        self._links[server].unsubscribing.update(names)
        return [name, Send(server, (b"PUNSUBSCRIBE", *names), ("punsubscribe", names))]

    def _link_up(self, event: LinkUp, now: float) -> list[Any]:
        link = self._links[event.link]
        link.up = True
        link.up_since = now
        link.run_id = event.run_id
        actions: list[Any] = []
        for subscription in self._register.current.values():
            subscription.places[event.link].excused = False
            actions += self._listen(subscription, event.link)
        return actions

    def _link_down(self, event: LinkDown, now: float) -> list[Any]:
        link = self._links[event.link]
        if not link.up:
            return []
        link.up = False
        link.down_since = now
        link.unsubscribing.clear()
        for subscription in self._register.current.values():
            place = subscription.places[event.link]
            place.disconnected(subscription.names)
            if subscription.confirmed:
                place.lost = place.lost or f"the connection to server {event.link} was lost: {event.reason}"
            else:
                subscription.begin_anew()
        self._timers.add(now + self.options.failover_s, self._fail_over, event.link)
        return [a for ending in list(self._register.ending.values()) for a in self._left(ending, event.link, now)]

    def _fail_over(self, server: str, now: float) -> list[Any]:
        """A server is still away, and may be for good: confirm what waits for it, and tell of what was missed there."""
        link = self._links.get(server)
        if link is None or link.up or now - link.down_since < self.options.failover_s:
            return []
        actions: list[Any] = []
        for subscription in list(self._register.current.values()):
            place = subscription.places[server]
            if not subscription.confirmed:
                place.excused = True
                actions += self._confirm(subscription, now)
                continue
            if now >= place.join_until:
                place.lost = place.lost or f"server {server} was not known before"
            if place.lost is not None:
                actions.append(PatternGapDetected(subscription.pattern, None, None, None, place.lost))
        return actions

    # Replies.

    def _replied(self, event: Replied, now: float) -> list[Any]:
        match event.tag:
            case ("header", number, asked_at):
                return self._header_read(event, number, asked_at, now)
            case ("psubscribe", pattern):
                return self._refused(event, pattern, now)
            case ("punsubscribe", names):
                self.counters["refused_commands"] += 1
                return [action for name in names for action in self._unsubscribed(event.link, name, now)]
            case ("name",):
                self.counters["refused_commands"] += 1
                return []
            case _:
                raise AssertionError(f"not a tag of a pattern subscriber: {event.tag!r}")

    def _refused(self, event: Replied, pattern: bytes, now: float) -> list[Any]:
        """PSUBSCRIBE has no reply but an error: final where permission is missing, for a while where it is busy."""
        subscription = self._register.current.get(pattern)
        if subscription is None:
            return []
        if event.value.lacks_permission:
            return [*self._drop(subscription, now), SubscriptionFailed(pattern, str(event.value))]
        self.counters["refused_commands"] += 1
        self._timers.add(now + self.options.retry_s, self._listen_again, subscription, event.link)
        return []

    def _header_read(self, event: Replied, number: int, asked_at: float, now: float) -> list[Any]:
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
        actions: list[Any] = []
        if header is not None and header.believed:
            self._plan.update_header(header.plan)
            actions += self._follow_servers(now)
            link.read_at = asked_at
            if server not in self._links:
                return [*actions, *self._confirm_all(now)]
        elif self._plan.is_alone and stored_plan.is_absent(event.value):
            link.read_at = asked_at
        else:
            self.counters["no_plan_at_server"] += 1
            if now - link.up_since < self.options.failover_s:
                self._timers.add(now + self.options.retry_s, self._read_later, server)
                return []
        for subscription in self._register.current.values():
            place = subscription.places[server]
            place.verified = place.verified or (number >= place.attempt and not place.missing)
        return [*actions, *self._confirm_all(now)]

    def _unreadable(self, error: str, now: float) -> list[Any]:
        """Without permission to read the plan no pattern can be confirmed."""
        reason = f"the stored plan cannot be read: {error}"
        waiting = [each for each in self._register.current.values() if not each.confirmed]
        return [a for each in waiting for a in (*self._drop(each, now), SubscriptionFailed(each.pattern, reason))]

    def _confirm_all(self, now: float) -> list[Any]:
        waiting = [each for each in self._register.current.values() if not each.confirmed]
        return [action for subscription in waiting for action in self._confirm(subscription, now)]

    def _confirm(self, subscription: PatternSubscription, now: float) -> list[Any]:
        """Tell the application, if every server is verified or excused."""
        if not subscription.joined():
            return []
        pattern = subscription.pattern
        actions: list[Any] = [*self._register.confirm(pattern, subscription, now)]
        away = [server for server, place in subscription.places.items() if not place.verified]
        if away:
            reason = f"subscribed without what is published at {', '.join(away)}, which cannot be reached"
            actions.append(PatternGapDetected(pattern, None, None, None, reason))
        for server in away:
            subscription.places[server].lost = f"server {server} could not be reached"
        if subscription.early:
            actions.append(DeliverMatched(subscription.early))
            subscription.early = []
        return actions

    # Messages.

    def _pushed(self, event: Pushed, now: float) -> list[Any]:
        actions: list[Any] = []
        delivered: list[PatternMessage] = []
        take = self._messages.take
        for push in event.messages:
            more = take(push, now, delivered) if push[0] == b"pmessage" else self._acknowledged(event.link, push, now)
            if more:
                if delivered:
                    actions.append(DeliverMatched(delivered))
                    delivered = []
                actions += more
        if delivered:
            actions.append(DeliverMatched(delivered))
        return actions

    # Acknowledgements.

    def _acknowledged(self, link: str, push: Sequence[Any], now: float) -> list[Any]:
        if push[0] == b"psubscribe":
            return self._subscribed(link, push[1], now)
        if push[0] == b"punsubscribe":
            return self._unsubscribed(link, push[1], now)
        return []

    def _subscribed(self, link: str, name: bytes, now: float) -> list[Any]:
        """A subscription takes effect: what came before was of an earlier one, or before a gap."""
        actions: list[Any] = []
        for subscription in self._messages.users(name):
            place = subscription.places.get(link)
            if place is None or subscription.unsubscribe_acks_pending:
                continue
            place.missing.discard(name)
            if subscription.confirmed and now >= place.join_until:
                place.lost = place.lost or f"server {link} was not known before"
            if place.lost is not None or not place.missing:
                place.join_until = float("inf")
            if not subscription.confirmed:
                subscription.begin_anew()
            elif place.lost is not None:
                actions.append(PatternGapDetected(subscription.pattern, None, None, None, place.lost))
                place.lost = None
        return actions

    def _unsubscribed(self, link_name: str, name: bytes, now: float) -> list[Any]:
        """Note that the server has done a PUNSUBSCRIBE, or refuses it: nothing more comes to what is ending."""
        link = self._links[link_name]
        if not acknowledged(link.unsubscribing, name):
            return []
        ending = [user for user in self._messages.users(name) if user.unsubscribe_acks_pending]
        done = [user for user in ending if link.unsubscribing.keys().isdisjoint(user.names)]
        return [action for subscription in done for action in self._left(subscription, link_name, now)]

    # Time.

    def _read_again(self, now: float) -> list[Any]:
        """Look everywhere for servers that have come or gone."""
        self._reads_headers = bool(self._register.current)
        if not self._register.current:
            return []
        interval_s = LOOK_INTERVAL_S if self._plan.is_alone else self.options.header_interval_s
        self._timers.add(now + interval_s, self._read_again)
        actions = self._follow_servers(now)
        self._to_read.update(dict.fromkeys(self._links))
        return actions

    def _read_later(self, server: str, _: float) -> list[Any]:
        """Ask again a server that held no plan."""
        if self._register.current and server in self._links:
            self._to_read[server] = None
        return []

    def _listen_again(self, subscription: PatternSubscription, server: str, _: float) -> list[Any]:
        current = self._register.is_current(subscription.pattern, subscription)
        if not current or server not in self._links or not self._links[server].up:
            return []
        return self._listen(subscription, server)

    def _close_idle(self, now: float) -> list[Any]:
        if self._idle_since is None or now - self._idle_since < self.options.link_idle_s:
            return []
        if self._register.ending:
            self._timers.add(now + self.options.link_idle_s, self._close_idle)
            return []
        closed = [Disconnect(server) for server in self._links]
        self._links.clear()
        return closed

    def _forget_idle(self, now: float) -> list[Any]:
        """Forget, now and then, publishers of which nothing came for long; at the start there is none."""
        for subscription in self._register.current.values():
            for matched in subscription.channels.values():
                matched.sequences.forget_idle()
        self._register.forget()
        self._timers.add(now + self.options.stream_idle_s, self._forget_idle)
        return []
