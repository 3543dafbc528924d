"""PubSub on real servers that store a plan: redis-py's behaviour, and what is added to it."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
import redis.asyncio.client
import redis.exceptions

from dynamoth_client.asyncio import GapInfo, PubSub, Redis, from_url
from dynamoth_client.runtime import feed
from tests.client.stored_cluster import StoredCluster, confirmed, next_of, on_both_loops

pytestmark = on_both_loops


def _message(kind: str, channel: Any, data: Any) -> dict[str, Any]:
    return {"type": kind, "pattern": None, "channel": channel, "data": data}


@pytest.mark.parametrize(
    ("subscribe", "publish"), [("subscribe", "publish"), ("psubscribe", "publish"), ("ssubscribe", "spublish")]
)
async def test_what_is_published_after_subscribe_arrives(cluster: StoredCluster, subscribe: str, publish: str) -> None:
    cluster.put({"c3": "s1", "c4": "s2"})
    async with from_url(cluster.url) as other, from_url(cluster.url) as client, client.pubsub() as connected:
        for number in range(10):
            async with client.pubsub() as fresh:
                for pubsub in (fresh, connected):
                    await getattr(pubsub, subscribe)(f"c{number}")
                for publisher in (client, other):
                    await getattr(publisher, publish)(f"c{number}", f"{number}")
                for pubsub in (fresh, connected):
                    seen = [await next_of(pubsub) for _ in range(3)]
                    assert [message["data"] for message in seen[1:]] == [b"%d" % number] * 2


async def test_unsubscribing_from_all_does_not_repeat_what_is_under_way(cluster: StoredCluster) -> None:
    async with from_url(cluster.url) as client, client.pubsub() as pubsub:
        await confirmed(pubsub, "a", "b")
        await pubsub.unsubscribe("a")
        await pubsub.unsubscribe()
        assert await next_of(pubsub) == _message("unsubscribe", b"a", 1)
        assert await next_of(pubsub) == _message("unsubscribe", b"b", 0)
        await pubsub.punsubscribe()
        assert await next_of(pubsub) == _message("punsubscribe", None, 0)


async def test_names_may_come_from_an_iterator(cluster: StoredCluster) -> None:
    async with from_url(cluster.url) as client, client.pubsub() as pubsub:
        await pubsub.subscribe(name for name in ("a", "b"))
        assert [(await next_of(pubsub))["channel"] for _ in range(2)] == [b"a", b"b"]
        await pubsub.unsubscribe(name for name in ("a", "b"))
        assert await next_of(pubsub) == _message("unsubscribe", b"a", 1)
        assert await next_of(pubsub) == _message("unsubscribe", b"b", 0)


async def test_a_server_that_hangs_does_not_hold_the_others_acknowledgements(cluster: StoredCluster) -> None:
    hanging, quick = cluster.channel_at("s1"), cluster.channel_at("s2")
    async with from_url(cluster.url, socket_connect_timeout=0.3) as client, client.pubsub() as pubsub:
        await pubsub.connect()
        cluster.servers["s1"].pause()
        await pubsub.subscribe(hanging, quick)
        assert await next_of(pubsub) == _message("subscribe", quick.encode(), 1)
        cluster.servers["s1"].resume()
        assert await next_of(pubsub) == _message("subscribe", hanging.encode(), 2)


async def test_no_message_comes_before_the_acknowledgement_of_its_channel(
    cluster: StoredCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "HOLD_S_MAX", 3600.0)
    hanging, quick = cluster.channel_at("s1"), cluster.channel_at("s2")
    async with from_url(cluster.url, socket_connect_timeout=0.3) as client, client.pubsub() as pubsub:
        await client.plan(quick)
        cluster.servers["s1"].pause()
        await pubsub.subscribe(hanging, quick)
        reading = asyncio.create_task(next_of(pubsub))
        while not reading.done():
            await client.publish(quick, "x")
        assert await reading == _message("subscribe", quick.encode(), 1)
        assert await next_of(pubsub) == _message("message", quick.encode(), b"x")
        cluster.servers["s1"].resume()
        while (message := await next_of(pubsub))["type"] == "message":
            assert message["channel"] == quick.encode()
        assert message == _message("subscribe", hanging.encode(), 2)


async def test_is_subscribed_before_subscribe_first_yields(cluster: StoredCluster) -> None:
    async with from_url(cluster.url) as client, client.pubsub() as pubsub:
        subscribing = pubsub.subscribe("c")
        before = pubsub.subscribed
        yielded: Any = subscribing.send(None)  # runs until it first yields
        assert (before, pubsub.subscribed) == (False, True)
        assert yielded is not None
        subscribing.close()


async def test_a_listener_that_starts_while_subscribe_is_under_way(cluster: StoredCluster) -> None:
    async def listen(pubsub: PubSub) -> list[Any]:
        seen: list[Any] = []
        async for message in pubsub.listen():
            seen.append(message["data"])
            if message["type"] == "message":
                await pubsub.unsubscribe()
        return seen

    async with from_url(cluster.url) as client, client.pubsub() as pubsub:
        subscribing = asyncio.create_task(pubsub.subscribe("c"))
        await asyncio.sleep(0)
        listening = asyncio.create_task(listen(pubsub))
        await subscribing
        await cluster.until_subscribed(*_where(cluster, "c"))
        while not await client.publish("c", "hello"):  # noqa: ASYNC110  # the listener takes the acknowledgement
            await asyncio.sleep(0)
        assert (await listening)[0] == 1


def _where(cluster: StoredCluster, channel: str) -> tuple[str, str]:
    return cluster.plan.ring.home(channel.encode()), channel


async def test_a_listener_learns_that_subscribe_failed(cluster: StoredCluster) -> None:
    for server in cluster.servers.values():
        server.kill()
    client = from_url(cluster.url)
    pubsub = client.pubsub()
    subscribing = asyncio.create_task(pubsub.subscribe("c"))
    await asyncio.sleep(0)
    reading = asyncio.create_task(pubsub.get_message(timeout=None))
    outcomes = await asyncio.gather(subscribing, reading, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [redis.exceptions.ConnectionError] * 2
    assert not pubsub.subscribed
    await client.aclose()


async def test_get_message_before_the_first_subscribe(cluster: StoredCluster) -> None:
    async with from_url(cluster.url) as client, client.pubsub() as pubsub:
        with pytest.raises(RuntimeError, match="did you forget to call subscribe"):
            await pubsub.get_message()
        before: Any = pubsub.connection
        await pubsub.connect()
        assert before is None
        assert pubsub.connection is not None
        assert await pubsub.get_message() is None
        assert [message async for message in pubsub.listen()] == []


async def test_timeouts_of_get_message(cluster: StoredCluster) -> None:
    async with from_url(cluster.url) as client, client.pubsub(ignore_subscribe_messages=True) as pubsub:
        await pubsub.subscribe("c")
        loop = asyncio.get_running_loop()
        assert await pubsub.get_message(timeout=None) is None  # the ignored acknowledgement
        assert await pubsub.get_message() is None
        began_at = loop.time()
        assert await pubsub.get_message(timeout=0.05) is None
        assert 0.049 <= loop.time() - began_at < 2
        reading = asyncio.create_task(pubsub.get_message(timeout=20))
        await client.publish("c", "x")
        assert await reading == _message("message", b"c", b"x")


async def test_a_reader_that_never_waits_lets_others_run(cluster: StoredCluster) -> None:
    async with from_url(cluster.url) as client, client.pubsub() as pubsub:
        await pubsub.subscribe("c")
        while (message := await pubsub.get_message()) is None:
            pass
        assert message["type"] == "subscribe"
        publishing = asyncio.create_task(client.publish("c", "x"))
        while (message := await pubsub.get_message()) is None:
            pass
        assert message["data"] == b"x" and await publishing == 1


async def test_a_full_queue_does_not_starve_the_loop(cluster: StoredCluster) -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with from_url(cluster.url) as client, client.pubsub() as pubsub:
        await confirmed(pubsub, "c")
        await asyncio.gather(*(client.publish("c", number) for number in range(2000)))
        await client.publish("c", "end")
        counting = asyncio.create_task(count())
        async for message in pubsub.listen():
            if message["data"] == b"end":
                break
        counting.cancel()
        await asyncio.wait({counting})
        assert turns >= 5


async def test_handlers_sync_and_async(cluster: StoredCluster) -> None:
    seen: list[tuple[str, Any]] = []

    def quick(message: dict[str, Any]) -> None:
        seen.append(("sync", message["data"]))

    async def slow(message: dict[str, Any]) -> None:
        await asyncio.sleep(0)
        seen.append(("async", message["data"]))

    async with from_url(cluster.url) as client, client.pubsub() as pubsub:
        await confirmed(pubsub, "none", quick=quick, slow=slow)
        for channel in ("quick", "slow", "none"):
            await client.publish(channel, channel)
        messages: list[dict[str, Any]] = []
        async for message in pubsub.listen():
            messages.append(message)
            break
        assert messages == [_message("message", b"none", b"none")]
        assert seen == [("sync", b"quick"), ("async", b"slow")]
        await pubsub.subscribe("quick")  # without its handler
        assert (await next_of(pubsub))["type"] == "subscribe"
        await client.publish("quick", "x")
        assert await next_of(pubsub) == _message("message", b"quick", b"x")


async def test_subscription_objects_and_lists(cluster: StoredCluster) -> None:
    typing = pytest.importorskip("redis.typing")
    if not hasattr(typing, "Subscription"):
        pytest.skip("this redis-py has no Subscription")
    seen: list[Any] = []
    async with from_url(cluster.url) as client, client.pubsub() as pubsub:
        await pubsub.subscribe(["a", "b"], typing.Subscription(b"\xff", seen.append))
        assert [(await next_of(pubsub))["channel"] for _ in range(3)] == [b"a", b"b", b"\xff"]
        await client.publish(b"\xff", "x")
        assert await pubsub.get_message(timeout=None) is None
        assert len(seen) == 1
        await pubsub.unsubscribe(["a", "b"], b"\xff")
        assert [(await next_of(pubsub))["data"] for _ in range(3)] == [2, 1, 0]


async def test_run_calls_handlers_until_it_is_cancelled(cluster: StoredCluster) -> None:
    got = asyncio.Event()
    async with from_url(cluster.url) as client, client.pubsub() as pubsub:
        await pubsub.subscribe(c=lambda _: got.set())
        running = asyncio.create_task(cast("Any", pubsub).run(poll_timeout=0.05))
        while not await client.publish("c", "x"):  # noqa: ASYNC110  # `run` takes the acknowledgement
            await asyncio.sleep(0)
        await got.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    pubsub = client.pubsub()
    await pubsub.subscribe("without a handler")
    with pytest.raises(redis.exceptions.PubSubError, match="no handler"):
        await cast("Any", pubsub).run()
    await client.aclose()


async def test_ping_is_answered_with_a_pong_message(cluster: StoredCluster) -> None:
    async with from_url(cluster.url) as client, client.pubsub() as pubsub:
        await pubsub.connect()
        assert await pubsub.ping()
        assert await next_of(pubsub) == _message("pong", None, b"")
        await pubsub.subscribe("c")
        await pubsub.ping("hello")  # before there is a connection
        assert [await next_of(pubsub) for _ in range(2)] == [
            _message("subscribe", b"c", 1),
            _message("pong", None, b"hello"),
        ]
        for server in cluster.servers.values():
            server.kill()
        with pytest.raises(redis.exceptions.ConnectionError):
            while await pubsub.ping():  # noqa: ASYNC110  # until the loss is noticed
                await asyncio.sleep(0.005)


async def test_messages_come_before_the_unsubscription_and_not_after(cluster: StoredCluster) -> None:
    async with from_url(cluster.url) as client, client.pubsub() as pubsub:
        await confirmed(pubsub, "a", "b")
        await client.publish("a", 1)
        await pubsub.unsubscribe("a")
        assert await next_of(pubsub) == _message("message", b"a", b"1")
        assert await next_of(pubsub) == _message("unsubscribe", b"a", 1)
        assert await client.publish("a", 2) == 0
        await client.publish("b", 3)
        assert await next_of(pubsub) == _message("message", b"b", b"3")
        assert set(pubsub.channels) == {b"b"}


async def test_subscribing_again_before_the_unsubscription_is_read(cluster: StoredCluster) -> None:
    async with from_url(cluster.url) as client, client.pubsub() as pubsub:
        await confirmed(pubsub, "a")
        await pubsub.unsubscribe("a")
        assert pubsub.pending_unsubscribe_channels == {b"a"}
        await pubsub.subscribe("a")
        assert pubsub.pending_unsubscribe_channels == set()
        assert await next_of(pubsub) == _message("unsubscribe", b"a", 0)
        assert pubsub.subscribed
        assert await next_of(pubsub) == _message("subscribe", b"a", 1)
        assert await client.publish("a", "x") == 1


async def test_close_ends_readers_and_the_pubsub_can_be_used_again(cluster: StoredCluster) -> None:
    async def listen(pubsub: PubSub) -> list[Any]:
        return [message async for message in pubsub.listen()]

    async with from_url(cluster.url) as client:
        pubsub = client.pubsub()
        await confirmed(pubsub, "a")
        listening = asyncio.create_task(listen(pubsub))
        reading = asyncio.create_task(pubsub.get_message(timeout=30))
        await asyncio.sleep(0)
        await pubsub.aclose()
        assert await listening == []
        assert await reading is None
        assert not pubsub.subscribed
        assert pubsub.connection is None
        await cluster.until_subscribed(*_where(cluster, "a"), count=0)
        await confirmed(pubsub, "b")
        assert await client.publish("b", "x") == 1
        with pytest.deprecated_call():
            await cast("Any", pubsub).reset()
        with pytest.deprecated_call():
            await cast("Any", pubsub).close()


@pytest.mark.parametrize("is_read", [True, False])
async def test_a_pubsub_subscribes_again_after_a_close_of_the_client(cluster: StoredCluster, is_read: bool) -> None:
    """At once if somebody reads it, else when it is used: as redis-py's does."""
    client = from_url(cluster.url)
    gaps: list[GapInfo] = []
    pubsub = client.pubsub(on_gap=gaps.append)
    await confirmed(pubsub, "a", "b")
    await client.publish("b", "before")
    assert (await next_of(pubsub))["data"] == b"before"
    reading = asyncio.create_task(pubsub.get_message(timeout=None)) if is_read else None
    await asyncio.sleep(0)
    await client.aclose()
    first = await reading if reading is not None else await pubsub.get_message(timeout=None)
    again = [message for message in (first, await next_of(pubsub), await next_of(pubsub)) if message is not None]
    assert [(message["type"], message["data"]) for message in again[-2:]] == [("subscribe", 1), ("subscribe", 2)]
    assert {gap.channel for gap in gaps} == {b"a", b"b"}
    assert await client.publish("a", "x") == 1
    assert (await next_of(pubsub))["data"] == b"x"
    await client.aclose()
    await confirmed(pubsub, "c")  # what is asked for next begins with what there was
    assert await client.publish("a", "y") == 1
    assert pubsub.channels.keys() == {b"a", b"b", b"c"}
    await pubsub.aclose()
    await cluster.until_subscribed(*_where(cluster, "a"), count=0)
    await client.aclose()


@pytest.mark.parametrize("read", ["get_message", "listen", "batches", "parse_response"])
async def test_a_reader_goes_on_however_often_the_client_is_closed(cluster: StoredCluster, read: str) -> None:
    """Also while it is about to subscribe again after the close before, at any point of that."""
    client = from_url(cluster.url)
    gaps: list[GapInfo] = []
    pubsub = client.pubsub(on_gap=gaps.append)
    await confirmed(pubsub, "a")
    heard: asyncio.Queue[object] = asyncio.Queue()

    async def go_on() -> None:
        if read == "listen":
            async for message in pubsub.listen():
                heard.put_nowait(message["data"])
        elif read == "batches":
            async for batch in pubsub.batches():
                for message in batch:
                    heard.put_nowait(message["data"])
        else:
            while pubsub.subscribed:
                if read == "get_message":
                    got = await pubsub.get_message(timeout=0.1)
                    heard.put_nowait(got and got["data"])
                else:
                    response = await pubsub.parse_response()
                    heard.put_nowait(response and response[-1])

    reading = asyncio.create_task(go_on())
    for turns in range(20):
        gaps.clear()
        for _ in range(3):
            await client.aclose()
            for _ in range(turns):
                await asyncio.sleep(0)
        while await client.publish("a", str(turns)) == 0:
            assert not reading.done(), reading
            await asyncio.sleep(0.001)
        async with asyncio.timeout(5):
            while await heard.get() != b"%d" % turns:
                pass
        assert gaps or read == "parse_response"
        assert {gap.channel for gap in gaps} <= {b"a"}
    await pubsub.aclose()
    await reading
    await client.aclose()


async def test_a_reader_goes_on_when_the_client_is_closed_while_another_task_subscribes(cluster: StoredCluster) -> None:
    """The reader waits for messages then, and the other task is about to subscribe again."""
    client = from_url(cluster.url)
    pubsub = client.pubsub()
    await confirmed(pubsub, "a")
    reading = asyncio.create_task(anext(message async for message in pubsub.listen() if message["type"] == "message"))
    await asyncio.sleep(0)
    subscribing = pubsub.subscribe("b")
    _, error, _ = await asyncio.gather(client.aclose(), subscribing, _close_later(client), return_exceptions=True)
    assert isinstance(error, redis.exceptions.ConnectionError)
    await cluster.until_subscribed(*_where(cluster, "b"))
    assert await client.publish("b", "x") == 1
    assert (await reading)["data"] == b"x"
    await pubsub.aclose()
    await client.aclose()


async def _close_later(client: Redis) -> None:
    for _ in range(3):
        await asyncio.sleep(0)
    await client.aclose()


async def test_a_reader_learns_of_servers_that_are_away_when_another_task_subscribes_again(
    cluster: StoredCluster,
) -> None:
    client = from_url(cluster.url)
    pubsub = client.pubsub()
    await confirmed(pubsub, "a")
    reading = asyncio.create_task(next_of(pubsub))
    await asyncio.sleep(0)
    for server in cluster.servers.values():
        server.kill()
    _, *told = await asyncio.gather(client.aclose(), pubsub.subscribe("b"), reading, return_exceptions=True)
    assert [type(error) for error in told] == [redis.exceptions.ConnectionError] * 2


async def test_a_pubsub_that_is_closed_behind_its_client_lets_its_reader_go(cluster: StoredCluster) -> None:
    """As one that is closed before it: also while the reader is about to subscribe again."""
    for turns in range(20):
        client = from_url(cluster.url)
        pubsub = client.pubsub()
        await confirmed(pubsub, "a")
        reading = asyncio.create_task(_all(pubsub))
        await asyncio.sleep(0)
        await client.aclose()
        for _ in range(turns):
            await asyncio.sleep(0)
        await pubsub.aclose()
        assert {message["type"] for message in await reading} <= {"subscribe"}
        assert not pubsub.subscribed
        await client.aclose()


async def _all(pubsub: PubSub) -> list[dict[str, Any]]:
    return [message async for message in pubsub.listen()]


async def test_a_pubsub_of_a_closed_client_tries_again_while_servers_are_away(cluster: StoredCluster) -> None:
    client = from_url(cluster.url)
    pubsub = client.pubsub()
    await confirmed(pubsub, "a")
    await client.aclose()
    for server in cluster.servers.values():
        server.kill()
    for _ in range(2):
        with pytest.raises(redis.exceptions.ConnectionError, match="no server of the cluster gave a plan"):
            await pubsub.get_message(timeout=None)
    assert pubsub.subscribed
    for server in cluster.servers.values():
        await asyncio.to_thread(server.restart)
    await asyncio.to_thread(cluster.store)
    while (message := await pubsub.get_message(timeout=None)) is None or message["type"] != "subscribe":
        pass
    assert await client.publish("a", "x") == 1
    await pubsub.aclose()
    await client.aclose()


async def test_a_handler_that_raises_later_and_reading_goes_on(cluster: StoredCluster) -> None:
    failing, quiet = cluster.channel_at("s1", "h"), cluster.channel_at("s1", "a")  # of one server: in order

    async def fail(message: dict[str, Any]) -> None:
        await asyncio.sleep(0)
        raise ZeroDivisionError(message["data"])

    async with from_url(cluster.url) as client, client.pubsub() as pubsub:
        await confirmed(pubsub, quiet, **{failing: fail})
        for number in range(2):
            await client.publish(failing, number)
            await client.publish(quiet, number)
        with pytest.raises(ZeroDivisionError, match="0"):
            await next_of(pubsub)
        assert (await next_of(pubsub))["data"] == b"0"
        with pytest.raises(ZeroDivisionError, match="1"):
            await anext(pubsub.listen())
        assert (await anext(pubsub.listen()))["data"] == b"1"


def test_it_is_redis_py_s_pubsub(cluster: StoredCluster) -> None:
    assert isinstance(from_url(cluster.url).pubsub(), redis.asyncio.client.PubSub)


async def test_a_cancelled_reader_loses_nothing(cluster: StoredCluster) -> None:
    async with from_url(cluster.url) as client, client.pubsub() as pubsub:
        await confirmed(pubsub, "c")
        seen: list[bytes] = []
        publishing = asyncio.gather(*(client.publish("c", number) for number in range(200)))
        while len(seen) < 200:
            reading = asyncio.create_task(pubsub.get_message(timeout=None))
            await asyncio.wait({reading}, timeout=0.0005)
            if not reading.cancel():
                message = await reading
                assert message is not None
                seen.append(message["data"])
            else:
                await asyncio.wait({reading})
                if not reading.cancelled():
                    message = await reading
                    assert message is not None
                    seen.append(message["data"])
        await publishing
        assert seen == [b"%d" % number for number in range(200)]


def test_push_handlers_are_refused(cluster: StoredCluster) -> None:
    with pytest.raises(redis.exceptions.DataError, match="push_handler_func"):
        from_url(cluster.url).pubsub(push_handler_func=print)
