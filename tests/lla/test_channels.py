from __future__ import annotations

from collections.abc import Iterable

from dynamoth.names import AGENT_CHANNEL, inbox, replica_channel
from dynamoth.protocol.control import Announcement
from dynamoth_lla.channels import ANNOUNCED_MAX, CHANNEL_BYTES_MAX, TrackedChannels


def tracked(channels_max: int = 100, per_channel_max: int = 10, clients_max: int = 1000) -> TrackedChannels:
    return TrackedChannels(channels_max, per_channel_max, clients_max)


def announce(channels: TrackedChannels, client: int, joined: Iterable[bytes] = (), left: Iterable[bytes] = ()) -> None:
    channels.take_announcement(Announcement(client, 1, tuple(joined), tuple(left)))


def clients(channels: TrackedChannels, channel: bytes) -> list[int]:
    track = channels.get(channel)
    return [] if track is None else list(track.audience.clients)


def test_only_users_channels_are_followed() -> None:
    channels = tracked()
    for name in (AGENT_CHANNEL, inbox(1), b"__keyspace@0__:k", b"x" * (CHANNEL_BYTES_MAX + 1)):
        assert channels.follow(name) is None
    assert channels.follow(b"a") is channels.follow(b"a")
    assert len(channels) == 1


def test_a_full_table_follows_no_more_channels() -> None:
    channels = tracked(channels_max=2)
    assert channels.follow(b"a") and channels.follow(b"b")
    assert channels.follow(b"c") is None
    assert channels.follow(b"a") is not None


def test_discovered_and_announced_channels_leave_room_for_busy_ones() -> None:
    channels = tracked(channels_max=10)
    channels.discover([b"%d" % number for number in range(100)])
    assert len(channels) == 5
    announce(channels, 1, [b"x", b"0"])
    assert channels.get(b"x") is None and clients(channels, b"0") == [1]
    assert channels.announcements_dropped == 1
    assert channels.follow(b"busy") is not None


def test_a_nearly_full_table_forgets_what_was_asked_the_longest_ago() -> None:
    channels = tracked(channels_max=10)
    tracks = [track for number in range(10) if (track := channels.follow(b"%d" % number))]
    for track in tracks:
        channels.take_count(track.physical, 2)
    channels.take_asked(tracks[:3], 1.0)
    channels.make_room()
    assert len(channels) == 9
    assert [channels.get(b"%d" % number) is not None for number in range(3)] == [True] * 3
    assert channels.subscribers == 18


def test_who_subscribes_is_what_clients_announce_the_latest_last() -> None:
    channels = tracked()
    announce(channels, 1, [b"a", b"b"])
    announce(channels, 2, [b"a"])
    announce(channels, 1, [b"a"])
    assert clients(channels, b"a") == [2, 1]
    announce(channels, 2, left=[b"a", b"b", b"never"])
    assert clients(channels, b"a") == [1]
    assert clients(channels, b"b") == [1]


def test_a_client_that_left_without_a_word_is_forgotten_when_redis_counts_fewer() -> None:
    channels = tracked()
    for client in (1, 2, 3):
        announce(channels, client, [b"a"])
    channels.take_count(b"a", 3)
    assert clients(channels, b"a") == [1, 2, 3]
    channels.take_count(b"a", 2)
    assert clients(channels, b"a") == [2, 3]
    channels.take_count(b"a", 0)
    assert clients(channels, b"a") == []


def test_announced_clients_are_bounded_per_channel_and_in_all() -> None:
    channels = tracked(per_channel_max=2, clients_max=3)
    for client in (1, 2, 3):
        announce(channels, client, [b"a"])
    assert clients(channels, b"a") == [2, 3]
    announce(channels, 1, [b"b"])
    announce(channels, 1, [b"c"])
    assert clients(channels, b"b") == [1]
    assert clients(channels, b"c") == []
    assert channels.announcements_dropped == 1
    channels.take_count(b"a", 0)
    announce(channels, 1, [b"c"])
    assert clients(channels, b"c") == [1]


def test_an_endless_announcement_is_cut() -> None:
    channels = tracked(channels_max=10 * ANNOUNCED_MAX, clients_max=10 * ANNOUNCED_MAX)
    announce(channels, 1, [b"%d" % number for number in range(ANNOUNCED_MAX + 5)])
    assert len(channels) == ANNOUNCED_MAX
    assert channels.announcements_dropped == 5


def test_physical_names_of_one_channel_share_the_audience() -> None:
    channels = tracked()
    old, new = channels.follow(b"a"), channels.follow(replica_channel(b"a", 7))
    assert old is not None and new is not None
    assert old.audience is new.audience and new.logical == b"a"
    announce(channels, 1, [b"a"])
    announce(channels, 2, [replica_channel(b"a", 7)])
    channels.take_count(b"a", 1)
    channels.take_count(new.physical, 2)
    assert old.audience.subscribers == 3 == channels.subscribers
    channels.take_count(b"a", 0)
    channels.drop_deserted([old])
    assert channels.get(b"a") is None
    assert new.audience.subscribers == 2 == channels.subscribers
    announce(channels, 2, left=[new.physical])
    assert list(new.audience.clients) == []


def test_a_client_that_moves_to_another_name_of_the_channel_is_still_there() -> None:
    channels = tracked()
    new = replica_channel(b"a", 7)
    announce(channels, 1, [b"a"])
    channels.take_count(b"a", 1)
    announce(channels, 1, [new])
    channels.take_count(new, 1)
    announce(channels, 1, left=[b"a"])
    channels.take_count(b"a", 0)
    track = channels.get(new)
    assert track is not None and list(track.audience.clients) == [1]
    announce(channels, 1, left=[new])
    assert not track.audience.clients


def test_a_long_name_is_followed_under_its_physical_names_too() -> None:
    channels = tracked()
    longest, longer = b"x" * CHANNEL_BYTES_MAX, b"x" * (CHANNEL_BYTES_MAX + 1)
    for name, followed in ((longest, True), (longer, False)):
        for physical in (name, replica_channel(name, 7)):
            assert (channels.follow(physical) is not None) == followed


def test_deserted_channels_are_followed_no_more_unless_somebody_has_just_joined() -> None:
    channels = tracked()
    tracks = [track for name in (b"a", b"b", b"c") if (track := channels.follow(name))]
    channels.take_count(b"a", 1)
    announce(channels, 1, [b"b"])
    channels.drop_deserted(tracks)
    assert channels.get(b"a") and channels.get(b"b")
    assert channels.get(b"c") is None


def test_new_channels_come_before_those_that_were_asked_and_these_in_their_order() -> None:
    channels = tracked()
    a, b, c = (channels.follow(name) for name in (b"a", b"b", b"c"))
    assert a and b and c
    channels.take_asked([b], 1.0)
    channels.take_asked([a], 2.0)
    assert [track.physical for track in channels.stale(2.0, 10)] == [b"c", b"b"]
    assert [track.physical for track in channels.stale(2.0, 1)] == [b"c"]
    assert [track.physical for track in channels.newest()] == [b"a", b"b", b"c"]
    channels.follow(b"d")
    assert [track.physical for track in channels.stale(5.0, 10)] == [b"d", b"c", b"b", b"a"]
