"""What the process of a data cluster does when, with real Spark and Redis, but in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pyspark.sql import SparkSession

from dynamoth.data.progress import QueryStatus
from dynamoth.data.terms import TERM_KEY
from dynamoth_analytics.cluster.ingest import Ingest
from dynamoth_analytics.cluster.process import DataClusterConfig, DataClusterProcess, prepare_folder
from dynamoth_analytics.cluster.runner import ClusterRunner
from dynamoth_daemon.exit_codes import EXIT_REFUSED
from tests.data_cluster.world import POLL_S, TIMEOUT_S, World


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            if holds():
                return
            await asyncio.sleep(POLL_S)


def test_a_new_folder_is_for_one_account_alone_and_another_one_stays_as_it_is(tmp_path: Path) -> None:
    """It has places and parameters of users."""
    for made_before in (False, True):
        folder = tmp_path / str(made_before) / "data-cluster"
        if made_before:
            folder.mkdir(parents=True)
            folder.chmod(0o750)
        prepare_folder(folder)
        assert folder.stat().st_mode & 0o777 == (0o750 if made_before else 0o700)


def test_readiness_names_what_is_stalled_and_what_is_not_stored(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    no_spark, stalled = cast("Any", None), SimpleNamespace(is_stalled=True, status=QueryStatus(reason="it hangs"))
    well = SimpleNamespace(is_stalled=False, status=QueryStatus())

    def queries(_: ClusterRunner) -> dict[str, Any]:
        return {"near": stalled, "far": well}

    monkeypatch.setattr(ClusterRunner, "queries", queries)

    async def ask() -> str | None:
        config = DataClusterConfig(cluster_url=world.cluster_url, servers=world.servers, http_port=0)
        process = DataClusterProcess(config, no_spark, world.folder, asyncio.Event())
        ingest = process._ingest  # pyright: ignore[reportPrivateUsage]
        ingest.faults["reports"] = "log server l1 does not answer"
        return process.why_not_ready()

    assert asyncio.run(ask()) == (
        "query near is stalled: it hangs\n"
        "what is published waits to be stored (dataset reports): log server l1 does not answer"
    )


def test_what_is_published_is_stored_by_the_data_cluster_in_charge_alone(
    driver: SparkSession, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that cannot take a term does not begin to store; one that is taken over ends."""
    looks: list[bool] = []
    ingests: list[str] = []
    follow = ClusterRunner.follow_catalog

    def count_looks(self: ClusterRunner) -> None:
        looks.append(self.has_begun)
        follow(self)

    async def ingest(_: Ingest) -> None:
        ingests.append("begins behind a term" if world.servers.run("l1", (b"GET", TERM_KEY)) else "begins too early")
        try:
            await asyncio.Event().wait()
        finally:
            ingests.append("ends")

    monkeypatch.setattr(ClusterRunner, "follow_catalog", count_looks)
    monkeypatch.setattr(Ingest, "run", ingest)
    world.set_dataset()
    world.servers.run("l2", (b"HSET", TERM_KEY, b"no", b"term"))  # the catalog can be read there

    async def play() -> int:
        config = DataClusterConfig(
            cluster_url=world.cluster_url, servers=world.servers, folder=str(world.folder), http_port=0
        )
        process = DataClusterProcess(config, driver, world.folder, asyncio.Event())
        running = asyncio.create_task(process.run())
        await until(lambda: len(looks) >= 2)
        assert ingests == []
        world.servers.run("l2", (b"DEL", TERM_KEY))
        await until(lambda: ingests)
        await until(lambda: True in looks)
        world.servers.take_term("another one")
        return await running

    assert asyncio.run(play()) == EXIT_REFUSED
    assert ingests == ["begins behind a term", "ends"]
