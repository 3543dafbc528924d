from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamoth.errors import ConfigError
from dynamoth.machine.events import ErrorReply, LinkDown, LinkUp, Pushed, Replied, Start, Tick
from dynamoth.names import (
    AGENT_CHANNEL,
    ANNOUNCE_CHANNEL,
    BALANCER_CHANNEL,
    OPERATOR_CHANNEL,
    operator_inbox,
    replica_channel,
)
from dynamoth.plan.slots import slot_index
from dynamoth.protocol.control import PlanQuery, pack_control
from dynamoth.protocol.envelope import CONTROL, FORWARDED, HEARTBEAT
from dynamoth.protocol.reports import ChannelLoad, ChannelSums, pack_ids
from dynamoth_lla.counting import PMESSAGE_BYTES
from dynamoth_lla.digest import MESSAGE_BYTES
from dynamoth_lla.machine import NAMES_PER_NUMSUB, LoadAnalyzer
from dynamoth_lla.options import LoadAnalyzerOptions
from dynamoth_lla.round import ObservationLate, Stage
from tests.examples import examples
from tests.lla.harness import OUTGOING_BYTES_PER_S_MAX, Bench, FakeServer, publication, push, rows

MESSAGE = publication(1)


def a_bench(**options: Any) -> Bench:
    """Return an analyzer whose connection is up, and which has measured where the server's counters begin."""
    bench = Bench(**options)
    bench.up()
    assert bench.reports == []
    return bench


# What a report holds.


def test_an_idle_server_is_reported_too() -> None:
    bench = a_bench()
    reports = [bench.next_report() for _ in range(3)]
    assert [report.sequence for report in reports] == [0, 1, 2]
    assert [report.interval_s for report in reports] == [1.0] * 3
    assert all(report.load_ratio == 0 and len(report.columns) == 0 for report in reports)
    assert all((report.server, report.incarnation, report.blind_s) == ("s1", 11, 0) for report in reports)


def test_load_ratio_is_what_the_server_sent_without_what_the_agent_read() -> None:
    bench = a_bench()
    bench.server.subscribers[b"a"] = 2
    bench.observe(*[push(b"a", MESSAGE)] * 100)
    observed_bytes = 100 * (PMESSAGE_BYTES + len(b"a") + len(MESSAGE))
    bench.server.output_bytes += 500_000 + observed_bytes
    ratio = bench.next_report().load_ratio
    replies_ratio = 2000 / OUTGOING_BYTES_PER_S_MAX  # those of INFO and NUMSUB are the agent's as well
    assert 0.5 - replies_ratio <= ratio <= 0.5


def test_messages_on_our_own_channels_are_nobodys_load_but_were_read_by_the_agent() -> None:
    bench = a_bench()
    size = 100_000
    bench.observe(push(AGENT_CHANNEL, bytes(size)))
    bench.server.output_bytes += size
    report = bench.next_report()
    assert report.outgoing_bytes_per_s == 0
    assert report.columns.channels == () and report.rest == ChannelSums()


def test_what_balancers_and_operators_are_sent_is_reported_apart() -> None:
    """The agent has read each message, and so has somebody else."""
    bench = a_bench()
    size = 100_000
    for channel in (BALANCER_CHANNEL, OPERATOR_CHANNEL, operator_inbox(7)):
        bench.observe(push(channel, bytes(size)))
        bench.server.output_bytes += 2 * size
    report = bench.next_report()
    assert 0.99 * 3 * size <= report.control_bytes_per_s <= 3 * size
    assert report.outgoing_bytes_per_s == 0 and report.load_ratio == 0
    bench.observe(push(operator_inbox(7), bytes(size)))
    bench.server.output_bytes += size  # the operator has gone: only the agent has read it
    report = bench.next_report()
    assert report.outgoing_bytes_per_s == report.control_bytes_per_s == 0


def test_control_messages_never_hide_what_channels_send() -> None:
    bench = a_bench()
    bench.server.subscribers[b"c"] = 10
    bench.observe(push(b"c", MESSAGE), push(BALANCER_CHANNEL, bytes(100_000)))
    sent = 10 * (MESSAGE_BYTES + 1 + len(MESSAGE))
    bench.server.output_bytes += sent + 200_000
    assert bench.next_report().outgoing_bytes_per_s >= sent


def test_announcements_and_answers_were_read_by_the_agent_too() -> None:
    bench = a_bench()
    names = [b"%0200d" % number for number in range(500)]
    bench.server.subscribers.update(dict.fromkeys(names, 1))
    bench.announce(1, names)
    bench.server.output_bytes += 100_000
    assert bench.next_report().outgoing_bytes_per_s == 0
    # NUMSUB and CHANNELS are answered after the server was measured, so their bytes are in the next interval.
    bench.server.output_bytes += 2 * 100_000
    assert bench.next_report().outgoing_bytes_per_s == 0


def test_resources_of_the_server() -> None:
    bench = a_bench()
    bench.server.cpu_s += 0.25
    bench.server.input_bytes += 5000
    bench.server.more_fields = (
        "used_memory:2000\r\nmaxmemory:4000\r\nconnected_clients:9\r\nmaxclients:100\r\n"
        "client_recent_max_output_buffer:77\r\nmem_clients_normal:88\r\n"
    )
    report = bench.next_report()
    assert report.cpu_ratio == 0.25
    assert report.incoming_bytes_per_s == 5000
    assert (report.memory_bytes, report.memory_bytes_max) == (2000, 4000)
    assert (report.connections, report.connections_max) == (9, 100)
    assert (report.output_buffer_bytes_max, report.client_buffers_bytes) == (77, 88)
    assert report.tightest_ratio == 0.5


def test_channels_are_measured_as_the_paper_lists() -> None:
    bench = a_bench()
    bench.server.subscribers[b"a"] = 3
    bench.observe(push(b"a", publication(1)), push(b"a", publication(2)), push(b"a", publication(1)))
    report = bench.next_report()
    wire = MESSAGE_BYTES + len(b"a") + len(MESSAGE)
    assert rows(report)[b"a"] == ChannelLoad(b"a", 3, 2, 3, 9, 3 * wire, 9 * wire)
    assert report.columns.publisher_ids[0] == pack_ids((1, 2))
    assert bench.next_report().columns.publications == (0,)


def test_while_it_is_in_transition_a_channel_is_one_row_and_copies_are_no_publications() -> None:
    """Plain name, an old epoch and a new one at once, as when the server is in each of the assignments."""
    bench = a_bench()
    old, new = replica_channel(b"a", 5), replica_channel(b"a", 9)
    bench.server.subscribers.update({b"a": 1, old: 4, new: 2})
    bench.announce(11, [old])
    bench.announce(11, [new])  # moves
    bench.observe(push(b"a", publication(1)), push(old, publication(1, flags=FORWARDED)))
    bench.observe(push(new, publication(1, flags=FORWARDED)), push(new, publication(2)))
    bench.observe(push(new, publication(0, flags=CONTROL)), push(old, publication(0, flags=FORWARDED | CONTROL)))
    bench.observe(push(new, publication(3, flags=HEARTBEAT)))
    bench.announce(11, left=[old])
    report = bench.next_report()
    assert report.columns.channels == (b"a",)
    row = rows(report)[b"a"]
    assert (row.publications, row.publishers) == (2, 2)
    assert row.subscribers == 7, "who is moving is counted twice, by Redis as well"
    assert row.messages_sent == 1 * 1 + 2 * 4 + 4 * 2
    assert report.columns.subscriber_ids == (pack_ids([11]),)
    assert report.rest == ChannelSums()
    bench.server.subscribers.update({b"a": 0, old: 0, new: 7})
    row = rows(bench.next_report())[b"a"]
    assert (row.publications, row.subscribers, row.messages_sent) == (0, 7, 0)


def test_the_busiest_channels_are_named_and_the_rest_are_sums() -> None:
    bench = a_bench(channels_per_report_max=2)
    for number in range(5):
        name = b"c%d" % number
        bench.server.subscribers[name] = number
        bench.observe(*[push(name, publication(number))] * 2)
    report = bench.next_report()
    wire = MESSAGE_BYTES + 2 + len(MESSAGE)
    assert report.columns.channels == (b"c4", b"c3")
    assert report.rest == ChannelSums(
        channels=3, publications=6, subscribers=3, messages_sent=6, bytes_in=6 * wire, bytes_out=6 * wire
    )


def test_what_is_not_named_is_added_up_by_slot_unless_the_plan_names_it() -> None:
    bench = a_bench(channels_per_report_max=1)
    names = [b"c%d" % number for number in range(200)]
    by_slot: dict[int, list[bytes]] = {}
    for name in names:
        by_slot.setdefault(slot_index(name), []).append(name)
    one, other = max(by_slot.values(), key=len)[:2]  # of one slot
    [far] = [name for name in names if slot_index(name) != slot_index(one)][:1]
    bench.server.subscribers.update({one: 3, other: 2, far: 1, b"busiest": 50})
    bench.analyzer.planned = {far}
    bench.observe(*(push(name, MESSAGE) for name in (one, other, far, b"busiest")), push(one, MESSAGE))
    slots = bench.next_report().slots
    counts = zip(slots.publications, slots.subscribers, slots.messages_sent, strict=True)
    rows = dict(zip(slots.slots, counts, strict=True))
    assert rows == {slot_index(one): (3, 5, 2 * 3 + 2), slot_index(far): (0, 1, 0)}
    wire = MESSAGE_BYTES + len(one) + len(MESSAGE)
    assert slots.bytes_out[slots.slots.index(slot_index(one))] == 2 * 3 * wire + 2 * (wire - len(one) + len(other))


@pytest.mark.parametrize(
    ("who_per_channel_max", "publishers", "subscribers"),
    [(2, (pack_ids([3, 2]), b""), (pack_ids([23, 22]), b"")), (0, (b"", b""), (b"", b""))],
)
def test_who_is_notified_of_the_busiest_channels_only_and_the_busiest_publishers_first(
    who_per_channel_max: int, publishers: tuple[bytes, ...], subscribers: tuple[bytes, ...]
) -> None:
    bench = a_bench(who_channels_max=1, who_per_channel_max=who_per_channel_max)
    bench.server.subscribers.update({b"a": 5, b"b": 1})
    for client in (21, 22, 23):
        bench.announce(client, [b"a", b"b"])
    for publisher in (1, 2, 3):
        bench.observe(*[push(b"a", publication(publisher))] * publisher, push(b"b", MESSAGE))
    columns = bench.next_report().columns
    assert (columns.channels, columns.publishers) == ((b"a", b"b"), (3, 1))
    assert (columns.publisher_ids, columns.subscriber_ids) == (publishers, subscribers)


def test_a_report_that_nobody_hears_is_counted() -> None:
    bench = a_bench()
    bench.next_report()
    assert bench.analyzer.counters["reports_unheard"] == 0
    bench.server.hearers = 1
    bench.next_report()
    assert bench.analyzer.counters["reports_unheard"] == 1


# Idle channels.


def test_idle_channels_with_subscribers_are_found_and_named_where_there_is_room() -> None:
    bench = a_bench()
    bench.server.subscribers.update({b"idle": 4, AGENT_CHANNEL: 1})
    bench.next_report()
    report = bench.next_report()
    assert rows(report) == {b"idle": ChannelLoad(b"idle", 0, 0, 4, 0, 0, 0)}


def test_idle_channels_are_asked_for_now_and_then_only_and_in_the_sums_where_there_is_no_room() -> None:
    bench = a_bench(discovery_interval_s=5.0, channels_per_report_max=1)
    bench.server.subscribers.update({b"busy": 1, b"idle": 4})
    for _ in range(12):
        bench.observe(push(b"busy", MESSAGE))
        bench.next_report()
    report = bench.reports[-1]
    assert report.columns.channels == (b"busy",)
    assert (report.rest.channels, report.rest.subscribers) == (1, 4)
    discoveries = [args for args in bench.sent if args[:2] == (b"PUBSUB", b"CHANNELS")]
    counts = [args for args in bench.sent if args[:2] == (b"PUBSUB", b"NUMSUB")]
    assert len(discoveries) == 3
    assert sum(b"idle" in args for args in counts) in (2, 3)


def test_a_channel_that_everybody_left_is_forgotten() -> None:
    bench = a_bench(discovery_interval_s=2.0)
    bench.server.subscribers[b"a"] = 1
    bench.observe(push(b"a", MESSAGE))
    bench.next_report()
    del bench.server.subscribers[b"a"]
    report = [bench.next_report() for _ in range(4)][-1]
    assert len(bench.analyzer.channels) == 0
    assert report.columns.channels == () and report.rest == ChannelSums()


def test_all_channels_are_not_asked_for_when_there_are_too_many() -> None:
    bench = a_bench(discovery_channels_max=10)
    bench.server.subscribers[b"idle"] = 1
    bench.server.channels_elsewhere = 10
    report = bench.next_report()
    assert report.channels_subscribed == 11
    assert (b"PUBSUB", b"CHANNELS") not in bench.sent
    assert bench.analyzer.counters["discoveries_left_out"] == 1


# Bounds of what is asked.


def test_numsub_is_asked_in_chunks() -> None:
    bench = a_bench()
    names = [b"%d" % number for number in range(NAMES_PER_NUMSUB * 2 + 1)]
    bench.server.subscribers.update(dict.fromkeys(names, 1))
    bench.observe(*[push(name, MESSAGE) for name in names])
    report = bench.next_report()
    sizes = [len(args) - 2 for args in bench.sent if args[:2] == (b"PUBSUB", b"NUMSUB")]
    assert sizes == [NAMES_PER_NUMSUB, NAMES_PER_NUMSUB, 1]
    assert sum(report.columns.messages_sent) + report.rest.messages_sent == len(names)


def test_with_too_many_channels_for_one_round_each_has_its_turn() -> None:
    bench = a_bench(numsub_per_round_max=10, discovery_channels_max=0)
    names = [b"%d" % number for number in range(35)]
    bench.server.subscribers.update(dict.fromkeys(names, 1))
    for _ in range(4):
        asked_before = len(bench.sent)
        bench.observe(*[push(name, MESSAGE) for name in names])
        bench.next_report()
        asked = [args for args in bench.sent[asked_before:] if args[:2] == (b"PUBSUB", b"NUMSUB")]
        assert sum(len(args) - 2 for args in asked) <= 10
    columns = bench.reports[-1].columns
    assert set(columns.subscribers) == {1}
    assert len(columns) == 35


def test_messages_of_channels_that_are_not_followed_are_counted_until_there_is_room() -> None:
    bench = a_bench(channels_max=10)
    names = [b"%d" % number for number in range(15)]
    bench.server.subscribers.update(dict.fromkeys([*names, b"new"], 1))
    bench.observe(*[push(name, MESSAGE) for name in names])
    assert bench.next_report().rest.messages_untracked == 5
    assert bench.analyzer.counters["messages_untracked"] == 5
    assert bench.analyzer.counters["messages_observed"] == 15
    bench.observe(push(b"new", MESSAGE))
    report = bench.next_report()
    assert report.columns.channels[0] == b"new" and report.rest.messages_untracked == 0


@pytest.fixture
def long_round(monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A round with messages on 600 channels, of which each step takes some, has begun."""
    monkeypatch.setattr("dynamoth_lla.digest.WORK_PER_STEP", 50)
    bench = a_bench(discovery_channels_max=0)
    names = [b"%d" % number for number in range(600)]
    bench.server.subscribers.update(dict.fromkeys(names, 1))
    bench.observe(*[push(name, MESSAGE) for name in names])
    bench.next_deadline()
    bench.tell(Tick())
    return bench


def test_a_long_round_goes_step_by_step_and_messages_in_between_belong_to_the_next(long_round: Bench) -> None:
    bench, steps = long_round, 0
    while bench.unanswered or bench.is_busy:
        if bench.unanswered:
            bench.answer_one()
        else:
            steps += 1
            bench.observe(push(b"late", MESSAGE))
            bench.tell(Tick())
    assert steps >= 6
    (report,) = bench.reports
    assert sum(report.columns.publications) + report.rest.publications == 600
    assert rows(bench.next_report())[b"late"].publications == steps


# The observer keeps up, or says so.


def test_a_late_observation_is_measured_and_an_alarm_and_the_next_round_waits_for_it() -> None:
    bench = a_bench(lag_s_max=0.5)
    bench.next_deadline()
    bench.tell(Tick())
    assert bench.analyzer.deadline() is None
    bench.now += 2.0
    sent = len(bench.unanswered)
    bench.tell(Tick())
    assert len(bench.unanswered) == sent, "only one round is under way"
    assert bench.analyzer.observation_lag_s(bench.now) == 2.0  # known before the answer has come
    bench.answer_all()  # of the next round as well, which is due by now
    late, in_time = bench.reports
    assert (late.observation_lag_s, in_time.observation_lag_s) == (2.0, 0.0)
    assert (late.interval_s, in_time.interval_s) == (1.0, 2.0), "between the measurements, not the answers"
    assert bench.other_actions == [ObservationLate(True, 2.0), ObservationLate(False, 0.0)]
    assert bench.analyzer.counters["intervals_late"] == 1
    assert bench.analyzer.observation_lag_s(bench.now + 10) == 0.0


def test_rounds_keep_to_their_grid() -> None:
    bench = a_bench()
    began = bench.now
    for _ in range(5):
        bench.next_deadline()
        bench.now += 0.1  # a tick comes late
        bench.tell(Tick())
        bench.answer_all()
    assert (bench.analyzer.deadline() or 0.0) - began == pytest.approx(6.0)


@pytest.mark.parametrize("interruptions", [1, 3])
def test_an_interruption_is_reported_from_the_last_report_to_the_new_connection(interruptions: int) -> None:
    bench = a_bench()
    bench.next_report()
    for _ in range(interruptions):
        bench.now += 0.4
        bench.observe(push(b"a", MESSAGE))
        bench.down()
        assert bench.analyzer.deadline() is None
        bench.now += 5.0
        bench.up()
    report = bench.next_report()
    assert report.blind_s == pytest.approx(5.4 * interruptions)
    assert report.interval_s == 1.0
    assert len(report.columns) == 0, "what was seen before belongs to the blind time"
    assert bench.analyzer.counters["interruptions"] == interruptions
    assert bench.analyzer.blind_s_total == pytest.approx(5.4 * interruptions)
    assert bench.next_report().blind_s == 0


def test_a_restart_of_the_server_is_no_interruption_by_it() -> None:
    bench = a_bench()
    bench.next_report()
    for run_id, interruptions in (("run2", 0), ("run2", 1), ("run3", 1)):
        bench.now += 1.0
        bench.down()
        bench.now += 1.0
        bench.up(run_id)
        report = bench.next_report()
        assert (report.interruptions, report.blind_s > 1.0) == (interruptions, True)


def test_failed_attempts_to_connect_are_nothing() -> None:
    bench = Bench()
    for _ in range(3):
        bench.tell(LinkDown("local", "refused"))
    bench.up()
    assert bench.next_report().blind_s == 0


def test_answers_to_an_earlier_connection_are_dropped() -> None:
    """A driver never delivers them; a machine must not build on it."""
    bench = a_bench()
    bench.next_deadline()
    bench.tell(Tick())
    late = list(bench.unanswered)
    bench.down()
    bench.up()
    for command in late:
        bench.tell(Replied("local", command.tag, bench.server.answer(tuple(command.args))))
    assert bench.reports == []
    assert bench.next_report().sequence == 0


@pytest.mark.parametrize("stage", [Stage.MEASURING, Stage.ASKING, Stage.COMPOSING])
def test_a_round_that_was_cut_off_does_not_disturb_the_next(long_round: Bench, stage: Stage) -> None:
    bench = long_round
    while bench.analyzer.round.stage is not stage:
        if bench.is_busy:
            bench.tell(Tick())
        else:
            bench.answer_one()
    assert bench.reports == []
    bench.down()
    assert bench.analyzer.deadline() is None
    bench.now += 1.0
    bench.up()
    bench.observe(push(b"1", MESSAGE))
    report = bench.next_report()
    assert rows(report)[b"1"].messages_sent == 1
    assert report.blind_s == 0  # as nothing had been reported before: the incarnation is new


def test_a_restarted_server_has_no_subscribers_and_other_counters() -> None:
    bench = a_bench()
    bench.server.subscribers[b"a"] = 3
    bench.server.output_bytes = 900_000
    bench.observe(push(b"a", MESSAGE))
    bench.next_report()
    bench.down()
    bench.server.subscribers.clear()
    bench.server.output_bytes = 0
    bench.up("run2")
    bench.server.output_bytes = 100_000
    report = bench.next_report()
    assert len(report.columns) == 0 and report.rest.channels == 0
    assert 0.09 < report.load_ratio <= 0.1


def test_subscribers_of_the_same_server_are_remembered_over_an_interruption() -> None:
    bench = a_bench()
    bench.server.subscribers[b"a"] = 1
    bench.announce(5, [b"a"])
    bench.next_report()
    bench.down()
    bench.up()
    bench.observe(push(b"a", MESSAGE))
    assert bench.next_report().columns.subscriber_ids == (pack_ids([5]),)


def test_counters_that_were_reset_do_not_make_the_server_idle() -> None:
    bench = a_bench()
    bench.server.output_bytes += 500_000
    before = bench.next_report()
    bench.server.output_bytes = 100  # CONFIG RESETSTAT
    report = bench.next_report()
    assert report.outgoing_bytes_per_s == before.outgoing_bytes_per_s > 400_000
    assert not report.outgoing_is_estimate


# A server that refuses.


def refusing(command: bytes) -> Bench:
    server = FakeServer()
    server.refused.add(command)
    bench = Bench(server)
    bench.up()
    return bench


def test_without_info_the_load_is_estimated_from_what_was_observed() -> None:
    bench = refusing(b"INFO")
    bench.server.subscribers[b"a"] = 10
    bench.observe(*[push(b"a", MESSAGE)] * 7)
    report = bench.next_report()
    assert report.outgoing_is_estimate
    assert report.outgoing_bytes_per_s == 70 * (MESSAGE_BYTES + 1 + len(MESSAGE))
    assert bench.analyzer.counters["replies_refused"] == 8
    assert (b"PUBSUB", b"CHANNELS") not in bench.sent  # it is not known whether there are too many


def test_without_numsub_publications_are_still_reported() -> None:
    bench = refusing(b"PUBSUB")
    bench.observe(push(b"a", MESSAGE))
    row = rows(bench.next_report())[b"a"]
    assert (row.publications, row.subscribers) == (1, 0)


# Input of any kind.


def test_malformed_announcements_are_counted() -> None:
    bench = a_bench()
    for data in (b"", b"\xc1", b"hello", pack_control(PlanQuery(1)), MESSAGE):
        bench.observe(push(ANNOUNCE_CHANNEL, data))
    assert bench.analyzer.counters["announcements_malformed"] == 5
    bench.next_report()


def test_events_of_others_are_passed_by() -> None:
    bench = a_bench()
    bench.tell(Start())
    bench.tell(LinkUp("to:s2", "run9"))
    bench.tell(LinkDown("to:s2", "lost"))
    bench.tell(Replied("to:s2", ("lla", 1, "stats"), b""))
    bench.tell(Replied("local", ("plan",), {}))
    bench.tell(Replied("local", object(), 1))
    bench.tell(Pushed("to:s2", [push(b"a", MESSAGE)]))
    assert bench.unanswered == []
    assert len(bench.next_report().columns) == 0


garbage = (
    st.none()
    | st.integers()
    | st.binary(max_size=40)
    | st.lists(st.integers() | st.binary(max_size=4) | st.none(), max_size=5)
    | st.builds(ErrorReply, st.text(max_size=5))
    | st.dictionaries(st.binary(max_size=3), st.integers(), max_size=3)
)
channels = st.sampled_from([b"a", b"b", AGENT_CHANNEL, ANNOUNCE_CHANNEL, replica_channel(b"a", 1)]) | st.binary(
    max_size=9
)


@examples(200)
@given(st.data())
def test_fuzz_no_input_makes_it_raise_and_it_goes_on_reporting(data: st.DataObject) -> None:
    bench = Bench(channels_max=6, records_max=9, publishers_max=20, numsub_per_round_max=4, discovery_interval_s=2.0)
    bench.up()
    for _ in range(data.draw(st.integers(1, 8))):
        match data.draw(st.sampled_from(["observe", "tick", "garbage", "down", "answer"])):
            case "observe":
                for channel, message in data.draw(st.lists(st.tuples(channels, st.binary(max_size=60)), max_size=9)):
                    bench.observe(push(channel, message))
            case "tick":
                bench.now += data.draw(st.sampled_from([0.0, 0.5, 1.0, 3.0]))
                bench.tell(Tick())
            case "garbage" if bench.unanswered:
                bench.tell(Replied("local", bench.unanswered.pop(0).tag, data.draw(garbage)))
            case "down":
                bench.down()
                bench.up(data.draw(st.sampled_from(["run1", "run2", None])))
            case _:
                bench.answer_all()
    bench.answer_all()
    bench.now += 2.0
    bench.tell(Tick())
    bench.answer_all()
    assert bench.reports


@examples(200)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 7), st.integers(0, 3), st.sampled_from([0, FORWARDED])), max_size=30),
        min_size=1,
        max_size=5,
    ),
    st.integers(1, 10),
    st.integers(1, 12),
)
def test_named_and_rest_add_up_to_what_happened(
    intervals: list[list[tuple[int, int, int]]], named_max: int, steps_max: int
) -> None:
    bench = a_bench(channels_per_report_max=named_max)
    for number in range(8):
        bench.server.subscribers[b"%d" % number] = number
    for interval in intervals:
        published: Counter[int] = Counter()
        sent = 0
        for channel, publisher, flags in interval:
            bench.observe(push(b"%d" % channel, publication(publisher, flags=flags)))
            published[channel] += not flags
            sent += channel
        report = bench.next_report()
        assert sum(report.columns.publications) + report.rest.publications == published.total()
        assert sum(report.columns.messages_sent) + report.rest.messages_sent == sent
        assert list(report.columns.bytes_out) == sorted(report.columns.bytes_out, reverse=True)
        assert len(report.columns) <= named_max
        for name, row in rows(report).items():
            assert row.publications == published[int(name)]
        assert min(dataclasses.astuple(report.rest)) >= 0
        for field in ("publications", "subscribers", "messages_sent", "bytes_in", "bytes_out"):
            assert sum(getattr(report.slots, field)) == getattr(report.rest, field), "no channel is in the plan"


# Options.


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("report_interval_s", 0),
        ("discovery_interval_s", -1.0),
        ("lag_s_max", 0),
        ("outgoing_bytes_per_s_max", 0),
        ("channels_per_report_max", 0),
        ("channels_per_report_max", 10_001),
        ("channels_max", 0),
        ("publishers_max", 0),
        ("records_max", 0),
        ("numsub_per_round_max", 0),
    ],
)
def test_settings_out_of_range_are_refused_by_name(name: str, value: float) -> None:
    options: dict[str, Any] = {"outgoing_bytes_per_s_max": 1, name: value}
    with pytest.raises(ConfigError, match=name):
        LoadAnalyzer("s1", 1, LoadAnalyzerOptions(**options))
