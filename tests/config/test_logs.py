"""Logs: one line of JSON for each record, whatever is in it."""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from dynamoth_daemon.logs import BURST, KINDS_MAX, REPEAT_INTERVAL_S, DaemonLog, LimitedHandler, configure_logging


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
    """The log, as JSON from level info on."""
    stream = io.StringIO()
    configure_logging("info", "json", stream)
    return stream


def logged(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_record_is_one_json_object(stream: io.StringIO) -> None:
    logging.getLogger("dynamoth.agent").info("moved %s", "a\nb", extra={"channel": b"c\xff", "plan": 3, "of": {1}})
    [record] = logged(stream)
    assert record.pop("time").endswith("+00:00")
    assert record == {
        "level": "info",
        "logger": "dynamoth.agent",
        "message": "moved a\nb",
        "channel": "c\\xff",
        "plan": 3,
        "of": "{1}",
    }


def test_an_exception_stays_on_its_line(stream: io.StringIO) -> None:
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
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("careful", stacklevel=1)
    assert "careful" in logged(stream)[0]["message"]


def test_text_is_for_people(stream: io.StringIO) -> None:
    configure_logging("info", "text", stream)
    logging.getLogger("x").warning("hot", extra={"cause": None, "server": "s1"})
    assert stream.getvalue().rstrip().endswith("warning x: hot server=s1")


def test_unknown_values_are_refused() -> None:
    with pytest.raises(ValueError, match="use json or text"):
        configure_logging("info", "xml")
    with pytest.raises(ValueError, match="LOUD"):
        configure_logging("loud", "json")


def test_fields_are_flat(stream: io.StringIO) -> None:
    refused = {"s1": "NOPERM", b"s2": {"deep": [1, 2]}, "none": {}}
    logging.getLogger("x").info("m", extra={"refused": refused, "held": 2})
    [record] = logged(stream)
    fields = {name: value for name, value in record.items() if name.startswith(("refused", "held"))}
    assert fields == {"refused.s1": "NOPERM", "refused.s2.deep": [1, 2], "held": 2}
    assert not any(isinstance(value, dict) for value in record.values())


def test_every_entry_of_a_daemon_has_cause_and_plan_version(stream: io.StringIO) -> None:
    versions = iter([None, 7, 8])
    log = DaemonLog(logging.getLogger("dynamoth.agent"), lambda: next(versions), server="s1")
    log.write(logging.INFO, "started")
    log.write(logging.WARNING, "no connection", "refused", link="local")
    log.write(logging.INFO, "a plan", plan_version=9, **{"message": "what is reserved", "name": "too"})  # type: ignore[arg-type]
    assert [(line["message"], line["cause"], line["plan_version"], line["server"]) for line in logged(stream)] == [
        ("started", None, None, "s1"),
        ("no connection", "refused", 7, "s1"),
        ("a plan", None, 9, "s1"),
    ]


class Clock:
    """Writes records that say when they were made."""

    def __init__(self) -> None:
        [handler] = logging.getLogger().handlers
        assert isinstance(handler, LimitedHandler)
        self.handler = handler

    def at(self, now: float, message: str, level: int = logging.WARNING, **extra: Any) -> None:
        record = logging.getLogger("x").makeRecord("x", level, "", 0, message, (), None, extra=extra)
        record.created = now
        self.handler.handle(record)


@pytest.fixture
def clock(stream: io.StringIO) -> Clock:
    assert stream.getvalue() == "", "nothing is logged yet"
    return Clock()


def test_a_repeated_warning_is_written_at_once_and_then_counted_at_intervals(clock: Clock, stream: io.StringIO) -> None:
    for number in range(200):
        clock.at(1000 + number / 4, f"{number} reports from nobody", server="s2", seen=number)
    shown = [(line["seen"], line.get("repeated")) for line in logged(stream)]
    each = round(REPEAT_INTERVAL_S * 4)
    assert shown == [
        *((number, None) for number in range(BURST)),
        (each, each - BURST),
        (each + 1, None),
        (each + 2, None),
    ]
    clock.handler.close()
    assert logged(stream)[-1]["seen"] == 199, "what was left out last is not lost"
    assert sum(1 + line.get("repeated", 0) for line in logged(stream)) == 200


def test_a_count_is_written_when_the_kind_has_ended(clock: Clock, stream: io.StringIO) -> None:
    for _ in range(BURST + 5):
        clock.at(1000.0, "again")
    clock.at(1000.0 + REPEAT_INTERVAL_S - 1, "something else", logging.INFO)
    assert [line["message"] for line in logged(stream)][BURST:] == ["something else"]
    clock.at(1000.0 + REPEAT_INTERVAL_S, "something else", logging.INFO)
    assert [(line["message"], line.get("repeated")) for line in logged(stream)][BURST + 1 :] == [
        ("again", 4),
        ("something else", None),
    ]
    clock.at(1000.0 + REPEAT_INTERVAL_S, "again")
    assert logged(stream)[-1]["message"] == "again", "it is a new series"


@pytest.mark.parametrize("field", ["server", "link", "channel", "subject", "kind"])
def test_what_is_about_another_thing_is_another_kind(field: str, clock: Clock, stream: io.StringIO) -> None:
    for number in range(20):
        extra: dict[str, Any] = {field: f"s{number}"}
        clock.at(1000.0, "again", **extra)
    assert len(logged(stream)) == 20


def test_other_levels_are_limited_where_they_ask_for_it(clock: Clock, stream: io.StringIO) -> None:
    for _ in range(20):
        clock.at(1000.0, "moved", logging.INFO)
        clock.at(1000.0, "connected", logging.INFO, limited=True)
        clock.at(1000.0, "settings", logging.WARNING, limited=False)
    counts = Counter(line["message"] for line in logged(stream))
    assert counts == {"moved": 20, "connected": BURST, "settings": 20}
    assert not any("limited" in line for line in logged(stream))


def test_kinds_are_bounded_and_no_count_is_lost(clock: Clock, stream: io.StringIO) -> None:
    for _ in range(BURST + 2):
        clock.at(1000.0, "first")
    for number in range(3 * KINDS_MAX):
        clock.at(1000.0, "again", server=f"s{number}")
    assert [line.get("repeated") for line in logged(stream) if line["message"] == "first"] == [*[None] * BURST, 1]
    assert len(vars(clock.handler)["_kinds"]) == KINDS_MAX
