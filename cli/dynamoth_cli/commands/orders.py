"""What ``dynamoth pause``, ``resume`` and ``unpin`` have in common: orders that the plan keeps."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Mapping
from typing import Any

from dynamoth_balancer.install.orders import STORE_TIMEOUT_S
from dynamoth_cli.admin import ask_balancer
from dynamoth_cli.cluster_access import access_of, add_access
from dynamoth_cli.decisions import to_json

ANSWER_GRACE_S = 1.0
"""The balancer waits itself until its servers store the order, and we this much longer."""


def add_order(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of every order."""
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_access(parser)


def give_order(
    arguments: argparse.Namespace,
    command: str,
    wanted: Mapping[str, Any],
    describe: Callable[[Mapping[str, Any]], str],
) -> int:
    """Ask the balancer, and print the result. Raises RequestRefused where it refuses."""
    access = access_of(arguments)
    timeout_s = STORE_TIMEOUT_S + ANSWER_GRACE_S
    result = asyncio.run(ask_balancer(access.cluster, command, wanted, timeout_s=timeout_s, link=access.link))
    if arguments.json:
        sys.stdout.write(to_json(result))
    else:
        note = f"; {result['note']}" if result["note"] else ""
        sys.stdout.write(f"{describe(result)} (plan version {result['version']}){note}\n")
    return 0
