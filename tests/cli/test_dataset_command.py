"""``dynamoth dataset`` and ``dynamoth query``, with real log servers."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as arrow  # pyright: ignore[reportMissingTypeStubs]
import pyarrow.parquet as parquet  # pyright: ignore[reportMissingTypeStubs]
import pytest
import redis

from dynamoth.data.catalog import QUERIES_KEY, Entry, put_command
from dynamoth.data.progress import (
    QueryStatus,
    begin_key,
    parse_begin,
    parse_progress,
    progress_key,
    query_server,
    restart_key,
    store_status_command,
)
from dynamoth.data.records import partition_name, partition_server, state_command
from dynamoth.data.registrations import register_command
from dynamoth_cli.local.child import dynamoth_command
from dynamoth_cli.local.cluster import environment_without_settings
from dynamoth_cli.local.embedded import EmbeddedRedis
from dynamoth_cli.main import main
from dynamoth_client.datasets import SyncDatasetWriter
from dynamoth_client.runtime.data_links import DataLinks
from dynamoth_daemon.exit_codes import EXIT_DONE, EXIT_FAILED, EXIT_REFUSED

SPARK_TIMEOUT_S = 180.0

DEFINITIONS = """
[datasets.reports]
kind = "append"
id = "id"
fields = { id = "string", type = "string", size = "int?", hot = "bool?", at = "timestamp?" }

[datasets.shelters]
kind = "static"
fields = { id = "string", type = "string" }

[queries.of_type]
on = "reports"
reads = ["shelters"]
period_s = 10
parameters = { type = "string" }
sql = "SELECT r.id, s.id AS shelter FROM reports r JOIN shelters s ON s.type = r.type WHERE r.type = :type"
"""


@dataclass
class Console:
    """The commands, with two log servers."""

    urls: dict[str, str]
    folder: Path
    capture: pytest.CaptureFixture[str]

    def run(self, *words: str, code: int = EXIT_DONE) -> str:
        """Run a command; return what it prints, errors if it has to fail."""
        logs = " ".join(f"{id_}={url}" for id_, url in self.urls.items())
        got = main([*words, "--logs", logs])
        shown = self.capture.readouterr()
        assert got == code, shown
        return shown.err if code else shown.out

    def json(self, *words: str) -> Any:
        return json.loads(self.run(*words, "--json"))

    def write(self, text: str, name: str = "definitions.toml") -> str:
        (self.folder / name).write_text(text)
        return str(self.folder / name)

    def set(self, text: str = DEFINITIONS, *words: str, code: int = EXIT_DONE) -> str:
        return self.run("dataset", "set", self.write(text), *words, code=code)

    def execute(self, id_: str, *command: Any) -> Any:
        client: Any = redis.Redis.from_url(self.urls[id_])  # pyright: ignore[reportUnknownMemberType]
        with client:
            return client.execute_command(*command)

    def of_query(self, name: str, *command: Any) -> Any:
        """Execute a command at the server that has a query's progress."""
        return self.execute(query_server(name, tuple(self.urls)), *command)


@pytest.fixture
def console(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Console]:
    with EmbeddedRedis() as first, EmbeddedRedis() as second:
        yield Console({"l1": first.url, "l2": second.url}, tmp_path, capsys)


def test_definitions_are_registered_shown_changed_and_dropped(console: Console) -> None:
    assert "there are no datasets" in console.run("dataset", "list")
    assert "there are no queries" in console.run("query", "list")
    assert console.set().splitlines() == [
        "dataset reports: registered, version 1",
        "dataset shelters: registered, version 1",
        "query of_type: registered, version 1",
    ]
    assert console.run("query", "set", str(console.folder / "definitions.toml")).splitlines() == [
        "dataset reports: unchanged, version 1",
        "dataset shelters: unchanged, version 1",
        "query of_type: unchanged, version 1",
    ]
    listed = console.run("dataset", "list").splitlines()
    assert [line.split()[:2] for line in listed] == [["reports", "append"], ["shelters", "static"]]
    assert "size int?" in listed[0]
    added = DEFINITIONS.replace("size =", 'street = "string?", size =').replace("period_s = 10", "period_s = 5")
    assert console.set(added).splitlines() == [
        "dataset reports: changed, version 2",
        "dataset shelters: unchanged, version 1",
        "query of_type: changed, version 2",
    ]
    assert console.json("dataset", "list")["datasets"]["reports"]["fields"]["street"] == "string?"
    assert console.json("query", "show", "of_type")["period_s"] == 5
    assert "is used by the query 'of_type'" in console.run("dataset", "drop", "reports", code=EXIT_REFUSED)
    assert "dropped, version 3" in console.run("query", "drop", "of_type")
    assert "there is no query 'of_type'" in console.run("query", "drop", "of_type", code=EXIT_REFUSED)
    assert "dropped, version 3" in console.run("dataset", "drop", "reports")
    assert "there is no dataset 'reports'" in console.run("dataset", "show", "reports", code=EXIT_REFUSED)
    assert console.json("dataset", "list")["datasets"].keys() == {"shelters"}
    assert "dataset reports: registered, version 4" in console.set()


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('size = "int?"', 'size = "string?"', "with the field 'size' of type int"),
        ('size = "int?"', 'size = "int?", street = "string"', "a new one is optional ('string?')"),
        ('hot = "bool?", ', "", "with the field 'hot'"),
        ('id = "id"', 'id = "id"\npartitions = 7', "another number of partitions: drop it first"),
    ],
)
def test_changes_that_stored_records_do_not_fit_are_refused(console: Console, old: str, new: str, says: str) -> None:
    console.set()
    changed = DEFINITIONS.replace(old, new)
    assert changed != DEFINITIONS
    assert says in console.set(changed, code=EXIT_REFUSED)
    assert console.json("dataset", "show", "reports")["version"] == 1
    assert "reports: changed, version 2" in console.set(changed, "--force")


def test_a_field_with_records_keeps_its_type_even_with_force(console: Console) -> None:
    console.set()
    console.run("dataset", "load", "reports", console.write(fire(1), "one.jsonl"))
    changed = DEFINITIONS.replace('size = "int?"', 'size = "string?"')
    said = console.set(changed, "--force", code=EXIT_REFUSED)
    assert "'reports' has records with the field 'size' of type int, which cannot become string, not even" in said
    assert console.json("dataset", "show", "reports")["version"] == 1
    without = DEFINITIONS.replace('size = "int?", ', "").replace('id = "id"', 'id = "id"\nlate_s = 0')
    assert "reports: changed, version 2" in console.set(without, "--force")
    said = console.set(changed, code=EXIT_REFUSED)
    assert "with the field 'size' of type int, which cannot become string" in said, "nor when it comes back"
    console.run("query", "drop", "of_type")
    console.run("dataset", "drop", "reports")
    said = console.set(changed.replace('id = "string"', 'id = "int"'), "--force", code=EXIT_REFUSED)
    assert "with the field 'id' of type string, which cannot become int" in said, "nor where it was dropped"
    said = console.set(changed, "--force", code=EXIT_REFUSED)
    assert "with the field 'size' of type int, which cannot become string" in said, "nor where it was left out before"
    assert "reports: registered, version 4" in console.set(DEFINITIONS, "--force")


def test_a_static_dataset_that_was_loaded_keeps_its_types(console: Console) -> None:
    """An execution that is repeated reads the load of before."""
    console.set()
    other = DEFINITIONS.replace(
        '{ id = "string", type = "string" }\n\n[queries', '{ id = "int", type = "string" }\n\n[queries'
    )
    for each in (other, DEFINITIONS):
        assert "dataset shelters: changed" in console.set(each, "--force"), "it has no records"
    assert "1 stored" in console.run("dataset", "load", "shelters", console.write(fire(1), "one.jsonl"))
    said = console.set(other, "--force", code=EXIT_REFUSED)
    assert "'shelters' has records with the field 'id' of type string, which cannot become int" in said
    console.run("query", "drop", "of_type")
    console.run("dataset", "drop", "shelters")
    assert "dataset shelters: registered" in console.set(other), "its loads do not come back"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("no TOML", "is no TOML"),
        ("", "defines nothing"),
        ("[servers]\n", "'servers' is unknown"),
        ("[datasets.a]\nkind = 'append'\n", "dataset 'a' has no fields"),
        ("[datasets.a]\nkeys = 'id'\n", "record_bytes_max, waiting_max, bind\n"),
        ("[queries.a]\nevery = 1\n", "retained_min, keep_s, bind\n"),
        (
            DEFINITIONS.replace('type = "string" }\nsql', 'size = { type = "int", min = 7, max = 5 } }\nsql'),
            "no value fits, as min = 7 is more than max = 5",
        ),
        (DEFINITIONS.replace("period_s = 10", "period_s = 10\nkeep_s = 59"), "keep_s is at least 60, not 59"),
        (DEFINITIONS.replace('"bool?"', '"text"'), "types are string, int, float, bool, timestamp"),
        (DEFINITIONS.replace("FROM reports", "FROM report"), "report"),
        (DEFINITIONS.replace("= :type", "= :kind"), "kind"),
    ],
)
def test_files_with_faults_change_nothing(console: Console, text: str, says: str) -> None:
    assert says in console.set(text, code=EXIT_REFUSED)
    assert console.json("dataset", "list") == {"datasets": {}, "faults": {}}


def test_files_are_loaded_and_shown(console: Console) -> None:
    console.set()
    lines = '{"id": "a", "type": "fire", "size": 1}\n\n{"id": "b", "type": "fire"}\n'
    jsonl = console.write(lines, "some.jsonl")
    csv = console.write("id,type,size,hot\nc,flood,7,true\nd,flood,,\n", "some.csv")
    columns = {"id": ["e", "a"], "type": ["snow", "snow"], "size": [5, None]}
    parquet.write_table(arrow.table(columns), console.folder / "some.parquet")  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    loaded = console.run("dataset", "load", "reports", jsonl, csv, str(console.folder / "some.parquet"))
    assert loaded == "5 stored, 1 duplicates, 0 refused\n"
    tail = [json.loads(line) for line in console.run("dataset", "tail", "reports", "--json").splitlines()]
    assert {each["id"]: each for each in tail} == {
        "a": {"id": "a", "type": "fire", "size": 1},
        "b": {"id": "b", "type": "fire"},
        "c": {"id": "c", "type": "flood", "size": 7, "hot": True},
        "d": {"id": "d", "type": "flood"},
        "e": {"id": "e", "type": "snow", "size": 5},
    }
    [last] = console.run("dataset", "tail", "reports", "--last", "1").splitlines()
    assert " s ago  {" in last
    shown = console.json("dataset", "show", "reports")
    assert (shown["stored"], shown["restarts"], shown["dead_letters"]) == (5, 0, 0)
    assert "there is no file" in console.run("dataset", "load", "reports", "missing.jsonl", code=EXIT_REFUSED)
    other = console.write("x", "some.xml")
    assert "ends with .jsonl, .csv or .parquet" in console.run("dataset", "load", "reports", other, code=EXIT_REFUSED)


def test_a_file_is_loaded_as_the_log_servers_are_configured(console: Console) -> None:
    """Where they lose nothing, as brokers and data cluster know, a load does not look like a restart."""
    console.set()
    logs = " ".join(f"{id_}={url}" for id_, url in console.urls.items())
    config = console.write(f'[data_cluster]\nlogs = "{logs}"\nlog_durable = true\n', "dynamoth.toml")
    with SyncDatasetWriter(console.urls, durable=True) as writer:
        writer.append_many("reports", [{"id": f"a{number}", "type": "fire"} for number in range(20)])
    lines = "".join(json.dumps({"id": f"b{number}", "type": "fire"}) + "\n" for number in range(20))
    assert main(["dataset", "load", "reports", console.write(lines, "some.jsonl"), "--config", config]) == EXIT_DONE
    console.capture.readouterr()
    shown = console.json("dataset", "show", "reports")
    assert (shown["stored"], shown["restarts"]) == (40, 0)


def test_refused_records_are_named_counted_and_kept_aside(console: Console) -> None:
    console.set()
    file = console.write("id,type,size\na,fire,1\nb,fire,big\n,,\n", "some.csv")
    assert (
        main(["dataset", "load", "reports", file, "--logs", " ".join(f"{k}={v}" for k, v in console.urls.items())]) == 1
    )
    shown = console.capture.readouterr()
    assert "record 2: field 'size' is a whole number" in shown.err
    assert "dataset dead reports" in shown.out
    dead = console.run("dataset", "dead", "reports")
    assert f"(from file {file})" in dead
    letters = [json.loads(line) for line in console.run("dataset", "dead", "reports", "--json").splitlines()]
    assert any(json.loads(each["record"]).get("size") == "big" for each in letters)
    assert console.json("dataset", "show", "reports")["dead_letters"] == len(letters)
    assert len(dead.splitlines()) == len(letters)


def test_a_dead_letter_is_one_line(console: Console) -> None:
    """Others choose what is in it, so it could look like another one."""
    console.set()
    file = console.write("id,type,size\nb,fire,big\n", "some\n 5 s ago  refused.csv")
    assert main(["dataset", "load", "reports", file, "--logs", " ".join(f"{k}={v}" for k, v in console.urls.items())])
    console.capture.readouterr()
    (line,) = console.run("dataset", "dead", "reports").splitlines()
    assert "some\\n 5 s ago  refused.csv" in line


def fire(number: int) -> str:
    return json.dumps({"id": str(number), "type": "fire"})


def test_refused_records_are_numbered_through_the_file(console: Console) -> None:
    console.set()
    lines = [fire(number) for number in range(2500)]
    lines[2100] = "{}"
    file = console.write("\n".join(lines), "many.jsonl")
    logs = " ".join(f"{id_}={url}" for id_, url in console.urls.items())
    assert main(["dataset", "load", "reports", file, "--logs", logs]) == EXIT_FAILED
    assert "record 2101: field 'id' is missing" in console.capture.readouterr().err


@pytest.mark.parametrize("has_id", [True, False])
def test_a_load_that_stops_says_where_to_go_on(console: Console, has_id: bool) -> None:
    small = DEFINITIONS.replace('id = "id"\n', "waiting_max = 1000\npartitions = 1\n" + 'id = "id"\n' * has_id)
    console.set(small)
    file = console.write("\n".join(map(fire, range(2500))), "many.jsonl")
    said = console.run("dataset", "load", "reports", file, code=EXIT_FAILED)
    assert f"1000 records of {file} are stored or refused, then: " in said
    assert "1000 records wait for the archive" in said
    assert "go on behind record 1000" in said
    assert ("is not stored twice" in said) == has_id
    assert console.json("dataset", "show", "reports")["stored"] == 1000
    broken = console.folder / "broken.csv"
    broken.write_bytes(b"id,type\nz,fire\n" + b"\xff,fire\n")
    assert "0 records of it are stored" in console.run("dataset", "load", "reports", str(broken), code=EXIT_REFUSED)


def test_a_load_that_is_too_large_for_its_dataset_names_the_setting(console: Console) -> None:
    console.set(DEFINITIONS.replace('kind = "static"', 'kind = "static"\nwaiting_max = 1000\npartitions = 1'))
    file = console.write("\n".join(map(fire, range(1001))), "many.jsonl")
    said = console.run("dataset", "load", "shelters", file, code=EXIT_REFUSED)
    assert "partition 0 would have 1001 records, and waiting_max is 1000" in said
    assert console.json("dataset", "show", "shelters")["loaded"] == 0


def test_a_static_dataset_is_replaced_as_a_whole_or_not_at_all(console: Console) -> None:
    console.set()

    def ids() -> list[str]:
        lines = console.run("dataset", "tail", "shelters", "--json").splitlines()
        return sorted(json.loads(line)["id"] for line in lines)

    def load(*rows: str, code: int = EXIT_DONE) -> str:
        file = console.write("\n".join(["id,type", *rows, ""]), "shelters.csv")
        return console.run("dataset", "load", "shelters", file, code=code)

    assert "2 stored" in load("a,fire", "b,flood")
    assert ids() == ["a", "b"]
    assert "have no records; nothing was loaded" in load(code=EXIT_REFUSED)
    assert ids() == ["a", "b"]
    assert "1 stored" in load("c,fire")
    assert ids() == ["c"]
    assert "nothing was loaded" in load("d,fire", "e,fire,1", code=EXIT_REFUSED)
    assert ids() == ["c"]
    shown = console.json("dataset", "show", "shelters")
    assert (shown["loaded"], shown["version"], shown["stored"]) == (2, 3, 1)
    old = partition_name("shelters@1", 0)
    server = partition_server(old, tuple(console.urls))
    assert 0 < console.execute(server, b"TTL", f"__dynamoth__:data:{{{old}}}:meta") <= 3600
    assert "unchanged, version 3" in console.set(), "its definition does not say how often it was loaded"


def test_a_static_dataset_can_be_emptied(console: Console) -> None:
    console.set()
    assert "1 stored" in console.run("dataset", "load", "shelters", console.write(fire(1), "one.jsonl"))
    assert "0 stored" in console.run("dataset", "load", "shelters", console.write("", "none.jsonl"), "--empty")
    assert console.json("dataset", "show", "shelters")["stored"] == 0


def test_files_of_programs_that_begin_them_with_a_mark_are_read(console: Console) -> None:
    console.set()
    csv = console.write("\ufeffid,type,size\na,fire,1\n", "some.csv")
    jsonl = console.write("\ufeff" + fire(1), "some.jsonl")
    assert "2 stored, 0 duplicates, 0 refused" in console.run("dataset", "load", "reports", csv, jsonl)


def test_tables_without_a_needed_column_are_refused_with_the_columns_that_they_have(console: Console) -> None:
    console.set()
    semicolons = console.write("id;type\na;fire\n", "semicolons.csv")
    said = console.run("dataset", "load", "reports", semicolons, code=EXIT_REFUSED)
    assert "the file has the columns 'id;type', and none for the field 'id'" in said
    assert "separated by commas" in said
    other = console.write("id,kind,size\na,fire,1\n", "other.csv")
    said = console.run("dataset", "load", "reports", other, code=EXIT_REFUSED)
    assert "the file has the columns 'id, kind, size', and none for the field 'type'" in said
    table = console.folder / "some.parquet"
    parquet.write_table(arrow.table({"id": ["a"]}), table)  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    said = console.run("dataset", "load", "shelters", str(table), code=EXIT_REFUSED)
    assert "the file has the columns 'id', and none for the field 'type'" in said
    assert console.json("dataset", "show", "reports")["dead_letters"] == 0
    assert "0 stored" in console.run("dataset", "load", "reports", console.write("", "empty.csv"))


def test_a_dropped_dataset_comes_back_without_former_records_or_not_at_all(console: Console) -> None:
    console.set()
    file = console.write(fire(1), "one.jsonl")
    for name in ("reports", "shelters"):
        assert "1 stored" in console.run("dataset", "load", name, file)
    console.run("query", "drop", "of_type")
    for name in ("reports", "shelters"):
        console.run("dataset", "drop", name)
    said = console.set(code=EXIT_REFUSED)
    assert "dataset 'reports' was dropped, and its records are still stored" in said
    assert console.json("dataset", "list")["datasets"] == {}
    assert "dataset shelters: registered, version 4" in console.set(DEFINITIONS, "--force")
    assert console.json("dataset", "show", "reports")["stored"] == 1
    shelters = console.json("dataset", "show", "shelters")
    assert (shelters["stored"], shelters["loaded"]) == (0, 3), "no load of this number was there before"
    for number in range(2):
        name = partition_name("shelters@3", number)
        key = f"__dynamoth__:data:{{{name}}}:meta"
        server = partition_server(name, tuple(console.urls))
        assert console.execute(server, b"HGET", key, b"records") == b"0", "it is complete, and empty"
        old = partition_name("shelters@1", number)
        key = f"__dynamoth__:data:{{{old}}}:meta"
        assert 0 < console.execute(partition_server(old, tuple(console.urls)), b"TTL", key) <= 3600
    assert "1 stored" in console.run("dataset", "load", "shelters", file)


def test_a_query_that_comes_back_begins_behind_the_records_of_then(console: Console) -> None:
    console.set()
    console.run("dataset", "load", "reports", console.write(fire(1), "one.jsonl"))
    console.run("query", "drop", "of_type")
    before = console.of_query("of_type", b"GET", progress_key("of_type"))
    console.run("dataset", "load", "reports", console.write(fire(2), "two.jsonl"))
    assert "of_type: registered, version 3" in console.set()
    begin = parse_begin(console.of_query("of_type", b"GET", begin_key("of_type")))
    assert begin is not None
    for name, offset in begin["offsets"].items():
        tip = console.execute(partition_server(name, tuple(console.urls)), *state_command(name))[0]
        assert offset == int(tip or 0)
    assert console.of_query("of_type", b"GET", progress_key("of_type")) == before, "it may be executed, too"
    console.run("query", "drop", "of_type")
    console.of_query("of_type", b"DEL", progress_key("of_type"))
    console.set()
    progress = parse_progress(console.of_query("of_type", b"GET", progress_key("of_type")))
    assert progress is not None
    assert progress.window.end["offsets"] == begin["offsets"]
    assert progress.execution > 1_700_000_000_000, "logs may know the numbers of before"


@pytest.mark.parametrize("action", ["set", "drop"])
def test_a_lost_race_is_no_success(console: Console, monkeypatch: pytest.MonkeyPatch, action: str) -> None:
    console.set()
    entries = DataLinks.entries

    async def overtaken(links: DataLinks) -> Any:
        """Have somebody else register something else as soon as the catalog was read."""
        read = await entries(links)
        definition = {**(read[1]["of_type"].definition or {}), "period_s": 7}
        for id_ in console.urls:
            console.execute(id_, *put_command(QUERIES_KEY, "of_type", Entry(2, definition)))
        return read

    with monkeypatch.context() as patch:
        patch.setattr(DataLinks, "entries", overtaken)
        words = ("drop", "of_type") if action == "drop" else ("set", str(console.folder / "definitions.toml"))
        if action == "set":
            console.write(DEFINITIONS.replace("period_s = 10", "period_s = 5"))
        assert "was changed by somebody else just now: run it again" in console.run("query", *words, code=EXIT_REFUSED)
    done = console.run("query", *words)
    assert "version 3" in done


def test_a_change_says_how_many_interests_do_not_fit_any_more(console: Console) -> None:
    console.set()
    for id_, interest, type_ in (("l1", "i1", "fire"), ("l2", "i2", "fire"), ("l2", "i3", "flood")):
        console.execute(id_, *register_command("of_type", [(interest, json.dumps({"type": type_}), 60.0)]))
    narrow = DEFINITIONS.replace('type = "string" }\nsql', 'type = { type = "string", choices = ["flood"] } }\nsql')
    assert narrow != DEFINITIONS
    said = console.set(narrow)
    assert "query of_type: 2 of 3 registered interests do not fit it any more" in said
    assert "do not fit" not in console.set(narrow), "nothing has changed"
    assert "do not fit" not in console.set(), "they fit again"


def test_queries_show_how_they_do_and_can_be_restarted(console: Console) -> None:
    console.set()
    said = console.run("query", "list")
    assert "no data cluster has begun to execute it: `dynamoth data-cluster` is still starting, or does not run" in said
    progress = parse_progress(console.of_query("of_type", b"GET", progress_key("of_type")))
    assert progress is not None and progress.is_done and progress.execution == 0
    status = QueryStatus(execution=7, ended_ms=1, seconds=0.25, interests=3, counts={"rows": 12})
    console.of_query("of_type", *store_status_command("of_type", status, 1))
    console.execute("l1", *register_command("of_type", [("i1", '{"type":"fire"}', 60.0)]))
    assert "execution 7" in console.run("query", "list")
    shown = console.run("query", "show", "of_type")
    assert ["rows", "12"] in [line.split() for line in shown.splitlines()]
    values = console.json("query", "show", "of_type")
    assert (values["registered"], values["status"]["execution"]) == (1, 7)
    failing = QueryStatus(state="failing", reason="overflow", since_ms=1)
    console.of_query("of_type", *store_status_command("of_type", failing, 1))
    assert "overflow" in console.run("query", "list")
    assert console.json("query", "list")["queries"]["of_type"]["status"]["state"] == "failing"
    assert "is skipped" in console.run("query", "restart", "of_type")
    assert int(console.of_query("of_type", b"GET", restart_key("of_type"))) > 1
    assert "there is no query 'other'" in console.run("query", "restart", "other", code=EXIT_REFUSED)


def test_query_list_asks_for_a_data_cluster_where_records_wait_for_one(console: Console) -> None:
    console.set()
    now = round(time.time() * 1000)

    def listed(status: QueryStatus) -> str:
        console.of_query("of_type", *store_status_command("of_type", status, 1))
        listed = console.run("query", "list")
        assert ("run?" in listed) == ("run?" in console.run("query", "show", "of_type"))
        return listed

    old = QueryStatus(execution=20, ended_ms=now - 180_000)
    assert "execution 20 3 min ago" in listed(old)
    assert "run?" not in listed(old), "there was nothing to execute"
    console.run("dataset", "load", "reports", console.write(f"{fire(1)}\n{fire(2)}", "two.jsonl"))
    assert "2 records wait: does `dynamoth data-cluster` run?" in listed(old)
    assert "run?" not in listed(QueryStatus(execution=20, ended_ms=now))
    assert "not executed yet; 2 records wait: does" in listed(QueryStatus(since_ms=now - 180_000))
    assert "every 10 s" in listed(old)
    console.set(DEFINITIONS.replace("period_s = 10", "period_s = 0"))
    assert "every" not in listed(old) and " continuous " in listed(old)


def test_changes_are_printed_as_json_as_well(console: Console) -> None:
    file = console.write(DEFINITIONS)
    done = console.json("dataset", "set", file)
    assert done["warnings"] == []
    assert done["definitions"][0] == {"kind": "dataset", "name": "reports", "outcome": "registered", "version": 1}
    assert [each["outcome"] for each in console.json("query", "set", file)["definitions"]] == ["unchanged"] * 3
    records = console.write('{"id": "a", "type": "fire"}\n', "some.jsonl")
    assert console.json("dataset", "load", "reports", records) == {"stored": 1, "duplicate": 0, "refused": 0}
    assert console.json("dataset", "load", "shelters", records) == {"stored": 1, "loaded": 1}
    assert console.json("query", "restart", "of_type") == {"restarted": "of_type"}
    assert console.json("query", "drop", "of_type") == {"dropped": "of_type", "version": 2}
    assert console.json("dataset", "drop", "reports") == {"dropped": "reports", "version": 2}


def test_a_log_server_that_cannot_be_reached_is_named(console: Console, free_port: int) -> None:
    console.set()
    console.urls["l2"] = f"redis://127.0.0.1:{free_port}"
    assert "log server l2" in console.run("dataset", "list", code=EXIT_FAILED)
    console.urls = {"l?": "redis://127.0.0.1"}
    assert "ID=URL expected" in console.run("query", "list", code=EXIT_REFUSED)
    console.urls = {}
    assert "--logs 'l1=redis://HOST:PORT'" in console.run("query", "list", code=EXIT_REFUSED)


def test_log_servers_come_from_the_file_of_settings(console: Console) -> None:
    console.set()
    logs = " ".join(f"{id_}={url}" for id_, url in console.urls.items())
    config = console.write(f'[data_cluster]\nlogs = "{logs}"\n', "dynamoth.toml")
    assert main(["dataset", "list", "--json", "--config", config]) == EXIT_DONE
    assert json.loads(console.capture.readouterr().out)["datasets"].keys() == {"reports", "shelters"}


def test_a_query_is_tried_on_samples(tmp_path: Path) -> None:
    """With Spark, in a process of its own."""
    file, reports, shelters = (tmp_path / name for name in ("definitions.toml", "reports.jsonl", "shelters.csv"))
    file.write_text(DEFINITIONS)
    reports.write_text('{"id": "a", "type": "fire"}\n{"id": "b", "type": "flood"}\n')
    shelters.write_text("id,type\ns1,fire\ns2,fire\n")

    def attempt(*words: str) -> subprocess.CompletedProcess[str]:
        command = dynamoth_command("query", "try", str(file), "of_type", *words)
        return subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=SPARK_TIMEOUT_S,
            env=environment_without_settings(),
        )  # fmt: skip

    samples = ("--sample", f"reports={reports}", "--sample", f"shelters={shelters}")
    interests = ("--params", '{"type": "fire"}', "--params", '{"type": "flood"}')
    done = attempt(*samples, *interests, "--json")
    assert done.returncode == EXIT_DONE, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {"params": {"type": "fire"}, "rows": [{"id": "a", "shelter": "s1"}, {"id": "a", "shelter": "s2"}]},
        {"params": {"type": "flood"}, "rows": []},
    ]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["other"], "has no query 'other'; it has of_type"),
        (["of_type"], "give --params"),
        (["of_type", "--config", "missing.toml"], "give --params"),
        (["of_type", "--params", '{"type": 1}'], "is of type string"),
        (["of_type", "--params", "no JSON"], "--params no JSON"),
        (["of_type", "--sample", "roads=x.csv"], "with one of reports, shelters"),
        (["of_type", "--sample", "reports=missing.csv"], "there is no such file"),
    ],
)
def test_trials_that_cannot_be_made(
    tmp_path: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "definitions.toml"
    file.write_text(DEFINITIONS)
    assert main(["query", "try", str(file), *words]) == EXIT_REFUSED
    assert says in capsys.readouterr().err
