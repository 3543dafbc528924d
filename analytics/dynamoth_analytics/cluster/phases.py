"""When queries are executed: spread over their periods, so that they do not contend for the processors."""

from __future__ import annotations

from collections.abc import Mapping

HORIZON_S = 600
"""Executions are spread as well as possible within this time."""


def phases(periods: Mapping[str, int]) -> dict[str, float]:
    """Return the phase of each query: the seconds between a multiple of its period and its tick.

    Queries with a short period choose first, by name, and each takes the whole second at which the fewest of those
    before it are executed. So one more query changes the phase of those with longer periods at most. A continuous query
    (period 0) has phase 0.
    """
    busy = [0] * HORIZON_S
    found: dict[str, float] = {}
    for name in sorted(periods, key=lambda each: (periods[each], each)):
        period = min(periods[name], HORIZON_S)
        if period <= 1:
            found[name] = 0.0
            continue
        load = [max(busy[second::period]) for second in range(period)]
        near = [load[second] * 4 + load[second - 1] * 2 + load[(second + 1) % period] for second in range(period)]
        phase = min(range(period), key=lambda second: (near[second], second))
        for second in range(phase, HORIZON_S, period):
            busy[second] += 1
        found[name] = float(phase)
    return found
