"""Libraries that know redis-py only, unchanged, on a cluster whose channels move."""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from threading import Thread
from typing import Any, Self

from dynamoth_cli.local.child import Child
from dynamoth_cli.local.cluster import HOST, LocalCluster
from tests.whole.harness import until

MESSAGES_BETWEEN_CHANGES = 10

APPLICATIONS = ("app_channels", "app_socketio", "app_socketio_sync", "app_broadcaster")

SERVERS = ["s1", "s2", "s3"]

CHANGES: list[tuple[str, dict[str, Any]]] = [
    *(("move", {"to": server}) for server in SERVERS),
    ("replicate", {"mode": "all-subscribers", "servers": SERVERS}),
    ("replicate", {"mode": "all-publishers", "servers": SERVERS}),
    ("unreplicate", {}),
]
"""What happens to every channel; one of the moves is to where it is."""


class Worker:
    """A process of ``worker.py``, and what it has written."""

    def __init__(self, application: str, url: str) -> None:
        path = os.pathsep.join(os.path.abspath(each) for each in sys.path if each)
        command = [sys.executable, "-P", "-m", "tests.dependants.worker", application, url]
        self._child = Child(application, command, environment=os.environ | {"PYTHONPATH": path}, pipes=True)
        self._reader = Thread(target=self._read, name=f"stdout of {application}")
        self._said: dict[str, Any] = {}
        #: The numbers that have come, by road.
        self.heard: dict[str, list[int]] = {}

    def __enter__(self) -> Self:
        self._child.start()
        self._reader.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._child.stop()
        self._reader.join()

    def says(self, kind: str) -> Any:
        """Wait until it has said something of a kind; return that."""
        until(lambda: self._is_alive() and kind in self._said, f"{self._child.name} says {kind!r}")
        return self._said[kind]

    def hears_more(self) -> None:
        """Wait until more messages have come by every road."""
        self._hears({road: self._latest(road) + MESSAGES_BETWEEN_CHANGES for road in self.says("channels")})

    def finish(self) -> None:
        """Let it publish no more, and check what has come and that it ends well."""
        self._child.stdin.write(b"\n")
        self._child.stdin.flush()
        count: int = self.says("published")
        self._hears(dict.fromkeys(self.says("channels"), count - 1))
        self._child.stdin.close()
        until(lambda: not self._child.running, f"{self._child.name} ends")
        assert self._child.stop() == 0, self._child.lines
        for heard in self.heard.values():
            assert heard == list(range(heard[0], count)), "each once and in order, since the subscription took effect"

    def _latest(self, road: str) -> int:
        return self.heard.get(road, [-1])[-1]

    def _hears(self, wanted: dict[str, int]) -> None:
        """Wait until these numbers, or later ones, have come by their roads."""
        until(
            lambda: self._is_alive() and all(self._latest(road) >= number for road, number in wanted.items()),
            f"messages arrive: {self._child.name}",
        )

    def _is_alive(self) -> bool:
        if self._child.ended_by_itself:
            raise self._child.failure()
        return True

    def _read(self) -> None:
        for line in self._child.stdout:
            kind, *words = json.loads(line)
            if kind == "heard":
                self.heard.setdefault(words[0], []).append(words[1])
            else:
                [self._said[kind]] = words


def test_every_message_arrives_once_while_channels_move() -> None:
    with LocalCluster(len(SERVERS)) as cluster, ExitStack() as stack, ThreadPoolExecutor() as operators:
        url = f"redis://{HOST}:{cluster.redis['s1'].port}"
        workers = [stack.enter_context(Worker(application, url)) for application in APPLICATIONS]
        channels = {channel.encode() for worker in workers for channel in worker.says("channels").values()}
        for command, arguments in CHANGES:
            for worker in workers:
                worker.hears_more()
            asked = [
                operators.submit(cluster.ask_balancer, command, {"channel": channel, **arguments})
                for channel in channels
            ]
            for answer in asked:
                answer.result()
        for worker in workers:
            worker.hears_more()
            worker.finish()
