from __future__ import annotations

from typing import Protocol

import pytest

from tests.client.stored_cluster import StoredCluster
from tests.redis_servers import RedisServerFactory


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
