"""Standing queries: their definitions, their parameters, and when they are executed."""

from __future__ import annotations

from typing import Any

import pytest

from dynamoth.data.queries import BadParameters, read_query, write_query
from dynamoth.data.results import (
    changed_payload,
    dropped_payload,
    result_payload,
    says_the_same,
    too_large_payload,
)
from dynamoth.errors import ConfigError

GOOD: dict[str, Any] = {
    "sql": "SELECT r.id FROM reports r WHERE r.type = :type AND r.n < :most",
    "on": "reports",
    "period_s": 10,
    "parameters": {
        "type": {"type": "string", "choices": ["fire", "flood"]},
        "most": {"type": "int", "min": 1, "max": 9},
    },
}


def test_a_definition_is_read_as_it_is_written() -> None:
    query = read_query("near", GOOD | {"reads": ["places"], "bind": {"type": "$sub"}, "keep_s": 5})
    assert read_query("near", write_query(query)) == query
    assert query.datasets == ("reports", "places")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sql": " "}, "sql is a SELECT"),
        ({"period_s": -1}, "period_s is between"),
        ({"period_s": 1.5}, "a whole number"),
        ({"on": "Reports"}, "small letters"),
        ({"reads": ["reports"]}, "each dataset once"),
        ({"delivery": "push"}, "delivery is one of"),
        ({"parameters": {"type": "text"}}, "type is one of string, int, float, bool, not 'text'"),
        ({"parameters": {"type": {"max": 3}}}, "type is one of string, int, float, bool"),
        ({"parameters": {"type": {"type": "string", "min": 1}}}, "only numbers"),
        ({"parameters": {"type": {"type": "int", "choices": ["a"]}}}, "choices"),
        ({"parameters": {"type": {"typ": "int"}}}, "no setting 'typ'"),
        ({"parameters": {"type": {"type": "int", "max": float("nan")}}}, "finite numbers"),
        ({"parameters": {"type": {"type": "float", "min": float("-inf")}}}, "finite numbers"),
        ({"keep_s": 0}, "keep_s is between"),
        ({"bind": {"most": "$sub"}}, "bind is"),
        ({"periods": 3}, "no setting 'periods'"),
    ],
)
def test_a_wrong_definition_is_refused_with_the_reason(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match="query 'near'") as error:
        read_query("near", GOOD | change)
    assert words in str(error.value)


@pytest.mark.parametrize("missing", ["sql", "on", "period_s"])
def test_what_a_definition_needs(missing: str) -> None:
    with pytest.raises(ConfigError, match=f"query 'near' needs {missing}"):
        read_query("near", {name: each for name, each in GOOD.items() if name != missing})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"type": "fire"}, "'most' is missing"),
        ({"type": "fire", "most": 3, "x": 1}, "no parameter 'x'"),
        ({"type": 1, "most": 3}, "of type string"),
        ({"type": "storm", "most": 3}, "one of fire, flood"),
        ({"type": "fire", "most": 0}, "at least 1"),
        ({"type": "fire", "most": 10}, "at most 9"),
        ({"type": "fire", "most": 1.5}, "of type int"),
        ({"type": "fire", "most": True}, "of type int"),
        ({"type": "fire", "most": None}, "of type int"),
        ({"type": "fire", "most": float("nan")}, "of type int"),
    ],
)
def test_values_fit_the_parameters_or_are_refused(values: dict[str, Any], words: str) -> None:
    query = read_query("near", GOOD)
    with pytest.raises(BadParameters) as error:
        query.check(values)
    assert words in str(error.value)


@pytest.mark.parametrize("value", [1e20, -(2.0**53) - 2, 2**53 + 1, 10**400, float("inf"), True])
def test_whole_numbers_are_exact_or_refused(value: float) -> None:
    query = read_query("near", GOOD | {"parameters": {"n": "int"}, "sql": "SELECT 1 FROM reports WHERE n = :n"})
    with pytest.raises(BadParameters, match="'n'"):
        query.check({"n": value})
    query.check({"n": 2**53})
    query.check({"n": -(2.0**53)})


@pytest.mark.parametrize("value", [10**400, float("inf"), float("nan"), False, "1"])
def test_numbers_are_finite_or_refused(value: float) -> None:
    query = read_query("near", GOOD | {"parameters": {"x": "float"}, "sql": "SELECT 1 FROM reports WHERE x = :x"})
    with pytest.raises(BadParameters, match="'x'"):
        query.check({"x": value})
    query.check({"x": 1.7e308})
    query.check({"x": 10**20})  # as the canonical parameters have 1e20


def test_values_that_fit() -> None:
    query = read_query("near", GOOD)
    query.check({"type": "fire", "most": 3})
    query.check({"type": "flood", "most": 9.0})


def test_an_interest_of_a_former_version_fits_or_there_is_a_reason() -> None:
    query = read_query("near", GOOD)
    assert query.fault({"type": "fire", "most": 3, "gone": 1}) is None
    assert query.fault({"type": "fire"}) == "parameter 'most' is missing: it is of type int"
    assert query.fault({"type": "fire", "most": 10}) == "parameter 'most' is at most 9, not 10"


def test_a_result_set_is_json() -> None:
    assert result_payload("near", 2, 7, 1_700_000_000_250, '[{"id":1}]') == (
        b'{"query":"near","version":2,"execution":7,"until":"2023-11-14T22:13:20.250Z","rows":[{"id":1}]}'
    )
    assert b'"error":"the result set has 9 rows and at least 5000 bytes' in too_large_payload(
        "near", 2, 7, 0, 9, 5000, 1024
    )
    head = b'{"query":"near","version":3,"execution":8,"until":"1970-01-01T00:00:00.250Z"'
    changed = changed_payload("near", 3, 8, 250, "x")
    assert changed == head + b',"error":"the query has changed: subscribe again: x"}'
    assert dropped_payload("near", 3, 8, 250) == head + b',"dropped":true}'


def test_a_last_publication_is_known_again_whatever_its_execution() -> None:
    changed = changed_payload("near", 3, 8, 250, "x")
    assert says_the_same(changed, changed_payload("near", 3, 9, 1250, "x"))
    assert says_the_same(b'{"query":"near","version":3,"error":"the query has changed: subscribe again: x"}', changed)
    assert not says_the_same(changed, changed_payload("near", 3, 8, 250, "y"))
    assert not says_the_same(changed, changed_payload("near", 4, 8, 250, "x"))
    assert not says_the_same(changed, dropped_payload("near", 3, 8, 250))
