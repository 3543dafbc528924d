"""What applications publish on the channels of datasets is stored once: with real servers, without Spark."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from functools import wraps
from itertools import count
from typing import Any, ParamSpec

import pytest

from dynamoth.data.catalog import DATASETS_KEY, Entry, entry_of, put_command
from dynamoth.data.datasets import read_dataset
from dynamoth.data.records import parse_records, partition_name, range_command
from dynamoth_analytics.cluster.ingest import Ingest
from dynamoth_analytics.cluster.metrics import collect_ingest
from dynamoth_analytics.cluster.servers import LogServers, read_servers
from dynamoth_cli.local.cluster import LocalCluster
from dynamoth_cli.local.embedded import EmbeddedRedis
from dynamoth_client.asyncio import Redis
from dynamoth_client.asyncio import from_url as connect
from dynamoth_client.datasets import DatasetWriter

P = ParamSpec("P")

TIMEOUT_S = 60.0
POLL_S = 0.02
COUNT = 500

WITH_ID: dict[str, Any] = {"kind": "append", "id": "id", "partitions": 2, "fields": {"id": "string", "n": "int"}}
WITHOUT_ID: dict[str, Any] = {"kind": "append", "partitions": 3, "fields": {"n": "int"}}


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(2) as running:
        yield running


@pytest.fixture
def redis(cluster: LocalCluster) -> Iterator[list[EmbeddedRedis]]:
    with EmbeddedRedis() as first, EmbeddedRedis() as second:
        yield [first, second]


@pytest.fixture
def servers(redis: list[EmbeddedRedis]) -> LogServers:
    return read_servers(" ".join(f"l{n}=redis://127.0.0.1:{each.port}" for n, each in enumerate(redis, 1)))


def put(servers: LogServers, name: str, definition: Mapping[str, Any] | None, version: int = 1) -> None:
    entry = Entry(version, None)
    if definition is not None:
        entry = entry_of(read_dataset(name, {**definition, "version": version}))
    for id_ in servers.ids:
        servers.run(id_, put_command(DATASETS_KEY, name, entry))


def stored(servers: LogServers, name: str, partitions: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for number in range(partitions):
        partition = partition_name(name, number)
        reply = servers.run(servers.server_of(partition), range_command(partition, 0, 2**62, 10_000))
        found += [json.loads(each.value) for each in parse_records(reply)]
    return found


@asynccontextmanager
async def running(cluster: LocalCluster, servers: LogServers) -> AsyncGenerator[tuple[Ingest, Redis]]:
    ingest = Ingest(cluster.url, dict(servers.urls))
    task = asyncio.create_task(ingest.run())
    try:
        async with connect(cluster.url) as client:
            yield ingest, client
            assert not task.done(), "an ingest runs until it is cancelled"
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def synchronous(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    @wraps(test)
    def run(*arguments: P.args, **named: P.kwargs) -> None:
        asyncio.run(test(*arguments, **named))

    return run


async def until(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            if holds():
                return
            await asyncio.sleep(POLL_S)


@synchronous
async def test_what_is_published_is_stored_once(cluster: LocalCluster, servers: LogServers) -> None:
    put(servers, "reports", WITH_ID)
    put(servers, "shelters", {"kind": "static", "fields": {"n": "int"}})
    async with running(cluster, servers) as (ingest, client):
        await until(lambda: ingest.subscribed)
        for number in range(COUNT):
            assert await client.publish("d:reports", json.dumps({"id": f"r{number}", "n": number})) == 1
        await client.publish("d:reports", json.dumps({"id": "r7", "n": 7}))
        await client.publish("d:reports", "no JSON")
        await until(lambda: ingest.counts.total() == COUNT + 2)
        assert ingest.counts == {"stored": COUNT, "duplicate": 1, "refused": 1}
        assert sorted(each["n"] for each in stored(servers, "reports", 2)) == [*range(COUNT)]
        [letter] = stored(servers, "reports_dead", 1)
        assert letter["source"] == "publish"
        assert letter["record"] == "no JSON"
        assert ingest.subscribed == {"reports"}, "a static dataset is loaded as a whole"


@synchronous
async def test_a_reader_follows_the_catalog(cluster: LocalCluster, servers: LogServers) -> None:
    async with running(cluster, servers) as (ingest, client):
        put(servers, "events", WITHOUT_ID)
        await until(lambda: ingest.subscribed == {"events"})
        await client.publish("d:events", '{"n": 1}')
        await until(lambda: ingest.counts["stored"] == 1)
        put(servers, "events", None, version=2)
        await until(lambda: not ingest.subscribed)
        assert await client.publish("d:events", '{"n": 2}') == 0
        put(servers, "events", WITHOUT_ID, version=3)
        await until(lambda: ingest.subscribed == {"events"})
        await client.publish("d:events", '{"n": 3}')
        await until(lambda: ingest.counts["stored"] == 2)
        assert [each["n"] for each in stored(servers, "events", 3)] in ([1, 3], [3, 1])


@synchronous
async def test_messages_wait_while_a_log_server_is_down_and_another_dataset_is_full(
    cluster: LocalCluster, servers: LogServers, redis: list[EmbeddedRedis]
) -> None:
    """Also without an id none is stored twice: only what was certainly not stored is repeated."""
    put(servers, "events", WITHOUT_ID)
    put(servers, "full", {"kind": "append", "partitions": 1, "waiting_max": 1000, "fields": {"n": "int"}})
    assert len({servers.server_of(partition_name("events", number)) for number in range(3)}) == 2
    async with running(cluster, servers) as (ingest, client):
        await until(lambda: ingest.subscribed == {"events", "full"})
        for number in range(1300):
            await client.publish("d:full", json.dumps({"n": number}))
        await until(lambda: "full" in ingest.faults)
        for number in range(COUNT):
            await client.publish("d:events", json.dumps({"n": number}))
        await until(lambda: len(stored(servers, "events", 3)) == COUNT)
        down = redis[1 - servers.ids.index(servers.server_of("full/0"))]
        down.kill()
        for number in range(COUNT, 2 * COUNT):
            await client.publish("d:events", json.dumps({"n": number}))
        await until(lambda: "events" in ingest.faults)
        down.start()  # it has lost everything
        put(servers, "events", WITHOUT_ID, version=2)
        put(servers, "full", {**WITHOUT_ID, "partitions": 1}, version=2)
        await until(lambda: not ingest.faults)
        await until(lambda: ingest.counts["stored"] + ingest.counts["unknown"] == 2 * COUNT + 1300)
        counted = Counter(each["n"] for each in stored(servers, "events", 3) if each["n"] >= COUNT)
        assert set(counted.values()) == {1}, "none is stored twice"
        assert len(counted) >= COUNT - ingest.counts["unknown"], "and none is missing whose outcome is known"
        assert len(stored(servers, "full", 1)) == 1300


@synchronous
async def test_messages_wait_while_a_definition_cannot_be_read(cluster: LocalCluster, servers: LogServers) -> None:
    put(servers, "events", WITHOUT_ID)
    async with running(cluster, servers) as (ingest, client):
        await until(lambda: ingest.subscribed == {"events"})
        for id_ in servers.ids:
            servers.run(id_, (b"HSET", DATASETS_KEY, b"events", b"2 {", b"other", b"no entry"))
        numbers = count()
        async with asyncio.timeout(TIMEOUT_S):
            while "cannot be read" not in ingest.faults.get("events", ""):
                assert await client.publish("d:events", json.dumps({"n": next(numbers)})) == 1
                await asyncio.sleep(POLL_S)
        put(servers, "events", WITHOUT_ID, version=3)
        await until(lambda: not ingest.faults)
        total = next(numbers)
        await until(lambda: ingest.counts["stored"] == total)
        assert sorted(each["n"] for each in stored(servers, "events", 3)) == [*range(total)]


@synchronous
async def test_messages_of_a_reader_that_ends_are_counted_and_another_reader_takes_its_place(
    cluster: LocalCluster, servers: LogServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(servers, "events", WITHOUT_ID)
    store = DatasetWriter.append_each
    broken = [True]

    async def append(self: DatasetWriter, *arguments: Any, **named: Any) -> Any:
        if broken.pop():
            raise ZeroDivisionError
        broken.append(False)
        return await store(self, *arguments, **named)

    monkeypatch.setattr(DatasetWriter, "append_each", append)
    async with running(cluster, servers) as (ingest, client):
        await until(lambda: ingest.subscribed)
        await client.publish("d:events", '{"n": 1}')
        await until(lambda: ingest.counts["missing"] == 1)
        broken.append(False)
        await until(lambda: ingest.subscribed)
        await client.publish("d:events", '{"n": 2}')
        await until(lambda: ingest.counts["stored"] == 1)
        assert [each["n"] for each in stored(servers, "events", 3)] == [2]


@synchronous
async def test_what_waits_for_a_dataset_that_is_dropped_is_counted(cluster: LocalCluster, servers: LogServers) -> None:
    put(servers, "full", {"kind": "append", "partitions": 1, "waiting_max": 1000, "fields": {"n": "int"}})
    async with running(cluster, servers) as (ingest, client):
        await until(lambda: ingest.subscribed)
        for number in range(2000):
            await client.publish("d:full", json.dumps({"n": number}))
        await until(lambda: "full" in ingest.faults)
        put(servers, "full", None, version=2)
        await until(lambda: ingest.counts.total() == 2000)
        assert ingest.counts["missing"] == 2000 - len(stored(servers, "full", 1)) >= 1000


def test_metrics_have_every_count() -> None:
    samples = {
        sample.name: sample.value
        for family in collect_ingest(Counter(stored=3, gaps=2, missing=7), 1)
        for sample in family.samples
    }
    assert samples["dynamoth_data_cluster_ingest_stored_total"] == 3
    assert samples["dynamoth_data_cluster_ingest_missing_total"] == 7
    assert samples["dynamoth_data_cluster_ingest_refused_total"] == 0
    assert samples["dynamoth_data_cluster_ingest_waiting"] == 1
