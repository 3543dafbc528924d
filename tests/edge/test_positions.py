"""The scripts of stored positions, on real Redis and in the simulator's model: the same commands, the same replies."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from dynamoth.edge.log import LogOptions, append_command, log_keys, read_command
from dynamoth.edge.positions import (
    POSITIONS_PER_COMMAND_MAX,
    find_command,
    parse_found,
    position_key,
    store_command,
)
from dynamoth.edge.publications import Position
from dynamoth.errors import MalformedMessage
from dynamoth.machine.events import CommandPart, ErrorReply
from dynamoth_cli.local.embedded import EmbeddedRedis
from dynamoth_link.query import query
from dynamoth_sim.world.redis import RedisServer
from dynamoth_sim.world.world import World

OPTIONS, DURABLE = LogOptions(), LogOptions(durable=True)
TTL_S = 60.0
LOG, OTHER_LOG = "a" * 22, "b" * 22
EPOCH, OTHER_EPOCH = 0x1234, 0xABCD
KEY, OTHER_KEY = position_key(LOG, "ann", "phone"), position_key(OTHER_LOG, "ann", "phone")
GET, GET_OTHER = (b"GET", KEY), (b"GET", OTHER_KEY)
OF_TEST = (b"DEL", *log_keys(LOG), *log_keys(OTHER_LOG), KEY, OTHER_KEY)


def append(times: int, log: str = LOG, run: str = "run1", epoch: int = EPOCH) -> list[tuple[CommandPart, ...]]:
    return [append_command(log, b"m", run, epoch, OPTIONS)] * times


def find(run: str = "run1", epoch: int = EPOCH, options: LogOptions = OPTIONS) -> tuple[CommandPart, ...]:
    return find_command(LOG, KEY, run, epoch, options, TTL_S)


def store(*offsets: int, run: str = "run1", epoch: int = EPOCH, options: LogOptions = OPTIONS) -> list[tuple[Any, ...]]:
    return [store_command([(LOG, KEY, Position(epoch, offset))], run, options, TTL_S) for offset in offsets]


BOTH = [(LOG, KEY, Position(EPOCH, 2)), (OTHER_LOG, OTHER_KEY, Position(OTHER_EPOCH, 1))]

STORIES: dict[str, list[tuple[CommandPart, ...]]] = {
    "the first look stores the end of the log": [*append(2), find(), GET, *append(1), find(), GET],
    "of an empty log, too": [find(), GET],
    "a position moves forward only": [*append(5), *store(3), GET, *store(2, 3, 1), GET, *store(5), GET, find()],
    "no position is ahead of the log": [*append(2), *store(3), GET, *append(1), GET, *store(3), GET],
    "a first position cannot be ahead of a log that is none": [*store(0, 1), GET],
    "one of another life is ignored": [*append(2), *store(2, epoch=OTHER_EPOCH), GET],
    "one of the present life replaces one of a former one": [
        *append(5),
        *store(5),
        *append(2, run="run2", epoch=OTHER_EPOCH),
        find(run="run2"),
        *store(5, run="run2"),
        GET,
        *store(1, run="run2", epoch=OTHER_EPOCH),
        GET,
    ],
    "nothing is stored for a log whose server has restarted": [*append(2), *store(2, run="run2"), GET],
    "but where the server loses nothing": [*append(2), *store(2, run="run2", options=DURABLE), GET],
    "looking begins a lost log": [*append(3), *store(2), find(run="run2", epoch=OTHER_EPOCH), read_command(
        LOG, "run2", 7, OPTIONS, 0, 5
    )],
    "one command stores many": [
        *append(2),
        *append(1, OTHER_LOG, epoch=OTHER_EPOCH),
        store_command(BOTH, "run1", OPTIONS, TTL_S),
        GET,
        GET_OTHER,
        store_command([], "run1", OPTIONS, TTL_S),
    ],
}  # fmt: skip


def model(commands: Sequence[tuple[CommandPart, ...]], server: RedisServer | None = None) -> list[Any]:
    server = server or RedisServer(World(1), "log", "redis://log")
    words = [[word if isinstance(word, bytes) else str(word).encode() for word in command] for command in commands]
    return [server.execute("test", *each) for each in words]


@pytest.fixture(scope="module")
def server() -> Any:
    with EmbeddedRedis() as running:
        yield running


@pytest.mark.parametrize("story", STORIES)
def test_redis_and_its_model_reply_alike(story: str, server: EmbeddedRedis) -> None:
    commands = STORIES[story]
    replies = asyncio.run(query(f"redis://127.0.0.1:{server.port}", OF_TEST, *commands))[1:]
    assert replies == model(commands)


def test_what_the_replies_mean() -> None:
    found, _, _, stored, again = model([find(), *append(2), *store(2), find()])
    assert parse_found(found) == (Position(EPOCH, 0), True)
    assert stored == 1
    assert parse_found(again) == (Position(EPOCH, 2), False)


def test_positions_expire_and_every_use_lets_them_last(server: EmbeddedRedis) -> None:
    age, ttl = (b"PEXPIRE", KEY, b"1000"), (b"PTTL", KEY)
    commands = [*append(2), find(), ttl, age, find(), ttl, age, *store(0), ttl, age, *store(2), ttl]
    replies = asyncio.run(query(f"redis://127.0.0.1:{server.port}", OF_TEST, *commands))
    left_ms = [reply for reply in replies if isinstance(reply, int) and reply > 1000]
    assert len(left_ms) == 4
    assert all(TTL_S * 1000 - 10_000 < each <= TTL_S * 1000 for each in left_ms)


def test_a_server_without_memory_stores_no_new_position(server: EmbeddedRedis) -> None:
    limit, more = (b"CONFIG", b"SET", b"maxmemory", b"1"), (b"CONFIG", b"SET", b"maxmemory", b"0")
    commands = [*append(2), limit, find(), GET, more, find()]
    *_, refusal, stored, _, found = asyncio.run(query(f"redis://127.0.0.1:{server.port}", OF_TEST, *commands))
    assert isinstance(refusal, ErrorReply) and "OOM" in str(refusal)
    assert stored is None and parse_found(found) == (Position(EPOCH, 2), True)


def test_a_full_command_is_quick_for_redis(server: EmbeddedRedis) -> None:
    positions = [
        (f"{number:022d}", position_key(f"{number:022d}", "ann", "phone"), Position(EPOCH, 1))
        for number in range(POSITIONS_PER_COMMAND_MAX)
    ]
    commands = [append_command(log, b"m", "run1", EPOCH, OPTIONS) for log, _, _ in positions]
    replies = asyncio.run(
        query(f"redis://127.0.0.1:{server.port}", *commands, store_command(positions, "run1", OPTIONS, TTL_S))
    )
    assert replies[-1] == POSITIONS_PER_COMMAND_MAX


def test_a_position_belongs_to_one_user_and_session() -> None:
    keys = {position_key(*each) for each in ((LOG, "ann", "p"), (LOG, "bob", "p"), (LOG, "ann", "q"), (LOG, "", "p"))}
    keys |= {position_key(OTHER_LOG, "ann", "p"), position_key(LOG, "ann\n", "p"), position_key(LOG, "\ud800", "p")}
    assert len(keys) == 7


@pytest.mark.parametrize("reply", [None, b"OK", [], [b"x", 1], [b"0" * 16, 1], [b"0" * 16 + b" -1", 0], [None, 0]])
def test_a_reply_of_something_else_is_malformed(reply: Any) -> None:
    with pytest.raises(MalformedMessage):
        parse_found(reply)
