"""The benchmark of elasticity: how it judges, and the servers that it starts and frees when the balancer asks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest

from bench.elastic_machines import Machines
from bench.elasticity import SMALL, Outcome, judge, longest_s, table
from bench.game_run import Moment
from bench.game_systems import USABLE_RATIO
from bench.replication_network import Network, NotPossible
from dynamoth_balancer.process.provisioners import CommandProvisioner, ProvisionerFailed
from dynamoth_link.query import query
from dynamoth_link.urls import parse_server_url

ANY = Moment(
    system="dynamoth",
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
    servers=1,
    moves=0,
    load_ratio_mean=0.5,
    load_ratio_max=0.5,
    load_ratios=(0.5,),
    busy_ratio=0.2,
    redis_cores_max=0.1,
    player_cores=0.3,
)


def judged(*stretches: tuple[int, int, float], slow: range = range(0)) -> Outcome:
    """Judge a run of stretches, each with its seconds, servers, and what is due in parts of what one can send."""
    seconds = [(servers, load) for count, servers, load in stretches for _ in range(count)]
    moments = [replace(ANY, at_s=float(at_s), servers=servers) for at_s, (servers, _) in enumerate(seconds, 1)]
    moments = [replace(each, response_ms_sum=30 * 400.0) if each.at_s in slow else each for each in moments]
    return judge(moments, SMALL, [load * SMALL.bytes_per_s_max * USABLE_RATIO for _, load in seconds])


def test_the_longest_time_has_no_break() -> None:
    assert longest_s([True, True, False, True], [1.0, 2.0, 9.0, 1.5]) == 3.0
    assert longest_s([False], [1.0]) == 0.0


def test_server_seconds_are_compared_with_the_fewest_servers_for_the_peak() -> None:
    outcome = judged((30, 1, 0.4), (30, 4, 2.4), (40, 1, 0.4))
    assert outcome.server_s == 30 + 30 * 4 + 40
    assert (outcome.fixed_servers, outcome.fixed_server_s) == (3, 300.0)
    assert outcome.ratio == pytest.approx(190 / 300)
    assert outcome.servers_most == 4
    assert any("0.63" in line for line in table(outcome, SMALL))


def test_servers_follow_late_when_there_are_too_few_or_too_many_for_long() -> None:
    outcome = judged((20, 1, 0.1), (25, 1, 0.9), (20, 2, 0.9), (35, 2, 0.1))
    # Means over 5 s cross the bounds some seconds after the load.
    assert 20 <= outcome.short_s <= 25
    assert 30 <= outcome.spare_s <= 35
    assert judged((50, 2, 1.0)).short_s == 0.0
    assert judged((50, SMALL.servers_max, 10.0)).short_s == 0.0, "there are no more"


def test_slow_responses_count_without_a_break() -> None:
    assert 28 <= judged((50, 1, 0.1), slow=range(11, 41)).slow_s <= 34
    assert judged((50, 1, 0.1)).slow_s == 0


def test_what_is_due_follows_the_players_and_not_what_was_sent() -> None:
    plan = SMALL.plan(1)
    due = [sum(second.values()) for second in plan.bytes_due()]
    assert len(due) == int(plan.schedule.duration_s)
    players = [plan.schedule.players(at_s) for at_s in range(len(due))]
    alone = 3 * 2 * 2069  # a player who is alone in a tile, to itself and the agent
    assert all(each >= count * alone * 0.8 for each, count in zip(due, players, strict=True)), "all are somewhere"
    assert mean(due[50:65]) > 2 * mean(due[90:]), "40 players against 15"


@pytest.fixture
def network() -> Iterator[Network]:
    """Half a megabyte per second; skipped where networks cannot be made."""
    try:
        with Network(500_000) as network:
            yield network
    except NotPossible as error:
        pytest.skip(str(error))


def test_servers_are_started_listed_and_freed_by_a_command(network: Network) -> None:
    with Machines(network, 475_000) as machines:
        provisioner = CommandProvisioner([machines.command])
        url = asyncio.run(provisioner.start("auto-1-1"))
        assert asyncio.run(provisioner.start("auto-1-1")) == url, "requests may be repeated"
        assert asyncio.run(provisioner.running()) == machines.servers == ["auto-1-1"]
        (reply,) = asyncio.run(query(parse_server_url(url), (b"PING",)))
        assert reply in (b"PONG", "PONG")
        assert sorted(machines.processes) == ["agent auto-1-1", "server auto-1-1"]
        machines.check()
        processes = list(machines.processes.values())
        asyncio.run(provisioner.free("auto-1-1"))
        asyncio.run(provisioner.free("auto-1-1"))
        assert machines.servers == []
        assert not any(Path(f"/proc/{process}").exists() for process in processes)
        other = asyncio.run(provisioner.start("auto-1-2"))
        assert other != url
        left = list(machines.processes.values())
        command = Path(machines.command)
    assert not any(Path(f"/proc/{process}").exists() for process in left)
    assert not command.exists()


def silent_command(address: str, folder: Path) -> list[str]:
    return ["sleep", "60"]


def test_a_server_that_cannot_be_started_is_a_failure_and_leaves_nothing(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.elastic_machines.READY_TIMEOUT_S", 0.2)
    monkeypatch.setattr("bench.elastic_machines.redis_command", silent_command)
    with Machines(network, 475_000) as machines:
        with pytest.raises(ProvisionerFailed, match="status 1"):
            asyncio.run(CommandProvisioner([machines.command]).start("auto-1-1"))
        assert machines.servers == []
        machines.check()
