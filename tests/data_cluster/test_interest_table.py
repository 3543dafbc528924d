"""The mirror of registrations, on real Redis servers."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet  # pyright: ignore[reportMissingTypeStubs]

from dynamoth.data.queries import StandingQuery
from dynamoth.data.registrations import CHANGES_MAX, register_command, registration_keys
from dynamoth.edge.interests import query_interest
from dynamoth.edge.log import log_keys
from dynamoth_analytics.cluster.interest_table import InterestTable, expire_interests
from tests.data_cluster.world import World

PARAMETERS: dict[str, Any] = {"type": "string", "size": "int", "radius": "float", "open": "bool"}
SQL = "SELECT r.id FROM reports r WHERE r.type = :type AND r.size = :size AND r.size < :radius AND :open"
LATER_MS = 2**52
FIRE = {"type": "fire"}
VALUES = {"type": "fire", "size": 1.0, "radius": 5, "open": True}


def table_of(world: World, query: StandingQuery) -> InterestTable:
    return InterestTable(world.servers, world.folder / "interests" / query.name, query)


def rows(table: InterestTable) -> dict[str, dict[str, Any]]:
    table.refresh()
    return {row.pop("_interest"): row for row in parquet.read_table(table.file(LATER_MS)[0]).to_pylist()}


def test_interests_are_rows_with_typed_parameters(world: World) -> None:
    query = world.set_query(parameters=PARAMETERS, sql=SQL)
    table = table_of(world, query)
    assert rows(table) == {}
    before = world.servers.now_ms()
    interest = world.register("of_type", VALUES)
    (found,) = rows(table).items()
    assert found[0] == interest
    assert before <= found[1].pop("_registered") <= world.servers.now_ms()
    assert json.dumps(found[1]) == '{"__type": "fire", "__size": 1, "__radius": 5.0, "__open": true}'


def test_interests_that_do_not_fit_this_version_are_named_with_the_reason(world: World) -> None:
    query = world.set_query(parameters=PARAMETERS, sql=SQL)
    less = world.register("of_type", {"type": "fire"})
    other = world.register("of_type", {**VALUES, "open": "yes"})
    good = world.register("of_type", VALUES)
    table = table_of(world, query)
    assert [*rows(table)] == [good]
    assert len(table) == 3
    assert table.unfit() == {
        less: "parameter 'size' is missing: it is of type int",
        other: "parameter 'open' is of type bool, not 'yes'",
    }
    world.servers.run(world.server_of(less), (b"DEL", registration_keys("of_type")[2]))
    world.servers.run(world.server_of(less), (b"DEL", registration_keys("of_type")[0]))
    table.refresh()
    assert table.unfit().keys() == {less, other}, "what a server has lost is registered again"


def test_an_interest_that_the_file_cannot_have_harms_no_other(world: World, caplog: pytest.LogCaptureFixture) -> None:
    table = table_of(world, world.set_query())
    good = world.register("of_type", {"type": "fire"})
    half = register_command("of_type", [("half", '{"type":"\\ud800"}', 60.0)])  # no broker takes such text
    world.servers.run(world.server_of("half"), half)
    assert [*rows(table)] == [good]
    other = world.register("of_type", {"type": "flood"})
    assert set(rows(table)) == {good, other}
    [record] = [each for each in caplog.records if "left out" in each.message]
    assert "interest half of query of_type" in record.message


def test_whole_numbers_that_no_column_can_have_are_left_out(world: World) -> None:
    query = world.set_query(parameters={"size": "int"}, sql="SELECT r.id FROM reports r WHERE r.size = :size")
    world.register("of_type", {"size": 1e20})
    good = world.register("of_type", {"size": 2**53})
    assert [*rows(table_of(world, query))] == [good]


def test_a_file_is_written_when_something_has_changed(world: World) -> None:
    table = table_of(world, world.set_query())
    world.register("of_type", {"type": "fire"})
    rows(table)
    first, _ = table.file(LATER_MS)
    world.register("of_type", {"type": "fire"})  # renewed
    table.refresh()
    assert table.file(LATER_MS) == (first, 1)
    second = world.register("of_type", {"type": "flood"})
    assert second in rows(table)
    assert first.exists(), "an execution that runs may read it"
    world.register("of_type", {"type": "quake"})
    assert len(rows(table)) == 3
    assert not first.exists()
    assert len([*first.parent.iterdir()]) == 2


def test_an_interest_ends_with_its_log_when_its_time_is_over(world: World) -> None:
    table = table_of(world, world.set_query())
    short, long = world.register("of_type", {"type": "fire"}, 0.0), world.register("of_type", {"type": "flood"})
    for each in (short, long):
        world.servers.run(world.server_of(each), (b"HSET", log_keys(each)[0], b"epoch", b"1"))
    assert set(rows(table)) == {short, long}
    while not expire_interests(world.servers, "of_type"):
        assert time.time() < world.servers.now_ms() / 1000 + 10, "its time is over within a second"
    assert set(rows(table)) == {long}
    assert [world.servers.run(world.server_of(each), (b"EXISTS", log_keys(each)[0])) for each in (short, long)] == [
        0,
        1,
    ]


def test_a_reader_that_is_far_behind_reads_everything(world: World) -> None:
    table = table_of(world, world.set_query())
    interest = world.register("of_type", {"type": "fire"})
    gone = world.register("of_type", {"type": "flood"})
    assert set(rows(table)) == {interest, gone}
    server = world.server_of(gone)
    hash_key, expiry, changes = registration_keys("of_type")
    many = [query_interest("of_type", {"type": f"type {number}"}) for number in range(CHANGES_MAX + 500)]
    for begin in range(0, len(many), 500):
        part = [(each.id, each.params, 60.0) for each in many[begin : begin + 500]]
        world.servers.run(server, register_command("of_type", part))
    world.servers.run_all(server, [
        (b"HDEL", hash_key, gone.encode()), (b"ZREM", expiry, gone.encode()),
        (b"XTRIM", changes, b"MAXLEN", b"%d" % CHANGES_MAX),
    ])  # fmt: skip
    found = rows(table)
    assert gone not in found, "it had ended; that is no loss"
    assert len(found) == len(many) + 1


def test_what_a_server_has_lost_is_registered_there_again(world: World) -> None:
    table = table_of(world, world.set_query())
    interests = {each: world.register("of_type", {"type": each}) for each in ("fire", "flood", "quake", "storm")}
    before = rows(table)
    lost = {each for each in interests.values() if world.server_of(each) == world.server_of(interests["fire"])}
    world.servers.run(world.server_of(interests["fire"]), (b"FLUSHALL",))
    assert rows(table) == before, "they count from when they were registered first"
    again = set(world.servers.run(world.server_of(interests["fire"]), (b"HKEYS", registration_keys("of_type")[0])))
    assert again == {each.encode() for each in lost}
    late = world.register("of_type", {"type": "late"})
    assert set(rows(table)) == {*interests.values(), late}


def test_an_interest_that_comes_back_with_an_older_copy_of_its_server_is_read_again(world: World) -> None:
    table = table_of(world, world.set_query())
    ended, server = world.register("of_type", FIRE), world.server_of(query_interest("of_type", FIRE).id)
    keys = registration_keys("of_type")
    assert set(rows(table)) == {ended}
    older = world.servers.run_all(server, ((b"DUMP", key) for key in keys))
    world.servers.run(server, (b"ZADD", keys[1], b"0", ended.encode()))
    assert expire_interests(world.servers, "of_type") == 1
    assert rows(table) == {}
    copies = zip(keys, older, strict=True)
    world.servers.run_all(server, ((b"RESTORE", key, b"0", copy, b"REPLACE") for key, copy in copies))
    others = (query_interest("of_type", {"type": f"type {number}"}) for number in range(100))
    other = next(each for each in others if world.server_of(each.id) == server)
    world.servers.run(server, register_command("of_type", [(other.id, other.params, 60.0)]))
    assert world.register("of_type", FIRE) == ended, "its broker confirms its user"
    assert set(rows(table)) == {ended, other.id}


def test_a_hundred_thousand_interests(world: World) -> None:
    query = world.set_query()
    interests = [query_interest("of_type", {"type": f"type {number}"}) for number in range(100_000)]
    for id_ in world.servers.ids:
        own = [(each.id, each.params, 600.0) for each in interests if world.server_of(each.id) == id_]
        commands = [register_command("of_type", own[begin : begin + 500]) for begin in range(0, len(own), 500)]
        world.servers.run_all(id_, commands)
    table = table_of(world, query)
    assert len(rows(table)) == len(interests)
    world.register("of_type", {"type": "one more"})
    began = time.process_time()
    table.refresh()
    table.file(LATER_MS)
    assert time.process_time() - began < 2.0, "one change is cheap"


def test_files_of_a_process_before_are_removed(world: World) -> None:
    query = world.set_query()
    folder: Path = world.folder / "interests" / query.name
    folder.mkdir(parents=True)
    (folder / "7.parquet").write_bytes(b"torn")
    assert rows(table_of(world, query)) == {}
    assert [each.name for each in folder.iterdir()] == ["1.parquet"]


def test_a_file_has_the_interests_that_were_registered_until_then(world: World) -> None:
    table = table_of(world, world.set_query())
    first = world.register("of_type", {"type": "fire"})
    registered_ms = rows(table)[first]["_registered"]
    assert table.file(registered_ms - 1)[1] == 0
    file, count = table.file(registered_ms)
    assert [each["_interest"] for each in parquet.read_table(file).to_pylist()] == [first]
    assert count == 1
