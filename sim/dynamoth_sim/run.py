"""Running seeds: one seed is one world, and any seed can be run again."""

from __future__ import annotations

import os
import sys
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import repeat
from multiprocessing import get_context
from typing import Any

from dynamoth.names import logical_channel
from dynamoth.plan.plan import Location, Mode, single
from dynamoth_client.machines.standalone import FRESH_S
from dynamoth_sim.audit import Audit, Totals, Violation
from dynamoth_sim.cluster import Cluster, short_options
from dynamoth_sim.data.audit import DataAudit
from dynamoth_sim.data.run import DATA_PROFILES, run_data_profile
from dynamoth_sim.data.scenarios import DATA_SCENARIOS
from dynamoth_sim.data.stage import DataStage
from dynamoth_sim.edge.run import EDGE_PROFILES, run_edge_profile
from dynamoth_sim.edge.scenarios import EDGE_SCENARIOS
from dynamoth_sim.edge.stage import EdgeScenario, EdgeStage
from dynamoth_sim.faults.faults import Chaos
from dynamoth_sim.faults.profiles import PROFILES, Profile, draw_profile
from dynamoth_sim.load.workload import Workload
from dynamoth_sim.scenarios.registry import SCENARIOS
from dynamoth_sim.scenarios.stage import SceneFailed, Stage
from dynamoth_sim.world.process import MachineFailed
from dynamoth_sim.world.world import World

SETTLE_S_MAX = 8.0
"""Longest time from the last fault until every transition has settled."""

DRAINED_S_MAX = 1.5 * SETTLE_S_MAX
"""Longest time in which a server being drained becomes empty and is stopped, after the last fault. Faults go on for
this time, too, if it does not become empty before."""

RECOVERY_S = 1.5
"""Time after that in which everything is connected, subscribed and verified again (G5: delivery resumes)."""

FILL_S = 0.3
"""Time between two attempts to move channels to an added server."""

ROUND_S = 0.4
"""The time given to one round of final messages: enough for a publisher to learn a route and to count observers."""

HOLD_S_MAX = 1.5
"""How long subscribers of the simulation hold messages; longer than a pause, a stall and a spike together."""


SPREAD = (0.3, 1.0, 1.0, 3.0, 10.0)
"""How much slower one direction of a connection is than others: the way round is often quicker than the direct one."""

CHECK_EVERY = 20
"""In random worlds the invariants of a machine are checked after one in this many of its events, to save time."""

SEEDS_PER_TASK = 16
"""Seeds that a process takes at a time: about a second of work."""


@dataclass(slots=True)
class Outcome:
    """The result of one seed."""

    seed: int
    name: str
    violations: list[Violation] = field(default_factory=list[Violation])
    totals: Totals = field(default_factory=Totals)
    #: Equal for two runs only if the same happened in both.
    digest: int = 0
    steps: int = 0
    virtual_s: float = 0.0
    cpu_s: float = 0.0

    @property
    def clean(self) -> bool:
        """Whether every guarantee held."""
        return not self.violations

    def __str__(self) -> str:
        what = "clean" if self.clean else f"{len(self.violations)} violations"
        totals = self.totals
        return (
            f"seed {self.seed} ({self.name}): {what}; published {totals.published}, delivered {totals.delivered},"
            f" gaps {totals.gaps} ({totals.needless_gaps} needless);"
            f" {self.steps} steps, {self.virtual_s:.1f} virtual s, {self.cpu_s * 1000:.0f} ms"
        )


def run_seed(seed: int, name: str | None = None) -> Outcome:
    """Run one world.

    Args:
        seed: determines everything that happens in it.
        name: of a scenario (``scenarios.SCENARIOS``, ``edge.scenarios.EDGE_SCENARIOS``,
            ``data.scenarios.DATA_SCENARIOS``), or of a profile of faults (``faults.PROFILES``, ``EDGE_PROFILES``,
            ``DATA_PROFILES``) for a random world; None draws one of PROFILES from the seed.

    Raises:
        KeyError: there is no scenario and no profile of this name.

    """
    if name in SCENARIOS:
        return run_scenario(seed, name)
    if name in EDGE_SCENARIOS:
        return run_edge_scenario(seed, name)
    if name in DATA_SCENARIOS:
        return run_data_scenario(seed, name)
    world = World(seed, CHECK_EVERY)
    if name in EDGE_PROFILES:
        edge, live = run_edge_profile(world, EDGE_PROFILES[name])
        return _outcome(name, edge.cluster, live, edge.logged_audit)
    if name in DATA_PROFILES:
        data, live = run_data_profile(world, DATA_PROFILES[name])
        return _outcome(name, data.cluster, live, data.data_audit)
    drawn = draw_profile(world.random)
    return _run_profile(world, drawn if name is None else PROFILES[name])


def run_scenario(seed: int, name: str, check_every: int = 1) -> Outcome:
    """Play a scenario; the seed determines only what the script leaves open. ``check_every``: as for ``World``."""
    scenario = SCENARIOS[name]
    stage = Stage(World(seed, check_every), scenario)

    def play() -> list[Violation]:
        with suppress(SceneFailed):  # which has been noted as a violation
            if scenario.opened:
                stage.open()
            scenario.play(stage)
            stage.close()
        return stage.violations()

    return _outcome(name, stage.cluster, play)


def run_edge_scenario(seed: int, name: str, check_every: int = 1) -> Outcome:
    """Play a scenario of brokers and users; see :func:`run_scenario`."""
    stage = EdgeStage(World(seed, check_every), EDGE_SCENARIOS[name])
    return _play(name, stage, EDGE_SCENARIOS[name], stage.edge.logged_audit)


def run_data_scenario(seed: int, name: str, check_every: int = 1) -> Outcome:
    """Play a scenario of standing queries; see :func:`run_scenario`."""
    stage = DataStage(World(seed, check_every), DATA_SCENARIOS[name])
    return _play(name, stage, DATA_SCENARIOS[name], stage.data.data_audit)


def _play(name: str, stage: EdgeStage, scenario: EdgeScenario, audit: Audit | DataAudit) -> Outcome:
    def play() -> list[Violation]:
        with suppress(SceneFailed):  # which has been noted as a violation
            stage.open()
            scenario.play(stage)
            stage.close()
        return stage.violations()

    return _outcome(name, stage.cluster, play, audit)


def _run_profile(world: World, profile: Profile) -> Outcome:
    """Run one world under a profile of faults, from start to audit."""
    cluster = Cluster(world, short_options(profile, hold_s_max=HOLD_S_MAX, spread=SPREAD))
    return _outcome(profile.name, cluster, lambda: _live(cluster, profile))


def _outcome(
    name: str, cluster: Cluster, live: Callable[[], list[Violation]], also: Audit | DataAudit | None = None
) -> Outcome:
    """Run a world to its end, and sum up. ``also`` is a second audit."""
    world = cluster.world
    began = time.process_time()
    outcome = Outcome(world.seed, name)
    try:
        outcome.violations = live()
    except MachineFailed as error:
        text = "".join(traceback.format_exception(error)).strip()
        outcome.violations = [Violation("machine", text, world.now)]
    outcome.totals = cluster.audit.totals if also is None else cluster.audit.totals + also.totals
    outcome.digest = zlib.crc32(repr((world.digest, outcome.totals)).encode())
    outcome.steps = world.steps
    outcome.virtual_s = world.now
    outcome.cpu_s = time.process_time() - began
    return outcome


def _live(cluster: Cluster, profile: Profile) -> list[Violation]:
    world = cluster.world
    workload = Workload(cluster, profile.workload)
    chaos = Chaos(cluster, profile)
    if profile.alone_s:  # agents and balancer come later, and every client knows s1 only
        cluster.begin_at("s1")
        world.run_until(FRESH_S + 1.0)
        workload.start()
        world.run_until(world.now + profile.alone_s * world.random.random())
        cluster.start()
    else:
        cluster.start()
        workload.start()
    world.at(world.now + 0.5, chaos.start)
    world.run_until(world.now + profile.work_s)
    world.run_until_true(lambda: not chaos.unfinished(), world.now + DRAINED_S_MAX)
    chaos.stop()
    workload.stop()
    world.run_until_true(lambda: not chaos.unfinished(), world.now + DRAINED_S_MAX)
    violations = [Violation("settling", text, world.now) for text in chaos.unfinished()]
    violations += _settle(cluster, workload)
    for client in cluster.clients:
        for app in client.subscribers:
            app.read_all()
    if stayed := [server for server in cluster.added if server not in cluster.gone]:
        violations += _fill(cluster, workload, stayed[-1])
    if cluster.gone:
        workload.subscribe_late()
    world.run_until(world.now + RECOVERY_S)
    if cluster.gone:
        text = f"{RECOVERY_S} s after a server was found gone, these wait for their confirmation: "
        violations += [Violation("confirmation", text + name, world.now) for name in workload.unconfirmed()]
    cluster.audit.calm()
    workload.publish_everywhere()
    world.run_until(world.now + ROUND_S)
    violations += _settle(cluster, workload)  # where the balancer goes by load, it may have begun something again
    _check_receivers(cluster, workload)
    world.run_until(world.now + ROUND_S)
    violations += _settle(cluster, workload)
    violations += _check_places(cluster, workload)
    for publisher, channel in workload.unended():
        text = f"{publisher.name} still waits for a publish, though nothing has failed for {RECOVERY_S} s"
        violations.append(Violation("G4", text, world.now, channel, story=world.trace.story(channel, None)))
    world.run_until(world.now + HOLD_S_MAX)
    return [*violations, *cluster.audit.finish(world.now)]


def _settle(cluster: Cluster, workload: Workload) -> list[Violation]:
    world = cluster.world
    if world.run_until_true(cluster.settled, world.now + SETTLE_S_MAX):
        return []
    text = f"{SETTLE_S_MAX} s after the last fault: " + "; ".join(cluster.unsettled())
    channel = next((channel for channel in workload.channels if channel.decode() in text), workload.channels[0])
    return [Violation("settling", text, world.now, story=world.trace.story(channel, None))]


def _fill(cluster: Cluster, workload: Workload, server: str) -> list[Violation]:
    """Move every channel to a server that was added, once that may be: who has a pattern has found it by then."""
    world = cluster.world
    end = world.now + SETTLE_S_MAX

    def is_there(channel: bytes) -> bool:
        plan = cluster.newest_plan()
        return plan is not None and plan.entry(channel).route.assignment == single(server)

    while not all(map(is_there, workload.channels)):
        if world.now > end:
            text = f"channels cannot be moved to {server}, which was added: {dict(cluster.moves.refused)}"
            return [Violation("settling", text, world.now)]
        for channel in workload.channels:
            cluster.change(channel, single(server))
        world.run_until(world.now + FILL_S)
        if any(map(is_there, workload.channels)):
            workload.publish_everywhere()
    return _settle(cluster, workload)


def _check_receivers(cluster: Cluster, workload: Workload) -> None:
    """G7, now that all is quiet: publish returns the number of subscriptions."""

    def ended(name: str, channel: bytes, number: int, receivers: int | None) -> None:
        if receivers is not None:
            audit = cluster.audit
            true = audit.open_count(channel) + audit.pattern_count(channel) * _copies(cluster, channel)
            audit.receivers(name, channel, number, cluster.world.now, receivers, true)

    for client in cluster.clients:
        if client.publisher is not None:
            client.publisher.on_ended = partial(ended, client.publisher.name)
    workload.publish_everywhere()


def _copies(cluster: Cluster, channel: bytes) -> int:
    """Return how many servers a message is published at: a pattern is counted by each of them."""
    plan = cluster.newest_plan()
    assert plan is not None, "all is quiet"
    assignment = plan.entry(channel).route.assignment
    return len(assignment.servers) if assignment.mode is Mode.ALL_PUBLISHERS else 1


def _check_places(cluster: Cluster, workload: Workload) -> list[Violation]:
    """When all has settled, everybody listens where the plan says, and nowhere else."""
    violations: list[Violation] = []
    plan = cluster.newest_plan()
    if plan is None:
        return violations
    for channel in workload.channels:
        route = plan.entry(channel).route
        right = {location: len(_listeners(cluster, location)) for location in route.locations(channel)}
        expected = cluster.audit.open_count(channel)
        if route.assignment.mode is Mode.ALL_PUBLISHERS:
            fine = sum(right.values()) == expected
        else:
            fine = all(count == expected for count in right.values())
        found = {
            Location(server.id, physical): ", ".join(server.subscribers(physical))
            for server in cluster.servers.values()
            for physical in server.channels()
            if logical_channel(physical) == channel
        }
        if not fine or not found.keys() <= right.keys():
            text = (
                f"{expected} are subscribed to {channel.decode()}; they should listen at {list(right)} and do: {found}"
            )
            story = cluster.world.trace.story(channel, None)
            violations.append(Violation("place", text, cluster.world.now, channel, story=story))
    return violations


def _listeners(cluster: Cluster, location: Location) -> list[str]:
    return cluster.servers[location.server].subscribers(location.physical)


def run_seeds(seeds: Sequence[int], name: str | None = None, jobs: int = 1) -> Iterator[Outcome]:
    """Run many seeds in ``jobs`` processes; outcomes come in their order. ``name`` as for :func:`run_seed`."""
    if jobs == 1:
        yield from (run_seed(seed, name) for seed in seeds)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(run_seed, seeds, repeat(name), chunksize=SEEDS_PER_TASK)


def parse_seeds(text: str) -> range:
    """Read ``A-B`` (both included) or a single seed. Raises ValueError."""
    first, _, last = text.partition("-")
    try:
        seeds = range(int(first), int(last or first) + 1)
    except ValueError:
        raise ValueError(f"seeds are given as A-B, two numbers from 0, not {text!r}") from None
    if not seeds:
        raise ValueError(f"there is no seed in {text!r}: the first must not be above the last")
    return seeds


def run_and_report(
    seeds: range, scenario: str | None = None, jobs: int | None = None, write: Callable[[str], Any] = sys.stdout.write
) -> bool:
    """Run seeds as ``dynamoth sim`` does, and describe every violation.

    Args:
        seeds: which.
        scenario: name of a scenario or of a profile of faults; None draws a profile for each seed.
        jobs: processes; None for one per core.
        write: where the text goes.

    Returns whether every guarantee held.
    """
    began = time.monotonic()
    broken: list[Outcome] = []
    totals: Counter[str] = Counter()
    for outcome in run_seeds(seeds, scenario, min(len(seeds), jobs or os.cpu_count() or 1)):
        totals += Counter(asdict(outcome.totals))
        if not outcome.clean:
            broken.append(outcome)
            _describe(outcome, scenario, write)
    sums = ", ".join(f"{name} {totals[name]}" for name in ("published", "delivered", "gaps", "needless_gaps"))
    duration = time.monotonic() - began
    write(f"{len(seeds)} seeds, {len(broken)} broken, in {duration:.1f} s; {sums}\n")
    if broken:
        write(f"broken seeds: {', '.join(str(outcome.seed) for outcome in broken)}\n")
    return not broken


def _describe(outcome: Outcome, scenario: str | None, write: Callable[[str], Any]) -> None:
    write(f"{outcome}\n")
    for violation in outcome.violations[1:]:
        write(f"{violation.guarantee} at {violation.at:.6f}: {violation.text}\n")
    write(f"{outcome.violations[0]}\n")
    again = "" if scenario is None else f" --scenario {scenario}"
    write(f"replay: dynamoth sim --seeds {outcome.seed}-{outcome.seed}{again}\n\n")
