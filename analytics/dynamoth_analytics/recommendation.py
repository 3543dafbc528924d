"""Recommends settings that a recording gives reason for, as TOML with the evidence as comments.

The maximum of a server becomes what it sent at its break point, so that load ratio 1 means the same for all. LR_high
leaves room for the usual rise of a load within a slot.

A channel that alone makes more than ``load_ratio_high`` of the largest server needs several servers. Algorithm 1 (see
``dynamoth_balancer.decide.replicate``) should replicate it before that. Where the thresholds in force are above what
the channel has at ``load_ratio_high``, lower ones are recommended: by what it has at ``replicate_load_ratio_min``. Only
channels with so much load are concerned, so lower thresholds replicate no small ones. A recording without such channels
gives no reason for others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from dynamoth.settings.declare import to_text
from dynamoth_analytics.jobs.calibration import BREAK, FLAT, SMOOTH
from dynamoth_analytics.jobs.runner import Drawn, Row
from dynamoth_analytics.recorded_settings import DEFAULTS, PresentSettings
from dynamoth_analytics.text import display_name, figure

HIGH_MIN, HIGH_MAX = 0.6, 0.9
SAFE_RATIO = 0.75
"""Bounds of the recommended LR_high; LR_safe is this share of it, as with Dynamoth's 0.8 and 0.6."""

BELOW_RATIO = 0.9
"""A threshold is this share of the figure that is to be above it."""

REPLICAS_MIN = 2


def recommended(drawn: Drawn, settings: PresentSettings) -> str:
    """Return the recommended settings as TOML that ``dynamoth balancer`` reads."""
    rise = drawn["rise"][0]["rise"]
    lower = thresholds(drawn["outgrown"], settings.numbers)
    draining = settings.settings.options.draining
    return as_toml(drawn["break_points"], capacities(drawn), settings.urls, rise, settings.numbers, lower, draining)


def capacities(drawn: Drawn, *, at_break: bool = False) -> dict[str, float]:
    """Return the maximum of each server in bytes/s: as configured, or what it sent at its break point."""
    found = {row["server"]: float(row["outgoing_bytes_per_s_max"] or 1) for row in drawn["servers"]}
    breaks = {row["server"]: row["break_ratio"] or 1.0 for row in drawn["break_points"]} if at_break else {}
    return {server: value * breaks.get(server, 1.0) for server, value in found.items()}


def as_toml(
    breaks: Sequence[Row],
    capacities: Mapping[str, float],
    urls: Mapping[str, str],
    rise: float | None,
    in_force: Mapping[str, float],
    thresholds: Sequence[str] = (),
    draining: Collection[str] = (),
) -> str:
    """Return settings as TOML, with the evidence as comments.

    Args:
        breaks: rows of :func:`dynamoth_analytics.jobs.calibration.break_points`.
        capacities: the present maximum of each server that reported, in bytes/s.
        urls: of the servers of the settings in force; empty: they were not recorded. Other servers become comments.
        rise: how far the largest load ratio of a slot is above its mean, usually; None: unknown.
        in_force: the settings in force.
        thresholds: more lines of ``[balancer]``.
        draining: servers that were being drained.

    """
    by_server = {row["server"]: row for row in breaks}
    found = [row for row in breaks if row["break_ratio"] is not None]
    lines = [
        "# Recommended by `dynamoth report`. Check: `dynamoth balancer --check --config FILE`.",
        "",
        "[balancer]",
    ]
    high, safe = in_force["load_ratio_high"], in_force["load_ratio_safe"]
    if found and rise is not None:
        relative_rise = rise / min(row["break_ratio"] for row in found)
        high = round(min(HIGH_MAX, max(HIGH_MIN, 1.0 - relative_rise)), 2)
        safe = round(high * SAFE_RATIO, 2)
        lines.append(
            f"# Room for peaks: in 95% of slots, no report was more than {relative_rise:.2f} above the mean load ratio."
        )
    else:
        lines.append("# As now: at no server was latency seen to break.")
    lines += [f"load_ratio_high = {high:g}", f"load_ratio_safe = {safe:g}", *thresholds]
    if not urls:
        lines += ["", "# The recording does not have the URLs of the servers: add them, and remove the marks."]
    for server in sorted({*capacities, *urls}):
        lines += [
            "",
            *_server(server, urls, capacities.get(server), by_server.get(server), draining=server in draining),
        ]
    return "\n".join(lines) + "\n"


def _server(
    server: str, urls: Mapping[str, str], capacity: float | None, row: Row | None, *, draining: bool
) -> list[str]:
    """Return the lines of one server; comments where the settings in force do not have it.

    ``capacity`` and ``row``, one of ``break_points``, are None where nothing is known.
    """
    lines = ["[[cluster.servers]]", f"id = {to_text(server, quoted=True)}"]
    lines.append(f"url = {to_text(urls.get(server, 'redis://HOST:PORT'), quoted=True)}")
    if draining:
        lines.append("draining = true")
    if capacity is None:
        return ["# No report of it was recorded: the default maximum is assumed.", *lines]
    broken = row["break_ratio"] if row is not None else None
    lines.append(f"outgoing_bytes_per_s_max = {max(1, round(capacity * (broken or 1.0)))}")
    why = "# As now: no latency was measured." if row is None else f"# {_evidence(row, capacity)}"
    if server in urls:
        return [why, *lines]
    left = ["# It was not in the last recorded settings: it may have left."] if urls else []
    return [*left, why, *(f"# {line}" for line in lines)]


def _evidence(row: Row, capacity: float) -> str:
    """Return why the maximum of a server changes, or stays."""
    up_to = f"up to load ratio {row['ratio_max']:.2f} ({row['probes']} probes)"
    if row["shape"] == BREAK:
        return (
            f"Latency rises from {row['latency_s_min'] * 1e3:.2f} ms to {row['latency_s_max'] * 1e3:.2f} ms beyond load"
            f" ratio {row['break_ratio']:.3f} of {capacity:.0f} bytes/s; {row['probes']} probes."
        )
    if row["shape"] == SMOOTH:
        return (
            f"As now: latency rises smoothly from {row['latency_s_min'] * 1e3:.2f} ms to"
            f" {row['latency_s_max'] * 1e3:.2f} ms, without a break, {up_to}."
        )
    if row["shape"] == FLAT:
        return f"As now: latency has no clear rise {up_to}."
    return f"As now: too few loads were seen to find a break, {up_to}."


def thresholds(channels: Sequence[Row], present: Mapping[str, float]) -> list[str]:
    """Return the recommended thresholds as lines of TOML, with the evidence as comments; none without evidence.

    Args:
        channels: rows of :func:`dynamoth_analytics.jobs.replication.outgrown`.
        present: the settings in force.

    """
    large, high = present["replicate_load_ratio_min"], present["load_ratio_high"]
    lowest: dict[str, tuple[float, Row]] = {}
    for row in channels:
        at_high = _figures(row, high)
        for name, value in _figures(row, large).items():
            if at_high[name] <= present[name] and (name not in lowest or value < lowest[name][0]):
                lowest[name] = value, row
    lines: list[str] = []
    for name, (value, row) in lowest.items():
        lines += [
            f"# {present[name]:g} is too much: {display_name(row['channel'])} alone made load ratio {row['ratio']:.2f},"
            f" with {figure(row['publications_per_s'])} publications/s to {figure(row['subscribers'])} subscribers.",
            f"# At load ratio {large:g}, from which channels are replicated, it would have {value:.3g}.",
            f"{name} = {_rounded(value * BELOW_RATIO, whole=isinstance(DEFAULTS[name], int))}",
        ]
    return lines


def _figures(row: Row, ratio: float) -> dict[str, float]:
    """Return what the thresholds are compared with, at a load ratio; nothing where figures are unknown.

    A channel with more publications than subscribers got there by publications, another one by subscribers.
    """
    share = min(1.0, ratio / row["ratio"])
    rate, subscribers, publishers = row["publications_per_s"], row["subscribers"], row["publishers"]
    if None in (rate, subscribers, publishers):
        return {}
    if rate >= subscribers and publishers >= REPLICAS_MIN:
        rate *= share
        return {
            "replicate_publications_per_s_min": rate,
            "all_subscribers_ratio_min": rate / max(subscribers, 1.0),
        }
    if subscribers >= REPLICAS_MIN and rate > 0:
        subscribers *= share
        return {"replicate_subscribers_min": subscribers, "all_publishers_ratio_min": subscribers / rate}
    return {}


def _rounded(value: float, *, whole: bool) -> str:
    """Return a number with two digits that matter, as TOML."""
    rounded = float(f"{value:.2g}")
    return f"{int(rounded)}" if whole else f"{rounded!r}"
