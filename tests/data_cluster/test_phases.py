"""Phases spread executions over time: pure."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from dynamoth_analytics.cluster.phases import phases

PERIODS = st.dictionaries(
    st.text("abcdef", min_size=1, max_size=4), st.sampled_from([0, 1, 2, 5, 10, 20, 30, 60, 86_400])
)


@given(PERIODS)
def test_a_phase_is_a_second_of_the_period_and_always_the_same(periods: dict[str, int]) -> None:
    found = phases(periods)
    assert found == phases(dict(reversed(periods.items())))
    for name, period in periods.items():
        assert 0 <= found[name] < max(period, 1)
        assert found[name].is_integer()


def test_queries_of_one_period_share_no_second() -> None:
    found = phases({f"query {number}": 10 for number in range(10)})
    assert sorted(found.values()) == [*range(10)]


def test_queries_of_several_periods_are_spread() -> None:
    periods = {"a": 10, "b": 10, "c": 10, "d": 20, "e": 20, "f": 30, "g": 30}
    found = phases(periods)
    executions = Counter(second for name, phase in found.items() for second in range(int(phase), 60, periods[name]))
    assert max(executions.values()) == 1


def test_one_more_query_leaves_those_with_shorter_periods_alone() -> None:
    periods = {"a": 5, "b": 10, "c": 10}
    before, after = phases(periods), phases({**periods, "d": 30})
    assert {name: after[name] for name in periods} == before
