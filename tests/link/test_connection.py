"""What a connection hands on: pushes and replies in the order of the server, however they come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

import hiredis
from hypothesis import given
from hypothesis import strategies as st

from dynamoth_link.connection import Connection
from dynamoth_link.options import LinkOptions
from dynamoth_link.urls import ServerAddress


class _Sink(asyncio.Transport):
    """Takes what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        self.written += bytes(data)

    def get_write_buffer_size(self) -> int:
        return 0

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


parts = st.sampled_from([b"", b"c", b"PUBLISH", b"x" * 1023, b"x" * 1024])


@given(st.lists(st.tuples(parts, parts, parts), min_size=1, max_size=6))
def test_commands_are_packed_as_hiredis_packs_them(sent: list[tuple[bytes, bytes, bytes]]) -> None:
    async def main() -> None:
        sink = _Sink()
        connection = Connection(ServerAddress("127.0.0.1", 6379), LinkOptions(), lambda _: None)
        connection.connection_made(sink)
        connection.send_all(sent, lambda _: None)
        pack = cast("Callable[[tuple[bytes, ...]], bytes]", hiredis.pack_command)
        assert sink.written == b"".join(map(pack, sent))

    asyncio.run(main())
