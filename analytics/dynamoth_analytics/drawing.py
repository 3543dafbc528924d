"""Draws the page of a report from the rows of its jobs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any

from dynamoth_analytics.findings import Drawn, Row
from dynamoth_analytics.page import (
    Axes,
    Series,
    bars,
    chart,
    clock,
    code,
    duration,
    figure,
    page,
    paragraph,
    percent,
    ratio,
    section,
    shown,
    table,
    time,
)

BARS_MAX = 12
RESPONSE_SERVERS_MAX = 4
REFRESH_S = 10


def draw(drawn: Drawn, sentences: Sequence[str], begin: datetime, end: datetime, toml: str) -> str:
    """Return the page."""
    span = f"{begin:%Y-%m-%d %H:%M:%S} to {end:%Y-%m-%d %H:%M:%S} UTC, {duration((end - begin).total_seconds())}"
    subtitle = f"{span}; {_counted(drawn)}"
    parts = (
        *(_load(drawn), _channels(drawn, _judged(drawn)), _plans(drawn), _calibration(drawn, toml)),
        *(_departures(drawn), _gaps(drawn)),
    )
    return page("Report of a Dynamoth cluster", subtitle, sentences, parts)


def draw_recent(drawn: Drawn, sentences: Sequence[str], begin: datetime, end: datetime) -> str:
    """Return the page of a report that follows a recording. Browsers load it again and again."""
    subtitle = f"{begin:%Y-%m-%d %H:%M:%S} to {end:%H:%M:%S} UTC; {_counted(drawn)}"
    parts = _load(drawn), _channels(drawn), _departures(drawn)
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
    return [Series(shown(name), sorted(points)) for name, points in sorted(found.items())]


def _load(drawn: Drawn) -> str:
    high = drawn.settings["load_ratio_high"]
    series = _series(drawn["load"], "server", "slot", "ratio")
    times = sorted({x for each in series for x, _ in each.points})
    step = min((b - a for a, b in pairwise(times)), default=1.0)
    caption = f"Load ratio of each server; dashed: {high:g}, from which servers are relieved."
    over_time = Axes(caption, clock, y_marks=((high, "load_ratio_high"),), joined_within=step * 1.5, y_text=ratio)
    spread = [
        Series("largest over mean", [(row["slot"].timestamp(), row["imbalance"] or 0.0) for row in drawn["balance"]])
    ]
    servers = (
        (
            shown(row["server"]),
            ratio(row["ratio"]),
            ratio(row["ratio_max"]),
            figure(row["overload_minutes"]),
            figure(row["outgoing_bytes_per_s"], "B/s"),
            figure(row["unused_bytes_per_s"], "B/s"),
            ratio(row["cpu_ratio"]),
            figure(row["server_seconds"], "s"),
        )
        for row in drawn["servers"]
    )
    headings = ("server", "mean", "largest", "overload min", "sent", "unused", "CPU", "reported")
    runs = (
        (
            shown(row["server"]),
            time(row["begin"]),
            duration(row["minutes"] * 60),
            ratio(row["ratio_max"]),
            shown(row["channel"]),
            percent(row["channel_share"]),
        )
        for row in drawn["overloads"]
    )
    return section(
        "Load",
        chart(series, over_time),
        chart(spread, Axes("Imbalance: 1 is an even load.", clock, joined_within=step * 1.5)),
        table(headings, servers, "No server reported."),
        table(("overloaded", "from", "for", "up to", "busiest channel", "share"), runs, "No server was overloaded."),
    )


def _channels(drawn: Drawn, *more: str) -> str:
    rows = drawn["channels"]
    top = [(shown(row["channel"]), row["bytes_out"] or 0.0, percent(row["share"])) for row in rows[:BARS_MAX]]
    lines = (
        (
            shown(row["channel"]),
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
        table(headings, lines, "No channel was reported."),
        *more,
    )


def _judged(drawn: Drawn) -> str:
    judged = (
        (
            shown(row["channel"]),
            row["mode"],
            row["wanted"],
            duration(row["seconds"]),
            ratio(row["ratio_max"]),
            figure(row["publications_per_s_max"]),
            figure(row["subscribers_max"]),
        )
        for row in drawn["replication"]
    )
    modes = ("channel", "mode", "Algorithm 1", "for", "load ratio", "pub/s", "subscribers")
    return table(modes, judged, "Algorithm 1 asks for no replication.")


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
    servers = ", ".join(map(shown, row.get(f"{end}_servers") or ()))
    mode = row.get(f"{end}_mode")
    return f"{servers} ({mode})" if mode not in (None, "single") else servers


def _plans(drawn: Drawn) -> str:
    effects = (
        (
            shown(row["server"]),
            time(row["at"]),
            shown(row["goal"]),
            figure(row["channels"]),
            ratio(row["ratio_before"]),
            ratio(row["ratio_predicted"]),
            ratio(row["ratio_measured"]),
            shown(row["reason"]),
        )
        for row in drawn["effects"]
    )
    changes = (
        (
            shown(row["channel"]),
            time(row["at"]),
            _route(row, "from"),
            _route(row, "to"),
            _milliseconds(row["preparing_s"]),
            _milliseconds(row["settling_s"]),
        )
        for row in drawn["changes"]
    )
    back = (
        (shown(row["channel"]), time(row["at"]), _route(row, "to"), duration(row["away_s"]), shown(row["reason"]))
        for row in drawn["ping_pong"]
    )
    around = (
        (
            shown(row["server"]),
            time(row["begin"]),
            figure(row["channels"]),
            *(_milliseconds(row[name]) for name in ("before_s", "during_s", "after_s")),
            figure(row["lost"]),
        )
        for row in drawn["latency_around"]
    )
    gained = [("decision", "at", "before", "after", "reason"), *_gained(drawn["without_gain"])]
    return section(
        "Plans",
        table(
            ("server", "at", "goal", "channels", "before", "predicted", "measured", "reason"),
            effects,
            "The balancer decided nothing.",
            text_columns=(7,),
        ),
        table(("channel", "at", "from", "to", "prepared ms", "settled ms"), changes, "No channel was moved."),
        table(
            ("back again", "at", "at server", "away for", "reason"), back, "No move was undone within an hour.", (4,)
        ),
        table(gained[0], gained[1:], "No decision was without gain.", text_columns=(4,)),
        table(("latency at", "from", "channels", "before ms", "during ms", "after ms", "lost"), around, ""),
    )


def _gained(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    return [
        (
            str(row["decision"]),
            time(row["at"]),
            ratio(row["ratio_before"]),
            ratio(row["ratio_measured"]),
            shown(row["reason"]),
        )
        for row in rows
    ]


def _calibration(drawn: Drawn, toml: str) -> str:
    breaks = {row["server"]: row["break_ratio"] for row in drawn["break_points"]}
    busiest = sorted(drawn["break_points"], key=lambda row: -row["ratio_max"])[:RESPONSE_SERVERS_MAX]
    drawn_servers = {row["server"] for row in busiest}
    points = (row for row in drawn["response"] if row["server"] in drawn_servers)
    marks = [(at, f"break point of {shown(server)}") for server, at in breaks.items() if at and server in drawn_servers]
    caption = "Latency in seconds (median of probes) against load ratio; dashed: where it breaks."
    axes = Axes(caption, ratio, x_marks=marks, joined_within=0)
    found = (
        (
            shown(row["server"]),
            ratio(row["break_ratio"]),
            _milliseconds(row["flat_s"]),
            _milliseconds(row["latency_s_max"]),
            ratio(row["ratio_max"]),
            figure(row["probes"]),
        )
        for row in drawn["break_points"]
    )
    headings = ("server", "breaks at", "below ms", "at most load ms", "load seen", "probes")
    return section(
        "Calibration",
        chart(_series(points, "server", "ratio", "latency_s"), axes),
        table(headings, found, "The recording has no probes of latency."),
        paragraph("Recommended settings (recommended.toml):"),
        code(toml),
    )


def _departures(drawn: Drawn) -> str:
    found = (
        (
            shown(row["subject"]),
            time(row["at"]),
            row["metric"],
            figure(row["value"]),
            figure(row["expected"]),
            figure(row["score"]),
        )
        for row in drawn["anomalies"]
    )
    return section(
        "Anomalies",
        paragraph("Departures from the recent past, in units of the usual spread; missing reports; lagging agents."),
        table(("subject", "at", "metric", "value", "expected", "spreads"), found, "Nothing departed from its past."),
    )


def _gaps(drawn: Drawn) -> str:
    gaps = (
        (shown(row["server"]), time(row["at"]), shown(row["kind"]), figure(row["seconds"], "s"), shown(row["reason"]))
        for row in drawn["gaps"]
    )
    return section(
        "Gaps", table(("gap at", "until", "kind", "for", "reason"), gaps, "Recorders noted no gaps.", text_columns=(4,))
    )
