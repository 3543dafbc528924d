"""The balancer as a process, on real Redis servers with real agents; and its file of metrics."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dynamoth.errors import ConfigError
from dynamoth.names import BALANCER_CHANNEL, BALANCER_LEASE_KEY
from dynamoth.plan.plan import Phase, Plan, Server
from dynamoth.protocol.stored_plan import READ_WHOLE, parse_whole
from dynamoth_agent.process.runtime import AgentConfig, run_agent
from dynamoth_balancer.options import BalancerOptions
from dynamoth_balancer.process.recorder import Recorder, report_row
from dynamoth_balancer.process.runtime import BalancerConfig, run_balancer
from dynamoth_cli.admin import ask_balancer
from dynamoth_cli.local.embedded import EmbeddedRedis
from dynamoth_daemon.exit_codes import EXIT_DONE
from dynamoth_link.query import query
from dynamoth_link.urls import ClusterAddress, parse_server_url
from tests.balancer.cluster import SimCluster
from tests.redis_servers import RedisServerFactory

OPTIONS = BalancerOptions(load_ratio_high=100.0, lease_s=1.5, lease_renew_s=0.3)
TIMEOUT_S = 20.0


class Cluster:
    """Two real servers with their agents."""

    def __init__(self, redis: list[EmbeddedRedis]) -> None:
        self.servers = tuple(Server(f"s{n}", server.url) for n, server in enumerate(redis, 1))
        self.address = ClusterAddress(tuple(parse_server_url(server.url) for server in self.servers))

    def config(self, **more: Any) -> BalancerConfig:
        return BalancerConfig(servers=self.servers, options=OPTIONS, **more)

    async def plan(self, server: Server) -> Plan | None:
        [reply] = await query(server.url, READ_WHOLE)
        return parse_whole(reply, None)

    async def plans(self) -> list[Plan | None]:
        return [await self.plan(server) for server in self.servers]

    async def move(self, channel: bytes) -> Any:
        plan = await self.plan(self.servers[0])
        assert plan is not None
        home = plan.entry(channel).route.assignment.servers[0]
        target = next(server.id for server in self.servers if server.id != home)
        return await ask_balancer(self.address, "move", {"channel": channel, "to": target}, timeout_s=TIMEOUT_S)

    @asynccontextmanager
    async def agents(self) -> AsyncGenerator[None]:
        stop = asyncio.Event()
        configs = [
            AgentConfig(server=server.id, url=server.url, outgoing_bytes_per_s_max=10**9, report_interval_s=0.2)
            for server in self.servers
        ]
        tasks = [asyncio.create_task(run_agent(config, stop)) for config in configs]
        try:
            yield
        finally:
            stop.set()
            await asyncio.gather(*tasks)

    @asynccontextmanager
    async def balancer(self, config: BalancerConfig) -> AsyncGenerator[asyncio.Task[int]]:
        stop = asyncio.Event()
        task = asyncio.create_task(run_balancer(config, stop))
        try:
            await until(lambda: self.is_ready(config))
            yield task
        finally:
            stop.set()
            assert await task == EXIT_DONE

    async def is_ready(self, config: BalancerConfig) -> bool:
        status = await ask_balancer(self.address, "status", timeout_s=TIMEOUT_S)
        servers = status["servers"].values()
        version = status["version"]
        return status["stage"] == "leading" and all(server["acknowledged_version"] == version for server in servers)


async def until(condition: Callable[[], Any]) -> None:
    """Wait until an asynchronous condition holds; a cluster that is starting counts as not yet."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            try:
                if await condition():
                    return
            except Exception as error:
                if getattr(error, "code", "") not in ("unavailable", "refused"):
                    raise
            await asyncio.sleep(0.02)


@pytest.fixture
def cluster(redis_server_factory: RedisServerFactory) -> Cluster:
    return Cluster([redis_server_factory(), redis_server_factory()])


def _get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_a_channel_is_moved_and_the_successor_goes_on(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture, free_port: int
) -> None:
    caplog.set_level(logging.INFO, "dynamoth.balancer")
    rows = tmp_path / "metrics.jsonl"
    config = cluster.config(http_port=free_port, metrics_file=str(rows))

    async def first() -> Plan:
        async with cluster.agents(), cluster.balancer(config):
            result = await cluster.move(b"news")
            assert result["channel"] == b"news" and result["version"] == 3
            plans = await cluster.plans()
            assert plans[0] == plans[1] and plans[0] is not None
            assert plans[0].entries[b"news"].phase is Phase.SETTLED
            url = f"http://127.0.0.1:{free_port}"
            assert await asyncio.to_thread(_get, f"{url}/readyz") == (200, "ready\n")

            async def shows_load() -> bool:
                return 'dynamoth_balancer_load_ratio{server="s1"}' in (await metrics())[1]

            async def metrics() -> tuple[int, str]:
                return await asyncio.to_thread(_get, f"{url}/metrics")

            await until(shows_load)
            text = (await metrics())[1]
            assert "dynamoth_balancer_moves_settled_total 1.0" in text
            assert "dynamoth_balancer_leading 1.0" in text
            return plans[0]

    async def second() -> None:
        replies = [await query(server.url, (b"EXISTS", BALANCER_LEASE_KEY)) for server in cluster.servers]
        assert replies == [[0], [0]], "the lease was given back"
        async with cluster.agents(), cluster.balancer(config):
            plan = await cluster.plan(cluster.servers[1])
            assert plan is not None and plan.version > before.version and dict(plan.entries) == dict(before.entries)
            await cluster.move(b"sports")

    before = asyncio.run(first())
    asyncio.run(second())
    read = [json.loads(line) for line in rows.read_text().splitlines()]
    assert {row["server"] for row in read} == {"s1", "s2"} and all(row["interval_s"] > 0 for row in read)
    versions = [record for record in caplog.records if record.message == "the plan has a new version"]
    assert [vars(record)["cause"] for record in versions][:2] == ["a new cluster", "an administrator's move"]


def test_it_is_not_ready_while_no_server_answers(redis_server: EmbeddedRedis, free_port: int) -> None:
    config = BalancerConfig(
        servers=(Server("s1", redis_server.url), Server("s2", "redis://127.0.0.1:1")),
        options=OPTIONS,
        http_port=free_port,
    )

    async def run() -> tuple[int, str]:
        stop = asyncio.Event()
        task = asyncio.create_task(run_balancer(config, stop))
        url = f"http://127.0.0.1:{free_port}"

        async def listens() -> bool:
            [(_, count)] = await query(redis_server.url, (b"PUBSUB", b"NUMSUB", BALANCER_CHANNEL))
            return bool(count)

        await until(listens)
        answer = await asyncio.to_thread(_get, f"{url}/readyz")
        stop.set()
        assert await task == EXIT_DONE
        return answer

    status, text = asyncio.run(run())
    assert status == 503 and "contending" in text


def test_what_cannot_be_configured() -> None:
    with pytest.raises(ConfigError, match="at least one server"):
        BalancerConfig(servers=())
    with pytest.raises(ConfigError, match="http"):
        BalancerConfig(servers=(Server("s1", "http://somewhere"),))
    with pytest.raises(ConfigError, match="metrics_file"):
        config = BalancerConfig(servers=(Server("s1", "redis://h"),), metrics_file="/nowhere/at/all")
        asyncio.run(run_balancer(config))


# The file of metrics.


def test_rows_are_appended(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    report = SimCluster(1).agents["s1"].report()
    for _ in range(2):
        recorder = Recorder(path)
        recorder.write(report_row(report, 1_700_000_000.1234, 0.5))
        recorder.close()
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert first == second
    assert (first["server"], first["time_s"], first["load_ratio_averaged"]) == ("s1", 1_700_000_000.123, 0.5)


def test_a_full_disk_is_told_of_once_and_costs_nothing_but_the_rows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(Path("/dev/full"))
    for _ in range(5):
        recorder.write({"a": 1})
    recorder.close()
    assert (recorder.rows_written, recorder.rows_lost) == (0, 5)
    [record] = caplog.records
    assert "metrics cannot be recorded" in record.message and "No space left" in vars(record)["cause"]


def test_a_row_that_was_cut_off_does_not_spoil_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    recorder = Recorder(path)
    recorder.write({"row": 1})
    write = os.write

    def write_some(descriptor: int, data: bytes) -> int:
        return write(descriptor, data[:4])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write_some)
        recorder.write({"row": 2})
    recorder.write({"row": 3})
    recorder.close()
    lines = path.read_text().splitlines()
    assert [json.loads(lines[0]), json.loads(lines[2])] == [{"row": 1}, {"row": 3}]
    assert (recorder.rows_written, recorder.rows_lost) == (2, 1)
