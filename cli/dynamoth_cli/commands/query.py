"""``dynamoth query``: registers standing queries, tries them, and shows what they do."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from dynamoth.data.catalog import Catalog
from dynamoth.data.datasets import Dataset
from dynamoth.data.progress import (
    QueryStatus,
    parse_status,
    query_server,
    restart_key,
    status_key,
)
from dynamoth.data.queries import StandingQuery, write_query
from dynamoth.data.records import parse_state, partition_names, partition_server, state_command
from dynamoth.data.registrations import registration_keys
from dynamoth.errors import ConfigError, printable
from dynamoth_cli.data_admin import (
    add_access,
    ago,
    drop,
    print_json,
    read_definitions,
    read_progress,
    register,
    with_servers,
)
from dynamoth_client.runtime.data_links import DataLinks

QUIET_S = 60.0
QUIET_PERIODS = 3
"""A query that was not executed for both of these, though records wait, may have no data cluster."""

_IS_IT_RUNNING = "does `dynamoth data-cluster` run? If so, its log says why they wait"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    commands = parser.add_subparsers(dest="action", title="commands", required=True)
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
    unused = "accepted as with the other commands, and not read: a query is tried without any server"
    every["try"].add_argument("--config", metavar="FILE", help=unused)
    for name, each in every.items():
        each.add_argument("--json", action="store_true", help="print JSON")
        if name != "try":
            add_access(each)


def run(arguments: argparse.Namespace) -> int:
    """Execute the command."""
    action: str = arguments.action
    if action == "set":
        given = read_definitions(arguments.file)
        done = with_servers(arguments, lambda links: register(links, given, force=arguments.force))
        done.write(as_json=arguments.json)
    elif action == "list":
        _list(arguments)
    elif action == "show":
        _show(arguments)
    elif action == "drop":
        version = with_servers(arguments, lambda links: drop(links, arguments.name, is_query=True))
        if arguments.json:
            print_json({"dropped": arguments.name, "version": version})
        else:
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


@dataclass(frozen=True)
class _State:
    """How a query does."""

    #: What the data cluster has said last; None if it never has.
    status: QueryStatus | None
    #: The records that wait to be executed; counted only where nothing was executed for a while.
    waiting: int = 0


async def _state(links: DataLinks, catalog: Catalog, query: StandingQuery) -> _State:
    server = query_server(query.name, links.ids)
    status = parse_status(await links.command(server, (b"GET", status_key(query.name)), repeats=True))
    if status is None or (status.state == "dropped" and status.version < query.version):
        return _State(None)
    if status.state != "running":
        return _State(status)
    quiet_s = time.time() - (status.ended_ms or status.since_ms) / 1000
    if quiet_s < max(QUIET_S, QUIET_PERIODS * query.period_s):
        return _State(status)
    return _State(status, await _waiting(links, catalog.datasets.get(query.on), query))


async def _waiting(links: DataLinks, dataset: Dataset | None, query: StandingQuery) -> int:
    """Return how many records of its dataset a query has not executed yet."""
    progress = await read_progress(links, query.name)
    if dataset is None or progress is None:
        return 0
    done = (progress.window.end if progress.is_done else progress.window.start)["offsets"]
    waiting = 0
    for name in partition_names(dataset):
        reply = await links.command(partition_server(name, links.ids), state_command(name), repeats=True)
        partition = parse_state(reply)
        waiting += partition.count(done.get(name, 0), partition.offset)
    return waiting


def _described(state: _State) -> str:
    status = state.status
    if status is None:
        return "no data cluster has begun to execute it: `dynamoth data-cluster` is still starting, or does not run"
    if status.state != "running":
        return f"{status.state} for {ago(status.since_ms)}: {status.reason}" if status.reason else status.state
    hint = f"; {state.waiting} records wait: {_IS_IT_RUNNING}" if state.waiting else ""
    if not status.execution:
        return f"running, not executed yet{hint}"
    last = f"execution {status.execution} {ago(status.ended_ms)} ago, in {status.seconds:.1f} s"
    return f"{last}, {status.interests} interests{hint}"


def _list(arguments: argparse.Namespace) -> None:
    async def gather(links: DataLinks) -> tuple[Catalog, dict[str, _State]]:
        catalog = await links.catalog()
        return catalog, {name: await _state(links, catalog, each) for name, each in catalog.queries.items()}

    catalog, states = with_servers(arguments, gather)
    if arguments.json:
        queries = catalog.queries.items()
        values = {name: write_query(each) | {"status": _as_data(states[name].status)} for name, each in queries}
        print_json({"queries": values, "faults": catalog.query_faults})
        return
    for name, each in sorted(catalog.queries.items()):
        period = "continuous" if each.is_continuous else f"every {each.period_s} s"
        _print([f"{name:28} {period:14} version {each.version:<3} {_described(states[name])}"])
    _print([f"{name:28} cannot be read: {fault}" for name, fault in catalog.query_faults.items()])
    if not catalog.queries:
        _print(["there are no queries: register some with `dynamoth query set FILE`"])


def _as_data(status: QueryStatus | None) -> dict[str, Any] | None:
    return None if status is None else asdict(status)


def _show(arguments: argparse.Namespace) -> None:
    async def gather(links: DataLinks) -> tuple[dict[str, Any], _State]:
        catalog = await links.catalog()
        query = _find(catalog, arguments.name)
        interests = [
            await links.command(id_, (b"HLEN", registration_keys(query.name)[0]), repeats=True) for id_ in links.ids
        ]
        return write_query(query) | {"registered": sum(interests)}, await _state(links, catalog, query)

    values, state = with_servers(arguments, gather)
    status = state.status
    if arguments.json:
        print_json(values | {"status": _as_data(status)})
        return
    for key, value in values.items():
        _print([f"{key:18} {value}"])
    _print([f"{'status':18} {_described(state)}"])
    for key, count in ({} if status is None else status.counts).items():
        _print([f"{key:18} {count}"])


def _find(catalog: Catalog, name: str) -> StandingQuery:
    query = catalog.queries.get(name)
    if query is None:
        raise ConfigError(f"there is no query {name!r}: `dynamoth query list` shows those that there are")
    return query


def _restart(arguments: argparse.Namespace) -> None:
    """Order a query to go on behind what is stored now."""

    async def order(links: DataLinks) -> None:
        query = _find(await links.catalog(), arguments.name)
        if await read_progress(links, query.name) is None:
            raise ConfigError(f"query {query.name!r} was never executed: there is nothing to restart")
        server, now = query_server(query.name, links.ids), b"%d" % round(time.time() * 1000)
        await links.command(server, (b"SET", restart_key(query.name), now), repeats=True)

    with_servers(arguments, order)
    if arguments.json:
        print_json({"restarted": arguments.name})
        return
    _print([f"query {arguments.name}: ordered; the data cluster goes on with what is stored from then on"])
    _print(["what was stored before and is not executed yet is skipped, and written down as skipped"])
