"""The Spark session of all tests here, and servers with datasets and queries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from dynamoth_analytics.cluster.source import DynamothSource
from tests.analytics.conftest import pytest_collection_modifyitems, spark
from tests.data_cluster.world import World

__all__ = ["pytest_collection_modifyitems", "spark"]


@pytest.fixture(scope="session")
def driver(spark: SparkSession) -> SparkSession:
    """The session, which knows datasets."""
    spark.dataSource.register(DynamothSource)
    return spark


@pytest.fixture
def make_world(tmp_path: Path) -> Iterator[Callable[[], World]]:
    """Makes worlds that end with the test."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(World(tmp_path))


@pytest.fixture
def world(make_world: Callable[[], World]) -> World:
    """Two log servers and a server for notifications."""
    return make_world()
