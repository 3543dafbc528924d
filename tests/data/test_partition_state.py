"""What a partition knows about the offsets that it gave: pure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamoth.data.records import PartitionState, parse_state
from dynamoth.errors import MalformedMessage

RESTARTED = PartitionState(2003, 2, ((0, 1000), (1005, 1500), (1507, 2000)))


@pytest.mark.parametrize(
    ("after", "until", "expected"),
    [
        (0, 5000, [(1001, 1005), (1501, 1507), (2001, 2003)]),
        (1003, 2001, [(1004, 1005), (1501, 1507), (2001, 2001)]),
        (1005, 1500, []),
        (1507, 2000, []),
        (0, 1000, []),
        (2003, 9999, []),
    ],
)
def test_the_offsets_of_each_run_are_known(after: int, until: int, expected: list[tuple[int, int]]) -> None:
    assert RESTARTED.given(after, until) == expected
    assert RESTARTED.count(after, until) == sum(last - first + 1 for first, last in expected)


def test_of_forgotten_runs_only_the_last_offset_is_known() -> None:
    state = PartitionState(2003, 9, ((1507, 2000),))
    assert state.given(0, 1600) == [(1507, 1507)]
    assert PartitionState(7).given(0, 9) == [(7, 7)]
    assert PartitionState(0).given(0, 9) == []


@pytest.mark.parametrize(
    ("offset", "expected"),
    [(0, False), (1003, False), (1005, False), (1006, True), (1500, True), (1501, False), (2003, False), (2004, True)],
)
def test_an_offset_that_the_server_never_knew_it_gave_was_forgotten(offset: int, expected: bool) -> None:
    assert RESTARTED.has_forgotten(offset) is expected


def test_a_server_that_lost_all_has_forgotten_everything_before() -> None:
    assert PartitionState(0).has_forgotten(5)
    assert PartitionState(1003, 0, ((0, 1000),)).has_forgotten(5)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=8))
def test_whatever_a_server_loses_it_knows_what_it_still_has(lives: list[tuple[int, int]]) -> None:
    """Each life stores some records, and then the server forgets the last ones of all that it had."""
    kept: list[int] = []
    forgotten: set[int] = set()
    state = PartitionState(0)
    for number, (stored, lost) in enumerate(lives, start=1):
        begin = max(state.offset, 100 * number)
        runs = (*state.runs, (state.offset, begin))
        kept += range(begin + 1, begin + stored + 1)
        state = PartitionState(kept[-1], number - 1, runs)
        if lost:
            forgotten |= {*kept[-lost:]}
            kept = kept[:-lost]
            last = kept[-1] if kept else 0
            runs = tuple(each for each in runs if each[1] < last)
            state = PartitionState(last, number - 1, runs)
    offsets = [offset for first, last in state.given(0, 10**6) for offset in range(first, last + 1)]
    assert offsets == kept
    assert {offset for offset in {*kept} | forgotten if state.has_forgotten(offset)} == forgotten


def test_the_state_is_read() -> None:
    assert parse_state([b"2003", b"2", b"0-1000 1005-1500 1507-2000 "]) == RESTARTED
    assert parse_state([None, None, None]) == PartitionState(0)
    with pytest.raises(MalformedMessage):
        parse_state([b"1", b"2", b"0-1000-3 "])
