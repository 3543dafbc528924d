"""Credentials that are asked for at each connection."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from dynamoth_cli.local.embedded import EmbeddedRedis
from dynamoth_link import credentials as module
from dynamoth_link.credentials import Credentials, parse_login
from dynamoth_link.errors import AuthenticationFailed, CredentialsUnavailable
from dynamoth_link.options import LinkOptions
from dynamoth_link.query import query
from dynamoth_link.urls import ServerAddress
from tests.link.harness import HASTY, Runner, fake_server, opened, polite, up

PLACE = ServerAddress("example", 1)


def giving(*answers: Any) -> Callable[[], Awaitable[object]]:
    """Give one answer after the other; the last one without end. An exception is raised."""
    left = list(answers)

    async def ask() -> object:
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, BaseException):
            raise answer
        return answer

    return ask


def hasty(credentials: Credentials, **options: Any) -> LinkOptions:
    return LinkOptions(credentials=credentials, backoff_s_min=0.01, backoff_s_max=0.05, **options)


@pytest.mark.parametrize(
    ("given", "login"),
    [
        (("user", "password"), ("user", "password")),
        (["user", b"token"], ("user", b"token")),
        (("password",), ("default", "password")),
        ((), None),
        (None, None),
    ],
)
def test_what_may_be_given(given: Any, login: Any) -> None:
    assert parse_login(PLACE, given) == login


@pytest.mark.parametrize("given", ["secret", ("a", "b", "secret"), ("secret", None), {"user": "secret"}, 7])
def test_what_is_given_wrongly_is_said_and_not_shown(given: Any) -> None:
    with pytest.raises(CredentialsUnavailable, match=r"redis://example:1: .*\(user, password\)") as error:
        parse_login(PLACE, given)
    assert "secret" not in str(error.value)


async def test_they_are_asked_for_at_each_connection(redis: EmbeddedRedis) -> None:
    await query(redis.url, ["ACL", "SETUSER", "u", "on", ">old", "~*", "&*", "+@all"])
    given = ["old"]

    async def ask() -> object:
        return "u", given[0]

    options = hasty(Credentials(ask))
    async with up(redis.url, options) as (link, calls):
        assert await query(redis.url, ["ACL", "WHOAMI"], options=options) == [b"u"]
        await query(redis.url, ["ACL", "SETUSER", "u", ">new", "<old"])
        link.cut()
        await calls.until(lambda: any("wrong password for user 'u'" in reason for reason in calls.of("down")))
        given[0] = "new"
        await calls.count("up", 2)
        link.send(["ACL", "WHOAMI"], calls.record("reply"))
        assert await calls.count("reply", 1) == [b"u"]


async def test_a_provider_that_fails_is_named_and_asked_again(redis: EmbeddedRedis) -> None:
    faults = [ValueError("no token today"), TimeoutError("too late"), asyncio.CancelledError(), RuntimeError(), "text"]
    async with up(redis.url, hasty(Credentials(giving(*faults, ())))) as (_, calls):
        says = ["raised ValueError: no token today", "raised TimeoutError: too late", "was cancelled"]
        says += ["raised RuntimeError: ", "gave something that is neither"]
        for reason, words in zip(calls.of("down"), says, strict=True):
            assert words in reason
            assert "it is asked again" in reason


async def test_one_that_hangs_is_given_up(redis: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ASK_S_MAX", 0.05)
    with pytest.raises(CredentialsUnavailable, match=r"gave nothing within 0\.05 s"):
        await query(redis.url, ["PING"], options=LinkOptions(credentials=Credentials(asyncio.Event().wait)))


async def test_the_time_it_takes_does_not_count_as_connecting(redis: EmbeddedRedis) -> None:
    async def ask() -> object:
        await asyncio.sleep(0.7)  # longer than the bounds below: that is what is tested
        return ()

    options = LinkOptions(credentials=Credentials(ask), connect_timeout_s=0.5)
    assert await query(redis.url, ["PING"], options=options, timeout_s=0.5) == [b"PONG"]


async def test_what_comes_behind_it_is_bounded_again() -> None:
    options = hasty(Credentials(giving(("u", "p"))), connect_timeout_s=0.05)
    async with fake_server(lambda _: b"") as url, opened(url, options) as (_, calls):
        assert "no answer within 0.05 s" in (await calls.count("down", 1))[0]


async def test_credentials_of_the_url_come_first(redis: EmbeddedRedis) -> None:
    await query(redis.url, ["ACL", "SETUSER", "u", "on", ">p", "~*", "&*", "+@all"])
    url = redis.url.replace("://", "://u:p@")
    options = LinkOptions(credentials=Credentials(giving(AssertionError("not to be asked"))))
    assert await query(url, ["ACL", "WHOAMI"], options=options) == [b"u"]
    with pytest.raises(AuthenticationFailed, match="wrong password for user 'nobody'"):
        await query(redis.url, ["PING"], options=LinkOptions(credentials=Credentials(giving(("nobody", "p")))))


async def test_open_connections_log_in_again(redis: EmbeddedRedis, caplog: pytest.LogCaptureFixture) -> None:
    for user in ("first", "second"):
        await query(redis.url, ["ACL", "SETUSER", user, "on", ">p", "~*", "&*", "+@all"])
    credentials = Credentials(giving(("first", "p")))
    async with up(redis.url, hasty(credentials)) as (one, calls), up(redis.url, hasty(credentials)) as (two, _):
        await asyncio.to_thread(credentials.renew, "second", b"p")  # a provider has threads of its own
        for link in (one, two):
            link.send(["ACL", "WHOAMI"], calls.record("reply"))
        assert await calls.count("reply", 2) == [b"second"] * 2
        with caplog.at_level(logging.WARNING, "dynamoth.link"):
            credentials.renew("second", "wrong")
            while not caplog.messages:  # noqa: ASYNC110  # nobody tells of a line in a log
                await asyncio.sleep(0.001)
        assert "refused renewed credentials" in caplog.messages[0]
        assert "wrong" not in caplog.messages[0].lower().replace("wrongpass", "")
        one.send(["ACL", "WHOAMI"], calls.record("reply"))
        assert await calls.count("reply", 3) == [b"second"] * 3
        assert not calls.of("down")
    credentials.renew("second", "p")  # nobody is there any more


def test_what_is_said_of_the_library(run_async: Runner) -> None:
    """By a fake, as only Redis 7.2 and later know it; others refuse it, which does not matter."""
    said: list[list[bytes]] = []

    def answer(command: list[bytes]) -> bytes:
        if command[0] == b"CLIENT":
            said.append(command[1:])
            return b"-ERR unknown subcommand\r\n"
        return polite(command)

    async def main() -> None:
        async with fake_server(answer) as url:
            async with up(url, LinkOptions(library_name="lib", library_version="1.2")) as (_, calls):
                assert calls.of("up") == ["abcdef"]
            async with up(url, HASTY):
                pass

    run_async(main)
    assert said == [[b"SETINFO", b"LIB-NAME", b"lib"], [b"SETINFO", b"LIB-VER", b"1.2"]]
