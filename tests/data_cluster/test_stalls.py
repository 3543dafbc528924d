"""Queries of which no execution ends: when they are called stalled, and where that is shown."""

from __future__ import annotations

import threading
import time
from collections import Counter
from itertools import count
from typing import Any

import pytest
from pyspark.sql import SparkSession

from dynamoth.data.progress import WindowEnd
from dynamoth_analytics.cluster.executions import Executions
from dynamoth_analytics.cluster.metrics import collect
from dynamoth_analytics.cluster.runner import ClusterRunner
from dynamoth_analytics.cluster.stalls import BOUND_S_MIN, LOOK_S_MAX, Stall, bound_s
from dynamoth_analytics.cluster.windows import Ticks, Windows
from tests.data_cluster.world import World, reports, until


def stalled_at(stall: Stall, *looks: tuple[str, int], begin: float = 1000.0, every_s: float = 10.0) -> list[float]:
    """Return the times, from the beginning on, at which a query is stalled that is looked at again and again."""
    times = [number * every_s for number in range(len(looks))]
    return [at for at, (waits_for, done) in zip(times, looks, strict=True) if stall.look(waits_for, done, begin + at)]


def test_the_bound_grows_with_the_period_and_leaves_time_for_a_cold_start() -> None:
    assert bound_s(0) == bound_s(2) == BOUND_S_MIN > 110
    assert bound_s(60) == 600
    assert bound_s(86_400) == 86_400 + 3600


def test_a_query_is_stalled_when_nothing_ends_for_longer_than_the_bound() -> None:
    busy = [("execution 8 does not end", 7)] * 22
    assert stalled_at(Stall(2), *busy) == [190.0, 200.0, 210.0]
    reason = Stall(2)
    said = [reason.look("execution 8 does not end", 7, 1000.0 + 10 * number) for number in range(20)][-1]
    assert said.startswith("execution 8 does not end, for more than 180 s: Spark hangs")
    assert "restart the data cluster" in said


@pytest.mark.parametrize("between", [("", 7), ("execution 9 does not end", 8)], ids=["nothing to do", "one has ended"])
def test_what_has_ended_or_has_nothing_to_do_begins_anew(between: tuple[str, int]) -> None:
    busy = [("execution 8 does not end", 7)] * 15
    assert stalled_at(Stall(2), *busy, between, *((f"{each} again", between[1]) for each, _ in busy)) == []


def test_a_process_that_was_stopped_itself_finds_no_query_stalled() -> None:
    stall = Stall(2)
    assert stall.look("records wait", 7, 1000.0) == ""
    assert stall.look("records wait", 7, 9000.0) == ""
    assert LOOK_S_MAX < BOUND_S_MIN / 2


def test_records_wait_behind_a_tick_only(world: World) -> None:
    dataset, other = world.set_dataset(), world.set_dataset("others")
    start: WindowEnd = {"tick_ms": 0, "offsets": world.servers.tips({"reports": 2, "others": 2})}
    windows = Windows(world.servers, dataset, [other], Ticks(1))
    assert not windows.has_waiting(start)
    world.append(other, *reports("fire", "a"))
    assert not windows.has_waiting(start), "the query is not about these"
    world.append(dataset, *reports("fire", "a"))
    assert windows.has_waiting(start)
    assert not windows.has_waiting({**start, "tick_ms": int(time.time() * 1000) + 10_000}), "no tick has passed"


def test_an_execution_that_hangs_is_shown_until_it_ends(
    driver: SparkSession, world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    executing, go_on, clock = threading.Event(), threading.Event(), count(1000.0, 10.0)

    def hang(*_: Any) -> Counter[str]:
        executing.set()
        go_on.wait()
        return Counter()

    monkeypatch.setattr(Executions, "run", hang)
    dataset = world.set_dataset()
    world.set_query()
    cluster = ClusterRunner(driver, world.servers, world.cluster_url, world.folder, 3600.0)

    def shown() -> tuple[float, str]:
        status = world.status("of_type")
        assert status is not None
        samples = {each.name: each.value for family in collect(cluster) for each in family.samples}
        return samples["dynamoth_data_cluster_queries_stalled"], status.state

    def watch_for(seconds: int) -> None:
        for _ in range(0, seconds, 10):
            cluster.queries()["of_type"].watch(next(clock))

    try:
        cluster.follow_catalog()
        watch_for(100)
        assert shown() == (0, "running")
        world.append(dataset, *reports("fire", "a"))
        until(executing.is_set)
        watch_for(400)
        watch_for(400)
        assert shown() == (1, "stalled")
        said = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
        assert len(said) == 1, said
        assert said[0].startswith("query of_type is stalled: execution 1 does not end, for more than 180 s")
        go_on.set()
        until(lambda: shown() == (0, "running"))
        watch_for(400)
        assert shown() == (0, "running"), "nothing waits"
    finally:
        go_on.set()
        cluster.stop(10.0)
