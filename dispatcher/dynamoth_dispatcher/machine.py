"""The dispatcher machine: forwards and redirects at one server.

Theory of operation
-------------------
It observes everything that is published at its server (``observation``) and holds the whole plan (``followed_plan``).
A publication that needs nothing costs one look-up in ``_at_rest``. For any other the ``forwarding_table`` says where
it goes, the ``forwarder`` sends it there in the order of observation, through one outbox per server, and a publisher
that used an old route gets a notice (``client_notices``).

The plan comes from the copy stored at the server: whole when the link comes up, then in deltas behind each change that
the balancer stores. Messages observed before the first plan wait for it (``tables``).

For a channel in transition here (``transitions``) the dispatcher also sends notices to the listeners of an old
location, sends markers to those who join a new one, and reports a vacated old location.

Messages published at all new locations (ALL_PUBLISHERS) are forwarded to the old ones by the dispatchers of all. They
*relay* them: each gives its copy to the dispatcher of the old location, which publishes each message once. One of them
does so at once. The others follow a little later, with many messages together, in case the first one cannot or has not
got the message.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any, assert_never

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
    NOTIFICATION_PREFIXES,
    RELAY_PREFIX,
    forwarded_channel,
    is_user_channel,
    logical_channel,
)
from dynamoth.plan.plan import Entry, Location, Phase, Plan
from dynamoth.plan.slots import is_slot, slot_of
from dynamoth.protocol.control import (
    LossNotice,
    PlanChange,
    PlanQuery,
    Vacated,
    pack_control,
    seal_control,
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
    seal,
)
from dynamoth_dispatcher import observation
from dynamoth_dispatcher.client_notices import (
    TAG_LISTENERS,
    TAG_SLOT_LISTENERS,
    ClientNotices,
    read_control,
    read_envelope,
)
from dynamoth_dispatcher.events import LOCAL, DispatcherAction, DispatcherEvent
from dynamoth_dispatcher.followed_plan import TAG_PLAN, FollowedPlan
from dynamoth_dispatcher.forwarder import Forwarder, observation_gap
from dynamoth_dispatcher.forwarding_table import Forwarding, ForwardingTable, is_relayed
from dynamoth_dispatcher.observation import Observation
from dynamoth_dispatcher.options import DispatcherOptions
from dynamoth_dispatcher.tables import Backlog, RawNumbers
from dynamoth_dispatcher.transitions import TAG_LIST, TAG_MEMBERS, TAG_NUMSUB, Transition, Transitions

_physical_of = itemgetter(2)
_ONLY_PMESSAGES = {4}
"""The number of elements of a ``pmessage``; no other push has as many."""

AT_REST_ENTRY_BYTES = 100
"""Approximate memory of a channel at rest besides its name."""


class DispatcherMachine:
    """Forwards and redirects at one server.

    Promises: every message observed while the plan is known is forwarded wherever a follower of any route may listen,
    at least once and in the order of observation. Subscribers get a ``LossNotice`` for messages that cannot be
    forwarded, publishers an ``ObservationGap`` for those that were not observed.

    Args:
        server: the id of its server.
        incarnation: up to 63 bits, random, new with each start of the process.
        options: its bounds and periods.

    """

    def __init__(self, server: str, incarnation: int, options: DispatcherOptions | None = None) -> None:
        self.server = server
        self.incarnation = incarnation
        self.options = options = options or DispatcherOptions()
        self.counters: Counter[str] = Counter()
        self.transitions = Transitions(server, options.transition, self.counters)
        self._publisher = zlib.crc32(server.encode()) << 32 | incarnation & 0xFFFFFFFF
        self._followed = FollowedPlan(server, incarnation, options.plan_retry_s, self.counters)
        #: Physical channels whose messages need nothing while their route is the present one: the hot path's one
        #: look-up.
        self._at_rest: set[bytes] = set()
        #: Bytes of their names; an upper bound.
        self._at_rest_bytes = 0
        #: Where messages on other channels go.
        self._forwarding = ForwardingTable(
            server, self._publisher, options.forwardings_max, 2 * options.names_bytes_max
        )
        self.forwarder = Forwarder(server, options.forwarder, self.counters)
        self._notices = ClientNotices(server, options, self.transitions, self.forwarder, self.counters)
        self._raw_numbers = RawNumbers(options.raw_channels_max, options.names_bytes_max, self.counters)
        #: Channel to the time of its latest change of plan, for ROUTE_CHANGED.
        self._changed_at: dict[bytes, float] = {}
        #: Messages observed before the plan was known.
        self._backlog = Backlog(options.backlog_max, 2 * options.names_bytes_max)
        #: The subscriptions. Where the server refuses them, no plan is acknowledged.
        self.observation = Observation()
        self._up = False
        #: Whether messages may have passed unobserved of which the clients here do not know yet.
        self._blind = True
        #: When this dispatcher last began to observe.
        self._sighted_at = float("-inf")

    @property
    def plan(self) -> Plan | None:
        """The plan that is acted upon; None before the first was read."""
        return self._followed.plan

    @property
    def why_blind(self) -> str | None:
        """Why this dispatcher does not observe its server now; None when it does."""
        return self.observation.why_blind

    def handle(self, event: DispatcherEvent, now: float) -> list[DispatcherAction]:
        """Handle one event; return the actions to execute, in order."""
        match event:
            case Pushed():
                return self._on_pushes(event, now)
            case Replied() | RepliedAll():
                return self._on_reply(event, now)
            case Tick():
                return self._on_tick(now)
            case LinkUp(link, run_id):
                return self._on_local_up(run_id, now) if link == LOCAL else self.forwarder.link_up(link)
            case LinkDown(link):
                return self._on_link_down(link)
            case Start():
                return []
            case _:
                assert_never(event)

    def deadline(self) -> float | None:
        """Return when the next notice, poll or reading of the plan may be due."""
        if not self._up:
            return None
        return earliest(
            self.transitions.deadline(), self._followed.retry_at, self.observation.retry_at, self.forwarder.deadline()
        )

    def check(self) -> None:
        """Assert the invariants between the parts, after each event."""
        self.transitions.check(self.plan)
        self.forwarder.check()
        self._forwarding.check()
        if self.plan is None:
            assert not self._at_rest and not len(self._forwarding), "nothing is decided without a plan"
        else:
            assert not len(self._backlog), "messages wait for the first plan only"
        for transition in self.transitions.all():
            for location in (*transition.old_here, *transition.new_here):
                assert location.physical not in self._at_rest, f"{location} is at rest and in transition"
        if not self._up:
            assert not self._followed.is_reading and self.why_blind is not None, "the link is down"

    # Links.

    def _on_local_up(self, run_id: str | None, now: float) -> list[DispatcherAction]:
        self._up = True
        self._blind = True
        self._sighted_at = now
        # Observe first: when the balancer speaks, this agent must already see what is published.
        return [*self.observation.link_up(), *self._followed.link_up(run_id)]

    def _on_subscription(self, push: Sequence[Any], now: float) -> list[DispatcherAction]:
        """Handle a confirmation; after a refusal, begin with the last one as after a reconnect."""
        actions = self.observation.on_confirmation(push)
        if not self.observation.is_restored():
            return actions
        self._blind = True
        self._sighted_at = now
        return [*actions, *self._followed.read()]

    def _on_link_down(self, link: str) -> list[DispatcherAction]:
        if link != LOCAL:
            self.forwarder.link_down(link)
            return []
        self._up = False
        self.observation.link_down()
        self._followed.link_down()
        self._notices.link_down()
        self.transitions.link_down()
        return self.forwarder.flush()  # nothing more comes for them to wait for

    def _on_reply(self, event: Replied | RepliedAll, now: float) -> list[DispatcherAction]:
        if isinstance(event.tag, Outbox):
            values = (event.value,) if isinstance(event, Replied) else event.values
            return self.forwarder.on_replies(event.link, event.tag, values)
        assert isinstance(event, Replied), "only copies are sent together"
        match event.tag:
            case (observation.TAG_OBSERVE,):
                assert isinstance(event.value, ErrorReply), "subscriptions are confirmed by pushes"
                self.counters["refused_commands"] += 1
                self.observation.on_refusal(str(event.value), now + self.options.observe_retry_s)
                return []
            case (observation.TAG_LEAVE,):
                self.counters["refused_commands"] += 1
                self.observation.on_leave_refusal(str(event.value))
                return []
            case (tag,) if tag == TAG_PLAN:
                return self._on_stored_plan(event.value, now)
            case (tag, asked) if tag == TAG_NUMSUB:
                return self._report_vacated(self.transitions.on_poll(asked, event.value, now))
            case (tag, slots) if tag == TAG_LIST:
                listened, vacated = self.transitions.on_list(slots, event.value, now)
                return [*self._notify_listeners(listened), *self._report_vacated(vacated)]
            case (tag, asked) if tag == TAG_MEMBERS:
                return self._notify_listeners(self.transitions.on_members(asked, event.value))
            case (tag,) if tag == TAG_SLOT_LISTENERS:
                assert self.plan is not None, "it is never given up"
                return self._notices.report_losses(event.value, self.plan)
            case (tag,) if tag == TAG_LISTENERS:
                assert self.plan is not None, "it is never given up"
                return self._notices.on_listeners(event.value, self.plan)
            case _:
                raise AssertionError(f"not a tag of a dispatcher: {event.tag!r}")

    # The plan.

    def _on_stored_plan(self, reply: Any, now: float) -> list[DispatcherAction]:
        known = self.plan
        plan, is_checked = self._followed.on_stored(reply, now)
        if plan is None:
            return self._catch_up(now) if known else []
        actions: list[DispatcherAction] = []
        if known is None or plan.version >= known.version or is_checked:
            if known is not None:
                actions += self.forwarder.follow(plan.servers)  # first, as in _on_change
                actions += self._catch_up_with(known, plan, {**known.entries, **plan.entries})
            actions += self._adopt(plan, now)
            if known is None or known.compatibility != plan.compatibility:
                actions += self._announce_rules(plan)
        if is_checked:
            actions += self._notices.ask_for_listeners()
        if self._followed.is_doubtful:
            actions += self._followed.read()
        return [*actions, *self.acknowledge(), *self._catch_up(now)]

    def _adopt(self, plan: Plan, now: float) -> list[DispatcherAction]:
        """Act on a whole plan."""
        self._followed.adopt(plan)
        actions = self.forwarder.follow(plan.servers)
        self._forget_at_rest()
        self._forwarding.clear()
        self.transitions.clear()
        self.transitions.plan = plan
        for channel, entry in plan.entries.items():
            if entry.phase is not Phase.SETTLED:
                self.transitions.update(channel, entry, now)
        return actions

    def _catch_up_with(self, known: Plan, plan: Plan, names: Iterable[bytes]) -> list[DispatcherAction]:
        """Handle changes that went on without this dispatcher: its server counted as dead, or all plans were lost.

        Balancers never change the ring. But all servers may have lost their copies while no balancer was at work: then
        the next one begins a new plan, and nothing else would notify listeners here of it.

        Clients may have gone on here meanwhile, unless the server was restarted: then each has verified again.
        """
        if not self._followed.is_of_this_process:
            return []
        actions: list[DispatcherAction] = []
        is_left = plan.ring_mark != known.ring_mark
        for name in names:
            before, after = known.entry(name), plan.entry(name)
            is_left = is_left or self._is_left(name, before, after)
            if self._is_lossy(name, before, after):
                actions += self._report_loss(name, self._elsewhere(name, after))
        return [*self._notices.ask_for_listeners(), *actions] if is_left else actions

    def _is_left(self, name: bytes, before: Entry, after: Entry) -> bool:
        """Return whether a location here is none any more, and this dispatcher has not reported it as vacated."""
        gone = self._here(name, before) - self._here(name, after)
        transition = self.transitions.get(name)
        is_vacated = before.phase is Phase.ACTIVE and transition is not None and transition.is_vacated
        return not gone <= (before.left(name) if is_vacated else set())

    def _is_lossy(self, name: bytes, before: Entry, after: Entry) -> bool:
        """Return whether clients may use a new location to which this dispatcher has not forwarded from here."""
        if after.phase is Phase.PREPARED or not self._here(name, before):
            return False
        known = {place for route in before.live_routes for place in route.locations(name)}
        return not known.issuperset(self._elsewhere(name, after))

    def _here(self, name: bytes, entry: Entry) -> set[Location]:
        routes = [route for route in entry.live_routes if self.server in route.assignment.servers]
        return {place for route in routes for place in route.locations(name) if place.server == self.server}

    def _report_loss(self, name: bytes, locations: Iterable[Location]) -> list[DispatcherAction]:
        notice = seal_control(LossNotice(name, None))
        # Of a slot, the dispatchers there know which channels somebody listens to.
        send = self.forwarder.relay if is_slot(name) else self.forwarder.forward
        return [action for location in locations for action in send(location, notice)]

    def _announce_rules(self, plan: Plan) -> list[DispatcherAction]:
        """Make the publishers here read the compatibility rules, unless there never were any."""
        return self._notices.change_of_rules(plan) if plan.compatibility.version else []

    def _catch_up(self, now: float) -> list[DispatcherAction]:
        """Report messages that were not observed to clients, then handle those that waited for the plan."""
        actions = self._report_blindness() if self._blind else []
        actions += self._notices.list_slots()
        while self._backlog:
            actions += self._observed(*self._backlog.take(), now)
        return actions

    def _report_blindness(self) -> list[DispatcherAction]:
        self._blind = False
        actions: list[DispatcherAction] = [observation_gap(self.server)]
        for transition in self.transitions.all():
            elsewhere = self._elsewhere(transition.channel, transition.entry)
            if is_slot(transition.channel):
                self.transitions.note_loss(transition.channel)
                actions += self._report_loss(transition.channel, elsewhere)
                continue
            here = (*transition.old_here, *transition.new_here)
            forwarded_here = here if len(here) > 1 or is_relayed(transition.entry.route) else ()
            actions += self._report_loss(transition.channel, (*elsewhere, *forwarded_here))
        return actions

    def _elsewhere(self, channel: bytes, entry: Entry) -> list[Location]:
        places = dict.fromkeys(place for route in entry.live_routes for place in route.locations(channel))
        return [place for place in places if place.server != self.server]

    def acknowledge(self) -> list[DispatcherAction]:
        """Send the balancer the version of the plan, if this dispatcher observes its server."""
        return self._followed.acknowledge() if self.why_blind is None else []

    def _on_balancer_message(self, data: bytes, now: float) -> list[DispatcherAction]:
        match message := read_control(data, self.counters):
            case PlanChange(delta):
                if self.plan is None or delta.version > self.plan.version:
                    return self._on_change(message, now)
                return self._followed.read() if self._followed.contradicts(delta) else self.acknowledge()
            case PlanQuery(is_doubtful=True):
                return self._followed.doubt()
            case PlanQuery(version):
                is_known = self.plan is not None and self.plan.version >= version
                return self.acknowledge() if is_known else self._followed.read()
            case None:
                return []
            case _:
                self.counters["unexpected_messages"] += 1
                return []

    def _on_change(self, change: PlanChange, now: float) -> list[DispatcherAction]:
        delta, known = change.delta, self.plan
        if not self._followed.apply(delta):
            return self._followed.read()
        assert known is not None and self.plan is not None, "a change was applied"
        # First the servers: some of what is sent may go to new ones.
        actions = [] if delta.servers is None else self.forwarder.follow(self.plan.servers)
        actions += self._catch_up_with(known, self.plan, delta.entries)
        self.transitions.plan = self.plan
        if any(map(is_slot, delta.entries)):  # any channel may inherit from it
            self._forget_at_rest()
            self._forwarding.clear()
        if delta.compatibility is not None:
            self._forget_at_rest()
            self._forwarding.clear()
            actions += self._announce_rules(self.plan)
        for channel, entry in delta.entries.items():
            places = {place for route in entry.live_routes for place in route.locations(channel)}
            self._at_rest.difference_update(place.physical for place in places)
            self._at_rest.discard(channel)
            self._forwarding.forget(channel)
            self._changed_at[channel] = now
            if self.transitions.update(channel, entry, now):  # connect before the first message is to be forwarded
                for place in self._elsewhere(channel, entry):
                    actions += self.forwarder.connect(place.server)
            for place in places:
                self.forwarder.forget_relayed(place.physical)
        self._forget_changes(now)
        return [*actions, *self.acknowledge()]

    def _forget_changes(self, now: float) -> None:
        window = self.options.route_change_window_s
        for channel in [c for c, changed_at in self._changed_at.items() if now - changed_at > window]:
            del self._changed_at[channel]

    # Observation.

    def _on_pushes(self, event: Pushed, now: float) -> list[DispatcherAction]:
        at_rest = self._at_rest
        if set(map(len, event.messages)) == _ONLY_PMESSAGES and at_rest.issuperset(map(_physical_of, event.messages)):
            return []  # nearly always, and nothing of this runs in Python
        actions: list[DispatcherAction] = []
        for push in event.messages:
            kind = push[0]
            if kind == b"pmessage":
                if push[2] not in at_rest and push[1] != self.observation.repeated:
                    actions += self._observed(push[2], push[3], now)
            elif kind == b"message" and push[1] == AGENT_CHANNEL:
                actions += self._on_balancer_message(push[2], now)
            elif kind in observation.SUBSCRIPTIONS:
                actions += self._on_subscription(push, now)
        return actions

    def _observed(self, physical: bytes, data: bytes, now: float) -> list[DispatcherAction]:
        channel = logical_channel(physical)
        plan = self._followed.plan
        if plan is not None and self._forwarding.has(channel, physical):
            return self._dispatch(physical, channel, plan.entry(channel), data, now)
        is_relay = physical.startswith(RELAY_PREFIX)
        asked_for = forwarded_channel(physical)
        if not is_relay and asked_for is None and not is_user_channel(physical):
            return self._on_own_channel(physical, data, now)
        if plan is None:
            if dropped := self._backlog.put(physical, data):
                self._blind = True
                self.counters["backlog_dropped"] += dropped
            return []
        if is_relay:
            target = physical.removeprefix(RELAY_PREFIX)
            return self._notices.list_slot(target) if is_slot(target) else self.forwarder.publish_once(target, data)
        if asked_for is not None:
            return self._notices.on_forward_request(asked_for, data, plan.servers, now)
        entry = plan.entry(channel)
        if entry.phase is Phase.SETTLED and Location(self.server, physical) in entry.route.locations(channel):
            if is_enveloped(data) and plan.compatibility.is_plain(channel):
                return self._correct_format(plan, data)
            self._remember_at_rest(physical)
            return []
        return self._dispatch(physical, channel, entry, data, now)

    def _on_own_channel(self, physical: bytes, data: bytes, now: float) -> list[DispatcherAction]:
        """Handle a message on a channel that is no application's."""
        if physical.startswith(NOTIFICATION_PREFIXES):
            return self.observation.on_notification()
        # No markers while old locations may not know of unobserved messages: the subscriber announces itself again.
        if physical == ANNOUNCE_CHANNEL and len(self.transitions) and not self._blind:
            return self._notices.on_announcement(data, now)
        return []

    def _remember_at_rest(self, physical: bytes) -> None:
        self._at_rest_bytes += len(physical) + AT_REST_ENTRY_BYTES
        if len(self._at_rest) >= self.options.at_rest_max or self._at_rest_bytes > 4 * self.options.names_bytes_max:
            self.counters["at_rest_evicted"] += len(self._at_rest)
            self._forget_at_rest()
            self._at_rest_bytes = len(physical) + AT_REST_ENTRY_BYTES
        self._at_rest.add(physical)

    def _forget_at_rest(self) -> None:
        self._at_rest.clear()
        self._at_rest_bytes = 0

    # Forwarding.

    def _dispatch(
        self, physical: bytes, channel: bytes, entry: Entry, data: bytes, now: float
    ) -> list[DispatcherAction]:
        """Forward a message that needs it, and send notices to its publisher and to listeners of its location."""
        envelope = read_envelope(data, self.counters)
        if envelope is not None and envelope.flags & CONTROL:
            return []
        forwarding = self._forwarding.find(channel, physical, entry, envelope)
        actions = self._forward_message(channel, forwarding, envelope, data, now)
        if forwarding.stale and envelope is not None and not envelope.flags & (FORWARDED | HEARTBEAT):
            actions += self._notices.redirect_publisher(channel, entry.client_route, envelope.publisher, now)
        transition = self.transitions.get(channel)
        if transition is not None and not transition.is_noticed and entry.phase is Phase.ACTIVE:
            here = Location(self.server, physical)
            if here in transition.old_here:
                transition.is_noticed = True
                actions += self._notices.redirect_listeners(transition, (here,))
        return actions

    def _forward_message(
        self, channel: bytes, forwarding: Forwarding, envelope: Envelope | None, data: bytes, now: float
    ) -> list[DispatcherAction]:
        copies = len(forwarding.forwarded) + len(forwarding.relayed) + len(forwarding.relayed_later)
        if not copies:
            return []
        if envelope is None:
            # Plain clients cannot read what this dispatcher has numbered.
            copy = data if self._is_plain(channel) else self._number_raw(channel, forwarding.epoch, data)
        else:
            copy = forwarded(data, forwarding.epoch, ROUTE_CHANGED if self._in_doubt(channel, now) else 0)
        self.counters["forwarded_messages"] += copies
        actions: list[DispatcherAction] = []
        for target in forwarding.forwarded:
            actions += self.forwarder.forward(target, copy)
        for target in forwarding.relayed:
            actions += self.forwarder.relay(target, copy)
        for target in forwarding.relayed_later:
            actions += self.forwarder.relay_later(target, copy, now)
        return actions

    def _is_plain(self, channel: bytes) -> bool:
        """Return whether a copy stays raw: not in a transition, where raw copies would be forwarded back and forth."""
        at_rest = self.transitions.get(channel) is None
        return at_rest and self.plan is not None and self.plan.compatibility.is_plain(channel)

    def _in_doubt(self, channel: bytes, now: float) -> bool:
        """Return whether earlier messages may have taken another route, or may not have been observed."""
        changes = (self._changed_at.get(name, float("-inf")) for name in (channel, slot_of(channel)))
        since = max(*changes, self._sighted_at)
        return now - since <= self.options.route_change_window_s

    def _number_raw(self, channel: bytes, epoch: int, data: bytes) -> bytes:
        number, is_first = self._raw_numbers.next(channel)
        flags = RAW | FORWARDED | (FIRST if is_first else 0)
        return seal(self._publisher, number, epoch, data, flags)

    def _correct_format(self, plan: Plan, data: bytes) -> list[DispatcherAction]:
        """Make a publisher read the rules: plain subscribers of this channel cannot read its envelopes."""
        envelope = read_envelope(data, self.counters)
        if envelope is None or envelope.flags & (CONTROL | FORWARDED):
            return []
        self.counters["envelopes_on_plain_channels"] += 1
        return self._notices.change_of_rules(plan, envelope.publisher)

    # Time.

    def _on_tick(self, now: float) -> list[DispatcherAction]:
        if not self._up:
            return []  # what it asks now would never be answered
        actions: list[DispatcherAction] = []
        retry_at = self.observation.retry_at
        if retry_at is not None and retry_at <= now:
            actions += self.observation.subscribe()
        if self._followed.retry_at is not None and self._followed.retry_at <= now:
            actions += self._followed.read()
        actions += self.forwarder.on_tick(now)
        notices, polls = self.transitions.due(now)
        actions += self._notify_listeners(notices)
        actions += self._report_vacated(self.transitions.vacated_again(polls, now))
        return [*actions, *self.transitions.poll(polls, now)]

    def _notify_listeners(self, transitions: Iterable[Transition]) -> list[DispatcherAction]:
        """Send the listeners at old locations the new routes."""
        actions: list[DispatcherAction] = []
        for transition in transitions:
            transition.is_noticed = True
            actions += self._notices.redirect_listeners(transition, transition.old_here)
        return actions

    def _report_vacated(self, channels: tuple[tuple[bytes, int], ...]) -> list[DispatcherAction]:
        """Report to the balancer that nobody listens any more at the old locations of channels here."""
        if not channels:
            return []
        message = pack_control(Vacated(self.server, channels, self.incarnation))
        return [Send(LOCAL, (b"PUBLISH", BALANCER_CHANNEL, message))]
