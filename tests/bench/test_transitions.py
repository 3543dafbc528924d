"""A busy channel goes through assignments of every mode on real servers: nothing is lost, repeated or reordered."""

from __future__ import annotations

import random
from itertools import pairwise, product

import pytest

from bench.busy_channel import Load
from bench.processors import BusyMeter
from bench.transitions import SEED, go_through, walk
from dynamoth.plan.plan import Mode, single

SERVERS = ("s1", "s2", "s3")


def test_a_hundred_steps_have_every_pair_of_modes_and_never_stand_still() -> None:
    path = [single("s1"), *walk(single("s1"), SERVERS, 100, random.Random(SEED))]
    assert len(path) == 101
    assert all(before != after for before, after in pairwise(path))
    assert {(before.mode, after.mode) for before, after in pairwise(path)} == set(product(Mode, Mode))


def stat(user: int, idle: int, waiting: int = 0) -> tuple[int, int]:
    """Return what a meter reads of the machine: ticks without work, and all ticks."""
    return idle + waiting, user + idle + waiting


def test_a_meter_says_how_busy_the_machine_was(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([stat(1000, 5000, 500), stat(1030, 5060, 510)])
    monkeypatch.setattr(BusyMeter, "_ticks", staticmethod(lambda: next(readings)))
    assert BusyMeter().ratio() == pytest.approx(0.3)


def test_a_meter_reads_this_machine() -> None:
    ratio = BusyMeter().ratio()
    assert ratio is None or 0.0 <= ratio <= 1.0


def test_a_busy_channel_goes_through_assignments() -> None:
    load = Load(subscribers=10, publishers=4, messages_per_s=100, changes=5, processes=1, rest_s=0.5)
    result = go_through(load, SEED)
    assert result.clean, result
    assert result.published > 0
    assert result.delivered == result.published * load.subscribers
    assert sum(figures["changes"] or 0 for figures in result.kinds.values()) == load.changes
