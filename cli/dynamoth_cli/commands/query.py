"""``dynamoth query``: registers standing queries, tries them, and shows what they do."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from typing import Any

from dynamoth.data.catalog import Catalog
from dynamoth.data.executions import (
    Progress,
    Window,
    executions_key,
    executions_server,
    parse_progress,
    state_key,
    store_progress_command,
)
from dynamoth.data.queries import write_query
from dynamoth.data.records import parse_tip, partition_name, partition_server, tip_command
from dynamoth.data.registrations import registration_keys
from dynamoth.errors import ConfigError, printable
from dynamoth_cli.data_admin import add_access, drop, find_dataset, read_definitions, register, with_servers
from dynamoth_client.runtime.data_links import DataLinks


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    helps = {
        "set": "register the datasets and queries of a TOML file, or change them",
        "list": "list the queries, and how they do",
        "show": "show a definition, its interests, and its executions",
        "try": "execute a query of a file on sample data, without any server (needs Spark)",
        "drop": "drop a query: its users get a last result that says so",
        "restart": "go on with what is stored from now on, where records were lost",
    }
    every = {name: commands.add_parser(name, help=text) for name, text in helps.items()}
    for name in ("set", "try"):
        every[name].add_argument("file", metavar="FILE", help="a TOML file with [datasets.NAME] and [queries.NAME]")
    every["set"].add_argument("--force", action="store_true", help="also if stored records do not fit any more")
    for name in ("show", "try", "drop", "restart"):
        every[name].add_argument("name", metavar="NAME", help="of the query")
    sample = "records of a dataset, as .jsonl, .csv or .parquet; once for each dataset"
    every["try"].add_argument("--sample", action="append", default=[], metavar="DATASET=FILE", help=sample)
    params = "parameters of an interest, as JSON; once for each interest"
    every["try"].add_argument("--params", action="append", default=[], metavar="JSON", help=params)
    for name in ("list", "show", "try"):
        every[name].add_argument("--json", action="store_true", help="print JSON")
    for name, each in every.items():
        if name != "try":
            add_access(each)


def run(arguments: argparse.Namespace) -> int:
    """Execute the command."""
    action: str = arguments.action
    if action == "set":
        given = read_definitions(arguments.file)
        _print(with_servers(arguments, lambda links: register(links, given, force=arguments.force)))
    elif action == "list":
        _list(arguments)
    elif action == "show":
        _show(arguments)
    elif action == "drop":
        version = with_servers(arguments, lambda links: drop(links, arguments.name, is_query=True))
        _print([f"query {arguments.name}: dropped, version {version}"])
    elif action == "restart":
        _restart(arguments)
    else:
        from dynamoth_analytics.cluster.trial import try_query

        return try_query(read_definitions(arguments.file), arguments)
    return 0


def _print(lines: list[str]) -> None:
    for line in lines:
        sys.stdout.write(f"{printable(line)}\n")


async def _state(links: DataLinks, name: str) -> dict[str, Any]:
    """Return what the data cluster says about a query; empty while none runs."""
    server = executions_server(name, links.ids)
    reply = await links.command(server, (b"GET", state_key(name)), repeats=True)
    state: dict[str, Any] = json.loads(reply) if reply is not None else {}
    return state


def _described(state: dict[str, Any]) -> str:
    if not state:
        return "not executed: no data cluster runs"
    if state.get("failure"):
        return f"FAILING: {state['failure']}"
    return f"execution {state['execution']}, {state['seconds']:.1f} s, {state['interests']} interests"


def _list(arguments: argparse.Namespace) -> None:
    async def gather(links: DataLinks) -> tuple[Catalog, dict[str, dict[str, Any]]]:
        catalog = await links.catalog()
        return catalog, {name: await _state(links, name) for name in catalog.queries}

    catalog, states = with_servers(arguments, gather)
    if arguments.json:
        values = {name: write_query(each) | {"state": states[name]} for name, each in catalog.queries.items()}
        sys.stdout.write(json.dumps({"queries": values, "faults": catalog.faults}) + "\n")
        return
    for name, each in sorted(catalog.queries.items()):
        period = "continuous" if each.is_continuous else f"{each.period_s} s"
        _print([f"{name:28} every {period:10} version {each.version:<3} {_described(states[name])}"])
    _print([f"{name:28} cannot be read: {fault}" for name, fault in catalog.faults.items()])
    if not catalog.queries:
        _print(["there are no queries: register some with `dynamoth query set FILE`"])


def _show(arguments: argparse.Namespace) -> None:
    async def gather(links: DataLinks) -> dict[str, Any]:
        catalog = await links.catalog()
        query = catalog.queries.get(arguments.name)
        if query is None:
            raise ConfigError(f"there is no query {arguments.name!r}: `dynamoth query list` shows those that there are")
        interests = [
            await links.command(id_, (b"HLEN", registration_keys(query.name)[0]), repeats=True) for id_ in links.ids
        ]
        return write_query(query) | {"registered": sum(interests), "state": await _state(links, query.name)}

    values = with_servers(arguments, gather)
    if arguments.json:
        sys.stdout.write(json.dumps(values) + "\n")
        return
    state = values.pop("state")
    for key, value in values.items():
        _print([f"{key:18} {value}"])
    _print([f"{'state':18} {_described(state)}"])
    for key in ("executions", "failures", "overruns", "ticks_missed", "result_sets", "rows", "too_large"):
        if state:
            _print([f"{key:18} {state.get('counts', {}).get(key, 0)}"])


def _restart(arguments: argparse.Namespace) -> None:
    """Have a query go on behind what is stored now."""

    async def restart(links: DataLinks) -> int:
        catalog = await links.catalog()
        query = catalog.queries.get(arguments.name)
        if query is None:
            raise ConfigError(f"there is no query {arguments.name!r}: `dynamoth query list` shows those that there are")
        tips: dict[str, int] = {}
        for dataset in (find_dataset(catalog, name) for name in query.datasets):
            for number in range(dataset.partitions):
                name = partition_name(dataset.stream, number)
                reply = await links.command(partition_server(name, links.ids), tip_command(name), repeats=True)
                tips[name] = parse_tip(reply)[0]
        server = executions_server(query.name, links.ids)
        before = parse_progress(await links.command(server, (b"GET", executions_key(query.name)), repeats=True))
        if before is None:
            raise ConfigError(f"query {query.name!r} was never executed: there is nothing to restart")
        end = {"tick_ms": before.window.end["tick_ms"], "offsets": tips}
        progress = Progress(before.execution + 1, Window(before.window.end, end), is_done=True)
        progress = replace(progress, checkpoint=before.checkpoint + 1)
        await links.command(server, store_progress_command(query.name, progress), repeats=True)
        return progress.execution

    execution = with_servers(arguments, restart)
    _print([f"query {arguments.name}: it goes on behind execution {execution} with what is stored from now on"])
    _print(["what was stored before and not executed yet is skipped"])
