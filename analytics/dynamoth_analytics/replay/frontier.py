"""Compares settings by what they did to the recorded load: the frontier, and what beats the settings in force."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache

from dynamoth_analytics.page import html

ROWS_DRAWN_MAX = 50
"""Bound of the rows of a table on the page; the Parquet table has them all."""

CONFIDENT_P = 0.05
"""A setting is called better where chance alone makes one look so good with at most this probability."""


@dataclass(frozen=True, slots=True)
class Compared:
    """The sum of all windows under some settings, compared with those in force (``setting`` 0)."""

    setting: int
    text: str
    windows: int
    overload_minutes: float
    server_s: float
    moves: int
    replications: int
    ratio_max: float
    imbalance: float
    #: In how many windows it was better, or worse, than the settings in force.
    better: int
    worse: int
    #: How many settings are tried besides those in force.
    tried: int = 1
    #: In how many windows its replay failed, and why in the first of them. No figure has these windows.
    failed: int = 0
    problem: str | None = None

    @property
    def p(self) -> float:
        """A bound of the probability that any of the settings tried has so many better windows by chance.

        Sign test, times ``tried`` (Bonferroni). By chance: better and worse are equally probable in each window, and
        windows do not depend on each other. Windows that are alike do not count.
        """
        return min(1.0, self.tried * sign_test(self.better, self.worse))

    @property
    def beats(self) -> bool:
        """Whether it is better than the settings in force in most windows."""
        return 2 * self.better > self.windows

    @property
    def is_sure(self) -> bool:
        """Whether that is hardly chance."""
        return self.beats and self.p <= CONFIDENT_P

    @property
    def costs(self) -> tuple[float, float, float]:
        """What should be low, each."""
        return round(self.overload_minutes, 3), round(self.server_s), float(self.moves)


@cache
def sign_test(better: int, worse: int) -> float:
    """Return the probability of at least ``better`` heads in ``better + worse`` throws of a coin."""
    throws = better + worse
    ways = total = math.comb(throws, better)
    for heads in range(better, throws):
        ways = ways * (throws - heads) // (heads + 1)
        total += ways
    return total / (1 << throws)


def complete(settings: Sequence[Compared]) -> list[Compared]:
    """Return the settings that were replayed in all windows of those in force, which come first.

    The others have smaller sums only because they lack windows.
    """
    return [each for each in settings if each.windows == settings[0].windows]


def frontier(settings: Iterable[Compared]) -> list[Compared]:
    """Return those that no other one beats in overload, server-seconds and moves at once, by overload.

    Of several with the same costs, the first.
    """
    kept: list[Compared] = []
    for each in sorted(settings, key=lambda one: (one.costs, one.setting)):
        if not any(all(a <= b for a, b in zip(other.costs, each.costs, strict=True)) for other in kept):
            kept.append(each)
    return kept


def winners(settings: Iterable[Compared]) -> list[Compared]:
    """Return the settings that are better than those in force in most windows, the surest and best first."""
    return sorted((each for each in settings if each.beats), key=lambda one: (one.p, one.costs, one.setting))


@dataclass(frozen=True, slots=True)
class DifferenceInWords:
    """A decision that only the recording has, or only the replay."""

    at: float
    recorded: str
    replayed: str
    cause: str


@dataclass(frozen=True, slots=True)
class Fidelity:
    """How a replay with the settings in force agrees with the recording."""

    #: Decisions with moves: recorded, and made by the replay, too.
    recorded: int = 0
    same: int = 0
    #: Changes of administrators and of earlier balancers.
    followed: int = 0
    #: What the replay did when it was left to itself.
    moves: int = 0
    moves_replayed: int = 0
    overload_s: float = 0.0
    overload_s_replayed: float = 0.0
    differences: Sequence[DifferenceInWords] = ()
    #: Why the whole recording could not be replayed; then there are no figures.
    problem: str | None = None

    @property
    def sentences(self) -> list[str]:
        """What people should know of it."""
        if self.problem is not None:
            return [f"How true the replay is, is not known: the replay of the whole recording failed: {self.problem}."]
        open_at = next((_time(each.at) for each in self.differences if not each.recorded), None)
        if not self.recorded:
            replayed = "makes none either" if open_at is None else f"would have decided, first at {open_at}"
            return [f"The recording has no decisions to compare the replay with; the replay {replayed}."]
        more = "" if open_at is None else f", and would have decided after the last of them, first at {open_at}"
        return [
            f"Asked step by step, the replay with the settings in force makes {self.same} of the balancer's"
            f" {self.recorded} recorded decisions ({self.same / self.recorded:.0%}){more}.",
            f"Left to itself, it makes {self.moves_replayed} moves (recorded: {self.moves}), with"
            f" {self.overload_s_replayed / 60:.1f} server-minutes of overload (recorded: {self.overload_s / 60:.1f}).",
        ]


def sentences(settings: Sequence[Compared], window_s: float, overload_ratio: float) -> list[str]:
    """Return the findings, the main one first. ``settings`` begins with those in force."""
    now, *others = complete(settings)
    best, sure = winners(others), sum(each.is_sure for each in others)
    found = [_main(now, others, best)]
    found.append(
        f"The settings in force: {_figures(now)}, in {html.counted(now.windows, 'window')} of"
        f" {html.duration(window_s)}; a server above load ratio {overload_ratio:g} counts as overloaded."
    )
    if len(best) > 1:
        found.append(
            f"{len(best)} of {len(others)} other combinations are better in most windows, {sure or 'none'} of them with"
            f" p at most {CONFIDENT_P:g}."
        )
    if now.failed:
        found.append(
            f"The settings in force could not be replayed in {now.failed} of"
            f" {html.counted(now.failed + now.windows, 'window')}: {now.problem}. Nothing is compared there."
        )
    if left_out := _left_out(settings):
        first = left_out[0]
        found.append(
            f"{len(left_out)} of {html.counted(len(settings) - 1, 'other combination')} could not be replayed in all"
            f" windows and cannot be compared. The first: {first.text}: {first.problem}."
        )
    return found


def _main(now: Compared, others: Sequence[Compared], best: Sequence[Compared]) -> str:
    """Return whether other settings are better."""
    if not others:
        return "There are no other settings to compare those in force with."
    if not best:
        subject = "The other combination is not" if len(others) == 1 else f"None of {len(others)} other combinations is"
        return f"{subject} better than the settings in force in most windows."
    first = best[0]
    evidence = f"better in {first.better} of {html.counted(first.windows, 'window')}, worse in {first.worse}"
    if first.costs[0] > now.costs[0]:
        evidence += ", with more overload in all"
    p = f"p at most {_p(first)}, corrected for {html.counted(first.tried, 'combination')} tried"
    if first.is_sure:
        return f"Better: {first.text}: {_figures(first)}; {evidence} ({p})."
    return (
        "No other settings are surely better than those in force. Better in most windows, which may be chance:"
        f" {first.text}: {_figures(first)}; {evidence} ({p}). Record for longer to know more."
    )


def _figures(one: Compared) -> str:
    return f"{one.overload_minutes:.1f} server-minutes of overload with {html.counted(one.moves, 'move')}"


def _p(one: Compared) -> str:
    """Return p with three digits, rounded up, as it is a bound."""
    return f"{math.ceil(one.p * 1000) / 1000:.3f}"


def _left_out(settings: Sequence[Compared]) -> list[Compared]:
    """Return the settings that are not compared, as they lack windows of those in force."""
    return [each for each in settings if each.windows != settings[0].windows]


def fragment(settings: Sequence[Compared], compared: Fidelity) -> list[str]:
    """Return the sections of a page. ``settings`` begins with those in force."""
    left_out, settings = _left_out(settings), complete(settings)
    best, edge = winners(settings), frontier(settings)
    parts = [
        html.section(
            "Overload against moves",
            html.paragraph(
                "Each dot is a combination of settings. On the frontier are those that no other one beats in overload,"
                " server-seconds and moves at once."
            ),
            _scatter(settings, edge, "moves", [float(each.moves) for each in settings]),
            _table(edge, "There is no frontier."),
        ),
        html.section(
            "Better than the settings in force",
            html.paragraph(
                "Better in most windows: less overload or, where that is the same, fewer moves, then fewer"
                " server-seconds. The more settings are tried, the more of them are better by chance. p allows for"
                " that: it bounds the probability that any of them is better so often by chance (sign test, times the"
                " number of settings). Neighbouring windows are alike, so the true value is larger."
            ),
            _table(best[:ROWS_DRAWN_MAX], "There are none."),
        ),
    ]
    if len({round(each.server_s) for each in settings}) > 1:
        seconds = [each.server_s for each in settings]
        parts.insert(1, html.section("Overload against server-seconds", _scatter(settings, edge, "server-s", seconds)))
    if left_out:
        cells = [(each.text, str(each.failed), each.problem or "") for each in left_out[:ROWS_DRAWN_MAX]]
        parts.append(
            html.section(
                "Not compared",
                html.paragraph("The replay of these failed in some windows, so their sums cannot be compared."),
                html.table(("settings", "failed windows", "problem"), cells, "", (0, 2)),
            )
        )
    rows = [_difference_row(each) for each in compared.differences[:ROWS_DRAWN_MAX]]
    followed = f" The replay followed {compared.followed} changes by others." if compared.followed else ""
    headings = ("time", "recorded", "replayed", "cause")
    parts.append(
        html.section(
            "How true the replay is",
            html.paragraph(" ".join(compared.sentences) + followed),
            html.table(headings, rows, "No decision differs.", (1, 2, 3)),
        )
    )
    return parts


def _scatter(settings: Sequence[Compared], edge: Sequence[Compared], name: str, values: Sequence[float]) -> str:
    points = {each.setting: (each.overload_minutes, value) for each, value in zip(settings, values, strict=True)}
    on_edge = [points[each.setting] for each in edge]
    others = [point for point in dict.fromkeys(points.values()) if point not in on_edge]
    series = [
        html.Series("frontier", on_edge),
        html.Series("in force", [points[settings[0].setting]]),
        html.Series("others", others),
    ]
    caption = f"{name} (up) by server-minutes of overload (to the right)"
    return html.chart(series, html.Axes(caption, html.figure, joined_within=0))


def _table(rows: Sequence[Compared], empty: str) -> str:
    headings = (
        "settings",
        "overload min",
        "server-s",
        "moves",
        "replications",
        "max ratio",
        "imbalance",
        "better",
        "p",
    )
    cells = [
        (
            each.text,
            f"{each.overload_minutes:.1f}",
            html.figure(each.server_s),
            str(each.moves),
            str(each.replications),
            html.ratio(each.ratio_max),
            html.ratio(each.imbalance),
            f"{each.better}:{each.worse} of {each.windows}" if each.setting else "-",
            _p(each) if each.setting else "-",
        )
        for each in rows[:ROWS_DRAWN_MAX]
    ]
    return html.table(headings, cells, empty, (0,))


def _difference_row(each: DifferenceInWords) -> tuple[str, ...]:
    return _time(each.at), each.recorded or "nothing", each.replayed or "nothing", each.cause


def _time(at: float) -> str:
    return html.time(datetime.fromtimestamp(at, UTC))
