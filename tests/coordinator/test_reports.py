"""Decisions by reports and candidates: bounded, and nearly as good as with every user in one model."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamoth.edge.control import (
    INTERESTS_MAX,
    USER_LOAD_CLASSES,
    BrokerReport,
    Candidate,
    Candidates,
    InterestColumns,
)
from dynamoth_broker.candidates import busiest, choose_candidates, user_load_class
from dynamoth_broker.coordinator.fleet import Fleet
from dynamoth_broker.coordinator.model import LoadModel, Standing
from dynamoth_broker.coordinator.relieve import ReliefLimits, Scheme, relieve
from dynamoth_broker.coordinator.reports import ANY_LOAD, Total, build_model, users_for
from dynamoth_broker.coordinator.settings import CoordinatorSettings
from tests.coordinator.scripted_cluster import ScriptedCluster, report_of
from tests.coordinator.test_relieve import small_worlds
from tests.coordinator.worlds import own_interests, paper, ratios

REPORT = BrokerReport(broker="a", capacity_bytes_per_s=100.0, load_bytes_per_s=40.0, inbound_bytes_per_s=10.0, users=10)


def everything(model: LoadModel) -> list[Candidates]:
    """Return all users of a model as candidates."""
    return [
        choose_candidates(
            broker.id,
            ((user.id, user.interests) for user in broker.known.values()),
            {interest: model.rate(interest) for interest in broker.counts},
            broker.counts,
            (ANY_LOAD, len(broker.known)),
        )
        for broker in model.brokers.values()
    ]


@given(small_worlds())
def test_with_every_user_as_candidate_the_model_is_the_full_one(model: LoadModel) -> None:
    totals: list[Total] = []
    for broker in model.brokers.values():
        report = report_of(model, broker)
        totals.append(Total(report, Standing.OPEN, report.load_bytes_per_s))
    built = build_model(totals, everything(model), connection_bytes_per_s=model.connection_bytes_per_s)
    built.check()
    assert built.summary() == model.summary()
    assert {user.id: (user.broker, user.interests) for user in built.users.values()} == {
        user.id: (user.broker, user.interests) for user in model.users.values()
    }
    for user in model.users.values():
        assert built.delta_remove(built.users[user.id]) == model.delta_remove(user)
        for name in model.brokers:
            assert built.delta_add(user.interests, name) == model.delta_add(user.interests, name)


@pytest.mark.parametrize("scheme", Scheme)
def test_a_decision_by_reports_is_nearly_that_of_the_full_model(scheme: Scheme) -> None:
    """10,000 users at ten brokers, of whom 2,500 are candidates. No report names all interests of its broker."""
    model = paper(1, regional=True)
    for broker in model.brokers.values():
        broker.capacity = 900e6
    settings = CoordinatorSettings(
        scheme=scheme,
        looks=1,
        connection_bytes_per_s=0.0,
        candidates_max=2500,
        moves_per_plan_max=10**6,
        moves_in_max=10**6,
        shuffle_cov_min=5.0,
    )
    limits = replace(settings.relief, margin_ratio=0.0)
    full = model.copy()
    relieve(full, scheme, limits)
    cluster = ScriptedCluster(model, settings, report_of=lambda model, broker: report_of(model, broker, 500))
    decision = cluster.run_until_decided()
    assert sum(ask.users_max for ask in cluster.asks) <= 2500 + len(cluster.asks)
    assert decision.plan.after.ratio_max <= 1.05 * ratios(full)[0]
    # What was predicted is an upper bound, as nobody says that a target holds an interest with a low rate.
    assert model.summary().ratio_max <= decision.plan.after.ratio_max * (1 + 1e-9)


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=200), st.floats(0.01, 1.0))
def test_the_classes_of_loads_tell_how_many_users_have_to_be_asked(loads: list[int], part: float) -> None:
    classes = [0] * USER_LOAD_CLASSES
    for load in loads:
        classes[user_load_class(load)] += 1
    wanted = part * sum(loads)
    needed, total = 0, 0
    for load in sorted(loads, reverse=True):
        if total >= wanted / 2:
            break
        total += load
        needed += 1
    assert needed <= users_for(wanted, classes) <= len(loads), "classes are powers of two: right within a factor of two"


@pytest.mark.parametrize(("load", "number"), [(0.0, 0), (0.9, 0), (1.0, 1), (3.9, 2), (4.0, 3), (1e300, 47)])
def test_classes_of_user_loads(load: float, number: int) -> None:
    assert user_load_class(load) == number


def test_candidates_are_heavy_but_not_too_heavy_and_some_of_all_sizes() -> None:
    rates = {f"k{number}": float(number) for number in range(1, 101)}
    users = [(f"u{number:03}", (f"k{number}",)) for number in range(1, 101)]
    answer = choose_candidates("a", users, rates, dict.fromkeys(rates, 1), (60.0, 10))
    sizes = [rates[candidate.interests[0]] for candidate in answer.users]
    assert sizes[:3] == [60, 59, 58], "the heaviest that are not above 60, until there are 120 together"
    assert len(sizes) == len(set(sizes)) == 10 and max(sizes[3:]) > 90 and min(sizes[3:]) < 20
    assert answer.interests.ids == tuple(candidate.interests[0] for candidate in answer.users)
    assert answer.interests.rates == tuple(sizes) and set(answer.interests.users) == {1}
    everybody = choose_candidates("a", users, rates, {}, (ANY_LOAD, 10))
    assert [rates[candidate.interests[0]] for candidate in everybody.users] == list(range(100, 90, -1))
    assert choose_candidates("a", [], rates, {}, (60.0, 10)).users == ()


def test_a_report_names_the_interests_with_the_highest_rates() -> None:
    counts = {f"k{number}": number + 1 for number in range(3000)}
    rates = {interest: 1.0 / count for interest, count in counts.items()}
    columns = busiest(rates, counts)
    assert len(columns.ids) == INTERESTS_MAX and columns.ids[:2] == ("k0", "k1") and columns.users[:2] == (1, 2)


def test_the_tightest_resource_makes_the_load_ratio() -> None:
    """At 40% of its bytes, the broker has used 80% of its CPU: so much more load would be all."""
    report = replace(REPORT, other_ratio_max=0.8)
    [broker] = build_model([Total(report, Standing.OPEN, 40.0)]).brokers.values()
    assert (broker.load, broker.ratio) == (40, 0.8)
    [broker] = build_model([Total(report, Standing.OPEN, 40.0)], connection_bytes_per_s=5.0).brokers.values()
    assert (broker.load, broker.capacity) == (90, 100), "bytes are the tightest"
    [broker] = build_model([Total(report, Standing.OPEN, 0.0)]).brokers.values()
    assert (broker.load, broker.capacity) == (0, 100)


def test_doubtful_answers_change_nothing_that_they_should_not() -> None:
    """A user whom two brokers offer, a count that is too low, a broker that is gone."""
    users = (Candidate("u", ("k",)), Candidate("v", ("k",)))
    answers = [
        Candidates("a", users, InterestColumns(("k",), (7.0,), (1,))),
        Candidates("b", users[:1], InterestColumns(("k",), (5.0,), (1,))),
        Candidates("gone", (Candidate("w", ()),), InterestColumns()),
    ]
    totals = [Total(replace(REPORT, broker=broker, users=1), Standing.OPEN, 40.0) for broker in "ab"]
    model = build_model(totals, answers)
    model.check()
    assert {user.id: user.broker for user in model.users.values()} == {"u": "a", "v": "a"}
    assert model.brokers["a"].counts == {"k": 2} and model.rate("k") == 7 and model.brokers["a"].users == 2
    model.move("u", "b")
    model.check()


def test_averages_follow_reports_by_their_half_lives_and_moves_at_once() -> None:
    fleet = Fleet(CoordinatorSettings(connection_bytes_per_s=0.0, fast_half_life_s=10.0, slow_half_life_s=60.0))
    fleet.report(REPORT, 0.0)
    fleet.report(replace(REPORT, load_bytes_per_s=80.0), 10.0)
    assert fleet.for_placement(10.0).brokers["a"].load == 60
    slow = fleet.for_moves(10.0).brokers["a"].load
    assert slow == pytest.approx(80 - 40 * 0.5 ** (1 / 6))
    fleet.report(replace(REPORT, load_bytes_per_s=0.0), 20.0)
    assert fleet.for_placement(20.0).brokers["a"].load == pytest.approx(slow * 0.5 ** (1 / 6)), "the larger of the two"
    fleet.shift("a", -5.0)
    assert fleet.for_moves(20.0).brokers["a"].load == pytest.approx(slow * 0.5 ** (1 / 6) - 5)
    fleet.shift("a", -1000.0)
    fleet.shift("unknown", 5.0)
    assert fleet.for_moves(20.0).brokers["a"].load == 0


def test_placement_knows_which_interests_a_broker_reports() -> None:
    fleet = Fleet(CoordinatorSettings(connection_bytes_per_s=0.0))
    fleet.report(replace(REPORT, interests=InterestColumns(("k", "l"), (5.0, 3.0), (2, 0))), 0.0)
    model = fleet.for_placement(0.0)
    assert model.delta_add(("k",), "a") == 5 and model.brokers["a"].counts == {"k": 2}
    assert not fleet.for_moves(0.0).brokers["a"].counts, "the model of a decision has what candidates are interested in"


def test_standings() -> None:
    fleet = Fleet(CoordinatorSettings(report_s=1.0, suspect_reports=3))
    assert fleet.standing("a", 0.0) is Standing.SUSPECT
    fleet.report(REPORT, 0.0)
    assert fleet.standing("a", 3.0) is Standing.OPEN and fleet.standing("a", 3.1) is Standing.SUSPECT
    for report, standing in (
        (replace(REPORT, is_admitting=False), Standing.FULL),
        (replace(REPORT, other_ratio_max=1.0), Standing.FULL),
        (replace(REPORT, is_draining=True), Standing.DRAINING),
    ):
        fleet.report(report, 4.0)
        assert fleet.standing("a", 4.0) is standing
    fleet.forget("a")
    assert fleet.latest("a") is None and fleet.suspects(4.0) == []


def test_relief_with_few_candidates_does_what_these_allow() -> None:
    model = own_interests({"a": [2.0] * 20, "b": []})
    totals = [Total(report_of(model, broker), Standing.OPEN, broker.load) for broker in model.brokers.values()]
    [answer, _] = everything(model)
    few = build_model(totals, [replace(answer, users=answer.users[:3])])
    plan = relieve(few, Scheme.LOAD, ReliefLimits(cov_max=0.0, ratio_mean_min=0.0))
    assert len(plan.moves) == 3 and [broker.load for broker in few.brokers.values()] == [68, 12]


def average_for_moves(fleet: Fleet) -> float:
    """Return the average that moves go by."""
    return fleet.for_moves(10.0).brokers["a"].load


def test_a_move_changes_the_part_of_an_average_that_shows_the_user() -> None:
    fleet = Fleet(CoordinatorSettings(connection_bytes_per_s=0.0, slow_half_life_s=10.0))
    fleet.report(replace(REPORT, load_bytes_per_s=0.0), 0.0)
    fleet.report(replace(REPORT, load_bytes_per_s=80.0), 10.0)
    assert average_for_moves(fleet) == 40.0, "half of the users are in the average"
    for left in (30.0, 20.0, 10.0):
        fleet.shift("a", -20.0)
        assert average_for_moves(fleet) == pytest.approx(left), "a quarter of the load has moved away"
    fleet.shift("a", 20.0)
    assert average_for_moves(fleet) == pytest.approx(30.0), "a user that arrives shows at once"


def test_a_move_changes_the_whole_of_an_average_that_shows_more_than_the_latest_report() -> None:
    fleet = Fleet(CoordinatorSettings(connection_bytes_per_s=0.0, slow_half_life_s=10.0))
    fleet.report(replace(REPORT, load_bytes_per_s=80.0), 0.0)
    fleet.report(replace(REPORT, load_bytes_per_s=40.0), 10.0)
    fleet.shift("a", -20.0)
    assert average_for_moves(fleet) == 40.0
