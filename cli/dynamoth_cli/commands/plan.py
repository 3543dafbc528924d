"""``dynamoth plan``: which channel is where; move one, spread one over several servers, and fold it back."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from dynamoth.plan.plan import Entry, Location, Mode, Phase, Plan, Route
from dynamoth.plan.slots import SLOTS, is_slot, slot_name
from dynamoth_balancer.admin.api import CHANGE_TIMEOUT_S_MAX
from dynamoth_balancer.admin.changes import MODES, mode_name
from dynamoth_balancer.admin.compatibility import describe_rules
from dynamoth_cli.admin import ask_balancer, read_plan
from dynamoth_cli.cluster_access import Access, access_of, add_access
from dynamoth_cli.commands import compatibility
from dynamoth_cli.numbers import channel_name, counted, number
from dynamoth_link.errors import LinkError
from dynamoth_link.urls import redact

CHANGE_TIMEOUT_S = 60.0

ANSWER_GRACE_S = 1.0
"""The balancer waits for ``--timeout`` itself, and we this much longer, so that it can say what it waits for."""

NAME_WIDTH_MAX = 24
"""Longer names of channels do not widen the column: what is said of them begins on a line of its own."""

REPLICATED_MODES = [name for name, mode in MODES.items() if mode is not Mode.SINGLE]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    commands = parser.add_subparsers(dest="action", required=True)
    show = commands.add_parser("show", help="show the plan, or one channel, as the servers store it; needs no balancer")
    show.add_argument("channel", metavar="CHANNEL", nargs="?", type=channel_argument, help="show where this channel is")
    add_access(show)
    show.add_argument("--json", action="store_true", help="print JSON")
    move = _add_change(
        commands,
        "move",
        "move a channel to a server, and wait until that has settled",
        "Move a channel to a server without losing, repeating or reordering a message, and wait until nobody uses the"
        " old server for it. The balancer may move it again, by load, after channel_rest_s.",
    )
    move.add_argument("--to", metavar="SERVER", required=True, help="id of the server, as 'plan show' lists them")
    replicate = _add_change(
        commands,
        "replicate",
        "spread a channel over several servers, and wait until that has settled",
        "Spread a channel that is too large for one server over several, without losing, repeating or reordering a"
        " message, and wait until everybody uses them. The balancer leaves it so until it is restarted.",
    )
    replicate.add_argument(
        "--mode",
        choices=REPLICATED_MODES,
        required=True,
        help="all-subscribers: each subscriber listens at all servers, a publisher uses one (many publications);"
        " all-publishers: each publication goes to all servers, a subscriber listens at one (many subscribers)",
    )
    which = replicate.add_mutually_exclusive_group(required=True)
    which.add_argument("--servers", type=_names, metavar="S1,S2", help="ids of the servers, at least two")
    which.add_argument(
        "--count", type=int, metavar="N", help="how many servers; the least loaded are chosen, the present ones first"
    )
    unreplicate = _add_change(
        commands,
        "unreplicate",
        "put a replicated channel back at one server, and wait until that has settled",
        "Put a replicated channel back at one server without losing, repeating or reordering a message, and wait until"
        " nobody uses the others for it.",
    )
    unreplicate.add_argument("--to", metavar="SERVER", help="id of the server (default: its least loaded replica)")
    compatibility.configure(commands)


def _add_change(commands: Any, name: str, summary: str, description: str) -> argparse.ArgumentParser:
    """Add a command that asks the balancer for a change of one channel."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=f"{description} Exits with 1 and the reason when the balancer refuses."
    )
    add_change_arguments(parser)
    return parser


def add_change_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the channel, and what all changes of one have in common."""
    parser.add_argument("channel", metavar="CHANNEL", type=channel_argument)
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=CHANGE_TIMEOUT_S,
        metavar="S",
        help="how long to wait (default %(default)g s)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    add_access(parser)


def run(arguments: argparse.Namespace) -> int:
    """Show or change the plan."""
    if arguments.action == "compatibility":
        return compatibility.run(arguments)
    access = access_of(arguments)
    if arguments.action == "show":
        plan = asyncio.run(read_plan(access.cluster, access.link, _warn))
        sys.stdout.write(_shown(plan, arguments.channel, arguments.json))
        return 0
    return change_channel(arguments, arguments.action)


def change_channel(arguments: argparse.Namespace, command: str) -> int:
    """Ask for a change of one channel, and print where it is now. Raises RequestRefused."""
    result = asyncio.run(_change(access_of(arguments), arguments, command))
    if arguments.json:
        sys.stdout.write(json.dumps({**result, "channel": arguments.channel}, indent=2) + "\n")
    else:
        sys.stdout.write(describe_result(arguments.channel, result))
    return 0


def _warn(fault: LinkError) -> None:
    sys.stderr.write(f"dynamoth: a server did not answer; the others store the plan shown here: {fault}\n")


def _shown(plan: Plan, channel: str | None, as_json: bool) -> str:
    """Return the output of ``plan show``."""
    if channel is None:
        return json.dumps(plan_as_json(plan), indent=2) + "\n" if as_json else plan_as_text(plan)
    name = channel.encode(errors="surrogateescape")
    return json.dumps(channel_as_json(plan, name), indent=2) + "\n" if as_json else channel_as_text(plan, name)


async def _change(access: Access, arguments: argparse.Namespace, command: str) -> Mapping[str, Any]:
    return await ask_balancer(
        access.cluster,
        command,
        change_arguments(arguments),
        timeout_s=arguments.timeout + ANSWER_GRACE_S,
        link=access.link,
    )


def change_arguments(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of the request to the balancer, from those of the command line."""
    given = {name: getattr(arguments, name, None) for name in ("to", "mode", "servers", "count")}
    wanted = {name: value for name, value in given.items() if value is not None}
    channel = arguments.channel.encode(errors="surrogateescape")
    return {"channel": channel, "timeout_s": arguments.timeout, **wanted}


def describe_result(channel: str, result: Mapping[str, Any]) -> str:
    """Return in words where a channel is now."""
    spread = "" if result["mode"] == mode_name(Mode.SINGLE) else f", {result['mode']}"
    note = f"note: {result['note']}\n" if result["note"] else ""
    return f"{channel} is at {', '.join(result['servers'])}{spread}, settled (plan version {result['version']})\n{note}"


def plan_as_json(plan: Plan) -> Mapping[str, Any]:
    """Return a plan as JSON has it. Bytes of channels that are no UTF-8 are escaped."""
    return {
        "version": plan.version,
        "servers": [{"id": server.id, "url": redact(server.url)} for server in plan.servers.values()],
        "base": list(plan.base),
        "virtual_nodes": plan.virtual_nodes,
        "compatibility": compatibility.rules_as_json(describe_rules(plan.compatibility)),
        "paused": plan.administration.paused,
        "pins": {channel_name(channel): list(pin.servers) for channel, pin in plan.administration.pins.items()},
        "channels": [
            {
                "channel": channel_name(channel),
                "phase": entry.phase.name,
                **_route_as_json(entry.route),
                "previous": [_route_as_json(route) for route in entry.previous],
            }
            for channel, entry in _channels(plan)
        ],
        "slots": _slots(plan),
    }


def _channels(plan: Plan) -> list[tuple[bytes, Entry]]:
    """Return the channels that a plan names, with their entries."""
    return sorted((name, entry) for name, entry in plan.entries.items() if not is_slot(name))


def _slots(plan: Plan) -> dict[str, int]:
    """Return how many slots each server has."""
    counts = Counter(plan.entry(slot_name(slot)).route.assignment.servers[0] for slot in range(SLOTS))
    return {server: counts[server] for server in plan.servers}


def channel_as_json(plan: Plan, channel: bytes) -> Mapping[str, Any]:
    """Return where one channel is. ``servers`` of ``locations`` have it under the ``name`` there."""
    entry = plan.entry(channel)
    [home] = plan.home_route(channel).assignment.servers
    rule = plan.compatibility.rule_of(channel)
    return {
        "version": plan.version,
        "channel": channel_name(channel),
        "home": home,
        "moved": _is_moved(plan, channel),
        "phase": entry.phase.name,
        **_route_as_json(entry.route),
        "previous": [_route_as_json(route) for route in entry.previous],
        "locations": [{"server": at.server, "name": channel_name(at.physical)} for at in _locations(entry, channel)],
        "compatibility": None if rule is None else channel_name(rule.pattern),
    }


def channel_as_text(plan: Plan, channel: bytes) -> str:
    """Return where one channel is, for people."""
    entry = plan.entry(channel)
    [home] = plan.home_route(channel).assignment.servers
    where = f"not at its home {home}" if _is_moved(plan, channel) else "at home"
    lines = [f"{channel_name(channel)}  {_describe(entry)}  {where}"]
    lines += [f"  at {at.server} as {channel_name(at.physical)}" for at in _locations(entry, channel)]
    if (rule := plan.compatibility.rule_of(channel)) is not None:
        lines += [f"  {line}" for line in compatibility.describe([asdict(rule)])]
    return "\n".join([*lines, ""])


def _is_moved(plan: Plan, channel: bytes) -> bool:
    return plan.entry(channel).route.assignment != plan.home_route(channel).assignment


def _locations(entry: Entry, channel: bytes) -> list[Location]:
    """Return where the channel is, and where it still is while it moves."""
    return [*dict.fromkeys(at for route in entry.live_routes for at in route.locations(channel))]


def plan_as_text(plan: Plan) -> str:
    """Return a plan for people."""
    lines = [f"plan version {plan.version}"]
    lines += [f"  server {server.id}  {redact(server.url)}" for server in plan.servers.values()]
    if plan.compatibility.rules:
        lines += [f"  {line}" for line in compatibility.describe(describe_rules(plan.compatibility))]
    lines += describe_administration(plan)
    if not plan.entries:
        return "\n".join([*lines, "every channel is where the ring puts it", ""])
    channels = _channels(plan)
    if moving := sum(entry.phase is not Phase.SETTLED for name, entry in plan.entries.items() if is_slot(name)):
        lines.append(f"  {counted(moving, 'slot')} in transition")
    rest = "where the ring puts them"
    if len(channels) < len(plan.entries):
        rest = f"in slots: {', '.join(f'{number} at {server}' for server, number in _slots(plan).items())}"
    if not channels:
        return "\n".join([*lines, f"all channels are {rest}", ""])
    width = min(NAME_WIDTH_MAX, max(len(channel_name(channel)) for channel, _ in channels))
    replicated = sum(entry.route.assignment.mode is not Mode.SINGLE for _, entry in channels)
    also = f", {replicated} of them {'is' if replicated == 1 else 'are'} replicated now" if replicated else ""
    lines.append(
        f"{counted(len(channels), 'channel')} {'was' if len(channels) == 1 else 'were'} moved or replicated"
        f"{also}; all others are {rest}"
    )
    for channel, entry in channels:
        name = channel_name(channel)
        if len(name) > width:
            lines.append(f"  {name}")
            name = ""
        lines.append(f"  {name:{width}}  {_describe(entry)}")
    return "\n".join([*lines, ""])


def describe_administration(plan: Plan) -> list[str]:
    """Return a line for each order of administrators that the plan keeps."""
    decided = plan.administration
    paused = ["  the balancer is paused"] if decided.paused else []
    pins = sorted(decided.pins.items())
    return [*paused, *(f"  pinned: {channel_name(name)} to {', '.join(pin.servers)}" for name, pin in pins)]


def _describe(entry: Entry) -> str:
    where, mode = _servers(entry.route), mode_name(entry.route.assignment.mode)
    old = " and ".join(f"{_servers(route)} {mode_name(route.assignment.mode)}" for route in reversed(entry.previous))
    moving = f"  from {old}" if old else ""
    return f"{where}  {mode}  {entry.phase.name.lower()}{moving}  since version {entry.route.epoch}"


def _servers(route: Route) -> str:
    return ",".join(route.assignment.servers)


def _route_as_json(route: Route) -> dict[str, Any]:
    return {"mode": route.assignment.mode.name, "servers": list(route.assignment.servers), "epoch": route.epoch}


def seconds(text: str) -> float:
    """Read a timeout of a change. Raises ArgumentTypeError, which argparse shows with the name of the option."""
    value = number(text)
    if not 0 < value <= CHANGE_TIMEOUT_S_MAX:
        raise argparse.ArgumentTypeError(f"more than 0 s expected, at most {CHANGE_TIMEOUT_S_MAX:g} s, not {text}")
    return value


def channel_argument(text: str) -> str:
    """Read the name of a channel. Raises ArgumentTypeError."""
    if not text:
        raise argparse.ArgumentTypeError("the name of a channel expected, not nothing")
    return text


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
