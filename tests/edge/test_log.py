"""The scripts of logs, on real Redis and in the simulator's model: the same commands get the same replies."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from dynamoth.edge.log import (
    FENCED,
    Appended,
    LogOptions,
    LogPage,
    append_command,
    append_many_command,
    log_keys,
    log_server,
    parse_appended,
    parse_appended_many,
    parse_page,
    read_command,
    tips_command,
)
from dynamoth.errors import MalformedMessage
from dynamoth.machine.events import CommandPart, ErrorReply
from dynamoth_cli.local.embedded import EmbeddedRedis
from dynamoth_link.query import query
from dynamoth_sim.world.redis import RedisServer
from dynamoth_sim.world.world import World

OPTIONS = LogOptions()
LOG = "a" * 22
OTHER = "b" * 22
FENCE = b"the newest term"
EPOCH, OTHER_EPOCH = 0x1234, 0xABCD


def append(payload: bytes, run: str = "run1", epoch: int = EPOCH, **arguments: Any) -> tuple[CommandPart, ...]:
    return append_command(LOG, payload, run, epoch, arguments.pop("options", OPTIONS), **arguments)


def append_many(
    *publications: tuple[str, bytes],
    run: str = "run1",
    epoch: int = EPOCH,
    term: int = 1,
    execution: int = 1,
    fence: bytes = b"",
) -> tuple[CommandPart, ...]:
    new = [(interest_id, payload, epoch + number) for number, (interest_id, payload) in enumerate(publications)]
    return append_many_command(new, run, OPTIONS, term, execution, fence)


def read(after: int = 0, count: int = 10, run: str = "run1", epoch: int = EPOCH) -> tuple[CommandPart, ...]:
    return read_command(LOG, run, epoch, OPTIONS, after, count)


STORIES: dict[str, list[tuple[CommandPart, ...]]] = {
    "an empty log has an epoch": [read(), read(), read(epoch=OTHER_EPOCH)],
    "offsets have no holes": [
        append(b"a"),
        append(b"b", epoch=OTHER_EPOCH),
        append(b"\xff\x00"),
        read(),
        read(1),
        read(3),
    ],
    "pages": [
        *(append(b"%d" % number) for number in range(5)),
        read(0, 2),
        read(2, 2),
        read(4, 2),
        read(9, 2),
        read(0, 0),
    ],
    "a page has a bound of bytes, and one publication at least": [
        *(append(bytes(size)) for size in (300, 200, 100, 100, 0)),
        *(read_command(LOG, "run1", EPOCH, OPTIONS, after, 10, 300) for after in range(5)),
        read_command(LOG, "run1", EPOCH, OPTIONS, 0, 10, 299),
    ],
    "another process of the server begins another epoch": [
        append(b"a"),
        append(b"b"),
        append(b"c", run="run2", epoch=OTHER_EPOCH),
        read(run="run2"),
        read(run="run2", epoch=7),
    ],
    "reading a lost log begins it, too": [
        append(b"a"),
        read(run="run2", epoch=OTHER_EPOCH),
        append(b"b", run="run2", epoch=9),
    ],
    "a durable log survives its server": [append(b"a"), append(b"b", options=LogOptions(durable=True)), read()],
    "an older term is refused": [
        append(b"a", term=5),
        append(b"b", term=4),
        append(b"c", term=5),
        append(b"d", term=6),
        read(),
    ],
    "an execution is appended once": [
        append(b"a", execution=1),
        append(b"a", execution=1),
        append(b"b", execution=2),
        append(b"a", execution=1),
        append(b"from nobody"),
        append(b"b", execution=2),
        read(),
    ],
    "without a number it is appended again": [append(b"a"), append(b"a"), read()],
    "after a loss, an execution may come again": [
        append(b"a", execution=3),
        append(b"a", run="run2", epoch=OTHER_EPOCH, execution=3),
        read(run="run2"),
    ],
    "tips of many logs": [
        append(b"a"),
        append(b"b"),
        tips_command([LOG, "b" * 22], "run1", OPTIONS),
        tips_command([LOG], "run2", OPTIONS),
        tips_command(["b" * 22, LOG], "run2", LogOptions(durable=True)),
        read(),
    ],
    "one execution for many logs": [
        append_many((LOG, b"a"), (OTHER, b"b")),
        append_many((OTHER, b"b"), (LOG, b"a"), epoch=OTHER_EPOCH),
        append_many((LOG, b"c"), execution=2),
        append_many((LOG, b"c"), (OTHER, b"d"), execution=2),
        append_many((LOG, b"a"), (OTHER, b"b")),
        append(b"one", execution=2),
        append(b"from nobody"),
        append_many((LOG, b"c"), (OTHER, b"d"), execution=2),
        read(),
    ],
    "many logs of a server that has lost them": [
        append_many((LOG, b"a"), (OTHER, b"b"), execution=3),
        append_many((LOG, b"a"), (OTHER, b"b"), run="run2", epoch=OTHER_EPOCH, execution=3),
        read(run="run2"),
    ],
    "many logs, and a fence": [
        append_many((LOG, b"a"), (OTHER, b"b"), term=4, fence=FENCE),
        (b"SET", FENCE, b"5"),
        append_many((LOG, b"c"), (OTHER, b"d"), term=4, execution=2, fence=FENCE),
        append_many((LOG, b"e"), (OTHER, b"f"), term=5, execution=2, fence=FENCE),
        append_many((LOG, b"g"), (OTHER, b"h"), term=6, execution=3, fence=FENCE),
        read(),
    ],
    "many logs, one of which has a newer writer": [
        append(b"a", term=5),
        append_many((OTHER, b"b"), (LOG, b"c"), term=4),
        append_many((OTHER, b"b"), (LOG, b"c"), term=5),
        read(),
    ],
    "a lost log keeps its fence": [append(b"a", term=5), append(b"b", run="run2", epoch=OTHER_EPOCH, term=4)],
}


def model(commands: Sequence[tuple[CommandPart, ...]]) -> list[Any]:
    server = RedisServer(World(1), "log", "redis://log")
    words = [[word if isinstance(word, bytes) else str(word).encode() for word in command] for command in commands]
    return [server.execute("test", *each) for each in words]


@pytest.fixture(scope="module")
def server() -> Any:
    with EmbeddedRedis() as running:
        yield running


@pytest.mark.parametrize("story", STORIES)
def test_redis_and_its_model_reply_alike(story: str, server: EmbeddedRedis) -> None:
    address = f"redis://127.0.0.1:{server.port}"
    commands = STORIES[story]
    replies = asyncio.run(query(address, (b"DEL", *log_keys(LOG), *log_keys(OTHER)), *commands))[1:]
    assert [_plain(reply) for reply in replies] == [_plain(reply) for reply in model(commands)]


def _plain(reply: Any) -> Any:
    return str(reply).removeprefix("ERR ") if isinstance(reply, ErrorReply) else reply


def test_what_the_replies_mean() -> None:
    first, second, page = model([append(b"a"), append(b"b"), read()])
    assert parse_appended(first) == Appended(EPOCH, 1, is_new=True)
    assert parse_appended(second) == Appended(EPOCH, 2, is_new=True)
    assert parse_page(page) == LogPage(EPOCH, 2, 1, ((1, b"a"), (2, b"b")))
    repeated = model([append(b"a", execution=1), append(b"a", execution=1)])[1]
    assert parse_appended(repeated) == Appended(EPOCH, 1, is_new=False)
    commands = [append(b"a", execution=1), append(b"b", execution=2), append(b"c")]
    last, former = model([*commands, append(b"b", execution=2), append(b"a", execution=1)])[3:]
    assert parse_appended(last) == Appended(EPOCH, 2, is_new=False)
    assert parse_appended(former) == Appended(EPOCH, 3, is_new=False, is_exact=False)
    many, again = model([append_many((LOG, b"a"), (OTHER, b"b")), append_many((OTHER, b"b"), (LOG, b"a"))])
    assert parse_appended_many(many) == [Appended(EPOCH, 1, is_new=True), Appended(EPOCH + 1, 1, is_new=True)]
    assert parse_appended_many(again) == [Appended(EPOCH + 1, 1, is_new=False), Appended(EPOCH, 1, is_new=False)]
    refused = model([append(b"a", term=2), append(b"b", term=1)])[1]
    assert isinstance(refused, ErrorReply)
    assert str(refused).startswith(FENCED)


def test_a_log_forgets_the_oldest() -> None:
    options = LogOptions(retained_min=3)
    *_, page = model([*(append(b"%d" % number, options=options) for number in range(1, 6)), read()])
    assert parse_page(page) == LogPage(EPOCH, 5, 3, ((3, b"3"), (4, b"4"), (5, b"5")))
    *_, empty = model([read()])
    assert parse_page(empty) == LogPage(EPOCH, 0, 1, ())


def test_redis_forgets_the_oldest_in_whole_nodes(server: EmbeddedRedis) -> None:
    options = LogOptions(retained_min=50)
    commands = [append(b"%d" % number, options=options) for number in range(1, 401)]
    replies = asyncio.run(query(f"redis://127.0.0.1:{server.port}", (b"DEL", *log_keys(LOG)), *commands, read(0, 1000)))
    page = parse_page(replies[-1])
    assert page.tip == 400
    assert 400 - 200 <= page.first <= 400 - 50 + 1
    assert [offset for offset, _ in page.entries] == list(range(page.first, 401))


@pytest.mark.parametrize(
    "reply", [None, b"OK", [], [b"x", 1, 1], [b"0" * 16, 1], [b"0" * 16, 2, 1, 1, b"a", 3, b"b"], [b"0" * 16, 1, 1, 1]]
)
def test_a_reply_of_something_else_is_malformed(reply: Any) -> None:
    with pytest.raises(MalformedMessage):
        parse_page(reply)


def test_logs_are_spread_and_a_lost_server_moves_only_its_own() -> None:
    ids = [f"{number:022d}" for number in range(1000)]
    before = {id_: log_server(id_, ["l1", "l2", "l3"]) for id_ in ids}
    after = {id_: log_server(id_, ["l1", "l3"]) for id_ in ids}
    assert all(before[id_] == after[id_] for id_ in ids if before[id_] != "l2")
    counts = [list(before.values()).count(server) for server in ("l1", "l2", "l3")]
    assert min(counts) > 250


@pytest.mark.parametrize(
    "command", [append(b"b", term=1, execution=2), append_many((LOG, b"b"), (OTHER, b"b"), execution=2)]
)
def test_a_server_without_memory_refuses_to_append_to_a_log_that_it_has(
    command: tuple[CommandPart, ...], redis_server: EmbeddedRedis
) -> None:
    begun = append_many((LOG, b"a"), (OTHER, b"a"))
    limit, more = (b"CONFIG", b"SET", b"maxmemory", b"1"), (b"CONFIG", b"SET", b"maxmemory", b"0")
    *_, refusal, page, _, appended = asyncio.run(query(redis_server.url, begun, limit, command, read(), more, command))
    assert isinstance(refusal, ErrorReply) and "OOM" in str(refusal)
    assert parse_page(page).tip == 1, "what was refused has left nothing, and the log can be read"
    assert appended[1:3] == [2, 1]


@pytest.mark.parametrize("command", [append(b"a"), append_many((LOG, b"a"), (OTHER, b"a")), read()])
def test_a_server_without_memory_begins_no_log(command: tuple[CommandPart, ...], redis_server: EmbeddedRedis) -> None:
    limit, more = (b"CONFIG", b"SET", b"maxmemory", b"1"), (b"CONFIG", b"SET", b"maxmemory", b"0")
    _, refusal, keys, _ = asyncio.run(query(redis_server.url, limit, command, (b"DBSIZE",), more))
    assert isinstance(refusal, ErrorReply) and "OOM" in str(refusal)
    assert keys == 0
