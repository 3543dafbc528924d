"""One busy channel that is moved to and fro between two servers: what is lost, and how much slower it gets.

Run with ``python -m bench.moves``; ``--help`` tells the rest. Real servers, agents and balancer; subscribers and
publishers are processes of their own. Every delivery is judged by the checker that the simulator uses. A message
counts as "during a move" when it was published between the request of a move and the answer that it has settled.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import sys
import time
from array import array
from bisect import bisect_right
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from struct import Struct
from typing import Any

from dynamoth_cli.admin import ask_balancer
from dynamoth_cli.cluster import LocalCluster
from dynamoth_cli.latency import LatencyCounts
from dynamoth_cli.loops import run
from dynamoth_client.asyncio import GapInfo, Redis
from dynamoth_link.urls import parse_cluster_url
from dynamoth_sim.guarantees import Audit

CHANNEL = b"busy"
REST_S = 5.0
"""How long the latency at rest is measured before the first move."""
PAUSE_S = 0.1
"""Rest between two moves."""
MOVE_TIMEOUT_S = 30.0
ARRIVAL_TIMEOUT_S = 15.0
LATENCY_SAMPLE = 10
"""Each subscriber notes the latency of every tenth message."""
HEAD = Struct(">QIQ")
"""Number, publisher, time of sending in nanoseconds."""
PAYLOAD_BYTES = 64


@dataclass(frozen=True)
class Load:
    """How busy the channel is."""

    subscribers: int
    publishers: int
    messages_per_s: float
    moves: int
    processes: int


@dataclass(frozen=True)
class Result:
    """What came out. Latencies in milliseconds, times in seconds."""

    published: int
    delivered: int
    lost: int
    duplicated: int
    reordered: int
    gaps: int
    moves: int
    settled_s_p50: float
    settled_s_max: float
    rest_ms_p50: float
    rest_ms_p99: float
    moving_ms_p50: float
    moving_ms_p99: float

    @property
    def clean(self) -> bool:
        """Whether every message was delivered exactly once and in order."""
        return not (self.lost or self.duplicated or self.reordered or self.gaps)


# Subscribers.


class Subscribers:
    """Some subscribers in one process."""

    def __init__(self, url: str, numbers: range) -> None:
        self._url = url
        self._numbers = numbers
        self._audit = Audit(live=False)
        self._sent_ns = array("q")
        self._latency_ns = array("q")
        self._all_confirmed = asyncio.Event()
        self._gaps: list[str] = []

    async def work(self, pipe: Connection) -> None:
        """Subscribe, say ``ready``, receive until told what was published and when channels moved, answer, end."""
        loop = asyncio.get_running_loop()
        async with Redis.from_url(self._url) as client:
            pubsubs = [client.pubsub(on_gap=self._on_gap) for _ in self._numbers]
            for pubsub in pubsubs:
                await pubsub.subscribe(CHANNEL)
            readers = [loop.create_task(self._read(*pair)) for pair in zip(self._numbers, pubsubs, strict=True)]
            await self._all_confirmed.wait()
            pipe.send("ready")
            published, moves = await loop.run_in_executor(None, pipe.recv)
            await self._arrived(sum(published) * len(pubsubs))
            for reader in readers:
                reader.cancel()
            for publisher, number in enumerate(published):
                self._audit.published_upto(publisher, CHANNEL, number)
            self._audit.finish(time.monotonic())
            pipe.send({**asdict(self._audit.totals), "gap_reasons": self._gaps[:5], **self._latencies(moves)})

    async def _arrived(self, deliveries: int) -> None:
        """Wait until everything has come, or nothing does any more."""
        deadline = time.monotonic() + ARRIVAL_TIMEOUT_S
        # An event for each delivery would be part of what is measured.
        while self._audit.totals.delivered < deliveries and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    async def _read(self, number: int, pubsub: Any) -> None:
        async for message in pubsub.listen():
            if message["type"] == "message":
                self._take(number, message["data"])
            elif message["type"] == "subscribe":
                self._audit.confirmed(number, CHANNEL, time.monotonic())
                if self._audit.open_count(CHANNEL) == len(self._numbers):
                    self._all_confirmed.set()

    def _take(self, subscriber: int, payload: bytes) -> None:
        number, publisher, sent_ns = HEAD.unpack_from(payload)
        self._audit.delivered(subscriber, CHANNEL, publisher, number, 0.0)
        if (number + subscriber) % LATENCY_SAMPLE == 0:
            self._sent_ns.append(sent_ns)
            self._latency_ns.append(time.monotonic_ns() - sent_ns)

    def _on_gap(self, gap: GapInfo) -> None:
        self._gaps.append(gap.reason)
        self._audit.gap(0, CHANNEL, None, None, time.monotonic())

    def _latencies(self, moves: list[tuple[int, int]]) -> dict[str, Any]:
        """Tell the latencies at rest from those during the ``moves`` (begin, end), which are in order."""
        rest, moving = LatencyCounts(), LatencyCounts()
        begins = [begin for begin, _ in moves]
        for sent_ns, latency_ns in zip(self._sent_ns, self._latency_ns, strict=True):
            index = bisect_right(begins, sent_ns) - 1
            during = index >= 0 and sent_ns <= moves[index][1]
            (moving if during else rest).add(latency_ns)
        return {"rest": rest.counts, "moving": moving.counts}


def subscribe(url: str, numbers: range, pipe: Connection) -> None:
    """Be a process of subscribers."""
    run(Subscribers(url, numbers).work(pipe))


# Publishers.


async def publish_at_rate(url: str, load: Load, pipe: Connection) -> None:
    """Publish, each publisher with a client of its own and one message after the other, until told to stop."""
    stop = asyncio.Event()

    async def publish(publisher: int) -> int:
        interval_s = load.publishers / load.messages_per_s
        padding = bytes(PAYLOAD_BYTES - HEAD.size)
        number = 0
        async with Redis.from_url(url) as client:
            due = time.monotonic() + interval_s * publisher / load.publishers
            while not stop.is_set():
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                due += interval_s
                number += 1
                await client.publish(CHANNEL, HEAD.pack(number, publisher, time.monotonic_ns()) + padding)
        return number

    tasks = [asyncio.create_task(publish(publisher)) for publisher in range(load.publishers)]
    await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
    stop.set()
    pipe.send(await asyncio.gather(*tasks))


def publish(url: str, load: Load, pipe: Connection) -> None:
    """Be the process of the publishers."""
    run(publish_at_rate(url, load, pipe))


# The measurement.


def move_to_and_fro(cluster: LocalCluster, count: int) -> list[tuple[int, int]]:
    """Move the channel ``count`` times; return when each move was asked for and when it had settled."""
    address = parse_cluster_url(cluster.url)
    moves: list[tuple[int, int]] = []

    async def move(target: str) -> None:
        await ask_balancer(address, "move", {"channel": CHANNEL, "to": target}, timeout_s=MOVE_TIMEOUT_S)

    async def where() -> str:
        async with Redis.from_url(cluster.url) as client:
            return (await client.plan(CHANNEL)).servers[0]

    first = asyncio.run(where())
    second = next(server for server in cluster.server_ids if server != first)
    for index in range(count):
        time.sleep(PAUSE_S)  # rest between moves is part of the workload
        began_ns = time.monotonic_ns()
        asyncio.run(move((second, first)[index % 2]))
        moves.append((began_ns, time.monotonic_ns()))
        cluster.check()
    return moves


def measure(load: Load) -> Result:
    """Run the load on a cluster of two servers."""
    context = multiprocessing.get_context("spawn")
    with LocalCluster(2) as cluster:  # of ample capacity, so that the balancer moves nothing by itself
        pipes: list[Connection] = []
        share = -(-load.subscribers // load.processes)
        workers = [
            (subscribe, (cluster.url, range(first, min(first + share, load.subscribers))))
            for first in range(0, load.subscribers, share)
        ]
        processes = [_start(context, target, arguments, pipes) for target, arguments in workers]
        for pipe in pipes:
            assert pipe.recv() == "ready"
        processes.append(_start(context, publish, (cluster.url, load), pipes))
        time.sleep(REST_S)  # the latency at rest is measured meanwhile
        moves = move_to_and_fro(cluster, load.moves)
        pipes[-1].send("stop")
        published: list[int] = pipes[-1].recv()
        for pipe in pipes[:-1]:
            pipe.send((published, moves))
        answers = [pipe.recv() for pipe in pipes[:-1]]
        for process in processes:
            process.join()
    return _sum(published, moves, answers)


def _start(context: Any, target: Any, arguments: tuple[Any, ...], pipes: list[Connection]) -> Any:
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(*arguments, theirs), daemon=True)
    process.start()
    pipes.append(ours)
    return process


def _sum(published: list[int], moves: list[tuple[int, int]], answers: list[dict[str, Any]]) -> Result:
    rest, moving = LatencyCounts(), LatencyCounts()
    for answer in answers:
        rest.merge(answer["rest"])
        moving.merge(answer["moving"])
        for reason in answer["gap_reasons"]:
            sys.stderr.write(f"gap: {reason}\n")
    settled_s = sorted((end - begin) / 1e9 for begin, end in moves)

    def total(name: str) -> int:
        return sum(answer[name] for answer in answers)

    def quantile(latencies: LatencyCounts, ratio: float) -> float:
        value = latencies.quantile_ms(ratio)
        assert value is not None, "no latency was measured"
        return value

    return Result(
        published=sum(published),
        delivered=total("delivered"),
        lost=total("lost"),
        duplicated=total("duplicated"),
        reordered=total("reordered"),
        gaps=total("gaps"),
        moves=len(moves),
        settled_s_p50=settled_s[len(settled_s) // 2],
        settled_s_max=settled_s[-1],
        rest_ms_p50=quantile(rest, 0.5),
        rest_ms_p99=quantile(rest, 0.99),
        moving_ms_p50=quantile(moving, 0.5),
        moving_ms_p99=quantile(moving, 0.99),
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.moves", description=__doc__)
    parser.add_argument("--subscribers", type=int, default=100)
    parser.add_argument("--publishers", type=int, default=10)
    parser.add_argument("--messages-per-s", type=float, default=1000.0)
    parser.add_argument("--moves", type=int, default=100)
    parser.add_argument("--processes", type=int, default=2, help="processes of subscribers")
    parser.add_argument("--json", action="store_true")
    arguments = vars(parser.parse_args())
    as_json = arguments.pop("json")
    result = measure(Load(**arguments))
    if as_json:
        sys.stdout.write(json.dumps(asdict(result)) + "\n")
        return
    for name, value in asdict(result).items():
        sys.stdout.write(f"{name:16} {value:.3f}\n" if isinstance(value, float) else f"{name:16} {value}\n")


if __name__ == "__main__":
    main()
