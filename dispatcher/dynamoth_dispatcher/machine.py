"""The dispatcher machine: forwards and redirects at one server.

Theory of operation
-------------------
It observes everything that is published at its server (``observation``) and holds the whole plan. A publication for
which nothing is to be done costs one look-up in ``_at_rest``. Any other is looked at: whoever sent it by an old route
is told, and it is forwarded where ``missing`` says, in the order of observation, through one outbox per server.

The plan comes from the copy stored at the server, whole when the link comes up, and in deltas behind each change that
the balancer stores. What is observed before the plan has come waits for it.

For a channel in transition here it also tells the listeners of an old location, sends markers to who joins a new one,
and reports an old location that nobody listens at any more (``transitions``).

What is published at all new locations (ALL_PUBLISHERS) is forwarded to the old ones by the dispatchers of all. They
*relay* it: each gives it to the dispatcher of the old location, which publishes it once. One of them does so at once;
the others, in case it cannot or has not got the message, a little later, many messages together.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from dynamoth.errors import MalformedMessage, PlanError
from dynamoth.machine.bounded import ENTRY_BYTES, BoundedTable
from dynamoth.machine.events import (
    ErrorReply,
    LinkDown,
    LinkUp,
    Pushed,
    Replied,
    RepliedAll,
    Send,
    Start,
    Tick,
    earliest,
)
from dynamoth.machine.outbox import Outbox
from dynamoth.names import (
    AGENT_CHANNEL,
    ANNOUNCE_CHANNEL,
    BALANCER_CHANNEL,
    CLIENTS_CHANNEL,
    NOTIFICATION_PREFIXES,
    RELAY_PREFIX,
    forwarded_channel,
    inbox,
    is_user_channel,
    logical_channel,
)
from dynamoth.plan.plan import Entry, Location, Phase, Plan, Route
from dynamoth.protocol import stored_plan
from dynamoth.protocol.control import (
    Announcement,
    ForwardRequest,
    LossNotice,
    Marker,
    PlanAck,
    PlanChange,
    PlanQuery,
    RouteNotice,
    RulesChanged,
    Vacated,
    pack_control,
    seal_control,
    unpack_control,
)
from dynamoth.protocol.envelope import (
    CONTROL,
    FIRST,
    FORWARDED,
    HEARTBEAT,
    RAW,
    ROUTE_CHANGED,
    Envelope,
    forwarded,
    is_enveloped,
    open_envelope,
    seal,
)
from dynamoth_dispatcher import observation
from dynamoth_dispatcher.forwarder import LOCAL, Forwarder, ForwarderOptions
from dynamoth_dispatcher.forwarding_table import Forwarding, ForwardingTable, is_relayed
from dynamoth_dispatcher.observation import Observation
from dynamoth_dispatcher.tables import Backlog, RawNumbers
from dynamoth_dispatcher.transitions import Transition, TransitionOptions, Transitions

DELTA_VERSIONS_MAX = 10_000
"""A change of the plan that leaves out more versions is not believed: what the server stores is read instead. A new
balancer leaves out 1000."""


_physical_of = itemgetter(2)
_ONLY_PMESSAGES = {4}
"""The number of elements of a ``pmessage``; no other push has so many."""

QUIET_ENTRY_BYTES = 100
"""About what a channel at rest takes besides its name."""


@dataclass(frozen=True, slots=True)
class DispatcherOptions:
    """What a dispatcher may choose."""

    transition: TransitionOptions = field(default_factory=TransitionOptions)
    forwarder: ForwarderOptions = field(default_factory=ForwarderOptions)
    backlog_max: int = 100_000
    """Messages that wait for the plan at most, before it has been read; past it clients are told of the gap."""
    quiet_max: int = 1_000_000
    """Channels at rest that are remembered at most; about 100 bytes each."""
    forwardings_max: int = 100_000
    """ForwardingTable of messages that are forwarded, remembered at most; about 400 bytes each."""
    names_bytes_max: int = 32 * 1024 * 1024
    """Memory for each table of what was published here (raw channels, told publishers; the backlog and the ways twice
    that much, and channels at rest four times), about."""
    told_max: int = 100_000
    """Publishers that are remembered as told at most."""
    tell_again_s: float = 1.0
    """A publisher that still uses an old route so long after it was told is told again."""
    raw_channels_max: int = 100_000
    """Channels at a wrong server whose raw messages are numbered at most."""
    route_change_window_s: float = 5.0
    """Forwarded copies say ROUTE_CHANGED for so long after the plan changed for their channel, or after the dispatcher
    began to observe."""
    plan_retry_s: float = 0.5
    """How soon the stored plan is read again when there was none."""
    observe_retry_s: float = 2.0
    """How soon a server that does not let this dispatcher observe is asked again: its ACL may have been mended."""


class DispatcherMachine:
    """Dispatches at one server. See the module's text.

    Promises: every message observed while the plan is known is forwarded wherever a follower of any route may listen,
    at least once and in the order of observation; what cannot be forwarded is told to subscribers (``LossNotice``),
    and what was not observed to publishers (``ObservationGap``).
    """

    def __init__(self, server: str, incarnation: int, options: DispatcherOptions | None = None) -> None:
        """Make a dispatcher.

        Args:
            server: the id of its server.
            incarnation: up to 63 bits, random, new with each start of the process.
            options: see :class:`DispatcherOptions`.

        """
        self.server = server
        self.incarnation = incarnation
        self.options = options or DispatcherOptions()
        self.counters: Counter[str] = Counter()
        #: The plan that is acted upon; None before the first was read.
        self.plan: Plan | None = None
        self.transitions = Transitions(server, self.options.transition)
        self._publisher = zlib.crc32(server.encode()) << 32 | incarnation & 0xFFFFFFFF
        #: Physical channels on which a message of today's routes needs nothing: the hot path's one look-up.
        self._at_rest: set[bytes] = set()
        #: Bytes of their names; an upper bound.
        self._at_rest_bytes = 0
        #: Where messages go of which that is not true.
        self._forwarding = ForwardingTable(
            server, self._publisher, self.options.forwardings_max, 2 * self.options.names_bytes_max
        )
        self._forwarder = Forwarder(server, self.options.forwarder, self.counters)
        #: (publisher, channel) to (epoch, time) of the latest notice to a stale publisher.
        self._told: BoundedTable[tuple[int, bytes], tuple[int, float]] = BoundedTable(
            self.options.told_max, self.options.names_bytes_max, lambda key, _: len(key[1]) + ENTRY_BYTES
        )
        self._raw_numbers = RawNumbers(self.options.raw_channels_max, self.options.names_bytes_max, self.counters)
        #: Channel to the time of its latest change of plan, for ROUTE_CHANGED.
        self._changed_at: dict[bytes, float] = {}
        #: Observed before the plan was known.
        self._backlog = Backlog(self.options.backlog_max, 2 * self.options.names_bytes_max)
        #: What is subscribed to. Where the server does not allow it, no plan is acknowledged.
        self._observation = Observation()
        self._up = False
        self._run_id: str | None = None
        #: Whether something may have gone by unobserved of which the clients here have not been told.
        self._blind = True
        #: When this dispatcher last began to observe.
        self._sighted_at = float("-inf")
        self._plan_asked = False
        self._plan_retry_at: float | None = None

    @property
    def why_blind(self) -> str | None:
        """Why this dispatcher does not observe its server now; None when it does."""
        return self._observation.why_blind

    @property
    def refusal(self) -> str | None:
        """Why the server does not let this dispatcher observe; None where it does."""
        return self._observation.refusal

    @property
    def leave_refusal(self) -> str | None:
        """Why keyspace notifications still come: the server does not let this dispatcher unsubscribe. Else None."""
        return self._observation.leave_refusal

    @property
    def forwards_refused(self) -> dict[str, str]:
        """By server, what it answers to forwarded messages that it refuses: they are lost."""
        return self._forwarder.refusals

    def handle(self, event: Any, now: float) -> list[Any]:
        """Take one event; return the actions to execute, in order."""
        match event:
            case Pushed():
                return self._pushed(event, now)
            case Replied() | RepliedAll():
                return self._replied(event, now)
            case Tick():
                return self._tick(now)
            case LinkUp(link, run_id):
                return self._local_up(run_id, now) if link == LOCAL else self._forwarder.link_up(link)
            case LinkDown(link, _):
                return self._link_down(link)
            case Start():
                return []
            case _:
                raise AssertionError(f"not an event of a dispatcher: {event!r}")

    def deadline(self) -> float | None:
        """Return when the next notice, poll or reading of the plan may be due."""
        if not self._up:
            return None
        return earliest(
            self.transitions.deadline(), self._plan_retry_at, self._observation.retry_at, self._forwarder.deadline()
        )

    # Links.

    def _local_up(self, run_id: str | None, now: float) -> list[Any]:
        self._up = True
        self._run_id = run_id
        self._blind = True
        self._sighted_at = now
        # Observe first: what the balancer says must find an agent that sees what is published.
        return [*self._observation.link_up(), *self._read_plan()]

    def _subscriptions_changed(self, push: Sequence[Any], now: float) -> list[Any]:
        """Take the confirmation of a subscription; with the last one after a refusal, begin as after a reconnect."""
        actions = self._observation.changed(push)
        if not self._observation.is_restored():
            return actions
        self._blind = True
        self._sighted_at = now
        return [*actions, *self._read_plan()]

    def _read_plan(self) -> list[Any]:
        self._plan_retry_at = None
        if self._plan_asked:
            return []
        self._plan_asked = True
        return [Send(LOCAL, stored_plan.READ_WHOLE, ("plan",))]

    def _link_down(self, link: str) -> list[Any]:
        if link != LOCAL:
            self._forwarder.link_down(link)
            return []
        self._up = False
        self._observation.link_down()
        self._plan_asked = False
        self._plan_retry_at = None
        return self._forwarder.flush()  # nothing more comes that it could go together with

    # The plan.

    def _replied(self, event: Replied | RepliedAll, now: float) -> list[Any]:
        if isinstance(event.tag, Outbox):
            values = (event.value,) if isinstance(event, Replied) else event.values
            return self._forwarder.replied(event.link, event.tag, values)
        assert isinstance(event, Replied), "only copies are sent together"
        match event.tag:
            case (observation.TAG_OBSERVE,):
                assert isinstance(event.value, ErrorReply), "subscriptions are confirmed by pushes"
                self.counters["refused_commands"] += 1
                self._observation.refused(str(event.value), now + self.options.observe_retry_s)
                return []
            case (observation.TAG_LEAVE,):
                self.counters["refused_commands"] += 1
                self._observation.leave_refused(str(event.value))
                return []
            case ("plan",):
                self._plan_asked = False
                return self._plan_read(event.value, now)
            case ("numsub", channels):
                return self._polled(channels, event.value, now)
            case ("listeners",):
                return self._tell_listeners(event.value)
            case _:
                raise AssertionError(f"not a tag of a dispatcher: {event.tag!r}")

    def _plan_read(self, reply: Any, now: float) -> list[Any]:
        plan = None
        try:
            if isinstance(reply, ErrorReply):
                self.counters["refused_commands"] += 1
            else:
                plan = stored_plan.parse_whole(reply, self._run_id)
        except (MalformedMessage, PlanError):
            self.counters["malformed_plans"] += 1
        if plan is None:
            self._plan_retry_at = now + self.options.plan_retry_s
            return self._catch_up(now) if self.plan else []
        told: list[Any] = []
        if self.plan is None or plan.version >= self.plan.version:
            known = self.plan
            self._adopt(plan, now)
            if known is None or known.compatibility != plan.compatibility:
                told = self._tell_rules()
            if known is not None:
                told += self._ask_for_listeners(known)
        return [*told, *self.acknowledge(), *self._catch_up(now)]

    def _adopt(self, plan: Plan, now: float) -> None:
        """Act on a whole plan."""
        self.plan = plan
        self._forwarder.servers = plan.servers
        self._forget_quiet()
        self._forwarding.clear()
        self.transitions.clear()
        for channel, entry in plan.entries.items():
            if entry.phase is not Phase.SETTLED:
                self.transitions.update(channel, entry, now)

    def _ask_for_listeners(self, known: Plan) -> list[Any]:
        """Ask who listens here, if this plan does not continue the one that was known.

        Balancers never take an entry away, nor change the ring. But all servers may have lost their copies while no
        balancer was at work: then the next one begins a new plan, and nothing else would tell those who listen here.
        """
        assert self.plan is not None, "it was just taken"
        same_homes = self.plan.ring_mark == known.ring_mark
        if same_homes and not any(e.newer_than(self.plan.entries.get(channel)) for channel, e in known.entries.items()):
            return []
        return [Send(LOCAL, (b"PUBSUB", b"CHANNELS"), ("listeners",))]

    def _tell_listeners(self, reply: Any) -> list[Any]:
        """Have subscribers look again who listen where the plan does not send them."""
        if isinstance(reply, ErrorReply):
            self.counters["refused_commands"] += 1
            return []
        assert self.plan is not None, "it is never given up"
        actions: list[Any] = []
        for physical in filter(is_user_channel, reply):
            channel = logical_channel(physical)
            places = [place for route in self.plan.entry(channel).live_routes for place in route.locations(channel)]
            if Location(self.server, physical) not in places:
                notice = seal_control(LossNotice(channel, None))
                actions.append(Send(LOCAL, (b"PUBLISH", physical, notice)))
        return actions

    def _tell_rules(self) -> list[Any]:
        """Have the publishers here read the compatibility rules, which have changed, or may have."""
        assert self.plan is not None, "it was just taken"
        version = self.plan.compatibility.version
        if not version:
            return []
        return [Send(LOCAL, (b"PUBLISH", CLIENTS_CHANNEL, pack_control(RulesChanged(version))))]

    def _catch_up(self, now: float) -> list[Any]:
        """With the plan known: tell clients if something was not observed, and handle what was, before."""
        actions = self._tell_of_blindness() if self._blind else []
        while self._backlog:
            actions += self._observed(*self._backlog.take(), now)
        return actions

    def _tell_of_blindness(self) -> list[Any]:
        actions: list[Any] = []
        self._blind = False
        actions.append(self._forwarder.ask_publishers())
        for transition in self.transitions.all():
            notice = seal_control(LossNotice(transition.channel, None))
            here = (*transition.old_here, *transition.new_here)
            forwarded_here = here if len(here) > 1 or is_relayed(transition.entry.route) else ()
            for location in (*self._elsewhere(transition.channel, transition.entry), *forwarded_here):
                actions += self._forwarder.forward(location, notice)
        return actions

    def _elsewhere(self, channel: bytes, entry: Entry) -> list[Location]:
        places = dict.fromkeys(place for route in entry.live_routes for place in route.locations(channel))
        return [place for place in places if place.server != self.server]

    def acknowledge(self) -> list[Any]:
        """Tell the balancer which version is acted upon."""
        if self.plan is None or self.why_blind is not None:
            return []
        ack = PlanAck(self.server, self.incarnation, self.plan.version)
        return [Send(LOCAL, (b"PUBLISH", BALANCER_CHANNEL, pack_control(ack)))]

    def _told_by_balancer(self, data: bytes, now: float) -> list[Any]:
        try:
            message = unpack_control(data)
        except MalformedMessage:
            self.counters["malformed_messages"] += 1
            return []
        match message:
            case PlanChange(delta):
                if self.plan is None or delta.version > self.plan.version:
                    return self._changed(message, now)
                return self.acknowledge()
            case PlanQuery(version):
                return self.acknowledge() if self.plan and self.plan.version >= version else self._read_plan()
            case _:
                self.counters["unexpected_messages"] += 1
                return []

    def _changed(self, change: PlanChange, now: float) -> list[Any]:
        delta = change.delta
        if self.plan is None or delta.base != self.plan.version or delta.version - delta.base > DELTA_VERSIONS_MAX:
            return self._read_plan()
        try:
            self.plan = self.plan.apply(change.delta)
        except PlanError:
            self.counters["malformed_plans"] += 1
            return self._read_plan()
        actions: list[Any] = []
        if change.delta.compatibility is not None:
            self._forget_quiet()
            self._forwarding.clear()
            actions += self._tell_rules()
        for channel, entry in change.delta.entries.items():
            places = {place for route in entry.live_routes for place in route.locations(channel)}
            self._at_rest.difference_update(place.physical for place in places)
            self._at_rest.discard(channel)
            self._forwarding.forget(channel)
            self._changed_at[channel] = now
            if self.transitions.update(channel, entry, now):
                actions += self._open_links(channel, entry)
            for place in places:
                self._forwarder.forget_relayed(place.physical)
        self._forget_changes(now)
        return [*actions, *self.acknowledge()]

    def _open_links(self, channel: bytes, entry: Entry) -> list[Any]:
        """Connect before the first message is to be forwarded."""
        return [action for place in self._elsewhere(channel, entry) for action in self._forwarder.connect(place.server)]

    def _forget_changes(self, now: float) -> None:
        window = self.options.route_change_window_s
        for channel in [c for c, changed_at in self._changed_at.items() if now - changed_at > window]:
            del self._changed_at[channel]

    # Observation.

    def _pushed(self, event: Pushed, now: float) -> list[Any]:
        quiet = self._at_rest
        if set(map(len, event.messages)) == _ONLY_PMESSAGES and quiet.issuperset(map(_physical_of, event.messages)):
            return []  # nearly always, and nothing of this runs in Python
        actions: list[Any] = []
        for push in event.messages:
            kind = push[0]
            if kind == b"pmessage":
                if push[2] not in quiet and push[1] != self._observation.repeated:
                    actions += self._observed(push[2], push[3], now)
            elif kind == b"message" and push[1] == AGENT_CHANNEL:
                actions += self._told_by_balancer(push[2], now)
            elif kind in observation.SUBSCRIPTIONS:
                actions += self._subscriptions_changed(push, now)
        return actions

    def _observed(self, physical: bytes, data: bytes, now: float) -> list[Any]:
        channel = logical_channel(physical)
        if self.plan is not None and self._forwarding.has(channel, physical):
            return self._dispatch(physical, channel, self.plan.entry(channel), data, now)
        is_relay = physical.startswith(RELAY_PREFIX)
        asked_for = forwarded_channel(physical)
        if not is_relay and asked_for is None and not is_user_channel(physical):
            if physical.startswith(NOTIFICATION_PREFIXES):
                return self._observation.notified()
            return self._announced(data, now) if physical == ANNOUNCE_CHANNEL and len(self.transitions) else []
        if self.plan is None:
            if dropped := self._backlog.put(physical, data):
                self._blind = True
                self.counters["backlog_dropped"] += dropped
            return []
        if is_relay:
            return self._forwarder.publish_once(physical.removeprefix(RELAY_PREFIX), data)
        if asked_for is not None:
            return self._requested(asked_for, data, now)
        entry = self.plan.entry(channel)
        if entry.phase is Phase.SETTLED and Location(self.server, physical) in entry.route.locations(channel):
            if is_enveloped(data) and self.plan.compatibility.is_plain(channel):
                return self._tell_of_rules(data)
            self._remember_at_rest(physical)
            return []
        return self._dispatch(physical, channel, entry, data, now)

    def _announced(self, data: bytes, now: float) -> list[Any]:
        """Send markers to a subscriber that has joined new locations here, to where it listens to old ones.

        Not while something may have gone by unobserved of which old locations have not been told: it asks again.
        """
        try:
            message = unpack_control(data)
        except MalformedMessage:
            self.counters["malformed_messages"] += 1
            return []
        if not isinstance(message, Announcement) or self._blind:
            return []
        actions: list[Any] = []
        to = inbox(message.client)
        named = frozenset(message.leaving)
        for physical in dict.fromkeys(message.joined):
            transition = self.transitions.get(logical_channel(physical))
            if transition is None or Location(self.server, physical) not in transition.new_here:
                continue
            marker = seal_control(Marker(transition.channel, self.server, message.number))
            relayed = is_relayed(transition.entry.route)
            for server in sorted(named & transition.old_servers):
                actions += self._forwarder.mark(Location(server, to), marker, now, relayed=relayed)
        return actions

    def _requested(self, physical: bytes, data: bytes, now: float) -> list[Any]:
        """Forward what a publisher cannot send itself. Its own copy may still arrive: subscribers know both as one.

        A heartbeat waits, and is sent when the publisher has not asked for a later one in the meantime.
        """
        try:
            request = unpack_control(data)
        except MalformedMessage:
            self.counters["malformed_messages"] += 1
            return []
        assert self.plan is not None
        if not isinstance(request, ForwardRequest):
            self.counters["unexpected_messages"] += 1
            return []
        actions: list[Any] = []
        for server, copy in request.copies:
            envelope = self._open(copy)
            if envelope is None or server not in self.plan.servers or server == self.server:
                self.counters["unexpected_messages"] += 1
                continue
            target = Location(server, physical)
            if envelope.flags & HEARTBEAT:
                actions += self._forwarder.heartbeat_later(target, envelope, now)
            else:
                self.counters["forwarded_messages"] += 1
                actions += self._forwarder.forward(target, copy)
        return actions

    def _remember_at_rest(self, physical: bytes) -> None:
        self._at_rest_bytes += len(physical) + QUIET_ENTRY_BYTES
        if len(self._at_rest) >= self.options.quiet_max or self._at_rest_bytes > 4 * self.options.names_bytes_max:
            self.counters["quiet_evicted"] += len(self._at_rest)
            self._forget_quiet()
            self._at_rest_bytes = len(physical) + QUIET_ENTRY_BYTES
        self._at_rest.add(physical)

    def _forget_quiet(self) -> None:
        self._at_rest.clear()
        self._at_rest_bytes = 0

    def _open(self, data: bytes) -> Envelope | None:
        """Return the envelope, or None for a raw message."""
        if not is_enveloped(data):
            return None
        try:
            return open_envelope(data)
        except MalformedMessage:
            self.counters["malformed_messages"] += 1
            return None

    # Forwarding.

    def _dispatch(self, physical: bytes, channel: bytes, entry: Entry, data: bytes, now: float) -> list[Any]:
        """Forward a message that is not simply in its place, and tell who should know."""
        envelope = self._open(data)
        if envelope is not None and envelope.flags & CONTROL:
            return []
        way = self._forwarding.find(channel, physical, entry, envelope)
        actions = self._forward_message(channel, way, envelope, data, now)
        if way.stale and envelope is not None and not envelope.flags & (FORWARDED | HEARTBEAT):
            actions += self._tell_publisher(channel, entry.client_route, envelope.publisher, now)
        transition = self.transitions.get(channel)
        if transition is not None and not transition.told and entry.phase is Phase.ACTIVE:
            here = Location(self.server, physical)
            if here in transition.old_here:
                transition.told = True
                actions.append(self._notice(transition, here))
        return actions

    def _forward_message(
        self, channel: bytes, way: Forwarding, envelope: Envelope | None, data: bytes, now: float
    ) -> list[Any]:
        copies = len(way.forwarded) + len(way.relayed) + len(way.relayed_later)
        if not copies:
            return []
        if envelope is None:
            # Plain clients cannot read what this dispatcher has numbered.
            copy = data if self._is_plain(channel) else self._number_raw(channel, way.epoch, data)
        else:
            copy = forwarded(data, way.epoch, ROUTE_CHANGED if self._in_doubt(channel, now) else 0)
        self.counters["forwarded_messages"] += copies
        actions: list[Any] = []
        for target in way.forwarded:
            actions += self._forwarder.forward(target, copy)
        for target in way.relayed:
            actions += self._forwarder.relay(target, copy)
        for target in way.relayed_later:
            actions += self._forwarder.relay_later(target, copy, now)
        return actions

    def _is_plain(self, channel: bytes) -> bool:
        """Tell whether plain clients listen: on no channel in transition, where raw copies would go to and fro."""
        at_rest = self.transitions.get(channel) is None
        return at_rest and self.plan is not None and self.plan.compatibility.is_plain(channel)

    def _in_doubt(self, channel: bytes, now: float) -> bool:
        """Tell whether earlier messages may have taken another way than this one, or may not have been observed."""
        since = max(self._changed_at.get(channel, float("-inf")), self._sighted_at)
        return now - since <= self.options.route_change_window_s

    def _number_raw(self, channel: bytes, epoch: int, data: bytes) -> bytes:
        number, is_first = self._raw_numbers.next(channel)
        flags = RAW | FORWARDED | (FIRST if is_first else 0)
        return seal(self._publisher, number, epoch, data, flags)

    # Telling.

    def _tell_publisher(self, channel: bytes, told: Route, publisher: int, now: float) -> list[Any]:
        """Tell a publisher of the route that clients are to follow, unless it was told just now."""
        key = (publisher, channel)
        epoch, at = self._told.get(key) or (-1, 0.0)
        if epoch == told.epoch and now - at < self.options.tell_again_s:
            return []
        self._told.put(key, (told.epoch, now))
        self.counters["redirected_publishers"] += 1
        notice = pack_control(RouteNotice(channel, told))
        return [Send(LOCAL, (b"PUBLISH", inbox(publisher), notice))]

    def _tell_of_rules(self, data: bytes) -> list[Any]:
        """Tell a publisher that its envelopes cannot be read by all subscribers: the rules have changed."""
        envelope = self._open(data)
        if envelope is None or envelope.flags & (CONTROL | FORWARDED) or self.plan is None:
            return []
        self.counters["envelopes_on_plain_channels"] += 1
        notice = pack_control(RulesChanged(self.plan.compatibility.version))
        return [Send(LOCAL, (b"PUBLISH", inbox(envelope.publisher), notice))]

    def _notice(self, transition: Transition, location: Location) -> Send:
        self.counters["route_notices"] += 1
        notice = RouteNotice(transition.channel, transition.entry.route)
        return Send(LOCAL, (b"PUBLISH", location.physical, seal_control(notice)))

    # Time.

    def _tick(self, now: float) -> list[Any]:
        actions: list[Any] = []
        retry_at = self._observation.retry_at
        if retry_at is not None and retry_at <= now:
            actions += self._observation.subscribe()
        if self._plan_retry_at is not None and self._plan_retry_at <= now:
            actions += self._read_plan()
        actions += self._forwarder.due(now)
        notices, polls = self.transitions.due(now)
        for transition in notices:
            transition.told = True
            actions += [self._notice(transition, location) for location in transition.old_here]
        return [*actions, *self._poll(polls)]

    def _poll(self, transitions: Iterable[Transition]) -> list[Any]:
        asked = [(t.channel, t.entry.route.epoch, location.physical) for t in transitions for location in t.old_here]
        if not asked:
            return []
        return [Send(LOCAL, (b"PUBSUB", b"NUMSUB", *(physical for _, _, physical in asked)), ("numsub", asked))]

    def _polled(self, asked: list[tuple[bytes, int, bytes]], reply: Any, now: float) -> list[Any]:
        """Report the channels at whose old locations here nobody listens."""
        if isinstance(reply, ErrorReply):
            self.counters["refused_commands"] += 1
            return []
        listened = {channel for (channel, _, _), listeners in zip(asked, reply[1::2], strict=True) if int(listeners)}
        vacated: list[tuple[bytes, int]] = []
        for channel, epoch, _ in asked:
            transition = self.transitions.get(channel)
            if transition is None or transition.entry.route.epoch != epoch or channel in listened:
                continue
            if now - transition.vacated_at >= self.options.transition.vacated_interval_s:
                transition.vacated_at = now
                vacated.append((channel, epoch))
        if not vacated:
            return []
        message = pack_control(Vacated(self.server, tuple(dict.fromkeys(vacated)), self.incarnation))
        return [Send(LOCAL, (b"PUBLISH", BALANCER_CHANNEL, message))]
