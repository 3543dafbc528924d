"""Edge brokers on the page of a what-if: findings in sentences, and sections of HTML."""

from __future__ import annotations

from collections.abc import Sequence

from dynamoth_analytics import text
from dynamoth_analytics.jobs.runner import ROWS_DRAWN_MAX
from dynamoth_analytics.page import html
from dynamoth_analytics.page.what_if import p_text
from dynamoth_analytics.replay.brokers.comparison import BrokerFigures, ComparedBrokers
from dynamoth_analytics.replay.comparison import complete, frontier, incomplete, winners


def broker_sentences(recorded: BrokerFigures, compared: Sequence[ComparedBrokers], overload_ratio: float) -> list[str]:
    """Return the findings, the main one first. ``compared`` begins with the settings in force."""
    in_force, *others = complete(compared)
    found = [_main(others, winners(others))]
    found.append(
        f"Brokers under the settings in force: {_figures(in_force.figures)}, in"
        f" {text.counted(in_force.windows, 'window')}; a broker above load ratio {overload_ratio:g} counts as"
        " overloaded."
    )
    found.append(f"What was recorded: {_figures(recorded)}. The nearer the two, the truer the replay.")
    if left_out := incomplete(compared):
        first = left_out[0]
        found.append(
            f"{len(left_out)} combinations could not be replayed in all windows of brokers. The first: {first.text}:"
            f" {first.problem}."
        )
    return found


def _main(others: Sequence[ComparedBrokers], best: Sequence[ComparedBrokers]) -> str:
    if not best:
        return f"Brokers: none of {text.counted(len(others), 'other combination')} is better in most windows."
    first = best[0]
    evidence = f"better in {first.better} of {text.counted(first.windows, 'window')}, worse in {first.worse}"
    bound = f"p at most {p_text(first)}, corrected for {text.counted(first.tried, 'combination')} tried"
    sure = "Brokers, better" if first.is_sure else "Brokers, better in most windows, which may be chance"
    return f"{sure}: {first.text}: {_figures(first.figures)}; {evidence} ({bound})."


def _figures(one: BrokerFigures) -> str:
    return (
        f"{one.overload_minutes:.1f} broker-minutes of overload, cov {text.ratio(one.cov)}, load ratio up to"
        f" {text.ratio(one.ratio_max)}, {text.counted(one.moves, 'move')}"
    )


def broker_what_if_sections(recorded: BrokerFigures, compared: Sequence[ComparedBrokers]) -> list[str]:
    """Return the sections of the page as HTML. ``compared`` begins with the settings in force."""
    whole = complete(compared)
    edge = frontier(whole)
    return [
        html.section(
            "Brokers: cov against moves",
            html.paragraph(
                "Each dot is a combination of settings of the coordinator. On the frontier are those that no other one"
                " beats in overload, cov and moves at once."
            ),
            _scatter(whole, edge),
            _table(edge, recorded),
        ),
        html.section(
            "Brokers: better than the settings in force",
            html.paragraph(
                "Better in most windows: less overload or, where that is the same, a lower cov, then fewer moves."
            ),
            _table(winners(whole)[:ROWS_DRAWN_MAX], None),
        ),
    ]


def _scatter(compared: Sequence[ComparedBrokers], edge: Sequence[ComparedBrokers]) -> str:
    points = {each.combination: (float(each.figures.moves), each.figures.cov) for each in compared}
    on_edge = [points[each.combination] for each in edge]
    others = [point for point in dict.fromkeys(points.values()) if point not in on_edge]
    series = [
        html.Series("frontier", on_edge),
        html.Series("in force", [points[compared[0].combination]]),
        html.Series("others", others),
    ]
    caption = "mean cov of the load ratios (up) by moves of users (to the right)"
    return html.chart(series, html.Axes(caption, text.figure, joined_within=0, y_text=text.ratio))


def _table(rows: Sequence[ComparedBrokers], recorded: BrokerFigures | None) -> str:
    headings = ("settings", "overload min", "max ratio", "mean of max", "cov", "egress", "moves", "shuffles", "better")
    cells = [
        (
            each.text,
            *_cells(each.figures),
            f"{each.better}:{each.worse} of {each.windows}" if each.combination else "-",
        )
        for each in rows[:ROWS_DRAWN_MAX]
    ]
    if recorded is not None:
        cells.append(("(recorded)", *_cells(recorded), "-"))
    return html.table((*headings[:-1], headings[-1]), cells, "There are none.", (0,))


def _cells(one: BrokerFigures) -> tuple[str, ...]:
    return (
        f"{one.overload_minutes:.1f}",
        text.ratio(one.ratio_max),
        text.ratio(one.ratio_max_mean),
        f"{one.cov:.3f}",
        text.figure(one.redis_egress, "B/s"),
        str(one.moves),
        str(one.shuffles),
    )
