"""The model: averages, and load on its way, which counts once and at the right server (case 19)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamoth.plan.plan import Assignment, Mode, Route, single
from dynamoth.plan.slots import slot_name
from dynamoth.protocol.reports import ChannelSums, Report, SlotColumns
from dynamoth_balancer.decide.model import BUSY_MAX, SAMPLES_MAX, ClusterModel
from tests.balancer import traffic
from tests.balancer.traffic import Row, Traffic

CAPACITY = 1000


def report(server: str, loads: dict[bytes, int], *, rest: int = 0, interval_s: float = 1.0) -> Report:
    """Return a report of loads in bytes/s; ``rest`` is sent on channels that it does not name."""
    rows = {channel: Row(bytes_out=load) for channel, load in loads.items()}
    sent = float(sum(loads.values()) + rest)
    return traffic.report(server, rows, interval_s, capacity=CAPACITY, outgoing_bytes_per_s=sent)


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
    assert {load.channel: load.outgoing_bytes_per_s for load in model.channels("s1")} == {b"a": pytest.approx(300)}
    assert model.load("s1", 40.0) is None, "silent agents are no idle servers"


def test_a_server_that_is_full_has_the_load_of_all_that_is_due_to_its_subscribers() -> None:
    """It sends no more than it can, and would seem to have only a little too much."""
    model = ClusterModel(["s1", "s2"], averaging_s=10.0)
    full = replace(report("s1", {b"a": 1500, b"b": 700}), outgoing_bytes_per_s=float(CAPACITY))
    model.report(full, 1.0)
    model.report(report("s2", {}), 1.0)
    assert ratio(model, "s1", 1.0) == 2.2
    model.on_moves({b"a": (single("s1"), single("s2"))}, 2.0)
    model.report(full, 2.0)
    model.report(report("s2", {}), 2.0)
    assert (ratio(model, "s1", 2.0), ratio(model, "s2", 2.0)) == (0.7, 1.5)


def test_reports_of_different_length_weigh_by_it() -> None:
    model = ClusterModel(["s1"], averaging_s=10.0)
    model.report(report("s1", {b"a": 100}, interval_s=3.0), 3.0)
    model.report(report("s1", {b"a": 500}, interval_s=1.0), 4.0)
    assert ratio(model, "s1", 4.0) == 0.2


def test_channels_that_come_and_go_are_averaged_over_the_whole_time() -> None:
    model = ClusterModel(["s1"], averaging_s=10.0)
    for second in range(10):
        model.report(report("s1", {b"a": 100} if second % 2 else {b"b": 100}), float(second))
    assert {load.channel: load.outgoing_bytes_per_s for load in model.channels("s1")} == pytest.approx(
        {b"a": 50, b"b": 50}
    )


def test_slots_have_the_load_that_no_channel_has_by_name_and_take_it_along() -> None:
    model = ClusterModel(["s1", "s2"], averaging_s=10.0)
    slots = SlotColumns((5, 7), (1, 1), (10, 20), (1, 1), (0, 0), (100, 300))
    rest = ChannelSums(channels=3, publications=3, subscribers=35, messages_sent=3, bytes_out=450)
    full = replace(report("s1", {b"a": 50}, rest=450), rest=rest, slots=slots, channels_subscribed=100)
    model.report(full, 1.0)
    model.report(report("s2", {}), 1.0)
    five, seven = slot_name(5), slot_name(7)
    assert {name: load.outgoing_bytes_per_s for name, load in model.slots("s1").items()} == {five: 100, seven: 300}
    assert [load.channel for load in model.channels("s1")] == [b"a"] and model.channel_names("s1") == {b"a"}
    assert not model.unnamed("s1") and model.busy("s1", 0.0, 0.0) == [b"a"]
    assert model.subscriptions("s1") == ({b"a": 0, five: 10, seven: 20}, 70), "INFO counts 100 channels"
    model.on_moves({seven: (single("s1"), single("s2"))}, 2.0)
    model.report(full, 2.0)  # still there
    model.report(report("s2", {}), 2.0)
    assert (ratio(model, "s1", 2.0), ratio(model, "s2", 2.0)) == (0.2, 0.3)
    assert model.slots("s2")[seven].outgoing_bytes_per_s == 300 and not model.slots("s1")[seven]


def test_load_on_its_way_counts_at_the_new_server_and_forwarded_copies_do_not() -> None:
    model = ClusterModel(["s1", "s2"], averaging_s=10.0)
    now = 0.0
    for _ in range(10):
        now += 1
        model.report(report("s1", {b"a": 500, b"b": 400}), now)
        model.report(report("s2", {b"z": 100}), now)
    assert (ratio(model, "s1", now), ratio(model, "s2", now)) == (0.9, 0.1)
    model.on_moves({b"a": (single("s1"), single("s2"))}, now)
    for second in range(5):
        assert (ratio(model, "s1", now), ratio(model, "s2", now)) == (0.4, 0.6), f"{second} s after the decision"
        now += 1  # forwarded in both directions: it is sent at both servers, and even more than before
        model.report(report("s1", {b"a": 500, b"b": 400}), now)
        model.report(report("s2", {b"z": 100, b"a": 700}), now)
    model.on_settled([b"a"], now - 0.5)
    for second in range(15):
        assert (ratio(model, "s1", now), ratio(model, "s2", now)) == (0.4, 0.6), f"{second} s after it has settled"
        now += 1
        model.report(report("s1", {b"b": 400}), now)
        model.report(report("s2", {b"z": 100, b"a": 500}), now)
        model.forget_proven(now)
    model.report(report("s2", {b"z": 100}), now + 1)
    assert ratio(model, "s2", now + 1) == 0.55, "reports are believed again"


def test_an_agent_that_has_restarted_begins_anew() -> None:
    model = ClusterModel(["s1"], averaging_s=10.0)
    model.report(report("s1", {b"a": 900}), 1.0)
    model.on_agent_restart("s1")
    model.report(report("s1", {b"a": 100}), 2.0)
    assert ratio(model, "s1", 2.0) == 0.1 and model.reports("s1") == 1


def test_samples_are_bounded() -> None:
    model = ClusterModel(["s1"], averaging_s=10.0)
    now, interval_s = 0.0, 0.011
    for load in [0] * SAMPLES_MAX + [100] * SAMPLES_MAX:
        now += interval_s
        model.report(report("s1", {b"a": load}, interval_s=interval_s), now)
    assert ratio(model, "s1", now) == 0.1, "those without load are forgotten before their time"


def test_reports_count_that_an_average_is_too_short_for_until_there_was_none() -> None:
    model = ClusterModel(["s1"], averaging_s=2.0)
    for now in range(1, 6):
        model.report(report("s1", {b"a": 100}), float(now))
    assert model.reports("s1") == 5
    assert model.load("s1", 6.9) is not None and model.reports("s1") == 5
    assert model.load("s1", 7.1) is None and model.reports("s1") == 0
    model.report(report("s1", {b"a": 100}), 8.0)
    assert model.reports("s1") == 1


@given(
    st.lists(
        st.tuples(
            st.dictionaries(st.sampled_from([b"a", b"b", b"c"]), st.integers(0, 10**9), max_size=3),
            st.floats(0.011, 3.0),
            st.floats(0.0, 1.0),
            st.sampled_from(["report", "report", "report", "move", "settle", "restart"]),
        ),
        max_size=40,
    )
)
def test_sums_of_channels_are_exact(steps: list[tuple[dict[bytes, int], float, float, str]]) -> None:
    """Whatever comes and goes, the running sums are those that adding up all samples gives: ``check`` compares."""
    model = ClusterModel(["s1", "s2"], averaging_s=5.0)
    now = 0.0
    for loads, interval_s, cpu_ratio, step in steps:
        now += interval_s
        match step:
            case "move":
                model.on_moves({channel: (single("s1"), single("s2")) for channel in loads}, now)
            case "settle":
                model.on_settled(list(loads), now)
                model.forget_proven(now)
            case "restart":
                model.on_agent_restart("s1")
            case _:
                rows = {c: Row(load % 1000, 1, 5, load) for c, load in loads.items()}
                model.report(traffic.report("s1", rows, interval_s, capacity=CAPACITY, cpu_ratio=cpu_ratio), now)
        model.check()
    for _ in range(2):  # the first one may still cover a channel that moves
        now += 6.0
        model.report(report("s1", {b"z": 100}), now)
    assert [load for load in model.channels("s1") if load.channel != b"z"] == [], "nothing is left of what has gone"


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
            model.on_moves({channel: (single(places[channel]), single(target))}, now)
            on_the_way[channel] = target
        for _ in range(ticks):
            pass_time()
        if settles:
            for moved, to in on_the_way.items():
                places[moved] = to
            model.on_settled(list(on_the_way), now)
            on_the_way.clear()
        model.forget_proven(now)
        expected = dict.fromkeys(servers, 0)
        for c, load in loads.items():
            expected[on_the_way.get(c, places[c])] += load
        for server in servers:
            load_now = model.load(server, now)
            assert load_now is not None
            assert load_now.outgoing_bytes_per_s == pytest.approx(expected[server], abs=1e-6)


# What is true of a channel, however many servers have measured it.

HOT = b"hot"
TRAFFIC = Traffic(1000, 90, publishers=30, message_bytes=0.01)


def _seen(
    model: ClusterModel, route: Route, servers: list[str], counted: Traffic = TRAFFIC, until: float = 10.0
) -> None:
    for server in servers:
        for second in range(10):
            rows = {b"other": Row(bytes_out=10.0)}
            if server in route.assignment.servers:
                rows[HOT] = counted.seen_at(server, route)
            _hear(model, server, rows, until - 9 + second)


def _hear(model: ClusterModel, server: str, rows: dict[bytes, Row], at: float) -> None:
    model.report(traffic.report(server, rows, capacity=CAPACITY), at)


@pytest.mark.parametrize("mode", Mode)
def test_figures_of_a_channel_are_the_same_in_every_mode(mode: Mode) -> None:
    servers = ["s1", "s2", "s3", "s4"]
    assignment = single("s2") if mode is Mode.SINGLE else Assignment(mode, ("s4", "s1", "s2"))
    model = ClusterModel(servers, averaging_s=20.0)
    _seen(model, Route(3, assignment), servers)
    [figures] = model.figures({HOT: assignment})
    assert figures.assignment == assignment
    assert figures.publications_per_s == pytest.approx(1000, abs=2)
    assert (figures.publishers, figures.subscribers) == (30, 90)
    assert figures.total.outgoing_bytes_per_s == pytest.approx(900, abs=2)
    assert set(figures.outgoing_bytes_per_s) == set(assignment.servers)


def test_figures_are_averages_and_publishers_the_most_of_any_report() -> None:
    model = ClusterModel(["s1"], averaging_s=20.0)
    _seen(model, Route(0, single("s1")), ["s1"], Traffic(100, 10, publishers=7, message_bytes=0.1), until=10.0)
    _seen(model, Route(0, single("s1")), ["s1"], Traffic(300, 30, publishers=2, message_bytes=0.1), until=20.0)
    [figures] = model.figures({HOT: single("s1")})
    assert (figures.publications_per_s, figures.subscribers, figures.publishers) == pytest.approx((200, 20, 7))


def test_what_is_published_at_a_server_that_has_no_replica_counts() -> None:
    """Plain Redis clients do not know of replicas: what they publish is forwarded, and copies are no publications."""
    assignment = Assignment(Mode.ALL_SUBSCRIBERS, ("s1", "s2"))
    model = ClusterModel(["s1", "s2", "s3"], averaging_s=20.0)
    _seen(model, Route(1, assignment), ["s1", "s2"])
    for second in range(1, 11):
        _hear(model, "s3", {HOT: Row(publications=500)}, float(second))
    [figures] = model.figures({HOT: assignment})
    assert figures.publications_per_s == pytest.approx(1500, abs=2)


def test_figures_are_not_known_while_reports_are_from_before_the_channel_settled() -> None:
    before, after = single("s1"), Assignment(Mode.ALL_PUBLISHERS, ("s2", "s3"))
    servers = ["s1", "s2", "s3"]
    model = ClusterModel(servers, averaging_s=5.0)
    _seen(model, Route(0, before), servers, until=10.0)
    model.on_moves({HOT: (before, after)}, 10.0)
    model.on_settled([HOT], 12.5)
    for now in range(11, 31):
        _seen_once(model, Route(1, after), servers, float(now))
        model.forget_proven(float(now))
        assert (model.figures({HOT: after}) != []) == (now >= 18), f"at {now}: a report of 12 to 13 is in the average"
    assert ClusterModel(["s1"], 5.0).figures({HOT: single("s1")}) == [], "no report at all"


def _seen_once(model: ClusterModel, route: Route, servers: list[str], now: float) -> None:
    for server in servers:
        rows = {HOT: TRAFFIC.seen_at(server, route)} if server in route.assignment.servers else {}
        _hear(model, server, rows, now)
        model.load(server, now)


def test_the_busiest_channels_of_the_latest_report_are_found() -> None:
    model = ClusterModel(["s1", "s2"], averaging_s=10.0)
    model.report(report("s1", {b"gone": 900}), 1.0)
    model.report(report("s1", {b"a": 300, b"b": 500, b"c": 299}), 2.0)
    assert model.busy("s1", 300.0, 1.0) == [b"b", b"a"]
    assert model.busy("s2", 0.0, 1.0) == []
    many = {b"%d" % number: 5 for number in range(3 * BUSY_MAX)}
    model.report(report("s2", many), 2.0)
    assert len(model.busy("s2", 0.0, 1.0)) == BUSY_MAX


def test_load_that_is_being_spread_counts_at_all_replicas() -> None:
    servers = ["s1", "s2", "s3"]
    model = ClusterModel(servers, averaging_s=5.0)
    one, three = single("s1"), Assignment(Mode.ALL_SUBSCRIBERS, ("s1", "s2", "s3"))
    two = Assignment(Mode.ALL_PUBLISHERS, ("s2", "s3"))
    _seen(model, Route(0, one), servers)
    for before, after, expected in (
        (one, three, (0.31, 0.31, 0.31)),
        (three, two, (0.01, 0.46, 0.46)),
        (two, single("s2"), (0.01, 0.91, 0.01)),
    ):
        model.on_moves({HOT: (before, after)}, 10.0)
        assert tuple(ratio(model, server, 10.0) for server in servers) == pytest.approx(expected, abs=0.002)
