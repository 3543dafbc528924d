"""Standing queries and datasets at real brokers, with a real cluster and real log servers."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec

import aiohttp
import pytest

from dynamoth.data.catalog import DATASETS_KEY, QUERIES_KEY, Entry, entry_of, put_command
from dynamoth.data.datasets import Dataset, Field
from dynamoth.data.queries import Parameter, StandingQuery
from dynamoth.data.records import parse_records, partition_name, partition_server, range_command
from dynamoth.data.registrations import parse_registration, registration_keys
from dynamoth.edge.interests import LOG_CHANNEL_PREFIX, Interest, query_interest
from dynamoth.edge.log import LogOptions, append_many_command, log_server, parse_appended_many
from dynamoth.edge.publications import LoggedPublication, pack_publication
from dynamoth_cli.local.cluster import LocalCluster
from dynamoth_cli.local.embedded import EmbeddedRedis
from dynamoth_client.asyncio import Redis
from dynamoth_link.query import query
from tests.broker.edge import PATIENCE_S, RawUser, RunningBroker, free_port, running_broker, token, write_keys

P = ParamSpec("P")

NEAR = StandingQuery(
    "near", "SELECT r.n FROM reports r WHERE r.user = :user AND r.n < :most", "reports", 10,
    (Parameter("user", "string"), Parameter("most", "int", 1, 100)), keep_s=60.0, bind=(("user", "$sub"),),
)  # fmt: skip
REPORTS = Dataset(
    "reports", "append", (Field("id", "string"), Field("user", "string"), Field("n", "int")), id="id",
    bind=(("user", "$sub"),),
)  # fmt: skip


@dataclass
class Place:
    """A cluster with two log servers, and a broker with a data cluster's catalog."""

    cluster_url: str
    logs: dict[str, str]
    broker: RunningBroker

    async def at(self, server: str, *commands: Any) -> list[Any]:
        return await query(self.logs[server], *commands)

    async def put(self, definition: Dataset | StandingQuery) -> None:
        key = DATASETS_KEY if isinstance(definition, Dataset) else QUERIES_KEY
        for server in self.logs:
            await self.at(server, put_command(key, definition.name, entry_of(definition)))

    async def drop(self, name: str, version: int) -> None:
        for server in self.logs:
            await self.at(server, put_command(QUERIES_KEY, name, Entry(version, None)))

    async def registered(self, interest: Interest) -> list[str | None]:
        (stored,) = await self.at(log_server(interest.id, [*self.logs]), (b"HGETALL", registration_keys("near")[0]))
        return [parse_registration(*pair).params for pair in stored.items()]

    async def expires_in_ms(self, interest: Interest) -> int:
        _, expiry, _ = registration_keys("near")
        server = log_server(interest.id, [*self.logs])
        score, (seconds, _) = await self.at(server, (b"ZSCORE", expiry, interest.id.encode()), (b"TIME",))
        return int(float(score)) - int(seconds) * 1000

    async def records(self, dataset: Dataset) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for number in range(dataset.partitions):
            name = partition_name(dataset.stream, number)
            (reply,) = await self.at(partition_server(name, [*self.logs]), range_command(name, 0, 2**53, 100))
            found += [json.loads(record.value) for record in parse_records(reply)]
        return found


def in_a_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run an asynchronous test in an event loop of its own."""

    @wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[str, dict[str, str]]]:
    with LocalCluster(1) as cluster, EmbeddedRedis() as first, EmbeddedRedis() as second:
        yield cluster.url, {"l1": f"redis://127.0.0.1:{first.port}", "l2": f"redis://127.0.0.1:{second.port}"}


@asynccontextmanager
async def place(servers: tuple[str, dict[str, str]], folder: Path, **settings: Any) -> AsyncGenerator[Place]:
    cluster_url, logs = servers
    for url in logs.values():
        await query(url, (b"FLUSHALL",))
    keys: dict[str, Any] = {"token_keys_file": str(write_keys(folder)), "anonymous": False}
    machine: dict[str, Any] = {"has_data_cluster": True, "data_cluster": True}
    async with running_broker(cluster_url, logs, sse_port=free_port(), **machine | keys | settings) as broker:
        where = Place(cluster_url, logs, broker)
        await where.put(NEAR)
        await where.put(REPORTS)
        yield where


async def until(found: Callable[[], Awaitable[bool]]) -> None:
    """Wait until something holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not await found():  # noqa: ASYNC110 what is waited for is in Redis
            await asyncio.sleep(0.02)


def near(user: str = "ada", most: Any = 5) -> dict[str, Any]:
    return {"query": "near", "params": {"user": user, "most": most}}


@in_a_loop
async def test_an_interest_is_registered_before_its_user_is_confirmed(
    servers: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    interest = query_interest("near", {"user": "ada", "most": 5})
    async with place(servers, tmp_path) as where:
        user = await RawUser.open(where.broker.url, near(), token=token())
        assert user.answers()[0]["type"] == "subscribed"
        assert await where.registered(interest) == [interest.params]
        assert 50_000 < await where.expires_in_ms(interest) <= 61_000


@pytest.mark.parametrize(
    ("sub", "code", "words"),
    [
        ({"query": "nowhere", "params": {}}, "unknown_query", "no such query"),
        ({"query": "near", "params": {"user": "ada"}}, "bad_params", "'most' is missing"),
        (near(most=101), "bad_params", "at most 100"),
        (near(most=1.5), "bad_params", "of type int"),
        (near() | {"params": {"user": "ada", "most": 5, "x": 1}}, "bad_params", "no parameter 'x'"),
        (near(user="bob"), "forbidden", "parameter 'user' has to be the subject"),
    ],
)
@in_a_loop
async def test_what_does_not_fit_the_definition_is_refused(
    servers: tuple[str, dict[str, str]], tmp_path: Path, sub: dict[str, Any], code: str, words: str
) -> None:
    async with place(servers, tmp_path) as where:
        user = await RawUser.open(where.broker.url, sub, near(), token=token())
        refusal = user.answers()[0]
        assert (refusal["type"], refusal["code"], refusal["retry"]) == ("error", code, "never")
        assert words in refusal["message"]
        assert user.answers()[1]["type"] == "subscribed", "others are not affected"


@in_a_loop
async def test_one_and_one_point_zero_are_one_interest(servers: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    async with place(servers, tmp_path) as where:
        user = await RawUser.open(where.broker.url, near(most=5), near(most=5.0), token=token())
        assert len({answer["s"] for answer in user.answers().values()}) == 1


@pytest.mark.parametrize("is_anonymous", [False, True])
@in_a_loop
async def test_a_user_has_a_bounded_number_of_new_interests_registered(
    servers: tuple[str, dict[str, str]], tmp_path: Path, is_anonymous: bool
) -> None:
    user_token = None if is_anonymous else token()
    async with place(servers, tmp_path, new_interests_per_hour_max=2, anonymous=is_anonymous) as where:
        await where.put(replace(NEAR, name="free", bind=()))
        free = [{"query": "free", "params": {"user": "ada", "most": most}} for most in range(1, 5)]
        first = await RawUser.open(where.broker.url, *free[:3], token=user_token)
        answers = [first.answers()[ref] for ref in range(3)]
        assert [each["type"] for each in answers] == ["subscribed", "subscribed", "error"]
        assert (answers[2]["code"], answers[2]["retry"]) == ("too_many_interests", "later")
        assert answers[2]["retry_after_ms"] > 1_700_000
        second = await RawUser.open(where.broker.url, free[1], free[3], token=user_token)
        assert [second.answers()[ref]["type"] for ref in range(2)] == ["subscribed", "error"]


@in_a_loop
async def test_interests_with_users_are_renewed_and_others_expire(
    servers: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    brief = replace(NEAR, keep_s=2.0, version=2)
    ada, bob = (query_interest("near", {"user": name, "most": 5}) for name in ("ada", "bob"))
    async with place(servers, tmp_path) as where:
        await where.put(brief)
        first = await RawUser.open(where.broker.url, near(), token=token())
        second = await RawUser.open(where.broker.url, near("bob"), token=token(sub="bob"))
        await second.close()
        await until(lambda: _is_over(where, bob))
        assert await where.expires_in_ms(ada) > 0
        await first.close()


async def _is_over(where: Place, interest: Interest) -> bool:
    return await where.expires_in_ms(interest) < -500


@in_a_loop
async def test_a_query_that_is_dropped_takes_no_new_users(servers: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    async with place(servers, tmp_path) as where:
        await where.drop("near", 2)
        user = await RawUser.open(where.broker.url, near(), token=token())
        assert user.answers()[0]["code"] == "unknown_query"


@in_a_loop
async def test_a_query_that_is_registered_later_is_found(servers: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    async with place(servers, tmp_path) as where:
        late = replace(NEAR, name="late", bind=())
        user = await RawUser.open(where.broker.url, near() | {"query": "late"}, token=token())
        assert user.answers()[0]["code"] == "unknown_query"
        await where.put(late)

        async def is_found() -> bool:
            again = await RawUser.open(where.broker.url, near() | {"query": "late"}, token=token(), session="other")
            return bool(again.answers()[0]["type"] == "subscribed")

        await until(is_found)


@in_a_loop
async def test_a_notice_is_read_once_for_all_users(servers: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    """Rows that do not come with the notification are fetched once, whatever the number of users."""
    interest = query_interest("near", {"user": "ada", "most": 5})
    async with place(servers, tmp_path) as where:
        users = [
            await RawUser.open(where.broker.url, near(), token=token(), session=f"s{number}") for number in range(5)
        ]
        server = log_server(interest.id, [*where.logs])
        await where.at(server, (b"CONFIG", b"RESETSTAT"))
        client: Redis = Redis.from_url(where.cluster_url)
        try:
            (run_id,) = [
                line.removeprefix("run_id:")
                for line in (await where.at(server, (b"INFO", b"server")))[0].decode().splitlines()
                if line.startswith("run_id:")
            ]
            for execution in (1, 2, 3):
                payload = b'{"rows":[%d]}' % execution
                command = append_many_command([(interest.id, payload, 7)], run_id, LogOptions(), 1, execution)
                (place_,) = parse_appended_many((await where.at(server, command))[0])
                notice = pack_publication(LoggedPublication(place_.epoch, place_.offset, None))
                await client.publish(LOG_CHANNEL_PREFIX + interest.id.encode(), notice)
                assert [await user.texts(1) for user in users] == [[payload.decode()]] * 5
        finally:
            await client.aclose()
        stats = (await where.at(server, (b"INFO", b"commandstats")))[0].decode()
        calls = next(line for line in stats.splitlines() if line.startswith("cmdstat_eval:"))
        # Three appends and three reads; tips are compared, too, every 5 s.
        assert int(calls.partition("calls=")[2].partition(",")[0]) <= 8


@in_a_loop
async def test_records_of_users_are_stored_before_they_are_acknowledged(
    servers: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    async with place(servers, tmp_path) as where:
        user = await RawUser.open(where.broker.url, token=token())
        for ref, record in enumerate(({"id": "a", "user": "ada", "n": 1}, {"id": "a", "user": "ada", "n": 1})):
            await user.send("publish", ref=ref, channel="d:reports", d=json.dumps(record))
            assert await user.until("published") == {"type": "published", "ref": ref}
            assert await where.records(REPORTS) == [{"id": "a", "user": "ada", "n": 1}]


@pytest.mark.parametrize(
    ("channel", "record", "code", "retry"),
    [
        ("d:reports", '{"id": "a", "user": "ada", "n": "x"}', "bad_record", "never"),
        ("d:reports", '{"id": "a", "user": "bob", "n": 1}', "bad_record", "never"),
        ("d:reports", "[1]", "bad_record", "never"),
        ("d:nowhere", "{}", "unknown_dataset", "never"),
    ],
)
@in_a_loop
async def test_a_record_that_does_not_belong_is_refused_and_kept_with_the_reason(
    servers: tuple[str, dict[str, str]], tmp_path: Path, channel: str, record: str, code: str, retry: str
) -> None:
    dead = Dataset("reports_dead", "append", (), partitions=1)
    async with place(servers, tmp_path) as where:
        user = await RawUser.open(where.broker.url, token=token())
        await user.send("publish", ref=1, channel=channel, d=record)
        refusal = await user.until("error")
        assert (refusal["code"], refusal["retry"]) == (code, retry)
        assert await where.records(REPORTS) == []
        letters = await where.records(dead)
        expected = [(record, "user ada")] if code == "bad_record" else []
        assert [(letter["record"], letter["source"]) for letter in letters] == expected
        assert all(letter["reason"] in refusal["message"] for letter in letters)


@in_a_loop
async def test_a_dataset_that_is_full_refuses_for_now(servers: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    async with place(servers, tmp_path) as where:
        small = replace(REPORTS, name="small", partitions=1, waiting_max=1000, id="", bind=())
        await where.put(small)
        user = await RawUser.open(where.broker.url, token=token())
        name = partition_name("small", 0)
        server = partition_server(name, [*where.logs])
        fill = (b"XADD", range_command(name, 0, 1, 1)[1], b"*", b"t", b"0", b"d", b"{}")
        await where.at(server, *[fill] * 1000)
        await user.send("publish", ref=1, channel="d:small", d='{"id": "a", "user": "ada", "n": 1}')
        refusal = await user.until("error")
        assert (refusal["code"], refusal["retry"]) == ("dataset_full", "later")


@in_a_loop
async def test_nobody_subscribes_to_the_records_of_others(servers: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    async with place(servers, tmp_path) as where:
        user = await RawUser.open(where.broker.url, {"channel": "d:reports"}, token=token())
        assert user.answers()[0]["code"] == "forbidden"


@in_a_loop
async def test_a_token_says_who_may_publish_records(servers: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    async with place(servers, tmp_path) as where:
        user = await RawUser.open(where.broker.url, token=token(publish=["d:other"]))
        await user.send("publish", ref=1, channel="d:reports", d='{"id": "a", "user": "ada", "n": 1}')
        assert (await user.until("error"))["code"] == "forbidden"
        assert await where.records(REPORTS) == []


async def post(
    where: Place, body: bytes, dataset: str = "reports", headers: dict[str, str] | None = None, **claims: Any
) -> tuple[int, dict[str, Any]]:
    url = f"http://127.0.0.1:{where.broker.sse_port}/datasets/{dataset}"
    headers = {"Authorization": f"Bearer {token(**claims)}"} | (headers or {})
    async with aiohttp.ClientSession() as http, http.post(url, data=body, headers=headers) as response:
        return response.status, await response.json()


RECORD = b'{"id": "%s", "user": "ada", "n": 1}'


@pytest.mark.parametrize(
    "body",
    [
        b"\n".join(RECORD % each for each in (b"a", b"b", b"a")),
        b"[" + b",".join(RECORD % each for each in (b"a", b"b", b"a")) + b"]",
    ],
    ids=["lines", "array"],
)
@in_a_loop
async def test_records_are_posted(servers: tuple[str, dict[str, str]], tmp_path: Path, body: bytes) -> None:
    async with place(servers, tmp_path) as where:
        assert await post(where, body) == (200, {"stored": 2, "duplicates": 1, "refused": []})
        assert sorted(record["id"] for record in await where.records(REPORTS)) == ["a", "b"]
        assert (await post(where, body))[1] == {"stored": 0, "duplicates": 3, "refused": []}


@in_a_loop
async def test_a_post_says_which_records_are_refused(servers: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    async with place(servers, tmp_path) as where:
        status, answer = await post(where, b'%b\n{"id": 1}\n' % (RECORD % b"a"))
        assert (status, answer["stored"]) == (200, 1)
        assert [(each["index"], each["code"]) for each in answer["refused"]] == [(1, "bad_record")]


@pytest.mark.parametrize(
    ("body", "dataset", "claims", "status"),
    [
        (b"", "reports", {}, 400),
        (b"[1", "reports", {}, 400),
        (b" [ ] ", "reports", {}, 400),
        (b"{}\n" * 1001, "reports", {}, 400),
        (b"{}", "reports", {}, 422),
        (RECORD % b"a", "nowhere", {}, 404),
        (RECORD % b"a", "reports", {"publish": []}, 403),
        (RECORD % b"a", "reports", {"exp": 1}, 401),
        (b"x" * 65_537, "reports", {}, 413),
        (b"x" * 65_537, "reports", {"exp": 1}, 401),
        (RECORD % b"a", "reports_dead", {"publish": ["*"]}, 404),
        (b'{"id": "a", "user": "ada", "n": 1, "n": 2}', "reports", {}, 422),
        (b'[{"id": "a", "user": "ada", "n": 1, "n": 2}]', "reports", {}, 422),
        ('{"id": "a", "user": "ada", "n": 1}'.encode("utf-16"), "reports", {}, 422),
    ],
)
@in_a_loop
async def test_a_post_that_is_refused_says_why(
    servers: tuple[str, dict[str, str]], tmp_path: Path, body: bytes, dataset: str, claims: dict[str, Any], status: int
) -> None:
    async with place(servers, tmp_path) as where:
        answered, answer = await post(where, body, dataset, **claims)
        assert answered == status
        assert answer["error"]
        assert answer["retry"] == "never"
        assert await where.records(REPORTS) == []


@pytest.mark.parametrize(
    ("headers", "body", "status", "words"),
    [
        ({"Content-Encoding": "gzip"}, b"no gzip", 400, "Content-Encoding"),
        ({"Content-Encoding": "gzip"}, gzip.compress(b"", mtime=0)[:10] + b"\xff" * 20, 400, "Content-Encoding"),
        ({"Content-Encoding": "gzip"}, gzip.compress(b" " * 1_000_000, mtime=0), 413, "65536 bytes"),
        ({"Content-Encoding": "gzip"}, gzip.compress(RECORD % b"a", mtime=0)[:-1], 400, "Content-Encoding"),
        ({"Content-Encoding": "gzip"}, gzip.compress(RECORD % b"a", mtime=0) + b"x", 400, "Content-Encoding"),
        ({"Content-Encoding": "br"}, b"x", 415, "gzip and deflate"),
        ({"Content-Encoding": "gzip, gzip"}, b"x", 415, "gzip and deflate"),
        ({"Content-Encoding": "gzip", "Authorization": "Bearer x"}, b"no gzip", 401, "token"),
        ({"Content-Encoding": "gzip", "Authorization": "Basic x"}, b"no gzip", 400, "`Bearer`"),
    ],
)
@in_a_loop
async def test_a_body_that_cannot_be_read_is_refused_without_a_traceback(
    servers: tuple[str, dict[str, str]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    headers: dict[str, str],
    body: bytes,
    status: int,
    words: str,
) -> None:
    async with place(servers, tmp_path) as where:
        answered, answer = await post(where, body, headers=headers)
        assert (answered, answer["retry"]) == (status, "never")
        assert words in answer["error"]
        assert await where.records(REPORTS) == []
        assert await post(where, RECORD % b"a") == (200, {"stored": 1, "duplicates": 0, "refused": []})
    assert [record for record in caplog.records if record.exc_info or record.levelname == "ERROR"] == []


@pytest.mark.parametrize(
    ("coding", "body"),
    [
        ("gzip", gzip.compress(RECORD % b"a", mtime=0)),
        ("deflate", zlib.compress(RECORD % b"a")),
        ("deflate", zlib.compress(RECORD % b"a")[2:-4]),
        ("identity", RECORD % b"a"),
    ],
    ids=["gzip", "deflate", "deflate without its header", "identity"],
)
@in_a_loop
async def test_a_body_may_come_compressed(
    servers: tuple[str, dict[str, str]], tmp_path: Path, coding: str, body: bytes
) -> None:
    async with place(servers, tmp_path) as where:
        answer = await post(where, body, headers={"Content-Encoding": coding})
        assert answer == (200, {"stored": 1, "duplicates": 0, "refused": []})


@in_a_loop
async def test_a_broker_without_a_data_cluster_refuses_records_and_asks_for_no_registration(
    servers: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    async with place(servers, tmp_path, has_data_cluster=False, data_cluster=False) as where:
        user = await RawUser.open(where.broker.url, near("bob"), token=token())
        assert user.answers()[0]["type"] == "subscribed"
        await user.send("publish", ref=1, channel="d:reports", d='{"id": "a", "user": "ada", "n": 1}')
        refusal = await user.until("error")
        assert (refusal["code"], "broker.data_cluster" in refusal["message"]) == ("unknown_dataset", True)
