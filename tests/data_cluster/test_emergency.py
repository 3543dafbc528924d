"""The emergency application: town and scenario, its queries in Python, and the audit, which has to find each fault."""

from __future__ import annotations

import argparse
import ast
import asyncio
import json
import math
import re
import shutil
import subprocess
import threading
import tomllib
from dataclasses import asdict
from itertools import combinations, pairwise
from pathlib import Path
from random import Random
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

import emergency
from dynamoth.data.datasets import BadRecord, read_dataset
from dynamoth.data.queries import read_query
from dynamoth.data.results import result_payload
from dynamoth.edge.interests import query_interest
from emergency import reporters
from emergency.evaluate import QUERIES, History, View, Window, evaluate, is_near
from emergency.journal import Journal, digest_of, read_journal
from emergency.judge import (
    Execution,
    Faults,
    Interest,
    Log,
    LogJudge,
    UserJudge,
    judge_executions,
    judge_locations,
    judge_reports,
    latencies_ms,
    quantile,
)
from emergency.reports import REPORT_BYTES, TYPES, draw_report, encode
from emergency.scenario import QUERY_WEIGHTS, plan_users
from emergency.serve import make_server
from emergency.tokens import make_keys
from emergency.town import HEIGHT_M, WIDTH_M, Place, Walker, build_town, draw_shelters, to_place, vehicle

FOLDER = Path(emergency.__file__).parent
DEFINITIONS = tomllib.loads((FOLDER / "emergency.toml").read_text())
EPOCH = 7
JSON = "application/json"


# The world.


def _cross(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> float:
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])


def test_a_town_is_planar_connected_and_the_same_for_a_seed() -> None:
    town = build_town(Random(3))
    assert town == build_town(Random(3)) != build_town(Random(4))
    streets = [(here, there) for here, beside in enumerate(town.neighbours) for there in beside if here < there]
    for (a, b), (c, d) in combinations(streets, 2):
        if len({a, b, c, d}) == 4:
            points = [town.crossings[each] for each in (a, b, c, d)]
            crosses = (
                _cross(points[0], points[1], points[2]) * _cross(points[0], points[1], points[3]) < 0
                and _cross(points[2], points[3], points[0]) * _cross(points[2], points[3], points[1]) < 0
            )
            assert not crosses, (a, b, c, d)
    assert all(0 <= x <= WIDTH_M and 0 <= y <= HEIGHT_M for x, y in town.crossings)
    assert all(town.way(0, end)[-1] == end for end in range(len(town.crossings)))


@pytest.mark.parametrize(("make", "slowest", "fastest"), [(Walker, 0.5, 1.5), (vehicle, 7.0, 10.0)])
def test_walkers_keep_to_their_speed_and_pause(make: Any, slowest: float, fastest: float) -> None:
    town = build_town(Random(1))
    for seed in range(10):
        walker = make(town, Random(seed))
        points = [walker.point(second / 10) for second in range(6000)]
        speeds = [math.dist(a, b) * 10 for a, b in pairwise(points)]
        assert max(speeds) <= fastest + 1e-6
        assert max(speeds) >= slowest
        again = make(town, Random(seed))
        assert again.point(599.9) == points[-1], "where a walker is does not depend on how often it is asked"


def test_places_have_the_distances_of_the_town() -> None:
    a, b = to_place(100, 200), to_place(400, 600)
    there = {"lat": a.lat, "lon": a.lon}
    assert is_near(there, b.lat, b.lon, 501)
    assert not is_near(there, b.lat, b.lon, 499)


def test_reports_have_the_sizes_and_types_of_the_paper_and_fit_their_dataset() -> None:
    dataset = read_dataset("reports", DEFINITIONS["datasets"]["reports"])
    random = Random(1)
    reports = [draw_report(random, "reporter0", number, Place(60.17, 24.93), 1.8e9) for number in range(500)]
    sizes = [len(encode(report)) for report in reports]
    assert min(sizes) >= REPORT_BYTES[0] and max(sizes) <= REPORT_BYTES[1]
    assert {report["type"] for report in reports} == set(TYPES)
    for report in reports:
        dataset.normalize(encode(report), 1.8e9, "reporter0")


def test_a_user_may_send_only_the_own_place() -> None:
    dataset = read_dataset("user_locations", DEFINITIONS["datasets"]["user_locations"])
    record = encode({"user": "u001", "lat": 60.0, "lon": 25.0, "at": 1.8e9})
    dataset.normalize(record, 1.8e9, "u001")
    with pytest.raises(BadRecord, match="subject"):
        dataset.normalize(record, 1.8e9, "u002")


def test_the_scenario_has_the_figures_of_the_paper() -> None:
    town = build_town(Random(1))
    plans = plan_users(town, 400, 1800.0, 1)
    assert [asdict(plan) for plan in plans] == [asdict(plan) for plan in plan_users(town, 400, 1800.0, 1)]
    subscriptions = [each for plan in plans for each in plan.subscriptions]
    interests = {query_interest(each.query, each.params).id for each in subscriptions}
    assert 2200 <= len(subscriptions) <= 2600
    assert 500 <= len(interests) <= 700
    assert all(plan.login_s <= 240 for plan in plans)
    assert all(240 <= each.at_s <= 480 for each in subscriptions)
    for plan in plans:
        assert 1 <= len({each.query for each in plan.subscriptions}) <= 5
        assert len({query_interest(each.query, each.params).id for each in plan.subscriptions}) == len(
            plan.subscriptions
        )
    assert any(plan.away_s for plan in plans)
    for plan in plans:
        if plan.away_s is not None:
            assert 480 <= plan.away_s[0] < plan.away_s[1] <= 1800


def test_parameters_fit_the_queries() -> None:
    queries = {name: read_query(name, definition) for name, definition in DEFINITIONS["queries"].items()}
    assert queries.keys() == QUERIES.keys() == QUERY_WEIGHTS.keys()
    assert len(queries) == 7 and {query.period_s for query in queries.values()} == {10, 20, 30}
    for plan in plan_users(build_town(Random(1)), 100, 120.0, 2):
        for each in plan.subscriptions:
            query = queries[each.query]
            query.check(each.params)
            assert all(each.params[name] == plan.name for name, _ in query.bind)


# The queries.


def _report(
    id_: str, at: int, type_: str = "fire", severity: int = 3, x: float = 0.0, y: float = 0.0
) -> dict[str, Any]:
    place = to_place(2000 + x, 2000 + y)
    return {
        "id": id_, "type": type_, "severity": severity, "lat": place.lat, "lon": place.lon, "at": at,
        "reporter": "r", "text": f"text of {id_}",
    }  # fmt: skip


def _location(user: str, x: float, y: float = 0.0, at: int = 0) -> dict[str, Any]:
    place = to_place(2000 + x, 2000 + y)
    return {"user": user, "lat": place.lat, "lon": place.lon, "at": at}


def _shelter(id_: int, x: float) -> dict[str, Any]:
    place = to_place(2000 + x, 2000)
    return {"id": id_, "name": f"Shelter {id_}", "lat": place.lat, "lon": place.lon, "capacity": 50}


VIEW = View(
    reports=[
        _report("b", 2000, x=100),
        _report("a", 1000, x=250),
        _report("c", 1000, "flood", 1, x=700),
        _report("d", 3000, "flood", 5, x=50),
    ],
    places={"ann": _location("ann", 0), "bob": _location("bob", 900)},
    shelters=[_shelter(2, 350), _shelter(1, -390), _shelter(3, 450)],
)
CENTRE = {"lat": to_place(2000, 2000).lat, "lon": to_place(2000, 2000).lon}


@pytest.mark.parametrize(
    ("query", "params", "expected"),
    [
        ("reports_of_type", {"type": "fire"}, [("a",), ("b",)]),
        ("reports_of_type", {"type": "medical"}, []),
        ("reports_near_place", {"type": "fire", **CENTRE, "radius_m": 200}, [("b",)]),
        ("reports_near_me", {"user": "ann", "radius_m": 300}, [("a",), ("b",), ("d",)]),
        ("reports_near_me", {"user": "nobody", "radius_m": 300}, []),
        ("reports_of_type_near_me", {"user": "bob", "type": "flood", "radius_m": 300}, [("c",)]),
        ("shelters_near_me", {"user": "ann", "type": "flood", "radius_m": 300}, [(1,), (2,)]),
        ("shelters_near_me", {"user": "bob", "type": "flood", "radius_m": 300}, []),
        ("report_counts", {**CENTRE, "radius_m": 300}, [("fire", 2, 3), ("flood", 1, 5)]),
        ("people_near_reports", {"type": "flood"}, [("c", 1), ("d", 1)]),
    ],
)
def test_queries_in_python(query: str, params: dict[str, Any], expected: list[tuple[Any, ...]]) -> None:
    columns = {"report_counts": ("type", "reports", "severity_max"), "people_near_reports": ("id", "people")}
    rows = evaluate(query, params, VIEW)
    assert [tuple(row[name] for name in columns.get(query, ("id",))) for row in rows] == expected


def test_a_view_has_the_window_and_the_latest_places() -> None:
    history = History(
        reports={"reports/0": [(5, _report("a", 1)), (7, _report("b", 2)), (9, _report("c", 3))]},
        locations={
            "user_locations/0": [(1, _location("ann", 0)), (4, _location("ann", 100)), (6, _location("ann", 200))]
        },
    )
    assert [each["id"] for each in history.reports_in(Window({"reports/0": 5}, {"reports/0": 9}))] == ["b", "c"]
    assert history.places_at({"user_locations/0": 5})["ann"] == _location("ann", 100)
    assert history.places_at({"user_locations/0": 0}) == {}


# The audit, on a run of two executions and two users.

PARAMS = {"type": "fire"}
ID = query_interest("reports_of_type", PARAMS).id
INTEREST = Interest(ID, "reports_of_type", PARAMS, 500)


def _history() -> History:
    return History(
        reports={
            "reports/0": [(1, _report("a", 1000)), (2, _report("b", 2000)), (3, _report("f", 2000, "flood"))],
            "reports/1": [(1, _report("c", 12_000))],
        }
    )


def _executions() -> list[Execution]:
    return [
        Execution("reports_of_type", 1, 10_000, Window({"reports/0": 0}, {"reports/0": 3})),
        Execution("reports_of_type", 2, 20_000, Window({"reports/0": 3}, {"reports/0": 3, "reports/1": 1})),
    ]


def _payload(execution: int, *reports: dict[str, Any]) -> bytes:
    rows = [
        {name: report[name] for name in ("id", "type", "severity", "lat", "lon")}
        | {"at": f"1970-01-01T00:00:{report['at'] / 1000:06.3f}Z"}
        for report in reports
    ]
    return result_payload("reports_of_type", 1, execution, execution * 10_000, json.dumps(rows))


FIRST, SECOND = _payload(1, _report("a", 1000), _report("b", 2000)), _payload(2, _report("c", 12_000))


def _log(*payloads: bytes) -> Log:
    return Log(EPOCH, len(payloads), dict(enumerate(payloads, 1)))


def _judge_log(log: Log, registered_ms: int = 500) -> Faults:
    faults = Faults()
    judge = LogJudge(_history(), {"reports_of_type": _executions()}, faults)
    judge.judge(Interest(ID, "reports_of_type", PARAMS, registered_ms), log)
    return faults


def test_a_right_log_is_clean() -> None:
    assert _judge_log(_log(FIRST, SECOND)).texts == []
    assert _judge_log(_log(SECOND), registered_ms=10_001).texts == [], "the first execution was before the registration"


@pytest.mark.parametrize(
    ("log", "fault"),
    [
        (_log(FIRST), "execution 2 is missing, with 1 rows"),
        (_log(FIRST, FIRST, SECOND), "offset 2 has execution 1 behind 1"),
        (_log(SECOND, FIRST), "offset 2 has execution 1 behind 2"),
        (_log(FIRST, SECOND, _payload(3)), "execution 3 was to have no rows"),
        (_log(_payload(1, _report("a", 1000)), SECOND), "execution 1: 2 rows expected, not 1"),
        (_log(_payload(1, _report("b", 2000), _report("a", 1000)), SECOND), "execution 1: row 0 expected"),
        (_log(_payload(1, _report("a", 1000), _report("b", 2000, severity=4)), SECOND), "execution 1: row 1 expected"),
        (Log(EPOCH, 3, {1: FIRST, 3: SECOND}), "has not all offsets from 1 to 3"),
    ],
)
def test_each_fault_of_a_log_is_found(log: Log, fault: str) -> None:
    assert any(fault in text for text in _judge_log(log).texts)


def test_executions_follow_each_other() -> None:
    first, second = _executions()
    faults = Faults()
    assert judge_executions([first, second], _history(), 10, faults) == 0
    assert faults.texts == []
    late = Execution("reports_of_type", 2, 50_000, second.window)
    assert judge_executions([first, late], _history(), 10, faults) == 3
    assert faults.texts == []


@pytest.mark.parametrize(
    ("second", "fault"),
    [
        (Execution("q", 3, 20_000, Window({"reports/0": 3}, {"reports/0": 3, "reports/1": 1})), "follows 1"),
        (Execution("q", 2, 20_000, Window({"reports/0": 2}, {"reports/0": 3, "reports/1": 1})), "begins behind 2"),
        (Execution("q", 2, 20_000, Window({"reports/0": 3}, {"reports/0": 3})), "the last records of reports/1"),
    ],
)
def test_a_hole_between_executions_is_found(second: Execution, fault: str) -> None:
    faults = Faults()
    judge_executions([_executions()[0], second], _history(), 10, faults)
    assert [text for text in faults.texts if fault in text]


def _entry(kind: str, user: str, **fields: Any) -> dict[str, Any]:
    return {"is": kind, "user": user, "interest": ID, **fields}


def _item(offset: int, data: bytes, user: str = "ann", epoch: int = EPOCH) -> dict[str, Any]:
    return _entry("item", user, epoch=epoch, offset=offset, at=20.5, data=data.decode())


SUBSCRIBED = _entry("subscribed", "ann", query="reports_of_type", params=PARAMS, epoch=EPOCH, offset=0)
GAP = _entry("gap", "ann", first=1, last=1, reason="retention", epoch=EPOCH, offset=1)


def _judge_user(*entries: dict[str, Any]) -> Faults:
    faults = Faults()
    UserJudge({ID: _log(FIRST, SECOND)}, faults).judge([SUBSCRIBED, *entries])
    return faults


@pytest.mark.parametrize(
    "entries",
    [
        (_item(1, FIRST), _item(2, SECOND)),
        (_item(1, FIRST), _entry("same", "ann", epoch=EPOCH, offset=2, at=20.6, digest=digest_of(SECOND))),
        (GAP, _item(2, SECOND)),
        (_item(1, FIRST), _entry("ended", "ann")),
    ],
)
def test_a_user_who_got_everything_is_clean(entries: tuple[dict[str, Any], ...]) -> None:
    assert _judge_user(*entries).texts == []


@pytest.mark.parametrize(
    ("entries", "fault"),
    [
        ((_item(1, FIRST),), "up to 1, and the log goes up to 2"),
        ((_item(2, SECOND),), "1 to 1 are missing without a gap"),
        ((_item(1, FIRST), _item(1, FIRST), _item(2, SECOND)), "delivered twice or late"),
        ((_item(1, FIRST), _item(2, SECOND), _item(1, FIRST)), "delivered twice or late"),
        ((_item(1, SECOND), _item(2, SECOND)), "not what the log has"),
        ((_item(1, FIRST), _item(2, SECOND, epoch=8)), "epoch 8 without a gap"),
        ((_item(1, FIRST), GAP, _item(2, SECOND)), "a gap of 1 to 1 behind 1"),
        ((_item(1, FIRST), _item(2, SECOND), _item(1, FIRST, user="bob")), "never subscribed to"),
        ((_item(1, FIRST), _entry("ended", "ann"), _item(2, SECOND)), "delivered after the end"),
        ((_item(1, FIRST), _item(2, SECOND), _entry("refused", "ann", what="x", reason="y")), "was refused x: y"),
    ],
)
def test_each_fault_of_a_user_is_found(entries: tuple[dict[str, Any], ...], fault: str) -> None:
    assert any(fault in text for text in _judge_user(*entries).texts)


def test_acknowledged_reports_are_stored_once() -> None:
    journal = [{"is": "report", "id": id_, "at": 1} for id_ in "abc"] + [{"is": "doubtful", "id": "f"}]
    faults = Faults()
    assert judge_reports(_history(), journal, faults) == 4
    assert faults.texts == []
    judge_reports(_history(), [*journal[1:], {"is": "report", "id": "x", "at": 1}], faults)
    assert faults.texts == [
        "report x was acknowledged, and is not stored",
        "report a is stored, and nobody sent it",
    ]
    twice = _history()
    twice.reports["reports/1"].append((2, _report("a", 1000)))
    faults = Faults()
    judge_reports(twice, journal, faults)
    assert faults.texts == ["report a is stored 2 times"]


def test_acknowledged_locations_are_stored() -> None:
    history = History(locations={"user_locations/0": [(1, _location("ann", 0)), (2, _location("ann", 1))]})
    faults = Faults()
    assert judge_locations(history, [{"is": "location", "user": "ann", "stored": 1, "unknown": 1}], faults) == 1
    assert faults.texts == []
    judge_locations(history, [{"is": "location", "user": "ann", "stored": 3}], faults)
    judge_locations(history, [{"is": "location", "user": "ann", "stored": 1}], faults)
    assert faults.count == 2


def test_latencies_leave_out_what_came_after_an_absence() -> None:
    early = {"is": "back", "user": "ann", "at": 5.0}
    queries = {ID: "reports_of_type"}
    assert latencies_ms([early, _item(1, FIRST)], queries) == {"reports_of_type": [(1000, 19_500.0), (2000, 18_500.0)]}
    late = {"is": "back", "user": "ann", "at": 15.0}
    assert latencies_ms([late, _item(1, FIRST)], queries) == {}
    same = _entry("same", "bob", epoch=EPOCH, offset=1, at=21.0, digest="")
    assert latencies_ms([_item(1, FIRST), same], queries)["reports_of_type"][2:] == [
        (1000, 20_000.0),
        (2000, 19_000.0),
    ]
    assert quantile([1.0, 2.0, 3.0, 4.0], 0.99) == 4.0


def test_a_journal_comes_back_without_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "citizens0.jsonl"
    journal = Journal(path)
    journal.write("ended", user="ann", interest=ID)
    journal.write_item("ann", ID, EPOCH, 1, 20.0, FIRST)
    journal.write_item("bob", ID, EPOCH, 1, 20.0, FIRST)
    journal.close()
    with path.open("a") as file:
        file.write('{"is":"it')
    entries = list(read_journal(path))
    assert [entry["is"] for entry in entries] == ["ended", "item", "same"]
    assert digest_of(entries[1]["data"].encode()) == entries[2]["digest"] == digest_of(FIRST)


@pytest.mark.parametrize(
    ("statuses", "entries"),
    [
        ((503, 408, 429, 200), [{"is": "report", "id": "r", "at": 1}]),
        ((413,), [{"is": "refused", "user": "reporter0", "what": "r", "reason": "413 too large"}]),
    ],
)
def test_a_report_is_sent_until_it_is_stored_or_refused(
    statuses: tuple[int, ...], entries: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter(statuses)
    path = tmp_path / "reporters.jsonl"

    async def answer(_: web.Request) -> web.Response:
        status = next(answers)
        return web.Response(status=status, text="too large" if status == 413 else '{"refused": []}', content_type=JSON)

    async def report() -> None:
        app = web.Application()
        app.router.add_post("/datasets/reports", answer)
        journal = Journal(path)
        async with TestServer(app) as server, aiohttp.ClientSession() as session:
            options = argparse.Namespace(brokers=[str(server.make_url("")).rstrip("/")], seed=1, speed=1.0)
            reporter = reporters.Reporter("reporter0", build_town(Random(1)), options, "token", journal)
            await reporter._store(session, {"id": "r", "at": 1})  # pyright: ignore[reportPrivateUsage]
        journal.close()

    monkeypatch.setattr(reporters, "RETRY_S", 0.0)
    asyncio.run(report())
    assert list(read_journal(path)) == entries
    assert next(answers, None) is None


def test_shelters_fit_their_dataset() -> None:
    dataset = read_dataset("shelters", DEFINITIONS["datasets"]["shelters"])
    shelters = draw_shelters(build_town(Random(1)), Random(1))
    assert len(shelters) == 200
    for shelter in shelters:
        dataset.normalize(encode(shelter), 0.0)


# The page.

WALK = """
import { bounds, nearest, stepper, way } from "./walk.js";
import { readFileSync } from "node:fs";
const { crossings, neighbours } = JSON.parse(readFileSync(0));
const box = bounds(crossings);
const points = crossings.map(([lat, lon]) => box.point(lat, lon));
const walk = stepper(points, 0);
const found = way(points, neighbours, 0, points.length - 1);
walk.follow(found);
const places = [];
while (!walk.isThere) places.push(box.place(walk.step(5)));
const back = crossings.map(([lat, lon]) => box.place(box.point(lat, lon)));
console.log(JSON.stringify({ way: found, places, back }));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="Node.js is not installed")
def test_the_page_walks_as_the_town_does() -> None:
    town = build_town(Random(1))
    places = [to_place(*crossing) for crossing in town.crossings]
    world = {"crossings": [[place.lat, place.lon] for place in places], "neighbours": town.neighbours}
    command = ["node", "--input-type=module", "--eval", WALK.replace("./walk.js", str(FOLDER / "page" / "walk.js"))]
    done = subprocess.run(command, input=json.dumps(world), capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    end = len(places) - 1
    own = town.way(0, end)
    walked = [sum(town.length_m(*pair) for pair in pairwise(way)) for way in (own, found["way"])]
    assert walked[0] == pytest.approx(walked[1], abs=1.0), "both find a shortest way"
    for place, back in zip(places, found["back"], strict=True):
        assert (back["lat"], back["lon"]) == pytest.approx((place.lat, place.lon), abs=2e-6)
    assert len(found["places"]) == pytest.approx(walked[0] / 5, abs=2)
    for a, b in pairwise(found["places"]):
        assert is_near(a, b["lat"], b["lon"], 5.3)


def test_the_page_is_served_with_what_it_needs(tmp_path: Path) -> None:
    keys, shelters = tmp_path / "keys.json", tmp_path / "shelters.jsonl"
    make_keys(keys)
    shelters.write_bytes(encode({"id": 1, "name": "Shelter 1", "lat": 60.0, "lon": 25.0, "capacity": 10}))
    server = make_server(0, ["ws://127.0.0.1:1/connect"], keys, shelters, 1)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"

    def get(path: str, body: bytes | None = None) -> bytes:
        with urlopen(url + path, body, 10) as answer:
            return bytes(answer.read())

    try:
        page = get("/").decode()
        for name in re.findall(r'(?:src|href)="(\w[\w.]*)"', page):
            assert get(f"/{name}")
        assert b"export class Dynamoth" in get("/dynamoth.js")
        world = json.loads(get("/world"))
        assert len(world["crossings"]) == len(world["neighbours"]) and world["types"] == list(TYPES)
        first, other = json.loads(get("/login", b"")), json.loads(get("/login", b"no token"))
        assert first["user"] != other["user"]
        assert json.loads(get("/login", first["token"].encode()))["user"] == first["user"], "a visitor keeps the name"
        for path in ("/keys.json", "/../tokens.py", "/page.js/.."):
            with pytest.raises(HTTPError, match="404"):
                get(path)
    finally:
        server.shutdown()
        server.server_close()


def test_the_page_names_queries_and_parameters_as_they_are() -> None:
    script = (FOLDER / "page" / "page.js").read_text()
    table = script[script.index("const QUERIES") : script.index("};")]
    needs = {
        name: set(re.findall(r'"(\w+)"', rest))
        for name, rest in re.findall(r"(\w+): \{ title.*?needs: (\[.*?\])", table)
    }
    columns = {"type": {"type"}, "square": {"lat", "lon"}, "radius": {"radius_m"}}
    for name, definition in DEFINITIONS["queries"].items():
        asked = {column for need in needs[name] for column in columns[need]} | (
            {"user"} & set(definition["parameters"])
        )
        assert asked == set(definition["parameters"]), name
        assert ("user" in definition["parameters"]) == name.endswith("_me"), "the page adds the user by this name"


def test_the_audit_shares_nothing_with_the_data_cluster() -> None:
    for name in ("audit", "judge", "evaluate", "journal"):
        tree = ast.parse((FOLDER / f"{name}.py").read_text())
        imported = {each.module or "" for each in ast.walk(tree) if isinstance(each, ast.ImportFrom)}
        imported |= {alias.name for each in ast.walk(tree) if isinstance(each, ast.Import) for alias in each.names}
        assert not [each for each in imported if each.startswith(("dynamoth_analytics", "pyspark", "sqlglot"))], name
