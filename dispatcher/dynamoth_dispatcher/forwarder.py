"""Delivers the copies of a dispatcher: over one outbox per server, relayed by another dispatcher, or later.

Theory of operation
-------------------
A copy for a location at another server goes through the outbox of that server, in one order, and stays there until the
server has answered. A full outbox loses the newest copies. When there is room again, subscribers at the location learn
how many (``LossNotice``); if too many locations are concerned, publishers send heartbeats instead.

A *relayed* copy goes to the dispatcher of the location, which publishes each message once, however many dispatchers
relay it. If no dispatcher receives it, the copy goes to the location itself. Where another dispatcher relays it at
once, a copy waits a little for others, and all go together; so do the markers that must stay behind them.

A heartbeat that a publisher requested waits until the publisher has requested no later one for a while.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dynamoth.errors import MalformedMessage
from dynamoth.machine.bounded import ENTRY_BYTES, BoundedTable
from dynamoth.machine.events import Connect, Disconnect, ErrorReply, Send, earliest
from dynamoth.machine.outbox import Outbox
from dynamoth.names import CLIENTS_CHANNEL, INBOX_PREFIX, is_user_channel, logical_channel, relay_channel
from dynamoth.plan.plan import Location, Server
from dynamoth.protocol.control import LossNotice, ObservationGap, pack_control, seal_control
from dynamoth.protocol.envelope import CONTROL, HEARTBEAT, QUIET_MS_MAX, Envelope, open_envelope, seal
from dynamoth_dispatcher.events import LOCAL, DispatcherAction
from dynamoth_dispatcher.options import ForwarderOptions

_LINK_PREFIX = "to:"


def forward_link(server: str) -> str:
    """Return the name of the link over which a dispatcher forwards to ``server``."""
    return _LINK_PREFIX + server


def observation_gap(server: str) -> Send:
    """Make the publishers at ``server`` send heartbeats: some of their messages may not have been forwarded."""
    return Send(LOCAL, (b"PUBLISH", CLIENTS_CHANNEL, pack_control(ObservationGap(server))))


@dataclass(frozen=True, slots=True)
class _Relay:
    """A copy that was given to another dispatcher."""

    target: Location
    data: bytes
    size: int


class Forwarder:
    """The copies of one dispatcher that are under way.

    Promises: an accepted copy arrives at least once and in the order of acceptance per server, or subscribers there
    learn that it is lost.

    Args:
        server: the id of the dispatcher's own server; copies for locations there are published over ``LOCAL``.
        options: its bounds and delays.
        counters: those of the dispatcher.

    """

    def __init__(self, server: str, options: ForwarderOptions, counters: Counter[str]) -> None:
        self._server = server
        self._options = options
        self._counters = counters
        #: The answers of servers that refused copies, since the latest connection.
        self.refusals: dict[str, str] = {}
        #: The servers of the plan by id; nothing is sent to any other.
        self.servers: Mapping[str, Server] = {}
        #: Server to the commands that must arrive there.
        self._outboxes: dict[str, Outbox] = {}
        #: Server to location to the number of messages that a full outbox has lost, until subscribers there have got a
        #: notice.
        self._lost: dict[str, dict[Location, int]] = {}
        #: Whether messages were lost on more channels than ``_lost`` holds; then publishers must send heartbeats.
        self._lost_unnamed = False
        #: Old physical channel here to the messages relayed to it, oldest first.
        self._relayed: BoundedTable[bytes, OrderedDict[tuple[int, int, int], None]] = BoundedTable(
            options.relay_channels_max, options.relayed_bytes_max, _relayed_bytes, self._note_evicted
        )
        #: Server to the bytes of the unanswered commands of its outbox.
        self._bytes: dict[str, int] = {}
        #: Bytes of the names in ``_lost``.
        self._lost_bytes = 0
        #: When delayed copies are sent; None while there are none.
        self._flush_at: float | None = None
        #: (location, publisher) to the latest heartbeat that the publisher requested, and when; the latest last.
        self._heartbeats: BoundedTable[tuple[Location, int], tuple[Envelope, float]] = BoundedTable(
            options.heartbeats_max,
            options.names_bytes_max,
            lambda key, _: _location_bytes(key[0]),
            lambda key, waiting: self._heartbeats_evicted.append((key, waiting)),
        )
        #: Heartbeats that there is no room for: they are sent at once.
        self._heartbeats_evicted: list[tuple[tuple[Location, int], tuple[Envelope, float]]] = []

    # Copies.

    def forward(self, target: Location, data: bytes) -> list[DispatcherAction]:
        """Send a copy to ``target``: over the link to its server, or here when only the physical channel differs."""
        if target.server == self._server:
            return [Send(LOCAL, (b"PUBLISH", target.physical, data))]
        return self._put(target, (b"PUBLISH", target.physical, data))

    def relay(self, target: Location, data: bytes, *, later: bool = False) -> list[DispatcherAction]:
        """Give a copy to the dispatcher of ``target``, in one order with everything else for it."""
        if target.server == self._server:
            return self.publish_once(target.physical, data)
        return self._put(
            target,
            (b"PUBLISH", relay_channel(target.physical), data),
            _Relay(target, data, _command_bytes(target.physical, data)),
            later=later,
        )

    def relay_later(self, target: Location, data: bytes, now: float) -> list[DispatcherAction]:
        """Relay up to ``relay_delay_s`` later, together with everything else for that dispatcher until then."""
        if self._flush_at is None and target.server != self._server:
            self._flush_at = now + self._options.relay_delay_s
        return self.relay(target, data, later=True)

    def mark(self, target: Location, data: bytes, now: float, *, relayed: bool) -> list[DispatcherAction]:
        """Send a marker behind the copies for its server.

        Without room it is dropped, and the subscriber announces itself again.
        """
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
    ) -> list[DispatcherAction]:
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
        """Return whether there is no room for a command of ``size`` bytes."""
        outbox = self._outboxes.get(server)
        if outbox is None or not len(outbox):
            return False
        return outbox.full or self._bytes[server] + size > self._options.forwards_bytes_max

    def _note_evicted(self, physical: bytes, known: object) -> None:
        self._counters["relayed_evicted"] += 1

    def publish_once(self, physical: bytes, data: bytes) -> list[DispatcherAction]:
        """Publish a relayed message, unless it was published before; markers always."""
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
        """Forget the messages relayed to a physical channel here, as its transition has changed."""
        self._relayed.pop(physical)

    # Time.

    def deadline(self) -> float | None:
        """Return when delayed copies or a heartbeat are due."""
        return earliest(self._flush_at, self._heartbeat_at())

    def on_tick(self, now: float) -> list[DispatcherAction]:
        """Send the delayed copies and heartbeats that are due."""
        actions: list[DispatcherAction] = []
        while (heartbeat_at := self._heartbeat_at()) is not None and heartbeat_at <= now:
            key = next(iter(self._heartbeats))
            waiting = self._heartbeats.pop(key)
            assert waiting is not None
            actions += self._send_heartbeat(key, waiting, now)
        return [*actions, *self.flush()] if self._flush_at is not None and self._flush_at <= now else actions

    def flush(self) -> list[DispatcherAction]:
        """Send all delayed copies now."""
        self._flush_at = None
        return [action for outbox in self._outboxes.values() for action in outbox.flush()]

    # Links.

    def follow(self, servers: Mapping[str, Server]) -> list[DispatcherAction]:
        """Follow the list of servers of the plan: links to others are closed, with the copies that wait for them.

        Nobody needs these: a server has lost all listeners before it leaves the plan.
        """
        self.servers = servers
        gone = [server for server in self._outboxes if server not in servers]
        for server in gone:
            del self._outboxes[server], self._bytes[server]
            self.refusals.pop(server, None)
            for target in self._lost.pop(server, {}):
                self._lost_bytes -= _location_bytes(target)
        return [Disconnect(forward_link(server)) for server in gone]

    def connect(self, server: str) -> list[DispatcherAction]:
        """Open the link to a server of the plan, unless it was opened before."""
        if server in self._outboxes:
            return []
        self._outboxes[server] = Outbox(forward_link(server), self._options.forwards_max)
        self._bytes[server] = 0
        return [Connect(forward_link(server), self.servers[server].url)]

    def link_up(self, link: str) -> list[DispatcherAction]:
        """Send the waiting copies for a server."""
        server = link.removeprefix(_LINK_PREFIX)
        self.refusals.pop(server, None)
        actions: list[DispatcherAction] = [*self._outboxes[server].link_up()]
        return [*actions, *self._report_lost(server)]

    def link_down(self, link: str) -> None:
        """Keep the copies for a server until its link is up again."""
        self._outboxes[link.removeprefix(_LINK_PREFIX)].link_down()

    def on_replies(self, link: str, outbox: Outbox, values: Sequence[Any]) -> list[DispatcherAction]:
        """Handle the answers to copies, whose tag is their outbox."""
        relays: list[_Relay | int] = outbox.replied_all(len(values))
        server = link.removeprefix(_LINK_PREFIX)
        self._bytes[server] -= sum(each if isinstance(each, int) else each.size for each in relays)
        actions: list[DispatcherAction] = [*outbox.flush()] if outbox.held else []
        for relay, value in zip(relays, values, strict=True):
            if isinstance(value, ErrorReply):
                self._counters["forwards_refused"] += 1
                self.refusals[server] = str(value)
            elif isinstance(relay, _Relay) and value == 0:  # its dispatcher is away
                actions += self.forward(relay.target, relay.data)
        return [*actions, *self._report_lost(server)] if self._lost else actions

    # Losses.

    def _lose(self, target: Location) -> None:
        """Count a message that cannot be forwarded to listeners at ``target``."""
        self._counters["forwards_lost"] += 1
        lost = self._lost.setdefault(target.server, {})
        if target in lost:
            lost[target] += 1
            return
        size = _location_bytes(target)
        if len(lost) < self._options.lost_max and self._lost_bytes + size <= self._options.names_bytes_max:
            lost[target] = 1
            self._lost_bytes += size
        else:
            self._lost_unnamed = True

    def _report_lost(self, server: str) -> list[DispatcherAction]:
        """Send loss notices to the subscribers at ``server``, now that its outbox has room again."""
        lost = self._lost.get(server)
        if lost is None:
            return []
        actions: list[DispatcherAction] = []
        while lost and not self._outboxes[server].full:
            target, number = lost.popitem()
            self._lost_bytes -= _location_bytes(target)
            notice = LossNotice(logical_channel(target.physical), number)
            actions += self.forward(target, seal_control(notice))
        if not lost:
            del self._lost[server]
        if not self._lost and self._lost_unnamed:
            self._lost_unnamed = False
            actions.append(observation_gap(self._server))
        return actions

    # Heartbeats.

    def _heartbeat_at(self) -> float | None:
        """Return when the next heartbeat is due."""
        first = next(iter(self._heartbeats), None)
        waiting = None if first is None else self._heartbeats.get(first)
        return None if waiting is None else waiting[1] + self._options.heartbeat_delay_s

    def heartbeat_later(self, target: Location, heartbeat: Envelope, now: float) -> list[DispatcherAction]:
        """Send a heartbeat once its publisher has requested no later one for ``target`` for a while."""
        self._heartbeats.put((target, heartbeat.publisher), (heartbeat._replace(payload=b""), now))
        evicted, self._heartbeats_evicted = self._heartbeats_evicted, []
        self._counters["heartbeats_evicted"] += len(evicted)
        return [action for key, waiting in evicted for action in self._send_heartbeat(key, waiting, now)]

    def _send_heartbeat(
        self, key: tuple[Location, int], waiting: tuple[Envelope, float], now: float
    ) -> list[DispatcherAction]:
        (target, publisher), (heartbeat, asked_at) = key, waiting
        if target.server not in self.servers:
            return []
        quiet_ms = min(heartbeat.quiet_ms + int((now - asked_at) * 1000), QUIET_MS_MAX)
        return self.forward(target, seal(publisher, heartbeat.sequence, heartbeat.epoch, b"", HEARTBEAT, quiet_ms))

    def check(self) -> None:
        """Assert that the counted bytes are those of what waits."""
        for server, outbox in self._outboxes.items():
            assert (self._bytes[server] > 0) == (len(outbox) > 0), (
                f"{self._bytes[server]} bytes in {len(outbox)} copies"
            )
            assert self._lost.get(server) != {}, f"{server} has lost nothing"
        lost = [target for targets in self._lost.values() for target in targets]
        assert self._lost_bytes == sum(map(_location_bytes, lost)), f"{self._lost_bytes} bytes of lost locations"


def _location_bytes(target: Location) -> int:
    return len(target.physical) + ENTRY_BYTES


def _relayed_bytes(physical: bytes, known: OrderedDict[tuple[int, int, int], None]) -> int:
    return len(physical) + ENTRY_BYTES * (len(known) + 2)


def _command_bytes(physical: bytes, data: bytes) -> int:
    return len(physical) + len(data) + ENTRY_BYTES
