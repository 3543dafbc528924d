"""Runs the asynchronous tests of links on both event loops, and gives them every Redis that is installed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import pytest
import uvloop

from dynamoth_cli.local.embedded import EmbeddedRedis, bundled_redis_server, find_redis_server
from tests.link.harness import Runner, run
from tests.redis_servers import RedisServerFactory

BINARIES = sorted({binary for binary in (find_redis_server(), bundled_redis_server()) if binary is not None})


def pytest_pycollect_makeitem(obj: object) -> None:
    """Run each asynchronous test once per event loop."""
    if inspect.iscoroutinefunction(obj):
        pytest.mark.usefixtures("run_async")(obj)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an asynchronous test with the fixture ``run_async``."""
    test: Any = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}
    run = cast("Runner", pyfuncitem.funcargs["run_async"])
    run(lambda: test(**arguments))
    return True


@pytest.fixture(params=["asyncio", "uvloop"])
def run_async(request: pytest.FixtureRequest) -> Runner:
    """Runs a coroutine function on one event loop, and fails when it leaves tasks behind."""
    factory = uvloop.new_event_loop if request.param == "uvloop" else None

    def run_on_loop(main: Callable[[], Coroutine[Any, Any, None]], *, bugs: int = 0) -> list[str]:
        return run(main, factory, bugs)

    return run_on_loop


@pytest.fixture(params=BINARIES, ids=str)
def redis(request: pytest.FixtureRequest, redis_server_factory: RedisServerFactory) -> EmbeddedRedis:
    """One running server of each version that is installed."""
    binary: Path = request.param
    return redis_server_factory(binary=binary)
