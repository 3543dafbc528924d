"""The agent as it runs, on real Redis servers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import redis

from dynamoth.errors import ConfigError
from dynamoth.names import AGENT_CHANNEL, BALANCER_CHANNEL
from dynamoth.plan.plan import Plan, Server
from dynamoth.protocol.envelope import seal
from dynamoth.protocol.reports import Report, unpack_report
from dynamoth.protocol.stored_plan import write_whole
from dynamoth_agent.process.runtime import AgentConfig, run_agent
from dynamoth_cli.local.embedded import EmbeddedRedis
from dynamoth_link.link import Link
from dynamoth_link.options import LinkOptions

PATIENCE_S = 20.0

HASTY = LinkOptions(backoff_s_min=0.01, backoff_s_max=0.05, close_timeout_s=0.2)


def config(server: EmbeddedRedis, **fields: Any) -> AgentConfig:
    known: dict[str, Any] = {
        "server": "s1",
        "url": server.url,
        "outgoing_bytes_per_s_max": 1_000_000,
        "report_interval_s": 0.1,
        "link": HASTY,
    }
    return AgentConfig(**{**known, **fields})


def command(server: EmbeddedRedis, *words: bytes | str | int) -> Any:
    """Send one command over a connection of its own."""
    client: Any = redis.Redis(host="127.0.0.1", port=server.port)
    with client:
        return client.execute_command(*words)


def store_plan(server: EmbeddedRedis) -> None:
    for words in write_whole(Plan.initial([Server("s1", server.url)]), None):
        command(server, *(word if isinstance(word, bytes) else str(word) for word in words))


def agents(server: EmbeddedRedis) -> int:
    [(_, count)] = command(server, "PUBSUB NUMSUB", AGENT_CHANNEL)
    assert isinstance(count, int)
    return count


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110  # other processes make it true
            await asyncio.sleep(0.005)


async def get(port: int, path: str) -> tuple[int, str]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\n\r\n".encode())
    answer = (await reader.read()).decode()
    writer.close()
    return int(answer.split(" ")[1]), answer.partition("\r\n\r\n")[2]


@asynccontextmanager
async def running(agent: AgentConfig) -> AsyncGenerator[asyncio.Task[int]]:
    stop = asyncio.Event()
    task = asyncio.create_task(run_agent(agent, stop))
    try:
        yield task
    finally:
        stop.set()
        await task


class Listener:
    """What the balancer does: hears the reports at a server."""

    def __init__(self, server: EmbeddedRedis) -> None:
        self.reports: list[Report] = []
        self.pushes: list[list[Any]] = []
        self._link = Link(server.url, on_up=self._up, on_down=lambda reason: None, on_pushes=self._take, options=HASTY)

    def _up(self, run_id: str | None) -> None:
        self._link.send((b"SUBSCRIBE", BALANCER_CHANNEL))

    def _take(self, pushes: list[list[Any]]) -> None:
        for push in pushes:
            self.pushes.append(push)
            if push[:2] == [b"message", BALANCER_CHANNEL] and push[2][1] == 12:
                self.reports.append(unpack_report(push[2]))

    async def __aenter__(self) -> Listener:
        self._link.start()
        await until(lambda: self.pushes)
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._link.close()

    async def next_report(self, condition: Callable[[Report], object] = lambda report: True) -> Report:
        """Return the next report, from now on, for which the condition holds."""
        start = len(self.reports)
        await until(lambda: any(condition(report) for report in self.reports[start:]))
        return next(report for report in self.reports[start:] if condition(report))


async def test_an_agent_measures_a_real_server(redis_server: EmbeddedRedis) -> None:
    store_plan(redis_server)
    async with running(config(redis_server)), Listener(redis_server) as listener:
        report = await listener.next_report(lambda report: report.plan_version == 0)
        assert not report.outgoing_is_estimate
        assert report.connections_max > 0 and report.memory_bytes > 0 and report.connections >= 2

        subscriber = Listener(redis_server)
        async with subscriber:
            link = subscriber._link  # pyright: ignore[reportPrivateUsage]
            link.send((b"SUBSCRIBE", b"world"))
            await until(lambda: [b"subscribe", b"world", 2] in subscriber.pushes)
            payload = bytes(10_000)
            for sequence in range(50):
                link.send((b"PUBLISH", b"world", seal(7, sequence, 0, payload)))
                link.send((b"PUBLISH", b"world", payload))
            await until(lambda: sum(push[:2] == [b"message", b"world"] for push in subscriber.pushes) == 100)
            reports = listener.reports
            await until(lambda: sum(sum(r.columns.publications) for r in reports) == 100)
        seen = [r for r in reports if sum(r.columns.publications)]
        assert max(r.columns.publishers[0] for r in seen) == 1
        assert sum(r.columns.messages_sent[0] for r in seen) == 100
        sent = sum(r.columns.bytes_out[0] for r in seen)
        assert 1_000_000 < sent < 1_010_000

        # What Redis says it has sent, without the agent's copy, is what the channel accounts for.
        # Redis counts when a socket takes the bytes: that may be an interval later.
        def measured() -> float:
            return sum(r.outgoing_bytes_per_s * r.interval_s for r in reports)

        await until(lambda: measured() > 0.9 * sent)
        assert measured() < 1.9 * sent
        assert max(r.observation_lag_s for r in reports) < PATIENCE_S


@pytest.mark.parametrize("user", ["", "nobody@"])
def test_a_url_that_cannot_be_used_is_refused_at_once(user: str) -> None:
    with pytest.raises(ConfigError):
        AgentConfig(server="s1", url=f"http://{user}x", outgoing_bytes_per_s_max=1)
    with pytest.raises(ConfigError, match="outgoing_bytes_per_s_max"):
        AgentConfig(server="s1", url="redis://x", outgoing_bytes_per_s_max=0)


async def test_http_says_whether_it_is_ready(redis_server: EmbeddedRedis, free_port: int) -> None:
    port = free_port
    async with running(config(redis_server, http_port=port)) as task:
        await until(lambda: agents(redis_server) == 1)
        assert (await get(port, "/healthz"))[0] == 200
        async with asyncio.timeout(PATIENCE_S):  # it may not have read that it observes
            while "balancer" not in (answer := await get(port, "/readyz"))[1]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert answer[0] == 503
        store_plan(redis_server)
        async with asyncio.timeout(PATIENCE_S):
            while (await get(port, "/readyz"))[0] != 200:  # noqa: ASYNC110  # it is asked from outside
                await asyncio.sleep(0.01)
        status, text = await get(port, "/metrics")
        assert status == 200
        assert 'dynamoth_agent_link_up{server="s1"} 1.0' in text
        redis_server.kill()
        async with asyncio.timeout(PATIENCE_S):
            while "no connection" not in (await get(port, "/readyz"))[1]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert not task.done()


async def test_without_permission_to_list_clients_it_works_and_says_so(
    redis_server: EmbeddedRedis, caplog: pytest.LogCaptureFixture
) -> None:
    rules = ["on", ">secret", "allkeys", "allchannels", "+@all", "-info", "-client"]
    command(redis_server, "ACL", "SETUSER", "agent", *rules)
    store_plan(redis_server)
    restricted = LinkOptions(username="agent", password="secret", backoff_s_max=0.1)
    async with running(config(redis_server, link=restricted)), Listener(redis_server) as listener:
        report = await listener.next_report()
        assert report.outgoing_is_estimate
    causes = [vars(record)["cause"] for record in caplog.records if record.levelno == logging.WARNING]
    assert any("one agent per server" in cause and "NOPERM" in cause for cause in causes)


async def test_a_machine_that_raises_ends_the_process_with_another_code(
    redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> list[Any]:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr("dynamoth_lla.machine.LoadAnalyzer.handle", broken)
    assert await run_agent(config(redis_server)) == 1
    assert "broken on purpose" in caplog.text
