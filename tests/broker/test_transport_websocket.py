from __future__ import annotations

import asyncio
import errno
import json
import logging
import socket
from dataclasses import replace
from typing import Any

import msgpack
import pytest

from dynamoth.errors import ConfigError
from dynamoth_broker.process import accept, websocket
from dynamoth_broker.process.accept import KEEPALIVE_S, UNSENT_KERNEL_BYTES, USER_TIMEOUT_S
from dynamoth_broker.process.frames import Frame
from dynamoth_broker.process.transport import (
    HARD_BOUND_RATIO,
    TransportOptions,
    UserConnection,
    broadcast,
    prepare,
)
from dynamoth_broker.process.websocket import (
    FRAGMENTS_MAX,
    LINGERING_BYTES_MAX,
    READ_BYTES,
    REASON_BYTES_MAX,
    REQUEST_BYTES_MAX,
    WebSocketConnection,
    WebSocketServer,
)
from tests.broker.transport_users import (
    BINARY,
    CLOSE,
    CONTINUATION,
    OPTIONS,
    PATIENCE_S,
    PING,
    PONG,
    SHORT,
    TEXT,
    Recorder,
    Run,
    masked,
    raw_user,
    request,
    run,
    serving,
    until,
    user,
)

__all__ = ["run"]

HUGE = 100 * 1024 * 1024


def text(frame: Frame) -> bytes:
    return json.dumps(frame).encode()


# Frames.


def test_messages_arrive_in_both_directions(run: Run) -> None:
    async def main() -> None:
        async with serving() as (server, recorder), user(server.port) as raw:
            raw.send(TEXT, text({"type": "connect"}) + b" " * 100)
            raw.send(TEXT, text({"type": "pong", "long": "x" * 60_000}))
            await recorder.until("received", 2)
            assert recorder.received_frames == [{"type": "connect"}, {"type": "pong", "long": "x" * 60_000}]
            (conn,) = recorder.connections
            assert conn.encoding == "json" and conn.user is None and conn.peer.startswith("127.0.0.1:")
            for number in range(3):
                conn.send(prepare({"type": "data", "o": number}, b"x" * number * 70_000))
            assert conn.unsent_bytes > 210_000
            for number in range(3):
                opcode, payload = await raw.frame()
                assert opcode == TEXT and json.loads(payload) == {
                    "type": "data",
                    "o": number,
                    "d": "x" * number * 70_000,
                }
            assert conn.unsent_bytes == 0

    run(main())


def test_msgpack(run: Run) -> None:
    async def main() -> None:
        async with serving() as (server, recorder), user(server.port, "dynamoth.v1.msgpack") as raw:
            raw.send(BINARY, msgpack.packb({"b": b"\xff"}))
            await recorder.until("received")
            assert recorder.received_frames == [{"b": b"\xff"}]
            (conn,) = recorder.connections
            assert conn.encoding == "msgpack"
            conn.send(prepare({"type": "data"}, b"\xff"))
            assert await raw.frame() == (BINARY, msgpack.packb({"type": "data", "b": b"\xff"}))

    run(main())


def test_all_users_of_an_encoding_get_the_same_bytes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "FLUSHED_PER_TURN_MAX", 2)
    written: list[bytes] = []
    write = WebSocketConnection.write

    def noting(self: WebSocketConnection, data: bytes) -> None:
        written.append(data)
        write(self, data)

    async def main() -> None:
        async with (
            serving() as (server, recorder),
            user(server.port) as first,
            user(server.port) as second,
            user(server.port) as third,
            user(server.port, "dynamoth.v1.msgpack") as packed,
        ):
            await recorder.until("opened", 4)
            monkeypatch.setattr(WebSocketConnection, "write", noting)
            frame, another = prepare({"type": "data"}, b"x"), prepare({"type": "data"}, b"y")
            broadcast(recorder.connections, frame)
            broadcast(recorder.connections, another)
            for each in (first, second, third):
                assert [await each.frame(), await each.frame()] == [
                    (TEXT, b'{"type":"data","d":"x"}'),
                    (TEXT, b'{"type":"data","d":"y"}'),
                ]
            assert await packed.frame() == (BINARY, msgpack.packb({"type": "data", "d": "x"}))
            assert len(written) == 4, "one system call per user for both publications"
            assert written[0] == frame.websocket_json + another.websocket_json
            assert written[0] is written[1], "those who get the same share its bytes"
            broadcast(recorder.connections[:3], frame)
            assert await third.frame() == (TEXT, b'{"type":"data","d":"x"}')
            assert all(each is frame.websocket_json for each in written[4:])

    run(main())


def test_fragments_and_pings_between_them(run: Run) -> None:
    async def main() -> None:
        async with serving() as (server, recorder), user(server.port) as raw:
            raw.send(TEXT, b'{"a":"\xc3', fin=False)
            raw.send(PING, b"still there?")
            assert await raw.frame() == (PONG, b"still there?")
            raw.send(CONTINUATION, b"\xa4", fin=False)
            raw.send(CONTINUATION, b'"}')
            await recorder.until("received")
            assert recorder.received_frames == [{"a": "ä"}]

    run(main())


def test_a_connection_has_a_parser_only_within_a_message(run: Run) -> None:
    async def main() -> None:
        async with serving() as (server, recorder), user(server.port) as first, user(server.port) as second:
            await recorder.until("opened", 2)
            kept = [each for each in recorder.connections if isinstance(each, WebSocketConnection)]
            assert [each.parses for each in kept] == [False, False]
            whole = [masked(TEXT, text({"number": number})) for number in range(2)]
            for raw, data in zip((first, second), whole, strict=True):
                raw.write(data[:9])
            await until(lambda: [each.parses for each in kept] == [True, True])
            for raw, data in zip((second, first), reversed(whole), strict=True):
                raw.write(data[9:])
            await recorder.until("received", 2)
            assert [each.parses for each in kept] == [False, False]
            assert sorted(frame["number"] for frame in recorder.received_frames) == [0, 1]
            first.send(TEXT, b'{"a":', fin=False)
            await until(lambda: sorted(each.parses for each in kept) == [False, True])

    run(main())


# Messages that break the protocol.


MALFORMED = {
    "not JSON": (TEXT, b"{"),
    "nested": (TEXT, b'{"a":' + b"[" * 60_000),
    "a name twice": (TEXT, b'{"a":1,"a":2}'),
    "NaN": (TEXT, b'{"a":NaN}'),
    "out of range": (TEXT, b'{"a":1e999}'),
    "not an object": (TEXT, b"[]"),
    "a binary message": (BINARY, b'{"type":"connect"}'),
}


@pytest.mark.parametrize(("opcode", "payload"), MALFORMED.values(), ids=MALFORMED.keys())
def test_what_the_listener_finds_malformed(opcode: int, payload: bytes) -> None:
    async def main() -> None:
        async with serving() as (server, recorder), user(server.port) as raw, user(server.port) as other:
            raw.write(masked(opcode, payload) + masked(TEXT, b"{}"))
            code, reason = await raw.close_frame()
            raw.send(CLOSE, code.to_bytes(2, "big"))
            await raw.end()
            assert code == 4005 and reason
            assert recorder.kinds == ["opened", "opened", "malformed", "closed"], "nothing after the first is handled"
            other.send(TEXT, b"{}")
            await recorder.until("received")

    asyncio.run(main())


def test_a_text_message_on_msgpack_is_malformed() -> None:
    async def main() -> None:
        async with serving() as (server, recorder), user(server.port, "dynamoth.v1.msgpack") as raw:
            raw.send(TEXT, msgpack.packb({}))
            assert (await raw.close_frame())[0] == 4005
            assert ("malformed", "a binary message is expected") in recorder.events

    asyncio.run(main())


BROKEN = {
    "text that is not UTF-8": (masked(TEXT, b'{"a":"\xff"}'), 1007),
    "half of a character": (masked(TEXT, b'{"a":"\xc3', fin=False) + masked(CONTINUATION, b'"}'), 1007),
    "100 MB": (bytes([0x81, 0xFF]) + HUGE.to_bytes(8, "big") + b"\0" * 4 + b"x" * 100_000, 1009),
    "2**63 bytes": (bytes([0x81, 0xFF]) + (2**63).to_bytes(8, "big") + b"\0" * 4, 1009),
    "one byte too much": (masked(TEXT, b"x" * (OPTIONS.frame_bytes_max + 1)), 1009),
    "fragments that are too much": (
        masked(TEXT, b"x" * 40_000, fin=False) + masked(CONTINUATION, b"x" * 40_000, fin=False),
        1009,
    ),
    "empty fragments": (masked(TEXT, fin=False) + masked(CONTINUATION, fin=False) * FRAGMENTS_MAX, 1009),
    "compressed, though it was not negotiated": (bytes([0xC1, 0x80]) + b"\0" * 4, 1002),
    "not masked": (b"\x81\x02{}", 1002),
    "an unknown opcode": (masked(0x3), 1002),
    "a continuation of nothing": (masked(CONTINUATION), 1002),
    "a message within a message": (masked(TEXT, fin=False) + masked(TEXT), 1002),
    "a long ping": (masked(PING, b"x" * 126), 1002),
    "a close frame of one byte": (masked(CLOSE, b"x"), 1002),
    "a close frame with a reserved code": (masked(CLOSE, (1005).to_bytes(2, "big")), 1002),
    "a close frame that is not UTF-8": (masked(CLOSE, b"\x03\xe8\xff"), 1007),
}


@pytest.mark.parametrize(("data", "code"), BROKEN.values(), ids=BROKEN.keys())
def test_what_ends_a_connection(run: Run, data: bytes, code: int) -> None:
    async def main() -> None:
        async with serving() as (server, recorder), user(server.port) as raw, user(server.port) as other:
            raw.write(data)
            assert (await raw.close_frame())[0] == code
            raw.writer.close()
            await recorder.until("closed")
            assert recorder.kinds == ["opened", "opened", "closed"]
            other.send(TEXT, b"{}")
            await recorder.until("received")

    run(main())


def test_who_goes_on_sending_100_mb_is_cut_off(run: Run) -> None:
    async def main() -> None:
        async with serving() as (server, recorder), user(server.port) as raw:
            raw.write(bytes([0x81, 0xFF]) + HUGE.to_bytes(8, "big") + b"\0" * 4)
            sent = 0
            with pytest.raises(ConnectionError):
                while sent < HUGE:
                    raw.write(b"x" * 65536)
                    sent += 65536
                    async with asyncio.timeout(PATIENCE_S):
                        await raw.writer.drain()
            assert LINGERING_BYTES_MAX < sent < HUGE // 4, "what is beyond the bound is what the kernel had taken"
            await recorder.until("closed")

    run(main())


def test_who_breaks_the_protocol_and_reads_slowly_still_finds_out_why(run: Run) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with serving() as (server, recorder), asyncio.timeout(PATIENCE_S):
            with socket.socket() as slow:
                slow.setblocking(False)
                slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
                await loop.sock_connect(slow, ("127.0.0.1", server.port))
                await loop.sock_sendall(slow, request())
                await recorder.until("opened")
                (conn,) = recorder.connections
                while not conn.unsent_bytes:  # the kernel takes the first ones
                    conn.send(prepare({"d": "x" * 16_000}))
                    await asyncio.sleep(0)
                    await asyncio.sleep(0)
                broken = bytes([0x81, 0xFF]) + HUGE.to_bytes(8, "big") + b"\0" * 4 + b"x" * 2 * READ_BYTES
                await loop.sock_sendall(slow, broken)
                received = b""
                # A socket that is closed with bytes that nobody has read resets the connection, and they are lost.
                while chunk := await loop.sock_recv(slow, 1024):
                    received += chunk
                    await asyncio.sleep(0)
            assert b"\x03\xf1" in received[-200:], "close code 1009"
            await recorder.until("closed")

    run(main())


def test_a_flood_of_messages_does_not_hold_up_others(run: Run) -> None:
    async def main() -> None:
        async with serving(replace(OPTIONS, frames_per_s=1000)) as (server, recorder), user(server.port) as other:
            await recorder.until("opened")
            async with user(server.port) as raw:
                raw.write(masked(TEXT, b'{"flood":1}') * 3000)
                await recorder.until("received")
                other.send(TEXT, b'{"flood":0}')
                async with asyncio.timeout(PATIENCE_S):
                    while {"flood": 0} not in recorder.received_frames:
                        await recorder.until("received", len(recorder.received_frames) + 1)
                assert len(recorder.received_frames) < 3000
                before = len(recorder.received_frames)
                await recorder.until("received", before + 1)  # it goes on, slowly

    run(main())


# Handshakes.


REFUSED = {
    "no subprotocol": (request("/connect", None), 400),
    "an unknown subprotocol": (request("/connect", "dynamoth.v2.json, graphql-ws"), 400),
    "a foreign origin": (request("/connect", "dynamoth.v1.json", "Origin: https://example.com"), 403),
    "an origin that begins like ours": (
        request("/connect", "dynamoth.v1.json", "Origin: https://example.org.example.com"),
        403,
    ),
    "the origin of a local file": (request("/connect", "dynamoth.v1.json", "Origin: null"), 403),
    "two origins": (
        request("/connect", "dynamoth.v1.json", "Origin: https://example.org", "Origin: https://example.com"),
        400,
    ),
    "another path": (request("/"), 404),
    "a path below": (request("/connect/1"), 404),
    "plain HTTP": (b"GET /connect HTTP/1.1\r\nHost: localhost\r\n\r\n", 426),
    "another method": (request().replace(b"GET", b"PUT"), 405),
    "an old version": (request().replace(b"Version: 13", b"Version: 8"), 400),
    "no key": (request().replace(b"-Key: ", b"-Kex: "), 400),
    "a long line": (request("/connect", "dynamoth.v1.json", "Cookie: " + "x" * 9_000), 431),
    "many headers": (request("/connect", "dynamoth.v1.json", *["X: y"] * 200), 431),
    "a long request": (request("/connect", "dynamoth.v1.json", *["X: " + "y" * 8_000] * 3), 431),
    "a message before the answer": (request() + masked(TEXT, b"{}"), 400),
}


@pytest.mark.parametrize(("data", "status"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_handshakes(data: bytes, status: int) -> None:
    async def main() -> None:
        async with serving() as (server, recorder), raw_user(server.port) as raw:
            raw.write(data)
            assert (await raw.head()).startswith(f"HTTP/1.1 {status} ")
            await raw.end()
            assert recorder.events == []

    asyncio.run(main())


@pytest.mark.parametrize("headers", [(), ("Origin: https://example.org",)])
@pytest.mark.parametrize("path", ["/connect", "/connect?a=b"])
def test_accepted_handshakes(path: str, headers: tuple[str, ...]) -> None:
    async def main() -> None:
        async with serving() as (server, recorder), raw_user(server.port) as raw:
            offered = "graphql-ws, dynamoth.v1.msgpack, dynamoth.v1.json"
            compression = "Sec-WebSocket-Extensions: permessage-deflate; client_max_window_bits"
            raw.write(request(path, offered, compression, *headers))
            head = await raw.head()
            assert "101 Switching Protocols" in head
            assert "Sec-WebSocket-Protocol: dynamoth.v1.msgpack\r\n" in head
            assert "Extensions" not in head, "compression is never negotiated"
            await recorder.until("opened")

    asyncio.run(main())


def test_bytes_that_are_no_request_end_the_connection(run: Run) -> None:
    async def main() -> None:
        async with serving() as (server, recorder):
            for data in (b"\x16\x03\x01\x02\x00" + b"\r\n" * 10, b"hello\r\n", b"x" * (REQUEST_BYTES_MAX + 1)):
                async with raw_user(server.port) as raw:
                    raw.write(data)
                    await raw.end()
            assert recorder.events == []

    run(main())


def test_a_slow_handshake_is_cut_off(run: Run) -> None:
    async def main() -> None:
        async with serving(SHORT) as (server, recorder), raw_user(server.port) as silent, raw_user(server.port) as slow:
            slow.write(request()[:-2])
            await asyncio.gather(silent.end(), slow.end())
            assert recorder.events == [] and not server.connections
            async with user(server.port) as raw:
                loop = asyncio.get_running_loop()
                await recorder.until("opened")
                timed_out = loop.create_future()
                loop.call_later(2 * SHORT.handshake_timeout_s, timed_out.set_result, None)
                await timed_out
                raw.send(TEXT, b"{}")
                await recorder.until("received")  # who has finished has no such bound

    run(main())


def test_a_listener_that_raises_ends_only_that_connection(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with serving() as (server, recorder), user(server.port) as raw, user(server.port) as other:

            def fail(conn: UserConnection, frame: Frame) -> None:
                if frame.get("bad"):
                    raise RuntimeError("a bug")

            recorder.on_received = fail
            raw.send(TEXT, b'{"bad":1}')
            await raw.end()
            await recorder.until("closed")
            other.send(TEXT, b"{}")
            await recorder.until("received", 2)

    with caplog.at_level(logging.ERROR, "dynamoth.broker"):
        run(main())
    assert "a bug" in caplog.text


# The end.


def test_the_user_closes(run: Run) -> None:
    async def main() -> None:
        async with serving() as (server, recorder), user(server.port) as raw:
            raw.write(masked(TEXT, b"{}") + masked(CLOSE, (1000).to_bytes(2, "big") + b"done") + masked(TEXT, b"{}"))
            assert await raw.close_frame() == (1000, "done")
            await raw.end()
            await recorder.until("closed")
            assert recorder.kinds == ["opened", "received", "closed"]

    run(main())


def test_the_broker_closes_after_what_is_queued(run: Run) -> None:
    async def main() -> None:
        async with serving() as (server, recorder), user(server.port) as raw:
            await recorder.until("opened")
            (conn,) = recorder.connections
            conn.send(prepare({"type": "error"}))
            conn.close(1013, "ü" * 100)
            conn.close(1001, "too late")
            conn.send(prepare({"type": "too late"}))
            assert recorder.kinds == ["opened"], "`closed` does not come from inside of `close`"
            assert await raw.frame() == (TEXT, b'{"type":"error"}')
            code, reason = await raw.close_frame()
            assert (code, reason) == (1013, "ü" * (REASON_BYTES_MAX // 2))
            raw.write(masked(TEXT, b"{}") + masked(CLOSE, (1013).to_bytes(2, "big")))
            assert await raw.reader.read() == b""
            await recorder.until("closed")
            assert recorder.kinds == ["opened", "closed"]
            assert conn.peer == "" and conn.unsent_bytes == 0
            conn.close(1000)
            conn.abort()
            conn.send(prepare({}))

    run(main())


def test_a_peer_that_does_not_answer_the_close_is_aborted(run: Run) -> None:
    async def main() -> None:
        async with serving(SHORT) as (server, recorder), user(server.port) as raw:
            await recorder.until("opened")
            recorder.connections[0].close(1001)
            assert (await raw.close_frame())[0] == 1001
            await recorder.until("closed")

    run(main())


def test_a_peer_that_does_not_read_the_close_is_aborted(run: Run) -> None:
    async def main() -> None:
        async with serving(SHORT) as (server, recorder), user(server.port):
            await recorder.until("opened")
            (conn,) = recorder.connections
            await fill(recorder, conn)
            conn.close(4003)
            await recorder.until("closed")

    run(main())


def test_a_peer_that_has_finished_sending_and_does_not_read_is_aborted(run: Run) -> None:
    async def main() -> None:
        async with serving(SHORT) as (server, recorder), user(server.port) as raw:
            await recorder.until("opened")
            await fill(recorder, recorder.connections[0])
            raw.writer.write_eof()
            await recorder.until("closed")

    run(main())


def test_a_peer_that_has_finished_sending_is_gone(run: Run) -> None:
    async def main() -> None:
        async with serving() as (server, recorder), user(server.port) as raw:
            raw.write(masked(TEXT, b"{}")[:5])
            raw.writer.write_eof()
            await recorder.until("closed")
            assert recorder.kinds == ["opened", "closed"]

    run(main())


def test_a_reset(run: Run) -> None:
    async def main() -> None:
        async with serving() as (server, recorder), user(server.port) as raw:
            await recorder.until("opened")
            raw.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            raw.writer.transport.abort()
            await recorder.until("closed")

    run(main())


def test_abort_drops_what_is_queued(run: Run) -> None:
    async def main() -> None:
        async with serving() as (server, recorder), user(server.port) as raw:
            await recorder.until("opened")
            (conn,) = recorder.connections
            conn.send(prepare({}))
            conn.abort()
            conn.abort()
            assert recorder.kinds == ["opened"]
            await recorder.until("closed")
            assert await raw.reader.read() == b""

    run(main())


# Slow readers.


SLOW = replace(SHORT, unsent_bytes_max=256 * 1024, close_timeout_s=PATIENCE_S)


async def fill(recorder: Recorder, conn: UserConnection) -> int:
    """Send to a user who does not read until that is noticed, and return how many frames that took."""
    frame, sent = prepare({"d": "x" * 16_000}), 0
    async with asyncio.timeout(PATIENCE_S):
        while "overflowed" not in recorder.kinds:
            conn.send(frame)
            sent += 1
            await asyncio.sleep(0)
    return sent


def test_a_reader_that_never_reads_is_reported_once_until_it_reads(run: Run) -> None:
    async def main() -> None:
        async with serving(SLOW) as (server, recorder), user(server.port) as slow, user(server.port) as other:
            await recorder.until("opened", 2)
            conn, fine = recorder.connections
            sent = await fill(recorder, conn)
            assert SLOW.unsent_bytes_max < conn.unsent_bytes <= SLOW.unsent_bytes_max + 3 * 16_100
            for _ in range(3):
                conn.send(prepare({}))
                await asyncio.sleep(0)
            fine.send(prepare({}))
            assert await other.frame() == (TEXT, b"{}")
            assert recorder.kinds == ["opened", "opened", "overflowed"]
            for _ in range(sent):
                await slow.frame()
            await recorder.until("writable")
            assert conn.unsent_bytes <= SLOW.unsent_bytes_max // 4
            for _ in range(3):
                assert await slow.frame() == (TEXT, b"{}")
            await fill_again(recorder, conn)
            assert recorder.kinds == ["opened", "opened", "overflowed", "writable", "overflowed"]

    run(main())


async def fill_again(recorder: Recorder, conn: UserConnection) -> None:
    recorder.events[2] = ("was overflowed", None)
    await fill(recorder, conn)
    recorder.events[2] = ("overflowed", None)


def test_a_connection_that_is_sent_far_too_much_is_aborted(run: Run) -> None:
    async def main() -> None:
        async with serving(SLOW) as (server, recorder), user(server.port):
            await recorder.until("opened")
            (conn,) = recorder.connections
            frame, highest = prepare({"d": "x" * 16_000}), 0
            async with asyncio.timeout(PATIENCE_S):
                while "closed" not in recorder.kinds:
                    conn.send(frame)
                    highest = max(highest, conn.unsent_bytes)
                    await asyncio.sleep(0)
            assert recorder.kinds == ["opened", "overflowed", "closed"]
            assert highest <= HARD_BOUND_RATIO * SLOW.unsent_bytes_max + 3 * 16_100

    run(main())


def test_who_does_not_read_gets_no_pongs(run: Run) -> None:
    async def main() -> None:
        async with serving(SLOW) as (server, recorder), user(server.port) as raw:
            await recorder.until("opened")
            (conn,) = recorder.connections
            await fill(recorder, conn)
            before = conn.unsent_bytes
            raw.write(masked(PING, b"x" * 125) * 10 + masked(TEXT, b"{}"))
            await recorder.until("received")
            assert conn.unsent_bytes == before

    run(main())


# Accepting.


def test_accepts_per_second_are_bounded(run: Run) -> None:
    async def main() -> None:
        async with serving(replace(OPTIONS, accepts_per_s=50.0)) as (server, recorder):
            loop = asyncio.get_running_loop()
            begin = loop.time()

            async def come() -> None:
                async with user(server.port):
                    pass

            await asyncio.gather(*(come() for _ in range(30)))
            assert recorder.kinds.count("opened") == 30
            assert loop.time() - begin >= 0.4  # a burst of 5, then 25 at 50 per second

    run(main())


def test_accepted_sockets_find_out_about_dead_peers(run: Run) -> None:
    async def main() -> None:
        async with serving() as (server, recorder), user(server.port):
            await recorder.until("opened")
            (conn,) = server.connections
            accepted = conn.get_extra_info("socket")
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            wanted = {
                socket.TCP_KEEPIDLE: KEEPALIVE_S,
                socket.TCP_USER_TIMEOUT: USER_TIMEOUT_S * 1000,
                socket.TCP_NOTSENT_LOWAT: UNSENT_KERNEL_BYTES,
                socket.TCP_NODELAY: 1,
            }
            assert {each: accepted.getsockopt(socket.IPPROTO_TCP, each) for each in wanted} == wanted

    run(main())


def test_without_file_descriptors_users_wait(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(accept, "OUT_OF_FILES_PAUSE_S", 0.05)
    accept_one, failures = socket.socket.accept, iter([errno.EMFILE, errno.ENFILE])

    def scarce(listening: socket.socket) -> tuple[socket.socket, Any]:
        code = next(failures, None)
        if code is not None:
            raise OSError(code, "none left")
        return accept_one(listening)

    async def main() -> None:
        async with serving() as (server, recorder):
            monkeypatch.setattr(socket.socket, "accept", scarce)
            async with user(server.port):
                await recorder.until("opened")

    with caplog.at_level(logging.ERROR, "dynamoth.broker"):
        run(main())
    assert caplog.text.count("none left") == 2


def test_a_taken_port_is_an_error_of_the_configuration() -> None:
    async def main() -> None:
        async with serving() as (server, _):
            with pytest.raises(ConfigError, match="choose another"):
                WebSocketServer.start(Recorder(), "127.0.0.1", server.port, TransportOptions())

    asyncio.run(main())


def test_closing_the_server_ends_everything(run: Run) -> None:
    async def main() -> None:
        async with serving() as (server, recorder), user(server.port) as raw, raw_user(server.port) as silent:
            await recorder.until("opened")
            await until(lambda: len(server.connections) == 2)
            async with asyncio.timeout(PATIENCE_S):
                await server.close()
            await asyncio.gather(raw.end(), silent.end())
            assert recorder.kinds == ["opened", "closed"]
            assert not server.connections

    run(main())
