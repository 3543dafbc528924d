"""Where windows end."""

from __future__ import annotations

import time
from typing import Any

import pytest

from dynamoth.data.progress import WindowEnd
from dynamoth.data.records import partition_keys
from dynamoth_analytics.cluster.storage.reading import RecordsLost
from dynamoth_analytics.cluster.windows import CONTINUOUS_MS, Ticks, Windows
from tests.data_cluster.world import STATIC, World, reports


@pytest.mark.parametrize(
    ("period_s", "phase_s", "now_ms", "latest_ms"),
    [
        (10, 0, 20_000, 20_000),
        (10, 0, 29_999, 20_000),
        (10, 3, 22_999, 13_000),
        (10, 3, 23_000, 23_000),
        (0, 0, 5_700, 5_000),
    ],
)
def test_ticks_are_multiples_of_the_period_behind_the_phase(
    period_s: float, phase_s: float, now_ms: int, latest_ms: int
) -> None:
    assert Ticks(period_s, phase_s).latest(now_ms) == latest_ms


@pytest.mark.parametrize(
    ("after_ms", "now_ms", "next_ms"),
    [
        (20_000, 20_000, 30_000),
        (20_000, 26_000, 30_000),
        (10_000, 26_000, 30_000),  # the tick at 20 had nothing new
        (40_000, 26_000, 50_000),  # the clock has gone back
    ],
)
def test_the_next_tick_has_not_passed_yet(after_ms: int, now_ms: int, next_ms: int) -> None:
    assert Ticks(10).next(after_ms, now_ms) == next_ms


def windows(world: World, **reads: Any) -> Windows:
    on = world.servers.catalog().datasets["reports"]
    return Windows(world.servers, on, [world.set_dataset(name, **each) for name, each in reads.items()], Ticks(0))


def test_a_window_ends_with_the_records_that_there_are(world: World) -> None:
    dataset = world.set_dataset()
    found = windows(world, shelters=STATIC | {"loaded": 7}, places={"kind": "keyed", "key": "id", "id": ""})
    start: WindowEnd = {"tick_ms": 0, "offsets": {}}
    assert found.next_end(start) is None
    world.append(dataset, *reports("fire", "a"))
    before_ms = world.servers.now_ms()
    end = found.next_end(start)
    assert end is not None
    assert end["offsets"] == world.servers.tips({"reports": 2, "places": 2})
    assert end.get("static") == {"shelters": 7}
    assert before_ms <= end.get("sealed_ms", 0) <= world.servers.now_ms()
    assert time.time() * 1000 - CONTINUOUS_MS < end["tick_ms"] <= time.time() * 1000
    world.append(dataset, *reports("fire", "b"))
    assert found.next_end({**end, "tick_ms": end["tick_ms"] + 3_600_000}) is None, "that tick has not passed"


def test_a_partition_that_comes_back_goes_on_where_it_was(world: World) -> None:
    dataset = world.set_dataset()
    world.append(dataset, *reports("fire", "a", "b"))
    end: WindowEnd = {"tick_ms": 0, "offsets": {"other/0": 1}}
    for id_, partitions in zip("cde", (2, 1, 2), strict=True):
        on = world.set_dataset(partitions=partitions)
        world.append(on, *reports("fire", id_), partition=0)
        found = Windows(world.servers, on, [], Ticks(0)).next_end({**end, "tick_ms": 0})
        assert found is not None
        end = found
        assert end["offsets"] == world.servers.tips({"reports": 2}), "nothing of the second one is executed again"


def test_records_of_other_datasets_end_no_window(world: World) -> None:
    world.set_dataset()
    found = windows(world, places={"kind": "keyed", "key": "id", "id": ""})
    world.append(world.servers.catalog().datasets["places"], *reports("fire", "a"))
    assert found.next_end({"tick_ms": 0, "offsets": {}}) is None


def test_a_server_that_has_lost_records_ends_no_window(world: World) -> None:
    dataset = world.set_dataset()
    world.append(dataset, *reports("fire", "a", "b"))
    found = windows(world)
    start = found.now()
    for id_, name in ((world.servers.server_of(each), each) for each in ("reports/0", "reports/1")):
        world.servers.run(id_, (b"HSET", partition_keys(name)[0], b"offset", b"%d" % (start["offsets"][name] - 1)))
    with pytest.raises(RecordsLost, match="no longer there"):
        found.next_end(start)
