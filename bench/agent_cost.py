"""What an agent costs: its own CPU per observed message, and what Redis loses by being observed.

Run with ``python -m bench.agent_cost``. A Redis server is started for it, and the agent runs as the process that
``dynamoth agent`` runs. Prints a line per figure, then one line of JSON; ends with 1 when a target is missed.

1. CPU. Messages in envelopes, on many channels, at a steady rate that the machine has room for. The CPU time of the
   agent's process, divided by the messages it says it has observed. All that it does meanwhile is in it: INFO, NUMSUB,
   reports.
2. Throughput. A publisher with a deep pipeline, every channel with ten subscribers, with agent and without in turns.
   The publisher is as fast as Redis answers and the subscribers read, so that Redis cannot win by piling up output.
   Four processes are busy then. Where there are fewer cores, Redis has to share them with the others, and it is judged
   by its CPU time per publication: the inverse of what it could do with a core for itself.

The best of some rounds counts, with and without agent in turns.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import random
import re
import selectors
import socket
import sys
import time
import urllib.request
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.sharedctypes import SynchronizedArray
from multiprocessing.synchronize import Event
from pathlib import Path

import hiredis

from bench.servers import pack, store_plan, unlimited_redis
from dynamoth.protocol.envelope import seal
from dynamoth_agent.process.runtime import AgentConfig, run
from dynamoth_cli.local.embedded import EmbeddedRedis
from dynamoth_daemon.logs import configure_logging

CPU_US_PER_MESSAGE_MAX = 1.2
REDIS_KEEPS_RATIO_MIN = 0.85

BUSY_PROCESSES = 4
"""Redis, agent, publisher and subscribers."""

PUBLISHERS = 50
BATCH = 200
"""Publications that are sent at once."""
BATCHES_IN_FLIGHT = 8
"""Redis has always something to do, and its replies do not pile up."""
UNREAD_BYTES_MAX = 1_000_000
"""What a subscriber has not read yet at most. Enough to keep everybody busy."""
CPU_ROUND_S = 1.0
THROUGHPUT_ROUND_S = 1.0
WAIT_S_MAX = 30.0

_spawn = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Result:
    cpu_us_per_message: float
    messages_per_s: float
    observation_lag_s: float
    throughput_alone_per_s: float
    throughput_with_agent_per_s: float
    throughput_ratio: float
    redis_cpu_us_alone: float
    redis_cpu_us_with_agent: float

    @property
    def redis_keeps_ratio(self) -> float:
        """The throughput that Redis keeps: what the target is about; see the module's text."""
        enough_cores = (os.cpu_count() or 1) >= BUSY_PROCESSES
        return self.throughput_ratio if enough_cores else self.redis_cpu_us_alone / self.redis_cpu_us_with_agent

    def missed(self) -> list[str]:
        missed: list[str] = []
        if self.cpu_us_per_message > CPU_US_PER_MESSAGE_MAX:
            missed.append(f"CPU per message is above {CPU_US_PER_MESSAGE_MAX} us")
        if self.redis_keeps_ratio < REDIS_KEEPS_RATIO_MIN:
            missed.append(f"Redis keeps less than {REDIS_KEEPS_RATIO_MIN:.0%} of its throughput")
        return missed


# Processes of the benchmark.


def agent_process(url: str, http_port: int, report_interval_s: float) -> None:
    configure_logging("warning", "text")
    config = AgentConfig(
        server="s1",
        url=url,
        outgoing_bytes_per_s_max=125_000_000,
        http_port=http_port,
        report_interval_s=report_interval_s,
    )
    sys.exit(run(config))


def subscribers_process(port: int, channels: int, received: SynchronizedArray[int], ready: Event) -> None:
    """Subscribe a connection for each item of ``received`` to all channels, and count there the bytes that come."""
    names = channel_names(channels)
    command = pack((b"SUBSCRIBE", *names))
    selector = selectors.DefaultSelector()
    buffer = bytearray(1 << 20)
    counts = received.get_obj()
    for index in range(len(counts)):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(command)
        acknowledged = hiredis.Reader()
        missing = len(names)
        while missing:
            acknowledged.feed(connection.recv(65536))
            while acknowledged.gets():
                missing -= 1
        selector.register(connection, selectors.EVENT_READ, (index, connection))
    ready.set()
    while True:
        for key, _ in selector.select():
            index, connection = key.data
            count = connection.recv_into(buffer, 0, socket.MSG_TRUNC)  # counted and thrown away, not copied
            if not count:
                return
            counts[index] += count


# Load.


def channel_names(count: int) -> list[bytes]:
    return [b"world:tile:%d" % number for number in range(count)]


@dataclass(frozen=True)
class Batch:
    """``BATCH`` publications: the commands, and the size of what each subscriber gets."""

    commands: bytes
    pushed_bytes: int


def batches(channels: int) -> list[Batch]:
    """Return batches that publish messages of 64 to 200 bytes on all channels, by several publishers."""
    chance = random.Random(1)
    names = channel_names(channels)
    publishers = [chance.getrandbits(64) for _ in range(PUBLISHERS)]
    messages = [
        (names[n % channels], seal(chance.choice(publishers), n, 1, bytes(chance.randint(40, 176))))
        for n in range(max(channels, 20_000))
    ]
    chance.shuffle(messages)
    return [make_batch(messages[start : start + BATCH]) for start in range(0, len(messages), BATCH)]


def make_batch(messages: list[tuple[bytes, bytes]]) -> Batch:
    """A push to a RESP2 subscriber is as long as the command that publishes it, as both words have seven letters."""
    commands = b"".join([pack((b"PUBLISH", channel, data)) for channel, data in messages])
    return Batch(commands, len(commands))


class Publisher:
    """Publishes batch after batch over one connection.

    ``received``: what the subscribers have read, in bytes, one item each; None to publish whatever they read.
    """

    def __init__(self, port: int, channels: int, received: SynchronizedArray[int] | None = None) -> None:
        self._connection = socket.create_connection(("127.0.0.1", port))
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = received.get_obj() if received is not None else None
        self._pushed_bytes = 0
        self._batches: Iterator[Batch] = itertools.cycle(batches(channels))
        self._in_flight = 0

    def send_batch(self) -> None:
        batch = next(self._batches)
        self._connection.sendall(batch.commands)
        self._pushed_bytes += batch.pushed_bytes
        self._in_flight += BATCH

    def wait(self, in_flight_max: int) -> None:
        while self._in_flight > in_flight_max:
            self._in_flight -= self._connection.recv(1 << 16).count(b"\n")  # each reply is one line, a number

    def wait_for_subscribers(self, unread_bytes_max: int) -> None:
        while self._received is not None and self._pushed_bytes - min(self._received) > unread_bytes_max:
            time.sleep(0.0005)

    def saturate(self, duration_s: float) -> int:
        """Publish as fast as Redis answers and subscribers read; return how many messages, when all have been read."""
        began = time.perf_counter()
        count = 0
        while time.perf_counter() - began < duration_s:
            self.send_batch()
            self.wait((BATCHES_IN_FLIGHT - 1) * BATCH)
            self.wait_for_subscribers(UNREAD_BYTES_MAX)
            count += BATCH
        self.wait(0)
        self.wait_for_subscribers(0)
        return count

    def pace(self, rate_per_s: float, duration_s: float) -> int:
        """Publish at a steady rate; return how many messages."""
        began = time.perf_counter()
        count = 0
        while count < rate_per_s * duration_s:
            self.send_batch()
            self.wait(0)
            count += BATCH
            time.sleep(max(0.0, began + count / rate_per_s - time.perf_counter()))
        return count


# Measuring.


def cpu_s(pid: int) -> float:
    """Return the CPU time of the main thread, to the nanosecond; the agent has no other at work. Linux only."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = WAIT_S_MAX) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"within {timeout_s:.0f} s not: {what}")
        time.sleep(0.02)


def metric(http_port: int, name: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{http_port}/metrics", timeout=5) as answer:
        found = re.search(rf"^{name}(?:{{.*}})? (\S+)$", answer.read().decode(), re.MULTILINE)
    return float(found[1]) if found else 0.0


def is_ready(http_port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{http_port}/readyz", timeout=5):
            return True
    except OSError:
        return False


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@contextmanager
def agent(url: str, report_interval_s: float = 1.0) -> Generator[tuple[int, int]]:
    """Run an agent; give its process id and HTTP port when it is ready."""
    http_port = free_port()
    process = _spawn.Process(target=agent_process, args=(url, http_port, report_interval_s), daemon=True)
    process.start()
    try:
        assert process.pid is not None, "the process was started"
        wait_until(lambda: is_ready(http_port), "an agent that is ready")
        yield process.pid, http_port
    finally:
        process.terminate()
        process.join()


@contextmanager
def all_subscribed(port: int, channels: int, count: int) -> Generator[SynchronizedArray[int]]:
    ready = _spawn.Event()
    received: SynchronizedArray[int] = _spawn.Array("q", count)
    process = _spawn.Process(target=subscribers_process, args=(port, channels, received, ready), daemon=True)
    process.start()
    try:
        if not ready.wait(WAIT_S_MAX):
            raise TimeoutError("the subscribers are not ready")
        yield received
    finally:
        process.terminate()
        process.join()


@dataclass(frozen=True)
class CpuCost:
    us_per_message: float
    messages_per_s: float
    lag_s: float


def measure_cpu(server: EmbeddedRedis, channels: int, rate_per_s: float, rounds: int) -> CpuCost:
    """Measure an agent under a steady load. Each round has a report in it."""
    observed = "dynamoth_lla_messages_observed_total"
    with agent(server.url) as (pid, http_port):
        publisher = Publisher(server.port, channels)
        warm_up = publisher.pace(rate_per_s, 1.0)
        wait_until(lambda: metric(http_port, observed) >= warm_up, "a report of the first messages")
        seen, messages, began = metric(http_port, observed), 0, time.perf_counter()
        costs_us: list[float] = []
        for _ in range(rounds):
            used_s = cpu_s(pid)
            count = publisher.pace(rate_per_s, CPU_ROUND_S)
            costs_us.append(1e6 * (cpu_s(pid) - used_s) / count)
            messages += count
        wall_s = time.perf_counter() - began
        wait_until(lambda: metric(http_port, observed) >= seen + messages, "a report of all messages")
        lag_s = metric(http_port, "dynamoth_agent_observation_lag_seconds")
    return CpuCost(min(costs_us), messages / wall_s, lag_s)


@dataclass(frozen=True)
class Throughput:
    messages_per_s: float
    #: CPU time of Redis per publication: tells what it could do if it had a core for itself, however busy the machine.
    redis_cpu_us: float


def saturate(server: EmbeddedRedis, publisher: Publisher, duration_s: float) -> Throughput:
    used_s = cpu_s(server.pid)
    began = time.perf_counter()
    count = publisher.saturate(duration_s)
    return Throughput(count / (time.perf_counter() - began), 1e6 * (cpu_s(server.pid) - used_s) / count)


def best(results: list[Throughput]) -> Throughput:
    """Return what came out undisturbed: what else a machine does, or a core that is slow for a while, only adds."""
    return Throughput(
        max(result.messages_per_s for result in results),
        min(result.redis_cpu_us for result in results),
    )


def measure_throughput(
    server: EmbeddedRedis, channels: int, subscriber_count: int, rounds: int
) -> tuple[Throughput, Throughput]:
    """Return what Redis does without an agent, and with one."""
    alone: list[Throughput] = []
    observed: list[Throughput] = []
    with all_subscribed(server.port, channels, subscriber_count) as received:
        publisher = Publisher(server.port, channels, received)
        publisher.saturate(1.0)
        for _ in range(rounds):
            alone.append(saturate(server, publisher, THROUGHPUT_ROUND_S))
            with agent(server.url):
                observed.append(saturate(server, publisher, THROUGHPUT_ROUND_S))
    return best(alone), best(observed)


def measure(*, channels: int, rate_per_s: float, subscribers: int, rounds: int) -> Result:
    with unlimited_redis() as server:
        store_plan(server)
        cost = measure_cpu(server, channels, rate_per_s, rounds)
        alone, observed = measure_throughput(server, channels, subscribers, rounds)
    return Result(
        cpu_us_per_message=cost.us_per_message,
        messages_per_s=cost.messages_per_s,
        observation_lag_s=cost.lag_s,
        throughput_alone_per_s=alone.messages_per_s,
        throughput_with_agent_per_s=observed.messages_per_s,
        throughput_ratio=observed.messages_per_s / alone.messages_per_s,
        redis_cpu_us_alone=alone.redis_cpu_us,
        redis_cpu_us_with_agent=observed.redis_cpu_us,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--channels", type=int, default=1000)
    parser.add_argument("--rate-per-s", type=float, default=100_000)
    parser.add_argument("--subscribers", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    result = measure(**vars(arguments))
    sys.stdout.write(
        f"agent: {result.cpu_us_per_message:.2f} us CPU per observed message, at {result.messages_per_s:,.0f}/s"
        f" on {arguments.channels} channels; {result.observation_lag_s * 1e3:.1f} ms late\n"
        f"Redis: {result.throughput_alone_per_s:,.0f} messages/s to {arguments.subscribers} subscribers each,"
        f" {result.throughput_with_agent_per_s:,.0f} with the agent: {result.throughput_ratio:.1%}\n"
        f"Redis: {result.redis_cpu_us_alone:.2f} us CPU per publication, {result.redis_cpu_us_with_agent:.2f} with it\n"
        f"Redis keeps {result.redis_keeps_ratio:.1%} of its throughput (judged by"
        f" {'throughput' if (os.cpu_count() or 1) >= BUSY_PROCESSES else 'CPU time: too few cores here'})\n"
        f"{json.dumps({**asdict(result), 'redis_keeps_ratio': result.redis_keeps_ratio})}\n"
    )
    for missed in result.missed():
        sys.stdout.write(f"missed: {missed}\n")
    sys.exit(1 if result.missed() else 0)


if __name__ == "__main__":
    main()
