"""The arguments of ``subscribe``, ``unsubscribe`` and the like, as redis-py takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import redis.exceptions

from dynamoth.globs import bytes_spelled
from dynamoth.names import RESERVED_PREFIX, SERVER_LOCAL_PREFIXES

_COMMANDS = ("subscribe", "psubscribe", "ssubscribe", "unsubscribe", "punsubscribe", "sunsubscribe", "ping")


def flat(args: tuple[Any, ...]) -> list[Any]:
    """Return positional arguments: names, or a list of them first."""
    if not args or isinstance(args[0], (bytes, str, memoryview)) or not isinstance(args[0], Iterable):
        return list(args)
    return [*args[0], *args[1:]]


def with_handlers(
    args: tuple[Any, ...], kwargs: Mapping[str, Callable[[dict[str, Any]], Any]]
) -> dict[Any, Callable[[dict[str, Any]], Any] | None]:
    """Return names with their handlers, in order. redis-py 8 also has ``Subscription(name, handler)`` objects."""
    wanted: dict[Any, Callable[[dict[str, Any]], Any] | None] = {}
    for arg in flat(args):
        if hasattr(arg, "handler") and hasattr(arg, "name"):
            wanted[arg.name] = arg.handler
        else:
            wanted[arg] = None
    wanted.update(kwargs)
    return wanted


def method_of(command: Any) -> str:
    """Return the method of a PubSub for a command's name. Raises ``redis.exceptions.PubSubError`` for any other."""
    name = command.decode() if isinstance(command, bytes) else str(command)
    if name.lower() not in _COMMANDS:
        raise redis.exceptions.PubSubError(f"{name} is no command of a PubSub: give it to the client")
    return name.lower()


def refuse_unroutable(name: bytes, family: str) -> None:
    """Raise ``redis.exceptions.DataError`` for a channel that cannot be subscribed to here.

    ``family`` is the module of redis-py that the application's client stands for.
    """
    if not name.startswith(b"__"):
        return
    if name.startswith(SERVER_LOCAL_PREFIXES):
        raise _not_routed(name, family)
    if name.startswith(RESERVED_PREFIX):
        raise redis.exceptions.DataError(f"{name!r} is one of Dynamoth's own channels: choose another name")


def refuse_unroutable_pattern(pattern: bytes, family: str) -> None:
    """Raise ``redis.exceptions.DataError`` for a pattern of channels that cannot be subscribed to here.

    Such a pattern matches nothing else, or begins as their names do (``__key*__:*``). One that also matches other
    channels (``*``) is accepted.
    """
    refuse_unroutable(pattern, family)
    if any(bytes_spelled(pattern, prefix) >= enough for prefix, enough in _MEANT.items()):
        raise _not_routed(pattern, family)


_MEANT = {b"__keyspace@": len(b"__key"), b"__keyevent@": len(b"__key"), b"__redis__:": len(b"__redis")}
"""How much of the beginning of a server's own names a pattern must spell out to be meant for them."""


def _not_routed(name: bytes, family: str) -> redis.exceptions.DataError:
    return redis.exceptions.DataError(
        f"{name!r} belongs to one server and is not routed: subscribe to it there, with"
        f" {family}.client.PubSub(client.connection_pool) for the first server"
    )
