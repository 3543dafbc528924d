"""Compares settings by what they did to the recorded load: the frontier, and what beats the settings in force."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from dynamoth_analytics import page
from dynamoth_analytics.replay import Moved

ROWS_DRAWN_MAX = 50
"""Bound of the rows of a table on the page; the Parquet table has them all."""

MOVES_SHOWN_MAX = 20

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

    @property
    def p(self) -> float:
        """How probable so many better windows are by chance (sign test; windows that are alike do not count)."""
        return sign_test(self.better, self.worse)

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
class Fidelity:
    """How the moves of a replay with the settings in force compare with the recorded ones."""

    same: int
    missing: Sequence[Moved]
    others: Sequence[Moved]

    @property
    def ratio(self) -> float | None:
        """The share of recorded moves that were replayed; None without any."""
        recorded = self.same + len(self.missing)
        return self.same / recorded if recorded else None

    @property
    def sentence(self) -> str:
        """What people should know of it."""
        if self.ratio is None:
            unasked = f"; the replay has {len(self.others)}" if self.others else ", and the replay has none either"
            return f"The recording has no moves to compare the replay with{unasked}."
        return (
            f"The replay with the settings in force has {self.same} of the {self.same + len(self.missing)} recorded"
            f" moves ({self.ratio:.0%}), and {len(self.others)} others."
        )


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
    sure = "hardly by chance" if one.p <= CONFIDENT_P else "may be chance: record for longer"
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
                " server-seconds. p is the probability of so many better windows by chance."
            ),
            _table(best[:ROWS_DRAWN_MAX], "There are none."),
        ),
    ]
    if len({round(each.server_s) for each in settings}) > 1:
        seconds = [each.server_s for each in settings]
        parts.insert(1, page.section("Overload against server-seconds", _scatter(settings, edge, "server-s", seconds)))
    missing = [("recorded only", move) for move in compared.missing[:MOVES_SHOWN_MAX]]
    others = [("replayed only", move) for move in compared.others[:MOVES_SHOWN_MAX]]
    rows = [_move_row(which, move) for which, move in [*missing, *others]]
    parts.append(
        page.section(
            "How true the replay is",
            page.paragraph(compared.sentence),
            page.table(("move", "time", "channel", "from", "to", "reason"), rows, "No move differs.", (5,)),
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


def _move_row(which: str, move: Moved) -> tuple[str, ...]:
    at = page.time(datetime.fromtimestamp(move.at, UTC))
    name = page.shown(move.channel.decode(errors="backslashreplace"))
    return which, at, name, ", ".join(move.before.servers), ", ".join(move.after.servers), move.reason
