"""The traffic of one channel: recorded message by message, evaluated once per interval.

The agent has little time for each message. Of each message that it looks at (all, or a sample: ``sampling``) it stores
only a *record*: its length and its first bytes, the *head*: magic, flags and publisher id of an envelope. Records of
one channel stand end to end. Nearly always all of them are of ordinary publications, which a few functions that run in
C can recognise and add up. If not, or if there are too many records, they are counted by head.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from operator import itemgetter
from struct import Struct

from dynamoth.protocol.envelope import CONTROL, FORWARDED, HEARTBEAT, KNOWN_FLAGS, MAGIC

HEAD_BYTES = 12
"""Magic, flags and publisher of an envelope."""

RECORD = Struct(f"={HEAD_BYTES}sI")
"""Head and length of a message. Shorter messages are padded with zeros: they are no envelopes anyway."""

_PUBLISHER = Struct("=4x8s4x")
_first = itemgetter(0)

Heads = defaultdict[bytes, int]
"""Messages and bytes by head."""

ONE_MESSAGE = 1 << 48
"""In :data:`Heads` one number holds both: messages in the upper bits, and room for 281 TB below."""
_BYTES_MASK = ONE_MESSAGE - 1

_NOT_PUBLISHED = FORWARDED | HEARTBEAT | CONTROL
_KNOWN = [flags for flags in range(256) if not flags & ~KNOWN_FLAGS]
_PUBLISHED_PREFIXES = frozenset(MAGIC + bytes((flags,)) for flags in _KNOWN if not flags & _NOT_PUBLISHED)
_COPY_PREFIXES = frozenset(MAGIC + bytes((flags,)) for flags in _KNOWN if flags & _NOT_PUBLISHED)

#: The heads that others are folded into. Longer than any head of a message, so none is mistaken for them.
_PUBLICATIONS = bytes(HEAD_BYTES + 1)
_COPIES = MAGIC + bytes((FORWARDED,)) + bytes(HEAD_BYTES + 1 - 4)


def add_records(records: bytearray, heads: Heads) -> None:
    """Count records by head."""
    for head, size in RECORD.iter_unpack(records):
        heads[head] += ONE_MESSAGE + size


def messages_and_bytes(records: bytearray) -> tuple[int, int]:
    """Return how many records there are, and the sum of the lengths."""
    return len(records) // RECORD.size, sum(memoryview(records).cast("I")[3::4])


def fold_plain(heads: Heads) -> None:
    """Make room: count plain messages, whose heads are arbitrary, under one head."""
    _fold(heads, [head for head in heads if head[:4] not in _PUBLISHED_PREFIXES])


def fold_all(heads: Heads) -> int:
    """Make more room: forget publishers. Returns how many publishers' heads were forgotten."""
    return _fold(heads, list(heads))


def _fold(heads: Heads, which: list[bytes]) -> int:
    publishers = 0
    for head in which:
        if len(head) == HEAD_BYTES:
            publishers += head[:4] in _PUBLISHED_PREFIXES
            heads[_COPIES if head[:4] in _COPY_PREFIXES else _PUBLICATIONS] += heads.pop(head)
    return publishers


class Traffic:
    """The traffic of one physical channel.

    Args:
        records: one for each message; not copied.
        heads: earlier counts by head; the records are added to them. None for none.

    """

    __slots__ = ("_heads", "_is_ordinary", "_records", "messages", "size")

    def __init__(self, records: bytearray, heads: Heads | None = None) -> None:
        self._records = records
        self._heads = heads
        #: Whether all records are of publications in envelopes without flags, and nothing was counted by head.
        self._is_ordinary = False
        if heads is None:
            self.messages, self.size = messages_and_bytes(records)
            self._is_ordinary = self._find_ordinary()
        else:
            add_records(records, heads)
            self.messages, self.size = _split(sum(heads.values()))

    def _find_ordinary(self) -> bool:
        records, step, count = self._records, RECORD.size, self.messages
        return (
            records[0::step].count(MAGIC[0]) == count
            and records[1::step].count(MAGIC[1]) == count
            and records[2::step].count(MAGIC[2]) == count
            and records[3::step].count(0) == count
        )

    def _by_head(self) -> Heads:
        if self._heads is None:
            heads: Heads = defaultdict(int)
            add_records(self._records, heads)
            self._heads = heads
        return self._heads

    def published(self) -> tuple[int, int]:
        """Return messages and bytes that clients published: no forwarded copies, heartbeats or control messages.

        Plain messages count as published.
        """
        if self._is_ordinary:
            return self.messages, self.size
        return _split(sum([count for head, count in self._by_head().items() if head[:4] not in _COPY_PREFIXES]))

    def count_publishers(self) -> int:
        """Return how many known publishers there are. Plain messages have none."""
        if self._is_ordinary:
            return len(set(_PUBLISHER.iter_unpack(self._records)))
        return len(self.publishers())

    def publishers(self) -> Counter[bytes]:
        """Return how many messages each known publisher published, by its 8-byte id."""
        if self._is_ordinary:
            return Counter(map(_first, _PUBLISHER.iter_unpack(self._records)))
        found: Counter[bytes] = Counter()
        for head, count in self._by_head().items():
            if head[:4] in _PUBLISHED_PREFIXES and len(head) == HEAD_BYTES:
                found[head[4:]] += _split(count)[0]
        return found


def _split(total: int) -> tuple[int, int]:
    """Return messages and bytes of a number in :data:`Heads`, or of a sum of some."""
    return total >> 48, total & _BYTES_MASK
