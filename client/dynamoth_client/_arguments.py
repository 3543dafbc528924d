"""The arguments of ``subscribe``, ``unsubscribe`` and the like, as redis-py takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import redis.exceptions

from dynamoth.names import RESERVED_PREFIX, SERVER_LOCAL_PREFIXES


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


def refuse_unroutable(name: bytes) -> None:
    """Raise ``redis.exceptions.DataError`` for a channel or a pattern that cannot be subscribed to here."""
    if not name.startswith(b"__"):
        return
    if name.startswith(SERVER_LOCAL_PREFIXES):
        raise redis.exceptions.DataError(
            f"{name!r} belongs to one server and is not routed: subscribe to it there, with"
            " redis.asyncio.client.PubSub(client.connection_pool) for the first server"
        )
    if name.startswith(RESERVED_PREFIX):
        raise redis.exceptions.DataError(f"{name!r} is one of Dynamoth's own channels: choose another name")
