"""The loads of brokers: equations 1 to 8 of BAD, and that they stay right while users come, go and move."""

from __future__ import annotations

from dataclasses import astuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamoth_broker.coordinator.model import LoadModel, Standing, cov, mean
from tests.coordinator.worlds import own_interests, recomputed, sharing

INTERESTS = "abcdef"

operations = st.lists(
    st.one_of(
        st.tuples(st.just("attach"), st.integers(0, 7), st.integers(0, 2), st.sets(st.sampled_from(INTERESTS))),
        st.tuples(st.just("move"), st.integers(0, 7), st.integers(0, 2), st.none()),
        st.tuples(st.just("detach"), st.integers(0, 7), st.none(), st.none()),
        st.tuples(st.just("rate"), st.sampled_from(INTERESTS), st.integers(0, 1000), st.none()),
    ),
    max_size=40,
)


def figures(model: LoadModel) -> dict[str, tuple[float, float, int, dict[str, int]]]:
    return {broker.id: (broker.load, broker.inbound, broker.users, broker.counts) for broker in model.brokers.values()}


@given(operations, st.integers(0, 5))
def test_loads_after_any_changes_equal_those_computed_anew(changes: list[tuple[str, ...]], weight: int) -> None:
    model = LoadModel(float(weight))
    for broker in ("b0", "b1", "b2"):
        model.add_broker(broker, 10.0)
    for kind, name, where, interests in changes:
        user = f"u{name}"
        if kind == "rate":
            model.set_rate(name, float(where))
        elif kind == "attach" and user not in model.users:
            model.attach(user, f"b{where}", sorted(interests))
        elif kind == "move" and user in model.users:
            model.move(user, f"b{where}")
        elif kind == "detach" and user in model.users:
            model.detach(user)
        model.shared(INTERESTS)  # makes the index, so that it is kept up to date from here on
        model.check()
    assert figures(model) == figures(recomputed(model))


def test_an_interest_is_fetched_once_and_delivered_to_each_user() -> None:
    model = sharing({"a": 3.0, "b": 5.0}, {"x": {"one": "ab", "two": "a"}, "y": {"three": "b"}})
    assert (model.brokers["x"].load, model.brokers["x"].inbound) == (3 * (1 + 2) + 5 * (1 + 1), 8)
    assert (model.brokers["y"].load, model.brokers["y"].inbound) == (10, 5)
    assert model.summary().redis_egress == 13


@given(st.sets(st.sampled_from(INTERESTS)), st.sets(st.sampled_from(INTERESTS)), st.sets(st.sampled_from(INTERESTS)))
def test_a_predicted_change_is_what_a_move_changes(mover: set[str], fellow: set[str], other: set[str]) -> None:
    rates = {interest: 2.0**power for power, interest in enumerate(INTERESTS)}
    users = {"x": {"mover": "".join(sorted(mover)), "fellow": "".join(sorted(fellow))}}
    model = sharing(rates, {**users, "y": {"other": "".join(sorted(other))}})
    user = model.users["mover"]
    less, more = model.delta_remove(user), model.delta_add(user.interests, "y")
    before = {broker.id: broker.load for broker in model.brokers.values()}
    assert more == 2 * model.own_load(mover) - model.similarity(mover, "y")
    assert model.shared(mover) == {
        broker: similarity for broker in "xy" if (similarity := model.similarity(mover, broker))
    }
    model.move("mover", "y")
    model.check()
    assert model.brokers["x"].load == before["x"] - less and model.brokers["y"].load == before["y"] + more


def test_on_its_way_a_user_counts_at_both_brokers() -> None:
    model = own_interests({"a": [3.0], "b": [1.0]})
    model.arrive("a0", "b")
    assert [broker.load for broker in model.brokers.values()] == [6, 8]
    model.depart("a0", "b")
    assert [broker.load for broker in model.brokers.values()] == [0, 8]
    model.check()


def test_a_copy_is_independent() -> None:
    model = own_interests({"a": [3.0], "b": [1.0]})
    before = figures(recomputed(model))
    other = model.copy()
    other.move("a0", "b")
    other.set_rate("b0", 100.0)
    other.check()
    assert figures(model) == before and model.users["a0"].broker == "a" and model.rate("b0") == 1
    model.set_rate("a0", 50.0)
    assert other.rate("a0") == 3


def test_without_load_nothing_is_uneven() -> None:
    assert astuple(LoadModel().summary()) == (0, 0, 0, 0)
    assert astuple(own_interests({"a": [], "b": []}).summary()) == (0, 0, 0, 0)
    assert cov([]) == mean([]) == 0 and cov([0.0, 0.0]) == 0


def test_the_spread_is_that_of_the_population() -> None:
    assert cov([1.0, 3.0]) == 0.5 and mean([1.0, 3.0]) == 2


def test_suspect_and_draining_brokers_do_not_count_but_fetch() -> None:
    model = own_interests({"a": [3.0], "b": [1.0], "c": [100.0], "d": [50.0]})
    model.brokers["c"].standing = Standing.SUSPECT
    model.brokers["d"].standing = Standing.DRAINING
    summary = model.summary()
    assert (summary.ratio_max, summary.ratio_mean, summary.cov, summary.redis_egress) == (6, 4, 0.5, 154)


def test_candidates_of_a_report_are_contained_in_its_totals() -> None:
    model = LoadModel(1.0)
    for broker in ("a", "b"):
        model.add_broker(broker, 100.0)
        model.set_rate("k", 5.0)
    model.set_totals("a", load=80.0, inbound=20.0, users=9)
    model.set_count("a", "k", 3)
    model.set_totals("b", load=10.0, inbound=5.0, users=2)
    model.introduce("u", "a", ("k", "k"))
    assert model.brokers["a"].load == 80 and model.user_load_mean() == 90 / 11
    model.move("u", "b")
    assert (model.brokers["a"].load, model.brokers["a"].users, model.brokers["a"].counts) == (74, 8, {"k": 2})
    # Nobody has said that b holds k, so the prediction is the largest that is possible.
    assert (model.brokers["b"].load, model.brokers["b"].inbound, model.brokers["b"].counts) == (21, 10, {"k": 1})


def test_capacities_names_and_counts_are_checked() -> None:
    model = own_interests({"a": [1.0]})
    with pytest.raises(ValueError, match="more than 0"):
        model.add_broker("z", 0.0)
    with pytest.raises(ValueError, match="already"):
        model.add_broker("a", 1.0)
    with pytest.raises(ValueError, match="already"):
        model.attach("a0", "a", ())
    model.set_count("a", "a0", 0)
    with pytest.raises(AssertionError, match="too few users"):
        model.check()
