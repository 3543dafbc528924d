"""Replays windows of brokers inside Spark's workers: a packed window in, a row per combination of settings out."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeStubs=false
# pandas comes without types; mypy checks the rest.

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from dynamoth_analytics.errors import BadRecording
from dynamoth_analytics.replay.brokers.replay import Figures, recorded_figures, replay_brokers
from dynamoth_analytics.replay.brokers.windows import BrokerSpan, unpacked_brokers
from dynamoth_broker.coordinator.settings import CoordinatorOptions

RECORDED = -1
"""The number of the combination whose rows are what really happened."""

BROKER_REPLAYS = {
    "combination": "int",
    "window": "long",
    "seconds": "double",
    "overload_s": "double",
    "ratio_max": "double",
    "ratio_max_mean": "double",
    "cov": "double",
    "redis_egress": "double",
    "moves": "long",
    "decisions": "long",
    "shuffles": "long",
    "problem": "string",
}
"""Columns and types of a replay. ``problem`` is why it failed: then there are no figures."""

BROKER_REPLAYS_SCHEMA = ", ".join(f"{name} {type_}" for name, type_ in BROKER_REPLAYS.items())

_FIGURES = [name for name in BROKER_REPLAYS if name not in ("combination", "window", "problem")]


def replayed_brokers(
    options: Sequence[CoordinatorOptions],
    span: BrokerSpan,
    overload_ratio: float,
    chunks: int,
    tasks: Iterator[pd.DataFrame],
) -> Iterator[pd.DataFrame]:
    """Replay packed windows, each under one chunk of the combinations; the first chunk has what was recorded, too.

    Args:
        options: the settings of each combination; the first ones are those in force.
        span: that of the windows.
        overload_ratio: a broker above this load ratio is overloaded.
        chunks: how many chunks the combinations are divided into.
        tasks: rows of ``packed_broker_windows``, each with the number of a chunk.

    Yields:
        Rows of ``BROKER_REPLAYS``.

    """
    columns = pd.Index(BROKER_REPLAYS)
    for frame in tasks:
        for task in frame.to_dict("records"):
            chosen = {number: options[number] for number in range(task["chunk"], len(options), chunks)}
            for row in _rows(task, chosen, options[0], span, overload_ratio):
                yield pd.DataFrame([[row.get(name) for name in BROKER_REPLAYS]], columns=columns)


def _rows(
    task: Mapping[Any, Any],
    combinations: Mapping[int, CoordinatorOptions],
    in_force: CoordinatorOptions,
    span: BrokerSpan,
    overload_ratio: float,
) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of one task. A window without reports has none."""
    number: int = task["window"]
    migrations, pauses = (task[name] if isinstance(task[name], str) else None for name in ("migrations", "pauses"))
    try:
        window = unpacked_brokers(number, task["reports"], task["interests"], migrations, pauses, span)
    except BadRecording as error:
        yield from ({"combination": each, "window": number, "problem": str(error)} for each in combinations)
        return
    if 0 in combinations:
        yield from _row(RECORDED, number, recorded_figures(window, in_force, overload_ratio))
    for combination, options in combinations.items():
        yield from _row(combination, number, replay_brokers(window, options, overload_ratio))


def _row(combination: int, number: int, found: Figures | None) -> Iterator[Mapping[str, Any]]:
    if found is not None:
        yield {"combination": combination, "window": number, **{name: getattr(found, name) for name in _FIGURES}}
