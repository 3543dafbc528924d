"""Reads from redis-py's connection pool what links need: seeds, credentials, TLS, timeouts, retries.

redis-py's connection pool is the one place where a client's settings are kept. To read them, a connection of the pool
is made and not connected: so an option has redis-py's default, and what redis-py refuses is refused with its exception.

:class:`dynamoth_client.asyncio.Redis` says what becomes of each option. One that it does not name holds for every link,
where links have such a thing. ``Settings`` has the details of timeouts.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import redis
import redis.asyncio
import redis.asyncio.sentinel
import redis.exceptions
import redis.sentinel

from dynamoth.errors import ConfigError
from dynamoth_client.machines.publisher.events import PUBLISH_TIMEOUT_S_MAX, PUBLISH_TIMEOUT_S_MIN
from dynamoth_client.redis_py.errors import BadOption
from dynamoth_client.redis_py.pools import Pool, PoolState, is_asynchronous, name_limit, options_of, state_of
from dynamoth_client.redis_py.retrying import Retrying, is_retry
from dynamoth_link.options import LinkOptions
from dynamoth_link.spares import Spares
from dynamoth_link.tls import TlsOptions
from dynamoth_link.trust import TRUSTED_HOSTS_VARIABLE, Trust, parse_trusted_hosts, trust_in
from dynamoth_link.urls import ServerAddress

DEFAULT_PORT = 6379

_DEFAULTS = LinkOptions()

_TLS = (redis.SSLConnection, redis.asyncio.SSLConnection)

_TIMEOUTS = ("socket_timeout", "socket_connect_timeout")

_ARGUMENTS = inspect.signature(cast("Any", redis.Redis)).parameters

_SOCKET_TIMEOUT_DEFAULT = _ARGUMENTS["socket_timeout"].default
"""redis-py's own ``socket_timeout``: 5 s since 8.0. A pool does not tell whether the application said so. With the
silence before a PING that would be more than the 5 s in which a cut connection is noticed by default."""

_CONNECT_TIMEOUT_DEFAULT = _ARGUMENTS["socket_connect_timeout"].default

UNREACHABLE_S = 10.0
"""Longer than a failover takes (3 s until a server counts as dead, and 3 s until others serve its channels), with room
for a busy machine: many libraries read in a loop that an error ends for good."""

_LEFT_OUT = ("socket_connect_timeout", "socket_keepalive", "socket_keepalive_options")
"""What redis-py does not give to the connections of a unix socket; besides ``ssl_*``, as to those without TLS."""

_TLS_FILES = ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile")

_OCSP = "ssl_validate_ocsp"
"""How the options begin that ask for OCSP; only redis-py's synchronous connections have them."""

_UNSUPPORTED = {
    "redis_connect_func": "it would set up connections in its own way: use credential_provider for credentials that"
    " change, and client_name and driver_info for names",
    "ssl_validate_ocsp": "the connections are those of asyncio, which do not support OCSP: leave it out and restrict"
    " ssl_ca_certs to an authority of your own",
}
_UNSUPPORTED["ssl_validate_ocsp_stapled"] = _UNSUPPORTED["ssl_validate_ocsp"]


class OptionIgnored(UserWarning):
    """Warned when a client begins to publish or subscribe, for each option that only other commands can use."""


class Encoder(Protocol):
    """redis-py's encoder, as far as it is used here."""

    decode_responses: bool

    def encode(self, value: Any) -> bytes | bytearray | memoryview:
        """Return the bytes to send. Raises ``redis.exceptions.DataError`` for a value that cannot be sent."""
        ...

    def decode(self, value: Any) -> Any:
        """Return what the application gets for bytes that came: text when it asked for ``decode_responses``."""
        ...


@dataclass(frozen=True, slots=True)
class Settings:
    """Where a client begins, and how it connects.

    ``seeds`` are the servers of which it reads the plan, at least one, in the caller's order; all with database 0, as
    the plan is there and publish/subscribe knows no databases. ``retrying`` is for reading the plan, which a client
    does before it publishes or subscribes, for questions to all servers, and for PING. Subscriptions are always
    restored.

    What was published is sent again by itself until ``publish_timeout_s``. That is how long redis-py would try at most,
    each attempt taking the longer of ``socket_timeout`` and ``socket_connect_timeout``; but no less than
    ``PUBLISH_TIMEOUT_S_MIN``, and no more than ``PUBLISH_TIMEOUT_S_MAX``, which it is where no option says anything.

    Readers get an error when no server of their channels can be reached for ``unreachable_s``:
    ``socket_connect_timeout``, or ``UNREACHABLE_S`` where that has redis-py's default.
    """

    seeds: tuple[ServerAddress, ...]
    link_options: LinkOptions
    retrying: Retrying
    pool: PoolState
    publish_timeout_s: float
    unreachable_s: float


def connection_encoder(pool: Pool) -> Encoder:
    """Return what encodes and decodes for the connections of a pool."""
    return cast("Encoder", cast("Any", pool).get_encoder())


def keep_arguments(pool: Pool, keywords: Mapping[str, Any]) -> None:
    """Keep, for the links, the constructor arguments that cannot be read back from a pool of redis-py."""
    name_limit(pool, keywords)
    kept = options_of(pool)
    state_of(pool).left_out.update(
        (name, value)
        for name, value in keywords.items()
        if value is not None and name not in kept and (name in _LEFT_OUT or name.startswith("ssl_"))
    )


def sample_of(pool: Pool) -> tuple[Any, Mapping[str, Any]]:
    """Return a connection as redis-py makes them, which is not connected, and its arguments.

    Raises whatever redis-py raises for options that it refuses: TypeError, ValueError, ``redis.exceptions.RedisError``.
    """
    kind: Any = pool.connection_class
    options = dict(options_of(pool))
    left_out = state_of(pool).left_out
    if left_out:
        family: Any = redis.asyncio if is_asynchronous(pool) else redis
        needs_tls = any(name.startswith("ssl_") for name in left_out)
        kind = family.SSLConnection if needs_tls else family.Connection
        options.pop("path", None)
        options |= left_out
    retry = options.get("retry")
    if retry is not None and not is_retry(retry):
        raise BadOption(f"retry must be a redis.retry.Retry or redis.asyncio.retry.Retry, not {retry!r}")
    state = state_of(pool)
    if state.sample is None or state.sample[1:] != (kind, options):  # making one takes redis-py a millisecond or two
        state.sample = kind(**_library_arguments(kind, options), **options), kind, options
    return state.sample[0], options


def _library_arguments(kind: type[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the name and version of the library, where redis-py would find them for each connection: 0.3 ms."""
    is_own_class = not kind.__module__.startswith("redis.")
    if is_own_class or not options.keys().isdisjoint(("driver_info", "lib_name", "lib_version")):
        return {}
    return _default_library()


@functools.cache
def _default_library() -> dict[str, Any]:
    try:
        from redis.driver_info import DriverInfo  # since redis-py 7.2
    except ImportError:
        return {}
    return {"driver_info": DriverInfo()}


def read_settings(pool: Pool, seeds: Iterable[ServerAddress] | None) -> Settings:
    """Read what links need from a pool. ``seeds`` None stands for the pool's own server.

    Raises:
        redis.exceptions.DataError: a setting cannot be used for links; the text says which and what to do.
        TypeError, ValueError, redis.exceptions.RedisError: redis-py's own, see ``sample_of``.

    """
    servers = tuple(seeds) if seeds is not None else (_server_of(pool),)
    sample, options = sample_of(pool)
    _refuse_unsupported(options)
    _warn_of_own_class(pool)
    state = state_of(pool)
    # First: redis-py may use it as the connect timeout as well, and an error must name the option that was given.
    socket_timeout_s = _seconds(sample, "socket_timeout", _SOCKET_TIMEOUT_DEFAULT)
    library_name, library_version = _library_of(sample)
    retrying = Retrying(sample.retry)
    keeps_alive = getattr(sample, "socket_keepalive", False)
    try:
        link_options = LinkOptions(
            username=sample.username or None,
            password=sample.password or None,
            credentials=state.credentials,
            trust=_trust(servers, state.trusted_hosts),
            client_name=sample.client_name or None,
            library_name=library_name,
            library_version=library_version,
            keepalive=dict(sample.socket_keepalive_options) if keeps_alive else None,
            tls=_tls_options(options) if isinstance(sample, _TLS) else TlsOptions(),
            connect_timeout_s=_seconds(sample, "socket_connect_timeout") or _DEFAULTS.connect_timeout_s,
            ping_interval_s=_seconds(sample, "health_check_interval", 0) or _DEFAULTS.ping_interval_s,
            ping_timeout_s=socket_timeout_s or _DEFAULTS.ping_timeout_s,
            spares=Spares(),
            backoff=None if options.get("retry") is None else retrying.backoff,
        )
    except ConfigError as error:
        raise BadOption(str(error)) from error
    return Settings(
        tuple(replace(server, db=0) for server in servers),
        link_options,
        retrying,
        state,
        publish_timeout_s=_publish_timeout_s(sample, options, retrying),
        unreachable_s=_seconds(sample, "socket_connect_timeout", _CONNECT_TIMEOUT_DEFAULT) or UNREACHABLE_S,
    )


def _trust(servers: Iterable[ServerAddress], trusted_hosts: Iterable[str]) -> Trust:
    """Return which servers get our credentials: on hosts that the application or the environment names."""
    of_environment = parse_trusted_hosts(os.environ.get(TRUSTED_HOSTS_VARIABLE, ""))
    return trust_in(servers, [*trusted_hosts, *of_environment])


def _tls_options(options: Mapping[str, Any]) -> TlsOptions:
    return TlsOptions(context=_tls_context(options), has_certificate=bool(options.get("ssl_certfile")))


def _publish_timeout_s(sample: Any, options: Mapping[str, Any], retrying: Retrying) -> float:
    """Return the time of the same name in ``Settings``."""
    if options.keys().isdisjoint(("retry", "retry_on_timeout", "retry_on_error", *_TIMEOUTS)):
        return PUBLISH_TIMEOUT_S_MAX
    timeouts_s = (_seconds(sample, name) for name in _TIMEOUTS)
    attempt_s = max(math.inf if timeout_s is None else timeout_s for timeout_s in timeouts_s)
    return max(PUBLISH_TIMEOUT_S_MIN, retrying.longest_s(attempt_s, PUBLISH_TIMEOUT_S_MAX))


def _seconds(sample: Any, name: str, ours: float | None = None) -> float | None:
    """Return an option in seconds; None for None, and for ``ours``, a value that stands for our own default as well."""
    value = getattr(sample, name)
    if value is None or (ours is not None and value == ours):
        return None
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
        raise BadOption(f"{name} must be a number of seconds, more than 0, not {value!r}")
    return value


def _library_of(sample: Any) -> tuple[str | None, str | None]:
    """Return the name and the version that a connection tells of its library."""
    if not hasattr(sample, "driver_info"):  # before redis-py 7.2
        return sample.lib_name, sample.lib_version
    info = sample.driver_info
    return (None, None) if info is None else (info.formatted_name, info.lib_version)


def _refuse_unsupported(options: Mapping[str, Any]) -> None:
    for name, why in _UNSUPPORTED.items():
        if options.get(name):
            raise redis.exceptions.DataError(f"{name} is not supported for publish and subscribe: {why}")


def _warn_of_own_class(pool: Pool) -> None:
    kind: type[Any] = pool.connection_class
    if not kind.__module__.startswith("redis."):
        warnings.warn(
            f"connection_class={kind.__name__} is used for other commands only: publish and subscribe have connections"
            " of their own, with the options of the pool",
            OptionIgnored,
            stacklevel=2,
        )


def _server_of(pool: Pool) -> ServerAddress:
    """Return the one server that a pool connects to."""
    if isinstance(pool, (redis.sentinel.SentinelConnectionPool, redis.asyncio.sentinel.SentinelConnectionPool)):
        raise redis.exceptions.DataError(
            "a pool of Sentinel names no server of the cluster: name some with servers=[...]"
        )
    options = options_of(pool)
    if "path" in options:
        return ServerAddress(host="", port=0, path=options["path"])
    tls = issubclass(pool.connection_class, _TLS)
    return ServerAddress(host=options.get("host", "localhost"), port=int(options.get("port", DEFAULT_PORT)), tls=tls)


def _tls_context(options: Mapping[str, Any]) -> Any:
    """Return the ``ssl.SSLContext`` that redis-py makes of its ``ssl_*`` arguments."""
    about_tls = {
        name: value
        for name, value in options.items()
        if name.startswith("ssl_") and not name.startswith(("ssl_ocsp", _OCSP))
    }
    make: Any = redis.asyncio.SSLConnection
    known = inspect.signature(make.__init__).parameters
    for name in ("ssl_password", "ssl_ca_path"):  # before redis-py 7 only synchronous connections have them
        if name not in known and about_tls.pop(name, None) is not None:
            raise redis.exceptions.DataError(f"{name} needs redis-py 7 or later: its asyncio had none before")
    connection = make(**about_tls)
    try:
        return connection.ssl_context.get()
    except (OSError, TypeError, ValueError) as error:
        files = ", ".join(f"{name}={options[name]}" for name in _TLS_FILES if options.get(name) is not None)
        raise redis.exceptions.DataError(
            f"the TLS files or options cannot be used ({error}): check the ssl_* arguments ({files or 'no files'})"
        ) from error
