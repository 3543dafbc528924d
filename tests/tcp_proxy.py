"""A TCP proxy that can stop passing bytes without closing anything, as a connection that is cut silently."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

CHUNK_BYTES = 16 * 1024


class Proxy:
    """Passes bytes between its port and another one, on the running event loop.

    Args:
        port: where a server listens on this machine.
        bytes_per_s: how much it passes at most, in each direction of each connection; 0 for no limit.
        tls: what its own port speaks, if anything.

    """

    def __init__(self, port: int, bytes_per_s: float = 0, tls: ssl.SSLContext | None = None) -> None:
        self._to = port
        self._bytes_per_s = bytes_per_s
        self._tls = tls
        #: Set while bytes pass, on the present connections and on those to come.
        self._passing = asyncio.Event()
        self._passing.set()
        #: Set while bytes pass from the server, too.
        self._answering = asyncio.Event()
        self._answering.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def port(self) -> int:
        """Its own port."""
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    def cut(self) -> None:
        """Pass nothing from now on, and keep all connections open; new ones as well."""
        self._passing.clear()

    def cut_present(self) -> None:
        """Pass nothing any more on the present connections, and everything on new ones."""
        self._passing.clear()
        self._passing = asyncio.Event()
        self._passing.set()

    def hold_answers(self) -> None:
        """Pass what is sent to the server, and nothing of what comes back, until ``drop``."""
        self._answering.clear()

    async def drop(self) -> None:
        """Close the present connections, with all that was held; new ones pass everything."""
        await self._end_tasks()
        self._answering.set()

    def mend(self) -> None:
        """Pass everything again, and what has waited first."""
        self._passing.set()

    async def start(self) -> None:
        """Listen. Its buffers are small, so that what the other side does not get stays with the sender."""
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, CHUNK_BYTES)
        self._server = await asyncio.start_server(self._accept, sock=listener, limit=CHUNK_BYTES, ssl=self._tls)

    async def stop(self) -> None:
        """Close everything."""
        assert self._server is not None
        self._server.close()
        await self._end_tasks()

    async def _end_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to: asyncio.StreamWriter | None = None
        try:
            passing = self._passing
            await passing.wait()
            from_, to = await asyncio.open_connection("127.0.0.1", self._to, limit=CHUNK_BYTES)
            ways = self._pass(reader, to, passing), self._pass(from_, writer, passing, self._answering)
            ends = [asyncio.create_task(way) for way in ways]
            try:
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for end in ends:
                    end.cancel()
                await asyncio.gather(*ends, return_exceptions=True)
        finally:
            for side in (writer, to):
                if side is not None:
                    side.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *gates: asyncio.Event) -> None:
        while data := await reader.read(CHUNK_BYTES):
            for gate in gates:
                await gate.wait()
            writer.write(data)
            await writer.drain()
            if self._bytes_per_s:
                await asyncio.sleep(len(data) / self._bytes_per_s)


@asynccontextmanager
async def proxied(port: int, bytes_per_s: float = 0, tls: ssl.SSLContext | None = None) -> AsyncGenerator[Proxy, None]:
    """Run a proxy to a port of this machine."""
    proxy = Proxy(port, bytes_per_s, tls)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.stop()
