"""Whatever is cancelled, at whichever step: all works afterwards, and nothing is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
import redis.exceptions

from dynamoth_client.asyncio import PubSub, Redis, from_url
from tests.client.stored_cluster import StoredCluster, on_both_loops, run

pytestmark = on_both_loops

PATIENCE_S = 20.0
TURNS_MAX = 400
"""More turns of the loop than any call takes; a call that waits for servers takes many that only wait."""

Call = Callable[[Redis, PubSub], Awaitable[Any]]

CALLS: dict[str, Call] = {
    "subscribe": lambda _, pubsub: pubsub.subscribe("a"),
    "psubscribe": lambda _, pubsub: pubsub.psubscribe("a*"),
    "unsubscribe": lambda _, pubsub: pubsub.unsubscribe("mine"),
    "get_message": lambda _, pubsub: pubsub.get_message(timeout=0),
    "ping": lambda _, pubsub: pubsub.ping(),
    "connect": lambda _, pubsub: pubsub.connect(),
    "pubsub.aclose": lambda _, pubsub: pubsub.aclose(),
    "publish": lambda client, _: client.publish("mine", "1"),
    "spublish": lambda client, _: client.spublish("mine", "1"),
    "plan": lambda client, _: client.plan("mine"),
    "pubsub_numsub": lambda client, _: client.pubsub_numsub("mine"),
    "pubsub_channels": lambda client, _: client.pubsub_channels(),
    "pubsub_numpat": lambda client, _: client.pubsub_numpat(),
    "client.aclose": lambda client, _: client.aclose(),
}

FIRST = ("subscribe", "psubscribe", "ping", "connect", "publish", "pubsub_numpat", "client.aclose")
"""Calls that may be the first of a client, one of each way to begin."""


async def message_of(pubsub: PubSub, kind: str) -> dict[str, Any]:
    """Return the next message of a kind."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            message = await pubsub.get_message(timeout=None)
            if message is not None and message["type"] == kind:
                return message


async def cancelled_after(turns: int, call: Awaitable[Any]) -> bool:
    """Cancel a call after so many turns of the loop; False when it has ended before that."""

    async def wait() -> Any:
        return await call

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)  # it has begun: else there would be nothing to cancel
    for _ in range(turns):
        if task.done():
            break
        await asyncio.sleep(0)
    task.cancel()
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.wait({task})
    if not task.cancelled():
        task.result()
    return task.cancelled()


async def all_works(client: Redis, pubsub: PubSub) -> None:
    """A subscription takes effect and a message comes, whatever was subscribed to before."""
    try:
        await pubsub.subscribe("works")
    except redis.exceptions.ConnectionError:  # the client was closed: that ends its PubSubs
        await pubsub.aclose()
        await pubsub.subscribe("works")
    while (await message_of(pubsub, "subscribe"))["channel"] != b"works":
        pass
    assert await client.publish("works", "x") == 1
    while (await message_of(pubsub, "message"))["channel"] != b"works":
        pass


async def nothing_is_left(cluster: StoredCluster) -> None:
    """Cancelled calls may close their sockets behind our back, but soon."""
    async with asyncio.timeout(PATIENCE_S):
        while asyncio.all_tasks() != {asyncio.current_task()}:  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0.001)
        for id_ in cluster.servers:
            while await cluster.ask(id_, "PUBSUB", "CHANNELS") or await cluster.ask(id_, "PUBSUB", "NUMPAT"):  # noqa: ASYNC110
                await asyncio.sleep(0.001)


async def sweep(
    cluster: StoredCluster, call: Call, begin: Callable[[Redis, PubSub], Coroutine[Any, Any, None]]
) -> None:
    turns = 0
    while True:
        client = from_url(cluster.url)
        pubsub = client.pubsub()
        await begin(client, pubsub)
        was_cancelled = await cancelled_after(turns, call(client, pubsub))
        await all_works(client, pubsub)
        await client.aclose()
        await nothing_is_left(cluster)
        if not was_cancelled:
            return
        turns += 1
        assert turns < TURNS_MAX


async def nothing(client: Redis, pubsub: PubSub) -> None:
    """A client that has not been used."""


async def subscribed(client: Redis, pubsub: PubSub) -> None:
    await pubsub.subscribe("mine")
    await message_of(pubsub, "subscribe")


async def busy(client: Redis, pubsub: PubSub) -> None:
    """A client with everything: links to servers, a pattern, a publisher."""
    await subscribed(client, pubsub)
    await pubsub.psubscribe("p*")
    await message_of(pubsub, "psubscribe")
    assert await client.publish("mine", "0") == 1
    await message_of(pubsub, "message")


@pytest.mark.parametrize("name", FIRST)
def test_the_first_call_of_a_client(cluster: StoredCluster, name: str) -> None:
    run(sweep(cluster, CALLS[name], nothing))


@pytest.mark.parametrize("name", CALLS)
def test_a_call_of_a_client_at_work(cluster: StoredCluster, name: str) -> None:
    run(sweep(cluster, CALLS[name], busy))


@pytest.mark.parametrize("close", ["pubsub", "client"])
async def test_who_waits_is_let_go_by_a_close_that_is_cancelled(cluster: StoredCluster, close: str) -> None:
    was_cancelled, turns = True, 0
    while was_cancelled:
        client = from_url(cluster.url)
        pubsub = client.pubsub()
        await busy(client, pubsub)
        waiting = asyncio.create_task(pubsub.get_message(timeout=None))
        await asyncio.sleep(0)
        was_cancelled = await cancelled_after(turns, (client if close == "client" else pubsub).aclose())
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.wait({waiting})
        message = waiting.result()
        assert message is None if close == "pubsub" else message is not None, "it has subscribed again"
        await pubsub.aclose()
        await client.aclose()
        await nothing_is_left(cluster)
        turns += 1
