"""How many deliveries per second one edge broker makes: frames of 200 bytes, each to every user.

Run with ``python -m bench.edge_fanout``; ``--help`` tells the rest. Beside ours, ``websockets.broadcast`` does the same
without compression. With ``burst`` 1 one publication comes at a time, and the system call per delivery, which no server
can do without, is most of the cost. A broker that has much to do reads several publications at a time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict, dataclass

from bench.edge_processes import FRAME, SYSTEMS, ServerProcess, System, UsersProcess, allow_files, wait_for
from dynamoth_broker.process.transport import prepare

REPETITIONS = 5


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--users", type=int, default=5_000)
    parser.add_argument("--bursts", type=int, nargs="+", default=[1, 4, 16], help="publications that come at once")
    parser.add_argument("--frames", type=int, default=32, help="publications in one repetition")
    arguments = parser.parse_args()
    allow_files(arguments.users + 1000)
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
