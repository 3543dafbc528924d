"""python-socketio as ``app_socketio``, but with a server of threads, whose ``RedisManager`` uses the sync client."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from socketserver import ThreadingMixIn
from threading import Thread
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from tests.dependants.app_socketio import MANAGERS, browsing, publishing, socketio
from tests.dependants.worker import Hear

__all__ = ["listening", "publishing"]

CHANNEL = "socketio-sync"


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _QuietHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Requests are of no interest."""


@asynccontextmanager
async def listening(url: str, hear: Hear) -> AsyncGenerator[dict[str, str]]:
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
