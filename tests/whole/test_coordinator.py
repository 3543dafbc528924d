"""Brokers and a coordinator as real processes: users are moved by load, and by operators."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from dynamoth_cli.local.child import Child
from dynamoth_cli.local.cluster import LocalCluster
from dynamoth_cli.local.embedded import reserve_port
from dynamoth_cli.main import main
from dynamoth_client.asyncio import from_url
from tests.loop_thread import LoopThread
from tests.whole.edge_users import RawUser
from tests.whole.harness import until

USERS = 40
CHANNELS = 8
PUBLISH_S = 0.02
PAYLOAD = b"x" * 400

SETTINGS = {
    "broker.anonymous": True,
    "broker.capacity_bytes_per_s": 2_000_000,
    "broker.report_s": 0.3,
    "coordinator.report_s": 0.3,
    "coordinator.suspect_reports": 10,
    "coordinator.decide_s": 0.3,
    "coordinator.looks": 2,
    "coordinator.wait_s": 1.0,
    "coordinator.rest_s": 0.0,
    "coordinator.slow_half_life_s": 0.5,
    "coordinator.fast_half_life_s": 0.5,
    "coordinator.ratio_mean_min": 0.02,
    "coordinator.shuffle_ratio_mean_min": 10.0,
    "coordinator.appear_s": 1.0,
}


class Edge:
    """Two brokers, a coordinator, users at the first broker, and traffic."""

    def __init__(self, cluster: LocalCluster, stack: ExitStack) -> None:
        self.cluster = cluster
        self.ports = {id_: stack.enter_context(_port()) for id_ in ("b1", "b2")}
        self.http = stack.enter_context(_port())
        self.urls = {id_: f"ws://127.0.0.1:{port}/connect" for id_, port in self.ports.items()}
        self.brokers = {
            id_: cluster.beside(id_, "broker", "--id", id_, "--port", str(port)) for id_, port in self.ports.items()
        }
        self.coordinator = cluster.beside("coordinator", "coordinator", "--http-port", str(self.http))
        self.users = [
            RawUser(f"u{number}", [f"ch{number % CHANNELS}", f"ch{(number * 3 + 1) % CHANNELS}"])
            for number in range(USERS)
        ]
        self.thread = LoopThread("users")
        self._traffic: asyncio.Task[None] | None = None
        stack.callback(self.close)
        for child in self.brokers.values():
            child.start()

    def start_users(self) -> None:
        async def start() -> None:
            await asyncio.gather(*(user.start(self.urls["b1"]) for user in self.users))
            self._traffic = asyncio.get_running_loop().create_task(self._publish())

        self.thread.call(start())

    async def _publish(self) -> None:
        client = from_url(self.cluster.url)
        number = 0
        try:
            while True:
                number += 1
                await client.publish(f"ch{number % CHANNELS}", PAYLOAD)
                await asyncio.sleep(PUBLISH_S / CHANNELS)
        finally:
            await client.aclose()

    def close(self) -> None:
        async def end() -> None:
            if self._traffic is not None:
                self._traffic.cancel()
                await asyncio.gather(self._traffic, return_exceptions=True)
            await asyncio.gather(*(user.close() for user in self.users))

        self.thread.call(end())
        self.thread.close()
        for child in (self.coordinator, *self.brokers.values()):
            child.stop()

    def at(self, broker: str) -> int:
        return sum(user.url == self.urls[broker] for user in self.users)

    def places(self) -> list[str]:
        """Return where a newcomer is sent; nowhere while no broker has reported lately."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.http}/place?session=new", timeout=5) as answer:
                urls: list[str] = json.load(answer)["urls"]
                return urls
        except urllib.error.HTTPError:
            return []

    def serves_everybody(self) -> bool:
        return Counter(user.url is not None for user in self.users)[True] == USERS

    def flows(self) -> None:
        """Wait until everybody gets data from now on."""
        now = time.monotonic()
        until(lambda: all(user.arrived_at > now for user in self.users), "everybody gets data")


@contextmanager
def _port() -> Generator[int]:
    with reserve_port() as reserved:
        yield reserved.getsockname()[1]


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2):
            return True
    except OSError:
        return False


def _say_why(*children: Child) -> str:
    return "".join(f"\n{child.name}: {line}" for child in children for line in child.lines[-20:])


def test_users_are_moved_by_load_and_by_operators(capsys: pytest.CaptureFixture[str]) -> None:
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(2, settings=SETTINGS))
        edge = Edge(cluster, stack)

        def run(*command: str) -> tuple[int, str, str]:
            code = main(["broker", *command, "--url", cluster.url])
            output, error = capsys.readouterr()
            return code, output, error

        def printed(*command: str) -> Any:
            code, output, error = run(*command, "--json")
            assert code == 0, error
            return json.loads(output)

        def status() -> Any:
            code, output, _ = run("status", "--json")
            return json.loads(output) if code == 0 else {"brokers": {}, "coordinator": None}

        until(lambda: len(status()["brokers"]) == 2, "both brokers answer operators", 0.1)
        edge.start_users()
        edge.flows()
        before = status()
        assert before["coordinator"] is None and before["brokers"]["b1"]["sessions"] == USERS
        assert edge.at("b1") == USERS
        code, _, error = run("drain", "b1")
        assert code == 1 and "there is no other broker to move users to" in error
        # By load.
        edge.coordinator.start()
        until(lambda: edge.at("b2") >= USERS // 4, f"users are moved by load: {_say_why(edge.coordinator)}")
        explanation = printed("explain")
        assert explanation["latest"]["kind"] == "relieve" and set(explanation["brokers"]) == {"b1", "b2"}
        assert printed("pause")["paused"]
        until(lambda: printed("explain")["stage"] == "watching", "the plan settles", 0.1)
        # Operators.
        drained = printed("drain", "b1", "--rate", "200")
        assert drained["draining"]
        until(lambda: edge.at("b2") == USERS, "b1 is drained")
        until(lambda: status()["brokers"]["b1"]["sessions"] == 0, "b1 is empty", 0.1)
        assert "draining" in run("status")[1]
        assert not printed("undrain", "b1")["draining"]
        until(lambda: edge.urls["b1"] in status()["brokers"]["b2"]["alternates"], "b1 takes users", 0.1)
        user = edge.users[7]
        moved = printed("move", user.session, "--to", "b1")
        assert (moved["from"], moved["to"]) == ("b2", edge.urls["b1"])
        until(lambda: user.url == edge.urls["b1"], "a user has moved")
        assert run("move", "nobody", "--to", "b1")[0] == 1
        assert run("move", user.session, "--to", "b9")[0] == 1
        until(lambda: edge.places() == [edge.urls["b1"], edge.urls["b2"]], "b1 is the first for newcomers", 0.1)
        assert _answers(f"http://127.0.0.1:{edge.http}/readyz")
        # Without the coordinator.
        edge.coordinator.kill()
        edge.flows()
        assert edge.serves_everybody() and edge.at("b2") == USERS - 1
        until(lambda: status()["coordinator"] is None and len(status()["brokers"]) == 2, "brokers answer alone", 0.1)
        edge.flows()
        assert [loss for user in edge.users for loss in user.losses] == []
        assert [missing for user in edge.users for missing in user.missing()] == []
        assert all(user.moves for user in edge.users)
