"""Draws the page of a report from the rows of its jobs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

from dynamoth_analytics.jobs.calibration import BREAK, FLAT, SMOOTH, TOO_LITTLE
from dynamoth_analytics.jobs.runner import Drawn, Row
from dynamoth_analytics.page.brokers import broker_sections
from dynamoth_analytics.page.findings import cause
from dynamoth_analytics.page.html import Axes, Series, bars, chart, code, page, paragraph, section, table
from dynamoth_analytics.text import TimeFormat, display_name, duration, figure, percent, ratio

BARS_MAX = 12
RESPONSE_SERVERS_MAX = 4
REFRESH_S = 10

SHAPES = {
    BREAK: "breaks",
    SMOOTH: "rises smoothly, no break",
    FLAT: "no clear rise",
    TOO_LITTLE: "too few loads seen",
}


def draw(drawn: Drawn, sentences: Sequence[str], begin: datetime, end: datetime, toml: str) -> str:
    """Return the page."""
    span = f"{begin:%Y-%m-%d %H:%M:%S} to {end:%Y-%m-%d %H:%M:%S} UTC, {duration((end - begin).total_seconds())}"
    subtitle = f"{span}; {_counted(drawn)}"
    when = drawn.when
    parts = (
        *(_load(drawn, when), _channels(drawn, _judged(drawn)), _plans(drawn, when), _calibration(drawn, toml)),
        *(*broker_sections(drawn, when), _departures(drawn, when), _gaps(drawn, when)),
    )
    return page("Report of a Dynamoth cluster", subtitle, sentences, parts)


def draw_recent(drawn: Drawn, sentences: Sequence[str], begin: datetime, end: datetime) -> str:
    """Return the page of a report that follows a recording. Browsers load it again and again."""
    subtitle = f"{begin:%Y-%m-%d %H:%M:%S} to {end:%H:%M:%S} UTC; {_counted(drawn)}"
    when = drawn.when
    parts = _load(drawn, when), _channels(drawn), _departures(drawn, when)
    return page("A Dynamoth cluster, now", subtitle, sentences, parts, refresh_s=REFRESH_S)


def _counted(drawn: Drawn) -> str:
    return f"{drawn.counts.get('servers', 0)} servers, {drawn.counts.get('channels', 0)} channels"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.2f}"


def _series(rows: Iterable[Row], key: str, x: str, y: str) -> list[Series]:
    """Return one series per value of ``key``; rows without a value are left out."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row[y] is not None:
            across: Any = row[x]
            at = across.timestamp() if isinstance(across, datetime) else across
            found.setdefault(row[key], []).append((at, row[y]))
    return [Series(display_name(name), sorted(points)) for name, points in sorted(found.items())]


def _load(drawn: Drawn, when: TimeFormat) -> str:
    high = drawn.settings["load_ratio_high"]
    series = _series(drawn["load"], "server", "slot", "ratio")
    times = sorted({x for each in series for x, _ in each.points})
    step = min((b - a for a, b in pairwise(times)), default=1.0)
    caption = f"Load ratio of each server; dashed: {high:g}, from which servers are relieved."

    def moment(seconds: float) -> str:
        return when(datetime.fromtimestamp(seconds, UTC))

    over_time = Axes(caption, moment, y_marks=((high, "load_ratio_high"),), joined_within=step * 1.5, y_text=ratio)
    spread = _series(({**row, "name": "largest over mean"} for row in drawn["balance"]), "name", "slot", "imbalance")
    servers = (
        (
            display_name(row["server"]),
            ratio(row["ratio"]),
            ratio(row["ratio_max"]),
            duration(row["overload_minutes"] * 60),
            figure(row["outgoing_bytes_per_s"], "B/s"),
            figure(row["unused_bytes_per_s"], "B/s"),
            ratio(row["cpu_ratio"]),
            figure(row["server_seconds"], "s"),
        )
        for row in drawn["servers"]
    )
    headings = ("server", "mean load", "largest", "overloaded", "sent", "unused", "CPU", "reported")
    runs = (
        (
            display_name(row["server"]),
            when(row["begin"]),
            duration(row["minutes"] * 60),
            ratio(row["ratio_max"]),
            display_name(row["channel"]),
            percent(row["channel_share"]),
            cause(row),
        )
        for row in drawn["overloads"]
    )
    return section(
        "Load",
        chart(series, over_time),
        chart(spread, Axes("Imbalance of load ratios: 1 is an even load.", moment, joined_within=step * 1.5)),
        table(headings, servers, "No server reported.", title="Servers: load ratios, means of the time reported"),
        table(
            ("server", "from", "for", "load up to", "busiest channel", "share", "why"),
            runs,
            "No server was overloaded.",
            text_columns=(4, 6),
            title="Overloads, the longest first",
        ),
    )


def _channels(drawn: Drawn, *more: str) -> str:
    rows = drawn["channels"]
    top = [(display_name(row["channel"]), row["bytes_out"] or 0.0, percent(row["share"])) for row in rows[:BARS_MAX]]
    lines = (
        (
            display_name(row["channel"]),
            figure(row["bytes_out_per_s"], "B/s"),
            figure(row["publications_per_s"]),
            figure(row["publishers"]),
            figure(row["subscribers"]),
            figure(row["fan_out"]),
            figure(row["p_ratio"]),
            figure(row["s_ratio"]),
            figure(row["churn_per_minute"]),
        )
        for row in rows
    )
    headings = ("channel", "sent", "pub/s", "publishers", "subscribers", "fan-out", "P ratio", "S ratio", "churn/min")
    return section(
        "Channels",
        bars(top, f"The busiest {len(top)} of {drawn.counts.get('channels', 0)} channels, by bytes sent."),
        _popularity(drawn["popularity"]),
        table(
            headings,
            lines,
            "No channel was reported.",
            title="The busiest channels: means of the time in which reports name them",
        ),
        *more,
    )


def _judged(drawn: Drawn) -> str:
    judged = (
        (
            display_name(row["channel"]),
            row["mode"],
            row["wanted"],
            duration(row["seconds"]),
            ratio(row["ratio_max"]),
            figure(row["publications_per_s_max"]),
            figure(row["subscribers_max"]),
        )
        for row in drawn["replication"]
    )
    modes = ("channel", "was", "should be", "for", "load up to", "pub/s up to", "subscribers up to")
    title = "Replication: the mode that channels had, and the one that Algorithm 1 asks for"
    return table(modes, judged, "Algorithm 1 asks for no replication.", title=title)


def _popularity(rows: Sequence[Row]) -> str:
    if not rows or rows[0]["exponent"] is None:
        return paragraph("There are too few channels for a law of popularity.")
    fit = rows[0]
    error = f" ± {fit['standard_error']:.2f}" if fit["standard_error"] is not None else ""
    return paragraph(
        f"Publications by rank fall with the exponent {fit['exponent']:.2f}{error} (Zipf; {fit['channels']} channels,"
        f" r² {fit['r2']:.2f})."
    )


def _route(row: Row, end: str) -> str:
    servers = ", ".join(map(display_name, row.get(f"{end}_servers") or ()))
    mode = row.get(f"{end}_mode")
    return f"{servers} ({mode})" if mode not in (None, "single") else servers


def _plans(drawn: Drawn, when: TimeFormat) -> str:
    parts = (_effects, _changes, _ping_pong, _without_gain, _latency_around)
    return section("Plans", *(part(drawn, when) for part in parts))


def _effects(drawn: Drawn, when: TimeFormat) -> str:
    rows = (
        (
            display_name(row["server"]),
            when(row["at"]),
            display_name(row["goal"]),
            figure(row["channels"]),
            ratio(row["ratio_before"]),
            ratio(row["ratio_predicted"]),
            ratio(row["ratio_measured"]),
            display_name(row["reason"]),
        )
        for row in drawn["effects"]
    )
    return table(
        ("server", "at", "goal", "channels", "before", "predicted", "measured", "reason"),
        rows,
        "The balancer decided nothing.",
        text_columns=(7,),
        title="Decisions: load ratio of each server that they touched",
    )


def _changes(drawn: Drawn, when: TimeFormat) -> str:
    rows = (
        (
            display_name(row["channel"]),
            when(row["at"]),
            _route(row, "from"),
            _route(row, "to"),
            _milliseconds(row["preparing_s"]),
            _milliseconds(row["settling_s"]),
        )
        for row in drawn["changes"]
    )
    return table(
        ("channel", "at", "from", "to", "prepared ms", "settled ms"),
        rows,
        "No channel was moved.",
        title="Changes of channels: until servers were prepared, then until clients had followed",
    )


def _ping_pong(drawn: Drawn, when: TimeFormat) -> str:
    rows = (
        (
            display_name(row["channel"]),
            when(row["at"]),
            _route(row, "to"),
            duration(row["away_s"]),
            display_name(row["reason"]),
        )
        for row in drawn["ping_pong"]
    )
    return table(
        ("channel", "at", "back at", "away for", "reason"),
        rows,
        "No move was undone within an hour.",
        text_columns=(4,),
        title="Moves that were undone within an hour",
    )


def _without_gain(drawn: Drawn, when: TimeFormat) -> str:
    rows = (
        (
            figure(row["decision"]),
            when(row["at"]),
            ratio(row["ratio_before"]),
            ratio(row["ratio_measured"]),
            display_name(row["reason"]),
        )
        for row in drawn["without_gain"]
    )
    return table(
        ("decision", "at", "before", "after", "reason"),
        rows,
        "Every measured decision lowered the load.",
        text_columns=(4,),
        title="Decisions that gained nothing: load ratio of their most loaded server",
    )


def _latency_around(drawn: Drawn, when: TimeFormat) -> str:
    rows = (
        (
            display_name(row["server"]),
            when(row["begin"]),
            figure(row["channels"]),
            *(_milliseconds(row[name]) for name in ("before_s", "during_s", "after_s")),
            figure(row["lost"]),
        )
        for row in drawn["latency_around"]
    )
    return table(
        ("server", "from", "channels", "before ms", "during ms", "after ms", "lost"),
        rows,
        "No latency was measured around changes.",
        title="Median latency of probes 10 s before, during and 10 s after changes; lost probes",
    )


def _calibration(drawn: Drawn, toml: str) -> str:
    busiest = sorted(drawn["break_points"], key=lambda row: -row["ratio_max"])[:RESPONSE_SERVERS_MAX]
    breaks = {row["server"]: row["break_ratio"] for row in busiest}
    points = ({**row, "ms": row["latency_s"] * 1e3} for row in drawn["response"] if row["server"] in breaks)
    marks = [(at, f"break point of {display_name(server)}") for server, at in breaks.items() if at]
    caption = f"Latency in ms (median of probes) against load ratio{'; dashed: where it breaks' if marks else ''}."
    if len(busiest) < len(drawn["break_points"]):
        caption += f" The {len(busiest)} servers with the highest loads."
    axes = Axes(caption, ratio, x_marks=marks, joined_within=0)
    found = (
        (
            display_name(row["server"]),
            SHAPES[row["shape"]],
            ratio(row["break_ratio"]),
            _milliseconds(row["latency_s_min"]),
            _milliseconds(row["latency_s_max"]),
            ratio(row["ratio_max"]),
            figure(row["probes"]),
        )
        for row in drawn["break_points"]
    )
    headings = ("server", "latency", "breaks at", "ms before", "ms at highest load", "highest load", "probes")
    return section(
        "Calibration",
        chart(_series(points, "server", "ratio", "ms"), axes),
        table(headings, found, "The recording has no probes of latency.", title="Latency as the load ratio rises"),
        paragraph("Recommended settings (recommended.toml):"),
        code(toml),
    )


def _departures(drawn: Drawn, when: TimeFormat) -> str:
    found = (
        (
            display_name(row["subject"]),
            when(row["at"]),
            row["metric"],
            figure(row["value"]),
            figure(row["expected"]),
            figure(row["score"]),
        )
        for row in drawn["anomalies"]
    )
    return section(
        "Anomalies",
        table(
            ("subject", "at", "metric", "value", "expected", "spreads"),
            found,
            "Nothing departed from its past.",
            title="Departures from the recent past, in units of the usual spread; missing reports; lagging agents",
        ),
    )


def _gaps(drawn: Drawn, when: TimeFormat) -> str:
    gaps = (
        (
            display_name(row["server"]),
            when(row["at"]),
            display_name(row["kind"]),
            figure(row["seconds"], "s"),
            display_name(row["reason"]),
        )
        for row in drawn["gaps"]
    )
    return section(
        "Gaps",
        table(
            ("server", "until", "kind", "for", "reason"),
            gaps,
            "Recorders noted no gaps.",
            text_columns=(4,),
            title="What the recording does not know",
        ),
    )
