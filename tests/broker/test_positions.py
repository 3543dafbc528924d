"""Stored positions: in the machine of a broker, and with real brokers, log servers and clients."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dynamoth.edge.frames import Ack, Data, Error, Gap, Subscribe, Subscribed, SubscriptionRequest, Unsubscribe
from dynamoth.edge.interests import channel_interest, query_interest
from dynamoth.edge.positions import FIND_SCRIPT, STORE_SCRIPT, position_key
from dynamoth.edge.publications import Position
from dynamoth.machine.events import ErrorReply, LinkDown, Replied, Send
from dynamoth_broker.events import ChannelConfirmed, Closed, Grant, Stop, Stopped
from dynamoth_broker.sessions import Session
from dynamoth_cli.local.cluster import LocalCluster
from dynamoth_cli.local.embedded import EmbeddedRedis
from dynamoth_link.query import query
from dynamoth_user import Client, Item, RefusedError
from tests.broker.edge import RawUser, running_broker, token, write_keys
from tests.broker.test_machine import (
    EPOCH,
    LATER_EPOCH,
    LIVE,
    LOG,
    LOGGED,
    NO_PINGS,
    OPTIONS,
    Broker,
    frames,
    reads,
)
from tests.machines.helpers import only

ANN = Grant("ann")
STORED = SubscriptionRequest(1, LOGGED, None, is_stored=True)
KEY = position_key(LOGGED.id, "ann", "phone")


def scripts(actions: list[Any], script: bytes) -> list[Send]:
    return [send for send in reads(actions) if send.args[1] == script]


def found(broker: Broker, find: Send, offset: int, epoch: int = EPOCH, *, is_new: bool = False) -> list[Any]:
    """Let the log server answer the look for a position."""
    return broker.tell(Replied(LOG, find.tag, [b"%016x %d" % (epoch, offset), int(is_new)]))


def stored_in(actions: list[Any]) -> list[tuple[str, int, int]]:
    """Return the positions that are sent to the log server: key, epoch, offset."""
    positions: list[tuple[str, int, int]] = []
    for send in scripts(actions, STORE_SCRIPT):
        words = [word if isinstance(word, bytes) else str(word).encode() for word in send.args]
        count = int(words[2])
        keys, (_, _, *places) = words[3 : 3 + count], words[3 + count :]
        positions += [
            (key.decode(), int(epoch, 16), int(offset))
            for key, epoch, offset in zip(keys[1::2], places[::2], places[1::2], strict=True)
        ]
    return positions


def subscribed(options: Any = NO_PINGS, at: int = 2, tip: int = 5) -> Broker:
    """Return a broker with connection 1 of ann, whose stored subscription has begun at an offset of the log."""
    broker = Broker(options)
    [find] = scripts(broker.open(1, STORED, grant=ANN, session="phone"), FIND_SCRIPT)
    found(broker, find, at)
    [tip_read] = reads(broker.tell(ChannelConfirmed(LOGGED.log_channel)))
    actions = broker.page(tip_read, tip)
    if at < tip:
        [page] = reads(actions)
        broker.page(page, tip, *range(at + 1, tip + 1))
    return broker


def ack(broker: Broker, offset: int, epoch: int = EPOCH, interest_id: str = LOGGED.id) -> list[Any]:
    return broker.frame(1, Ack({interest_id: Position(epoch, offset)}))


# The beginning.


@pytest.mark.parametrize("is_channel_first", [False, True])
def test_a_stored_subscription_begins_behind_its_position(is_channel_first: bool) -> None:
    broker = Broker()
    [find] = scripts(broker.open(1, STORED, grant=ANN, session="phone"), FIND_SCRIPT)
    assert find.args[5] == KEY
    if is_channel_first:
        [tip_read] = reads(broker.tell(ChannelConfirmed(LOGGED.log_channel)))
        assert frames(broker.page(tip_read, 5), 1) == []
        actions = found(broker, find, 3)
    else:
        assert frames(found(broker, find, 3), 1) == []
        [tip_read] = reads(broker.tell(ChannelConfirmed(LOGGED.log_channel)))
        actions = broker.page(tip_read, 5)
    [page] = reads(actions)
    sent = frames(broker.page(page, 5, 4, 5), 1)
    assert sent[0] == Subscribed(1, LOGGED.id, Position(EPOCH, 3))
    assert [frame.o for frame in sent if isinstance(frame, Data)] == [4, 5]


def test_a_position_of_a_former_life_of_the_log_begins_with_a_gap() -> None:
    broker = Broker()
    [find] = scripts(broker.open(1, STORED, grant=ANN), FIND_SCRIPT)
    found(broker, find, 3)
    [tip_read] = reads(broker.tell(ChannelConfirmed(LOGGED.log_channel)))
    [page] = reads(broker.page(tip_read, 1, epoch=LATER_EPOCH))
    sent = frames(broker.page(page, 1, epoch=LATER_EPOCH), 1)
    assert sent[0] == Subscribed(1, LOGGED.id, Position(LATER_EPOCH, 0), recovered=False)
    assert isinstance(sent[1], Gap)


@pytest.mark.parametrize("reply", [ErrorReply("OOM"), [b"nonsense", 0]])
def test_who_cannot_be_told_its_position_is_refused_and_may_come_again(reply: Any) -> None:
    broker = Broker()
    [find] = scripts(broker.open(1, STORED, grant=ANN), FIND_SCRIPT)
    [error] = only(Error, frames(broker.tell(Replied(LOG, find.tag, reply)), 1))
    assert (error.code, error.retry) == ("log_unavailable", "later")
    assert scripts(broker.frame(1, Subscribe(STORED)), FIND_SCRIPT)


def test_a_position_is_looked_for_when_there_is_a_connection() -> None:
    broker = Broker()
    broker.tell(LinkDown(LOG, "lost"))
    assert scripts(broker.open(1, STORED, grant=ANN), FIND_SCRIPT) == []
    [first] = scripts(broker.up(LOG), FIND_SCRIPT)
    broker.tell(LinkDown(LOG, "lost"))
    [second] = scripts(broker.up(LOG), FIND_SCRIPT)
    assert first.tag is second.tag
    found(broker, second, 5)
    [tip_read] = reads(broker.tell(ChannelConfirmed(LOGGED.log_channel)))
    assert frames(broker.page(tip_read, 5), 1)[0] == Subscribed(1, LOGGED.id, Position(EPOCH, 5))


def test_a_look_that_is_not_answered_ends() -> None:
    broker = Broker()
    [find] = scripts(broker.open(1, STORED, grant=ANN), FIND_SCRIPT)
    [error] = only(Error, frames(broker.pass_time(NO_PINGS.log_wait_s), 1))
    assert error.code == "log_unavailable"
    assert found(broker, find, 3) == []


def test_positions_are_for_users_with_a_token_and_channels_with_a_log() -> None:
    broker = Broker()
    broker.open(1, grant=Grant())
    [anonymous] = only(Error, frames(broker.frame(1, Subscribe(STORED)), 1))
    assert (anonymous.code, anonymous.retry) == ("forbidden", "never")
    assert "token" in anonymous.message
    broker.open(2, grant=ANN)
    [live] = only(Error, frames(broker.frame(2, Subscribe(SubscriptionRequest(1, LIVE, None, is_stored=True))), 2))
    assert (live.code, live.retry) == ("not_logged", "never")
    near = query_interest("near", {"km": 1})
    assert scripts(broker.frame(2, Subscribe(SubscriptionRequest(2, near, None, is_stored=True))), FIND_SCRIPT)


def test_who_says_where_to_begin_is_not_looked_for_and_stored_from_then_on() -> None:
    broker = Broker()
    wanted = replace(STORED, since=Position(EPOCH, 5))
    assert scripts(broker.open(1, wanted, grant=ANN), FIND_SCRIPT) == []
    [tip_read] = reads(broker.tell(ChannelConfirmed(LOGGED.log_channel)))
    broker.page(tip_read, 5)
    ack(broker, 5)
    assert [each[2] for each in stored_in(broker.pass_time(1.0))] == [5]


# Acknowledgements.


def test_acknowledgements_are_stored_together_the_latest_of_each() -> None:
    broker = subscribed()
    for offset in (3, 4):
        assert ack(broker, offset) == []
    assert stored_in(broker.pass_time(1.0)) == [(KEY.decode(), EPOCH, 4)]
    assert broker.broker.counters["acks_ignored"] == 0


def test_of_acknowledgements_in_another_order_the_farthest_is_stored() -> None:
    broker = subscribed()
    for offset in (4, 3):
        ack(broker, offset)
    assert stored_in(broker.pass_time(1.0)) == [(KEY.decode(), EPOCH, 4)]


def test_an_acknowledgement_that_says_nothing_true_is_ignored() -> None:
    broker = subscribed(at=2, tip=5)
    ack(broker, 6)  # ahead of the log
    ack(broker, 3, LATER_EPOCH)
    ack(broker, 3, interest_id=channel_interest("log.other").id)
    broker.open(2, SubscriptionRequest(1, LOGGED), grant=ANN)
    broker.frame(2, Ack({LOGGED.id: Position(EPOCH, 3)}))  # not stored
    assert stored_in(broker.pass_time(5.0)) == []
    assert broker.broker.counters["acks_ignored"] == 4


def test_what_a_log_server_ignores_is_counted() -> None:
    broker = subscribed()
    ack(broker, 3)
    [store] = scripts(broker.pass_time(1.0), STORE_SCRIPT)
    broker.tell(Replied(LOG, store.tag, 0))
    assert broker.broker.counters["acks_ignored"] == 1
    assert stored_in(broker.pass_time(5.0)) == []


@pytest.mark.parametrize("is_lost", [False, True])
def test_what_a_log_server_has_not_confirmed_is_stored_again_the_latest(is_lost: bool) -> None:
    broker = subscribed()
    ack(broker, 3)
    [store] = scripts(broker.pass_time(1.0), STORE_SCRIPT)
    ack(broker, 4)
    broker.tell(LinkDown(LOG, "lost") if is_lost else Replied(LOG, store.tag, ErrorReply("OOM")))
    if is_lost:
        assert stored_in(broker.pass_time(3.0)) == []
        broker.up(LOG)
    assert stored_in(broker.pass_time(1.0)) == [(KEY.decode(), EPOCH, 4)]


def test_positions_that_cannot_be_stored_are_bounded() -> None:
    broker = subscribed(replace(NO_PINGS, unsaved_positions_max=1))
    broker.open(2, replace(STORED, since=Position(EPOCH, 5)), grant=ANN, session="laptop")
    broker.tell(LinkDown(LOG, "lost"))
    ack(broker, 4)
    broker.frame(2, Ack({LOGGED.id: Position(EPOCH, 5)}))
    ack(broker, 5)
    broker.up(LOG)
    assert stored_in(broker.pass_time(1.0)) == [(KEY.decode(), EPOCH, 5)]
    assert broker.broker.counters["positions_dropped"] == 1


@pytest.mark.parametrize("how", ["closed", "unsubscribed"])
def test_what_was_acknowledged_is_stored_at_once_when_a_subscription_ends(how: str) -> None:
    broker = subscribed()
    ack(broker, 3)
    broker.tell(Closed(1)) if how == "closed" else broker.frame(1, Unsubscribe(LOGGED.id))
    assert [each[2] for each in stored_in(broker.pass_time(0.0))] == [3]


def test_a_connection_that_takes_over_begins_behind_what_the_former_one_has_acknowledged() -> None:
    broker = subscribed()
    ack(broker, 4)
    actions = broker.open(2, STORED, grant=ANN, session="phone", generation=1)
    assert [send.args[1] for send in reads(actions)] == [STORE_SCRIPT, FIND_SCRIPT]  # in this order on one connection
    assert stored_in(actions) == [(KEY.decode(), EPOCH, 4)]


def test_a_broker_that_stops_says_when_everything_is_stored() -> None:
    broker = subscribed()
    ack(broker, 3)
    actions = broker.tell(Stop())
    [store] = scripts(actions, STORE_SCRIPT)
    assert only(Stopped, actions) == []
    assert only(Stopped, broker.tell(Replied(LOG, store.tag, 1))) == [Stopped()]
    idle = Broker()
    assert only(Stopped, idle.tell(Stop())) == [Stopped()]


def test_positions_of_connected_users_are_stored_again_so_that_they_last() -> None:
    broker = subscribed(replace(NO_PINGS, position_ttl_s=400.0), at=5)
    again = {f"session{number}": number for number in range(2, 102)}
    for session, number in again.items():
        [find] = scripts(broker.open(number, STORED, grant=ANN, session=session), FIND_SCRIPT)
        found(broker, find, 5)
    stored: set[str] = set()
    for _ in range(100):
        actions = broker.pass_time(1.0)
        assert len(stored_in(actions)) <= 3  # a portion
        stored |= {key for key, _, offset in stored_in(actions) if offset == 5}
        for store in scripts(actions, STORE_SCRIPT):
            broker.tell(Replied(LOG, store.tag, 1))
    assert stored == {KEY.decode(), *(position_key(LOGGED.id, "ann", each).decode() for each in again)}
    for number in (1, *again.values()):
        broker.tell(Closed(number))
    broker.pass_time(3.0)
    assert stored_in(broker.pass_time(1000.0)) == []


def test_sessions_with_stored_positions_leave_memory_when_they_end() -> None:
    broker = subscribed(replace(OPTIONS, position_ttl_s=400.0))
    for number in range(2, 52):
        broker.open(number, replace(STORED, since=Position(EPOCH, 5)), grant=Grant("leaves"), session=f"s{number}")
        broker.frame(number, Ack({LOGGED.id: Position(EPOCH, 5)}))
    broker.pass_time(3.0)  # a round of refreshing has begun
    for number in range(2, 52):
        broker.tell(Closed(number))
    broker.pass_time(30.0)
    gc.collect()
    assert [each for each in gc.get_objects() if isinstance(each, Session) and each.grant.user == "leaves"] == []


def test_what_is_to_be_stored_while_a_server_is_at_work_follows_its_answer() -> None:
    broker = subscribed()
    ack(broker, 3)
    [first] = scripts(broker.pass_time(1.0), STORE_SCRIPT)
    ack(broker, 4)
    broker.tell(Closed(1))
    assert stored_in(broker.pass_time(0.0)) == []
    assert [each[2] for each in stored_in(broker.tell(Replied(LOG, first.tag, 1)))] == [4]


# Real brokers.


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(1) as running:
        yield running


@pytest.fixture(scope="module")
def log() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as running:
        yield running


async def take(client: Client, count: int) -> list[str]:
    """Subscribe, and return the texts of the next publications; all of them are handled."""
    texts: list[str] = []
    async with await client.subscribe("log1", stored=True) as subscription:
        async for item in subscription:
            assert isinstance(item, Item)
            texts.append(item.text)
            if len(texts) == count:
                return texts
    raise AssertionError("the subscription has ended")


def test_a_service_continues_where_it_was(cluster: LocalCluster, log: EmbeddedRedis, tmp_path: Path) -> None:
    logs = {"l1": f"redis://127.0.0.1:{log.port}"}
    keys = str(write_keys(tmp_path))

    def service(url: str, **options: Any) -> Client:
        return Client([url], session="billing", token=token(sub="billing"), proxy=None, **options)

    async def main() -> None:
        async with AsyncExitStack() as stack:
            one = await stack.enter_async_context(running_broker(cluster.url, logs, "b1", token_keys_file=keys))
            two = await stack.enter_async_context(running_broker(cluster.url, logs, "b2", token_keys_file=keys))
            writer = await stack.enter_async_context(Client([two.url], token=token(sub="writer"), proxy=None))
            async with service(one.url) as first:
                subscription = await first.subscribe("log1", stored=True)
                for text in "abc":
                    await writer.publish("log1", text)
                assert [(await anext(subscription)).text for _ in "abc"] == ["a", "b", "c"]  # type: ignore[union-attr]
            # `c` was handled: `async with` has ended without an error.
            for text in "def":
                await writer.publish("log1", text)
            assert await one.stop() == 0
            async with service(two.url) as second:
                assert await take(second, 2) == ["d", "e"]
            [key] = await query(logs["l1"], (b"KEYS", b"__dynamoth__:position:*"))
            assert key == [position_key(channel_interest("log1").id, "billing", "billing")]
            async with service(two.url) as third:
                assert await take(third, 1) == ["f"]
            async with Client([two.url], session="billing", proxy=None) as anonymous:
                with pytest.raises(RefusedError, match="token"):
                    await anonymous.subscribe("log1", stored=True)

    asyncio.run(main())


def test_a_broker_that_ends_has_stored_what_was_acknowledged(
    cluster: LocalCluster, log: EmbeddedRedis, tmp_path: Path
) -> None:
    logs = {"l1": f"redis://127.0.0.1:{log.port}"}
    settings: dict[str, Any] = {"token_keys_file": str(write_keys(tmp_path)), "ack_s": 60.0}
    wanted = {"channel": "log2", "since": "stored"}
    interest_id = channel_interest("log2").id

    async def main() -> None:
        async with running_broker(cluster.url, logs, **settings) as broker:
            user = await RawUser.open(broker.url, wanted, token=token())
            begun = user.answers()[0]
            for ref in (1, 2, 3):
                await user.send("publish", ref=ref, channel="log2", d=f"m{ref}")
            await user.texts(3)
            at = {"epoch": begun["epoch"], "offset": begun["offset"] + 2}
            await user.send("ack", p={interest_id: at})
            await user.send("publish", ref=4, channel="log2", d="m4")
            await user.texts(1)  # the broker has the acknowledgement, and will store it in a minute
            assert await broker.stop() == 0
        async with running_broker(cluster.url, logs, "b2", **settings) as broker:
            again = await RawUser.open(broker.url, wanted, token=token())
            assert again.answers()[0] == {**begun, "offset": begun["offset"] + 2}
            missed = [frame["d"] for frame in again.skipped if frame["type"] == "data"]
            assert missed + await again.texts(2 - len(missed)) == ["m3", "m4"]
            await again.close()

    asyncio.run(main())
