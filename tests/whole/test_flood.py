"""A flood that Redis disconnects the agent for: it is shown while it lasts, and the balancer acts on it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from dynamoth_cli.local.cluster import LocalCluster
from tests.whole.harness import channels_at, logged, until

SETTINGS = {
    "agent.report_interval_s": 0.3,
    "balancer.wait_s": 1.0,
    "balancer.averaging_s": 3.0,
    "balancer.channel_rest_s": 1.0,
}
LIMIT = {"client-output-buffer-limit": "pubsub 128kb 64kb 60"}
"""So small that any machine can publish faster than an agent of its own reads."""


def command(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


@contextmanager
def flood(port: int, channel: bytes) -> Generator[None]:
    """Publish as fast as one connection can."""
    over = threading.Event()
    messages = command(b"PUBLISH", channel, b"x" * 2000) * 500
    replies_bytes = 500 * len(b":1\r\n")

    def publish() -> None:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            while not over.is_set():
                connection.sendall(messages)
                left = replies_bytes
                while left:
                    left -= len(connection.recv(left))

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def problem(cluster: LocalCluster, kind: str) -> Mapping[str, Any] | None:
    problems = cluster.ask_balancer("status")["problems"]
    return next((each for each in problems if each["kind"] == kind), None)


def test_a_flood_that_blinds_an_agent_is_shown_and_its_server_relieved() -> None:
    quiet, flooded = channels_at("s1", 2)
    with LocalCluster(2, settings=SETTINGS, redis_options=LIMIT) as cluster:
        [advice] = until(
            lambda: logged(cluster.agents["s1"], "a setting of the server does harm"), "the agent's advice"
        )
        assert "client-output-buffer-limit pubsub is 131072 65536" in advice["cause"]
        assert "set client-output-buffer-limit pubsub 256mb 128mb 60" in advice["cause"]
        port = cluster.redis["s1"].port
        with socket.create_connection(("127.0.0.1", port)) as listener:
            listener.sendall(command(b"SUBSCRIBE", quiet))
            publish = b"PUBLISH", quiet, b"x" * 1000
            until(lambda: cluster.ask("s1", publish)[0] == 2, "the agent sees it, and a subscriber")
            with flood(port, flooded):
                blind = until(lambda: problem(cluster, "agent_blind"), "the balancer says so while it lasts", 0.1)
                assert blind is not None and blind["subject"] == "s1" and blind["severity"] == "error"
                until(lambda: cluster.ask_balancer("status")["servers"]["s1"]["interruptions"] > 1, "how often", 0.1)
                # The first one: later ones may be about where the flooded channel is by then.
                decision = until(lambda: cluster.ask_balancer("status")["decisions"], "the balancer acts on it", 0.1)[0]
                acted = [*decision["first_moves"], *decision["findings"]]
                assert {each.get("from", each.get("server")) for each in acted} == {"s1"}
        until(lambda: cluster.ask("s1", publish)[0] == 1, "the agent sees everything again")
