"""Recorded decisions are compared with those of a replay one by one, whatever the recorder's delays."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest

from dynamoth.errors import MalformedMessage
from dynamoth.names import BALANCER_CHANNEL, RECORD_CHANNEL
from dynamoth.plan.plan import single
from dynamoth.protocol.records import RecordedRows, unpack_rows
from dynamoth.protocol.reports import unpack_report
from dynamoth_analytics.replay.agreement import Agreement, agreement
from dynamoth_analytics.replay.recorded import RecordedReport, RecordedWindow
from dynamoth_analytics.replay.windows import plan_step, recorded_log, recorded_pauses
from dynamoth_balancer.options import BalancerOptions
from tests.analytics.loads import BEGIN, SERVERS, at_home, load, recorded_under
from tests.balancer.cluster import SimCluster, StoringServer

OPTIONS = BalancerOptions(
    wait_s=5.0, averaging_s=4.0, channel_rest_s=10.0, replication_rest_s=10.0, load_ratio_high=0.7
)
SECONDS = 150
LAG_S_MAX = 2.5
CHANNELS = {server: at_home(server, 8) for server in SERVERS}

Rows = list[dict[str, Any]]


def restless(second: int) -> Mapping[bytes, float]:
    """Return loads that change each second, with another server overloaded every 15 s."""
    chance = random.Random(second)
    hot = SERVERS[second // 15 % len(SERVERS)]
    return {
        name: chance.uniform(0.8, 1.2) * (100_000 if server == hot else 30_000)
        for server, names in CHANNELS.items()
        for name in names
    }


def recorded(pauses: Sequence[tuple[float, bool]] = ()) -> tuple[RecordedWindow, Rows]:
    """Return a recording without delays, and the rows of its decisions."""
    window, _, tables = recorded_under(replace(load(SECONDS, restless), pauses=pauses), OPTIONS)
    return window, tables["decisions"]


@pytest.fixture(scope="module")
def recording() -> tuple[RecordedWindow, Rows]:
    return recorded()


def late(window: RecordedWindow, rows: Rows) -> tuple[RecordedWindow, Rows]:
    """Return what a slow recorder would have written: messages come with random delays, those of a sender in order."""
    chance = random.Random(7)

    def delays(times: Iterable[float]) -> dict[float, float]:
        sent = sorted({*times})
        heard = accumulate((at + chance.uniform(0, LAG_S_MAX) for at in sent), max)
        return dict(zip(sent, heard, strict=True))

    of_balancer = delays([*(row["at"] for row in rows), *(step.at for step in window.steps)])
    reports: list[RecordedReport] = []
    for server in SERVERS:
        some = [each for each in window.reports if each.report.server == server]
        of_agent = delays(each.at for each in some)
        reports += [each._replace(at=of_agent[each.at]) for each in some]
    reports.sort(key=lambda each: each.at)
    steps = [replace(step, at=of_balancer[step.at]) for step in window.steps]
    return replace(window, reports=reports, steps=steps), [{**row, "at": of_balancer[row["at"]]} for row in rows]


def found(window: RecordedWindow, rows: Rows) -> Agreement:
    return agreement(window, recorded_log(rows), OPTIONS)


def without(rows: Rows, *names: str) -> Rows:
    return [{name: value for name, value in row.items() if name not in names} for row in rows]


def test_a_replay_makes_the_recorded_decisions_however_late_the_recorder_heard_of_them(
    recording: tuple[RecordedWindow, Rows],
) -> None:
    agreed = found(*recording)
    assert agreed.same == agreed.recorded >= 5 and agreed.moves > agreed.recorded and not agreed.differences
    window, rows = late(*recording)
    assert found(window, rows) == agreed
    unknown = found(window, without(rows, "clock_s", "reports", "settled"))
    assert unknown.same < agreed.same, "by the recorder's time alone, decisions differ"


def test_one_different_decision_does_not_lead_to_others(recording: tuple[RecordedWindow, Rows]) -> None:
    window, rows = recording
    number, channel = next((row["decision"], row["channel"]) for row in rows if row["kind"] == "move")
    changed = [
        {**row, "to_servers": ("s3",)} if (row["decision"], row["channel"]) == (number, channel) else row
        for row in rows
    ]
    agreed = found(window, changed)
    [difference] = agreed.differences
    assert agreed.same == agreed.recorded - 1 and agreed.followed == 1, "the plan has a move that no decision explains"
    [replayed] = [move for move in difference.replayed if move.channel == channel.encode()]
    assert replayed.after == single("s2") and "chooses s2" in difference.cause and "instead of s3" in difference.cause


def test_reports_that_were_not_recorded_are_the_cause(recording: tuple[RecordedWindow, Rows]) -> None:
    window, rows = recording
    first = recorded_log(rows).decisions[0]
    kept = [each for each in window.reports if each.at > first.at or each.report.server != "s1"]
    difference = found(replace(window, reports=kept), rows).differences[0]
    assert difference.at == first.at and "that the balancer had heard are not in the recording" in difference.cause


def test_a_decision_that_was_not_recorded_is_a_difference(recording: tuple[RecordedWindow, Rows]) -> None:
    window, rows = recording
    last = recorded_log(rows).decisions[-1]
    cut = replace(window, end=last.at + 2, steps=[step for step in window.steps if step.at < last.at])
    agreed = found(cut, [row for row in rows if row["at"] < last.at])
    [difference] = agreed.differences
    assert not difference.recorded and {move.channel for move in difference.replayed} & {
        move.channel for move in last.moves
    }


def test_a_replay_is_paused_when_the_balancer_was() -> None:
    window, rows = recorded([(BEGIN, True), (BEGIN + 40, False)])
    assert recorded_log(rows).pauses[-2:] == ((BEGIN, True), (BEGIN + 40, False))
    agreed = found(window, rows)
    assert agreed.same == agreed.recorded and not agreed.differences
    assert recorded_log(rows).decisions[0].at >= BEGIN + 40
    [earlier, *_] = found(window, [row for row in rows if row["kind"] == "move"]).differences
    assert "earlier" in earlier.cause


def test_a_pause_before_the_window_counts() -> None:
    window, rows = recorded([(BEGIN - 100, True), (BEGIN + 40, False)])
    agreed = found(window, [row for row in rows if row["kind"] != "paused"])
    assert agreed.same == agreed.recorded >= 3 and not agreed.differences


def test_a_new_balancer_is_not_paused() -> None:
    rows = [(1, 1, "leads"), (2, 1, "paused"), (3, 2, "leads"), (4, 2, "paused"), (5, 3, "paused"), (6, 3, "leads")]
    pauses = recorded_pauses({"at": float(at), "balancer": balancer, "kind": kind} for at, balancer, kind in rows)
    window = RecordedWindow(0.0, 9.0, SERVERS, [], pauses=pauses)
    assert [window.paused_at(time) for time in range(7)] == [False, False, True, False, True, True, True]


# A balancer and agents that run in virtual time.


class SimRecorder:
    """Hears what agents and balancer say at all servers, without delay."""

    def __init__(self, cluster: SimCluster) -> None:
        self._cluster = cluster
        self.reports: list[RecordedReport] = []
        self.rows: dict[str, Rows] = {}
        for server in cluster.servers.values():
            self._listen(server)

    def _listen(self, server: StoringServer) -> None:
        delivered = server.meddle
        assert delivered is not None, "a storing server listens, too"

        def meddle(id_: str, channel: bytes, data: bytes) -> int:
            if channel == BALANCER_CHANNEL:
                with suppress(MalformedMessage):  # acknowledgements
                    self.reports.append(RecordedReport(self._cluster.now, unpack_report(data)))
            elif channel == RECORD_CHANNEL and id_ == "s1":
                self._write(unpack_rows(data))
            return delivered(id_, channel, data)

        server.meddle = meddle

    def _write(self, said: RecordedRows) -> None:
        key = {"at": self._cluster.now, "balancer": said.sender, "number": said.number}
        rows = self.rows.setdefault(said.table, [])
        rows += [
            {**key, "line": line, **dict(zip(said.columns, row, strict=True))} for line, row in enumerate(said.rows)
        ]


def test_a_cluster_that_administrators_change_is_followed_from_its_first_second_on() -> None:
    cluster = SimCluster(3)
    recorder = SimRecorder(cluster)
    balancer = cluster.started(OPTIONS)
    channels = {server: balancer.at_home(server, 8) for server in cluster.servers}
    begin, chance = cluster.now, random.Random(5)
    for second in range(SECONDS):
        hot = SERVERS[second // 15 % len(SERVERS)]
        for server, names in channels.items():
            mean = 120_000 if server == hot else 30_000
            cluster.follow.update({name: round(mean * chance.uniform(0.8, 1.2)) for name in names})
        if second % 40 == 20:
            cluster.ask("pause")
        if second % 40 == 30:
            cluster.ask("resume")
        if second == 50:
            cluster.ask("replicate", {"channel": channels["s2"][0], "mode": "all-subscribers", "count": 2})
        cluster.run(1.0)
    steps = [plan_step(row) for row in recorder.rows["plans"]]
    window = RecordedWindow(begin, cluster.now, tuple(cluster.servers), recorder.reports, steps)
    settings = recorder.rows["settings"][0]
    agreed = agreement(window, recorded_log(recorder.rows["decisions"]), OPTIONS, settings["at"])
    assert settings["number"] == 1 and agreed.followed == 1
    assert agreed.same == agreed.recorded >= 5 and not agreed.differences
