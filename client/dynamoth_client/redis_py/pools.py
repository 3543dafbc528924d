"""The state that all clients of one redis-py connection pool share: users, credentials and trusted hosts."""

from __future__ import annotations

import asyncio
import functools
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, cast

import redis
import redis.asyncio
import redis.credentials
import redis.exceptions

from dynamoth.errors import ConfigError
from dynamoth.plan.plan import Plan
from dynamoth_link.credentials import Credentials
from dynamoth_link.trust import parse_trusted_hosts, trust_in

Pool = redis.ConnectionPool | redis.asyncio.ConnectionPool


class User(Protocol):
    """A publisher, or a PubSub at work. It has one connection to each server that it uses."""

    @property
    def is_stopped(self) -> bool:
        """Whether it has ended."""
        ...


_U = TypeVar("_U", bound=User)


class ConnectionLimit:
    """Limits the publishers and PubSubs that are open, on any number of event loops, to ``max_connections``.

    Each has one connection to a server, so that is a bound for every server. (A PubSub with both channels and patterns
    has two, and counts as one, as it does in redis-py.)

    Any thread may use it, and a finalizer may in the midst of another use: so there is no lock.
    """

    def __init__(self, limit: int | None) -> None:
        """Set the limit; None for no limit."""
        self._limit = limit
        #: In order: each user under a key of its own, with a place before it is made.
        self._users: weakref.WeakValueDictionary[object, User] = weakref.WeakValueDictionary()

    def admit(self, make: Callable[[], _U]) -> _U:
        """Make another user within the limit.

        Raises:
            redis.exceptions.MaxConnectionsError: there are as many as may be.

        """
        key, place = object(), _Place()
        self._users[key] = place
        try:
            if self._limit is not None and self._open_before(place) >= self._limit:
                raise redis.exceptions.MaxConnectionsError(
                    f"Too many connections: max_connections={self._limit} publishers and PubSubs are open; close some"
                    " PubSubs, or raise max_connections"
                )
            user = self._users[key] = make()
            return user
        finally:
            place.is_stopped = True  # an exception's traceback may keep it

    def _open_before(self, place: _Place) -> int:
        users = [reference() for reference in self._users.valuerefs()]
        return sum(user is not None and not user.is_stopped for user in users[: users.index(place)])

    def start_over(self) -> None:
        """Forget the users: in a forked child they are the parent's."""
        self._users = weakref.WeakValueDictionary()


class _Place:
    """Stands for a user that is about to be made."""

    def __init__(self) -> None:
        self.is_stopped = False


@dataclass(slots=True, eq=False)
class PoolState:
    """The state that the clients of one pool share."""

    connections: ConnectionLimit
    #: The pool's ``credential_provider``, as links ask it; None where there is none.
    credentials: Credentials | None
    #: Options for TCP and TLS that redis-py leaves out of the pool, as its own server is a unix socket or without TLS.
    left_out: dict[str, Any] = field(default_factory=dict[str, Any])
    #: The latest connection that was made to read settings, and its class and arguments; see ``sample_of``.
    sample: tuple[Any, Any, Mapping[str, Any]] | None = None
    #: Hosts that get credentials besides those of the servers that were named; see ``dynamoth_link.trust``.
    trusted_hosts: tuple[str, ...] = ()
    #: The latest plan that a client has read at its start, without entries: where to ask when no seed can be reached.
    plan: Plan | None = None
    #: Whether no seed answered when a client last read the plan: then the next one asks other servers, too, at once.
    seeds_are_silent: bool = False


_states: weakref.WeakKeyDictionary[Pool, PoolState] = weakref.WeakKeyDictionary()


def state_of(pool: Pool) -> PoolState:
    """Return the state that the clients of a pool share."""
    return _states.get(pool) or _states.setdefault(
        pool, PoolState(ConnectionLimit(_limit_of(pool)), _credentials_of(pool))
    )


def name_limit(pool: Pool, arguments: Mapping[str, Any]) -> None:
    """Limit the connections of a pool if its arguments name ``max_connections``, be it redis-py's default."""
    if arguments.get("max_connections"):  # redis-py also takes 0 and None for its default
        state_of(pool).connections = ConnectionLimit(cast("Any", pool).max_connections)


def trust_hosts(pool: Pool, hosts: Iterable[str]) -> None:
    """Trust hosts with the credentials of a pool, too. Raises ``redis.exceptions.DataError`` for another item."""
    items = parse_trusted_hosts(hosts) if isinstance(hosts, str) else tuple(hosts)
    try:
        trust_in((), items)
    except ConfigError as error:
        raise redis.exceptions.DataError(str(error)) from error
    state = state_of(pool)
    state.trusted_hosts = tuple(dict.fromkeys((*state.trusted_hosts, *items)))


def start_over() -> None:
    """Forget users and credentials in a forked child; the application's settings stay."""
    for pool, state in list(_states.items()):
        state.connections.start_over()
        state.credentials = _credentials_of(pool)


def options_of(pool: Pool) -> Mapping[str, Any]:
    """Return the arguments of a pool's connections."""
    return cast("Mapping[str, Any]", cast("Any", pool).connection_kwargs)


def is_asynchronous(pool: Pool) -> bool:
    """Tell whether a pool is one of ``redis.asyncio``."""
    return isinstance(pool, redis.asyncio.ConnectionPool)


def follow_renewals(pool: Pool, dispatcher: Any) -> None:
    """Make links log in again, too, whenever a provider that streams credentials has new ones for the connections.

    ``dispatcher`` is the one of the client of redis-py; None before 5.3, where no provider streams.
    """
    streaming: Any = getattr(redis.credentials, "StreamingCredentialProvider", None)  # since redis-py 5.3
    provider = options_of(pool).get("credential_provider")
    if streaming is None or not isinstance(provider, streaming):
        return
    from redis.event import AfterPooledConnectionsInstantiationEvent, ClientType

    asynchronous = is_asynchronous(pool)
    renewal = (_AsyncRenewal if asynchronous else _Renewal)(state_of(pool))
    kind = ClientType.ASYNC if asynchronous else ClientType.SYNC
    dispatcher.dispatch(AfterPooledConnectionsInstantiationEvent([renewal, pool], kind, cast("Any", provider)))


class _Renewal:
    """Receives new credentials from redis-py, as its pools do, and renews those of our links."""

    def __init__(self, state: PoolState) -> None:
        self._state = state

    def re_auth_callback(self, token: Any) -> None:
        """Use new credentials from now on."""
        if self._state.credentials is not None:
            self._state.credentials.renew(token.try_get("oid"), token.get_value())


class _AsyncRenewal:
    """The same for a pool of ``redis.asyncio``."""

    def __init__(self, state: PoolState) -> None:
        self._renewal = _Renewal(state)

    async def re_auth_callback(self, token: Any) -> None:
        """Use new credentials from now on."""
        self._renewal.re_auth_callback(token)


def _limit_of(pool: Pool) -> int | None:
    """Return ``max_connections`` of a pool; None where it is redis-py's default, which may not have been named.

    That (100) bounds how many commands run at once, and has never stopped anybody from having a thousand PubSubs here.
    Where it was named, see ``name_limit``: a pool that the application has made does not tell.
    """
    family: Any = redis.asyncio if is_asynchronous(pool) else redis
    kind = family.BlockingConnectionPool if isinstance(pool, family.BlockingConnectionPool) else family.ConnectionPool
    limit: int | None = getattr(pool, "max_connections", None)
    return None if limit == _default_limit(kind) else limit


@functools.cache
def _default_limit(kind: Callable[[], Any]) -> int | None:
    limit: int | None = kind().max_connections
    return limit


def _credentials_of(pool: Pool) -> Credentials | None:
    provider = options_of(pool).get("credential_provider")
    if provider is None:
        return None
    if is_asynchronous(pool) and hasattr(provider, "get_credentials_async"):  # since redis-py 5.3
        return Credentials(provider.get_credentials_async)

    async def ask() -> object:
        """A provider for threads may take its time, and the loop has other connections."""
        return await asyncio.to_thread(provider.get_credentials)

    return Credentials(ask)
