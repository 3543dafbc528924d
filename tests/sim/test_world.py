"""Time runs in order, and the same seed brings the same."""

from __future__ import annotations

import pytest

from dynamoth_sim.world import world as world_module
from dynamoth_sim.world.world import World


@pytest.fixture
def world() -> World:
    return World(1)


def test_callbacks_run_in_the_order_of_time_and_then_of_scheduling(world: World) -> None:
    order: list[str] = []
    world.after(2.0, order.append, "c")
    world.after(1.0, order.append, "a")
    world.after(1.0, order.append, "b")
    world.at(0.5, lambda: world.after(1.0, order.append, "between"))
    world.run_until(2.0)
    assert order == ["a", "b", "between", "c"]
    assert world.now == 2.0


def test_a_condition_is_waited_for_and_no_longer(world: World) -> None:
    done: list[bool] = []
    world.after(0.33, done.append, True)
    assert world.run_until_true(lambda: bool(done), 2.0, poll_s=0.1)
    assert 0.33 <= world.now <= 0.44
    assert not world.run_until_true(lambda: False, 1.0)
    assert world.now == 1.0


def test_the_digest_tells_runs_apart() -> None:
    def run(delay: float) -> int:
        world = World(7)
        world.after(delay, lambda: None)
        world.run_until(1.0)
        return world.digest

    assert run(0.5) == run(0.5)
    assert run(0.5) != run(0.25)


def test_time_that_stands_still_is_noticed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world_module, "SAME_MOMENT_CALLBACKS_MAX", 100)

    def again() -> None:
        world.after(0.0, again)

    again()
    with pytest.raises(AssertionError, match="time stands still"):
        world.run_until(1.0)
