"""The drop-in asyncio client: redis-py's ``Redis`` whose publish/subscribe is spread over many servers.

>>> client = dynamoth_client.asyncio.from_url("dynamoth://host1:6379,host2:6379")
>>> await client.publish("news", "hello")
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any, cast

import redis.asyncio
import redis.asyncio.client
import redis.exceptions

from dynamoth.names import sharded_channel
from dynamoth_client.asyncio._pubsub import PubSub
from dynamoth_client.redis_py.commands import (
    COUNT_AGENTS,
    as_redis_py,
    in_pipeline,
    is_publication,
    routed,
    without_agents,
)
from dynamoth_client.redis_py.constructor import (
    ChannelPlan,
    constructor_arguments,
    encoded,
    is_server_local,
    url_arguments,
    warn_of_plain_payloads,
)
from dynamoth_client.redis_py.pools import follow_renewals, trust_hosts
from dynamoth_client.redis_py.settings import (
    connection_encoder,
    keep_arguments,
    read_settings,
    sample_of,
)
from dynamoth_client.runtime import introspection
from dynamoth_client.runtime.cluster import Cluster
from dynamoth_link.urls import ServerAddress


class Redis(redis.asyncio.Redis):
    """A ``redis.asyncio.Redis`` whose ``publish`` and ``pubsub`` use all servers of a Dynamoth cluster.

    Every other command (GET, SET, pipelines, ``monitor`` ...) goes to the *first* server named, through redis-py and
    its own connection pool. A PUBLISH or SPUBLISH in a pipeline, and a PUBLISH in a script, goes there as well, without
    an envelope: it is delivered, and forwarded if the channel lives elsewhere, but not numbered by this client. Agents
    are not counted in what a pipeline returns, but are in what a script does. PUBSUB in a pipeline is answered by the
    first server alone.

    Connections are opened on first use. The first ``publish`` or ``subscribe`` reads the plan from the servers named;
    some of them may be down. Errors are those of ``redis.exceptions``.

    A client belongs to the event loop where it published or subscribed first, until ``aclose``; on another one it
    raises RuntimeError. ``aclose`` closes all connections. A PubSub that is read or used later subscribes again, with a
    gap: close the PubSub to end its reader. Where the loop has been closed without ``aclose``, and in a forked child,
    publishing and PubSubs start again on the loop where they are used next: a PubSub subscribes again, and where the
    loop was closed it reports a gap for each subscription that was acknowledged.

    redis-py's options hold for every server, also for those that join later. Credentials in a server's own URL come
    first. Options with a special meaning:

    * ``credential_provider`` is asked for each connection. When it raises, that is in the text of the ConnectionError
      that ``publish``, ``subscribe`` and reading raise, and it is asked again. What it streams renews open connections.
    * ``retry``: connections are always retried, and subscriptions restored, whatever its ``retries``, after the pauses
      of its backoff (10 ms at least; without a ``retry`` they grow from 0.05 s to 1 s). ``retries`` and
      ``retry_on_error`` apply to reading the plan, ``pubsub_channels`` and its like, and ``PubSub.ping``. Refused
      credentials are not tried again.
    * ``publish`` sends a message again by itself when its connection is lost, and waits as long as redis-py would at
      most: for ``retries`` + 1 attempts, each of the longer of ``socket_timeout`` and ``socket_connect_timeout``, and
      the pauses between them. But not less than 1.5 s, as a first message waits for the connection, and a replica that
      takes the place of another takes 1 s; and not more than 10 s, which is the value without any of these options.
      Then it raises TimeoutError where the server is connected, else ConnectionError.
    * ``health_check_interval`` is the silence after which a connection is sent a PING, ``socket_timeout`` how long the
      answer may take. redis-py's defaults (0; None, or 5 s since 8.0) stand for 1.5 s and 3.4 s: a connection that was
      cut silently, or a server that hangs, is noticed within 5 s, and a command that blocks the server for 3 s is not
      mistaken for that.
    * ``socket_connect_timeout`` bounds each attempt; None stands for ``socket_timeout``, or 5 s.
    * ``max_connections``: as many publishers (one per client) and PubSubs that have subscribed can be open, for all
      clients of a pool; one more raises ``redis.exceptions.MaxConnectionsError``, with a BlockingConnectionPool too.
      Each has a connection to each server that it uses, a PubSub of channels and patterns two. There is no limit where
      it is not named, or where a pool of the application's own has redis-py's default. Connections for other commands
      are counted by redis-py, by themselves.
    * ``redis_connect_func``, and OCSP (``ssl_validate_ocsp``), are for other commands: ``publish`` and ``subscribe``
      raise DataError with them; before redis-py 7 with ``ssl_password`` and ``ssl_ca_path``, too. They do not use a
      ``connection_class`` of one's own, and warn of that (OptionIgnored).
    * ``db``, ``protocol``, ``legacy_responses``, ``single_connection_client``, ``socket_read_size``, ``parser_class``,
      a pool's ``timeout``, client-side caches and notifications of maintenance are for other commands. Publish and
      subscribe know no databases and speak RESP3.
    """

    def __init__(
        self,
        *,
        servers: Iterable[str | ServerAddress] | None = None,
        envelope: bool = True,
        trusted_hosts: Iterable[str] = (),
        connection_pool: redis.asyncio.ConnectionPool | None = None,
        **kwargs: Any,
    ) -> None:
        """Make a client; see :meth:`from_url` for URLs.

        Args:
            servers: some servers of the cluster, ``redis://...`` URLs or ``host:port``; the first one gets all other
                commands. None: the one that ``host`` and ``port`` (or ``connection_pool``) name.
            envelope: False publishes plain payloads that plain redis-py subscribers can read, for the time in which an
                application is being upgraded. Then messages are not numbered: while a channel moves, or a connection is
                lost, they can be lost, repeated and reordered, without a gap event. Subscribing is not affected.
            trusted_hosts: hosts that get the credentials, too, if the plan names servers there, besides those of
                ``servers``: names, suffixes (``*.redis.example.com``) or networks (``10.1.0.0/16``).
            connection_pool: as in redis-py; its settings serve publish and subscribe too.
            **kwargs: redis-py's, see the class.

        Raises:
            redis.exceptions.DataError: ``servers`` is empty, or comes with ``host``, ``port`` or ``unix_socket_path``.
            TypeError, ValueError: a URL that cannot be read, or an argument that redis-py refuses.

        """
        seeds, arguments = constructor_arguments(servers, connection_pool, (), kwargs)
        super().__init__(**arguments)  # pyright: ignore[reportUnknownMemberType]  # redis-py is typed in part
        if connection_pool is None:
            keep_arguments(self.connection_pool, kwargs)
            sample_of(self.connection_pool)
        if not self.single_connection_client:
            follow_renewals(self.connection_pool, getattr(self, "_event_dispatcher", None))
        trust_hosts(self.connection_pool, trusted_hosts)
        self._seeds = seeds
        self._envelope = envelope
        self._encoder = connection_encoder(self.connection_pool)
        self._cluster = Cluster(partial(read_settings, self.connection_pool, seeds), envelope=envelope)
        if not envelope:
            warn_of_plain_payloads()

    @classmethod
    def from_url(
        cls,
        url: str,
        single_connection_client: bool = False,
        auto_close_connection_pool: bool | None = None,
        **kwargs: Any,
    ) -> Redis:
        """Make a client from ``dynamoth://[user:password@]host:port,host:port[/db][?option=value&...]``.

        ``dynamoths://`` is the same over TLS. Credentials, options and ``db`` hold for every server; ``db`` does not
        matter to publish and subscribe. Options are redis-py's, and ``envelope``; keyword arguments are those of the
        class. The URL of one server (``redis://``, ``rediss://``, ``unix://``) stands for a cluster found through it.

        Raises:
            ValueError: the URL, or an option in it, cannot be read; the text says why and never shows the password.
            TypeError, redis.exceptions.RedisError: an option that redis-py refuses; as it does, but at once.

        """
        make_pool = cast("Callable[..., redis.asyncio.ConnectionPool]", redis.asyncio.ConnectionPool.from_url)  # pyright: ignore[reportUnknownMemberType]
        client = cls(**url_arguments(url, make_pool, kwargs), single_connection_client=single_connection_client)
        client.auto_close_connection_pool = auto_close_connection_pool is not False
        return client

    def client(self) -> Redis:
        """Return a client of the same cluster with one connection of its own for other commands."""
        return self.__class__(
            servers=self._seeds,
            envelope=self._envelope,
            connection_pool=self.connection_pool,
            single_connection_client=True,
        )

    async def publish(self, channel: Any, message: Any, **kwargs: Any) -> int:
        """Publish ``message`` on ``channel``; return the number of client subscribers at the server it went to.

        Both are encoded as redis-py does (str, bytes, memoryview, int, float). Messages that one task publishes one
        after the other through one client are delivered in that order; several clients are different publishers. A
        publish that is cancelled may or may not have been carried out.

        Raises:
            redis.exceptions.TimeoutError: the channel's server is connected and did not answer in time: the message may
                have been delivered. The docstring of the class says how long it waits.
            redis.exceptions.ConnectionError: no server gave a plan, or there was no connection to the channel's server
                in time; a message that had been sent before it was lost may have been delivered.
            redis.exceptions.ResponseError: the server refused it.
            redis.exceptions.DataError: the message or the channel cannot be sent.

        """
        name = channel if type(channel) is bytes else self._encode(channel)
        payload = message if type(message) is bytes else self._encode(message)
        if name[:2] == b"__" and is_server_local(name):
            return cast("int", await self._execute_here("PUBLISH", name, payload, **kwargs))
        return await self._cluster.publish(name, payload)

    async def spublish(self, shard_channel: Any, message: Any, **kwargs: Any) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Publish ``message`` on a sharded channel, as :meth:`publish` on a channel: only ``ssubscribe`` hears it.

        Raises as ``publish``.
        """
        return await self._cluster.publish(sharded_channel(self._encode(shard_channel)), self._encode(message))

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """Execute a command at the first server; but PUBLISH, SPUBLISH and PUBSUB as their methods here do."""
        if (route := routed(args)) is None:
            return await self._execute_here(*args, **options)
        method, arguments = route
        return as_redis_py(args, await getattr(self, method)(*arguments, **options))

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> Pipeline:
        """Return redis-py's pipeline, at the first server; see the class for PUBLISH and SPUBLISH in it."""
        return Pipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)

    def set_retry(self, retry: Any) -> None:
        """Use this ``Retry`` from now on; open links keep their backoff.

        A client that has published keeps the time that ``publish`` waits until ``aclose``.
        """
        super().set_retry(retry)
        self._cluster.forget_settings()

    def pubsub(self, **kwargs: Any) -> PubSub:
        """Return a new :class:`PubSub`, with links of its own. Arguments: redis-py's and those of the class."""
        return PubSub(self.connection_pool, self._cluster, **kwargs)

    def keyspace_notifications(self, *args: Any, **kwargs: Any) -> Any:
        """Return redis-py's own (since 8.0): notifications of the first server, where the keys are."""
        return cast("Any", redis.asyncio.Redis(connection_pool=self.connection_pool)).keyspace_notifications(
            *args, **kwargs
        )

    async def pubsub_channels(self, pattern: Any = "*", **kwargs: Any) -> list[Any]:
        """Return the channels of the whole cluster that match ``pattern`` and have subscribers, sorted.

        These five ask every server that this client knows of; names and patterns of Dynamoth itself do not show.
        Keyword arguments are those of redis-py's cluster client (``target_nodes``): without a meaning here.

        Raises:
            redis.exceptions.ConnectionError: a server cannot be reached; the text names it.
            redis.exceptions.ResponseError: a server refused.

        """
        return await introspection.read_channels(self._cluster, self._encoder, pattern)

    async def pubsub_numsub(self, *args: Any, **kwargs: Any) -> list[tuple[Any, int]]:
        """Return channels with their numbers of subscribers in the whole cluster. Raises as ``pubsub_channels``.

        A subscriber counts once at however many replicas it listens; twice for the moment of a move in which it
        listens at both places.
        """
        return await introspection.count_subscribers(self._cluster, self._encoder, args)

    async def pubsub_shardchannels(self, pattern: Any = "*", **kwargs: Any) -> list[Any]:
        """Return the sharded channels of the whole cluster, as ``pubsub_channels`` does the others."""
        return await introspection.read_channels(self._cluster, self._encoder, pattern, sharded=True)

    async def pubsub_shardnumsub(self, *args: Any, **kwargs: Any) -> list[tuple[Any, int]]:
        """Return sharded channels with their numbers of subscribers, as ``pubsub_numsub`` does others."""
        return await introspection.count_subscribers(self._cluster, self._encoder, args, sharded=True)

    async def pubsub_numpat(self, **kwargs: Any) -> int:
        """Return how many patterns are subscribed to in the whole cluster. Raises as ``pubsub_channels``.

        Those of plain Redis clients can only be counted at each server: the number of the one that has most is taken.
        """
        return await introspection.count_patterns(self._cluster)

    async def plan(self, channel: Any) -> ChannelPlan:
        """Return where this client believes ``channel`` to be. Bootstraps when needed; raises as ``publish``."""
        return await introspection.plan(self._cluster, self._encoder, channel)

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        """Close all connections and, as in redis-py, the pool. Calls that still wait fail with ConnectionError.

        The client can be used again afterwards, on any event loop. A PubSub that is still read subscribes again.
        """
        await self._cluster.close()
        await super().aclose(close_connection_pool)

    async def _execute_here(self, *args: Any, **options: Any) -> Any:
        """Execute a command at the first server."""
        execute = cast("Callable[..., Awaitable[Any]]", super().execute_command)  # pyright: ignore[reportUnknownMemberType]
        return await execute(*args, **options)

    def _encode(self, value: Any) -> bytes:
        return encoded(self._encoder.encode, value)


class Pipeline(redis.asyncio.client.Pipeline):
    """redis-py's pipeline, at the first server.

    PUBLISH and SPUBLISH are forwarded by the agents, who are not counted in what these return: where there is one of
    them, ``execute`` asks once more for the number of agents, afterwards. PUBSUB is answered by the first server alone,
    with the names of Dynamoth itself.
    """

    def execute_command(self, *args: Any, **kwargs: Any) -> Any:
        """Put a command into the pipeline. Raises ``redis.exceptions.DataError`` for channels of Dynamoth's own."""
        return cast("Any", super()).execute_command(*in_pipeline(self.connection_pool, args), **kwargs)

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        """Execute the commands of the pipeline, as redis-py does; return their results, in order."""
        stack = cast("list[tuple[tuple[Any, ...], Any]]", self.command_stack)
        published = [index for index, (args, _) in enumerate(stack) if is_publication(args)]
        results = await super().execute(raise_on_error)
        if published:
            agents = 0
            try:
                agents = await self._count_agents()
            except redis.exceptions.RedisError:
                pass  # the connection is lost, but all was executed
            finally:
                await cast("Any", self).reset()
            for index in published:
                results[index] = without_agents(results[index], agents)
        return results

    async def immediate_execute_command(self, *args: Any, **options: Any) -> Any:
        """Execute a command at once, as ``execute_command`` does between WATCH and ``multi``."""
        result = await cast("Any", super()).immediate_execute_command(*args, **options)
        return without_agents(result, await self._count_agents()) if is_publication(args) else result

    async def _count_agents(self) -> int:
        """Return how many agents observe the server; 0 if it refuses to say. Raises as other commands."""
        try:
            return int((await self.immediate_execute_command(*COUNT_AGENTS))[-1])
        except redis.exceptions.ResponseError:
            return 0


StrictRedis = Redis


def from_url(url: str, **kwargs: Any) -> Redis:
    """Make a client from a URL; see :meth:`Redis.from_url`."""
    return Redis.from_url(url, **kwargs)
