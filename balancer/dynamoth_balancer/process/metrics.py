"""The metrics of a balancer, as Prometheus reads them. Labels are ids of servers, resources, and kinds of problems."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric

from dynamoth_balancer.machine import BalancerMachine
from dynamoth_daemon import metrics

_GAUGES: Mapping[str, str] = {
    "leading": "1 while this balancer holds the lease and decides",
    "standing_by": "1 while another balancer leads and this one waits to replace it",
    "paused": "1 while administrators have paused its decisions",
    "links_up": "Servers that the balancer is connected to",
    "agents_alive": "Agents that the balancer hears",
    "agents_in_conflict": "Servers for which several processes speak as agents",
    "transitions": "Channels in transition",
    "transition_age_seconds": "Age of the oldest transition; 0 without any",
    "plan_version": "Version of the plan",
    "plan_entries": "Channels that the plan names",
    "replicated_channels": "Channels that are spread over several servers",
    "fleet_starting": "Servers that the provisioner has been asked for",
    "fleet_joining": "Servers that the provisioner has started and that do not report their load yet",
    "fleet_active": "Servers of the provisioner that take part",
    "fleet_draining": "Servers of the provisioner that give up their channels, as the load is low",
    "fleet_gone": "Servers that the provisioner is to free",
    "fleet_server_seconds": "Time of all servers while this balancer led, each from its request until it is freed",
}

_GAUGES_BY_SERVER: Mapping[str, str] = {
    "load_ratio": "Averaged load over capacity, as decisions see it: load on its way is counted where it goes",
    "channels_left": "Channels that are still at a server that is being drained, as far as its agent knows",
    "slots_left": "Slots that are still at a server that is being drained; the channels without an entry are in slots",
    "agent_blind": "1 while the agent does not see what is published",
}

_RESOURCE_RATIO = "Used of each resource; the load ratio is the larger one of outgoing and cpu"

_COUNTERS: Mapping[str, str] = {
    "decisions": "Decisions of the balancer's own, including those that only say what it cannot do",
    "moves_begun": "Channels whose assignment was changed, by decision or by an administrator",
    "moves_settled": "Channels whose change of assignment has settled",
    "replications_begun": "Channels whose assignment was changed and that are replicated before or after",
    "requests": "Requests of administrators",
    "requests_refused": "Requests of administrators that were refused, or not carried out in time",
    "requests_dropped": "Requests of administrators that came while too many waited; they are repeated",
    "requests_repeated": "Requests of administrators that had been answered before",
    "malformed": "Messages to the balancer that could not be read",
    "unexpected": "Control messages that are not for a balancer",
    "wrong_server": "Messages of agents at a server that is not their own",
    "contested_messages": "Messages of agents while another process spoke for the same server, too",
    "reports_implausible": "Reports with figures that no agent can have measured",
    "acks_from_future": "Acknowledgements of a version that the balancer does not know",
    "copies_conflicting": "Stored plans that no balancer of this cluster can have written, and that were written over",
    "vacated_out_of_date": "Reports of vacated locations for transitions that are over",
    "servers_started": "Servers that the provisioner has started",
    "servers_freed": "Servers that the provisioner has freed",
    "provisioner_failures": "Requests that the provisioner refused, did not answer, or answered wrongly",
    "agents_started_again": "Requests to start a server again whose agent was gone",
    "releases_abandoned": "Releases of servers that ended because the load rose",
}


_FAMILIES = metrics.Families("dynamoth_balancer_")


def make_registry(machine: BalancerMachine, clock: Callable[[], float]) -> CollectorRegistry:
    """Return a registry with the metrics of a balancer and of its process. ``clock`` is the machine's."""
    return metrics.make_registry("balancer", lambda: _collect(machine, clock()))


def _collect(machine: BalancerMachine, now: float) -> Iterator[Metric]:
    for name, figure in machine.overview.figures(now).items():
        yield _FAMILIES.gauge(name, _GAUGES[name], figure)
    by_server = machine.overview.server_figures(now)
    for name, figures in by_server.items():
        known = {server: figure for server, figure in figures.items() if figure is not None}
        yield _FAMILIES.gauge_by("server", name, _GAUGES_BY_SERVER[name], known)
    used = GaugeMetricFamily("dynamoth_balancer_resource_ratio", _RESOURCE_RATIO, labels=["server", "resource"])
    for labels, ratio in machine.overview.resource_ratios(now).items():
        used.add_metric(labels, ratio)
    yield used
    yield from _of_problems(machine, by_server["agent_blind"].keys(), now)
    yield from _FAMILIES.counters(_COUNTERS, machine.overview.all_counters())


def _of_problems(machine: BalancerMachine, servers: Collection[str], now: float) -> Iterator[Metric]:
    """Count the problems by kind, and by server where a server is their subject; channels are never a label."""
    ages: defaultdict[tuple[str, str, str], list[float]] = defaultdict(list)
    for problem in machine.health.problems:
        server = problem.subject if problem.subject in servers else ""
        ages[problem.kind, problem.severity.value, server].append(now - problem.since)
    labels = ["kind", "severity", "server"]
    numbers = GaugeMetricFamily("dynamoth_balancer_problems", "What is stalled or refused, see the log", labels=labels)
    oldest = GaugeMetricFamily("dynamoth_balancer_problem_age_seconds", "Age of the oldest such problem", labels=labels)
    for key, ages_s in ages.items():
        numbers.add_metric(key, len(ages_s))
        oldest.add_metric(key, max(0.0, *ages_s))
    yield numbers
    yield oldest
