from __future__ import annotations

import asyncio
import base64
import gc
import json
import logging
import os
import ssl
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import uvloop

from dynamoth.edge.frames import (
    Ack,
    Bye,
    Connect,
    Connected,
    Error,
    Leave,
    Move,
    MovedIn,
    Ping,
    Pong,
    Published,
    PublishRequest,
    Refresh,
    Subscribe,
    Subscribed,
    Unsubscribe,
)
from dynamoth.edge.frames import Gap as GapFrame
from dynamoth.edge.interests import channel_interest
from dynamoth.errors import ConfigError
from dynamoth_user import (
    Client,
    ClientFailed,
    Failed,
    FileStorage,
    Gap,
    Interrupted,
    Item,
    PublishFailed,
    RefusedError,
    Served,
    StorageError,
    Subscription,
    connection,
    subscription,
    window,
)
from dynamoth_user.client import State
from dynamoth_user.connection import OUTGOING_MAX
from dynamoth_user.encoding import Encoding
from dynamoth_user.engine import _expiry_of, may_connect
from dynamoth_user.machine.machine import UserMachine
from dynamoth_user.storage import load_state
from dynamoth_user.window import PUBLICATIONS_MAX
from tests.tls import make_certificates
from tests.user.scripted_broker import JSON, MSGPACK, Peer, ScriptedBroker, at, data, scripted_broker

# pyright: reportPrivateUsage=false

_T = TypeVar("_T")


@asynccontextmanager
async def doing(work: Coroutine[Any, Any, _T]) -> AsyncGenerator[asyncio.Task[_T]]:
    """Run something beside the body, and wait for its end."""
    task = asyncio.create_task(work)
    try:
        yield task
        await asyncio.wait((task,))
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def confirm(peer: Peer, offset: int | None = 0) -> Subscribe:
    """Confirm the next subscription."""
    asked = await peer.read(Subscribe)
    begin = None if offset is None else asked.request.since or at(offset)
    await peer.send(Subscribed(asked.request.ref, asked.request.interest.id, begin))
    return asked


async def subscribed(
    client: Client,
    broker: ScriptedBroker,
    channel: str = "news",
    *,
    offset: int | None = 0,
    stored: bool = False,
    **connected: Any,
) -> tuple[Peer, Subscription]:
    """Return the first connection, and a subscription to a channel."""
    async with doing(client.subscribe(channel, stored=stored)) as subscribing:
        peer = await broker.peer()
        await peer.welcome(offset=offset, **connected)
    return peer, await subscribing


async def take(items: Subscription, count: int) -> list[str | Gap]:
    """Return the texts of the next items, and the gaps."""
    taken = [await anext(items) for _ in range(count)]
    return [item.text if isinstance(item, Item) else item for item in taken]


def client_of(*brokers: ScriptedBroker, **options: Any) -> Client:
    return Client([broker.url for broker in brokers], proxy=None, **options)


# Delivery.


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
async def test_publications_come_in_order_with_their_positions(encoding: Encoding) -> None:
    async with scripted_broker() as broker, client_of(broker, encoding=encoding, session="me") as client:
        peer, news = await subscribed(client, broker, offset=6)
        assert peer.websocket.subprotocol == {"json": JSON, "msgpack": MSGPACK}[encoding]
        assert (client.session, client.broker, news.position) == ("me", "b1", at(6))
        await peer.send(data("news", "é", 7), data("news", b"\xff\x00", 8), data("news", "é", 7), Ping())
        first, second = await anext(news), await anext(news)
        assert isinstance(first, Item)
        assert (first.text, first.position, first.interest) == ("é", at(7), channel_interest("news"))
        assert isinstance(second, Item)
        assert (second.data, second.position) == (b"\xff\x00", at(8))
        assert await peer.read(Pong) == Pong()


async def test_an_item_is_acknowledged_when_the_next_one_is_asked_for() -> None:
    async with scripted_broker() as broker, client_of(broker, session="me") as client:
        peer, news = await subscribed(client, broker, stored=True)
        await peer.send(data("news", "1", 1), data("news", "2", 2), data("news", "3", 3), Ping())
        assert await take(news, 2) == ["1", "2"]
        assert {type(frame) for frame in (await peer.frames.get(), await peer.frames.get())} == {Ack, Pong}
        assert await take(news, 1) == ["3"]
        assert await peer.read(Ack) == Ack({news.interest.id: at(2)})
    assert (await peer.closed)[0] == 1000
    assert await peer.read(Ack) == Ack({news.interest.id: at(3)})  # the client was left without an error


async def test_a_stored_subscription_needs_a_session_that_lasts() -> None:
    async with scripted_broker() as broker, client_of(broker) as client:
        with pytest.raises(ValueError, match="session"):
            await client.subscribe("news", stored=True)
    async with scripted_broker() as broker, client_of(broker, session="me") as client:
        with pytest.raises(ValueError, match="position"):
            await client.subscribe("news", since="new", stored=True)


async def test_a_stored_subscription_does_not_begin_where_the_storage_says(tmp_path: Path) -> None:
    file = tmp_path / "positions.json"
    async with scripted_broker() as broker, client_of(broker, storage=FileStorage(file)) as client:
        await subscribed(client, broker, offset=6)
    async with scripted_broker() as broker, client_of(broker, storage=FileStorage(file)) as client:
        async with doing(client.subscribe("news", stored=True)):
            peer = await broker.peer()
            connect = await peer.welcome(offset=9)
        assert (connect.subs[0].since, connect.subs[0].is_stored) == (None, True)


async def test_an_item_whose_task_has_failed_is_not_acknowledged() -> None:
    async with scripted_broker() as broker:
        peer: Peer | None = None
        with pytest.raises(ZeroDivisionError):
            async with client_of(broker, session="me") as client:
                peer, news = await subscribed(client, broker, stored=True)
                await peer.send(data("news", "1", 1))
                async for _ in news:
                    raise ZeroDivisionError
        assert peer is not None
        await peer.closed
        assert peer.frames.empty()


async def test_a_gap_comes_in_its_place() -> None:
    async with scripted_broker() as broker, client_of(broker) as client:
        peer, news = await subscribed(client, broker)
        await peer.send(data("news", "1", 1), GapFrame(news.interest.id, "trimmed", 2, 4, at(4)), data("news", "5", 5))
        gap = Gap(news.interest, "trimmed", 2, 4, None, at(4))
        assert await take(news, 3) == ["1", gap, "5"]


async def test_a_query_is_subscribed_to_with_its_parameters() -> None:
    async with scripted_broker() as broker, client_of(broker) as client:
        async with doing(client.subscribe_query("nearby", {"lat": 1.0, "who": None})) as subscribing:
            connect = await (await broker.peer()).welcome()
        assert [each.interest.values for each in connect.subs] == [{"lat": 1, "who": None}]
        assert (await subscribing).interest.kind == "query"


async def test_a_second_subscription_to_the_same_channel_is_a_mistake() -> None:
    async with scripted_broker() as broker, client_of(broker) as client:
        await subscribed(client, broker)
        with pytest.raises(ValueError, match="already"):
            await client.subscribe("news")


async def test_unsubscribing_ends_the_iteration_and_the_same_channel_can_be_subscribed_to_again() -> None:
    async with scripted_broker() as broker, client_of(broker) as client:
        peer, news = await subscribed(client, broker)
        async with news:
            await peer.send(data("news", "1", 1), data("news", "2", 2))
            assert await take(news, 1) == ["1"]
        assert [item async for item in news] == []
        while not isinstance(await peer.frames.get(), Unsubscribe):
            pass
        async with doing(client.subscribe("news")) as subscribing:
            assert (await confirm(peer, 5)).request.since is None
        again = await subscribing
        await peer.send(data("news", "6", 6))
        assert await take(again, 1) == ["6"]


async def test_an_ended_subscription_does_not_move_the_position_of_its_successor(tmp_path: Path) -> None:
    storage = FileStorage(tmp_path / "positions.json")
    async with scripted_broker() as broker, client_of(broker, storage=storage) as client:
        peer, old = await subscribed(client, broker)
        await peer.send(data("news", "1", 1))
        assert await take(old, 1) == ["1"]
        await old.unsubscribe()
        assert isinstance(await peer.frames.get(), Unsubscribe)
        async with doing(client.subscribe("news")) as subscribing:
            await confirm(peer, 7)
        await subscribing
        assert [item async for item in old] == []
        client.note_handled(old, at(2))
    state = await load_state(storage)
    assert state is not None and state.positions == {old.interest.id: at(7)}


async def test_a_cancelled_subscribe_leaves_no_subscription() -> None:
    async with scripted_broker() as broker, client_of(broker) as client:
        async with doing(client.subscribe("news")) as subscribing:
            peer = await broker.peer()
            wanted = (await peer.read(Connect)).subs
            assert [each.interest.name for each in wanted] == ["news"]
            subscribing.cancel()
        assert subscribing.cancelled()
        assert await peer.read(Unsubscribe) == Unsubscribe(channel_interest("news").id)
        async with doing(client.subscribe("news")) as subscribing:
            await peer.send(Connected("me", "b1"), Subscribed(wanted[0].ref, wanted[0].interest.id, at(1)))
            await confirm(peer, 4)
        assert (await subscribing).position == at(4)


# Handlers.


async def test_a_handler_that_raises_is_reported_and_delivery_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[str] = []
    errors: list[Exception] = []
    done = asyncio.Event()

    async def handle(item: Item | Gap) -> None:
        assert isinstance(item, Item)
        await asyncio.sleep(0)
        if item.text == "2":
            raise ZeroDivisionError
        seen.append(item.text)
        if item.text == "3":
            done.set()

    async with scripted_broker() as broker, client_of(broker, session="me", on_error=errors.append) as client:
        async with doing(client.subscribe("news", handle, stored=True)):
            peer = await broker.peer()
            await peer.welcome()
        await peer.send(*(data("news", str(number), number) for number in (1, 2, 3)))
        await done.wait()
        interest_id = channel_interest("news").id
        while await peer.read(Ack) != Ack({interest_id: at(3)}):
            pass
    assert seen == ["1", "3"]
    assert [type(error) for error in errors] == [ZeroDivisionError]
    assert "the handler of news has failed" in caplog.text


async def test_an_item_whose_handler_raises_is_not_handled_by_itself() -> None:
    failed = asyncio.Event()

    def handle(_: Item | Gap) -> None:
        raise ZeroDivisionError

    def note(_: Exception) -> None:
        failed.set()

    async with scripted_broker() as broker:
        async with client_of(broker, session="me", on_error=note) as client:
            async with doing(client.subscribe("news", handle, stored=True)):
                peer = await broker.peer()
                await peer.welcome()
            await peer.send(data("news", "1", 1))
            await failed.wait()
        await peer.closed
        assert peer.frames.empty()


async def test_a_handler_may_be_a_plain_function_and_may_close_the_client() -> None:
    seen: list[Item | Gap] = []
    closed = asyncio.Event()

    async def close(item: Item | Gap) -> None:
        seen.append(item)
        await client.close()
        closed.set()

    async with scripted_broker() as broker, client_of(broker) as client:
        async with doing(client.subscribe("plain", seen.append)):
            peer = await broker.peer()
            await peer.welcome()
        async with doing(client.subscribe("closing", close)):
            await confirm(peer)
        await peer.send(data("plain", "1", 1), data("closing", "1", 1), data("closing", "2", 2))
        await closed.wait()
        assert (await peer.closed)[0] == 1000
    assert [item.interest.name for item in seen] == ["plain", "closing"]


async def test_closing_cancels_a_handler_and_does_not_acknowledge_its_item() -> None:
    at_work = asyncio.Event()

    async def handle(_: Item | Gap) -> None:
        at_work.set()
        await asyncio.get_running_loop().create_future()

    async with scripted_broker() as broker:
        async with client_of(broker, session="me") as client:
            async with doing(client.subscribe("news", handle, stored=True)):
                peer = await broker.peer()
                await peer.welcome()
            await peer.send(data("news", "1", 1))
            await at_work.wait()
        await peer.closed
        assert peer.frames.empty()


# Back-pressure.


async def test_a_slow_application_stops_the_reading_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscription, "QUEUE_ITEMS_MAX", 8)
    async with scripted_broker() as broker, client_of(broker) as client:
        peer, news = await subscribed(client, broker)

        async def send_all() -> None:
            for number in range(1, 101):
                await peer.send(data("news", str(number), number))

        async with doing(send_all()):
            assert await peer.read(Pong) == Pong()  # without a ping: the client does not read any more
            assert len(news._items) == 8
            assert await take(news, 100) == [str(number) for number in range(1, 101)]
        await peer.send(data("news", "101", 101))
        assert await take(news, 1) == ["101"]


async def test_the_bytes_of_a_queue_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscription, "QUEUE_BYTES_MAX", 10_000)
    async with scripted_broker() as broker, client_of(broker) as client:
        peer, news = await subscribed(client, broker)
        await peer.send(*(data("news", "x" * 5000, number) for number in (1, 2, 3)))
        assert await peer.read(Pong) == Pong()
        assert len(news._items) == 2
        assert len(await take(news, 3)) == 3


async def test_a_client_that_does_not_read_can_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscription, "QUEUE_ITEMS_MAX", 2)
    async with scripted_broker() as broker:
        async with client_of(broker) as client:
            peer, _ = await subscribed(client, broker)
            await peer.send(*(data("news", str(number), number) for number in range(1, 10)))
            await peer.read(Pong)
        assert (await peer.closed)[0] == 1000


# Connections.


async def test_a_lost_connection_is_replaced_at_another_broker_and_goes_on_from_what_was_received() -> None:
    states: list[State] = []
    async with (
        scripted_broker() as first,
        scripted_broker() as second,
        client_of(first, on_state=states.append) as client,
    ):
        peer, news = await subscribed(client, first, alternates=(second.url,))
        await peer.send(data("news", "1", 1), data("news", "2", 2))
        assert await take(news, 1) == ["1"]
        peer.abort()
        peer = await second.peer()
        connect = await peer.welcome("b2")
        assert [each.since for each in connect.subs] == [at(2)]
        assert connect.generation > 0
        await peer.send(data("news", "3", 3))
        assert await take(news, 2) == ["2", "3"]
        assert (client.broker, client.moved) == ("b2", 0)
    assert [type(state) for state in states] == [Served, Interrupted, Served]


async def test_a_live_channel_has_a_gap_after_a_lost_connection() -> None:
    async with scripted_broker() as broker, client_of(broker) as client:
        peer, news = await subscribed(client, broker, offset=None)
        assert news.position is None
        await peer.send(data("news", "1", place=(7, 1)))
        assert await take(news, 1) == ["1"]
        await peer.close(1012, "restart")
        peer = await broker.peer()
        await peer.welcome(offset=None)
        await peer.send(data("news", "5", place=(7, 5)))
        gap, item = await take(news, 2)
        assert isinstance(gap, Gap)
        assert (gap.position, item) == (None, "5")


@pytest.mark.parametrize(
    "message", ["{", '{"type": "data"}', '{"type": "ping", "x": NaN}', "[1]", '{"type": "new"}', b"\x80", "[" * 9999]
)
async def test_a_malformed_frame_ends_its_connection_and_the_client_comes_again(message: str | bytes) -> None:
    async with scripted_broker() as broker, client_of(broker) as client:
        peer, news = await subscribed(client, broker)
        await peer.websocket.send(message)
        assert (await peer.closed)[0] == 4005
        peer = await broker.peer()
        await peer.welcome()
        await peer.send(data("news", "1", 1))
        assert await take(news, 1) == ["1"]


async def test_a_broker_of_another_protocol_is_not_used() -> None:
    states: asyncio.Queue[State] = asyncio.Queue()
    async with scripted_broker(subprotocols=None) as broker, client_of(broker, on_state=states.put_nowait):
        state = await states.get()
        assert isinstance(state, Interrupted)
        assert JSON in state.reason
        assert (await (await broker.peer()).closed)[0] == 1002


async def test_a_broker_that_is_not_there_is_passed_over() -> None:
    async with scripted_broker() as gone:
        pass
    async with scripted_broker() as broker, client_of(gone, broker) as client:
        _, news = await subscribed(client, broker)
        assert news.interest.name == "news"


@pytest.mark.parametrize("code", [1008, 1009, 4001, 4004, 4005])
async def test_a_final_close_code_ends_the_client(code: int) -> None:
    states: list[State] = []
    errors: list[Exception] = []
    async with (
        scripted_broker() as broker,
        client_of(broker, on_state=states.append, on_error=errors.append) as client,
    ):
        peer, news = await subscribed(client, broker)
        async with doing(client.publish("news", b"lost")) as publishing:
            await peer.read(PublishRequest)
            await peer.send(data("news", "1", 1))
            await peer.close(code, "no more")
        with pytest.raises(PublishFailed, match="unknown_outcome"):
            await publishing
        assert await take(news, 1) == ["1"]
        with pytest.raises(ClientFailed) as failed:
            await anext(news)
        assert (failed.value.close_code, failed.value.reason, failed.value.retryable) == (code, "no more", False)
        for work in (client.subscribe("more"), client.publish("news", b""), client.wait_moved()):
            with pytest.raises(ClientFailed):
                await work
    assert states[-1] == Failed(code, "no more")
    assert [type(error) for error in errors] == [ClientFailed]


# Migration.


async def test_a_migration_overlaps_and_holds_live_messages_until_the_old_broker_has_sent_all() -> None:
    async with scripted_broker() as first, scripted_broker() as second, client_of(first) as client:
        old, log = await subscribed(client, first, "log")
        async with doing(client.subscribe("live")) as subscribing:
            await confirm(old, None)
        live = await subscribing
        await old.send(data("log", "1", 1), data("live", "a1", place=(1, 1)))
        assert (await take(log, 1), await take(live, 1)) == (["1"], ["a1"])
        async with doing(client.wait_moved()):
            await old.send(Move((second.url,), 0, 60_000, "a ticket"))
            new = await second.peer()
            connect = await new.read(Connect)
            assert connect.ticket == "a ticket"
            assert {each.interest.name: each.since for each in connect.subs} == {"log": at(1), "live": None}
            await new.send(Connected(connect.session, "b2"))
            for each in connect.subs:
                begin = at(1) if each.interest.name == "log" else None
                await new.send(Subscribed(each.ref, each.interest.id, begin))
            await old.send(data("log", "2", 2))
            assert await take(log, 1) == ["2"]
            # Copies of the log, and live messages that are ahead of the old broker's.
            await new.send(data("log", "2", 2), data("log", "3", 3), data("live", "a3", place=(1, 3)), MovedIn())
        while not isinstance(await old.frames.get(), Leave):
            pass
        assert (client.moved, client.broker) == (1, "b2")
        assert not live._items
        await old.send(data("log", "3", 3), data("live", "a2", place=(1, 2)), Bye({}))
        assert (await old.closed)[0] == 1000
        await new.send(data("live", "a4", place=(1, 4)), data("log", "4", 4))
        assert await take(live, 3) == ["a2", "a3", "a4"]
        assert await take(log, 2) == ["3", "4"]


async def test_a_broker_that_cannot_take_over_changes_nothing() -> None:
    async with scripted_broker() as first, scripted_broker() as second, client_of(first) as client:
        old, news = await subscribed(client, first)
        await old.send(Move((second.url,), 0, 60_000))
        new = await second.peer()
        connect = await new.read(Connect)
        await new.send(Connected(connect.session, "b2"), Error("full", "full", "elsewhere", None, connect.subs[0].ref))
        assert (await new.closed)[0] == 4006
        await old.send(data("news", "1", 1))
        assert await take(news, 1) == ["1"]
        assert (client.moved, client.broker) == (0, "b1")


async def test_the_loss_of_the_old_broker_in_a_migration_leaves_the_new_one() -> None:
    async with scripted_broker() as first, scripted_broker() as second, client_of(first) as client:
        old, news = await subscribed(client, first)
        await old.send(Move((second.url,), 0, 60_000), data("news", "1", 1))
        new = await second.peer()
        assert await take(news, 1) == ["1"]
        old.abort()
        connect = await new.welcome("b2")
        await new.send(MovedIn(), data("news", "2", 2))
        assert await take(news, 1) == ["2"]
        assert connect.subs[0].since is not None
        assert client.broker == "b2"


async def test_tls_is_checked_against_the_given_authority_and_never_given_up(tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificates.server, certificates.server_key)
    trusting = ssl.create_default_context(cafile=str(certificates.authority))
    states: asyncio.Queue[State] = asyncio.Queue()
    async with scripted_broker(tls=tls) as broker, scripted_broker() as plain:
        async with client_of(broker, ssl=trusting) as client:
            peer, news = await subscribed(client, broker)
            await peer.send(Move((plain.url, broker.url), 0, 60_000))
            await (await broker.peer()).welcome()  # the second URL
            await peer.send(data("news", "1", 1))
            assert await take(news, 1) == ["1"]
        assert (await peer.closed)[0] == 1000
        assert plain.peers.empty()
        async with client_of(broker, on_state=states.put_nowait):
            state = await states.get()
            assert isinstance(state, Interrupted)
            assert "certificate" in state.reason


def test_a_broker_without_tls_is_no_place_to_move_to_from_one_with_tls() -> None:
    assert may_connect("wss://b2/connect", ("wss://b1/connect",))
    assert may_connect("ws://b2/connect", ("ws://b1/connect",))
    assert not may_connect("ws://b2/connect", ("wss://b1/connect",))
    assert not may_connect("file:///etc/passwd", ("ws://b1/connect",))


# Publishing.


async def test_publications_are_answered() -> None:
    async with scripted_broker() as broker, client_of(broker) as client:
        async with doing(client.publish("news", b"\xff")) as publishing:
            peer = await broker.peer()
            await peer.welcome()
            request = await peer.read(PublishRequest)
            assert (request.channel.name, request.payload) == ("news", b"\xff")
            await peer.send(Published(request.ref, at(9)))
        assert await publishing == at(9)
        async with doing(client.publish("chat", "é")) as publishing:
            request = await peer.read(PublishRequest)
            assert request.payload.decode() == "é"
            await peer.send(Published(request.ref))
        assert await publishing is None
        async with doing(client.publish("secret", b"")) as publishing:
            request = await peer.read(PublishRequest)
            await peer.send(Error("forbidden", "not yours", "never", None, request.ref))
        with pytest.raises(PublishFailed, match="not yours") as refused:
            await publishing
        assert (refused.value.code, refused.value.retryable) == ("forbidden", False)
        async with doing(client.publish("news", b"")) as publishing:
            request = await peer.read(PublishRequest)
            await peer.send(Error("log_unavailable", "later", "later", None, request.ref))
        with pytest.raises(PublishFailed, match="later") as later:
            await publishing
        assert later.value.retryable


async def test_nobody_knows_the_outcome_of_a_publication_whose_connection_is_lost() -> None:
    async with scripted_broker() as broker, client_of(broker) as client:
        async with doing(client.publish("news", b"1")) as publishing:
            peer = await broker.peer()
            await peer.welcome()
            await peer.read(PublishRequest)
            peer.abort()
        with pytest.raises(PublishFailed) as lost:
            await publishing
        assert (lost.value.code, lost.value.retryable) == ("unknown_outcome", True)


async def test_a_publication_that_is_cancelled_before_a_broker_serves_is_not_sent() -> None:
    async with scripted_broker() as broker, client_of(broker) as client:
        async with doing(client.publish("news", b"1")) as publishing:
            peer = await broker.peer()
            publishing.cancel()
        assert publishing.cancelled()
        async with doing(client.publish("news", b"2")) as publishing:
            await peer.welcome()
            request = await peer.read(PublishRequest)
            assert request.payload == b"2"
            await peer.send(Published(request.ref))


async def test_a_publication_that_brokers_would_not_take_is_not_sent() -> None:
    async with scripted_broker() as broker, client_of(broker) as client:
        with pytest.raises(PublishFailed, match="65536") as failed:
            await client.publish("news", b"\x01" * 11_000)  # JSON escapes each byte
        assert not failed.value.retryable


@pytest.mark.parametrize("payload", [{"id": "r1"}, ["r1"], 1, None])
async def test_what_is_neither_text_nor_bytes_is_refused_and_the_client_goes_on(payload: Any) -> None:
    async with scripted_broker() as broker, client_of(broker) as client:
        peer = await broker.peer()
        await peer.welcome()
        with pytest.raises(TypeError, match=r"text or bytes, not .*: json\.dumps"):
            await client.publish("d:reports", payload)
        likes: list[Any] = ["é", bytearray("é".encode()), memoryview("é".encode())]
        for like in likes:
            async with doing(client.publish("news", like)):
                request = await peer.read(PublishRequest)
                assert request.payload == "é".encode()
                await peer.send(Published(request.ref))


@pytest.mark.parametrize("serves", [True, False])
async def test_as_many_publications_as_the_application_likes_keep_the_connection_and_their_order(serves: bool) -> None:
    count = OUTGOING_MAX + 1
    async with scripted_broker() as broker, client_of(broker) as client:
        peer = await broker.peer()
        if serves:
            await peer.welcome()
        publishing = [asyncio.create_task(client.publish("news", str(number))) for number in range(count)]
        await asyncio.sleep(0)  # all are asked for in one turn
        if not serves:
            await peer.welcome()
        under_way = 0
        for number in range(count):
            request = await peer.read(PublishRequest)
            assert request.payload == b"%d" % number
            under_way = max(under_way, 1 + peer.frames.qsize())
            await peer.send(Published(request.ref, at(number)))
        assert await asyncio.gather(*publishing) == [at(number) for number in range(count)]
        assert under_way <= PUBLICATIONS_MAX
        assert not peer.closed.done()


async def test_publications_that_wait_for_their_turn_end_with_the_client_and_when_they_are_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(window, "PUBLICATIONS_MAX", 1)
    async with scripted_broker() as broker, client_of(broker) as client:
        peer = await broker.peer()
        await peer.welcome()
        first, second, third, fourth = (asyncio.create_task(client.publish("news", text)) for text in "1234")
        request = await peer.read(PublishRequest)
        second.cancel()
        await peer.send(Published(request.ref))
        await first
        assert (await peer.read(PublishRequest)).payload == b"3"
        await client.close()
        ended = await asyncio.gather(second, third, fourth, return_exceptions=True)
        assert [type(each) for each in ended] == [asyncio.CancelledError, ClientFailed, ClientFailed]


async def test_a_broker_that_reads_nothing_for_long_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "OUTGOING_MAX", 2)
    monkeypatch.setattr(connection, "UNREAD_S_MAX", -1.0)
    states: asyncio.Queue[State] = asyncio.Queue()
    async with scripted_broker() as broker, client_of(broker, on_state=states.put_nowait) as client:
        await (await broker.peer()).welcome()
        assert isinstance(await states.get(), Served)
        publishing = [asyncio.create_task(client.publish("news", b"")) for _ in range(3)]
        state = await states.get()
        assert isinstance(state, Interrupted)
        assert state.reason == "the broker does not read"
        await asyncio.gather(*publishing, return_exceptions=True)


# Refusals.


async def test_a_refused_subscription_raises() -> None:
    async with scripted_broker() as broker, client_of(broker) as client:
        async with doing(client.subscribe("secret")) as subscribing:
            peer = await broker.peer()
            connect = await peer.read(Connect)
            await peer.send(
                Connected(connect.session, "b1"), Error("forbidden", "not yours", "never", None, connect.subs[0].ref)
            )
        with pytest.raises(RefusedError, match="not yours") as refused:
            await subscribing
        assert (refused.value.code, refused.value.interest.name) == ("forbidden", "secret")
        assert not refused.value.retryable


async def test_a_subscription_that_is_refused_after_a_reconnect_ends_after_its_items() -> None:
    async with scripted_broker() as broker, client_of(broker) as client:
        peer, news = await subscribed(client, broker)
        await peer.send(data("news", "1", 1))
        await peer.close(1001)
        peer = await broker.peer()
        connect = await peer.read(Connect)
        await peer.send(Connected(connect.session, "b1"), Error("forbidden", "", "never", None, connect.subs[0].ref))
        assert await take(news, 1) == ["1"]
        with pytest.raises(RefusedError):
            await anext(news)


async def test_a_subscription_that_cannot_be_served_now_is_asked_for_again() -> None:
    async with scripted_broker() as broker, client_of(broker) as client:
        async with doing(client.subscribe("news")) as subscribing:
            peer = await broker.peer()
            connect = await peer.read(Connect)
            ref = connect.subs[0].ref
            await peer.send(Connected(connect.session, "b1"), Error("log_unavailable", "", "later", 10, ref))
            await confirm(peer, 3)
        assert (await subscribing).position == at(3)


# Tokens.


async def test_a_token_is_renewed_before_it_expires_and_after() -> None:
    given = iter(("t1", "t2", "t3"))

    async def token() -> str:
        await asyncio.sleep(0)
        return next(given)

    async with scripted_broker() as broker, client_of(broker, token=token):
        peer = await broker.peer()
        assert (await peer.welcome(expires_in_s=0.0)).token == "t1"
        assert await peer.read(Refresh) == Refresh("t2")
        await peer.close(4002, "expired")
        assert (await (await broker.peer()).welcome()).token == "t3"


def jwt_of(exp: object) -> str:
    payload = base64.urlsafe_b64encode(json.dumps({"exp": exp}).encode()).rstrip(b"=").decode()
    return f"e30.{payload}.c2ln"


async def test_the_next_refresh_goes_by_the_present_tokens_life() -> None:
    given = iter((3600, 3601, 7200))

    def token() -> str:
        return jwt_of(next(given))

    async with scripted_broker() as broker, client_of(broker, token=token):
        peer = await broker.peer()
        await peer.welcome(expires_in_s=0.0)
        assert await peer.read(Refresh) == Refresh(jwt_of(3601))  # it ends 1 s later
        assert await peer.read(Refresh) == Refresh(jwt_of(7200))


@pytest.mark.parametrize("token", ["", "a.b", "a.b.c", jwt_of(None), jwt_of("x"), jwt_of([]), "a." + "W" * 9999 + ".c"])
def test_a_token_that_cannot_be_read_has_no_expiry(token: str) -> None:
    assert _expiry_of(token) is None
    assert _expiry_of(jwt_of(5)) == 5


async def test_a_fixed_token_that_has_expired_ends_the_client() -> None:
    async with scripted_broker() as broker, client_of(broker, token="t1") as client:
        async with doing(client.subscribe("news")) as subscribing:
            peer = await broker.peer()
            assert (await peer.read(Connect)).token == "t1"
            await peer.close(4002, "expired")
        with pytest.raises(ClientFailed, match="4002"):
            await subscribing


async def test_a_function_for_tokens_that_raises_is_asked_again() -> None:
    errors: list[Exception] = []
    calls = iter((ZeroDivisionError(), "t2"))

    def token() -> str:
        result = next(calls)
        if isinstance(result, Exception):
            raise result
        return result

    async with scripted_broker() as broker, client_of(broker, token=token, on_error=errors.append):
        assert (await (await broker.peer()).closed)[0] == 1000
        assert (await (await broker.peer()).welcome()).token == "t2"
    assert [type(error) for error in errors] == [ZeroDivisionError]


# Storage.


async def test_the_next_run_goes_on_behind_what_was_handled(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    async with scripted_broker() as broker:
        async with client_of(broker, storage=FileStorage(path)) as client:
            peer, news = await subscribed(client, broker)
            await peer.send(data("news", "1", 1), data("news", "2", 2), data("news", "3", 3))
            assert await take(news, 2) == ["1", "2"]
            session = client.session
            await client.close()  # in the middle of the second one
        async with client_of(broker, storage=FileStorage(path)) as client:
            assert client.session == session
            async with doing(client.subscribe("news")) as subscribing:
                connect = await (await broker.peer()).welcome()
            assert connect.session == session
            assert connect.subs[0].since == (await subscribing).position == at(1)
            await (await subscribing).unsubscribe()
        async with client_of(broker, storage=FileStorage(path)) as client:
            _, news = await subscribed(client, broker, offset=8)
            assert news.position == at(8)
        assert os.listdir(tmp_path) == ["state.json"]


async def test_generations_grow_from_run_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamoth_user.client.time.time", lambda: 0.0)
    generations: list[int] = []
    async with scripted_broker() as broker:
        for _ in range(2):
            async with client_of(broker, storage=FileStorage(tmp_path / "state")):
                generations.append((await (await broker.peer()).read(Connect)).generation)
    assert generations[1] > generations[0] + 1000


class MemoryStorage:
    def __init__(self) -> None:
        self.saved: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.fails = False

    def load(self) -> dict[str, Any] | None:
        return None

    def save(self, state: dict[str, Any]) -> None:
        if self.fails:
            self.fails = False
            raise OSError("the disk is full")
        self.saved.put_nowait(state)


async def test_positions_are_saved_while_the_client_runs_and_a_failure_is_tried_again() -> None:
    storage, errors = MemoryStorage(), list[Exception]()
    async with scripted_broker() as broker, client_of(broker, storage=storage, on_error=errors.append) as client:
        peer, news = await subscribed(client, broker)
        storage.fails = True
        await peer.send(*(data("news", str(number), number) for number in range(1, 50)))
        await take(news, 49)
        while (await storage.saved.get())["positions"].get(news.interest.id, {}).get("offset") != 48:
            pass
    assert [type(error) for error in errors] == [OSError]
    assert storage.saved.get_nowait()["positions"][news.interest.id]["offset"] == 49
    assert storage.saved.empty()


async def test_a_storage_of_something_else_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    for text in ("{", "[]", '{"session": 1}', '{"session": "a", "generation": 1, "positions": {"x": 3}}'):
        path.write_text(text)
        with pytest.raises(StorageError):
            await Client(["ws://127.0.0.1:1/connect"], storage=FileStorage(path)).__aenter__()


# Life.


async def test_a_client_that_connects_can_be_closed() -> None:
    arrived = asyncio.Event()

    def silent(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        arrived.set()
        writers.append(writer)

    writers: list[asyncio.StreamWriter] = []
    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with Client([f"ws://127.0.0.1:{port}/connect"], proxy=None) as client:
            async with doing(client.subscribe("news")) as subscribing:
                await arrived.wait()
                await client.close()
            with pytest.raises(ClientFailed) as closed:
                await subscribing
            assert closed.value.close_code == 1000
        for writer in writers:
            writer.close()
            await writer.wait_closed()


async def test_closing_ends_everything_that_waits() -> None:
    async with scripted_broker() as broker:
        client = client_of(broker)
        async with client:
            peer, news = await subscribed(client, broker)
            waiting = [
                asyncio.create_task(each) for each in (anext(news), client.publish("news", b""), client.wait_moved())
            ]
            await peer.read(PublishRequest)
            await asyncio.gather(client.close(), client.close())
            results = await asyncio.gather(*waiting, return_exceptions=True)
            assert [type(each) for each in results] == [StopAsyncIteration, ClientFailed, ClientFailed]
        with pytest.raises(RuntimeError, match="once"):
            await client.__aenter__()
        gc.collect()


async def test_a_fault_of_the_client_ends_it(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    async with scripted_broker() as broker, client_of(broker) as client:
        peer, news = await subscribed(client, broker)
        async with doing(client.publish("news", b"")) as publishing:
            await peer.read(PublishRequest)
            with caplog.at_level(logging.CRITICAL, "dynamoth_user"):
                monkeypatch.setattr("dynamoth_user.machine.machine.UserMachine._on_data", _fail)
                await peer.send(data("news", "1", 1))
                with pytest.raises(ClientFailed, match="1011"):
                    await anext(news)
        with pytest.raises(ClientFailed, match="1011"):
            await publishing
        assert (await peer.closed)[0] == 1011


def test_mistakes_in_the_options_are_errors() -> None:
    urls: Any
    for urls in ("ws://b1/connect", [], ["http://b1/connect"], ["ws:///connect"]):
        with pytest.raises(ConfigError):
            Client(urls)
    with pytest.raises(ConfigError):
        Client(["ws://b1/connect"], session="two words")
    encoding: Any = "xml"
    with pytest.raises(ConfigError):
        Client(["ws://b1/connect"], encoding=encoding)


async def test_a_client_is_used_inside_async_with_only() -> None:
    with pytest.raises(RuntimeError, match="async with"):
        await Client(["ws://b1/connect"]).subscribe("news")


def _fail(*_: object) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("new_event_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_timer_that_is_due_already_can_be_set_again(
    monkeypatch: pytest.MonkeyPatch, new_event_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """The handles of uvloop do not know their time then."""

    def in_the_past(_: UserMachine) -> float:
        return 0.0

    async def main() -> None:
        client = Client(["ws://127.0.0.1:9/connect"])
        async with client:
            engine = client._engine
            assert engine is not None
            monkeypatch.setattr(UserMachine, "deadline", in_the_past)
            engine._set_timer()
            engine._set_timer()
            monkeypatch.undo()

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(main())
