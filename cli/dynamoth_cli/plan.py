"""``dynamoth plan``: which channel is where; and move one."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping
from typing import Any

from dynamoth.plan import Entry, Plan, Route
from dynamoth_cli.admin import add_url, ask_balancer, cluster_of, read_plan
from dynamoth_link.urls import redact

MOVE_TIMEOUT_S = 60.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    commands = parser.add_subparsers(dest="action", required=True)
    show = commands.add_parser("show", help="show the plan as the servers store it; needs no balancer")
    add_url(show)
    show.add_argument("--json", action="store_true", help="print JSON")
    move = commands.add_parser(
        "move",
        help="move a channel to a server, and wait until that has settled",
        description="Move a channel to a server without losing, repeating or reordering a message, and wait until"
        " nobody uses the old server for it. Exits with 1 and the reason when the balancer refuses.",
    )
    move.add_argument("channel", metavar="CHANNEL")
    move.add_argument("--to", metavar="SERVER", required=True, help="id of the server, as 'plan show' lists them")
    move.add_argument(
        "--timeout", type=_seconds, default=MOVE_TIMEOUT_S, metavar="S", help="how long to wait (default %(default)g s)"
    )
    add_url(move)


def run(arguments: argparse.Namespace) -> int:
    """Do it."""
    cluster = cluster_of(arguments)
    if arguments.action == "show":
        plan = asyncio.run(read_plan(cluster))
        sys.stdout.write(json.dumps(plan_as_json(plan), indent=2) + "\n" if arguments.json else plan_as_text(plan))
    else:
        moved = {"channel": arguments.channel.encode(errors="surrogateescape"), "to": arguments.to}
        result = asyncio.run(ask_balancer(cluster, "move", moved, timeout_s=arguments.timeout))
        version = result.get("version")
        settled = "" if version is None else f" (plan version {version})"
        sys.stdout.write(f"{arguments.channel} is at {arguments.to}, settled{settled}\n")
    return 0


def plan_as_json(plan: Plan) -> Mapping[str, Any]:
    """Return a plan as JSON has it. Bytes of channels that are no UTF-8 are escaped."""
    return {
        "version": plan.version,
        "servers": [{"id": server.id, "url": redact(server.url)} for server in plan.servers.values()],
        "base": list(plan.base),
        "virtual_nodes": plan.virtual_nodes,
        "channels": [
            {
                "channel": channel_name(channel),
                "phase": entry.phase.name,
                **_route_as_json(entry.route),
                "previous": [_route_as_json(route) for route in entry.previous],
            }
            for channel, entry in sorted(plan.entries.items())
        ],
    }


def plan_as_text(plan: Plan) -> str:
    """Return a plan for people."""
    lines = [f"plan version {plan.version}"]
    lines += [f"  server {server.id}  {redact(server.url)}" for server in plan.servers.values()]
    if not plan.entries:
        return "\n".join([*lines, "every channel is where the ring puts it", ""])
    width = max(len(channel_name(channel)) for channel in plan.entries)
    lines.append(f"{len(plan.entries)} channels were moved; all others are where the ring puts them")
    lines += [
        f"  {channel_name(channel):{width}}  {_describe(entry)}" for channel, entry in sorted(plan.entries.items())
    ]
    return "\n".join([*lines, ""])


def channel_name(channel: bytes) -> str:
    """Return the name of a channel for people."""
    return channel.decode(errors="backslashreplace")


def _describe(entry: Entry) -> str:
    where = ",".join(entry.route.assignment.servers)
    mode = entry.route.assignment.mode.name.lower()
    moving = f"  from {','.join(entry.previous[-1].assignment.servers)}" if entry.previous else ""
    return f"{where}  {mode}  {entry.phase.name.lower()}{moving}  since version {entry.route.epoch}"


def _route_as_json(route: Route) -> dict[str, Any]:
    return {"mode": route.assignment.mode.name, "servers": list(route.assignment.servers), "epoch": route.epoch}


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"more than 0 s expected, not {text}")
    return value
