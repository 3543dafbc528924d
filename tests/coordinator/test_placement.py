"""Where newcomers go: each placement, and what a burst of users without interests does to it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from dynamoth_broker.coordinator.model import LoadModel, Standing
from dynamoth_broker.coordinator.placement import (
    RESERVATIONS_MAX,
    LeastLoadedPlacement,
    NearestPlacement,
    Newcomer,
    Placement,
    RandomPlacement,
    Reservations,
    ReservingPlacement,
    RoundRobinPlacement,
    SimilarPlacement,
    TwoChoicesPlacement,
    distance_earth,
    distance_planar,
)
from tests.coordinator.worlds import sharing

PLACEMENTS: dict[str, Callable[[], Placement]] = {
    "NR": lambda: NearestPlacement(Reservations(), 0.8),
    "RR": RoundRobinPlacement,
    "RND": lambda: RandomPlacement(random.Random(1)),
    "LL": LeastLoadedPlacement,
    "LL with reservations": lambda: ReservingPlacement(Reservations()),
    "two choices": lambda: TwoChoicesPlacement(Reservations(), random.Random(1)),
    "similar": lambda: SimilarPlacement(Reservations()),
}

SPREADING = ["RR", "LL with reservations", "two choices", "similar"]


def world(**capacities: float) -> LoadModel:
    model = LoadModel(1.0)
    for broker, capacity in capacities.items():
        model.add_broker(broker, capacity)
    return model


def place(placement: Placement, model: LoadModel, users: int) -> list[str | None]:
    return [placement.place(Newcomer(id=f"n{number}"), model, 0.0) for number in range(users)]


@pytest.mark.parametrize("name", PLACEMENTS)
def test_only_open_brokers_get_users(name: str) -> None:
    model = world(a=100.0, b=100.0, c=100.0, d=100.0)
    for broker, standing in zip("abc", (Standing.FULL, Standing.DRAINING, Standing.SUSPECT), strict=True):
        model.brokers[broker].standing = standing
    placement = PLACEMENTS[name]()
    assert place(placement, model, 5) == ["d"] * 5
    model.brokers["d"].standing = Standing.FULL
    assert place(placement, model, 1) == [None]


@pytest.mark.parametrize("name", PLACEMENTS)
def test_the_same_seed_places_alike_in_any_order_of_brokers(name: str) -> None:
    assert place(PLACEMENTS[name](), world(a=2.0, b=1.0, c=1.0), 40) == place(
        PLACEMENTS[name](), world(c=1.0, a=2.0, b=1.0), 40
    )


def burst(placement: Placement) -> float:
    """Place 1,000 users who subscribe later; return the largest load as a multiple of the mean, when they have."""
    model = world(**{f"b{number}": 1.0 for number in range(10)})
    for number in range(100):
        for broker in model.brokers:
            model.set_rate("k", 5.0)
            model.attach(f"old-{broker}-{number}", broker, ("k",) if broker != "b3" else ())
    targets = place(placement, model, 1000)
    for number, target in enumerate(targets):
        assert target is not None
        model.attach(f"new-{number}", target, ("k",))
    summary = model.summary()
    return summary.ratio_max / summary.ratio_mean


def test_a_burst_of_empty_users_overwhelms_the_least_loaded_broker() -> None:
    assert burst(LeastLoadedPlacement()) > 5


@pytest.mark.parametrize("name", SPREADING)
def test_a_burst_of_empty_users_is_spread(name: str) -> None:
    assert burst(PLACEMENTS[name]()) < 1.25


def test_reservations_end_with_the_report_that_shows_the_users() -> None:
    reservations = Reservations(appear_s=10.0)
    for now in (0.0, 0.0, 5.0):
        reservations.add("a", now)
    reservations.on_report("a", 9.9)
    assert reservations.count("a") == 3
    reservations.on_report("a", 10.0)
    reservations.on_report("other", 10.0)
    assert reservations.count("a") == 1
    reservations.on_broker_gone("a")
    assert reservations.count("a") == reservations.count("other") == 0


def test_reservations_are_bounded() -> None:
    reservations = Reservations(appear_s=0.0)
    for now in range(RESERVATIONS_MAX + 5):
        reservations.add("a", float(now))
    assert reservations.count("a") == RESERVATIONS_MAX + 5
    reservations.on_report("a", RESERVATIONS_MAX - 2.0)
    assert reservations.count("a") == 6, "those that were merged count until the latest of them is shown"
    reservations.on_report("a", RESERVATIONS_MAX + 4.0)
    assert reservations.count("a") == 0


def test_the_nearest_is_that_of_the_shortest_round_trip_or_distance() -> None:
    model = world(far=100.0, near=100.0, unknown=100.0)
    model.brokers["far"].location, model.brokers["near"].location = (10.0, 0.0), (1.0, 1.0)
    placement = NearestPlacement(Reservations(), 0.9, distance_planar)
    assert placement.place(Newcomer(id="n", location=(0.0, 0.0)), model, 0.0) == "near"
    assert placement.place(Newcomer(id="n", location=(0.0, 0.0), latency_s={"far": 0.01}), model, 0.0) == "far"
    latency_s = {"far": 0.02, "unknown": 0.01}
    assert placement.place(Newcomer(id="n", latency_s=latency_s), model, 0.0) == "unknown"
    assert placement.place(Newcomer(id="n"), model, 0.0) in model.brokers


def test_near_brokers_are_filled_to_a_bound() -> None:
    model = world(far=10.0, near=10.0)
    model.brokers["far"].location, model.brokers["near"].location = (10.0, 0.0), (1.0, 1.0)
    placement = NearestPlacement(Reservations(), 0.5, distance_planar)
    newcomer = Newcomer(id="n", location=(0.0, 0.0))
    targets = [placement.place(newcomer, model, 0.0) for _ in range(16)]
    assert targets[:6] == ["near"] * 6 and targets[6:12] == ["far"] * 6
    assert Counter(targets[12:]) == {"far": 2, "near": 2}, "beyond the bound the least loaded is chosen"


def test_distances_on_earth() -> None:
    helsinki, darmstadt = (60.17, 24.94), (49.87, 8.65)
    assert distance_earth(helsinki, darmstadt) == pytest.approx(1_537_000, rel=0.01)
    assert distance_earth((0.0, 179.0), (0.0, -179.0)) == pytest.approx(222_390, rel=0.001)
    assert distance_earth(helsinki, helsinki) == 0


def test_round_robin_follows_capacity_and_is_smooth() -> None:
    targets = place(RoundRobinPlacement(), world(a=5.0, b=1.0, c=1.0), 14)
    assert targets == ["a", "a", "b", "a", "c", "a", "a"] * 2


def test_round_robin_goes_on_when_brokers_come_and_go() -> None:
    model, placement = world(a=1.0, b=1.0), RoundRobinPlacement()
    place(placement, model, 3)
    model.add_broker("c", 1.0)
    assert Counter(place(placement, model, 30)) == {"a": 10, "b": 10, "c": 10} or set(place(placement, model, 3)) == {
        *"abc"
    }
    model.brokers["a"].standing = Standing.FULL
    assert Counter(place(placement, model, 20)) == {"b": 10, "c": 10}


def test_random_placement_reaches_all() -> None:
    counts = Counter(place(RandomPlacement(random.Random(7)), world(a=1.0, b=1.0, c=1.0), 900))
    assert set(counts) == {"a", "b", "c"} and min(counts.values()) > 240


def test_users_go_to_the_broker_that_has_their_interests() -> None:
    rates = {"a": 10.0, "b": 10.0, "c": 1.0}
    model = sharing(rates, {"x": {"x0": "a", "x1": "c"}, "y": {"y0": "b", "y1": "c"}, "z": {"z0": "bb", "z1": "ab"}})
    placement = SimilarPlacement(Reservations())
    assert placement.place(Newcomer(id="n", interests=("b",)), model, 0.0) == "y"
    assert placement.place(Newcomer(id="n", interests=("a",)), model, 0.0) == "x"
    # What is similar but far above the least loaded broker is not chosen.
    both = Newcomer(id="n", interests=("a", "b"))
    assert SimilarPlacement(Reservations()).place(both, model, 0.0) == "x"
    assert SimilarPlacement(Reservations(), slack_ratio=1.0).place(both, model, 0.0) == "z"
