"""How much memory an agent takes that follows very many active channels.

Run with ``python -m bench.agent_memory``; ``--help`` tells the rest. Prints a line per figure, then one line of JSON;
ends with 1 when a target is missed. Linux only.

1. The load analyzer alone, without Redis: by how much this process grows when every channel has a message in each
   interval of reports.
2. The process that ``dynamoth agent`` runs, with the same load: a Redis server with a subscriber to every channel, and
   reports so far apart that a busy machine can publish as much between two of them. The most memory that the agent ever
   has counts.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import resource
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.agent_cost import Publisher, agent, all_subscribed, channel_names, metric, wait_until
from bench.servers import store_plan, unlimited_redis
from dynamoth.machine.events import LinkUp, Pushed, Replied, Send, Tick
from dynamoth.protocol.envelope import seal
from dynamoth_cli.local.embedded import EmbeddedRedis
from dynamoth_lla.machine import LOCAL, LoadAnalyzer
from dynamoth_lla.options import LoadAnalyzerOptions

MEMORY_BYTES_MAX = 300_000_000

ROUNDS = 3
PUBLISHERS = 50
REPORTED_S_MAX = 120.0
"""A busy machine needs longer than an interval for what came in it."""

READ = 1000
"""Messages of one read."""


@dataclass(frozen=True)
class Result:
    channels: int
    #: Channels that the agent follows.
    followed: int
    #: The most memory that the agent's process, and the load analyzer alone, ever had.
    process_bytes: int
    machine_bytes: int

    def missed(self) -> list[str]:
        missed: list[str] = []
        if self.followed < self.channels:
            missed.append(f"the agent follows only {self.followed:,} of {self.channels:,} channels")
        if self.process_bytes > MEMORY_BYTES_MAX:
            missed.append(f"the agent needs more than {MEMORY_BYTES_MAX / 1e6:.0f} MB")
        return missed


def peak_bytes(pid: int) -> int:
    """Return the most memory that a process has ever had."""
    found = re.search(r"^VmHWM:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None, "Linux says it"
    return int(found[1]) * 1024


def resident_bytes() -> int:
    """Return how much memory this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def measure_machine(channels: int) -> int:
    """Return by how much this process grows when a load analyzer follows the channels."""
    names = channel_names(channels)
    gc.collect()
    before = resident_bytes()
    analyzer = LoadAnalyzer("s1", 1, LoadAnalyzerOptions(outgoing_bytes_per_s_max=125_000_000))
    now = 0.0
    _settle(analyzer, analyzer.handle(LinkUp(LOCAL, "run"), now), now)
    for number in range(1, ROUNDS + 1):
        for first in range(0, channels, READ):
            pushes = [
                [b"pmessage", b"*", bytes(bytearray(name)), seal(first % PUBLISHERS, number, 1, bytes(64))]
                for name in names[first : first + READ]
            ]
            analyzer.handle(Pushed(LOCAL, pushes), now)
        now += 1.0
        _settle(analyzer, analyzer.handle(Tick(), now), now)
    assert analyzer.last_report is not None, "it has reported"
    assert len(analyzer.channels) >= channels, f"it follows {len(analyzer.channels)} channels"
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before


def _settle(analyzer: LoadAnalyzer, actions: list[Any], now: float) -> None:
    """Answer for a server at which each channel has a subscriber, until the round is over."""
    while actions or analyzer.round.work is not None:
        following: list[Any] = []
        for action in actions:
            assert isinstance(action, Send), f"no server answers {action}"
            following += analyzer.handle(Replied(LOCAL, action.tag, _reply(action.args)), now)
        actions = following or analyzer.handle(Tick(), now)


def _reply(command: Sequence[Any]) -> Any:
    if command[:2] == (b"PUBSUB", b"NUMSUB"):
        return [item for name in command[2:] for item in (name, 1)]
    return 2 if command[0] == b"PUBLISH" else b""


def measure_process(channels: int, rate_per_s: float) -> tuple[int, int]:
    """Return the most memory of an agent's process, and how many channels it follows."""
    interval_s = channels / rate_per_s
    observed = "dynamoth_lla_messages_observed_total"
    with (
        unlimited_redis() as server,
        all_subscribed(server.port, channels, 1) as received,
        agent_of(server, interval_s) as (pid, http_port),
    ):
        publisher = Publisher(server.port, channels, received)
        published = sum(publisher.pace(rate_per_s, interval_s) for _ in range(ROUNDS))
        wait_until(lambda: metric(http_port, observed) >= published, "a report of all messages", REPORTED_S_MAX)
        return peak_bytes(pid), int(metric(http_port, "dynamoth_agent_channels_tracked"))


def agent_of(server: EmbeddedRedis, interval_s: float) -> AbstractContextManager[tuple[int, int]]:
    """Make a server a cluster of one; return its agent."""
    store_plan(server)
    return agent(server.url, interval_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--channels", type=int, default=200_000)
    parser.add_argument("--rate-per-s", type=float, default=20_000)
    arguments = parser.parse_args()
    machine_bytes = measure_machine(arguments.channels)
    process_bytes, followed = measure_process(arguments.channels, arguments.rate_per_s)
    result = Result(arguments.channels, followed, process_bytes, machine_bytes)
    figures = json.dumps({**asdict(result), "unfollowed": arguments.channels - followed})
    sys.stdout.write(
        f"{followed:,} of {arguments.channels:,} active channels followed: {process_bytes / 1e6:.0f} MB of the agent's"
        f" process, {machine_bytes / 1e6:.0f} MB of the load analyzer alone\n{figures}\n"
    )
    for missed in result.missed():
        sys.stdout.write(f"missed: {missed}\n")
    sys.exit(1 if result.missed() else 0)


if __name__ == "__main__":
    main()
