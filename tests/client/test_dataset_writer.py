"""Backends that store records: with real log servers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis

from dynamoth.data.catalog import DATASETS_KEY, Entry, entry_of, put_command
from dynamoth.data.datasets import dead_letters, read_dataset
from dynamoth.data.records import latest_command, parse_latest, partition_keys, partition_name, partition_server
from dynamoth.edge.log import SERVERS_KEY, servers_value
from dynamoth.errors import ConfigError
from dynamoth_cli.local.embedded import EmbeddedRedis
from dynamoth_client.datasets import (
    BadRecord,
    DatasetFull,
    DatasetWriter,
    LogUnavailable,
    Stored,
    SyncDatasetWriter,
    UnknownDataset,
    UnknownOutcome,
)
from tests.tcp_proxy import proxied

SHORT_S = 0.3
TIMEOUT_S = 20.0

IDS = ("l1", "l2")

DATASETS: dict[str, dict[str, Any]] = {
    "reports": {"kind": "append", "id": "id", "fields": {"id": "string", "n": "int?"}},
    "events": {"kind": "append", "partitions": 3, "fields": {"n": "int"}},
    "forgetful": {"kind": "append", "id": "id", "duplicate_s": 0, "fields": {"id": "string", "n": "int?"}},
    "places": {"kind": "keyed", "key": "user", "fields": {"user": "string", "n": "int"}},
    "shelters": {"kind": "static", "fields": {"id": "string"}},
    "small": {"kind": "append", "partitions": 1, "waiting_max": 1000, "fields": {"n": "int"}},
}


class Servers:
    """Two log servers, and what is stored there."""

    def __init__(self, servers: Mapping[str, EmbeddedRedis]) -> None:
        self.by_id = dict(servers)
        self.urls = {id_: each.url for id_, each in servers.items()}
        for name, definition in DATASETS.items():
            self.put(name, entry_of(read_dataset(name, definition)))

    def execute(self, id_: str, *command: Any) -> Any:
        client: Any = redis.Redis.from_url(self.by_id[id_].url)  # pyright: ignore[reportUnknownMemberType]
        with client:
            return client.execute_command(*command)

    def put(self, name: str, entry: Entry) -> None:
        for id_ in self.by_id:
            self.execute(id_, *put_command(DATASETS_KEY, name, entry))

    def server_of(self, name: str, partition: int = 0) -> str:
        return partition_server(partition_name(name, partition), tuple(self.by_id))

    def records(self, name: str) -> list[dict[str, Any]]:
        """Return what is stored: by partition, each in order."""
        dataset = dead_letters(name.removesuffix("_dead")) if name.endswith("_dead") else None
        dataset = dataset or read_dataset(name, DATASETS[name])
        found: list[dict[str, Any]] = []
        for number in range(dataset.partitions):
            command = latest_command(partition_name(name, number), 10_000)
            found += [
                json.loads(each.value) for each in parse_latest(self.execute(self.server_of(name, number), *command))
            ]
        return found


@pytest.fixture
def servers() -> Iterator[Servers]:
    with EmbeddedRedis() as first, EmbeddedRedis() as second:
        yield Servers(dict(zip(IDS, (first, second), strict=True)))


async def until(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            if holds():
                return
            await asyncio.sleep(0.01)


def test_records_are_stored_once_in_the_order_of_their_key(servers: Servers) -> None:
    async def main() -> None:
        async with DatasetWriter(servers.urls) as writer:
            assert await writer.append("reports", {"id": "r1", "n": 1}) == Stored("stored")
            assert await writer.append("reports", b'{"id": "r1", "n": 2}') == Stored("duplicate")
            many = [{"user": f"u{number % 5}", "n": number} for number in range(1200)]
            assert await writer.append_many("places", many) == [Stored("stored")] * 1200
            assert await writer.append_many("places", []) == []

    asyncio.run(main())
    assert servers.records("reports") == [{"id": "r1", "n": 1}]
    for user in range(5):
        numbers = [each["n"] for each in servers.records("places") if each["user"] == f"u{user}"]
        assert numbers == [*range(user, 1200, 5)]


def test_what_does_not_belong_to_the_dataset_is_refused_and_kept_aside(servers: Servers) -> None:
    async def main() -> None:
        async with DatasetWriter(servers.urls) as writer:
            records: list[Any] = [{"n": 1}, {"n": "2"}, '{"n": 3}', "no JSON", {"n": {1}}, {"n": 6, "m": 1}]
            results = await writer.append_many("events", records, source="a test")
            assert [each.outcome for each in results] == [
                *("stored", "refused", "stored", "refused", "refused", "refused"),
            ]
            assert "whole number" in results[1].reason
            assert "no field" in results[5].reason
            with pytest.raises(BadRecord, match="missing"):
                await writer.append("events", {})

    asyncio.run(main())
    assert sorted(each["n"] for each in servers.records("events")) == [1, 3]
    letters = servers.records("events_dead")
    assert [each["source"] for each in letters] == ["a test"] * 4 + ["a backend"]
    assert json.loads(letters[0]["record"]) == {"n": "2"}
    assert "whole number" in letters[0]["reason"]


def test_datasets_that_cannot_be_appended_to_are_named(servers: Servers) -> None:
    async def main() -> None:
        async with DatasetWriter(servers.urls) as writer:
            with pytest.raises(UnknownDataset, match=r"no dataset 'nothing'.*dataset list"):
                await writer.append("nothing", {})
            with pytest.raises(UnknownDataset, match=r"static.*dataset load"):
                await writer.append("shelters", {"id": "a"})
            for name in ("reports_dead", "reports_dead_dead"):
                with pytest.raises(UnknownDataset, match="refused records of another"):
                    await writer.append_many(name, [{"reason": "forged", "source": "user bob"}, b"malformed"])
                assert servers.records(name) == []
            servers.put("nothing", entry_of(read_dataset("nothing", DATASETS["events"])))
            assert (await writer.append("nothing", {"n": 1})).outcome == "stored"  # it reads the catalog again

    asyncio.run(main())


def test_a_log_server_without_memory_is_named_with_the_cure(servers: Servers) -> None:
    server = servers.server_of("small")

    async def main() -> None:
        async with DatasetWriter(servers.urls) as writer:
            await writer.append("small", {"n": 1})
            servers.execute(server, "CONFIG", "SET", "maxmemory", "1")
            with pytest.raises(LogUnavailable, match=rf"log server {server}: .*raise maxmemory.*nothing was stored"):
                await writer.append("small", {"n": 2})
            servers.execute(server, "CONFIG", "SET", "maxmemory", "0")
            await writer.append("small", {"n": 3})
        assert [each["n"] for each in servers.records("small")] == [1, 3]

    asyncio.run(main())


def test_a_full_dataset_takes_records_again_when_there_is_room(servers: Servers) -> None:
    server = servers.server_of("small")

    async def main() -> None:
        async with DatasetWriter(servers.urls) as writer:
            await writer.append_many("small", [{"n": number} for number in range(1000)])
            with pytest.raises(DatasetFull, match=r"1000 records wait.*try again"):
                await writer.append("small", {"n": 1000})
            assert (await writer.append("events", {"n": 1})).outcome == "stored"
            servers.execute(server, b"XTRIM", partition_keys("small/0")[1], b"MAXLEN", b"400")
            records = [{"n": number} for number in range(1000, 2200)]
            results = await writer.append_each("small", records)
            assert results[:500] == [Stored("stored")] * 500
            assert all(isinstance(each, DatasetFull) for each in results[500:]), "nothing behind an error is stored"

    asyncio.run(main())
    assert [each["n"] for each in servers.records("small")] == [*range(600, 1500)]


def test_a_server_that_is_down_is_named_and_what_others_have_is_stored(servers: Servers) -> None:
    down = servers.server_of("small")
    places = [number for number in range(3) if servers.server_of("events", number) == down]
    assert 0 < len(places) < 3, "both servers have partitions"

    async def main() -> None:
        async with DatasetWriter(servers.urls, timeout_s=SHORT_S) as writer:
            await writer.append("events", {"n": 0})
            servers.by_id[down].kill()
            await until(lambda: not servers.by_id[down].running)
            records = [{"n": number} for number in range(30)]
            await writer.append_each("events", records)  # this one may meet a connection that is not known to be lost
            results = await writer.append_each("events", records)
            failed = [each for each in results if not isinstance(each, Stored)]
            assert len(failed) == 10 * len(places)
            assert all(isinstance(each, LogUnavailable) and f"log server {down}" in str(each) for each in failed)
            with pytest.raises(LogUnavailable, match=f"log server {down}: .*nothing was stored"):
                await writer.append("small", {"n": 1})
        async with DatasetWriter(servers.urls, timeout_s=SHORT_S) as writer:
            with pytest.raises(LogUnavailable, match=f"log server {down}.*refused"):
                await writer.append("small", {"n": 1})  # nor can definitions be read

    asyncio.run(main())


@pytest.mark.parametrize("name", ["reports", "events", "forgetful"])
def test_a_connection_that_is_lost_before_the_answer(servers: Servers, name: str) -> None:
    """Where ids are remembered the writer repeats, and the record is stored once. Else it says that nobody knows."""

    async def main() -> None:
        async with proxied(servers.by_id["l1"].port) as one, proxied(servers.by_id["l2"].port) as two:
            urls = {"l1": f"redis://127.0.0.1:{one.port}", "l2": f"redis://127.0.0.1:{two.port}"}
            async with DatasetWriter(urls, timeout_s=TIMEOUT_S) as writer:
                await writer.append("places", {"user": "ann", "n": 0})  # it has read the definitions
                for proxy in (one, two):
                    proxy.hold_answers()
                record = {"n": 1} if name == "events" else {"id": "r1", "n": 1}
                append = asyncio.create_task(writer.append(name, record))
                await until(lambda: servers.records(name))
                assert not append.done()
                for proxy in (one, two):
                    await proxy.drop()
                if name == "reports":
                    assert (await append).outcome == "duplicate"
                else:
                    with pytest.raises(UnknownOutcome, match="stored or not"):
                        await append

    asyncio.run(main())
    assert len(servers.records(name)) == 1


def test_without_an_answer_in_time_nobody_knows(servers: Servers) -> None:
    server = servers.by_id[servers.server_of("small")]

    async def main() -> None:
        async with DatasetWriter(servers.urls, timeout_s=SHORT_S) as writer:
            await writer.append_many("small", [{"n": 0}])
            server.pause()
            try:
                results = await writer.append_each("small", [{"n": number} for number in range(1, 800)])
            finally:
                server.resume()
            assert all(isinstance(each, UnknownOutcome) for each in results[:500])
            assert all(isinstance(each, LogUnavailable) for each in results[500:]), "those were not sent"

    asyncio.run(main())
    assert len(servers.records("small")) in (1, 501)


def test_log_servers_other_than_those_of_the_brokers_are_refused(servers: Servers) -> None:
    for id_ in IDS:
        servers.execute(id_, b"SET", SERVERS_KEY, servers_value(["l2", "l3"]))

    async def main() -> None:
        async with DatasetWriter(servers.urls) as writer:
            with pytest.raises(ConfigError, match="the brokers have 'l2 l3'"):
                await writer.append("events", {"n": 1})

    asyncio.run(main())
    assert servers.records("events") == []
    with pytest.raises(ConfigError, match="log servers"):
        DatasetWriter({})
    with pytest.raises(ConfigError, match="timeout_s"):
        DatasetWriter(servers.urls, timeout_s=0)


def test_threads_store_alike(servers: Servers) -> None:
    with SyncDatasetWriter(servers.urls) as writer, ThreadPoolExecutor(4) as pool:

        def store(thread: int) -> Sequence[str]:
            records = [{"n": 100 * thread + number} for number in range(100)]
            return [writer.append("events", each).outcome for each in records[:50]] + [
                each.outcome for each in writer.append_many("events", records[50:])
            ]

        assert [outcome for each in pool.map(store, range(4)) for outcome in each] == ["stored"] * 400
        with pytest.raises(BadRecord):
            writer.append("events", {"n": "1"})
        with pytest.raises(RuntimeError, match="opened once"):
            writer.__enter__()
    assert sorted(each["n"] for each in servers.records("events")) == [*range(400)]
    writer.close()
    with pytest.raises(RuntimeError, match="not open"):
        writer.append("events", {"n": 1})


def test_closing_ends_what_waits(servers: Servers) -> None:
    server = servers.by_id[servers.server_of("small")]

    async def main() -> None:
        async with DatasetWriter(servers.urls) as writer:
            await writer.append("small", {"n": 0})
            server.pause()
            waiting = asyncio.create_task(writer.append("small", {"n": 1}))
            await asyncio.sleep(0)
            await writer.aclose()
            server.resume()
            with pytest.raises((UnknownOutcome, LogUnavailable)):
                await waiting
            with pytest.raises(LogUnavailable, match="closed"):
                await writer.append("small", {"n": 2})

    asyncio.run(main())
