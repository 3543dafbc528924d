from __future__ import annotations

from dataclasses import replace

import pytest

from dynamoth.edge.control import (
    BrokerReport,
    Candidate,
    Candidates,
    CandidatesOffer,
    EdgeMessage,
    InterestColumns,
    MoveEnd,
    MovesEnded,
    Stamp,
    pack_edge,
)
from dynamoth.globs import literal_glob
from dynamoth.machine.events import Connect, Disconnect, ErrorReply, Pushed, Replied, Send, Start, Tick
from dynamoth.names import (
    AGENT_CHANNEL,
    BALANCER_CHANNEL,
    COORDINATOR_CHANNEL,
    COORDINATOR_RECORD_CHANNEL,
    RECORD_CHANNEL,
    RECORDER_FAILING_CHANNEL,
    probe_channel,
)
from dynamoth.plan.plan import Server
from dynamoth.protocol.records import RecordedRows, pack_rows
from dynamoth.protocol.reports import ChannelColumns, ChannelSums, Report, pack_report
from dynamoth.recording import TABLES, channel_bytes, channel_text
from dynamoth_recorder.events import LinkChanged, Refused, Rows, ServersChanged, StoreChanged
from dynamoth_recorder.machine import PROBE_LOST_S, RESUBSCRIBE_S, RecorderMachine
from dynamoth_recorder.rows import rows_of_report
from tests.machines.helpers import SERVERS, Subject, commands, only

PROBES = probe_channel(7)

COLUMNS = ChannelColumns((b"a", b"\xff"), (1, 2), (1, 1), (3, 4), (3, 8), (10, 20), (30, 40), (b"", b""), (b"", b""))
REPORT = Report(
    server="s1",
    incarnation=5,
    sequence=1,
    interval_s=1.0,
    plan_version=0,
    outgoing_bytes_per_s_max=100,
    outgoing_bytes_per_s=70.0,
    problems=(("kind", "text"),),
    columns=COLUMNS,
    rest=ChannelSums(channels=9, publications=8),
)


class Recorder(Subject):
    def __init__(self, *servers: Server) -> None:
        super().__init__(RecorderMachine(7))
        self.tell(Start(), ServersChanged(servers or SERVERS[:1]))

    def listening(self) -> Recorder:
        self.up("s1")
        self.tell(Pushed("s1", [[b"subscribe", PROBES, 2]]))
        return self

    def report(self, report: Report = REPORT, server: str = "s1") -> list[Rows]:
        push = [b"pmessage", BALANCER_CHANNEL, BALANCER_CHANNEL, pack_report(report)]
        return only(Rows, self.tell(Pushed(server, [push])))

    @property
    def not_heard(self) -> dict[str, str]:
        assert isinstance(self.machine, RecorderMachine)
        return self.machine.not_heard

    def counted(self, name: str) -> int:
        assert isinstance(self.machine, RecorderMachine)
        return self.machine.counters[name]


def test_it_follows_the_servers_and_listens_to_reports_by_a_pattern_and_never_to_what_agents_hear() -> None:
    recorder = Recorder()
    actions = recorder.up("s1")
    patterns = [(BALANCER_CHANNEL,), (COORDINATOR_CHANNEL,)]
    assert commands(actions, b"PSUBSCRIBE") == patterns, "the names have no character of a glob"
    assert commands(actions, b"SUBSCRIBE") == [(RECORD_CHANNEL,), (COORDINATOR_RECORD_CHANNEL,), (PROBES,)]
    assert AGENT_CHANNEL not in [args for send in only(Send, actions) for args in send.args]
    moved = Server("s1", "redis://elsewhere:1")
    assert recorder.tell(ServersChanged((moved, SERVERS[1]))) == [
        Disconnect("s1"),
        Connect("s1", moved.url),
        Connect("s2", SERVERS[1].url),
    ]


def test_a_report_becomes_a_row_of_the_server_and_one_of_each_channel_and_of_the_others_together() -> None:
    recorder = Recorder().listening()
    server, channels = recorder.report()
    assert server.table == "servers" and server.same["problems"] == ["kind: text"]
    assert (channels.table, channels.count) == ("channels", 3)
    assert channels.same == {"server": "s1", "incarnation": 5, "sequence": 1, "interval_s": 1.0}
    columns = {name: [*values] for name, values in channels.columns.items()}
    assert columns["channel"] == ["a", "\\xff", None] and columns["channels"] == [1, 1, 9]
    assert columns["publications"] == [1, 2, 8] and columns["publishers"] == [1, 1, None]
    assert columns["publisher_ids"] == [b"", b"", None]
    for report, rows in ((replace(REPORT, rest=ChannelSums()), 2), (replace(REPORT, columns=ChannelColumns()), 1)):
        [_, channels] = rows_of_report(report)
        assert {len(values) for values in channels.columns.values()} == {rows} == {channels.count}
    assert len(rows_of_report(replace(REPORT, columns=ChannelColumns(), rest=ChannelSums()))) == 1
    assert recorder.report() == [] and recorder.counted("repeated") == 1


def test_what_cannot_be_read_or_comes_from_the_wrong_server_is_counted_only() -> None:
    recorder = Recorder(*SERVERS[:2]).listening()
    assert recorder.report(replace(REPORT, server="s2")) == []
    junk = [b"pmessage", BALANCER_CHANNEL, BALANCER_CHANNEL, pack_report(REPORT)[:-1]]
    ack = [b"pmessage", BALANCER_CHANNEL, BALANCER_CHANNEL, b"\x92\x01\x02"]
    assert recorder.tell(Pushed("s1", [junk, ack])) == []
    recorder.push("s1", RECORD_CHANNEL, b"junk")
    recorder.push("s1", PROBES, b"junk")
    assert [recorder.counted(name) for name in ("wrong_server", "malformed", "unexpected")] == [1, 2, 1]


def test_what_the_balancer_says_at_each_server_is_recorded_once_and_its_rows_are_numbered() -> None:
    recorder = Recorder(*SERVERS[:2]).listening()
    recorder.up("s2")
    data = pack_rows(RecordedRows(3, 1, "plans", ("channel", "version"), (("a", 1), ("b", 1))))
    [rows] = only(Rows, recorder.push("s1", RECORD_CHANNEL, data))
    assert (rows.table, rows.count, rows.same) == ("plans", 2, {"balancer": 3, "number": 1})
    assert {name: [*column] for name, column in rows.columns.items()} == {
        "channel": ["a", "b"],
        "version": [1, 1],
        "line": [0, 1],
    }
    assert recorder.push("s2", RECORD_CHANNEL, data) == []


BROKER_REPORT = BrokerReport(
    broker="b1",
    capacity_bytes_per_s=1000.0,
    load_bytes_per_s=600.0,
    inbound_bytes_per_s=200.0,
    users=3,
    location=(48.2, 16.4),
    interests=InterestColumns(("k1", "k2"), (150.0, 50.0), (2, 1)),
    user_loads=(0, 2, 1),
    url="wss://b1/",
    report_s=1.0,
)


def from_broker(message: EdgeMessage, number: int = 1) -> Pushed:
    data = pack_edge(Stamp(4, number), message)
    return Pushed("s1", [[b"pmessage", COORDINATOR_CHANNEL, COORDINATOR_CHANNEL, data]])


def test_a_report_of_a_broker_becomes_a_row_and_one_of_each_interest_and_names_no_user() -> None:
    recorder = Recorder(*SERVERS[:2]).listening()
    recorder.up("s2")
    broker, interests = only(Rows, recorder.tell(from_broker(BROKER_REPORT)))
    head = {"broker": "b1", "incarnation": 4, "number": 1}
    assert broker.table == "brokers" and head.items() <= broker.same.items()
    assert broker.same.keys() == {column.name for column in TABLES["brokers"].columns} - {"at", "recorder"}
    assert (broker.same["user_loads"], broker.same["latitude"], broker.same["load_bytes_per_s"]) == ("0 2 1", 48.2, 600)
    assert (interests.table, interests.count, interests.same) == ("broker_interests", 2, head)
    assert interests.columns == {"interest": ("k1", "k2"), "rate": (150.0, 50.0), "users": (2, 1)}
    copy = replace(from_broker(BROKER_REPORT), link="s2")
    assert recorder.tell(copy) == [], "it came through another server"
    candidates = Candidates("b1", (Candidate("phone@ann", ("k1",)),), InterestColumns(("k1",), (1.0,), (1,)))
    ended = MovesEnded("b1", (("phone@ann", MoveEnd.LEFT),))
    others: tuple[EdgeMessage, ...] = CandidatesOffer(1, candidates), ended
    assert recorder.tell(*(from_broker(each, number) for number, each in enumerate(others, 2))) == []
    [alone] = only(
        Rows, recorder.tell(from_broker(replace(BROKER_REPORT, interests=InterestColumns(), location=None), 4))
    )
    assert alone.same["latitude"] is None and recorder.counted("malformed") == 0


def test_what_the_coordinator_says_is_recorded_once_and_each_sender_fills_only_its_own_tables() -> None:
    recorder = Recorder(*SERVERS[:2]).listening()
    recorder.up("s2")
    data = pack_rows(RecordedRows(3, 1, "broker_moves", ("from_broker", "interests"), (("b1", ("k1",)),)))
    [rows] = only(Rows, recorder.push("s1", COORDINATOR_RECORD_CHANNEL, data))
    assert (rows.table, rows.same) == ("broker_moves", {"coordinator": 3, "number": 1})
    assert recorder.push("s2", COORDINATOR_RECORD_CHANNEL, data) == []
    plans = pack_rows(RecordedRows(3, 2, "plans", ("channel",), (("a",),)))
    assert recorder.push("s1", COORDINATOR_RECORD_CHANNEL, plans) == recorder.push("s1", RECORD_CHANNEL, data) == []
    assert recorder.counted("malformed") == 2


def test_a_server_that_refuses_only_what_brokers_say_is_heard_and_asked_again() -> None:
    recorder = Recorder()
    recorder.up("s1")
    events = refused(COORDINATOR_CHANNEL), refused(COORDINATOR_RECORD_CHANNEL), confirmed(PROBES)
    assert only(Refused, recorder.tell(*events)) == [Refused("s1", "NOPERM")]
    assert recorder.not_heard == {}
    again = recorder.pass_time(RESUBSCRIBE_S + 1.0)
    assert (COORDINATOR_CHANNEL,) in commands(again, b"PSUBSCRIBE")


def test_gaps_name_what_the_recording_does_not_know() -> None:
    recorder = Recorder().listening()
    recorder.report()
    missing, *_ = recorder.report(replace(REPORT, sequence=4))
    assert missing.same["kind"] == "report_missing"
    assert (missing.same["count"], missing.same["seconds"], missing.same["sequence"]) == (2, 2.0, 4)
    blind, *_ = recorder.report(replace(REPORT, sequence=5, blind_s=3.5))
    assert (blind.same["kind"], blind.same["seconds"]) == ("agent_blind", 3.5)
    recorder.down("s1")
    recorder.pass_time(10.0)
    assert recorder.down("s1") == [], "the log has this reason"
    assert only(LinkChanged, recorder.up("s1")) == [LinkChanged("s1", None)]
    [away] = recorder.tell(Pushed("s1", [[b"subscribe", PROBES, 2]]))
    assert (away.same["kind"], away.same["seconds"], away.same["sequence"]) == ("recorder_away", 10.0, 1)
    assert len(recorder.report(replace(REPORT, sequence=9))) == 2, "the absence has been recorded"


def kinds(rows: list[Rows]) -> list[str]:
    return [each.same["kind"] for each in rows if each.table == "gaps"]


def test_the_time_between_an_agent_and_its_successor_is_a_gap() -> None:
    recorder = Recorder().listening()
    assert kinds(recorder.report()) == [], "nothing is known of the time before"
    recorder.now += 4.0
    restarted, *_ = recorder.report(replace(REPORT, incarnation=6, sequence=1))
    expected = {"kind": "agent_restarted", "server": "s1", "incarnation": 6, "sequence": 1, "seconds": 3.0}
    assert expected.items() <= restarted.same.items()
    recorder.now += 1.4
    assert kinds(recorder.report(replace(REPORT, incarnation=7))) == [], "a report may take that long"


def test_an_agent_that_dies_blind_leaves_a_gap_since_it_saw_something() -> None:
    recorder = Recorder().listening()
    recorder.report()
    for sequence in (2, 3):
        recorder.now += 2.0
        assert kinds(recorder.report(replace(REPORT, sequence=sequence, observing=False, blind_s=2.0))) == []
    recorder.now += 1.0
    restarted, *_ = recorder.report(replace(REPORT, incarnation=6, observing=False))
    assert (restarted.same["kind"], restarted.same["seconds"]) == ("agent_restarted", 4.0)
    recorder.now += 3.0
    restarted, *_ = recorder.report(replace(REPORT, incarnation=7))
    assert (restarted.same["kind"], restarted.same["seconds"]) == ("agent_restarted", 2.0), "no time twice"


def test_an_agent_that_started_again_while_the_recorder_was_away_leaves_a_gap_only_after_that() -> None:
    recorder = Recorder().listening()
    recorder.report()
    for incarnation, after_s, found in ((6, 1.0, []), (7, 4.0, ["agent_restarted"]), (7, 4.0, [])):
        recorder.down("s1")
        recorder.pass_time(10.0)
        recorder.listening()
        recorder.now += after_s
        gaps = [rows for rows in recorder.report(replace(REPORT, incarnation=incarnation)) if rows.table == "gaps"]
        assert kinds(gaps) == found and [rows.same["seconds"] for rows in gaps] == [3.0 for _ in found]


def test_an_absence_begins_when_something_was_heard_last() -> None:
    recorder = Recorder().listening()
    recorder.pass_time(2.5)
    recorder.push("s1", PROBES, b"the latest message")
    recorder.pass_time(4.0)
    recorder.down("s1")
    recorder.pass_time(1.0)
    recorder.up("s1")
    [away] = recorder.tell(Pushed("s1", [[b"subscribe", PROBES, 2]]))
    assert away.same["seconds"] == 5.0


def test_an_absence_of_a_recorder_that_stood_still_begins_when_it_ran_last() -> None:
    recorder = Recorder().listening()
    recorder.pass_time(2.0)
    recorder.now += 30.0
    recorder.report()
    recorder.down("s1")
    recorder.tell(Tick())
    recorder.up("s1")
    [away] = recorder.tell(Pushed("s1", [[b"subscribe", PROBES, 2]]))
    assert (away.same["kind"], away.same["seconds"]) == ("recorder_away", 30.0)


def test_absences_from_a_server_that_left_and_came_back_have_other_numbers() -> None:
    recorder = Recorder().listening()
    numbers: list[int] = []
    for _ in range(2):
        recorder.down("s1")
        recorder.up("s1")
        [away] = recorder.tell(Pushed("s1", [[b"subscribe", PROBES, 2]]))
        numbers.append(away.same["sequence"])
        recorder.tell(ServersChanged(()), ServersChanged(SERVERS[:1]))
        recorder.listening()
    assert numbers == [1, 2], "rows with equal keys are one event"


def test_the_absence_from_a_server_that_moved_is_noted() -> None:
    recorder = Recorder().listening()
    recorder.pass_time(1.5)
    recorder.push("s1", PROBES, b"the latest message")
    recorder.tell(ServersChanged((Server("s1", "redis://elsewhere:1"),)))
    recorder.pass_time(4.0)
    recorder.up("s1")
    [away] = recorder.tell(Pushed("s1", [[b"subscribe", PROBES, 2]]))
    assert (away.same["kind"], away.same["seconds"]) == ("recorder_away", 4.5), "since the latest tick"


def test_a_probe_measures_the_latency_and_a_lost_one_has_none() -> None:
    recorder = Recorder().listening()
    [(channel, first)] = commands(recorder.pass_time(1.0), b"PUBLISH", "s1")
    assert channel == PROBES
    recorder.now += 0.25
    [row] = only(Rows, recorder.push("s1", PROBES, first))
    assert row.same == {"server": "s1", "number": 1, "latency_s": 0.25}
    lost = only(Rows, recorder.pass_time(PROBE_LOST_S + 1.0))
    assert [rows.table for rows in lost] == ["latency", "gaps"]
    assert lost[0].same == {"server": "s1", "number": 2} and lost[1].same["kind"] == "probe_lost"
    assert {rows.table for rows in only(Rows, recorder.down("s1"))} == {"latency", "gaps"}
    assert commands(recorder.pass_time(3.0), b"PUBLISH") == []


def test_a_recorder_that_was_stopped_says_that_its_rows_are_late() -> None:
    recorder = Recorder().listening()
    recorder.now += 30.0
    [late, *_] = only(Rows, recorder.tell(Tick()))
    assert (late.same["kind"], late.same["server"], late.same["seconds"]) == ("recorder_late", "s1", 29.0)
    assert "gaps" not in {rows.table for rows in only(Rows, recorder.pass_time(1.0))}


def test_reports_that_waited_for_the_recorder_have_the_times_at_which_they_were_due() -> None:
    recorder = Recorder().listening()
    recorder.report()
    recorder.now += 0.9
    ages = [recorder.report(replace(REPORT, sequence=2))[0].age_s]
    recorder.now += 7.0
    after = (3, 4, 8, 9, 10)  # three were lost
    ages += [recorder.report(replace(REPORT, sequence=sequence))[-1].age_s for sequence in after]
    assert ages == pytest.approx([0, 6, 5, 1, 0, 0]), "the latest ones came in time, as far as is known"
    recorder.now += 60.0
    [server, *_] = recorder.report(replace(REPORT, sequence=11, interval_s=60.0))
    assert server.age_s == 0, "its agent stood still"
    recorder.now += 60.0
    assert recorder.report(replace(REPORT, incarnation=6))[-1].age_s == 0, "nothing is known of a new agent"


def test_reports_after_a_blind_time_or_another_interval_did_not_wait_for_the_recorder() -> None:
    recorder = Recorder().listening()
    recorder.report()
    recorder.now += 31.0
    assert recorder.report(replace(REPORT, sequence=2, blind_s=30.0))[-1].age_s == 0, "the agent was blind"
    recorder.now += 31.0
    ages = [recorder.report(replace(REPORT, sequence=4))[-1].age_s]  # the one between was of a blind agent
    for sequence in (5, 6):
        recorder.now += 1.0
        ages.append(recorder.report(replace(REPORT, sequence=sequence))[-1].age_s)
    assert ages == [29.0, 0.0, 0.0], "one may be dated wrong, and not all from then on"


AGENTS = literal_glob(BALANCER_CHANNEL)


def refused(what: bytes, text: str = "NOPERM") -> Replied:
    return Replied("s1", what, ErrorReply(text))


def confirmed(*channels: bytes) -> Pushed:
    return Pushed("s1", [[b"psubscribe" if channel == AGENTS else b"subscribe", channel, 1] for channel in channels])


def test_a_refusal_is_reported_once_and_lasts_until_the_subscription_is_confirmed() -> None:
    recorder = Recorder()
    recorder.up("s1")
    assert recorder.tell(refused(AGENTS), refused(RECORD_CHANNEL), confirmed(PROBES)) == [Refused("s1", "NOPERM")]
    for _ in range(3):
        again = recorder.pass_time(RESUBSCRIBE_S + 1.0)
        assert commands(again, b"PSUBSCRIBE")[0] == (BALANCER_CHANNEL,) and not commands(again, b"PUBLISH")
        assert only(Refused, again) == [] and recorder.not_heard == {"s1": "NOPERM"}
        assert recorder.tell(refused(AGENTS), confirmed(RECORD_CHANNEL, PROBES)) == []
        assert recorder.not_heard == {"s1": "NOPERM"}
    recorder.pass_time(RESUBSCRIBE_S)
    [away] = recorder.tell(confirmed(AGENTS, RECORD_CHANNEL, PROBES))
    assert isinstance(away, Rows) and (away.same["kind"], away.same["seconds"]) == ("recorder_away", 43.0)
    assert recorder.not_heard == {} and recorder.counted("refused") == 5


def test_a_refusal_is_reported_for_each_reason_and_connection() -> None:
    recorder = Recorder().listening()
    probe = refused(b"PUBLISH", "NOPERM for publish")
    assert recorder.tell(probe, probe) == [Refused("s1", "NOPERM for publish")]
    assert commands(recorder.pass_time(RESUBSCRIBE_S + 1.0), b"PSUBSCRIBE") == [], "probes ask by themselves"
    recorder.tell(Replied("s1", b"PUBLISH", 1))
    assert recorder.not_heard == {}
    recorder.tell(probe)
    recorder.down("s1")
    recorder.up("s1")
    assert recorder.tell(probe) == [Refused("s1", "NOPERM for publish")]


def test_a_refused_sign_of_a_recorder_that_cannot_write_ends_with_it() -> None:
    recorder = Recorder().listening()
    recorder.tell(StoreChanged(True), refused(RECORDER_FAILING_CHANNEL))
    assert recorder.not_heard == {"s1": "NOPERM"}
    recorder.tell(StoreChanged(False), refused(RECORDER_FAILING_CHANNEL))
    assert recorder.not_heard == {}


def test_servers_show_that_the_recording_cannot_be_written() -> None:
    recorder = Recorder(*SERVERS[:2]).listening()
    assert recorder.tell(StoreChanged(True)) == [
        Send("s1", (b"SUBSCRIBE", RECORDER_FAILING_CHANNEL), RECORDER_FAILING_CHANNEL)
    ]
    assert (RECORDER_FAILING_CHANNEL,) in commands(recorder.up("s2"), b"SUBSCRIBE")
    assert len(recorder.tell(StoreChanged(False))) == 2


def test_lost_rows_are_a_gap_of_each_table() -> None:
    recorder = Recorder().listening()
    keys: set[tuple[object, ...]] = set()
    for _ in range(2):
        recorder.tell(StoreChanged(True))
        recorder.now += 5.0
        lost = only(Rows, recorder.tell(StoreChanged(False, {"servers": 3, "channels": 900})))
        assert [(each.same["kind"], each.same["server"], each.same["count"]) for each in lost] == [
            ("rows_lost", None, 3),
            ("rows_lost", None, 900),
        ]
        assert {each.same["seconds"] for each in lost} == {5.0}
        keys |= {tuple(each.same.get(name) for name in TABLES["gaps"].key) for each in lost}
    assert len(keys) == 4, "rows with equal keys are one event"


def test_each_name_of_a_channel_has_a_text_of_its_own() -> None:
    names = [b"caf\xc3\xa9", b"\xff-a", rb"\xff-a", rb"\\xff-a", b"\\\xff", b""]
    for some in (names, names[:1], names[2:4]):
        zeros, nobody = (0,) * len(some), (b"",) * len(some)
        columns = ChannelColumns(tuple(some), zeros, zeros, zeros, zeros, zeros, zeros, nobody, nobody)
        [_, rows] = rows_of_report(replace(REPORT, columns=columns, rest=ChannelSums()))
        assert [*map(channel_bytes, rows.columns["channel"])] == some
        assert rows.columns["channel"] == [*map(channel_text, some)]
    assert channel_text(b"caf\xc3\xa9-\xff") == "caf\u00e9-\\xff"
