"""The catalog: definitions of datasets and queries, stored at every log server.

Each definition has a version. A server keeps the highest one that it has seen, and a reader of several servers takes
the highest of all. So a server that was away when a definition changed does no harm, and the data cluster brings it up
to date. What is dropped stays as a version, with the definition that it had.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dynamoth.data.datasets import DEAD_SUFFIX, Dataset, dead_letters, read_dataset, write_dataset
from dynamoth.data.queries import StandingQuery, read_query, write_query
from dynamoth.data.records import DATA_PREFIX
from dynamoth.errors import ConfigError, MalformedMessage
from dynamoth.machine.events import CommandPart
from dynamoth.protocol.wire import parser, read_array, read_bytes, read_text_map

DATASETS_KEY = DATA_PREFIX + b"datasets"
"""Hash at every log server: definitions of datasets by name."""
QUERIES_KEY = DATA_PREFIX + b"queries"
"""Hash at every log server: definitions of standing queries by name."""

_DROPPED = "dropped"
"""In place of a definition that was dropped, an object has it under this name."""

PUT_SCRIPT = b"""local stored = redis.call('HGET', KEYS[1], ARGV[1])
if stored and tonumber(string.match(stored, '^%d+') or '0') >= tonumber(ARGV[2]) then return stored end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2] .. ' ' .. ARGV[3])
return false
"""
"""Stores a definition unless this version or a later one is stored; returns what is stored then, nil otherwise."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The entry of one name in the catalog. ``definition`` is None where it was dropped."""

    version: int
    definition: Mapping[str, Any] | None
    #: The definition that was dropped; None where it was not, or is not known.
    former: Mapping[str, Any] | None = None
    #: Why it cannot be read; empty: it can.
    fault: str = ""


@dataclass
class Catalog:
    """The definitions at the log servers, merged: see ``catalog_of``."""

    datasets: dict[str, Dataset] = field(default_factory=dict[str, Dataset])
    queries: dict[str, StandingQuery] = field(default_factory=dict[str, StandingQuery])
    #: The versions of the entries of queries that were dropped, by name.
    dropped_queries: dict[str, int] = field(default_factory=dict[str, int])
    #: Why definitions cannot be read, by name.
    dataset_faults: dict[str, str] = field(default_factory=dict[str, str])
    query_faults: dict[str, str] = field(default_factory=dict[str, str])

    def dataset(self, name: str) -> Dataset | None:
        """Return a dataset to read, also the one of the refused records of another, where nobody may write."""
        if (found := self.datasets.get(name)) is not None:
            return found
        base = name.removesuffix(DEAD_SUFFIX)
        return dead_letters(base) if base != name and base in self.datasets else None


def put_command(key: bytes, name: str, entry: Entry) -> tuple[CommandPart, ...]:
    """Return the command that stores an entry of the hash ``key``."""
    return b"EVAL", PUT_SCRIPT, b"1", key, name.encode(), b"%d" % entry.version, _text_of(entry)


def stored_value(entry: Entry) -> bytes:
    """Return the value that ``put_command`` stores: who repeats it gets this as the reply, and others do not."""
    return b"%d %s" % (entry.version, _text_of(entry))


def _text_of(entry: Entry) -> bytes:
    definition = entry.definition
    if definition is None and entry.former is not None:
        definition = {_DROPPED: entry.former}
    return b"" if definition is None else json.dumps(definition, ensure_ascii=False, separators=(",", ":")).encode()


@parser("an entry of the catalog")
def parse_entry(value: bytes) -> Entry:
    """Read the value of one field. Raises MalformedMessage."""
    version, _, text = value.partition(b" ")
    if not text:
        return Entry(int(version), None)
    definition = read_text_map(json.loads(text))
    if _DROPPED in definition:
        return Entry(int(version), None, read_text_map(definition[_DROPPED]))
    return Entry(int(version), definition)


@parser("the catalog")
def parse_entries(reply: Any) -> dict[str, Entry]:
    """Read the reply of an HGETALL of one of the two hashes. A field that cannot be read is an entry with a fault.

    Raises MalformedMessage.
    """
    if isinstance(reply, Mapping):
        pairs = [(read_bytes(name), read_bytes(value)) for name, value in reply.items()]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    else:
        values = read_array(reply)
        pairs = [(read_bytes(n), read_bytes(v)) for n, v in zip(values[::2], values[1::2], strict=True)]
    return {name.decode(errors="backslashreplace"): _entry(value) for name, value in pairs}


def _entry(value: bytes) -> Entry:
    try:
        return parse_entry(value)
    except MalformedMessage as error:
        version = re.match(rb"\d*", value)  # as the script reads it
        return Entry(int(version[0] or 0) if version else 0, None, fault=str(error))


def merged(copies: Iterable[Mapping[str, Entry]]) -> dict[str, Entry]:
    """Return the latest entry of each name over the copies of several servers, one without a fault if possible."""
    latest: dict[str, Entry] = {}
    for copy in copies:
        for name, entry in copy.items():
            if name not in latest or _rank(entry) > _rank(latest[name]):
                latest[name] = entry
    return latest


def _rank(entry: Entry) -> tuple[int, bool]:
    return entry.version, not entry.fault


def catalog_of(datasets: Mapping[str, Entry], queries: Mapping[str, Entry]) -> Catalog:
    """Read the definitions of merged entries. One that cannot be read is a fault, and harms no other one."""
    catalog = Catalog()
    for name, entry in datasets.items():
        try:
            if (definition := _definition(entry)) is not None:
                catalog.datasets[name] = read_dataset(name, definition)
        except ConfigError as error:
            catalog.dataset_faults[name] = str(error)
    for name, entry in queries.items():
        try:
            if (definition := _definition(entry)) is None:
                catalog.dropped_queries[name] = entry.version
            else:
                catalog.queries[name] = read_query(name, definition)
        except ConfigError as error:
            catalog.query_faults[name] = str(error)
    return catalog


def _definition(entry: Entry) -> dict[str, Any] | None:
    """Return a definition with its version; None where it was dropped. Raises ConfigError."""
    if entry.fault:
        raise ConfigError(entry.fault)
    return None if entry.definition is None else {**entry.definition, "version": entry.version}


def entry_of(definition: Dataset | StandingQuery) -> Entry:
    """Return the entry of a definition."""
    written = write_dataset(definition) if isinstance(definition, Dataset) else write_query(definition)
    return Entry(definition.version, written)
