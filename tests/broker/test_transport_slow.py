from __future__ import annotations

import asyncio
import socket
from dataclasses import replace

from dynamoth_broker.process.transport import HARD_BOUND_RATIO, UserConnection, prepare
from dynamoth_broker.process.websocket import READ_BYTES
from tests.broker.transport_users import (
    PATIENCE_S,
    PING,
    SHORT,
    TEXT,
    Recorder,
    Run,
    masked,
    request,
    run,
    serving,
    user,
)

__all__ = ["run"]


HUGE = 100 * 1024 * 1024

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
