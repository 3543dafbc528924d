"""One busy channel whose assignment is changed again and again: what is lost, and how much slower it gets.

What ``bench.moves`` and ``bench.transitions`` share. Real servers, agents and balancer; subscribers and publishers are
processes of their own. Every delivery is judged by the checker that the simulator uses. A message counts as "during a
change" when it was published between the request of a change and the answer that it has settled.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import time
from array import array
from bisect import bisect_right
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from multiprocessing.connection import Connection
from statistics import median
from struct import Struct
from typing import Any

from bench.processors import BusyMeter
from bench.workers import Worker
from dynamoth.errors import DynamothError
from dynamoth_cli.local.cluster import LocalCluster
from dynamoth_client.asyncio import GapInfo, Redis
from dynamoth_daemon.event_loop import run
from dynamoth_demo.latency import LatencyCounts
from dynamoth_sim.audit import Audit

CHANNEL = b"busy"
ARRIVAL_TIMEOUT_S = 15.0
LATENCY_SAMPLE = 10
"""Each subscriber notes the latency of every tenth message."""
HEAD = Struct(">QIQ")
"""Number, publisher, time of sending in nanoseconds."""
PAYLOAD_BYTES = 64
CALIBRATION_SHARES = (0.1, 0.3)
CALIBRATION_WARM_UP_S = 1.5
CALIBRATION_S = 4.0
RATE_MIN = 20.0
"""Below this there are too few messages in a change to say anything of them."""
PUBLISHERS_MAX = 1000
"""Publishers are numbered below this."""


@dataclass(frozen=True)
class Change:
    """A request to the balancer to change the channel's assignment. The answer comes when that has settled."""

    command: str
    arguments: Mapping[str, Any]
    kind: str
    """Changes of one kind are added up in the results."""


@dataclass(frozen=True)
class Load:
    """How busy the channel is."""

    subscribers: int
    publishers: int
    messages_per_s: float
    changes: int
    processes: int
    rest_s: float = 5.0
    """How long the latency at rest is measured before the first change."""
    pause_s: float = 0.1
    """Rest between two changes."""


@dataclass(frozen=True)
class Result:
    """The results of a run. Latencies in milliseconds, times in seconds."""

    #: How busy the machine was while the changes were carried out; None where the system does not say.
    busy_ratio: float | None
    messages_per_s: float
    published: int
    delivered: int
    lost: int
    duplicated: int
    reordered: int
    gaps: int
    changes: int
    settled_s_p50: float
    settled_s_max: float
    rest_ms_p50: float
    rest_ms_p99: float
    changing_ms_p50: float
    changing_ms_p99: float
    kinds: Mapping[str, Mapping[str, float | None]]
    """The changes by kind: how many, ``settled_s_max``, ``changing_ms_p99`` (None if nothing was published)."""

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
        #: What each subscriber got, in order: number and publisher. Judged at the end: judging is not to be measured.
        self._received = {number: array("q") for number in numbers}
        self._sent_ns = array("q")
        self._latency_ns = array("q")
        self._all_confirmed = asyncio.Event()
        self._gaps: list[str] = []

    async def work(self, pipe: Connection) -> None:
        """Subscribe, send ``ready``, receive until the pipe says what was published and when it changed, answer."""
        loop = asyncio.get_running_loop()
        async with Redis.from_url(self._url) as client:
            pubsubs = [client.pubsub(on_gap=self._on_gap) for _ in self._numbers]
            for pubsub in pubsubs:
                await pubsub.subscribe(CHANNEL)
            readers = [loop.create_task(self._read(*pair)) for pair in zip(self._numbers, pubsubs, strict=True)]
            await self._all_confirmed.wait()
            gc.collect()
            gc.freeze()  # otherwise a seventh of the time goes into looking at the same clients again and again
            pipe.send("ready")
            published, times = await loop.run_in_executor(None, pipe.recv)
            await self._arrived(sum(published) * len(pubsubs))
            for reader in readers:
                reader.cancel()
            for subscriber, received in self._received.items():
                for message in received:
                    number, publisher = divmod(message, PUBLISHERS_MAX)
                    self._audit.delivered(subscriber, CHANNEL, publisher, number, 0.0)
            for publisher, number in enumerate(published):
                self._audit.published_upto(publisher, CHANNEL, number)
            self._audit.finish(time.monotonic())
            pipe.send({**asdict(self._audit.totals), "gap_reasons": self._gaps[:5], **self._latencies(times)})

    async def _arrived(self, deliveries: int) -> None:
        """Wait until everything has come, or nothing does any more."""
        deadline = time.monotonic() + ARRIVAL_TIMEOUT_S
        # An event for each delivery would be part of what is measured.
        while sum(map(len, self._received.values())) < deliveries and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    async def _read(self, subscriber: int, pubsub: Any) -> None:
        unpack, take = HEAD.unpack_from, self._received[subscriber].append
        async for message in pubsub.listen():
            if message["type"] == "message":
                number, publisher, sent_ns = unpack(message["data"])
                take(number * PUBLISHERS_MAX + publisher)
                if (number + subscriber) % LATENCY_SAMPLE == 0:
                    self._sent_ns.append(sent_ns)
                    self._latency_ns.append(time.monotonic_ns() - sent_ns)
            elif message["type"] == "subscribe":
                self._audit.confirmed(subscriber, CHANNEL, time.monotonic())
                if self._audit.open_count(CHANNEL) == len(self._numbers):
                    self._all_confirmed.set()

    def _on_gap(self, gap: GapInfo) -> None:
        self._gaps.append(gap.reason)
        self._audit.gap(0, CHANNEL, None, None, time.monotonic())

    def _latencies(self, times: list[tuple[int, int]]) -> dict[str, Any]:
        """Tell the latencies at rest from those during each change (begin, end), which are in order."""
        rest, changing = LatencyCounts(), [LatencyCounts() for _ in times]
        begins = [begin for begin, _ in times]
        for sent_ns, latency_ns in zip(self._sent_ns, self._latency_ns, strict=True):
            index = bisect_right(begins, sent_ns) - 1
            during = index >= 0 and sent_ns <= times[index][1]
            (changing[index] if during else rest).add(latency_ns)
        return {"rest": rest.counts, "changing": [counts.counts for counts in changing]}


def subscribe(pipe: Connection, url: str, numbers: range) -> None:
    """Run one process of subscribers."""
    run(Subscribers(url, numbers).work(pipe))


# Publishers.


async def publish_at_rate(pipe: Connection, url: str, load: Load) -> None:
    """Publish, each publisher with a client of its own and one message after the other, until the pipe says stop."""
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
    pipe.send("ready")
    await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
    stop.set()
    pipe.send(await asyncio.gather(*tasks))


def publish(pipe: Connection, url: str, load: Load) -> None:
    """Run the process of the publishers."""
    run(publish_at_rate(pipe, url, load))


# The measurement.


@contextmanager
def _at_work(load: Load, cluster: LocalCluster) -> Generator[tuple[Worker, list[Worker]]]:
    """Start the load; yield the process of the publishers and those of the subscribers."""
    share = -(-load.subscribers // load.processes)
    subscribers = [
        Worker(subscribe, cluster.url, range(first, min(first + share, load.subscribers)))
        for first in range(0, load.subscribers, share)
    ]
    workers = list(subscribers)
    try:
        for worker in subscribers:
            assert worker.receive() == "ready"
        publishers = Worker(publish, cluster.url, load)
        workers.append(publishers)
        assert publishers.receive() == "ready"
        yield publishers, subscribers
    finally:
        for worker in workers:
            worker.stop()


def measure(load: Load, cluster: LocalCluster, changes: Sequence[Change]) -> Result:
    """Run the load on a cluster, and carry out the changes, one after the other."""
    with _at_work(load, cluster) as (publishers, subscribers):
        time.sleep(load.rest_s)  # the latency at rest is measured meanwhile
        meter = BusyMeter()
        times = [_carry_out(change, cluster, load.pause_s) for change in changes]
        busy_ratio = meter.ratio()
        publishers.send("stop")
        published: list[int] = publishers.receive()
        for worker in subscribers:
            worker.send((published, times))
        answers = [worker.receive() for worker in subscribers]
    return _sum(load, busy_ratio, published, changes, times, answers)


def find_rate(load: Load, cluster: LocalCluster, busy_ratio: float) -> float:
    """Find the rate, up to that of the load, at which the machine is busy to this ratio while nothing changes.

    What the machine does at two lower rates tells it, as the time it needs grows in proportion. On systems that do not
    say how busy they are the rate is that of the load.
    """
    points: list[tuple[float, float]] = []
    for share in CALIBRATION_SHARES:
        trial = replace(load, messages_per_s=load.messages_per_s * share)
        with _at_work(trial, cluster):
            time.sleep(CALIBRATION_WARM_UP_S)
            meter = BusyMeter()
            time.sleep(CALIBRATION_S)
            busy = meter.ratio()
        if busy is None:
            return load.messages_per_s
        points.append((trial.messages_per_s, busy))
    (low_rate, low), (high_rate, high) = points
    per_message = max(1e-9, (high - low) / (high_rate - low_rate))
    rate = low_rate + (busy_ratio - low) / per_message
    return min(load.messages_per_s, max(RATE_MIN, rate))


def _carry_out(change: Change, cluster: LocalCluster, pause_s: float) -> tuple[int, int]:
    """Carry out one change; return when it was requested and when it had settled."""
    time.sleep(pause_s)  # rest between changes is part of the workload
    began_ns = time.monotonic_ns()
    try:
        cluster.ask_balancer(change.command, change.arguments)
    except DynamothError as error:
        error.add_note(f"asked for {change}")
        raise
    ended_ns = time.monotonic_ns()
    cluster.check()
    return began_ns, ended_ns


def where(cluster: LocalCluster) -> str:
    """Return the server of the channel, which was not moved yet."""

    async def ask() -> str:
        async with Redis.from_url(cluster.url) as client:
            return (await client.plan(CHANNEL)).servers[0]

    return asyncio.run(ask())


def _sum(
    load: Load,
    busy_ratio: float | None,
    published: list[int],
    changes: Sequence[Change],
    times: list[tuple[int, int]],
    answers: list[dict[str, Any]],
) -> Result:
    rest, changing = LatencyCounts(), [LatencyCounts() for _ in changes]
    for answer in answers:
        rest.merge(answer["rest"])
        for latencies, counts in zip(changing, answer["changing"], strict=True):
            latencies.merge(counts)
        for reason in answer["gap_reasons"]:
            sys.stderr.write(f"gap: {reason}\n")
    settled_s = [(end - begin) / 1e9 for begin, end in times]
    all_changing = _together(changing)

    def total(name: str) -> int:
        return sum(answer[name] for answer in answers)

    return Result(
        busy_ratio=busy_ratio,
        messages_per_s=load.messages_per_s,
        published=sum(published),
        delivered=total("delivered"),
        lost=total("lost"),
        duplicated=total("duplicated"),
        reordered=total("reordered"),
        gaps=total("gaps"),
        changes=len(changes),
        settled_s_p50=median(settled_s),
        settled_s_max=max(settled_s),
        rest_ms_p50=_quantile_ms(rest, 0.5),
        rest_ms_p99=_quantile_ms(rest, 0.99),
        changing_ms_p50=_quantile_ms(all_changing, 0.5),
        changing_ms_p99=_quantile_ms(all_changing, 0.99),
        kinds=_by_kind(changes, settled_s, changing),
    )


def _by_kind(
    changes: Sequence[Change], settled_s: list[float], changing: list[LatencyCounts]
) -> dict[str, dict[str, float | None]]:
    indices: dict[str, list[int]] = {}
    for index, change in enumerate(changes):
        indices.setdefault(change.kind, []).append(index)
    return {
        kind: {
            "changes": len(some),
            "settled_s_max": max(settled_s[index] for index in some),
            "changing_ms_p99": _together([changing[index] for index in some]).quantile_ms(0.99),
        }
        for kind, some in sorted(indices.items())
    }


def _together(parts: Sequence[LatencyCounts]) -> LatencyCounts:
    whole = LatencyCounts()
    for part in parts:
        whole.merge(part.counts)
    return whole


def _quantile_ms(latencies: LatencyCounts, ratio: float) -> float:
    value = latencies.quantile_ms(ratio)
    assert value is not None, "no latency was measured"
    return value


# The command line.


def add_arguments(parser: argparse.ArgumentParser, *, changes: str, pause_s: float) -> None:
    """Add the arguments of a load; ``changes`` is the name of the flag that says how many there are."""
    parser.add_argument("--subscribers", type=int, default=100)
    parser.add_argument("--publishers", type=int, default=10)
    parser.add_argument("--messages-per-s", type=float, default=1000.0)
    parser.add_argument(f"--{changes}", dest="changes", type=int, default=100)
    parser.add_argument("--pause-s", type=float, default=pause_s, help="rest between two (default %(default)g s)")
    parser.add_argument("--processes", type=int, default=2, help="processes of subscribers")
    parser.add_argument("--json", action="store_true")


def load_of(arguments: argparse.Namespace) -> Load:
    """Return the load that the arguments describe."""
    given = {field.name: getattr(arguments, field.name) for field in fields(Load) if field.name in arguments}
    return Load(**given)


def show(result: Result, *, as_json: bool) -> None:
    """Print a result."""
    if as_json:
        sys.stdout.write(json.dumps(asdict(result)) + "\n")
        return
    for name, value in asdict(result).items():
        if name != "kinds":
            sys.stdout.write(f"{name:16} {value:.3f}\n" if isinstance(value, float) else f"{name:16} {value}\n")
    for kind, figures in result.kinds.items():
        shown = ", ".join(f"{name} {'unknown' if value is None else f'{value:.4g}'}" for name, value in figures.items())
        sys.stdout.write(f"{kind}: {shown}\n")
