"""Plays RGame on a system, with as many players as a schedule says, and notes each second."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from statistics import mean
from typing import Any

from bench.game import GRACE_S, Schedule, Second, deliveries_due, overloaded_s
from bench.game_players import Game, Sample, play
from bench.game_systems import System
from bench.processors import BusyMeter, cpu_s
from bench.replication_network import Network
from bench.workers import Worker
from dynamoth.protocol.envelope import HEADER_BYTES
from dynamoth_demo.latency import LatencyCounts
from dynamoth_demo.scene import PUSH_BYTES
from dynamoth_sim.load.rgame import GameWorld

PROCESSES = 2
"""Processes of players."""


@dataclass(frozen=True, kw_only=True)
class Moment:
    """What happened in about one second; a row of the raw data. Load ratios are of what a machine may send."""

    system: str
    #: Seconds since the start.
    at_s: float
    players: int
    published: int
    publish_failed: int
    join_failed: int
    delivered: int
    lost: int
    out_of_order: int
    gaps: int
    responses: int
    #: Response times: as they were, and with the latency of a wide area network.
    response_ms_sum: float
    response_ms_p99: float | None
    wan_ms_sum: float
    wan_ms_p99: float | None
    #: Servers in use, and channels that began to move.
    servers: int
    moves: int
    load_ratio_mean: float
    load_ratio_max: float
    #: By server, in the order of their ids; those that are not in use, too.
    load_ratios: tuple[float, ...]
    #: Of all processors together; None where the system does not say.
    busy_ratio: float | None
    #: Cores that the busiest Redis process used, and that the players used.
    redis_cores_max: float
    player_cores: float

    def response(self, *, wan: bool) -> Second:
        """Return its response times, with or without the latency of a wide area network."""
        return Second(self.players, self.responses, self.wan_ms_sum if wan else self.response_ms_sum)


@dataclass(frozen=True, kw_only=True)
class GamePlan:
    """What is played: the fields of ``GameWorld``, the size of an update, how many players there are at what time."""

    world: Mapping[str, Any]
    payload_bytes: int
    schedule: Schedule
    seed: int = 1

    def bytes_due(self) -> list[dict[bytes, float]]:
        """Return for each second how many bytes servers should send on each channel, headers of networks aside."""
        update_bytes = self.payload_bytes + HEADER_BYTES + PUSH_BYTES
        due = deliveries_due(GameWorld(**self.world), self.schedule, self.seed)
        return [{channel: count * update_bytes for channel, count in second.items()} for second in due]


class _Meters:
    """Measures machines and processes from second to second."""

    def __init__(self, network: Network, system: System, bytes_per_s_max: int) -> None:
        self._network = network
        self._system = system
        self._bytes_per_s_max = bytes_per_s_max
        self._at = time.monotonic()
        self._sent = network.sent_bytes()
        self._cpu_s: dict[str, float] = {}
        self._busy = BusyMeter()
        self._players_cpu_s = 0.0

    def read(self, players_cpu_s: float) -> dict[str, Any]:
        """Return what was used since the last reading."""
        now = time.monotonic()
        elapsed_s, self._at = now - self._at, now
        sent, before = self._network.sent_bytes(), self._sent
        self._sent = sent
        ratios = {
            id_: (count - before.get(id_, 0)) / elapsed_s / self._bytes_per_s_max for id_, count in sorted(sent.items())
        }
        redis = {name: cpu_s(pid) for name, pid in self._system.processes.items() if name.startswith("server ")}
        cores = [(used - self._cpu_s.get(name, used)) / elapsed_s for name, used in redis.items()]
        self._cpu_s = redis
        busy, self._busy = self._busy, BusyMeter()
        players, self._players_cpu_s = players_cpu_s - self._players_cpu_s, players_cpu_s
        return {
            "ratios": ratios,
            "busy_ratio": busy.ratio(),
            "redis_cores_max": max(cores, default=0.0),
            "player_cores": players / elapsed_s,
        }


def run_game(
    name: str,
    system: System,
    network: Network,
    plan: GamePlan,
    bytes_per_s_max: int,
    say: Callable[[str], None],
    *,
    until_overloaded: bool = False,
) -> list[Moment]:
    """Play; return one moment for each second.

    Args:
        name: of the system, in the rows.
        system: what carries the game; it is ready.
        network: where its servers are.
        plan: what is played.
        bytes_per_s_max: the limit of each machine.
        say: called with a line for people every ten seconds.
        until_overloaded: whether to stop when response times have been too high for so long that it counts.

    Raises ChildEnded or WorkerFailed if a process has ended.

    """
    game = Game(system.transport, system.url, plan.world, plan.payload_bytes, plan.seed, time.monotonic())
    workers = [Worker(play, game, index, PROCESSES) for index in range(PROCESSES)]
    moments: list[Moment] = []
    try:
        began_cpu_s = _sample(workers, plan.schedule.players(0)).cpu_s
        meters = _Meters(network, system, bytes_per_s_max)
        meters.read(began_cpu_s)
        began = time.monotonic()
        for second in range(1, int(plan.schedule.duration_s) + 1):
            time.sleep(max(0.0, began + second - time.monotonic()))
            sample = _sample(workers, plan.schedule.players(second))
            moments.append(_moment(name, time.monotonic() - began, sample, system, meters.read(sample.cpu_s)))
            if second % 10 == 0:
                say(in_words(moments[-10:]))
            if until_overloaded and overloaded_s([each.response(wan=False) for each in moments]) > GRACE_S:
                break
    finally:
        for worker in workers:
            worker.stop()
    return moments


def _sample(workers: Sequence[Worker], players: int) -> Sample:
    """Set the number of players, and return what they saw since the last call."""
    total = Sample()
    for worker in workers:
        worker.send(players)
    for worker in workers:
        total.add(worker.receive())
    return total


def _moment(name: str, at_s: float, sample: Sample, system: System, used: Mapping[str, Any]) -> Moment:
    ratios: Mapping[str, float] = used["ratios"]
    moves = system.second(ratios)
    in_use = [ratios.get(id_, 0.0) for id_ in system.servers]
    return Moment(
        system=name,
        at_s=at_s,
        players=sample.players,
        published=sample.published,
        publish_failed=sample.publish_failed,
        join_failed=sample.join_failed,
        delivered=sample.delivered,
        lost=sample.lost,
        out_of_order=sample.out_of_order,
        gaps=sample.gaps,
        responses=sample.responses,
        response_ms_sum=sample.response_ms_sum,
        response_ms_p99=_p99(sample.response),
        wan_ms_sum=sample.wan_ms_sum,
        wan_ms_p99=_p99(sample.wan),
        servers=len(in_use),
        moves=moves,
        load_ratio_mean=mean(in_use),
        load_ratio_max=max(in_use),
        load_ratios=tuple(ratios.values()),
        busy_ratio=used["busy_ratio"],
        redis_cores_max=used["redis_cores_max"],
        player_cores=used["player_cores"],
    )


def _p99(counts: dict[int, int]) -> float | None:
    latencies = LatencyCounts()
    latencies.merge(counts)
    return latencies.quantile_ms(0.99)


def in_words(moments: Sequence[Moment]) -> str:
    """Return some seconds in one line, for people who wait."""
    last = moments[-1]
    responses = sum(each.responses for each in moments)
    time_ms = sum(each.response_ms_sum for each in moments) / responses if responses else float("nan")
    return (
        f"{last.system}, {last.at_s:.0f} s: {last.players} players, {last.servers} servers, response {time_ms:.0f} ms,"
        f" load ratio {last.load_ratio_mean:.2f} (max {last.load_ratio_max:.2f}),"
        f" {sum(each.moves for each in moments)} moves, {sum(each.lost for each in moments)} lost,"
        f" processors {last.busy_ratio or 0:.0%} busy"
    )


def write_parquet(moments: Sequence[Moment], file: Path) -> None:
    """Write the raw data, one row for each second and system."""
    arrow: Any = import_module("pyarrow")  # has no types
    parquet: Any = import_module("pyarrow.parquet")
    parquet.write_table(arrow.Table.from_pylist([asdict(moment) for moment in moments]), file)


def read_parquet(file: Path) -> list[Moment]:
    """Read what ``write_parquet`` has written."""
    parquet: Any = import_module("pyarrow.parquet")
    rows: list[dict[str, Any]] = parquet.read_table(file).to_pylist()
    return [Moment(load_ratios=tuple(row.pop("load_ratios")), **row) for row in rows]
