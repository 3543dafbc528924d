"""The benchmark of moving channels: what it finds in a cluster of each kind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.cluster_moves import Result, Setting, measure_one, table
from bench.replication_network import LimitedCluster, Network, NotPossible
from bench.sharded_cluster import ShardedCluster, find_redis_7

TINY = Setting(channels=3, listeners_per_channel=2, rest_s=0.5, moving_s=3.0)


@pytest.fixture
def network() -> Iterator[Network]:
    """Ten megabytes per second; skipped where networks cannot be made."""
    try:
        find_redis_7()
        with Network(10_000_000) as network:
            yield network
    except NotPossible as error:
        pytest.skip(str(error))


def assert_all_accounted_for(result: Result) -> None:
    assert result.published > 50 and result.due == 2 * result.published
    assert result.delivered - result.duplicated + result.lost == result.due
    assert result.moves >= 3
    assert result.moving_ms["p50"] is not None
    assert any(f"{result.lost} (" in line for line in table([result]))


def test_dynamoth_loses_nothing_while_channels_move(network: Network) -> None:
    with LimitedCluster(network, 3) as cluster:
        result = measure_one("dynamoth", cluster, TINY, None)
    assert_all_accounted_for(result)
    assert (result.lost, result.duplicated, result.reordered, result.gaps) == (0, 0, 0, 0)


def test_a_redis_cluster_ends_subscriptions_that_only_a_command_brings_back(network: Network) -> None:
    with ShardedCluster(network, 3) as cluster:
        as_it_comes = measure_one("redis-cluster", cluster, TINY, 2.0)
    assert_all_accounted_for(as_it_comes)
    assert as_it_comes.lost > as_it_comes.due / 4


def test_an_application_that_looks_where_its_channel_is_loses_less(network: Network) -> None:
    with ShardedCluster(network, 3) as cluster:
        result = measure_one("redis-cluster, returning", cluster, TINY, 2.0)
    assert_all_accounted_for(result)
    assert result.lost < result.due / 4
