"""How many deliveries per second one edge broker makes: frames of 200 bytes, each to every user.

Run with ``python -m bench.edge_fanout``; ``--help`` tells the rest. Beside ours, ``websockets.broadcast`` does the same
without compression. With ``burst`` 1 one publication comes at a time, and the system call per delivery, which no server
can do without, is most of the cost. A broker that has much to do reads several publications at a time.

``--sustained`` measures that: publications of 200 bytes come at a rate, whatever becomes of them, and the rate rises
until a server does not keep up. The largest rate at which it does is its number; the systems take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict, dataclass

from bench.edge_processes import (
    FRAME,
    FRAME_BYTES,
    SYSTEMS,
    ServerProcess,
    System,
    Usage,
    UsersProcess,
    allow_files,
    wait_for,
)
from dynamoth_broker.process.transport import prepare
from dynamoth_demo.latency import LatencyCounts

REPETITIONS = 5
LATE_MS = 150.0
KEEPS_UP_RATIO = 0.95
"""A server that has sent less than this part of what was due does not keep up."""


@dataclass(frozen=True)
class Measured:
    """One system, the median of some repetitions."""

    system: System
    users: int
    burst: int
    deliveries_per_s: float
    user_us: float
    """Processor time of the server's own code per delivery."""
    system_us: float
    """Processor time of the kernel per delivery."""


def measure(system: System, users: int, burst: int, frames: int) -> Measured:
    server = ServerProcess(system)
    crowd = UsersProcess(server.port, users)
    frame_bytes = len(prepare(FRAME).websocket_json)
    try:
        wait_for(lambda: server.users() == users)
        rates: list[float] = []
        user_us: list[float] = []
        system_us: list[float] = []
        for repetition in range(REPETITIONS + 1):
            before = server.usage()
            seconds = server.fan_out(frames // burst, burst)
            after = server.usage()
            deliveries = frames // burst * burst * users
            expected = (repetition + 1) * deliveries * frame_bytes
            wait_for(lambda expected=expected: crowd.received_bytes() == expected)  # type: ignore[misc]
            if repetition:  # the first one warms up
                rates.append(deliveries / seconds)
                user_us.append((after.user_s - before.user_s) / deliveries * 1e6)
                system_us.append((after.system_s - before.system_s) / deliveries * 1e6)
    finally:
        crowd.stop()
        server.stop()
    return Measured(system, users, burst, *(statistics.median(each) for each in (rates, user_us, system_us)))


@dataclass(frozen=True)
class Step:
    """One rate."""

    deliveries_per_s: float
    p99_ms: float
    #: Use of one processor, by the server and by the process of the users. A rate at which the users' process is the
    #: busier one says nothing about the server, but that it bears at least this.
    server_ratio: float
    users_ratio: float


@dataclass(frozen=True)
class Sustained:
    """The largest rate of one system with which it kept up, and all steps."""

    system: System
    users: int
    deliveries_per_s: float
    steps: list[Step]


def sustain(system: System, users: int, first: float, factor: float, seconds: float) -> Sustained:
    """Raise the rate by ``factor``, beginning with ``first`` deliveries per second, until the server is late."""
    server = ServerProcess(system)
    crowd = UsersProcess(server.port, users)
    steps: list[Step] = []
    best = 0.0
    try:
        wait_for(lambda: server.users() == users)
        sent, _ = server.sustain(first / users, 1.0)
        rate, came = first, sent * users * FRAME_BYTES
        wait_for(lambda: crowd.received_bytes() == came)
        while True:
            crowd.latencies()
            before = _processor_s(server.usage()), _processor_s(crowd.usage())
            sent, took = server.sustain(rate / users, seconds)
            used, used_by_users = _processor_s(server.usage()) - before[0], _processor_s(crowd.usage()) - before[1]
            came += sent * users * FRAME_BYTES
            wait_for(lambda expected=came: crowd.received_bytes() == expected)  # type: ignore[misc]
            p99 = _quantile_ms(crowd.latencies(), 0.99)
            steps.append(Step(sent * users / took, p99, used / took, used_by_users / took))
            sys.stderr.write(f"{system}: {steps[-1]}\n")
            if p99 > LATE_MS or steps[-1].deliveries_per_s < rate * KEEPS_UP_RATIO:
                return Sustained(system, users, best, steps)
            best = steps[-1].deliveries_per_s
            rate *= factor
    finally:
        crowd.stop()
        server.stop()


def _processor_s(used: Usage) -> float:
    return used.user_s + used.system_s


def _quantile_ms(counts: dict[int, int], ratio: float) -> float:
    latencies = LatencyCounts()
    latencies.merge(counts)
    return latencies.quantile_ms(ratio) or 0.0


def measure_sustained(arguments: argparse.Namespace) -> None:
    """Let the systems take turns, and print the ratio of their medians."""
    results: dict[System, list[Sustained]] = {system: [] for system in SYSTEMS}
    for _ in range(arguments.rounds):
        for system in SYSTEMS:
            result = sustain(system, arguments.users, arguments.first, arguments.factor, arguments.seconds)
            results[system].append(result)
            sys.stdout.write(f"{system:10} keeps up with {result.deliveries_per_s:,.0f} deliveries/s\n")
    ours, theirs = (statistics.median(each.deliveries_per_s for each in results[system]) for system in SYSTEMS)
    sys.stdout.write(f"ratio {ours / theirs:.2f}\n")
    sys.stdout.write(json.dumps([asdict(each) for system in SYSTEMS for each in results[system]]) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--users", type=int, default=5_000)
    parser.add_argument("--bursts", type=int, nargs="+", default=[1, 4, 16], help="publications that come at once")
    parser.add_argument("--frames", type=int, default=32, help="publications in one repetition")
    parser.add_argument("--sustained", action="store_true", help="raise the rate until a server does not keep up")
    parser.add_argument("--first", type=float, default=40_000, help="sustained: deliveries per second to begin with")
    parser.add_argument("--factor", type=float, default=1.25)
    parser.add_argument("--seconds", type=float, default=4.0, help="sustained: how long each rate lasts")
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    allow_files(arguments.users + 1000)
    if arguments.sustained:
        measure_sustained(arguments)
        return
    results: list[Measured] = []
    for burst in arguments.bursts:
        ours, theirs = (measure(system, arguments.users, burst, arguments.frames) for system in SYSTEMS)
        results += [ours, theirs]
        for each in (ours, theirs):
            sys.stdout.write(
                f"{each.system:10} burst {burst:2}: {each.deliveries_per_s:,.0f} deliveries/s,"
                f" {each.user_us:.2f} us own code and {each.system_us:.2f} us kernel each\n"
            )
        sys.stdout.write(f"ratio {ours.deliveries_per_s / theirs.deliveries_per_s:.2f}\n")
    sys.stdout.write(json.dumps([asdict(each) for each in results]) + "\n")


if __name__ == "__main__":
    main()
