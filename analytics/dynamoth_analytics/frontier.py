"""Compares settings by what they did to the recorded load: the frontier, and what beats the settings in force."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from dynamoth_analytics import page

ROWS_DRAWN_MAX = 50
"""Bound of the rows of a table on the page; the Parquet table has them all."""

CONFIDENT_P = 0.05


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
    #: With how many settings those in force are compared.
    tried: int = 1

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
    def costs(self) -> tuple[float, float, float]:
        """What should be low, each."""
        return round(self.overload_minutes, 3), round(self.server_s), float(self.moves)


def sign_test(better: int, worse: int) -> float:
    """Return the probability of at least ``better`` heads in ``better + worse`` throws of a coin."""
    throws = better + worse
    return math.ldexp(sum(math.comb(throws, heads) for heads in range(better, throws + 1)), -throws)


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
class Difference:
    """A decision that only the recording has, or only the replay; decisions and cause are in words."""

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
    differences: Sequence[Difference] = ()

    @property
    def sentences(self) -> list[str]:
        """What people should know of it."""
        others = sum(not each.recorded for each in self.differences)
        more = f", and {others} that it did not make" if others else ""
        if not self.recorded:
            return [f"The recording has no decisions to compare the replay with; the replay makes {others}."]
        return [
            f"Asked step by step, the replay with the settings in force makes {self.same} of the balancer's"
            f" {self.recorded} recorded decisions ({self.same / self.recorded:.0%}){more}.",
            f"Left to itself, it makes {self.moves_replayed} moves (recorded: {self.moves}), with"
            f" {self.overload_s_replayed / 60:.1f} server-minutes of overload (recorded: {self.overload_s / 60:.1f}).",
        ]


def sentences(settings: Sequence[Compared], window_s: float, overload_ratio: float) -> list[str]:
    """Return the findings, the main one first. ``settings`` begins with those in force."""
    now, best = settings[0], winners(settings)
    found: list[str] = []
    if best:
        first = best[0]
        found.append(
            f"Better: {first.text}: {_figures(first)}; better in {first.better} of {first.windows} windows, worse in"
            f" {first.worse} ({_confidence(first)})."
        )
    else:
        found.append(f"None of {len(settings) - 1} other settings is better than those in force in most windows.")
    found.append(
        f"The settings in force: {_figures(now)}, in {now.windows} windows of {page.duration(window_s)}; a server above"
        f" load ratio {overload_ratio:g} counts as overloaded."
    )
    if len(best) > 1:
        found.append(f"{len(best)} settings are better than those in force in most windows.")
    return found


def _figures(one: Compared) -> str:
    return f"{one.overload_minutes:.1f} server-minutes of overload with {one.moves} moves"


def _confidence(one: Compared) -> str:
    tried = f"corrected for {one.tried} settings tried"
    sure = tried if one.p <= CONFIDENT_P else f"{tried}: it may be chance, record for longer"
    return f"p = {one.p:.3f}, {sure}"


def fragment(settings: Sequence[Compared], compared: Fidelity) -> list[str]:
    """Return the sections of a page. ``settings`` begins with those in force."""
    best, edge = winners(settings), frontier(settings)
    parts = [
        page.section(
            "Overload against moves",
            page.paragraph(
                "Each dot is a combination of settings. On the frontier are those that no other one beats in overload,"
                " server-seconds and moves at once."
            ),
            _scatter(settings, edge, "moves", [float(each.moves) for each in settings]),
            _table(edge, "There is no frontier."),
        ),
        page.section(
            "Better than the settings in force",
            page.paragraph(
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
        parts.insert(1, page.section("Overload against server-seconds", _scatter(settings, edge, "server-s", seconds)))
    rows = [_difference_row(each) for each in compared.differences[:ROWS_DRAWN_MAX]]
    followed = f" The replay followed {compared.followed} changes by others." if compared.followed else ""
    headings = ("time", "recorded", "replayed", "cause")
    parts.append(
        page.section(
            "How true the replay is",
            page.paragraph(" ".join(compared.sentences) + followed),
            page.table(headings, rows, "No decision differs.", (1, 2, 3)),
        )
    )
    return parts


def _scatter(settings: Sequence[Compared], edge: Sequence[Compared], name: str, values: Sequence[float]) -> str:
    points = {each.setting: (each.overload_minutes, value) for each, value in zip(settings, values, strict=True)}
    on_edge = [points[each.setting] for each in edge]
    others = [point for point in dict.fromkeys(points.values()) if point not in on_edge]
    series = [
        page.Series("frontier", on_edge),
        page.Series("in force", [points[settings[0].setting]]),
        page.Series("others", others),
    ]
    caption = f"{name} (up) by server-minutes of overload (to the right)"
    return page.chart(series, page.Axes(caption, page.figure, joined_within=0))


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
            page.figure(each.server_s),
            str(each.moves),
            str(each.replications),
            page.ratio(each.ratio_max),
            page.ratio(each.imbalance),
            f"{each.better}:{each.worse} of {each.windows}" if each.setting else "-",
            f"{each.p:.3f}" if each.setting else "-",
        )
        for each in rows[:ROWS_DRAWN_MAX]
    ]
    return page.table(headings, cells, empty, (0,))


def _difference_row(each: Difference) -> tuple[str, ...]:
    at = page.time(datetime.fromtimestamp(each.at, UTC))
    return at, each.recorded or "nothing", each.replayed or "nothing", each.cause
