"""Describes the balancer's decisions for people: moves with reason and load, findings, and what was measured."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from dynamoth.plan.plan import Mode
from dynamoth.plan.slots import is_slot, slot_number
from dynamoth_balancer.admin.changes import mode_name
from dynamoth_cli.numbers import channel_name, counted

SINGLE = mode_name(Mode.SINGLE)


def to_json(answer: Mapping[str, Any]) -> str:
    """Return an answer of the balancer as JSON. Names of channels that are no UTF-8 are escaped."""
    return json.dumps(answer, indent=2, default=_as_json) + "\n"


def _as_json(value: object) -> str:
    return channel_name(value) if isinstance(value, bytes) else str(value)


def describe_moves(moves: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for each move of a channel, and one for slots that move next to each other for one reason."""
    for key, together in groupby(moves, key=_kind):
        group = list(together)
        if key is None:
            yield from (f"{name_of(move['channel'])} {_rest([move])}" for move in group)
        else:
            what = name_of(group[0]["channel"]) if len(group) == 1 else counted(len(group), "slot")
            yield f"{what} {_rest(group)}"


def _kind(move: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Return what moves of slots in one line have in common; None for channels."""
    return (move["from"], move["to"], move["reason"]) if is_slot(move["channel"]) else None


def name_of(channel: bytes) -> str:
    """Return the name of a channel or slot for people."""
    slot = slot_number(channel)
    return channel_name(channel) if slot is None else f"slot {slot}"


def _rest(group: Sequence[Mapping[str, Any]]) -> str:
    move, ratios = group[0], _ratios(group)
    place = f"from {_place(move, 'from', 'mode_before')} to {_place(move, 'to', 'mode_after')}"
    return f"{place}: {move['reason']}{f' ({ratios})' if ratios else ''}"


def _place(move: Mapping[str, Any], servers: str, mode: str) -> str:
    name = move.get(mode, SINGLE)
    return str(move[servers]) if name == SINGLE else f"{move[servers]} {name}"


def _ratios(moves: Sequence[Mapping[str, Any]]) -> str:
    """Return the load ratios of the servers of some moves, before the first and after the last one."""
    touched: dict[str, tuple[float, float]] = {}
    for move in moves:
        for server, (before, after) in move.get("load_ratios", {}).items():
            touched[server] = (touched.get(server, (before, after))[0], after)
    return ", ".join(f"{server} {before:.2f} -> {after:.2f}" for server, (before, after) in touched.items())


def describe_findings(findings: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a line for each finding."""
    return [f"{each['server']} was left at load ratio {each['load_ratio']:.2f}: {each['reason']}" for each in findings]


def describe_measured(load_ratios: Mapping[str, Mapping[str, float | None]]) -> str:
    """Return what was measured at the servers that a decision touched; empty before it is."""
    measured = {server: ratios["measured"] for server, ratios in load_ratios.items()}
    shown = [f"{server} {ratio:.2f}" for server, ratio in measured.items() if ratio is not None]
    return f"measured afterwards: {', '.join(shown)}" if shown else ""


def describe_decision(decision: Mapping[str, Any], lines_max: int) -> list[str]:
    """Return the lines of one decision, each with how long ago it was made."""
    shown = decision["first_moves"]
    lines = [*describe_moves(shown)]
    if decision["moves"] > len(shown) or len(lines) > lines_max:
        lines = [*describe_moves(shown[:lines_max])]
        lines.append(f"{counted(decision['moves'] - min(len(shown), lines_max), 'more move')}")
    if refused := decision.get("refused"):
        lines.append(f"the moves could not begin: {refused}")
    if measured := describe_measured(decision.get("load_ratios", {})):
        lines.append(measured)
    lines += describe_findings(decision["findings"][:lines_max])
    return [f"{decision['age_s']:.0f} s ago: {line}" for line in lines]
