"""What every test can use."""

from __future__ import annotations

import gc
import os
from collections import deque
from functools import partial
from itertools import groupby
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from dynamoth_client.machines.patterns import machine as patterns
from dynamoth_client.machines.patterns.events import PatternOptions
from dynamoth_client.machines.subscriber import machine as subscriber
from dynamoth_client.machines.subscriber.events import SubscriberOptions
from tests.redis_servers import free_port, redis_server, redis_server_factory

__all__ = ["free_port", "redis_server", "redis_server_factory"]

# No deadline, and nothing is too slow: other work on the machine must not fail a test. In CI the same examples every
# time; many more of them in `make exhaustive`. A failure prints the blob that replays it.
settings.register_profile(
    "local", deadline=None, print_blob=True, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("ci", settings.get_profile("local"), derandomize=True, database=None)
settings.register_profile("exhaustive", settings.get_profile("local"), max_examples=5_000)
settings.load_profile("ci" if os.environ.get("CI") else "local")

# Java of a test lives for seconds: it uses its quick compiler alone, and collects garbage in one thread. Spark reads
# these variables when it starts Java; unlike JAVA_TOOL_OPTIONS, they write nothing to the log.
for variable in ("SPARK_SUBMIT_OPTS", "SPARK_LAUNCHER_OPTS"):
    os.environ.setdefault(variable, "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")


@pytest.fixture
def patient_subscribers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets an agent forward messages of a moving channel 10 s late: on a busy machine 0.5 s are a (rightful) gap."""
    monkeypatch.setattr(subscriber, "SubscriberOptions", partial(SubscriberOptions, hold_s_max=10.0))
    monkeypatch.setattr(patterns, "PatternOptions", partial(PatternOptions, hold_s_max=10.0))


LONG = ("data_cluster/test_demo_emergency.py", "docs", "data_cluster", "whole", "cli", "dependants", "bench")
"""Tests that run processes, some for minutes: folders and files, the longest first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every worker a share of the long tests, to begin with: one that begins last keeps the others waiting.

    Each worker gets an equal part of the list, in order, and takes tests from the end of another's part when it has
    none left. All tests that need Spark are in the first part, so that one session serves them.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    spark = [item for item in items if "spark" in getattr(item, "fixturenames", ())]
    others = [item for item in items if "spark" not in getattr(item, "fixturenames", ())]
    long = sorted((item for item in others if _rank(item) < len(LONG)), key=_rank)
    short = deque(item for item in others if _rank(item) == len(LONG))
    shares: list[list[pytest.Item]] = [[] for _ in range(workers)]
    for number, (_, of_file) in enumerate(groupby(long, lambda item: item.path)):  # one file: they share fixtures
        shares[-1 - number % max(workers - 1, 1)] += of_file
    shares[0] = spark + shares[0]
    count = len(items)
    items.clear()
    for number, share in enumerate(shares):
        rest = (count - len(items)) // (workers - number) - len(share)
        items += [*share, *(short.popleft() for _ in range(min(rest, len(short))))]
    items += short


def _rank(item: pytest.Item) -> int:
    """Return the first entry of LONG that a test belongs to, by number; their number if it is none."""
    path = item.path.relative_to(Path(__file__).parent).as_posix()
    return next((number for number, prefix in enumerate(LONG) if path.startswith(prefix)), len(LONG))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Take the tests and all modules from the garbage collector's sight: every collection walks what it can see."""
    gc.collect()
    gc.freeze()
