from __future__ import annotations

import asyncio
import gc
import inspect
from collections.abc import Coroutine
from functools import partial
from typing import Any

import pytest

from dynamoth_user import client
from dynamoth_user.machine.events import UserOptions

TEST_S_MAX = 20.0


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an asynchronous test; it must leave no task behind."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(_without_leaks(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})))
    gc.collect()  # sockets that were not closed warn, and warnings are errors
    return True


async def _without_leaks(test: Coroutine[Any, Any, None]) -> None:
    before = asyncio.all_tasks()
    async with asyncio.timeout(TEST_S_MAX):
        await test
    left = {task for task in asyncio.all_tasks() - before if not task.done()}
    assert not left, f"tasks are left: {left}"


@pytest.fixture(autouse=True)
def fast_reconnects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "UserOptions", partial(UserOptions, backoff_s_min=0.01, retry_s=0.01))
