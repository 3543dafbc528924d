"""Counting what is observed: the hot loop of the agent.

Theory of operation
-------------------
The agent sees every message of its server and has two microseconds for each, so as little as possible is done per
message: one number is added to, found by the physical channel and the first bytes of the message. These bytes, the
*head*, are magic, flags and publisher id of an envelope. The number holds messages and bytes at once, the messages
in its upper bits. What it all means is found out once per interval and head (``dynamoth_lla.digest``).

A plain message has an arbitrary head. That is correct and only costs room: when there are too many heads, those of
plain messages are folded into one, and then, if it must be, those of the publishers of the channels that have most.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from dynamoth.envelope import CONTROL, FORWARDED, HEARTBEAT, KNOWN_FLAGS, MAGIC
from dynamoth.names import ANNOUNCE_CHANNEL, is_user_channel

HEAD_BYTES = 12
"""Magic, flags and publisher of an envelope."""

PMESSAGE_BYTES = 40
"""Size of a push to a pattern subscriber without channel and data: type, ``pmessage``, ``*`` and four lengths."""

ONE_MESSAGE = 1 << 48
"""Added for each message, together with its length. There is room for 281 TB before bytes reach the messages."""
_BYTES_MASK = ONE_MESSAGE - 1

Heads = Mapping[bytes, int]
"""What one channel has carried: messages and bytes by head."""

_NOT_PUBLISHED = FORWARDED | HEARTBEAT | CONTROL
_KNOWN = [flags for flags in range(256) if not flags & ~KNOWN_FLAGS]
_PUBLISHED_PREFIXES = frozenset(MAGIC + bytes((flags,)) for flags in _KNOWN if not flags & _NOT_PUBLISHED)
_COPY_PREFIXES = frozenset(MAGIC + bytes((flags,)) for flags in _KNOWN if flags & _NOT_PUBLISHED)

#: What heads are folded into. Longer than any head, so none is mistaken for them.
_PUBLICATIONS = bytes(HEAD_BYTES + 1)
_COPIES = MAGIC + bytes((FORWARDED,)) + bytes(HEAD_BYTES + 1 - 4)


def split(total: int) -> tuple[int, int]:
    """Return messages and bytes of a number in :data:`Heads`, or of a sum of some."""
    return total >> 48, total & _BYTES_MASK


def are_ordinary(heads: Heads) -> bool:
    """Tell whether each head is that of another publisher and has no flags, as nearly always.

    The answer costs about 20 ns per head, a tenth of what it costs to look at each by itself.
    """
    count = len(heads)
    joined = b"".join(heads)
    return (
        len(joined) == count * HEAD_BYTES
        and joined[0::HEAD_BYTES].count(MAGIC[0]) == count
        and joined[1::HEAD_BYTES].count(MAGIC[1]) == count
        and joined[2::HEAD_BYTES].count(MAGIC[2]) == count
        and joined[3::HEAD_BYTES].count(0) == count
        and _PUBLICATIONS not in heads
        and _COPIES not in heads
    )


def publications(heads: Heads) -> int:
    """Return the sum of what clients published: no forwarded copies, heartbeats or control messages.

    Plain messages are publications, as far as anyone can tell.
    """
    return sum([count for head, count in heads.items() if head[:4] not in _COPY_PREFIXES])


def publishers(heads: Heads) -> dict[bytes, int]:
    """Return what each known publisher published, by its 8-byte id. Plain messages have none."""
    found: dict[bytes, int] = {}
    for head, count in heads.items():
        if head[:4] in _PUBLISHED_PREFIXES and len(head) == HEAD_BYTES:
            id_ = head[4:]
            found[id_] = found.get(id_, 0) + count
    return found


class Window:
    """What was observed since the window was opened.

    Args:
        channels_max: how many channels are told apart; the messages of others are added up.
        heads_max: how many heads there is room for, over all channels. Soft: one batch of messages may exceed it.

    """

    __slots__ = (
        "_channels_max",
        "_counts",
        "_heads_at_most",
        "_heads_max",
        "overflow",
        "publishers_uncounted",
        "uncounted_messages",
        "uncounted_wire_bytes",
    )

    def __init__(self, channels_max: int, heads_max: int) -> None:
        self._channels_max = channels_max
        self._heads_max = heads_max
        self._counts: defaultdict[bytes, defaultdict[bytes, int]] = defaultdict(_no_heads)
        #: Never less than the number of heads, so that counting them can wait until it reaches the bound.
        self._heads_at_most = 0
        #: Messages and bytes, as ``split`` reads them, on user channels that there was no room for.
        self.overflow = 0
        #: What the agent has read and ``counts`` does not hold: messages, and bytes on the wire.
        self.uncounted_messages = 0
        self.uncounted_wire_bytes = 0
        #: Heads of publishers that were folded.
        self.publishers_uncounted = 0

    @property
    def counts(self) -> Mapping[bytes, Heads]:
        """What each physical channel has carried; Dynamoth's own channels are among them."""
        return self._counts

    def observe(self, messages: Sequence[Sequence[Any]]) -> list[bytes]:
        """Count the ``pmessage`` pushes among ``messages``; return the announcements of clients among them."""
        counts = self._counts
        for message in messages:
            if len(message) == 4:  # of all pushes, pmessage alone has four elements
                data = message[3]
                counts[message[2]][data[:12]] += ONE_MESSAGE + len(data)
        self._heads_at_most += len(messages)
        if self._heads_at_most > self._heads_max:
            self._make_room()
        if len(counts) > self._channels_max:
            self._drop_newest()
        if ANNOUNCE_CHANNEL not in counts:
            return []
        self._forget(ANNOUNCE_CHANNEL, counts.pop(ANNOUNCE_CHANNEL))
        return [message[3] for message in messages if len(message) == 4 and message[2] == ANNOUNCE_CHANNEL]

    def _drop_newest(self) -> None:
        """Add up the channels that came last: the others have been followed for longer."""
        while len(self._counts) > self._channels_max:
            channel, heads = self._counts.popitem()
            total = self._forget(channel, heads)
            if is_user_channel(channel):
                self.overflow += total

    def _forget(self, channel: bytes, heads: Heads) -> int:
        total = sum(heads.values())
        messages, size = split(total)
        self.uncounted_messages += messages
        self.uncounted_wire_bytes += size + messages * (PMESSAGE_BYTES + len(channel))
        return total

    def _make_room(self) -> None:
        """Count the heads. Above half of the bound, fold those of plain messages, and then those of publishers."""
        if self._count_heads() > self._heads_max // 2:
            for heads in self._counts.values():
                _fold(heads, [head for head in heads if head[:4] not in _PUBLISHED_PREFIXES])
        if self._count_heads() > self._heads_max // 2:
            for heads in sorted(self._counts.values(), key=len, reverse=True):
                before = len(heads)
                self.publishers_uncounted += _fold(heads, list(heads))
                self._heads_at_most -= before - len(heads)
                if self._heads_at_most <= self._heads_max // 2:
                    break

    def _count_heads(self) -> int:
        self._heads_at_most = sum(map(len, self._counts.values()))
        return self._heads_at_most


def _no_heads() -> defaultdict[bytes, int]:
    return defaultdict(int)


def _fold(heads: defaultdict[bytes, int], which: Sequence[bytes]) -> int:
    """Fold heads into those that stand for many; return how many of them named a publisher."""
    named = 0
    for head in which:
        if len(head) <= HEAD_BYTES:
            named += head[:4] in _PUBLISHED_PREFIXES and len(head) == HEAD_BYTES
            heads[_COPIES if head[:4] in _COPY_PREFIXES else _PUBLICATIONS] += heads.pop(head)
    return named
