"""Stores records of datasets, from backends that have credentials for the log servers.

>>> async with DatasetWriter({"l1": "redis://10.0.0.3:6379"}) as writer:
...     await writer.append("reports", {"id": "r1", "type": "fire", "lat": 60.17, "lon": 24.94})
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, Unpack

from dynamoth.data.catalog import Catalog
from dynamoth.data.datasets import DEAD_SUFFIX, BadRecord, Dataset, dead_letter, dead_letters
from dynamoth.data.records import (
    RECORDS_PER_COMMAND_MAX,
    append_records_command,
    parse_appended_records,
    partition_name,
    partition_of,
    partition_server,
)
from dynamoth.errors import MalformedMessage
from dynamoth.machine.events import CommandPart
from dynamoth_client.runtime.data_links import TIMEOUT_S, DataLinks, DatasetFull, run_all
from dynamoth_client.runtime.log_links import LogError, LogUnavailable, UnknownOutcome
from dynamoth_client.runtime.log_writer import LogArguments

__all__ = [
    "BadRecord", "DatasetFull", "DatasetWriter", "LogError", "LogUnavailable", "Stored", "SyncDatasetWriter",
    "UnknownDataset", "UnknownOutcome",
]  # fmt: skip

CATALOG_S = 5.0
"""Definitions are read again when they are older than this."""

Record = Mapping[str, Any] | bytes | str
"""A record: a map, or JSON."""

_T = TypeVar("_T")


class UnknownDataset(LogError):
    """Raised when nobody appends there: there is no such dataset, it is static, or it has dead letters."""


@dataclass(frozen=True, slots=True)
class Stored:
    """What has become of a record: stored, a duplicate of one that was stored before, or refused for a reason."""

    outcome: Literal["stored", "duplicate", "refused"]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class _Checked:
    """A record that belongs to its dataset."""

    index: int
    value: bytes
    id: str


class DatasetWriter:
    """Stores records: durable, as the log servers are, when a call returns.

    If this process loses the connection before the answer, nobody knows whether a record is stored. Where the dataset
    has an ``id`` (and ``duplicate_s`` is not 0), the writer repeats it then, and it is stored once.

    ``async with`` begins to connect; calls wait for the servers that they need. It belongs to the event loop on which
    it is opened.

    Args:
        logs: the log servers: URLs by id, the same as ``broker.logs``.
        options: ``durable`` (``broker.log_durable``), ``timeout_s``, and ``options`` of the links.

    Raises ConfigError.

    """

    def __init__(self, logs: Mapping[str, str], **options: Unpack[LogArguments]) -> None:
        self._durable = options.get("durable", False)
        timeout_s = options.get("timeout_s", TIMEOUT_S)
        self._links = DataLinks(logs, options.get("options"), durable=self._durable, timeout_s=timeout_s)
        self._catalog: Catalog | None = None
        self._read_at = 0.0
        self._turn = 0

    async def __aenter__(self) -> Self:
        """Begin to connect."""
        self._links.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the connections. What waits for them raises. Closing twice does nothing."""
        await self._links.close()

    async def append(self, dataset: str, record: Record, *, source: str = "a backend") -> Stored:
        """Store one record.

        Raises BadRecord (it is among the dead letters then), UnknownDataset, DatasetFull, LogUnavailable (nothing is
        stored), and UnknownOutcome.
        """
        (stored,) = await self.append_many(dataset, [record], source=source)
        if stored.outcome == "refused":
            raise BadRecord(stored.reason)
        return stored

    async def append_many(
        self, dataset: str, records: Iterable[Record], *, source: str = "a backend"
    ) -> Sequence[Stored]:
        """Store records; return what has become of each, in order.

        Refused ones go to the dead letters of the dataset, with the reason and ``source``. Records with the same key,
        or without key and id, may be stored in another order. Raises as ``append``, but for BadRecord; some of them may
        be stored then.
        """
        results = await self.append_each(dataset, records, source=source)
        for each in results:
            if isinstance(each, LogError):
                raise each
        return [each for each in results if isinstance(each, Stored)]

    async def append_each(
        self, dataset: str, records: Iterable[Record], *, source: str = "a backend"
    ) -> Sequence[Stored | LogError]:
        """Store records as ``append_many``; where a log server fails, return the error in the place of each record.

        So those with LogUnavailable and DatasetFull can be repeated alone. Behind an error, no further record of the
        same partition is stored: what has the same key stays in order. Raises UnknownDataset, and LogUnavailable when
        the definition cannot be read.
        """
        definition = await self._definition(dataset)
        now = time.time()
        results: list[Stored | LogError] = []
        by_partition: dict[int, list[_Checked]] = {}
        letters: list[_Checked] = []
        for index, record in enumerate(records):
            data = _encoded(record)
            try:
                value, place, id_ = definition.normalize(data, now)
            except BadRecord as error:
                results.append(Stored("refused", str(error)))
                letters.append(_Checked(index, dead_letter(data, str(error), source, now), ""))
                continue
            self._turn += 1
            results.append(Stored("stored"))
            partition = partition_of(definition, place, self._turn)
            by_partition.setdefault(partition, []).append(_Checked(index, value, id_))
        work = [self._store(definition, partition, checked) for partition, checked in by_partition.items()]
        if letters:
            work.append(self._store(dead_letters(dataset), 0, letters))
        for outcomes in await run_all(work):
            for index, outcome in outcomes:
                if isinstance(outcome, LogError):
                    results[index] = outcome
                elif outcome == 0:
                    results[index] = Stored("duplicate")
        return results

    async def catalog(self) -> Catalog:
        """Return the definitions of datasets and queries, as the log servers have them now. Raises LogUnavailable."""
        self._catalog, self._read_at = await self._links.catalog(), time.monotonic()
        return self._catalog

    async def _definition(self, name: str) -> Dataset:
        if name.endswith(DEAD_SUFFIX):
            raise UnknownDataset(f"{name!r} has the refused records of another dataset: nobody else stores there")
        catalog = self._catalog
        if catalog is None or time.monotonic() > self._read_at + CATALOG_S or name not in catalog.datasets:
            catalog = await self.catalog()
        found = catalog.datasets.get(name)
        if found is None and (fault := catalog.dataset_faults.get(name)):
            raise LogUnavailable(f"the definition of dataset {name!r} cannot be read: {fault}; nothing is stored")
        if found is None:
            raise UnknownDataset(f"there is no dataset {name!r}: `dynamoth dataset list` shows those that there are")
        if found.kind == "static":
            raise UnknownDataset(f"{name!r} is a static dataset: load it with `dynamoth dataset load`")
        return found

    async def _store(
        self, dataset: Dataset, partition: int, records: Sequence[_Checked]
    ) -> list[tuple[int, int | LogError]]:
        """Store records of one partition; return index and offset of each, or the error in place of its offset."""
        server = partition_server(partition_name(dataset.stream, partition), self._links.ids)
        outcomes: list[tuple[int, int | LogError]] = []
        for begin in range(0, len(records), RECORDS_PER_COMMAND_MAX):
            part = records[begin : begin + RECORDS_PER_COMMAND_MAX]
            values = [(each.value, each.id) for each in part]

            def command(run_id: str, values: Sequence[tuple[bytes, str]] = values) -> tuple[CommandPart, ...]:
                return append_records_command(dataset, partition, values, "" if self._durable else run_id)

            try:
                reply = await self._links.command(server, command, repeats=bool(dataset.id and dataset.duplicate_s))
            except LogError as error:
                outcomes += [(each.index, error) for each in part]
                rest = error
                if isinstance(error, UnknownOutcome):  # the others were not sent
                    rest = LogUnavailable(f"it is not stored, as those before may be missing: {error}")
                return outcomes + [(each.index, rest) for each in records[begin + len(part) :]]
            try:
                offsets = parse_appended_records(reply, len(part))
            except MalformedMessage as error:
                unread = UnknownOutcome(str(error))
                return outcomes + [(each.index, unread) for each in records[begin:]]
            outcomes += [(each.index, offset) for each, offset in zip(part, offsets, strict=True)]
        return outcomes


class SyncDatasetWriter:
    """The same for threads: ``with SyncDatasetWriter(logs) as writer``. Any thread may append.

    The connections are those of one thread of its own; a forked child needs another writer. Arguments and errors: those
    of :class:`DatasetWriter`.
    """

    def __init__(self, logs: Mapping[str, str], **options: Unpack[LogArguments]) -> None:
        self._writer = DatasetWriter(logs, **options)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self._loop is not None:
            raise RuntimeError("a writer is opened once")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="dynamoth dataset writer", daemon=True)
        self._thread.start()
        try:
            self._run(self._writer.__aenter__())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the connections. What waits for them raises. Closing twice does nothing."""
        thread, self._thread = self._thread, None
        if thread is None or self._loop is None:
            return
        self._run(self._writer.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        thread.join()
        self._loop.close()

    def append(self, dataset: str, record: Record, *, source: str = "a backend") -> Stored:
        """Store one record; see :meth:`DatasetWriter.append`."""
        return self._run(self._writer.append(dataset, record, source=source))

    def append_many(self, dataset: str, records: Iterable[Record], *, source: str = "a backend") -> Sequence[Stored]:
        """Store records; see :meth:`DatasetWriter.append_many`."""
        return self._run(self._writer.append_many(dataset, records, source=source))

    def append_each(
        self, dataset: str, records: Iterable[Record], *, source: str = "a backend"
    ) -> Sequence[Stored | LogError]:
        """Store records; see :meth:`DatasetWriter.append_each`."""
        return self._run(self._writer.append_each(dataset, records, source=source))

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        if self._loop is None or self._loop.is_closed():
            work.close()
            raise RuntimeError("the writer is not open: use it in a `with` block")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def _encoded(record: Record) -> bytes:
    """Return a record as JSON. What JSON does not know is refused with the other bad records."""
    if isinstance(record, bytes):
        return record
    if isinstance(record, str):
        return record.encode(errors="surrogatepass")
    try:
        return json.dumps(record).encode()
    except (TypeError, ValueError) as error:
        return repr(error).encode()  # no JSON
