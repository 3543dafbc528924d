"""``dynamoth rebalance``: what the balancer would do now, with reasons and loads; or make it do so at once."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from dynamoth_cli.admin import ask_balancer
from dynamoth_cli.cluster_access import Access, access_of, add_access
from dynamoth_cli.commands.plan import ANSWER_GRACE_S, CHANGE_TIMEOUT_S, seconds
from dynamoth_cli.decisions import describe_findings, describe_moves, to_json
from dynamoth_cli.numbers import counted


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.description = (
        "Make the balancer decide now, though it is paused or waits between two plans, and wait until its moves have"
        " settled. With --dry-run, only show what it would do: which channels it would move where, why, and the load"
        " ratios before and after."
    )
    parser.add_argument("--dry-run", action="store_true", help="change nothing")
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=CHANGE_TIMEOUT_S,
        metavar="S",
        help="how long to wait until the moves have settled (default %(default)g s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_access(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the decision. Raises RequestRefused where the balancer refuses."""
    decision = asyncio.run(_ask(access_of(arguments), arguments))
    sys.stdout.write(to_json(decision) if arguments.json else "\n".join([*describe(decision), ""]))
    return 0


async def _ask(access: Access, arguments: argparse.Namespace) -> Mapping[str, Any]:
    wanted = {"dry_run": arguments.dry_run, "timeout_s": arguments.timeout}
    return await ask_balancer(
        access.cluster, "rebalance", wanted, timeout_s=arguments.timeout + ANSWER_GRACE_S, link=access.link
    )


def describe(decision: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines for people."""
    dry_run, number = decision["dry_run"], decision["moves"]
    if not number:
        yield "nothing to move"
    elif dry_run:
        yield f"the balancer would make {counted(number, 'move')}:"
    else:
        yield f"{counted(number, 'move')}, {decision['progress']} (decision {decision['number']}):"
    yield from (f"  {line}" for line in describe_moves(decision["first_moves"]))
    if (more := number - len(decision["first_moves"])) > 0:
        yield f"  {counted(more, 'more move')}"
    yield from (f"  {line}" for line in describe_findings(decision["findings"]))
    yield "load ratios:"
    yield from (f"  {id_} {_ratios(server)}" for id_, server in decision["servers"].items())
    if dry_run:
        yield from (f"not now: {obstacle}" for obstacle in decision["obstacles"])


def _ratios(server: Mapping[str, Any]) -> str:
    if server["load_ratio_before"] is None:
        return f"takes no part: {server['why_not']}"
    return f"{server['load_ratio_before']:.2f} -> {server['load_ratio_predicted']:.2f}"
