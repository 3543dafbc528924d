"""python-socketio as ``app_socketio``, but with a server of threads, whose ``RedisManager`` uses the sync client.

Its browser polls. Between two polls of a busy machine come more packets than the 16 that python-engineio accepts in
one answer: it then begins a new session, and what was emitted in between is lost, whatever Redis has delivered.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from importlib import import_module
from socketserver import ThreadingMixIn
from threading import Thread
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from tests.dependants.app_socketio import MANAGERS, browsing, publishing, socketio
from tests.dependants.worker import Hear

__all__ = ["listening", "publishing"]

CHANNEL = "socketio-sync"

PACKETS_MAX = 100_000
"""More than are emitted in a test."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _QuietHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Requests are of no interest."""


@asynccontextmanager
async def listening(url: str, hear: Hear) -> AsyncGenerator[dict[str, str]]:
    import_module("engineio.payload").Payload.max_decode_packets = PACKETS_MAX
    manager: Any = socketio.RedisManager(url, channel=CHANNEL)
    application: Any = socketio.WSGIApp(socketio.Server(async_mode="threading", client_manager=manager))
    server = make_server("127.0.0.1", 0, application, server_class=_Server, handler_class=_QuietHandler)
    thread = Thread(target=server.serve_forever, name="web server")
    thread.start()
    async with browsing(server.server_port, "polling", hear):
        yield dict.fromkeys(MANAGERS, CHANNEL)
    server.shutdown()
    thread.join()
    server.server_close()
