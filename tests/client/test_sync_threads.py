"""The synchronous client among threads, processes and signals."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, cast

import pytest

import dynamoth_client as redis
from dynamoth_cli.local.cluster import HOST
from dynamoth_client import PubSub
from dynamoth_client.threads import turns
from dynamoth_client.threads.cluster import SyncCluster
from dynamoth_client.threads.loop import Loop
from dynamoth_client.threads.turns import SharedLoop
from tests.client.forked import a_child_that_lives, in_child
from tests.client.interrupted import ROUNDS
from tests.client.stored_cluster import StoredCluster
from tests.client.sync_helpers import PATIENCE_S, Running, confirmed, keepers, next_of, until, waiting

THREADS = 8
EACH = 250


def _publish(client: redis.Redis, channels: list[str], name: int) -> list[int]:
    return [client.publish(channels[number % len(channels)], f"{name} {number}") for number in range(EACH)]


def test_threads_publish_while_others_read(cluster: StoredCluster) -> None:
    """With the same client, and with another one."""
    channels = [cluster.channel_at("s1"), cluster.channel_at("s2")]

    def read(pubsub: PubSub) -> dict[tuple[bytes, int], list[int]]:
        seen: dict[tuple[bytes, int], list[int]] = {}
        for _ in range(THREADS * EACH):
            message = next_of(pubsub)
            name, number = map(int, message["data"].split())
            seen.setdefault((message["channel"], name), []).append(number)
        assert pubsub.get_message(timeout=0.05) is None
        return seen

    with redis.from_url(cluster.url) as client, redis.from_url(cluster.url) as other:
        pubsubs = [client.pubsub(), client.pubsub(), other.pubsub()]
        for pubsub in pubsubs:
            confirmed(pubsub, *channels)
        reading = [Running(read, pubsub) for pubsub in pubsubs]
        publishing = [Running(_publish, client, channels, name) for name in range(THREADS)]
        assert [one.result() for one in publishing] == [[3] * EACH] * THREADS
        numbers = {channel.encode(): list(range(first, EACH, 2)) for first, channel in enumerate(channels)}
        expected = {(channel, name): numbers[channel] for channel in numbers for name in range(THREADS)}
        assert [one.result() for one in reading] == [expected] * 3


def test_threads_begin_at_once(cluster: StoredCluster) -> None:
    """One loop, one thread, one reading of the plan; and none before that."""
    until(lambda: keepers() == 0, "those of other tests have ended")
    for _ in range(5):
        with redis.from_url(cluster.url) as client:
            client.set("key", "value")
            assert keepers() == 0
            barrier = threading.Barrier(THREADS)

            def publish(client: redis.Redis = client, barrier: threading.Barrier = barrier) -> int:
                barrier.wait()
                return client.publish("c", "x")

            assert [one.result() for one in [Running(publish) for _ in range(THREADS)]] == [0] * THREADS
            assert keepers() == 1


def test_closing_while_threads_publish(cluster: StoredCluster) -> None:
    """Each call succeeds or says that the client was closed; a later one starts again; nothing hangs."""

    def publish(number: int) -> None:
        while not stop.is_set():
            try:
                client.publish("c", "x")
                succeeded[number] = True
            except redis.ConnectionError as error:
                assert "closed" in str(error), error

    client, stop, succeeded = redis.from_url(cluster.url), threading.Event(), [False] * THREADS
    publishing = [Running(publish, number) for number in range(THREADS)]
    for _ in range(20):
        client.close()
        time.sleep(0.01)
    until(lambda: all(succeeded), "all have published")
    stop.set()
    for one in publishing:
        one.result()
    client.close()
    until(lambda: keepers() == 0, "the threads of all that was closed have ended")


class _Interrupted(Exception):
    """Raised by a signal handler."""


@pytest.mark.parametrize("read", ["listen", "get_message", "follows"])
def test_a_signal_ends_a_wait_and_loses_nothing(cluster: StoredCluster, read: str) -> None:
    def interrupt(number: int, frame: Any) -> None:
        raise _Interrupted

    def strike() -> None:
        until(lambda: on_the_loop(waiting) == 1 + (leading is not None), "the main thread waits")
        until(lambda: cast("Any", client)._subscriptions._loop._loop.is_waiting, "the driver waits for sockets")
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with redis.from_url(cluster.url) as client, client.pubsub() as pubsub, client.pubsub() as other:
            confirmed(pubsub, "c")
            confirmed(other, "d")
            leading: Running | None = None
            if read == "follows":  # another thread drives
                leading = Running(other.get_message, False, None)
                leading.join(0.05)
                assert leading.is_alive()
            functions: dict[str, Callable[[], Any]] = {
                "listen": lambda: next(pubsub.listen()),
                "get_message": lambda: pubsub.get_message(timeout=None),
                "follows": lambda: pubsub.get_message(timeout=PATIENCE_S),
            }
            on_the_loop = cast("Any", client)._subscriptions.call
            striking = Running(strike)
            with pytest.raises(_Interrupted):
                functions[read]()
            striking.result()
            until(lambda: on_the_loop(waiting) == (leading is not None), "what was interrupted has ended")
            assert client.publish("c", "x") == 1
            assert next_of(pubsub)["data"] == b"x"
            assert client.publish("d", "y") == 1
            assert (next_of(other) if leading is None else leading.result())["data"] == b"y"
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("interruption", ["Exception", "KeyboardInterrupt"])
def test_signals_at_any_moment_leave_publishers_and_readers_whole(cluster: StoredCluster, interruption: str) -> None:
    """In a process of its own: here a signal could also strike pytest, between its hooks."""
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "tests.client.interrupted", cluster.url, interruption],
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE_S,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (ended.returncode, ended.stdout) == (0, f"{ROUNDS} rounds, each interrupted\n"), ended.stderr


def _strike(monkeypatch: pytest.MonkeyPatch, function: str, handler: Callable[[], Any]) -> None:
    """Call a handler once in the midst of a function of the loop, as a signal or the garbage collector may."""
    original = getattr(Loop, function)

    def struck(*args: Any) -> Any:
        monkeypatch.undo()
        handler()
        return original(*args)

    is_static = isinstance(Loop.__dict__[function], staticmethod)
    monkeypatch.setattr(Loop, function, staticmethod(struck) if is_static else struck)


@pytest.mark.parametrize("moment", ["__init__", "can_be_driven_here", "drive"])
def test_a_handler_that_uses_the_client_it_has_interrupted_does_not_hang(
    cluster: StoredCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, moment: str
) -> None:
    """While a loop is made, while the mutex is held, and while the thread has the turn."""

    def handle() -> None:
        with pytest.raises(RuntimeError, match="from inside itself"):
            client.publish("c", "from the handler")

    client = redis.from_url(cluster.url)
    if moment != "__init__":
        client.publish("c", "x")
    _strike(monkeypatch, moment, handle)
    assert Running(client.publish, "c", "x").result() == 0
    _strike(monkeypatch, moment, client.close)
    with contextlib.suppress(redis.ConnectionError):
        Running(client.publish, "c", "x").result()
    assert Running(client.publish, "c", "again").result() == 0
    client.close()
    assert keepers() == 0
    assert not caplog.text


async def _nothing() -> None:
    """Take a turn."""


def _unused_cluster() -> SyncCluster:
    """Return one that connects to nothing."""
    return SyncCluster(lambda: cast("Any", None), envelope=True, callers_drive=True)


def test_what_interrupts_a_call_is_refused_at_once_while_another_thread_closes() -> None:
    """It holds up the end that the other one waits for."""
    shared = _unused_cluster()

    async def interrupted() -> None:
        closing.append(Running(shared.close))
        until(lambda: not shared.is_open, "it closes")
        with pytest.raises(RuntimeError, match="from inside itself"):
            shared.call(_nothing)

    closing: list[Running] = []
    began_at = time.monotonic()
    shared.call(interrupted)
    closing[0].result()
    assert time.monotonic() - began_at < turns.END_S_MAX
    shared.call(_nothing)
    shared.close()
    assert keepers() == 0


def test_a_close_that_is_interrupted_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(loop: SharedLoop) -> None:
        raise _Interrupted

    shared = _unused_cluster()
    shared.call(_nothing)
    with monkeypatch.context() as context:
        context.setattr(SharedLoop, "close", interrupted)
        with pytest.raises(_Interrupted):
            shared.close()
    assert keepers() == 1
    shared.close()
    assert keepers() == 0


def test_a_process_without_descriptors_gets_an_error_of_redis_py(
    cluster: StoredCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with redis.from_url(cluster.url) as client, client.pubsub() as pubsub:
        _strike(monkeypatch, "__init__", fail)
        with pytest.raises(redis.ConnectionError, match="Too many open files"):
            client.publish("c", "x")
        _strike(monkeypatch, "__init__", fail)
        with pytest.raises(redis.ConnectionError, match="Too many open files"):
            pubsub.subscribe("c")
        confirmed(pubsub, "c")
        assert client.publish("c", "x") == 1


@pytest.mark.parametrize("busy", ["idle", "keeper", "driven"])
def test_a_forked_child_begins_anew_and_the_parent_goes_on(cluster: StoredCluster, busy: str) -> None:
    channel, other = cluster.channel_at("s1"), cluster.channel_at("s2")

    def begin_anew() -> None:
        assert pubsub.subscribed
        assert pubsub.channels == {channel.encode(): None, b"handled": taken.append}
        assert client.publish(channel, "from the child") == 1, "the parent's only: the child is not subscribed yet"
        assert [next_of(pubsub)["type"] for _ in range(2)] == ["subscribe", "subscribe"]
        assert client.publish(channel, "from the child, again") == 2
        assert next_of(pubsub)["data"] == b"from the child, again"
        assert client.publish("handled", "x") == 2
        assert pubsub.get_message(timeout=PATIENCE_S) is None
        assert [message["data"] for message in taken] == [b"x"]
        with redis.from_url(cluster.url) as another:
            assert another.publish(channel, "of another client") == 2
        client.close()

    taken: list[Any] = []
    with redis.from_url(cluster.url) as client, client.pubsub() as pubsub, client.pubsub() as second:
        confirmed(pubsub, channel, handled=taken.append)
        confirmed(second, other)
        assert client.publish(channel, "before") == 1
        driving: Running | None = None
        if busy == "keeper":
            time.sleep(3 * turns.KEEPER_IDLE_S)  # the keeper has the turn by then; nothing depends on it
        elif busy == "driven":
            driving = Running(second.get_message, False, None)
            driving.join(0.05)
            assert driving.is_alive()
        in_child(begin_anew)
        until(lambda: client.pubsub_numsub(channel) == [(channel.encode(), 1)], "the server has seen that it has ended")
        assert client.publish(channel, "after") == 1
        expected = [b"before", b"from the child", b"from the child, again", b"of another client", b"after"]
        assert [next_of(pubsub)["data"] for _ in expected] == expected, "and no gap, no acknowledgement"
        assert client.publish(other, "end") == 1
        assert (next_of(second) if driving is None else driving.result())["data"] == b"end"
        assert pubsub.gaps_detected == 0


def test_a_child_that_is_forked_without_free_descriptors_takes_nothing_from_the_parent(cluster: StoredCluster) -> None:
    channel = cluster.channel_at("s1")

    def begin_anew() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for client, pubsub in zip(clients, pubsubs, strict=True):
            assert next_of(pubsub)["type"] == "subscribe"
            assert client.publish(channel, "from the child") >= 3

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        clients = [stack.enter_context(redis.from_url(cluster.url)) for _ in range(2)]
        pubsubs = [stack.enter_context(client.pubsub()) for client in clients]
        for client, pubsub in zip(clients, pubsubs, strict=True):
            confirmed(pubsub, channel)
            assert client.publish("other", "x") == 0
        lowest_free = os.dup(0)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
        try:
            in_child(begin_anew)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for pubsub in pubsubs:
            assert [next_of(pubsub)["data"] for _ in clients] == [b"from the child"] * 2
            assert pubsub.gaps_detected == 0


def test_patterns_and_sharded_channels_are_subscribed_to_again_in_a_forked_child(cluster: StoredCluster) -> None:
    def begin_anew() -> None:
        assert (pubsub.patterns, pubsub.shard_channels) == ({b"c*": None}, {b"s": None})
        assert {next_of(pubsub)["type"] for _ in range(2)} == {"psubscribe", "ssubscribe"}
        client.publish("channel", "x")
        assert next_of(pubsub)["channel"] == b"channel"
        client.spublish("s", "x")
        assert next_of(pubsub)["channel"] == b"s"

    with redis.from_url(cluster.url) as client, client.pubsub() as pubsub:
        pubsub.psubscribe("c*")
        pubsub.ssubscribe("s")
        assert {next_of(pubsub)["type"] for _ in range(2)} == {"psubscribe", "ssubscribe"}
        in_child(begin_anew)
        assert {next_of(pubsub)["channel"] for _ in range(2)} == {b"channel", b"s"}


def test_a_forked_child_has_limits_and_credentials_of_its_own(cluster: StoredCluster) -> None:
    provider = redis.UsernamePasswordCredentialProvider("default", "any")
    options: dict[str, Any] = {"max_connections": 2, "credential_provider": provider}

    def begin_anew() -> None:
        assert next_of(pubsub)["type"] == "subscribe"
        assert client.publish("c", "from the child") == 2
        assert next_of(pubsub)["data"] == b"from the child"
        with pytest.raises(redis.ConnectionError, match="max_connections=2"):
            client.pubsub().subscribe("d")

    with redis.Redis(servers=cluster.hosts, **options) as client, client.pubsub() as pubsub:
        confirmed(pubsub, "c")
        assert client.publish("c", "before") == 1
        in_child(begin_anew)


def test_a_forked_child_holds_none_of_the_parent_s_connections(cluster: StoredCluster) -> None:
    """A server sees the parent leave although the child lives on."""
    channel = cluster.channel_at("s1")
    client = redis.from_url(cluster.url)
    pubsub = client.pubsub()
    confirmed(pubsub, channel)
    with a_child_that_lives():
        pubsub.close()
        client.close()
        asyncio.run(asyncio.wait_for(cluster.until_subscribed("s1", channel, 0), PATIENCE_S))


def test_a_child_that_cannot_subscribe_again_tries_again(cluster: StoredCluster) -> None:
    def begin_anew() -> None:
        for server in cluster.servers.values():
            server.pause()
        try:
            with pytest.raises(redis.ConnectionError):
                pubsub.get_message(timeout=PATIENCE_S)
            assert pubsub.subscribed
        finally:
            for server in cluster.servers.values():
                server.resume()
        assert next_of(pubsub)["type"] == "subscribe"
        assert client.publish("c", "x") == 2

    with redis.from_url(cluster.url + "?socket_connect_timeout=1") as client, client.pubsub() as pubsub:
        confirmed(pubsub, "c")
        in_child(begin_anew)


@pytest.mark.parametrize(
    ("how", "status"), [("at once", 0), ("global", 0), ("workers", 0), ("listener", 0), ("error", 3)]
)
def test_the_interpreter_exits_with_an_open_client(cluster: StoredCluster, how: str, status: int) -> None:
    """And prints nothing, although daemon threads use the client to the end."""
    program = textwrap.dedent(
        """
        import sys, threading, time
        import dynamoth_client as redis

        how, url = sys.argv[1:]
        client = redis.from_url(url)
        pubsub = client.pubsub()
        pubsub.subscribe(c=print)
        assert client.publish("d", "x") == 0
        if how == "workers":  # at any moment, one of them is between two calls
            for _ in range(8):
                another = client.pubsub()
                another.subscribe(c=print)
                another.run_in_thread(sleep_time=0.001, daemon=True)
        elif how == "listener":
            threading.Thread(target=lambda: list(pubsub.listen()), daemon=True).start()
        elif how == "global":
            time.sleep(0.05)
        elif how == "error":
            raise SystemExit(3)
        if how in ("workers", "listener"):
            time.sleep(0.05)
        """
    )
    command = [sys.executable, "-P", "-X", "dev", "-c", program, how, cluster.url]
    path = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False, env=path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (status, "", "")


@pytest.mark.parametrize("was_used", [True, False])
@pytest.mark.parametrize("host", [HOST, "localhost"])
def test_functions_of_atexit_publish(cluster: StoredCluster, host: str, was_used: bool) -> None:
    """Also those that were registered before the client was imported, and run after what it does at exit."""
    program = textwrap.dedent(
        """
        import atexit, sys

        def say_goodbye():
            print([client.publish("c", text) for text in ("at exit", "again")])

        atexit.register(say_goodbye)
        import dynamoth_client as redis

        client = redis.from_url(sys.argv[1])
        if len(sys.argv) > 2:
            client.publish("c", "first")
        """
    )
    command = [sys.executable, "-P", "-X", "dev", "-c", program, cluster.url.replace(HOST, host), *["used"] * was_used]
    path = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with redis.from_url(cluster.url) as client, client.pubsub() as pubsub:
        confirmed(pubsub, "c")
        ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False, env=path)
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, "[1, 1]\n", "")
        expected = [b"first"] * was_used + [b"at exit", b"again"]
        assert [next_of(pubsub)["data"] for _ in expected] == expected
