"""The provisioner ``process``: starts redis-server and an agent on this machine, each as a process of its own.

The processes do not end with the balancer: a balancer that is killed must take no server with it. So what runs is in
files, one folder for each server, and another balancer with the same folder continues. A process is known by its id
*and* by the id of its server in its command line, so that a number that the system has given to another process since
is never signalled.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dynamoth_balancer.process.provisioners import ProvisionerFailed
from dynamoth_link.errors import LinkError
from dynamoth_link.query import query
from dynamoth_link.urls import parse_server_url

HOST = "127.0.0.1"

READY_S = 10.0
"""A new redis-server answers within this time."""

STOP_S = 5.0
"""A process that was asked to end is killed after this time."""

POLL_S = 0.05

_DETACHED = '"$@" >>"$LOG" 2>&1 </dev/null & echo $!'
"""Starts a command that is no child of ours, so that nobody has to wait for its end."""


class ProcessProvisioner:
    """Starts servers on this machine; see ``Provisioner``.

    Args:
        folder: what runs is written there; made if it is not there.
        redis_server: the program.
        agent: returns the command of an agent, for the id and the URL of its server. It must contain the id.
        environment: all variables of the processes, among them the credentials of the agents.
        password: what the Redis servers ask for; empty for none.

    """

    def __init__(
        self,
        folder: Path,
        redis_server: str,
        agent: Callable[[str, str], Sequence[str]],
        environment: Mapping[str, str],
        password: str = "",
    ) -> None:
        self._folder = folder
        self._redis_server = redis_server
        self._agent = agent
        self._environment = dict(environment)
        self._password = password
        self._listed: Mapping[str, str] = {}

    def adopt(self, servers: Mapping[str, str]) -> None:
        """Note the servers of the plan, URLs by id: none of them is started elsewhere. What runs is in files."""
        self._listed = servers

    async def start(self, id_: str) -> str:
        """Start what does not run of a server and its agent."""
        home = self._folder / id_
        known = _read(home)
        if id_ in self._listed and self._listed[id_] != _url(known.get("port")):
            raise ProvisionerFailed(
                f"server {id_} at {self._listed[id_]} was not started from {home}: give this balancer the 'folder' of"
                " the one that has started it"
            )
        try:
            home.mkdir(parents=True, exist_ok=True)
            port = known.setdefault("port", _free_port())
            url = _url(port)
            configuration = home / "redis.conf"
            configuration.write_text(self._configuration(home, port))
            await asyncio.to_thread(self._ensure, home, known, "redis", [self._redis_server, str(configuration)])
            await self._wait_until_ready(home, url, known["redis"])
            await asyncio.to_thread(self._ensure, home, known, "agent", list(self._agent(id_, url)))
        except (OSError, subprocess.SubprocessError) as error:
            raise ProvisionerFailed(
                f"server {id_} cannot be started in {home}: {error}: check the rights of 'folder', and the space there"
            ) from error
        return url

    async def free(self, id_: str) -> None:
        """Stop a server and its agent, and forget them."""
        home = self._folder / id_
        if not home.is_dir():
            return
        known = _read(home)
        pids = [known[name] for name in ("agent", "redis") if name in known]
        for number, patience_s in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, STOP_S)):
            pids = await asyncio.to_thread(_running, pids, id_)
            for pid in pids:
                _signal(pid, number)
            for _ in range(int(patience_s / POLL_S)):
                if not await asyncio.to_thread(_running, pids, id_):
                    shutil.rmtree(home, ignore_errors=True)
                    return
                await asyncio.sleep(POLL_S)
        raise ProvisionerFailed(f"processes of server {id_} do not end: {', '.join(map(str, pids))}")

    async def running(self) -> list[str]:
        """Return the ids of all servers that have a folder."""
        return sorted(home.name for home in self._folder.iterdir() if home.is_dir()) if self._folder.is_dir() else []

    def _configuration(self, home: Path, port: int) -> str:
        lines = [f"bind {HOST}", f"port {port}", f'dir "{home}"', 'save ""', "appendonly no", "set-proc-title no"]
        return "\n".join([*lines, *([f'requirepass "{self._password}"'] if self._password else []), ""])

    def _ensure(self, home: Path, known: dict[str, Any], name: str, command: Sequence[str]) -> None:
        """Start a process of a server unless it runs, and note its id. In a thread, which no cancellation ends."""
        if not _runs(known.get(name, 0), home.name):
            known[name] = self._begin(home, command)
            _write(home, known)

    def _begin(self, home: Path, command: Sequence[str]) -> int:
        """Start a process that outlives this one; return its id. Raises OSError."""
        begun = subprocess.run(
            ["/bin/sh", "-c", _DETACHED, "sh", *command],
            env={**self._environment, "LOG": str(home / "log")},
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            check=True,
        )
        return int(begun.stdout)

    async def _wait_until_ready(self, home: Path, url: str, pid: int) -> None:
        address = parse_server_url(url).with_credentials(None, self._password or None)
        for _ in range(int(READY_S / POLL_S)):
            with suppress(LinkError):
                await query(address, timeout_s=1.0)
                if await asyncio.to_thread(_runs, pid, home.name):
                    return
            if not await asyncio.to_thread(_runs, pid, home.name):
                (home / "server.json").unlink(missing_ok=True)  # its port may have been taken: the next try has another
                break
            await asyncio.sleep(POLL_S)
        log = home / "log"
        last = log.read_text(errors="replace").strip().splitlines()[-1:] if log.exists() else []
        raise ProvisionerFailed(
            f"redis-server of {home.name} does not answer; its last output: {''.join(last) or 'nothing'}: check that"
            f" {self._redis_server} runs here"
        )


async def free_all(folder: Path) -> None:
    """Stop all servers that were started with this folder, and forget them. Raises ProvisionerFailed."""

    def no_agent(id_: str, url: str) -> Sequence[str]:
        raise AssertionError(f"nothing is started, and {id_} at {url} needs no agent")

    provisioner = ProcessProvisioner(folder, "", no_agent, {})
    for id_ in await provisioner.running():
        await provisioner.free(id_)


def _url(port: int | None) -> str:
    return f"redis://{HOST}:{port}"


def _read(home: Path) -> dict[str, Any]:
    """Return what runs of a server; a file that was half written says nothing."""
    with suppress(OSError, ValueError):
        return dict(json.loads((home / "server.json").read_text()))
    return {}


def _write(home: Path, known: Mapping[str, Any]) -> None:
    new = home / "server.json.new"
    new.write_text(json.dumps(known))
    new.replace(home / "server.json")


def _running(pids: Sequence[int], id_: str) -> list[int]:
    """Return those of some processes that run and are ones of this server."""
    return [pid for pid in pids if _runs(pid, id_)]


def _runs(pid: int, id_: str) -> bool:
    """Return whether a process runs and is one of this server."""
    if not pid:
        return False
    found = subprocess.run(["ps", "-ww", "-o", "args=", "-p", str(pid)], capture_output=True, text=True, check=False)
    args = found.stdout.strip()
    between_two_programs = args.startswith("[") and not args.endswith("<defunct>")  # exec has taken its command line
    return id_ in args or between_two_programs


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind((HOST, 0))
        port: int = free.getsockname()[1]
        return port
