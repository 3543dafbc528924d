"""Both clients, used alike: a test is run with a synchronous one, and with an asynchronous one that looks like that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import dynamoth_client
import dynamoth_client.asyncio


def _sync(urls: list[str], use: Callable[[Any], object], **options: Any) -> None:
    with dynamoth_client.Redis(servers=urls, **options) as client:
        use(client)


_MAKERS = ("pubsub", "client", "pipeline", "keyspace_notifications")
"""Methods that return what has methods to wait for."""


class _OnLoop:
    """An asynchronous client, or a PubSub of it, whose methods wait for their outcome."""

    def __init__(self, inner: Any, runner: asyncio.Runner) -> None:
        self._inner = inner
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._inner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            async def main() -> Any:
                outcome = attribute(*args, **kwargs)
                return await outcome if hasattr(outcome, "__await__") else outcome

            outcome = self._runner.run(main())
            return _OnLoop(outcome, self._runner) if name in _MAKERS else outcome

        return call if callable(attribute) else attribute


def _asyncio(urls: list[str], use: Callable[[Any], object], **options: Any) -> None:
    with asyncio.Runner() as runner:
        client = _OnLoop(dynamoth_client.asyncio.Redis(servers=urls, **options), runner)
        try:
            use(client)
        finally:
            client.aclose()


def close(pubsub: Any) -> None:
    """Close a PubSub of either client."""
    (pubsub.close if isinstance(pubsub, dynamoth_client.PubSub) else pubsub.aclose)()


Use = Callable[..., None]


@pytest.fixture(params=[_sync, _asyncio], ids=["sync", "asyncio"])
def with_client(request: pytest.FixtureRequest) -> Use:
    use: Use = request.param
    return use
