"""Stores the records that applications publish on ``d:NAME``, the channel of a dataset.

Theory of operation
-------------------
The data cluster subscribes to the channel of each append and keyed dataset, and follows the catalog. Each dataset has a
reader of its own, with connections of its own: one that cannot be stored now holds up no other one. A reader takes a
batch of messages, stores it, and only then takes the next one. Where the log server is down, or the dataset is full, or
a definition cannot be read, it tries again until the batch is stored. Meanwhile messages wait in the queue of the
client (``QUEUE_MAX``). What does not fit into it is dropped, and a gap says how many.

A message is durable only when it is stored: a publisher does not hear of that. PUBLISH returns the number of receivers;
while no data cluster runs, it is 0 and the message is lost. What waits in the queue is lost with its reader, and
counted as missing: when its dataset is dropped, and when the process ends. A publisher that needs an answer stores
records with ``DatasetWriter``, or publishes at a broker.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import redis.exceptions

from dynamoth.data.datasets import DATASET_PREFIX
from dynamoth.errors import DynamothError
from dynamoth_client.asyncio import PubSub, Redis
from dynamoth_client.asyncio import from_url as connect
from dynamoth_client.datasets import DatasetFull, DatasetWriter, LogError, LogUnavailable, UnknownDataset
from dynamoth_link.options import LinkOptions

SOURCE = "publish"
"""Where dead letters say that their record came from."""

FOLLOW_S = 2.0
"""The catalog is read this often: messages for a new dataset are stored after this time."""

QUEUE_MAX = 65_536
"""Messages of one dataset that wait to be stored."""

RETRY_S = 1.0
"""What was not stored is tried again this often."""

DEFAULT_LINK = LinkOptions()

_log = logging.getLogger("dynamoth.data-cluster")


class Ingest:
    """The subscriptions of a data cluster to the channels of datasets. Belongs to one event loop.

    Args:
        cluster_url: of the cluster on which applications publish.
        logs: the log servers, URLs by id.
        link: the options of links to these.
        durable: whether these lose nothing when they restart.

    Raises ConfigError.

    """

    def __init__(
        self, cluster_url: str, logs: Mapping[str, str], link: LinkOptions = DEFAULT_LINK, *, durable: bool = False
    ) -> None:
        self._cluster_url = cluster_url
        self._writer = DatasetWriter(logs, durable=durable, options=link)
        #: Records by outcome (stored, duplicate, refused, unknown), gaps, and the messages that these name as missing.
        self.counts: Counter[str] = Counter()
        #: The readers, by dataset.
        self._readers: dict[str, asyncio.Task[None]] = {}
        #: Datasets whose channel was subscribed to successfully.
        self.subscribed: set[str] = set()
        #: Present faults, by dataset; "" is the catalog.
        self.faults: dict[str, str] = {}

    async def run(self) -> None:
        """Store published records, until this is cancelled. After a fault, which is logged, it tries again."""
        client = connect(self._cluster_url)
        try:
            async with self._writer:
                try:
                    while True:
                        await self._follow(client)
                        await asyncio.sleep(FOLLOW_S)
                finally:
                    await _end(self._readers.values())
        finally:
            await client.aclose()

    async def _follow(self, client: Redis) -> None:
        """Start a reader for each new dataset, and end the readers of datasets that are gone."""
        try:
            catalog = await self._writer.catalog()
        except DynamothError as error:
            self._note("", str(error))
            return
        self._note("", None)
        self._forget_ended()
        names = {name for name, each in catalog.datasets.items() if each.kind != "static"}
        gone = self._readers.keys() - names - catalog.dataset_faults.keys()
        await _end([self._readers.pop(name) for name in gone])
        for name in names - self._readers.keys():
            self._readers[name] = asyncio.create_task(self._read(client, name), name=f"ingest of {name}")

    def _forget_ended(self) -> None:
        """Forget readers that a bug has ended, so that others take their place."""
        for name in [name for name, reader in self._readers.items() if reader.done()]:
            reader = self._readers.pop(name)
            error = None if reader.cancelled() else reader.exception()
            _log.error("a reader has ended because of a bug, and begins again: please report this line", exc_info=error)

    async def _read(self, client: Redis, name: str) -> None:
        """Store the records that are published for one dataset, until this is cancelled."""
        try:
            while True:
                try:
                    await self._subscribe_and_read(client, name)
                except UnknownDataset:
                    pass  # it was dropped: the next look at the catalog ends this reader
                except (redis.exceptions.RedisError, DynamothError, OSError) as error:
                    self._note(name, f"{type(error).__name__}: {error}")
                await asyncio.sleep(RETRY_S)
        finally:
            self.faults.pop(name, None)

    async def _subscribe_and_read(self, client: Redis, name: str) -> None:
        pubsub: PubSub = client.pubsub(ignore_subscribe_messages=True, gaps=True, max_queue=QUEUE_MAX)
        try:
            await pubsub.subscribe(DATASET_PREFIX + name)
            self.subscribed.add(name)
            self._note(name, None)
            batches = pubsub.batches()
            while True:
                try:
                    batch = await anext(batches)
                except redis.exceptions.ConnectionError as error:  # the subscription stays, and connects again
                    self._note(name, str(error))
                    batches = pubsub.batches()
                    continue
                except StopAsyncIteration:
                    return
                await self._take(name, batch)
        finally:
            self.subscribed.discard(name)
            self._count_lost(name, _waiting(pubsub))
            await pubsub.aclose()

    async def _take(self, name: str, batch: Sequence[Mapping[str, Any]]) -> None:
        """Count gaps, and store messages."""
        for message in batch:
            if message["type"] == "gap":
                self.counts["gaps"] += 1
                self.counts["missing"] += message["data"].count or 0
                _log.warning("messages for dataset %s may be missing: %s", name, message["data"])
        records = [message["data"] for message in batch if message["type"] == "message"]
        try:
            while records:
                records = await self._store(name, records)
                if records:
                    await asyncio.sleep(RETRY_S)
        finally:
            self._count_lost(name, len(records))

    def _count_lost(self, name: str, count: int) -> None:
        """Count the messages that a reader may not have stored when it ends."""
        if count:
            self.counts["missing"] += count
            _log.warning("a reader of dataset %s ends: %d messages may be missing", name, count)

    async def _store(self, name: str, records: Sequence[bytes]) -> list[bytes]:
        """Store records; return those that have to be stored again. Raises UnknownDataset."""
        try:
            results = await self._writer.append_each(name, records, source=SOURCE)
        except UnknownDataset:
            raise
        except DynamothError as error:
            self._note(name, str(error))
            return list(records)
        again: list[bytes] = []
        fault: str | None = None
        for record, result in zip(records, results, strict=True):
            if not isinstance(result, LogError):
                self.counts[result.outcome] += 1
                continue
            fault = str(result)
            if isinstance(result, LogUnavailable | DatasetFull):
                again.append(record)
            else:
                self.counts["unknown"] += 1
        self._note(name, fault)
        return again

    def _note(self, name: str, fault: str | None) -> None:
        """Note a fault, None: there is none any more. Beginning and end of a fault are logged once."""
        before = self.faults.get(name)
        what = f"dataset {name}" if name else "the catalog"
        if fault is None:
            if self.faults.pop(name, None) is not None:
                _log.info("what is published is stored again: %s", what)
            return
        self.faults[name] = fault
        if before is None:
            _log.error("what is published waits to be stored (%s): %s", what, fault)


def _waiting(pubsub: PubSub) -> int:
    """Take everything that waits in the queue of a PubSub; return how many messages that were."""
    count = 0
    while True:
        batch = pubsub.take_batch()
        count += len(batch)
        if not batch and pubsub.pop() is None:  # it was a notice
            return count


async def _end(tasks: Any) -> None:
    ended = list(tasks)
    for task in ended:
        task.cancel()
    await asyncio.gather(*ended, return_exceptions=True)
