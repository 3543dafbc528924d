"""Logs: one line of JSON for each record, whatever is in it."""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from dynamoth.logs import configure_logging


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]  # pytest uses it
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(capture=False)


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


def logged(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_record_is_one_json_object(stream: io.StringIO) -> None:
    configure_logging("info", "json", stream)
    logging.getLogger("dynamoth.node").info("moved %s", "a\nb", extra={"channel": b"c\xff", "plan": 3, "of": {1}})
    [record] = logged(stream)
    assert record.pop("time").endswith("+00:00")
    assert record == {
        "level": "info",
        "logger": "dynamoth.node",
        "message": "moved a\nb",
        "channel": "c\\xff",
        "plan": 3,
        "of": "{1}",
    }


def test_an_exception_stays_on_its_line(stream: io.StringIO) -> None:
    configure_logging("info", "json", stream)
    try:
        raise ValueError("why\nso")
    except ValueError:
        logging.getLogger("x").exception("failed")
    [record] = logged(stream)
    assert "ValueError: why" in record["exception"]


def test_the_level_counts_and_a_second_call_replaces_the_first(stream: io.StringIO) -> None:
    configure_logging("debug", "json", io.StringIO())
    configure_logging("warning", "json", stream)
    logging.getLogger("x").info("no")
    logging.getLogger("x").warning("yes")
    assert [record["message"] for record in logged(stream)] == ["yes"]


def test_warnings_are_logged(stream: io.StringIO) -> None:
    configure_logging("info", "json", stream)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("careful", stacklevel=1)
    assert "careful" in logged(stream)[0]["message"]


def test_text_is_for_people(stream: io.StringIO) -> None:
    configure_logging("info", "text", stream)
    logging.getLogger("x").warning("hot", extra={"server": "s1"})
    assert stream.getvalue().rstrip().endswith("warning x: hot server=s1")


def test_unknown_values_are_refused() -> None:
    with pytest.raises(ValueError, match="use json or text"):
        configure_logging("info", "xml")
    with pytest.raises(ValueError, match="LOUD"):
        configure_logging("loud", "json")
