"""Reads a partition at Redis in pages that are bounded by records and by bytes."""

from __future__ import annotations

from collections.abc import Iterator

from dynamoth.data.datasets import Dataset
from dynamoth.data.records import Record, parse_records, partition_name, range_command
from dynamoth_analytics.cluster.servers import LogServers

PAGE_RECORDS_MAX = 5000
PAGE_RECORDS_FIRST = 64
"""Records of the first page: nobody knows how large they are. A record has up to a MiB, so a page 64 MiB at most."""

PAGE_BYTES = 64 * 2**20
"""Bytes of a page at most. Only old records that are larger than the definition now allows can make one exceed it."""


def pages(servers: LogServers, dataset: Dataset, partition: int, after: int, until: int) -> Iterator[list[Record]]:
    """Yield the records of a partition that are at Redis, behind ``after`` and up to ``until``, in order.

    The number of records of a page follows the largest record of the page before, and at most doubles. It is never more
    than fit into ``PAGE_BYTES`` where each is as large as the dataset allows. Raises LogServerFailed.
    """
    name = partition_name(dataset.stream, partition)
    server = servers.server_of(name)
    count_max = max(1, min(PAGE_RECORDS_MAX, PAGE_BYTES // dataset.record_bytes_max))
    position, count = after, min(PAGE_RECORDS_FIRST, count_max)
    while position < until:
        page = parse_records(servers.run(server, range_command(name, position, until, count)))
        if not page:
            return
        yield page
        position = page[-1].offset
        count = next_count(page, count, count_max)


def next_count(page: list[Record], count: int, count_max: int) -> int:
    """Return how many records the next page has."""
    largest = max(len(record.value) for record in page)
    return max(1, min(2 * count, count_max, PAGE_BYTES // max(1, largest)))
