"""Translates our errors into redis-py's: ``except redis.exceptions.RedisError`` catches all but wrong use."""

from __future__ import annotations

import redis.exceptions
from redis.exceptions import RedisError

from dynamoth_link.errors import AuthenticationFailed, LinkError, ServerLoading

CLOSED = "the client was closed while this waited: keep it open until its calls have returned"

OTHER_LOOP = "this client belongs to another event loop: make one client per loop, and aclose() it there when done"


class OtherLoop(RuntimeError):
    """Raised when a client is used on another event loop than its own."""

    def __init__(self) -> None:
        super().__init__(OTHER_LOOP)


class ClientClosed(redis.exceptions.ConnectionError):
    """Raised when a client was closed while a call of it waited. A PubSub that is read subscribes again instead."""

    def __init__(self, text: str = CLOSED) -> None:
        super().__init__(text)  # pyright: ignore[reportUnknownMemberType]  # redis-py is typed in part


class BadOption(redis.exceptions.DataError, ValueError):
    """Raised when an option of redis-py has a value that nobody can use: a ValueError, as redis-py's often is."""


_BY_CODE: dict[str, type[RedisError]] = {
    "ERR": redis.exceptions.ResponseError,
    "NOPERM": redis.exceptions.NoPermissionError,
    "NOAUTH": redis.exceptions.AuthenticationError,
    "LOADING": redis.exceptions.BusyLoadingError,
    "READONLY": redis.exceptions.ReadOnlyError,
    "OOM": redis.exceptions.OutOfMemoryError,
}


def from_link(error: LinkError) -> RedisError:
    """Return the error for a server that cannot be used; its text is kept."""
    if isinstance(error, AuthenticationFailed):
        return redis.exceptions.AuthenticationError(str(error))
    if isinstance(error, ServerLoading):
        return redis.exceptions.BusyLoadingError(str(error))
    return redis.exceptions.ConnectionError(str(error))


def from_reply(text: str) -> RedisError:
    """Return the error for a command that a server refused with ``text``, as redis-py would raise it.

    A code that the class of the error stands for is not in its text.
    """
    code, _, words = text.partition(" ")
    return _BY_CODE[code](words) if code in _BY_CODE else redis.exceptions.ResponseError(text)


def joined(reasons: list[RedisError], summary: str) -> RedisError:
    """Return one error for several servers: about credentials if any of them is, else about connections."""
    about_credentials = any(isinstance(reason, redis.exceptions.AuthenticationError) for reason in reasons)
    kind = redis.exceptions.AuthenticationError if about_credentials else redis.exceptions.ConnectionError
    return kind("\n  ".join([summary, *map(str, reasons)]))
