"""Log servers that answer and refuse commands: the broker says so, tries them, and loses nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from dynamoth.edge.frames import PublishRequest
from dynamoth.edge.log import SERVERS_KEY, log_keys
from dynamoth.machine.events import ErrorReply, Replied, Send
from dynamoth_broker.events import Noted
from dynamoth_broker.logs import CALM_S, TRIED_ID, TRY_S
from dynamoth_cli.local.cluster import LocalCluster
from dynamoth_link.query import query
from tests.broker.edge import PATIENCE_S, RawUser, free_port, running_broker, token, write_keys
from tests.broker.test_machine import EPOCH, LOG, LOGGED, Broker, frames
from tests.machines.helpers import only
from tests.redis_servers import RedisServerFactory

OOM = ErrorReply("OOM command not allowed when used memory > 'maxmemory'.")
READONLY = ErrorReply("READONLY You can't write against a read only replica.")
STORED = [b"%016x" % EPOCH, 1, 1]

BEGINS, ENDS = "a log server refuses commands; trying again", "a log server accepts commands again"


def refused(broker: Broker, reply: ErrorReply = OOM) -> list[Any]:
    """Let the log server refuse what a user publishes."""
    [append] = only(Send, broker.frame(1, PublishRequest(3, LOGGED, b"x")))
    return broker.tell(Replied(LOG, append.tag, reply))


def tries(broker: Broker, after_s: float = TRY_S) -> tuple[Send, Send]:
    """Let time pass; return the two commands by which the broker tries the server."""
    names, append = only(Send, broker.pass_time(after_s))
    assert names.args[1] == SERVERS_KEY and append.args[3:5] == log_keys(TRIED_ID)
    return names, append


def answer(broker: Broker, tried: tuple[Send, Send], *replies: Any) -> list[Noted]:
    return only(
        Noted, [each for send, reply in zip(tried, replies, strict=True) for each in reply_to(broker, send, reply)]
    )


def reply_to(broker: Broker, send: Send, reply: Any) -> list[Any]:
    return broker.tell(Replied(LOG, send.tag, reply))


def opened() -> Broker:
    broker = Broker()
    broker.open(1)
    return broker


def test_a_refusal_is_noted_once_with_its_cure_and_its_user_is_to_try_again() -> None:
    broker = opened()
    actions = refused(broker)
    [noted] = only(Noted, actions)
    cause = f"{OOM} (raise maxmemory, or make room there)"
    assert noted == Noted(BEGINS, cause, {"server": "l1"}, is_warning=True)
    [error] = frames(actions, 1)
    assert (error.code, error.retry) == ("log_unavailable", "later")
    assert broker.broker.logs.refusals == {"l1": cause} and broker.broker.logs.faults == {}
    assert only(Noted, refused(broker)) == []
    [other] = only(Noted, refused(broker, READONLY))
    assert "primary" in other.cause


def test_a_server_that_refuses_is_tried_until_it_has_refused_nothing_for_a_while() -> None:
    broker = opened()
    refused(broker)
    assert answer(broker, tries(broker), "OK", STORED) == [], "one without memory takes some commands"
    assert answer(broker, tries(broker), "OK", OOM) == []
    assert answer(broker, tries(broker), OOM, STORED) == [], "not even which log servers there are"
    for _ in range(round(CALM_S / TRY_S) - 1):
        assert answer(broker, tries(broker), "OK", STORED) == []
    assert answer(broker, tries(broker), "OK", STORED) == [Noted(ENDS, fields={"server": "l1"})]
    assert broker.broker.logs.refusals == {}
    assert only(Send, broker.pass_time(10 * TRY_S)) == []
    assert [each.message for each in only(Noted, refused(broker))] == [BEGINS]


def test_a_lost_connection_ends_a_refusal_and_one_server_is_tried_once_at_a_time() -> None:
    broker = opened()
    refused(broker)
    broker.down(LOG)
    assert broker.broker.logs.refusals == {} and list(broker.broker.logs.faults) == ["l1"]
    broker.up(LOG)
    refused(broker)
    tries(broker)
    broker.down(LOG)
    assert only(Send, broker.pass_time(10 * TRY_S)) == []
    [names] = only(Send, broker.up(LOG))
    assert [each.message for each in only(Noted, reply_to(broker, names, READONLY))] == [BEGINS], "when it connects"
    tries(broker)


@pytest.mark.parametrize("reply", ["FENCED by a newer writer, term 3", "ERR wrong number of arguments"])
def test_an_error_of_one_command_says_nothing_about_the_server(reply: str) -> None:
    broker = opened()
    assert only(Noted, refused(broker, ErrorReply(reply))) == []
    assert broker.broker.logs.refusals == {}


# Real servers.


async def ask(port: int, path: str) -> tuple[int, str]:
    """Return status and text of what a broker serves; 0 while it does not listen."""
    with suppress(aiohttp.ClientConnectorError):
        async with aiohttp.ClientSession() as http, http.get(f"http://127.0.0.1:{port}{path}") as response:
            return response.status, await response.text()
    return 0, ""


async def readiness(port: int, expected: int) -> str:
    """Ask until the status is the expected one; return the text."""
    async with asyncio.timeout(CALM_S + PATIENCE_S):
        while True:
            status, text = await ask(port, "/readyz")
            if status == expected:
                return text
            await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(1) as running:
        yield running


TROUBLES = {
    "rights": (("ACL", "SETUSER", "default", "-xadd"), ("ACL", "SETUSER", "default", "+@all"), "'dynamoth acl'"),
    "replica": (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE"), "REPLICAOF NO ONE"),
    "memory": (("CONFIG", "SET", "maxmemory", "1"), ("CONFIG", "SET", "maxmemory", "0"), "raise maxmemory"),
    "replicas": (
        ("CONFIG", "SET", "min-replicas-to-write", "1"),
        ("CONFIG", "SET", "min-replicas-to-write", "0"),
        "min-replicas-to-write asks for",
    ),
}
"""What makes a server refuse, what ends that, and the cure."""


@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_broker_is_not_ready_while_its_log_server_refuses_and_goes_on_when_it_accepts(
    cluster: LocalCluster,
    redis_server_factory: RedisServerFactory,
    tmp_path: Path,
    trouble: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    log, port = redis_server_factory(), free_port()
    begin, end, cure = TROUBLES[trouble]
    settings: dict[str, Any] = {"http_port": port, "anonymous": False, "token_keys_file": str(write_keys(tmp_path))}

    async def publish(user: RawUser, ref: int) -> dict[str, Any]:
        await user.send("publish", ref=ref, channel="log.news", d=f"m{ref}")
        while (frame := await user.receive())["type"] not in ("published", "error"):
            user.skipped.append(frame)
        return frame

    async def main() -> None:
        async with running_broker(cluster.url, {"l1": log.url}, **settings) as broker:
            user = await RawUser.open(broker.url, {"channel": "log.news"}, token=token())
            assert (await publish(user, 1))["type"] == "published"
            await readiness(port, 200)
            await query(log.url, begin)
            error = await publish(user, 2)
            assert (error["code"], error["retry"]) == ("log_unavailable", "later") and cure in error["message"]
            text = await readiness(port, 503)
            assert "log server l1: " in text and cure in text
            assert "dynamoth_broker_logs_refusing 1.0" in (await ask(port, "/metrics"))[1]
            assert "dynamoth_broker_logs_down 0.0" in (await ask(port, "/metrics"))[1]
            await query(log.url, end)
            await readiness(port, 200)
            assert (await publish(user, 2))["offset"] == 2, "what was refused is not in the log twice"
            assert "dynamoth_broker_logs_refusing 0.0" in (await ask(port, "/metrics"))[1]
            received = [each["d"] for each in user.skipped if each["type"] == "data"]
            assert [*received, *await user.texts(2 - len(received))] == ["m1", "m2"]
            await user.socket.close()

    with caplog.at_level(logging.INFO, "dynamoth.broker"):
        asyncio.run(main())
    messages = [each.getMessage() for each in caplog.records if each.getMessage() in (BEGINS, ENDS)]
    assert messages == [BEGINS, ENDS]
    [record] = [each for each in caplog.records if each.getMessage() == BEGINS]
    assert cure in record.__dict__["cause"] and record.__dict__["server"] == "l1"


def test_a_password_is_changed_without_an_interruption_by_way_of_two(
    cluster: LocalCluster, redis_server_factory: RedisServerFactory
) -> None:
    log, port = redis_server_factory(), free_port()

    def settings(password: str) -> dict[str, str]:
        return {"l1": f"redis://broker:{password}@127.0.0.1:{log.port}"}

    async def acl(*rules: str) -> None:
        replies = await query(log.url, ("ACL", "SETUSER", "broker", *rules))
        assert not any(isinstance(each, ErrorReply) for each in replies)

    async def logged_in() -> None:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                [clients] = await query(log.url, ("CLIENT", "LIST"))
                if b"user=broker" in clients:
                    return
                await asyncio.sleep(0.05)

    async def main() -> None:
        await acl("on", ">old", "~*", "&*", "+@all")
        async with running_broker(cluster.url, settings("old"), http_port=port):
            await readiness(port, 200)
            await acl(">new")
            await query(log.url, ("CLIENT", "KILL", "USER", "broker"))
            await logged_in()  # again, with the old one
            await readiness(port, 200)
        async with running_broker(cluster.url, settings("new"), http_port=port):
            await readiness(port, 200)
            await acl("<old")
        async with running_broker(cluster.url, settings("old"), http_port=port):
            text = await readiness(port, 503)
            while "wrong password" not in text:
                text = await readiness(port, 503)
            assert "wrong password for user 'broker'" in text and "old" not in text
            await acl(">old")
            await readiness(port, 200)

    asyncio.run(main())
