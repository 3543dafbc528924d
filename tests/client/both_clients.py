"""Tests written for the synchronous client that run with the asynchronous one too, behind the same methods."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import pytest
import uvloop

import dynamoth_client
import dynamoth_client.asyncio
from tests.loop_thread import LoopThread

Connect = Callable[..., AbstractContextManager[Any]]
"""Opens a client of some servers, with options: ``with connect(cluster.hosts, client_name="me") as client``."""

_NO_MORE = object()


class OnLoop:
    """An asynchronous client, or something of it, on the loop of another thread: its methods wait for their outcome."""

    def __init__(self, inner: Any, thread: LoopThread) -> None:
        self.inner = inner
        self._thread = thread

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.inner, name)
        if not callable(attribute):
            return self._wrapped(attribute)

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._wrapped(self.on_loop(lambda: attribute(*args, **kwargs)))

        return call

    def __enter__(self) -> OnLoop:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self.on_loop(self.inner.aclose)

    def on_loop(self, function: Callable[[], Any]) -> Any:
        """Call a function on the loop, and wait for its outcome."""

        async def main() -> Any:
            outcome = function()
            return await outcome if hasattr(outcome, "__await__") else outcome

        return self._thread.call(main())

    def _wrapped(self, value: Any) -> Any:
        if hasattr(value, "__anext__"):
            return self._iterate(value)
        return OnLoop(value, self._thread) if hasattr(value, "aclose") or hasattr(value, "disconnect") else value

    def _iterate(self, items: Any) -> Iterator[Any]:
        while (item := self.on_loop(lambda: anext(items, _NO_MORE))) is not _NO_MORE:
            yield item


def is_asynchronous(client: Any) -> bool:
    return isinstance(client, OnLoop)


def _in_threads(servers: list[str], **options: Any) -> AbstractContextManager[Any]:
    return dynamoth_client.Redis(servers=servers, **options)


@contextmanager
def _on_loop(factory: Callable[[], asyncio.AbstractEventLoop], servers: list[str], **options: Any) -> Generator[OnLoop]:
    """Open an asynchronous client. Nothing of it may be left behind, and nothing be given to the loop's handler."""
    thread, reported = LoopThread("asynchronous client", factory), list[dict[str, Any]]()
    thread.loop.set_exception_handler(lambda _, context: reported.append(context))
    try:
        with OnLoop(dynamoth_client.asyncio.Redis(servers=servers, **options), thread) as client:
            yield client
    finally:
        thread.close()
    assert not reported


LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}

on_all_loops = pytest.mark.parametrize("connect", ["sync", *LOOPS], indirect=True)
"""For tests that depend on how the event loop connects, reads, writes and closes."""


@pytest.fixture(params=["sync", "asyncio"])
def connect(request: pytest.FixtureRequest) -> Connect:
    """Opens a client of either kind."""
    return _in_threads if request.param == "sync" else partial(_on_loop, LOOPS[request.param])
