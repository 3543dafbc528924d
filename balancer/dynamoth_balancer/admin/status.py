"""Describes the cluster and the plan for administrators, as plain data that msgpack and JSON can hold."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from itertools import islice
from typing import Any

from dynamoth.errors import RequestRefused
from dynamoth.plan.plan import Assignment, Entry, Phase, Plan, Route
from dynamoth.protocol.reports import Report
from dynamoth_balancer.admin.changes import mode_name
from dynamoth_balancer.decide.cluster import Move
from dynamoth_balancer.decide.history import MadeDecision
from dynamoth_balancer.decide.model import ClusterModel
from dynamoth_balancer.install.agents import Agents
from dynamoth_balancer.install.installer import Installer, Transition

TRANSITIONS_SHOWN_MAX = 100
MOVES_SHOWN_MAX = 20
REPLICATED_SHOWN_MAX = 100
PINS_SHOWN_MAX = 100
ENTRIES_PER_PAGE_MAX = 1000
"""Bounds of what one reply holds: about 100 KB."""


def describe_decisions(decisions: Iterable[MadeDecision], now: float) -> list[dict[str, Any]]:
    """Return decisions, with what came of them, as data."""
    return [describe_decision(made, now) for made in decisions]


def describe_decision(
    made: MadeDecision, now: float, moves_max: int = MOVES_SHOWN_MAX, first: Callable[[Move], bool] = bool
) -> dict[str, Any]:
    """Return one decision as data, with up to ``moves_max`` of its moves and findings; moves that are ``first`` lead.

    ``load_ratios`` has the servers that its moves touch, each with ``before``, ``predicted``, and ``measured``: None
    until ``averaging_s`` after the last move has settled.
    """
    moves, findings = made.decision.moves, made.decision.findings
    shown = sorted(moves, key=lambda move: not first(move))[:moves_max]
    return {
        "number": made.number,
        "age_s": now - made.at,
        "progress": made.progress.value,
        "refused": made.refused,
        "moves": len(moves),
        "first_moves": [describe_move(move) for move in shown],
        "findings": [asdict(finding) for finding in findings[:moves_max]],
        "load_ratios": {
            server: {"before": ratios.before, "predicted": ratios.after, "measured": made.measured.get(server)}
            for server, ratios in made.ratios.items()
        },
    }


def describe_move(move: Move) -> dict[str, Any]:
    """Return a move as data. The load ratios ``from`` and ``to`` are those of the busiest old and new server."""
    source, target = move.ratios[move.source], move.ratios[move.target]
    return {
        "channel": move.channel,
        "goal": move.goal,
        "mode_before": mode_name(move.before.mode),
        "mode_after": mode_name(move.after.mode),
        "from": ",".join(move.before.servers),
        "to": ",".join(move.after.servers),
        "reason": move.reason,
        "load_ratio_from_before": source.before,
        "load_ratio_from_after": source.after,
        "load_ratio_to_before": target.before,
        "load_ratio_to_after": target.after,
        "load_ratios": {server: [ratios.before, ratios.after] for server, ratios in move.ratios.items()},
        "loads": {server: asdict(load) for server, load in move.loads.items()},
    }


def describe_pins(pins: Mapping[bytes, Assignment]) -> dict[str, Any]:
    """Return how many channels are pinned, and the first of them."""
    first = heapq.nsmallest(PINS_SHOWN_MAX, pins)
    return {
        "pinned": len(pins),
        "pinned_channels": [{"channel": channel, "servers": list(pins[channel].servers)} for channel in first],
    }


def describe_channels(installer: Installer | None, now: float) -> dict[str, Any]:
    """Return how many channels the plan names, and the first of those that are replicated or in transition."""
    entries: Mapping[bytes, Entry] = {} if installer is None else installer.plan.entries
    transitions: Mapping[bytes, Transition] = {} if installer is None else installer.transitions
    replicated: Mapping[bytes, Assignment] = {} if installer is None else installer.index.replicated
    return {
        "entries": len(entries),
        "replicated": len(replicated),
        "replicated_channels": [
            describe_entry(channel, entries[channel]) for channel in heapq.nsmallest(REPLICATED_SHOWN_MAX, replicated)
        ],
        "in_transition": len(transitions),
        "transitions": [
            {
                "channel": channel,
                "phase": transition.entry.phase.name.lower(),
                **_describe_route(transition.entry.route),
                "from": sorted(transition.old),
                "to": list(transition.entry.route.assignment.servers),
                "age_s": now - transition.since,
                "waiting_for": list(installer.waiting_for(transition, now)),
            }
            for channel, transition in islice(transitions.items(), TRANSITIONS_SHOWN_MAX)
            if installer is not None
        ],
    }


def describe_server(
    server: str, agents: Agents, model: ClusterModel, installer: Installer | None, now: float
) -> dict[str, Any]:
    """Return the state of a server and its agent. Figures are left out while the agent is silent."""
    alive, acked = agents.is_alive(server, now), agents.acked(server, now)
    load = model.load(server, now) if alive else None
    usage = model.usage(server, now) if alive else {}
    blindness = model.blindness(server) if alive else None
    copy = None if installer is None else installer.copy(server)
    return {
        "agent": "alive" if alive else "silent",
        "agent_incarnation": agents.incarnation(server),
        "acknowledged_version": acked if acked >= 0 else None,
        "stored_version": None if copy is None else copy.version,
        "problem": "" if copy is None else copy.problem,
        "blind_s": None if blindness is None else now - blindness.since,
        "load_ratio": None if load is None else load.load_ratio,
        "outgoing_bytes_per_s_estimated": None if load is None else load.outgoing_bytes_per_s,
        "resource_ratios": {resource.value: ratio for resource, ratio in usage.items()},
        "tightest_resource": max(usage, key=lambda resource: usage[resource]).value if usage else None,
        "full": model.why_full(server) if alive else "",
        "report_age_s": model.report_age_s(server, now),
        **_describe_report(model.latest(server) if alive else None),
    }


def _describe_report(report: Report | None) -> dict[str, Any]:
    """Return the figures of a server's latest report."""
    if report is None:
        return {}
    return {
        "outgoing_bytes_per_s_max": report.outgoing_bytes_per_s_max,
        "outgoing_bytes_per_s": report.outgoing_bytes_per_s,
        "control_bytes_per_s": report.control_bytes_per_s,
        "incoming_bytes_per_s": report.incoming_bytes_per_s,
        "cpu_ratio": report.cpu_ratio,
        "memory_bytes": report.memory_bytes,
        "memory_bytes_max": report.memory_bytes_max,
        "connections": report.connections,
        "connections_max": report.connections_max,
        "messages_per_s": (sum(report.columns.messages_sent) + report.rest.messages_sent) / report.interval_s,
        "publications_per_s": (sum(report.columns.publications) + report.rest.publications) / report.interval_s,
        "channels": len(report.columns) + report.rest.channels,
        "observation_lag_s": report.observation_lag_s,
        "interruptions": report.interruptions,
        "observing": report.observing,
    }


def plan_page(plan: Plan, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a part of the plan; see :mod:`dynamoth_balancer.admin.api`. Raises RequestRefused."""
    channel = arguments.get("channel")
    page: dict[str, Any] = {
        "version": plan.version,
        "servers": {server.id: server.url for server in plan.servers.values()},
        "base": list(plan.base),
        "channels": len(plan.entries),
        "next": None,
    }
    if channel is not None:
        if not isinstance(channel, bytes):
            raise RequestRefused("the argument channel of the command plan must be bytes")
        return {**page, "entries": [describe_entry(channel, plan.entry(channel))]}
    after, limit = arguments.get("after"), arguments.get("limit", ENTRIES_PER_PAGE_MAX)
    if not (after is None or isinstance(after, bytes)):
        raise RequestRefused("the argument after of the command plan must be bytes")
    if type(limit) is not int or not 1 <= limit <= ENTRIES_PER_PAGE_MAX:
        raise RequestRefused(f"the argument limit of the command plan must be from 1 to {ENTRIES_PER_PAGE_MAX}")
    names = (name for name in plan.entries if after is None or name > after)
    found = heapq.nsmallest(limit + 1, names)
    page["entries"] = [describe_entry(name, plan.entries[name]) for name in islice(found, limit)]
    page["next"] = found[limit - 1] if len(found) > limit else None
    return page


def describe_entry(channel: bytes, entry: Entry) -> dict[str, Any]:
    """Return what the plan says of a channel, as data."""
    return {
        "channel": channel,
        "phase": entry.phase.name.lower(),
        **_describe_route(entry.route),
        "previous": [_describe_route(route) for route in entry.previous],
        "settled": entry.phase is Phase.SETTLED,
    }


def _describe_route(route: Route) -> dict[str, Any]:
    return {
        "epoch": route.epoch,
        "mode": mode_name(route.assignment.mode),
        "servers": list(route.assignment.servers),
    }
