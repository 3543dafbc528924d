"""Requests to a provisioner: their answers, one that hangs, and the end of the balancer."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from dynamoth_balancer.events import ListServers, ProvisionerAnswered, ProvisionerRequest
from dynamoth_balancer.process.provisioners import CommandProvisioner, ProvisionerFailed
from dynamoth_balancer.process.provisioning import Provisioning
from dynamoth_balancer.provision.fleet import FreeServer, StartServer

START = StartServer("auto-7-1")


class Scripted:
    """A provisioner whose requests end when the test says so."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.adopted: list[dict[str, str]] = []
        self.may_end = asyncio.Event()
        self.fails = False
        self.fault: Exception | None = None

    def adopt(self, servers: Mapping[str, str]) -> None:
        self.adopted.append(dict(servers))

    async def _answer(self, request: str) -> None:
        self.asked.append(request)
        await self.may_end.wait()
        if self.fails:
            raise ProvisionerFailed("no credit left")
        if self.fault is not None:
            raise self.fault

    async def start(self, id_: str) -> str:
        await self._answer(f"start {id_}")
        return f"redis://{id_}"

    async def free(self, id_: str) -> None:
        await self._answer(f"free {id_}")

    async def running(self) -> list[str]:
        await self._answer("list")
        return ["auto-7-1", "auto-7-2"]


class Asked:
    """A provisioning, and its answers."""

    def __init__(self, timeout_s: float = 30.0) -> None:
        self.provisioner = Scripted()
        self.answers: asyncio.Queue[ProvisionerAnswered] = asyncio.Queue()
        self.provisioning = Provisioning(self.provisioner, timeout_s, self.answers.put_nowait)

    async def ask(self, request: ProvisionerRequest) -> ProvisionerAnswered:
        self.provisioning.request(request)
        return await self.answers.get()


@pytest.mark.parametrize(
    ("request_", "answer"),
    [
        (START, ProvisionerAnswered(START, url="redis://auto-7-1")),
        (FreeServer("auto-7-1"), ProvisionerAnswered(FreeServer("auto-7-1"))),
        (ListServers(), ProvisionerAnswered(ListServers(), ids=("auto-7-1", "auto-7-2"))),
    ],
)
async def test_each_request_has_its_answer(request_: ProvisionerRequest, answer: ProvisionerAnswered) -> None:
    asked = Asked()
    asked.provisioner.may_end.set()
    assert await asked.ask(request_) == answer

    asked.provisioner.fails = True
    assert await asked.ask(request_) == ProvisionerAnswered(request_, "no credit left")


async def test_one_that_hangs_is_given_up_and_may_be_asked_again() -> None:
    asked = Asked(timeout_s=0.05)
    answer = await asked.ask(START)
    assert answer == ProvisionerAnswered(START, "the provisioner has not answered for 0.05 s")

    asked.provisioner.may_end.set()
    assert (await asked.ask(START)).url == "redis://auto-7-1"
    assert asked.provisioner.asked == ["start auto-7-1", "start auto-7-1"]


async def test_a_fault_of_a_provisioner_is_reported_and_the_request_may_be_made_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = Asked()
    asked.provisioner.may_end.set()
    asked.provisioner.fault = OSError(28, "No space left on device")
    answer = await asked.ask(START)
    assert not answer.url
    assert "No space left on device" in answer.problem
    [record] = caplog.records
    assert record.exc_info is not None and record.exc_info[1] is asked.provisioner.fault

    asked.provisioner.fault = None
    assert (await asked.ask(START)).url == "redis://auto-7-1"


async def test_a_request_under_way_is_not_made_twice() -> None:
    asked = Asked()
    asked.provisioning.request(START)
    asked.provisioning.request(START)
    asked.provisioner.may_end.set()
    await asked.answers.get()
    await asked.provisioning.close()

    assert asked.provisioner.asked == ["start auto-7-1"]
    assert asked.answers.empty()


async def test_the_provisioner_hears_of_each_change_of_the_plans_servers_once() -> None:
    asked = Asked()
    for servers in ({"s1": "a"}, {"s1": "a"}, {"s1": "a", "s2": "b"}):
        asked.provisioning.adopt(servers)

    assert asked.provisioner.adopted == [{"s1": "a"}, {"s1": "a", "s2": "b"}]


async def test_the_end_of_the_balancer_ends_a_command_with_its_children(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    script = tmp_path / "hang"
    script.write_text(f"#!/bin/sh\nsleep 1000 &\necho $! > {pid}.new && mv {pid}.new {pid}\nwait\n")
    script.chmod(0o755)
    answers: list[ProvisionerAnswered] = []
    provisioning = Provisioning(CommandProvisioner([str(script)]), 30.0, answers.append)
    provisioning.request(START)
    while not pid.exists():  # noqa: ASYNC110 - a file has no event
        await asyncio.sleep(0.01)
    child = os.pidfd_open(int(pid.read_text()))
    await provisioning.close()

    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(child, ended.set)
    await ended.wait()
    asyncio.get_running_loop().remove_reader(child)
    os.close(child)
    assert not answers
