from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest

from dynamoth.plan.plan import Entry
from dynamoth_balancer.options import BalancerOptions
from dynamoth_balancer.process.metrics import make_registry
from tests.balancer.cluster import started
from tests.compose.metric_series import hostile_channels, series_of

CHANNELS = 1000
"""Of one report; several reports name more."""


def test_the_number_of_series_depends_on_servers_and_not_on_channels() -> None:
    """10,000 channels of hostile names are reported; moves of some of them are stalled, and each is a problem."""
    cluster, balancer = started(options=BalancerOptions(load_ratio_high=1000.0))
    cluster.run(6)
    registry: CollectorRegistry = make_registry(balancer.machine, lambda: cluster.now)
    before = series_of(registry)
    names = hostile_channels(10_000)
    for first in range(0, len(names), CHANNELS):
        loads = dict.fromkeys(names[first : first + CHANNELS], 1)
        cluster.agents["s1"].loads, cluster.agents["s2"].loads = loads, loads
        cluster.run(0.5)
    for agent in cluster.agents.values():
        agent.lose = lambda message: True  # so that no transition settles
    ring = balancer.plan.ring
    for request, name in enumerate(names[:100]):
        home = ring.home(name)
        cluster.admin(home, "move", {"channel": name, "to": "s2" if home == "s1" else "s1"}, request)
    cluster.run(20)
    stalled = {"kind": "transition_stalled", "severity": "warning", "server": ""}
    assert registry.get_sample_value("dynamoth_balancer_problems", stalled) == 11, "ten, and a sum of the others"
    added = [dict(labels) for _, labels in series_of(registry) - before]
    assert sorted(labels["server"] for labels in added) == ["", "", "s1", "s1", "s2", "s2"]


class Entries(Mapping[bytes, Entry]):
    """The entries of a plan, for somebody who must not go through all of them."""

    def __init__(self, entries: Mapping[bytes, Entry]) -> None:
        self._entries = entries

    def __getitem__(self, channel: bytes) -> Entry:
        return self._entries[channel]

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[bytes]:
        raise AssertionError("goes through all entries of the plan")


def test_neither_a_scrape_nor_a_status_goes_through_the_entries_of_the_plan() -> None:
    """The event loop of a balancer with 100,000 channels would stand still meanwhile."""
    cluster, balancer = started(3, BalancerOptions(load_ratio_high=1000.0, join_s=0.0, draining=frozenset({"s3"})))
    assert cluster.ask("pause").error is None
    cluster.run(5)
    registry = make_registry(balancer.machine, lambda: cluster.now)
    for channel in (b"a", b"b"):
        arguments = {"channel": channel, "mode": "all-publishers", "servers": ["s1", "s2"]}
        assert cluster.ask("replicate", arguments).error is None
    assert cluster.ask("unreplicate", {"channel": b"a", "to": "s1"}).error is None
    vars(balancer.plan)["entries"] = Entries(balancer.plan.entries)
    generate_latest(registry)
    assert registry.get_sample_value("dynamoth_balancer_plan_entries") == 2
    assert registry.get_sample_value("dynamoth_balancer_leading") == 1
    assert registry.get_sample_value("dynamoth_balancer_moves_settled_total") == 3
    assert registry.get_sample_value("dynamoth_balancer_replicated_channels") == 1
    status = balancer.machine.overview.status(cluster.now)
    assert (status["entries"], status["replicated"]) == (2, 1)
    assert [entry["channel"] for entry in status["replicated_channels"]] == [b"b"]
