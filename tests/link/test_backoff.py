"""Pauses between attempts: pure, and those of a link whose server is away."""

from __future__ import annotations

import math
from typing import Any

import pytest
import redis.backoff

from dynamoth_link.backoff import FAILURES_MAX, PAUSE_S_MIN, Doubling, Pauses
from dynamoth_link.options import LinkOptions
from tests.link.harness import NOBODY, Runner, opened


class Recording:
    """A backoff that notes what it is asked, also by its copies, and gives a fixed answer."""

    def __init__(self, answer: Any, asked: list[int | str]) -> None:
        self.answer = answer
        self.asked = asked

    def __deepcopy__(self, memo: Any) -> Recording:
        return Recording(self.answer, self.asked)

    def reset(self) -> None:
        self.asked.append("reset")

    def compute(self, failures: int) -> float:
        self.asked.append(failures)
        if isinstance(self.answer, Exception):
            raise self.answer
        pause_s: float = self.answer
        return pause_s


def test_the_default_doubles_up_to_its_bound_less_up_to_a_half() -> None:
    pauses = Pauses(Doubling(0.05, 1.0))
    for failures in range(1, 2000):
        bound_s = min(1.0, 0.05 * 2.0 ** min(failures - 1, 10))
        assert bound_s / 2 <= pauses.after(failures) <= bound_s


@pytest.mark.parametrize(
    "backoff",
    [
        redis.backoff.ConstantBackoff(0.3),
        redis.backoff.ExponentialBackoff(cap=10, base=0.1),
        redis.backoff.FullJitterBackoff(cap=10, base=0.1),
        redis.backoff.EqualJitterBackoff(cap=10, base=0.1),
        redis.backoff.DecorrelatedJitterBackoff(cap=10, base=0.1),
        redis.backoff.ExponentialWithJitterBackoff(cap=10, base=0.1),
    ],
)
def test_backoffs_of_redis_py_serve_as_they_are_without_end(backoff: Any) -> None:
    """redis-py's own raise OverflowError after a thousand failures, which redis-py never has."""
    pauses = Pauses(backoff)
    assert all(PAUSE_S_MIN <= pauses.after(failures) <= 10 for failures in range(1, 2000))


def test_exponential_pauses_are_those_of_the_backoff() -> None:
    pauses = Pauses(redis.backoff.ExponentialBackoff(cap=3, base=0.1))
    assert [pauses.after(failures) for failures in range(1, 8)] == [0.2, 0.4, 0.8, 1.6, 3, 3, 3]


@pytest.mark.parametrize("answer", [0, -1, math.nan])
def test_there_is_always_a_pause(answer: float) -> None:
    assert Pauses(Recording(answer, [])).after(1) == PAUSE_S_MIN


def test_a_series_of_failures_begins_with_a_reset_and_counts_up_to_a_bound() -> None:
    asked: list[int | str] = []
    pauses = Pauses(Recording(0.5, asked))
    for failures in (1, 2, 3, 1, FAILURES_MAX, FAILURES_MAX + 1):
        pauses.after(failures)
    assert asked == ["reset", 1, 2, 3, "reset", 1, FAILURES_MAX, FAILURES_MAX]


def test_each_link_has_a_copy() -> None:
    backoff = redis.backoff.DecorrelatedJitterBackoff(cap=10, base=0.1)
    first = Pauses(backoff)
    for failures in range(1, 100):
        first.after(failures)
    assert backoff._previous_backoff == 0  # pyright: ignore[reportPrivateUsage]  # redis-py's state


async def test_a_link_waits_as_its_backoff_says() -> None:
    asked: list[int | str] = []
    async with opened(NOBODY, LinkOptions(backoff=Recording(0.001, asked))) as (_, calls):
        await calls.count("down", 4)
    assert asked[:4] == ["reset", 1, 2, 3]


def test_a_backoff_that_raises_is_reported_and_the_link_goes_on(run_async: Runner) -> None:
    broken = LinkOptions(backoff=Recording(ValueError("no idea"), []), backoff_s_min=0.01, backoff_s_max=0.01)

    async def main() -> None:
        async with opened(NOBODY, broken) as (_, calls):
            await calls.count("down", 2)

    assert "the backoff of the link to redis://127.0.0.1:1" in run_async(main, bugs=2)[0]
