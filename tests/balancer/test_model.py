"""The model: averages, and load on its way, which counts once and at the right server (DESIGN 7, number 19)."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamoth.reports import ChannelColumns, Report
from dynamoth_balancer.model import SAMPLES_MAX, ClusterModel

CAPACITY = 1000


def report(server: str, loads: dict[bytes, int], *, rest: int = 0, interval_s: float = 1.0) -> Report:
    """Return a report of loads in bytes/s; ``rest`` is sent on channels that it does not name."""
    channels = tuple(sorted(loads, key=lambda channel: -loads[channel]))
    zeros, nobody = (0,) * len(channels), (b"",) * len(channels)
    out = tuple(round(loads[channel] * interval_s) for channel in channels)
    return Report(
        server=server,
        incarnation=1,
        sequence=1,
        interval_s=interval_s,
        plan_version=0,
        outgoing_bytes_per_s_max=CAPACITY,
        outgoing_bytes_per_s=float(sum(loads.values()) + rest),
        columns=ChannelColumns(channels, zeros, zeros, zeros, zeros, zeros, out, nobody, nobody),
    )


def ratio(model: ClusterModel, server: str, now: float) -> float | None:
    load = model.load(server, now)
    return None if load is None else round(load.load_ratio, 6)


def test_load_ratios_are_averaged() -> None:
    model = ClusterModel(["s1"], averaging_s=10.0)
    assert model.load("s1", 0.0) is None
    for second in range(1, 21):
        model.report(report("s1", {b"a": 100 if second <= 10 else 300}, rest=100), float(second))
        if second == 10:
            assert ratio(model, "s1", 10.0) == 0.2
        if second == 15:
            assert ratio(model, "s1", 15.0) == 0.3
    assert ratio(model, "s1", 20.0) == 0.4
    assert {channel: rate for rate, channel in model.channels("s1")} == {b"a": pytest.approx(300)}
    assert model.load("s1", 40.0) is None, "silent agents are no idle servers"


def test_reports_of_different_length_weigh_by_it() -> None:
    model = ClusterModel(["s1"], averaging_s=10.0)
    model.report(report("s1", {b"a": 100}, interval_s=3.0), 3.0)
    model.report(report("s1", {b"a": 500}, interval_s=1.0), 4.0)
    assert ratio(model, "s1", 4.0) == 0.2


def test_channels_that_come_and_go_are_averaged_over_the_whole_time() -> None:
    model = ClusterModel(["s1"], averaging_s=10.0)
    for second in range(10):
        model.report(report("s1", {b"a": 100} if second % 2 else {b"b": 100}), float(second))
    assert {channel: rate for rate, channel in model.channels("s1")} == pytest.approx({b"a": 50, b"b": 50})


def test_load_on_its_way_counts_at_the_new_server_and_forwarded_copies_do_not() -> None:
    model = ClusterModel(["s1", "s2"], averaging_s=10.0)
    now = 0.0
    for _ in range(10):
        now += 1
        model.report(report("s1", {b"a": 500, b"b": 400}), now)
        model.report(report("s2", {b"z": 100}), now)
    assert (ratio(model, "s1", now), ratio(model, "s2", now)) == (0.9, 0.1)
    model.moved({b"a": ("s1", "s2")}, now)
    for second in range(5):
        assert (ratio(model, "s1", now), ratio(model, "s2", now)) == (0.4, 0.6), f"{second} s after the decision"
        now += 1  # forwarded in both directions: it is sent at both servers, and even more than before
        model.report(report("s1", {b"a": 500, b"b": 400}), now)
        model.report(report("s2", {b"z": 100, b"a": 700}), now)
    model.settled([b"a"], now - 0.5)
    for second in range(15):
        assert (ratio(model, "s1", now), ratio(model, "s2", now)) == (0.4, 0.6), f"{second} s after it has settled"
        now += 1
        model.report(report("s1", {b"b": 400}), now)
        model.report(report("s2", {b"z": 100, b"a": 500}), now)
        model.forget_proven(now)
    model.report(report("s2", {b"z": 100}), now + 1)
    assert ratio(model, "s2", now + 1) == 0.55, "reports are believed again"


def test_a_channel_that_is_moved_on_counts_at_its_latest_server_only() -> None:
    model = ClusterModel(["s1", "s2", "s3"], averaging_s=10.0)
    now = 0.0
    for _ in range(10):
        now += 1
        model.report(report("s1", {b"a": 500}), now)
        model.report(report("s2", {}), now)
        model.report(report("s3", {}), now)
    places = ["s1", "s2", "s3", "s1", "s2"]
    for source, target in pairwise(places):
        model.moved({b"a": (source, target)}, now)
        model.settled([b"a"], now)
        now += 1
        for server in ("s1", "s2", "s3"):
            model.report(report(server, {b"a": 500} if server == target else {}), now)
        expected = {server: 0.5 if server == target else 0.0 for server in ("s1", "s2", "s3")}
        assert {server: ratio(model, server, now) for server in expected} == expected


def test_an_agent_that_has_restarted_begins_anew() -> None:
    model = ClusterModel(["s1"], averaging_s=10.0)
    model.report(report("s1", {b"a": 900}), 1.0)
    model.agent_restarted("s1")
    model.report(report("s1", {b"a": 100}), 2.0)
    assert ratio(model, "s1", 2.0) == 0.1 and model.samples("s1") == 1


def test_samples_are_bounded() -> None:
    model = ClusterModel(["s1"], averaging_s=10.0)
    for number in range(3 * SAMPLES_MAX):
        model.report(report("s1", {b"a": 1000}, interval_s=0.011), number * 0.011)
    assert model.samples("s1") == SAMPLES_MAX


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 2), st.booleans()), min_size=1, max_size=30)
)
def test_the_load_of_the_cluster_is_neither_lost_nor_doubled(steps: list[tuple[int, int, int, bool]]) -> None:
    """Whatever is moved, and whenever it settles: with constant load the sum over all servers stays the same."""
    servers = ["s0", "s1", "s2"]
    loads = {b"c%d" % n: 100 * (n + 1) for n in range(4)}
    places = dict.fromkeys(loads, "s0")
    on_the_way: dict[bytes, str] = {}
    model = ClusterModel(servers, averaging_s=5.0)
    now = 0.0

    def pass_time() -> None:
        nonlocal now
        now += 1.0
        for server in servers:
            here = {c: load for c, load in loads.items() if server in (places[c], on_the_way.get(c))}
            model.report(report(server, here), now)

    for _ in range(6):
        pass_time()
    for channel_number, target_number, ticks, settles in steps:
        channel, target = b"c%d" % channel_number, servers[target_number]
        if channel not in on_the_way and places[channel] != target:
            model.moved({channel: (places[channel], target)}, now)
            on_the_way[channel] = target
        for _ in range(ticks):
            pass_time()
        if settles:
            for moved, to in on_the_way.items():
                places[moved] = to
            model.settled(list(on_the_way), now)
            on_the_way.clear()
        model.forget_proven(now)
        expected = dict.fromkeys(servers, 0)
        for c, load in loads.items():
            expected[on_the_way.get(c, places[c])] += load
        for server in servers:
            load_now = model.load(server, now)
            assert load_now is not None
            assert load_now.outgoing_bytes_per_s == pytest.approx(expected[server], abs=1e-6)
