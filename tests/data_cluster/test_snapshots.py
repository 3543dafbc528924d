"""Snapshots of keyed datasets: the latest record of each key, whatever base they begin with."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from pathlib import Path

from pyspark.sql import SparkSession

from dynamoth_analytics.cluster.snapshots import KeyedSnapshots
from tests.data_cluster.world import World


def test_a_snapshot_has_the_latest_of_each_key_before_and_after_renewals(
    driver: SparkSession, world: World, tmp_path: Path
) -> None:
    dataset = world.set_dataset(kind="keyed", key="id", id="", partitions=1)
    snapshots = KeyedSnapshots(tmp_path, {"logs": world.logs})
    latest: dict[str, int] = {}
    expected = []
    for turn in range(3):
        for key in "abc"[: turn + 1]:
            latest[key] = turn
            world.append(dataset, {"id": key, "type": "t", "size": turn})
        expected.append((world.servers.tips({"reports": 1}), dict(latest)))

    def at(offsets: dict[str, int]) -> dict[str, int]:
        return {row["id"]: row["size"] for row in snapshots.at(driver, dataset, offsets).collect()}

    assert [at(offsets) for offsets, _ in expected] == [sizes for _, sizes in expected]
    for offsets, _ in expected[:2]:
        snapshots.renew(driver, dataset, offsets)
    assert [at(offsets) for offsets, _ in expected] == [sizes for _, sizes in expected]
