"""What long-running processes share: their event loop, the signals that end them, and their HTTP."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from dynamoth_daemon.http import HttpAnswer, HttpServer, health, readiness

_T = TypeVar("_T")


def run(main: Coroutine[Any, Any, _T]) -> _T:
    """Run ``main`` to its end, in uvloop where it is installed (the extra ``fast``), else in asyncio's own loop."""
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(main)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


@contextmanager
def ended_by_signals(stop: asyncio.Event) -> Generator[None]:
    """Let SIGTERM and SIGINT set ``stop``. In a coroutine of the main thread only."""
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, stop.set)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


async def serve_http(
    host: str, port: int, registry: CollectorRegistry, why_not_ready: Callable[[], str | None]
) -> HttpServer | None:
    """Serve /metrics, /healthz and /readyz; None where the port is 0.

    Raises ``dynamoth.errors.ConfigError`` when the port cannot be listened at.
    """
    if not port:
        return None

    def metrics() -> HttpAnswer:
        return HttpAnswer(HTTPStatus.OK, generate_latest(registry), CONTENT_TYPE_LATEST)

    paths = {"/metrics": metrics, "/healthz": health, "/readyz": lambda: readiness(why_not_ready())}
    return await HttpServer.start(host, port, paths)
