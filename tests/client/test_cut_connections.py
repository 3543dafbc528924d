"""Connections that are cut silently: nothing closes them, and nothing comes any more."""

from __future__ import annotations

import asyncio

from dynamoth.plan.plan import Plan, Server
from dynamoth_client.asyncio import from_url
from tests.client.conftest import ClusterFactory
from tests.tcp_proxy import proxied

NOTICED_S = 5.0
"""A silent cut is noticed within this by default."""

SLACK_S = 3.0
"""To connect again, and for a busy machine."""


def test_a_publish_that_hangs_on_a_cut_connection_succeeds_over_the_next_one(cluster_factory: ClusterFactory) -> None:
    """With all options at their defaults. The subscriber gets it, and a gap for what else it may have missed."""
    cluster = cluster_factory(1, stored=False)

    async def test() -> None:
        loop = asyncio.get_running_loop()
        async with proxied(cluster.servers["s1"].port) as proxy:
            cluster.plan = Plan.initial([Server("s1", f"redis://127.0.0.1:{proxy.port}")])
            await cluster.write()
            async with from_url(f"dynamoth://127.0.0.1:{proxy.port}") as client, client.pubsub(gaps=True) as pubsub:
                await pubsub.subscribe("c")
                assert (await pubsub.get_message(timeout=None) or {})["type"] == "subscribe"
                assert await client.publish("c", "before") == 1
                assert (await pubsub.get_message(timeout=None) or {})["data"] == b"before"
                proxy.cut_present()
                cut_at = loop.time()
                await client.publish("c", "meanwhile")
                assert loop.time() - cut_at < NOTICED_S + SLACK_S
                kinds: list[str] = []
                while "gap" not in kinds:
                    kinds.append((await pubsub.get_message(timeout=None) or {})["type"])
                assert loop.time() - cut_at < NOTICED_S + SLACK_S
                await client.publish("c", "behind")
                messages: list[bytes] = []
                while not messages or messages[-1] != b"behind":
                    message = await pubsub.get_message(timeout=None) or {}
                    messages += [message["data"]] if message["type"] == "message" else []

    asyncio.run(asyncio.wait_for(test(), 30))
