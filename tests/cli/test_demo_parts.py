"""What the demo plays, what it knows, and how it judges."""

from __future__ import annotations

import asyncio
import io
import re
import time
from dataclasses import asdict
from typing import Any

import pytest
from rich.console import Console

from dynamoth.plan.plan import Assignment, Mode, Plan, Server, single
from dynamoth.plan.ring import Ring
from dynamoth.plan.slots import slot_name
from dynamoth_balancer.decide.cluster import ChannelFigures
from dynamoth_balancer.decide.replicate import wanted_change
from dynamoth_balancer.options import BalancerOptions
from dynamoth_balancer.provision.options import FleetOptions
from dynamoth_client.asyncio import GapInfo
from dynamoth_demo.festival import Festival, Performer
from dynamoth_demo.scene import Elasticity, Scene, make_scene
from dynamoth_demo.state import DemoState, WorkerState
from dynamoth_demo.view import View, render, show_summary
from dynamoth_demo.worker import ARRIVAL_POLL_S, Auditors, WorkerOptions
from dynamoth_sim.load.rgame import Update

SERVERS = ["s1", "s2", "s3"]
CHANNELS = [b"a", b"b", b"c"]
FESTIVAL = Festival(
    name="f",
    replicas=3,
    performers=4,
    messages_per_s=40.0,
    payload_bytes=1000,
    begins_s=20.0,
    gathers_s=2.0,
    ends_s=30.0,
)


@pytest.mark.parametrize("servers", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("players", [1, 10, 100, 1000])
def test_each_hot_spot_is_at_one_server_and_the_second_at_another(players: int, servers: int) -> None:
    ids = [f"s{number}" for number in range(servers)]
    scene = make_scene(players, ids, seconds=50.0)
    ring = Ring(ids)
    homes = [{ring.home(channel) for channel in scene.world.hot_channels(at_s)} for at_s in (0.0, 31.0)]
    assert [len(home) for home in homes] == [1, 1]
    assert servers == 1 or homes[0] != homes[1]


@pytest.fixture
def state() -> DemoState:
    return DemoState(SERVERS, CHANNELS, 50.0)


ELASTICITY = Elasticity(servers_max=4, kill_at_s=35.0, leave_at_s=42.0)


@pytest.fixture
def hot() -> DemoState:
    """A demo with a festival."""
    return DemoState(SERVERS, CHANNELS, 50.0, FESTIVAL)


def options_of(scene: Scene) -> BalancerOptions:
    """Return the options of the demo's balancer."""
    section = "balancer."
    given: dict[str, Any] = {
        key.removeprefix(section): value for key, value in scene.settings.items() if key.startswith(section)
    }
    return BalancerOptions(**given)


def figures_of(scene: Scene, festival: Festival, share: float = 1.0) -> ChannelFigures:
    """Return what a balancer knows of the festival when this share of it is in the average."""
    messages_per_s = festival.messages_per_s * share
    bytes_per_s = messages_per_s * scene.auditors * (festival.payload_bytes + 24 + 45)
    publishers, subscribers = festival.performers, scene.auditors
    at_one = single("s1")
    return ChannelFigures(festival.channel, at_one, messages_per_s, publishers, subscribers, {"s1": bytes_per_s})


def festival_of(scene: Scene) -> Festival:
    assert scene.festival is not None
    return scene.festival


@pytest.mark.parametrize("players", [1, 10, 40, 100, 1000, 5000])
@pytest.mark.parametrize("servers", [2, 3, 8])
def test_the_festival_is_spread_over_as_many_servers_as_there_are_up_to_three(players: int, servers: int) -> None:
    ring = Ring([f"s{number}" for number in range(servers)])
    scene = make_scene(players, list(ring.servers), seconds=50.0)
    festival, capacity, options = festival_of(scene), scene.outgoing_bytes_per_s_max, options_of(scene)
    figures = figures_of(scene, festival)
    assert 1.0 < figures.total.outgoing_bytes_per_s / capacity < 1.2, "it alone is too much for a server"
    assert festival.messages_per_s <= 300
    assert festival.payload_bytes >= 200
    assert ring.home(festival.channel) == ring.home(scene.world.hot_channels(0.0)[0]), "the others have room"
    for share in (0.76, 1.0, 1.08):
        wanted = wanted_change(figures_of(scene, festival, share), capacity, options)
        assert wanted is not None
        assert (wanted.mode, wanted.replicas) == (Mode.ALL_SUBSCRIBERS, min(3, servers))


@pytest.mark.parametrize("seconds", [20.0, 24.0, 50.0, 600.0])
def test_each_thing_has_its_time(seconds: float) -> None:
    scene = make_scene(100, SERVERS, seconds)
    festival, options = festival_of(scene), options_of(scene)
    assert 0.25 * seconds < festival.begins_s, "the crowd was dealt with"
    assert options.averaging_s < festival.gathers_s < festival.ends_s - festival.begins_s, "all of it is known"
    assert festival.ends_s < scene.world.hot_spot_period_s
    left_s = seconds - festival.ends_s
    assert left_s > options.averaging_s + options.wait_s + options.replication_rest_s / 2, "it can be folded back"


@pytest.mark.parametrize("players", [1, 40, 100, 1000])
def test_a_demo_whose_servers_come_and_go_needs_more_than_it_begins_with(players: int) -> None:
    scene = make_scene(players, ["s1", "s2"], seconds=100.0, elastic=True)
    elasticity, festival, capacity = scene.elasticity, festival_of(scene), scene.outgoing_bytes_per_s_max
    assert elasticity is not None
    total = scene.deliveries_per_s * (scene.payload_bytes + 24 + 45) / capacity
    grow, release = FleetOptions().grow_ratio, FleetOptions().release_ratio
    assert 2 * grow < total < 3 * grow, "three servers are needed"
    assert total + 1.1 < elasticity.servers_max, "with the festival, some servers can carry it"
    assert elasticity.stay_ratio * total < release, "in the end one is enough"
    assert capacity >= 4e6
    assert festival.ends_s < scene.world.hot_spot_period_s < elasticity.kill_at_s < elasticity.leave_at_s < 100.0
    assert elasticity.served_s_max == BalancerOptions().server_dead_s + 3.0


def test_with_one_server_there_is_no_festival() -> None:
    scene = make_scene(100, ["s1"], seconds=50.0)
    assert scene.festival is None
    assert BalancerOptions().replicate_load_ratio_min == options_of(scene).replicate_load_ratio_min


def test_a_performer_that_is_late_skips_and_counts_and_numbers_without_a_hole() -> None:
    performer = Performer(100, 0, FESTIVAL, start_s=0.0)
    assert performer.step(19.99) == [], "too early"
    numbers = [message.sequence for at in (20.0, 20.5, 20.55, 20.6) for message in performer.step(at)]
    assert numbers == [1, 2, 3], "at 20.55 there is nothing new"
    assert performer.skipped == 4
    [last] = performer.step(99.0)
    assert (last.sequence, performer.skipped + performer.sequences[b"f"]) == (4, 100)
    assert performer.deadline() is None
    assert performer.step(99.5) == []


def stats(**found: int) -> dict[str, Any]:
    nothing = dict.fromkeys(("published", "delivered", "lost", "covered_losses", "duplicated", "reordered", "gaps"), 0)
    return {**nothing, "errors": 0, "latencies": {}, **found}


def played(
    players: dict[str, int], auditors: dict[str, int], violations: int = 0, elasticity: Elasticity | None = None
) -> DemoState:
    """Return the state after a run that these have judged."""
    state = DemoState(SERVERS, CHANNELS, 50.0, elasticity=elasticity)
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
    for name, value in {"published": 10, "delivered": 50, "audited": 20, "lost": 0, "skipped": 2}.items():
        assert summary[name] == value
    assert (summary["clean"], summary["faults"]) == (True, [])


@pytest.mark.parametrize(
    ("players", "auditors", "faults"),
    [
        *(({name: 3}, {"delivered": 20}, [f"3 {name}"]) for name in ("lost", "duplicated", "reordered", "gaps")),
        *(({}, {"delivered": 20, name: 3}, [f"3 {name}"]) for name in ("lost", "duplicated", "reordered", "gaps")),
        ({}, {"delivered": 1, "covered_losses": 2}, ["2 lost"]),  # a loss that was reported is a loss
        ({"errors": 4}, {"delivered": 1}, ["4 errors of clients"]),
        ({"delivered": 30}, {}, ["the auditors have seen nothing, so nothing was checked"]),
    ],
)
def test_any_fault_that_anybody_finds_makes_the_audit_unclean(
    players: dict[str, int], auditors: dict[str, int], faults: list[str]
) -> None:
    summary = played({"published": 10, **players}, auditors).summary()
    assert (summary["clean"], summary["faults"]) == (False, faults)
    for name in ("lost", "duplicated", "reordered", "gaps"):
        assert summary[name] == sum(int(fault.split()[0]) for fault in faults if fault.endswith(f" {name}"))


def test_other_violations_errors_of_performers_and_workers_without_a_result_are_faults(state: DemoState) -> None:
    assert played({"published": 1}, {"delivered": 1}, violations=1).faults() == ["2 violations"]
    assert "not every worker has judged" in state.faults()
    assert state.summary()["clean"] is False
    state = played({"published": 10}, {"delivered": 20})
    performers = WorkerState("performers")
    state.workers.append(performers)
    assert state.faults() == ["not every worker has judged"]
    state.take_event(performers, {"event": "result", "violations": 0, "stories": [], **stats(errors=2)})
    assert state.faults() == ["2 errors of clients"]


def test_latencies_of_all_workers_are_taken() -> None:
    state = played({}, {})
    for worker in state.workers:
        state.take_event(worker, {"event": "stats", **stats(), "latencies": {"10": 1, "200": 1}})
    assert state.latencies.total == 4
    assert state.latencies.counts == {10: 2, 200: 2}


def versions(*changes: tuple[bytes, Assignment]) -> list[Plan]:
    """Return the versions of a plan with these changes, each of which is prepared, activated and settled."""
    found = [Plan.initial(Server(id_, "redis://x") for id_ in SERVERS)]
    for channel, assignment in changes:
        prepared = found[-1].begin({channel: assignment})
        active = prepared.activate([channel])
        found += [prepared, active, active.settle([channel])]
    return found


def plans() -> list[Plan]:
    """Return the versions in which ``a`` moves, and ``b`` moves there and back."""
    homes = [Ring(SERVERS).home(channel) for channel in (b"a", b"b")]
    [a, b] = [next(id_ for id_ in SERVERS if id_ != home) for home in homes]
    return versions((b"a", single(a)), (b"b", single(b)), (b"b", single(homes[1])))


def replicated_plans() -> list[Plan]:
    """Return the versions in which the festival is spread over two servers, then three, and folded back."""
    several = [Assignment(Mode.ALL_SUBSCRIBERS, servers) for servers in (("s1", "s2"), ("s1", "s2", "s3"))]
    return versions(*((b"f", assignment) for assignment in (*several, single("s3"))))


def moves(state: DemoState) -> tuple[int, int]:
    return state.migrations, state.in_transition


def test_moves_are_counted_by_their_epochs(state: DemoState) -> None:
    for plan in plans():
        state.take_plan(plan)
        state.take_plan(plan)
    assert moves(state) == (3, 0)
    assert replications(state) == (0, 0, 0, 1)
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
    "mode_before": "single",
    "mode_after": "single",
    "from": "s1",
    "to": "s2",
    "reason": "s1 is above 0.80",
    "load_ratio_from_before": 1.1,
    "load_ratio_from_after": 0.7,
}


def decide(state: DemoState, *moves: dict[str, Any]) -> None:
    """Let the balancer say that it has decided these moves."""
    decision = {"number": 1, "age_s": 0.0, "moves": len(moves), "first_moves": [*moves], "findings": []}
    state.take_balancer(status((0.5, 0.5, 0.5), [decision]))


def test_load_ratios_before_are_those_of_the_time_before_the_first_move(state: DemoState) -> None:
    state.take_balancer(status((0.5, None, 0.1), []))
    assert state.summary()["load_ratios_before"] is None, "not all are known yet"
    state.take_balancer(status((1.2, 0.1, 0.1), []))
    state.take_plan(plans()[1])
    state.take_balancer(status((0.6, 0.5, 0.1), []))
    assert state.load_ratios_before == {"s1": 1.2, "s2": 0.1, "s3": 0.1}
    assert state.load_ratios == {"s1": 0.6, "s2": 0.5, "s3": 0.1}
    assert state.load_ratio_peak == 1.2


def test_each_decision_is_news_once(state: DemoState) -> None:
    finding = {"server": "s3", "load_ratio": 0.95, "reason": "one channel is all of it"}
    for elapsed_s in (10.0, 10.6, 11.4):
        state.elapsed_s = elapsed_s
        decision = {"number": 1, "age_s": elapsed_s - 7.5, "moves": 1, "first_moves": [MOVE], "findings": [finding]}
        state.take_balancer(status((0.5, 0.5, 0.5), [decision]))
    assert len(state.news) == 2
    assert "a  s1 -> s2  (s1: 1.10 -> 0.70)  s1 is above 0.80" in state.news[0]
    assert "s3 at 0.95: one channel is all of it" in state.news[1]
    soon = {"number": 2, "age_s": 3.9, "moves": 1, "first_moves": [MOVE], "findings": []}
    state.take_balancer(status((0.5, 0.5, 0.5), [soon]))
    assert len(state.news) == state.news_count == 3, "another decision in the same second"


def test_slots_are_one_line_of_news_and_no_channels(state: DemoState) -> None:
    slots = [{**MOVE, "channel": slot_name(number), "reason": "s2 has 0 of 4096 slots"} for number in range(3)]
    decide(state, MOVE, *slots)
    assert [news.split("  ", 2)[2] for news in state.news] == [
        "a  s1 -> s2  (s1: 1.10 -> 0.70)  s1 is above 0.80",
        "slots: 3  s2 has 0 of 4096 slots",
    ]
    for plan in versions((slot_name(0), single("s1")), (slot_name(0), single("s2"))):
        state.take_plan(plan)
    assert (state.slots_moved, state.migrations) == (2, 0)


def test_what_keeps_a_server_overloaded_is_shown_now_and_then(state: DemoState) -> None:
    for second in range(12):
        state.elapsed_s = float(second)
        finding = {"server": "s3", "load_ratio": 0.95, "reason": f"{second} is why"}
        decision = {"number": second + 1, "age_s": 0.0, "moves": 0, "first_moves": [], "findings": [finding]}
        state.take_balancer(status((0.5, 0.5, 0.5), [decision]))
    assert list(state.news) == ["  0 s  s3 at 0.95: 0 is why", "  8 s  s3 at 0.95: 8 is why"]


def elastic(found: dict[str, int], *, grown: bool = True, served_at: float | None = 104.9) -> DemoState:
    """Return the state after a run in which s2 was killed at 100 s, and its channels served again at another time."""
    state = played({"published": 10}, {"delivered": 20, **found}, elasticity=ELASTICITY)
    state.servers_at_first = state.servers_at_most = 2
    state.take_plan(Plan.initial(Server(id_, "redis://x") for id_ in ("s1", "s2")), 10.0)
    plan = Plan.initial(Server(id_, "redis://x") for id_ in ("s1", "s2", *(["auto-1"] if grown else [])))
    plan = plan.begin({b"a": single("s2")}).activate([b"a"]).settle([b"a"])
    state.take_plan(plan, 20.0)
    state.on_kill("s2", 100.0)
    plan = plan.begin({b"a": single("s1")})
    state.take_plan(plan, 103.5)
    if served_at is not None:
        state.take_plan(plan.activate([b"a"]), served_at)
    return state


def test_a_server_that_is_killed_is_shown_until_others_serve_its_channels() -> None:
    state = elastic({"gaps": 3, "covered_losses": 7})
    assert [news.split("  ", 2)[2] for news in state.news] == [
        "s3 has left the cluster: 2 servers",
        "auto-1 joins the cluster: 3 servers",
        "s2 is killed (SIGKILL), with its agent; it had 1 channels",
        "others serve all channels of s2, 4.9 s after its death",
    ]
    text = shown(state, terminal=False)
    assert "s1=- s2=killed auto-1=-" in text
    assert "clean (0 lost, 0 duplicated, 0 reordered, 3 gaps, 7 lost with a gap event)" in text
    assert "2 at first, up to 3 under load, 2 in the end; s2 was killed, others served its channels 4.9 s later" in text
    assert re.search(r"s2 [^w]*killed", shown(state, terminal=True)), "in the table"
    assert state.faults() == []


@pytest.mark.parametrize(
    ("state", "faults"),
    [
        (elastic({"gaps": 3, "lost": 1}), ["1 lost"]),
        (elastic({"gaps": 3, "duplicated": 1}), ["1 duplicated"]),
        (elastic({}), ["nobody noticed the death of s2: there was no gap event"]),
        (elastic({"gaps": 3}, grown=False), ["no server was added under load"]),
        (elastic({"gaps": 3}, served_at=None), ["nobody serves the channels of s2"]),
        (elastic({"gaps": 3}, served_at=106.1), ["the channels of s2 were served again after 6.1 s only"]),
    ],
)
def test_each_part_of_the_demo_must_have_happened(state: DemoState, faults: list[str]) -> None:
    assert state.faults() == faults
    assert state.summary()["clean"] is False


def test_the_demo_must_lose_a_server_and_shrink() -> None:
    state = DemoState(["s1", "s2"], CHANNELS, 50.0, elasticity=ELASTICITY)
    state.take_plan(Plan.initial(Server(id_, "redis://x") for id_ in SERVERS))
    assert state.faults()[-2:] == ["no server was killed", "3 servers are left, not 2"]
    state = elastic({"gaps": 3})
    for life, has_shrunk in (("draining", False), ("active", True)):
        state.take_balancer({"servers": {}, "decisions": [], "fleet": {"servers": {"auto-1": {"life": life}}}})
        assert state.has_shrunk is has_shrunk


def replication(before: str, after: str, servers: tuple[str, str]) -> dict[str, Any]:
    ratios = {"s1": [1.4, 0.7], "s2": [0.3, 0.65]}
    modes = {"mode_before": before, "mode_after": after}
    return {**MOVE, **modes, "from": servers[0], "to": servers[1], "load_ratios": ratios, "reason": "it is hot"}


@pytest.mark.parametrize(
    ("move", "shown_as"),
    [
        (replication("single", "all-subscribers", ("s1", "s1,s2")), "split: s1 -> s1,s2 all-subscribers"),
        (replication("all-publishers", "all-publishers", ("s1,s2", "s1,s3")), "changed: s1,s2 -> s1,s3 all-publishers"),
        (replication("all-subscribers", "single", ("s1,s2", "s2")), "folded back: s1,s2 -> s2"),
    ],
)
def test_changes_of_a_hot_channel_are_news_with_all_load_ratios(
    state: DemoState, move: dict[str, Any], shown_as: str
) -> None:
    decide(state, move)
    assert list(state.news) == [f"  0 s  a  {shown_as}  (s1: 1.40 -> 0.70, s2: 0.30 -> 0.65)  it is hot"]


def replications(state: DemoState) -> tuple[int, int, int, int]:
    return state.replicated, state.replicas_changed, state.folded_back, state.replicas_max


def test_splits_are_counted_by_their_epochs_and_are_no_moves(hot: DemoState) -> None:
    seen: list[tuple[int, int, int, int]] = []
    for plan in replicated_plans():
        hot.take_plan(plan)
        hot.take_plan(plan)
        seen.append(replications(hot))
    assert seen == [(0, 0, 0, 1), *[(1, 0, 0, 2)] * 3, *[(1, 1, 0, 3)] * 3, *[(1, 1, 1, 3)] * 3]
    assert hot.migrations == 0
    summary = hot.summary()
    assert [summary[name] for name in ("replicated", "folded_back", "replicas_max")] == [1, 1, 3]


def test_the_hot_channel_is_where_clients_look_for_it(hot: DemoState) -> None:
    assert hot.hot_channels() == []
    seen: list[tuple[str, tuple[str, ...], bool]] = []
    for plan in replicated_plans()[:4]:
        hot.take_plan(plan)
        [channel] = hot.hot_channels()
        assert channel.name == "f"
        seen.append((channel.mode, channel.servers, channel.is_changing))
    home = Ring(SERVERS).home(b"f")
    assert seen == [
        ("single", (home,), False),
        ("single", (home,), True),
        ("all-subscribers", ("s1", "s2"), True),
        ("all-subscribers", ("s1", "s2"), False),
    ]


def test_the_rate_of_the_festival_is_that_of_its_performers() -> None:
    state = played({"published": 0}, {})
    performers = WorkerState("performers")
    state.workers.append(performers)
    for second in range(10):
        state.take_event(state.workers[0], {"event": "stats", **stats(published=second * 100)})
        state.take_event(performers, {"event": "stats", **stats(published=second * 300)})
        state.sample(float(second))
    assert state.rate("performed") == 300.0
    assert (state.rate("published"), state.rate("delivered")) == (400.0, 0.0)


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
    empty = shown(DemoState(SERVERS, CHANNELS, 50.0), terminal=terminal)
    assert "NOT clean" in empty
    assert terminal or empty.count("starting: load") == 1
    state = played({"published": 10, "delivered": 30, "lost": 1}, {"delivered": 20})
    state.take_plan(plans()[-1])
    state.take_balancer(
        status((1.7, 0.7, None), [{"number": 1, "age_s": 0.0, "moves": 1, "first_moves": [MOVE], "findings": []}])
    )
    text = shown(state, terminal=terminal)
    assert "NOT clean: 1 lost" in text
    assert "1.70" in text
    state.take_problem("no balancer is running")
    if terminal:
        assert "no balancer is running" in shown(state, terminal=terminal)


@pytest.mark.parametrize("terminal", [True, False])
def test_the_hot_channel_is_shown_with_its_mode_and_servers(hot: DemoState, terminal: bool) -> None:
    hot.elapsed_s = 25.0
    hot.take_plan(replicated_plans()[3])
    text = shown(hot, terminal=terminal)
    assert re.search("all-subscribers at s1, ?s2", text)
    assert "split: 1, over up to 2 servers; folded back: 0, as the demo was over too soon" in text
    for plan in replicated_plans()[4:]:
        hot.take_plan(plan)
    assert "split: 1, over up to 3 servers (changed meanwhile: 1); folded back: 1\n" in shown(hot, terminal=terminal)


@pytest.mark.parametrize(
    ("elapsed_s", "text"),
    [(5.0, "quiet until the festival begins, at 20 s"), (25.0, "0 publications/s"), (35.0, "the festival is over")],
)
def test_the_state_of_the_festival_is_shown(hot: DemoState, elapsed_s: float, text: str) -> None:
    hot.take_plan(replicated_plans()[0])
    hot.elapsed_s = elapsed_s
    assert text in shown(hot, terminal=True)


def test_the_summary_says_when_nothing_was_split() -> None:
    short, alone = DemoState(SERVERS, CHANNELS, 50.0, FESTIVAL), DemoState(["s1"], CHANNELS, 50.0)
    assert "split: none; f was too short" in shown(short, terminal=False)
    assert "split: none; with one server there is nothing to spread" in shown(alone, terminal=False)


@pytest.mark.anyio
async def test_a_gap_event_does_not_end_the_wait_for_what_is_under_way() -> None:
    world = make_scene(4, SERVERS, 50.0).world
    options = WorkerOptions(
        role="auditors", url="", world=asdict(world), seed=1, first=0, count=1, payload_bytes=10, losses_allowed=True
    )
    async with asyncio.TaskGroup() as tasks:
        auditors = Auditors(options, tasks)
        auditors.confirmed(0, b"a", time.monotonic())

        def take(sequence: int) -> None:
            update = Update(b"a", 7, sequence, 0.0, 0.0)
            auditors.take(0, b"a", update.payload(time.monotonic_ns(), 100), time.monotonic())

        auditors.gap(0, GapInfo(channel=b"a", publisher=None, count=None, reason="a server failed"))
        assert auditors.stories == ["subscriber 0: gap on a: a server failed"]
        take(2)
        auditors.expect([(7, "a", 3)], [])
        asyncio.get_running_loop().call_later(3 * ARRIVAL_POLL_S, take, 3)
        result = await auditors.finish()
    assert (result["delivered"], result["covered_losses"], result["violations"]) == (2, 1, 0)
    assert result["reordered"] == 0
