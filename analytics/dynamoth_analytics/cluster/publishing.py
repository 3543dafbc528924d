"""Publishes result sets, inside Spark's workers: appends them to the logs of their interests, then notifies brokers.

An append is idempotent by execution, and fenced by term: a data cluster that was taken over appends nothing, also to
logs that the newer one has not written. So a task that Spark repeats, or an execution that is repeated
after a crash, stores each result set once. It publishes again, and brokers drop what they have.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import redis.exceptions

from dynamoth.data.results import result_payload, too_large_payload
from dynamoth.edge.interests import LOG_CHANNEL_PREFIX
from dynamoth.edge.log import Appended, LogOptions, append_many_command, is_fenced, log_server, parse_appended_many
from dynamoth.edge.publications import LoggedPublication, pack_publication
from dynamoth_analytics.cluster.servers import LogServerFailed, LogServers, TakenOver
from dynamoth_client.asyncio import Redis
from dynamoth_client.asyncio import from_url as connect

APPENDS_PER_COMMAND = 200
"""Result sets of one command: a log server executes nothing else meanwhile, a few milliseconds."""

COMMAND_BYTES_MAX = 1_000_000

PUBLISHED_TOGETHER = 8
"""Commands whose result sets are published while the next ones are appended, at most."""

RETRY_S = 0.5
RETRY_FOR_S = 30.0
"""A log server that fails is tried again every ``RETRY_S``, by default for ``RETRY_FOR_S``."""

COUNTS = ("result_sets", "rows", "bytes", "repeated", "overtaken", "too_large", "unpublished")
"""What is counted of an execution: docs/data-cluster.md explains each, in the section about the journal."""

COUNTS_SCHEMA = ", ".join(f"{name} long" for name in COUNTS)
"""The schema of ``ResultPublisher.publish``, as Spark's DDL."""

_log = logging.getLogger("dynamoth.data-cluster")


@dataclass(frozen=True)
class ResultPublisher:
    """Publishes the result sets of one execution. Spark copies it to its workers."""

    servers: LogServers
    #: Of the cluster through which brokers are notified.
    cluster_url: str
    query: str
    version: int
    execution: int
    tick_ms: int
    term: int
    #: Payloads up to this size come with the notification, and brokers fetch others; -1: they fetch all.
    inline_bytes_max: int
    #: A larger result set is replaced by an error.
    result_bytes_max: int
    #: A log keeps at least this many publications.
    retained_min: int
    #: How long a log lives after its last reader or writer.
    ttl_s: float
    #: A log server that fails is tried again for this time; then the execution fails, and is repeated as a whole.
    retry_s: float = RETRY_FOR_S
    #: Interests whose logs have a later execution already: what was to be published is in none of these.
    overtaken: list[str] = field(default_factory=list[str], compare=False)
    #: Key of the newest writer's term at every log server; empty: only the terms of the logs themselves count.
    fence: bytes = b""

    def publish(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Publish Arrow batches with the columns of ``without_large``; yield one batch of ``COUNTS_SCHEMA``.

        Raises as ``publish_payloads``.
        """
        import pyarrow as arrow  # pyright: ignore[reportMissingTypeStubs] workers import it when they need it

        counts: Counter[str] = Counter()

        def payloads() -> Iterator[tuple[str, bytes]]:
            for batch in batches:
                columns = (batch.column(name).to_pylist() for name in ("interest", "rows", "result", "bytes"))
                for interest, rows, result, size in zip(*columns, strict=True):
                    counts["rows"] += rows
                    yield interest, self._payload(rows, result, size, counts)

        counts.update(self.publish_payloads(payloads()))
        yield arrow.RecordBatch.from_pydict({name: [counts[name]] for name in COUNTS})

    def publish_payloads(self, payloads: Iterable[tuple[str, bytes]]) -> Counter[str]:
        """Publish one payload for each of these interests, given its id; return the counts.

        Raises LogServerFailed (a server has not answered for ``retry_s``) and TakenOver.
        """
        counts: Counter[str] = Counter()
        by_server: dict[str, list[tuple[str, bytes]]] = {id_: [] for id_ in self.servers.ids}
        sizes = dict.fromkeys(by_server, 0)
        published = deque[Future[int]]()
        for interest, payload in payloads:
            counts["bytes"] += len(payload)
            server = log_server(interest, self.servers.ids)
            by_server[server].append((interest, payload))
            sizes[server] += len(payload)
            if len(by_server[server]) >= APPENDS_PER_COMMAND or sizes[server] >= COMMAND_BYTES_MAX:
                published.append(self._publish(server, by_server[server], counts))
                by_server[server], sizes[server] = [], 0
                if len(published) > PUBLISHED_TOGETHER:
                    counts["unpublished"] += published.popleft().result()
        for server, waiting in by_server.items():
            if waiting:
                published.append(self._publish(server, waiting, counts))
        counts["unpublished"] += sum(each.result() for each in published)
        return counts

    def _payload(self, rows: int, result: str | None, size: int, counts: Counter[str]) -> bytes:
        if result is not None:
            payload = result_payload(self.query, self.version, self.execution, self.tick_ms, result)
            size = len(payload)
            if size <= self.result_bytes_max:
                return payload
        counts["too_large"] += 1
        return too_large_payload(
            self.query, self.version, self.execution, self.tick_ms, rows, size, self.result_bytes_max
        )

    def _publish(self, server: str, results: Sequence[tuple[str, bytes]], counts: Counter[str]) -> Future[int]:
        """Append to the logs of one server, and begin to notify brokers; the future gets how many notices failed."""
        appended = self._append(server, results)
        messages: list[tuple[bytes, bytes]] = []
        for (interest, payload), place in zip(results, appended, strict=True):
            counts["result_sets"] += 1
            if not place.is_exact:
                counts["overtaken"] += 1
                self.overtaken.append(interest)
                continue
            counts["repeated"] += not place.is_new
            inline = payload if len(payload) <= self.inline_bytes_max else None
            publication = LoggedPublication(place.epoch, place.offset, inline)
            messages.append((LOG_CHANNEL_PREFIX + interest.encode(), pack_publication(publication)))
        return _publisher(self.cluster_url).publish(messages)

    def _append(self, server: str, results: Sequence[tuple[str, bytes]]) -> list[Appended]:
        """Append to the logs of one server, again and again until it answers or the time is over."""
        options = LogOptions(self.retained_min, self.ttl_s, self.servers.durable)
        deadline, is_logged = time.monotonic() + self.retry_s, False
        while True:
            try:
                new = [(interest, payload, secrets.randbits(64)) for interest, payload in results]
                run_id = self.servers.run_id(server)
                command = append_many_command(new, run_id, options, self.term, self.execution, self.fence)
                return parse_appended_many(self.servers.run(server, command))
            except LogServerFailed as error:
                if is_fenced(str(error.__cause__)):
                    raise TakenOver(f"another data cluster has taken over: {error}") from error
                if time.monotonic() > deadline:
                    raise
                if not is_logged:
                    _log.warning("%s; trying again", error)
                    is_logged = True
                time.sleep(RETRY_S)


class _Publisher:
    """The Dynamoth client of one worker process, on an event loop in a thread of its own."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._client: Redis | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="dynamoth publisher", daemon=True)
        self._thread.start()

    def publish(self, messages: Sequence[tuple[bytes, bytes]]) -> Future[int]:
        """Publish; the future gets how many failed: brokers find those when they compare the ends of logs."""
        return asyncio.run_coroutine_threadsafe(self._publish(messages), self._loop)

    def close(self) -> None:
        """End the client and its thread."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    async def _publish(self, messages: Sequence[tuple[bytes, bytes]]) -> int:
        if self._client is None:
            self._client = connect(self._url)
        client = self._client
        results = await asyncio.gather(*(client.publish(*each) for each in messages), return_exceptions=True)
        failed = [each for each in results if isinstance(each, BaseException)]
        for error in failed:
            if not isinstance(error, redis.exceptions.RedisError):
                raise error
        if failed:
            _log.warning(
                "%d notifications were not published: brokers compare the ends of logs: %s", len(failed), failed[0]
            )
        return len(failed)


_publishers: dict[str, _Publisher] = {}
"""Of this process, by URL of the cluster: they live as long as it does."""

_making = threading.Lock()


def _publisher(url: str) -> _Publisher:
    with _making:
        if url not in _publishers:
            _publishers[url] = _Publisher(url)
        return _publishers[url]


def publish_messages(url: str, messages: Sequence[tuple[bytes, bytes]]) -> int:
    """Publish channels and payloads by this process's client of a cluster; return how many failed."""
    return _publisher(url).publish(messages).result()


def close_publishers() -> None:
    """End the clients of this process: for tests. The next publication makes a new one."""
    with _making:
        while _publishers:
            _publishers.popitem()[1].close()
