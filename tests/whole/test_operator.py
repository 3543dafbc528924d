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
        [decision] = printed("explain", "s2")["decisions"]
        assert decision["progress"] == "measured" and decision["first_moves"] == done["first_moves"]
        assert decision["load_ratios"] == measured() == printed("explain", moved)["decisions"][0]["load_ratios"]
        assert main(["explain", moved, "--url", cluster.url]) == 0
        assert f"{moved} is at s2, settled" in capsys.readouterr().out
        traffic.flows()
        totals = traffic.finish()
        assert totals.gaps == 0, traffic.gaps


def test_a_pin_and_a_pause_outlive_the_balancer(capsys: pytest.CaptureFixture[str]) -> None:
    channel, other = channels_at("s1", 2)
    with LocalCluster(2, settings={"balancer.lease_s": 3.0}) as cluster:

        def run(*command: str) -> tuple[int, str, str]:
            code = main([*command, "--url", cluster.url])
            output, error = capsys.readouterr()
            return code, output, error

        def printed(*command: str) -> Any:
            code, output, _ = run(*command, "--json")
            assert code == 0
            return json.loads(output)

        with Traffic(cluster, [channel, other], publishers=1) as traffic:
            pinned = printed("pin", channel.decode(), "s2")
            assert (pinned["from"], pinned["to"], pinned["note"]) == ("s1", "s2", "")
            assert printed("pause")["paused"]
            assert cluster.balancer.stop() == 0
            code, text, _ = run("plan", "show")
            assert code == 0 and f"the balancer is paused\n  pinned: {channel.decode()} to s2" in text
            cluster.balancer.start()
            cluster.wait_ready()
            status = printed("status")["balancer"]
            assert status["paused"] and status["pinned_channels"] == [{"channel": channel.decode(), "servers": ["s2"]}]
            assert run("server", "drain", "s1")[0] == 0
            version = printed("plan", "show")["version"]
            for command, why in (
                (("pin", other.decode(), "s1"), "server s1 is being drained, and no channel can be pinned to it"),
                (("pin", other.decode(), "s9"), "server 's9' is not known; known are s1, s2: name one of them"),
                (("unpin", other.decode()), "is not pinned: 'dynamoth status' shows those that are"),
                (("plan", "move", channel.decode(), "--to", "s1"), "is pinned to s2: 'dynamoth unpin' ends that"),
            ):
                code, output, error = run(*command)
                assert (code, output) == (1, "") and why in error and error.count("\n") == 1
            shown = printed("plan", "show")
            assert (shown["version"], shown["paused"], shown["pins"]) == (version, True, {channel.decode(): ["s2"]})
            assert run("server", "undrain", "s1")[0] == 0
            assert printed("unpin", channel.decode())["servers"] == ["s2"]
            assert run("resume")[1].startswith("the balancer makes plans (plan version")
            assert not printed("status")["balancer"]["paused"]
            traffic.flows()
            assert traffic.finish().gaps == 0, traffic.gaps
