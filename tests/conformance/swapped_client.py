"""A pytest plugin: the drop-in classes in the place of redis-py's, and the tests that ``excused.toml`` excuses.

redis-py's fixtures look the classes up when they run; nothing else of its tests is changed. Tests that only make a
``PubSub`` of redis-py themselves, on mocks, go on to test that.

An excused test is expected to fail: one that passes fails the run, so that the list stays true.
"""

from __future__ import annotations

import gc
import os
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio

import dynamoth_client
import dynamoth_client.asyncio
from dynamoth.names import is_user_channel

EXCUSED = Path(__file__).with_name("excused.toml")
PORTS_VARIABLE = "DYNAMOTH_CONFORMANCE_PORTS"
"""The ports of the cluster's servers, separated by commas: __main__.py sets it."""

CLEAN_TIMEOUT_S = 5.0
POLL_INTERVAL_S = 0.005
"""How long the servers may take to forget what a test subscribed to, and how often they are asked."""

_PlainRedis: Any = redis.Redis  # before it is swapped


def pytest_configure() -> None:
    """Swap the classes."""
    swaps: list[tuple[Any, Any]] = [(redis.asyncio, dynamoth_client.asyncio), (redis, dynamoth_client)]
    for theirs, ours in swaps:
        theirs.Redis, theirs.from_url = ours.Redis, ours.from_url


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Mark the excused tests. Raises UsageError for an excuse of a test that does not exist."""
    by_name: dict[str, list[pytest.Item]] = {}
    for item in items:
        by_name.setdefault(item.nodeid.partition("[")[0], []).append(item)
        by_name.setdefault(item.nodeid, [item])
    files = {item.nodeid.partition("::")[0] for item in items}
    for excuse in tomllib.loads(EXCUSED.read_text())["excused"]:
        for test in excuse["tests"]:
            if test.partition("::")[0] not in files:
                continue
            if test not in by_name:
                raise pytest.UsageError(f"{EXCUSED.name} excuses a test that does not exist: {test}")
            for item in by_name[test]:
                runs = not excuse.get("hangs", False)
                item.add_marker(pytest.mark.xfail(reason=excuse["reason"], strict=True, run=runs))


@pytest.fixture(autouse=True)
def nothing_is_left_subscribed() -> Iterator[None]:
    """Fail a test after which a server still has subscribers: they would be counted by ``publish`` in the next one."""
    yield
    gc.collect()  # ends the subscriptions of what was dropped without being closed
    deadline = time.monotonic() + CLEAN_TIMEOUT_S
    for port in map(int, os.environ[PORTS_VARIABLE].split(",")):
        server = _PlainRedis(port=port)
        while left := _left(server):
            assert time.monotonic() < deadline, f"still subscribed to at port {port}: {left}"
            time.sleep(POLL_INTERVAL_S)
        server.close()


def _left(server: Any) -> list[bytes]:
    """Return the applications' channels that are subscribed to at a server, and how many patterns but the agent's."""
    left = [channel for channel in server.pubsub_channels() if is_user_channel(channel)]
    patterns: int = server.pubsub_numpat() - 1
    return [*left, b"%d pattern(s)" % patterns] if patterns else left
