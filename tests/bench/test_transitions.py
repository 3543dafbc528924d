"""A busy channel goes through assignments of every mode on real servers: nothing is lost, repeated or reordered."""

from __future__ import annotations

import random
from itertools import pairwise, product

import pytest

from bench.busy_channel import Load
from bench.transitions import SEED, all_assignments, change_between, go_through, walk
from dynamoth.plan import Assignment, Mode, single

SERVERS = ("s1", "s2", "s3")


def test_all_assignments_are_all() -> None:
    found = all_assignments(SERVERS)
    assert len(found) == len(set(found)) == 3 + 2 * 4  # one server; two of them in three ways, or all


def test_a_hundred_steps_have_every_pair_of_modes_and_never_stand_still() -> None:
    path = [single("s1"), *walk(single("s1"), SERVERS, 100, random.Random(SEED))]
    assert len(path) == 101
    assert all(before != after for before, after in pairwise(path))
    assert {(before.mode, after.mode) for before, after in pairwise(path)} == set(product(Mode, Mode))


@pytest.mark.parametrize(
    ("before", "after", "command"),
    [
        (single("s1"), single("s2"), "move"),
        (single("s1"), Assignment(Mode.ALL_PUBLISHERS, ("s2", "s3")), "replicate"),
        (Assignment(Mode.ALL_PUBLISHERS, ("s2", "s3")), Assignment(Mode.ALL_SUBSCRIBERS, ("s2", "s3")), "replicate"),
        (Assignment(Mode.ALL_SUBSCRIBERS, ("s2", "s3")), single("s1"), "unreplicate"),
    ],
)
def test_an_administrator_asks_for_what_there_is(before: Assignment, after: Assignment, command: str) -> None:
    assert change_between(before, after).command == command


def test_a_busy_channel_goes_through_assignments() -> None:
    load = Load(subscribers=10, publishers=4, messages_per_s=100, changes=15, processes=1, rest_s=1.0)
    result = go_through(load, SEED)
    assert result.clean, result
    assert result.published > 100
    assert result.delivered == result.published * load.subscribers
    assert sum(figures["changes"] for figures in result.kinds.values()) == load.changes
