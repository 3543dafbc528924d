"""A link to real Redis servers: order, subscriptions, reconnection, credentials, TLS, leaks."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dynamoth_cli.local.embedded import EmbeddedRedis
from dynamoth_link.link import Link
from dynamoth_link.options import LinkOptions
from dynamoth_link.query import query
from dynamoth_link.tls import TlsOptions
from tests.link.harness import HASTY, PATIENCE_S, Recorder, Runner, opened, subscribed, up
from tests.redis_servers import RedisServerFactory
from tests.tls import Certificates, make_certificates, tls_in_front_of

QUICK_TO_LOSE = replace(HASTY, ping_timeout_s=0.5)


async def test_a_server_that_hides_its_run_id(redis: EmbeddedRedis) -> None:
    await query(redis.url, ["ACL", "SETUSER", "u", "on", ">p", "~*", "&*", "+@all", "-info", "-ping"])
    async with up(redis.url.replace("://", "://u:p@")) as (_, calls):
        assert calls.of("up") == [None]


async def test_a_pause_holds_the_pushes_back(redis: EmbeddedRedis) -> None:
    """And liveness keeps quiet: the pause is longer than interval and timeout together."""
    async with subscribed(redis.url, QUICK_TO_LOSE) as (link, calls):
        link.pause_reading()
        await query(redis.url, ["PUBLISH", "c", "1"])
        # That nothing happens in it.
        await asyncio.sleep(2 * (QUICK_TO_LOSE.ping_interval_s + QUICK_TO_LOSE.ping_timeout_s))
        assert len(calls.pushes) == 1
        link.resume_reading()
        await calls.until(lambda: len(calls.pushes) == 2)
        assert calls.of("down") == []


async def test_a_pause_outlives_the_connection(redis: EmbeddedRedis) -> None:
    async with opened(redis.url) as (link, calls):
        link.pause_reading()
        await calls.count("up", 1)
        assert link.send(["PING"], calls.record("reply"))
        await query(redis.url, ["PING"])
        assert calls.of("reply") == []
        link.resume_reading()
        await calls.count("reply", 1)


async def test_a_reply_that_was_lost_with_the_connection_never_comes(redis: EmbeddedRedis) -> None:
    async with up(redis.url, QUICK_TO_LOSE) as (link, calls):
        redis.pause()
        link.send(["ECHO", "lost"], calls.record("reply"))
        link.send(["SUBSCRIBE", "c"], calls.record("reply"))
        reason = (await calls.count("down", 1))[0]
        assert "not even the answer to a PING" in reason
        redis.resume()
        await calls.count("up", 2)
        link.send(["ECHO", "new"], calls.record("reply"))
        assert await calls.count("reply", 1) == [b"new"]
        assert calls.pushes == []


async def test_wrong_passwords_are_named(redis_server_factory: RedisServerFactory) -> None:
    server = redis_server_factory(password="right")
    place = f"127.0.0.1:{server.port}"
    for url, says in [
        (f"redis://{place}", "asks for a password and none was given"),
        (f"redis://{place}", "from DYNAMOTH_LINK_PASSWORD"),  # a URL with one is refused in their configuration
        (f"redis://:wrong@{place}", "wrong password for the default user"),
        (f"redis://nobody:wrong@{place}", "wrong password for user 'nobody'"),
    ]:
        async with opened(url) as (_, calls):
            first, second = (await calls.count("down", 2))[:2]
            assert says in first
            assert "wrong@" not in first
            assert first == second
            assert calls.of("up") == []
    async with up(server.url):
        pass
    async with up(f"redis://{place}", LinkOptions(password="right")):
        pass


async def test_name_and_database(redis: EmbeddedRedis) -> None:
    async with up(redis.url + "/3", LinkOptions(client_name="me")) as (link, calls):
        link.send(["CLIENT", "LIST"], calls.record("reply"))
        (clients,) = await calls.count("reply", 1)
        assert b" name=me " in clients
        assert b" db=3 " in clients
    async with opened(redis.url + "/999") as (_, calls):
        assert "no such database" in (await calls.count("down", 1))[0]


async def test_unix_socket(redis_server_factory: RedisServerFactory, tmp_path: Path) -> None:
    path = tmp_path / "redis.sock"
    redis_server_factory(options={"unixsocket": str(path)})
    async with up(f"unix://{path}") as (link, calls):
        link.send(["PING"], calls.record("reply"))
        assert await calls.count("reply", 1) == [b"PONG"]
    async with opened(f"unix://{path}x") as (_, calls):
        assert "there is no such socket" in (await calls.count("down", 1))[0]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("tls"))


def speaks_tls(binary: Path) -> bool:
    return b"tls-auth-clients" in binary.read_bytes() and b"SSL_CTX_new" in binary.read_bytes()


@contextmanager
def tls_port(factory: RedisServerFactory, certificates: Certificates) -> Generator[int]:
    """A server with TLS: Redis' own where it was built with that, else one in front of it."""
    plain = factory()
    if not speaks_tls(plain.binary):
        with tls_in_front_of(plain.port, certificates) as port:
            yield port
        return
    plain.stop()  # its port is free now
    options = {"tls-port": str(plain.port), "tls-auth-clients": "no"}
    options |= {"tls-cert-file": str(certificates.server), "tls-key-file": str(certificates.server_key)}
    factory(options=options)
    yield plain.port


def test_tls(redis_server_factory: RedisServerFactory, certificates: Certificates, run_async: Runner) -> None:
    trusting = LinkOptions(tls=TlsOptions(ca_file=str(certificates.authority)))

    async def main(port: int) -> None:
        url = f"rediss://localhost:{port}"
        async with up(url, trusting) as (link, calls):
            link.send(["ECHO", b"x" * 1_000_000], calls.record("reply"))
            assert await calls.count("reply", 1) == [b"x" * 1_000_000]
        async with up(url, LinkOptions(tls=TlsOptions(verify=False))):
            pass
        for bad_url, bad_options, says in [
            (url, LinkOptions(), "the certificate is not trusted"),
            (url, LinkOptions(tls=TlsOptions(ca_file="/nowhere")), "the TLS files cannot be loaded"),
            (url.replace("rediss", "redis"), LinkOptions(), "TLS port (rediss://)"),
        ]:
            async with opened(bad_url, bad_options) as (_, calls):
                assert says in (await calls.count("down", 1))[0]

    with tls_port(redis_server_factory, certificates) as port:
        run_async(lambda: main(port))


async def test_tls_to_a_port_without_it(redis: EmbeddedRedis) -> None:
    # Redis takes the greeting of TLS for the beginning of a command, and waits for the rest.
    options = LinkOptions(connect_timeout_s=0.1)
    async with opened(redis.url.replace("redis:", "rediss:"), options) as (_, calls):
        assert "rediss://" in (await calls.count("down", 1))[0]


def test_exceptions_in_callbacks_are_reported_and_survived(redis: EmbeddedRedis, run_async: Runner) -> None:
    async def main() -> None:
        calls = Recorder()

        def broken(name: str) -> Any:
            record = calls.record(name)

            def callback(value: Any) -> None:
                record(value)
                raise ValueError(f"bug in {name}")

            return callback

        link = Link(redis.url, options=HASTY, on_up=broken("up"), on_down=broken("down"), on_pushes=broken("pushes"))
        link.start()
        await calls.count("up", 1)
        link.send(["SUBSCRIBE", "c"])
        link.send(["ECHO", 1], broken("reply"))
        link.send(["ECHO", 2], calls.record("good"))
        await calls.count("good", 1)
        link.send(["CLIENT", "KILL", "TYPE", "pubsub", "SKIPME", "no"])
        await calls.count("down", 1)
        await calls.count("up", 2)
        await link.close()
        assert [name for name, _ in calls.calls] == ["up", "pushes", "reply", "good", "down", "up"]

    reported = run_async(main, bugs=5)
    assert all("bug in" in report for report in reported)


async def test_a_link_that_is_cut_says_so_at_once_and_comes_back_without_a_wait(redis: EmbeddedRedis) -> None:
    async with up(redis.url, LinkOptions(backoff_s_min=1000.0, backoff_s_max=1000.0)) as (link, calls):
        for number in (1, 2):
            link.send(["ECHO", number], calls.record("lost"))
            link.cut()
            assert not link.is_up
            assert calls.of("down")[number - 1 :] == [str(link.fault)]
            assert "cut by the application" in str(link.fault)
            link.cut()  # nothing to cut
            await calls.count("up", number + 1)
            assert link.fault is None
        link.send(["ECHO", 3], calls.record("reply"))
        assert await calls.count("reply", 1) == [b"3"]
        assert len(calls.of("down")) == 2
        link.cut()  # and it is closed while it is cut
    assert calls.of("lost") == []


async def test_what_was_sent_before_close_goes_out(redis: EmbeddedRedis) -> None:
    async with subscribed(redis.url) as (_, seen):
        async with up(redis.url, replace(HASTY, close_timeout_s=PATIENCE_S)) as (link, calls):
            link.send(["PUBLISH", "c", b"x" * 5_000_000], calls.record("reply"))
        assert calls.of("reply") == []
        await seen.until(lambda: len(seen.pushes) == 2)


async def test_close_at_any_moment_leaves_nothing_behind(redis: EmbeddedRedis) -> None:
    """The runner looks for tasks; the server's own count is what tells of sockets."""
    for turns in range(60):
        calls = Recorder()
        link = Link(redis.url, on_up=calls.record("up"), on_down=calls.record("down"), on_pushes=calls.record("pushes"))
        link.start()
        for _ in range(turns):
            await asyncio.sleep(0)
        if turns % 2:
            link.stop()
            count = len(calls.calls)
            await link.close()
            assert len(calls.calls) == count
        else:
            closing = asyncio.ensure_future(link.close())
            await asyncio.sleep(0)
            closing.cancel()
            await asyncio.wait({closing})
    async with asyncio.timeout(10):
        while b"connected_clients:1\r\n" not in (await query(redis.url, ["INFO", "clients"]))[0]:
            pass  # the server sees a moment later that a socket was closed


async def test_stop_from_a_callback_is_the_last_one(redis: EmbeddedRedis) -> None:
    calls = Recorder()

    def stop(value: Any) -> None:
        calls.record("stopped")(value)
        link.stop()

    link = Link(redis.url, on_up=stop, on_down=calls.record("down"), on_pushes=calls.record("pushes"))
    link.start()
    await calls.count("stopped", 1)
    assert not link.send(["PING"])
    await link.close()
    assert [name for name, _ in calls.calls] == ["stopped"]


@pytest.mark.parametrize("options", [{}, {socket.TCP_KEEPIDLE: 17, socket.TCP_KEEPINTVL: 3}, None])
async def test_sockets_are_kept_alive(redis: EmbeddedRedis, options: dict[int, int] | None) -> None:
    async with up(redis.url, LinkOptions(keepalive=options)) as (link, _):
        connection: Any = link._connection  # pyright: ignore[reportPrivateUsage]  # no other way to see it
        sock = connection._transport.get_extra_info("socket")
        assert bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)) == (options is not None)
        for option, value in (options or {}).items():
            assert sock.getsockopt(socket.IPPROTO_TCP, option) == value


@pytest.mark.parametrize("options", [{9999: 1}, {socket.TCP_KEEPIDLE: "soon"}, {"TCP_KEEPIDLE": 1}])
async def test_options_of_keepalive_that_cannot_be_set(redis: EmbeddedRedis, options: Any) -> None:
    async with opened(redis.url, LinkOptions(keepalive=options)) as (_, calls):
        assert "the keepalive options cannot be set" in (await calls.count("down", 1))[0]
