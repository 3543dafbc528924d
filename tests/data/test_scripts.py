"""The scripts of records and registrations: real Redis and its model in the simulator reply alike, but for times."""

# pyright: reportUnknownVariableType=false

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from dynamoth.data.datasets import Dataset, Field
from dynamoth.data.records import (
    OFFSET_BITS,
    RUNS_BYTES_MAX,
    append_records_command,
    is_full,
    parse_appended_records,
    parse_records,
    parse_state,
    partition_keys,
    partition_name,
    range_command,
    state_command,
)
from dynamoth.data.registrations import (
    expire_command,
    parse_changes,
    parse_registration,
    register_command,
    registration_keys,
)
from dynamoth.data.terms import trim_command
from dynamoth.edge.log import LogOptions, append_command, log_keys
from dynamoth.errors import MalformedMessage
from dynamoth.machine.events import CommandPart, ErrorReply
from dynamoth_cli.local.embedded import EmbeddedRedis
from dynamoth_link.query import query
from dynamoth_sim.world.redis import RedisServer
from dynamoth_sim.world.world import World

PLAIN = Dataset("reports", "append", (Field("n", "int"),))
WITH_ID = replace(PLAIN, id="n", duplicate_s=60.0)
SMALL = replace(PLAIN, waiting_max=3)
NAME = partition_name("reports", 0)
INTEREST, OTHER = "a" * 22, "b" * 22
Command = tuple[CommandPart, ...]

TIP: Command = (b"HMGET", partition_keys(NAME)[0], b"offset", b"restarts")
"""Of the state, what does not depend on the clock."""


def append(dataset: Dataset, *records: tuple[bytes, str], run: str = "run1") -> Command:
    return append_records_command(dataset, 0, records, run)


STORIES: dict[str, list[Command]] = {
    "offsets have no holes": [
        append(PLAIN, (b"a", ""), (b"b", "")),
        append(PLAIN, (b"c", "")),
        TIP,
    ],
    "a record with an id is stored once": [
        append(WITH_ID, (b"a", "1"), (b"b", "2"), (b"a", "1")),
        append(WITH_ID, (b"b", "2"), (b"c", "3")),
        TIP,
    ],
    "without an id, a record may come again": [append(PLAIN, (b"a", "")), append(PLAIN, (b"a", ""))],
    "a restart is counted, and offsets grow": [
        append(PLAIN, (b"a", "")),
        append(PLAIN, (b"b", ""), run="run2"),
        append(PLAIN, (b"c", ""), run="run2"),
        TIP,
    ],
    "runs are remembered, and the first one was preceded by nothing": [
        append(PLAIN, (b"a", "")),
        append(PLAIN, (b"b", ""), run="run2"),
        (b"HGET", partition_keys(NAME)[0], b"run"),
    ],
    "old runs are forgotten": [
        (b"HSET", partition_keys(NAME)[0], b"run", b"run1", b"offset", b"7", b"runs", b"1-2 " * 999 + b"33-44 "),
        append(PLAIN, (b"a", ""), run="run2"),
        (b"HGET", partition_keys(NAME)[0], b"run"),
    ],
    "a run begins with its first record": [
        append(WITH_ID, (b"a", "1")),
        append(WITH_ID, (b"a", "1"), run="run2"),
        append(replace(SMALL, id="n"), (b"b", "2"), (b"c", "3"), (b"d", "4"), run="run2"),
        TIP,
        (b"HGET", partition_keys(NAME)[0], b"run"),
        append(WITH_ID, (b"b", "2"), run="run2"),
        TIP,
    ],
    "a durable server may restart": [append(PLAIN, (b"a", ""), run=""), append(PLAIN, (b"b", ""), run="")],
    "too many records are refused together": [
        append(SMALL, (b"a", ""), (b"b", "")),
        append(SMALL, (b"c", ""), (b"d", "")),
        append(SMALL, (b"c", "")),
    ],
    "interests are registered once": [
        register_command("near", [(INTEREST, "{}", 60), (OTHER, '{"a":1}', 60)]),
        register_command("near", [(INTEREST, "{}", 60)]),
        (b"HLEN", registration_keys("near")[0]),
    ],
    "an interest ends with its log when its time is over": [
        register_command("near", [(INTEREST, "{}", 0), (OTHER, "{}", 60)]),
        append_command(INTEREST, b"x", "run1", 1, LogOptions()),
        expire_command("near", [INTEREST, OTHER]),
        (b"HLEN", registration_keys("near")[0]),
        (b"HGETALL", log_keys(INTEREST)[0]),
        expire_command("near", [INTEREST, OTHER]),
        register_command("near", [(INTEREST, "{}", 60)]),
    ],
    "a renewal never shortens": [
        register_command("near", [(INTEREST, "{}", 60)]),
        register_command("near", [(INTEREST, "{}", 0)]),
        expire_command("near", [INTEREST]),
    ],
}


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as running:
        yield running


def model(commands: Sequence[Command]) -> list[Any]:
    world = World(1)
    world.now = 1000.0
    server = RedisServer(world, "log", "redis://log")
    words = [[word if isinstance(word, bytes) else str(word).encode() for word in command] for command in commands]
    replies: list[Any] = []
    for each in words:
        replies.append(server.execute("test", *each))
        world.now += 0.01
    return replies


def real(server: EmbeddedRedis, commands: Sequence[Command]) -> list[Any]:
    return asyncio.run(query(f"redis://127.0.0.1:{server.port}", (b"FLUSHALL",), *commands))[1:]


@pytest.mark.parametrize("story", STORIES)
def test_redis_and_its_model_reply_alike(story: str, server: EmbeddedRedis) -> None:
    commands = STORIES[story]
    assert _relative(real(server, commands)) == _relative(model(commands))


def _relative(replies: Sequence[Any]) -> list[Any]:
    """Return replies whose offsets are counted from the first one, by run: real ones begin at the time."""
    runs: list[tuple[int, int]] = []

    def plain(value: Any) -> Any:
        if isinstance(value, ErrorReply):
            return str(value).removeprefix("ERR ")
        if isinstance(value, list):
            return [plain(each) for each in value]
        if isinstance(value, dict):
            return [each for pair in value.items() for each in pair]
        number = int(value) if isinstance(value, bytes) and value.isdigit() else value
        if not isinstance(number, int) or number < 1 << OFFSET_BITS:
            return value
        for index, (first, last) in enumerate(runs):
            if first <= number <= last + 1:
                runs[index] = (first, max(last, number))
                return index, number - first
        runs.append((number, number))
        return len(runs) - 1, 0

    return [plain(reply) for reply in replies]


def test_what_the_replies_mean(server: EmbeddedRedis) -> None:
    first, again, state, page = real(
        server,
        [
            append(WITH_ID, (b"a", "1"), (b"b", "2")),
            append(WITH_ID, (b"b", "2"), (b"c", "3")),
            state_command(NAME),
            range_command(NAME, 0, 2**53, 10),
        ],
    )
    begin, _ = parse_appended_records(first, 2)
    assert parse_appended_records(first, 2) == [begin, begin + 1]
    assert parse_appended_records(again, 2) == [0, begin + 2]
    assert (parse_state(state).offset, parse_state(state).restarts) == (begin + 2, 0)
    assert [(record.offset - begin, record.value) for record in parse_records(page)] == [
        (0, b"a"),
        (1, b"b"),
        (2, b"c"),
    ]


def test_a_reply_with_another_number_of_offsets_is_malformed() -> None:
    assert parse_appended_records([7, 0], 2) == [7, 0]
    for reply in ([], [7], [7, 8, 9]):
        with pytest.raises(MalformedMessage, match="the offsets of 2 records expected"):
            parse_appended_records(reply, 2)


def test_offsets_grow_over_an_empty_restart(server: EmbeddedRedis) -> None:
    """Nothing is left of the partition, and yet no offset comes again."""
    (before,) = parse_appended_records(real(server, [append(PLAIN, (b"a", ""))])[0], 1)
    address = f"redis://127.0.0.1:{server.port}"

    for _ in range(3):
        (reply,) = asyncio.run(query(address, (b"FLUSHALL",), append(PLAIN, (b"b", ""))))[1:]
        (after,) = parse_appended_records(reply, 1)
        assert before < after < before + (10 << OFFSET_BITS)
        before = after


def test_a_restart_of_a_server_that_may_lose_records_is_counted(server: EmbeddedRedis) -> None:
    first, second, state = real(
        server, [append(PLAIN, (b"a", "")), append(PLAIN, (b"b", ""), run="run2"), state_command(NAME)]
    )
    assert parse_appended_records(second, 1)[0] > parse_appended_records(first, 1)[0]
    assert parse_state(state).restarts == 1


def test_runs_tell_which_offsets_were_given(server: EmbeddedRedis) -> None:
    first, second, reply = real(
        server,
        [append(PLAIN, (b"a", ""), (b"b", "")), append(PLAIN, (b"c", ""), run="run2"), state_command(NAME)],
    )
    offsets = parse_appended_records(first, 2) + parse_appended_records(second, 1)
    state = parse_state(reply)
    assert [each for begin, end in state.given(0, 2**53) for each in range(begin, end + 1)] == offsets
    assert (state.offset, state.restarts, len(state.runs)) == (offsets[-1], 1, 2)
    hash_ = partition_keys(NAME)[0]
    old = b"".join(b"%d-%d " % (number, number) for number in range(10**6, 10**6 + 300))
    commands = [
        (b"HSET", hash_, b"run", b"run1", b"offset", b"5000000", b"runs", old),
        append(PLAIN, (b"a", ""), run="run2"),
        state_command(NAME),
    ]
    for *_, reply in (real(server, commands), model(commands)):
        kept = parse_state(reply)
        assert kept.runs[-1][0] == 5_000_000
        assert kept.runs[-2] == (1_000_299, 1_000_299)
        assert RUNS_BYTES_MAX - 16 <= sum(len(f"{last}-{begin} ") for last, begin in kept.runs) <= RUNS_BYTES_MAX


def test_a_partition_that_is_full_refuses_all_of_a_command_until_it_is_trimmed(server: EmbeddedRedis) -> None:
    first, refusal = real(server, [append(SMALL, (b"a", ""), (b"b", "")), append(SMALL, (b"c", ""), (b"d", ""))])
    assert isinstance(refusal, ErrorReply)
    assert is_full(str(refusal))
    offsets = parse_appended_records(first, 2)
    trimmed, accepted = asyncio.run(
        query(
            f"redis://127.0.0.1:{server.port}",
            trim_command(NAME, offsets[0], 0),
            append(SMALL, (b"c", ""), (b"d", "")),
        )
    )
    assert trimmed == 1
    assert parse_appended_records(accepted, 2) == [offsets[1] + 1, offsets[1] + 2]


def test_long_ids_are_told_apart_and_take_little_memory(server: EmbeddedRedis) -> None:
    ids = ["x" * 60_000, "x" * 59_999, "x" * 60_000, "y"]
    stored, used = real(
        server,
        [
            append(WITH_ID, *((b"a", each) for each in ids)),
            (b"MEMORY", b"USAGE", partition_keys(NAME)[2]),
        ],
    )
    (begin, *_) = parse_appended_records(stored, 4)
    assert parse_appended_records(stored, 4) == [begin, begin + 1, 0, begin + 2]
    assert used < 2000


def test_ids_are_forgotten_after_their_time(server: EmbeddedRedis) -> None:
    brief = replace(WITH_ID, duplicate_s=0.05)
    address = f"redis://127.0.0.1:{server.port}"
    first, _ = real(server, [append(brief, (b"a", "1")), append(brief, (b"a", "1"))])
    (begin,) = parse_appended_records(first, 1)
    while (again := parse_appended_records(asyncio.run(query(address, append(brief, (b"a", "1"))))[0], 1)) == [0]:
        """It is a duplicate for a while."""
    assert again == [begin + 1]
    assert asyncio.run(query(address, (b"PTTL", partition_keys(NAME)[2])))[0] <= 50


def test_changes_tell_who_is_registered(server: EmbeddedRedis) -> None:
    interests, expiry, changes = registration_keys("near")
    *_, stored, log = real(
        server,
        [
            register_command("near", [(INTEREST, '{"user":"ann"}', 0), (OTHER, "{}", 60)]),
            expire_command("near", [INTEREST, OTHER]),
            (b"HGETALL", interests),
            (b"XRANGE", changes, b"-", b"+", b"COUNT", b"10"),
        ],
    )
    registrations = [parse_registration(*pair) for pair in stored.items()]
    assert [(each.interest_id, each.params) for each in registrations] == [(OTHER, "{}")]
    assert [(each.interest_id, each.params) for _, each in parse_changes(log)] == [
        (INTEREST, '{"user":"ann"}'),
        (OTHER, "{}"),
        (INTEREST, None),
    ]
    assert asyncio.run(query(f"redis://127.0.0.1:{server.port}", (b"ZCARD", expiry))) == [1]


@pytest.mark.parametrize("dataset", [PLAIN, WITH_ID], ids=["without an id", "with an id"])
def test_a_server_without_memory_refuses_records(dataset: Dataset, redis_server: EmbeddedRedis) -> None:
    limit, more = (b"CONFIG", b"SET", b"maxmemory", b"1"), (b"CONFIG", b"SET", b"maxmemory", b"0")
    commands = append(dataset, (b"a", "1")), limit, append(dataset, (b"b", "2")), more, append(dataset, (b"b", "2"))
    [first], _, refusal, _, [second] = asyncio.run(query(redis_server.url, *commands))
    assert isinstance(refusal, ErrorReply) and "OOM" in str(refusal)
    assert second == first + 1, "what was refused has left nothing"
