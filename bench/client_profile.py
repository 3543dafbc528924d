"""Where the processor's time of a busy client goes, layer by layer.

Run with ``python -m bench.client_profile``; ``--help`` tells the rest. The loads are those of ``client_throughput``, on
asyncio's own loop. A timer of the process's CPU time looks at what runs, every few milliseconds: time in C (a system
call, hiredis, a task's step) counts for the Python code that called it. Below each load stand the lines that take most.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

from bench import client_throughput
from bench.client_throughput import CHANNEL, TASKS, Load, measure
from bench.servers import store_plan, unlimited_redis

INTERVAL_S = 0.001
LINES_SHOWN = 5
OTHER = "other"

_LAYERS: tuple[tuple[str, str], ...] = (
    ("dynamoth_client/asyncio/_client.py", "API, queue"),
    ("asyncio/selector_events.py", "sockets (asyncio)"),
    ("/selectors.py", "sockets (asyncio)"),
    ("/asyncio/", "event loop: tasks and futures (asyncio)"),
    ("/bench/", "the application"),
    ("dynamoth_link/resp.py", "RESP: packing and parsing"),
    ("dynamoth_link/connection.py", "the connection"),
    ("/dynamoth_link/", "driver"),
    ("dynamoth_client/machines/", "machines: numbers, order, outcomes"),
    ("/dynamoth_client/", "API, queue"),
    ("/dynamoth/", "machines: numbers, order, outcomes"),
)
"""Parts of paths and the layers they belong to; the first match counts."""


class Profile:
    """Counts what runs while it is entered; the system's timer may be coarser than ``INTERVAL_S``."""

    def __init__(self) -> None:
        self.layers: Counter[str] = Counter()
        self.lines: Counter[str] = Counter()

    def __enter__(self) -> Profile:
        signal.signal(signal.SIGPROF, self._look)
        signal.setitimer(signal.ITIMER_PROF, INTERVAL_S, INTERVAL_S)
        return self

    def __exit__(self, *error: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)

    def _look(self, number: int, frame: FrameType | None) -> None:
        if frame is None:
            return
        path = frame.f_code.co_filename
        self.layers[next((layer for part, layer in _LAYERS if part in path), OTHER)] += 1
        self.lines[f"{Path(path).name}:{frame.f_lineno} ({frame.f_code.co_name})"] += 1

    def shares(self) -> dict[str, float]:
        """Return the share of each layer, the largest first."""
        total = max(1, self.layers.total())
        return {layer: count / total for layer, count in self.layers.most_common()}


def profile(port: int, load: Load) -> Profile:
    """Profile one load, after a run of it without."""
    asyncio.run(measure(port, load, ours=True))
    with Profile() as result:
        asyncio.run(measure(port, load, ours=True))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=500_000, help="per load")
    parser.add_argument("--payload-bytes", type=int, default=64)
    arguments = parser.parse_args()
    payload = b"x" * arguments.payload_bytes
    loads = [
        Load(f"publish, {TASKS} tasks", client_throughput.publish_concurrently, arguments.messages, payload),
        Load("listen", client_throughput.listen, arguments.messages, payload),
        Load("batches", client_throughput.batches, arguments.messages, payload),
    ]
    results: dict[str, dict[str, float]] = {}
    with unlimited_redis() as server:
        store_plan(server)
        for load in loads:
            result = profile(server.port, load)
            results[load.name] = result.shares()
            sys.stdout.write(f"{load.name}, on {CHANNEL.decode()}: {result.layers.total()} samples\n")
            for layer, share in result.shares().items():
                sys.stdout.write(f"  {share:6.1%}  {layer}\n")
            for line, count in result.lines.most_common(LINES_SHOWN):
                sys.stdout.write(f"          {count / result.layers.total():6.1%}  {line}\n")
            sys.stdout.flush()
    sys.stdout.write(json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
