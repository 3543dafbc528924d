"""What every test can use."""

from __future__ import annotations

import gc
import os
from functools import partial
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


LONG = ("whole", "bench", "cli", "dependants", "docs")
"""Folders of tests that run processes, some for half a minute."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put long tests first, so that no worker begins with one when the others have none left."""
    items.sort(key=lambda item: item.path.relative_to(Path(__file__).parent).parts[0] not in LONG)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Take the tests and all modules from the garbage collector's sight: every collection walks what it can see."""
    gc.collect()
    gc.freeze()
