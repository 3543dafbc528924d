"""The controller: what it decides when, and what it never does."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from dynamoth.edge.control import Candidates, InterestColumns
from dynamoth.errors import ConfigError
from dynamoth_broker.coordinator.controller import Controller, Stage
from dynamoth_broker.coordinator.events import (
    Answered,
    BrokerGone,
    Kind,
    MoveEnded,
    Reported,
    Tick,
)
from dynamoth_broker.coordinator.model import LoadModel, Standing
from dynamoth_broker.coordinator.placement import Newcomer, Reservations, ReservingPlacement
from dynamoth_broker.coordinator.plan import Outcome
from dynamoth_broker.coordinator.settings import CoordinatorSettings
from tests.coordinator.scripted_cluster import ScriptedCluster, report_of
from tests.coordinator.worlds import own_interests, paper, ratios

SETTINGS = CoordinatorSettings(connection_bytes_per_s=0.0, slow_half_life_s=0.1, ratio_mean_min=0.2)
"""Looks at 0, 5, 10 s; what three of them ask for is decided. Averages show nearly what the latest report does."""


def uneven(users: int = 40, capacity: float = 100.0) -> LoadModel:
    """Three brokers; the users of a have a cov of 0.4 (relief), or with 60 users 0.6 (shuffle)."""
    return with_capacity(own_interests({"a": [1.0] * users, "b": [1.0] * 20, "c": [1.0] * 15}), capacity)


def with_capacity(model: LoadModel, capacity: float) -> LoadModel:
    for broker in model.brokers.values():
        broker.capacity = capacity
    return model


def test_relief_comes_at_the_third_look_in_a_row_at_which_it_is_due() -> None:
    cluster = ScriptedCluster(uneven(), SETTINGS)
    cluster.run(10)
    assert not cluster.asks and cluster.controller.explain(cluster.now).looks == 2
    cluster.run(1)
    [made, settled] = cluster.records
    assert (made.number, made.at, made.kind, made.moved) == (1, 10.0, Kind.RELIEVE, 0)
    assert "cov 0.4" in made.reason and made.plan.outcome is Outcome.BALANCED
    assert settled.moved == len(made.plan.moves) == len(cluster.batches[0].moves) > 0 and not settled.failed
    assert [ask.broker for ask in cluster.asks] == ["a"], "only brokers above the mean are asked"
    assert ratios(cluster.model)[0] == pytest.approx(made.plan.after.ratio_max)


def test_a_peak_at_one_look_is_no_reason() -> None:
    cluster = ScriptedCluster(uneven(), SETTINGS)
    cluster.run(8)
    for user in [f"a{number}" for number in range(20)]:
        cluster.model.detach(user)
    cluster.run(60)
    assert not cluster.asks


def test_the_effect_is_measured_once_all_have_reported_and_nothing_more_is_moved() -> None:
    cluster = ScriptedCluster(uneven(), replace(SETTINGS, slow_half_life_s=60.0))
    cluster.run(300)
    assert len(cluster.batches) == 1, "averages follow moves at once, so the old load is not moved twice"
    assert len(cluster.records) == 3, "made, settled and measured"
    measured = cluster.records[-1].measured
    assert measured is not None and measured.ratio_max == pytest.approx(cluster.records[-1].plan.after.ratio_max)


def test_after_a_plan_it_waits() -> None:
    settings = replace(SETTINGS, moves_per_plan_max=4, wait_s=20.0)
    cluster = ScriptedCluster(uneven(), settings)
    first = cluster.run_until_decided()
    second = cluster.run_until_decided(2)
    assert first.plan.outcome is Outcome.PLAN_FULL
    assert second.at - first.at == 20.0 + 3 * settings.decide_s - 5.0
    waiting = cluster.controller.explain(cluster.now).obstacles
    assert any("wait_s" in obstacle for obstacle in waiting)


def test_users_rest_after_a_move() -> None:
    settings = replace(SETTINGS, rest_s=1000.0)
    cluster = ScriptedCluster(uneven(), settings)
    moved = {move.user for move in cluster.run_until_decided().plan.moves}
    for user in list(cluster.model.users):
        if cluster.model.users[user].broker != "c" and user not in moved:
            cluster.model.detach(user)
    for number in range(30):
        cluster.model.set_rate(f"new{number}", 1.0)
        cluster.model.attach(f"new{number}", "c", (f"new{number}",))
    again = cluster.run_until_decided(2)
    assert again.plan.moves and moved.isdisjoint(move.user for move in again.plan.moves)


def regional() -> LoadModel:
    """Ten very unevenly loaded brokers, four of them empty, whose users have the interests of their region."""
    model = with_capacity(paper(1, users=2000, regional=True), 350e6)
    for user in [user for broker in ("b6", "b7", "b8", "b9") for user in model.brokers[broker].known]:
        model.move(user, "b0")
    summary = model.summary()
    assert summary.cov > SETTINGS.shuffle_cov_min and summary.ratio_mean > SETTINGS.shuffle_ratio_mean_min
    return model


def test_a_shuffle_moves_batch_by_batch() -> None:
    settings, model = replace(SETTINGS, moves_per_plan_max=100), regional()
    before = model.summary()
    cluster = ScriptedCluster(model, settings)
    decision = cluster.run_until_decided()
    assert decision.kind is Kind.SHUFFLE and len(cluster.asks) == 6
    assert [batch.moves for batch in cluster.batches] == list(decision.plan.batches) and len(cluster.batches) > 5
    after = cluster.model.summary()
    assert after.redis_egress < 0.8 * before.redis_egress and after.ratio_max < before.ratio_max / 2
    assert decision.moved == len(decision.plan.moves)


def test_relief_is_preferred_where_a_shuffle_brings_no_more() -> None:
    """Nobody shares anything: a shuffle could only even out what relief evens out with fewer moves."""
    cluster = ScriptedCluster(uneven(users=200, capacity=300.0), replace(SETTINGS, cov_target=0.01))
    decision = cluster.run_until_decided()
    assert decision.plan.before.cov > SETTINGS.shuffle_cov_min and "very uneven" in decision.reason
    assert decision.kind is Kind.RELIEVE


def test_suspect_brokers_take_no_part() -> None:
    cluster = ScriptedCluster(uneven(), replace(SETTINGS, report_s=0.5))
    cluster.run(2)
    cluster.silent.add("c")
    decision = cluster.run_until_decided()
    assert decision.plan.moves and {move.target for move in decision.plan.moves} == {"b"}
    explained = cluster.controller.explain(cluster.now)
    assert explained.suspects == ("c",) and explained.brokers["c"][1] == "SUSPECT"


def test_nothing_is_decided_while_most_brokers_are_silent() -> None:
    cluster = ScriptedCluster(uneven(), SETTINGS)
    cluster.run(2)
    cluster.silent |= {"b", "c"}
    cluster.run(60)
    assert not cluster.asks
    [obstacle] = cluster.controller.explain(cluster.now).obstacles
    assert "most brokers" in obstacle and "b, c" in obstacle


def test_no_decision_goes_by_reports_from_before_a_plan_settled() -> None:
    cluster = ScriptedCluster(uneven(), replace(SETTINGS, suspect_reports=300, wait_s=0.0, moves_per_plan_max=4))
    cluster.run_until_decided()
    cluster.silent.add("b")
    cluster.run(60)
    assert len(cluster.records) == 2 and any("b" in why for why in cluster.controller.explain(cluster.now).obstacles)
    cluster.silent.clear()
    cluster.run(30)
    assert cluster.records[-1].number > 1


def test_a_broker_that_does_not_answer_is_not_waited_for() -> None:
    model = with_capacity(own_interests({"a": [1.0] * 40, "b": [1.0] * 40, "c": [1.0] * 15}), 100.0)
    cluster = ScriptedCluster(model, SETTINGS)
    cluster.run(10)
    cluster.silent.add("b")
    cluster.run(1)
    assert cluster.controller.stage is Stage.ASKING
    decision = cluster.run_until_decided()
    assert decision.at == 12.0 and {move.source for move in decision.plan.moves} == {"a"}


def test_late_and_foreign_answers_are_ignored() -> None:
    cluster = ScriptedCluster(uneven(), SETTINGS)
    cluster.send(Answered(0, Candidates("a", (), InterestColumns())))
    cluster.run(10)
    cluster.silent.add("a")
    cluster.run(1)
    for request, broker in ((0, "a"), (1, "b"), (2, "a")):
        cluster.send(Answered(request, Candidates(broker, (), InterestColumns())))
        assert cluster.controller.stage is Stage.ASKING
    cluster.send(BrokerGone("a"))
    assert cluster.controller.stage is Stage.WATCHING and cluster.records[-1].plan.moves == ()


def test_paused_it_decides_nothing_and_asks_nobody() -> None:
    cluster = ScriptedCluster(uneven(), SETTINGS)
    cluster.controller.obey(True, frozenset())
    cluster.run(60)
    assert not cluster.asks and "decisions are paused" in cluster.controller.explain(cluster.now).obstacles
    assert "uneven" in cluster.controller.explain(cluster.now).due
    cluster.controller.obey(False, frozenset())
    assert cluster.run_until_decided().plan.moves


def test_a_pause_while_candidates_are_awaited_ends_the_decision() -> None:
    cluster = ScriptedCluster(uneven(), SETTINGS)
    cluster.run(10)
    cluster.silent.add("a")
    cluster.run(1)
    cluster.controller.obey(True, frozenset())
    cluster.run(5)
    assert cluster.controller.stage is Stage.WATCHING and not cluster.records


def test_pinned_users_stay() -> None:
    cluster = ScriptedCluster(uneven(), SETTINGS)
    cluster.controller.obey(False, frozenset(f"a{number}" for number in range(40)))
    decision = cluster.run_until_decided()
    assert not decision.plan.moves and decision.plan.outcome is Outcome.NO_IMPROVING_MOVE
    cluster.controller.obey(False, frozenset())
    assert cluster.run_until_decided(2).plan.moves


def test_a_dry_run_moves_nobody() -> None:
    cluster = ScriptedCluster(uneven(), replace(SETTINGS, dry_run=True))
    before = ratios(cluster.model)
    decision = cluster.run_until_decided()
    assert decision.is_dry_run and decision.plan.moves and not cluster.batches and ratios(cluster.model) == before
    cluster.run_until_decided(2)
    assert all(record.measured is None for record in cluster.records)


def test_users_who_refuse_or_never_come_count_as_failed() -> None:
    cluster = ScriptedCluster(uneven(), SETTINGS)
    cluster.refusing = {f"a{number}" for number in range(10)}
    cluster.stuck = {f"a{number}" for number in range(10, 39)}
    cluster.run(11)
    assert cluster.controller.stage is Stage.MOVING
    decision = cluster.run_until_decided()
    assert decision.failed + decision.moved == len(decision.plan.moves) and decision.failed
    assert cluster.now >= decision.at + SETTINGS.batch_timeout_s
    late = decision.plan.moves[0].user
    cluster.send(MoveEnded(late, moved=True))
    assert cluster.records[-1] == decision


def test_later_batches_leave_out_brokers_that_have_become_unfit() -> None:
    model = regional()
    cluster = ScriptedCluster(model, replace(SETTINGS, moves_per_plan_max=100, batch_timeout_s=5.0))
    cluster.run(10)
    cluster.stuck = set(model.users)
    cluster.run(1)
    planned = cluster.controller.decisions[-1].plan
    assert len(planned.batches) > 1, "the test needs a second batch"
    target = next(move.target for move in planned.batches[1])
    cluster.edit = lambda report: replace(report, is_admitting=report.broker != target)
    cluster.stuck = set()
    cluster.run(7)
    assert len(cluster.batches) > 1
    assert all(move.target != target for batch in cluster.batches[1:] for move in batch.moves)
    assert cluster.records[-1].failed + cluster.records[-1].moved == len(planned.moves)


def test_a_broker_without_admission_or_draining_gets_nobody() -> None:
    cluster = ScriptedCluster(uneven(), SETTINGS)
    cluster.edit = lambda report: replace(report, is_draining=report.broker == "c")
    assert {move.target for move in cluster.run_until_decided().plan.moves} == {"b"}
    assert cluster.controller.fleet.standing("c", cluster.now) is Standing.DRAINING


def test_implausible_reports_are_refused() -> None:
    cluster = ScriptedCluster(uneven(), SETTINGS)
    good = report_of(cluster.model, cluster.model.brokers["a"])
    bad = [
        replace(good, load_bytes_per_s=math.nan),
        replace(good, capacity_bytes_per_s=0.0),
        replace(good, inbound_bytes_per_s=-1.0),
        replace(good, users=-1),
        replace(good, interests=InterestColumns(("k",), (1.0,), ())),
        replace(good, interests=InterestColumns(("k",), (math.inf,), (1,))),
    ]
    for report in bad:
        cluster.send(Reported(report))
    assert len(cluster.refusals) == len(bad) and not len(cluster.controller.fleet)


def test_placement_goes_by_reports_and_reservations() -> None:
    reservations = Reservations(appear_s=SETTINGS.appear_s)
    controller = Controller(SETTINGS, ReservingPlacement(reservations), 0.0, reservations)
    assert controller.place(Newcomer(id="n"), 0.0) is None
    model = uneven()
    for broker in model.brokers.values():
        controller.handle(Reported(report_of(model, broker)), 1.0)
    targets = [controller.place(Newcomer(id=f"n{number}"), 1.0) for number in range(45)]
    assert [targets.count(broker) for broker in "abc"] == [0, 20, 25], "as if each was a mean user"
    for broker in model.brokers.values():
        controller.handle(Reported(report_of(model, broker)), 40.0)
    assert controller.reservations.count("b") == 0
    controller.handle(BrokerGone("c"), 41.0)
    assert controller.place(Newcomer(id="n"), 41.0) == "b"


def test_without_brokers_nothing_happens() -> None:
    controller = Controller(SETTINGS, ReservingPlacement(Reservations()), 0.0)
    for now in (0.0, 3.0, 5.0, 10.0):
        assert controller.handle(Tick(), now) == []
    assert controller.deadline() == 15.0 and controller.explain(10.0).loads.cov == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"looks": 0},
        {"cov_max": 0.5},
        {"ratio_mean_min": 0.5},
        {"wait_s": -1.0},
        {"cov_target": 0.2},
        {"margin_ratio": 2.0},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_settings_are_checked(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        replace(CoordinatorSettings(), **wrong)  # type: ignore[arg-type] # each is of the type of its field
