from __future__ import annotations

from typing import Protocol, cast

import pytest
import uvloop

from tests.client import stored_cluster
from tests.client.stored_cluster import StoredCluster
from tests.redis_servers import RedisServerFactory


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Let what calls ``stored_cluster.run`` do so on both event loops, but for what moves channels that others keep."""
    names = metafunc.function.__code__.co_names
    if (
        "run" in names
        and "whole_cluster" not in metafunc.fixturenames
        and getattr(cast("object", metafunc.module), "run", None) is stored_cluster.run
    ):
        metafunc.parametrize("event_loop_kind", ["asyncio", "uvloop"], indirect=True)


@pytest.fixture(autouse=True)
def event_loop_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chooses the event loop of ``stored_cluster.run``."""
    if getattr(request, "param", "asyncio") == "uvloop":
        monkeypatch.setattr(stored_cluster, "loop_factory", uvloop.new_event_loop)


class ClusterFactory(Protocol):
    def __call__(self, servers: int = 2, *, password: str | None = None, stored: bool = True) -> StoredCluster: ...


@pytest.fixture
def cluster_factory(redis_server_factory: RedisServerFactory) -> ClusterFactory:
    def make(servers: int = 2, *, password: str | None = None, stored: bool = True) -> StoredCluster:
        cluster = StoredCluster([redis_server_factory(password=password) for _ in range(servers)])
        if stored:
            cluster.store()
        return cluster

    return make


@pytest.fixture
def cluster(cluster_factory: ClusterFactory) -> StoredCluster:
    """Two servers that store a plan."""
    return cluster_factory()
