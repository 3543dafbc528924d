"""The page of a what-if: findings in sentences, and sections of HTML."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from dynamoth_analytics import text
from dynamoth_analytics.jobs.runner import ROWS_DRAWN_MAX
from dynamoth_analytics.page import html
from dynamoth_analytics.replay.comparison import (
    CONFIDENT_P,
    Compared,
    Judged,
    complete,
    frontier,
    incomplete,
    winners,
)
from dynamoth_analytics.replay.fidelity import DifferenceInWords, Fidelity, NotReplayed


@dataclass(frozen=True, slots=True)
class Found:
    """What one part of a what-if has found: times, findings in sentences, and sections of HTML."""

    begin: datetime
    end: datetime
    sentences: Sequence[str]
    sections: Sequence[str]


def sentences(compared: Sequence[Compared], window_s: float, overload_ratio: float) -> list[str]:
    """Return the findings, the main one first. ``compared`` begins with the settings in force."""
    in_force, *others = complete(compared)
    best, sure = winners(others), sum(each.is_sure for each in others)
    found = [_main(in_force, others, best)]
    found.append(
        f"The settings in force: {_figures(in_force)}, in {text.counted(in_force.windows, 'window')} of"
        f" {text.duration(window_s)}; a server above load ratio {overload_ratio:g} counts as overloaded."
    )
    if len(best) > 1:
        found.append(
            f"{len(best)} of {len(others)} other combinations are better in most windows, {sure or 'none'} of them with"
            f" p at most {CONFIDENT_P:g}."
        )
    if in_force.failed:
        found.append(
            f"The settings in force could not be replayed in {in_force.failed} of"
            f" {text.counted(in_force.failed + in_force.windows, 'window')}: {in_force.problem}. Nothing is compared"
            " there."
        )
    if left_out := incomplete(compared):
        first = left_out[0]
        found.append(
            f"{len(left_out)} of {text.counted(len(compared) - 1, 'other combination')} could not be replayed in all"
            f" windows and cannot be compared. The first: {first.text}: {first.problem}."
        )
    return found


def _main(in_force: Compared, others: Sequence[Compared], best: Sequence[Compared]) -> str:
    """Return whether other settings are better."""
    if not others:
        return "There are no other settings to compare those in force with."
    if not best:
        subject = "The other combination is not" if len(others) == 1 else f"None of {len(others)} other combinations is"
        return f"{subject} better than the settings in force in most windows."
    first = best[0]
    evidence = f"better in {first.better} of {text.counted(first.windows, 'window')}, worse in {first.worse}"
    if first.costs[0] > in_force.costs[0]:
        evidence += ", with more overload in all"
    p = f"p at most {p_text(first)}, corrected for {text.counted(first.tried, 'combination')} tried"
    if first.is_sure:
        return f"Better: {first.text}: {_figures(first)}; {evidence} ({p})."
    return (
        "No settings are clearly better than those in force. These are better in most windows, which may be chance:"
        f" {first.text}: {_figures(first)}; {evidence} ({p}). Record for longer to know more."
    )


def _figures(one: Compared) -> str:
    return f"{one.overload_minutes:.1f} server-minutes of overload with {text.counted(one.moves, 'move')}"


def p_text(one: Judged) -> str:
    """Return p with three digits, rounded up, as it is a bound."""
    return f"{math.ceil(one.p * 1000) / 1000:.3f}"


def fidelity_sentences(fidelity: Fidelity | NotReplayed) -> list[str]:
    """Return the findings about the replay."""
    if isinstance(fidelity, NotReplayed):
        return [
            f"It is not known how true the replay is: the replay of the whole recording failed: {fidelity.problem}."
        ]
    at = fidelity.only_replayed_at
    if not fidelity.recorded:
        replayed = "makes none either" if at is None else f"would have decided, first at {_time(at)}"
        return [f"The recording has no decisions to compare the replay with; the replay {replayed}."]
    more = "" if at is None else f", and would have decided after the last of them, first at {_time(at)}"
    return [
        f"Asked step by step, the replay with the settings in force makes {fidelity.same} of the balancer's"
        f" {fidelity.recorded} recorded decisions ({fidelity.same / fidelity.recorded:.0%}){more}.",
        f"Left to itself, it makes {fidelity.moves_replayed} moves (recorded: {fidelity.moves}), with"
        f" {fidelity.overload_s_replayed / 60:.1f} server-minutes of overload"
        f" (recorded: {fidelity.overload_s / 60:.1f}).",
    ]


def sections(compared: Sequence[Compared], fidelity: Fidelity | NotReplayed) -> list[str]:
    """Return the sections of the page as HTML. ``compared`` begins with the settings in force."""
    left_out, compared = incomplete(compared), complete(compared)
    best, edge = winners(compared), frontier(compared)
    parts = [
        html.section(
            "Overload against moves",
            html.paragraph(
                "Each dot is a combination of settings. On the frontier are those that no other one beats in overload,"
                " server-seconds and moves at once."
            ),
            _scatter(compared, edge, "moves", [float(each.moves) for each in compared]),
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
    if len({round(each.server_s) for each in compared}) > 1:
        seconds = [each.server_s for each in compared]
        parts.insert(1, html.section("Overload against server-seconds", _scatter(compared, edge, "server-s", seconds)))
    if left_out:
        cells = [(each.text, str(each.failed), each.problem or "") for each in left_out[:ROWS_DRAWN_MAX]]
        parts.append(
            html.section(
                "Not compared",
                html.paragraph("The replay of these failed in some windows, so their sums cannot be compared."),
                html.table(("settings", "failed windows", "problem"), cells, "", (0, 2)),
            )
        )
    return [*parts, _how_true(fidelity)]


def _how_true(fidelity: Fidelity | NotReplayed) -> str:
    differences, followed = ((), 0) if isinstance(fidelity, NotReplayed) else (fidelity.differences, fidelity.followed)
    rows = [_difference_row(each) for each in differences[:ROWS_DRAWN_MAX]]
    more = f" The replay followed {followed} changes by others." if followed else ""
    return html.section(
        "How true the replay is",
        html.paragraph(" ".join(fidelity_sentences(fidelity)) + more),
        html.table(("time", "recorded", "replayed", "cause"), rows, "No decision differs.", (1, 2, 3)),
    )


def _scatter(compared: Sequence[Compared], edge: Sequence[Compared], name: str, values: Sequence[float]) -> str:
    points = {each.combination: (each.overload_minutes, value) for each, value in zip(compared, values, strict=True)}
    on_edge = [points[each.combination] for each in edge]
    others = [point for point in dict.fromkeys(points.values()) if point not in on_edge]
    series = [
        html.Series("frontier", on_edge),
        html.Series("in force", [points[compared[0].combination]]),
        html.Series("others", others),
    ]
    caption = f"{name} (up) by server-minutes of overload (to the right)"
    return html.chart(series, html.Axes(caption, text.figure, joined_within=0))


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
            text.figure(each.server_s),
            str(each.moves),
            str(each.replications),
            text.ratio(each.ratio_max),
            text.ratio(each.imbalance),
            f"{each.better}:{each.worse} of {each.windows}" if each.combination else "-",
            p_text(each) if each.combination else "-",
        )
        for each in rows[:ROWS_DRAWN_MAX]
    ]
    return html.table(headings, cells, empty, (0,))


def _difference_row(each: DifferenceInWords) -> tuple[str, ...]:
    return _time(each.at), each.recorded or "nothing", each.replayed or "nothing", each.cause


def _time(at: float) -> str:
    return text.time_of_day(datetime.fromtimestamp(at, UTC))
