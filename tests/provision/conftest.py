"""Runs the asynchronous tests of provisioners."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Coroutine
from typing import Any

import pytest

TIMEOUT_S = 60.0


async def bounded(test: Coroutine[Any, Any, None]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        await test
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, f"tasks left behind: {left}"


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an asynchronous test; it must end in time, and leave no task behind."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(bounded(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})))
    return True
