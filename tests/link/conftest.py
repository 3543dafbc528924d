"""Both event loops and every Redis that is at hand."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from dynamoth_cli.local.embedded import EmbeddedRedis, bundled_redis_server, find_redis_server
from tests.link.harness import Runner, run
from tests.redis_servers import RedisServerFactory

BINARIES = sorted({binary for binary in (find_redis_server(), bundled_redis_server()) if binary is not None})


@pytest.fixture(params=["asyncio", "uvloop"])
def run_async(request: pytest.FixtureRequest) -> Runner:
    """Runs a coroutine function on one event loop after the other, and looks for what it leaves behind."""
    factory = uvloop.new_event_loop if request.param == "uvloop" else None

    def run_on_loop(main: Callable[[], Coroutine[Any, Any, None]], *, bugs: int = 0) -> list[str]:
        return run(main, factory, bugs)

    return run_on_loop


@pytest.fixture(params=BINARIES, ids=str)
def redis(request: pytest.FixtureRequest, redis_server_factory: RedisServerFactory) -> EmbeddedRedis:
    """One running server of each version that is installed."""
    binary: Path = request.param
    return redis_server_factory(binary=binary)
