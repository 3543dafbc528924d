"""The interest table of each query: a Parquet file for Spark, which follows the registrations of brokers."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dynamoth.data.queries import ParameterType, StandingQuery, canonical_values
from dynamoth.data.registrations import (
    CHANGES_MAX,
    REGISTRATIONS_PER_COMMAND_MAX,
    Registration,
    expire_command,
    parse_changes,
    parse_registration,
    register_command,
    registration_keys,
)
from dynamoth_analytics.cluster.servers import LogServers
from dynamoth_analytics.cluster.sql.schema import INTEREST, PARAMETER_PREFIX
from dynamoth_analytics.cluster.storage.batches import ARROW_TYPES
from dynamoth_analytics.files import arrow, parquet

CHANGES_PER_READ = 5000
"""Changes of one command: a log server executes nothing else meanwhile."""

REGISTERED = "_registered"
"""Column with the time at which an interest was registered, in ms since 1970 of its log server."""

_log = logging.getLogger("dynamoth.data-cluster")

_UNFIT = ValueError, TypeError, OverflowError
"""What Arrow raises for a value that a column cannot have; its own errors are of these types."""


def table_schema(query: StandingQuery) -> Any:
    """Return the Arrow schema of a query's interest table: id, when it was registered (ms), and the parameters."""
    parameters = [arrow.field(PARAMETER_PREFIX + each.name, ARROW_TYPES[each.type]) for each in query.parameters]
    return arrow.schema([arrow.field(INTEREST, arrow.string()), arrow.field(REGISTERED, arrow.int64()), *parameters])


@dataclass
class _Mirror:
    """The registrations of one query at one server."""

    #: Id of the last change that was read; None: nothing was read yet.
    position: str | None = None
    registrations: dict[str, Registration] = field(default_factory=dict[str, Registration])
    #: Those that fit this version of the query, as rows of the table.
    rows: dict[str, tuple[Any, ...]] = field(default_factory=dict[str, "tuple[Any, ...]"])
    #: Why the others do not.
    unfit: dict[str, str] = field(default_factory=dict[str, str])


class InterestTable:
    """The interests of one query. Several threads may use it.

    Args:
        servers: the log servers.
        folder: in which the files are written; one process may use it. Files of a former process are deleted.
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
        #: Interests that were left out, and are in the log of the process.
        self._logged: set[str] = set()
        folder.mkdir(parents=True, exist_ok=True)
        for file in folder.glob("*.parquet"):
            file.unlink()  # of a process before this one

    def __len__(self) -> int:
        return sum(len(mirror.registrations) for mirror in self._mirrors.values())

    def refresh(self) -> None:
        """Read the changes at all log servers. Raises LogServerFailed."""
        with self._lock:
            for id_, mirror in self._mirrors.items():
                self._read(id_, mirror)

    def file(self, until_ms: int) -> tuple[Path, int]:
        """Return a file with the interests that were registered until then and read last, and their number.

        The file lives until the second call after this one. Raises OSError.
        """
        with self._lock:
            rows = [row for mirror in self._mirrors.values() for row in mirror.rows.values()]
            counted = [row for row in rows if row[1] <= until_ms]
            if self._file is None or self._is_changed or len(counted) < len(rows):
                self._file = self._written(counted)
                self._is_changed = len(counted) < len(rows)  # the next file has the others, too
            return self._file, len(counted)

    def unfit(self) -> dict[str, str]:
        """Return the ids of the interests that do not fit this version of the query, with the reasons."""
        with self._lock:
            return {each: why for mirror in self._mirrors.values() for each, why in mirror.unfit.items()}

    def _read(self, id_: str, mirror: _Mirror) -> None:
        changes = registration_keys(self._query.name)[2]
        if mirror.position is None or not self._has_all_changes(id_, mirror):
            self._read_all(id_, mirror)
            return
        while True:
            command = (b"XRANGE", changes, b"(" + mirror.position.encode(), b"+", b"COUNT", b"%d" % CHANGES_PER_READ)
            new = parse_changes(self._servers.run(id_, command))
            for mirror.position, registration in new:
                self._put(mirror, registration)
            if len(new) < CHANGES_PER_READ:
                return

    def _has_all_changes(self, id_: str, mirror: _Mirror) -> bool:
        """Return whether the stream of changes goes on where it was read last: not trimmed, lost, or an older copy.

        A copy that was restored lacks the last change, while what was registered since may be behind it.
        """
        changes, position = registration_keys(self._query.name)[2], (mirror.position or "0-0").encode()
        last_read, any_change = self._servers.run_all(
            id_, [(b"XRANGE", changes, position, position), (b"XRANGE", changes, b"-", b"+", b"COUNT", b"1")]
        )
        return bool(last_read) if any_change else not mirror.registrations

    def _read_all(self, id_: str, mirror: _Mirror) -> None:
        """Read the registrations as they are now; those that the server has lost are stored there again.

        Brokers renew registrations only now and then: until then, their users would get nothing, and no gap either.
        """
        interests, _, changes = registration_keys(self._query.name)
        last, changed, stored = self._servers.run_all(
            id_, [(b"XREVRANGE", changes, b"+", b"-", b"COUNT", b"1"), (b"XLEN", changes), (b"HGETALL", interests)]
        )
        former, mirror.position = mirror.registrations, last[0][0].decode() if last else "0-0"
        mirror.registrations, mirror.rows, mirror.unfit, self._is_changed = {}, {}, {}, True
        for pair in stored.items():
            self._put(mirror, parse_registration(*pair))
        if changed >= CHANGES_MAX:
            return  # it has lost none: this reader was too far behind
        lost = [each for interest_id, each in former.items() if interest_id not in mirror.registrations]
        for begin in range(0, len(lost), REGISTRATIONS_PER_COMMAND_MAX):
            part = lost[begin : begin + REGISTRATIONS_PER_COMMAND_MAX]
            again = [(each.interest_id, each.params or "{}", self._query.keep_s) for each in part]
            self._servers.run(id_, register_command(self._query.name, again))
        for each in lost:
            self._put(mirror, each)  # with the former time: the execution that begins is about it
        if lost:
            text = "log server %s has lost %d interests of query %s: they are stored there again"
            _log.warning(text, id_, len(lost), self._query.name)

    def _put(self, mirror: _Mirror, registration: Registration) -> None:
        """Note a registration of one interest, or its end."""
        self._is_changed = True
        interest_id = registration.interest_id
        mirror.rows.pop(interest_id, None)
        mirror.unfit.pop(interest_id, None)
        if registration.params is None:
            mirror.registrations.pop(interest_id, None)
            return
        mirror.registrations[interest_id] = registration
        values = canonical_values(registration.params)
        if fault := self._query.fault(values):  # it is of another version
            mirror.unfit[interest_id] = fault
            return
        columns = (column_value(each.type, values[each.name]) for each in self._query.parameters)
        mirror.rows[interest_id] = (interest_id, registration.at_ms, *columns)

    def _can_write(self, schema: Any, row: tuple[Any, ...]) -> bool:
        """Return whether the file can have a row; one that it cannot is logged once, and harms no other interest."""
        try:
            _arrays(schema, [row])
        except _UNFIT as error:
            if row[0] not in self._logged:
                self._logged.add(row[0])
                text = "interest %s of query %s is left out, as the table of interests cannot have its parameters: %s"
                _log.error(text, row[0], self._query.name, error)
            return False
        return True

    def _written(self, rows: Sequence[tuple[Any, ...]]) -> Path:
        schema = table_schema(self._query)
        try:
            arrays = _arrays(schema, rows)
        except _UNFIT:
            arrays = _arrays(schema, [row for row in rows if self._can_write(schema, row)])
        self._version += 1
        file = self._folder / f"{self._version}.parquet"
        hidden = file.with_suffix(".tmp")
        parquet.write_table(arrow.Table.from_arrays(arrays, schema=schema), hidden)
        os.rename(hidden, file)
        # An execution that runs may read the former one: the one before that is not needed any more.
        (self._folder / f"{self._version - 2}.parquet").unlink(missing_ok=True)
        return file


def _arrays(schema: Any, rows: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Return the columns of rows. Raises ``_UNFIT``."""
    columns = [*zip(*rows, strict=True)] or [()] * len(schema)
    return [arrow.array(column, field.type) for column, field in zip(columns, schema, strict=True)]


def column_value(type_: ParameterType, value: Any) -> Any:
    """Return a value of a parameter as its column has it: ``1.0`` is an int where the parameter is one."""
    return int(value) if type_ == "int" else float(value) if type_ == "float" else value


def expire_interests(servers: LogServers, query: str) -> int:
    """End the interests of a query whose time is over; return how many. Raises LogServerFailed."""
    count = 0
    _, expiry, _ = registration_keys(query)
    limit = b"%d" % REGISTRATIONS_PER_COMMAND_MAX
    for id_ in servers.ids:
        while True:
            seconds, _ = servers.run(id_, (b"TIME",))
            command = (b"ZRANGEBYSCORE", expiry, b"-inf", b"%d" % (int(seconds) * 1000), b"LIMIT", b"0", limit)
            late = [each.decode() for each in servers.run(id_, command)]
            if not late:
                break
            count += servers.run(id_, expire_command(query, late))
    return count
