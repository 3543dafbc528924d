"""What a connection hands on: pushes and replies in the order of the server, however they come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

import hiredis
from hypothesis import given
from hypothesis import strategies as st

from dynamoth_link.connection import LARGE_BYTES, Connection
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


def _push(kind: bytes, number: int) -> bytes:
    return b">3\r\n$%d\r\n%b\r\n$1\r\nc\r\n:%d\r\n" % (len(kind), kind, number)


commands = st.lists(
    st.tuples(st.sampled_from(["one", "together", "subscribe"]), st.integers(1, 4)),
    max_size=10,
)


@given(commands, st.lists(st.integers(0, 40), max_size=10), st.lists(st.integers(1, 60), max_size=30))
def test_everything_is_handed_on_once_and_in_order(
    sent: Sequence[tuple[str, int]], messages: list[int], pieces: list[int]
) -> None:
    """The server answers as it would, with messages in between; its bytes come in pieces of any size."""
    told: list[tuple[str, Any]] = []

    async def main() -> None:
        connection = Connection(
            ServerAddress("127.0.0.1", 6379),
            LinkOptions(),
            lambda pushes: told.extend(("push", push[2]) for push in pushes),
        )
        connection.connection_made(_Sink())
        kinds: list[bytes] = []
        for command, count in sent:
            if command == "one":
                connection.send((b"GET", b"k"), lambda value: told.append(("reply", value)))
                kinds.append(b"reply")
            elif command == "together":
                connection.send_all(
                    [(b"GET", b"k")] * count, lambda values: told.extend(("reply", value) for value in values)
                )
                kinds += [b"reply"] * count
            else:
                connection.send((b"SUBSCRIBE", *[b"c"] * count))
                kinds += [b"subscribe"] * count
        for place in messages:
            kinds.insert(place, b"message")
        answers = b"".join(b":%d\r\n" % n if kind == b"reply" else _push(kind, n) for n, kind in enumerate(kinds))
        for size in pieces:
            piece, answers = answers[:size], answers[size:]
            connection.data_received(piece)
        connection.data_received(answers)
        expected = [("reply" if kind == b"reply" else "push", number) for number, kind in enumerate(kinds)]
        assert told == expected
        assert not connection.lost.done()
        connection.data_received(b":1\r\n")
        assert "nobody asked for" in str(connection.lost.result())
        assert told == expected

    asyncio.run(main())


def test_what_came_before_a_fault_is_handed_on() -> None:
    told: list[Any] = []

    async def main() -> None:
        connection = Connection(ServerAddress("127.0.0.1", 6379), LinkOptions(), told.extend)
        connection.connection_made(_Sink())
        connection.data_received(_push(b"message", 1) + _push(b"message", 2) + b"?nonsense\r\n" + _push(b"message", 3))
        assert [push[2] for push in told] == [1, 2]
        assert "is a Redis server" in str(connection.lost.result())

    asyncio.run(main())


parts = st.sampled_from([b"", b"c", b"PUBLISH", b"x" * 1023, b"x" * 1024, b"x" * (LARGE_BYTES + 1)])


@given(st.lists(st.tuples(parts, parts, parts), min_size=1, max_size=6))
def test_commands_are_packed_as_hiredis_packs_them(sent: list[tuple[bytes, bytes, bytes]]) -> None:
    async def main() -> None:
        sink = _Sink()
        connection = Connection(ServerAddress("127.0.0.1", 6379), LinkOptions(), lambda _: None)
        connection.connection_made(sink)
        connection.send_all(sent, lambda _: None)
        for command in sent:
            connection.send(command)
        await asyncio.sleep(0)
        pack = cast("Callable[[tuple[bytes, ...]], bytes]", hiredis.pack_command)
        assert sink.written == b"".join(map(pack, [*sent, *sent]))

    asyncio.run(main())


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
