"""Turns redis-py's arguments and URLs into arguments of our clients' constructors, and checks channel names."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import parse_qsl, urlencode

import redis.connection
import redis.exceptions

from dynamoth.names import RESERVED_PREFIX, SERVER_LOCAL_PREFIXES
from dynamoth.plan.plan import Mode
from dynamoth_client.redis_py.errors import BadOption
from dynamoth_client.redis_py.pools import Pool, name_limit, trust_hosts
from dynamoth_client.redis_py.settings import sample_of
from dynamoth_link.urls import ServerAddress, parse_cluster_url, parse_server_url

CLUSTER_SCHEMES = ("dynamoth://", "dynamoths://")
SERVER_SCHEMES = ("redis://", "rediss://", "unix://")

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


class GuaranteesOff(UserWarning):
    """Warned once per client made with ``envelope=False``: its messages have no guarantees."""


@dataclass(frozen=True, slots=True)
class ChannelPlan:
    """Where a client believes a channel to be: ``servers`` by id, and the plan version since which (0: the ring's)."""

    mode: Mode
    servers: tuple[str, ...]
    epoch: int


# Making clients.


def constructor_arguments(
    servers: Iterable[str | ServerAddress] | None,
    connection_pool: Pool | None,
    positional: tuple[Any, ...],
    keywords: Mapping[str, Any],
) -> tuple[tuple[ServerAddress, ...] | None, dict[str, Any]]:
    """Return the seeds (None: the pool's own server) and the keyword arguments of redis-py's constructor.

    ``positional`` and ``keywords`` are what the application gave for it.

    Raises:
        redis.exceptions.DataError: ``servers`` is empty, or comes with another server.
        ValueError: a URL that cannot be read.

    """
    seeds = None if servers is None else parse_servers(servers, tls=bool(keywords.get("ssl")))
    if connection_pool is not None:
        return seeds, {**keywords, "connection_pool": connection_pool}
    if seeds is None:
        return None, dict(keywords)
    named = [name for name in ("host", "port", "unix_socket_path") if name in keywords]
    if named or positional:
        raise redis.exceptions.DataError(f"give either servers or {' and '.join(named) or 'host'}, not both")
    return seeds, {**keywords, **_designated_arguments(seeds[0])}


def url_arguments(url: str, make_pool: Callable[..., Pool], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of our constructor for a URL; ``keywords`` are for the pool, and ``envelope``.

    Raises:
        ValueError: the URL, or an option in it, cannot be read.
        redis.exceptions.RedisError, TypeError: an option that redis-py refuses.

    """
    options = dict(keywords)
    envelope = options.pop("envelope", True)
    trusted_hosts = options.pop("trusted_hosts", ())
    seeds: tuple[ServerAddress, ...] | None = None
    if url.startswith(CLUSTER_SCHEMES):
        cluster = parse_cluster_url(url)
        seeds, in_url = cluster.servers, dict(cluster.options)
        if "envelope" in in_url:
            envelope = _parse_flag("envelope", in_url.pop("envelope"))
        in_option = in_url.pop("trusted_hosts", None)
        url = cluster.first.url() + (f"?{urlencode(in_url)}" if in_url else "")
    elif not url.startswith(SERVER_SCHEMES):
        schemes = ", ".join((*CLUSTER_SCHEMES, *SERVER_SCHEMES))
        raise ValueError(f"the URL of a client must begin with one of {schemes}")
    else:
        url, flag = _take_option(url, "envelope")
        envelope = envelope if flag is None else _parse_flag("envelope", flag)
        url, in_option = _take_option(url, "trusted_hosts")
    pool = make_pool(url, **options)
    name_limit(pool, {**options, **_options_in(url)})
    sample_of(pool)
    if in_option:
        trust_hosts(pool, in_option)
    return {"servers": seeds, "envelope": envelope, "trusted_hosts": trusted_hosts, "connection_pool": pool}


def _take_option(url: str, name: str) -> tuple[str, str | None]:
    """Return the URL of a server without an option that is ours, and the option's text; None where it has none."""
    base, mark, query = url.partition("?")
    options = parse_qsl(query, keep_blank_values=True)
    values = [value for key, value in options if key == name]
    if not mark or not values:
        return url, None
    rest = urlencode([(key, value) for key, value in options if key != name])
    return (f"{base}?{rest}" if rest else base), values[0]


def _options_in(url: str) -> dict[str, Any]:
    """Return what redis-py reads in the URL of a server."""
    return cast("dict[str, Any]", cast("Any", redis.connection).parse_url(url))


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


def warn_of_plain_payloads() -> None:
    """Warn of what is lost with ``envelope=False``. Called by a constructor."""
    warnings.warn(
        "envelope=False: messages of this client are not numbered, so they can be lost, repeated or reordered while"
        " channels move; use it only until all subscribers use dynamoth_client",
        GuaranteesOff,
        stacklevel=3,
    )


def _designated_arguments(server: ServerAddress) -> dict[str, Any]:
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


def _parse_server(server: str | ServerAddress, tls: bool) -> ServerAddress:
    if isinstance(server, ServerAddress):
        return server
    if "://" in server:
        return parse_server_url(server)
    return parse_server_url(f"{'rediss' if tls else 'redis'}://{server}")


def _parse_flag(name: str, text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise BadOption(f"the option {name!r} of the URL must be true or false, not {text!r}")


# Names.


def is_server_local(channel: bytes) -> bool:
    """Tell whether a channel that begins with ``__`` belongs to one server, and so is published to at the first one.

    Raises ``redis.exceptions.DataError`` for one that is Dynamoth's own.
    """
    if channel.startswith(RESERVED_PREFIX):
        raise redis.exceptions.DataError(f"{channel!r} is one of Dynamoth's own channels: choose another name")
    return channel.startswith(SERVER_LOCAL_PREFIXES)


def encoded(encode: Callable[[Any], Any], value: Any) -> bytes:
    """Return a name or a payload as bytes. Raises ``redis.exceptions.DataError`` for a value that cannot be sent."""
    if type(value) is bytes:
        return value
    data = encode(value)
    return data if type(data) is bytes else bytes(data)
