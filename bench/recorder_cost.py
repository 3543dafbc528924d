"""Measures the cost of a recorder: the CPU time of its process while agents report many channels.

Run with ``python -m bench.recorder_cost``. It starts two Redis servers and ``dynamoth record``, and publishes reports
at a steady rate, like those of a large cluster. The recording is in a temporary folder. Prints a line per figure, then
one line of JSON; ends with 1 if the target is missed or rows were lost.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.agent_cost import free_port, is_ready, metric, wait_until
from bench.servers import pack, send_packed, unlimited_redis
from dynamoth.names import BALANCER_CHANNEL
from dynamoth.plan.plan import Plan, Server
from dynamoth.protocol.reports import ChannelColumns, Report, pack_ids, pack_report
from dynamoth.protocol.stored_plan import write_whole
from dynamoth_cli.local.child import Child, dynamoth_command
from dynamoth_cli.local.cluster import environment_without_settings
from dynamoth_cli.local.embedded import EmbeddedRedis

CORES_MAX = 0.5
"""Target, at 100,000 rows of ``channels`` per second."""

SERVERS = 2
WARM_UP_S = 6.0
"""Time before the measurement, in which the first files are written."""

IDS_PER_CELL = 16
CHANNELS_WITH_IDS = 50


@dataclass(frozen=True)
class Result:
    rows_per_s: float
    cores: float
    rows_lost: float
    bytes_per_row: float
    memory_bytes: int

    def missed(self) -> list[str]:
        missed = [f"it takes more than {CORES_MAX} of a core"] if self.cores > CORES_MAX else []
        return missed + (["rows were lost"] if self.rows_lost else [])


class Agents:
    """Publishes reports of the same channels again and again, with new random figures each time."""

    def __init__(self, servers: list[EmbeddedRedis], channels: int) -> None:
        self._servers = servers
        self._chance = random.Random(1)
        self._names = tuple(b"game:room:%d:state" % number for number in range(channels))
        self._ids = [
            pack_ids([self._chance.getrandbits(64) for _ in range(IDS_PER_CELL)]) if number < CHANNELS_WITH_IDS else b""
            for number in range(channels)
        ]
        self._sequence = 0

    def report(self) -> int:
        """Report once at each server; return the number of rows."""
        self._sequence += 1
        for index, server in enumerate(self._servers):
            data = pack_report(self._report(f"s{index + 1}"))
            send_packed(server.port, [pack((b"PUBLISH", BALANCER_CHANNEL, data))], 1)
        return len(self._servers) * len(self._names)

    def _report(self, server: str) -> Report:
        # Rates by Zipf's law, and the noise of one interval.
        counts = [round(2000 / rank * self._chance.uniform(0.8, 1.2)) for rank in range(1, len(self._names) + 1)]
        subscribers = [1 + count % 97 for count in counts]
        sent = [count * each for count, each in zip(counts, subscribers, strict=True)]
        return Report(
            server=server,
            incarnation=7,
            sequence=self._sequence,
            interval_s=1.0,
            plan_version=1,
            outgoing_bytes_per_s_max=125_000_000,
            outgoing_bytes_per_s=1e7,
            columns=ChannelColumns(
                channels=self._names,
                publications=tuple(counts),
                publishers=tuple(min(count, 5) for count in counts),
                subscribers=tuple(subscribers),
                messages_sent=tuple(sent),
                bytes_in=tuple(count * 213 for count in counts),
                bytes_out=tuple(each * 213 for each in sent),
                publisher_ids=tuple(self._ids),
                subscriber_ids=tuple(self._ids),
            ),
        )


def measure(rows_per_s: float, channels: int, seconds: float) -> Result:
    """Record for some seconds at this rate of rows; ``channels``: of each report."""
    servers = [unlimited_redis() for _ in range(SERVERS)]
    http_port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        try:
            for server in servers:
                server.start()
            plan = Plan.initial(Server(f"s{index + 1}", server.url) for index, server in enumerate(servers))
            for server in servers:
                commands = [pack(command) for command in write_whole(plan, None)]
                send_packed(server.port, commands, 1)
            command = dynamoth_command(
                "record", "--url", f"dynamoth://127.0.0.1:{servers[0].port}", "--out", f"{folder}/recording",
                "--http-port", str(http_port),
            )  # fmt: skip
            recorder = Child("recorder", command, environment=environment_without_settings())
            recorder.start()
            try:
                wait_until(lambda: is_ready(http_port), "a recorder that is ready")
                return _measure(recorder, Agents(servers, channels), http_port, rows_per_s, seconds)
            finally:
                recorder.stop()
        finally:
            for server in servers:
                server.stop()


def _measure(recorder: Child, agents: Agents, http_port: int, rows_per_s: float, seconds: float) -> Result:
    pace(agents, rows_per_s, WARM_UP_S)
    before, written_before = cpu_s(recorder.pid), written(http_port)
    began = time.perf_counter()
    rows = pace(agents, rows_per_s, seconds)
    took_s = time.perf_counter() - began
    used_s = cpu_s(recorder.pid) - before
    files_rows, files_bytes = (after - first for after, first in zip(written(http_port), written_before, strict=True))
    return Result(
        rows_per_s=rows / took_s,
        cores=used_s / took_s,
        rows_lost=metric(http_port, 'dynamoth_recorder_rows_lost_total{table="channels"}'),
        bytes_per_row=files_bytes / max(1.0, files_rows),
        memory_bytes=memory_bytes(recorder.pid),
    )


def pace(agents: Agents, rows_per_s: float, seconds: float) -> int:
    """Report at a steady rate; return the number of rows."""
    began = time.perf_counter()
    rows = 0
    while rows < rows_per_s * seconds:
        rows += agents.report()
        time.sleep(max(0.0, began + rows / rows_per_s - time.perf_counter()))
    return rows


def cpu_s(pid: int) -> float:
    """Return the CPU time of all threads of a process. Linux only."""
    return sum(int(file.read_text().split()[0]) for file in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def memory_bytes(pid: int) -> int:
    """Return the resident memory of a process. Linux only."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def written(http_port: int) -> tuple[float, float]:
    """Return the rows of channels and the bytes that were written."""
    rows = metric(http_port, 'dynamoth_recorder_rows_written_total{table="channels"}')
    return rows, metric(http_port, "dynamoth_recorder_written_bytes_total")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.recorder_cost", description=__doc__)
    parser.add_argument("--rows-per-s", type=float, default=100_000.0)
    parser.add_argument("--channels", type=int, default=1000, help="of each report")
    parser.add_argument("--seconds", type=float, default=20.0)
    arguments = parser.parse_args()
    result = measure(arguments.rows_per_s, arguments.channels, arguments.seconds)
    sys.stdout.write(
        f"{result.rows_per_s:,.0f} rows of channels/s: {result.cores:.2f} of a core (of {os.cpu_count()}),"
        f" {result.bytes_per_row:.1f} bytes on disk per row, {result.memory_bytes / 1e6:.0f} MB of memory\n"
    )
    missed = result.missed()
    sys.stdout.writelines(f"MISSED: {text}\n" for text in missed)
    sys.stdout.write(json.dumps(asdict(result)) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
