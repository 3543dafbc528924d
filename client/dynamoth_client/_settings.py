"""From redis-py's arguments and URLs to what links need: seeds, credentials, TLS, timeouts.

redis-py's connection pool is the one place where a client's settings are kept: it is built by redis-py from the
caller's arguments, and everything else is read from it. So an option means the same for GET and SET and for publish
and subscribe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast
from urllib.parse import urlencode

import redis.asyncio
import redis.exceptions
from redis.asyncio.connection import SSLConnection

from dynamoth.errors import ConfigError
from dynamoth_link.options import LinkOptions, TlsOptions
from dynamoth_link.urls import ServerAddress, parse_cluster_url, parse_server_url

DEFAULT_PORT = 6379
CLUSTER_SCHEMES = ("dynamoth://", "dynamoths://")

_DEFAULTS = LinkOptions()
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


class Encoder(Protocol):
    """redis-py's encoder, as far as it is used here."""

    decode_responses: bool

    def encode(self, value: Any) -> bytes | bytearray | memoryview:
        """Return the bytes to send. Raises ``redis.exceptions.DataError`` for what cannot be sent."""
        ...

    def decode(self, value: Any) -> Any:
        """Return what the application gets for bytes that came: text when it asked for ``decode_responses``."""
        ...


@dataclass(frozen=True, slots=True)
class Settings:
    """Where a client begins, and how it connects.

    ``seeds`` are the servers of which it reads the plan, at least one, in the caller's order; all with database 0, as
    the plan is there and publish/subscribe knows no databases.
    """

    seeds: tuple[ServerAddress, ...]
    link_options: LinkOptions


@dataclass(frozen=True, slots=True)
class ParsedUrl:
    """A URL cut into redis-py's part and ours.

    ``pool_url`` is for redis-py: the first server, with all options but ours. ``seeds`` is None for the URL of one
    server, which the pool then knows. ``envelope`` is None where the URL does not say.
    """

    pool_url: str
    seeds: tuple[ServerAddress, ...] | None
    envelope: bool | None


def parse_url(url: str) -> ParsedUrl:
    """Cut a URL. Raises ``InvalidUrl`` (a ValueError, as redis-py's) for a cluster URL that cannot be read."""
    if not url.startswith(CLUSTER_SCHEMES):
        return ParsedUrl(url, None, None)
    cluster = parse_cluster_url(url)
    options = dict(cluster.options)
    envelope = _parse_flag("envelope", options.pop("envelope")) if "envelope" in options else None
    query = f"?{urlencode(options)}" if options else ""
    return ParsedUrl(cluster.first.url() + query, cluster.servers, envelope)


def pool_from_url(pool_url: str, arguments: Mapping[str, Any]) -> redis.asyncio.ConnectionPool:
    """Return redis-py's pool for a URL of redis-py."""
    make = cast("Callable[..., redis.asyncio.ConnectionPool]", redis.asyncio.ConnectionPool.from_url)  # pyright: ignore[reportUnknownMemberType]  # redis-py is typed in part
    return make(pool_url, **arguments)


def connection_encoder(pool: redis.asyncio.ConnectionPool) -> Encoder:
    """Return what encodes and decodes for the connections of a pool."""
    return cast("Encoder", cast("Any", pool).get_encoder())


def parse_servers(servers: Iterable[str | ServerAddress], tls: bool) -> tuple[ServerAddress, ...]:
    """Read the argument ``servers``: URLs of servers, or ``host:port``, the latter over TLS when ``tls``.

    Raises ``redis.exceptions.DataError`` when there is none, and ``InvalidUrl`` for one that cannot be read.
    """
    if isinstance(servers, str):
        raise redis.exceptions.DataError(
            'servers must be a list of servers, not one text: give ["host:port", ...], or use from_url'
        )
    parsed = tuple(_parse_server(server, tls) for server in servers)
    if not parsed:
        raise redis.exceptions.DataError("servers is empty: name at least one server of the cluster")
    return parsed


def designated_arguments(server: ServerAddress) -> dict[str, Any]:
    """Return redis-py's keyword arguments for the server that gets all commands but publish and subscribe."""
    arguments: dict[str, Any] = {}
    if server.path is not None:
        arguments["unix_socket_path"] = server.path
    else:
        arguments |= {"host": server.host, "port": server.port}
    if server.tls:
        arguments["ssl"] = True
    if server.has_credentials:
        arguments |= {"username": server.username, "password": server.password}
    if server.db:
        arguments["db"] = server.db
    return arguments


def read_settings(pool: redis.asyncio.ConnectionPool, seeds: Iterable[ServerAddress] | None) -> Settings:
    """Read what links need from a pool. ``seeds`` None stands for the pool's own server.

    Raises:
        redis.exceptions.DataError: a setting cannot be used for links; the text says which and what to do.

    """
    arguments = cast("Mapping[str, Any]", pool.connection_kwargs)
    tls = issubclass(pool.connection_class, SSLConnection)
    if arguments.get("credential_provider") is not None:
        raise redis.exceptions.DataError(
            "credential_provider is not supported for publish and subscribe: give username and password"
        )
    servers = tuple(seeds) if seeds is not None else (_server_of(arguments, tls),)
    try:
        options = LinkOptions(
            username=arguments.get("username"),
            password=arguments.get("password"),
            client_name=arguments.get("client_name"),
            tls=TlsOptions(context=_tls_context(pool)) if tls else TlsOptions(),
            connect_timeout_s=arguments.get("socket_connect_timeout") or _DEFAULTS.connect_timeout_s,
            ping_interval_s=arguments.get("health_check_interval") or _DEFAULTS.ping_interval_s,
        )
    except ConfigError as error:
        raise redis.exceptions.DataError(str(error)) from error
    return Settings(tuple(replace(server, db=0) for server in servers), options)


def _parse_flag(name: str, text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise redis.exceptions.DataError(f"the option {name!r} of the URL must be true or false, not {text!r}")


def _parse_server(server: str | ServerAddress, tls: bool) -> ServerAddress:
    if isinstance(server, ServerAddress):
        return server
    if "://" in server:
        return parse_server_url(server)
    return parse_server_url(f"{'rediss' if tls else 'redis'}://{server}")


def _server_of(arguments: Mapping[str, Any], tls: bool) -> ServerAddress:
    """Return the one server that a pool connects to."""
    if "path" in arguments:
        return ServerAddress(host="", port=0, path=arguments["path"])
    return ServerAddress(
        host=arguments.get("host", "localhost"), port=int(arguments.get("port", DEFAULT_PORT)), tls=tls
    )


def _tls_context(pool: redis.asyncio.ConnectionPool) -> Any:
    """Return the ``ssl.SSLContext`` that redis-py makes of its ``ssl_*`` arguments."""
    connection = cast("Any", pool.connection_class(**pool.connection_kwargs))
    try:
        return connection.ssl_context.get()
    except (OSError, ValueError) as error:
        raise redis.exceptions.DataError(
            f"the TLS files or options cannot be used ({error}): check the ssl_* arguments"
        ) from error
