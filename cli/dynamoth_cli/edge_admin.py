"""Asks edge brokers and their coordinators: one request goes to all of them, and each answers.

They all listen on one channel at every server, and coordinators on one of their own, so the reply of NUMSUB is the
number of answers to expect. So brokers answer also while no coordinator runs.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from dynamoth.errors import ClusterUnavailable, RequestRefused
from dynamoth.machine.events import ErrorReply, Start
from dynamoth.names import COORDINATOR_CHANNEL, OPERATOR_EDGE_CHANNEL
from dynamoth.protocol.control import AdminReply, AdminRequest
from dynamoth_cli.admin import AdminMachine, Answered, Refused, ask_all
from dynamoth_link.driver import Driver
from dynamoth_link.errors import LinkError, MachineCrashed
from dynamoth_link.options import LinkOptions
from dynamoth_link.urls import ClusterAddress, ServerAddress

EVERYBODY = "*"
COORDINATORS = "coordinator"

LATE_S = 2.0
"""How long answers may take after the first one. One that hangs does not hold people up."""

ANSWER_TIMEOUT_S = 5.0

NOBODY = (
    "no edge broker and no coordinator is running in this cluster (nobody listens on their channel): start"
    " 'dynamoth broker' with the servers of the cluster"
)

NO_COORDINATOR = (
    "no coordinator is running in this cluster (nobody listens on its channel): start 'dynamoth coordinator'; until"
    " then nobody is moved by load"
)

_NO_ARGUMENTS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class EdgeAnswers:
    """What brokers and coordinators have answered, and how many were asked."""

    replies: tuple[AdminReply, ...]
    asked: int

    @property
    def missing(self) -> int:
        """How many have not answered, of those who should."""
        return max(0, self.asked - len(self.replies))

    def results(self, role: str) -> list[Mapping[str, Any]]:
        """Return the results of brokers, or of coordinators, without refusals."""
        return [each.result for each in self.replies if each.error is None and each.result.get("role") == role]

    def refusal(self) -> str | None:
        """Return why one of them refuses, None where none does."""
        return next((each.error for each in self.replies if each.error is not None), None)


async def ask_edge(
    cluster: ClusterAddress,
    link: LinkOptions,
    command: str,
    target: str = EVERYBODY,
    arguments: Mapping[str, Any] = _NO_ARGUMENTS,
) -> EdgeAnswers:
    """Send a request to brokers and coordinators; return what they answer.

    Args:
        cluster: its servers.
        link: credentials, TLS.
        command: as in ``dynamoth_broker.operators`` and ``dynamoth_broker.coordinator.requests``.
        target: the id of a broker, ``COORDINATORS``, or ``EVERYBODY``.
        arguments: those of the command.

    Raises:
        RequestRefused: a server does not let us ask.
        ClusterUnavailable: no server answers, nobody listens, or nobody has answered in time.

    """
    server, listeners = await _find(cluster, link, is_for_coordinators=target == COORDINATORS)
    request = AdminRequest(secrets.randbits(63), command, {"target": target, **arguments})
    expected = listeners if target in (EVERYBODY, COORDINATORS) else 1
    replies: list[AdminReply] = []
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def finish() -> None:
        if not done.done():
            done.set_result(None)

    def on_action(action: Any) -> None:
        if isinstance(action, Answered):
            replies.append(action.reply)
            if len(replies) >= expected:
                finish()
            elif len(replies) == 1:
                loop.call_later(LATE_S, finish)
        elif isinstance(action, Refused) and not done.done():
            done.set_exception(RequestRefused(f"{server.redacted()}: {action.reason}: check the user's permissions"))

    def on_crash(crash: MachineCrashed) -> None:
        if not done.done():
            done.set_exception(crash)

    machine = AdminMachine(server.url(), request, OPERATOR_EDGE_CHANNEL)
    driver = Driver(machine, on_action=on_action, link_options=lambda _: link, on_crash=on_crash)
    try:
        driver.handle(Start())
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            await done
    except TimeoutError as error:
        whom = "anybody" if target == EVERYBODY else f"the {target}" if target == COORDINATORS else f"broker {target}"
        why = f" ({machine.fault})" if machine.fault else ""
        raise ClusterUnavailable(
            f"no answer of {whom} within {ANSWER_TIMEOUT_S:g} s{why}: 'dynamoth broker status' shows who runs"
        ) from error
    finally:
        await driver.close()
    return EdgeAnswers(tuple(replies), expected)


async def _find(cluster: ClusterAddress, link: LinkOptions, *, is_for_coordinators: bool) -> tuple[ServerAddress, int]:
    """Return the server where most of them listen, and how many that are."""
    channel = COORDINATOR_CHANNEL if is_for_coordinators else OPERATOR_EDGE_CHANNEL
    best: tuple[ServerAddress, int] | None = None
    faults: list[LinkError] = []
    answers = await ask_all(cluster.servers, (b"PUBSUB", b"NUMSUB", channel), link=link)
    for server, answer in zip(cluster.servers, answers, strict=True):
        if isinstance(answer, LinkError):
            faults.append(answer)
        elif isinstance(count := answer[0], ErrorReply):
            raise RequestRefused(f"{server.redacted()}: {count}: check the user's permissions")
        elif count[1] and (best is None or count[1] > best[1]):
            best = server, count[1]
    if best is not None:
        return best
    if len(faults) == len(cluster.servers):
        raise ClusterUnavailable("no server of the cluster answers:" + "".join(f"\n  {fault}" for fault in faults))
    raise ClusterUnavailable(NO_COORDINATOR if is_for_coordinators else NOBODY)
