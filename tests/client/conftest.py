from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Protocol

import pytest
import uvloop

from dynamoth_cli.local.cluster import LocalCluster
from dynamoth_client.runtime import feed
from tests.client import stored_cluster
from tests.client.both_clients import connect
from tests.client.stored_cluster import StoredCluster
from tests.redis_servers import RedisServerFactory

__all__ = ["connect"]


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an asynchronous test with ``stored_cluster.run``."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    stored_cluster.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(autouse=True)
def event_loop_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chooses the event loop of ``stored_cluster.run``; see ``stored_cluster.on_both_loops``."""
    if getattr(request, "param", "asyncio") == "uvloop":
        monkeypatch.setattr(stored_cluster, "loop_factory", uvloop.new_event_loop)


@pytest.fixture(autouse=True)
def acknowledgements_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets none overtake another, however long the server of the other takes on a busy machine."""
    monkeypatch.setattr(feed, "HOLD_S_MAX", 3600.0)


@pytest.fixture(scope="session")
def whole_cluster() -> Iterator[LocalCluster]:
    """Three servers with agents and a balancer, for all tests of a worker: each uses channels of its own."""
    with LocalCluster(3, password="a password") as cluster:
        yield cluster


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
