"""Gets copies of messages to where the dispatcher wants them: over one outbox per server, relayed, or later.

Theory of operation
-------------------
A copy for a location at another server goes through the outbox of that server, in one order, and stays there until the
server has answered. An outbox that is full loses the newest; subscribers at the location are told how many
(``LossNotice``) when there is room again; when too many locations are concerned, publishers are asked for heartbeats.

A *relayed* copy goes to the dispatcher of the location instead, which publishes each message once, whoever else relays
it too. If no dispatcher hears it, it goes to the location itself. Where another dispatcher relays it at once, a copy
waits a little for others, and all go together; so do the markers that must stay behind it.

A heartbeat that a publisher has asked for waits until the publisher has asked for no later one for a while.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dynamoth.errors import MalformedMessage
from dynamoth.machine.bounded import ENTRY_BYTES, BoundedTable
from dynamoth.machine.events import Connect, ErrorReply, Send, earliest
from dynamoth.machine.outbox import Outbox
from dynamoth.names import CLIENTS_CHANNEL, INBOX_PREFIX, is_user_channel, logical_channel, relay_channel
from dynamoth.plan.plan import Location, Server
from dynamoth.protocol.control import LossNotice, ObservationGap, pack_control, seal_control
from dynamoth.protocol.envelope import CONTROL, HEARTBEAT, QUIET_MS_MAX, Envelope, open_envelope, seal

LOCAL = "local"
_LINK_PREFIX = "to:"


def forward_link(server: str) -> str:
    """Return the name of the link over which a dispatcher forwards to ``server``."""
    return _LINK_PREFIX + server


@dataclass(frozen=True, slots=True)
class ForwarderOptions:
    """What a dispatcher may choose about copies under way."""

    forwards_max: int = 100_000
    """Messages per server that wait to be forwarded at most; past it the newest are lost and subscribers are told."""
    forwards_bytes_max: int = 256 * 1024 * 1024
    """Their bytes per server at most; a message that is larger goes where nothing else waits."""
    lost_max: int = 10_000
    """Locations per server whose lost messages are counted at most; past it publishers send heartbeats instead."""
    relayed_max: int = 10_000
    """Messages per location that are known to have been relayed; one that is relayed again later comes twice."""
    relay_channels_max: int = 10_000
    """Channels of which such messages are remembered at most; the one that was used the longest ago gives way."""
    relayed_bytes_max: int = 32 * 1024 * 1024
    """Memory for them, about."""
    relay_delay_s: float = 0.02
    """A copy that another dispatcher relays too, and a marker behind it, wait so long for others."""
    heartbeat_delay_s: float = 5.0
    """A heartbeat that a publisher asks for waits so long for its message: longer than a slow server takes."""
    heartbeats_max: int = 100_000
    """Such heartbeats that wait at most; past it the oldest is sent."""
    names_bytes_max: int = 32 * 1024 * 1024
    """Memory for the names of channels that wait for a heartbeat, and of those whose lost messages are counted."""


@dataclass(frozen=True, slots=True)
class _Relay:
    """A copy that was given to another dispatcher."""

    target: Location
    data: bytes
    size: int


class Forwarder:
    """What a dispatcher has under way. See the module's text.

    Promises: a copy that is accepted arrives at least once and in the order of acceptance per server, or its loss is
    told to the subscribers there.
    """

    def __init__(self, server: str, options: ForwarderOptions, counters: Counter[str]) -> None:
        """Make one with nothing under way.

        Args:
            server: the id of the dispatcher's own server; copies for locations there are published over ``LOCAL``.
            options: see :class:`ForwarderOptions`.
            counters: those of the dispatcher.

        """
        self._server = server
        self._options = options
        self._counters = counters
        #: What servers have answered to copies that they refused, since the latest connection.
        self.refusals: dict[str, str] = {}
        #: The servers of the plan by id; nothing is sent to any other.
        self.servers: Mapping[str, Server] = {}
        #: Server to the commands that must arrive there.
        self._outboxes: dict[str, Outbox] = {}
        #: Server to location to the number of messages lost to a full outbox, until subscribers there can be told.
        self._lost: dict[str, dict[Location, int]] = {}
        #: Whether messages were lost on more channels than ``_lost`` holds; their publishers are to say what they sent.
        self._lost_unnamed = False
        #: Old physical channel here to the messages that were relayed to it, oldest first.
        self._relayed: BoundedTable[bytes, OrderedDict[tuple[int, int, int], None]] = BoundedTable(
            options.relay_channels_max, options.relayed_bytes_max, _relayed_bytes, self._note_evicted
        )
        #: Server to the bytes of the unanswered commands of its outbox.
        self._bytes: dict[str, int] = {}
        #: Bytes of the names in ``_lost``, and in ``_heartbeats``.
        self._lost_bytes = 0
        self._heartbeats_bytes = 0
        #: When what was put to be sent later is sent; None while there is nothing.
        self._flush_at: float | None = None
        #: (location, publisher) to the latest heartbeat that the publisher has asked for, and when; latest last.
        self._heartbeats: OrderedDict[tuple[Location, int], tuple[Envelope, float]] = OrderedDict()

    # Copies.

    def forward(self, target: Location, data: bytes) -> list[Any]:
        """Send a copy to ``target``: over the link to its server, or here when only the physical channel differs."""
        if target.server == self._server:
            return [Send(LOCAL, (b"PUBLISH", target.physical, data))]
        return self._put(target, (b"PUBLISH", target.physical, data))

    def relay(self, target: Location, data: bytes, *, later: bool = False) -> list[Any]:
        """Give a copy to the dispatcher of ``target``, in one order with everything else that is given to it."""
        if target.server == self._server:
            return self.publish_once(target.physical, data)
        return self._put(
            target,
            (b"PUBLISH", relay_channel(target.physical), data),
            _Relay(target, data, _command_bytes(target.physical, data)),
            later=later,
        )

    def relay_later(self, target: Location, data: bytes, now: float) -> list[Any]:
        """Do as ``relay``, but up to ``relay_delay_s`` later, with all that is given to that dispatcher until then."""
        if self._flush_at is None and target.server != self._server:
            self._flush_at = now + self._options.relay_delay_s
        return self.relay(target, data, later=True)

    def mark(self, target: Location, data: bytes, now: float, *, relayed: bool) -> list[Any]:
        """Send a marker behind the copies for its server; where there is no room, not: it is asked for again."""
        if self._is_full(target.server, _command_bytes(target.physical, data)):
            return []
        return self.relay_later(target, data, now) if relayed else self.forward(target, data)

    def _put(
        self,
        target: Location,
        command: tuple[bytes, bytes, bytes],
        token: _Relay | None = None,
        *,
        later: bool = False,
    ) -> list[Any]:
        actions = self.connect(target.server)
        outbox = self._outboxes[target.server]
        size = token.size if token is not None else _command_bytes(target.physical, command[-1])
        if self._is_full(target.server, size):
            self._lose(target)
            return actions
        self._bytes[target.server] += size
        if later:
            outbox.put_later(command, token or size)
        else:
            actions += outbox.put(command, token or size)
        return actions

    def _is_full(self, server: str, size: int) -> bool:
        """Tell whether there is no room for a command of ``size`` bytes."""
        outbox = self._outboxes.get(server)
        if outbox is None or not len(outbox):
            return False
        return outbox.full or self._bytes[server] + size > self._options.forwards_bytes_max

    def _note_evicted(self, physical: bytes, known: object) -> None:
        self._counters["relayed_evicted"] += 1

    def publish_once(self, physical: bytes, data: bytes) -> list[Any]:
        """Publish what was relayed, unless another dispatcher has relayed the same message; markers always."""
        if not is_user_channel(physical) and not physical.startswith(INBOX_PREFIX):
            self._counters["relays_refused"] += 1
            return []
        try:
            envelope = open_envelope(data)
        except MalformedMessage:
            self._counters["malformed_messages"] += 1
            return []
        if not envelope.flags & CONTROL:
            known = self._relayed.get(physical) or OrderedDict()
            key = (envelope.publisher, envelope.sequence, envelope.flags & HEARTBEAT)
            if key in known:
                return []
            known[key] = None
            if len(known) > self._options.relayed_max:
                known.popitem(last=False)
            self._relayed.put(physical, known)
        return [Send(LOCAL, (b"PUBLISH", physical, data))]

    def forget_relayed(self, physical: bytes) -> None:
        """Forget what was relayed to a physical channel here: its transition has changed."""
        self._relayed.pop(physical)

    # Time.

    def deadline(self) -> float | None:
        """Return when something is due."""
        return earliest(self._flush_at, self._heartbeat_at())

    def due(self, now: float) -> list[Any]:
        """Send what is due."""
        actions: list[Any] = []
        while (heartbeat_at := self._heartbeat_at()) is not None and heartbeat_at <= now:
            actions += self._send_heartbeat(now)
        return [*actions, *self.flush()] if self._flush_at is not None and self._flush_at <= now else actions

    def flush(self) -> list[Any]:
        """Send now what waits for others."""
        self._flush_at = None
        return [action for outbox in self._outboxes.values() for action in outbox.flush()]

    # Links.

    def connect(self, server: str) -> list[Any]:
        """Return what opens the link to a server of the plan, nothing if it was opened before."""
        if server in self._outboxes:
            return []
        self._outboxes[server] = Outbox(forward_link(server), self._options.forwards_max)
        self._bytes[server] = 0
        return [Connect(forward_link(server), self.servers[server].url)]

    def link_up(self, link: str) -> list[Any]:
        """Send what waits for a server."""
        server = link.removeprefix(_LINK_PREFIX)
        self.refusals.pop(server, None)
        actions: list[Any] = self._outboxes[server].link_up()
        return [*actions, *self._tell_lost(server)]

    def link_down(self, link: str) -> None:
        """Keep what waits for a server."""
        self._outboxes[link.removeprefix(_LINK_PREFIX)].link_down()

    def replied(self, link: str, outbox: Outbox, values: Sequence[Any]) -> list[Any]:
        """Take the answers to copies, whose tag is their outbox."""
        relays: list[_Relay | int] = outbox.replied_all(len(values))
        server = link.removeprefix(_LINK_PREFIX)
        self._bytes[server] -= sum(each if isinstance(each, int) else each.size for each in relays)
        actions: list[Any] = [*outbox.flush()] if outbox.held else []
        for relay, value in zip(relays, values, strict=True):
            if isinstance(value, ErrorReply):
                self._counters["forwards_refused"] += 1
                self.refusals[server] = str(value)
            elif isinstance(relay, _Relay) and value == 0:  # its dispatcher is away
                actions += self.forward(relay.target, relay.data)
        return [*actions, *self._tell_lost(server)] if self._lost else actions

    # Losses.

    def _lose(self, target: Location) -> None:
        """Count a message that cannot be forwarded, for those who listen at ``target``."""
        self._counters["forwards_lost"] += 1
        lost = self._lost.setdefault(target.server, {})
        if target in lost:
            lost[target] += 1
            return
        size = len(target.physical) + ENTRY_BYTES
        if len(lost) < self._options.lost_max and self._lost_bytes + size <= self._options.names_bytes_max:
            lost[target] = 1
            self._lost_bytes += size
        else:
            self._lost_unnamed = True

    def _tell_lost(self, server: str) -> list[Any]:
        """Tell the subscribers at ``server`` what a full outbox has cost them, now that there is room again."""
        lost = self._lost.get(server)
        if lost is None:
            return []
        actions: list[Any] = []
        while lost and not self._outboxes[server].full:
            target, number = lost.popitem()
            self._lost_bytes -= len(target.physical) + ENTRY_BYTES
            notice = LossNotice(logical_channel(target.physical), number)
            actions += self.forward(target, seal_control(notice))
        if not lost:
            del self._lost[server]
        if not self._lost and self._lost_unnamed:
            self._lost_unnamed = False
            actions.append(self.ask_publishers())
        return actions

    def ask_publishers(self) -> Send:
        """Have the publishers here say what they sent: it may not have been forwarded."""
        return Send(LOCAL, (b"PUBLISH", CLIENTS_CHANNEL, pack_control(ObservationGap(self._server))))

    # Heartbeats.

    def _heartbeat_at(self) -> float | None:
        """Return when the next heartbeat is due."""
        if not self._heartbeats:
            return None
        _, asked_at = next(iter(self._heartbeats.values()))
        return asked_at + self._options.heartbeat_delay_s

    def heartbeat_later(self, target: Location, heartbeat: Envelope, now: float) -> list[Any]:
        """Send a heartbeat when its publisher asks for no later one for ``target`` for a while."""
        key = target, heartbeat.publisher
        if key not in self._heartbeats:
            self._heartbeats_bytes += len(target.physical) + ENTRY_BYTES
        self._heartbeats[key] = heartbeat._replace(payload=b""), now
        self._heartbeats.move_to_end(key)
        actions: list[Any] = []
        while self._heartbeats and self._are_heartbeats_too_many():
            self._counters["heartbeats_evicted"] += 1
            actions += self._send_heartbeat(now)
        return actions

    def _are_heartbeats_too_many(self) -> bool:
        too_large = self._heartbeats_bytes > self._options.names_bytes_max
        return too_large or len(self._heartbeats) > self._options.heartbeats_max

    def _send_heartbeat(self, now: float) -> list[Any]:
        (target, publisher), (heartbeat, asked_at) = self._heartbeats.popitem(last=False)
        self._heartbeats_bytes -= len(target.physical) + ENTRY_BYTES
        if target.server not in self.servers:
            return []
        quiet_ms = min(heartbeat.quiet_ms + int((now - asked_at) * 1000), QUIET_MS_MAX)
        return self.forward(target, seal(publisher, heartbeat.sequence, heartbeat.epoch, b"", HEARTBEAT, quiet_ms))


def _relayed_bytes(physical: bytes, known: OrderedDict[tuple[int, int, int], None]) -> int:
    return len(physical) + ENTRY_BYTES * (len(known) + 2)


def _command_bytes(physical: bytes, data: bytes) -> int:
    return len(physical) + len(data) + ENTRY_BYTES
