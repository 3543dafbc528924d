"""What `dynamoth dataset` and `dynamoth query` share: definitions in files and in the catalog, and what is stored."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
import tomllib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from dynamoth.data.catalog import (
    DATASETS_KEY,
    QUERIES_KEY,
    Catalog,
    Entry,
    catalog_of,
    entry_of,
    put_command,
    stored_value,
)
from dynamoth.data.datasets import DEAD_SUFFIX, PARTITIONS_MAX, Dataset, read_dataset
from dynamoth.data.progress import (
    Progress,
    WindowEnd,
    begin_again_command,
    begin_progress_command,
    latest_progress,
    parse_progress,
    progress_key,
    query_server,
)
from dynamoth.data.queries import KEEP_S_MIN, StandingQuery, canonical_values, read_query
from dynamoth.data.records import (
    finish_load_command,
    parse_state,
    partition_keys,
    partition_name,
    partition_names,
    partition_server,
    state_command,
)
from dynamoth.data.registrations import parse_registration, registration_keys
from dynamoth.errors import ConfigError, printable
from dynamoth_cli.settings import add_section, link_options, load_settings
from dynamoth_cli.text_files import UnreadableFile, read_text_file
from dynamoth_client.runtime.data_links import DataLinks, run_all
from dynamoth_link.urls import InvalidUrl, parse_log_servers

OLD_LOAD_S = 3600
"""The records of a former load are forgotten after this time: queries that run may still read them."""

_T = TypeVar("_T")

Definition = Dataset | StandingQuery

_NOTHING = Entry(0, None)
"""In place of the entry of a name that the catalog does not have."""


def add_access(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say where the log servers are."""
    add_section(parser, "data_cluster", "link")
    parser.add_argument(
        "--logs", metavar="SERVERS", help="the log servers, as ID=URL separated by spaces; else those of --config"
    )


def log_servers(arguments: argparse.Namespace) -> tuple[dict[str, str], Any, bool]:
    """Return the log servers, URLs by id, the options of links, and whether they lose nothing. Raises ConfigError."""
    loaded = load_settings(arguments)
    config = loaded.config
    text = arguments.logs or config.data_cluster.logs or config.broker.logs
    try:
        addresses = parse_log_servers(text)
    except InvalidUrl as error:
        raise ConfigError(f"logs: {error}") from error
    if not addresses:
        raise ConfigError(
            "the log servers are not known: give --logs 'l1=redis://HOST:PORT', or --config with data_cluster.logs"
        )
    urls = {id_: address.url() for id_, address in addresses.items()}
    durable = config.data_cluster.log_durable or config.broker.log_durable
    return urls, link_options(loaded, "dynamoth-cli", tuple(addresses.values())), durable


def with_servers(arguments: argparse.Namespace, work: Callable[[DataLinks], Awaitable[_T]]) -> _T:
    """Do something with links to the log servers. Raises ConfigError, LogUnavailable."""
    urls, options, _ = log_servers(arguments)

    async def run() -> _T:
        links = DataLinks(urls, options, durable=True)  # a reader needs no run id, and scripts ask for it below
        links.open()
        try:
            return await work(links)
        finally:
            await links.close()

    return asyncio.run(run())


@dataclass(frozen=True)
class Definitions:
    """What a file defines."""

    datasets: Mapping[str, Dataset]
    queries: Mapping[str, StandingQuery]


def read_definitions(path: str) -> Definitions:
    """Read a TOML file with tables ``[datasets.NAME]`` and ``[queries.NAME]``. Raises ConfigError."""
    try:
        values = tomllib.loads(read_text_file(path))
    except UnreadableFile as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is no TOML: {error}") from error
    for name in values:
        if name not in ("datasets", "queries"):
            raise ConfigError(f"{path}: {name!r} is unknown: a file has [datasets.NAME] and [queries.NAME]")
    try:
        datasets = {name: read_dataset(name, each) for name, each in values.get("datasets", {}).items()}
        queries = {name: read_query(name, each) for name, each in values.get("queries", {}).items()}
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    for query in queries.values():
        if query.keep_s < KEEP_S_MIN:
            raise ConfigError(f"{path}: query {query.name!r}: keep_s is at least {KEEP_S_MIN}, not {query.keep_s:g}")
    if not datasets and not queries:
        raise ConfigError(f"{path} defines nothing: it has neither [datasets.NAME] nor [queries.NAME]")
    return Definitions(datasets, queries)


async def put(links: DataLinks, definition: Definition) -> None:
    """Store a definition at every log server. Raises LogUnavailable; it may be stored at some of them then."""
    key = DATASETS_KEY if isinstance(definition, Dataset) else QUERIES_KEY
    await put_entry(links, key, definition.name, entry_of(definition))


async def put_entry(links: DataLinks, key: bytes, name: str, entry: Entry) -> None:
    """Store an entry of the catalog at every log server. Raises LogUnavailable, and ConfigError for a lost race.

    One server comes after the other, for everybody in the same order: who loses a race has stored nothing.
    """
    for id_ in sorted(links.ids):
        reply = await links.command(id_, put_command(key, name, entry), repeats=True)
        if reply not in (None, stored_value(entry)):  # a command that is repeated finds its own value
            raise ConfigError(f"{name!r} was changed by somebody else just now: run it again")


def check_change(before: Dataset, after: Dataset) -> None:
    """Check that stored records belong to a changed dataset, too. Raises ConfigError."""
    where = f"dataset {after.name!r} is registered"
    for setting in ("kind", "key", "partitions"):
        if getattr(before, setting) != getattr(after, setting):
            what = "number of partitions" if setting == "partitions" else setting
            raise ConfigError(f"{where} with another {what}: drop it first, or --force, which leaves records behind")
    for field in before.fields:
        new = after.by_name.get(field.name)
        if new is None or new.type != field.type:
            raise ConfigError(
                f"{where} with the field {field.name!r} of type {field.type}: add fields, and keep others"
            )
    for field in after.fields:
        if field.name not in before.by_name and not field.is_optional:
            raise ConfigError(f"{where} without the field {field.name!r}: a new one is optional ('{field.type}?')")


def check_queries(queries: Mapping[str, StandingQuery], datasets: Mapping[str, Dataset]) -> list[str]:
    """Compile queries, where Spark is installed; return warnings. Raises ConfigError."""
    try:
        from dynamoth_analytics.cluster.sql.compiled import compile_query
    except ImportError:
        return ["the SQL is not checked, as dynamoth[analytics] is not installed here: see `dynamoth query show`"]
    return [
        f"query {name}: {warning}"
        for name, query in queries.items()
        for warning in compile_query(query, datasets).warnings
    ]


@dataclass(frozen=True)
class Outcome:
    """What has become of one definition of a file: ``registered``, ``changed`` or ``unchanged``."""

    kind: str
    name: str
    outcome: str
    version: int


@dataclass(frozen=True)
class Registered:
    """What a registration has done."""

    outcomes: Sequence[Outcome]
    #: Of the SQL of queries.
    warnings: Sequence[str]

    def write(self, *, as_json: bool) -> None:
        """Print it."""
        if as_json:
            print_json({"definitions": [asdict(each) for each in self.outcomes], "warnings": list(self.warnings)})
            return
        for warning in self.warnings:
            sys.stdout.write(printable(warning) + "\n")
        for each in self.outcomes:
            sys.stdout.write(f"{each.kind} {each.name}: {each.outcome}, version {each.version}\n")


def print_json(value: object) -> None:
    """Print a value as one line of JSON."""
    sys.stdout.write(json.dumps(value) + "\n")


async def register(links: DataLinks, given: Definitions, *, force: bool) -> Registered:
    """Register what has changed. Raises ConfigError, LogUnavailable."""
    entries = await links.entries()
    catalog = catalog_of(*entries)
    datasets = {**catalog.datasets, **given.datasets}
    warnings = check_queries(given.queries, datasets)
    outcomes: list[Outcome] = []
    changed: list[Definition] = []
    for dataset in given.datasets.values():
        before, stored = catalog.datasets.get(dataset.name), entries[0].get(dataset.name, _NOTHING)
        if before is not None and not force:
            check_change(before, dataset)
        elif stored.version and stored.definition is None and not force:
            await _check_unused(links, dataset)
        former = before or _former(dataset, stored)
        if former is not None:
            await _check_types(links, former, dataset)
            dataset = replace(dataset, left_out=_left_out(former, dataset))
        new = replace(dataset, version=stored.version, loaded=stored.version if before is None else before.loaded)
        outcomes.append(_outcome("dataset", new, before))
        if new != before:
            changed.append(replace(new, version=stored.version + 1))
    for query in given.queries.values():
        registered = catalog.queries.get(query.name)
        same = replace(query, version=entries[1].get(query.name, _NOTHING).version)
        outcomes.append(_outcome("query", same, registered))
        if same != registered:
            changed.append(replace(same, version=same.version + 1))
            warnings += await _outdated(links, query)
    for definition in changed:
        if isinstance(definition, Dataset):
            if definition.name not in catalog.datasets:
                await _begin_load(links, definition)
        elif definition.name not in catalog.queries:
            await _begin(links, definition, datasets)
        await put(links, definition)
    return Registered(outcomes, warnings)


async def _begin(links: DataLinks, query: StandingQuery, datasets: Mapping[str, Dataset]) -> None:
    """Have a query that is new, or was dropped, begin behind the records that there are now.

    A data cluster may start later, and may write even after this that the query was dropped.
    """
    tips: dict[str, int] = {}
    for dataset in (datasets[name] for name in query.datasets if datasets[name].kind != "static"):
        for number in range(dataset.partitions):
            name = partition_name(dataset.stream, number)
            reply = await links.command(partition_server(name, links.ids), state_command(name), repeats=True)
            tips[name] = parse_state(reply).offset
    end: WindowEnd = {"tick_ms": 0, "offsets": tips}
    number = 0 if query.version == 1 else round(time.time() * 1000)  # logs may know smaller ones
    for id_ in links.ids:
        await links.command(id_, begin_progress_command(query.name, end, number), repeats=True)
    if query.version > 1:
        server = query_server(query.name, links.ids)
        await links.command(server, begin_again_command(query.name, end), repeats=True)


async def read_progress(links: DataLinks, query: str) -> Progress | None:
    """Return the latest progress of a query that any log server has. Raises LogUnavailable."""
    command = (b"GET", progress_key(query))
    return latest_progress([parse_progress(await links.command(id_, command, repeats=True)) for id_ in links.ids])


async def _outdated(links: DataLinks, query: StandingQuery) -> list[str]:
    """Return a warning if interests that users have registered do not fit a query any more."""
    interests: dict[bytes, bytes] = {}
    for id_ in links.ids:
        cursor = b"0"
        while True:
            command = (b"HSCAN", registration_keys(query.name)[0], cursor, b"COUNT", b"1000")
            cursor, pairs = await links.command(id_, command, repeats=True)
            interests |= dict(zip(pairs[::2], pairs[1::2], strict=True))
            if int(cursor) == 0:
                break
    values = [canonical_values(parse_registration(*each).params or "{}") for each in interests.items()]
    count = sum(query.fault(each) is not None for each in values)
    if not count:
        return []
    return [
        f"query {query.name}: {count} of {len(values)} registered interests do not fit it any more: their users get an"
        " error as the last result set, and have to subscribe again"
    ]


async def _has_records(links: DataLinks, dataset: Dataset) -> bool:
    """Return whether records were ever stored under the name of a dataset. Raises LogUnavailable.

    They stay, here and in the archive. Executions that are repeated read the load of a static one as it was.
    """
    if dataset.kind == "static":
        return dataset.loaded > 0
    names = [partition_name(dataset.stream, number) for number in range(PARTITIONS_MAX)]  # it may have had others
    states = await run_all(
        [links.command(partition_server(name, links.ids), state_command(name), repeats=True) for name in names]
    )
    return any(parse_state(each).offset for each in states)


async def _check_unused(links: DataLinks, dataset: Dataset) -> None:
    """Check that a dropped dataset of the same name has left no records. Raises ConfigError, LogUnavailable."""
    if await _has_records(links, dataset):
        raise ConfigError(
            f"dataset {dataset.name!r} was dropped, and its records are still stored: choose another name, or --force,"
            " which has them belong to the new dataset: its fields need the types that they had"
        )


def _former(dataset: Dataset, stored: Entry) -> Dataset | None:
    """Return what was dropped before a dataset is registered again. Loads of static ones do not come back."""
    return None if stored.former is None or dataset.kind == "static" else read_dataset(dataset.name, stored.former)


def _types(dataset: Dataset) -> dict[str, str]:
    """Return the types that fields of stored records may have, also of those that were left out."""
    return dict(dataset.left_out) | {field.name: field.type for field in dataset.fields}


def _left_out(before: Dataset, after: Dataset) -> tuple[tuple[str, str], ...]:
    """Return the types of the fields that a changed dataset does not have any more."""
    return tuple(sorted(each for each in _types(before).items() if each[0] not in after.by_name))


async def _check_types(links: DataLinks, before: Dataset, after: Dataset) -> None:
    """Check that fields of a dataset with records keep their types, also those that come back.

    Its archive could not be read any more. Raises ConfigError, LogUnavailable.
    """
    types = _types(before)
    for field in after.fields:
        type_ = types.get(field.name, field.type)
        if type_ != field.type and await _has_records(links, before):
            raise ConfigError(
                f"dataset {after.name!r} has records with the field {field.name!r} of type {type_}, which cannot become"
                f" {field.type}, not even with --force: use a new name for the field, or for the dataset"
            )


async def _begin_load(links: DataLinks, dataset: Dataset) -> None:
    """Have a static dataset that was dropped begin without records: what was loaded before does not come back."""
    if dataset.kind != "static" or not dataset.loaded:
        return
    for name in partition_names(dataset):
        server = partition_server(name, links.ids)
        await links.command(server, finish_load_command(name, 0), repeats=True)


async def forget_load(links: DataLinks, dataset: Dataset) -> None:
    """Have the log servers forget a load of a static dataset, when nobody reads it any more. Raises LogUnavailable."""
    await run_all([
        links.command(partition_server(name, links.ids), (b"EXPIRE", key, OLD_LOAD_S), repeats=True)
        for name in partition_names(dataset)
        for key in partition_keys(name)
    ])  # fmt: skip


def _outcome(kind: str, definition: Definition, before: Definition | None) -> Outcome:
    """Return what a registration does; ``definition`` still has the version before."""
    if definition == before:
        return Outcome(kind, definition.name, "unchanged", definition.version)
    return Outcome(kind, definition.name, "changed" if before else "registered", definition.version + 1)


async def drop(links: DataLinks, name: str, *, is_query: bool) -> int:
    """Drop a dataset or a query; return its version. Raises ConfigError, LogUnavailable."""
    entries = await links.entries()
    catalog = catalog_of(*entries)
    kind, stored = "query" if is_query else "dataset", entries[is_query].get(name, _NOTHING)
    if stored.definition is None:
        raise ConfigError(f"there is no {kind} {name!r}: `dynamoth {kind} list` shows those that there are")
    if not is_query:
        users = [query.name for query in catalog.queries.values() if name in query.datasets]
        if users:
            raise ConfigError(f"dataset {name!r} is used by the query {users[0]!r}: drop that first")
    dropped = Entry(stored.version + 1, None, stored.definition)
    await put_entry(links, QUERIES_KEY if is_query else DATASETS_KEY, name, dropped)
    dataset = None if is_query else catalog.datasets.get(name)
    if dataset is not None and dataset.kind == "static":
        await forget_load(links, dataset)
    return dropped.version


def find_dataset(catalog: Catalog, name: str) -> Dataset:
    """Return a dataset, also that of the refused records of another one. Raises ConfigError."""
    found = catalog.dataset(name)
    if found is None:
        base = name.removesuffix(DEAD_SUFFIX)
        raise ConfigError(f"there is no dataset {base!r}: `dynamoth dataset list` shows those that there are")
    return found


def ago(milliseconds: int) -> str:
    """Return how long ago a time is, for people: ``5 s``."""
    seconds = time.time() - milliseconds / 1000
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
