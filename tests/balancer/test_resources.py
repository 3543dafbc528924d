"""A server is as loaded as its tighter resource; what no move frees only keeps channels away."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from dynamoth.plan.plan import Mode, single
from dynamoth.protocol.reports import ChannelSums, Report
from dynamoth_balancer.decide.cluster import ChannelFigures, ChannelRate, Cluster, Decision, ServerLoad, decide
from dynamoth_balancer.decide.drain import Drain
from dynamoth_balancer.decide.model import ClusterModel
from dynamoth_balancer.decide.relieve import OTHER_COMMANDS, Relieve
from dynamoth_balancer.decide.replicate import Replicate
from dynamoth_balancer.decide.resources import DELIVERY_CPU_S_MAX, Bounds, Resource, delivery_cpu_s
from dynamoth_balancer.options import BalancerOptions
from dynamoth_balancer.process.metrics import make_registry
from tests.balancer import traffic
from tests.balancer.cluster import started
from tests.balancer.planning import replicated
from tests.balancer.traffic import CAPACITY, Row

OPTIONS = BalancerOptions()
DELIVERY_CPU_S = 4e-6


def report(server: str, messages: Mapping[bytes, tuple[int, int]], cpu_ratio: float, **fields: Any) -> Report:
    """Return a report of publications and messages sent of each channel; a message has 100 bytes."""
    rows = {name: Row(publications, 1, 1, 100 * sent) for name, (publications, sent) in messages.items()}
    made = traffic.report(server, rows, cpu_ratio=cpu_ratio, **fields)
    sent = tuple(messages[name][1] for name in made.columns.channels)
    return replace(made, columns=replace(made.columns, messages_sent=sent))


# Measuring.


def test_cpu_is_shared_among_channels_by_what_redis_does_for_them() -> None:
    """10,000 publications count as 25,000 deliveries: as much as 25,000 messages sent."""
    model = ClusterModel(["s1"], averaging_s=10.0)
    model.report(report("s1", {b"in": (10_000, 0), b"out": (0, 25_000)}, 0.2), 1.0)
    loads = {load.channel: load for load in model.channels("s1")}
    assert loads[b"in"].cpu_ratio == loads[b"out"].cpu_ratio == pytest.approx(0.1)
    assert (loads[b"in"].outgoing_bytes_per_s, loads[b"out"].outgoing_bytes_per_s) == (0, 2_500_000)


def test_channels_that_are_not_named_have_their_part_of_the_cpu() -> None:
    model = ClusterModel(["s1"], averaging_s=10.0)
    rest = ChannelSums(channels=10, messages_sent=75_000, bytes_out=750)
    model.report(report("s1", {b"named": (0, 25_000)}, 0.4, rest=rest), 1.0)
    [named] = model.channels("s1")
    unnamed = model.unnamed("s1")
    assert (named.cpu_ratio, unnamed.cpu_ratio) == pytest.approx((0.1, 0.3)) and unnamed.outgoing_bytes_per_s == 750


def test_cpu_beyond_what_messages_can_cost_is_that_of_other_commands() -> None:
    some = report("s1", {b"few": (10, 10)}, 0.95)
    assert delivery_cpu_s(some) == DELIVERY_CPU_S_MAX
    model = ClusterModel(["s1"], averaging_s=10.0)
    model.report(some, 1.0)
    [few] = model.channels("s1")
    load = model.load("s1", 1.0)
    assert load is not None and load.load_ratio == 0.95 and load.resource is Resource.CPU
    assert few.cpu_ratio == pytest.approx(35 * DELIVERY_CPU_S_MAX)
    assert delivery_cpu_s(report("s1", {}, 0.9)) == 0.0, "nobody publishes"


@pytest.mark.parametrize(("cores", "ratio"), [(1.0, 0.5), (2.0, 0.25), (0.5, 1.0), (0.0, 0.0)])
def test_the_setting_says_how_much_cpu_there_is(cores: float, ratio: float) -> None:
    model = ClusterModel(["s1"], averaging_s=10.0, bounds=Bounds(cpu_ratio_max=cores))
    model.report(report("s1", {b"a": (0, 100_000)}, 0.5), 1.0)
    load = model.load("s1", 1.0)
    assert load is not None and load.cpu_ratio == ratio
    assert sum(each.cpu_ratio for each in model.channels("s1")) == pytest.approx(ratio)
    assert (Resource.CPU in model.usage("s1", 1.0)) == (ratio > 0)


def test_cpu_on_its_way_counts_at_the_new_server() -> None:
    """As bytes do; afterwards reports prove it."""
    model = ClusterModel(["s1", "s2"], averaging_s=10.0)

    def ratios(now: float) -> tuple[float, float]:
        loads = [model.load(server, now) for server in ("s1", "s2")]
        return tuple(round(load.cpu_ratio, 6) for load in loads if load is not None)  # type: ignore[return-value]

    now = 0.0
    for _ in range(10):
        now += 1
        model.report(report("s1", {b"a": (0, 50_000), b"b": (0, 40_000)}, 0.9), now)
        model.report(report("s2", {}, 0.1), now)
    model.on_moves({b"a": (single("s1"), single("s2"))}, now)
    for _ in range(5):
        assert ratios(now) == (0.4, 0.6)
        now += 1  # both send it
        model.report(report("s1", {b"a": (0, 50_000), b"b": (0, 40_000)}, 0.9), now)
        model.report(report("s2", {b"a": (0, 50_000), b"z": (0, 10_000)}, 0.6), now)
    model.on_settled([b"a"], now - 0.5)
    for _ in range(15):
        assert ratios(now) == (0.4, 0.6)
        now += 1
        model.report(report("s1", {b"b": (0, 40_000)}, 0.4), now)
        model.report(report("s2", {b"a": (0, 50_000), b"z": (0, 10_000)}, 0.6), now)
        model.forget_proven(now)
        model.check()


def test_busy_channels_are_those_with_many_bytes_or_much_cpu() -> None:
    model = ClusterModel(["s1"], averaging_s=10.0)
    some = report("s1", {b"bytes": (0, 10_000), b"cpu": (100_000, 0), b"small": (0, 100)}, 0.9)
    model.report(some, 1.0)
    assert model.busy("s1", 500_000.0, 0.5) == [b"bytes", b"cpu"]
    assert model.busy("s1", 500_000.0, 0.95) == [b"bytes"]


def test_a_report_with_more_cpu_than_any_machine_has_is_refused() -> None:
    model = ClusterModel(["s1"], averaging_s=10.0)
    assert not model.report(report("s1", {}, 1e5), 1.0) and model.counters["reports_implausible"] == 1


# Moves.


def cluster(
    loads: Mapping[str, Mapping[str, tuple[float, float]]],
    *,
    other_cpu: float = 0.0,
    full: Mapping[str, str] | None = None,
    draining: str = "",
    figures: ChannelFigures | None = None,
) -> Cluster:
    """Return a cluster: by server and channel, the ratios of outgoing bytes and of CPU. ``other_cpu`` is of s1."""
    rates = {
        server: [ChannelRate(out * CAPACITY, name.encode(), cpu) for name, (out, cpu) in channels.items()]
        for server, channels in loads.items()
    }
    servers = {
        server: ServerLoad(
            server,
            sum(rate.outgoing_bytes_per_s for rate in here),
            CAPACITY,
            sum(rate.cpu_ratio for rate in here) + (other_cpu if server == "s1" else 0.0),
        )
        for server, here in rates.items()
    }
    drained = {draining: rates[draining]} if draining else {}
    some = [] if figures is None else [figures]
    return Cluster(
        servers, rates.__getitem__, lambda channel, server: True, OPTIONS, some, draining=drained, full=full or {}
    )


def moved(decision: Decision) -> list[tuple[str, str]]:
    return [(move.channel.decode(), move.target) for move in decision.moves]


def test_a_server_that_is_short_of_cpu_is_relieved_of_the_channels_that_use_most_of_it() -> None:
    some = cluster({"s1": {"large": (0.5, 0.05), "busy": (0.05, 0.4), "calm": (0.05, 0.4)}, "s2": {}})
    decision = decide([Relieve()], some)
    assert moved(decision) == [("busy", "s2")] and not decision.findings
    [move] = decision.moves
    assert "0.85 (of its CPU)" in move.reason
    assert move.ratios["s1"] == pytest.approx((0.85, 0.55)) and move.ratios["s2"] == pytest.approx((0.0, 0.4))


def test_a_move_is_judged_by_both_resources_of_its_target() -> None:
    """s2 has room in bytes and no CPU; s3 has CPU and no room in bytes."""
    busy = {"s1": {"a": (0.3, 0.45), "b": (0.3, 0.45)}}
    some = cluster({**busy, "s2": {"c": (0.0, 0.55)}, "s3": {"d": (0.55, 0.0)}})
    decision = decide([Relieve()], some)
    assert not decision.moves and "would overload any other server" in decision.findings[0].reason
    some = cluster({**busy, "s2": {"c": (0.0, 0.55)}, "s3": {"d": (0.1, 0.1)}})
    assert moved(decide([Relieve()], some)) == [("a", "s3")]


def test_cpu_that_channels_do_not_use_is_not_chased() -> None:
    """Moving all of them would free nothing: the finding says where to look."""
    some = cluster({"s1": {"a": (0.0, 0.0005), "b": (0.0, 0.0005)}, "s2": {}}, other_cpu=0.95)
    decision = decide([Relieve()], some)
    assert not decision.moves
    assert [finding.reason for finding in decision.findings] == [OTHER_COMMANDS]


def test_a_server_that_is_being_drained_gives_up_its_channels_whatever_uses_its_cpu() -> None:
    """One that cannot move now rests: where its CPU goes is not the reason."""
    some = cluster({"s1": {"a": (0.0, 0.0005)}, "s2": {"b": (0.0, 0.95)}}, other_cpu=0.02, draining="s1")
    [reason] = [finding.reason for finding in decide([Relieve(), Drain()], some).findings if finding.server == "s1"]
    assert reason.startswith("it is not drained yet: its channels rest")


def test_a_channel_with_more_messages_than_one_core_handles_is_replicated() -> None:
    """Its bytes alone, 0.2 of what a server can send, would not ask for it."""
    loads = {"s1": {"hot": (0.2, 0.9)}, "s2": {}, "s3": {}}
    hot = ChannelFigures(b"hot", single("s1"), 100_000, 50, 5, {"s1": 0.2 * CAPACITY}, cpu_ratio={"s1": 0.9})
    [move] = decide([Replicate()], cluster(loads, figures=hot)).moves
    assert move.after.mode is Mode.ALL_SUBSCRIBERS and "load ratio 0.90" in move.reason
    assert {server: ratios.after for server, ratios in move.ratios.items() if ratios.after} == pytest.approx(
        dict.fromkeys(move.after.servers, 0.9 / len(move.after.servers))
    )
    idle = replace(hot, cpu_ratio={"s1": 0.3})
    assert decide([Replicate()], cluster(loads, figures=idle)) == Decision()


# Full servers.


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"connections": 95, "connections_max": 100}, "0.95 of its connections"),
        ({"memory_bytes": 96, "memory_bytes_max": 100}, "0.96 of its memory"),
        ({"memory_bytes": 980}, "0.98 of its memory"),
        ({"connections": 90, "connections_max": 100, "memory_bytes": 900}, ""),
        ({"connections": 1000}, ""),
    ],
)
def test_a_server_is_full_that_is_nearly_out_of_connections_or_memory(fields: dict[str, int], why: str) -> None:
    model = ClusterModel(["s1"], averaging_s=10.0, bounds=Bounds(memory_bytes_max=1000))
    assert model.why_full("s1") == "" and model.usage("s1", 1.0) == {}
    model.report(report("s1", {}, 0.0, **fields), 1.0)
    assert model.why_full("s1") == why


def test_no_channel_comes_to_a_full_server_and_none_leaves_it_for_that() -> None:
    full = {"s3": "0.95 of its connections"}
    some = cluster(
        {"s1": {"a": (0.5, 0.0), "b": (0.4, 0.0)}, "s2": {"c": (0.1, 0.0)}, "s3": {"d": (0.0, 0.0)}}, full=full
    )
    assert moved(decide([Relieve()], some)) == [("a", "s2")]
    some = cluster({"s1": {"a": (0.5, 0.0), "b": (0.4, 0.0)}, "s3": {"d": (0.3, 0.0)}}, full=full)
    decision = decide([Relieve()], some)
    assert not decision.moves and "relieve s3, which uses 0.95 of its connections" in decision.findings[0].reason


def test_a_full_server_can_be_drained_but_takes_nothing_of_others() -> None:
    loads = {"s1": {"a": (0.1, 0.0)}, "s2": {}, "s3": {}}
    some = cluster(loads, full={"s1": "0.95 of its memory", "s2": "0.95 of its memory"}, draining="s1")
    assert moved(decide([Drain()], some)) == [("a", "s3")]


def test_a_replica_at_a_full_server_stays() -> None:
    place = replicated(Mode.ALL_SUBSCRIBERS, 1, 2)
    figures = ChannelFigures(
        b"hot", place, 20_000, 50, 5, {"s1": 0.65 * CAPACITY, "s2": 0.65 * CAPACITY}, cpu_ratio={"s1": 0.1, "s2": 0.1}
    )
    loads = {"s1": {"hot": (0.65, 0.1)}, "s2": {"hot": (0.65, 0.1)}, "s3": {}, "s4": {}}
    some = cluster(loads, full={"s1": "0.95 of its memory", "s4": "0.95 of its memory"}, figures=figures)
    [move] = decide([Replicate()], some).moves
    assert set(move.after.servers) == {"s1", "s2", "s3"}


# What people see.


def test_status_metrics_and_problems_show_the_tightest_resource() -> None:
    machines, balancer = started()
    registry: CollectorRegistry = make_registry(balancer.machine, lambda: machines.now)
    machines.agents["s1"].loads[b"a"] = CAPACITY // 10
    machines.agents["s1"].amend = lambda made: replace(made, cpu_ratio=0.3, connections=93, connections_max=100)
    machines.run(3)
    server = machines.ask("status").result["servers"]["s1"]
    assert server["load_ratio"] == pytest.approx(0.3) and server["tightest_resource"] == "connections"
    assert server["resource_ratios"] == pytest.approx({"outgoing": 0.1, "cpu": 0.3, "connections": 0.93})
    assert server["full"] == "0.93 of its connections"
    assert [problem.kind for problem in balancer.machine.health.problems] == ["server_full"]
    assert "raise maxclients" in balancer.machine.health.problems[0].reason
    name, labels = "dynamoth_balancer_resource_ratio", {"server": "s1", "resource": "connections"}
    assert registry.get_sample_value(name, labels) == pytest.approx(0.93)
    assert registry.get_sample_value(name, {"server": "s2", "resource": "outgoing"}) == 0.0
    assert registry.get_sample_value(name, {"server": "s2", "resource": "memory"}) is None
