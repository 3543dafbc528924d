"""FLUSHALL, as every test suite has it: the plan is there again at once, and who comes meanwhile waits for it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import pytest

import dynamoth_client as redis
from dynamoth_cli.local.cluster import LocalCluster
from tests.client.both_clients import Use, with_client
from tests.client.sync_helpers import confirmed, next_of

__all__ = ["with_client"]

RESTORED_S = 0.2
BUSY_S = 0.3
"""Allowed beside that where the machine has other work."""

FLUSHES = 5


@pytest.fixture(scope="module", params=[1, 3], ids=["one server", "three servers"])
def cluster(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    with LocalCluster(request.param) as cluster:
        yield cluster


def _use(client: Any) -> None:
    pubsub = client.pubsub()
    confirmed(pubsub, "c")
    assert client.publish("c", "x") == 1
    assert next_of(pubsub)["data"] == b"x"


@pytest.mark.alone  # it measures how long something takes
@pytest.mark.parametrize("command", ["FLUSHALL", "FLUSHDB"])
def test_a_plan_that_was_flushed_is_there_again(cluster: LocalCluster, with_client: Use, command: str) -> None:
    def median_s(*commands: tuple[str]) -> float:
        """Return how long a new client takes to be of use after these commands at every server."""
        took: list[float] = []
        for _ in range(FLUSHES):
            for id_ in cluster.redis:
                cluster.ask(id_, *commands)
            began_at = time.monotonic()
            with_client([server.url for server in cluster.redis.values()][:1], _use)
            took.append(time.monotonic() - began_at)
        return median(took)

    usual_s = median_s(("PING",))
    assert median_s((command,)) < usual_s + RESTORED_S + BUSY_S


def test_the_text_of_the_error_says_what_happened(cluster: LocalCluster) -> None:
    os.kill(cluster.balancer.pid, signal.SIGSTOP)
    try:
        with redis.from_url(cluster.redis["s1"].url, retry=None) as client:
            client.execute_command("FLUSHALL")
            with pytest.raises(redis.ConnectionError, match=r"is gone \(FLUSHALL"):
                client.publish("c", "x")
    finally:
        os.kill(cluster.balancer.pid, signal.SIGCONT)
