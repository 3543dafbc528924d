"""The benchmark of scalability: what it counts, and that each system carries a game and leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from bench import exit_status
from bench.game import Schedule
from bench.game_run import Moment, read_parquet, run_game, write_parquet
from bench.replication_network import Network, NotPossible
from bench.scalability import (
    DYNAMOTH,
    HASHING,
    REDIS_CLUSTER,
    SMALL,
    Run,
    as_json,
    possible,
    ratio,
    runs_of,
    table,
)
from bench.sharded_cluster import find_redis_7

ANY = Moment(
    system=DYNAMOTH,
    at_s=1.0,
    players=10,
    published=30,
    publish_failed=0,
    join_failed=0,
    delivered=90,
    lost=0,
    out_of_order=0,
    gaps=0,
    responses=30,
    response_ms_sum=300.0,
    response_ms_p99=20.0,
    wan_ms_sum=2400.0,
    wan_ms_p99=120.0,
    servers=2,
    moves=1,
    load_ratio_mean=0.4,
    load_ratio_max=0.5,
    load_ratios=(0.3, 0.5),
    busy_ratio=0.2,
    redis_cores_max=0.1,
    player_cores=0.3,
)


def run_of(system: str, held: int, tried: int) -> Run:
    """Return a run in which more than ``held`` players are too many for the servers."""
    return Run(
        system,
        tuple(
            replace(ANY, system=system, players=players, response_ms_sum=300.0 if players <= held else 30_000.0)
            for players in range(1, tried + 1)
        ),
    )


def test_no_system_can_hold_more_players_than_all_servers_together() -> None:
    most = SMALL.most_possible(seed=1)
    assert SMALL.players[0] < most < SMALL.players[1]
    assert replace(SMALL, servers=2).most_possible(seed=1) < most
    assert replace(SMALL, servers=100).most_possible(seed=1) == SMALL.players[1]


def test_the_ratio_is_of_players_held() -> None:
    runs = [run_of(DYNAMOTH, 160, 200), run_of(HASHING, 100, 200)]
    # The mean is over 5 s, so that the first second of trouble ends it.
    assert [run.held() for run in runs] == [160, 100]
    assert ratio(runs, HASHING) == 1.6
    assert ratio(runs, REDIS_CLUSTER) is None
    assert ratio([run_of(DYNAMOTH, 160, 200), run_of(HASHING, 0, 50)], HASHING) is None


def test_the_wide_area_counts_separately() -> None:
    late = replace(ANY, wan_ms_sum=30 * 151.0)
    run = Run(DYNAMOTH, (late,) * 30)
    assert (run.held(), run.held(wan=True)) == (10, 0)


def test_figures_are_of_the_time_before_it_was_too_much() -> None:
    run = run_of(DYNAMOTH, 100, 130)
    results = replace(
        run, moments=(*run.moments[:100], *(replace(each, lost=1) for each in run.moments[100:]))
    ).as_json()
    assert results["lost"] == 0 and results["moves"] == 100
    assert results["response_ms"] == pytest.approx(10.0)
    assert results["response_ms_wan"] == pytest.approx(80.0)


def test_the_table_has_the_numbers_of_the_paper() -> None:
    runs = [run_of(DYNAMOTH, 160, 200), run_of(HASHING, 100, 200), run_of(REDIS_CLUSTER, 80, 200)]
    lines = list(table(as_json(SMALL, runs, 1)))
    assert any("160" in line and "100" in line and "80" in line for line in lines)
    assert any("almost 1000" in line and "625" in line for line in lines)
    assert any("1.60x" in line and "paper: 1.6x" in line for line in lines)
    assert any("redis-cluster: 2.00x" in line for line in lines)


def test_raw_data_are_read_as_they_were_written(tmp_path: Path) -> None:
    moments = [ANY, replace(ANY, system=HASHING, busy_ratio=None, response_ms_p99=None, load_ratios=(0.1,))]
    write_parquet(moments, tmp_path / "raw.parquet")
    assert read_parquet(tmp_path / "raw.parquet") == moments
    assert [(run.system, len(run.moments)) for run in runs_of(moments)] == [(DYNAMOTH, 1), (HASHING, 1)]


@pytest.fixture
def network() -> Iterator[Network]:
    """Half a megabyte per second; skipped where networks cannot be made."""
    try:
        find_redis_7()
        with Network(SMALL.bytes_per_s_max) as network:
            yield network
    except NotPossible as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", [DYNAMOTH, HASHING, REDIS_CLUSTER])
def test_a_system_carries_a_game_at_its_limits(name: str, network: Network) -> None:
    setting = replace(SMALL, servers=2)
    plan = replace(setting.plan(1), schedule=Schedule(((0.0, 12), (6.0, 14))))
    said: list[str] = []
    with setting.system(name, network, plan) as system:
        moments = run_game(name, system, network, plan, setting.bytes_per_s_max, said.append)
    assert [moment.players for moment in moments] == [12, 13, 13, 13, 14, 14]
    assert sum(moment.responses for moment in moments) > 50
    assert sum(moment.lost + moment.out_of_order + moment.publish_failed for moment in moments) == 0
    # What players received has passed the limits.
    times_s = [later.at_s - earlier.at_s for earlier, later in pairwise([replace(moments[0], at_s=0.0), *moments])]
    sent_s = sum(sum(moment.load_ratios) * time_s for moment, time_s in zip(moments, times_s, strict=True))
    assert sent_s * setting.bytes_per_s_max > sum(moment.delivered for moment in moments[:-1]) * plan.payload_bytes
    assert all(moment.servers == (1 if name == HASHING else 2) for moment in moments)


def left(process: int) -> list[str]:
    """Return the network interfaces and namespaces of a process."""
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout.splitlines()
    spaces = Path("/run/netns")
    names = [path.name for path in spaces.iterdir()] if spaces.is_dir() else []
    return [line for line in [*links, *names] if f"dyb{process}" in line]


def test_a_run_that_is_interrupted_leaves_nothing(network: Network) -> None:
    command = [sys.executable, "-m", "bench.scalability", "--small", "--only", DYNAMOTH]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, process_group=0) as process:
        deadline = time.monotonic() + 60
        while len(left(process.pid)) < 2 * SMALL.servers and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)  # until it has made all of its machines
        assert len(left(process.pid)) >= 2 * SMALL.servers
        os.kill(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == exit_status.INTERRUPTED, said
    assert left(process.pid) == []


def test_what_can_be_gained_depends_on_the_hashes() -> None:
    lines = [*possible(SMALL, (1, 2))]
    (evenly, by_hash), (evenly_2, by_hash_2) = (SMALL.held_by_queues(seed) for seed in (1, 2))
    assert evenly > by_hash and evenly_2 > by_hash_2
    assert evenly / by_hash != evenly_2 / by_hash_2
    assert lines[-3].split() == ["1", str(evenly), str(by_hash), f"{evenly / by_hash:.2f}x"]
