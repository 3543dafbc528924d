"""What operators ask about decisions, on real servers under real load: a dry run, the decision, and its explanation."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dynamoth_cli.local.cluster import LocalCluster
from dynamoth_cli.main import main
from tests.whole.harness import Traffic, channels_at, until

pytestmark = pytest.mark.usefixtures("patient_subscribers")


def test_a_dry_run_shows_what_rebalance_then_does(capsys: pytest.CaptureFixture[str]) -> None:
    channels = channels_at("s1", 6)
    settings: dict[str, Any] = {"agent.report_interval_s": 0.3, "balancer.averaging_s": 2.0, "balancer.wait_s": 600.0}
    # 6 channels, 20 messages per second, 2 subscribers, 600 bytes: about 145 KB/s.
    with (
        LocalCluster(2, outgoing_bytes_per_s_max=160_000, settings=settings) as cluster,
        Traffic(cluster, channels, publishers=1, interval_s=0.05, payload_bytes=550) as traffic,
    ):
        cluster.ask_balancer("pause")

        def printed(*command: str) -> Any:
            assert main([*command, "--json", "--url", cluster.url]) == 0
            return json.loads(capsys.readouterr().out)

        def wanted() -> Any:
            found = printed("rebalance", "--dry-run")
            return found if found["moves"] else None

        found = until(wanted, "s1 is overloaded", every_s=0.5)
        assert {(move["from"], move["to"], move["goal"]) for move in found["first_moves"]} == {("s1", "s2", "relieve")}
        assert cluster.ask_balancer("plan")["channels"] == 0, "nothing was moved"
        done = printed("rebalance")
        assert done["moves"] >= 1 and done["progress"] in ("settled", "measured")
        moved = done["first_moves"][0]["channel"]
        explained = printed("explain", moved)
        assert (explained["servers"], explained["placed_by"]) == (["s2"], "entry")
        assert explained["moves"][0]["reason"] == done["first_moves"][0]["reason"]
        assert explained["stays"][0].startswith("it has moved lately")

        def measured() -> Any:
            [decision] = printed("status")["balancer"]["decisions"]
            return decision["load_ratios"] if decision["progress"] == "measured" else None

        for server, ratios in until(measured, "the decision is measured", every_s=0.5).items():
            assert ratios["measured"] == pytest.approx(ratios["predicted"], abs=0.2), server
        assert printed("explain", "s2")["decisions"][0]["progress"] == "measured"
        assert main(["explain", moved, "--url", cluster.url]) == 0
        assert f"{moved} is at s2, settled" in capsys.readouterr().out
        traffic.flows()
        totals = traffic.finish()
        assert totals.gaps == 0, traffic.gaps
