"""``dynamoth status``: servers, agents, load and balancer, as the servers and the balancer tell them."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from dynamoth.errors import ClusterUnavailable, RequestRefused
from dynamoth.events import ErrorReply
from dynamoth.names import AGENT_CHANNEL
from dynamoth.stored_plan import READ_HEADER, parse_header
from dynamoth_cli.admin import ANSWER_TIMEOUT_S, add_url, ask_balancer, cluster_of, read_header
from dynamoth_cli.plan import channel_name
from dynamoth_link.errors import LinkError
from dynamoth_link.query import query
from dynamoth_link.urls import ClusterAddress, ServerAddress, parse_server_url


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_url(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Show how everything is. The exit code is 1 when something that should be there is not."""
    status = asyncio.run(read_status(cluster_of(arguments)))
    if arguments.json:
        sys.stdout.write(json.dumps(status, indent=2, default=_as_json) + "\n")
    else:
        show(status, Console())
    return 1 if status["problems"] else 0


async def read_status(cluster: ClusterAddress) -> dict[str, Any]:
    """Return how everything is: ``version``, ``servers``, ``balancer`` (what it says, or None), ``problems`` (texts).

    Raises:
        ClusterUnavailable: no server answers, or none stores a plan.

    """
    plan = await read_header(cluster)
    addresses = {id_: cluster.merge(parse_server_url(server.url)) for id_, server in plan.servers.items()}
    answers = await asyncio.gather(*(_server(id_, address) for id_, address in addresses.items()))
    servers = dict(zip(addresses, answers, strict=True))
    problems = [problem for server in answers for problem in server["problems"]]
    try:
        balancer: Mapping[str, Any] | None = await ask_balancer(cluster, "status", timeout_s=ANSWER_TIMEOUT_S)
    except (ClusterUnavailable, RequestRefused) as error:
        balancer = None
        problems.append(str(error))
    for id_, server in servers.items():
        server["load"] = balancer["servers"].get(id_, {}) if balancer else {}
    return {"version": plan.version, "servers": servers, "balancer": balancer, "problems": problems}


async def _server(id_: str, address: ServerAddress) -> dict[str, Any]:
    """Ask one server itself."""
    found: dict[str, Any] = {"url": address.redacted(), "agents": None, "stored_version": None, "problems": []}
    commands = (b"PUBSUB", b"NUMSUB", AGENT_CHANNEL), READ_HEADER
    try:
        agents, stored = await query(address, *commands, timeout_s=ANSWER_TIMEOUT_S)
    except LinkError as error:
        found["problems"].append(f"server {id_}: {error}")
        return found
    if isinstance(agents, ErrorReply) or isinstance(stored, ErrorReply):
        found["problems"].append(f"server {id_}: {agents if isinstance(agents, ErrorReply) else stored}")
        return found
    header = parse_header(stored, None)
    found["agents"] = agents[1]
    found["stored_version"] = None if header is None else header.version
    if agents[1] != 1:
        cure = f"start 'dynamoth node --server {id_}'" if agents[1] == 0 else "stop all but one"
        found["problems"].append(f"server {id_}: {agents[1]} agents, not 1: {cure}")
    if header is None:
        found["problems"].append(f"server {id_} stores no plan: the balancer writes it when it gets there")
    return found


def show(status: Mapping[str, Any], console: Console) -> None:
    """Print a status for people."""
    table = Table("server", "url", "agents", "plan", "load ratio", "out MB/s", "messages/s", "channels", "CPU")
    for id_, server in status["servers"].items():
        load = server["load"]
        table.add_row(
            id_,
            server["url"],
            _shown(server["agents"]),
            _shown(server["stored_version"]),
            _shown(load.get("load_ratio"), "{:.2f}"),
            _shown(load.get("outgoing_bytes_per_s"), "{:.2f}", 1e-6),
            _shown(load.get("messages_per_s"), "{:.0f}"),
            _shown(load.get("channels")),
            _shown(load.get("cpu_ratio"), "{:.2f}"),
        )
    console.print(table)
    balancer = status["balancer"]
    if balancer is not None:
        paused = ", paused" if balancer["paused"] else ""
        console.print(
            f"plan version {status['version']}; balancer: {balancer['stage']}{paused},"
            f" {balancer['moves_settled']} moves settled, {balancer['in_transition']} channels in transition",
            highlight=False,
        )
    for problem in status["problems"]:
        console.print(f"[bold red]![/] {problem}", highlight=False)


def _shown(value: Any, form: str = "{}", factor: float = 1) -> str:
    return "-" if value is None else form.format(value if factor == 1 else value * factor)


def _as_json(value: object) -> str:
    return channel_name(value) if isinstance(value, bytes) else str(value)
