"""Shuffles group users by interest, are worth their moves, and overload no broker on the way."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamoth_broker.coordinator.model import LoadModel, Standing
from dynamoth_broker.coordinator.plan import Outcome, Plan, Worth
from dynamoth_broker.coordinator.records import touched
from dynamoth_broker.coordinator.shuffle import ShuffleSettings, shuffle
from dynamoth_sim.edge.published_balancing import greedy_shuffle
from tests.coordinator.test_relieve import small_worlds
from tests.coordinator.worlds import own_interests, paper, placed, sharing

ALWAYS = Worth(gain_ratio_min=float("-inf"), move_cost_ratio=float("-inf"))
"""Every shuffle is worth it, so that tests see the moves."""

UNBOUNDED = ShuffleSettings(ratio_accept=float("inf"))


def check_on_the_way(model: LoadModel, plan: Plan, settings: ShuffleSettings) -> LoadModel:
    """Execute a plan batch by batch; check loads with users at both brokers, and return the model after it."""
    present = model.copy()
    for batch in plan.batches:
        assert 0 < len(batch) <= settings.batch_moves_max
        assert max(Counter(move.target for move in batch).values()) <= settings.batch_moves_in_max
        before = {broker.id: broker.ratio for broker in present.brokers.values()}
        for move in batch:
            present.arrive(move.user, move.target)
        for broker in present.brokers.values():
            assert broker.ratio <= max(settings.ratio_accept, before[broker.id]), f"{broker.id} is overloaded"
        for move in batch:
            assert move.source == present.users[move.user].broker != move.target
            present.depart(move.user, move.target)
    present.check()
    assert plan.after == present.summary()
    return present


def test_regional_interests_are_grouped() -> None:
    """At least a fifth less load than the published shuffle at the most loaded broker, and a third of its egress."""
    model = paper(1, regional=True)
    published = placed(model, greedy_shuffle(model)).summary()
    plan = shuffle(model, UNBOUNDED)
    assert plan.outcome is Outcome.BALANCED
    assert plan.after.ratio_max <= 0.8 * published.ratio_max
    assert plan.after.redis_egress <= published.redis_egress / 3
    check_on_the_way(model, plan, UNBOUNDED)


def test_uniform_interests_need_half_of_the_published_moves() -> None:
    model = paper(1)
    published = greedy_shuffle(model)
    moves = sum(model.users[user].broker != broker for user, broker in published.items())
    plan = shuffle(model, UNBOUNDED)
    assert len(plan.moves) <= moves / 2
    assert plan.after.ratio_max <= 1.05 * placed(model, published).summary().ratio_max


@given(small_worlds(), st.floats(0.0, 40.0), st.integers(1, 4), st.integers(1, 2))
def test_no_broker_is_overloaded_on_the_way(model: LoadModel, accept: float, moves: int, moves_in: int) -> None:
    settings = ShuffleSettings(
        ratio_accept=accept, batch_moves_max=moves, batch_moves_in_max=moves_in, worth=ALWAYS, stay_ratio=0.0
    )
    before = model.summary()
    plan = shuffle(model, settings)
    assert model.summary() == before, "the model has changed"
    check_on_the_way(model, plan, settings)
    assert len({move.user for move in plan.moves}) == len(plan.moves)


@given(small_worlds())
def test_moves_say_what_they_change(model: LoadModel) -> None:
    """One after the other, also within a batch: so a recording has the load ratios of a broker before and after all."""
    plan = shuffle(model, replace(UNBOUNDED, worth=ALWAYS))
    before = {broker.id: broker.ratio for broker in model.brokers.values()}
    after = {broker.id: broker.ratio for broker in check_on_the_way(model, plan, UNBOUNDED).brokers.values()}
    ratio = dict(before)
    for move in plan.moves:
        for broker, change in ((move.source, move.source_ratio), (move.target, move.target_ratio)):
            assert change.before == ratio[broker]
            ratio[broker] = change.after
    assert ratio == pytest.approx(after)
    changed = {move.source for move in plan.moves} | {move.target for move in plan.moves}
    assert touched(plan.moves) == {broker: (before[broker], ratio[broker]) for broker in changed}


def test_moves_that_wait_for_room_come_in_later_batches() -> None:
    """Two pairs change places. There is room for one user more at either broker."""
    model = sharing({"a": 9.0, "b": 9.0}, {"x": {"x0": "a", "x1": "b"}, "y": {"y0": "a", "y1": "b"}})
    settings = ShuffleSettings(ratio_accept=45.0, worth=ALWAYS, stay_ratio=0.0)
    plan = shuffle(model, settings)
    after = check_on_the_way(model, plan, settings)
    assert len(plan.batches) == 1 and [broker.inbound for broker in after.brokers.values()] == [9, 9]
    tight = replace(settings, ratio_accept=44.0)
    assert not shuffle(model, tight).moves, "no move has room, so all are left out"
    room = sharing({"a": 9.0, "b": 9.0, "c": 1.0}, {"x": {"x0": "a", "x1": "b"}, "y": {"y0": "a", "y1": "b"}, "z": {}})
    plan = shuffle(room, replace(settings, ratio_accept=46.0, batch_moves_in_max=1, batch_moves_max=1))
    assert len(plan.batches) == len(plan.moves) > 1


def test_a_shuffle_that_gains_too_little_is_not_made() -> None:
    even = paper(3, users=1000)
    balanced = placed(even, greedy_shuffle(even))
    plan = shuffle(balanced, UNBOUNDED)
    assert not plan.moves and plan.outcome is Outcome.NOT_WORTH_IT and plan.after == plan.before


def test_what_a_plan_is_worth() -> None:
    model = own_interests({"a": [2.0] * 8, "b": []})
    plan = shuffle(model, UNBOUNDED)
    assert len(plan.moves) == 4
    worth = Worth(gain_ratio_min=0.1, egress_weight=0.5, move_cost_ratio=0.2)
    assert worth.gain(plan) == 0.5 and worth.net_gain(plan, 8) == 0.4 and worth.is_worth_it(plan, 8)
    assert not replace(worth, gain_ratio_min=0.6).is_worth_it(plan, 8)
    assert not replace(worth, move_cost_ratio=1.0).is_worth_it(plan, 8)


def test_egress_alone_may_be_worth_it() -> None:
    users = {"x": {"x0": "ab", "x1": "cd"}, "y": {"y0": "ab", "y1": "cd"}}
    model = sharing(dict.fromkeys("abcd", 5.0), users)
    plan = shuffle(model, UNBOUNDED)
    assert (plan.before.redis_egress, plan.after.redis_egress) == (40, 20)
    assert not shuffle(model, replace(UNBOUNDED, worth=Worth(egress_weight=0.0, gain_ratio_min=0.5))).moves


def test_users_who_may_not_move_stay_and_suspect_brokers_take_no_part() -> None:
    model = own_interests({"a": [2.0] * 8, "b": [], "c": [2.0] * 20, "d": []})
    model.brokers["c"].standing = Standing.SUSPECT
    model.brokers["d"].standing = Standing.FULL
    plan = shuffle(model, replace(UNBOUNDED, worth=ALWAYS), lambda user: user not in {"a0", "a1"})
    assert {(move.source, move.target) for move in plan.moves} == {("a", "b")}
    assert {"a0", "a1"}.isdisjoint(move.user for move in plan.moves)


def test_a_shuffle_is_bounded_and_takes_from_the_most_loaded_first() -> None:
    model = own_interests({"a": [2.0] * 20, "b": [2.0] * 10, "c": [], "d": []})
    plan = shuffle(model, replace(UNBOUNDED, moves_max=5, worth=ALWAYS))
    assert plan.outcome is Outcome.PLAN_FULL and [move.source for move in plan.moves] == ["a"] * 5
    assert all(one.source_ratio.after == two.source_ratio.before for one, two in pairwise(plan.moves))


def test_totals_that_are_older_than_the_candidates_are_no_trouble() -> None:
    """A broker's reported load may be less than that of its candidates alone, who are taken out of it."""
    model = LoadModel(1.0)
    for broker in ("a", "b"):
        model.add_broker(broker, 100.0)
        model.set_totals(broker, load=10.0, inbound=5.0, users=2)
    model.set_rates({"k": 40.0})
    for number in range(4):
        broker = "ab"[number % 2]
        model.set_count(broker, "k", 2)
        model.introduce(f"u{number}", broker, ["k"])
    plan = shuffle(model, replace(UNBOUNDED, worth=ALWAYS))
    assert {move.user for move in plan.moves} <= {"u0", "u1", "u2", "u3"}
