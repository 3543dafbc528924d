"""The channels of a server that an analyzer follows from one interval to the next, and who subscribes to them.

Redis says how many clients subscribe (NUMSUB), but not which: clients announce that. An announcement is believed while
Redis counts enough subscribers. When Redis counts fewer than have announced themselves, some have left without a word:
then the earliest announcements are forgotten.

A channel may have several physical names at one server: those of old and new epochs while it is in transition. Their
subscribers are added up; a client that is moving is counted at both for a moment, by Redis as well.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice

from dynamoth.names import is_user_channel, logical_channel
from dynamoth.plan.slots import SLOTS, slot_index
from dynamoth.protocol.control import Announcement

CHANNEL_BYTES_MAX = 1024
"""Channels with longer names are measured in the sums only: the memory and the report of a name must be bounded."""

ANNOUNCED_MAX = 2000
"""Most channels of one announcement that are processed, so that none takes the agent longer than 3 ms. This client
names no more in one."""


class Audience:
    """The announced subscribers of a channel, under all physical names that it has at this server."""

    __slots__ = ("clients", "slot", "subscribers", "tracks")

    def __init__(self, slot: int) -> None:
        #: The number of the channel's slot.
        self.slot = slot
        #: Client ids by the time of their announcement, the latest last, each with the physical name that it joined.
        self.clients: dict[int, bytes] = {}
        #: How many subscribe, to all physical names, as far as known.
        self.subscribers = 0
        #: How many physical names are followed; more than 0.
        self.tracks = 0


class Track:
    """One physical channel that is followed."""

    __slots__ = ("asked_at", "audience", "logical", "physical", "subscribers")

    def __init__(self, physical: bytes, logical: bytes, audience: Audience) -> None:
        self.physical = physical
        self.logical = logical
        self.audience = audience
        #: The latest answer of NUMSUB; 0 before the first.
        self.subscribers = 0
        #: When NUMSUB was asked last; minus infinity for never.
        self.asked_at = -math.inf


class TrackedChannels:
    """The followed user channels of one server, and their subscribers.

    Args:
        channels_max: most physical channels.
        clients_per_channel_max: most announced clients per channel; the earliest are dropped.
        clients_max: most announced clients over all channels; past it announcements are dropped.

    """

    def __init__(self, channels_max: int, clients_per_channel_max: int, clients_max: int) -> None:
        self._channels_max = channels_max
        self._clients_per_channel_max = clients_per_channel_max
        self._clients_max = clients_max
        #: By physical name; those whose NUMSUB is the oldest come first.
        self._tracks: OrderedDict[bytes, Track] = OrderedDict()
        #: By logical name; each belongs to one track or more.
        self._audiences: dict[bytes, Audience] = {}
        #: How many clients all audiences have.
        self._clients = 0
        #: Sum of ``Track.subscribers``.
        self.subscribers = 0
        #: The same by slot.
        self.slot_subscribers = [0] * SLOTS
        #: Announcements of a client for a channel that were dropped for lack of room.
        self.announcements_dropped = 0

    def __len__(self) -> int:
        """Return how many physical channels are followed."""
        return len(self._tracks)

    def get(self, physical: bytes) -> Track | None:
        """Return the track of a channel, if it is followed."""
        return self._tracks.get(physical)

    def newest(self) -> Iterator[Track]:
        """Yield all channels, those with the newest NUMSUB first."""
        return reversed(self._tracks.values())

    def follow(self, physical: bytes) -> Track | None:
        """Return the track of a user channel, new if necessary; None for other channels, and without room."""
        track = self._tracks.get(physical)
        if track is not None:
            return track
        if len(self._tracks) >= self._channels_max or not is_user_channel(physical):
            return None
        logical = logical_channel(physical)
        if len(logical) > CHANNEL_BYTES_MAX:  # not of the physical name: a channel stays known when it is replicated
            return None
        audience = self._audiences.get(logical)
        if audience is None:
            audience = self._audiences[logical] = Audience(slot_index(logical))
        audience.tracks += 1
        track = self._tracks[physical] = Track(physical, logical, audience)
        self._tracks.move_to_end(physical, last=False)
        return track

    def take_asked(self, tracks: Sequence[Track], now: float) -> None:
        """Record that NUMSUB of these channels is being asked."""
        for track in tracks:
            track.asked_at = now
            self._tracks.move_to_end(track.physical)

    def stale(self, asked_before: float, count_max: int) -> list[Track]:
        """Return channels whose last NUMSUB is older than ``asked_before``, the oldest first."""
        oldest = islice(self._tracks.values(), count_max)
        return [track for track in oldest if track.asked_at < asked_before]

    def take_count(self, physical: bytes, subscribers: int) -> None:
        """Record an answer of NUMSUB."""
        track = self._tracks.get(physical)
        if track is None:
            return
        self.subscribers += subscribers - track.subscribers
        audience = track.audience
        audience.subscribers += subscribers - track.subscribers
        self.slot_subscribers[audience.slot] += subscribers - track.subscribers
        track.subscribers = subscribers
        while len(audience.clients) > audience.subscribers:
            del audience.clients[next(iter(audience.clients))]
            self._clients -= 1

    def drop_deserted(self, tracks: Sequence[Track]) -> None:
        """Stop following those of these channels that have no subscribers."""
        for track in tracks:
            audience = track.audience
            # More clients than subscribers: some have joined since NUMSUB was answered, which forgets those in excess.
            if not track.subscribers and len(audience.clients) <= audience.subscribers:
                self._drop(track)

    def make_room(self) -> None:
        """When nearly full, stop following the channels with the oldest NUMSUB: they are the idlest."""
        while len(self._tracks) > self._channels_max - self._channels_max // 10:
            self._drop(next(iter(self._tracks.values())))

    def _drop(self, track: Track) -> None:
        del self._tracks[track.physical]
        audience = track.audience
        self.subscribers -= track.subscribers
        audience.subscribers -= track.subscribers
        self.slot_subscribers[audience.slot] -= track.subscribers
        audience.tracks -= 1
        if audience.tracks == 0:
            self._clients -= len(audience.clients)
            del self._audiences[track.logical]

    def discover(self, physicals: Sequence[bytes]) -> None:
        """Follow the user channels among these, while that leaves room for busy ones."""
        for physical in physicals:
            if len(self._tracks) >= self._channels_max // 2:
                break
            self.follow(physical)

    def take_announcement(self, announcement: Announcement) -> None:
        """Record the channels that a client says it has joined and left."""
        named = len(announcement.joined) + len(announcement.left)
        self.announcements_dropped += max(0, named - ANNOUNCED_MAX)
        for channel in announcement.left[:ANNOUNCED_MAX]:
            audience = self._audiences.get(logical_channel(channel))
            if audience is not None and audience.clients.get(announcement.client) == channel:
                del audience.clients[announcement.client]  # else it has only moved, to another name
                self._clients -= 1
        for channel in announcement.joined[: max(0, ANNOUNCED_MAX - len(announcement.left))]:
            room = len(self._tracks) < self._channels_max // 2
            track = self.follow(channel) if room else self._tracks.get(channel)
            if track is None or self._clients >= self._clients_max:
                self.announcements_dropped += 1
            else:
                self._join(track, announcement.client)

    def _join(self, track: Track, client: int) -> None:
        audience = track.audience
        if client in audience.clients:
            del audience.clients[client]  # and again, as the latest
            self._clients -= 1
        elif len(audience.clients) >= self._clients_per_channel_max:
            del audience.clients[next(iter(audience.clients))]
            self._clients -= 1
        audience.clients[client] = track.physical
        self._clients += 1

    def check(self) -> None:
        """Assert that tracks, audiences and sums agree."""
        tracks: dict[bytes, list[Track]] = {}
        for track in self._tracks.values():
            tracks.setdefault(track.logical, []).append(track)
            assert self._audiences.get(track.logical) is track.audience, f"{track.physical!r} has another audience"
        assert tracks.keys() == self._audiences.keys(), "each audience has a track"
        for logical, audience in self._audiences.items():
            subscribers = sum(track.subscribers for track in tracks[logical])
            assert (audience.tracks, audience.subscribers) == (len(tracks[logical]), subscribers), f"{logical!r}"
        audiences = self._audiences.values()
        assert self.subscribers == sum(each.subscribers for each in audiences), f"{self.subscribers} subscribers"
        by_slot = [0] * SLOTS
        for each in audiences:
            by_slot[each.slot] += each.subscribers
        assert self.slot_subscribers == by_slot, "the subscribers of slots are those of their channels"
        assert self._clients == sum(len(each.clients) for each in audiences), f"{self._clients} clients"

    def clear(self) -> None:
        """Remove everything: the server has restarted, and nobody is subscribed yet."""
        self._tracks.clear()
        self._audiences.clear()
        self._clients = 0
        self.subscribers = 0
        self.slot_subscribers = [0] * SLOTS
