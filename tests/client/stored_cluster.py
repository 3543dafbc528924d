"""Servers that store a plan, without agents and balancer: enough for a client on which nothing moves."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dynamoth.plan.plan import Entry, Phase, Plan, Route, Server, single
from dynamoth.protocol import stored_plan
from dynamoth_cli.local.embedded import EmbeddedRedis
from dynamoth_client.asyncio import PubSub
from dynamoth_link.options import LinkOptions
from dynamoth_link.query import query

TIMEOUT_S = 60.0
"""Bound of a whole test: a hang fails here, and not in the tool that runs the tests."""

loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
"""What makes the event loop of ``run``; None: asyncio. Set by ``conftest``."""

on_both_loops = pytest.mark.parametrize("event_loop_kind", ["asyncio", "uvloop"], indirect=True)
"""For tests that depend on how the event loop connects, reads, writes and closes."""


class StoredCluster:
    """Servers ``s1``, ``s2`` ... with the same plan stored at each."""

    def __init__(self, servers: list[EmbeddedRedis]) -> None:
        self.servers = {f"s{index}": server for index, server in enumerate(servers, 1)}
        urls = {id_: f"redis://127.0.0.1:{server.port}" for id_, server in self.servers.items()}
        self.plan = Plan.initial(Server(id_, url) for id_, url in urls.items())

    @property
    def hosts(self) -> list[str]:
        return [f"127.0.0.1:{server.port}" for server in self.servers.values()]

    @property
    def url(self) -> str:
        return "dynamoth://" + ",".join(self.hosts)

    def store(self, *, at: list[str] | None = None) -> None:
        with ThreadPoolExecutor(1) as elsewhere:  # an asynchronous test has a loop of its own
            elsewhere.submit(asyncio.run, self.write(at=at)).result()

    async def write(self, *, at: list[str] | None = None) -> None:
        for id_ in at or self.servers:
            await write_plan(self.servers[id_], self.plan)

    def put(self, channels: Mapping[str, str]) -> None:
        """Say in the plan where channels are, and store it."""
        epoch = self.plan.version + 1
        entries = {
            channel.encode(): Entry(Route(epoch, single(server)), Phase.SETTLED) for channel, server in channels.items()
        }
        self.plan = self.plan.with_entries(entries)
        self.store()

    def channel_at(self, server: str, prefix: str = "channel") -> str:
        """A channel whose home is ``server``."""
        return next(
            name for number in range(10_000) if self.plan.ring.home((name := f"{prefix}-{number}").encode()) == server
        )

    async def ask(self, server: str, *command: str | bytes | int) -> Any:
        embedded = self.servers[server]
        options = LinkOptions(password=embedded.password)
        (reply,) = await query(f"redis://127.0.0.1:{embedded.port}", command, options=options)
        return reply

    async def until_subscribed(self, server: str, channel: str, count: int = 1) -> None:
        """Wait until so many connections are subscribed to a channel at a server."""
        while (await self.ask(server, "PUBSUB", "NUMSUB", channel))[1] != count:  # noqa: ASYNC110  # Redis tells nobody
            await asyncio.sleep(0.002)

    async def kill_subscribers(self, server: str) -> None:
        """Cut every connection that has subscriptions, at one server."""
        await self.ask(server, "CLIENT", "KILL", "TYPE", "pubsub")


async def next_of(pubsub: PubSub) -> dict[str, Any]:
    """Return the next message, past what handlers took."""
    while (message := await pubsub.get_message(timeout=None)) is None:
        pass
    return message


async def confirmed(pubsub: PubSub, *channels: str | bytes, **handlers: Any) -> None:
    """Subscribe, and read the acknowledgements."""
    await pubsub.subscribe(*channels, **handlers)
    for _ in range(len(channels) + len(handlers)):
        assert (await next_of(pubsub))["type"] == "subscribe"


async def write_plan(server: EmbeddedRedis, plan: Plan) -> None:
    url = f"redis://127.0.0.1:{server.port}"
    options = LinkOptions(password=server.password)
    (info,) = await query(url, ("INFO", "server"), options=options)
    run_id = re.search(rb"run_id:(\w+)", info)
    assert run_id is not None
    await query(url, *stored_plan.write_whole(plan, run_id[1].decode()), options=options)


def run(test: Coroutine[Any, Any, None]) -> None:
    """Run an asynchronous test; it must end in time, leave no task behind, and give nothing to the loop's handler."""
    reported: list[dict[str, Any]] = []

    async def guarded() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
        async with asyncio.timeout(TIMEOUT_S):
            await test
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"tasks are left: {left}"

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(guarded())
    assert not reported
