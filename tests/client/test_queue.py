from __future__ import annotations

import asyncio
import math

import pytest
import redis.exceptions

from dynamoth_client.machines.patterns.events import PatternMessage
from dynamoth_client.runtime.queue import Failure, Item, MessageQueue, Notice, ShardedMessage


def _message(number: int) -> tuple[bytes, bytes]:
    return b"channel", b"%d" % number


def _fill(queue: MessageQueue, items: list[Item]) -> None:
    for item in items:
        if isinstance(item, (Notice, Failure)):
            queue.put(item)
        else:
            queue.extend([item])


def _read(queue: MessageQueue, count: int = 1000) -> list[Item]:
    """Take so many items, as a reader does, or all."""
    taken: list[Item] = []
    while queue.items and len(taken) < count:
        item = queue.items.popleft()
        if isinstance(item, (Notice, Failure)):
            queue.has_read(item)
        queue.relieve()
        taken.append(item)
    return taken


def test_full_and_room_are_notified_once_each_and_nothing_is_dropped() -> None:
    got: list[str] = []
    queue = MessageQueue(4)
    queue.watch(lambda: got.append("full"), lambda: got.append("room"))
    queue.extend([_message(number) for number in range(3)])
    assert got == []
    queue.extend([_message(number) for number in range(3, 9)])
    queue.put(Notice("pong", None, b""))
    assert got == ["full"]
    taken = 0
    while queue.items:
        item = queue.items.popleft()
        if isinstance(item, Notice):
            queue.has_read(item)
        taken += 1
        queue.relieve()
        assert got == (["full"] if len(queue.items) > 3 else ["full", "room"])
    assert taken == 10


def test_the_oldest_messages_are_dropped_and_nothing_else() -> None:
    queue = MessageQueue(8)
    queue.watch(lambda: None, lambda: None)
    notice, failure = Notice("subscribe", b"channel", 1), Failure(redis.exceptions.ConnectionError("lost"))
    matched = [PatternMessage(b"c*", b"channel", b"%d" % number) for number in range(2)]
    sharded = ShardedMessage(b"channel", b"0")
    items: list[Item] = [_message(0), notice, matched[0], failure, sharded, *map(_message, range(1, 7)), matched[1]]
    _fill(queue, items)
    assert queue.is_full
    assert queue.drop_oldest() == {(b"channel", None, False): 2, (b"c*", b"c*", False): 1, (b"channel", None, True): 1}
    assert list(queue.items) == [notice, *map(_message, range(2, 7)), matched[1]]
    assert _read(queue) == [notice, failure, *map(_message, range(2, 7)), matched[1]]
    assert not queue.is_full


def test_notices_do_not_fill_it() -> None:
    got: list[str] = []
    queue = MessageQueue(2)
    queue.watch(lambda: got.append("full"), lambda: got.append("room"))
    notices = [Notice("subscribe", b"channel", number) for number in range(10)]
    _fill(queue, [*notices[:5], _message(0), *notices[5:]])
    assert (got, queue.notices) == ([], 10)
    queue.extend([_message(1)])
    assert got[0] == "full"
    assert _read(queue) == [*notices[:5], _message(0), *notices[5:], _message(1)]
    assert (got, queue.notices, queue.limit) == (["full", "room"], 0, 2)


def test_notices_stay_in_order_and_are_not_looked_at_again_when_messages_are_dropped() -> None:
    got: list[str] = []
    queue = MessageQueue(4)
    queue.watch(lambda: got.append("full"), lambda: None)
    notices = [Notice("subscribe", b"channel", number) for number in range(12)]
    gaps = [Notice("gap", b"channel", number) for number in range(3)]
    _fill(queue, [*notices[:8], _message(0), notices[8], *map(_message, (1, 2, 3))])
    assert queue.drop_oldest() == {(b"channel", None, False): 1}
    queue.put_dropped(gaps[0])
    assert list(queue.items) == [notices[0], notices[8], *map(_message, (1, 2, 3))]
    _fill(queue, [_message(4), notices[9]])
    assert queue.drop_oldest() == {(b"channel", None, False): 1}
    assert list(queue.items) == [notices[0], *map(_message, (2, 3, 4)), notices[9]]
    assert queue.notices == 11
    assert _read(queue, 3) == notices[:3]
    _fill(queue, [_message(5), notices[10]])
    assert queue.drop_oldest() == {(b"channel", None, False): 1}
    queue.put_dropped(gaps[1])
    assert _read(queue, 9) == [*notices[3:8], gaps[0], notices[8], gaps[1], _message(3)]
    _fill(queue, [_message(number) for number in (6, 7)])
    assert queue.drop_oldest() == {(b"channel", None, False): 1}
    queue.put_dropped(gaps[2])
    assert _read(queue) == [gaps[2], notices[9], _message(5), notices[10], *map(_message, (6, 7))]
    assert (got, queue.notices, queue.limit) == (["full"] * 4, 0, 4)


def test_a_reader_who_was_interrupted_leaves_nothing_behind_for_ever() -> None:
    queue = MessageQueue(1)
    queue.watch(lambda: None, lambda: None)
    notices = [Notice("subscribe", b"channel", number) for number in range(3)]
    _fill(queue, [*notices, _message(0)])
    queue.drop_oldest()
    assert queue.items.popleft() == notices[0]
    queue.settle()
    assert _read(queue) == notices[1:]
    assert (queue.notices, queue.limit) == (0, 1)


async def test_a_waiter_wakes_with_the_first_item_and_at_its_timeout() -> None:
    queue = MessageQueue(4)
    assert not await queue.until_item(0)
    for timeout_s in (60, None, math.inf):
        waiter = asyncio.create_task(queue.until_item(timeout_s))
        await asyncio.sleep(0)
        assert not waiter.done()
        queue.extend([_message(1)])
        assert await waiter
        queue.items.clear()
    loop = asyncio.get_running_loop()
    began_at = loop.time()
    assert not await queue.until_item(0.02)
    assert loop.time() - began_at >= 0.019


async def test_what_is_there_is_not_waited_for() -> None:
    queue = MessageQueue(4)
    queue.extend([_message(1)])
    queue.close(redis.exceptions.ConnectionError("gone"))
    assert await queue.until_item(0)
    assert await queue.until_item(None)


async def test_a_cancelled_waiter_does_not_disturb_another() -> None:
    queue = MessageQueue(4)
    first, second = asyncio.create_task(queue.until_item(60)), asyncio.create_task(queue.until_item(60))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait({first})
    assert not second.done()
    queue.extend([_message(1)])
    assert await second


@pytest.mark.parametrize("error", [None, redis.exceptions.ConnectionError("gone")])
async def test_who_waits_gets_the_end_and_so_does_who_comes_later(error: redis.exceptions.RedisError | None) -> None:
    queue = MessageQueue(4)
    waiter = asyncio.create_task(queue.until_item(60))
    await asyncio.sleep(0)
    queue.close(error)
    for later in (waiter, queue.until_item(60)):
        if error is None:
            assert not await later
        else:
            with pytest.raises(redis.exceptions.ConnectionError, match="gone") as raised:
                await later
            assert raised.value is not error
