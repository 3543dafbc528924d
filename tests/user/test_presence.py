"""Who is present, as users see it: the machine, and the asyncio client with a broker that a test plays."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from dynamoth.edge.frames import (
    AskMembers,
    Data,
    Error,
    Gap,
    Members,
    Move,
    Subscribe,
    Subscribed,
    SubscriptionRequest,
    Unsubscribe,
)
from dynamoth.edge.interests import channel_interest, presence_interest
from dynamoth.edge.publications import Position
from dynamoth.machine.events import Start
from dynamoth_user import Client, ClientFailed, Join, Leave, Presence, RefusedError, presence
from dynamoth_user import Gap as MissingChanges
from dynamoth_user.machine.events import (
    AddSubscription,
    CloseConnection,
    ConnectionClosed,
    ConnectionOpened,
    DeliverGap,
    MemberChanged,
    MembersListed,
    RemoveSubscription,
    SendFrame,
)
from dynamoth_user.machine.migration import MOVE_FAILED
from dynamoth_user.machine.presence import WAITING_MAX
from tests.machines.helpers import only
from tests.user.scripted_broker import EPOCH as BROKER_EPOCH
from tests.user.scripted_broker import Peer, ScriptedBroker, at, scripted_broker
from tests.user.test_client import client_of, confirm, doing
from tests.user.test_machine import EPOCH, LATER_EPOCH, User, connect_in

ROOM = presence_interest("room")
ANN, BOB, EVE = "a" * 22, "b" * 22, "e" * 22
NAMES = {ANN: "ann", BOB: "bob", EVE: "eve"}


def event(offset: int, kind: str, member: str) -> Data:
    payload = json.dumps({kind: {"user": NAMES[member], "member": member}})
    return Data(ROOM.id, payload.encode(), offset)


def members(ref: int, offset: int, *these: str, epoch: int = EPOCH, count: int | None = None) -> Members:
    listed = tuple((member, NAMES[member]) for member in these)
    return Members(ref, listed, len(these) if count is None else count, Position(epoch, offset))


def asked(actions: list[Any]) -> list[tuple[int, int]]:
    """Return connection and ``ref`` of each question."""
    return [(each.number, each.frame.ref) for each in only(SendFrame, actions) if isinstance(each.frame, AskMembers)]


def changes(actions: list[Any]) -> list[tuple[bool, str]]:
    return [(each.is_join, each.member) for each in only(MemberChanged, actions)]


def watching() -> tuple[User, int]:
    """Return a user who watches the room from offset 4, and the number of the question that it has asked."""
    user = User()
    user.tell(Start(), AddSubscription(ROOM))
    actions = user.answer(connect_in(user.tell(ConnectionOpened(1))), 1, Position(EPOCH, 4))
    [(number, ref)] = asked(actions)
    assert number == 1
    return user, ref


# The machine.


def test_the_list_and_what_comes_behind_it() -> None:
    user, ref = watching()
    assert user.frame(1, members(ref, 4, ANN, count=7)) == [MembersListed(ROOM, {ANN: "ann"}, 7)]
    assert user.frame(1, event(5, "join", BOB), event(6, "leave", ANN)) == [
        MemberChanged(ROOM, True, BOB, "bob"),
        MemberChanged(ROOM, False, ANN, "ann"),
    ]
    assert user.frame(1, event(6, "leave", ANN)) == []


def test_what_comes_before_the_list_waits_and_what_the_list_has_does_not_count_again() -> None:
    user, ref = watching()
    assert user.frame(1, event(5, "join", ANN), event(6, "join", BOB)) == []
    actions = user.frame(1, members(ref, 5, ANN))
    assert only(MembersListed, actions) and changes(actions) == [(True, BOB)]
    user, ref = watching()
    user.frame(1, members(ref, 6, ANN, BOB))
    assert changes(user.frame(1, event(5, "join", ANN), event(6, "join", BOB), event(7, "leave", BOB))) == [
        (False, BOB)
    ]


def test_after_a_gap_the_members_are_asked_for_again() -> None:
    user, ref = watching()
    user.frame(1, members(ref, 4, ANN))
    actions = user.frame(1, Gap(ROOM.id, "retention", 5, 9, Position(EPOCH, 9)))
    [(_, again)] = asked(actions)
    assert len(only(DeliverGap, actions)) == 1
    assert changes(user.frame(1, event(10, "join", BOB))) == []
    assert user.frame(1, members(ref, 9)) == []  # of the former question
    assert changes(user.frame(1, members(again, 9, ANN))) == [(True, BOB)]


def test_a_list_of_another_life_of_the_log_does_not_count() -> None:
    user, ref = watching()
    assert user.frame(1, members(ref, 1, ANN, epoch=LATER_EPOCH)) == []
    [(_, again)] = asked(user.pass_time(1.6))
    [(_, last)] = asked(user.frame(1, Gap(ROOM.id, "log_lost", 5, None, Position(LATER_EPOCH, 0))))
    assert user.frame(1, members(again, 1, ANN, epoch=LATER_EPOCH)) == []
    assert only(MembersListed, user.frame(1, members(last, 1, ANN, epoch=LATER_EPOCH))) != []


def test_a_list_that_cannot_be_had_is_asked_for_later() -> None:
    user, ref = watching()
    assert asked(user.frame(1, Error("log_unavailable", "", "later", 3000, ref))) == []
    assert asked(user.pass_time(1.4)) == []
    assert len(asked(user.pass_time(4.0))) == 1


def test_the_broker_that_serves_the_session_is_asked_if_another_one_has_not_answered() -> None:
    user, _ = watching()
    user.tell(ConnectionClosed(1, 1006, "lost"))
    user.pass_time(1.0)
    [(number, ref)] = asked(user.answer(connect_in(user.tell(ConnectionOpened(2))), 2))
    assert number == 2
    user.frame(2, members(ref, 4, ANN))
    user.tell(ConnectionClosed(2, 1006, "lost"))
    user.pass_time(1.0)
    assert asked(user.answer(connect_in(user.tell(ConnectionOpened(3))), 3)) == []
    assert changes(user.frame(3, event(5, "leave", ANN))) == [(False, ANN)]


def test_too_many_changes_before_the_list_are_dropped_and_the_list_is_asked_for_again() -> None:
    user, ref = watching()
    actions = user.frame(1, *(event(5 + number, "join", ANN) for number in range(WAITING_MAX + 1)))
    [(_, again)] = asked(actions)
    assert user.frame(1, members(ref, 6)) == []
    assert user.frame(1, members(again, WAITING_MAX + 5, ANN)) == [MembersListed(ROOM, {ANN: "ann"}, 1)]


def test_what_is_no_change_is_ignored() -> None:
    user, ref = watching()
    user.frame(1, members(ref, 4))
    assert user.frame(1, Data(ROOM.id, b"nonsense", 5)) == []
    assert changes(user.frame(1, event(6, "join", ANN))) == [(True, ANN)]


def test_who_watches_no_more_asks_no_more() -> None:
    user, ref = watching()
    user.tell(RemoveSubscription(ROOM))
    assert user.frame(1, members(ref, 4, ANN)) == []
    assert asked(user.pass_time(5.0)) == []


def test_a_move_asks_nothing_and_one_that_fails_is_not_the_end_of_the_session() -> None:
    user, ref = watching()
    user.frame(1, members(ref, 4, ANN))
    assert asked(user.moving()) == []
    user, _ = watching()
    user.frame(1, Move(("wss://b2",), 0, 5_000))
    user.pass_time(0.001)
    user.tell(ConnectionOpened(2))
    assert [(each.number, each.code) for each in only(CloseConnection, user.pass_time(5.0))] == [(2, MOVE_FAILED)]


@pytest.mark.parametrize("is_stored", [False, True])
def test_who_is_present_says_so_on_every_connection(is_stored: bool) -> None:
    user = User()
    channel = channel_interest("log.news")
    user.tell(Start(), AddSubscription(channel, None, is_stored, is_present=True))
    connect = connect_in(user.tell(ConnectionOpened(1)))
    assert connect.subs == (SubscriptionRequest(1, channel, None, is_stored, is_present=True),)
    user.answer(connect, 1)
    user.tell(ConnectionClosed(1, 1006, "lost"))
    user.pass_time(1.0)
    again = connect_in(user.tell(ConnectionOpened(2)))
    assert again.subs == (SubscriptionRequest(2, channel, Position(EPOCH, 0), is_stored, is_present=True),)


# The client.


async def answer(peer: Peer, offset: int, *these: str, count: int | None = None) -> None:
    """Answer the next question for the members."""
    question = await peer.read(AskMembers)
    assert question.interest == ROOM
    await peer.send(members(question.ref, offset, *these, epoch=BROKER_EPOCH, count=count))


async def watched(client: Client, broker: ScriptedBroker, *these: str) -> tuple[Peer, Presence]:
    """Return the first connection, and who is present in the room."""
    async with doing(client.presence("room")) as asking:
        peer = await broker.peer()
        await peer.welcome()
        if not asking.done():
            await answer(peer, 0, *these)
    return peer, await asking


async def test_members_are_current_whether_one_iterates_or_not() -> None:
    async with scripted_broker() as broker, client_of(broker) as client:
        peer, room = await watched(client, broker, ANN, BOB)
        assert (dict(room.members), room.count) == ({ANN: "ann", BOB: "bob"}, 2)
        await peer.send(event(1, "leave", ANN), event(2, "join", EVE))
        assert [await anext(room), await anext(room)] == [Leave(ANN, "ann"), Join(EVE, "eve")]
        assert (dict(room.members), room.count) == ({BOB: "bob", EVE: "eve"}, 2)


async def test_after_a_gap_the_difference_follows() -> None:
    async with scripted_broker() as broker, client_of(broker) as client:
        peer, room = await watched(client, broker, ANN, BOB)
        await peer.send(Gap(ROOM.id, "retention", 1, 9, at(9)))
        gap = await anext(room)
        assert isinstance(gap, MissingChanges) and (gap.reason, gap.first, gap.last) == ("retention", 1, 9)
        await answer(peer, 9, BOB, EVE)
        assert [await anext(room), await anext(room)] == [Leave(ANN, "ann"), Join(EVE, "eve")]
        await peer.send(event(10, "leave", BOB))
        assert await anext(room) == Leave(BOB, "bob")


async def test_after_a_gap_two_parts_of_the_members_make_no_difference() -> None:
    async with scripted_broker() as broker, client_of(broker) as client:
        async with doing(client.presence("room")) as asking:
            peer = await broker.peer()
            await peer.welcome()
            await answer(peer, 0, ANN, BOB, count=3)
        room = await asking
        for offset, listed, count in ((9, (BOB, EVE), 3), (19, (BOB, EVE), 2), (29, (ANN,), 3)):
            await peer.send(Gap(ROOM.id, "retention", offset, offset, at(offset)))
            assert isinstance(await anext(room), MissingChanges)
            await answer(peer, offset, *listed, count=count)
        await peer.send(event(30, "leave", BOB))
        assert await anext(room) == Leave(BOB, "bob")
        assert (dict(room.members), room.count) == ({ANN: "ann"}, 2)


async def test_a_presence_is_for_one_task_at_a_time() -> None:
    async with scripted_broker() as broker, client_of(broker) as client:
        peer, room = await watched(client, broker)
        async with doing(anext(room)) as waiting:
            await asyncio.sleep(0)  # it waits
            with pytest.raises(RuntimeError, match="another task"):
                await asyncio.wait_for(anext(room), 5.0)
            await peer.send(event(1, "join", ANN))
        assert await waiting == Join(ANN, "ann")
        await peer.send(event(2, "leave", ANN))
        assert await anext(room) == Leave(ANN, "ann")


async def test_who_does_not_iterate_gets_a_gap_in_place_of_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "CHANGES_MAX", 2)
    async with scripted_broker() as broker, client_of(broker) as client:
        peer, room = await watched(client, broker)
        await peer.send(event(1, "join", ANN), event(2, "join", BOB), event(3, "leave", ANN), event(4, "join", EVE))
        async with doing(client.subscribe("other")):
            await confirm(peer)  # behind the changes
        assert dict(room.members) == {BOB: "bob", EVE: "eve"}
        gap = await anext(room)
        assert isinstance(gap, MissingChanges) and gap.reason == presence.TOO_SLOW
        assert await anext(room) == Join(EVE, "eve")


async def test_a_presence_ends() -> None:
    async with scripted_broker() as broker, client_of(broker) as client:
        peer, room = await watched(client, broker)
        with pytest.raises(ValueError):
            await client.presence("room")
        async with room:
            pass
        assert (await peer.read(Unsubscribe)).s == ROOM.id
        assert [each async for each in room] == []
        async with doing(client.presence("room")) as asking:
            await confirm(peer)
            await answer(peer, 0, ANN)
        again = await asking
        assert dict(again.members) == {ANN: "ann"}
        await client.close()
        assert [each async for each in again] == []


async def test_a_presence_that_is_refused_or_lost() -> None:
    async with scripted_broker() as broker, client_of(broker) as client:
        async with doing(client.subscribe("news", present=True)) as subscribing:
            peer = await broker.peer()
            connect = await peer.welcome()
        assert connect.subs[0].is_present
        await subscribing
        async with doing(client.presence("room")) as asking:
            question = await peer.read(Subscribe)
            await peer.send(Error("forbidden", "not listed", "never", None, question.request.ref))
        with pytest.raises(RefusedError):
            await asking
        async with doing(client.presence("room")) as asking:
            question = await peer.read(Subscribe)
            await peer.send(Subscribed(question.request.ref, ROOM.id, at(0)))
            await answer(peer, 0)
        room = await asking
        await peer.close(4001, "no more")
        with pytest.raises(ClientFailed):
            await anext(room)
