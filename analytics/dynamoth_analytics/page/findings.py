"""The findings of a report: sentences, the most important first."""

from __future__ import annotations

from collections.abc import Callable

from dynamoth_analytics.jobs.calibration import SMOOTH
from dynamoth_analytics.jobs.runner import Drawn, Row
from dynamoth_analytics.page.brokers import broker_findings, broker_overload
from dynamoth_analytics.text import TimeFormat, counted, display_name, duration, figure, percent, ratio

ANOMALY_SENTENCES_MAX = 2
OVERLOADS_NAMED_MAX = 2

MEASURED = {
    "outgoing_bytes_per_s": ("sent", "B/s"),
    "cpu_ratio": ("had a CPU load of", ""),
    "publications_per_s": ("had", "publications/s"),
    "subscribers": ("had", "subscribers"),
    "publishers": ("had", "publishers"),
    "channels": ("published on", "channels"),
}
"""The verb and the unit of each metric of an anomaly."""

INCOMPLETE: dict[str, tuple[str, Callable[[float], str]]] = {
    "reports_missing": ("Missing reports, which leave figures of their time incomplete", figure),
    "silent_s": ("Time without any report", duration),
    "late_s": ("Delays of late reports in all", duration),
}
"""What each metric of missing reports means, and how its value is shown."""

CAUSE_SHARE_MIN = 0.3
"""A channel with a smaller part of a server's rise is not called the cause of an overload."""


def findings(drawn: Drawn) -> list[str]:
    """Return what the recording says, in sentences."""
    of_servers = _overload, broker_overload, _busiest, _moves, _break, _replication
    parts = (*of_servers, broker_findings, _anomalies, _incomplete)
    return [sentence for part in parts for sentence in part(drawn)]


def _overload(drawn: Drawn) -> list[str]:
    if overloads := sorted(drawn["overloads"], key=lambda row: row["minutes"], reverse=True):
        worst, *others = overloads
        sentences = [
            f"{display_name(worst['server'])} was overloaded for {_span(worst, drawn.when)}"
            f" (load ratio up to {ratio(worst['ratio_max'])}); {cause(worst)}."
        ]
        if others:
            named = "; ".join(
                f"{display_name(row['server'])} for {_span(row, drawn.when)}, {cause(row)}"
                for row in others[:OVERLOADS_NAMED_MAX]
            )
            rest = drawn.counts["overloads"] - 1 - len(others[:OVERLOADS_NAMED_MAX])
            sentences.append(f"Other overloads: {named}{f'; and {rest} more' if rest else ''}.")
        return sentences
    servers = [row for row in drawn["servers"] if row["ratio_max"] is not None]
    if not servers:
        return ["No server reported its load."]
    top = max(servers, key=lambda row: row["ratio_max"])
    highest = f"the highest load ratio was {ratio(top['ratio_max'])}, at {display_name(top['server'])}"
    if top["ratio_max"] > drawn.settings["load_ratio_high"]:
        return [f"No server was overloaded for {duration(drawn.slot_s)} or longer: {highest}, for a shorter time."]
    return [f"No server was overloaded: {highest}."]


def _span(row: Row, when: TimeFormat) -> str:
    return f"{duration(row['minutes'] * 60)} from {when(row['begin'])}"


def cause(row: Row) -> str:
    """Return why a server was overloaded, as far as is known."""
    if row["channel"] is None:
        return "no channel is known there"
    share = row["cause_share"]
    if share is not None and share >= CAUSE_SHARE_MIN:
        rise = f"from {figure(row['cause_bytes_per_s_before'], 'B/s')} to {figure(row['cause_bytes_per_s'], 'B/s')}"
        return f"the cause was channel {display_name(row['cause'])}, which rose {rise}"
    many = "" if share is None else "many channels rose, and "
    return f"{many}the busiest was {display_name(row['channel'])} with {percent(row['channel_share'])} of all bytes"


def _busiest(drawn: Drawn) -> list[str]:
    if not (channels := drawn["channels"]):
        return ["No channel sent anything."]
    top = channels[0]
    return [
        f"{display_name(top['channel'])} was the busiest channel: {percent(top['share'])} of all bytes,"
        f" {figure(top['bytes_out_per_s'], 'B/s')}, {figure(top['publications_per_s'])} publications/s for"
        f" {counted(round(top['subscribers'] or 0), 'subscriber')}."
    ]


def _moves(drawn: Drawn) -> list[str]:
    found: list[str] = []
    if back := drawn["ping_pong"]:
        names = ", ".join(dict.fromkeys(display_name(row["channel"]) for row in back[:3]))
        found.append(f"Moves that were undone within an hour: {drawn.counts['ping_pong']} ({names}).")
    if idle := drawn.counts.get("without_gain"):
        found.append(f"Decisions that gained nothing: {idle}. Their most loaded server was as loaded afterwards.")
    errors = [row["error"] for row in drawn["effects_error"] if row["error"] is not None]
    found += [
        f"Load ratios after decisions differed from the predicted ones by {ratio(error)} (median)." for error in errors
    ]
    return found


def _break(drawn: Drawn) -> list[str]:
    known = [row for row in drawn["break_points"] if row["break_ratio"] is not None]
    if not known:
        return [_smooth(row) for row in drawn["break_points"] if row["shape"] == SMOOTH][:1]
    first = min(known, key=lambda row: row["break_ratio"])
    high = drawn.settings["load_ratio_high"]
    judgement = "above" if first["break_ratio"] > high else "below"
    return [
        f"The latency at {display_name(first['server'])} breaks at load ratio {ratio(first['break_ratio'])},"
        f" {judgement} the {high:g} from which servers are relieved."
    ]


def _smooth(row: Row) -> str:
    low, high = (f"{row[name] * 1e3:.2f} ms" for name in ("latency_s_min", "latency_s_max"))
    return (
        f"The latency at {display_name(row['server'])} rises smoothly with its load, from {low} to {high} at load ratio"
        f" {ratio(row['ratio_max'])}: it has no break point."
    )


def _replication(drawn: Drawn) -> list[str]:
    if not (wanted := drawn["not_as_wanted"]):
        return []
    top = wanted[0]
    return [
        f"By Algorithm 1, {display_name(top['channel'])} should have been {top['wanted']} for"
        f" {duration(top['seconds'])}. It was {top['mode']}."
    ]


def _anomalies(drawn: Drawn) -> list[str]:
    departed = [row for row in drawn["anomalies"] if row["score"] is not None]
    return [_departure(row, drawn.when) for row in departed[:ANOMALY_SENTENCES_MAX]]


def _departure(row: Row, when: TimeFormat) -> str:
    verb, unit = MEASURED[row["metric"]]
    return (
        f"At {when(row['at'])} {row['kind']} {display_name(row['subject'])} {verb} {figure(row['value'], unit)};"
        f" before: {figure(row['expected'], unit)}."
    )


def _incomplete(drawn: Drawn) -> list[str]:
    found: list[str] = []
    for metric, (say, formatted) in INCOMPLETE.items():
        rows = [row for row in drawn["incomplete"] if row["metric"] == metric]
        if rows:
            parts = ", ".join(f"{display_name(row['server'])} {formatted(row['value'])}" for row in rows)
            found.append(f"{say}: {parts}.")
    if drawn.clocks_differ_s:
        found.append(
            f"The clocks of recorders differ by {duration(drawn.clocks_differ_s)}: all times are those of one of them."
            " Synchronize the clocks of their machines."
        )
    if drawn.files_gone:
        found.append(
            f"{drawn.files_gone} files of the recording were merged or deleted meanwhile: if this report lacks"
            " something, make another."
        )
    if not drawn.settings_recorded:
        found.append("The settings of the balancer are not in the recording: the defaults are assumed.")
    found += [
        f"The table {name} lacks the columns {', '.join(columns)}: an older version wrote it."
        for name, columns in drawn.missing.items()
        if columns
    ]
    return found
