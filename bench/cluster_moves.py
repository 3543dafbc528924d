"""Channels move all the time: what is lost, and how much slower it gets. Dynamoth against a Redis Cluster.

Run as root with ``python -m bench.cluster_moves``; ``--help`` tells the rest. It takes about three minutes. 24 channels
with 4 listeners and 1 publisher of 10 messages per second each, at 3 servers. At first nothing moves, then one channel
after the other moves to the next server, for half a minute. Three systems do this, one after the other:

dynamoth
    The balancer moves channels. Each move is complete before that channel moves again.
redis-cluster
    Sharded pub/sub of redis-server 7, with redis-py's asyncio cluster client as it comes. The slots of the channels are
    migrated as ``redis-cli --cluster reshard`` does it. They have no keys. The server ends the subscriptions of a slot
    that leaves it, and redis-py looks for its place when a command of the same client is answered with MOVED.
redis-cluster, returning
    The same with an application that helps: it sends such a command as soon as its subscription has ended.

Dynamoth goes first, with as many moves at a time as ``MOVERS``. The others get as many moves per second. A message is
due to all listeners of its channel.
Networks are as in ``bench.replication``: 100 Mbit/s for each server, which is ample here.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from redis.crc import key_slot

from bench import exit_status
from bench.cluster_moves_clients import TRANSPORTS, Clients, Heard, listen, publish
from bench.processors import BusyMeter
from bench.replication_network import REQUEST_TIMEOUT_S, LimitedCluster, Network, NotPossible
from bench.sharded_cluster import SLOTS, ShardedCluster, find_redis_7
from bench.workers import Worker
from dynamoth_cli.admin import ask_balancer
from dynamoth_cli.local.child import interrupted_by_signals
from dynamoth_client.asyncio import Redis
from dynamoth_demo.latency import LatencyCounts
from dynamoth_link.urls import parse_cluster_url

SERVERS = 3
BYTES_PER_S_MAX = 12_500_000
INTERVAL_S = 0.1
MOVERS = 4
"""Moves at a time."""

DYNAMOTH = "dynamoth"

Cluster = LimitedCluster | ShardedCluster


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The size of the benchmark."""

    channels: int
    listeners_per_channel: int
    rest_s: float
    moving_s: float


FULL = Setting(channels=24, listeners_per_channel=4, rest_s=10.0, moving_s=30.0)
SMALL = Setting(channels=12, listeners_per_channel=3, rest_s=4.0, moving_s=10.0)
"""In ``make bench``."""


@dataclass(frozen=True)
class Result:
    """What became of the messages in one system. Times in milliseconds; None when nothing came."""

    system: str
    moves: int
    moves_per_s: float
    published: int
    due: int
    delivered: int
    lost: int
    duplicated: int
    reordered: int
    gaps: int
    rest_ms: Mapping[str, float | None]
    moving_ms: Mapping[str, float | None]
    busy_ratio: float | None


QUANTILES = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999}


def quantiles_ms(counts: Mapping[int, int]) -> dict[str, float | None]:
    """Return the quantiles that are shown."""
    latencies = LatencyCounts()
    latencies.merge(counts)
    return {name: latencies.quantile_ms(ratio) for name, ratio in QUANTILES.items()}


def measure_one(system: str, cluster: Cluster, setting: Setting, rate_per_s: float | None) -> Result:
    """Run the clients, let them rest, move channels, and judge. ``rate_per_s``: see ``move_slots``."""
    channels = tuple(b"channel:%d" % number for number in range(setting.channels))
    clients = Clients(system, cluster.url, channels, setting.listeners_per_channel, INTERVAL_S)
    workers = [Worker(listen, clients), Worker(publish, clients)]
    listeners, publishers = workers
    try:
        assert listeners.receive() == "ready"
        publishers.send("begin")
        time.sleep(setting.rest_s)  # the rest is part of the measurement
        listeners.send(time.monotonic_ns())
        meter, began = BusyMeter(), time.monotonic()
        if isinstance(cluster, LimitedCluster):
            moves = asyncio.run(move_channels(cluster, channels, setting.moving_s))
        else:
            assert rate_per_s is not None, "a Redis Cluster moves as many channels as Dynamoth did"
            moves = move_slots(cluster, channels, setting.moving_s, rate_per_s)
        elapsed_s, busy_ratio = time.monotonic() - began, meter.ratio()
        cluster.check()
        publishers.send("stop")
        published: list[int] = publishers.receive()
        listeners.send(published)
        heard: Heard = listeners.receive()
    finally:
        for worker in workers:
            worker.stop()
    return Result(
        system=system,
        moves=moves,
        moves_per_s=moves / elapsed_s,
        published=sum(published),
        due=sum(published) * setting.listeners_per_channel,
        delivered=heard.totals["delivered"],
        lost=heard.totals["lost"] + heard.totals["covered_losses"],
        duplicated=heard.totals["duplicated"],
        reordered=heard.totals["reordered"],
        gaps=heard.gaps,
        rest_ms=quantiles_ms(heard.rest),
        moving_ms=quantiles_ms(heard.moving),
        busy_ratio=busy_ratio,
    )


# Moving.


async def move_channels(cluster: LimitedCluster, channels: Sequence[bytes], duration_s: float) -> int:
    """Have the balancer move one channel after the other to the next server; return how many moves have settled."""
    deadline = time.monotonic() + duration_s
    address = parse_cluster_url(cluster.url)
    async with Redis.from_url(cluster.url) as client:
        where = {channel: cluster.server_ids.index((await client.plan(channel)).servers[0]) for channel in channels}
    settled = 0

    async def keep_moving(mine: Sequence[bytes]) -> None:
        nonlocal settled
        for channel in itertools.cycle(mine):
            if time.monotonic() >= deadline:
                return
            where[channel] = (where[channel] + 1) % len(cluster.server_ids)
            move = {"channel": channel, "to": cluster.server_ids[where[channel]]}
            await ask_balancer(address, "move", move, timeout_s=REQUEST_TIMEOUT_S)
            settled += 1

    async with asyncio.TaskGroup() as tasks:
        for first in range(min(MOVERS, len(channels))):
            tasks.create_task(keep_moving(channels[first::MOVERS]))
    return settled


def move_slots(cluster: ShardedCluster, channels: Sequence[bytes], duration_s: float, rate_per_s: float) -> int:
    """Migrate the slot of one channel after the other to the next server, so many per second; return how many."""
    count = len(cluster.server_ids)
    ids = [cluster.ask(id_, "CLUSTER", "MYID").decode() for id_ in cluster.server_ids]
    where = {key_slot(channel): _owner(key_slot(channel), count) for channel in channels}
    began = time.monotonic()
    for moved, slot in enumerate(itertools.cycle(where)):
        due = began + moved / rate_per_s
        if due >= began + duration_s:
            return moved
        time.sleep(max(0.0, due - time.monotonic()))
        source, target = where[slot], (where[slot] + 1) % count
        where[slot] = target
        setslot = ("CLUSTER", "SETSLOT", str(slot))
        cluster.ask(cluster.server_ids[target], *setslot, "IMPORTING", ids[source])
        cluster.ask(cluster.server_ids[source], *setslot, "MIGRATING", ids[target])
        others = [index for index in range(count) if index not in (source, target)]
        for index in (target, source, *others):
            cluster.ask(cluster.server_ids[index], *setslot, "NODE", ids[target])
    raise AssertionError("there are channels")


def _owner(slot: int, servers: int) -> int:
    """Return which server ``ShardedCluster`` gives a slot to."""
    return next(index for index in range(servers) if slot < SLOTS * (index + 1) // servers)


def measure(setting: Setting, say: Callable[[str], None]) -> list[Result]:
    """Measure all systems, each in a network of its own. Raises NotPossible."""
    find_redis_7()
    results: list[Result] = []
    for system in TRANSPORTS:
        with Network(BYTES_PER_S_MAX) as network:
            make = LimitedCluster if system == DYNAMOTH else ShardedCluster
            with make(network, SERVERS) as cluster:
                result = measure_one(system, cluster, setting, results[0].moves_per_s if results else None)
        say(f"{system}: {result.moves} moves, {result.lost} of {result.due} lost, {_shown(result.moving_ms)}")
        results.append(result)
    return results


# What people read.


def _shown(times_ms: Mapping[str, float | None]) -> str:
    return ", ".join(f"{name} {_ms(value)}" for name, value in times_ms.items())


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} ms"


def table(results: Sequence[Result]) -> Iterator[str]:
    """Give the lines of a table."""
    row = "{:30}" + "{:>26}" * len(results)
    yield row.format("", *(result.system for result in results))

    def line(what: str, cell: Callable[[Result], str]) -> str:
        return row.format(what, *map(cell, results))

    yield line("moves (per second)", lambda each: f"{each.moves} ({each.moves_per_s:.1f})")
    yield line("messages due to listeners", lambda each: str(each.due))
    yield line("lost", lambda each: f"{each.lost} ({each.lost / each.due:.2%})")
    yield line("gap events", lambda each: str(each.gaps))
    yield line("doubled, out of order", lambda each: f"{each.duplicated}, {each.reordered}")
    for name in QUANTILES:
        times = [f"{_ms(each.rest_ms[name])}, {_ms(each.moving_ms[name])}" for each in results]
        yield row.format(f"{name} at rest, while moving", *times)
    yield line("processors busy", lambda each: f"{each.busy_ratio or 0:.0%}")


def main() -> int:
    """Measure and print. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.cluster_moves", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="fewer channels, and a minute in all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    arguments = parser.parse_args()
    try:
        with interrupted_by_signals():
            results = measure(SMALL if arguments.small else FULL, _say)
    except NotPossible as error:
        sys.stderr.write(f"skipped: the benchmark of moves beside a Redis Cluster {error}\n")
        return exit_status.SKIPPED
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: networks and processes are removed\n")
        return exit_status.INTERRUPTED
    sys.stdout.write("\n".join([*table(results), ""]))
    if arguments.json is not None:
        shown: dict[str, Any] = {result.system: asdict(result) for result in results}
        arguments.json.write_text(json.dumps(shown, indent=2) + "\n")
    return 0


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


if __name__ == "__main__":
    sys.exit(main())
