"""Counts every message of an interval: the hot loop of the agent, and the bounds of its memory.

The memory of a window is bounded in three ways. Past ``records_max`` records, those of some channels are counted by
head instead, which is smaller where a publisher sends more than one message. Past ``heads_max`` heads, those of plain
messages are folded into one, then, if that is not enough, those of the publishers of the channels with most. Past
``channels_max`` channels, the messages of the newest ones are only added up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from dynamoth.names import ANNOUNCE_CHANNEL, is_user_channel
from dynamoth_lla.traffic import RECORD, Heads, Traffic, add_records, fold_all, fold_plain, messages_and_bytes

PMESSAGE_BYTES = 40
"""Size of a push to a pattern subscriber without channel and data: type, ``pmessage``, ``*`` and four lengths."""


class Window:
    """The messages since the window was opened.

    Args:
        channels_max: most channels with figures of their own; the messages of others are added up. With more than
            ``records_max`` messages it may be half as many, as a channel may have both records and heads.
        records_max: most messages that are kept as records, 16 bytes each.
        heads_max: most heads, over all channels, for the messages beyond. About 200 bytes each. One batch of messages
            may exceed both bounds.

    """

    def __init__(self, channels_max: int, records_max: int, heads_max: int) -> None:
        self._channels_max = channels_max
        self._records_max = records_max
        self._heads_max = heads_max
        #: The records of each physical channel; those of Dynamoth's own channels too.
        self._logs: defaultdict[bytes, bytearray] = defaultdict(bytearray)
        #: How many records there are, or a few more, as pushes of other kinds are counted too.
        self._logged = 0
        #: Counts by head of the channels whose records were dropped for room.
        self._heads: dict[bytes, Heads] = {}
        #: The number of heads in ``_heads``.
        self._heads_counted = 0
        #: Messages on user channels beyond ``channels_max``.
        self.overflow_messages = 0
        #: Messages that the agent has read and ``traffic`` leaves out, and their bytes on the wire.
        self.uncounted_messages = 0
        self.uncounted_wire_bytes = 0
        #: Heads of publishers that were folded.
        self.publishers_uncounted = 0

    def observe(self, messages: Sequence[Sequence[Any]]) -> list[bytes]:
        """Record the ``pmessage`` pushes among ``messages``; return the announcements of clients among them."""
        logs = self._logs
        record = RECORD.pack
        for message in messages:
            if len(message) == 4:  # of all pushes, pmessage alone has four elements
                data = message[3]
                logs[message[2]].extend(record(data, len(data)))
        self._logged += len(messages)
        if self._logged > self._records_max or len(logs) > self._channels_max:
            self._count_newest()
        if ANNOUNCE_CHANNEL not in logs:
            return []
        self._forget(ANNOUNCE_CHANNEL, logs.pop(ANNOUNCE_CHANNEL))
        return [message[3] for message in messages if len(message) == 4 and message[2] == ANNOUNCE_CHANNEL]

    def traffic(self) -> Iterator[tuple[bytes, Traffic]]:
        """Yield the physical channels, Dynamoth's own among them, each once. The window must not change."""
        for channel, records in self._logs.items():
            yield channel, Traffic(records, self._heads.get(channel))
        for channel, heads in self._heads.items():
            if channel not in self._logs:
                yield channel, Traffic(bytearray(), heads)

    def _count_newest(self) -> None:
        """Count the newest channels by head until all is within bounds: about as many records as the batch brought."""
        logs = self._logs
        while logs and (self._logged > self._records_max or len(logs) > self._channels_max):
            channel, records = logs.popitem()
            self._logged -= len(records) // RECORD.size
            self._count(channel, records)
        if not logs:
            self._logged = 0
        if self._heads_counted > self._heads_max:
            self._make_room()

    def _count(self, channel: bytes, records: bytearray) -> None:
        heads = self._heads.get(channel)
        if heads is None:
            if len(self._logs) + len(self._heads) >= self._channels_max:
                messages = self._forget(channel, records)
                self.overflow_messages += messages if is_user_channel(channel) else 0
                return
            heads = self._heads[channel] = defaultdict(int)
        before = len(heads)
        add_records(records, heads)
        self._heads_counted += len(heads) - before

    def _forget(self, channel: bytes, records: bytearray) -> int:
        messages, size = messages_and_bytes(records)
        self.uncounted_messages += messages
        self.uncounted_wire_bytes += size + messages * (PMESSAGE_BYTES + len(channel))
        return messages

    def _make_room(self) -> None:
        """Fold heads until half of the bound is left: those of plain messages, then those of publishers."""
        for heads in self._heads.values():
            fold_plain(heads)
        self._heads_counted = sum(map(len, self._heads.values()))
        for heads in sorted(self._heads.values(), key=len, reverse=True):
            if self._heads_counted <= self._heads_max // 2:
                break
            before = len(heads)
            self.publishers_uncounted += fold_all(heads)
            self._heads_counted -= before - len(heads)
