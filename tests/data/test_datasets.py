"""Datasets: which records belong to them, and which definitions are accepted."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamoth.data.catalog import (
    Catalog,
    Entry,
    catalog_of,
    entry_of,
    merged,
    parse_entries,
    parse_entry,
    stored_value,
)
from dynamoth.data.datasets import (
    SHOWN_RECORD_BYTES,
    BadRecord,
    Dataset,
    Field,
    dead_letter,
    dead_letters,
    read_dataset,
    write_dataset,
)
from dynamoth.data.records import partition_of, partition_server
from dynamoth.errors import ConfigError, MalformedMessage

REPORTS = Dataset(
    "reports",
    "append",
    (
        Field("id", "string"),
        Field("n", "int", is_optional=True),
        Field("lat", "float", is_optional=True),
        Field("ok", "bool", is_optional=True),
        Field("at", "timestamp", is_optional=True),
    ),
    id="id",
)


def normalized(record: Any, dataset: Dataset = REPORTS, **arguments: Any) -> Any:
    text = record if isinstance(record, bytes) else json.dumps(record).encode()
    value, _, _ = dataset.normalize(text, arguments.pop("now", 0.0), **arguments)
    return json.loads(value)


def test_a_record_is_stored_with_its_fields_in_order() -> None:
    record = b'{"lat": 1, "id": "\\u00e4", "n": 3, "ok": true, "at": "1970-01-01T00:00:01.5Z"}'
    value, place, id_ = REPORTS.normalize(record, 0.0)
    assert value == '{"id":"ä","n":3,"lat":1.0,"ok":true,"at":1500000}'.encode()
    assert (place, id_) == ("ä", "ä")


@pytest.mark.parametrize("number", [-(2**63), 2**63 - 1])
def test_a_whole_number_has_64_bits(number: int) -> None:
    assert normalized({"id": "a", "n": number})["n"] == number


def test_an_optional_field_may_be_missing_or_null() -> None:
    assert normalized({"id": "a", "n": None}) == {"id": "a"}


@pytest.mark.parametrize(
    ("at", "microseconds"),
    [
        ("2026-01-31T12:00:00+02:00", 1769853600_000000),
        (1.25, 1250000),
        (0, 0),
        ("1970-01-01T00:00:00Z", 0),
        ("9999-12-31T23:59:59.999999+00:00", 253402300799_999999),
        (253402300799, 253402300799_000000),
        ("0001-01-01T00:00:00Z", -62135596800_000000),
        ("1969-12-31T23:59:59.999999Z", -1),
    ],
)
def test_a_time_is_iso_8601_with_its_zone_or_unix_seconds(at: Any, microseconds: int) -> None:
    assert normalized({"id": "a", "at": at})["at"] == microseconds


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (b"", "no JSON"),
        (b"[1]", "a JSON object expected"),
        (b'{"id": "a"', "no JSON"),
        (b'{"id": "a", "n": NaN}', "NaN"),
        (b'{"id": "a", "lat": 1e999}', "not a finite number"),
        (b'{"id": "a", "lat": -Infinity}', "Infinity"),
        (b"[" * 100_000, "bytes"),
        (b"[" * 50_000, "no JSON"),
        (b'{"id": "a", "n": %s}' % (b"9" * 5000), "no JSON|64 bits"),
        (b'{"id": "a", "n": 9223372036854775808}', "64 bits"),
        (b'{"id": "a", "n": -9223372036854775809}', "64 bits"),
        (b'{"id": "a", "n": 1.0}', "whole number"),
        (b'{"id": "a", "n": true}', "whole number"),
        (b'{"id": "a", "n": "1"}', "whole number"),
        (b'{"id": 1}', "is text"),
        (b'{"id": "a", "ok": 1}', "true or false"),
        (b'{"id": "a", "at": "2026-01-31T12:00:00"}', "with its zone"),
        (b'{"id": "a", "at": 1e300}', "ISO 8601"),
        (b'{"id": "a", "at": "9999-12-31T23:59:59.999999-00:01"}', "years 1 to 9999"),
        (b'{"id": "a", "at": 253402300800}', "years 1 to 9999"),
        (b'{"id": "a", "at": "0001-01-01T00:00:00+00:01"}', "years 1 to 9999"),
        (b'{"id": "a", "at": -62135596801.0}', "years 1 to 9999"),
        (b'{"id": "a", "at": "-0001-01-01T00:00:00Z"}', "years 1 to 9999"),
        (b'{"id": "a", "at": %s}' % (b"9" * 400), "years 1 to 9999"),
        (b'{"id": "a", "n": 1, "id": "b"}', "it has 'id' twice"),
        (b'{"id": "a", "\\u0069d": "b"}', "it has 'id' twice"),
        ('{"id": "a"}'.encode("utf-16"), "no JSON"),
        ('{"id": "a"}'.encode("utf-16-le"), "no JSON"),
        ('{"id": "a"}'.encode("utf-32"), "no JSON"),
        ('{"id": "a"}'.encode("utf-8-sig"), "no JSON"),
        (b'{"n": 1}', "'id' is missing"),
        (b'{"id": null}', "'id' is missing"),
        (b'{"id": ""}', "'id' is empty, and has to identify the record"),
        (b'{"id": "a", "more": 1}', "no field 'more'"),
        (b'{"idd": "a", "n": 1}', "'id' is missing, and the dataset has no field 'idd'"),
        (b'{"id": "\\ud800"}', "valid Unicode"),
        (b'{"id": "\xff"}', "no JSON"),
        (b'{"id": "%s"}' % (b"x" * 70_000), "65536 are allowed"),
    ],
)
def test_what_does_not_belong_is_refused_with_the_reason(record: bytes, reason: str) -> None:
    with pytest.raises(BadRecord, match=reason):
        REPORTS.normalize(record, 0.0)


def test_a_record_with_very_many_names_is_refused_at_once() -> None:
    """A broker serves nobody else meanwhile."""
    names = ",".join(f'"{number:x}":0' for number in range(80_000))
    began = time.monotonic()
    with pytest.raises(BadRecord, match="it has '1387f' twice"):
        replace(REPORTS, record_bytes_max=1_048_576).normalize(f'{{{names},"1387f":0}}'.encode(), 0.0)
    assert time.monotonic() - began < 5


def test_a_late_record_is_refused() -> None:
    dataset = replace(REPORTS, fields=(Field("id", "string"), Field("at", "timestamp")), time="at", late_s=60.0)
    assert normalized({"id": "a", "at": 1000}, dataset, now=1050.0) == {"id": "a", "at": 1000_000000}
    with pytest.raises(BadRecord, match="it is 100 s late, and 60 s are allowed"):
        normalized({"id": "a", "at": 1000}, dataset, now=1100.0)


def test_a_bound_field_is_the_subject_of_the_token() -> None:
    dataset = replace(REPORTS, bind=(("id", "$sub"),))
    assert normalized({"id": "ann"}, dataset, subject="ann") == {"id": "ann"}
    assert normalized({"id": "bob"}, dataset) == {"id": "bob"}, "a backend may publish for anybody"
    with pytest.raises(BadRecord, match="subject of the token"):
        normalized({"id": "bob"}, dataset, subject="ann")


@given(st.binary(max_size=200) | st.text(max_size=100).map(lambda text: json.dumps({"id": text}).encode()))
def test_any_bytes_are_stored_or_refused(record: bytes) -> None:
    try:
        value, _, id_ = REPORTS.normalize(record, 0.0)
    except BadRecord:
        return
    assert json.loads(value)["id"] == id_


@given(st.binary(max_size=6000), st.text(max_size=300))
def test_any_refused_record_becomes_a_dead_letter(record: bytes, reason: str) -> None:
    reason = reason.encode(errors="replace").decode()
    stored = dead_letter(record, reason, "a test", 5.0)
    letter = json.loads(stored)
    assert letter.keys() == dead_letters("reports").by_name.keys()
    assert len(stored) <= dead_letters("reports").record_bytes_max * 6
    assert letter["reason"] == reason
    assert letter["record"] == record[:SHOWN_RECORD_BYTES].decode(errors="replace")
    assert letter["at"] == 5_000000


# Definitions.

GOOD: dict[str, Any] = {"kind": "append", "fields": {"id": "string", "at": "timestamp?", "n": "int"}, "id": "id"}


def test_a_definition_is_read_as_it_is_written() -> None:
    dataset = read_dataset("reports", GOOD | {"partitions": 4, "bind": {"id": "$sub"}})
    assert read_dataset("reports", write_dataset(dataset)) == dataset
    assert dataset.by_name["at"] == Field("at", "timestamp", is_optional=True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "heap"}, "kind is one of"),
        ({"fields": {}}, "has no fields"),
        ({"fields": {"id": "text"}}, "types are string"),
        ({"fields": {"_id": "string"}}, "small letters"),
        ({"fields": {"Id": "string"}}, "small letters"),
        ({"kind": "keyed"}, "a keyed dataset has a key"),
        ({"key": "id"}, "no other one has"),
        ({"id": "at"}, "never missing"),
        ({"id": "nothing"}, "never missing"),
        ({"late_s": 5}, "needs time"),
        ({"partitions": 0}, "between 1 and 64"),
        ({"partitions": True}, "a whole number"),
        ({"partition": 1}, "no setting 'partition'"),
        ({"bind": {"n": "$sub"}}, "bind is"),
        ({"bind": {"id": "$user"}}, "bind is"),
    ],
)
def test_a_wrong_definition_is_refused_with_the_reason(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match="dataset 'reports'") as error:
        read_dataset("reports", GOOD | change)
    assert words in str(error.value)


@pytest.mark.parametrize("name", ["", "Reports", "1st", "a-b", "x" * 49, "reports_dead", "select * from"])
def test_a_name_can_stand_in_sql(name: str) -> None:
    with pytest.raises(ConfigError):
        read_dataset(name, GOOD)


# The catalog.


def test_the_latest_version_of_any_server_counts() -> None:
    old, new = entry_of(read_dataset("reports", GOOD)), Entry(2, GOOD | {"partitions": 7})
    catalog = catalog_of(merged([{"reports": old}, {"reports": new}, {}]), {})
    assert catalog.datasets["reports"].partitions == 7
    assert catalog_of(merged([{"reports": new}, {"reports": Entry(3, None)}]), {}) == Catalog()


def test_a_definition_that_cannot_be_read_harms_no_other_one() -> None:
    catalog = catalog_of({"bad": Entry(1, {"kind": "?"}), "reports": entry_of(read_dataset("reports", GOOD))}, {})
    assert catalog.datasets.keys() == {"reports"}
    assert "kind is one of" in catalog.dataset_faults["bad"]


@pytest.mark.parametrize("value", [b"", b"x", b"1 [", b"1 [1]", b"{}", b'1 {"dropped":1}'])
def test_a_malformed_entry_is_recognized(value: bytes) -> None:
    with pytest.raises(MalformedMessage):
        parse_entry(value)


def test_what_is_dropped_has_its_former_definition() -> None:
    former = entry_of(read_dataset("reports", GOOD)).definition
    dropped = Entry(2, None, former)
    assert parse_entry(stored_value(dropped)) == dropped
    catalog = catalog_of({"reports": dropped}, {"near": dropped})
    assert (catalog.datasets, catalog.queries, catalog.dropped_queries) == ({}, {}, {"near": 2})


def test_a_malformed_entry_harms_no_other_one_and_another_server_may_have_it() -> None:
    good = entry_of(read_dataset("reports", GOOD))
    text = b"%d %s" % (good.version, json.dumps(good.definition).encode())
    spoiled = parse_entries([b"reports", b"%d [" % good.version, b"far", b"{}", b"near", text])
    assert catalog_of(spoiled, {}).datasets.keys() == {"near"}
    assert catalog_of(spoiled, {}).dataset_faults.keys() == {"reports", "far"}
    assert catalog_of({}, spoiled).query_faults.keys() == {"reports", "far", "near"}
    for copies in ([spoiled, {"reports": good}], [{"reports": good}, spoiled]):
        assert catalog_of(merged(copies), {}).datasets.keys() == {"reports", "near"}
    newer = parse_entries([b"reports", b"9 ["])
    assert merged([newer, {"reports": good}])["reports"].version == 9, "the next one has a larger version"


def test_the_dataset_of_refused_records_follows_from_the_other_one() -> None:
    catalog = catalog_of({"reports": entry_of(read_dataset("reports", GOOD))}, {})
    assert catalog.dataset("reports_dead") == dead_letters("reports")
    assert catalog.dataset("others_dead") is None


def test_records_of_one_key_go_to_one_partition_and_others_are_spread() -> None:
    dataset = replace(REPORTS, partitions=8)
    assert len({partition_of(dataset, "ann", turn) for turn in range(50)}) == 1
    assert {partition_of(dataset, f"user{number}", 0) for number in range(200)} == set(range(8))
    assert [partition_of(dataset, "", turn) for turn in range(9)] == [0, 1, 2, 3, 4, 5, 6, 7, 0]
    keyed = replace(dataset, kind="keyed", key="id", id="")
    assert len({partition_of(keyed, "", turn) for turn in range(50)}) == 1, "the empty key is one, too"
    assert {partition_server(f"reports/{number}", ["l1", "l2", "l3"]) for number in range(64)} == {"l1", "l2", "l3"}
