"""What a figure claims, and whether runs bear it out: the rows of the tables that the commands print.

A claim is judged by the median of the seeds, or, where it says so, by every seed. What the paper gives only as a curve
has no number here: the figures themselves are not in its text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap

from bench.bad.runs import NoRuns, Run, Spread, spread

Runs = Mapping[str, Sequence[Run]]
"""Runs of several seeds, by ``placement/scheme``."""


@dataclass(frozen=True)
class Finding:
    """What the runs say."""

    measured: str
    #: None: nothing is checked.
    is_reached: bool | None


@dataclass(frozen=True)
class Claim:
    """A claim of the paper, or of this project."""

    text: str
    #: What the paper's prose says; ``-``: nothing.
    paper: str
    judge: Callable[[Runs], Finding]
    #: Why the runs differ from the paper, where they do.
    why: str = ""


@dataclass(frozen=True)
class Row:
    """One line of a table."""

    claim: str
    paper: str
    measured: str
    verdict: str
    why: str


def rows(claims: Iterable[Claim], runs: Runs) -> list[Row]:
    """Judge claims."""
    found: list[Row] = []
    for claim in claims:
        try:
            finding = claim.judge(runs)
        except NoRuns as error:
            finding = Finding(str(error), None)
        verdict = {True: "reached", False: "MISSED", None: ""}[finding.is_reached]
        found.append(Row(claim.text, claim.paper, finding.measured, verdict, claim.why))
    return found


WIDTHS = (44, 24, 44, 8, 40)
HEADS = ("claim", "paper", "measured: median (range)", "check", "why different")


def table(found: Sequence[Row]) -> str:
    """Return a table as text, with wrapped cells."""
    lines: list[str] = []
    cells = [HEADS, *((row.claim, row.paper, row.measured, row.verdict, row.why) for row in found)]
    for cell in cells:
        columns = [wrap(text, width) or [""] for text, width in zip(cell, WIDTHS, strict=True)]
        for index in range(max(map(len, columns))):
            parts = (
                (column[index] if index < len(column) else "").ljust(width)
                for column, width in zip(columns, WIDTHS, strict=True)
            )
            lines.append("  ".join(parts).rstrip())
        lines.append("-" * (sum(WIDTHS) + 2 * (len(WIDTHS) - 1)))
    return "\n".join(lines)


def markdown(found: Sequence[Row]) -> str:
    """Return a table for a page."""
    cells = [HEADS, ("---",) * len(HEADS)]
    cells += [(row.claim, row.paper, row.measured, row.verdict, row.why) for row in found]
    return "\n".join(f"| {' | '.join(cell)} |" for cell in cells)


# How claims are judged.


def of(runs: Runs, name: str, value: Callable[[Run], float]) -> Spread:
    """Return median and range of a value over the seeds of one placement and scheme."""
    return spread(value(run) for run in runs[name])


def paired(runs: Runs, one: str, other: str, value: Callable[[Run], float]) -> Spread:
    """Return median and range of the ratio of a value of two schemes, over the seeds that both have run.

    Infinite against 0.
    """
    others = {run.seed: run for run in runs[other]}
    pairs = [(run, others[run.seed]) for run in runs[one] if run.seed in others]
    return spread(value(a) / value(b) if value(b) else float("inf") for a, b in pairs)


def compare(
    names: Sequence[str], value: Callable[[Run], float], unit: float = 1.0, digits: str = ".3g"
) -> Callable[[Runs], Finding]:
    """Return a judge that only states a value for several schemes."""

    def judge(runs: Runs) -> Finding:
        texts = [f"{label(name)}: {of(runs, name, value).text(unit, digits)}" for name in names if runs[name]]
        return Finding("; ".join(texts) or "not run", None)

    return judge


def bounded(
    name: str,
    value: Callable[[Run], float],
    *,
    most: float | None = None,
    least: float | None = None,
    is_every: bool = False,
    unit: float = 1.0,
    digits: str = ".3g",
) -> Callable[[Runs], Finding]:
    """Return a judge of a value against a bound: of its median, or ``is_every``: of each seed."""

    def judge(runs: Runs) -> Finding:
        found = of(runs, name, value)
        top, bottom = (found.most, found.least) if is_every else (found.median, found.median)
        is_reached = (most is None or top <= most) and (least is None or bottom >= least)
        return Finding(f"{label(name)}: {found.text(unit, digits)}", is_reached)

    return judge


def ratio(
    one: str,
    other: str,
    value: Callable[[Run], float],
    *,
    most: float | None = None,
    least: float | None = None,
    is_every: bool = False,
) -> Callable[[Runs], Finding]:
    """Return a judge of the ratio of two schemes, seed by seed."""

    def judge(runs: Runs) -> Finding:
        found = paired(runs, one, other, value)
        top, bottom = (found.most, found.least) if is_every else (found.median, found.median)
        is_reached = (most is None or top <= most) and (least is None or bottom >= least)
        text = f"{label(one)} / {label(other)}: {found.text()}"
        return Finding(text, None if most is None and least is None else is_reached)

    return judge


def label(name: str) -> str:
    """Return how tables name a placement and scheme: without the placement, which the title of a figure has.

    Stored runs have the short names.
    """
    scheme = name.rpartition("/")[2].replace("ours", "Dynamoth")
    return scheme.replace(" at 8", " from minute 8")
