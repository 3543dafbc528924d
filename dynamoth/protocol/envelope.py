"""The envelope around each payload: 24 bytes that carry deduplication, order and loss detection.

Layout, big-endian, fixed so that one ``struct`` call opens it::

    0   3  magic, the third byte is the wire version; no UTF-8 text and no JSON begins with it
    3   1  flags
    4   8  publisher: 64-bit random id of the client (or dispatcher) that numbered the message
    12  6  sequence: per (publisher, channel), +1 for each message
    18  2  milliseconds since the publisher's previous message of this sequence, rounded down, at most 65535
    20  4  epoch that the sender followed for the channel
    24  .  the payload, untouched

A message without the magic came from a plain Redis client and is delivered as it is.
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

from dynamoth.errors import MalformedMessage

MAGIC = b"\xd7\x0d\x01"
HEADER_BYTES = 24
SEQUENCE_MAX = 2**48 - 1
QUIET_MS_MAX = 2**16 - 1
QUIET_BITS = 16

FORWARDED = 0x01
"""A dispatcher forwarded this copy; ``epoch`` is the newest the dispatcher knew, not the publisher's."""
FIRST = 0x02
"""The sequence begins (again) here: subscribers do not wait for earlier numbers of this publisher."""
ROUTE_CHANGED = 0x04
"""The publisher's previous messages on the channel took another route and may still be on their way, or no dispatcher
may have observed them. Subscribers that were confirmed before the previous one was published must get them."""
HEARTBEAT = 0x08
"""No payload: ``sequence`` is the number of the publisher's latest message, so that a lost tail is noticed."""
CONTROL = 0x10
"""The payload is a control message to clients; ``publisher`` and ``sequence`` mean nothing."""
RAW = 0x20
"""The payload came from a plain Redis client at a server where its channel is not; the dispatcher there numbered it."""

KNOWN_FLAGS = FORWARDED | FIRST | ROUTE_CHANGED | HEARTBEAT | CONTROL | RAW

_HEADER = Struct(">3sBQQI")
pack_plain_header = Struct(">12sQI").pack
"""Makes a header without flags, for the hottest path: ``plain_head`` of the publisher, sequence << QUIET_BITS |
quiet_ms, epoch."""
unpack_header = _HEADER.unpack_from
"""Opens a header without checks, for hot paths: magic, flags, publisher, sequence << QUIET_BITS | quiet_ms, epoch."""
unpack_numbered = Struct(">IQQ").unpack_from
"""Opens a header without checks and without the epoch, for the hottest path: ``head_of`` the flags, publisher,
sequence << QUIET_BITS | quiet_ms."""
_FLAGS_OFFSET = 3


class Envelope(NamedTuple):
    """An opened envelope."""

    flags: int
    publisher: int
    sequence: int
    epoch: int
    payload: bytes
    quiet_ms: int = 0

    def previous_at(self, now: float) -> float:
        """Return the latest time at which the previous message was published, if this one came at ``now``.

        Of a heartbeat, the message of its number.
        """
        return now - self.quiet_ms / 1000


def head_of(flags: int) -> int:
    """Return the magic and ``flags`` as the one number that ``unpack_numbered`` makes of them."""
    return int.from_bytes(MAGIC, "big") << 8 | flags


def plain_head(publisher: int) -> bytes:
    """Return what envelopes of a publisher begin with, if they have no flags, for ``pack_plain_header``."""
    return MAGIC + b"\0" + publisher.to_bytes(8, "big")


def is_enveloped(data: bytes) -> bool:
    """Tell whether ``data`` claims to be an envelope (it may still be malformed)."""
    return data[:3] == MAGIC


def seal(publisher: int, sequence: int, epoch: int, payload: bytes, flags: int = 0, quiet_ms: int = 0) -> bytes:
    """Put ``payload`` into an envelope."""
    return _HEADER.pack(MAGIC, flags, publisher, sequence << QUIET_BITS | quiet_ms, epoch) + payload


def whole_ms(duration_s: float) -> int:
    """Return a time since the previous message as an envelope has it: whole milliseconds, rounded down, bounded."""
    return min(int(duration_s * 1000), QUIET_MS_MAX)


def open_envelope(data: bytes) -> Envelope:
    """Open an envelope.

    Raises:
        MalformedMessage: when ``data`` is shorter than a header, has another magic, or flags of a newer wire version.

    """
    if len(data) < HEADER_BYTES:
        raise MalformedMessage(f"an envelope has at least {HEADER_BYTES} bytes, this one has {len(data)}")
    magic, flags, publisher, number, epoch = unpack_header(data)
    if magic != MAGIC:
        raise MalformedMessage(f"not an envelope: it begins with {magic!r} instead of {MAGIC!r}")
    if flags & ~KNOWN_FLAGS:
        raise MalformedMessage(f"unknown envelope flags {flags:#04x}; the sender is newer than this software")
    return Envelope(flags, publisher, number >> QUIET_BITS, epoch, data[HEADER_BYTES:], number & QUIET_MS_MAX)


def rerouted(data: bytes, epoch: int) -> bytes:
    """Return an envelope as its publisher sends it again, by another route of this epoch."""
    return _marked(data, epoch, ROUTE_CHANGED)


def forwarded(data: bytes, epoch: int, flags: int = 0) -> bytes:
    """Return a dispatcher's copy of an envelope: marked, with the dispatcher's epoch and more ``flags``."""
    return _marked(data, epoch, FORWARDED | flags)


def _marked(data: bytes, epoch: int, flags: int) -> bytes:
    marked = bytes((data[_FLAGS_OFFSET] | flags,))
    return data[:_FLAGS_OFFSET] + marked + data[4:20] + epoch.to_bytes(4, "big") + data[24:]
