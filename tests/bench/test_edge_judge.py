"""The judge of the trials of the edge finds what is wrong, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.edge_judge import Disturbance, Judge

PUBLISHED = [
    *(f"B p log {n} {n}.0" for n in range(1, 5)),
    *(f"P p log {n} e {n} {n}.1" for n in range(1, 5)),
    *(f"B p live {n} {n}.0" for n in range(1, 5)),
    *(f"P p live {n} - - {n}.1" for n in range(1, 5)),
]
BEGUN = ["V ann b1 0 0.0", "S ann log e 0 0.5", "S ann live - - 0.5"]


def logged(*numbers: int, epoch: str = "e") -> list[str]:
    return [f"D ann log {epoch} {n} p {n} {n}.2" for n in numbers]


def live(*numbers: int) -> list[str]:
    return [f"D ann live - - p {n} {n}.2" for n in numbers]


def judged(folder: Path, lines: list[str], judge: Judge | None = None) -> dict[str, int]:
    file = folder / "record"
    file.write_text("".join("\t".join(line.split(" ")) + "\n" for line in [*PUBLISHED, *BEGUN, *lines]))
    violations: dict[str, int] = (judge or Judge()).judge([file])["violations"]
    return violations


def test_nothing_is_wrong_when_all_comes_once_and_in_order(tmp_path: Path) -> None:
    assert judged(tmp_path, [*logged(1, 2, 3, 4), *live(1, 2, 3, 4)]) == {}


@pytest.mark.parametrize(
    ("lines", "kind"),
    [
        ([*logged(1, 3, 4), *live(1, 2, 3, 4)], "lost"),
        ([*logged(1, 2, 2, 3, 4), *live(1, 2, 3, 4)], "repeated"),
        ([*logged(1, 2, 3), *live(1, 2, 3, 4)], "end missing"),
        ([*logged(1, 2, 3, 4), *live(1, 2, 3)], "end missing"),
        ([*logged(1, 2, 3, 4), *live(1, 3, 4)], "live lost"),
        ([*logged(1, 2, 3, 4), *live(1, 3, 2, 4)], "live order"),
        ([*logged(1, 2, 3, 4), *live(1, 2, 2, 3, 4)], "live order"),
        (["D ann log e 1 p 2 1.2", *logged(2, 3, 4), *live(1, 2, 3, 4)], "different"),
        (["G ann log 2 3 - e 3 3.1 retention", *logged(4), *live(1, 2, 3, 4)], "gap not exact"),
        (["G ann log 1 3 - e 3 3.1 retention", *logged(4), *live(1, 2, 3, 4)], "gap within an epoch"),
        ([*logged(1, 2, 3, 4), "G ann log 5 - - f 0 5.0 log_lost", *live(1, 2, 3, 4)], "log lost"),
        ([*logged(1, 2), *logged(3, 4, epoch="f"), *live(1, 2, 3, 4)], "epoch"),
        ([*logged(1, 2), "S ann log e 3 2.5", *logged(4), *live(1, 2, 3, 4)], "position ahead"),
        (["F ann 1.0 gone", *logged(1, 2, 3, 4), *live(1, 2, 3, 4)], "user failed"),
    ],
)
def test_what_is_wrong_is_found(tmp_path: Path, lines: list[str], kind: str) -> None:
    assert kind in judged(tmp_path, lines)


@pytest.mark.parametrize(
    "lines",
    [
        ["G ann log 1 3 - e 3 3.1 retention", *logged(4), *live(1, 2, 3, 4)],
        [*logged(1, 2, 3, 4), *live(1), "G ann live - - - - - 2.5 lost", *live(3, 4)],
        [*logged(1, 2, 3), "S ann log e 1 3.1", *logged(2, 3, 4), *live(1, 2, 3, 4)],
    ],
)
def test_gaps_and_repetitions_after_a_crash_are_right(tmp_path: Path, lines: list[str]) -> None:
    assert judged(tmp_path, lines, Judge(retention_allowed=True)) == {}


def test_what_comes_late_is_put_down_to_the_failure_before(tmp_path: Path) -> None:
    lines = [*BEGUN, *logged(1, 2, 3), "D ann log e 4 p 4 9.1", *live(1, 2, 3, 4)]
    file = tmp_path / "record"
    file.write_text("".join("\t".join(line.split(" ")) + "\n" for line in [*PUBLISHED, *lines]))
    summary = Judge(disturbances=[Disturbance("kill", 3.5, 8.0)]).judge([file])
    assert (summary["late_s_max"], summary["late_after_return_s_max"]) == (5.0, {"kill": 1.1})
