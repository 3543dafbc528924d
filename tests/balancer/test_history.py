"""What is remembered of decisions: which moves, and the load ratios before, predicted and measured."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from dynamoth.plan.plan import single
from dynamoth_balancer.decide.cluster import Decision, Finding, Move, Ratios
from dynamoth_balancer.decide.history import (
    CHANNELS_KEPT_MAX,
    DECISIONS_KEPT_MAX,
    MOVES_PER_CHANNEL_MAX,
    UNMEASURED_MAX,
    History,
    PastMove,
    Progress,
)
from dynamoth_balancer.decide.resources import Load
from dynamoth_balancer.options import BalancerOptions
from tests.balancer.cluster import Balancer, SimCluster, started
from tests.balancer.traffic import CAPACITY

AVERAGING_S = 10.0
QUICK = BalancerOptions(wait_s=5.0, averaging_s=3.0, channel_rest_s=10.0)


def move(channel: bytes, source: tuple[float, float], target: tuple[float, float], to: str = "s2") -> Move:
    ratios = {"s1": Ratios(*source), to: Ratios(*target)}
    return Move(channel, single("s1"), single(to), "too much", ratios, {"s1": Load(-1.0), to: Load(1.0)}, "relieve")


TWO = Decision((move(b"a", (0.9, 0.7), (0.1, 0.3)), move(b"b", (0.7, 0.6), (0.2, 0.3), "s3")))


def no_load(server: str, now: float) -> float | None:
    raise AssertionError(f"nothing is measured at {server}")


def test_a_decision_is_measured_once_averaging_s_after_its_last_move_has_settled() -> None:
    history = History(AVERAGING_S)
    made = history.add(TWO, 100.0)
    assert made.ratios == {"s1": (0.9, 0.6), "s2": (0.1, 0.3), "s3": (0.2, 0.3)}
    history.on_settled([b"a", b"else"], 101.0)
    assert (history.measure(no_load, 120.0), made.progress) == ([], Progress.IN_TRANSITION)
    history.on_settled([b"b"], 120.0)
    history.on_settled([b"b"], 125.0)
    assert (history.measure(no_load, 129.9), made.progress) == ([], Progress.SETTLED)
    history.check()
    measured: Mapping[str, float | None] = {"s1": 0.65, "s2": None, "s3": 0.2}
    assert history.measure(lambda server, now: measured[server], 130.0) == [made]
    assert (made.progress, made.measured) == (Progress.MEASURED, measured)
    assert history.measure(no_load, 500.0) == []


def test_what_another_balancer_may_complete_is_not_measured() -> None:
    history = History(AVERAGING_S)
    made = history.add(TWO, 1.0)
    history.end_term()
    history.on_settled([b"a", b"b"], 2.0)
    assert history.measure(no_load, 100.0) == [] and made.progress is Progress.NOT_MEASURED


def test_findings_and_refused_moves_are_not_measured() -> None:
    history = History(AVERAGING_S)
    finding = history.add(Decision((), (Finding("s1", 0.9, "too large"),)), 1.0)
    refused = history.add(TWO, 2.0)
    history.refuse(refused, "the agent of server s2 is not heard")
    history.on_settled([b"a", b"b"], 3.0)
    assert history.measure(no_load, 100.0) == []
    assert [(each.number, each.progress) for each in (finding, refused)] == [
        (1, Progress.NO_MOVES),
        (2, Progress.REFUSED),
    ]
    history.check()


def test_everything_is_bounded() -> None:
    history = History(AVERAGING_S)
    first = history.add(TWO, 0.0)
    for number in range(UNMEASURED_MAX):
        history.add(TWO, float(number))
    history.check()
    assert first.progress is Progress.NOT_MEASURED
    assert [made.number for made in history.decisions] == [
        *range(UNMEASURED_MAX + 2 - DECISIONS_KEPT_MAX, UNMEASURED_MAX + 2)
    ]
    past = PastMove(0.0, single("s1"), single("s2"), "relieve", "too much")
    for number in range(CHANNELS_KEPT_MAX + 1):
        for _ in range(MOVES_PER_CHANNEL_MAX + 1 if number == 1 else 1):
            history.add_move(b"%d" % number, past)
    assert history.moves_of(b"0") == [] and history.moves_of(b"1") == [past] * MOVES_PER_CHANNEL_MAX


# The machine.


def overload(cluster: SimCluster, balancer: Balancer, *ratios: float) -> list[bytes]:
    channels = balancer.at_home("s1", len(ratios))
    cluster.follow.update({name: round(ratio * CAPACITY) for name, ratio in zip(channels, ratios, strict=True)})
    return channels


def test_status_shows_what_was_predicted_and_measured() -> None:
    cluster, balancer = started(options=QUICK)
    channels = overload(cluster, balancer, 0.5, 0.4)
    cluster.agents["s1"].listened.update(channels)
    cluster.run_until(lambda: bool(balancer.decided))
    cluster.run(QUICK.averaging_s + 1)
    [decision] = cluster.ask("status").result["decisions"]
    assert decision["progress"] == "in transition" and decision["first_moves"][0]["goal"] == "relieve"
    assert {each["measured"] for each in decision["load_ratios"].values()} == {None}
    cluster.agents["s1"].listened.clear()
    cluster.run(QUICK.averaging_s + 2)
    [decision] = cluster.ask("status").result["decisions"]
    assert decision["progress"] == "measured"
    for server in ("s1", "s2"):
        ratios = decision["load_ratios"][server]
        assert ratios["measured"] == pytest.approx(ratios["predicted"]) and ratios["before"] != ratios["predicted"]
    loads = decision["first_moves"][0]["loads"]
    assert loads["s2"]["outgoing_bytes_per_s"] == -loads["s1"]["outgoing_bytes_per_s"] > 0


def test_what_was_measured_differs_from_the_prediction_when_the_load_has_changed() -> None:
    cluster, balancer = started(options=QUICK)
    channels = overload(cluster, balancer, 0.5, 0.4)
    cluster.run_until(lambda: bool(balancer.decided))
    cluster.follow[channels[0]] = cluster.follow[channels[1]] = round(0.2 * CAPACITY)
    cluster.run_until(lambda: cluster.ask("status").result["decisions"][-1]["progress"] == "measured")
    ratios = cluster.ask("status").result["decisions"][-1]["load_ratios"]
    assert ratios["s1"]["measured"] == pytest.approx(0.2, abs=0.02) and ratios["s1"]["predicted"] > 0.35
