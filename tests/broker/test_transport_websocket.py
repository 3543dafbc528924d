from __future__ import annotations

import asyncio
import json
import logging
import socket
from dataclasses import replace

import msgpack
import pytest

from dynamoth_broker.process import websocket
from dynamoth_broker.process.frames import Frame
from dynamoth_broker.process.transport import (
    UserConnection,
    broadcast,
    prepare,
)
from dynamoth_broker.process.websocket_connection import (
    FRAGMENTS_MAX,
    LINGERING_BYTES_MAX,
    REASON_BYTES_MAX,
    WebSocketConnection,
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
    Run,
    masked,
    raw_user,
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


def test_a_write_that_fails_ends_only_that_connection(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write = WebSocketConnection.write

    async def main() -> None:
        async with serving() as (server, recorder), user(server.port) as first, user(server.port) as second:
            await recorder.until("opened", 2)

            def fail(self: WebSocketConnection, data: bytes) -> None:
                if self is recorder.connections[0]:
                    raise RuntimeError("the handle is closed")
                write(self, data)

            monkeypatch.setattr(WebSocketConnection, "write", fail)
            broadcast(recorder.connections, prepare({}))
            frames = await asyncio.gather(first.frame(), second.frame(), return_exceptions=True)
            assert (TEXT, b"{}") in frames
            await recorder.until("closed")

    with caplog.at_level(logging.ERROR, "dynamoth.broker"):
        run(main())
    assert "the handle is closed" in caplog.text


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


def parses(conn: WebSocketConnection) -> bool:
    return conn.parses


@pytest.mark.parametrize("length", [0, 30, 126, 65536 - 10])
def test_a_connection_has_a_parser_only_within_a_message(length: int) -> None:
    async def main() -> None:
        async with serving() as (server, recorder), user(server.port) as slow:
            await recorder.until("opened")
            async with user(server.port) as other:
                await recorder.until("opened", 2)
                first, second = (each for each in recorder.connections if isinstance(each, WebSocketConnection))
                message = masked(TEXT, b'{"a":1}' + b" " * length)
                header = len(message) - length - 7
                # Wherever a message is cut, its parser is nobody else's until the rest comes.
                for count, cut in enumerate([*range(1, header + 3), len(message) - 1], 1):
                    assert not parses(first)
                    slow.write(message[:cut])
                    await until(lambda: parses(first))
                    other.write(masked(TEXT, b'{"b":2}'))
                    await recorder.until("received", 2 * count - 1)
                    assert parses(first) and not parses(second)
                    slow.write(message[cut:])
                    await recorder.until("received", 2 * count)
                    assert recorder.received_frames[-2:] == [{"b": 2}, {"a": 1}]
                slow.send(TEXT, b'{"a":', fin=False)
                await until(lambda: parses(first))
                slow.send(CONTINUATION, b"1}")
                await until(lambda: not parses(first))

    asyncio.run(main())


def test_lengths_in_more_bytes_than_they_need_harm_nobody() -> None:
    async def main() -> None:
        async with serving() as (server, recorder), user(server.port) as odd, user(server.port) as other:
            for count in range(1, 4):
                odd.write(b"\x81\xfe\0\x02" + bytes(4) + b"{}" + b"\x81\xff" + bytes(7) + b"\x02" + bytes(4) + b"{}")
                other.send(TEXT, b"{}")
                await recorder.until("received", 3 * count)

    asyncio.run(main())


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
