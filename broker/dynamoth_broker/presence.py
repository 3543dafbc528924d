"""Who of this broker's users is present on which channels, and who asks for the members.

Theory of operation
-------------------
``dynamoth.edge.presence`` has the table of members at the log's server, and the script that changes it together with
the log. This module knows which sessions of this broker are members, and turns what happens to them into changes. The
changes of a channel that wait are those of one command: while it is under way, others gather for the next one, at most
one for each session. What a command has appended is published as all logged publications are.

Every ``refresh_s`` the broker names all its members of a channel again, which renews their leases. That also repairs
whatever went wrong before: a server that did not answer, or that has lost its data. When a connection to a log server
is up again, this happens at once. Channels that users only watch are touched as often, so that leases end in time.

What happens to a session decides what becomes of its member:

* It *unsubscribes*, or closes the connection with 1000: it leaves at once.
* It is *lost* (no answer, too slow, a token that has expired or does not allow everything any more, a page that was
  closed): it is released. It leaves after the time of grace, unless a broker has it again until then.
* It says ``leave``: the new broker has it, or will have it with its next refresh. Its lease keeps running
  until then.
* A *move to this broker has failed* (4006): its lease goes on, too, and the broker that it has not left takes it over.
* The broker is *drained*: its users move, as above. Those who have not moved when it *stops* connect elsewhere: nothing
  is sent, as their leases outlast that. The same holds when a broker dies: members who do not reconnect leave when
  their lease ends.
* A *newer connection* of the session comes to this broker: the older one is released, and the newer one enters then.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice

from dynamoth.edge.frames import AskMembers, Error, Members
from dynamoth.edge.interests import Interest, presence_interest
from dynamoth.edge.log import LogOptions
from dynamoth.edge.presence import (
    Appended,
    Change,
    Kind,
    Leases,
    Listed,
    change_command,
    member_id,
    members_command,
    parse_appended,
    parse_members,
    user_text,
)
from dynamoth.edge.publications import LoggedPublication, pack_publication
from dynamoth.errors import MalformedMessage
from dynamoth.globs import compile_glob
from dynamoth.machine.events import CommandPart, ErrorReply
from dynamoth.machine.timers import Timers
from dynamoth_broker.events import (
    MOVE_FAILED,
    NORMAL,
    RESTARTING,
    RETRY_MS,
    BrokerAction,
    BrokerOptions,
    PublishMessage,
    Transmit,
)
from dynamoth_broker.interests import SharedInterest
from dynamoth_broker.logs import Logs
from dynamoth_broker.sessions import Session, Subscription

CHANGES_MAX = 500
"""Changes in one command at most: a server takes 2 to 3 ms for them."""

REFRESHES_PER_LEASE = 3
"""A lease outlasts two refreshes that fail."""

LOOKS_PER_REFRESH = 10
"""How often in the time of one refresh a broker looks which channels are due."""

GRACE_MARGIN_S = 0.05
"""A broker touches a channel this long after the end of a time of grace, as the clock of the server is another one."""

GRACE_RATIO = 0.8
"""Part of a time of grace within which each broker names its members."""

NAMES_AT_ONCE = 20_000
"""Names of members in the answers that are sent at once: some 30 ms. Others that ask get theirs a little later."""

ANSWER_INTERVAL_S = 0.05


@dataclass(slots=True, eq=False)
class _Channel:
    """What this broker knows of the presence of one channel."""

    interest: Interest
    #: Sessions of this broker, by member: what is said of them again and again.
    members: dict[str, Change] = field(default_factory=dict[str, Change])
    #: The latest change of each member that was not sent, or not answered, and when it came.
    waiting: dict[str, tuple[Change, float]] = field(default_factory=dict[str, "tuple[Change, float]"])
    #: Whether the channel is to be touched, though nothing has changed.
    is_due: bool = False
    #: Whether a command is under way; at most one is.
    is_changing: bool = False
    #: The same interest as users have subscribed to it; None while none was.
    shared: SharedInterest | None = None
    #: Sessions that wait for the members, with their ``ref``: the next read answers them.
    asking: dict[Session, int] = field(default_factory=dict[Session, int])
    is_reading: bool = False

    @property
    def is_used(self) -> bool:
        """Whether somebody of this broker is present or watches."""
        return bool(self.members) or (self.shared is not None and self.shared.users > 0)

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to do."""
        busy = self.is_changing or self.is_reading or self.is_due
        return not (self.is_used or busy or self.waiting or self.asking)


class Presence:
    """The members among the users of one broker. ``flush`` returns what its other methods have left to do."""

    def __init__(
        self, options: BrokerOptions, logs: Logs, timers: Timers[BrokerAction], counters: Counter[str]
    ) -> None:
        """Begin without members; all arguments are shared with the owner."""
        self._options = options
        self._logs = logs
        self._timers = timers
        self._counters = counters
        self._patterns = [compile_glob(pattern.encode()) for pattern in options.presence]
        lost_s = options.ping_s + options.pong_timeout_s  # until a broker knows that a connection is dead
        self._leases = Leases(options.presence_ttl_s, options.presence_grace_s, lost_s + options.presence_ttl_s)
        #: Shorter than a time of grace, so that a session that was lost elsewhere, and is here, is renewed in time.
        self._refresh_s = min(options.presence_ttl_s / REFRESHES_PER_LEASE, options.presence_grace_s * GRACE_RATIO)
        self._channels: dict[str, _Channel] = {}
        #: Channels with something to send, in the order in which that came.
        self._changed: dict[_Channel, None] = {}
        #: When each channel is to be refreshed, the earliest first.
        self._refreshes: deque[tuple[float, _Channel]] = deque()
        self._is_looking = False

    @property
    def members(self) -> int:
        """How many members of channels the users of this broker are."""
        return sum(len(channel.members) for channel in self._channels.values())

    def is_listed(self, channel: str) -> bool:
        """Return whether the operator has listed a channel."""
        name = channel.encode()
        return any(pattern.fullmatch(name) for pattern in self._patterns)

    # What happens to sessions.

    def on_confirmed(self, subscription: Subscription, now: float) -> None:
        """Let a user who has subscribed as present be a member, and watch what is watched."""
        if not self._patterns or subscription.is_ended:
            return
        session, interest = subscription.session, subscription.interest.interest
        if interest.kind == "presence":
            self._channel(interest.name, now).shared = subscription.interest
        elif subscription.is_present and session.leaving_channels is None:
            member = Change("enter", _id_of(session), session.generation, user_text(session.grant.user))
            channel = self._channel(interest.name, now)
            channel.members[member.member] = member
            self._change(channel, member, now)
        elif interest.kind == "channel":
            self._remove(session, interest.name, "exit", now)

    def on_ended(self, subscription: Subscription, now: float) -> None:
        """Let a user leave whose subscription has ended, if no other one has replaced it.

        One that was refused for now is subscribed to again soon.
        """
        session, interest = subscription.session, subscription.interest.interest
        if interest.kind == "channel" and interest.id not in session.subscriptions:
            self._remove(session, interest.name, "exit" if subscription.has_unsubscribed else "release", now)

    def on_left(self, session: Session, now: float) -> None:
        """Leave the members of a session to the broker that serves it now."""
        self._remove_everywhere(session, "move", now)

    def on_closed(self, session: Session, code: int, now: float) -> None:
        """End or release the members of a session whose connection is closed with this code."""
        kinds: dict[int, Kind | None] = {NORMAL: "exit", MOVE_FAILED: "move", RESTARTING: None}
        self._remove_everywhere(session, kinds.get(code, "release"), now)

    def _remove_everywhere(self, session: Session, kind: Kind | None, now: float) -> None:
        if not self._channels:
            return
        for subscription in session.subscriptions.values():
            interest = subscription.interest.interest
            if interest.kind == "channel":
                self._remove(session, interest.name, kind, now)

    def _remove(self, session: Session, name: str, kind: Kind | None, now: float) -> None:
        """End that a session is a member here; ``kind`` None: without a word to the server."""
        channel = self._channels.get(name)
        if channel is None:
            return
        id_ = _id_of(session)
        member = channel.members.get(id_)
        if member is None or member.generation != session.generation:
            return
        del channel.members[id_]
        if kind is None:
            channel.waiting.pop(id_, None)
        else:
            self._change(channel, replace(member, kind=kind), now)
        if kind == "release":
            self._timers.add(now + self._leases.grace_s + GRACE_MARGIN_S, self._end_grace, name)

    def _end_grace(self, name: str, now: float) -> Sequence[BrokerAction]:
        self._touch(self._channel(name, now))
        return []

    # Channels.

    def _channel(self, name: str, now: float) -> _Channel:
        channel = self._channels.get(name)
        if channel is None:
            channel = self._channels[name] = _Channel(presence_interest(name))
            self._refreshes.append((now + self._refresh_s, channel))
            if not self._is_looking:
                self._is_looking = True
                self._timers.add(now + self._refresh_s / LOOKS_PER_REFRESH, self._look)
        return channel

    def _change(self, channel: _Channel, change: Change, now: float) -> None:
        channel.waiting[change.member] = change, now
        self._changed[channel] = None

    def _touch(self, channel: _Channel) -> None:
        channel.is_due = True
        self._changed[channel] = None

    def _look(self, now: float) -> Sequence[BrokerAction]:
        """Refresh the channels that are due, not too many at once, and forget those in which nobody is interested."""
        for _ in range(1 + 2 * len(self._refreshes) // LOOKS_PER_REFRESH):
            if not self._refreshes or self._refreshes[0][0] > now:
                break
            _, channel = self._refreshes.popleft()
            if channel.is_over:
                del self._channels[channel.interest.name]
                continue
            self._refreshes.append((now + self._refresh_s, channel))
            self._refresh(channel, now)
        self._is_looking = bool(self._refreshes)
        if self._is_looking:
            self._timers.add(now + self._refresh_s / LOOKS_PER_REFRESH, self._look)
        return []

    def _refresh(self, channel: _Channel, now: float) -> None:
        """Name all members again, and try again what has failed."""
        for id_, member in channel.members.items():
            channel.waiting.setdefault(id_, (member, now))
        if channel.waiting or channel.is_used:
            self._touch(channel)

    def on_server_up(self, server: str, now: float) -> None:
        """Name all members again at a log server that can be reached again: it may have lost its data."""
        for channel in self._channels.values():
            if self._logs.server_of(channel.interest.id) == server:
                self._refresh(channel, now)

    # Commands.

    def flush(self, now: float) -> list[BrokerAction]:
        """Return the commands for what has changed."""
        actions: list[BrokerAction] = []
        while self._changed:
            channel = next(iter(self._changed))
            del self._changed[channel]
            if not channel.is_changing and (channel.waiting or channel.is_due):
                actions += self._send(channel, now)
        return actions

    def _send(self, channel: _Channel, now: float) -> list[BrokerAction]:
        chosen = dict(islice(channel.waiting.items(), CHANGES_MAX))
        for id_ in chosen:
            del channel.waiting[id_]
        channel.is_due, channel.is_changing = False, True
        interest_id, changes = channel.interest.id, [change for change, _ in chosen.values()]

        def command(run_id: str, new_epoch: int, options: LogOptions) -> tuple[CommandPart, ...]:
            return change_command(interest_id, changes, self._options.id, self._leases, run_id, new_epoch, options)

        on_reply = partial(self._changed_at_server, channel, chosen)
        return self._logs.request(interest_id, command, on_reply, now)

    def _changed_at_server(
        self, channel: _Channel, chosen: dict[str, tuple[Change, float]], reply: object, now: float
    ) -> Sequence[BrokerAction]:
        channel.is_changing = False
        appended = self._appended_of(reply)
        if appended is None:
            self._keep(channel, chosen, now)
            return []
        if channel.waiting or appended.has_more:
            self._touch(channel)
        return _publish(channel, appended)

    def _keep(self, channel: _Channel, chosen: dict[str, tuple[Change, float]], now: float) -> None:
        """Try changes again with the next refresh, unless others have come; the lease has ended them after a while."""
        self._counters["presence_failed"] += 1
        for id_, (change, came_at) in chosen.items():
            if change.kind == "enter" and id_ not in channel.members:
                continue
            if now - came_at < self._leases.lease_s:
                channel.waiting.setdefault(id_, (change, came_at))

    def _appended_of(self, reply: object) -> Appended | None:
        if reply is None or isinstance(reply, ErrorReply):
            return None
        try:
            return parse_appended(reply)
        except MalformedMessage:
            self._counters["malformed"] += 1
            return None

    # Members.

    def ask(self, session: Session, frame: AskMembers, now: float) -> list[BrokerAction]:
        """Answer who is present, once the server has said so. Of two questions of one session the later is answered."""
        channel = self._channel(frame.interest.name, now)
        channel.asking[session] = frame.ref
        return [] if channel.is_reading else self._read(channel, now)

    def _read(self, channel: _Channel, now: float) -> list[BrokerAction]:
        asking, channel.asking = channel.asking, {}
        channel.is_reading = True
        interest_id = channel.interest.id

        def command(run_id: str, new_epoch: int, options: LogOptions) -> tuple[CommandPart, ...]:
            return members_command(interest_id, run_id, new_epoch, options)

        return self._logs.request(interest_id, command, partial(self._listed, channel, asking), now)

    def _listed(
        self, channel: _Channel, asking: dict[Session, int], reply: object, now: float
    ) -> Sequence[BrokerAction]:
        channel.is_reading = False
        listed = self._listed_of(reply)
        actions: list[BrokerAction] = []
        if listed is not None:
            actions += _publish(channel, listed.appended)
            if listed.appended.has_more:
                self._touch(channel)
        actions += self._answer(deque(asking.items()), listed, now)
        return [*actions, *self._read(channel, now)] if channel.asking else actions

    def _answer(self, asking: deque[tuple[Session, int]], listed: Listed | None, now: float) -> Sequence[BrokerAction]:
        """Answer some of those who ask, and the others after a while."""
        names = 0 if listed is None else len(listed.members)
        actions: list[BrokerAction] = []
        for _ in range(min(len(asking), 1 + NAMES_AT_ONCE // (1 + names))):
            session, ref = asking.popleft()
            if not session.is_closed:
                actions.append(Transmit(session.connection, _answer(session, ref, listed)))
        if asking:
            self._timers.add(now + ANSWER_INTERVAL_S, self._answer, asking, listed)
        return actions

    def _listed_of(self, reply: object) -> Listed | None:
        if reply is None or isinstance(reply, ErrorReply):
            return None
        try:
            return parse_members(reply)
        except MalformedMessage:
            self._counters["malformed"] += 1
            return None


def _id_of(session: Session) -> str:
    return member_id(session.grant.user, session.name)


def _publish(channel: _Channel, appended: Appended) -> list[BrokerAction]:
    """Publish what a script has appended."""
    epoch, log_channel = appended.position.epoch, channel.interest.log_channel
    return [
        PublishMessage(log_channel, pack_publication(LoggedPublication(epoch, offset, event)))
        for offset, event in appended.publications()
    ]


def _answer(session: Session, ref: int, listed: Listed | None) -> Members | Error:
    if listed is None:
        return Error("log_unavailable", "the server of the log does not answer: try again", "later", RETRY_MS, ref)
    if session.slow_since is not None:
        return Error("unavailable", "too much waits to be sent to you: read it, and try again", "later", RETRY_MS, ref)
    return Members(ref, listed.members, listed.count, listed.appended.position)
