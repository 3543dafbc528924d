"""A connection's bound on unwritten bytes, on a transport that takes nothing."""

from __future__ import annotations

import asyncio
from typing import Any

from dynamoth_link.connection import Connection
from dynamoth_link.options import LinkOptions
from dynamoth_link.urls import ServerAddress


class _Stuck(asyncio.Transport):
    """Takes nothing of what is written, until ``waiting`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = 0
        self.aborted = False

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        self.waiting += len(data)

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def abort(self) -> None:
        self.aborted = True


async def test_what_one_command_brings_is_never_too_much() -> None:
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


async def test_one_that_is_made_after_it_was_given_up_is_cut() -> None:
    connection = Connection(ServerAddress(), LinkOptions(), lambda _: None)
    connection.abort()
    transport = _Stuck()
    connection.connection_made(transport)
    assert transport.aborted and not connection.is_open
    connection.connection_lost(None)
    assert not connection.lost.done()
