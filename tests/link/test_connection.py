"""A connection's bound on unwritten bytes, and its liveness, on a transport that takes what the test says."""

from __future__ import annotations

import asyncio
from typing import Any

from dynamoth_link.connection import Connection
from dynamoth_link.liveness import LOOKS_PER_TIMEOUT
from dynamoth_link.options import LinkOptions
from dynamoth_link.urls import ServerAddress


class _Sink(asyncio.Transport):
    """Takes what is written; ``waiting`` bytes are said not to have been taken."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.waiting: int = 0

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        self.written += bytes(data)

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def abort(self) -> None:
        pass


class _Stuck(_Sink):
    """Takes nothing."""

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        super().write(data)
        self.waiting += len(data)


def test_what_one_command_brings_is_never_too_much() -> None:
    async def main() -> None:
        options = LinkOptions(write_buffer_bytes_max=1000)
        connection = Connection(ServerAddress("127.0.0.1", 6379), options, lambda _: None)
        sink = _Stuck()
        connection.connection_made(sink)
        for _ in range(2):
            for size in (900, 5000, 400, 400):
                connection.send((b"PUBLISH", b"c", b"x" * size))
                await asyncio.sleep(0)
            assert connection.is_open
            sink.waiting = 0  # it was slow
            connection.send((b"PUBLISH", b"c", b""))
            await asyncio.sleep(0)
        sink.waiting = 1001
        connection.send((b"PUBLISH", b"c", b""))
        await asyncio.sleep(0)
        assert "more than 1000 bytes wait" in str(connection.lost.result()), "what was allowed once is over"
        connection = Connection(ServerAddress("127.0.0.1", 6379), options, lambda _: None)
        connection.connection_made(_Stuck())
        for size in (5000, 900, 900):
            assert connection.is_open
            connection.send((b"PUBLISH", b"c", b"x" * size))
            await asyncio.sleep(0)
        assert "more than 1000 bytes wait" in str(connection.lost.result())

    asyncio.run(main())


PING_BYTES = len(b"*1\r\n$4\r\nPING\r\n")


def test_a_server_that_takes_what_is_written_is_not_silent() -> None:
    class Slow(_Stuck):
        def get_write_buffer_size(self) -> int:
            """Take one byte each time that somebody looks, until the PING has begun."""
            if self.waiting > PING_BYTES:
                self.waiting -= 1
            return self.waiting

    async def main() -> None:
        loop = asyncio.get_running_loop()
        options = LinkOptions(ping_interval_s=0.001, ping_timeout_s=0.008)
        connection = Connection(ServerAddress("127.0.0.1", 6379), options, lambda _: None)
        sink = Slow()
        connection.connection_made(sink)
        connection.send((b"PUBLISH", b"c", b"x" * 100))
        connection.watch()
        began_at = loop.time()
        reason = await asyncio.wait_for(connection.lost, 20)
        assert "silent" in str(reason) or "PING" in str(reason)
        assert loop.time() - began_at > 100 * 0.008 / LOOKS_PER_TIMEOUT
        assert sink.waiting == PING_BYTES
        assert sink.written.count(b"PING") == 1

    asyncio.run(main())
