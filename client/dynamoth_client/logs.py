"""Publishes on logged channels from backends that have credentials for Redis, without a broker in between.

>>> async with LogPublisher(client, {"l1": "redis://10.0.0.3:6379"}) as publisher:
...     position = await publisher.publish("news.sport", b"2:1")
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import redis.exceptions

from dynamoth.edge.interests import Interest, Scalar, channel_interest, query_interest
from dynamoth.edge.log import Appended
from dynamoth.edge.publications import LoggedPublication, Position, pack_publication
from dynamoth_client.asyncio import Redis as AsyncRedis
from dynamoth_client.runtime.log_writer import Fenced, LogArguments, LogError, LogUnavailable, LogWriter, UnknownOutcome
from dynamoth_client.sync import Redis

__all__ = ["Fenced", "LogError", "LogPublisher", "LogUnavailable", "Position", "SyncLogPublisher", "UnknownOutcome"]

_log = logging.getLogger("dynamoth_client")

_T = TypeVar("_T")


class LogPublisher:
    """Publishes on logged channels: appends to the log, and then publishes for the brokers.

    What one task publishes on a channel, one after the other, comes to users in this order. If this process dies, or
    loses the cluster, between append and publish, brokers find the publication when they compare tips
    (``broker.tip_check_s``). So what ``publish`` has returned is never lost by it.

    ``async with`` connects to the log servers; ``publish`` waits for the one that it needs. It belongs to the event
    loop on which it is opened.

    Args:
        client: of the cluster; not closed with this one.
        logs: the log servers: URLs by id, the same as ``broker.logs``. The ids decide where a log is: with others,
            nobody reads what is published. ``publish`` raises ConfigError then, if the log server says which ids the
            brokers have. If it refuses to say so (the right ``+get`` is missing), that is logged once, as a warning.
        retained_min: as ``broker.retained_min``.
        ttl_s: as ``broker.log_ttl_s``.
        durable: as ``broker.log_durable``.
        timeout_s: how long a publication may wait for its log server, more than 0.
        options: credentials, TLS and timeouts of the connections to log servers. None: those of ``client``.

    Raises ConfigError.

    """

    def __init__(self, client: AsyncRedis, logs: Mapping[str, str], **options: Unpack[LogArguments]) -> None:
        self._client = client
        self._writer = LogWriter(logs, **options)

    async def __aenter__(self) -> Self:
        """Begin to connect. Raises as the client does for options that cannot be used."""
        self._writer.open(self._client.connection_pool)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the connections to log servers. What waits for them raises. Closing twice does nothing."""
        await self._writer.close()

    # Publishing.

    async def publish(
        self, channel: str, payload: bytes | str, *, execution: int | None = None, term: int = 0
    ) -> Position:
        """Publish on a logged channel; return its place in the log.

        Args:
            channel: its name. Brokers log it if ``broker.history`` matches; nobody hears it otherwise.
            payload: text is encoded as UTF-8.
            execution: numbers the publications of the only writer that numbers any on this channel: 1, 2, 3 ... One
                that is stored already is not stored again, so the writer may repeat what it does not know about, and
                this method does so itself when a connection is lost. If a later one is stored, the place is that of the
                log's end. None: it is stored in any case.
            term: of the writer, larger with each one that takes over; 0: there is no other one.

        Raises LogUnavailable, Fenced, UnknownOutcome, MalformedMessage (the name), and ConfigError (the brokers have
        other log servers; nothing is stored). When it is cancelled, the publication is stored or not.
        """
        return await self._publish(channel_interest(channel), payload, execution, term)

    async def publish_result(
        self,
        query: str,
        params: Mapping[str, Scalar] | None,
        payload: bytes | str,
        *,
        execution: int | None = None,
        term: int = 0,
    ) -> Position:
        """Publish a result of a standing query with these parameters, as ``publish`` does on a channel."""
        return await self._publish(query_interest(query, params or {}), payload, execution, term)

    async def _publish(self, interest: Interest, payload: bytes | str, execution: int | None, term: int) -> Position:
        data = payload.encode() if isinstance(payload, str) else payload
        appended = await self._writer.append(interest, data, execution, term)
        if appended.is_exact:
            try:
                await self._client.publish(interest.log_channel, _packed(appended, data))
            except redis.exceptions.RedisError as error:
                _report(interest, error)
        return Position(appended.epoch, appended.offset)


class SyncLogPublisher:
    """The same for threads, with the synchronous client: ``with SyncLogPublisher(client, logs) as publisher``.

    Any thread may publish. The connections to log servers are those of one thread of its own; a forked child needs
    another publisher. Arguments and errors: those of :class:`LogPublisher`.
    """

    def __init__(self, client: Redis, logs: Mapping[str, str], **options: Unpack[LogArguments]) -> None:
        self._client = client
        self._writer = LogWriter(logs, **options)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self._loop is not None:
            raise RuntimeError("a publisher is opened once")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="dynamoth log publisher", daemon=True)
        self._thread.start()
        try:
            self._run(self._open())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the connections to log servers. What waits for them raises. Closing twice does nothing."""
        thread, self._thread = self._thread, None
        if thread is None or self._loop is None:
            return
        self._run(self._writer.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        thread.join()
        self._loop.close()

    def publish(self, channel: str, payload: bytes | str, *, execution: int | None = None, term: int = 0) -> Position:
        """Publish on a logged channel; see :meth:`LogPublisher.publish`."""
        return self._publish(channel_interest(channel), payload, execution, term)

    def publish_result(
        self,
        query: str,
        params: Mapping[str, Scalar] | None,
        payload: bytes | str,
        *,
        execution: int | None = None,
        term: int = 0,
    ) -> Position:
        """Publish a result of a standing query with these parameters, as ``publish`` does on a channel."""
        return self._publish(query_interest(query, params or {}), payload, execution, term)

    def _publish(self, interest: Interest, payload: bytes | str, execution: int | None, term: int) -> Position:
        data = payload.encode() if isinstance(payload, str) else payload
        appended = self._run(self._writer.append(interest, data, execution, term))
        if appended.is_exact:
            try:
                self._client.publish(interest.log_channel, _packed(appended, data))
            except redis.exceptions.RedisError as error:
                _report(interest, error)
        return Position(appended.epoch, appended.offset)

    async def _open(self) -> None:
        self._writer.open(self._client.connection_pool)

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        if self._loop is None or self._loop.is_closed():
            work.close()
            raise RuntimeError("the publisher is not open: use it in a `with` block")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def _packed(appended: Appended, data: bytes) -> bytes:
    return pack_publication(LoggedPublication(appended.epoch, appended.offset, data))


def _report(interest: Interest, error: redis.exceptions.RedisError) -> None:
    text = "a publication on %s is stored, and was not published: brokers find it when they compare tips: %s"
    _log.warning(text, interest.name, error)
