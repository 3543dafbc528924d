"""Channels move, by hand and by load, on real servers under real load: nothing is lost, repeated or reordered."""

from __future__ import annotations

from typing import Any

import pytest

from dynamoth_cli.local.cluster import LocalCluster
from tests.whole.harness import Traffic, channels_at, logged, move, until

pytestmark = pytest.mark.usefixtures("patient_subscribers")

LOAD_RATIO_HIGH = 0.8


def test_plain_publishers_at_either_server_are_heard_while_channels_move() -> None:
    [channel] = channels_at("s1", 1)
    with LocalCluster(2) as cluster, Traffic(cluster, [channel], publishers=1, plain=["s1", "s2"]) as traffic:
        for server in ("s2", "s1"):
            move(cluster, channel, server)
            traffic.flows()
        totals = traffic.finish()
        assert totals.gaps == 0, traffic.gaps
        assert totals.delivered >= 2 * totals.published
        causes = [line["cause"] for line in logged(cluster.balancer, "the plan has a new version")]
        assert causes[:2] == ["a new cluster", "an administrator's move"]


def test_the_balancer_moves_channels_away_from_an_overloaded_server_by_itself() -> None:
    channels = channels_at("s1", 12, servers=3)
    settings: dict[str, Any] = {
        "agent.report_interval_s": 0.3,
        "balancer.wait_s": 1.0,
        "balancer.averaging_s": 2.0,
        "balancer.channel_rest_s": 5.0,
    }
    # 12 channels, 20 messages per second, 2 subscribers, 600 bytes: about 290 KB/s, all of it at s1 at first.
    # Two servers below LR_high can send 250 KB/s.
    with (
        LocalCluster(3, outgoing_bytes_per_s_max=155_000, settings=settings) as cluster,
        Traffic(cluster, channels, publishers=1, interval_s=0.05, payload_bytes=550) as traffic,
    ):

        def moves_that_relieve() -> Any:
            status = cluster.ask_balancer("status")
            ratios = [server["load_ratio"] for server in status["servers"].values()]
            calm = status["moves_settled"] and not status["in_transition"]
            low = all(ratio is not None and ratio < LOAD_RATIO_HIGH for ratio in ratios)
            moves = [move for decision in status["decisions"] for move in decision["first_moves"]]
            return moves if calm and low and {move["to"] for move in moves} == {"s2", "s3"} else None

        # Seldom, as the answers are load too.
        moves = until(moves_that_relieve, "both others take channels, and every server is below LR_high", every_s=0.5)
        assert {move["from"] for move in moves} == {"s1"}
        assert max(move["load_ratio_from_before"] for move in moves) > LOAD_RATIO_HIGH
        assert len(logged(cluster.balancer, "decided to move a channel")) >= len(moves)
        traffic.flows()
        totals = traffic.finish()
        assert totals.gaps == 0, traffic.gaps


def test_a_server_that_is_short_of_cpu_is_relieved() -> None:
    """Its bytes, a thousandth of what a server can send, ask for nothing; most of the CPU it uses counts as all."""
    channels = channels_at("s1", 4)
    settings: dict[str, Any] = {
        "agent.report_interval_s": 0.3,
        "balancer.wait_s": 1.0,
        "balancer.averaging_s": 2.0,
        "balancer.channel_rest_s": 5.0,
    }
    used = _cpu_ratio(channels, settings)
    settings["balancer.cpu_ratio_max"] = used / 1.3
    with LocalCluster(2, settings=settings) as cluster, Traffic(cluster, channels, interval_s=0.01) as traffic:

        def moved() -> Any:
            status = cluster.ask_balancer("status")
            settled = status["moves_settled"] and not status["in_transition"]
            return settled and [move for decision in status["decisions"] for move in decision["first_moves"]]

        moves = until(moved, f"a channel leaves s1, which used {used:.4f} of a core", every_s=0.5)
        assert moves[0]["from"] == "s1" and "(of its CPU), above" in moves[0]["reason"]
        assert moves[0]["load_ratio_from_before"] > max(LOAD_RATIO_HIGH, moves[0]["load_ratio_to_after"])
        server = cluster.ask_balancer("status")["servers"]["s1"]
        assert server["resource_ratios"]["outgoing"] < 0.01
        traffic.flows()
        totals = traffic.finish()
        assert totals.gaps == 0, traffic.gaps


def _cpu_ratio(channels: list[bytes], settings: dict[str, Any]) -> float:
    """Return how much of a core the traffic costs s1 on this machine, which may be fast or slow."""
    with LocalCluster(2, settings=settings) as cluster, Traffic(cluster, channels, interval_s=0.01) as traffic:
        traffic.publishes(400)  # for longer than the balancer averages

        def average() -> Any:
            return cluster.ask_balancer("status")["servers"]["s1"]["resource_ratios"].get("cpu")

        return float(until(average, "the balancer knows the load of s1", every_s=0.5))
