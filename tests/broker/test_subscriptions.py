"""The broker's own subscriptions, with a client of the cluster that does what the test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
import redis.exceptions

from dynamoth_broker.process import subscriptions
from dynamoth_broker.process.subscriptions import Subscriptions
from dynamoth_client.asyncio import Redis


class BrokenPubSub:
    """Raises an error for each read, without a wait."""

    def __init__(self) -> None:
        self.channels: dict[bytes, None] = {}
        self.reads = 0

    async def subscribe(self, channel: bytes) -> None:
        self.channels[channel] = None

    def batches(self) -> AsyncIterator[list[dict[str, Any]]]:
        return self

    def __aiter__(self) -> BrokenPubSub:
        return self

    async def __anext__(self) -> list[dict[str, Any]]:
        self.reads += 1
        raise redis.exceptions.ConnectionError("it has broken down")

    async def aclose(self) -> None:
        pass


class BrokenClient:
    """Makes one broken PubSub."""

    def __init__(self) -> None:
        self.made = BrokenPubSub()

    def pubsub(self, **_: Any) -> BrokenPubSub:
        return self.made


def test_a_client_that_has_broken_down_ends_the_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscriptions, "PAUSE_S", 0.001)
    reports: list[str | None] = []

    async def main() -> int:
        client = BrokenClient()
        broker = Subscriptions(cast("Redis", client), lambda event: None, reports.append)
        broker.subscribe(b"news")
        async with asyncio.timeout(10):
            with pytest.raises(RuntimeError, match="it has broken down"):
                await broker.listening
        return client.made.reads

    assert asyncio.run(main()) == subscriptions.ERRORS_MAX
    assert reports == ["it has broken down"]
