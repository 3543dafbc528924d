"""``dynamoth explain``: why a channel is where it is and is not moved, and what a server carries and does."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dynamoth_cli.admin import ANSWER_TIMEOUT_S, ask_balancer
from dynamoth_cli.cluster_access import Access, access_of, add_access
from dynamoth_cli.decisions import SINGLE, describe_findings, describe_moves, name_of, to_json
from dynamoth_cli.numbers import counted, duration

MOVES_SHOWN_MAX = 5
BUSIEST_SHOWN_MAX = 10
"""Bounds of what is shown; ``--json`` has more."""

AMOUNTS = {
    "outgoing": ("outgoing_bytes_per_s", 1e6, "{:.2f} MB/s"),
    "cpu": ("cpu_ratio", 1.0, "{:.2f} cores"),
    "connections": ("connections", 1, "{:.0f}"),
    "memory": ("memory_bytes", 1e6, "{:.1f} MB"),
}
"""How much a server uses of a resource: the name in its status, a divisor and a format."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.description = (
        "Explain a channel: where it is, why and since when, its load and clients, its latest moves, and why the"
        " balancer does not move it now. Or a server: its load by resource, its slots and busiest channels, and what"
        " the balancer makes of it."
    )
    parser.add_argument("name", metavar="CHANNEL|SERVER", type=_name, help="a channel, or the id of a server")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--channel", dest="kind", action="store_const", const="channel", help="it is a channel")
    kind.add_argument("--server", dest="kind", action="store_const", const="server", help="it is a server")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_access(parser)


def _name(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("the name of a channel or the id of a server expected, not nothing")
    return text


def run(arguments: argparse.Namespace) -> int:
    """Print the explanation. Raises RequestRefused where there is none."""
    answer = asyncio.run(_ask(access_of(arguments), arguments))
    describe = describe_server if answer["kind"] == "server" else describe_channel
    sys.stdout.write(to_json(answer) if arguments.json else "\n".join([*describe(answer), ""]))
    return 0


async def _ask(access: Access, arguments: argparse.Namespace) -> Mapping[str, Any]:
    wanted = {"name": arguments.name.encode(errors="surrogateescape"), "kind": arguments.kind}
    return await ask_balancer(access.cluster, "explain", wanted, timeout_s=ANSWER_TIMEOUT_S, link=access.link)


# Channels.


def describe_channel(answer: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines about a channel."""
    mode = "" if answer["mode"] == SINGLE else f", {answer['mode']}"
    since = "" if answer["since_s"] is None else f", for {duration(answer['since_s'])}"
    yield (
        f"{name_of(answer['channel'])} is at {', '.join(answer['servers'])}{mode}, {answer['phase']}, since version"
        f" {answer['epoch']}{since}"
    )
    yield f"  why: {answer['why']} (slot {answer['slot']}, home {answer['home']})"
    if answer.get("pinned_to"):
        yield f"  pinned to {', '.join(answer['pinned_to'])}"
    for route in answer["previous"]:
        yield f"  comes from {', '.join(route['servers'])}"
    if answer["waiting_for"]:
        yield f"  waits for {', '.join(answer['waiting_for'])}"
    yield f"  load: {_describe_load(answer['load'])}"
    for move in answer["moves"][-MOVES_SHOWN_MAX:]:
        [line] = describe_moves([move])
        yield f"  {duration(move['age_s'])} ago: {line} ({move['goal']})"
    if answer["next_move"] is not None:
        [line] = describe_moves([answer["next_move"]])
        yield f"  next: {line}"
    yield from (f"  stays: {reason}" for reason in answer["stays"])
    yield from _describe_obstacles(answer["obstacles"])


def _describe_load(load: Mapping[str, Any]) -> str:
    parts = [
        f"{rate / 1e6:.3f} MB/s at {server}{_share(load['load_ratio'][server])}"
        for server, rate in load["outgoing_bytes_per_s"].items()
    ]
    if not load["reported"]:
        parts.append("agents do not name it in their reports: others are busier, or nobody uses it")
    if load["subscribers"] is not None:
        parts.append(
            f"{load['publications_per_s']:.1f} publications/s by {counted(load['publishers'], 'publisher')} to"
            f" {counted(round(load['subscribers']), 'subscriber')}"
        )
    return "; ".join(parts)


def _share(ratio: float | None) -> str:
    return "" if ratio is None else f" (load ratio {ratio:.3f})"


def _describe_obstacles(obstacles: Sequence[str]) -> Iterator[str]:
    yield from (f"  no plan now: {obstacle}" for obstacle in obstacles)


# Servers.


def describe_server(answer: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines about a server."""
    status = answer["status"]
    ratio = status["load_ratio"]
    load = "unknown load" if ratio is None else f"load ratio {ratio:.2f}"
    draining = ", being drained" if status["draining"] else ""
    yield f"{answer['server']} has {load}, {counted(answer['slots'], 'slot')}, agent {status['agent']}{draining}"
    for resource, used in status["resource_ratios"].items():
        name, size, form = AMOUNTS[resource]
        yield f"  {resource}: {used:.3f} ({form.format(status[name] / size)})"
    if answer["why_not"]:
        yield f"  takes part in no change: {answer['why_not']}"
    elif answer["why_not_to"]:
        yield f"  gets no channels: {answer['why_not_to']}"
    if (channels := status.get("channels")) is not None:
        yield f"  {counted(channels, 'active channel')}{'; the busiest:' if answer['busiest'] else ''}"
    for channel in answer["busiest"][:BUSIEST_SHOWN_MAX]:
        yield f"    {_share(channel['load_ratio']).strip()} {name_of(channel['channel'])}{_clients(channel)}"
    for made in answer["decisions"][-MOVES_SHOWN_MAX:]:
        measured = "" if made["measured"] is None else f", measured {made['measured']:.2f}"
        ratios = f"load ratio {made['before']:.2f}, predicted {made['predicted']:.2f}{measured}"
        yield f"  {duration(made['age_s'])} ago: decision {made['number']}, {made['progress']}: {ratios}"
    yield from (f"  {line}" for line in describe_findings(answer["findings"]))
    yield from (f"  next: {line}" for line in describe_moves(answer["next_moves"][:MOVES_SHOWN_MAX]))
    yield from _describe_obstacles(answer["obstacles"])


def _clients(channel: Mapping[str, Any]) -> str:
    if channel["subscribers"] is None:
        return ""
    subscribers = counted(round(channel["subscribers"]), "subscriber")
    return f": {channel['publications_per_s']:.1f} publications/s to {subscribers}"
