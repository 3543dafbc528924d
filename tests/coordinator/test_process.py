"""A coordinator as a process, on a real server that refuses what it needs."""

from __future__ import annotations

import asyncio
import logging

import pytest

from dynamoth.plan.plan import Server
from dynamoth_broker.coordinator.settings import CoordinatorOptions
from dynamoth_broker.process.coordinator import CoordinatorConfig, run_coordinator
from dynamoth_link.query import query
from tests.broker.edge import PATIENCE_S, free_port
from tests.broker.test_log_refusals import readiness
from tests.redis_servers import RedisServerFactory


@pytest.mark.parametrize(("right", "status"), [("-subscribe", 200), ("-set", 503)])
def test_a_coordinator_whose_server_refuses_says_why_with_the_cure(
    right: str, status: int, redis_server_factory: RedisServerFactory, caplog: pytest.LogCaptureFixture
) -> None:
    server, port = redis_server_factory(), free_port()
    config = CoordinatorConfig(servers=(Server("s1", server.url),), options=CoordinatorOptions(), http_port=port)

    async def said() -> str:
        """Return what the log and ``/readyz`` have said, as soon as one of them has the cure."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                text = await readiness(port, status) + str([each.__dict__ for each in caplog.records])
                if "'dynamoth acl'" in text:
                    return text
                await asyncio.sleep(0.05)

    async def main() -> None:
        await query(server.url, ("ACL", "SETUSER", "default", right))
        stop = asyncio.Event()
        running = asyncio.create_task(run_coordinator(config, stop))
        assert "NOPERM" in await said()
        stop.set()
        await running

    with caplog.at_level(logging.WARNING, "dynamoth.coordinator"):
        asyncio.run(main())
