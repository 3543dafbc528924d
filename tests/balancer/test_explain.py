"""``explain``: why a channel is where it is and stays there, and what a server carries."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dynamoth.plan.compatibility import CompatibilityRule
from dynamoth.plan.plan import Mode
from dynamoth.plan.slots import slot_name, slot_number, slot_of
from dynamoth_balancer.options import BalancerOptions
from tests.balancer.cluster import Balancer, SimCluster, started
from tests.balancer.traffic import CAPACITY, Traffic

QUICK = BalancerOptions(wait_s=5.0, averaging_s=3.0, channel_rest_s=20.0)
IDLE = BalancerOptions(load_ratio_high=1000.0, replicas_max=1, averaging_s=3.0, channel_rest_s=20.0)


def explain(cluster: SimCluster, name: bytes, kind: str | None = None) -> dict[str, Any]:
    reply = cluster.ask("explain", {"name": name} | ({} if kind is None else {"kind": kind}))
    assert reply.error is None, reply.error
    return dict(reply.result)


def load(cluster: SimCluster, balancer: Balancer, *ratios: float, server: str = "s1") -> list[bytes]:
    channels = balancer.at_home(server, len(ratios))
    cluster.follow.update({name: round(ratio * CAPACITY) for name, ratio in zip(channels, ratios, strict=True)})
    return channels


def test_a_channel_at_home_shows_its_place_load_and_clients() -> None:
    cluster, balancer = started(options=QUICK)
    [channel] = balancer.at_home("s1")
    cluster.traffic[channel] = Traffic(20.0, 10, publishers=4, message_bytes=500)
    cluster.run(5)
    found = explain(cluster, channel)
    assert (found["kind"], found["servers"], found["mode"], found["phase"]) == ("channel", ["s1"], "single", "settled")
    assert (found["home"], found["placed_by"], found["since_s"]) == ("s1", "ring", None)
    assert found["slot"] == slot_number(slot_of(channel))
    rates = found["load"]
    assert rates["reported"] and rates["outgoing_bytes_per_s"]["s1"] == pytest.approx(100_000)
    assert rates["load_ratio"]["s1"] == pytest.approx(0.1)
    assert (rates["publications_per_s"], rates["publishers"], rates["subscribers"]) == (20.0, 4, 10.0)
    assert found["stays"] == ["nothing asks for a move: s1 has load ratio 0.10, and servers are relieved above 0.80"]
    assert found["next_move"] is None and found["moves"] == []


def test_a_moved_channel_shows_by_whom_and_why_and_that_it_rests() -> None:
    cluster, balancer = started(options=QUICK)
    load(cluster, balancer, 0.5, 0.4)
    cluster.run_until(lambda: bool(balancer.decided))
    [move] = balancer.decided[0].decision.moves
    cluster.run(4)
    found = explain(cluster, move.channel)
    assert (found["placed_by"], found["servers"], found["home"]) == ("entry", ["s2"], "s1")
    assert 4 <= found["since_s"] < 5
    [past] = found["moves"]
    assert (past["from"], past["to"], past["goal"], past["reason"]) == ("s1", "s2", "relieve", move.reason)
    assert found["stays"][0].startswith("it has moved lately and rests for 1")
    cluster.run(QUICK.channel_rest_s)
    cluster.ask("move", {"channel": move.channel, "to": "s1"})
    found = explain(cluster, move.channel)
    assert [past["goal"] for past in found["moves"]] == ["relieve", "administrator"]


def test_a_channel_in_transition_shows_what_it_waits_for() -> None:
    cluster, balancer = started(options=IDLE)
    [channel] = load(cluster, balancer, 0.3)
    cluster.agents["s1"].listened.add(channel)
    cluster.admin("s1", "move", {"channel": channel, "to": "s2"})
    cluster.run(3)
    found = explain(cluster, channel)
    assert (found["phase"], found["waiting_for"]) == ("active", ["subscribers to leave s1"])
    assert found["load"]["subscribers"] is None and found["load"]["outgoing_bytes_per_s"].keys() == {"s1", "s2"}
    assert found["stays"] == ["it is in transition, and settles before it can move again"]


def test_a_channel_that_follows_a_slot_that_was_moved_says_so() -> None:
    cluster, balancer = started(options=IDLE)
    [channel] = balancer.at_home("s1")
    slot = slot_of(channel)
    cluster.ask("move", {"channel": slot, "to": "s2"})
    found = explain(cluster, channel)
    assert (found["placed_by"], found["servers"], found["home"]) == ("slot", ["s2"], "s1")
    assert f"slot {slot_number(slot)}" in found["why"]
    assert [past["channel"] for past in found["moves"]] == [slot]
    of_slot = explain(cluster, slot_name(found["slot"]))
    assert (of_slot["placed_by"], of_slot["servers"]) == ("entry", ["s2"])
    cluster.agents["s2"].listened.add(slot)
    cluster.admin("s1", "move", {"channel": slot, "to": "s1"})
    cluster.run(2)
    found = explain(cluster, channel)
    assert found["stays"] == ["its slot is in transition, and settles before it can move again"]
    assert found["waiting_for"] == ["subscribers to leave s2"]


def test_plain_and_held_channels_say_why_they_stay() -> None:
    options = BalancerOptions(averaging_s=3.0, channel_rest_s=0.0, compatibility=(CompatibilityRule(b"old*", "s1"),))
    cluster, _ = started(options=options)
    found = explain(cluster, b"old")
    assert found["placed_by"] == "rule" and "'old*'" in found["why"]
    assert found["stays"] == ["plain Redis clients use it, so it stays at the server of its compatibility rule"]
    mode = {"mode": "all-publishers", "servers": ["s1", "s2"]}
    cluster.ask("replicate", {"channel": b"wide", **mode})
    found = explain(cluster, b"wide")
    assert found["stays"][0] == "an administrator has replicated it so, or put it back at one server"
    assert found["mode"] == Mode.ALL_PUBLISHERS.name.lower().replace("_", "-")


def test_a_channel_too_large_for_any_server_says_what_it_would_do_to_others() -> None:
    options = BalancerOptions(averaging_s=3.0, replicas_max=1)
    cluster, balancer = started(3, options)
    [channel, small] = load(cluster, balancer, 0.95, 0.0001)
    load(cluster, balancer, 0.5, server="s2")
    cluster.run(5)
    found = explain(cluster, channel)
    assert "one server is too small for it" in found["stays"][0]
    assert found["stays"][1:] == ["s2 would have load ratio 1.45", "s3 would have load ratio 0.95"]
    assert explain(cluster, small)["stays"][-1] == "it makes too little of the load of s1: less than 0.1%"


def test_a_channel_that_would_be_moved_shows_the_move_although_the_balancer_is_paused() -> None:
    cluster, balancer = started(options=QUICK)
    cluster.ask("pause")
    big, other = load(cluster, balancer, 0.5, 0.4)
    cluster.run(5)
    found = explain(cluster, big)
    assert (found["next_move"]["to"], found["stays"]) == ("s2", [])
    assert found["obstacles"] == ["the balancer is paused: 'dynamoth resume' ends that"]
    stays = explain(cluster, other)["stays"]
    assert stays == ["s2 could take it, but other channels go first"]
    assert not balancer.decided


def test_a_channel_that_hardly_relieves_its_server_says_so() -> None:
    cluster, balancer = started(2, BalancerOptions(averaging_s=3.0, replicas_max=1))
    *_, small = load(cluster, balancer, 0.43, 0.43, 0.01)
    load(cluster, balancer, 0.5, server="s2")
    cluster.run(5)
    found = explain(cluster, small)
    assert "not worth the moves" in found["stays"][0]
    assert found["stays"][1:] == ["s2 could take it, but that would not relieve s1 by enough"]
    assert not any(made.decision.moves for made in balancer.decided)


def test_a_channel_that_reports_do_not_name_says_so() -> None:
    cluster, _ = started(options=QUICK)
    cluster.run(5)
    found = explain(cluster, b"nobody")["load"]
    assert not found["reported"] and found["subscribers"] is None


def test_a_server_shows_its_load_its_channels_and_its_decisions() -> None:
    cluster, balancer = started(options=QUICK)
    first, second = load(cluster, balancer, 0.5, 0.4)
    cluster.run_until(lambda: bool(balancer.decided))
    cluster.run(8)
    found = explain(cluster, b"s2")
    assert (found["kind"], found["server"], found["why_not"], found["why_not_to"]) == ("server", "s2", "", "")
    assert found["status"]["load_ratio"] == pytest.approx(0.5)
    assert found["status"]["resource_ratios"]["outgoing"] == pytest.approx(0.5)
    [busiest] = found["busiest"]
    assert (busiest["channel"], busiest["servers"]) == (first, ["s2"]) and busiest["load_ratio"] == pytest.approx(0.5)
    [decision] = found["decisions"]
    assert (decision["number"], decision["progress"]) == (1, "measured")
    assert decision["measured"] == pytest.approx(decision["predicted"])
    [move] = decision["first_moves"]
    assert (move["channel"], move["from"], move["to"], move["goal"]) == (first, "s1", "s2", "relieve")
    assert "above 0.80" in move["reason"] and decision["load_ratios"].keys() == {"s1", "s2"}
    assert decision["load_ratios"]["s2"] == {each: decision[each] for each in ("before", "predicted", "measured")}
    [of_channel] = explain(cluster, first)["decisions"]
    assert of_channel["first_moves"] == [move] and of_channel["load_ratios"] == decision["load_ratios"]
    assert explain(cluster, second)["decisions"] == []
    assert found["slots"] == len(balancer.plan.ring.slots["s2"])
    assert [each["channel"] for each in explain(cluster, b"s1")["busiest"]] == [second]


def test_the_move_of_a_channel_leads_its_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamoth_balancer.admin.explain.MOVES_PER_DECISION_MAX", 1)
    cluster, balancer = started(options=QUICK)
    load(cluster, balancer, *[0.1] * 9)
    cluster.run_until(lambda: bool(balancer.decided))
    first, *_, last = balancer.decided[0].decision.moves
    for move in (first, last):
        [decision] = explain(cluster, move.channel)["decisions"]
        assert [shown["channel"] for shown in decision["first_moves"]] == [move.channel]
        assert decision["moves"] == len(balancer.decided[0].decision.moves)


def test_a_server_shows_findings_and_why_it_takes_no_part() -> None:
    cluster, balancer = started(3, BalancerOptions(averaging_s=3.0, draining=frozenset({"s3"}), replicas_max=1))
    load(cluster, balancer, 0.95)
    cluster.run(5)
    cluster.agents["s2"].alive = False
    cluster.run(10)
    [finding] = explain(cluster, b"s1")["findings"]
    assert finding["goal"] == "relieve" and finding["load_ratio"] == pytest.approx(0.95)
    assert "the agent of server s2 is not heard" in explain(cluster, b"s2")["why_not"]
    found = explain(cluster, b"s3")
    assert found["why_not"] == "" and "is being drained" in found["why_not_to"] and found["status"]["draining"]


def test_a_full_server_says_of_what() -> None:
    cluster, _ = started(options=QUICK)
    cluster.agents["s2"].amend = lambda report: replace(report, connections=95, connections_max=100)
    cluster.run(3)
    found = explain(cluster, b"s2")
    assert (found["why_not"], found["why_not_to"]) == ("", "it uses 0.95 of its connections")


def test_the_kind_decides_what_a_name_means() -> None:
    cluster, _ = started()
    assert explain(cluster, b"s1")["kind"] == "server"
    assert explain(cluster, b"s1", "channel")["kind"] == "channel"
    assert explain(cluster, b"s1", "server")["kind"] == "server"
    assert cluster.refusal("explain", {"name": b"s9", "kind": "server"}) == "server 's9' is not known; known are s1, s2"


@pytest.mark.parametrize("arguments", [{}, {"name": "s1"}, {"name": b""}, {"name": b"c", "kind": "slot"}])
def test_nonsense_is_refused(arguments: dict[str, Any]) -> None:
    cluster, _ = started()
    assert "explain takes the arguments name" in cluster.refusal("explain", arguments)


def test_channels_of_our_own_are_refused() -> None:
    cluster, _ = started()
    assert "is not an application's" in cluster.refusal("explain", {"name": b"__dynamoth__:agent"})
