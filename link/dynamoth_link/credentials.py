"""Credentials from a provider: asked for at each connection, and renewed while it is open."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import weakref
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, cast

from dynamoth.machine.events import CommandPart, ErrorReply
from dynamoth_link import errors
from dynamoth_link.urls import ServerAddress

if TYPE_CHECKING:
    from dynamoth_link.connection import Connection

ASK_S_MAX = 60.0
"""Longer than a credential provider should take. A provider that hangs must not block a link."""

DEFAULT_USER = "default"
"""The user that a password without a user name belongs to."""

Login = tuple[CommandPart, CommandPart]
"""User and password."""

_logger = logging.getLogger("dynamoth.link")


class Credentials:
    """Gives credentials to the links of one client, on any number of event loops.

    Args:
        ask: returns ``(user, password)``, ``(password,)``, or nothing for none. Called for each connection, when its
            socket is there. What it raises makes that attempt fail, and the next one asks again.

    """

    def __init__(self, ask: Callable[[], Awaitable[object]]) -> None:
        self._ask = ask
        #: Open connections that have logged in with these credentials, by ``id``. Any thread uses them, and a finalizer
        #: may in the midst of that: so there is no lock.
        self._connections: weakref.WeakValueDictionary[int, Connection] = weakref.WeakValueDictionary()

    async def get(self, address: ServerAddress) -> Login | None:
        """Return user and password for a connection to a server. Raises ``CredentialsUnavailable``."""
        limit = asyncio.timeout(ASK_S_MAX)
        try:
            async with limit:
                given = await self._ask()
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise errors.no_credentials(address, "was cancelled") from error
        except Exception as error:
            what = f"gave nothing within {ASK_S_MAX:g} s" if limit.expired() else f"raised {_described(error)}"
            raise errors.no_credentials(address, what) from error
        return parse_login(address, given)

    def keep(self, connection: Connection) -> None:
        """Remember a connection that has logged in: ``renew`` will log it in again."""
        self._connections[id(connection)] = connection

    def renew(self, user: CommandPart, password: CommandPart) -> None:
        """Log in again on all connections that are open, from any thread.

        A server that refuses is logged; its connection stays what it was.
        """
        for reference in self._connections.valuerefs():
            if (connection := reference()) is not None:
                with contextlib.suppress(RuntimeError):  # its loop is closed
                    connection.loop.call_soon_threadsafe(connection.send, ("AUTH", user, password), _renewed)


def parse_login(address: ServerAddress, given: object) -> Login | None:
    """Return what was given as user and password; None for none. Raises ``CredentialsUnavailable`` for other things."""
    if not given:
        return None
    if isinstance(given, (tuple, list)):
        all_parts = cast("tuple[object, ...]", given)
        parts = [part for part in all_parts if isinstance(part, (str, bytes))]
        if len(all_parts) == len(parts) == 1:
            return DEFAULT_USER, parts[0]
        if len(all_parts) == len(parts) == 2:
            return parts[0], parts[1]
    raise errors.no_credentials(address, "gave something that is neither (user, password) nor (password,)")


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _renewed(reply: object) -> None:
    if isinstance(reply, ErrorReply):
        _logger.warning("a server refused renewed credentials, and keeps the connection as it was: %s", reply)
