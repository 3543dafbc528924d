"""Edge brokers in a report: findings in sentences, and the section of the page."""

from __future__ import annotations

from datetime import UTC, datetime

from dynamoth.edge.control import MoveEnd
from dynamoth_analytics.jobs.runner import Drawn, Row
from dynamoth_analytics.page.html import Axes, Series, chart, paragraph, section, table
from dynamoth_analytics.text import TimeFormat, counted, display_name, duration, figure, percent, ratio

ENDS = {
    MoveEnd.LEFT.value: "moved",
    MoveEnd.REFUSED.value: "on the move already",
    MoveEnd.GONE.value: "gone before",
    MoveEnd.DEADLINE.value: "stayed",
    "timeout": "nobody said how it ended",
    "unfit": "not asked: a broker had become unfit",
}
"""What each end of a move means."""


def broker_overload(drawn: Drawn) -> list[str]:
    """Return the sentence about the broker that was overloaded for longest, if any was."""
    over = [row for row in drawn["brokers"] if row["overloaded_share"]]
    if not over:
        return []
    worst = max(over, key=lambda row: row["overloaded_share"])
    more = f" So were {len(over) - 1} other brokers for a time." if len(over) > 1 else ""
    return [
        f"Broker {display_name(worst['broker'])} was overloaded for {percent(worst['overloaded_share'])} of its time"
        f" (load ratio up to {ratio(worst['ratio_max'])}).{more}"
    ]


def broker_findings(drawn: Drawn) -> list[str]:
    """Return what the recording says of brokers; nothing where it has none."""
    if not drawn["brokers"]:
        return []
    return [*_evenness(drawn), *_decided(drawn), *_moved(drawn), *_shared(drawn), *_silent(drawn)]


def _evenness(drawn: Drawn) -> list[str]:
    brokers, sums = drawn["brokers"], drawn["broker_sums"]
    top = max(brokers, key=lambda row: row["ratio_max"] or 0.0)
    found = (
        f"{counted(drawn.counts['brokers'], 'broker')}: the highest load ratio was {ratio(top['ratio_max'])}, at"
        f" {display_name(top['broker'])}"
    )
    if len(brokers) > 1 and sums and sums[0]["cov"] is not None:
        figures = sums[0]
        found += (
            f"; the cov of their load ratios was {ratio(figures['cov'])} on the average,"
            f" {ratio(figures['cov_first'])} at first and {ratio(figures['cov_last'])} at last"
        )
    return [f"{found}."]


def _decided(drawn: Drawn) -> list[str]:
    if not (sums := drawn["broker_decision_sums"]) or not sums[0]["decisions"]:
        return ["The coordinator decided to move nobody."]
    row = sums[0]
    parts = [f"The coordinator made {counted(row['decisions'], 'decision')} to move users"]
    if row["shuffles"]:
        parts.append(f"{row['shuffles']} of them shuffles")
    if row["dry_runs"]:
        parts.append(f"{row['dry_runs']} of them in a dry run, without moves")
    text = ", ".join(parts)
    if row["measured"]:
        went = "fell" if row["cov_measured"] < row["cov_before"] else "did not fall: it went"
        text += (
            f". The cov {went} from {ratio(row['cov_before'])} to {ratio(row['cov_measured'])} with one of them"
            f" (median; predicted: {ratio(row['cov_predicted'])})"
        )
    return [f"{text}."]


def _moved(drawn: Drawn) -> list[str]:
    by_end = {row["end"]: row for row in drawn["migration_ends"]}
    tried = sum(row["moves"] for end, row in by_end.items() if end is not None)
    if not tried:
        return []
    left = by_end.get(MoveEnd.LEFT.value)
    others = [(end, row["moves"]) for end, row in by_end.items() if end not in (None, MoveEnd.LEFT.value)]
    text = f"{left['moves'] if left else 0} of {counted(tried, 'move')} of users succeeded"
    if left and left["seconds"] is not None:
        text += f", in {left['seconds']:.2g} s (median)"
    if others:
        text += f"; the others: {', '.join(f'{moves} {ENDS.get(end, end)}' for end, moves in sorted(others))}"
    found = [f"{text}."]
    if back := sum(row["back"] for row in by_end.values()):
        found.append(f"{counted(back, 'user')} went back within an hour: moves to and fro bring nothing.")
    return found


def _shared(drawn: Drawn) -> list[str]:
    if not (sums := drawn["broker_sums"]) or sums[0]["sharing_factor"] is None:
        return []
    row = sums[0]
    text = (
        f"A broker fetched an interest once for {figure(row['sharing_factor'])} subscriptions to it; what brokers"
        f" fetched is {percent(row['inbound_share'])} of their load"
    )
    if row["copies"] is not None and row["copies"] > 1:
        text += f", and {figure(row['copies'])} brokers fetched the same interest on the average"
    return [f"{text}."]


def _silent(drawn: Drawn) -> list[str]:
    if not (silences := drawn["broker_silences"]):
        return []
    longest = silences[0]
    after = {None: "did not report again", True: "was started again", False: "went on"}[longest["restarted"]]
    more = len(silences) - 1
    others = f"; {counted(more, 'other time')} without reports of a broker: see broker_silences/" if more else ""
    return [
        f"Broker {display_name(longest['broker'])} did not report for {duration(longest['seconds'])} from"
        f" {drawn.when(longest['begin'])} on, and {after}{others}."
    ]


def broker_sections(drawn: Drawn, when: TimeFormat) -> list[str]:
    """Return the section about brokers; none where the recording has none."""
    if not drawn["brokers"]:
        return []
    return [
        section(
            "Brokers",
            *_charts(drawn, when),
            _loads(drawn),
            _decisions(drawn, when),
            _migrations(drawn, when),
        )
    ]


def _charts(drawn: Drawn, when: TimeFormat) -> list[str]:
    high = drawn.broker_ratio_high
    step = drawn.drawn_slot_s * 1.5

    def moment(seconds: float) -> str:
        return when(datetime.fromtimestamp(seconds, UTC))

    loads: dict[str, list[tuple[float, float]]] = {}
    for row in drawn["broker_load"]:
        if row["ratio"] is not None:
            loads.setdefault(row["broker"], []).append((row["slot"].timestamp(), row["ratio"]))
    series = [Series(display_name(name), sorted(points)) for name, points in sorted(loads.items())]
    decided = [(row["at"].timestamp(), f"{row['kind']}: {row['moves']} moves") for row in drawn["broker_decisions"]]
    cov = [(row["slot"].timestamp(), row["cov"]) for row in drawn["broker_balance"] if row["cov"] is not None]
    caption = f"Load ratio of each broker; dashed: {high:g}, above which a broker is overloaded."
    spread = "Cov of the load ratios of brokers: 0 is an even load. Dashed: decisions of the coordinator."
    over_time = Axes(caption, moment, y_marks=((high, "ratio_high"),), joined_within=step, y_text=ratio)
    return [
        chart(series, over_time),
        chart([Series("cov", cov)], Axes(spread, moment, x_marks=decided, joined_within=step, y_text=ratio)),
    ]


def _loads(drawn: Drawn) -> str:
    rows = (
        (
            display_name(row["broker"]),
            ratio(row["ratio"]),
            ratio(row["ratio_max"]),
            percent(row["overloaded_share"]),
            figure(row["users"]),
            figure(row["users_max"]),
            figure(row["load_bytes_per_s"], "B/s"),
            percent(row["inbound_share"]),
            figure(row["sharing_factor"]),
        )
        for row in drawn["brokers"]
    )
    headings = (
        "broker",
        "mean load",
        "largest",
        "overloaded",
        "users",
        "most",
        "F",
        "I of F",
        "subscriptions/interest",
    )
    return table(headings, rows, "", title="Brokers: load ratios, and F = I + O, what they fetch and deliver")


def _decisions(drawn: Drawn, when: TimeFormat) -> str:
    rows = (
        (
            when(row["at"]),
            row["kind"] or "-",
            _moves_of(row),
            figure(row["seconds"], "s"),
            _three(row, "cov"),
            _three(row, "ratio"),
            *(figure(row[f"redis_egress_{name}"], "B/s") for name in ("before", "measured")),
            display_name(row["reason"]),
        )
        for row in drawn["broker_decisions"]
    )
    headings = ("at", "kind", "moved", "in", "cov", "largest ratio", "egress before", "after", "reason")
    return table(
        headings,
        rows,
        "The coordinator decided to move nobody.",
        text_columns=(8,),
        title="Decisions: before → predicted → measured",
    )


def _moves_of(row: Row) -> str:
    if row["is_dry_run"]:
        return f"0 of {row['moves']} (dry run)"
    return f"{'?' if row['moved'] is None else row['moved']} of {row['moves']}"


def _three(row: Row, name: str) -> str:
    return " → ".join(ratio(row[f"{name}_{when}"]) for when in ("before", "predicted", "measured"))


def _migrations(drawn: Drawn, when: TimeFormat) -> str:
    rows = (
        (
            row["session"] or "-",
            when(row["at"]),
            f"{display_name(row['from_broker'])} → {display_name(row['to_broker'])}",
            figure(row["load_bytes_per_s"], "B/s"),
            ENDS.get(row["end"] or "", row["end"] or "-"),
            "-" if row["seconds"] is None else f"{row['seconds']:.2g}",
            _three(row, "from_ratio"),
            _three(row, "to_ratio"),
        )
        for row in drawn["migrations"]
    )
    total = drawn.counts.get("migrations", 0)
    title = "Moves of users with the highest loads (sessions are hashes): before → predicted → measured"
    headings = ("session", "at", "from → to", "load", "end", "s", "ratio there", "ratio here")
    shown = table(headings, rows, "Nobody was moved.", text_columns=(4,), title=title)
    return shown if total <= len(drawn["migrations"]) else shown + paragraph(f"{total} moves in all: see migrations/.")
