"""The interest table of each query: a Parquet file for Spark, kept current from what brokers register."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dynamoth.data.queries import ParameterType, StandingQuery, canonical_values
from dynamoth.data.registrations import (
    REGISTRATIONS_PER_COMMAND_MAX,
    Registration,
    expire_command,
    parse_changes,
    parse_registration,
    registration_keys,
)
from dynamoth_analytics.cluster.servers import LogServers
from dynamoth_analytics.cluster.sql import PARAMETER_PREFIX
from dynamoth_analytics.files import arrow, parquet

CHANGES_PER_READ = 5000

REGISTERED = "_registered"

_TYPES: dict[ParameterType, Any] = {
    "string": arrow.string(),
    "int": arrow.int64(),
    "float": arrow.float64(),
    "bool": arrow.bool_(),
}


def interest_schema(query: StandingQuery) -> Any:
    """Return the Arrow schema of a query's interest table: id, when it was registered (ms), and the parameters."""
    parameters = [arrow.field(PARAMETER_PREFIX + each.name, _TYPES[each.type]) for each in query.parameters]
    return arrow.schema([
        arrow.field("_interest", arrow.string()), arrow.field(REGISTERED, arrow.int64()), *parameters,
    ])  # fmt: skip


@dataclass
class _Mirror:
    """The registrations of one query at one server."""

    #: Id of the last change that was read; None: nothing was read yet.
    position: str | None = None
    registrations: dict[str, Registration] = field(default_factory=dict[str, Registration])


class InterestTable:
    """The interests of one query.

    Args:
        servers: the log servers.
        folder: in which the files are written; one process may use it.
        query: whose interests.

    """

    def __init__(self, servers: LogServers, folder: Path, query: StandingQuery) -> None:
        self._servers = servers
        self._folder = folder
        self._query = query
        self._mirrors = {id_: _Mirror() for id_ in servers.ids}
        self._lock = threading.Lock()
        self._version = 0
        self._file: Path | None = None
        self._is_changed = True
        folder.mkdir(parents=True, exist_ok=True)
        for file in folder.glob("*.parquet"):
            file.unlink()  # of a process before this one

    def __len__(self) -> int:
        return sum(len(mirror.registrations) for mirror in self._mirrors.values())

    def refresh(self) -> None:
        """Read what has changed. Raises LogServerFailed."""
        with self._lock:
            for id_, mirror in self._mirrors.items():
                self._read(id_, mirror)

    def file(self) -> Path:
        """Return a file with the interests that were read last. Raises OSError."""
        with self._lock:
            if self._file is None or self._is_changed:
                self._write()
            assert self._file is not None, "it was written"
            return self._file

    def expire(self) -> int:
        """End the interests whose time is over; return how many. Raises LogServerFailed."""
        count = 0
        for id_ in self._servers.ids:
            _, expiry, _ = registration_keys(self._query.name)
            while True:
                seconds, _ = self._servers.run(id_, (b"TIME",))
                limit = b"%d" % REGISTRATIONS_PER_COMMAND_MAX
                command = (b"ZRANGEBYSCORE", expiry, b"-inf", b"%d" % (int(seconds) * 1000), b"LIMIT", b"0", limit)
                late = [each.decode() for each in self._servers.run(id_, command)]
                if not late:
                    break
                count += self._servers.run(id_, expire_command(self._query.name, late))
        return count

    def _read(self, id_: str, mirror: _Mirror) -> None:
        interests, _, changes = registration_keys(self._query.name)
        if mirror.position is not None:
            first = self._servers.run(id_, (b"XRANGE", changes, b"-", b"+", b"COUNT", b"1"))
            is_there = bool(first) and _is_at_most(first[0][0].decode(), mirror.position)
            if not is_there and first:
                mirror.position = None  # changes that were not read are gone
        if mirror.position is None:
            last = self._servers.run(id_, (b"XREVRANGE", changes, b"+", b"-", b"COUNT", b"1"))
            mirror.position = last[0][0].decode() if last else "0-0"
            stored = self._servers.run(id_, (b"HGETALL", interests))
            mirror.registrations = {
                each.interest_id: each for each in (parse_registration(*pair) for pair in stored.items())
            }
            self._is_changed = True
            return
        while True:
            command = (b"XRANGE", changes, b"(" + mirror.position.encode(), b"+", b"COUNT", b"%d" % CHANGES_PER_READ)
            new = parse_changes(self._servers.run(id_, command))
            for mirror.position, registration in new:
                self._is_changed = True
                if registration.params is None:
                    mirror.registrations.pop(registration.interest_id, None)
                else:
                    mirror.registrations[registration.interest_id] = registration
            if len(new) < CHANGES_PER_READ:
                return

    def _write(self) -> None:
        columns: dict[str, list[Any]] = {name: [] for name in interest_schema(self._query).names}
        for mirror in self._mirrors.values():
            for registration in mirror.registrations.values():
                values = canonical_values(registration.params or "{}")
                if any(each.check(values.get(each.name)) for each in self._query.parameters):
                    continue  # of another version of the query
                columns["_interest"].append(registration.interest_id)
                columns[REGISTERED].append(registration.at_ms)
                for each in self._query.parameters:
                    value = values[each.name]
                    if each.type == "int" and isinstance(value, float):
                        value = int(value)
                    columns[PARAMETER_PREFIX + each.name].append(value)
        self._version += 1
        former, file = self._file, self._folder / f"{self._version}.parquet"
        hidden = file.with_suffix(".tmp")
        parquet.write_table(arrow.table(columns, schema=interest_schema(self._query)), hidden)
        os.rename(hidden, file)
        self._file, self._is_changed = file, False
        if former is not None:
            # An execution that runs may read the former one: the one before that is not needed any more.
            (self._folder / f"{self._version - 2}.parquet").unlink(missing_ok=True)


def _is_at_most(one: str, other: str) -> bool:
    """Tell whether an id of a stream is not behind another one."""
    return tuple(map(int, one.split("-"))) <= tuple(map(int, other.split("-")))
