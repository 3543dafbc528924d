"""What the demo plays, what it knows, and how it judges."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from dynamoth.plan import Plan, Server, single
from dynamoth.ring import Ring
from dynamoth_cli.demo_scene import make_scene
from dynamoth_cli.demo_state import DemoState, WorkerState
from dynamoth_cli.demo_view import View, render, show_summary

SERVERS = ["s1", "s2", "s3"]
CHANNELS = [b"a", b"b", b"c"]


@pytest.mark.parametrize("servers", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("players", [1, 10, 100, 1000])
def test_each_hot_spot_is_at_one_server_and_the_second_at_another(players: int, servers: int) -> None:
    ids = [f"s{number}" for number in range(servers)]
    scene = make_scene(players, ids, seconds=50.0)
    ring = Ring(ids)
    homes = [{ring.home(channel) for channel in scene.world.hot_channels(at_s)} for at_s in (0.0, 26.0)]
    assert [len(home) for home in homes] == [1, 1]
    assert servers == 1 or homes[0] != homes[1]


def test_the_load_fits_on_two_cores_and_overloads_one_server() -> None:
    scene = make_scene(100, SERVERS, seconds=50.0)
    assert scene.deliveries_per_s < 8000
    total = scene.deliveries_per_s * 300
    assert total < 3 * 0.6 * scene.outgoing_bytes_per_s_max, "there is room for all, when it is spread"
    assert total * scene.world.hot_ratio > 0.8 * scene.outgoing_bytes_per_s_max, "but not at one server"


def stats(**found: int) -> dict[str, Any]:
    nothing = dict.fromkeys(("published", "delivered", "lost", "covered_losses", "duplicated", "reordered", "gaps"), 0)
    return {**nothing, "errors": 0, "latencies": {}, **found}


def played(players: dict[str, int], auditors: dict[str, int], violations: int = 0) -> DemoState:
    """Return the state after a run that these have judged."""
    state = DemoState(SERVERS, CHANNELS, 50.0)
    for role, found in (("players", players), ("auditors", auditors)):
        worker = WorkerState(role)
        state.workers.append(worker)
        state.take_event(worker, {"event": "ready"})
        state.take_event(worker, {"event": "stats", **stats(**found)})
        state.take_event(worker, {"event": "stopped", "skipped": 1})
        state.take_event(worker, {"event": "result", "violations": violations, "stories": [], **stats(**found)})
    return state


def test_a_clean_run() -> None:
    summary = played({"published": 10, "delivered": 30}, {"delivered": 20}).summary()
    assert summary["clean"] is True
    assert summary["faults"] == []
    for name, value in {"published": 10, "delivered": 50, "audited": 20, "lost": 0, "skipped": 2}.items():
        assert summary[name] == value


@pytest.mark.parametrize("found", ["lost", "duplicated", "reordered", "gaps"])
@pytest.mark.parametrize("by", ["players", "auditors"])
def test_whatever_is_found_by_whomever_makes_it_unclean(found: str, by: str) -> None:
    players, auditors = {"published": 10, "delivered": 30}, {"delivered": 20}
    (players if by == "players" else auditors)[found] = 3
    summary = played(players, auditors).summary()
    assert summary["clean"] is False
    assert summary[found] == 3
    assert summary["faults"] == [f"3 {found}"]


def test_a_loss_that_was_reported_is_a_loss() -> None:
    summary = played({"published": 1, "delivered": 1}, {"delivered": 1, "covered_losses": 2}).summary()
    assert summary["lost"] == 2
    assert summary["clean"] is False


def test_other_violations_and_errors_are_not_overlooked() -> None:
    assert played({"published": 1}, {"delivered": 1}, violations=1).faults() == ["2 violations"]
    assert played({"published": 1, "errors": 4}, {"delivered": 1}).faults() == ["4 errors of clients"]


def test_nothing_measured_is_a_failure() -> None:
    assert played({"published": 10, "delivered": 30}, {}).faults() == [
        "the auditors have seen nothing, so nothing was checked"
    ]
    state = DemoState(SERVERS, CHANNELS, 50.0)
    assert "not every worker has judged" in state.faults()
    assert state.summary()["clean"] is False


def test_a_worker_that_has_not_judged_is_a_failure() -> None:
    state = played({"published": 10}, {"delivered": 20})
    state.workers.append(WorkerState("players"))
    assert state.faults() == ["not every worker has judged"]


def test_latencies_of_all_workers_are_taken() -> None:
    state = played({}, {})
    for worker in state.workers:
        state.take_event(worker, {"event": "stats", **stats(), "latencies": {"10": 1, "200": 1}})
    assert state.latencies.total == 4
    assert state.latencies.counts == {10: 2, 200: 2}


def plans() -> list[Plan]:
    """Return the versions of a plan in which ``a`` moves, and ``b`` moves there and back."""
    plan = Plan.initial(Server(id_, "redis://x") for id_ in SERVERS)
    versions = [plan]
    for channel, times in ((b"a", 1), (b"b", 2)):
        home = plan.ring.home(channel)
        other = next(id_ for id_ in SERVERS if id_ != home)
        for target in (other, home)[:times]:
            plan = plan.begin({channel: single(target)})
            versions += [plan, plan.activate([channel]), plan.activate([channel]).settle([channel])]
            plan = versions[-1]
    return versions


def moves(state: DemoState) -> tuple[int, int]:
    return state.migrations, state.in_transition


def test_moves_are_counted_by_their_epochs() -> None:
    state = DemoState(SERVERS, CHANNELS, 50.0)
    for plan in plans():
        state.take_plan(plan)
        state.take_plan(plan)
    assert moves(state) == (3, 0)
    assert sum(state.channels_at().values()) == len(CHANNELS)
    state.take_plan(plans()[1])
    assert moves(state) == (3, 1)


def status(ratios: tuple[float | None, ...], decisions: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "servers": {id_: {"load_ratio": ratio} for id_, ratio in zip(SERVERS, ratios, strict=True)},
        "decisions": decisions,
    }


MOVE = {
    "channel": b"a",
    "from": "s1",
    "to": "s2",
    "reason": "s1 is above 0.80",
    "load_ratio_from_before": 1.1,
    "load_ratio_from_after": 0.7,
}


def test_load_ratios_before_are_those_of_the_time_before_the_first_move() -> None:
    state = DemoState(SERVERS, CHANNELS, 50.0)
    state.take_balancer(status((0.5, None, 0.1), []))
    assert state.summary()["load_ratios_before"] is None, "not all are known yet"
    state.take_balancer(status((1.2, 0.1, 0.1), []))
    state.take_plan(plans()[1])
    state.take_balancer(status((0.6, 0.5, 0.1), []))
    assert state.load_ratios_before == {"s1": 1.2, "s2": 0.1, "s3": 0.1}
    assert state.load_ratios == {"s1": 0.6, "s2": 0.5, "s3": 0.1}
    assert state.load_ratio_peak == 1.2


def test_each_decision_is_news_once() -> None:
    state = DemoState(SERVERS, CHANNELS, 50.0)
    finding = {"server": "s3", "load_ratio": 0.95, "reason": "one channel is all of it"}
    for elapsed_s in (10.0, 10.6, 11.4):
        state.elapsed_s = elapsed_s
        decision = {"age_s": elapsed_s - 7.5, "first_moves": [MOVE], "findings": [finding]}
        state.take_balancer(status((0.5, 0.5, 0.5), [decision]))
    assert len(state.news) == 2
    assert "a  s1 -> s2  (s1: 1.10 -> 0.70)  s1 is above 0.80" in state.news[0]
    assert "s3 at 0.95: one channel is all of it" in state.news[1]
    state.elapsed_s = 20.0
    state.take_balancer(status((0.5, 0.5, 0.5), [{"age_s": 1.0, "first_moves": [MOVE], "findings": []}]))
    assert len(state.news) == 3


def test_rates_are_over_the_last_seconds() -> None:
    state = played({"published": 0}, {})
    for second in range(10):
        state.take_event(state.workers[0], {"event": "stats", **stats(published=second * 100, delivered=second * 500)})
        state.sample(float(second))
    assert state.rates() == (100.0, 500.0)


def shown(state: DemoState, *, terminal: bool) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    if terminal:
        console.print(render(state))
    else:
        with View(state, console) as view:
            view.update()
            view.update()
    show_summary(state.summary(), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_everything_can_be_shown_at_any_time(terminal: bool) -> None:
    empty = DemoState(SERVERS, CHANNELS, 50.0)
    assert "NOT clean" in shown(empty, terminal=terminal)
    state = played({"published": 10, "delivered": 30, "lost": 1}, {"delivered": 20})
    state.take_plan(plans()[-1])
    state.take_balancer(status((1.7, 0.7, None), [{"age_s": 0.0, "first_moves": [MOVE], "findings": []}]))
    text = shown(state, terminal=terminal)
    assert "NOT clean: 1 lost" in text
    assert "1.70" in text
    state.take_problem("no balancer is running")
    if terminal:
        assert "no balancer is running" in shown(state, terminal=terminal)


def test_without_a_terminal_each_line_is_said_once() -> None:
    text = shown(played({"published": 10}, {"delivered": 20}), terminal=False)
    assert text.count("starting: load") == 1
    assert "audit: clean" in text
