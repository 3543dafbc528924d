"""Where executions go on after a crash, a lost checkpoint, or a lost log server: pure."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamoth.data.progress import (
    Checkpoint,
    Continuation,
    Progress,
    QueryStatus,
    Window,
    WindowEnd,
    give_up,
    parse_progress,
    parse_status,
    resumption,
    store_progress_command,
    store_status_command,
    ticks_missed,
    with_new_datasets,
)


def offsets(number: int) -> WindowEnd:
    return {"tick_ms": 1000 * number, "offsets": {"reports/0": number}}


def progress(execution: int, *, is_done: bool = True, dropped_version: int = 0) -> Progress:
    return Progress(execution, Window(offsets(execution - 1), offsets(execution)), is_done, dropped_version)


def checkpoint(base: int, last: int, committed: int | None = None) -> Checkpoint:
    ends = {each: offsets(each) for each in range(base + 1, last + 1)}
    return Checkpoint(base, ends, last if committed is None else committed, offsets(base))


def with_end(found: Checkpoint, execution: int, end: WindowEnd) -> Checkpoint:
    return replace(found, ends={**found.ends, execution: end})


KEEP = None

NOW_MS = 1_790_000_000_500


@pytest.mark.parametrize(
    ("stored", "found", "expected"),
    [
        (progress(7), None, Continuation(7, offsets(7))),
        (progress(7, is_done=False), None, Continuation(6, offsets(6), offsets(7))),
        (progress(7, dropped_version=2), None, Continuation(7)),
        # The checkpoint goes on where it stands.
        (None, checkpoint(0, 0), KEEP),
        (None, checkpoint(0, 5), KEEP),
        (progress(7), checkpoint(3, 7), KEEP),
        (progress(7, is_done=False), checkpoint(3, 7, committed=6), KEEP),
        (progress(7), checkpoint(3, 8, committed=7), KEEP),
        (progress(7), checkpoint(7, 7), KEEP),
        (progress(7, is_done=False), checkpoint(6, 6), Continuation(6, offsets(6), offsets(7))),  # as it was begun
        (progress(5), checkpoint(3, 8), KEEP),
        (progress(2), checkpoint(3, 8), KEEP),
        # It is older than the record: of a backup.
        (progress(7), checkpoint(0, 6), Continuation(7, offsets(7))),
        (progress(7, is_done=False), checkpoint(0, 5), Continuation(6, offsets(6), offsets(7))),
        # Its history is another one.
        (Progress(7, Window(offsets(6), offsets(99)), True), checkpoint(3, 8), Continuation(7, offsets(99))),
        (Progress(7, Window(offsets(98), offsets(7)), True), checkpoint(3, 8), Continuation(7, offsets(7))),
        # A former data cluster has written down a window of its own as the next one.
        (progress(7), with_end(checkpoint(3, 7), 8, offsets(6)), Continuation(7, offsets(7))),
        (progress(7), with_end(checkpoint(3, 7), 8, offsets(7)), Continuation(7, offsets(7))),
        # The query was dropped, and comes back: a checkpoint of before is none, and the one of after is.
        (progress(7, dropped_version=2), checkpoint(3, 6), Continuation(7)),
        (progress(7, dropped_version=2), checkpoint(7, 7), KEEP),
        (progress(7, dropped_version=2), checkpoint(7, 8, committed=7), KEEP),
    ],
)
def test_where_a_query_goes_on(
    stored: Progress | None, found: Checkpoint | None, expected: Continuation | None
) -> None:
    assert resumption(stored, found, reads_the_same=True) == expected


def test_another_dataset_begins_a_new_checkpoint_where_the_farther_one_ended() -> None:
    def resumed(stored: Progress | None, found: Checkpoint) -> Continuation | None:
        return resumption(stored, found, reads_the_same=False)

    assert resumed(progress(7), checkpoint(3, 7)) == Continuation(7, offsets(7))
    assert resumed(progress(7), checkpoint(3, 8, committed=7)) == Continuation(7, offsets(7), offsets(8))
    assert resumed(progress(5), checkpoint(3, 8)) == Continuation(8, offsets(8))
    assert resumed(None, checkpoint(0, 0)) == Continuation(0, offsets(0))
    unfinished = resumed(progress(7, is_done=False), checkpoint(3, 7, committed=6))
    assert unfinished == Continuation(6, offsets(6), offsets(7))


def test_records_are_given_up_behind_the_last_execution_that_is_known() -> None:
    tips: WindowEnd = {"tick_ms": 0, "offsets": {"reports/0": 20}}
    assert give_up(progress(7), checkpoint(3, 8), tips, NOW_MS) == Progress(9, Window(offsets(8), tips), True)
    assert give_up(progress(0), checkpoint(3, 8, 7), tips, NOW_MS) == Progress(9, Window(offsets(7), tips), True)
    assert give_up(progress(7), None, tips, NOW_MS) == Progress(8, Window(offsets(7), tips), True)
    assert give_up(progress(7, is_done=False), None, tips, NOW_MS) == Progress(8, Window(offsets(6), tips), True)
    assert give_up(None, checkpoint(3, 8), tips, NOW_MS) == Progress(9, Window(offsets(8), tips), True)
    assert give_up(None, None, tips, NOW_MS) == Progress(NOW_MS + 1, Window(tips, tips), True)


def test_datasets_that_are_new_to_a_query_begin_at_their_end() -> None:
    known: WindowEnd = {"tick_ms": 5, "offsets": {"reports/0": 3}}
    tips = {"reports/0": 9, "reports/1": 8, "alarms/0": 7}
    assert with_new_datasets(known, tips) == {"tick_ms": 5, "offsets": {"reports/0": 3, "alarms/0": 7}}


@given(st.data())
def test_whatever_dies_each_window_is_executed_once_more_at_most(data: st.DataObject) -> None:
    """A model of the life of a query: windows follow each other, whatever is lost in between, but not both at once.

    Where both are lost, numbers are new ones, so that logs take no execution for a repeated one.
    """
    stored: Progress | None = None
    found: Checkpoint | None = None
    executed: dict[int, Window] = {}
    tip, now_ms = 0, NOW_MS
    for _ in range(data.draw(st.integers(1, 6))):
        if stored is None and found is None:
            stored = give_up(None, None, offsets(tip), now_ms)
        begin = resumption(stored, found, reads_the_same=data.draw(st.booleans()))
        if begin is not None:
            assert begin.base >= max(executed, default=0) - 1
            found = Checkpoint(begin.base, {}, begin.base, begin.start or offsets(tip), begin.first_end)
        assert found is not None
        ends, committed = dict(found.ends), found.committed
        for _ in range(data.draw(st.integers(0, 3))):
            execution = committed + 1
            tip += 1
            now_ms += 1000
            start = ends.get(committed, found.start)
            first_end = found.first_end if execution == found.base + 1 else None
            end = ends.get(execution) or first_end or offsets(tip)
            ends[execution] = end
            step = data.draw(st.integers(0, 3))
            if step >= 1:
                window = Window(start, end)
                stored = Progress(execution, window, is_done=step >= 2)
                assert executed.setdefault(execution, window) == window, "a repeated execution has its former window"
                if execution - 1 in executed:
                    assert executed[execution - 1].end == start, "windows follow each other"
            if step >= 3:
                committed = execution
            found = Checkpoint(found.base, dict(ends), committed, found.start, found.first_end)
            if step < 3:
                break
        loss = data.draw(st.sampled_from(["nothing", "checkpoint", "progress", "both"]))
        if loss == "checkpoint" and stored is not None:
            found = None
        elif loss == "progress" and (found.ends or not executed):
            stored = None
        elif loss == "both":
            stored = found = None
            now_ms += 1000  # a new process is there later


def test_what_is_stored_is_read() -> None:
    dropped = progress(4, dropped_version=2)
    for each in (progress(3), progress(3, is_done=False), dropped, replace(dropped, is_done=False)):
        text = store_progress_command("nearby", each, 5)[-2]
        assert parse_progress(text) == each
    assert parse_progress(None) is None
    status = QueryStatus("failing", 1, "why", 2, {"reports": 8}, 3, 4, 5, 6, 0.5, {"failures": 7})
    assert parse_status(store_status_command("nearby", status, 5)[-1]) == status
    assert parse_status(b'{"state":"running","from a newer version":1}') == QueryStatus()


@pytest.mark.parametrize(
    ("end_ms", "began_ms", "ended_ms", "missed"),
    [
        (20_000, 10_400, 10_500, 0),
        (40_000, 10_400, 12_000, 0),  # nothing came meanwhile
        (40_000, 10_400, 31_000, 2),
        (30_000, 10_400, 21_000, 1),
        (20_000, 10_400, 21_000, 0),  # it came late, and none was left out
        (99_000, 88_400, 88_500, 0),  # repeated after a restart: no data cluster ran
        (10_000, 10_400, 99_000, 0),
    ],
)
def test_ticks_that_passed_while_an_execution_ran_are_missed(
    end_ms: int, began_ms: int, ended_ms: int, missed: int
) -> None:
    assert ticks_missed(10_000, end_ms, 10, began_ms, ended_ms) == missed
