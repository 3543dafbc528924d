"""``dynamoth plan compatibility``: which channels plain Redis clients share with those of Dynamoth, by pattern."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from dynamoth.plan.plan import Plan
from dynamoth_balancer.admin.compatibility import describe_rules
from dynamoth_cli.admin import ask_balancer, read_header
from dynamoth_cli.cluster_access import Access, access_of, add_access
from dynamoth_cli.numbers import channel_name

CHANGE_TIMEOUT_S = 10.0
"""The balancer answers when every agent has acknowledged the rules, or says after a few seconds who has not."""

_DESCRIPTION = (
    "Rules for channels that plain Redis clients use, too, in the order in which they are looked at; the first one that"
    " matches holds. Messages on channels of a plain rule carry no envelope, and the balancer leaves these channels at"
    " the server of the rule. See docs/migrating.md."
)

_ACTIONS = {
    "list": "show the rules as the servers store them; needs no balancer",
    "add": "add a plain rule before the others, or change the one with this pattern",
    "lift": "take 'plain' away, when no plain Redis client uses these channels any more; they stay where they are until"
    " the balancer, or you, move them",
    "remove": "remove a rule",
}


def configure(commands: Any) -> None:
    """Add the command to those of ``dynamoth plan``."""
    parser = commands.add_parser("compatibility", help="channels that plain Redis clients use, too")
    parser.description = _DESCRIPTION
    actions = parser.add_subparsers(dest="compatibility", required=True, metavar="{list,add,lift,remove}")
    for name, text in _ACTIONS.items():
        action: argparse.ArgumentParser = actions.add_parser(
            name, help=text, description=f"{text[0].upper()}{text[1:]}."
        )
        if name != "list":
            action.add_argument("pattern", metavar="PATTERN", help="as for PSUBSCRIBE; quote it for the shell")
        if name == "add":
            action.add_argument("--server", metavar="SERVER", required=True, help="id of the server that they know")
        action.add_argument("--json", action="store_true", help="print JSON")
        add_access(action)


def run(arguments: argparse.Namespace) -> int:
    """Show or change the rules. Raises RequestRefused where the balancer refuses."""
    access = access_of(arguments)
    if arguments.compatibility == "list":
        plan: Plan = asyncio.run(read_header(access.cluster, access.link))
        result: Mapping[str, Any] = {"version": plan.version, "rules": describe_rules(plan.compatibility)}
    else:
        result = asyncio.run(_change(access, arguments))
    if arguments.json:
        shown = {"version": result["version"], "rules": rules_as_json(result["rules"])}
        sys.stdout.write(json.dumps(shown, indent=2) + "\n")
    else:
        sys.stdout.write("\n".join([*describe(result["rules"]), f"(plan version {result['version']})", ""]))
    return 0


def rules_as_json(rules: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return rules as JSON has them."""
    return [{**rule, "pattern": channel_name(rule["pattern"])} for rule in rules]


def describe(rules: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a line for each rule."""
    lines = [
        f"compatibility: {channel_name(rule['pattern'])} at {rule['server']},"
        f" {'plain' if rule['plain'] else 'with envelopes'}"
        for rule in rules
    ]
    return lines or ["compatibility: no rules"]


async def _change(access: Access, arguments: argparse.Namespace) -> Mapping[str, Any]:
    wanted: dict[str, Any] = {
        "action": arguments.compatibility,
        "pattern": arguments.pattern.encode(errors="surrogateescape"),
    }
    if arguments.compatibility == "add":
        wanted |= {"server": arguments.server, "plain": True}
    return await ask_balancer(access.cluster, "compatibility", wanted, timeout_s=CHANGE_TIMEOUT_S, link=access.link)
