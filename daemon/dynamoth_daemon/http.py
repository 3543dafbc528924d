"""The small HTTP server of the daemons, for monitoring: /metrics, /healthz and /readyz.

One request per connection, GET and HEAD only, no body. Size and time of a request and the number of connections are
bounded, so that nobody who reaches the port can hold up the daemon.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from types import MappingProxyType
from typing import Self

from dynamoth.errors import ConfigError

REQUEST_BYTES_MAX = 8192
"""Bound of request line and headers together; Prometheus and probes send less than 1 KB."""

REQUEST_TIMEOUT_S = 5.0
"""Bound of the time from the connection until the request is there, and again until the answer is taken."""

CONNECTIONS_MAX = 64
"""Connections at a time; one more closes the oldest, so that slow ones cannot keep probes out."""

TEXT = "text/plain; charset=utf-8"

_log = logging.getLogger("dynamoth.http")


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """The answer of a path."""

    status: HTTPStatus
    body: bytes
    content_type: str = TEXT


HttpHandler = Callable[[], HttpAnswer]
"""Answers a path. If it raises, that is logged and the answer is 500."""

HttpQuery = Callable[[str], HttpAnswer]
"""Answers a path with what stands behind its ``?``, as it came. If it raises, as for ``HttpHandler``."""


def health() -> HttpAnswer:
    """Answer /healthz: a process that answers is alive."""
    return HttpAnswer(HTTPStatus.OK, b"ok\n")


def readiness(why_not: str | None) -> HttpAnswer:
    """Answer /readyz: ready, or why not."""
    if why_not is None:
        return HttpAnswer(HTTPStatus.OK, b"ready\n")
    return HttpAnswer(HTTPStatus.SERVICE_UNAVAILABLE, f"not ready: {why_not}\n".encode())


class HttpServer:
    """Serves some paths. Made by :meth:`start`; ends with :meth:`close`."""

    def __init__(self, paths: Mapping[str, HttpHandler], queries: Mapping[str, HttpQuery]) -> None:
        self._paths = paths
        self._queries = queries
        self._server: asyncio.Server | None = None
        #: One task per connection, at most ``CONNECTIONS_MAX``, oldest first.
        self._connections: dict[asyncio.Task[None], None] = {}

    @classmethod
    async def start(
        cls,
        host: str,
        port: int,
        paths: Mapping[str, HttpHandler],
        queries: Mapping[str, HttpQuery] = MappingProxyType({}),
    ) -> Self:
        """Listen at ``host`` and ``port`` (0: any that is free, see :attr:`port`).

        Raises:
            ConfigError: the address cannot be listened at.

        """
        self = cls(paths, queries)
        try:
            self._server = await asyncio.start_server(self._accept, host, port, limit=REQUEST_BYTES_MAX)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"cannot listen at http_host {host!r}, http_port {port} ({error}): choose another host or port,"
                " or port 0 for none"
            ) from error
        return self

    @property
    def port(self) -> int:
        """The port that is listened at."""
        assert self._server is not None, "the server has been started"
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def close(self) -> None:
        """Stop listening, and cut the connections."""
        if self._server is None:
            return
        self._server.close()
        for task in self._connections:
            task.cancel()
        if self._connections:
            await asyncio.wait(self._connections)
        await self._server.wait_closed()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= CONNECTIONS_MAX:
            oldest = next(iter(self._connections))
            del self._connections[oldest]
            oldest.cancel()
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._connections[task] = None

        def end(ended: asyncio.Task[None]) -> None:  # called also for a task that was cancelled before it began
            self._connections.pop(ended, None)
            writer.transport.abort()

        task.add_done_callback(end)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            answer, with_body = await self._answer(reader)
            writer.write(_format(answer, with_body=with_body))
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError) as error:
            _log.debug("an HTTP connection ended early: %r", error)

    async def _answer(self, reader: asyncio.StreamReader) -> tuple[HttpAnswer, bool]:
        """Read one request; return the answer, and whether its body is wanted."""
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return _fault(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE), True
        except TimeoutError:
            return _fault(HTTPStatus.REQUEST_TIMEOUT), True
        except asyncio.IncompleteReadError:
            return _fault(HTTPStatus.BAD_REQUEST), True
        words = head.partition(b"\r\n")[0].decode("latin-1").split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return _fault(HTTPStatus.BAD_REQUEST), True
        if words[0] not in ("GET", "HEAD"):
            return _fault(HTTPStatus.METHOD_NOT_ALLOWED), True
        path, _, query = words[1].partition("?")
        return self._look_up(path, query), words[0] == "GET"

    def _look_up(self, path: str, query: str) -> HttpAnswer:
        handler = self._paths.get(path)
        if handler is None and path in self._queries:
            handler = partial(self._queries[path], query)
        if handler is None:
            known = ", ".join([*self._paths, *self._queries])
            return HttpAnswer(HTTPStatus.NOT_FOUND, f"no such path; there are {known}\n".encode())
        try:
            return handler()
        except Exception:
            _log.exception("the handler of %s failed: this is a bug", path)
            return _fault(HTTPStatus.INTERNAL_SERVER_ERROR)


def _fault(status: HTTPStatus) -> HttpAnswer:
    return HttpAnswer(status, f"{status.phrase}\n".encode())


def _format(answer: HttpAnswer, *, with_body: bool) -> bytes:
    head = (
        f"HTTP/1.1 {answer.status.value} {answer.status.phrase}\r\n"
        f"Content-Type: {answer.content_type}\r\n"
        f"Content-Length: {len(answer.body)}\r\n"
        "Allow: GET, HEAD\r\n"
        "Cache-Control: no-store\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode("latin-1") + (answer.body if with_body else b"")
