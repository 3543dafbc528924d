"""Turns the counts of a window into the channels of a report.

Both steps go through every channel of the interval. They are generators that yield now and then, so that the agent can
forward messages in between, however many channels there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Generator
from dataclasses import asdict, dataclass, field
from heapq import nlargest
from operator import attrgetter

from dynamoth.names import BALANCER_CHANNEL, OPERATOR_CHANNEL, OPERATOR_INBOX_PREFIX, is_user_channel
from dynamoth.protocol.reports import ChannelColumns, ChannelSums, SlotColumns, pack_ids
from dynamoth_lla.channels import Track, TrackedChannels
from dynamoth_lla.counting import PMESSAGE_BYTES, Window
from dynamoth_lla.sampling import EstimatedTraffic, SampledWindow
from dynamoth_lla.traffic import Traffic

MESSAGE_BYTES = 32
"""Size on the wire without channel and data, of a ``message`` push as of a PUBLISH: both have three elements."""

CONTROL_CHANNELS = frozenset((BALANCER_CHANNEL, OPERATOR_CHANNEL))
"""Dynamoth's own channels on which a message goes to a balancer; answers to operators go to their inboxes. Those to the
agent alone do not count as output anyway."""

WORK_PER_STEP = 1000
"""Channels that one step processes: some 3 ms."""
MESSAGES_PER_CHANNEL = 20
"""This many messages of a channel take as much work as the channel itself."""


class Load:
    """The traffic of one channel within the interval; all zero for an idle one."""

    __slots__ = ("_traffic", "bytes_in", "bytes_out", "messages_sent", "publications", "track", "weight")

    def __init__(self, track: Track, traffic: Traffic | EstimatedTraffic | None = None) -> None:
        self.track = track
        #: One for each physical name that messages came on.
        self._traffic: list[Traffic | EstimatedTraffic] = [] if traffic is None else [traffic]
        self.publications = 0
        self.messages_sent = 0
        self.bytes_in = 0
        self.bytes_out = 0
        #: Sorts by load: bytes out, then bytes in, then subscribers.
        self.weight = 0

    def measure(self) -> None:
        """Compute the figures with the present number of subscribers."""
        (traffic,) = self._traffic
        overhead = MESSAGE_BYTES + len(self.track.physical)
        subscribers = self.track.subscribers
        self.publications, published_bytes = traffic.published()
        self.bytes_in = published_bytes + self.publications * overhead
        self.messages_sent = traffic.messages * subscribers
        self.bytes_out = (traffic.size + traffic.messages * overhead) * subscribers
        self.weight = (self.bytes_out << 64) + (self.bytes_in << 32) + subscribers

    def merge(self, other: Load) -> None:
        """Add the load of another physical name of the same channel; both have been measured."""
        self._traffic += other._traffic
        self.publications += other.publications
        self.messages_sent += other.messages_sent
        self.bytes_in += other.bytes_in
        self.bytes_out += other.bytes_out
        self.weight += other.weight

    def publishers(self) -> Counter[bytes]:
        """Return how many messages each known publisher published, by its id."""
        merged: Counter[bytes] = Counter()
        for traffic in self._traffic:
            merged.update(traffic.publishers())
        return merged

    def count_publishers(self) -> int:
        """Return how many publishers there are."""
        return self._traffic[0].count_publishers() if len(self._traffic) == 1 else len(self.publishers())


@dataclass(slots=True)
class Digest:
    """A window that was gone through; complete when the generator that fills it has ended."""

    #: By physical channel.
    loads: list[Load] = field(default_factory=list[Load])
    #: Messages on user channels that are not followed.
    messages_untracked: int = 0
    #: Messages to the agent itself, on all channels.
    agent_messages: int = 0
    agent_bytes: int = 0
    #: What agents, balancers and operators say to each other, once per message, without the agent's copy.
    control_bytes: int = 0


def digest(window: Window | SampledWindow, channels: TrackedChannels, into: Digest) -> Generator[None]:
    """Follow the user channels of a window, and sum up the traffic of each."""
    into.messages_untracked += window.overflow_messages
    into.agent_messages += window.uncounted_messages
    into.agent_bytes += window.uncounted_wire_bytes
    all_bytes = window.size if isinstance(window, SampledWindow) else None
    into.agent_bytes += all_bytes or 0
    work = 0
    for physical, traffic in window.traffic():
        messages = traffic.messages
        into.agent_messages += messages
        into.agent_bytes += messages * (PMESSAGE_BYTES + len(physical)) + (traffic.size if all_bytes is None else 0)
        track = channels.follow(physical)
        if track is not None:
            into.loads.append(Load(track, traffic))
        elif is_user_channel(physical):
            into.messages_untracked += messages
        elif physical in CONTROL_CHANNELS or physical.startswith(OPERATOR_INBOX_PREFIX):
            into.control_bytes += traffic.size + messages * (MESSAGE_BYTES + len(physical))
        work += 1 + messages // MESSAGES_PER_CHANNEL
        if work >= WORK_PER_STEP:
            work = 0
            yield


@dataclass(slots=True)
class Composed:
    """The channels of a report. Complete when the generator that fills it has ended."""

    columns: ChannelColumns = field(default_factory=ChannelColumns)
    rest: ChannelSums = field(default_factory=ChannelSums)
    #: The part of the rest that belongs to slots.
    slots: SlotColumns = field(default_factory=SlotColumns)
    #: Of all channels, named or not.
    total: ChannelSums = field(default_factory=ChannelSums)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedBounds:
    """Bounds of what a report names: channels, those of them with client ids, and ids per channel."""

    channels_max: int
    who_channels_max: int
    who_per_channel_max: int


def compose(
    digested: Digest,
    channels: TrackedChannels,
    bounds: NamedBounds,
    planned: Container[bytes],
    publishers_uncounted: int,
    into: Composed,
) -> Generator[None]:
    """Put the costliest channels into columns and the rest into sums, over all and by slot.

    Channels without messages are named where there is room. ``planned`` has those that do not follow their slot, as the
    plan names them.
    """
    for number, load in enumerate(digested.loads, 1):
        load.measure()
        if number % WORK_PER_STEP == 0:
            yield
    loads = _by_channel(digested.loads)
    yield
    named = nlargest(bounds.channels_max, loads, key=attrgetter("weight"))
    named += _idle(named, channels, bounds.channels_max - len(named))
    yield
    publisher_counts: list[int] = []
    work = 0
    for load in named:
        publisher_counts.append(load.count_publishers())
        work += 1 + load.publications // MESSAGES_PER_CHANNEL
        if work >= WORK_PER_STEP:
            work = 0
            yield
    into.columns = _columns(named, publisher_counts, bounds)
    yield
    into.total = _sum_up(loads, len(channels), channels.subscribers)
    tracks = sum([load.track.audience.tracks for load in named])
    subscribers = sum([load.track.audience.subscribers for load in named])
    summed = _sum_up(named, tracks, subscribers)
    differences = {name: count - getattr(summed, name) for name, count in asdict(into.total).items()}
    differences |= {"messages_untracked": digested.messages_untracked, "publishers_uncounted": publishers_uncounted}
    into.rest = ChannelSums(**differences)
    yield
    yield from _add_up_by_slot(loads, named, channels, planned, into)


def _add_up_by_slot(
    loads: list[Load], named: list[Load], channels: TrackedChannels, planned: Container[bytes], into: Composed
) -> Generator[None]:
    """Add up what is not named, and not in the plan either, by slot."""
    subscribers = channels.slot_subscribers.copy()
    for load in named:
        subscribers[load.track.audience.slot] -= load.track.audience.subscribers
    sums = {slot: [0, 0, 0, 0] for slot, count in enumerate(subscribers) if count}
    names = {load.track.logical for load in named}
    for number, load in enumerate(loads, 1):
        logical = load.track.logical
        if logical not in names and logical not in planned:
            row = sums.setdefault(load.track.audience.slot, [0, 0, 0, 0])
            row[0] += load.publications
            row[1] += load.messages_sent
            row[2] += load.bytes_in
            row[3] += load.bytes_out
        if number % WORK_PER_STEP == 0:
            yield
    slots = sorted(sums)
    publications, sent, bytes_in, bytes_out = zip(*(sums[slot] for slot in slots), strict=True) if slots else [()] * 4
    counts = tuple([subscribers[slot] for slot in slots])
    into.slots = SlotColumns(tuple(slots), publications, counts, sent, bytes_in, bytes_out)


def _by_channel(loads: list[Load]) -> list[Load]:
    """Merge the physical names of each channel; nearly all channels have one only."""
    replicas = [load for load in loads if load.track.physical is not load.track.logical]
    if not replicas:
        return loads
    merged = {load.track.logical: load for load in loads if load.track.physical is load.track.logical}
    for replica in replicas:
        load = merged.setdefault(replica.track.logical, replica)
        if load is not replica:
            load.merge(replica)
    return list(merged.values())


def _idle(named: list[Load], channels: TrackedChannels, count_max: int) -> list[Load]:
    """Return channels that have subscribers and no messages."""
    found: list[Load] = []
    if count_max > 0:
        names = {load.track.logical for load in named}
        for track in channels.newest():
            if track.audience.subscribers and track.logical not in names:
                names.add(track.logical)
                found.append(Load(track))
                if len(found) == count_max:
                    break
    return found


def _columns(loads: list[Load], publisher_counts: list[int], bounds: NamedBounds) -> ChannelColumns:
    who, unnamed = loads[: bounds.who_channels_max], (b"",) * max(0, len(loads) - bounds.who_channels_max)
    who_max = bounds.who_per_channel_max
    published = [load.publishers().most_common(who_max) for load in who]
    announced = [load.track.audience.clients for load in who]
    return ChannelColumns(
        channels=tuple([load.track.logical for load in loads]),
        publications=tuple([load.publications for load in loads]),
        publishers=tuple(publisher_counts),
        subscribers=tuple([load.track.audience.subscribers for load in loads]),
        messages_sent=tuple([load.messages_sent for load in loads]),
        bytes_in=tuple([load.bytes_in for load in loads]),
        bytes_out=tuple([load.bytes_out for load in loads]),
        publisher_ids=tuple([b"".join([id_ for id_, _ in counts]) for counts in published]) + unnamed,
        subscriber_ids=tuple([pack_ids(list(clients)[: -who_max - 1 : -1]) for clients in announced]) + unnamed,
    )


def _sum_up(loads: list[Load], channels: int, subscribers: int) -> ChannelSums:
    return ChannelSums(
        channels=channels,
        publications=sum([load.publications for load in loads]),
        subscribers=subscribers,
        messages_sent=sum([load.messages_sent for load in loads]),
        bytes_in=sum([load.bytes_in for load in loads]),
        bytes_out=sum([load.bytes_out for load in loads]),
    )
