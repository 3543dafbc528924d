"""Replays windows inside Spark's workers: a packed window in, a row per combination of settings out."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeStubs=false
# pandas and pyarrow come without types; mypy checks the rest.

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from dynamoth.recording import channel_text
from dynamoth_analytics.replay.agreement import agreement
from dynamoth_analytics.replay.fidelity import fidelity
from dynamoth_analytics.replay.instant_cluster import ReplayError
from dynamoth_analytics.replay.recorded import Moved, RecordedWindow
from dynamoth_analytics.replay.replay import Outcome, measured, replay
from dynamoth_analytics.replay.windows import WHOLE_RECORDING, ReplaySpan, recorded_log, unpacked
from dynamoth_balancer.admin.changes import mode_name
from dynamoth_balancer.options import BalancerOptions

REPLAYS = {
    "combination": "int",
    "window": "long",
    "overload_s": "double",
    "ratio_max": "double",
    "ratio_mean": "double",
    "imbalance": "double",
    "server_s": "double",
    "moves": "long",
    "replications": "long",
    "decisions": "string",
    "problem": "string",
    "agreement": "string",
}
"""Columns and types of a replay. ``decisions`` are its moves as JSON. ``agreement`` is the ``Fidelity`` as JSON, of the
window ``WHOLE_RECORDING`` only. ``problem`` is why it failed: then there are no figures."""

REPLAYS_SCHEMA = ", ".join(f"{name} {type_}" for name, type_ in REPLAYS.items())

_TEXTS = ("steps", "pauses", "log")


def replayed(
    options: Sequence[BalancerOptions],
    span: ReplaySpan,
    overload_ratio: float,
    chunks: int,
    tasks: Iterator[pd.DataFrame],
) -> Iterator[pd.DataFrame]:
    """Replay packed windows, each under one chunk of the combinations; the whole recording under those in force only.

    Chunks are interleaved: combinations that follow each other are alike, and take the same time.

    Args:
        options: the settings of each combination; the first ones are those in force.
        span: that of the windows.
        overload_ratio: a server above this load ratio is overloaded.
        chunks: how many chunks the combinations are divided into.
        tasks: rows of ``packed_windows``, each with the number of a chunk.

    Yields:
        Rows of ``REPLAYS`` one by one, so that a task has one window and one replay in its memory.

    """
    for frame in tasks:
        for task in frame.to_dict("records"):
            is_whole = task["window"] == WHOLE_RECORDING
            chunk = [0] if is_whole else range(task["chunk"], len(options), chunks)
            for row in _rows(task, {number: options[number] for number in chunk}, span, overload_ratio):
                yield pd.DataFrame([[row.get(name) for name in REPLAYS]], columns=pd.Index(REPLAYS))


def _rows(
    task: Mapping[Any, Any], combinations: Mapping[int, BalancerOptions], span: ReplaySpan, overload_ratio: float
) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of one task. A window without reports has none."""
    number: int = task["window"]
    steps, pauses, log = (task[name] if isinstance(task[name], str) else None for name in _TEXTS)
    window = unpacked(number, task["reports"], task["channels"], steps, pauses, span)
    for combination, options in combinations.items():
        key = {"combination": combination, "window": number}
        try:
            outcome = replay(window, options, overload_ratio, span.settle_s)
            if outcome is None:
                continue
            row = {**key, **_figures(outcome)}
            if number == WHOLE_RECORDING:
                row["agreement"] = _agreement(window, log, options, span, outcome, overload_ratio)
            yield row
        except ReplayError as error:
            yield {**key, "problem": str(error)}


def _figures(outcome: Outcome) -> dict[str, Any]:
    return {
        "overload_s": outcome.overload_s,
        "ratio_max": outcome.ratio_max,
        "ratio_mean": outcome.ratio_mean,
        "imbalance": outcome.imbalance,
        "server_s": outcome.server_s,
        "moves": len(outcome.moves),
        "replications": outcome.replications,
        "decisions": _moves_text(outcome.moves),
    }


def _agreement(
    window: RecordedWindow,
    log: str | None,
    options: BalancerOptions,
    span: ReplaySpan,
    outcome: Outcome,
    overload_ratio: float,
) -> str:
    """Return how the replay agrees with the recording, as JSON."""
    found = agreement(window, recorded_log(json.loads(log or "[]")), options, span.led_since)
    overload_s = measured(window, overload_ratio).overload_s
    return fidelity(found, len(outcome.moves), overload_s, outcome.overload_s).to_json()


def _moves_text(moves: Iterable[Moved]) -> str:
    """Return moves as JSON."""
    return json.dumps(
        [
            {
                "at": move.at,
                "channel": channel_text(move.channel),
                "from_mode": mode_name(move.before.mode),
                "from_servers": move.before.servers,
                "to_mode": mode_name(move.after.mode),
                "to_servers": move.after.servers,
                "reason": move.reason,
            }
            for move in moves
        ]
    )
