"""Keeps the connections of queries for a link to take over: each saves a connect and a login."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from dynamoth_link.urls import ServerAddress

if TYPE_CHECKING:
    from dynamoth_link.connection import Connection
    from dynamoth_link.resp import OnPushBatch

SPARE_S = 1.0
"""How long a connection waits to be taken over. A client publishes or subscribes right after it has read the plan."""


class Spares:
    """Open connections that nobody uses, at most one per server. All were opened with the same options."""

    def __init__(self) -> None:
        #: By server: the connection, the run id of the server, and the timer that closes an unused connection.
        self._spares: dict[ServerAddress, tuple[Connection, str | None, asyncio.TimerHandle]] = {}

    def keep(self, address: ServerAddress, connection: Connection, run_id: str | None) -> None:
        """Keep a connection for ``SPARE_S``. No reply may be missing on it, and no subscription made."""
        self._drop(address)
        timer = connection.loop.call_later(SPARE_S, self._drop, address)
        self._spares[address] = connection, run_id, timer

    def take(self, address: ServerAddress, on_pushes: OnPushBatch) -> tuple[Connection, str | None] | None:
        """Return a connection to the server, and the run id; None where there is none on the running event loop."""
        spare = self._spares.get(address)
        if spare is None or spare[0].loop is not asyncio.get_running_loop():
            return None
        del self._spares[address]
        connection, run_id, timer = spare
        timer.cancel()
        if not connection.is_open:
            return None
        connection.hand_over(on_pushes)
        return connection, run_id

    def abandon(self) -> list[int]:
        """Forget all, of an event loop that is closed or the parent's; return the descriptors of the sockets."""
        spares, self._spares = self._spares, {}
        return [connection.fileno for connection, _, _ in spares.values() if connection.fileno >= 0]

    async def close(self) -> None:
        """End all, and wait until the sockets are gone."""
        connections = [connection for connection, _, _ in self._spares.values()]
        for address in list(self._spares):
            self._drop(address)
        for connection in connections:
            await connection.wait_closed(SPARE_S)

    def _drop(self, address: ServerAddress) -> None:
        if (spare := self._spares.pop(address, None)) is not None:
            spare[2].cancel()
            spare[0].abort()
