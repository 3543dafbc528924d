"""``rebalance``: what the balancer would do now, without an effect, and doing it at once."""

from __future__ import annotations

import re
from typing import Any

import pytest

from dynamoth_balancer.decide.cluster import Cluster, Move
from dynamoth_balancer.decide.spread import Spread
from dynamoth_balancer.install.leadership import Stage
from dynamoth_balancer.options import BalancerOptions
from tests.balancer.cluster import Balancer, SimCluster, started
from tests.balancer.traffic import CAPACITY

WAITS = r"the balancer waits between two plans \(wait_s\): (59|60)\.\d s are left"

PATIENT = BalancerOptions(wait_s=60.0, averaging_s=3.0, channel_rest_s=10.0)


def overload(cluster: SimCluster, balancer: Balancer, *ratios: float) -> list[bytes]:
    channels = balancer.at_home("s1", len(ratios))
    cluster.follow.update({name: round(ratio * CAPACITY) for name, ratio in zip(channels, ratios, strict=True)})
    return channels


def paused(servers: int = 2, options: BalancerOptions = PATIENT) -> tuple[SimCluster, Balancer]:
    cluster, balancer = started(servers, options)
    cluster.ask("pause")
    return cluster, balancer


def dry_run(cluster: SimCluster) -> dict[str, Any]:
    reply = cluster.ask("rebalance", {"dry_run": True})
    assert reply.error is None and reply.result["dry_run"]
    return dict(reply.result)


def test_a_dry_run_shows_moves_with_reason_and_load_and_begins_none() -> None:
    cluster, balancer = paused()
    overload(cluster, balancer, 0.5, 0.4)
    cluster.run(5)
    found = dry_run(cluster)
    assert (found["moves"], found["progress"], found["number"]) == (1, "preview", 0)
    [move] = found["first_moves"]
    assert (move["goal"], move["from"], move["to"]) == ("relieve", "s1", "s2") and "above 0.80" in move["reason"]
    for server, before, after in (("s1", 0.9, 0.4), ("s2", 0.0, 0.5)):
        ratios = found["servers"][server]
        assert ratios["load_ratio_before"] == pytest.approx(before)
        assert ratios["load_ratio_predicted"] == pytest.approx(after)
        assert found["load_ratios"][server] == {
            "before": ratios["load_ratio_before"],
            "predicted": ratios["load_ratio_predicted"],
            "measured": None,
        }
    assert found["obstacles"] == ["the balancer is paused: 'dynamoth resume' ends that"]
    assert not balancer.decided and balancer.plan.version == 1, "only the pause"
    assert dry_run(cluster)["first_moves"] == found["first_moves"]


def test_a_dry_run_says_why_the_balancer_does_nothing_by_itself() -> None:
    cluster, balancer = started(options=PATIENT)
    channels = overload(cluster, balancer, 0.5, 0.4)
    cluster.agents["s1"].listened.update(channels)
    cluster.run_until(lambda: bool(balancer.decided))
    waits, moving = dry_run(cluster)["obstacles"]
    assert re.fullmatch(WAITS, waits)
    assert moving == "channels and slots are in transition (1), and must settle first"
    assert cluster.refusal("rebalance") == f"no plan can be made now: {moving}; try again then"
    cluster.agents["s1"].listened.clear()
    cluster.run(5)
    assert dry_run(cluster)["obstacles"][1:] == []


def test_a_dry_run_does_not_change_what_goals_remember(monkeypatch: pytest.MonkeyPatch) -> None:
    class Remembers(Spread):
        asked = 0

        def propose(self, cluster: Cluster) -> list[Move]:
            self.asked += 1
            return super().propose(cluster)

    goal = Remembers()
    monkeypatch.setattr("dynamoth_balancer.machine.Spread", lambda: goal)
    options = BalancerOptions(wait_s=1.0, averaging_s=3.0, transitions_max=100, join_s=0.0)
    cluster = SimCluster(3)
    balancer = cluster.start(options, ["s1", "s2"])
    cluster.run_until(lambda: balancer.machine.stage is Stage.LEADING)
    cluster.ask("pause")
    assert cluster.ask("server", {"action": "add", "server": "s3", "url": "redis://s3"}).error is None
    cluster.run(5)
    asked = goal.asked
    assert dry_run(cluster)["moves"] == dry_run(cluster)["moves"] == options.transitions_max
    assert goal.asked == asked and balancer.plan.entries == {}
    assert cluster.ask("rebalance").result["moves"] == options.transitions_max
    assert goal.asked == asked + 1


def test_rebalance_does_it_now_and_answers_when_it_has_settled() -> None:
    cluster, balancer = paused()
    channels = overload(cluster, balancer, 0.5, 0.4)
    cluster.run(5)
    cluster.agents["s1"].listened.update(channels)
    cluster.admin("s1", "rebalance", {"timeout_s": 50.0}, request=4711)
    cluster.run(5)
    assert [decided.number for decided in balancer.decided] == [1] and balancer.machine.overview.transitions == 1
    assert not [reply for reply in cluster.servers["s1"].replies if reply.request == 4711]
    cluster.agents["s1"].listened.clear()
    cluster.run(5)
    [reply] = [reply for reply in cluster.servers["s1"].replies if reply.request == 4711]
    assert (reply.result["dry_run"], reply.result["number"], reply.result["moves"]) == (False, 1, 1)
    assert reply.result["progress"] in ("settled", "measured")
    assert cluster.ask("status").result["paused"], "it is still paused"
    cluster.run(30)
    assert len(balancer.decided) == 1


def test_rebalance_does_not_wait_between_two_plans_but_the_next_plan_waits() -> None:
    cluster, balancer = started(3, PATIENT)
    overload(cluster, balancer, 0.5, 0.4)
    cluster.run_until(lambda: bool(balancer.decided))
    cluster.run(8)
    more = balancer.at_home("s1", 3, b"more")
    cluster.follow.update(dict.fromkeys(more, round(0.2 * CAPACITY)))
    cluster.run(5)
    assert len(balancer.decided) == 1
    assert cluster.ask("rebalance").result["number"] == 2
    [waits] = dry_run(cluster)["obstacles"]
    assert re.fullmatch(WAITS, waits)


def test_rebalance_with_nothing_to_do_says_so_with_its_findings() -> None:
    cluster, balancer = paused()
    assert cluster.ask("rebalance").result["moves"] == 0
    overload(cluster, balancer, 0.95)
    cluster.run(5)
    result = cluster.ask("rebalance").result
    assert (result["moves"], result["number"], result["progress"]) == (0, 0, "no moves")
    assert "one server is too small for it" in result["findings"][0]["reason"]
    assert not balancer.decided


def test_a_move_that_does_not_settle_in_time_is_answered_as_it_is() -> None:
    cluster, balancer = paused()
    channels = overload(cluster, balancer, 0.5, 0.4)
    cluster.run(5)
    cluster.agents["s1"].listened.update(channels)
    assert cluster.ask("rebalance", {"timeout_s": 3.0}).result["progress"] == "in transition"


def test_a_server_that_takes_no_part_says_why() -> None:
    cluster, _ = paused(3)
    cluster.agents["s3"].alive = False
    cluster.run(20)
    found = dry_run(cluster)["servers"]
    assert found["s1"]["why_not"] == "" and "the agent of server s3 is not heard" in found["s3"]["why_not"]
    assert found["s3"]["load_ratio_before"] is None


@pytest.mark.parametrize("arguments", [{"dry_run": "yes"}, {"dry_run": 1}, {"timeout_s": 0}, {"timeout_s": "now"}])
def test_nonsense_is_refused(arguments: dict[str, Any]) -> None:
    cluster, balancer = paused()
    [name] = arguments
    assert name in cluster.refusal("rebalance", arguments)
    assert not balancer.plan.entries
