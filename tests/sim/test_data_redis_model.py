"""The scripts of catalog and executions, and what a data cluster reads: real Redis and its model reply alike."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from dynamoth.data.catalog import QUERIES_KEY, Entry, put_command
from dynamoth.data.progress import (
    Progress,
    Window,
    WindowEnd,
    begin_progress_command,
    progress_key,
    store_progress_command,
)
from dynamoth.data.records import partition_keys, range_command
from dynamoth.data.registrations import register_command, registration_keys
from dynamoth.data.terms import TERM_KEY, claim_command, trim_command
from dynamoth.machine.events import CommandPart, ErrorReply
from dynamoth_cli.local.embedded import EmbeddedRedis
from dynamoth_link.query import query
from dynamoth_sim.world.redis import RedisServer
from dynamoth_sim.world.world import World

Command = tuple[CommandPart, ...]

END: WindowEnd = {"tick_ms": 5, "offsets": {"reports/0": 7}}
PROGRESS = Progress(3, Window(END, END), is_done=False)
CHANGES = registration_keys("near")[2]
STREAM = partition_keys("reports/0")[1]


def put(version: int, **definition: Any) -> Command:
    return put_command(QUERIES_KEY, "near", Entry(version, definition or None))


STORIES: dict[str, list[Command]] = {
    "a term only grows": [
        claim_command(5, "a"),
        claim_command(3, "a"),
        (b"INCR", TERM_KEY),
        claim_command(5, "a"),
        claim_command(6, "a"),
        (b"GET", TERM_KEY),
    ],
    "a term belongs to one": [
        claim_command(5, "a"),
        claim_command(5, "b"),
        claim_command(5, "a"),
        claim_command(6, "b"),
        claim_command(5, "a"),
    ],
    "progress is stored by the newest data cluster": [
        store_progress_command("near", PROGRESS, 1),
        claim_command(2, "a"),
        store_progress_command("near", PROGRESS, 1),
        store_progress_command("near", PROGRESS, 2),
        (b"GET", progress_key("near")),
    ],
    "progress follows what was stored before": [
        store_progress_command("near", PROGRESS, 1, follows=True),
        *(
            store_progress_command("near", replace(PROGRESS, execution=execution, is_done=is_done), 1, follows=follows)
            for execution, is_done, follows in [
                (3, False, True),
                (3, True, True),
                (4, False, True),
                (5, False, True),
                (4, True, True),
                (4, True, True),
                (6, False, True),
                (5, True, True),
                (5, False, True),
                (4, True, True),
                (9, True, False),
                (11, True, True),
            ]
        ),
        (b"GET", progress_key("near")),
    ],
    "a stream is trimmed by the newest data cluster": [
        *((b"XADD", STREAM, b"%d-0" % offset, b"t", b"1", b"d", b"{}") for offset in (3, 4, 5)),
        trim_command("reports/0", 3, 1),
        claim_command(2, "a"),
        trim_command("reports/0", 4, 1),
        trim_command("reports/0", 4, 2),
        range_command("reports/0", 0, 9, 9),
    ],
    "a query begins once": [
        begin_progress_command("near", END),
        begin_progress_command("near", {**END, "tick_ms": 6}),
        (b"GET", progress_key("near")),
    ],
    "a definition is replaced by a later one": [put(2, a=1), put(1, a=2), put(2), put(3), (b"HGETALL", QUERIES_KEY)],
    "a definition replaces what is none": [
        (b"HSET", QUERIES_KEY, b"near", b"{}", b"far", b"7{}"),
        put(1, a=1),
        put_command(QUERIES_KEY, "far", Entry(7, None)),
        (b"HGETALL", QUERIES_KEY),
    ],
    "without changes there is no last one": [(b"XREVRANGE", CHANGES, b"+", b"-", b"COUNT", b"1"), (b"XLEN", CHANGES)],
}


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as running:
        yield running


def on_model(commands: Sequence[Command]) -> list[Any]:
    world = World(1)
    world.now = 1000.0
    model = RedisServer(world, "log", "redis://log")
    words = [[word if isinstance(word, bytes) else str(word).encode() for word in command] for command in commands]
    return [_plain(model.execute("test", *each)) for each in words]


def on_redis(server: EmbeddedRedis, commands: Sequence[Command]) -> list[Any]:
    replies = asyncio.run(query(f"redis://127.0.0.1:{server.port}", (b"FLUSHALL",), *commands))
    return [_plain(reply) for reply in replies[1:]]


def _plain(reply: Any) -> Any:
    if isinstance(reply, dict):
        return [part for pair in reply.items() for part in pair]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(reply, ErrorReply):
        return str(reply).removeprefix("ERR ")
    return reply.encode() if isinstance(reply, str) else reply


@pytest.mark.parametrize("story", STORIES)
def test_redis_and_its_model_reply_alike(story: str, server: EmbeddedRedis) -> None:
    replies = on_redis(server, STORIES[story])
    assert replies == on_model(STORIES[story])


def test_changes_are_read_from_both_ends_and_behind_an_id(server: EmbeddedRedis) -> None:
    """Their ids are times, so each of the two is asked for those that it gave."""
    registered = [register_command("near", [(name * 22, "{}", 60)]) for name in "abc"]
    every: Command = (b"XRANGE", CHANGES, b"-", b"+", b"COUNT", b"9")

    def names(execute: Any) -> list[list[bytes]]:
        first, second, third = execute(*registered, every)[-1]
        last, behind = execute(
            (b"XREVRANGE", CHANGES, b"+", b"-", b"COUNT", b"1"),
            (b"XRANGE", CHANGES, b"(" + first[0], b"+", b"COUNT", b"9"),
        )
        assert last == [third] and behind == [second, third]
        return [each[1] for each in (first, second, third)]

    world = World(1)
    model = RedisServer(world, "log", "redis://log")
    address = f"redis://127.0.0.1:{server.port}"
    asyncio.run(query(address, (b"FLUSHALL",)))

    def by_model(*commands: Command) -> list[Any]:
        return [model.execute("test", *map(_word, each)) for each in commands]

    def by_redis(*commands: Command) -> list[Any]:
        return asyncio.run(query(address, *commands))

    of_redis = names(by_redis)
    assert [row[:2] for row in of_redis] == [row[:2] for row in names(by_model)]


def _word(part: CommandPart) -> bytes:
    return part if isinstance(part, bytes) else str(part).encode()
