"""From what a window has counted to the channels of a report.

Both steps go through every channel of the interval. They are generators that yield now and then, so that the agent can
forward messages in between however many channels there are.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from heapq import nlargest
from operator import itemgetter

from dynamoth.names import is_user_channel
from dynamoth.reports import ID_BYTES, ChannelColumns, ChannelSums, pack_ids
from dynamoth_lla.channels import Track, TrackedChannels
from dynamoth_lla.window import PMESSAGE_BYTES, Heads, Window, are_ordinary, publications, publishers, split

MESSAGE_BYTES = 32
"""Size on the wire without channel and data, of a ``message`` push as of a PUBLISH: both have three elements."""

WORK_PER_STEP = 5000
"""Channels and heads that are looked at in one step: about 3 ms."""


class Activity:
    """What one physical channel has carried within the interval."""

    __slots__ = ("are_ordinary", "heads", "published", "total", "track")

    def __init__(self, track: Track, heads: Heads, total: int) -> None:
        self.track = track
        self.heads = heads
        self.are_ordinary = are_ordinary(heads)
        #: Messages and bytes, as ``split`` reads them: of all messages, and of publications.
        self.total = total
        self.published = total if self.are_ordinary else publications(heads, total)

    @property
    def publishers(self) -> dict[bytes, int]:
        """What each known publisher published, by its id."""
        if self.are_ordinary:
            return {head[-ID_BYTES:]: count for head, count in self.heads.items()}
        return publishers(self.heads)


@dataclass(slots=True)
class Digest:
    """A window that was gone through. Complete when the generator that fills it has ended."""

    activities: list[Activity] = field(default_factory=list[Activity])
    #: Messages and bytes on user channels that are not followed, as ``split`` reads them.
    untracked: int = 0
    #: What the agent itself was sent, on all channels.
    agent_messages: int = 0
    agent_bytes: int = 0


def digest(window: Window, channels: TrackedChannels, into: Digest) -> Generator[None]:
    """Go through a window: follow its user channels, and sum up each."""
    into.untracked += window.overflow
    into.agent_messages += window.uncounted_messages
    into.agent_bytes += window.uncounted_wire_bytes
    work = 0
    for physical, heads in window.counts.items():
        total = sum(heads.values())
        messages, size = split(total)
        into.agent_messages += messages
        into.agent_bytes += size + messages * (PMESSAGE_BYTES + len(physical))
        track = channels.follow(physical)
        if track is not None:
            into.activities.append(Activity(track, heads, total))
        elif is_user_channel(physical):
            into.untracked += total
        work += 1 + len(heads)
        if work >= WORK_PER_STEP:
            work = 0
            yield


class _Row:
    """A channel by the name that users give it: one physical channel or more."""

    __slots__ = ("activities", "bytes_in", "bytes_out", "messages_sent", "publications", "track")

    def __init__(self, track: Track) -> None:
        self.track = track
        self.activities: list[Activity] = []
        self.publications = 0
        self.messages_sent = 0
        self.bytes_in = 0
        self.bytes_out = 0

    def add(self, activity: Activity) -> None:
        overhead = MESSAGE_BYTES + len(activity.track.physical)
        subscribers = activity.track.subscribers
        published, published_bytes = split(activity.published)
        messages, size = split(activity.total)
        self.activities.append(activity)
        self.publications += published
        self.bytes_in += published_bytes + published * overhead
        self.messages_sent += messages * subscribers
        self.bytes_out += (size + messages * overhead) * subscribers

    def count_publishers(self) -> int:
        if len(self.activities) == 1 and self.activities[0].are_ordinary:
            return len(self.activities[0].heads)
        return len(self.publishers())

    def publishers(self) -> dict[bytes, int]:
        """What each known publisher published, by its id, under all physical names."""
        merged: dict[bytes, int] = {}
        for activity in self.activities:
            for id_, count in activity.publishers.items():
                merged[id_] = merged.get(id_, 0) + count
        return merged


def _weight(row: _Row) -> tuple[int, int, int]:
    return row.bytes_out, row.bytes_in, row.track.audience.subscribers


@dataclass(slots=True)
class Composed:
    """The channels of a report. Complete when the generator that fills it has ended."""

    columns: ChannelColumns = field(default_factory=ChannelColumns)
    rest: ChannelSums = field(default_factory=ChannelSums)
    #: Of all channels, named or not.
    publications: int = 0
    messages_sent: int = 0
    bytes_in: int = 0
    bytes_out: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedBounds:
    """How much a report tells by name: of how many channels, of how many of them who, and how many clients of each."""

    channels_max: int
    who_channels_max: int
    who_per_channel_max: int


def compose(
    digested: Digest, channels: TrackedChannels, bounds: NamedBounds, publishers_uncounted: int, into: Composed
) -> Generator[None]:
    """Sort the channels by what they cost and put the costliest into columns, the rest into sums.

    Channels without messages are named where there is room.
    """
    rows: dict[bytes, _Row] = {}
    for number, activity in enumerate(digested.activities, 1):
        track = activity.track
        row = rows.get(track.logical)
        if row is None:
            row = rows[track.logical] = _Row(track)
        row.add(activity)
        if number % WORK_PER_STEP == 0:
            yield
    _add_idle(rows, channels, bounds.channels_max)
    named = nlargest(bounds.channels_max, rows.values(), key=_weight)
    publisher_counts: list[int] = []
    work = 0
    for row in named:
        publisher_counts.append(row.count_publishers())
        work += publisher_counts[-1]
        if work >= WORK_PER_STEP:
            work = 0
            yield
    into.columns = _columns(named, publisher_counts, bounds)
    sums = _Sums(rows.values())
    into.publications, into.messages_sent = sums.publications, sums.messages_sent
    into.bytes_in, into.bytes_out = sums.bytes_in, sums.bytes_out
    into.rest = sums.without(_Sums(named), channels, digested.untracked, publishers_uncounted)


def _add_idle(rows: dict[bytes, _Row], channels: TrackedChannels, channels_max: int) -> None:
    if len(rows) >= channels_max:
        return
    for track in channels.newest():
        if track.audience.subscribers and track.logical not in rows:
            rows[track.logical] = _Row(track)
            if len(rows) == channels_max:
                return


def _columns(rows: list[_Row], publisher_counts: list[int], bounds: NamedBounds) -> ChannelColumns:
    unnamed = (b"",) * max(0, len(rows) - bounds.who_channels_max)
    who_max = bounds.who_per_channel_max
    who = range(min(len(rows), bounds.who_channels_max))
    return ChannelColumns(
        channels=tuple([row.track.logical for row in rows]),
        publications=tuple([row.publications for row in rows]),
        publishers=tuple(publisher_counts),
        subscribers=tuple([row.track.audience.subscribers for row in rows]),
        messages_sent=tuple([row.messages_sent for row in rows]),
        bytes_in=tuple([row.bytes_in for row in rows]),
        bytes_out=tuple([row.bytes_out for row in rows]),
        publisher_ids=tuple([_busiest(rows[index].publishers(), who_max) for index in who]) + unnamed,
        subscriber_ids=tuple([_latest(rows[index], who_max) for index in who]) + unnamed,
    )


def _busiest(published: dict[bytes, int], count_max: int) -> bytes:
    busiest = nlargest(count_max, published.items(), key=itemgetter(1))
    return b"".join([id_ for id_, _ in busiest])


def _latest(row: _Row, count_max: int) -> bytes:
    clients = list(row.track.audience.clients)
    return pack_ids(clients[: -count_max - 1 : -1])


class _Sums:
    __slots__ = ("bytes_in", "bytes_out", "messages_sent", "physical", "publications", "subscribers")

    def __init__(self, rows: Iterable[_Row]) -> None:
        rows = list(rows)
        self.physical = sum([row.track.audience.tracks for row in rows])
        self.publications = sum([row.publications for row in rows])
        self.subscribers = sum([row.track.audience.subscribers for row in rows])
        self.messages_sent = sum([row.messages_sent for row in rows])
        self.bytes_in = sum([row.bytes_in for row in rows])
        self.bytes_out = sum([row.bytes_out for row in rows])

    def without(
        self, named: _Sums, channels: TrackedChannels, untracked: int, publishers_uncounted: int
    ) -> ChannelSums:
        return ChannelSums(
            channels=len(channels) - named.physical,
            publications=self.publications - named.publications,
            subscribers=channels.subscribers - named.subscribers,
            messages_sent=self.messages_sent - named.messages_sent,
            bytes_in=self.bytes_in - named.bytes_in,
            bytes_out=self.bytes_out - named.bytes_out,
            messages_untracked=split(untracked)[0],
            publishers_uncounted=publishers_uncounted,
        )
