from __future__ import annotations

import asyncio
import base64
import json
import logging
import time
import zlib
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from dynamoth.errors import ConfigError
from dynamoth_broker.process.sse import STREAMS_PER_SESSION_MAX, SseServer
from dynamoth_broker.process.sse_connection import POSTS_UNPACED_MAX
from dynamoth_broker.process.transport import HARD_BOUND_RATIO, TransportOptions, UserConnection, broadcast, prepare
from tests.broker.transport_users import OPTIONS, PATIENCE_S, SHORT, Recorder, Run, raw_user, run, until

__all__ = ["run"]

CONNECT = {"type": "connect", "v": 1, "session": "s-1", "subs": [{"ref": 1, "channel": "news"}]}


@asynccontextmanager
async def serving(
    options: TransportOptions = OPTIONS, event_id: Callable[[UserConnection], str | None] = lambda conn: None
) -> AsyncGenerator[tuple[SseServer, Recorder]]:
    recorder = Recorder()
    server = await SseServer.start(recorder, "127.0.0.1", 0, options, event_id=event_id)
    try:
        yield server, recorder
    finally:
        async with asyncio.timeout(PATIENCE_S):
            await server.close()
        assert recorder.kinds.count("closed") == recorder.kinds.count("opened")


def encoded(frame: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(frame).encode()).rstrip(b"=").decode()


class Browser:
    def __init__(self, http: aiohttp.ClientSession, port: int) -> None:
        self.http = http
        self.url = f"http://127.0.0.1:{port}/sse"

    async def get(self, frame: Any = CONNECT, **headers: str) -> aiohttp.ClientResponse:
        return await self.http.get(self.url, params={"connect": encoded(frame)}, headers=headers)

    async def post(self, body: bytes, session: str = "s-1", **headers: str) -> int:
        async with self.http.post(f"{self.url}/{session}", data=body, headers=headers) as response:
            return response.status


@asynccontextmanager
async def browser(server: SseServer) -> AsyncGenerator[Browser]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(PATIENCE_S)) as http:
        yield Browser(http, server.port)


async def event(response: aiohttp.ClientResponse) -> dict[str, str]:
    """Return the fields of the next event."""
    fields: dict[str, str] = {}
    while (line := (await response.content.readuntil(b"\n")).decode()) != "\n":
        name, _, value = line.rstrip("\n").partition(": ")
        fields[name] = value
    return fields


def test_a_stream_and_what_is_posted(run: Run) -> None:
    positions = iter(["p1", "p2"])

    async def main() -> None:
        async with serving(event_id=lambda conn: next(positions, None)) as (server, recorder), browser(server) as user:
            async with await user.get(
                Authorization="Bearer secret", Origin="https://example.org", **{"Last-Event-ID": "p0"}
            ) as response:
                assert response.status == 200
                assert response.headers["Content-Type"] == "text/event-stream"
                assert response.headers["Access-Control-Allow-Origin"] == "https://example.org"
                await recorder.until("received")
                assert recorder.received_frames == [{**CONNECT, "token": "secret"}]
                (conn,) = recorder.connections
                assert conn.encoding == "json" and conn.last_event_id == "p0" and conn.peer.startswith("127.0.0.1:")
                broadcast([conn], prepare({"type": "data"}, "ü\n\n\u2028".encode()))
                conn.send(prepare({"type": "data"}, b"\xff"))
                conn.send(prepare({"type": "ping"}))
                assert await event(response) == {"data": '{"type":"data","d":"ü\\n\\n\u2028"}', "id": "p1"}
                assert await event(response) == {"data": '{"type":"data","b":"/w=="}', "id": "p2"}
                assert await event(response) == {"data": '{"type":"ping"}'}
                assert await user.post(b'{"type":"pong"}', Authorization="Bearer secret") == 204
                assert recorder.received_frames[1:] == [{"type": "pong"}]
            await recorder.until("closed")
            assert recorder.kinds == ["opened", "received", "received", "closed"]
            assert await user.post(b"{}", Authorization="Bearer secret") == 404

    run(main())


def test_close_says_why_after_what_is_queued(run: Run) -> None:
    async def main() -> None:
        async with serving() as (server, recorder), browser(server) as user:
            async with await user.get() as response:
                await recorder.until("received")
                (conn,) = recorder.connections
                conn.send(prepare({"type": "error"}))
                conn.close(1013, "full")
                conn.close(1001)
                conn.send(prepare({"type": "too late"}))
                assert await user.post(b"{}") == 404
                assert await event(response) == {"data": '{"type":"error"}'}
                assert await event(response) == {"event": "close", "data": '{"code":1013,"reason":"full"}'}
                assert await response.content.read() == b""
            await recorder.until("closed")
            assert recorder.kinds == ["opened", "received", "closed"]

    run(main())


def test_abort(run: Run) -> None:
    async def main() -> None:
        async with serving() as (server, recorder), browser(server) as user:
            async with await user.get() as response:
                await recorder.until("received")
                recorder.connections[0].send(prepare({}))
                recorder.connections[0].abort()
                assert recorder.kinds == ["opened", "received"]
                with pytest.raises(aiohttp.ClientPayloadError):
                    await response.content.read()
            await recorder.until("closed")

    run(main())


def test_a_session_that_reconnects_posts_to_its_newest_stream() -> None:
    async def main() -> None:
        async with serving() as (server, recorder), browser(server) as user, await user.get(Authorization="Bearer 1"):
            await recorder.until("opened")
            async with await user.get(Authorization="Bearer 2"):
                await recorder.until("opened", 2)
                assert await user.post(b"{}", Authorization="Bearer 1") == 403
                assert await user.post(b"{}", Authorization="Bearer 2") == 204
            await recorder.until("closed")
            assert await user.post(b"{}", Authorization="Bearer 1") == 204
            refresh = json.dumps({"type": "refresh", "token": "3"}).encode()
            assert await user.post(refresh, Authorization="Bearer 1") == 204
            assert await user.post(b"{}", Authorization="Bearer 1") == 403
            assert await user.post(b"{}", Authorization="Bearer 3") == 204
            others = [await user.get() for _ in range(STREAMS_PER_SESSION_MAX)]
            assert [each.status for each in others] == [200] * (STREAMS_PER_SESSION_MAX - 1) + [429]
            for each in others:
                each.close()

    asyncio.run(main())


REFUSED_CONNECT = {
    "not base64": "%%%",
    "not JSON": encoded("x")[:-3],
    "not UTF-8": base64.urlsafe_b64encode(b'{"a":"\xff"}').decode(),
    "not an object": encoded([1]),
    "without a session": encoded({"type": "connect"}),
    "with a session that is too long": encoded({"session": "x" * 65}),
    "with a session of other characters": encoded({"session": "a/b"}),
    "with a token": encoded({**CONNECT, "token": "secret"}),
    "nothing": "",
}


@pytest.mark.parametrize("connect", REFUSED_CONNECT.values(), ids=REFUSED_CONNECT.keys())
def test_refused_connect_frames(connect: str) -> None:
    async def main() -> None:
        async with serving() as (server, recorder), browser(server) as user:
            async with user.http.get(user.url, params={"connect": connect}) as response:
                assert response.status == 400
            assert recorder.events == []

    asyncio.run(main())


def test_foreign_origins(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        foreign = {"Origin": "https://example.com"}
        ours = {"Origin": "https://example.org"}
        async with serving() as (server, recorder), browser(server) as user, await user.get():
            await recorder.until("received")
            async with await user.get(**foreign) as response:
                assert response.status == 403 and "Access-Control-Allow-Origin" not in response.headers
            assert await user.post(b"{}", **foreign) == 403
            for url in (user.url, f"{user.url}/s-1"):
                async with user.http.options(url, headers=foreign) as response:
                    assert response.status == 403
                async with user.http.options(url, headers=ours) as response:
                    assert response.status == 204
                    assert response.headers["Access-Control-Allow-Origin"] == ours["Origin"]
                    assert "Authorization" in response.headers["Access-Control-Allow-Headers"]
            assert recorder.kinds == ["opened", "received"]

    asyncio.run(main())
    assert {record.__dict__["origin"] for record in caplog.records} == {"https://example.com"}


@pytest.mark.parametrize("body", [b"{", b'{"a":NaN}', b'{"a":1,"a":1}', b'{"a":"\xff"}', b"[" * 60_000])
def test_malformed_posts(body: bytes) -> None:
    async def main() -> None:
        async with serving() as (server, recorder), browser(server) as user, await user.get() as response:
            await recorder.until("received")
            assert await user.post(body) == 400
            assert json.loads((await event(response))["data"])["code"] == 4005
            await recorder.until("closed")
            assert recorder.kinds == ["opened", "received", "malformed", "closed"]

    asyncio.run(main())


def test_large_posts_and_other_requests() -> None:
    async def main() -> None:
        async with serving() as (server, recorder), browser(server) as user, await user.get():
            await recorder.until("received")
            assert await user.post(b'{"a":"' + b"x" * OPTIONS.frame_bytes_max + b'"}') == 413
            assert await user.post(b"{}", "unknown") == 404
            async with user.http.get(user.url, headers={"Authorization": "Basic eA=="}) as response:
                assert response.status == 400
            async with user.http.get(user.url.replace("/sse", "/connect")) as response:
                assert response.status == 404
            async with user.http.get(f"{user.url}?connect={'A' * 10_000}") as response:
                assert response.status == 414
                assert "use WebSocket" in await response.text()
            assert recorder.kinds == ["opened", "received"]

    asyncio.run(main())


@pytest.mark.parametrize("path", ["sse/s-1", "nowhere"])
def test_nothing_is_unpacked_of_a_body_that_is_refused(run: Run, path: str) -> None:
    """Who has no token cannot hold up all others with a small body that is a large one when it is unpacked."""
    packer = zlib.compressobj(9, wbits=31)
    body = b"".join(packer.compress(bytes(1_000_000)) for _ in range(200)) + packer.flush()
    began = time.thread_time()
    zlib.decompressobj(31).decompress(body)
    unpacking_s = time.thread_time() - began
    head = f"POST /{path} HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: {len(body)}\r\n\r\n"

    async def main() -> None:
        async with serving() as (server, _):
            began = time.thread_time()
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(head.encode() + body + b"GET /last HTTP/1.1\r\nHost: x\r\n\r\n")
            async with asyncio.timeout(PATIENCE_S):
                for _ in range(2):  # the second answer comes when the body of the first request was dropped
                    assert b" 404 " in await reader.readuntil(b"\r\n\r\n")
            writer.close()
            assert time.thread_time() - began < unpacking_s / 4

    run(main())


def test_slow_requests_are_cut_off(run: Run) -> None:
    async def main() -> None:
        async with serving(SHORT) as (server, recorder), raw_user(server.port) as silent, raw_user(server.port) as slow:
            slow.write(b"GET /sse?connect=")
            await asyncio.gather(silent.end(), slow.end())
            async with browser(server) as user, await user.get() as response, raw_user(server.port) as body:
                await recorder.until("received")
                body.write(b"POST /sse/s-1 HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
                assert (await body.head()).startswith("HTTP/1.1 408 ")
                recorder.connections[0].send(prepare({"type": "ping"}))  # a stream has no such bound
                assert await event(response) == {"data": '{"type":"ping"}'}

    run(main())


def test_posts_are_slowed_down_as_frames_of_a_websocket_are_and_a_flood_is_refused() -> None:
    async def main() -> None:
        options = replace(OPTIONS, frames_per_s=100.0)
        async with serving(options) as (server, recorder), browser(server) as user, await user.get():
            await recorder.until("received")
            began = asyncio.get_running_loop().time()
            assert {await user.post(b"{}") for _ in range(POSTS_UNPACED_MAX + 30)} == {204}
            assert asyncio.get_running_loop().time() - began >= 0.29
            assert recorder.kinds.count("received") == 1 + POSTS_UNPACED_MAX + 30
        options = replace(OPTIONS, frames_per_s=1.0, handshake_timeout_s=2.0)
        async with serving(options) as (server, recorder), browser(server) as user, await user.get():
            await recorder.until("received")
            posts = [asyncio.create_task(user.post(b"{}")) for _ in range(POSTS_UNPACED_MAX + 4)]
            done, _ = await asyncio.wait(posts, return_when=asyncio.ALL_COMPLETED)
            assert sorted(each.result() for each in done) == [204] * (POSTS_UNPACED_MAX + 2) + [429] * 2

    asyncio.run(main())


def test_users_with_one_session_have_streams_of_their_own() -> None:
    async def main() -> None:
        recorder = Recorder()
        users = {"ada 1": "ada", "ada 2": "ada", "bob": "bob"}
        server = await SseServer.start(recorder, "127.0.0.1", 0, OPTIONS, user_of=lambda token: users.get(token or ""))
        async with browser(server) as user:
            ada, bob, nobody = ({"Authorization": f"Bearer {name}"} for name in ("ada 1", "bob", "nobody"))
            streams = [await user.get(**ada)]
            streams += [await user.get(**bob) for _ in range(STREAMS_PER_SESSION_MAX + 1)]
            streams += [await user.get(**nobody) for _ in range(STREAMS_PER_SESSION_MAX + 1)]
            expected = [200] * (1 + STREAMS_PER_SESSION_MAX) + [429] + [200] * (STREAMS_PER_SESSION_MAX + 1)
            assert [each.status for each in streams] == expected
            assert [await user.post(b"{}", **each) for each in (ada, bob, nobody)] == [204, 204, 403]
            for refused in ("nobody", "bob"):
                refresh = json.dumps({"type": "refresh", "token": refused}).encode()
                assert await user.post(refresh, **ada) == 204  # an event `error` is the answer
                assert await user.post(b"{}", **ada) == 204
            assert await user.post(b'{"type":"refresh","token":"ada 2"}', **ada) == 204
            assert await user.post(b"{}", **ada) == 403
            for each in streams:
                each.close()
        await server.close()

    asyncio.run(main())


def test_requests_that_are_no_http_are_counted_and_logged_without_a_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        async with serving() as (server, recorder):
            for request in (b"GET /sse HTTP/1.1\r\nbad header: secret\r\n\r\n", b"\x16\x03\x01 \r\n") * 3:
                async with raw_user(server.port) as user:
                    user.write(request)
                    assert (await user.head()).split()[1] == "400"
            assert server.http_log.malformed_requests == 3
            assert recorder.events == []

    with caplog.at_level(logging.INFO, "dynamoth.broker"):
        asyncio.run(main())
    [record] = caplog.records
    assert (record.exc_info, record.name) == (None, "dynamoth.broker.sse")
    assert "secret" not in record.getMessage()


SLOW = replace(OPTIONS, unsent_bytes_max=512 * 1024)
GET = f"GET /sse?connect={encoded(CONNECT)} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


def test_a_reader_that_never_reads_is_reported_once_until_it_reads(run: Run) -> None:
    async def main() -> None:
        async with serving(SLOW) as (server, recorder), raw_user(server.port) as slow:
            slow.write(GET)
            await recorder.until("received")
            (conn,) = recorder.connections
            frame = prepare({"d": "x" * 16_000})
            async with asyncio.timeout(PATIENCE_S):
                while "overflowed" not in recorder.kinds:
                    conn.send(frame)
                    await asyncio.sleep(0)
            assert SLOW.unsent_bytes_max < conn.unsent_bytes < SLOW.unsent_bytes_max + 3 * 16_100
            conn.send(frame)
            await asyncio.sleep(0)
            assert recorder.kinds == ["opened", "received", "overflowed"]
            reading = asyncio.create_task(slow.end())
            await recorder.until("writable")
            await until(lambda: conn.unsent_bytes == 0)
            conn.close(1000)
            await recorder.until("closed")
            reading.cancel()
            assert recorder.kinds == ["opened", "received", "overflowed", "writable", "closed"]

    run(main())


def test_a_stream_that_is_sent_far_too_much_is_aborted(run: Run) -> None:
    async def main() -> None:
        async with serving(SLOW) as (server, recorder), raw_user(server.port) as slow:
            slow.write(GET)
            await recorder.until("received")
            (conn,) = recorder.connections
            frame, highest = prepare({"d": "x" * 16_000}), 0
            async with asyncio.timeout(PATIENCE_S):
                while "closed" not in recorder.kinds:
                    conn.send(frame)
                    highest = max(highest, conn.unsent_bytes)
                    await asyncio.sleep(0)
            assert recorder.kinds == ["opened", "received", "overflowed", "closed"]
            assert highest <= HARD_BOUND_RATIO * SLOW.unsent_bytes_max + 16_100

    run(main())


def test_a_peer_that_does_not_read_the_close_is_aborted(run: Run) -> None:
    async def main() -> None:
        options = replace(SLOW, close_timeout_s=0.2)
        async with serving(options) as (server, recorder), raw_user(server.port) as slow:
            slow.write(GET)
            await recorder.until("received")
            async with asyncio.timeout(PATIENCE_S):
                while "overflowed" not in recorder.kinds:
                    recorder.connections[0].send(prepare({"d": "x" * 16_000}))
                    await asyncio.sleep(0)
            recorder.connections[0].close(4003)
            await recorder.until("closed")

    run(main())


def test_a_taken_port_is_an_error_of_the_configuration() -> None:
    async def main() -> None:
        async with serving() as (server, _):
            with pytest.raises(ConfigError, match="choose another"):
                await SseServer.start(Recorder(), "127.0.0.1", server.port)

    asyncio.run(main())
