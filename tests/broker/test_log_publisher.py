"""Backends that publish on logged channels: with a real cluster, real log servers and real brokers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis.exceptions

from dynamoth.edge.interests import channel_interest
from dynamoth.edge.log import SERVERS_KEY, log_keys, log_server, servers_value
from dynamoth.errors import ConfigError, MalformedMessage
from dynamoth_cli.local.cluster import LocalCluster
from dynamoth_cli.local.embedded import EmbeddedRedis
from dynamoth_client.asyncio import Redis
from dynamoth_client.logs import Fenced, LogPublisher, LogUnavailable, SyncLogPublisher, UnknownOutcome
from dynamoth_client.sync import Redis as SyncRedis
from dynamoth_link.options import LinkOptions
from dynamoth_link.query import query
from tests.broker.edge import RawUser, RunningBroker, running_broker, token, write_keys
from tests.docs.pages import ROOT

SHORT_S = 0.3
NEVER_S = 1000.0

DOCUMENTED = "+eval +get +hmget +hset +hdel +del +pexpire +xadd ~__dynamoth__:log:*"
assert DOCUMENTED in (ROOT / "docs" / "brokers.md").read_text()


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(1) as running:
        yield running


@pytest.fixture
def log() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as running:
        yield running


@pytest.fixture
def keys(tmp_path: Path) -> str:
    return str(write_keys(tmp_path))


@dataclass
class Backend:
    """A publisher, and the client of the cluster that it uses."""

    client: Redis
    publisher: LogPublisher


@asynccontextmanager
async def backend(cluster: LocalCluster, *logs: EmbeddedRedis, **options: Any) -> AsyncGenerator[Backend]:
    client = Redis.from_url(cluster.url)
    urls = {f"l{number}": log.url for number, log in enumerate(logs, 1)}
    async with LogPublisher(client, urls, **options) as publisher:
        yield Backend(client, publisher)
    await client.aclose()


@asynccontextmanager
async def both(
    cluster: LocalCluster, log: EmbeddedRedis, **settings: Any
) -> AsyncGenerator[tuple[RunningBroker, Backend]]:
    """Run a broker that does not compare tips, and a backend."""
    settings = {"tip_check_s": NEVER_S, **settings}
    async with running_broker(cluster.url, {"l1": log.url}, **settings) as broker, backend(cluster, log) as b:
        yield broker, b


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(main)


def test_users_get_everything_in_order_whoever_publishes(cluster: LocalCluster, log: EmbeddedRedis, keys: str) -> None:
    async def main() -> None:
        logs = {"l1": log.url}
        async with (
            running_broker(cluster.url, logs, token_keys_file=keys, tip_check_s=NEVER_S) as broker,
            backend(cluster, log) as b,
        ):
            user = await RawUser.open(broker.url, {"channel": "log1"}, token=token())
            positions = [await b.publisher.publish("log1", f"m{number}") for number in range(50)]
            assert [position.offset for position in positions] == list(range(1, 51))
            assert await user.texts(50) == [f"m{number}" for number in range(50)]
            await user.send("publish", ref=9, channel="log1", d="from a user")
            assert await user.texts(1) == ["from a user"]
            many = await asyncio.gather(*(b.publisher.publish("log1", f"c{number}") for number in range(50)))
            assert sorted(position.offset for position in many) == list(range(52, 102))
            in_order = [f"c{number}" for _, number in sorted((each.offset, number) for number, each in enumerate(many))]
            assert await user.texts(50) == in_order
            await user.close()

    run(main())


def test_what_is_appended_and_not_published_comes_with_the_next_comparison(
    cluster: LocalCluster, log: EmbeddedRedis, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(channel: bytes, payload: bytes) -> int:
        raise redis.exceptions.ConnectionError("the process has died here")

    async def main() -> None:
        async with both(cluster, log, tip_check_s=0.2) as (broker, b):
            user = await RawUser.open(broker.url, {"channel": "log1"})
            monkeypatch.setattr(b.client, "publish", fail)
            assert (await b.publisher.publish("log1", "lost?")).offset == 1
            assert await user.texts(1) == ["lost?"]
            await user.close()

    with caplog.at_level(logging.WARNING, "dynamoth_client"):
        run(main())
    assert "log1 is stored, and was not published" in caplog.text


def test_a_numbered_publication_is_stored_once(cluster: LocalCluster, log: EmbeddedRedis) -> None:
    async def main() -> None:
        async with (
            running_broker(cluster.url, {"l1": log.url}, tip_check_s=NEVER_S) as broker,
            backend(cluster, log) as b,
        ):
            user = await RawUser.open(broker.url, {"channel": "log1"})
            first = await b.publisher.publish("log1", "one", execution=1)
            await b.publisher.publish("log1", "in between")
            assert await b.publisher.publish("log1", "one", execution=1) == first
            await b.publisher.publish("log1", "two", execution=2)
            assert (await b.publisher.publish("log1", "one", execution=1)).offset == 3  # the end of the log
            assert await user.texts(3) == ["one", "in between", "two"]
            await b.publisher.publish("log1", "last")
            assert await user.texts(1) == ["last"]
            await user.close()

    run(main())


def test_a_writer_that_was_replaced_is_refused(cluster: LocalCluster, log: EmbeddedRedis) -> None:
    async def main() -> None:
        async with backend(cluster, log) as b:
            await b.publisher.publish("log1", "new", term=2, execution=1)
            with pytest.raises(Fenced, match="newer writer"):
                await b.publisher.publish("log1", "old", term=1, execution=2)
            assert (await b.publisher.publish("log1", "new", term=2, execution=2)).offset == 2

    run(main())


def test_results_of_queries_are_published_alike(cluster: LocalCluster, log: EmbeddedRedis, keys: str) -> None:
    async def main() -> None:
        logs = {"l1": log.url}
        async with (
            running_broker(cluster.url, logs, token_keys_file=keys, tip_check_s=NEVER_S) as broker,
            backend(cluster, log) as b,
        ):
            user = await RawUser.open(broker.url, {"query": "near", "params": {"km": 1.0}}, token=token())
            await b.publisher.publish_result("near", {"km": 1}, '[["ada", 3]]')
            assert await user.texts(1) == ['[["ada", 3]]']
            await user.close()

    run(main())


def test_threads_publish_alike(cluster: LocalCluster, log: EmbeddedRedis) -> None:
    async def main() -> None:
        async with running_broker(cluster.url, {"l1": log.url}, tip_check_s=NEVER_S) as broker:
            user = await RawUser.open(broker.url, {"channel": "log1"})
            await asyncio.to_thread(publish, 5)
            assert await user.texts(5) == [f"m{number}" for number in range(5)]
            await user.close()

    def publish(count: int) -> None:
        client = SyncRedis.from_url(cluster.url)
        with SyncLogPublisher(client, {"l1": log.url}, timeout_s=10.0) as publisher:
            offsets = [publisher.publish("log1", f"m{number}").offset for number in range(count)]
            assert offsets == list(range(1, count + 1))
            assert publisher.publish_result("near", {"km": 1}, b"[]").offset == 1
            with pytest.raises(ValueError, match="numbered 1, 2, 3"):
                publisher.publish("log1", "m", execution=0)
        publisher.close()
        with pytest.raises(RuntimeError, match="not open"):
            publisher.publish("log1", "late")
        client.close()

    run(main())


def test_what_the_client_of_the_cluster_publishes_on_a_logged_channel_is_noticed(
    cluster: LocalCluster, log: EmbeddedRedis, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with both(cluster, log) as (broker, b):
            user = await RawUser.open(broker.url, {"channel": "log1"})
            while "reaches no user" not in caplog.text:  # first, the broker may not listen to this name yet
                await b.client.publish("log1", "lost")
            await b.publisher.publish("log1", "stored")
            assert await user.texts(1) == ["stored"]
            await user.close()

    with caplog.at_level(logging.WARNING, "dynamoth.broker"):
        run(asyncio.wait_for(main(), 20))


# Troubles.


def test_a_server_that_does_not_answer_leaves_the_outcome_unknown(cluster: LocalCluster, log: EmbeddedRedis) -> None:
    async def main() -> None:
        async with backend(cluster, log, timeout_s=SHORT_S) as b:
            await b.publisher.publish("log1", "first")
            log.pause()
            with pytest.raises(UnknownOutcome, match="stored or not"):
                await b.publisher.publish("log1", "second")
            log.resume()
            assert (await b.publisher.publish("log1", "third")).offset == 3  # the second one was stored

    run(main())


def test_without_a_connection_nothing_is_stored(cluster: LocalCluster, log: EmbeddedRedis) -> None:
    async def main() -> None:
        log.stop()
        async with backend(cluster, log, timeout_s=SHORT_S) as b:
            with pytest.raises(LogUnavailable, match="nothing was stored there"):
                await b.publisher.publish("log1", "first", execution=1)

    run(main())


def test_a_lost_connection_is_the_end_of_a_publication_but_not_of_a_numbered_one(
    cluster: LocalCluster, log: EmbeddedRedis
) -> None:
    async def main() -> None:
        async with backend(cluster, log, timeout_s=20.0) as b:
            first = await b.publisher.publish("log1", "first")
            log.pause()
            plain = asyncio.create_task(b.publisher.publish("log1", "plain"))
            numbered = asyncio.create_task(b.publisher.publish("log2", "numbered", execution=1))
            await asyncio.sleep(0)  # both are sent
            log.kill()
            with pytest.raises(UnknownOutcome):
                await plain
            await asyncio.to_thread(log.restart)
            again = await numbered
            assert (again.offset, again.epoch == first.epoch) == (1, False)

    run(main())


def test_it_needs_the_rights_of_the_page_and_what_is_refused_is_not_stored(
    cluster: LocalCluster, log: EmbeddedRedis
) -> None:
    async def main() -> None:
        # The rights that docs/brokers.md names, with those that every connection needs.
        for_all = (b"+hello", b"+auth", b"+ping", b"+info", b"+client|setname", b"+client|id")
        documented = (*DOCUMENTED.encode().split(), *for_all)
        await query(log.url, (b"ACL", b"SETUSER", b"backend", b"on", b">pw", b"-@all", *documented))
        async with backend(cluster, log, options=LinkOptions(username="backend", password="pw")) as b:
            assert (await b.publisher.publish("log1", "first", term=1, execution=1)).offset == 1
        rights = (b"ACL", b"SETUSER", b"reader", b"on", b">pw", b"+@all", b"-eval", b"~*")
        await query(log.url, rights)
        options = LinkOptions(username="reader", password="pw")
        async with backend(cluster, log, options=options) as b:
            with pytest.raises(LogUnavailable, match="NOPERM"):
                await b.publisher.publish("log1", "first")
        await query(log.url, (*rights[:4], b"+eval", b"-info"))
        async with backend(cluster, log, options=options, timeout_s=SHORT_S) as b:
            with pytest.raises(LogUnavailable, match="right to INFO"):
                await b.publisher.publish("log1", "first")

    run(main())


def test_closing_ends_what_waits(cluster: LocalCluster, log: EmbeddedRedis) -> None:
    async def main() -> None:
        async with backend(cluster, log) as b:
            await b.publisher.publish("log1", "first")
            log.pause()
            sent = asyncio.create_task(b.publisher.publish("log1", "second"))
            await asyncio.sleep(0)
            await b.publisher.aclose()
            with pytest.raises(UnknownOutcome):
                await sent
            with pytest.raises(LogUnavailable, match="closed"):
                await b.publisher.publish("log1", "third")
            log.resume()

    run(main())


def test_logs_are_where_brokers_look_for_them(cluster: LocalCluster, log: EmbeddedRedis) -> None:
    async def main() -> None:
        with EmbeddedRedis() as other:
            async with backend(cluster, log, other) as b:
                for number in range(10):
                    await b.publisher.publish(f"log{number}", "m")
            for number in range(10):
                interest_id = channel_interest(f"log{number}").id
                url = {"l1": log.url, "l2": other.url}[log_server(interest_id, ("l1", "l2"))]
                assert await query(url, (b"EXISTS", *log_keys(interest_id))) == [2]

    run(main())


def test_log_servers_other_than_those_of_the_brokers_are_refused(cluster: LocalCluster, log: EmbeddedRedis) -> None:
    async def main() -> None:
        await query(log.url, (b"SET", SERVERS_KEY, servers_value(["l2", "l1"])))
        async with backend(cluster, log) as b:
            for _ in range(2):
                with pytest.raises(ConfigError, match=r"servers 'l1', and the brokers have 'l1 l2'.*same ids and URLs"):
                    await b.publisher.publish("log1", "lost", execution=1)
            await asyncio.to_thread(publish)
            assert await query(log.url, (b"EXISTS", *log_keys(channel_interest("log1").id))) == [0]
            await query(log.url, (b"SET", SERVERS_KEY, servers_value(["l1"])))
            many = await asyncio.gather(*(b.publisher.publish("log1", f"{number}") for number in range(3)))
            assert sorted(position.offset for position in many) == [1, 2, 3]  # the brokers were corrected

    def publish() -> None:
        client = SyncRedis.from_url(cluster.url)
        with SyncLogPublisher(client, {"l1": log.url}) as publisher, pytest.raises(ConfigError, match="l1 l2"):
            publisher.publish("log1", "lost")
        client.close()

    run(main())


def test_a_server_that_does_not_say_which_log_servers_there_are_is_named_once(
    cluster: LocalCluster, log: EmbeddedRedis, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        user = (b"ACL", b"SETUSER", b"backend", b"on", b">pw", b"+@all", b"-get", b"~*")
        with EmbeddedRedis() as other:
            for each in (log, other):
                await query(each.url, user)
            options = LinkOptions(username="backend", password="pw")
            async with backend(cluster, log, other, options=options) as b:
                for number in range(10):
                    assert (await b.publisher.publish(f"log{number}", "m")).offset == 1

    with caplog.at_level(logging.WARNING, "dynamoth_client"):
        run(main())
    warnings = [each.getMessage() for each in caplog.records if each.name == "dynamoth_client"]
    assert len(warnings) == 1 and "NOPERM" in warnings[0] and "+get" in warnings[0]


def test_what_cannot_be_used_is_refused() -> None:
    async def main() -> None:
        client = Redis.from_url("redis://127.0.0.1:1")
        with pytest.raises(ConfigError, match="log servers"):
            LogPublisher(client, {})
        with pytest.raises(ConfigError, match="more than 0"):
            LogPublisher(client, {"l1": "redis://127.0.0.1:1"}, timeout_s=0)
        publisher = LogPublisher(client, {"l1": "redis://127.0.0.1:1"})
        with pytest.raises(RuntimeError, match="not open"):
            await publisher.publish("log1", "m")
        async with publisher:
            with pytest.raises(MalformedMessage):
                await publisher.publish("", "m")
            for execution in (0, True, 1.5, 2**53):
                with pytest.raises(ValueError, match="numbered 1, 2, 3"):
                    await publisher.publish("log1", "m", execution=execution)  # type: ignore[arg-type]
            for term in (-1, 1.5, 2**53):
                with pytest.raises(ValueError, match="a term is a number"):
                    await publisher.publish("log1", "m", term=term)  # type: ignore[arg-type]
            for name in ("q:x", "__dynamoth__:x", "__keyspace@0__:x"):
                with pytest.raises(ValueError, match="reserved"):
                    await publisher.publish(name, "m")
        with pytest.raises(RuntimeError, match="opened once"):
            await publisher.__aenter__()
        await client.aclose()

    run(main())
