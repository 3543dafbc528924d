"""Fixtures that give tests real Redis servers. conftest.py hands them to all tests.

A machine without any ``redis-server`` fails these tests, with the way to install one; it never skips them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import pytest

from dynamoth_cli.local.embedded import EmbeddedRedis, reserve_port


class RedisServerFactory(Protocol):
    def __call__(
        self,
        *,
        port: int | None = None,
        password: str | None = None,
        options: Mapping[str, str] | None = None,
        binary: Path | None = None,
    ) -> EmbeddedRedis: ...


@pytest.fixture
def redis_server_factory() -> Iterator[RedisServerFactory]:
    """Starts any number of servers; they are stopped after the test."""
    with ExitStack() as servers:

        def start(
            *,
            port: int | None = None,
            password: str | None = None,
            options: Mapping[str, str] | None = None,
            binary: Path | None = None,
        ) -> EmbeddedRedis:
            server = EmbeddedRedis(port=port, password=password, options=options, binary=binary)
            return servers.enter_context(server)

        yield start


@pytest.fixture
def free_port() -> Iterator[int]:
    """A port where nobody listens, and nobody but the test will."""
    with reserve_port() as reserved:
        port: int = reserved.getsockname()[1]
        yield port


@pytest.fixture
def redis_server(redis_server_factory: RedisServerFactory) -> EmbeddedRedis:
    """One running server."""
    return redis_server_factory()
