"""Questions to all servers of a cluster, of which some hang or refuse."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from dynamoth.errors import ClusterUnavailable, RequestRefused
from dynamoth.machine.events import ErrorReply
from dynamoth.names import AGENT_CHANNEL, OPERATOR_CHANNEL, RECORD_CHANNEL, RECORDER_FAILING_CHANNEL
from dynamoth.plan.plan import Plan, Server
from dynamoth.protocol.control import AdminReply
from dynamoth.protocol.stored_plan import READ_HEADER
from dynamoth_cli import admin
from dynamoth_cli.cluster_access import Access
from dynamoth_cli.commands import status
from dynamoth_link.errors import LinkError
from dynamoth_link.options import LinkOptions
from dynamoth_link.urls import ServerAddress, parse_cluster_url
from tests.balancer.cluster import stored_hash

CLUSTER = parse_cluster_url("dynamoth://127.0.0.1:1,127.0.0.1:2,127.0.0.1:3")
LINK = LinkOptions()
HANGS = object()
REFUSED = ErrorReply("NOPERM no")


def answering(monkeypatch: pytest.MonkeyPatch, *answers: Any) -> None:
    """Let the servers give these answers, in their order."""

    async def query(server: ServerAddress, *commands: Any, **_: Any) -> list[Any]:
        answer = answers[server.port - 1]
        if answer is HANGS:
            await asyncio.Event().wait()
        return [answer]

    monkeypatch.setattr(admin, "query", query)


def port_with_balancer() -> int:
    server = asyncio.run(asyncio.wait_for(admin.find_balancer(CLUSTER, LINK), 5))
    return server.port


@pytest.mark.parametrize("answers", [(HANGS, [b"c", 0], [b"c", 1]), (REFUSED, HANGS, [b"c", 1])])
def test_no_server_keeps_a_balancer_from_being_found(monkeypatch: pytest.MonkeyPatch, answers: tuple[Any, ...]) -> None:
    answering(monkeypatch, *answers)
    assert port_with_balancer() == 3


def test_without_a_balancer_a_refusal_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, [b"c", 0], REFUSED, [b"c", 0])
    with pytest.raises(RequestRefused, match="NOPERM no"):
        port_with_balancer()
    answering(monkeypatch, [b"c", 0], [b"c", 0], [b"c", 0])
    with pytest.raises(ClusterUnavailable, match="no balancer is running"):
        port_with_balancer()


def test_a_plan_is_read_although_one_server_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan.initial([Server("s1", "redis://127.0.0.1:1")])
    stored = stored_hash(plan, "run")
    answering(monkeypatch, REFUSED, stored, stored)
    assert asyncio.run(admin.read_plan(CLUSTER, LINK)).version == plan.version
    answering(monkeypatch, REFUSED, REFUSED, REFUSED)
    with pytest.raises(RequestRefused, match="NOPERM no"):
        asyncio.run(admin.read_plan(CLUSTER, LINK))


def test_a_plan_of_another_format_is_not_said_to_be_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """No balancer of this version writes over it."""
    plan = Plan.initial([Server("s1", "redis://127.0.0.1:1")])
    newer, damaged = (
        {**stored_hash(plan, "run"), b"@format": b"7"},
        {b"@version": b"x", b"@cluster": b"x", b"@run": b""},
    )
    answering(monkeypatch, damaged, newer, newer)
    with pytest.raises(ClusterUnavailable, match=r"in format 7, .*: upgrade this software") as caught:
        asyncio.run(admin.read_plan(CLUSTER, LINK))
    assert "start 'dynamoth balancer'" not in str(caught.value)
    answering(monkeypatch, damaged, damaged, damaged)
    with pytest.raises(ClusterUnavailable, match="start 'dynamoth balancer', which writes it again"):
        asyncio.run(admin.read_plan(CLUSTER, LINK))


def test_status_names_the_server_whose_plan_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan.initial([Server(f"s{number}", f"redis://127.0.0.1:{number}") for number in (1, 2)])
    stored = {"s1": stored_hash(plan, "run"), "s2": {**stored_hash(plan, "run"), b"@format": b"7"}}
    listening = [AGENT_CHANNEL, 1, RECORDER_FAILING_CHANNEL, 0, RECORD_CHANNEL, 0, OPERATOR_CHANNEL, 1]
    headers = {id_: [fields.get(name) for name in READ_HEADER[2:]] for id_, fields in stored.items()}

    async def ask_all(servers: Any, *_: Any, **__: Any) -> list[Any]:
        return [[listening, headers[f"s{server.port}"]] for server in servers]

    async def read_header(*_: Any) -> Plan:
        return plan

    async def ask_balancer(*_: Any, **__: Any) -> Any:
        return {"servers": {}}

    monkeypatch.setattr(status, "ask_all", ask_all)
    monkeypatch.setattr(status, "read_header", read_header)
    monkeypatch.setattr(status, "ask_balancer", ask_balancer)
    found = asyncio.run(status.read_status(Access(CLUSTER, LINK)))
    [problem] = found["problems"]
    assert (problem["kind"], problem["subject"]) == ("plan_unreadable", "s2")
    assert "in format 7" in problem["reason"]
    assert [server["stored_version"] for server in found["servers"].values()] == [plan.version, None]


def test_servers_that_hang_hold_a_question_to_all_up_for_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan.initial([Server("s1", "redis://127.0.0.1:1")])
    answering(monkeypatch, stored_hash(plan, "run"), HANGS, HANGS)
    faults: list[LinkError] = []
    reading = asyncio.wait_for(admin.read_plan(CLUSTER, LINK, faults.append), admin.LATE_S + 20)
    assert asyncio.run(reading).version == plan.version
    assert [str(fault).partition(" no answer")[0] for fault in faults] == [
        "redis://127.0.0.1:2: timed out:",
        "redis://127.0.0.1:3: timed out:",
    ]


class FakeDriver:
    """Delivers answers to whoever asks, one after the other."""

    answers: tuple[AdminReply, ...] = ()

    def __init__(self, machine: Any, *, on_action: Callable[[Any], None], **_: Any) -> None:
        self._on_action = on_action

    def handle(self, event: Any) -> None:
        for answer in self.answers:
            self._on_action(admin.Answered(answer))

    async def close(self) -> None:
        """Nothing is open."""


def _status(stage: str, *problems: str) -> AdminReply:
    return AdminReply(1, {"stage": stage, "problems": [{"kind": kind} for kind in problems]}, None)


LEADS = _status("leading")
SHOULD_LEAD = _status("contending", "server_unreachable", "not_leading")
STANDS_BY = _status("contending", "server_unreachable")


@pytest.mark.parametrize(
    ("answers", "used"),
    [
        ((STANDS_BY, LEADS), LEADS),
        ((LEADS, STANDS_BY), LEADS),
        ((STANDS_BY,), STANDS_BY),
        ((STANDS_BY, SHOULD_LEAD), SHOULD_LEAD),
        ((SHOULD_LEAD, STANDS_BY), SHOULD_LEAD),
    ],
)
def test_of_two_balancers_that_answer_the_one_that_leads_or_says_why_not_is_believed(
    monkeypatch: pytest.MonkeyPatch, answers: tuple[AdminReply, ...], used: AdminReply
) -> None:
    answering(monkeypatch, [b"c", 2], [b"c", 0], [b"c", 0])
    monkeypatch.setattr(admin, "SECOND_ANSWER_S", 0.01)
    monkeypatch.setattr(admin, "Driver", FakeDriver)
    monkeypatch.setattr(FakeDriver, "answers", answers)
    assert asyncio.run(admin.ask_balancer(CLUSTER, "status", timeout_s=5)) == used.result
