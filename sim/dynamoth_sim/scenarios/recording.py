"""A script about a recorder that listens while everything around it fails.

See ``scenarios`` for the words; ``mutations`` has what must make it fail.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

from dynamoth.globs import compile_glob
from dynamoth.names import AGENT_CHANNEL, BALANCER_CHANNEL, RECORDER_FAILING_CHANNEL, probe_channel
from dynamoth.plan.plan import Phase, Plan
from dynamoth.protocol.control import REPORT_CODE
from dynamoth.protocol.reports import unpack_report
from dynamoth.recording import (
    CHANNELS,
    DECISIONS,
    GAPS,
    LATENCY,
    PLANS,
    SERVERS,
    SETTINGS,
    TABLES,
    DecisionKind,
    GapKind,
    channel_text,
)
from dynamoth_recorder.events import Refused, Rows, ServersChanged, StoreChanged
from dynamoth_recorder.machine import LATE_INTERVALS, LATE_S_MIN, PROBE_INTERVAL_S, RESUBSCRIBE_S, RecorderMachine
from dynamoth_sim.scenarios.stage import PATIENCE_S, Scenario, Stage
from dynamoth_sim.world.process import Process

NAME = "recorder"

LATE_S = LATE_S_MIN + PROBE_INTERVAL_S + 0.1
"""A pause that a recorder notices even if it begins just after a probe."""

UNDER_WAY_S_MAX = 0.005
"""Longest time from a PUBLISH until a recorder that runs has handled the message: connections are quick here."""

REFUSED_S = RESUBSCRIBE_S + 2 * PROBE_INTERVAL_S
"""A recorder that a server refuses for this time asks twice."""


class Recorder:
    """A recorder, and the rows that it has made."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.process = Process(stage.world, stage.cluster.network, NAME, RecorderMachine, self._acted)
        #: By table, in the order in which they were made. ``at`` is when.
        self.rows: dict[str, list[dict[str, Any]]] = {table: [] for table in TABLES}
        #: In the order in which they were reported.
        self.refused: list[Refused] = []

    def start(self) -> None:
        """Start it, and wait until it listens at every server."""
        self.process.start()
        self.process.handle(ServersChanged(tuple(self._stage.cluster.server_list)))
        self.wait_listening()

    def wait_listening(self, patience_s: float = PATIENCE_S) -> None:
        """Wait until it listens at every server."""
        self._stage.wait("the recorder listens at every server", lambda: not self.machine.not_heard, patience_s)

    @property
    def machine(self) -> RecorderMachine:
        """The machine; the recorder does not crash."""
        machine = self.process.machine
        assert isinstance(machine, RecorderMachine)
        return machine

    def gaps(self, kind: GapKind) -> list[dict[str, Any]]:
        """Return the gaps of one kind."""
        return [row for row in self.rows[GAPS.name] if row["kind"] == kind]

    def _acted(self, action: Any) -> None:
        if isinstance(action, Refused):
            self.refused.append(action)
        elif isinstance(action, Rows):
            head = {"at": self._stage.world.now - action.age_s, "recorder": NAME, **action.same}
            self.rows[action.table] += [
                {name: column[index] for name, column in action.columns.items()} | head for index in range(action.count)
            ]


def recorded(stage: Stage) -> None:
    """Case 72. A recorder listens while reports and connections get lost, and agent, balancer and server start again.

    A server refuses the recorder for a while, an agent loses its server, and the recorder stands still. Its rows tell
    what happened, each thing once, and its gaps what they leave out.
    """
    recorder = Recorder(stage)
    recorder.start()
    channel = stage.channel_with_subscriber("s1")
    drained = stage.channel_at("s1", "d")
    publisher = stage.publisher("P", channel, drained)
    stage.move(channel, "s2")
    stage.move(drained, "s3")
    with stage.losing("s1", lambda name, _: name == BALANCER_CHANNEL):
        stage.run(1.0)
    _lose_connection(stage, recorder, channel)
    _blind_agent(stage)
    _start_again(stage, recorder, channel, drained)
    _stand_still(stage, recorder)
    stage.publish(publisher, channel)
    stage.wait_settled(channel, drained)
    stage.run(1.0)
    _expect_unseen(stage, recorder)
    _expect_once(stage, recorder)
    _expect_reports(stage, recorder)
    _expect_successor(stage, recorder)
    _expect_plans(stage, recorder)
    _expect_decisions(stage, recorder)
    _expect_absences(stage, recorder)
    _expect_probes(stage, recorder)


def _lose_connection(stage: Stage, recorder: Recorder, channel: bytes) -> None:
    """Cut the recorder off s2, with a probe under way, while it cannot write and a channel leaves s2.

    Then s2 refuses it reports.
    """
    recorder.process.handle(StoreChanged(True))
    _run_until_probe(stage, recorder, before_s=0.1)
    heal = stage.cluster.network.part([NAME], ["s2"])
    stage.move(channel, "s3")
    stage.run(1.0)
    server = stage.cluster.servers["s2"]
    server.refuse = lambda who, words: "NOPERM" if (who, words[0]) == (NAME, b"PSUBSCRIBE") else None
    heal()
    stage.wait("s2 refuses the recorder", lambda: bool(recorder.refused))
    stage.run(REFUSED_S)
    server.refuse = None
    recorder.wait_listening(REFUSED_S)
    reported = [(each.server, each.reply) for each in recorder.refused]
    stage.expect(f"a refusal is reported once, and not as {reported}", reported == [("s2", "NOPERM")])
    _expect_failing(stage, [NAME])
    recorder.process.handle(StoreChanged(False))
    _expect_failing(stage, [])


def _blind_agent(stage: Stage) -> None:
    """Cut the agent of s2 off its server. It says that it was blind, and its reports go on."""
    stage.run(1.0)
    agent = stage.cluster.agents["s2"].name
    heal = stage.cluster.network.part([agent], ["s2"])
    stage.cut(agent, "s2")
    stage.run(1.0)
    heal()
    stage.run(1.0)


def _start_again(stage: Stage, recorder: Recorder, *drained: bytes) -> None:
    """Start the agent of s3, the balancer and the server s1 again, one after the other. The new balancer drains s3."""
    agent, server = stage.cluster.agents["s3"], stage.cluster.servers["s1"]
    agent.crash()
    stage.run(1.0)
    agent.start()
    stage.run(1.0)
    stage.cluster.restart_balancer()
    stage.cluster.change_server("drain", "s3")
    stage.wait("s3 is drained", lambda: not any(stage.is_at(each, "s3", Phase.PREPARED) for each in drained))
    stage.run(1.0)
    server.stop()
    stage.run(0.5)
    server.start()
    recorder.wait_listening()
    stage.run(1.0)


def _stand_still(stage: Stage, recorder: Recorder) -> None:
    """Pause the recorder. Meanwhile it loses its connection to s3."""
    recorder.process.pause(LATE_S)
    stage.run(1.0)
    stage.cut(NAME, "s3")
    stage.run(LATE_S)
    recorder.wait_listening()


def _run_until_probe(stage: Stage, recorder: Recorder, before_s: float) -> None:
    """Advance the clock until the recorder's next probe is due in ``before_s``."""
    probe_at = recorder.machine.deadline()
    assert probe_at is not None
    due_s = probe_at - before_s - stage.world.now
    stage.run(due_s if due_s > 0 else due_s + PROBE_INTERVAL_S)


def _expect_failing(stage: Stage, recorders: list[str]) -> None:
    """Every server shows which recorders cannot write."""
    stage.run(0.1)
    for id_, server in stage.cluster.servers.items():
        shown = server.subscribers(RECORDER_FAILING_CHANNEL)
        stage.expect(f"{id_} shows that {recorders} cannot write, not {shown}", shown == recorders)


def _expect_unseen(stage: Stage, recorder: Recorder) -> None:
    """Nobody takes the recorder for an agent or for a balancer."""
    for id_, server in stage.cluster.servers.items():
        counted = server.subscribers(BALANCER_CHANNEL)
        stage.expect(f"{id_} counts one balancer, not {counted}", counted == ["balancer"])
    names = [record.channel or b"" for record in stage.records("subscribe", who=NAME)]
    patterns = [record.channel or b"" for record in stage.records("psubscribe", who=NAME)]
    hears = AGENT_CHANNEL in names or any(compile_glob(pattern).fullmatch(AGENT_CHANNEL) for pattern in patterns)
    stage.expect("the recorder does not listen to what agents hear", not hears)
    stage.expect("the recorder is never counted as a balancer", BALANCER_CHANNEL not in names)


def _expect_once(stage: Stage, recorder: Recorder) -> None:
    for table in TABLES.values():
        keys = Counter(tuple(row.get(name) for name in table.key) for row in recorder.rows[table.name])
        twice = [key for key, count in keys.items() if count > 1]
        stage.expect(f"each row of {table.name} is there once, not twice as {twice[:3]}", not twice)
    for table in (SERVERS, CHANNELS, SETTINGS):
        stage.expect(f"there are rows of {table.name}", bool(recorder.rows[table.name]))


# Reports.


def _expect_reports(stage: Stage, recorder: Recorder) -> None:
    """Each report between two that were recorded is recorded, or a gap covers it; and gaps are about others only.

    Reports have the time at which they were sent, also those that waited for the recorder.
    """
    sent: dict[tuple[str, int], dict[int, float]] = {}
    for record in stage.records("publishes", channel=BALANCER_CHANNEL):
        if record.data is not None and record.data[1] == REPORT_CODE:
            report = unpack_report(record.data)
            sent.setdefault((report.server, report.incarnation), {})[report.sequence] = record.at
    recorded: dict[tuple[str, int], list[int]] = {}
    for row in recorder.rows[SERVERS.name]:
        agent, number = (row["server"], row["incarnation"]), row["sequence"]
        recorded.setdefault(agent, []).append(number)
        late_s = row["at"] - sent[agent][number]
        is_dated = -UNDER_WAY_S_MAX <= late_s <= LATE_INTERVALS * row["interval_s"] + UNDER_WAY_S_MAX
        stage.expect(f"report {number} of {agent} has its own time, not one that is {late_s:.3f} s later", is_dated)
    stage.expect("each agent is recorded, and the one that started again twice", len(recorded) == 4)
    missing = _missing(recorder)
    stage.expect("lost reports are noted", len(missing) > 0)
    for agent, numbers in recorded.items():
        for before, after in pairwise(numbers):
            stage.expect(f"reports of {agent} are in order: {before}, {after}", before < after)
            for number in range(before + 1, after):
                begin = sent[agent].get(number, sent[agent][before])
                end = sent[agent].get(number, sent[agent][after])
                covered = (agent, number) in missing or _was_away(recorder, agent[0], begin, end)
                stage.expect(f"report {number} of {agent}, sent at {begin:.3f}, is missing without a gap", covered)
    needless = [each for each in missing if each[1] in recorded[each[0]] or missing[each] > 1]
    stage.expect(f"no report that is recorded is said to be missing, as {needless[:3]} are", not needless)


def _expect_successor(stage: Stage, recorder: Recorder) -> None:
    """A gap says how long nobody measured s3: from the last report of one agent to the first interval of the next."""
    reports = [row for row in recorder.rows[SERVERS.name] if row["server"] == "s3"]
    [(last, first)] = [(a, b) for a, b in pairwise(reports) if a["incarnation"] != b["incarnation"]]
    unmeasured_s = first["at"] - first["interval_s"] - last["at"]
    found = [
        (gap["server"], gap["incarnation"], gap["sequence"], gap["seconds"])
        for gap in recorder.gaps(GapKind.AGENT_RESTARTED)
    ]
    expected = ("s3", first["incarnation"], first["sequence"], unmeasured_s)
    stage.expect(f"the agent that started again leaves the gap {expected}, not {found}", found == [expected])
    blind = {gap["server"] for gap in recorder.gaps(GapKind.AGENT_BLIND)}
    stage.expect(f"the agent of s2 was blind, not those of {blind}", "s2" in blind)


def _missing(recorder: Recorder) -> Counter[tuple[tuple[str, int], int]]:
    """Return the reports that gaps name, each as agent and number."""
    return Counter(
        ((gap["server"], gap["incarnation"]), number)
        for gap in recorder.gaps(GapKind.REPORT_MISSING)
        for number in range(gap["sequence"] - gap["count"], gap["sequence"])
    )


def _was_away(recorder: Recorder, server: str, begin: float, end: float) -> bool:
    """Tell whether a gap says that the recorder did not listen at a server for some time of an interval."""
    return any(
        gap["server"] == server and gap["at"] - gap["seconds"] - UNDER_WAY_S_MAX <= end and begin <= gap["at"]
        for gap in recorder.gaps(GapKind.RECORDER_AWAY)
    )


# What the balancer says.


def _expect_plans(stage: Stage, recorder: Recorder) -> None:
    """Every change of the plan is recorded, and nothing else: at some server the recorder listens all the time."""
    versions = stage.records("moves")
    said = {each for record in versions for each in _entries(record.note, record.note.entries)}
    changes = {
        each
        for old, new in pairwise(versions)
        for each in _entries(new.note, [c for c, e in new.note.entries.items() if old.note.entries.get(c) != e])
    }
    rows = {
        (row["version"], row["channel"], row["phase"], row["epoch"], tuple(row["to_servers"]))
        for row in recorder.rows[PLANS.name]
    }
    stage.expect(f"these changes of the plan are not recorded: {sorted(changes - rows)[:3]}", changes <= rows)
    stage.expect(f"these changes of the plan are recorded, and never were: {sorted(rows - said)[:3]}", rows <= said)
    phases = {phase for _, _, phase, _, _ in rows}
    stage.expect(f"changes in each phase are recorded, not only {phases}", len(phases) == len(Phase))


def _entries(plan: Plan, channels: Iterable[bytes]) -> Iterator[tuple[int, str, str, int, tuple[str, ...]]]:
    """Yield entries of a version of the plan as rows of ``plans`` have them."""
    for channel in channels:
        entry = plan.entries[channel]
        route = entry.route
        yield plan.version, channel_text(channel), entry.phase.name.lower(), route.epoch, route.assignment.servers


def _expect_decisions(stage: Stage, recorder: Recorder) -> None:
    """What the balancer has decided is recorded: it drains a server."""
    decided = sorted(channel_text(move.channel) for record in stage.records("decides") for move in record.note.moves)
    moves = {
        (row["balancer"], row["decision"], row["channel"])
        for row in recorder.rows[DECISIONS.name]
        if row["kind"] == DecisionKind.MOVE
    }
    rows = sorted(channel for _, _, channel in moves)
    stage.expect(f"the moves {rows} are recorded instead of {decided}", rows == decided != [])


# What the recorder says of itself.


def _expect_absences(stage: Stage, recorder: Recorder) -> None:
    """The recorder says where it was away, and that it was late, once for each time."""
    away = sorted(gap["server"] for gap in recorder.gaps(GapKind.RECORDER_AWAY))
    stage.expect(f"it was away from each server once, not from {away}", away == sorted(stage.cluster.servers))
    [goes_on] = stage.records("fault", who=NAME, note="goes on")
    late = [gap for gap in recorder.gaps(GapKind.RECORDER_LATE) if gap["at"] - goes_on.at < UNDER_WAY_S_MAX]
    servers = [gap["server"] for gap in late]
    stage.expect(f"it was late where it still had a connection, not at {servers}", servers == ["s1", "s2"])
    stage.expect("it was not late at other times", late == recorder.gaps(GapKind.RECORDER_LATE))
    seconds = [gap["seconds"] for gap in late]
    stage.expect(f"it was late for {seconds} s", all(LATE_S_MIN < each <= LATE_S for each in seconds))


def _expect_probes(stage: Stage, recorder: Recorder) -> None:
    """Each probe has one row: with its latency, or without where a gap says that it was lost."""
    sent = stage.records("publishes", who=NAME, channel=probe_channel(recorder.machine.recorder))
    numbers = [int.from_bytes(record.data or b"", "big") for record in sent]
    latencies = {row["number"]: row.get("latency_s") for row in recorder.rows[LATENCY.name]}
    lost = {gap["sequence"] for gap in recorder.gaps(GapKind.PROBE_LOST)}
    unknown = sorted(set(numbers) - latencies.keys())
    stage.expect(f"the probes {unknown} have neither come back nor are lost", not unknown and bool(numbers))
    silent = {number for number, latency_s in latencies.items() if latency_s is None}
    stage.expect(f"the probes {silent} have no latency, and {lost} are lost", silent == lost != set())


SCENARIOS: dict[str, Scenario] = {"72-recorded": Scenario(recorded, losses_allowed=True)}
