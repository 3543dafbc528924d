"""The drop-in synchronous client: redis-py's ``Redis`` whose publish/subscribe is spread over many servers.

>>> client = dynamoth_client.from_url("dynamoth://host1:6379,host2:6379")
>>> client.publish("news", "hello")
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Self, cast

import redis
import redis.client
import redis.exceptions

from dynamoth.names import sharded_channel
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
from dynamoth_client.redis_py.settings import connection_encoder, keep_arguments, read_settings, sample_of
from dynamoth_client.runtime import introspection
from dynamoth_client.sync._pubsub import PubSub
from dynamoth_client.threads.cluster import SyncCluster
from dynamoth_link.urls import ServerAddress


class Redis(redis.Redis):
    """A ``redis.Redis`` whose ``publish`` and ``pubsub`` use all servers of a Dynamoth cluster.

    What :class:`dynamoth_client.asyncio.Redis` promises holds here too: every other command goes to the first server
    named, through redis-py, nothing connects before it is needed, errors are those of ``redis.exceptions``, and options
    hold for every server. A ``credential_provider`` is asked by ``get_credentials``, in threads of their own.

    Any thread may use it. Threads of its own, one for what it publishes and one for its PubSubs, keep connections while
    nobody calls; they end with ``close``, or with the client and its PubSubs. A forked child has connections of its
    own, made when it uses the client first.
    """

    def __init__(
        self,
        *args: Any,
        servers: Iterable[str | ServerAddress] | None = None,
        envelope: bool = True,
        trusted_hosts: Iterable[str] = (),
        connection_pool: redis.ConnectionPool | None = None,
        **kwargs: Any,
    ) -> None:
        """Make a client; see :meth:`from_url` for URLs.

        Args:
            *args: redis-py's, that is ``host``, ``port``, ``db`` and ``password``.
            servers: some servers of the cluster, ``redis://...`` URLs or ``host:port``; the first one gets all other
                commands. None: the one that ``host`` and ``port`` (or ``connection_pool``) name.
            envelope: as for :class:`dynamoth_client.asyncio.Redis`.
            trusted_hosts: as for :class:`dynamoth_client.asyncio.Redis`.
            connection_pool: as for :class:`dynamoth_client.asyncio.Redis`.
            **kwargs: redis-py's, see :class:`dynamoth_client.asyncio.Redis`.

        Raises as that class.

        """
        seeds, arguments = constructor_arguments(servers, connection_pool, args, kwargs)
        super().__init__(*args, **arguments)  # pyright: ignore[reportUnknownMemberType]  # redis-py is typed in part
        pool = self.connection_pool
        if connection_pool is None:
            keep_arguments(pool, kwargs)
            sample_of(pool)
        if not kwargs.get("single_connection_client"):  # redis-py has registered that connection with the provider
            follow_renewals(pool, getattr(self, "_event_dispatcher", None))
        trust_hosts(self.connection_pool, trusted_hosts)
        self._seeds = seeds
        self._envelope = envelope
        self._encoder = connection_encoder(pool)
        settings = partial(read_settings, pool, seeds)
        # Two of them, so that publishers and readers never wait for each other. A publication is answered soonest if
        # its caller drives; a subscription must survive an exception in the thread that reads.
        self._cluster = SyncCluster(settings, envelope=envelope, callers_drive=True)
        self._subscriptions = SyncCluster(settings, envelope=envelope, callers_drive=False)
        if not envelope:
            warn_of_plain_payloads()

    @classmethod
    def from_url(cls, url: str, **kwargs: Any) -> Redis:
        """Make a client from ``dynamoth://[user:password@]host:port,host:port[/db][?option=value&...]``.

        As :meth:`dynamoth_client.asyncio.Redis.from_url`, which also says what it raises.
        """
        single_connection_client = kwargs.pop("single_connection_client", False)
        make_pool = cast("Callable[..., redis.ConnectionPool]", redis.ConnectionPool.from_url)
        client = cls(**url_arguments(url, make_pool, kwargs), single_connection_client=single_connection_client)
        client.auto_close_connection_pool = True
        return client

    def client(self) -> Redis:
        """Return a client of the same cluster with one connection of its own for other commands."""
        return self.__class__(
            servers=self._seeds,
            envelope=self._envelope,
            connection_pool=self.connection_pool,
            single_connection_client=True,
        )

    def __enter__(self) -> Self:
        """Return this; the end of the block closes it."""
        return self

    def publish(self, channel: Any, message: Any, **kwargs: Any) -> int:
        """Publish ``message`` on ``channel``; return the number of client subscribers at the server it went to.

        Messages that one thread publishes one after the other through one client are delivered in that order; several
        clients are different publishers. Encodes and raises as :meth:`dynamoth_client.asyncio.Redis.publish`.
        """
        encode = self._encoder.encode
        name = encoded(encode, channel)
        payload = encoded(encode, message)
        if name.startswith(b"__") and is_server_local(name):
            return cast("int", self._execute_here("PUBLISH", name, payload, **kwargs))
        return self._cluster.publish(name, payload)

    def spublish(self, shard_channel: Any, message: Any, **kwargs: Any) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Publish ``message`` on a sharded channel, as :meth:`publish` on a channel: only ``ssubscribe`` hears it.

        Raises as ``publish``.
        """
        return self._cluster.publish(sharded_channel(self._encode(shard_channel)), self._encode(message))

    def execute_command(self, *args: Any, **options: Any) -> Any:
        """Execute a command at the first server; but PUBLISH, SPUBLISH and PUBSUB as their methods here do."""
        if (route := routed(args)) is None:
            return self._execute_here(*args, **options)
        method, arguments = route
        return as_redis_py(args, getattr(self, method)(*arguments, **options))

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> Pipeline:
        """Return redis-py's pipeline, at the first server; PUBLISH and SPUBLISH in it are forwarded."""
        return Pipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)

    def set_retry(self, retry: Any) -> None:
        """Use this ``Retry`` from now on; open links keep their backoff.

        A client that has published keeps the time that ``publish`` waits until ``close``.
        """
        super().set_retry(retry)
        for cluster in (self._cluster, self._subscriptions):
            cluster.cluster.forget_settings()

    def pubsub(self, **kwargs: Any) -> PubSub:
        """Return a new :class:`PubSub`, with links of its own. Arguments: redis-py's and those of the class."""
        return PubSub(self.connection_pool, self._subscriptions, **kwargs)

    def keyspace_notifications(self, *args: Any, **kwargs: Any) -> Any:
        """Return redis-py's own (since 8.0): notifications of the first server, where the keys are."""
        plain = cast("Any", redis.Redis(connection_pool=self.connection_pool))
        return plain.keyspace_notifications(*args, **kwargs)

    def pubsub_channels(self, pattern: Any = "*", **kwargs: Any) -> list[Any]:
        """Return the channels of the whole cluster that match ``pattern``.

        This and the next four are those of :class:`dynamoth_client.asyncio.Redis`.
        """
        return self._cluster.ask(introspection.read_channels, self._encoder, pattern)

    def pubsub_numsub(self, *args: Any, **kwargs: Any) -> list[tuple[Any, int]]:
        """Return channels with their numbers of subscribers in the whole cluster."""
        return self._cluster.ask(introspection.count_subscribers, self._encoder, args)

    def pubsub_shardchannels(self, pattern: Any = "*", **kwargs: Any) -> list[Any]:
        """Return the sharded channels of the whole cluster that match ``pattern``."""
        return self._cluster.ask(introspection.read_channels, self._encoder, pattern, True)

    def pubsub_shardnumsub(self, *args: Any, **kwargs: Any) -> list[tuple[Any, int]]:
        """Return sharded channels with their numbers of subscribers in the whole cluster."""
        return self._cluster.ask(introspection.count_subscribers, self._encoder, args, True)

    def pubsub_numpat(self, **kwargs: Any) -> int:
        """Return how many patterns are subscribed to in the whole cluster. Raises as ``pubsub_channels``.

        Those of plain Redis clients can only be counted at each server: the number of the one that has most is taken.
        """
        return self._cluster.ask(introspection.count_patterns)

    def plan(self, channel: Any) -> ChannelPlan:
        """Return where this client believes ``channel`` to be. Bootstraps when needed; raises as ``publish``."""
        return self._cluster.ask(introspection.plan, self._encoder, channel)

    def close(self) -> None:
        """Close the PubSubs, the links and, as in redis-py, the pool. Calls that still wait fail with ConnectionError.

        The client can be used again afterwards.
        """
        if "_subscriptions" in self.__dict__:  # not so where the constructor failed
            self._cluster.close()
            self._subscriptions.close()
        super().close()

    def __del__(self) -> None:
        """Close the pool, as redis-py does. PubSubs may still be in use: links end with the last of them."""
        if "_subscriptions" in self.__dict__:
            super().close()

    def _execute_here(self, *args: Any, **options: Any) -> Any:
        """Execute a command at the first server."""
        execute = cast("Any", super()).execute_command
        return execute(*args, **options)

    def _encode(self, value: Any) -> bytes:
        return encoded(self._encoder.encode, value)


class Pipeline(redis.client.Pipeline):
    """redis-py's pipeline, at the first server.

    PUBLISH and SPUBLISH are forwarded by the agents, who are not counted in what these return: where there is one of
    them, ``execute`` asks once more for the number of agents, afterwards. PUBSUB is answered by the first server alone,
    with the names of Dynamoth itself.
    """

    def execute_command(self, *args: Any, **kwargs: Any) -> Any:
        """Put a command into the pipeline. Raises ``redis.exceptions.DataError`` for channels of Dynamoth's own."""
        return cast("Any", super()).execute_command(*in_pipeline(self.connection_pool, args), **kwargs)

    def execute(self, raise_on_error: bool = True) -> list[Any]:
        """Execute the commands of the pipeline, as redis-py does; return their results, in order."""
        stack = cast("list[tuple[tuple[Any, ...], Any]]", self.command_stack)
        published = [index for index, (args, _) in enumerate(stack) if is_publication(args)]
        results = super().execute(raise_on_error)
        if published:
            agents = 0
            try:
                agents = self._count_agents()
            except redis.exceptions.RedisError:
                pass  # the connection is lost, but all was executed
            finally:
                self.reset()
            for index in published:
                results[index] = without_agents(results[index], agents)
        return results

    def immediate_execute_command(self, *args: Any, **options: Any) -> Any:
        """Execute a command at once, as ``execute_command`` does between WATCH and ``multi``."""
        result = cast("Any", super()).immediate_execute_command(*args, **options)
        return without_agents(result, self._count_agents()) if is_publication(args) else result

    def _count_agents(self) -> int:
        """Return how many agents observe the server; 0 if it refuses to say. Raises as other commands."""
        try:
            return int((self.immediate_execute_command(*COUNT_AGENTS))[-1])
        except redis.exceptions.ResponseError:
            return 0


StrictRedis = Redis


def from_url(url: str, **kwargs: Any) -> Redis:
    """Make a client from a URL; see :meth:`Redis.from_url`."""
    return Redis.from_url(url, **kwargs)
