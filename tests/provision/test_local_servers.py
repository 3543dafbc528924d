"""Servers that the balancer starts on this machine: real processes, which outlive the one that started them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from dynamoth_balancer.process.local_servers import ProcessProvisioner
from dynamoth_balancer.process.provisioners import ProvisionerFailed
from dynamoth_cli.local.embedded import find_redis_server
from dynamoth_link.query import query
from dynamoth_link.urls import parse_server_url

STUB = "import time; time.sleep(1000)"
"""In the place of an agent."""


def provisioner(folder: Path, redis_server: str | None = None, password: str = "") -> ProcessProvisioner:
    program = str(find_redis_server()) if redis_server is None else redis_server
    return ProcessProvisioner(
        folder, program, lambda id_, url: [sys.executable, "-c", STUB, id_, url], os.environ, password
    )


@asynccontextmanager
async def cleared(folder: Path) -> AsyncGenerator[None]:
    """Free all servers of a folder at the end."""
    try:
        yield
    finally:
        last = provisioner(folder)
        for id_ in await last.running():
            await last.free(id_)


def processes(folder: Path, id_: str) -> list[int]:
    """Return the processes of a server: its redis-server has the folder in its command line, its stub the id."""
    listed = subprocess.run(["ps", "-ww", "-eo", "pid=,args="], capture_output=True, text=True, check=True).stdout
    found = [line.split(None, 1) for line in listed.splitlines()]
    mine = [(pid, args) for pid, args in found if f"{folder}/{id_}/redis.conf" in args or f"{STUB} {id_} " in args]
    return [int(pid) for pid, _ in mine]


async def test_a_server_is_started_once_outlives_its_provisioner_and_leaves_nothing(tmp_path: Path) -> None:
    async with cleared(tmp_path):
        url = await provisioner(tmp_path, password="secret").start("auto-7-1")
        began = processes(tmp_path, "auto-7-1")
        assert len(began) == 2
        (reply,) = await query(parse_server_url(url).with_credentials(None, "secret"), (b"PING",))
        assert reply == b"PONG"

        later = provisioner(tmp_path, password="secret")
        assert await later.start("auto-7-1") == url
        assert processes(tmp_path, "auto-7-1") == began
        assert await later.running() == ["auto-7-1"]

        await later.free("auto-7-1")
        await later.free("auto-7-1")
        assert processes(tmp_path, "auto-7-1") == []
        assert await later.running() == []


@pytest.mark.parametrize("dies", ["redis", "agent"])
async def test_what_has_died_is_started_again_under_the_same_url_by_another_balancer(tmp_path: Path, dies: str) -> None:
    async with cleared(tmp_path):
        url = await provisioner(tmp_path).start("auto-7-1")
        known = json.loads((tmp_path / "auto-7-1" / "server.json").read_text())
        (other,) = {"redis", "agent"} - {dies}
        os.kill(known[dies], signal.SIGKILL)
        successor = provisioner(tmp_path)
        successor.adopt({"auto-7-1": url})

        assert await successor.start("auto-7-1") == url
        again = processes(tmp_path, "auto-7-1")
        assert len(again) == 2
        assert known[other] in again and known[dies] not in again


async def test_a_server_of_the_plan_that_runs_elsewhere_is_not_started_a_second_time(tmp_path: Path) -> None:
    local = provisioner(tmp_path)
    local.adopt({"auto-7-1": "redis://127.0.0.1:7777"})

    with pytest.raises(ProvisionerFailed, match=r"auto-7-1 at redis://127.0.0.1:7777 was not started from .*'folder'"):
        await local.start("auto-7-1")
    assert await local.running() == []


async def test_a_process_that_hangs_is_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamoth_balancer.process.local_servers.STOP_S", 0.2)
    async with cleared(tmp_path):
        local = provisioner(tmp_path)
        await local.start("auto-7-1")
        for pid in processes(tmp_path, "auto-7-1"):
            os.kill(pid, signal.SIGSTOP)

        await local.free("auto-7-1")
        assert processes(tmp_path, "auto-7-1") == []


async def test_a_redis_that_does_not_start_is_said_so(tmp_path: Path) -> None:
    async with cleared(tmp_path):
        with pytest.raises(
            ProvisionerFailed, match=r"redis-server of auto-7-1 does not answer; its last output.* runs here"
        ):
            await provisioner(tmp_path, "/bin/false").start("auto-7-1")


async def test_a_folder_that_cannot_be_made_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        ProvisionerFailed, match=r"server auto-7-1 cannot be started in .*Not a directory.*check the rights of 'folder'"
    ):
        await provisioner(tmp_path / "file").start("auto-7-1")


async def test_a_process_of_somebody_else_is_never_ended(tmp_path: Path) -> None:
    """Its number was that of a redis-server before."""
    (tmp_path / "auto-7-1").mkdir()
    (tmp_path / "auto-7-1" / "server.json").write_text(f'{{"redis": {os.getpid()}, "port": 1}}')
    await provisioner(tmp_path).free("auto-7-1")

    assert await provisioner(tmp_path).running() == [], "it is free, and we are alive"
