"""Libraries that know redis-py only, unchanged, between processes on a cluster whose channels move."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from threading import Thread
from types import TracebackType
from typing import Any, Self

import pytest

from dynamoth.plan.plan import Plan, Server
from dynamoth_cli.local.child import Child
from dynamoth_cli.local.cluster import HOST, LocalCluster
from tests.whole.harness import move, until

SERVERS = 3
MESSAGES_BETWEEN_CHANGES = 20

APPLICATIONS = ["app_channels", "app_socketio", "app_socketio_sync", "app_broadcaster"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """Three servers, kept for all tests here: each has channels of its own."""
    with LocalCluster(SERVERS) as cluster:
        yield cluster


class Worker:
    """A process of ``worker.py``, and what it has said."""

    def __init__(self, *arguments: str) -> None:
        path = os.pathsep.join(os.path.abspath(each) for each in sys.path if each)
        command = [sys.executable, "-P", "-m", "tests.dependants.worker", *arguments]
        self._child = Child(" ".join(arguments[:2]), command, environment=os.environ | {"PYTHONPATH": path}, pipes=True)
        self._reader = Thread(target=self._read, name=f"stdout of {self._child.name}")
        self._said: list[list[Any]] = []
        self._finished = False

    def __enter__(self) -> Self:
        self._child.start()
        self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            sys.stderr.write("".join(f"[{self._child.name}] {line}\n" for line in self._child.lines))
        self._child.stop()
        self._reader.join()

    def told(self, kind: str) -> list[list[Any]]:
        """Return what it has said of a kind."""
        if self._child.ended_by_itself and not self._finished:
            raise self._child.failure()
        return [words for word, *words in self._said if word == kind]

    def first(self, kind: str) -> Any:
        """Wait until it has said something of a kind; return that."""
        return until(lambda: self.told(kind), f"{self._child.name} says {kind!r}")[0][0]

    def stop_publishing(self) -> int:
        """Let a publisher come to an end; return how many numbers it has published by each road."""
        self._child.stdin.write(b"\n")
        self._child.stdin.flush()
        count: int = self.first("published")
        return count

    def finish(self) -> None:
        """Let it end by itself, having closed everything, and check that nothing went wrong."""
        self._finished = True
        self._child.stdin.close()
        until(lambda: not self._child.running, f"{self._child.name} ends")
        self._reader.join()
        assert self._child.stop() == 0, self._child.lines

    def _read(self) -> None:
        for line in self._child.stdout:
            self._said.append(json.loads(line))


class Listener(Worker):
    """One that listens."""

    def heard(self, road: str) -> list[int]:
        """Return the numbers that have come by a road, in their order."""
        return [number for by, number in self.told("heard") if by == road]

    def hears_more(self, roads: Sequence[str]) -> None:
        """Wait until so many messages more have come by every road."""
        wanted = {road: len(self.heard(road)) + MESSAGES_BETWEEN_CHANGES for road in roads}
        until(lambda: all(len(self.heard(road)) >= count for road, count in wanted.items()), "messages arrive")


@pytest.mark.parametrize("application", APPLICATIONS)
def test_every_message_arrives_once_while_channels_move(cluster: LocalCluster, application: str) -> None:
    url = f"redis://{HOST}:{cluster.redis['s1'].port}"
    with ExitStack() as stack:
        listener = stack.enter_context(Listener(application, "listen", url))
        channels: dict[str, str] = listener.first("channels")
        publisher = stack.enter_context(Worker(application, "publish", url, json.dumps(channels)))
        listener.hears_more(list(channels))
        for channel in dict.fromkeys(name.encode() for name in channels.values()):
            home = _home(cluster, channel)
            others = [server for server in cluster.server_ids if server != home]
            for server in (*others, home):
                move(cluster, channel, server)
                listener.hears_more(list(channels))
            for mode in ("all-subscribers", "all-publishers"):
                cluster.ask_balancer("replicate", {"channel": channel, "mode": mode, "servers": cluster.server_ids})
                listener.hears_more(list(channels))
            cluster.ask_balancer("unreplicate", {"channel": channel})
            listener.hears_more(list(channels))
        count = publisher.stop_publishing()
        until(lambda: all(listener.heard(road)[-1] == count - 1 for road in channels), "the last message arrives")
        publisher.finish()
        listener.finish()
        for road in channels:
            heard = listener.heard(road)
            assert heard == list(range(heard[0], count)), "each once and in order, since the subscription took effect"


def _home(cluster: LocalCluster, channel: bytes) -> str:
    return Plan.initial(Server(id_, "redis://x") for id_ in cluster.server_ids).ring.home(channel)
