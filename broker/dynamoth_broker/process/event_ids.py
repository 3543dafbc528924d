"""The ids of server-sent events: the positions of a stream, so that a browser that reconnects goes on from there.

A browser sends the last id back in a header, which proxies and servers bound. So an id is binary, in base64url: the
version, then per subscription the first 4 bytes of the interest id, the epoch (8 bytes), and the offset in base 128,
lowest digits first. 4 bytes are enough to distinguish the few subscriptions of one stream; where they are not, the id
says nothing of either.
"""

from __future__ import annotations

from base64 import b64decode, urlsafe_b64decode, urlsafe_b64encode
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Final

from dynamoth.edge.frames import (
    Connect,
    Data,
    Error,
    Frame,
    Gap,
    Subscribe,
    Subscribed,
    Unsubscribe,
    Unsubscribed,
    UserFrame,
    read_position,
)
from dynamoth.edge.publications import Position
from dynamoth.errors import MalformedMessage

HEADER_BYTES_MAX = 8190
"""Bound of the first line of a request, and of each header: proxies allow about as much."""

LOGGED_MAX = 300
"""Logged subscriptions of one stream. The longest id of so many, with offsets of 53 bits, has 8,002 characters."""

TAG_BYTES = 4
EPOCH_BYTES = 8
OFFSET_BYTES_MAX = 8
VERSION = b"\x01"


@dataclass(slots=True)
class StreamPositions:
    """Where one stream is, as far as frames were queued."""

    #: Packed, by interest id, in the order of the subscriptions.
    _entries: dict[str, bytes] = field(default_factory=dict[str, bytes])
    #: Logged interests that were asked for, with or without an answer: the interest id, and the ``ref``.
    _asked: dict[str, int] = field(default_factory=dict[str, int])

    def refusal(self, frame: UserFrame, *, is_logged: bool) -> Error | None:
        """Note a subscription that is asked for; return why it cannot be had, if it cannot."""
        if isinstance(frame, Unsubscribe):
            self._asked.pop(frame.s, None)
        if not isinstance(frame, Subscribe) or not is_logged:
            return None
        request = frame.request
        if request.interest.id not in self._asked and len(self._asked) >= LOGGED_MAX:
            message = (
                f"a stream of server-sent events has at most {LOGGED_MAX} logged subscriptions, as a header holds their"
                " positions: open another stream, or use WebSocket"
            )
            return Error("too_many", message, ref=request.ref)
        self._asked[request.interest.id] = request.ref
        return None

    def note(self, frame: Frame) -> None:
        """Note where the stream is once this frame has been sent."""
        match frame:
            case Data(s, _, int(offset)) if s in self._entries:
                self._entries[s] = self._entries[s][: TAG_BYTES + EPOCH_BYTES] + _packed(offset)
            case Subscribed(_, s, Position(epoch, offset)) | Gap(s, position=Position(epoch, offset)):
                self._entries[s] = _tag(s) + epoch.to_bytes(EPOCH_BYTES) + _packed(offset)
            case Unsubscribed(s):
                self._entries.pop(s, None)
                self._asked.pop(s, None)
            case Error(ref=int(ref)):
                self._asked = {s: each for s, each in self._asked.items() if each != ref or s in self._entries}
            case _:
                pass

    def event_id(self) -> str | None:
        """Return the id for the next event; None while nothing is logged."""
        if not self._entries:
            return None
        return urlsafe_b64encode(VERSION + b"".join(self._entries.values())).rstrip(b"=").decode()


def resumed(connect: Connect, event_id: str | None) -> Connect:
    """Return a ``connect`` that begins where the last event of a stream was; as it is if that cannot be read."""
    if not event_id:
        return connect
    try:
        known = _read(event_id)
    except MalformedMessage:
        return connect
    tags = [_tag(each.interest.id) for each in connect.subs]
    counts = Counter(tags)
    subs = tuple(
        each if counts[tag] > 1 else replace(each, since=known.get(tag, each.since))
        for each, tag in zip(connect.subs, tags, strict=True)
    )
    return replace(connect, subs=subs)


def _read(event_id: str) -> dict[bytes, Position]:
    """Return the positions of an id by tag. Raises MalformedMessage: users can forge it."""
    if len(event_id) > HEADER_BYTES_MAX:
        raise MalformedMessage("an id of an event that is too long")
    try:
        data = _Reader(b64decode(event_id + "=" * (-len(event_id) % 4), altchars=b"-_", validate=True))
    except ValueError as error:
        raise MalformedMessage("an id of an event that is not base64url") from error
    if data.take(len(VERSION)) != VERSION:
        raise MalformedMessage("an id of an event in another version")
    known: dict[bytes, Position] = {}
    twice: set[bytes] = set()
    for _ in range(LOGGED_MAX):
        if data.is_at_end:
            break
        tag = data.take(TAG_BYTES)
        position = read_position({"epoch": data.take(EPOCH_BYTES).hex(), "offset": data.take_number()})
        if tag in known:
            twice.add(tag)
        known[tag] = position
    if not data.is_at_end:
        raise MalformedMessage("an id of an event with too many positions")
    return {tag: position for tag, position in known.items() if tag not in twice}


class _Reader:
    """Reads packed bytes from front to back."""

    def __init__(self, data: bytes) -> None:
        self._data: Final = data
        self._at = 0

    @property
    def is_at_end(self) -> bool:
        return self._at == len(self._data)

    def take(self, count: int) -> bytes:
        """Return the next bytes. Raises MalformedMessage."""
        taken = self._data[self._at : self._at + count]
        if len(taken) < count:
            raise MalformedMessage("an id of an event that was cut off")
        self._at += count
        return taken

    def take_number(self) -> int:
        """Return the next number in base 128. Raises MalformedMessage."""
        number = 0
        for place in range(OFFSET_BYTES_MAX):
            [digit] = self.take(1)
            number |= (digit & 0x7F) << 7 * place
            if digit < 0x80:
                return number
        raise MalformedMessage("an id of an event with an offset that is too long")


def _tag(interest_id: str) -> bytes:
    return urlsafe_b64decode(interest_id + "==")[:TAG_BYTES]


def _packed(number: int) -> bytes:
    packed = bytearray()
    while number >= 0x80:
        packed.append(number & 0x7F | 0x80)
        number >>= 7
    packed.append(number)
    return bytes(packed)
