"""Counts a busy server's messages: each by channel, and a sample of them in full.

Theory of operation
-------------------
A busy agent has no time to look at each message. A :class:`SampledWindow` counts the messages of one read with a few
calls that run in C. These figures are exact: messages of each channel, all messages, all bytes.

The rest needs Python for each message (its size by channel, its flags, its publisher). It is found for two kinds only,
which are recorded as in an ordinary window:

* each *large* message, as a few large messages make most of the bytes. The figures that follow from them are exact.
* of all others a sample of one in ``stride``: from a random one on every ``stride``-th of a read. The figures of a
  channel follow from its own sample, or, where that is empty, from the sample as a whole.

So the relative error of a channel's bytes is about the relative spread of its small messages' sizes, divided by the
square root of their number in the sample: 4% with 100 messages of 40 to 200 bytes. The error of the share of copies
(forwarded messages, heartbeats, control messages) shrinks alike. The number of publishers is estimated from how many
were seen once and how many twice (Chao 1984): exact where each has some messages in the sample, within about a third
where a hundred or more have one each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import compress
from operator import itemgetter
from typing import Any

from dynamoth.names import ANNOUNCE_CHANNEL, is_user_channel
from dynamoth_lla.counting import PMESSAGE_BYTES, Window
from dynamoth_lla.traffic import Traffic

SAMPLE_MESSAGES = 10_000
"""An interval with up to twice as many messages is recorded in full; of one with more, about this many are sampled."""

LARGE_RATIO = 8
"""Messages of more than this many times the mean size are large: at most an eighth of all are."""
LARGE_BYTES_MIN = 1024

STRIDES = (1, 2, 3, 5, 7, 11, 17, 23, 31, 43, 61, 83, 113, 163, 233, 331, 461)
"""Primes, so that messages that come in turns by fives or tens are all met."""

_physical_of = itemgetter(2)
_data_of = itemgetter(3)
_ALL_PMESSAGES = {4}
"""The number of elements of a ``pmessage``; no other push has as many."""
_NOTHING: Traffic = Traffic(bytearray())


def stride_for(messages: int) -> int:
    """Return the stride for an interval with as many messages as the one before."""
    wanted = messages // SAMPLE_MESSAGES
    return max((stride for stride in STRIDES if stride <= wanted), default=1)


def large_from(messages: int, size: int) -> int:
    """Return the size from which on a message is large, given the messages and bytes of the interval before."""
    return max(LARGE_BYTES_MIN, LARGE_RATIO * size // max(1, messages)) + 1


class SampledWindow:
    """The messages since the window was opened, estimated in part. Has the public face of :class:`Window`.

    Args:
        channels_max: see :class:`Window`.
        records_max: see :class:`Window`; once for the sample and once for the large messages. So is ``heads_max``.
        heads_max: see there.
        stride: one in this many small messages is sampled.
        large_bytes: messages from this size on are large.

    """

    def __init__(self, channels_max: int, records_max: int, heads_max: int, stride: int, large_bytes: int) -> None:
        self._channels_max = channels_max
        self._stride = stride
        self._large_bytes = large_bytes
        #: Messages by physical channel; those of Dynamoth's own channels too.
        self._counts: Counter[bytes] = Counter()
        self._sample = Window(channels_max, records_max, heads_max)
        self._large = Window(channels_max, records_max, heads_max)
        #: State of a linear congruential generator: where in a read the sample begins.
        self._chance = stride
        #: The sum of the lengths of all messages.
        self.size = 0
        #: Messages on user channels beyond ``channels_max``.
        self.overflow_messages = 0
        #: Messages that ``traffic`` leaves out, and their bytes on the wire besides ``size``.
        self.uncounted_messages = 0
        self.uncounted_wire_bytes = 0

    @property
    def publishers_uncounted(self) -> int:
        """Publishers of the sample, and of large messages, beyond ``heads_max``."""
        return self._sample.publishers_uncounted + self._large.publishers_uncounted

    def observe(self, messages: Sequence[Sequence[Any]]) -> list[bytes]:
        """Count the ``pmessage`` pushes among ``messages``; return the announcements of clients among them."""
        if set(map(len, messages)) != _ALL_PMESSAGES:
            messages = [message for message in messages if len(message) == 4]
            if not messages:
                return []
        counts = self._counts
        counts.update(map(_physical_of, messages))
        sizes = list(map(len, map(_data_of, messages)))
        self.size += sum(sizes)
        self._chance = (1103515245 * self._chance + 12345) & 0x7FFFFFFF
        begin = (self._chance >> 16) % self._stride
        sample = messages[begin :: self._stride]
        if max(sizes) >= self._large_bytes:
            sample = [message for message in sample if len(message[3]) < self._large_bytes]
            self._large.observe(list(compress(messages, map(self._large_bytes.__le__, sizes))))
        if sample:
            self._sample.observe(sample)
        if len(counts) > self._channels_max:
            self._forget_newest()
        if ANNOUNCE_CHANNEL not in counts:
            return []
        self._forget(ANNOUNCE_CHANNEL, counts.pop(ANNOUNCE_CHANNEL))
        return [message[3] for message in messages if message[2] == ANNOUNCE_CHANNEL]

    def traffic(self) -> Iterator[tuple[bytes, Traffic | EstimatedTraffic]]:
        """Yield the physical channels, Dynamoth's own among them, each once. The window must not change."""
        sample = dict(self._sample.traffic())
        large = dict(self._large.traffic())
        sampled = sum([traffic.messages for traffic in sample.values()])
        mean_bytes = sum([traffic.size for traffic in sample.values()]) / sampled if sampled else 0.0
        for channel, messages in self._counts.items():
            yield (
                channel,
                EstimatedTraffic(messages, sample.get(channel, _NOTHING), large.get(channel, _NOTHING), mean_bytes),
            )

    def _forget_newest(self) -> None:
        """Add the messages of the newest channels up until there is room."""
        while len(self._counts) > self._channels_max:
            channel, messages = self._counts.popitem()
            self._forget(channel, messages)
            self.overflow_messages += messages if is_user_channel(channel) else 0

    def _forget(self, channel: bytes, messages: int) -> None:
        self.uncounted_messages += messages
        self.uncounted_wire_bytes += messages * (PMESSAGE_BYTES + len(channel))


class EstimatedTraffic:
    """The traffic of one physical channel, from its exact number of messages and a sample of them.

    Has the public face of :class:`Traffic`.

    Args:
        messages: all of them.
        sample: some of the small ones.
        large: all that are large.
        mean_bytes: the mean size of small messages of all channels, for a channel with an empty sample.

    """

    __slots__ = ("_large", "_sample", "_small", "messages", "size")

    def __init__(self, messages: int, sample: Traffic, large: Traffic, mean_bytes: float) -> None:
        self.messages = messages
        self._sample = sample
        self._large = large
        #: How many messages the sample stands for.
        self._small = max(0, messages - large.messages)
        if sample.messages:
            mean_bytes = sample.size / sample.messages
        self.size = large.size + round(self._small * mean_bytes)

    def published(self) -> tuple[int, int]:
        """Return messages and bytes that clients published, as far as the sample shows."""
        if not self._sample.messages:
            copies, copied_bytes = 0, 0
        else:
            published, size = self._sample.published()
            if published == self._sample.messages and self._large is _NOTHING:
                return self.messages, self.size
            scale = self._small / self._sample.messages
            copies = round((self._sample.messages - published) * scale)
            copied_bytes = round((self._sample.size - size) * scale)
        large, large_bytes = self._large.published()
        return (
            self._small - copies + large,
            max(0, self.size - self._large.size - copied_bytes) + large_bytes,
        )

    def count_publishers(self) -> int:
        """Return an estimate of the number of known publishers."""
        seen = self._sample.publishers()
        unseen = 0
        if self._sample.messages < self._small:
            times = list(seen.values())
            once, twice = times.count(1), times.count(2)
            unseen = once * (once - 1) // (2 * (twice + 1))
        known = len(seen) if self._large is _NOTHING else len(seen.keys() | self._large.publishers().keys())
        return min(known + unseen, max(known, self.messages))

    def publishers(self) -> Counter[bytes]:
        """Return an estimate of the messages of each publisher in the sample, by its 8-byte id."""
        scale = self._small / self._sample.messages if self._sample.messages else 1.0
        found = Counter({id_: round(count * scale) for id_, count in self._sample.publishers().items()})
        found.update(self._large.publishers())
        return found
