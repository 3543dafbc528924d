"""Relief: it ends, never makes anything worse, and keeps its bounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamoth_broker.coordinator.model import LoadModel, Standing, User
from dynamoth_broker.coordinator.plan import Outcome
from dynamoth_broker.coordinator.relieve import ReliefLimits, Scheme, relieve
from dynamoth_sim.edge.published_balancing import greedy_shuffle
from tests.coordinator.worlds import own_interests, paper, placed, ratios, recomputed, routes, sharing

ANY = ReliefLimits(cov_max=0.0, ratio_mean_min=0.0, margin_ratio=0.0)
"""Any unevenness counts, and any improvement is worth a move."""

UNBOUNDED = 10**9

schemes = st.sampled_from(Scheme)


@st.composite
def small_worlds(draw: st.DrawFn) -> LoadModel:
    """Draw up to 3 brokers of any capacity, with up to 8 users who share some of 5 interests."""
    model = LoadModel(float(draw(st.integers(0, 3))))
    for interest in "abcde":
        model.set_rate(interest, float(draw(st.integers(0, 9))))
    # Powers of two: ratios are then as exact as the loads are.
    brokers = [f"b{number}" for number in range(draw(st.integers(1, 3)))]
    for broker in brokers:
        model.add_broker(broker, draw(st.sampled_from([1.0, 2.0, 4.0])))
    for number in range(draw(st.integers(0, 8))):
        model.attach(f"u{number}", draw(st.sampled_from(brokers)), sorted(draw(st.sets(st.sampled_from("abcde")))))
    return model


def best_of_all(model: LoadModel) -> float:
    """Return the least largest ratio of all assignments."""
    users, brokers = list(model.users), list(model.brokers)
    trial, least = model.copy(), ratios(model)[0]
    for assignment in product(brokers, repeat=len(users)):
        for user, broker in zip(users, assignment, strict=True):
            if trial.users[user].broker != broker:
                trial.move(user, broker)
        least = min(least, ratios(trial)[0])
    return least


@given(small_worlds(), schemes, st.sampled_from([0.0, 0.05, 0.3]), st.sampled_from([0.0, 0.15]))
def test_each_move_makes_the_sorted_loads_smaller(
    model: LoadModel, scheme: Scheme, margin: float, cov_max: float
) -> None:
    replayed = model.copy()
    limits = ReliefLimits(cov_max=cov_max, ratio_mean_min=0.0, margin_ratio=margin)
    plan = relieve(model, scheme, limits)
    assert len({move.user for move in plan.moves}) == len(plan.moves)
    before = ratios(replayed)
    assert plan.before.ratio_max == before[0]
    for move in plan.moves:
        source, target = replayed.brokers[move.source], replayed.brokers[move.target]
        assert (source.ratio, target.ratio) == (move.source_ratio.before, move.target_ratio.before)
        replayed.move(move.user, move.target)
        assert (source.ratio, target.ratio) == (move.source_ratio.after, move.target_ratio.after)
        assert move.target_ratio.after < move.source_ratio.before * (1 - margin) or margin == 0
        assert move.source_ratio.after < move.source_ratio.before > move.target_ratio.after
        after = ratios(replayed)
        assert after < before, "the sorted loads have not become smaller"
        before = after
    assert ratios(recomputed(model)) == ratios(model) == before
    assert plan.after == model.summary()
    assert (plan.outcome is Outcome.BALANCED) == (
        not limits.is_uneven(plan.after.ratio_max, plan.after.ratio_mean, plan.after.cov)
    )


@given(small_worlds(), schemes)
def test_a_plan_ends_only_when_no_user_that_has_not_moved_improves_anything(model: LoadModel, scheme: Scheme) -> None:
    plan = relieve(model, scheme, ANY)
    moved = {move.user for move in plan.moves}
    if plan.outcome is Outcome.NO_IMPROVING_MOVE:
        check_no_move_improves(model, [user for user in model.users.values() if user.id not in moved])


@given(small_worlds(), schemes)
def test_a_plan_without_moves_left_is_one_that_no_single_move_improves(model: LoadModel, scheme: Scheme) -> None:
    """Looked at anew, as the next plan does, with every user free to move: by brute force."""
    while relieve(model, scheme, ANY).moves:
        pass
    check_no_move_improves(model, model.users.values())


def check_no_move_improves(model: LoadModel, users: Iterable[User]) -> None:
    summary = model.summary()
    for user, target in product(users, model.brokers.values()):
        source = model.brokers[user.broker]
        if source.ratio > summary.ratio_mean > target.ratio and model.delta_remove(user) > 0:
            after = (target.load + model.delta_add(user.interests, target.id)) / target.capacity
            assert after >= source.ratio, f"{user.id} could go from {source.id} to {target.id}"


@pytest.mark.parametrize("seed", range(6))
def test_small_worlds_come_near_the_optimum(seed: int) -> None:
    """Brute force: the published bound of the greedy algorithm, 4/3, holds here without an overhaul, for most seeds."""
    model = paper(seed, users=6)
    for broker in [f"b{number}" for number in range(3, 10)]:
        for user in list(model.brokers[broker].known):
            model.move(user, "b0")
        del model.brokers[broker]
    best = best_of_all(model)
    while relieve(model, Scheme.LOAD, ANY).moves:
        pass
    assert best <= ratios(model)[0] <= 4 / 3 * best


@pytest.mark.parametrize("seed", [1, 2])
def test_small_alpha_is_as_good_as_the_published_shuffle_at_a_fifth_of_its_moves(seed: int) -> None:
    model = paper(seed)
    shuffled = greedy_shuffle(model)
    shuffle_moves = sum(model.users[user].broker != broker for user, broker in shuffled.items())
    shuffle_max = ratios(placed(model, shuffled))[0]
    limits = ReliefLimits(
        cov_max=0.005, ratio_mean_min=0.0, moves_max=UNBOUNDED, moves_in_max=UNBOUNDED, margin_ratio=0.0
    )
    plan = relieve(model, Scheme.LOAD, limits)
    assert plan.outcome is Outcome.BALANCED
    assert plan.after.ratio_max <= 1.01 * shuffle_max
    assert len(plan.moves) <= 0.2 * shuffle_moves


def test_similarity_lowers_loads_that_load_alone_does_not() -> None:
    limits = ReliefLimits(cov_max=0.15, ratio_mean_min=0.0, moves_max=UNBOUNDED, moves_in_max=UNBOUNDED)
    of_load, of_similarity = (
        relieve(paper(1, users=3000, regional=True), scheme, limits).after
        for scheme in (Scheme.LOAD, Scheme.SIMILARITY)
    )
    assert of_similarity.redis_egress < of_load.redis_egress
    assert of_similarity.ratio_max < of_load.ratio_max


def test_the_user_moves_who_fits_best() -> None:
    """Of 26 at a and 6 at b, 10 have to move: the user of 10, not the heaviest."""
    plan = relieve(own_interests({"a": [6.0, 5.0, 2.0], "b": [3.0]}), Scheme.LOAD, ANY)
    assert routes(plan) == [("a1", "a", "b")] and plan.outcome is Outcome.BALANCED


def test_similarity_decides_between_targets_and_ties_go_to_the_lowest_id() -> None:
    users = {"z": {"z0": "a", "z1": "b"}, "y": {"y0": "c"}, "x": {"x0": "d"}, "w": {"w0": "d"}}
    rates = {"a": 4.0, "b": 5.0, "c": 1.0, "d": 1.0}
    tied = relieve(sharing(rates, users), Scheme.SIMILARITY, ANY)
    assert tied.moves[0].target == "w"
    users["y"]["y0"] = "ca"
    similar = relieve(sharing({**rates, "b": 20.0}, users), Scheme.SIMILARITY, ANY)
    assert ("z0", "z", "y") in routes(similar)


def test_capacities_count() -> None:
    model = LoadModel()
    model.add_broker("large", 4.0)
    model.add_broker("small", 1.0)
    model.set_rate("k", 1.0)
    for number in range(10):
        model.attach(f"u{number}", "small" if number else "large", ("k",))
    relieve(model, Scheme.LOAD, ANY)
    assert [broker.ratio for broker in model.brokers.values()] == [2.5, 2.0]


@pytest.mark.parametrize("standing", [Standing.FULL, Standing.DRAINING, Standing.SUSPECT])
def test_only_open_brokers_are_targets(standing: Standing) -> None:
    model = own_interests({"a": [2.0] * 6, "b": [2.0], "c": []})
    model.brokers["c"].standing = standing
    plan = relieve(model, Scheme.LOAD, ANY)
    assert plan.moves and {move.target for move in plan.moves} == {"b"}


@pytest.mark.parametrize("standing", [Standing.DRAINING, Standing.SUSPECT])
def test_nobody_leaves_a_broker_that_does_not_count(standing: Standing) -> None:
    model = own_interests({"a": [2.0] * 6, "b": [2.0] * 3, "c": []})
    model.brokers["a"].standing = standing
    plan = relieve(model, Scheme.LOAD, ANY)
    assert plan.moves and {move.source for move in plan.moves} == {"b"}


def test_users_leave_a_full_broker() -> None:
    model = own_interests({"a": [2.0] * 6, "b": [2.0]})
    model.brokers["a"].standing = Standing.FULL
    assert len(relieve(model, Scheme.LOAD, ANY).moves) == 2


def test_a_plan_and_what_one_broker_gets_are_bounded() -> None:
    limits = ReliefLimits(cov_max=0.0, ratio_mean_min=0.0, moves_max=5, moves_in_max=3)
    bounded = relieve(own_interests({"a": [2.0] * 60, "b": [], "c": []}), Scheme.LOAD, limits)
    assert len(bounded.moves) == 5 and bounded.outcome is Outcome.PLAN_FULL
    bounded = relieve(own_interests({"a": [2.0] * 60, "b": []}), Scheme.LOAD, limits)
    assert Counter(move.target for move in bounded.moves) == {"b": 3} and bounded.outcome is Outcome.PLAN_FULL


def test_a_mean_below_beta_is_no_matter_but_one_overloaded_broker_is() -> None:
    loads = {f"b{number}": [0.3] for number in range(100)} | {"hot": [0.3, 0.2]}
    calm = ReliefLimits(cov_max=0.15, ratio_mean_min=0.9)
    assert relieve(own_interests(loads), Scheme.LOAD, calm).outcome is Outcome.BALANCED
    # One of 101 brokers hardly shows in the cov (0.07).
    spread = ReliefLimits(cov_max=0.15, ratio_mean_min=0.3)
    assert not relieve(own_interests(loads), Scheme.LOAD, spread).moves
    alert = ReliefLimits(cov_max=0.15, ratio_mean_min=0.3, ratio_high=0.95)
    loads["b7"] = [0.1]
    plan = relieve(own_interests(loads), Scheme.LOAD, alert)
    assert routes(plan) == [("hot1", "hot", "b7")] and plan.outcome is Outcome.BALANCED


def test_users_without_interests_count_by_their_connections() -> None:
    model = LoadModel(1.0)
    model.add_broker("a", 100.0)
    model.add_broker("b", 100.0)
    for number in range(10):
        model.attach(f"u{number}", "a", ())
    plan = relieve(model, Scheme.LOAD, ANY)
    assert len(plan.moves) == 5 and plan.after.cov == 0
