"""Reads a range of a partition's records: from its stream at Redis, and trimmed records from the archive.

What counts as a loss
---------------------
A range ends with the offset of a record (``LogServers.tips`` gives no others). Between its records, offsets jump where
the server has restarted, which is no loss by itself. These are losses, and raise ``RecordsLost``:

* The range ends with a record that is neither at Redis nor in the archive: the caller saw that it was stored.
* The server knows that it gave offsets of the jump (``PartitionState.given``), and the archive does not have them.
* The chain of the archive's files has a hole there (``archive_files``).

A server that forgets its last records with their offsets leaves a jump like that of a restart without losses. If nobody
has seen these offsets, it looks like one: ``dynamoth dataset show`` counts such restarts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamoth.data.datasets import Dataset
from dynamoth.data.records import (
    PartitionState,
    Record,
    parse_records,
    parse_state,
    partition_name,
    range_command,
    state_command,
)
from dynamoth.errors import DynamothError
from dynamoth_analytics.cluster.servers import LogServers
from dynamoth_analytics.cluster.storage.archive_files import Hole, archived, first_archived
from dynamoth_analytics.cluster.storage.batches import OFFSET, to_batch
from dynamoth_analytics.cluster.storage.paging import pages


class RecordsLost(DynamothError):
    """Raised when records that a reader asks for are neither at their server nor in the archive."""

    code = "records-lost"


def read_state(servers: LogServers, name: str) -> PartitionState:
    """Return what the server of a partition knows about its offsets. Raises LogServerFailed."""
    return parse_state(servers.run(servers.server_of(name), state_command(name)))


def read_range(
    servers: LogServers,
    dataset: Dataset,
    partition: int,
    after: int,
    until: int,
    archive: Path | None,
    *,
    fail_on_loss: bool = True,
) -> Iterator[Any]:
    """Yield the records of a partition behind ``after`` and up to ``until``, as Arrow batches, in order.

    Args:
        servers: the log servers.
        dataset: whose records.
        partition: its number.
        after: an offset, of a record or 0.
        until: the offset of a record: each end of a window is one.
        archive: folder of the archive; None: there is none.
        fail_on_loss: false: what is lost is left out.

    A record is archived before it is trimmed: so whatever the stream lacks is looked for in the archive. About a page
    or a row group is in memory at a time. Raises RecordsLost and LogServerFailed.

    """
    gaps = _Gaps(servers, dataset, partition, archive, fail_on_loss)
    position = after
    for page in pages(servers, dataset, partition, after, until):
        for records in _without_jumps(page):
            if records[0].offset > position + 1:
                yield from gaps.read(position, records[0].offset - 1)
            yield to_batch(dataset, partition, records)
            position = records[-1].offset
    if position < until:
        yield from gaps.read(position, until, is_end=True)


def oldest(servers: LogServers, dataset: Dataset, partition: int, archive: Path | None) -> int:
    """Return the offset before the oldest record of a partition that is kept, in the archive or else at Redis."""
    if archive is not None and (file := first_archived(archive, dataset.name, partition)) is not None:
        return file.before
    name = partition_name(dataset.stream, partition)
    found = parse_records(servers.run(servers.server_of(name), range_command(name, 0, 2**53, 1)))
    return found[0].offset - 1 if found else read_state(servers, name).offset


def _without_jumps(page: list[Record]) -> Iterator[list[Record]]:
    """Yield the records of a page, divided where offsets jump."""
    begin = 0
    for index in range(1, len(page) + 1):
        if index == len(page) or page[index].offset > page[index - 1].offset + 1:
            yield page[begin:index]
            begin = index


@dataclass(frozen=True)
class _Gaps:
    """Reads from the archive what the stream of a partition lacks."""

    servers: LogServers
    dataset: Dataset
    partition: int
    archive: Path | None
    fail_on_loss: bool

    def read(self, after: int, until: int, *, is_end: bool = False) -> Iterator[Any]:
        """Yield the archived records behind ``after`` and up to ``until``.

        Raises RecordsLost where records are missing. ``is_end``: there is a record at ``until``.
        """
        position = after
        for found in archived(self.archive, self.dataset, self.partition, after, until) if self.archive else ():
            if isinstance(found, Hole):
                self._lose(found.first, found.last)
            else:
                yield found
                position = found.column(OFFSET)[-1].as_py()
        if position >= until or not self.fail_on_loss:
            return
        if is_end:
            self._lose(position + 1, until)
        state = read_state(self.servers, partition_name(self.dataset.stream, self.partition))
        for first, last in state.given(position, until)[:1]:
            self._lose(first, last)

    def _lose(self, first: int, last: int) -> None:
        if not self.fail_on_loss:
            return
        name = partition_name(self.dataset.stream, self.partition)
        where = f"the archive {self.archive} lacks them" if self.archive else "the option `archive` is missing"
        raise RecordsLost(
            f"records of {name} from offset {first} to {last} are no longer at Redis, and {where}. Restore them, or go"
            " on without: `dynamoth query restart`; in your own job, option fail_on_loss=false"
        )
