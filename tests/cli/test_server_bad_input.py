"""Changes of servers that are refused, with real servers: one sentence, and the stored plan stays as it is."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from dynamoth.names import PLAN_KEY
from dynamoth_cli.local.cluster import HOST, LocalCluster
from dynamoth_cli.local.embedded import EmbeddedRedis, reserve_port
from dynamoth_cli.main import main
from dynamoth_daemon.exit_codes import EXIT_FAILED
from tests.whole.harness import until

Refusal = Callable[..., str]


class SilentHandler(BaseHTTPRequestHandler):
    """Answers what is not HTTP with an error, and writes no log."""

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(2, settings={"balancer.lease_s": 3.0}) as running:
        yield running


@pytest.fixture(scope="module")
def web_server() -> Iterator[int]:
    """Serve HTTP; return the port."""
    with ThreadingHTTPServer((HOST, 0), SilentHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def stored(cluster: LocalCluster) -> list[dict[bytes, bytes]]:
    """Return what each server stores as the plan, byte for byte."""
    return [cluster.ask(server, (b"HGETALL", PLAN_KEY))[0] for server in cluster.server_ids]


@pytest.fixture
def refusal(cluster: LocalCluster, capsys: pytest.CaptureFixture[str]) -> Refusal:
    """Return what types a command that is refused, and returns the reason. The stored plan stays as it is."""

    def refuse(*words: str) -> str:
        before = stored(cluster)
        capsys.readouterr()
        assert main(["server", *words, "--url", cluster.url]) == EXIT_FAILED
        assert stored(cluster) == before, "nothing has changed"
        printed = capsys.readouterr()
        [reason] = printed.err.splitlines()
        assert printed.out == "" and reason.startswith("dynamoth: ")
        return reason.removeprefix("dynamoth: ")

    return refuse


def test_what_is_not_a_redis_server_is_not_added(refusal: Refusal, web_server: int, free_port: int) -> None:
    reason = refusal("add", "s9", f"redis://{HOST}:{web_server}")
    assert reason.startswith("s9 cannot be reached at its URL: ") and "nothing has changed" in reason
    assert "s9 cannot be reached at its URL: " in refusal("add", "s9", f"redis://{HOST}:{free_port}")


@pytest.fixture
def node_port() -> Iterator[int]:
    """Reserve the port of a node of a Redis Cluster, and the one of its bus, 10,000 above it; return the first."""
    with contextlib.ExitStack() as reserved:
        while True:
            bus: int = reserved.enter_context(reserve_port()).getsockname()[1]
            own = reserved.enter_context(socket.socket())
            own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):  # somebody else has it: another pair
                own.bind((HOST, bus - 10_000))
                break
        yield bus - 10_000


def test_a_node_of_a_redis_cluster_is_not_added(refusal: Refusal, node_port: int) -> None:
    with EmbeddedRedis(port=node_port, options={"cluster-enabled": "yes"}) as node:
        reason = refusal("add", "s9", f"redis://{HOST}:{node.port}")
    assert reason.startswith("s9 is a node of a Redis Cluster, and Dynamoth uses standalone servers")


def test_a_replica_a_second_id_and_a_wrong_password_are_not_added(cluster: LocalCluster, refusal: Refusal) -> None:
    master = cluster.redis["s1"].port
    with EmbeddedRedis(options={"replicaof": f"{HOST} {master}"}) as replica, EmbeddedRedis(password="x") as closed:
        reason = refusal("add", "s9", f"redis://{HOST}:{replica.port}")
        assert reason.startswith("s9 is a replica, and stores nothing itself: name its master, or type ")
        reason = refusal("add", "s9", f"redis://{HOST}:{closed.port}")
        assert reason.startswith("s9 cannot be reached at its URL: ") and "password" in reason
    reason = refusal("add", "s9", f"redis://localhost:{master}")
    assert reason == "s9 is the server s1, by another URL: a server has one id; nothing has changed"
    reason = refusal("add", "s1", f"redis://localhost:{master}")
    assert reason.startswith("server s1 is in the plan with the URL ")
    assert reason.endswith(": give the new server another id")


def test_the_last_server_stays_and_a_used_id_does_not_come_back(
    cluster: LocalCluster, refusal: Refusal, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "as it is not being drained: type 'dynamoth server drain s1'" in refusal("remove", "s1")
    assert main(["pause", "--url", cluster.url]) == 0  # so that s2 keeps its slots until s1 has been refused
    assert main(["server", "drain", "s2", "--url", cluster.url]) == 0
    reason = refusal("drain", "s1")
    assert "as all others are being drained" in reason and "'dynamoth server add'" in reason
    assert main(["resume", "--url", cluster.url]) == 0

    remove = ["server", "remove", "s2", "--url", cluster.url]
    until(lambda: main(remove) == 0, "s2 is empty and removed", every_s=0.5)
    assert "s2 is not in the plan any more" in capsys.readouterr().out
    for action in ("remove", "drain"):
        assert "as it is the only one" in refusal(action, "s1")
    port = cluster.redis["s2"].port
    reason = refusal("add", "s2", f"redis://{HOST}:{port}")
    assert reason == "the id s2 was used before, and somebody may still know that server: take another id"
    assert main(["server", "add", "s3", f"redis://{HOST}:{port}", "--url", cluster.url]) == 0
    assert "s3 is in the plan" in capsys.readouterr().out
