"""A server is drained as an operator does it: a line in the configuration, and the balancer restarted, under load."""

from __future__ import annotations

from typing import Any

import pytest

from dynamoth.errors import RequestRefused
from dynamoth.plan.slots import is_slot, slot_of
from dynamoth_cli.local.cluster import HOST, LocalCluster
from dynamoth_cli.main import main
from dynamoth_client import from_url
from tests.whole.harness import Traffic, channels_at, logged, move, until

pytestmark = pytest.mark.usefixtures("patient_subscribers")

SETTINGS: dict[str, Any] = {
    "balancer.wait_s": 3.0,
    "balancer.averaging_s": 3.0,
    "balancer.lease_s": 3.0,
    "balancer.replicas_max": 1,  # what is replicated stays so, however little traffic there is
}


def test_a_server_is_drained_under_load_and_takes_no_channel(capsys: pytest.CaptureFixture[str]) -> None:
    at_s1, [moved, hot, elsewhere] = channels_at("s1", 3, servers=3), channels_at("s2", 3, servers=3)
    everything = [*at_s1, moved, hot, elsewhere]
    with LocalCluster(3, settings=SETTINGS) as cluster:
        move(cluster, moved, "s1")
        replicated = {"channel": hot, "mode": "all-subscribers", "servers": ["s1", "s2"]}
        cluster.ask_balancer("replicate", replicated)
        with Traffic(cluster, everything) as traffic:
            file = cluster.config_file
            file.write_text(file.read_text().replace('id = "s1"\n', 'id = "s1"\ndraining = true\n'))
            assert cluster.balancer.stop() == 0
            cluster.balancer.start()
            cluster.wait_ready()

            def left() -> Any:
                server = cluster.ask_balancer("status")["servers"]["s1"]
                return server["channels_left"], server["slots_left"]

            until(lambda: left() == (0, 0), "nothing is left at s1", every_s=0.5)
            traffic.flows()
            requests: list[tuple[str, dict[str, Any]]] = [
                ("replicate", {**replicated, "servers": ["s1", "s2", "s3"]}),
                ("move", {"channel": elsewhere, "to": "s1"}),
                ("unreplicate", {"channel": hot, "to": "s1"}),
            ]
            for command, arguments in requests:
                with pytest.raises(RequestRefused, match="server s1 is being drained and takes no channels"):
                    cluster.ask_balancer(command, arguments)
            users = [name for name in cluster.ask("s1", (b"PUBSUB", b"CHANNELS"))[0] if not name.startswith(b"__")]
            assert not users, "no subscriber is left"
            pages = [cluster.ask_balancer("plan")]
            while pages[-1]["next"] is not None:
                pages.append(cluster.ask_balancer("plan", {"after": pages[-1]["next"]}))
            servers = {entry["channel"]: sorted(entry["servers"]) for page in pages for entry in page["entries"]}
            assert all("s1" not in each for each in servers.values())
            assert {name for name in servers if not is_slot(name)} == {moved, hot} and servers[hot] == ["s2", "s3"]
            assert all(slot_of(channel) in servers for channel in at_s1), "they have left with their slots"
            assert main(["status", "--url", cluster.url]) == 0
            assert "draining: s1; nothing is left there\n" in capsys.readouterr().out
            decided = logged(cluster.balancer, "decided to")
            assert {line["cause"] for line in decided} == {"s1 is being drained"}
            cluster.agents["s1"].stop()
            cluster.redis["s1"].stop()
            traffic.flows()
            with from_url(cluster.url) as client, client.pubsub() as pubsub:
                pubsub.subscribe(at_s1[0])
                until(lambda: (pubsub.get_message(timeout=1.0) or {}).get("type") == "subscribe", "a new subscriber")
                assert client.publish(at_s1[0], b"from a new client") > 0

            def shown() -> bool:
                code = main(["status", "--url", cluster.url])
                return code == 0 and "! s1: it is drained and stopped: type" in capsys.readouterr().out

            until(shown, "the server that is gone for good", every_s=0.2)
            others = "dynamoth://" + ",".join(f"{HOST}:{cluster.redis[id_].port}" for id_ in ("s2", "s3"))
            assert main(["server", "remove", "s1", "--url", others]) == 0
            assert main(["status", "--url", others]) == 0
            assert "! s1: it was removed from the plan: take it out of the config" in capsys.readouterr().out
            assert cluster.balancer.stop() == 0
            tables = file.read_text().split("[[cluster.servers]]")
            file.write_text("[[cluster.servers]]".join(each for each in tables if 'id = "s1"' not in each))
            cluster.balancer.start()

            def is_gone() -> bool:
                return main(["status", "--url", others]) == 0 and "s1" not in capsys.readouterr().out

            until(is_gone, "it is not listed any more", every_s=0.2)
            traffic.flows()
            assert traffic.finish().gaps == 0, traffic.gaps
