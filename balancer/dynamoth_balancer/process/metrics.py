"""The metrics of a balancer, as Prometheus reads them.

Everything is read from the machine at each scrape. Labels name servers only: channels are too many for labels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from dynamoth_balancer.machine import BalancerMachine, Stage
from dynamoth_balancer.process.recorder import Recorder

COUNTERS: Mapping[str, str] = {
    "decisions": "Decisions that the balancer made by itself, those that nothing can be done included",
    "moves_begun": "Channels whose assignment was changed, by decision or by an administrator",
    "moves_settled": "Channels whose change of assignment has settled",
    "replications_begun": "Changes among them of channels that were, or then are, replicated",
    "requests": "Requests of administrators",
    "requests_refused": "Requests of administrators that were refused, or not carried out in time",
    "requests_repeated": "Requests of administrators that had been answered before",
    "malformed": "Messages to the balancer that could not be read",
    "unexpected": "Control messages that are not for a balancer",
    "wrong_server": "Messages of agents that speak at a server which is not their own",
    "contested_messages": "Messages of agents while another process spoke for the same server, too",
    "reports_implausible": "Reports that nobody can have measured",
    "acks_from_future": "Acknowledgements of a version that the balancer does not know",
    "copies_conflicting": "Stored plans that no balancer of this cluster can have written, and that were written over",
    "vacated_out_of_date": "Words of agents about transitions that are over",
}


class BalancerCollector(Collector):
    """Makes the metrics of one balancer, afresh at each scrape.

    Args:
        machine: the balancer.
        clock: the clock that the machine is told the time of.
        recorder: None where metrics are not recorded.

    """

    def __init__(self, machine: BalancerMachine, clock: Callable[[], float], recorder: Recorder | None) -> None:
        self._machine = machine
        self._clock = clock
        self._recorder = recorder

    def describe(self) -> list[Metric]:
        """Return nothing: names are not checked at registration."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Make all metrics."""
        machine, now = self._machine, self._clock()
        yield InfoMetricFamily("dynamoth_build", "What is running", {"version": _version(), "component": "balancer"})
        yield _gauge("leading", "1 while this balancer holds the lease and decides", machine.stage is Stage.LEADING)
        yield _gauge("paused", "1 while administrators have paused its decisions", machine.is_paused)
        yield _gauge("links_up", "Servers that the balancer is connected to", machine.links_up())
        yield _gauge("agents_alive", "Agents that the balancer hears", machine.agents_alive(now))
        yield _gauge(
            "agents_in_conflict", "Servers for which several processes speak as agents", machine.agents_in_conflict(now)
        )
        yield _gauge("transitions", "Channels in transition", machine.transitions)
        if machine.plan is not None:
            yield _gauge("plan_version", "Version of the plan", machine.plan.version)
            yield _gauge("plan_entries", "Channels that the plan names", len(machine.plan.entries))
            yield _gauge("replicated_channels", "Channels that are spread over several servers", machine.replicated)
        ratios = GaugeMetricFamily(
            "dynamoth_balancer_load_ratio",
            "Averaged load over capacity, as decisions see it: load on its way is counted where it goes",
            labels=["server"],
        )
        for server, ratio in machine.load_ratios(now).items():
            if ratio is not None:
                ratios.add_metric([server], ratio)
        yield ratios
        left = GaugeMetricFamily(
            "dynamoth_balancer_channels_left",
            "Channels that are still at a server that is being drained, as far as its agent can tell",
            labels=["server"],
        )
        for server in sorted(machine.options.draining):
            if (count := machine.channels_left(server, now)) is not None:
                left.add_metric([server], count)
        yield left
        yield from _of_problems(machine, now)
        counters = machine.all_counters()
        for name in {**COUNTERS, **counters}:
            yield _counter(name, COUNTERS.get(name, name.replace("_", " ")), counters.get(name, 0))
        if self._recorder is not None:
            yield _counter("rows_written", "Rows written to the metrics file", self._recorder.rows_written)
            yield _counter("rows_lost", "Rows that could not be written to the metrics file", self._recorder.rows_lost)


def _of_problems(machine: BalancerMachine, now: float) -> Iterator[Metric]:
    """Make the metrics of what is wrong. Problems of channels are counted, and only the oldest of a kind is told."""
    counts: Counter[tuple[str, str, str]] = Counter()
    ages: dict[tuple[str, str, str], float] = {}
    blind_now = machine.blind()
    for problem in machine.health.problems:
        key = (problem.kind, problem.severity.value, problem.subject if problem.subject in blind_now else "")
        counts[key] += 1
        ages[key] = max(ages.get(key, 0.0), now - problem.since)
    labels = ["kind", "severity", "server"]
    numbers = GaugeMetricFamily("dynamoth_balancer_problems", "What is stalled or refused, see the log", labels=labels)
    oldest = GaugeMetricFamily("dynamoth_balancer_problem_age_seconds", "Age of the oldest of them", labels=labels)
    for key, count in counts.items():
        numbers.add_metric(key, count)
        oldest.add_metric(key, ages[key])
    yield numbers
    yield oldest
    yield _gauge("transition_age_seconds", "Age of the oldest transition; 0 without any", machine.transition_age_s(now))
    blind = GaugeMetricFamily(
        "dynamoth_balancer_agent_blind", "1 while the agent does not see what is published", labels=["server"]
    )
    for server, is_blind in blind_now.items():
        blind.add_metric([server], is_blind)
    yield blind


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"dynamoth_balancer_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"dynamoth_balancer_{name}", text, value=value)


def make_registry(
    machine: BalancerMachine, clock: Callable[[], float], recorder: Recorder | None = None
) -> CollectorRegistry:
    """Return a registry with the metrics of a balancer and of its process."""
    registry = CollectorRegistry()
    registry.register(BalancerCollector(machine, clock, recorder))
    ProcessCollector(registry=registry)
    return registry


def _version() -> str:
    try:
        return version("dynamoth")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "unknown"
