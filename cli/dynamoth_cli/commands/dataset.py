"""``dynamoth dataset``: registers datasets, loads records, and shows what is stored."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

from dynamoth.data.catalog import Catalog
from dynamoth.data.datasets import DEAD_SUFFIX, BadRecord, Dataset, write_dataset
from dynamoth.data.records import (
    RECORDS_PER_COMMAND_MAX,
    append_records_command,
    finish_load_command,
    latest_command,
    parse_latest,
    parse_state,
    partition_keys,
    partition_name,
    partition_of,
    partition_server,
    state_command,
)
from dynamoth.errors import ConfigError, printable
from dynamoth_cli.data_admin import (
    add_access,
    ago,
    drop,
    find_dataset,
    forget_load,
    log_servers,
    print_json,
    put,
    read_definitions,
    register,
    with_servers,
)
from dynamoth_client.datasets import LogError, SyncDatasetWriter
from dynamoth_client.runtime.data_links import DataLinks
from dynamoth_client.runtime.record_files import read_records

SHOWN_REFUSALS = 5
BATCH = 2000


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    commands = parser.add_subparsers(dest="action", title="commands", required=True)
    helps = {
        "set": "register the datasets and queries of a TOML file, or change them",
        "list": "list the datasets",
        "show": "show a definition, and what is stored",
        "load": "store the records of files (JSON lines, CSV, Parquet); a static dataset is replaced",
        "drop": "drop a dataset; what is archived stays",
        "tail": "show the last records",
        "dead": "show the last records that were refused, and why",
    }
    every = {name: commands.add_parser(name, help=text) for name, text in helps.items()}
    every["set"].add_argument("file", metavar="FILE", help="a TOML file with [datasets.NAME] and [queries.NAME]")
    every["set"].add_argument("--force", action="store_true", help="also if stored records do not fit any more")
    for name in ("show", "load", "drop", "tail", "dead"):
        every[name].add_argument("name", metavar="NAME", help="of the dataset")
    every["load"].add_argument("files", metavar="FILE", nargs="+", help=".jsonl, .csv or .parquet")
    every["load"].add_argument("--empty", action="store_true", help="of a static dataset: files may have no records")
    for name in ("tail", "dead"):
        every[name].add_argument("--last", type=int, default=20, metavar="N", help="how many (default %(default)s)")
    for each in every.values():
        each.add_argument("--json", action="store_true", help="print JSON")
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
        version = with_servers(arguments, lambda links: drop(links, arguments.name, is_query=False))
        if arguments.json:
            print_json({"dropped": arguments.name, "version": version})
        else:
            _print([f"dataset {arguments.name}: dropped, version {version}; what is archived stays"])
    elif action == "load":
        return _load(arguments)
    else:
        _tail(arguments)
    return 0


def _print(lines: list[str]) -> None:
    for line in lines:
        sys.stdout.write(f"{printable(line)}\n")


# Showing.


async def _stored(links: DataLinks, dataset: Dataset) -> tuple[int, int]:
    """Return how many records of a dataset are at Redis, and how often its servers may have lost some."""
    records = restarts = 0
    for number in range(dataset.partitions):
        name = partition_name(dataset.stream, number)
        server = partition_server(name, links.ids)
        records += await links.command(server, (b"XLEN", partition_keys(name)[1]), repeats=True)
        restarts += parse_state(await links.command(server, state_command(name), repeats=True)).restarts
    return records, restarts


def _list(arguments: argparse.Namespace) -> None:
    async def gather(links: DataLinks) -> tuple[Catalog, dict[str, tuple[int, int]]]:
        catalog = await links.catalog()
        return catalog, {name: await _stored(links, each) for name, each in catalog.datasets.items()}

    catalog, stored = with_servers(arguments, gather)
    if arguments.json:
        values = {name: write_dataset(each) | {"stored": stored[name][0]} for name, each in catalog.datasets.items()}
        print_json({"datasets": values, "faults": catalog.dataset_faults})
        return
    for name, each in sorted(catalog.datasets.items()):
        fields = ", ".join(f"{field.name} {field.type}{'?' * field.is_optional}" for field in each.fields)
        _print([f"{name:24} {each.kind:7} {stored[name][0]:>9} at Redis  ({fields})"])
    _print([f"{name:24} cannot be read: {fault}" for name, fault in catalog.dataset_faults.items()])
    if not catalog.datasets:
        _print(["there are no datasets: register some with `dynamoth dataset set FILE`"])


def _show(arguments: argparse.Namespace) -> None:
    async def gather(links: DataLinks) -> tuple[Dataset, tuple[int, int], int]:
        dataset = find_dataset(await links.catalog(), arguments.name)
        dead = (await _stored(links, find_dataset(await links.catalog(), _dead_name(arguments.name))))[0]
        return dataset, await _stored(links, dataset), dead

    dataset, (records, restarts), dead = with_servers(arguments, gather)
    values = write_dataset(dataset) | {"stored": records, "restarts": restarts, "dead_letters": dead}
    if arguments.json:
        print_json(values)
        return
    for key, value in values.items():
        _print([f"{key:18} {value}"])
    if restarts:
        _print([f"a log server has restarted {restarts} times: records that it had not written to disk are lost"])


def _dead_name(name: str) -> str:
    return name if name.endswith(DEAD_SUFFIX) else name + DEAD_SUFFIX


def _tail(arguments: argparse.Namespace) -> None:
    name = _dead_name(arguments.name) if arguments.action == "dead" else arguments.name

    async def gather(links: DataLinks) -> list[tuple[int, bytes]]:
        dataset = find_dataset(await links.catalog(), name)
        found: list[tuple[int, bytes]] = []
        for number in range(dataset.partitions):
            partition = partition_name(dataset.stream, number)
            command = latest_command(partition, max(1, arguments.last))
            reply = await links.command(partition_server(partition, links.ids), command, repeats=True)
            found += [(each.arrived_ms, each.value) for each in parse_latest(reply)]
        return sorted(found)[-arguments.last :]

    for arrived_ms, value in with_servers(arguments, gather):
        if arguments.json:
            sys.stdout.write(value.decode() + "\n")
        elif arguments.action == "dead":
            letter = json.loads(value)
            text = f"{letter['reason']}  (from {letter['source']})  {letter['record'][:200]}"
            _print([f"{ago(arrived_ms):>8} ago  {_one_line(text)}"])
        else:
            _print([f"{ago(arrived_ms):>8} ago  {value.decode()}"])


def _one_line(text: str) -> str:
    return text.replace("\n", "\\n")  # others have written it, and it is to look like no line of ours


# Loading.


def _load(arguments: argparse.Namespace) -> int:
    urls, options, durable = log_servers(arguments)
    dataset = with_servers(arguments, lambda links: _found(links, arguments.name))
    for path in arguments.files:
        if not Path(path).is_file():
            raise ConfigError(f"there is no file {path}")
    if dataset.kind == "static":
        return _load_static(arguments, dataset)
    counts = {"stored": 0, "duplicate": 0, "refused": 0}
    with SyncDatasetWriter(urls, options=options, durable=durable) as writer:
        for path in arguments.files:
            _load_file(writer, dataset, path, counts)
    if arguments.json:
        print_json(counts)
    else:
        _print([f"{counts['stored']} stored, {counts['duplicate']} duplicates, {counts['refused']} refused"])
    if counts["refused"] and not arguments.json:
        _print([f"`dynamoth dataset dead {dataset.name}` shows those that were refused"])
    return 1 if counts["refused"] else 0


def _load_file(writer: SyncDatasetWriter, dataset: Dataset, path: str, counts: dict[str, int]) -> None:
    """Store the records of a file, and count. Raises LogError, which says where to go on, and ConfigError."""
    records, number = read_records(Path(path), dataset), 0
    while True:
        try:
            batch = list(islice(records, BATCH))
        except ConfigError as error:
            raise ConfigError(f"{error}; {number} records of it are stored or refused") from error
        if not batch:
            return
        try:
            results = writer.append_each(dataset.name, batch, source=f"file {path}")
        except LogError as error:
            raise _stopped(dataset, path, number, 0, error) from error
        failed = [index for index, each in enumerate(results) if isinstance(each, LogError)]
        for index, each in enumerate(results):
            if isinstance(each, LogError):
                continue
            counts[each.outcome] += 1
            if each.outcome == "refused" and counts["refused"] <= SHOWN_REFUSALS:
                sys.stderr.write(printable(f"dynamoth: {path}: record {number + index + 1}: {each.reason}") + "\n")
        if failed:
            first = results[failed[0]]
            assert isinstance(first, LogError), "it has failed"
            behind = len(results) - failed[0] - len(failed)
            raise _stopped(dataset, path, number + failed[0], behind, first)
        number += len(batch)


def _stopped(dataset: Dataset, path: str, number: int, behind: int, error: LogError) -> LogError:
    """Return an error that says which records of a file are done.

    Args:
        dataset: whose.
        path: of the file.
        number: so many records at its beginning are done.
        behind: so many behind these are done, too, in other partitions.
        error: of the next one.

    """
    text = f"{number} records of {path} are stored or refused, then: {error}; go on behind record {number}"
    if dataset.id and dataset.duplicate_s:
        text += ", or load the file again: what is stored is not stored twice"
    elif behind:
        text += f"; {behind} records behind that one are stored, too"
    return type(error)(text)


async def _found(links: DataLinks, name: str) -> Dataset:
    return find_dataset(await links.catalog(), name)


def _load_static(arguments: argparse.Namespace, before: Dataset) -> int:
    """Store all records under new names, and then have the definition name these: queries see the old ones, or all."""
    dataset = replace(before, loaded=before.loaded + 1, version=before.version + 1)
    by_partition: dict[int, list[tuple[bytes, str]]] = {number: [] for number in range(dataset.partitions)}
    count = 0
    for path in arguments.files:
        for number, record in enumerate(read_records(Path(path), dataset), start=1):
            try:
                value, place, _ = dataset.normalize(record, 0.0)
            except BadRecord as error:
                raise ConfigError(f"{path}: record {number}: {error}; nothing was loaded") from error
            by_partition[partition_of(dataset, place, count)].append((value, ""))
            count += 1
    if not count and not arguments.empty:
        raise ConfigError("the files have no records; nothing was loaded: to empty the dataset, add --empty")
    for number, records in by_partition.items():
        if len(records) > dataset.waiting_max:
            raise ConfigError(
                f"partition {number} would have {len(records)} records, and waiting_max is {dataset.waiting_max}: raise"
                " `waiting_max` of the dataset; nothing was loaded"
            )

    async def store(links: DataLinks) -> None:
        for number, records in by_partition.items():
            name = partition_name(dataset.stream, number)
            server = partition_server(name, links.ids)
            await links.command(server, (b"DEL", *partition_keys(name)), repeats=True)  # of a load that has failed
            for begin in range(0, len(records), RECORDS_PER_COMMAND_MAX):
                part = records[begin : begin + RECORDS_PER_COMMAND_MAX]
                await links.command(server, append_records_command(dataset, number, part, ""), repeats=False)
            await links.command(server, finish_load_command(name, len(records)), repeats=True)
        await put(links, dataset)
        await forget_load(links, before)

    with_servers(arguments, store)
    if arguments.json:
        print_json({"stored": count, "loaded": dataset.loaded})
        return 0
    _print([f"{count} stored; queries see them from their next execution on"])
    return 0
