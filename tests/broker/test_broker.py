"""A broker on a real cluster and a real log server, with users over WebSocket and server-sent events."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import socket
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import aiohttp
import jwt
import pytest
from websockets.asyncio.client import connect
from websockets.typing import Subprotocol

from dynamoth.edge.frames import Subscribed
from dynamoth.edge.interests import channel_interest
from dynamoth.edge.log import LogOptions, append_command
from dynamoth.edge.publications import Position
from dynamoth.errors import ConfigError
from dynamoth_broker.events import BrokerOptions
from dynamoth_broker.process.event_ids import LOGGED_MAX, StreamPositions
from dynamoth_broker.process.runtime import BrokerConfig
from dynamoth_cli.local.cluster import LocalCluster
from dynamoth_cli.local.embedded import EmbeddedRedis
from dynamoth_client.asyncio import Redis
from dynamoth_link.query import query
from tests.broker.edge import (
    SECRET,
    RawUser,
    encoded_connect,
    events_until,
    free_port,
    running_broker,
    token,
    write_keys,
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(2) as running:
        yield running


@pytest.fixture(scope="module")
def log() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as running:
        yield running


@pytest.fixture
def logs(log: EmbeddedRedis) -> dict[str, str]:
    return {"l1": f"redis://127.0.0.1:{log.port}"}


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return write_keys(tmp_path)


def run(main: Any) -> None:
    asyncio.run(main)


def test_redis_sees_one_subscriber_however_many_users_there_are(cluster: LocalCluster, logs: dict[str, str]) -> None:
    async def main() -> None:
        client = Redis.from_url(cluster.url)
        async with running_broker(cluster.url, logs) as broker:
            users = [await RawUser.open(broker.url, {"channel": "shared"}, session=f"u{n}") for n in range(30)]
            assert await client.pubsub_numsub("shared") == [(b"shared", 1)]
            assert await client.publish("shared", "hello") == 1
            assert [await user.texts(1) for user in users] == [["hello"]] * 30
            for user in users:
                await user.close()
        await client.aclose()

    run(main())


def test_a_logged_channel_goes_on_at_another_broker(cluster: LocalCluster, logs: dict[str, str], keys: Path) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            options: dict[str, Any] = {"token_keys_file": str(keys), "anonymous": False}
            one = await stack.enter_async_context(running_broker(cluster.url, logs, "b1", **options))
            two = await stack.enter_async_context(running_broker(cluster.url, logs, "b2", **options))
            user = await RawUser.open(one.url, {"channel": "log1"}, token=token())
            confirmed = user.answers()[0]
            assert confirmed["recovered"]
            writer = await RawUser.open(two.url, session="writer", token=token())
            for number in range(3):
                await writer.send("publish", ref=number, channel="log1", d=f"m{number}")
                published = await writer.until("published")
                assert published["offset"] == confirmed["offset"] + number + 1
            assert await user.texts(3) == ["m0", "m1", "m2"]
            await user.close()
            since = {"epoch": confirmed["epoch"], "offset": confirmed["offset"] + 1}
            again = await RawUser.open(two.url, {"channel": "log1", "since": since}, token=token())
            assert again.answers()[0] == {**confirmed, "offset": confirmed["offset"] + 1}
            missed = [frame["d"] for frame in again.skipped if frame["type"] == "data"]
            assert missed + await again.texts(2 - len(missed)) == ["m1", "m2"]
            lost = await RawUser.open(
                two.url, {"channel": "log1", "since": {"epoch": "0" * 16, "offset": 7}}, token=token()
            )
            assert not lost.answers()[0]["recovered"]
            gap = next((frame for frame in lost.skipped if frame["type"] == "gap"), None) or await lost.until("gap")
            assert (gap["reason"], gap["from"], gap["epoch"]) == ("log_lost", 8, confirmed["epoch"])
            for each in (writer, again, lost):
                await each.close()

    run(main())


def test_a_user_moves_and_gets_everything_from_before(cluster: LocalCluster, logs: dict[str, str]) -> None:
    async def main() -> None:
        client = Redis.from_url(cluster.url)
        async with AsyncExitStack() as stack:
            two = await stack.enter_async_context(running_broker(cluster.url, logs, "b2"))
            one = await stack.enter_async_context(
                running_broker(cluster.url, logs, "b1", alternates=(two.url,), drain_s=5.0)
            )
            old = await RawUser.open(one.url, {"channel": "live"}, session="ada", generation=1)
            ending = asyncio.create_task(one.stop())
            move = await old.until("move")
            assert move["to"] == [two.url]
            new = await RawUser.open(two.url, {"channel": "live"}, session="ada", generation=2)
            await client.publish("live", "both")
            await old.send("leave")
            bye = await old.until("bye")
            assert bye["p"] == {}
            assert [frame["d"] for frame in old.skipped if frame["type"] == "data"] == ["both"]
            assert await new.texts(1) == ["both"]
            await old.close()
            assert await ending == 0
            await new.close()
        await client.aclose()

    run(main())


def test_a_broker_that_is_drained_or_full_sends_users_elsewhere(cluster: LocalCluster, logs: dict[str, str]) -> None:
    async def main() -> None:
        async with running_broker(cluster.url, logs, sessions_max=1) as broker:
            first = await RawUser.open(broker.url, session="first")
            second = await RawUser.dial(broker.url)
            await second.send("connect", v=1, session="second", subs=[])
            error = await second.until("error")
            assert (error["code"], error["retry"]) == ("full", "elsewhere")
            assert await second.close_code() == 1013
            await first.close()

    run(main())


def test_of_two_connections_of_a_session_the_newer_one_stays(cluster: LocalCluster, logs: dict[str, str]) -> None:
    async def main() -> None:
        async with running_broker(cluster.url, logs) as broker:
            old = await RawUser.open(broker.url, session="ada", generation=1)
            new = await RawUser.open(broker.url, session="ada", generation=2)
            assert await old.close_code() == 4004
            late = await RawUser.dial(broker.url)
            await late.send("connect", v=1, session="ada", generation=1, subs=[])
            assert await late.close_code() == 4004
            await new.close()

    run(main())


@pytest.mark.parametrize(
    ("made", "code"),
    [
        (lambda: None, 4001),
        (lambda: "no token", 4001),
        (lambda: token(key=b"another" * 8), 4001),
        (lambda: token(kid="k2"), 4001),
        (lambda: token(SECRET * 2, "HS512"), 4001),
        (lambda: jwt.encode({"sub": "ada", "exp": time.time() + 60}, "", "none", headers={"kid": "k1"}), 4001),
        (lambda: token(exp=time.time() - 60), 4002),
        (lambda: token(sub=None), 4001),
        (lambda: token(channels="*"), 4001),
        (lambda: token(channels=["\ud800"]), 4001),
        (lambda: token(sub="\ud800"), 4001),
        (lambda: token(sub="a" * 257), 4001),
        (lambda: token(exp=10**400), 4001),
    ],
    ids=[
        "none",
        "garbage",
        "other key",
        "other kid",
        "other algorithm",
        "alg none",
        "expired",
        "no subject",
        "no list",
        "half a character in a pattern",
        "half a character in the subject",
        "a long subject",
        "the end of time",
    ],
)
def test_tokens_that_are_not_valid(
    made: Any, code: int, cluster: LocalCluster, logs: dict[str, str], keys: Path
) -> None:
    async def main() -> None:
        async with running_broker(cluster.url, logs, token_keys_file=str(keys), anonymous=False) as broker:
            user = await RawUser.dial(broker.url)
            await user.send("connect", v=1, session="ada", subs=[], token=made())
            assert (await user.until("error"))["code"] == {4001: "token_refused", 4002: "token_expired"}[code]
            assert await user.close_code() == code

    run(main())


def test_a_refused_token_is_logged_with_its_cause_and_counted(
    cluster: LocalCluster, logs: dict[str, str], keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    refused = token(kid="k2")

    async def main() -> None:
        settings: dict[str, Any] = {"token_keys_file": str(keys), "anonymous": False, "http_port": free_port()}
        async with running_broker(cluster.url, logs, **settings) as broker, aiohttp.ClientSession() as http:
            user = await RawUser.dial(broker.url)
            await user.send("connect", v=1, session="ada", subs=[], token=refused)
            assert (await user.until("error"))["message"] == "the token names an unknown key"
            assert await user.close_code() == 4001
            async with http.get(f"http://127.0.0.1:{settings['http_port']}/metrics") as metrics:
                assert "dynamoth_broker_token_refusals_unknown_key_total 1.0" in await metrics.text()

    with caplog.at_level(logging.WARNING, "dynamoth.broker"):
        run(main())
    [record] = [each for each in caplog.records if each.getMessage() == "a user's token is refused"]
    assert "'k2'" in record.__dict__["cause"]
    assert refused not in str(record.__dict__)


def test_what_a_token_allows(cluster: LocalCluster, logs: dict[str, str], keys: Path) -> None:
    async def main() -> None:
        async with running_broker(cluster.url, logs, token_keys_file=str(keys), anonymous=False) as broker:
            rights = token(channels=["news.*"], publish=[], params={"near": {"user": "$sub"}}, queries=["near"])
            user = await RawUser.open(
                broker.url,
                {"channel": "news.sport"},
                {"channel": "secret"},
                {"query": "near", "params": {"user": "ada", "km": 5}},
                {"query": "near", "params": {"user": "bob", "km": 5}},
                {"channel": "__dynamoth__:balancer:to-agent"},
                token=rights,
            )
            answers = user.answers()
            assert [answers[ref].get("code") for ref in range(5)] == [None, "forbidden", None, "forbidden", "forbidden"]
            await user.send("publish", ref=9, channel="news.sport", d="x")
            assert (await user.until("error"))["code"] == "forbidden"
            await user.send("refresh", token=token(exp=time.time() - 60))
            assert (await user.until("error"))["code"] == "token_expired"
            await user.close()

    run(main())


@pytest.mark.parametrize(
    "frame",
    [
        {"type": "nonsense"},
        {"type": "connect", "v": 2, "session": "x"},
        {"type": "connect", "v": 1, "session": "bad name!"},
        {"type": "connect", "v": 1, "session": "x", "subs": [{"ref": 1}]},
        {"type": "connect", "v": 1, "session": "x", "subs": [{"ref": 1, "channel": "a", "query": "b"}]},
        {
            "type": "connect",
            "v": 1,
            "session": "x",
            "subs": [{"ref": 1, "channel": "a", "since": {"epoch": "zz", "offset": 1}}],
        },
        {
            "type": "connect",
            "v": 1,
            "session": "x",
            "subs": [{"ref": 1, "channel": "a", "since": {"epoch": "0" * 16, "offset": -1}}],
        },
        {"type": "connect", "v": 1, "session": "x", "subs": [{"ref": n, "channel": "a"} for n in range(1001)]},
        {"type": "leave"},
        {"type": "ack", "p": {"x": 1}},
    ],
    ids=lambda frame: json.dumps(frame)[:60],
)
def test_bad_frames_close_the_connection_and_nobody_elses(
    frame: dict[str, Any], cluster: LocalCluster, logs: dict[str, str]
) -> None:
    async def main() -> None:
        async with running_broker(cluster.url, logs) as broker:
            other = await RawUser.open(broker.url, session="other")
            user = await RawUser.dial(broker.url)
            await user.socket.send(json.dumps(frame))
            error = await user.until("error")
            assert (error["code"], error["retry"]) == ("bad_frame", "never")
            assert await user.close_code() == 4005
            await other.send("subscribe", ref=1, channel="live")
            assert (await other.until("subscribed"))["live"]
            await other.close()

    run(main())


def test_server_sent_events_go_on_from_the_last_event(cluster: LocalCluster, logs: dict[str, str], keys: Path) -> None:
    async def main() -> None:
        settings: dict[str, Any] = {"token_keys_file": str(keys), "anonymous": False, "sse_port": free_port()}
        async with running_broker(cluster.url, logs, **settings) as broker, aiohttp.ClientSession() as http:
            connect = {"type": "connect", "v": 1, "session": "ada", "subs": [{"ref": 1, "channel": "log-sse"}]}
            encoded = base64.urlsafe_b64encode(json.dumps(connect).encode()).decode()
            url = f"http://127.0.0.1:{broker.sse_port}/sse"
            headers = {"Authorization": f"Bearer {token()}"}
            writer = await RawUser.open(broker.url, session="writer", token=token())
            async with http.get(url, params={"connect": encoded}, headers=headers) as stream:
                await events_until(stream, "moved_in")
                last = ""
                for text in ("m1", "m2"):
                    await writer.send("publish", ref=1, channel="log-sse", d=text)
                    last, _ = await events_until(stream, "data")
                async with http.post(
                    f"{url}/ada", json={"type": "subscribe", "ref": 2, "channel": "live"}, headers=headers
                ) as answer:
                    assert answer.status == 204
                await events_until(stream, "subscribed")
            await writer.send("publish", ref=1, channel="log-sse", d="m3")
            await writer.until("published")
            async with http.get(url, params={"connect": encoded}, headers={**headers, "Last-Event-ID": last}) as stream:
                _, frame = await events_until(stream, "data")
                assert frame["d"] == "m3"
            await writer.close()

    run(main())


MISSED = 10_000


async def fill_log(logs: dict[str, str], channel: str) -> dict[str, Any]:
    """Append what a user misses in an hour; return the position before it, as frames have it."""
    interest = channel_interest(channel)
    commands = [
        append_command(interest.id, b"result %d" % number, "", 0xE, LogOptions(durable=True))
        for number in range(1, MISSED + 1)
    ]
    for first in range(0, MISSED, 1000):
        await query(logs["l1"], *commands[first : first + 1000], timeout_s=30.0)
    return {"epoch": f"{0xE:016x}", "offset": 0}


def test_who_was_away_gets_everything_at_another_broker(
    cluster: LocalCluster, logs: dict[str, str], keys: Path
) -> None:
    async def main() -> None:
        since = await fill_log(logs, "log-away")
        expected = [f"result {number}" for number in range(1, MISSED + 1)]
        settings: dict[str, Any] = {"log": LogOptions(durable=True), "sse_port": free_port()}
        async with running_broker(cluster.url, logs, **settings) as broker, aiohttp.ClientSession() as http:
            user = await RawUser.open(broker.url, {"channel": "log-away", "since": since})
            assert user.answers()[0]["recovered"]
            early = [frame["d"] for frame in user.skipped if frame["type"] == "data"]
            assert early + await user.texts(MISSED - len(early)) == expected
            await user.close()
            sub = {"ref": 1, "channel": "log-away"}
            connect = {"type": "connect", "v": 1, "session": "ada", "subs": [sub]}
            encoded = base64.urlsafe_b64encode(json.dumps(connect).encode()).decode()
            positions = StreamPositions()
            positions.note(Subscribed(1, channel_interest("log-away").id, Position(0xE, 0)))
            last = positions.event_id() or ""
            url = f"http://127.0.0.1:{broker.sse_port}/sse"
            async with http.get(url, params={"connect": encoded}, headers={"Last-Event-ID": last}) as stream:
                assert [(await events_until(stream, "data"))[1]["d"] for _ in expected] == expected
            for forged in (last[:-2], f"{last}A", last[::-1], "A" * 5000, "{}"):
                last = forged
                async with http.get(url, params={"connect": encoded}, headers={"Last-Event-ID": last}) as stream:
                    assert (await events_until(stream, "subscribed"))[1]["offset"] == MISSED

    run(main())


def test_a_stream_that_subscribes_to_too_much_hears_it_at_once_and_resumes_all_the_rest(
    cluster: LocalCluster, logs: dict[str, str]
) -> None:
    async def main() -> None:
        settings: dict[str, Any] = {"sse_port": free_port(), "subscriptions_per_session_max": 1000}
        async with running_broker(cluster.url, logs, **settings) as broker, aiohttp.ClientSession() as http:
            url = f"http://127.0.0.1:{broker.sse_port}/sse"
            connect = encoded_connect({"ref": 0, "channel": "log-many-0"})
            async with http.get(url, params={"connect": connect}) as stream:
                await events_until(stream, "moved_in")
                last = ""
                for ref in range(1, LOGGED_MAX + 1):
                    frame = {"type": "subscribe", "ref": ref, "channel": f"log-many-{ref}"}
                    async with http.post(f"{url}/ada", json=frame) as answer:
                        assert answer.status == 204
                    if ref < LOGGED_MAX:
                        last, _ = await events_until(stream, "subscribed")
                _, error = await events_until(stream, "error")
                assert (error["code"], error["ref"], error["retry"]) == ("too_many", LOGGED_MAX, "never")
                assert "use WebSocket" in error["message"]
                assert len(last) > 4000
            async with http.get(url, params={"connect": connect}, headers={"Last-Event-ID": last}) as stream:
                assert stream.status == 200
                await events_until(stream, "moved_in")

    run(main())


def test_posts_of_others_with_the_same_session_and_refused_tokens_change_nothing(
    cluster: LocalCluster, logs: dict[str, str], keys: Path
) -> None:
    async def main() -> None:
        settings: dict[str, Any] = {"token_keys_file": str(keys), "anonymous": False, "sse_port": free_port()}
        async with running_broker(cluster.url, logs, **settings) as broker, aiohttp.ClientSession() as http:
            url = f"http://127.0.0.1:{broker.sse_port}/sse"
            ada, bob = ({"Authorization": f"Bearer {token(sub=sub)}"} for sub in ("ada", "bob"))
            params = {"connect": encoded_connect()}

            async def post(headers: dict[str, str], **frame: Any) -> int:
                async with http.post(f"{url}/ada", json=frame, headers=headers) as answer:
                    return answer.status

            async with http.get(url, params=params, headers=ada) as hers:
                await events_until(hers, "moved_in")
                async with http.get(url, params=params, headers=bob) as his:
                    await events_until(his, "moved_in")
                    assert [await post(each, type="pong") for each in (ada, bob)] == [204, 204]
                    assert await post({"Authorization": f"Bearer {token(sub='eve')}"}, type="pong") == 403
                assert await post(ada, type="refresh", token=token(key=b"another" * 8)) == 204
                assert (await events_until(hers, "error"))[1]["code"] == "token_refused"
                assert await post(ada, type="pong") == 204
                newer = token(exp=time.time() + 120)
                assert await post(ada, type="refresh", token=newer) == 204
                assert await post(ada, type="pong") == 403
                assert await post({"Authorization": f"Bearer {newer}"}, type="pong") == 204

    run(main())


def test_without_keys_nobody_could_log_in() -> None:
    options = BrokerOptions(id="b1")
    with pytest.raises(ConfigError, match="nobody could log in"):
        BrokerConfig(id="b1", options=options, make_client=lambda: Redis())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        '{"keys": [{}]}',
        '{"keys": [{"kid": "a", "kty": "oct", "k": "c2hvcnQ", "alg": "HS256"}]}',
        '{"keys": [{"kid": "a", "kty": "oct", "k": "", "alg": "none"}]}',
    ],
    ids=["empty", "no keys", "an empty key", "a short secret", "alg none"],
)
def test_key_sets_that_cannot_be_used(text: str, tmp_path: Path, cluster: LocalCluster) -> None:
    file = tmp_path / "keys.json"
    file.write_text(text)

    async def main() -> None:
        async with running_broker(cluster.url, {}, history=(), token_keys_file=str(file), anonymous=False):
            pass

    with pytest.raises(ConfigError, match="JSON Web Key Set"):
        run(main())


def test_interest_ids_are_the_protocols() -> None:
    assert channel_interest("news").id == "JxRG8SHA_johIc5ws2hG2g"


def test_who_reads_slowly_catches_up_with_large_publications_over_one_connection(
    cluster: LocalCluster, logs: dict[str, str]
) -> None:
    async def main() -> None:
        channel, epoch, count = "log.large", 0xE, 200
        interest = channel_interest(channel)
        durable = LogOptions(durable=True)
        appends = [append_command(interest.id, b"x" * 32_000, "", epoch, durable) for _ in range(count)]
        await query(logs["l1"], *appends)
        async with running_broker(cluster.url, logs, log=durable) as broker:
            with socket.socket() as plain:
                plain.setblocking(False)
                plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)  # little fits in between
                await asyncio.get_running_loop().sock_connect(plain, ("127.0.0.1", broker.port))
                user = RawUser(
                    await connect(
                        broker.url,
                        sock=plain,
                        subprotocols=[Subprotocol("dynamoth.v1.json")],
                        compression=None,
                        max_queue=1,
                    )
                )
                since = {"epoch": f"{epoch:016x}", "offset": 0}
                await user.send("connect", v=1, session="slow", subs=[{"ref": 1, "channel": channel, "since": since}])
                for offset in range(1, count + 1):
                    assert (await user.until("data"))["o"] == offset
                    await asyncio.sleep(0.001)  # it takes its time for each
                await user.close()

    run(main())


def test_a_broker_that_reaches_no_server_of_the_cluster_is_not_ready(
    cluster: LocalCluster, logs: dict[str, str], free_port: int
) -> None:
    async def readiness(expected: int) -> str:
        """Ask until the status is the expected one; return the text."""
        url = f"http://127.0.0.1:{free_port}/readyz"
        async with aiohttp.ClientSession() as http, asyncio.timeout(10):
            while True:
                with suppress(aiohttp.ClientConnectorError):  # it does not listen yet
                    async with http.get(url) as response:
                        if response.status == expected:
                            return await response.text()
                await asyncio.sleep(0.05)

    async def main() -> None:
        nobody = "redis://127.0.0.1:1"
        async with running_broker(cluster.url, logs, control={"s1": nobody}, http_port=free_port):
            assert "no server of the cluster can be reached" in await readiness(503)
        servers = {"s1": nobody, "s2": f"redis://127.0.0.1:{next(iter(cluster.redis.values())).port}"}
        async with running_broker(cluster.url, logs, control=servers, http_port=free_port):
            assert await readiness(200) == "ready\n"

    run(main())
