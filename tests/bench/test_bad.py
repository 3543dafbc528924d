"""The figures of BAD: workloads from seeds, simulations of a small one, and how claims are judged."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from bench.bad import million
from bench.bad.claims import Claim, Finding, bounded, label, markdown, ratio, rows, table
from bench.bad.emergencies import BY_NAME, QUERIES, Emergencies, cell_of, part_of
from bench.bad.prototype_figures import FIGURES as PROTOTYPED
from bench.bad.runs import NoRuns, Run, Store, spread
from bench.bad.simulated import END_S, SUBSCRIBED_S, SimWorkload, SimWorld
from bench.bad.simulation_figures import FIGURE_13, FIGURE_14, FIGURES, SCHEMES, mean_cov, mean_max, moved
from bench.bad.town import HEIGHT_M, WIDTH_M, Town, Walker
from bench.bad.virtual import SimScheme, VirtualEdge, ours, settings

SMALL = SimWorkload(users=400, interests_per_query=20, rate_mean=500_000.0, rate_deviation=125_000.0)
"""The mean load is as in the paper's workload, so its thresholds fit."""


def made(
    scheme: str, seed: int, loads: list[list[float]], moves: list[int] | None = None, shuffle_end: float = -1.0
) -> Run:
    """Make a run that is sampled once a minute."""
    return Run(
        world="simulation",
        workload="uniform",
        placement="NR",
        scheme=scheme,
        seed=seed,
        times=[60.0 * index for index in range(len(loads))],
        loads=loads,
        users=[[1] * len(each) for each in loads],
        moves=moves or [0] * len(loads),
        egress=[1.0] * len(loads),
        shuffle_end=shuffle_end,
    )


# Runs.


def test_figures_of_a_run() -> None:
    run = made("LDM", 1, [[3.0, 1.0], [2.5, 1.5], [2.0, 2.0]], [0, 1, 2], shuffle_end=60.0)
    assert run.covs() == [0.5, 0.25, 0.0]
    assert run.mean_max(60.0) == 2.25
    assert run.mean_spread(60.0) == 0.5
    assert run.balanced_at(0.3, 0.0) == 60.0
    assert run.balanced_at(0.3, 120.0) == 120.0
    assert run.moved == 2
    assert run.cov_after_shuffle() == 0.25 and run.cov_after_shuffle(2) == 0.0
    assert replace(run, shuffle_end=-1.0).cov_after_shuffle() == float("inf")


def test_loads_of_unequal_brokers_are_ratios() -> None:
    run = replace(made("LDM", 1, [[4.0, 1.0]]), capacities=[4.0, 1.0])
    assert run.covs() == [0.0] and run.maxima() == [1.0]


def test_a_load_that_does_not_stay_even_is_not_balanced() -> None:
    run = made("none", 1, [[1.0, 1.0], [3.0, 1.0], [3.0, 1.0]])
    assert run.balanced_at(0.1, 0.0) == float("inf")


def test_a_store_keeps_the_latest_run_of_each_key(tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    store = Store(file)
    store.add(made("LDM", 1, [[1.0, 2.0]]))
    store.add(made("LDM", 1, [[1.23456789, 2.0]]))
    store.add(made("LDM", 2, [[5.0, 2.0]]))
    again = Store(file)
    found = again.find("simulation", "uniform", "NR", "LDM", 1)
    assert found is not None and found.loads == [[1.23457, 2.0]]
    assert again.find("simulation", "uniform", "NR", "GSH", 1) is None
    assert len(file.read_text().splitlines()) == 3 and json.loads(file.read_text().splitlines()[0])["seed"] == 1


# Claims.


def test_a_bound_is_of_the_median_or_of_every_seed() -> None:
    runs = {"NR/LDM": [made("LDM", seed, [[load]]) for seed, load in enumerate((1.0, 2.0, 9.0))]}

    def load(run: Run) -> float:
        return run.loads[0][0]

    assert bounded("NR/LDM", load, most=2.0)(runs) == Finding("LDM: 2 (1 to 9)", True)
    assert bounded("NR/LDM", load, most=2.0, is_every=True)(runs).is_reached is False
    assert bounded("NR/LDM", load, least=2.0)(runs).is_reached is True
    assert bounded("NR/LDM", load, least=1.5, is_every=True)(runs).is_reached is False


def test_ratios_are_taken_seed_by_seed() -> None:
    runs = {
        "NR/a": [made("a", 1, [[2.0]]), made("a", 2, [[30.0]])],
        "NR/b": [made("b", 1, [[1.0]]), made("b", 2, [[10.0]])],
    }
    finding = ratio("NR/a", "NR/b", lambda run: run.loads[0][0], most=2.5, is_every=True)(runs)
    assert finding == Finding("a / b: 2.5 (2 to 3)", False)
    assert ratio("NR/a", "NR/b", lambda run: run.loads[0][0])(runs).is_reached is None


def test_a_table_says_what_was_missed() -> None:
    claims = [
        Claim("what is reached", "1", lambda runs: Finding("2", True)),
        Claim("what is not", "-", lambda runs: Finding("3", False), "a reason"),
    ]
    found = rows(claims, {})
    assert [row.verdict for row in found] == ["reached", "MISSED"]
    lines = table(found).splitlines()
    assert any("what is not" in line and "MISSED" in line and "a reason" in line for line in lines)


def test_tables_name_schemes_without_their_placement() -> None:
    names = ("RND/LDM+GSH", "NR/ours", "NR/ours at 8")
    assert [*map(label, names)] == ["LDM+GSH", "Dynamoth", "Dynamoth from minute 8"]


def test_the_page_has_the_claims_of_every_figure() -> None:
    """The page has stored numbers: this compares what does not come from runs."""
    page = (Path(__file__).parents[2] / "docs" / "bad-figures.md").read_text()
    found = [each.partition("\n## ")[0] for each in page.split("\n### ")[1:]]
    sections = {each.partition("\n")[0].rpartition("; ")[0]: each for each in found}
    figures = {each.title: each.claims for each in PROTOTYPED.values()}
    figures |= {each.title: each.claims for several in FIGURES.values() for each in several}
    figures[million.title(1_000_000, million.BROKERS)] = million.CLAIMS
    assert sections.keys() == figures.keys()
    for title, claims in figures.items():
        lines = [line for line in sections[title].splitlines() if line.startswith("| ")]
        assert lines[:2] == markdown([]).splitlines()
        cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]
        assert [(claim, paper, why) for claim, paper, _, _, why in cells] == [
            (each.text, each.paper, each.why) for each in claims
        ]


def test_no_run_is_no_result() -> None:
    with pytest.raises(NoRuns):
        spread([])
    claim = Claim("any", "-", bounded("NR/LDM", lambda run: run.loads[0][0], most=1.0))
    assert [(row.measured, row.verdict) for row in rows([claim], {"NR/LDM": []})] == [("not run", "")]


def test_a_ratio_is_of_the_seeds_that_both_have_run() -> None:
    runs = {"NR/a": [made("a", 1, [[2.0]]), made("a", 2, [[9.0]])], "NR/b": [made("b", 1, [[1.0]])]}
    assert ratio("NR/a", "NR/b", lambda run: run.loads[0][0])(runs).measured == "a / b: 2 (2 to 2)"


# The workload of the prototype.


def test_the_prototype_has_about_the_paper_s_sizes_and_is_the_same_each_time() -> None:
    one, again, other = Emergencies(1), Emergencies(1), Emergencies(2)
    assert one.users == again.users and one.reports == again.reports
    assert one.users != other.users
    assert 1900 <= one.subscriptions <= 2500 and 450 <= len(one.interests) <= 700
    assert 9_500 <= len(one.reports) <= 10_500
    for plan in one.users:
        per_query = Counter(each.query for each in plan.subscriptions)
        assert 1 <= len(per_query) <= 5 and max(per_query.values()) <= 3
        assert plan.login_at <= 240 <= plan.subscriptions[0].at and plan.subscriptions[-1].at <= 480
    assert all(200 <= report.size <= 700 for report in one.reports)


def test_queries_match_by_type_and_by_place() -> None:
    emergencies = Emergencies(3)
    end = 1200.0
    for name in ("EmergenciesOfTypeAt", "EmergenciesOfTypeInPart"):
        query = BY_NAME[name]
        found = emergencies.results(query, end)
        assert found, "there are results in every period"
        for (where, kind), reports in found.items():
            assert (name, (where, kind)) in emergencies.interests
            for report in reports:
                assert report.type == kind and end - query.period_s <= report.at < end
                assert where == (cell_of(report.place) if "cell" in query.parameters else part_of(report.place))
    near = emergencies.results(BY_NAME["EmergenciesNearMe"], end)
    for values in near:
        radius, user = values
        assert isinstance(radius, int)
        wider = [
            each
            for each in (300, 450)
            if each > radius and ("EmergenciesNearMe", (each, user)) in emergencies.interests
        ]
        for each in wider:
            assert set(near[values]) <= set(near[each, user])


def test_nobody_gets_results_before_the_first_subscription() -> None:
    emergencies = Emergencies(1)
    assert not any(emergencies.results(query, 240.0) for query in QUERIES)


def test_walkers_keep_to_the_streets_of_the_town() -> None:
    from random import Random

    town = Town(1)
    walker = Walker(town, 0, Random(1), (0.5, 1.5), (0.0, 120.0))
    former = walker.at(0.0)
    for second in range(1, 2000):
        x, y = walker.at(float(second))
        assert 0 <= x <= WIDTH_M and 0 <= y <= HEIGHT_M
        assert (x - former[0]) ** 2 + (y - former[1]) ** 2 <= 3.0**2, "two streets in one second at most"
        former = x, y
    assert all(ends for ends in town.streets)


# The simulation.


def test_the_simulated_workload_is_the_same_each_time() -> None:
    one, again = SimWorld(SMALL, 7), SimWorld(SMALL, 7)
    assert one.subscriptions == again.subscriptions and one.changes == again.changes and one.homes == again.homes
    assert SimWorld(SMALL, 8).subscriptions != one.subscriptions
    assert all(each.at <= SUBSCRIBED_S for each in one.subscriptions)
    per_user = Counter(each.user for each in one.subscriptions)
    assert min(per_user.values()) >= 10 and max(per_user.values()) <= 30


def test_rates_rise_and_fall_again_after_four_to_six_minutes() -> None:
    world = SimWorld(SMALL, 1)
    rises: dict[str, float] = {}
    for change in world.changes:
        base = world.rates[change.interest]
        if change.rate == base:
            assert 240 <= change.at - rises.pop(change.interest) <= 360
        else:
            assert change.rate == 2 * base and change.interest not in rises
            rises[change.interest] = change.at
    assert len(world.changes) > END_S / 60 * 10


def test_nearest_brokers_are_unevenly_loaded_and_every_scheme_mends_it() -> None:
    """A reduced seed of figures 13 and 14: the same schemes, 400 users."""
    names = ("none", "LDM(0.15, 300)", "LDM(0.05, 300)", "GSH")
    runs = {name: VirtualEdge(SMALL, 1, SCHEMES[name]).run() for name in names}
    none = runs["none"]
    assert max(none.users[-1]) > 4 * min(none.users[-1]) and mean_cov(none) > 0.3 and none.moved == 0
    assert all(sum(users) == 400 for run in runs.values() for users in run.users)
    assert mean_cov(runs["LDM(0.15, 300)"]) <= 0.16 < mean_cov(none)
    assert mean_cov(runs["LDM(0.05, 300)"]) <= mean_cov(runs["LDM(0.15, 300)"])
    assert runs["LDM(0.05, 300)"].moved > runs["LDM(0.15, 300)"].moved > 0
    assert runs["GSH"].shuffles == 1 and runs["GSH"].shuffle_moves == runs["GSH"].moved > 300
    assert runs["GSH"].cov_after_shuffle() < 0.05
    ours_run = VirtualEdge(SMALL, 1, SimScheme(name="ours", settings=ours(0.02, 0.01, 300e6))).run()
    assert mean_max(ours_run) <= 1.03 * mean_max(runs["GSH"]) and moved(ours_run) <= 0.4 * moved(runs["GSH"])


def test_a_run_is_repeated_exactly() -> None:
    scheme = SCHEMES["LDM(0.15, 300)"]
    one, again = (replace(VirtualEdge(SMALL, 2, scheme).run(), more={}) for _ in range(2))
    assert one == again


def test_the_nearest_broker_is_the_one_of_the_part_of_the_town() -> None:
    world = SimWorld(SMALL, 1)
    for x, y in world.homes:
        nearest = min(range(10), key=lambda each: (world.brokers[each][0] - x) ** 2 + (world.brokers[each][1] - y) ** 2)
        assert world.nearest((x, y)) == nearest


def test_nothing_is_decided_before_it_may_begin() -> None:
    early = SimScheme(name="early", settings=settings(cov_max=0.15, mean_min_bytes_per_s=300e6), begin_s=SUBSCRIBED_S)
    run = VirtualEdge(SMALL, 1, early).run()
    assert run.moved > 0
    assert all(moves == 0 for moves, at in zip(run.moves, run.times, strict=True) if at <= SUBSCRIBED_S)


@pytest.mark.parametrize("figure", [FIGURE_13, FIGURE_14])
def test_every_claim_of_a_figure_can_be_judged_with_its_own_runs(figure: object) -> None:
    from bench.bad.simulation_figures import SimFigure

    assert isinstance(figure, SimFigure)
    loads = [[float(1 + broker % 2) for broker in range(10)] for _ in range(31)]
    runs = {f"NR/{name}": [made(name, seed, loads, list(range(31))) for seed in (1, 2)] for name in figure.schemes}
    found = rows(figure.claims, runs)
    assert len(found) == len(figure.claims) and any(row.verdict == "MISSED" for row in found)
