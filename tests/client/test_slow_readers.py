"""Readers that are slow, and readers that take many messages at once, on real servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import redis.exceptions

import dynamoth_client
from dynamoth_client.asyncio import GapInfo, from_url
from dynamoth_client.machines.patterns.events import PatternMessage
from dynamoth_client.runtime.backpressure import MESSAGE_BYTES, PAUSE_S_MAX, Blocking
from dynamoth_client.runtime.queue import Item, MessageQueue, Notice, ShardedMessage
from tests.client.both_clients import Connect, is_asynchronous
from tests.client.stored_cluster import StoredCluster, confirmed, next_of
from tests.client.sync_helpers import confirmed as confirmed_sync
from tests.client.sync_helpers import next_of as next_sync
from tests.client.sync_helpers import until

COUNT = 500


def pubsub_of(client: Any, **options: Any) -> Any:
    return client.pubsub(**options)


def queue_of(pubsub: Any) -> Any:
    """What waits to be read from a PubSub of either client."""
    return (pubsub.inner if is_asynchronous(pubsub) else pubsub._inner)._queue.items


def blocking(monkeypatch: pytest.MonkeyPatch, **options: float) -> None:
    """Let ``Blocking`` have other bounds."""
    known: dict[str, Any] = Blocking.__init__.__kwdefaults__ or {}
    monkeypatch.setattr(Blocking.__init__, "__kwdefaults__", known | options)


async def publish(client: Any, channel: str, count: int = COUNT) -> None:
    await asyncio.gather(*(client.publish(channel, b"%d" % number) for number in range(count)))


# batches().


async def read(batches: AsyncIterator[list[dict[str, Any]]], count: int) -> list[list[dict[str, Any]]]:
    read: list[list[dict[str, Any]]] = []
    async for batch in batches:
        assert batch
        read.append(batch)
        if sum(map(len, read)) >= count:
            break
    return read


async def test_batches_have_every_message_once_and_in_order(cluster: StoredCluster) -> None:
    async with from_url(cluster.url) as client, pubsub_of(client) as pubsub:
        await confirmed(pubsub, "c")
        await publish(client, "c")
        batches = await read(pubsub.batches(), COUNT)
        assert [int(message["data"]) for batch in batches for message in batch] == list(range(COUNT))
        assert batches[0][0] == {"type": "message", "pattern": None, "channel": b"c", "data": b"0"}
        assert max(map(len, batches)) > 10


async def test_batches_begin_with_acknowledgements_and_end_with_the_last_subscription(cluster: StoredCluster) -> None:
    async with from_url(cluster.url, decode_responses=True) as client, pubsub_of(client) as pubsub:
        handled: list[str] = []

        def handle(message: dict[str, Any]) -> None:
            handled.append(message["data"])

        await pubsub.subscribe("c", handled=handle)
        await pubsub.psubscribe("pat*")
        await pubsub.ssubscribe("shard")
        batches = pubsub.batches()
        kinds = [[message["type"] for message in batch] for batch in [await anext(batches) for _ in range(4)]]
        assert sorted(kinds) == [["psubscribe"], ["ssubscribe"], ["subscribe"], ["subscribe"]]
        for channel in ("c", "handled", "pattern", "c"):
            await client.publish(channel, channel)
        await client.spublish("shard", "sharded")
        messages = [message for batch in await read(batches, 4) for message in batch]
        assert sorted((m["type"], str(m["pattern"]), m["data"]) for m in messages) == [
            ("message", "None", "c"),
            ("message", "None", "c"),
            ("pmessage", "pat*", "pattern"),
            ("smessage", "None", "sharded"),
        ]
        await pubsub.unsubscribe()
        await pubsub.punsubscribe()
        await pubsub.sunsubscribe()
        rest = [message["type"] async for batch in pubsub.batches() for message in batch]
        assert sorted(rest) == ["punsubscribe", "sunsubscribe", "unsubscribe", "unsubscribe"]
        assert handled == ["handled"]


async def test_a_disconnected_pubsub_has_its_error_behind_the_messages_and_begins_again(cluster: StoredCluster) -> None:
    async with from_url(cluster.url) as client, pubsub_of(client, max_queue=COUNT, when_full="disconnect") as pubsub:
        await confirmed(pubsub, "c")
        await publish(client, "c", 2 * COUNT)
        got: list[int] = []
        with pytest.raises(redis.exceptions.ConnectionError, match=r"max_queue.*aclose"):
            async for batch in pubsub.batches():
                got += [int(message["data"]) for message in batch]
        assert got == list(range(len(got))) and COUNT <= len(got) < 2 * COUNT
        for refused in (pubsub.get_message(timeout=None), pubsub.subscribe("other")):
            with pytest.raises(redis.exceptions.ConnectionError, match="aclose"):
                await refused
        await pubsub.aclose()
        await confirmed(pubsub, "c")
        await client.publish("c", b"again")
        assert (await next_of(pubsub))["data"] == b"again"


def fail(message: dict[str, Any]) -> None:
    raise ZeroDivisionError(message["data"])


def read_items(pubsub: Any, count: int) -> list[Any]:
    """Read batches, past errors, until so many messages and errors have come; return them by their data and type."""
    got: list[Any] = []
    while len(got) < count:
        try:
            for batch in pubsub.batches():
                got += [message["data"] for message in batch]
                if len(got) >= count:
                    break
        except (ZeroDivisionError, UnicodeError) as error:
            got.append(type(error))
    return got


MIXED = (("a", "1"), ("a", "2"), ("h", "x"), ("a", "3"), ("p", "y"), ("a", "4"), ("a", "5"), ("h", "z"), ("h", "z"))
IN_ORDER = [b"1", b"2", ZeroDivisionError, b"3", ZeroDivisionError, b"4", b"5", ZeroDivisionError, ZeroDivisionError]


@pytest.mark.parametrize("bound", [1000, 1, 2])
def test_a_handler_that_raises_takes_nothing_from_a_batch(cluster: StoredCluster, connect: Connect, bound: int) -> None:
    """As with ``get_message``: what came before is read before, what came behind it is read on."""

    async def fail_later(message: dict[str, Any]) -> None:
        await asyncio.sleep(0)
        fail(message)

    with connect(cluster.hosts) as client, client.pubsub(max_queue=bound) as pubsub:
        handler = fail_later if is_asynchronous(client) and bound != 1 else fail
        confirmed_sync(pubsub, "a", h=handler)
        pubsub.psubscribe(**{"[p]": handler})
        assert next_sync(pubsub)["type"] == "psubscribe"
        together = bound == 1000
        for count, (channel, payload) in enumerate(MIXED, 1):
            client.publish(channel, payload)
            until(lambda count=count: not together or len(queue_of(pubsub)) == count, "it has come")  # type: ignore[misc]
        seen = read_items(pubsub, len(MIXED))
        # Where not all are in the queue, those of the pattern come by another way at another time.
        assert seen == IN_ORDER if together else sorted(map(str, seen)) == sorted(map(str, IN_ORDER))


async def test_a_handler_that_is_cancelled_takes_nothing_from_a_batch(cluster: StoredCluster) -> None:
    hanging, quiet = cluster.channel_at("s1", "h"), cluster.channel_at("s1", "a")  # of one server: in order
    begun = asyncio.Event()

    async def hang(message: dict[str, Any]) -> None:
        begun.set()
        await asyncio.Event().wait()

    async with from_url(cluster.url) as client, pubsub_of(client) as pubsub:
        await confirmed(pubsub, quiet)
        await pubsub.subscribe(**{hanging: hang})
        assert (await next_of(pubsub))["type"] == "subscribe"
        for channel, payload in ((quiet, "1"), (quiet, "2"), (hanging, "x"), (quiet, "3")):
            await client.publish(channel, payload)
        seen: list[bytes] = []

        async def read_on() -> None:
            async for batch in pubsub.batches():
                seen.extend(message["data"] for message in batch)
                if seen[-1] == b"3":
                    break

        reading = asyncio.create_task(read_on())
        await begun.wait()
        reading.cancel()
        await asyncio.wait({reading})
        assert seen == [b"1", b"2"]
        await read_on()
        assert seen == [b"1", b"2", b"3"]


def test_a_payload_that_cannot_be_decoded_takes_nothing_from_a_batch(cluster: StoredCluster, connect: Connect) -> None:
    payloads = (b"1", b"2", b"\xff", b"3", b"\xff", b"\xff", b"4")
    expected = ["1", "2", UnicodeDecodeError, "3", UnicodeDecodeError, UnicodeDecodeError, "4"]
    with connect(cluster.hosts, decode_responses=True) as client, client.pubsub() as pubsub:
        confirmed_sync(pubsub, "a")
        for payload in payloads:
            client.publish("a", payload)
        assert read_items(pubsub, len(payloads)) == expected


def test_what_ends_a_batch_is_not_lost_with_a_reader_who_leaves(cluster: StoredCluster) -> None:
    with dynamoth_client.from_url(cluster.url) as client, client.pubsub() as pubsub:
        confirmed_sync(pubsub, "a")
        client.publish("a", "1")
        until(lambda: len(queue_of(pubsub)) == 1, "it has come")
        pubsub.ping("2")
        until(lambda: len(queue_of(pubsub)) == 2, "it has come")
        assert [message["data"] for message in next(pubsub.batches())] == [b"1"]
        assert next_sync(pubsub)["data"] == b"2"


# when_full.


async def test_dropping_the_oldest_keeps_the_newest_and_says_how_many_are_missing(cluster: StoredCluster) -> None:
    got: list[GapInfo] = []
    async with (
        from_url(cluster.url) as client,
        pubsub_of(client, max_queue=40, when_full="drop_oldest", gaps=True, on_gap=got.append) as pubsub,
        pubsub_of(client) as witness,
    ):
        await confirmed(pubsub, "c")
        await confirmed(witness, "c")
        for _ in range(5):
            await publish(client, "c", 100)
        for _ in range(500):
            assert (await next_of(witness))["type"] == "message"
        await client.publish("c", b"last")
        messages: list[dict[str, Any]] = []
        while not messages or messages[-1]["data"] != b"last":
            messages.append(await next_of(pubsub))
        gaps = [message["data"] for message in messages if message["type"] == "gap"]
        assert gaps == got
        assert messages[0]["type"] == "gap", "in the place of what was dropped"
        assert {(gap.channel, gap.publisher, gap.pattern) for gap in gaps} == {(b"c", None, None)}
        assert sum(gap.count for gap in gaps) + len(messages) - len(gaps) == 501
        assert pubsub.gaps_detected >= 1


async def test_a_reader_that_has_stopped_costs_no_more_with_time(cluster: StoredCluster) -> None:
    """However many channels a pattern matches, and however often messages are dropped."""
    options: Any = {"max_queue": 8, "when_full": "drop_oldest", "gaps": True}
    async with from_url(cluster.url) as client, pubsub_of(client, **options) as pubsub:
        await pubsub.psubscribe("c*")
        assert (await next_of(pubsub))["type"] == "psubscribe"
        for number in range(300):
            await client.publish(f"c{number}", b"%d" % number)
        await client.publish("c", b"last")
        queue = pubsub._queue
        async with asyncio.timeout(30):  # the servers' messages come in any order
            while sum(map(count_of, queue.items)) < 301:  # noqa: ASYNC110  # a reader is woken by the first item
                await asyncio.sleep(0.01)
        assert len(queue.items) <= 8 + 1
        gap = (await next_of(pubsub))["data"]
        assert gap.count + len(queue.items) == 301


async def test_a_slow_reader_stops_its_servers_and_neither_loses_anything_nor_slows_another(
    cluster: StoredCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each PubSub has its own links: what blocks one is not in the way of the other."""
    blocking(monkeypatch, pause_s_max=3600.0)
    size, numbers = 1000, list(range(2000))
    async with from_url(cluster.url) as client, pubsub_of(client, max_queue=100) as slow, pubsub_of(client) as quick:
        await confirmed(slow, "c")
        await confirmed(quick, "c")
        await asyncio.gather(*(client.publish("c", b"%d " % number + bytes(size)) for number in numbers))
        assert [int((await next_of(quick))["data"].split()[0]) for _ in numbers] == numbers
        one_read = 256 * 1024 // size
        assert slow._queue.is_full and 100 <= len(slow._queue.items) <= 100 + one_read
        assert [int((await next_of(slow))["data"].split()[0]) for _ in numbers] == numbers
        assert not slow._queue.is_full


def test_unknown_policies_and_bounds_are_refused(cluster: StoredCluster, connect: Connect) -> None:
    with connect(cluster.hosts) as client:
        with pytest.raises(redis.exceptions.DataError, match="block, drop_oldest, disconnect"):
            client.pubsub(when_full="explode")
        with pytest.raises(redis.exceptions.DataError, match="max_queue"):
            client.pubsub(max_queue=0)


# Many subscriptions.


@pytest.mark.parametrize(("when_full", "bound"), [("block", 1000), ("disconnect", 1000), ("drop_oldest", 8)])
async def test_acknowledgements_do_not_fill_the_queue(cluster: StoredCluster, when_full: str, bound: int) -> None:
    count = 5000
    channels = [f"c{number}" for number in range(count)]
    options: Any = {"when_full": when_full, "max_queue": bound, "gaps": True}
    # So many take seconds of a slow machine, in which nothing else is done on the loop.
    patient = from_url(cluster.url, socket_connect_timeout=30)
    async with patient as client, pubsub_of(client, **options) as pubsub:
        await pubsub.subscribe(*channels)
        while pubsub._queue.notices < count:  # noqa: ASYNC110  # they come by themselves
            await asyncio.sleep(0.01)
        for channel in (channels[0], channels[-1]):
            assert await client.publish(channel, "x") == 1
        seen = [await next_of(pubsub) for _ in range(count + 2)]
        assert [message["data"] for message in seen] == [*range(1, count + 1), b"x", b"x"]
        assert {message["channel"] for message in seen[:count]} == {channel.encode() for channel in channels}
        assert [message["channel"] for message in seen[count:]] == [channels[0].encode(), channels[-1].encode()]
        assert pubsub.gaps_detected == 0


# A reader that has stopped, with when_full="block".


class Clock:
    """Makes calls on request."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def later(self, delay_s: float, call: Callable[[], None]) -> Clock:
        assert delay_s == PAUSE_S_MAX
        self.calls.append(call)
        return self

    def cancel(self) -> None:
        self.calls.clear()

    def ring(self) -> None:
        [call] = self.calls
        self.calls.clear()
        call()


def blocked(bound: int, spill_messages: int) -> tuple[MessageQueue, Blocking, Clock, list[str]]:
    """Return a full queue, and what was done to the links since."""
    queue, clock, done = MessageQueue(bound), Clock(), list[str]()
    blocking = Blocking(
        queue,
        pause=lambda: done.append("pause"),
        resume=lambda: done.append("resume"),
        later=clock.later,
        spill_bytes_max=spill_messages * (MESSAGE_BYTES + 1),
    )
    queue.watch(blocking.on_full, blocking.on_room)
    queue.extend([(b"c", b"0")] * bound)
    assert (blocking.is_paused, done) == (True, ["pause"])
    return queue, blocking, clock, done


def take(queue: MessageQueue, count: int) -> None:
    for _ in range(count):
        queue.items.popleft()
        queue.relieve()


def test_a_blocked_reader_s_servers_are_read_from_again_after_a_while() -> None:
    queue, blocking, clock, done = blocked(bound=4, spill_messages=10)
    clock.ring()
    assert (blocking.is_paused, queue.is_full, done) == (False, True, ["pause", "resume"])
    assert blocking.put([(b"c", b"1")] * 10) == {}
    assert len(queue.items) == 14
    take(queue, 12)
    assert not queue.is_full
    assert done == ["pause", "resume"], "it is not paused, and not resumed twice"


def test_a_reader_that_makes_room_in_time_ends_the_pause() -> None:
    queue, blocking, clock, done = blocked(bound=4, spill_messages=10)
    take(queue, 2)
    assert (blocking.is_paused, clock.calls, done) == (False, [], ["pause", "resume"])


def test_what_does_not_fit_behind_a_full_queue_is_skipped_and_counted_until_there_is_room() -> None:
    queue, blocking, clock, _ = blocked(bound=4, spill_messages=10)
    clock.ring()
    pattern = PatternMessage(b"c*", b"c", b"1")
    assert blocking.put([(b"c", b"1")] * 8 + [pattern, pattern]) == {}
    assert blocking.put([(b"c", b"1")] * 3 + [pattern, ShardedMessage(b"c", b"1")]) == {
        (b"c", None, False): 3,
        (b"c*", b"c*", False): 1,
        (b"c", None, True): 1,
    }
    take(queue, 11)
    assert blocking.put([(b"c", b"1")]) == {(b"c", None, False): 1}, "in order: behind the gap"
    take(queue, 1)
    assert not queue.is_full
    queue.extend([(b"c", b"2")] * 2)
    assert blocking.put([(b"c", b"2")] * 10) == {}


def test_a_slow_reader_that_keeps_up_just_so_loses_nothing() -> None:
    """What it has read makes room behind the full queue, long before the queue is not full any more."""
    queue, blocking, clock, _ = blocked(bound=100, spill_messages=80)
    clock.ring()
    for _ in range(1000):
        assert blocking.put([(b"c", b"1")] * 10) == {}
        take(queue, 10)
    assert queue.is_full


def count_of(item: Item) -> int:
    """Return how many messages an item of a queue stands for."""
    if isinstance(item, Notice):
        assert isinstance(item.data, GapInfo) and item.data.count is not None
        return item.data.count
    return 1


async def test_a_reader_that_has_stopped_gets_what_fits_and_one_gap_in_the_place_of_the_rest(
    cluster: StoredCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocking(monkeypatch, pause_s_max=0.05, spill_bytes_max=20_000)
    async with from_url(cluster.url) as client, pubsub_of(client, max_queue=40, gaps=True) as pubsub:
        await confirmed(pubsub, "c")
        published = 0
        while pubsub.gaps_detected == 0 or published % 1000:
            for _ in range(10):
                await client.publish("c", b"%d" % published)
                published += 1
        items = pubsub._queue.items
        async with asyncio.timeout(30):
            while sum(map(count_of, items)) < published:  # noqa: ASYNC110  # a reader is woken by the first item
                await asyncio.sleep(0.01)
        assert 40 + 90 < len(items) < published
        messages: list[dict[str, Any]] = []
        while not messages or messages[-1]["type"] != "gap":
            messages.append(await next_of(pubsub))
        numbers = [int(message["data"]) for message in messages[:-1]]
        assert numbers == list(range(len(numbers)))
        gap = messages[-1]["data"]
        assert (gap.channel, gap.count + len(numbers)) == (b"c", published)
        assert pubsub.gaps_detected == 1
        await client.publish("c", b"behind")
        assert (await next_of(pubsub))["data"] == b"behind"
