"""The scripts of presence, on real Redis and in the simulator's model: the same commands get the same replies."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from dynamoth.edge.frames import (
    AskMembers,
    Members,
    Subscribe,
    SubscriptionRequest,
    UserFrame,
    read_broker_frame,
    read_user_frame,
    to_wire,
)
from dynamoth.edge.interests import channel_interest, presence_interest
from dynamoth.edge.log import LogOptions, log_keys, read_command
from dynamoth.edge.log import parse_page as parse_log
from dynamoth.edge.presence import (
    Change,
    Kind,
    Leases,
    Listed,
    PresenceEvent,
    change_command,
    member_id,
    members_command,
    parse_appended,
    parse_members,
    presence_keys,
    read_event,
    user_text,
)
from dynamoth.edge.publications import Position
from dynamoth.errors import MalformedMessage
from dynamoth.machine.events import CommandPart
from dynamoth_cli.local.embedded import EmbeddedRedis
from dynamoth_link.query import query
from dynamoth_sim.world.redis import RedisServer
from dynamoth_sim.world.world import World

OPTIONS = LogOptions()
INTEREST = presence_interest("room")
EPOCH, OTHER_EPOCH = 0x1234, 0xABCD

LONG = Leases(1000.0, 1000.0, 1000.0)
OVER = Leases(0.0, 0.0, 0.0)
"""Leases that end at once: after the changes of the command that begins them."""

ANN, BOB, EVE = "ann", "bob", 'Eve "\\ \n é'
Command = tuple[CommandPart, ...]


def change(
    kind: Kind, user: str, generation: int = 1, leases: Leases = LONG, run: str = "run1", epoch: int = EPOCH
) -> Command:
    changed = Change(kind, member_id(user, "s"), generation, user_text(user))
    return change_command(INTEREST.id, [changed], "b1", leases, run, epoch, OPTIONS)


def changes(*users: str, kind: Kind = "enter", leases: Leases = LONG, expired_max: int = 100) -> Command:
    made = [Change(kind, member_id(user, "s"), 1, user_text(user)) for user in users]
    return change_command(INTEREST.id, made, "b1", leases, "run1", EPOCH, OPTIONS, expired_max)


def members(members_max: int = 100, run: str = "run1", epoch: int = EPOCH) -> Command:
    return members_command(INTEREST.id, run, epoch, OPTIONS, members_max=members_max)


def log() -> Command:
    return read_command(INTEREST.id, "run1", EPOCH, OPTIONS, 0, 100)


STORIES: dict[str, list[Command]] = {
    "nobody": [members(), changes(), members(epoch=OTHER_EPOCH)],
    "some join, and one leaves": [changes(ANN, BOB, EVE), change("exit", BOB), members(), log()],
    "a name is text of JSON": [change("enter", EVE), change("exit", EVE), log()],
    "who is there does not join again": [change("enter", ANN), change("enter", ANN), change("enter", ANN, 2), log()],
    "who is not there does not leave": [change("exit", ANN), change("release", BOB), change("move", BOB), log()],
    "an older connection does not leave": [
        change("enter", ANN, 5),
        change("exit", ANN, 4),
        change("release", ANN, 4, OVER),
        change("move", ANN, 4, OVER),
        changes(),
        members(),
    ],
    "an older connection does not renew a lease": [
        change("enter", ANN, 5, OVER),
        change("enter", ANN, 5),
        change("enter", ANN, 4, OVER),
        members(),
        log(),
    ],
    "an older connection takes over where a newer one has not renewed the lease": [
        change("enter", ANN, 5, Leases(100.0, 0.0, 1000.0)),
        change("exit", ANN, 4),
        change("enter", ANN, 4, Leases(150.0, 0.0, 1000.0)),
        change("exit", ANN, 4),
        members(),
        change("enter", ANN, 4, Leases(1000.0, 0.0, 1000.0)),
        change("exit", ANN, 4),
        members(),
        log(),
    ],
    "a lease ends": [change("enter", ANN), change("enter", BOB), change("enter", BOB, 1, OVER), members(), log()],
    "a lease is renewed": [change("enter", ANN, leases=LONG), change("enter", ANN, leases=LONG), members()],
    "who was released is taken over": [
        change("enter", ANN, 5),
        change("release", ANN, 5),
        change("enter", ANN, 4),
        change("exit", ANN, 3),
        members(),
        log(),
    ],
    "who was released leaves after a while": [
        change("enter", ANN),
        change("release", ANN, leases=Leases(1000.0, 0.0, 1000.0)),
        members(),
        log(),
    ],
    "who has moved stays for a lease": [
        change("enter", ANN),
        change("move", ANN, leases=Leases(1000.0, 0.0, 1000.0)),
        members(),
        change("enter", ANN),
        change("move", ANN, leases=OVER),
        members(),
    ],
    "who has left cannot be brought back by an older connection": [
        change("enter", ANN, 4),
        change("enter", ANN, 5),
        change("exit", ANN, 5),
        change("enter", ANN, 4),
        members(),
        change("enter", ANN, 5),
        members(),
    ],
    "a fence ends": [
        change("enter", ANN, 5),
        change("exit", ANN, 5, OVER),
        change("enter", ANN, 4),
        members(),
    ],
    "an exit without an entry is a fence, too": [change("exit", ANN, 5), change("enter", ANN, 4), members()],
    "ends in portions": [
        changes(ANN, BOB, EVE, leases=OVER, expired_max=2),
        changes(expired_max=2),
        changes(expired_max=2),
        members(),
    ],
    "a lost log keeps the members, and begins another epoch": [
        changes(ANN, BOB),
        members(run="run2", epoch=OTHER_EPOCH),
        change("exit", BOB, run="run2"),
        members(run="run2"),
    ],
}


def model(commands: Sequence[Command]) -> list[Any]:
    server = RedisServer(World(1), "log", "redis://log")
    words = [[word if isinstance(word, bytes) else str(word).encode() for word in command] for command in commands]
    return [server.execute("test", *each) for each in words]


@pytest.fixture(scope="module")
def server() -> Any:
    with EmbeddedRedis() as running:
        yield running


def redis(server: EmbeddedRedis, commands: Sequence[Command]) -> list[Any]:
    address = f"redis://127.0.0.1:{server.port}"
    return asyncio.run(query(address, (b"DEL", *presence_keys(INTEREST.id)), *commands))[1:]


@pytest.mark.parametrize("story", STORIES)
def test_redis_and_its_model_reply_alike(story: str, server: EmbeddedRedis) -> None:
    assert redis(server, STORIES[story]) == model(STORIES[story])


def test_the_members_are_those_of_the_position() -> None:
    joined, left, listed, page = model([changes(ANN, BOB), change("exit", ANN), members(), log()])
    assert parse_appended(joined).position == Position(EPOCH, 2)
    assert not parse_appended(joined).has_more
    events = [*parse_appended(joined).publications(), *parse_appended(left).publications()]
    assert list(parse_log(page).entries) == events
    ann, bob = member_id(ANN, "s"), member_id(BOB, "s")
    assert [read_event(event) for _, event in events] == [
        PresenceEvent(True, ann, ANN),
        PresenceEvent(True, bob, BOB),
        PresenceEvent(False, ann, ANN),
    ]
    what = parse_members(listed)
    assert (what.appended.position, what.count, what.members) == (Position(EPOCH, 3), 1, ((bob, BOB),))


def test_a_lease_that_has_ended_is_a_leave_before_the_answer() -> None:
    *_, listed = model([changes(ANN, BOB), change("release", BOB, leases=OVER), members()])
    assert parse_members(listed).members == ((member_id(ANN, "s"), ANN),)
    assert parse_members(listed).appended.position == Position(EPOCH, 3)


def test_more_is_due_than_may_end_at_once() -> None:
    replies = model([changes(ANN, BOB, EVE, leases=OVER, expired_max=2), changes(expired_max=2)])
    first, second = map(parse_appended, replies)
    assert [first.has_more, second.has_more] == [True, False]
    assert len(first.events) == 3 + 2 and len(second.events) == 1


def test_many_members_are_named_in_part_and_counted(server: EmbeddedRedis) -> None:
    many = [f"user{number}" for number in range(1500)]
    for replies in (redis(server, [changes(*many), members(1000)]), model([changes(*many), members(1000)])):
        listed = parse_members(replies[-1])
        assert listed.count == 1500
        assert len({member for member, _ in listed.members}) == len(listed.members) == 1000
        assert dict(listed.members).items() <= {member_id(user, "s"): user for user in many}.items()


def test_names_of_users_are_bounded_in_bytes() -> None:
    long = [f"{number}{'x' * 8000}" for number in range(100)]
    listed: Listed = parse_members(model([changes(*long), members()])[-1])
    assert listed.count == 100
    assert 60 < len(listed.members) < 70


@pytest.mark.parametrize(
    "reply", [None, b"OK", [], [b"x", 1, 0, 0], [b"0" * 16, 1, 0, 2, b"a"], [b"0" * 16, b"x", 0, 0]]
)
def test_a_reply_of_something_else_is_malformed(reply: Any) -> None:
    for parse in (parse_appended, parse_members):
        with pytest.raises(MalformedMessage):
            parse(reply)


@pytest.mark.parametrize("payload", [b"", b"[]", b"{}", b'{"join":1}', b'{"come":{}}', b'{"join":{"user":1}}', b"\xff"])
def test_a_publication_of_something_else_is_malformed(payload: bytes) -> None:
    with pytest.raises(MalformedMessage):
        read_event(payload)


@pytest.mark.parametrize(
    "frame", [AskMembers(3, INTEREST), Subscribe(SubscriptionRequest(1, channel_interest("room"), None, True))]
)
def test_frames_of_users_are_read_as_they_were_written(frame: UserFrame) -> None:
    assert read_user_frame(to_wire(frame)) == frame


def test_frames_on_the_wire() -> None:
    position = {"epoch": "000000000000000a", "offset": 4}
    wire: dict[str, Any] = {"type": "members", "ref": 3, "members": [["ann", "m" * 22]], "count": 9, **position}
    assert to_wire(Members(3, (("m" * 22, "ann"),), 9, Position(10, 4))) == wire
    assert read_broker_frame(wire) == Members(3, (("m" * 22, "ann"),), 9, Position(10, 4))
    assert to_wire(AskMembers(3, INTEREST)) == {"type": "members", "ref": 3, "channel": "room"}
    assert to_wire(Subscribe(SubscriptionRequest(1, INTEREST, Position(10, 4)))) == {
        "type": "subscribe",
        "ref": 1,
        "presence": "room",
        "since": position,
    }


@pytest.mark.parametrize(
    "fields", [{"members": [["ann"]]}, {"members": [["ann", "short"]]}, {"members": [[1, "m" * 22]]}, {"count": -1}]
)
def test_answers_that_cannot_be_read(fields: dict[str, Any]) -> None:
    wire: dict[str, Any] = {"type": "members", "ref": 3, "members": [], "count": 0, "epoch": "0" * 16, "offset": 4}
    read_broker_frame(wire)
    with pytest.raises(MalformedMessage):
        read_broker_frame(wire | fields)


def test_a_subscription_is_to_one_thing() -> None:
    for fields in ({"channel": "a", "presence": "a"}, {"query": "a", "presence": "a"}, {}):
        with pytest.raises(MalformedMessage):
            read_user_frame({"type": "subscribe", "ref": 1, **fields})


def test_what_others_see_of_a_session() -> None:
    assert member_id("ann", "s1") == "8AhXZgv7WagJMmmn8SdH5Q"
    assert len({member_id(*who) for who in (("a", "b"), ("ab", ""), ("", "ab"), ("a", "c"))}) == 4
    assert channel_interest("room").id != INTEREST.id
    assert presence_keys(INTEREST.id)[:2] == log_keys(INTEREST.id)
