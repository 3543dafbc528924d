"""The festival of the demo: one channel that for a while is too much for any single server.

Some dozens of performers publish as fast as they can, and nobody but the auditors listens: many publications, few
subscribers. So the balancer spreads the channel over several servers at all of which the auditors then listen
(all-subscribers, Dynamoth, section III-B.1, Algorithm 1), and folds it back when the festival is over.

It is bytes/s that make it too much, not messages/s: the demo plays on machines that have other things to do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from dynamoth_sim.load.rgame import Update

RATIO_THRESHOLDS_LESS = 0.25
"""The festival exceeds the threshold of Algorithm 1's ratio by the wanted number of replicas, less this: so figures
that vary by some percent do not ask for one replica more."""

PUBLICATIONS_RATIO_MIN = 0.5
"""The channel is spread at this share of the festival's publications/s, as a busy machine may not manage all of them;
with fewer than all, perhaps over fewer servers."""

LOAD_RATIO_MIN = 0.4
"""The channel is spread from this load ratio on: several times that of a tile, less than half of the festival's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Festival:
    """When, where and how much. All times are from the moment at which the players begin.

    ``name``: of the channel. ``replicas``: over how many servers it is to be spread. ``messages_per_s``: of all
    ``performers`` together. ``gathers_s``: time after the begin for which the balancer is paused.
    """

    name: str
    replicas: int
    performers: int
    messages_per_s: float
    payload_bytes: int
    begins_s: float
    gathers_s: float
    ends_s: float

    @property
    def channel(self) -> bytes:
        """The channel."""
        return self.name.encode()

    @property
    def interval_s(self) -> float:
        """Time between two messages of one performer."""
        return self.performers / self.messages_per_s

    def thresholds(self, subscribers: int) -> Mapping[str, object]:
        """Return the settings with which a balancer spreads this channel, and no tile, over ``replicas``.

        Args:
            subscribers: how many subscribe to the channel, from 1.

        """
        return {
            "balancer.all_subscribers_ratio_min": self.messages_per_s
            / subscribers
            / (self.replicas - RATIO_THRESHOLDS_LESS),
            "balancer.replicate_publications_per_s_min": self.messages_per_s * PUBLICATIONS_RATIO_MIN,
            "balancer.replicate_load_ratio_min": LOAD_RATIO_MIN,
        }


class Performer:
    """One publisher of the festival. It decides what is due, and does none of it, like a ``Player``.

    Args:
        number: names it; nobody else in the demo has it.
        index: which of the performers it is, from 0: they take turns.
        festival: what it takes part in.
        start_s: when the players began, in the time of :meth:`step`.

    """

    def __init__(self, number: int, index: int, festival: Festival, start_s: float) -> None:
        self.number = number
        #: How many messages were not published because nobody called :meth:`step` in time.
        self.skipped = 0
        #: The number of its latest message, by channel; it has one channel.
        self.sequences: dict[bytes, int] = {}
        self._channel = festival.channel
        self._interval_s = festival.interval_s
        self._first_s = start_s + festival.begins_s + self._interval_s * index / festival.performers
        #: How many messages it has in all.
        self._messages = math.ceil((start_s + festival.ends_s - self._first_s) / self._interval_s)
        #: How many were due so far, skipped ones included.
        self._due = 0

    def deadline(self) -> float | None:
        """Return when :meth:`step` is to be called next, None when there is nothing more to do."""
        return None if self._due >= self._messages else self._first_s + self._due * self._interval_s

    def step(self, now: float) -> list[Update]:
        """Return the message that is due. Of several the latest: to catch up would be more load than was planned."""
        due = min(math.floor((now - self._first_s) / self._interval_s + 1e-6) + 1, self._messages)
        if due <= self._due:
            return []
        self.skipped += due - self._due - 1
        self._due = due
        sequence = self.sequences[self._channel] = self.sequences.get(self._channel, 0) + 1
        return [Update(self._channel, self.number, sequence, 0.0, 0.0)]
