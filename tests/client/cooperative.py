"""What applications do with the synchronous client, under a cooperative scheduler.

``patched.py`` runs ``SCENARIOS`` in a process in which the standard library is the scheduler's.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from itertools import islice
from typing import Any, cast

import dynamoth_client as redis
from tests.client.sync_helpers import PATIENCE_S, Running, confirmed, next_of, until

PUBLISHERS = 100
EACH = 20
READERS = 4
TICKS_MIN = 5
"""Nobody ticks beside one that blocks; on a busy machine a tick may come late."""

_kept: list[object] = []


class Ticker:
    """Counts while others wait: it stands still when somebody blocks the only thread that there is."""

    def __init__(self) -> None:
        self.ticks = 0
        self._stop = threading.Event()
        self._running = Running(self._tick)

    def _tick(self) -> None:
        while not self._stop.wait(0.001):
            self.ticks += 1

    def stop(self) -> None:
        self._stop.set()
        self._running.result()


def publish_and_read(url: str, scheduler: Scheduler) -> None:
    """Many publish and some read at once: no message is lost, repeated or out of order, and others run meanwhile."""

    def publish(name: int) -> None:
        for number in range(EACH):
            assert client.publish(f"c{name % 2}", f"{name} {number}") == READERS

    def read(pubsub: redis.PubSub) -> dict[int, list[int]]:
        seen: dict[int, list[int]] = {}
        for message in islice(pubsub.listen(), PUBLISHERS * EACH):
            name, number = map(int, message["data"].split())
            seen.setdefault(name, []).append(number)
        return seen

    with redis.from_url(url) as client:
        pubsubs = [client.pubsub() for _ in range(READERS)]
        for pubsub in pubsubs:
            confirmed(pubsub, "c0", "c1")
        ticker = Ticker()
        reading = [Running(read, pubsub) for pubsub in pubsubs]
        publishing = [Running(publish, name) for name in range(PUBLISHERS)]
        for one in publishing:
            one.result()
        for one in reading:
            assert one.result() == {name: list(range(EACH)) for name in range(PUBLISHERS)}
        ticker.stop()
        assert ticker.ticks > TICKS_MIN


def wait(url: str, scheduler: Scheduler) -> None:
    """Others run while one waits for a message, and while nobody answers."""
    with redis.from_url(url) as client, client.pubsub() as pubsub:
        ticker = Ticker()
        confirmed(pubsub, "c")
        before, began_at = ticker.ticks, time.monotonic()
        assert pubsub.get_message(timeout=0.3) is None
        assert 0.3 <= time.monotonic() - began_at < PATIENCE_S
        while ticker.ticks - before <= TICKS_MIN:  # on a busy machine each wait may let others tick only once
            assert pubsub.get_message(timeout=0.02) is None
        waiting = Running(pubsub.get_message, False, None)
        time.sleep(0.05)
        assert client.publish("c", "x") == 1
        assert waiting.result()["data"] == b"x"
        waiting = Running(lambda: list(pubsub.listen()))
        time.sleep(0.05)
        pubsub.close()
        assert waiting.result() == []
        ticker.stop()


def handlers(url: str, scheduler: Scheduler) -> None:
    """Handlers run in ``run_in_thread``, and may publish themselves."""
    with redis.from_url(url) as client, client.pubsub(ignore_subscribe_messages=True) as pubsub:
        answers: list[bytes] = []

        def answer(message: dict[str, Any]) -> None:
            client.publish("answers", message["data"])

        def keep(message: dict[str, Any]) -> None:
            answers.append(b"p" * (message["type"] == "pmessage") + message["data"])

        pubsub.subscribe(questions=answer, answers=keep)
        pubsub.psubscribe(**{"q*": keep})
        worker: threading.Thread = cast("Any", pubsub).run_in_thread(sleep_time=0.01, daemon=True)
        for number in range(10):
            assert client.publish("questions", number) == 2
        until(lambda: len(answers) == 20, "all answered")
        cast("Any", worker).stop()
        worker.join(PATIENCE_S)
        assert not worker.is_alive()
        assert [one for one in answers if one.isdigit()] == [b"%d" % number for number in range(10)]
        assert [one for one in answers if not one.isdigit()] == [b"p%d" % number for number in range(10)]


def idle(url: str, scheduler: Scheduler) -> None:
    """Connections are kept, though nobody calls: one that is lost is made again."""
    with redis.from_url(url) as client, redis.from_url(url) as other, client.pubsub(gaps=True) as pubsub:
        confirmed(pubsub, "c")
        assert other.publish("c", "first") == 1
        other.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        until(lambda: other.publish("c", "second") == 1, "subscribed again, though nobody reads")
        assert next_of(pubsub)["data"] == b"first"
        messages = [next_of(pubsub)]
        while messages[-1]["type"] == "gap":
            messages.append(next_of(pubsub))
        assert len(messages) > 1
        assert messages[-1]["data"] == b"second"


def server_goes_away(url: str, scheduler: Scheduler) -> None:
    """Errors are redis-py's, in time, and others run meanwhile; the server's process id is asked for, and stopped."""
    with redis.from_url(url + "?socket_timeout=1&socket_connect_timeout=1") as client, client.pubsub() as pubsub:
        confirmed(pubsub, "c")
        number = _process_id(client)
        os.kill(number, signal.SIGSTOP)
        try:
            ticker = Ticker()
            publishing = [Running(client.publish, "c", "x") for _ in range(10)]
            for one in publishing:
                try:
                    one.result()
                except (redis.TimeoutError, redis.ConnectionError):
                    continue
                raise AssertionError("published")
            assert ticker.ticks > TICKS_MIN
            ticker.stop()
        finally:
            os.kill(number, signal.SIGCONT)
        until(lambda: _succeeds(client), "it goes on")
        os.kill(number, signal.SIGKILL)
        try:
            next_of(pubsub)
            while True:
                next_of(pubsub)
        except redis.ConnectionError:
            pass


def _process_id(client: Any) -> int:
    """Return that of the server."""
    return int(client.info("server")["process_id"])


def _succeeds(client: redis.Redis) -> bool:
    try:
        return client.publish("d", "x") == 0
    except redis.RedisError:
        return False


def timeouts_and_kills(url: str, scheduler: Scheduler) -> None:
    """What a scheduler throws into one that waits ends this wait and nothing else."""
    ended: list[object] = []
    with redis.from_url(url) as client, client.pubsub(gaps=True) as pubsub:
        confirmed(pubsub, "c")
        with scheduler.Timeout(0.05, False):
            ended.append(pubsub.get_message(timeout=None))
        reading = scheduler.spawn(pubsub.get_message, False, None)
        time.sleep(0.05)
        reading.kill()
        assert client.publish("c", "x") == 1
        assert next_of(pubsub)["data"] == b"x"
        number = _process_id(client)
        os.kill(number, signal.SIGSTOP)
        with scheduler.Timeout(0.05, False):
            ended.append(client.publish("c", "given up"))
        assert not ended
        publishing = scheduler.spawn(client.publish, "c", "given up")
        others = [Running(client.publish, "c", "y") for _ in range(2)]
        time.sleep(0.05)
        publishing.kill()
        os.kill(number, signal.SIGCONT)
        assert [one.result() for one in others] == [1, 1]
        data = [next_of(pubsub)["data"] for _ in range(2)]
        while data[-2:] != [b"y", b"y"]:
            data.append(next_of(pubsub)["data"])
        assert set(data[:-2]) <= {b"given up"}, data  # they were sent, or not yet


class _Provider(redis.CredentialProvider):  # type: ignore[misc]  # redis-py is typed in part
    """Is asked in a thread, and waits while others run."""

    def __init__(self, ticker: Ticker) -> None:
        self._ticker = ticker

    def get_credentials(self) -> tuple[str, str]:
        until(lambda: self._ticker.ticks > TICKS_MIN, "others run")
        return "default", "any"


def names_and_credentials(url: str, scheduler: Scheduler) -> None:
    """A host name is resolved, and a credential provider asked, while others run."""
    url = url.replace("127.0.0.1", "localhost")
    ticker = Ticker()
    with redis.from_url(url, credential_provider=_Provider(ticker)) as client, client.pubsub() as pubsub:
        confirmed(pubsub, "c")
        assert client.publish("c", "x") == 1
        assert next_of(pubsub)["data"] == b"x"
    ticker.stop()
    assert ticker.ticks > TICKS_MIN


def fork(url: str, scheduler: Scheduler) -> None:
    """A forked child has connections of its own; nobody drives those of the parent there."""
    with redis.from_url(url) as client, client.pubsub(gaps=True) as pubsub:
        confirmed(pubsub, "c")
        assert client.publish("c", "before") == 1
        child = os.fork()
        if child == 0:
            status = 1
            try:
                assert client.publish("c", "from the child") == 1
                assert next_of(pubsub)["type"] == "subscribe"
                time.sleep(0.2)
                assert client.publish("c", "again") == 2
                assert next_of(pubsub)["data"] == b"again"
                status = 0
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        until(lambda: client.pubsub_numsub("c") == [(b"c", 1)], "Redis has noticed that the child is gone")
        assert client.publish("c", "after") == 1
        expected = [b"before", b"from the child", b"again", b"after"]
        assert [next_of(pubsub)["data"] for _ in expected] == expected


def end_at_exit(url: str, scheduler: Scheduler) -> None:
    """An open client does not keep the process."""
    client = redis.from_url(url)
    pubsub = client.pubsub()
    confirmed(pubsub, "c")
    threading.Thread(target=lambda: list(pubsub.listen()), daemon=True).start()
    assert client.publish("d", "x") == 0
    time.sleep(0.1)
    _kept.append((client, pubsub))


Scheduler = Any
"""The module ``gevent`` or ``eventlet``."""

SCENARIOS: tuple[Callable[[str, Scheduler], None], ...] = (
    publish_and_read,
    wait,
    handlers,
    idle,
    timeouts_and_kills,
    names_and_credentials,
    server_goes_away,
    fork,
    end_at_exit,
)
