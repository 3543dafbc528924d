"""Finds which bases of snapshots and which archived records queries may still need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from dynamoth.data.catalog import Catalog
from dynamoth.data.progress import Checkpoint, Progress
from dynamoth.data.records import partition_name
from dynamoth_analytics.cluster.storage.archive import archived_datasets
from dynamoth_analytics.cluster.storage.snapshots import KeyedSnapshots

NOBODY = 2**53
"""No offset is larger: nobody needs any record."""


@dataclass(frozen=True)
class Needs:
    """The records that one query may still read: those of these datasets, behind these offsets."""

    datasets: frozenset[str]
    offsets: Mapping[str, int]


def needs_of(
    catalog: Catalog, progress_of: Callable[[str], Progress | None], checkpoint_of: Callable[[str], Checkpoint | None]
) -> list[Needs]:
    """Return the needs of each query that has begun: from the start of an execution that may be repeated.

    The stored progress and the checkpoint may differ, and either may count: the lower offset is taken. A query whose
    definition cannot be read needs what its offsets name. ``progress_of`` and ``checkpoint_of`` read them, and their
    errors are raised.
    """
    found: list[Needs] = []
    for name in (*catalog.queries, *catalog.query_faults):
        windows = [*_windows(progress_of(name), checkpoint_of(name))]
        partitions = {each for window in windows for each in window}
        lowest = {each: min(window[each] for window in windows if each in window) for each in partitions}
        query = catalog.queries.get(name)
        datasets = query.datasets if query is not None else [each.rpartition("/")[0] for each in partitions]
        if windows:
            found.append(Needs(frozenset(datasets), lowest))
    return found


def _windows(progress: Progress | None, checkpoint: Checkpoint | None) -> Iterator[Mapping[str, int]]:
    if progress is not None and not progress.is_dropped:
        window = progress.window
        yield (window.end if progress.is_done else window.start)["offsets"]
    if checkpoint is not None:
        yield checkpoint.ends.get(checkpoint.committed, checkpoint.start)["offsets"]


def unneeded(catalog: Catalog, needs: Iterable[Needs], snapshots: KeyedSnapshots) -> dict[str, int]:
    """Return up to which offset no query needs the archive of each partition, by its name.

    Of a keyed dataset, the records in its newest base, and in those bases that queries need, are not needed any more.
    """
    found: dict[str, int] = {}
    for dataset in archived_datasets(catalog):
        own = [each for each in needs if dataset.name in each.datasets]
        for number in range(dataset.partitions):
            name = partition_name(dataset.stream, number)
            lowest = [each.offsets.get(name, 0) for each in own]
            if dataset.kind == "keyed":
                bases = [next(iter(snapshots.bases(dataset)), None)]
                bases += [snapshots.base_of(dataset, each.offsets) for each in own]
                lowest += [0 if base is None else base.offsets.get(name, 0) for base in bases]
            found[name] = min(lowest, default=NOBODY)
    return found
