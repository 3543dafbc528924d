"""``dynamoth server``: which servers the cluster has; add one, drain one, remove one."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from dynamoth.errors import ConfigError
from dynamoth_cli.admin import ask_balancer, read_header
from dynamoth_cli.cluster_access import Access, access_of, add_access
from dynamoth_cli.numbers import counted
from dynamoth_link.urls import parse_server_url, redact

ANSWER_TIMEOUT_S = 15.0
"""Longer than the balancer tries a new server, and then waits until enough servers store a change."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    commands = parser.add_subparsers(dest="action", required=True)
    listing = commands.add_parser("list", help="show the servers of the plan, and what is left at those being drained")
    drain = commands.add_parser(
        "drain", help="have a server give up all channels and slots; 'list' shows what is left there"
    )
    undrain = commands.add_parser(
        "undrain", help="let a server that is being drained keep its channels, and get others"
    )
    add = commands.add_parser("add", help="add a server to the plan; start 'dynamoth agent' for it, too")
    add.add_argument("server", metavar="ID", help="a new id; never that of an earlier server")
    add.add_argument("to", metavar="URL", help="where agents, balancer and clients reach it: redis://host:port")
    remove = commands.add_parser(
        "remove", help="remove a drained server that has nothing left; then it and its agent can be stopped"
    )
    for each in (drain, undrain, remove):
        each.add_argument("server", metavar="ID", help="id of the server, as 'list' shows it")
    for each in (listing, add, drain, undrain, remove):
        each.add_argument("--json", action="store_true", help="print JSON")
        add_access(each)


def run(arguments: argparse.Namespace) -> int:
    """List servers, or have the balancer change one. Raises RequestRefused where it refuses."""
    access = access_of(arguments)
    result = asyncio.run(_list(access) if arguments.action == "list" else _change(access, arguments))
    if arguments.json:
        sys.stdout.write(json.dumps(result, indent=2) + "\n")
    elif arguments.action == "list":
        sys.stdout.write("".join(f"{line}\n" for line in describe_servers(result["servers"])))
    else:
        sys.stdout.write(f"{describe_change(result)}\n")
    return 0


async def _list(access: Access) -> dict[str, Any]:
    """Return the servers of the stored plan, with what the balancer says of each."""
    plan = await read_header(access.cluster, access.link)
    status = await ask_balancer(access.cluster, "status", timeout_s=ANSWER_TIMEOUT_S, link=access.link)
    known = status["servers"]
    return {
        "version": plan.version,
        "servers": {
            id_: {"url": redact(server.url), **_state(known.get(id_, {}))} for id_, server in plan.servers.items()
        },
    }


def _state(server: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: server.get(name)
        for name in ("draining", "link", "agent", "load_ratio", "channels_left", "channels_named", "slots_left")
    }


async def _change(access: Access, arguments: argparse.Namespace) -> Mapping[str, Any]:
    wanted = {"action": arguments.action, "server": arguments.server}
    if arguments.action == "add":
        address = parse_server_url(arguments.to)
        if address.has_credentials:
            raise ConfigError(
                f"{address.redacted()} has credentials, and the plan shows URLs to every client: leave them out, and"
                " set link.username and link.password of the daemons"
            )
        wanted["url"] = address.url()
    return await ask_balancer(access.cluster, "server", wanted, timeout_s=ANSWER_TIMEOUT_S, link=access.link)


def describe_servers(servers: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for each server."""
    width = max(map(len, servers), default=0)
    for id_, server in servers.items():
        yield f"{id_:{width}}  {server['url']}  {', '.join(_words(server))}"


def _words(server: Mapping[str, Any]) -> Iterator[str]:
    yield f"link {server['link'] or 'unknown'}"
    yield f"agent {server['agent'] or 'unknown'}"
    if server["draining"]:
        channels = server["channels_named"] if server["channels_left"] is None else server["channels_left"]
        numbers = {"channel": channels or 0, "slot": server["slots_left"] or 0}
        left = " and ".join(counted(number, what) for what, number in numbers.items() if number)
        yield f"draining: {left or 'nothing'} left"


def describe_change(result: Mapping[str, Any]) -> str:
    """Return in words what was changed."""
    server, action = result["server"], result["action"]
    if result["note"]:
        return f"{server}: {result['note']}"
    return {
        "add": f"{server} is in the plan: it gets slots when its agent reports. Start 'dynamoth agent --server"
        f" {server}' with the configuration of the other agents, which need not name it yet",
        "drain": f"{server} is being drained: 'dynamoth server list' shows what is left there",
        "undrain": f"{server} is not drained any more: it takes channels again, by load",
        "remove": f"{server} is not in the plan any more: stop it and its agent, and take it out of the configuration",
    }[action]
