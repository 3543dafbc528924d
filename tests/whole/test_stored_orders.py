"""A pause and pinned users outlive a coordinator that is killed; newcomers are placed by their coordinates."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from dynamoth.names import COORDINATOR_ORDERS_KEY
from dynamoth_cli.local.child import Child
from dynamoth_cli.local.cluster import LocalCluster
from dynamoth_cli.local.embedded import reserve_port
from dynamoth_cli.main import main
from tests.whole.harness import until

PLACES = {"b1": "48.2,16.4", "b2": "59.9,10.8"}


@contextmanager
def _port() -> Generator[int]:
    with reserve_port() as reserved:
        yield reserved.getsockname()[1]


def test_a_pause_outlives_a_killed_coordinator_and_newcomers_go_to_the_nearest_broker(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(2, settings={"broker.anonymous": True}))
        http = stack.enter_context(_port())
        coordinator = cluster.beside("coordinator", "coordinator", "--http-port", str(http))
        brokers: list[Child] = []
        urls: dict[str, str] = {}
        for id_, location in PLACES.items():
            port = stack.enter_context(_port())
            urls[id_] = f"ws://127.0.0.1:{port}/connect"
            brokers.append(cluster.beside(id_, "broker", "--id", id_, "--port", str(port), "--location", location))

        def stop() -> None:
            for child in (coordinator, *brokers):
                child.stop()

        stack.callback(stop)

        def asked(*command: str) -> Any:
            code = main(["broker", *command, "--url", cluster.url, "--json"])
            output, error = capsys.readouterr()
            assert code == 0, error
            return json.loads(output)

        def leads() -> Any:
            main(["broker", "status", "--url", cluster.url, "--json"])
            output, _ = capsys.readouterr()
            return json.loads(output)["coordinator"] if output else None

        def place(query: str) -> tuple[int, Any]:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{http}/place?{query}", timeout=5) as answer:
                    return answer.status, json.load(answer)
            except urllib.error.HTTPError as error:
                return error.code, json.load(error)

        coordinator.start()
        until(leads, "the coordinator acts", 0.1)
        assert asked("pause")["paused"] and asked("pin", "someone")["pinned_users"] == 1
        assert [cluster.ask(id_, (b"GET", COORDINATOR_ORDERS_KEY)) for id_ in cluster.server_ids] != [[None], [None]]
        coordinator.kill()
        coordinator.start()
        leader = until(leads, "it acts again", 0.1)
        assert leader["paused"] and leader["pinned_users"] == 1
        assert asked("explain")["pinned"] == ["someone"]
        assert not asked("resume")["paused"]
        # Newcomers.
        for broker in brokers:
            broker.start()
        until(lambda: place("session=u")[0] == 200 and len(place("session=u")[1]["urls"]) == 2, "both report", 0.1)
        assert place("session=u&near=50.1,14.4")[1] == {"urls": [urls["b1"], urls["b2"]]}
        assert place("session=u&near=60,11")[1] == {"urls": [urls["b2"], urls["b1"]]}
        for wrong in ("near=", "near=north", "near=91,0"):
            status, body = place(wrong)
            assert status == 400 and body["error"].startswith("near: ")
        # The last broker that takes users.
        assert asked("drain", "b1")["draining"]
        until(lambda: place("session=u")[1] == {"urls": [urls["b2"]]}, "b1 takes nobody", 0.1)
        assert main(["broker", "drain", "b2", "--url", cluster.url]) == 1
        assert "no other broker takes users" in capsys.readouterr().err
        assert asked("drain", "b2", "--force")["warnings"]
