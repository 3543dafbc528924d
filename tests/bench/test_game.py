"""The benchmarks of RGame: what they decide, and that players of both kinds hear each other."""

from __future__ import annotations

import time
from collections.abc import Iterator
from random import Random
from statistics import mean

import pytest

from bench.game import (
    AddWhenLoaded,
    FairHashing,
    Schedule,
    Second,
    WideArea,
    mean_response_ms,
    players_held,
    queued,
)
from bench.game_players import Game, Sample, play
from bench.replication_network import LimitedCluster, Network, NotPossible
from bench.sharded_cluster import ShardedCluster, find_redis_7
from bench.workers import Worker
from dynamoth.plan.slots import SLOTS


def test_a_schedule_goes_straight_from_point_to_point() -> None:
    schedule = Schedule(((0.0, 100), (10.0, 200), (20.0, 50)))
    assert [schedule.players(at_s) for at_s in (-1, 0, 5, 10, 12, 20, 99)] == [100, 100, 150, 200, 170, 50, 50]
    assert schedule.duration_s == 20.0


def test_a_schedule_that_goes_back_in_time_is_refused() -> None:
    with pytest.raises(ValueError, match="increase"):
        Schedule(((0.0, 1), (0.0, 2)))


def test_a_server_that_is_added_to_consistent_hashing_takes_its_share_from_each_other() -> None:
    hashing = FairHashing([b"c%d" % number for number in range(1000)], SLOTS)
    where = hashing.add("s1")
    assert set(where.values()) == {"s1"} and len(where) == 1000
    for count in range(2, 9):
        before = {server: hashing.slots_of(server) for server in hashing.servers}
        moved = hashing.add(f"s{count}")
        assert set(moved.values()) == {f"s{count}"}
        where.update(moved)
        assert all(hashing.slots_of(server) < slots for server, slots in before.items())
        assert all(abs(hashing.slots_of(server) - SLOTS / count) <= 1 for server in hashing.servers[:-1])
        assert sum(map(hashing.slots_of, hashing.servers)) == SLOTS
        assert len(moved) == pytest.approx(1000 / count, rel=0.3)


def test_consistent_hashing_gets_a_server_when_one_is_loaded_for_long_enough() -> None:
    rule = AddWhenLoaded(servers_max=2, averaging_s=3, wait_s=5.0)
    added = [rule.observe({"s1": 0.9, "s2": 0.0}, 1) for _ in range(12)]
    assert [second for second, now in enumerate(added) if now] == [2, 7]
    assert not any(rule.observe({"s1": 0.9, "s2": 0.9}, 2) for _ in range(12))
    assert not any(AddWhenLoaded(servers_max=2).observe({"s1": 0.8}, 1) for _ in range(12))


def game(*stretches: tuple[int, float | None]) -> list[Second]:
    """Return seconds with one more player each, of these lengths and response times."""
    times = [response_ms for length, response_ms in stretches for _ in range(length)]
    return [
        Second(players, 0 if response_ms is None else 1, response_ms or 0.0)
        for players, response_ms in enumerate(times, 1)
    ]


def test_players_are_held_until_responses_stay_slow() -> None:
    assert players_held(game((100, 75.0))) == 100
    assert players_held(game((50, 75.0), (10, 400.0), (40, 75.0))) == 100
    assert 50 <= players_held(game((50, 75.0), (50, 400.0), (100, 75.0))) < 55
    assert 50 <= players_held(game((50, 75.0), (50, None))) < 60
    assert players_held(game((100, 151.0))) == 0


def test_the_wide_area_is_as_it_is_described() -> None:
    wide_area = WideArea(Random(1))
    assert mean(wide_area.round_trip_ns() / 1e6 for _ in range(20_000)) == pytest.approx(68, rel=0.02)


@pytest.fixture
def network() -> Iterator[Network]:
    """Two megabytes per second; skipped where networks cannot be made."""
    try:
        with Network(2_000_000) as network:
            yield network
    except NotPossible as error:
        pytest.skip(str(error))


def hear_each_other(transport: str, url: str) -> Sample:
    """Play with 6 players until they have walked over tiles and heard each other."""
    world = {"tiles_per_side": 2, "tile_side_m": 2.0, "speed_m_per_s": 5.0}
    worker = Worker(play, Game(transport, url, world, 200, 1, time.monotonic()), 0, 1)
    total = Sample()
    try:
        deadline = time.monotonic() + 30
        while total.delivered < 100 and time.monotonic() < deadline:
            worker.send(6)
            sample: Sample = worker.receive()
            assert sample.players == 6
            total.add(sample)
            time.sleep(0.2)  # samples are of what happens between them
        worker.send(2)
        assert worker.receive().players == 2
        worker.send(None)
        assert worker.receive() is None
    finally:
        worker.stop()
    return total


def assert_heard(total: Sample) -> None:
    assert total.delivered >= 100
    assert 0 < total.responses == sum(total.wan.values()) <= total.published
    assert 0.0 < total.response_ms_sum < total.wan_ms_sum
    assert not (total.publish_failed or total.out_of_order or total.gaps)


def test_players_of_dynamoth_hear_each_other(network: Network) -> None:
    with LimitedCluster(network, 2, settings={"balancer.wait_s": 4.0}, paused=False) as cluster:
        total = hear_each_other("dynamoth", cluster.url)
        assert_heard(total)
        assert total.lost == 0
        assert sum(network.sent_bytes().values()) > total.delivered * 200


def test_players_of_a_redis_cluster_hear_each_other(network: Network) -> None:
    try:
        find_redis_7()
    except NotPossible as error:
        pytest.skip(str(error))
    with ShardedCluster(network, 3) as cluster:
        assert_heard(hear_each_other("sharded", cluster.url))
        cluster.check()


def test_a_server_is_a_queue_whose_messages_wait_for_those_before() -> None:
    first, second, third = queued([[150.0, 50.0], [50.0, 50.0], [100.0, 0.0]], [1, 2, 3], 100.0)
    assert (first.players, first.responses) == (1, 150)
    assert mean_response_ms([first]) == pytest.approx(100 * 500 / 150)
    assert (second.responses, second.response_ms_sum) == (150, 0.0), "what waited was sent with what was due"
    assert (third.players, third.responses, third.response_ms_sum) == (3, 100, 0.0)
