"""The Spark session of the tests of jobs, and log servers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dynamoth_analytics.cluster.servers import LogServers, read_servers
from dynamoth_cli.local.embedded import EmbeddedRedis
from tests.analytics.conftest import pytest_collection_modifyitems as pytest_collection_modifyitems
from tests.analytics.conftest import spark as spark


@pytest.fixture(scope="session")
def log_processes() -> Iterator[tuple[EmbeddedRedis, EmbeddedRedis]]:
    with EmbeddedRedis() as first, EmbeddedRedis() as second:
        yield first, second


@pytest.fixture
def logs(log_processes: tuple[EmbeddedRedis, EmbeddedRedis]) -> str:
    """Two log servers, empty."""
    text = " ".join(f"l{number}=redis://127.0.0.1:{each.port}" for number, each in enumerate(log_processes, 1))
    servers = read_servers(text)
    for id_ in servers.ids:
        servers.run(id_, (b"FLUSHALL",))
    return text


@pytest.fixture
def servers(logs: str) -> LogServers:
    return read_servers(logs)
