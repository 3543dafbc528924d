"""Servers that come and go by load, each on a machine of its own: what the balancer's provisioner ``command`` asks.

Theory of operation
-------------------
The balancer runs a program for each request (``dynamoth_balancer.process.provisioners``). That program is a relay of a
few lines: it hands the request to :class:`Machines`, which serves them one after the other in a thread of this process,
as only this process may make networks. A server is a machine of the network with its redis-server and its agent.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Any, Self

from bench.replication_network import POLL_INTERVAL_S, PORT, READY_TIMEOUT_S, Network, redis_command
from dynamoth.errors import ClusterUnavailable, DynamothError
from dynamoth_cli.local.child import Child, dynamoth_command
from dynamoth_cli.local.cluster import environment_without_settings
from dynamoth_link.errors import LinkError
from dynamoth_link.query import query
from dynamoth_link.urls import parse_server_url

_RELAY = """\
#!{python} -IS
import socket, sys
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect({path!r})
    connection.sendall(sys.stdin.buffer.read())
    connection.shutdown(socket.SHUT_WR)
    answer = b"".join(iter(lambda: connection.recv(65536), b""))
sys.stdout.buffer.write(answer)
sys.exit(0 if answer else 1)
"""


class Machines:
    """Starts and frees servers when the balancer asks. As a context manager; nothing of them is left on exit.

    Args:
        network: gets a machine for each server. It must live longer.
        bytes_per_s_max: what agents report as the capacity of their servers.

    """

    def __init__(self, network: Network, bytes_per_s_max: int) -> None:
        self._network = network
        self._bytes_per_s_max = bytes_per_s_max
        self._folder = Path(tempfile.gettempdir()) / f"dynamoth-bench-machines-{os.getpid()}"
        self._listening = socket.socket(socket.AF_UNIX)
        self._thread = Thread(target=self._serve, name="machines", daemon=True)
        #: The processes of each server that runs: Redis, then its agent. Written by the thread alone.
        self._running: dict[str, list[Child]] = {}
        #: What has ended the thread before its time.
        self._failure: BaseException | None = None

    def __enter__(self) -> Self:
        self._folder.mkdir(mode=0o700)
        path = self._folder / "requests"
        self._listening.bind(str(path))
        self._listening.listen()
        self._relay.write_text(_RELAY.format(python=sys.executable, path=str(path)))
        self._relay.chmod(0o700)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)  # accept() ends with an error
        self._thread.join()
        self._listening.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def command(self) -> str:
        """The value of ``fleet.command``."""
        return str(self._relay)

    @property
    def servers(self) -> list[str]:
        """The ids of the servers that run."""
        return list(self._running)

    @property
    def processes(self) -> dict[str, int]:
        """The ids of the processes, by name."""
        return {child.name: child.pid for children in list(self._running.values()) for child in list(children)}

    def check(self) -> None:
        """Raise what has ended the thread, or ChildEnded if a process has ended by itself."""
        if self._failure is not None:
            raise self._failure
        for children in list(self._running.values()):
            for child in list(children):
                if child.ended_by_itself:
                    raise child.failure()

    @property
    def _relay(self) -> Path:
        return self._folder / "provision"

    def _serve(self) -> None:
        """Answer requests until the socket is shut down; then end everything.

        In one thread, as the kernel ends children with the thread that has started them.
        """
        try:
            while (connection := self._accept()) is not None:
                with connection, connection.makefile("rb") as asked:
                    try:
                        answer = self._answer(json.loads(asked.read()))
                        connection.sendall(json.dumps(answer).encode())
                    except (DynamothError, OSError) as error:
                        # Without an answer the relay fails. If it has ended already, the balancer asks again.
                        sys.stderr.write(f"machines: {error}\n")
        except BaseException as error:
            self._failure = error
            raise
        finally:
            for id_ in list(self._running):
                self._free(id_)

    def _accept(self) -> socket.socket | None:
        try:
            return self._listening.accept()[0]
        except OSError:
            return None  # it is shut down

    def _answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        match request["action"]:
            case "start":
                return {"url": self._start(request["id"])}
            case "free":
                self._free(request["id"])
                return {}
            case _:
                return {"ids": self.servers}

    def _start(self, id_: str) -> str:
        if id_ not in self._network.addresses:
            self._network.add(id_)
        address = self._network.addresses[id_]
        url = f"redis://{address}:{PORT}"
        if id_ not in self._running:
            self._running[id_] = []
            limit = ("--outgoing-bytes-per-s-max", str(self._bytes_per_s_max))
            try:
                self._run(f"server {id_}", id_, redis_command(address, self._folder))
                _wait_for(url)
                agent = ("agent", "--server", id_, "--servers", f"{id_}={url}", *limit)
                self._run(f"agent {id_}", id_, dynamoth_command(*agent))
            except BaseException:
                self._free(id_)
                raise
        return url

    def _run(self, name: str, id_: str, command: list[str]) -> None:
        child = Child(name, self._network.inside(id_, command), environment=environment_without_settings())
        child.start()
        self._running[id_].append(child)

    def _free(self, id_: str) -> None:
        for child in reversed(self._running.pop(id_, ())):
            child.stop()


def _wait_for(url: str) -> None:
    """Wait until a server answers. Raises ClusterUnavailable when it does not."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while True:
        try:
            asyncio.run(query(parse_server_url(url), (b"PING",)))
        except LinkError as error:
            if time.monotonic() > deadline:
                raise ClusterUnavailable(f"not ready after {READY_TIMEOUT_S:g} s: {error}") from error
            time.sleep(POLL_INTERVAL_S)
        else:
            return
