"""FLUSHALL, as every test suite has it: the plan is there again at once, and who comes meanwhile waits for it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

import dynamoth_client as redis
from dynamoth_cli.local.cluster import LocalCluster
from dynamoth_client.runtime import bootstrap
from tests.client.both_clients import Connect
from tests.client.sync_helpers import PATIENCE_S, confirmed, next_of


@pytest.fixture(scope="module", params=[1, 3], ids=["one server", "three servers"])
def cluster(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    with LocalCluster(request.param) as cluster:
        yield cluster


def test_a_plan_that_was_flushed_is_there_again(
    cluster: LocalCluster, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that begins in between waits for it. The simulator measures how long (scenario 53)."""
    monkeypatch.setattr(bootstrap, "RESTORED_S_MAX", PATIENCE_S)
    for command in ("FLUSHALL", "FLUSHDB") * 2:
        for id_ in cluster.redis:
            cluster.ask(id_, (command,))
        with connect([cluster.redis["s1"].url]) as client, client.pubsub() as pubsub:
            confirmed(pubsub, "c")
            assert client.publish("c", "x") == 1
            assert next_of(pubsub)["data"] == b"x"


def test_the_text_of_the_error_says_what_happened(cluster: LocalCluster) -> None:
    os.kill(cluster.balancer.pid, signal.SIGSTOP)
    try:
        with redis.from_url(cluster.redis["s1"].url, retry=None) as client:
            client.execute_command("FLUSHALL")
            with pytest.raises(redis.ConnectionError, match=r"is gone \(FLUSHALL"):
                client.publish("c", "x")
    finally:
        os.kill(cluster.balancer.pid, signal.SIGCONT)
