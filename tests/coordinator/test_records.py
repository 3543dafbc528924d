"""What a coordinator publishes for recorders: its decisions, their moves, and its settings."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest

from dynamoth.edge.control import Candidate, Candidates, InterestColumns, MoveEnd
from dynamoth.errors import ConfigError
from dynamoth.names import COORDINATOR_RECORD_CHANNEL
from dynamoth.protocol.records import unpack_rows
from dynamoth.recording import COORDINATOR_TABLES
from dynamoth_broker.coordinator.events import Decision, Kind
from dynamoth_broker.coordinator.model import Summary
from dynamoth_broker.coordinator.plan import Change, Move, Outcome, Plan
from dynamoth_broker.coordinator.records import (
    CANDIDATES_REMEMBERED_MAX,
    INTERESTS_RECORDED_MAX,
    MOVES_RECORDED_MAX,
    SETTINGS_REPEAT_S,
    Records,
    describe_settings,
    read_settings,
)
from dynamoth_broker.coordinator.relieve import Scheme
from dynamoth_broker.coordinator.settings import CoordinatorOptions, CoordinatorSettings
from dynamoth_sim.world.redis import RedisServer
from tests.coordinator.sim_edge import OPTIONS, SimEdge

SECRET = b"s" * 16
BEFORE, AFTER, MEASURED = Summary(0.9, 0.6, 0.5, 900.0), Summary(0.7, 0.6, 0.1, 900.0), Summary(0.72, 0.61, 0.12, 910.0)


def move(user: str, before: float = 0.9) -> Move:
    return Move(user, "b1", "b2", 100.0, Change(before, before - 0.1), Change(0.3, 0.4))


def decided(*moves: Move, dry_run: bool = False) -> Decision:
    return Decision(1, 5.0, Kind.RELIEVE, "uneven", Plan((moves,), Outcome.BALANCED, BEFORE, AFTER), dry_run)


class Published:
    """Records, and the rows that they publish, by table."""

    def __init__(self, secret: bytes = SECRET) -> None:
        self.records = Records(9, CoordinatorSettings(), secret)
        self.records.begin_term(3, 0.0)

    def rows(self) -> dict[str, list[dict[str, Any]]]:
        return read([bytes(send.args[2]) for send in self.records.publish(["s1"])])  # type: ignore[arg-type]

    def offered(self, candidates: Candidates, request: int = 1) -> None:
        self.records.on_asking(request)
        self.records.on_candidates(request, candidates)

    def decided(self, decision: Decision, now: float = 6.0) -> dict[str, list[dict[str, Any]]]:
        self.records.on_decision(decision, now, {"b1": 0.71, "b2": 0.52})
        return self.rows()


def read(messages: list[bytes]) -> dict[str, list[dict[str, Any]]]:
    found: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for data in messages:
        said = unpack_rows(data, COORDINATOR_TABLES)
        found[said.table] += [dict(zip(said.columns, row, strict=True)) for row in said.rows]
    return found


def test_a_decision_is_recorded_when_it_is_made_has_settled_and_was_measured() -> None:
    published = Published()
    users = ("left@ann", "gone@bob", "silent", "late")
    theirs = tuple(Candidate(user, (f"k{number}",)) for number, user in enumerate(users))
    published.offered(Candidates("b1", theirs, InterestColumns()))
    decision = decided(move("left@ann"), *(move(user, 0.8) for user in users[1:]))
    made = published.decided(decision)
    [row] = made["broker_decisions"]
    expected = {
        "term": 3,
        "decision": 1,
        "state": "made",
        "kind": "relieve",
        "moves": 4,
        "clock_s": 5.0,
        "broker": None,
    }
    assert expected.items() <= row.items() and (row["cov_before"], row["cov_predicted"]) == (0.5, 0.1)
    assert row["cov_measured"] is None and row["ratio_before"] == 0.9
    planned = made["broker_moves"]
    assert [each["interests"] for each in planned] == [(f"k{number}",) for number in range(4)]
    assert (planned[0]["from_ratio_predicted"], planned[0]["load_bytes_per_s"], planned[0]["end"]) == (0.8, 100.0, None)

    published.records.on_asked(decision.plan.moves[:3], 6.0)
    published.records.on_move_ended("left@ann", MoveEnd.LEFT, 6.5)
    published.records.on_move_ended("left@ann", MoveEnd.GONE, 6.6)
    published.records.on_move_ended("gone@bob", MoveEnd.GONE, 7.0)
    published.records.on_move_ended("late", MoveEnd.LEFT, 7.0)
    settled = published.decided(replace(decision, moved=1, failed=3), 8.0)
    assert [(each["end"], each["seconds"]) for each in settled["broker_moves"]] == [
        *(("left", 0.5), ("gone", 1.0), ("timeout", None), ("unfit", None))
    ]
    assert [each["session"] for each in settled["broker_moves"]] == [each["session"] for each in planned]
    [row] = settled["broker_decisions"]
    assert (row["state"], row["moved"], row["failed"]) == ("settled", 1, 3)

    measured = published.decided(replace(decision, moved=1, failed=3, measured=MEASURED), 30.0)
    assert not measured["broker_moves"]
    whole, *brokers = measured["broker_decisions"]
    assert (whole["state"], whole["cov_measured"], whole["ratio_measured"]) == ("measured", 0.12, 0.72)
    columns = "broker", "ratio_before", "ratio_predicted", "ratio_measured"
    assert [[row[name] for name in columns] for row in brokers] == [
        ["b1", 0.9, pytest.approx(0.7), 0.71],
        ["b2", 0.3, 0.4, 0.52],
    ]


def test_no_row_has_the_name_of_a_session_and_hashes_cannot_be_tried_without_the_secret() -> None:
    first, other = Published(), Published(b"t" * 16)
    hashes = [each.decided(decided(move("phone@ann")))["broker_moves"][0]["session"] for each in (first, first, other)]
    assert hashes[0] == hashes[1] != hashes[2] and all("ann" not in each for each in hashes)
    assert Published().records.session_hash("phone@ann") == hashes[0], "the same user, each time"


def test_a_dry_run_ends_with_its_decision_and_large_plans_have_rows_up_to_a_bound() -> None:
    published = Published()
    assert len(published.decided(decided(move("u1"), dry_run=True))["broker_moves"]) == 1
    published.records.on_asked([move("u1")], 6.0)
    published = Published()
    many = tuple(f"k{number}" for number in range(INTERESTS_RECORDED_MAX + 1))
    published.offered(Candidates("b1", (Candidate("u0", many),), InterestColumns()))
    made = published.decided(decided(*(move(f"u{number}") for number in range(MOVES_RECORDED_MAX + 1))))
    assert len(made["broker_moves"]) == MOVES_RECORDED_MAX and made["broker_decisions"][0]["moves"] > MOVES_RECORDED_MAX
    assert len(made["broker_moves"][0]["interests"]) == INTERESTS_RECORDED_MAX
    [later] = published.decided(replace(decided(move("u0")), number=2))["broker_moves"]
    assert later["interests"] == (), "candidates are those of one decision"


def test_interests_are_those_of_the_latest_question_and_bounded() -> None:
    published = Published()
    published.offered(Candidates("b1", (Candidate("u1", ("old",)),), InterestColumns()))
    published.records.on_asking(2)
    published.records.on_candidates(1, Candidates("b1", (Candidate("u1", ("late",)),), InterestColumns()))
    [row] = published.decided(decided(move("u1")))["broker_moves"]
    assert row["interests"] == ()
    many = tuple(Candidate(f"u{number}", ("k",)) for number in range(CANDIDATES_REMEMBERED_MAX + 1))
    for _ in range(2):
        published.offered(Candidates("b1", many, InterestColumns()), 3)
    last, first = many[-1].user, many[0].user
    rows = published.decided(replace(decided(move(last), move(first)), number=2))["broker_moves"]
    assert [row["interests"] for row in rows] == [(), ("k",)]


def test_settings_and_pauses_are_recorded_while_it_acts() -> None:
    published = Published()
    published.records.tick(False, 0.0)
    rows = published.rows()["coordinator_settings"]
    assert read_settings((row["name"], row["value"]) for row in rows) == CoordinatorOptions()
    published.records.tick(True, SETTINGS_REPEAT_S / 2)
    published.records.tick(True, SETTINGS_REPEAT_S - 0.1)
    [pause] = published.rows()["broker_decisions"]
    assert (pause["state"], pause["clock_s"], pause["term"]) == ("paused", SETTINGS_REPEAT_S / 2, 3)
    published.records.tick(False, SETTINGS_REPEAT_S)
    again = published.rows()
    assert again["coordinator_settings"] and again["broker_decisions"][0]["state"] == "resumed"
    published.records.end_term()
    published.records.tick(True, 10 * SETTINGS_REPEAT_S)
    assert published.rows() == {}


def test_settings_are_read_as_they_were_written_and_strange_ones_are_refused() -> None:
    changed = CoordinatorSettings(cov_max=0.3, looks=1, dry_run=True, scheme=Scheme.LOAD)
    read_back = read_settings([*describe_settings(changed), ("of_a_later_version", "1")])
    assert (read_back.cov_max, read_back.looks, read_back.dry_run, read_back.scheme) == (0.3, 1, True, Scheme.LOAD)
    for name, value in (("cov_max", "-1"), ("cov_max", "x"), ("scheme", '"none"'), ("looks", '"1"')):
        with pytest.raises(ConfigError):
            read_settings([(name, value)])


def test_whoever_listens_at_any_server_hears_what_a_coordinator_decides() -> None:
    edge = SimEdge()
    edge.staying = {"u0"}
    heard: dict[str, list[bytes]] = {id_: [] for id_ in edge.servers}
    for id_, server in edge.servers.items():
        listen(server, heard[id_])
    edge.crowd()
    edge.until(lambda: any(decision.measured for decision in edge.plans()), "a plan is measured")
    edge.run(0.2)
    first, *others = heard.values()
    assert first and all(each == first for each in others)
    rows = read(first)
    decision = edge.plans()[0]
    states = [row["state"] for row in rows["broker_decisions"] if row["decision"] == decision.number]
    assert states[:3] == ["made", "settled", "measured"]
    of_it = [row for row in rows["broker_moves"] if row["decision"] == decision.number]
    ends = [row["end"] for row in of_it if row["end"]]
    assert len(of_it) == 2 * len(decision.plan.moves) and ends.count("left") == decision.moved
    assert all(row["interests"] for row in of_it if not row["end"])
    settings = read_settings((row["name"], row["value"]) for row in rows["coordinator_settings"])
    assert settings.wait_s == OPTIONS.wait_s and settings.slow_half_life_s == OPTIONS.slow_half_life_s
    assert b"u0" not in b"".join(first)


def listen(server: RedisServer, heard: list[bytes]) -> None:
    """Keep what is published for recorders at a simulated server."""

    def kept(_: str, channel: bytes, data: bytes) -> int:
        if channel == COORDINATOR_RECORD_CHANNEL:
            heard.append(data)
        return 1

    server.meddle = kept
