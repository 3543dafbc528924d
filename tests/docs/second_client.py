"""The protocol, implemented a second time from ``docs/protocol.md`` alone: nothing of the project is imported here.

``test_protocol.py`` compares it with the code. Where both differ, the page is wrong or not exact enough.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

import msgpack

PREFIX = b"__dynamoth__:"
FORWARDED, FIRST, ROUTE_CHANGED, HEARTBEAT, CONTROL, RAW = 0x01, 0x02, 0x04, 0x08, 0x10, 0x20
PREPARED, ACTIVE, SETTLED = 1, 2, 3
SINGLE, ALL_SUBSCRIBERS, ALL_PUBLISHERS = 1, 2, 3
SLOTS = 4096

Route = list[Any]
Location = tuple[str, bytes]


def pack(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value)
    return packed


# Names.


def inbox(client: int) -> bytes:
    return PREFIX + b"inbox:%016x" % client


def operator_inbox(request: int) -> bytes:
    return PREFIX + b"operator:inbox:%016x" % request


def replica(channel: bytes, epoch: int) -> bytes:
    sharded = PREFIX + b"s:"
    if channel.startswith(sharded):
        return PREFIX + b"sr:%08x:" % epoch + channel[len(sharded) :]
    return PREFIX + b"r:%08x:" % epoch + channel


def forward_request(physical: bytes) -> bytes:
    return PREFIX + b"forward:" + physical[len(PREFIX) :]


def relay(physical: bytes) -> bytes:
    return PREFIX + b"agent:relay:" + physical


# Envelopes.


class Envelope(NamedTuple):
    flags: int
    publisher: int
    sequence: int
    quiet_ms: int
    epoch: int
    payload: bytes


def seal(envelope: Envelope) -> bytes:
    return b"".join(
        (
            b"\xd7\x0d\x01",
            envelope.flags.to_bytes(1, "big"),
            envelope.publisher.to_bytes(8, "big"),
            envelope.sequence.to_bytes(6, "big"),
            envelope.quiet_ms.to_bytes(2, "big"),
            envelope.epoch.to_bytes(4, "big"),
            envelope.payload,
        )
    )


def unseal(data: bytes) -> Envelope | None:
    """Return an envelope; None for a message of a plain Redis client. Raises ValueError: it is malformed."""
    if data[:3] != b"\xd7\x0d\x01":
        return None
    if len(data) < 24 or data[3] >= 0x40:
        raise ValueError("malformed")
    publisher, sequence, quiet_ms, epoch = (
        int.from_bytes(data[begin:end], "big") for begin, end in ((4, 12), (12, 18), (18, 20), (20, 24))
    )
    return Envelope(data[3], publisher, sequence, quiet_ms, epoch, data[24:])


# The ring, and where a route leads.


def ring_hash(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big")


def ring_home(servers: list[str], points_each: int, channel: bytes) -> str:
    points = sorted((ring_hash(f"{id_}#{index}".encode()), id_) for id_ in servers for index in range(points_each))
    at = bisect_left([point for point, _ in points], (2 * slot(channel) + 1) << 51)
    return points[at % len(points)][1]


def slot(channel: bytes) -> int:
    return ring_hash(channel) >> 52


def slot_name(channel: bytes) -> bytes:
    return PREFIX + b"slot:%04d" % slot(channel)


def locations(route: Route, channel: bytes) -> list[Location]:
    epoch, mode, servers = route[:3]
    physical = channel if mode == SINGLE else replica(channel, epoch)
    return [(server, physical) for server in servers]


def publishes_at(route: Route, channel: bytes, publisher: int) -> list[Location]:
    places = locations(route, channel)
    return [places[(publisher ^ route[0]) % len(places)]] if route[1] == ALL_SUBSCRIBERS else places


def listens_at(route: Route, channel: bytes, subscriber: int) -> list[Location]:
    places = locations(route, channel)
    return [places[(subscriber ^ route[0]) % len(places)]] if route[1] == ALL_PUBLISHERS else places


# The stored plan.


def followed_route(entry: list[Any]) -> Route:
    phase, route, older = entry[:3]
    return list(older[-1] if phase == PREPARED else route)


def is_believed(version: bytes | None, run: bytes | None, run_id: str) -> bool:
    return version is not None and run is not None and run in (b"", run_id.encode())


@dataclass
class StoredPlan:
    """The hash at one server."""

    version: int
    servers: dict[str, str]
    ring: list[str]
    points_each: int
    rules_version: int = 0
    #: Patterns without anything special in them, for this test: a rule of one channel.
    rules: list[list[Any]] = field(default_factory=list[list[Any]])
    entries: dict[bytes, list[Any]] = field(default_factory=dict[bytes, list[Any]])

    def fields(self, run_id: str, ring_mark: bytes) -> dict[bytes, bytes]:
        """Return the hash as it is stored."""
        header = [[[id_, url] for id_, url in self.servers.items()], self.ring, self.points_each, SLOTS]
        return {
            b"@version": b"%d" % self.version,
            b"@cluster": pack(header),
            b"@run": run_id.encode(),
            b"@compatibility": pack([self.rules_version, self.rules]),
            b"@ring": ring_mark,
            **{b"c:" + channel: pack(entry) for channel, entry in self.entries.items()},
        }

    @classmethod
    def read(cls, stored: dict[bytes, bytes]) -> StoredPlan:
        """Read the hash."""
        servers, ring, points_each = msgpack.unpackb(stored[b"@cluster"])[:3]
        rules_version, rules = msgpack.unpackb(stored.get(b"@compatibility", b"\x92\x00\x90"))[:2]
        entries = {name[2:]: msgpack.unpackb(value) for name, value in stored.items() if name.startswith(b"c:")}
        version = int(stored[b"@version"])
        return cls(version, dict(servers), ring, points_each, rules_version, rules, entries)

    def rule(self, channel: bytes) -> list[Any] | None:
        return None if channel.startswith(PREFIX) else next((rule for rule in self.rules if rule[0] == channel), None)

    def home(self, channel: bytes) -> Route:
        rule = self.rule(channel)
        return [0, SINGLE, [ring_home(self.ring, self.points_each, channel) if rule is None else rule[1]]]

    def route(self, channel: bytes) -> Route:
        """Return the route that clients follow."""
        entry = self.entries.get(channel)
        if entry is None and self.rule(channel) is None:
            entry = self.entries.get(slot_name(channel))
        return self.home(channel) if entry is None else followed_route(entry)


# Order, copies and gaps.


@dataclass(frozen=True)
class Gap:
    count: int | None


class Held(NamedTuple):
    payload: bytes | None
    at: float
    previous: float
    expected: int


Delivered = bytes | Gap

HOLD_S, LATE_S, AHEAD_MAX, FOLLOWERS_MAX, NUMBER_MAX = 2.0, 20.0, 10_000, 100, 2**44


class Stream:
    """One publisher's messages on one channel, for a subscription that was confirmed at ``due_since``."""

    def __init__(self, due_since: float) -> None:
        self.expected: int | None = None
        self.due_since = due_since
        self.held: dict[int, Held] = {}
        self.begun = 0
        self.begun_at = 0.0

    def arrive(self, envelope: Envelope, now: float) -> list[Delivered]:
        number, flags = envelope.sequence, envelope.flags
        message = Held(
            None if flags & HEARTBEAT else envelope.payload, now, now - envelope.quiet_ms / 1000, self.expected or 0
        )
        if number > NUMBER_MAX:
            return []
        if self.expected is None:
            return self._arrive_unknown(number, flags, message)
        if message.payload is None:
            if number >= self.expected:
                self.held.setdefault(number, message)
            return self._bounded(now)
        if number < self.expected:
            return self._below(number, flags, now)
        if number == self.expected:
            return self._deliver(number, message.payload)
        if number - self.expected <= AHEAD_MAX:
            if flags & FIRST:
                return self._restart(number, message.payload, now)
            if message.previous < self.due_since and number <= min(self.held, default=number):
                return self._begin_at(number, message.payload, now)
        elif flags & FIRST:
            message = message._replace(previous=float("-inf"))
        self._hold(number, message)
        return self._bounded(now)

    def _arrive_unknown(self, number: int, flags: int, message: Held) -> list[Delivered]:
        is_due = message.previous >= self.due_since
        if message.payload is None:
            if is_due:
                self.held.setdefault(number, message)
                return self._bounded(message.at)
            if not self.held:
                self._expect(number + 1, message.at)
            return []
        if flags & FIRST:
            return self._restart(number, message.payload, message.at)
        waits = flags & ROUTE_CHANGED and is_due and message.at - message.previous < 65.535
        if not waits and number <= min(self.held, default=number):
            return self._begin_at(number, message.payload, message.at)
        self._hold(number, message)
        if len(self.held) <= FOLLOWERS_MAX and self._published_before(min(self.held)) < self.due_since:
            return self._release(message.at)
        return self._bounded(message.at)

    def tick(self, now: float) -> list[Delivered]:
        """Release what has been held for too long."""
        out: list[Delivered] = []
        while self.held and self.held[min(self.held)].at + HOLD_S <= now:
            out += self._release(now)
        return out

    def _release(self, now: float) -> list[Delivered]:
        lowest = min(self.held)
        first = self.held[lowest]
        if self.expected is not None and first.expected < self.expected < lowest - AHEAD_MAX:
            del self.held[lowest]
            return [Gap(1)]
        skips_itself = first.payload is None
        count = None if self.expected is None else lowest - self.expected + skips_itself
        is_due = self._published_before(lowest) >= self.due_since
        if skips_itself:
            del self.held[lowest]
        self._expect(lowest + skips_itself, now)
        return [*([Gap(count)] if is_due else []), *self._run()]

    def _published_before(self, lowest: int) -> float:
        """When the message before the lowest one held was published at the latest, by the quickest of its followers."""
        latest = self.held[lowest].previous
        earlier = 0.0
        number = lowest
        while (message := self.held.get(number)) is not None and message.payload is not None:
            latest = min(latest, message.previous - earlier)
            earlier += message.at - message.previous
            number += 1
        return latest

    def _restart(self, number: int, payload: bytes, now: float) -> list[Delivered]:
        out: list[Delivered] = []
        while self.held and min(self.held) < number:
            out += self._release(now)
        if self.expected is not None and self.expected > number:
            return out
        return [*out, *self._begin_at(number, payload, now)]

    def _begin_at(self, number: int, payload: bytes, now: float) -> list[Delivered]:
        self._expect(number, now)
        return self._deliver(number, payload)

    def _expect(self, number: int, now: float) -> None:
        self.expected = self.begun = number
        self.begun_at = now

    def _deliver(self, number: int, payload: bytes) -> list[Delivered]:
        self.held.pop(number, None)
        self.expected = number + 1
        return [payload, *self._run()]

    def _run(self) -> list[Delivered]:
        out: list[Delivered] = []
        assert self.expected is not None
        while (message := self.held.get(self.expected)) is not None and message.payload is not None:
            del self.held[self.expected]
            out.append(message.payload)
            self.expected += 1
        return out

    def _below(self, number: int, flags: int, now: float) -> list[Delivered]:
        if number >= self.begun or flags & FORWARDED or now - self.begun_at <= LATE_S:
            return []
        self.begun_at = now
        return [Gap(None)]

    def _hold(self, number: int, message: Held) -> None:
        known = self.held.get(number)
        if known is None or known.payload is None:
            self.held[number] = message

    def _bounded(self, now: float) -> list[Delivered]:
        return self._release(now) if len(self.held) > AHEAD_MAX else []
