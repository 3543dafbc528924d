"""Reads the plan of a running cluster from its servers, and sends requests to its balancer.

Theory of operation
-------------------
A request goes to the balancer through any server: it is published on the operators' channel there, and the answer comes
to an inbox of the request's own, at the same server. So the inbox is subscribed first. An unanswered request is sent
again with the same number, over a new connection if necessary: the balancer gives it the same answer again, and a
balancer that was restarted in between gets it, too.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from dynamoth.errors import ClusterUnavailable, MalformedMessage, OtherFormat, RequestRefused
from dynamoth.machine.events import (
    CommandPart,
    Connect,
    ErrorReply,
    LinkDown,
    LinkUp,
    Pushed,
    Replied,
    Send,
    Start,
    Tick,
)
from dynamoth.names import OPERATOR_CHANNEL, operator_inbox
from dynamoth.plan.plan import Plan
from dynamoth.protocol.control import AdminReply, AdminRequest, pack_control, unpack_control
from dynamoth.protocol.stored_plan import READ_HEADER, READ_WHOLE, parse_header, parse_whole
from dynamoth_link.driver import Driver
from dynamoth_link.errors import LinkError, MachineCrashed, connect_timed_out
from dynamoth_link.options import LinkOptions
from dynamoth_link.query import query
from dynamoth_link.urls import ClusterAddress, ServerAddress

REPEAT_INTERVAL_S = 1.0
"""A request that was not answered for this long is sent again."""

ANSWER_TIMEOUT_S = 5.0

LATE_S = 1.0
"""How much later than the first server the others may answer the same question."""

SECOND_ANSWER_S = 0.5
"""How long to wait for a better answer of another balancer: two get a request at the same time."""

BEST = 2
"""The rank of an answer that no other one can be better than."""

NO_BALANCER = (
    "no balancer is running in this cluster (nobody listens on its channel): start 'dynamoth balancer'; until then"
    " everything goes on with the last plan, and nothing is moved"
)


# The request, as a machine.


@dataclass(frozen=True, slots=True)
class Answered:
    """Action: the balancer has answered."""

    reply: AdminReply


@dataclass(frozen=True, slots=True)
class Refused:
    """Action: the server does not let us ask."""

    reason: str


class AdminMachine:
    """Asks one thing, through one server, until it is answered.

    Args:
        url: the server.
        request: with a number that nobody else uses.
        channel: where those listen who answer: the balancer, or edge brokers and coordinators.
    """

    def __init__(self, url: str, request: AdminRequest, channel: bytes = OPERATOR_CHANNEL) -> None:
        self._url = url
        self._channel = channel
        self._inbox = operator_inbox(request.request)
        self._number = request.request
        self._packed = pack_control(request)
        #: When the request is sent again; None while the inbox is not subscribed, and after the answer.
        self._repeat_at: float | None = None
        #: Messages in our inbox that are no answer to us.
        self.ignored = 0
        #: Why the server cannot be reached at present; None while it can, and before the first attempt.
        self.fault: str | None = None

    def handle(self, event: Any, now: float) -> list[Any]:
        """Handle one event; return the actions to execute, in order."""
        match event:
            case Start():
                return [Connect("server", self._url)]
            case LinkUp():
                self.fault = None
                return [Send("server", (b"SUBSCRIBE", self._inbox), "subscribe")]
            case LinkDown():
                self.fault = event.reason
                self._repeat_at = None
            case Pushed():
                return self._pushed(event, now)
            case Tick() if self._repeat_at is not None:
                return self._ask(now)
            case Replied(value=ErrorReply() as error):
                return [Refused(str(error))]
            case _:
                pass
        return []

    def deadline(self) -> float | None:
        """Return when the request is sent again."""
        return self._repeat_at

    def _pushed(self, event: Pushed, now: float) -> list[Any]:
        actions: list[Any] = []
        for push in event.messages:
            if push[0] == b"subscribe":
                actions += self._ask(now)
            elif push[0] == b"message" and (reply := self._read(push[2])):
                self._repeat_at = None
                actions.append(Answered(reply))
        return actions

    def _ask(self, now: float) -> list[Any]:
        self._repeat_at = now + REPEAT_INTERVAL_S
        return [Send("server", (b"PUBLISH", self._channel, self._packed), "publish")]

    def _read(self, data: bytes) -> AdminReply | None:
        """Read an answer; anybody can write into our inbox."""
        try:
            reply = unpack_control(data)
        except MalformedMessage:
            reply = None
        if isinstance(reply, AdminReply) and reply.request == self._number:
            return reply
        self.ignored += 1
        return None


# Running it.

_NO_ARGUMENTS: Mapping[str, Any] = MappingProxyType({})


_DEFAULTS = LinkOptions()


async def ask_balancer(
    cluster: ClusterAddress,
    command: str,
    arguments: Mapping[str, Any] = _NO_ARGUMENTS,
    *,
    timeout_s: float,
    link: LinkOptions = _DEFAULTS,
) -> Mapping[str, Any]:
    """Send a request to the balancer; return its result.

    While a second balancer waits for the lease, both answer "status": the answer of the one that leads is taken.

    Args:
        cluster: its servers.
        command: as in ``dynamoth_balancer.admin.api``.
        arguments: those of the command.
        timeout_s: bound of the whole answer.
        link: credentials, TLS.

    Raises:
        RequestRefused: the balancer refuses, with its reason.
        ClusterUnavailable: no server answers, no balancer is running, or none has answered within ``timeout_s``.
        LinkError: the servers do not let us in.

    """
    server = await find_balancer(cluster, link)
    request = AdminRequest(secrets.randbits(63), command, dict(arguments))
    loop = asyncio.get_running_loop()
    done: asyncio.Future[AdminReply] = loop.create_future()

    fallback: list[AdminReply] = []

    def on_action(action: Any) -> None:
        if done.done():
            return
        if isinstance(action, Answered):
            if action.reply.error is not None or _rank(action.reply.result) == BEST:
                done.set_result(action.reply)
            else:
                fallback.append(action.reply)
                loop.call_later(SECOND_ANSWER_S, settle)
        elif isinstance(action, Refused):
            done.set_exception(RequestRefused(f"{server.redacted()}: {action.reason}: check the user's permissions"))

    def settle() -> None:
        if not done.done():
            done.set_result(max(fallback, key=lambda reply: _rank(reply.result)))

    def on_crash(crash: MachineCrashed) -> None:
        if not done.done():
            done.set_exception(crash)

    machine = AdminMachine(server.url(), request)
    driver = Driver(machine, on_action=on_action, link_options=lambda _: link, on_crash=on_crash)
    try:
        driver.handle(Start())
        async with asyncio.timeout(timeout_s):
            reply = await done
    except TimeoutError as error:
        why = f" ({machine.fault})" if machine.fault else ""
        raise ClusterUnavailable(
            f"the balancer has not answered {command!r} within {timeout_s:g} s{why}:"
            " 'dynamoth status' says whether one leads, and why not; its log says more"
        ) from error
    finally:
        await driver.close()
    if reply.error is not None:
        raise RequestRefused(reply.error)
    return reply.result


def _rank(result: Mapping[str, Any]) -> int:
    """Return how good an answer is. Of a status, that of the leader is best.

    Where none leads, one that says so is better than one of a standby, which waits for the other.
    """
    if result.get("stage", "leading") == "leading":
        return BEST
    return int(any(problem["kind"] == "not_leading" for problem in result.get("problems", ())))


async def find_balancer(cluster: ClusterAddress, link: LinkOptions) -> ServerAddress:
    """Return a server that a balancer listens at.

    Raises:
        RequestRefused: no server says that there is one, and some refuse to say it.
        ClusterUnavailable: no server answers, or no balancer is running.

    """
    faults: list[LinkError] = []
    refusals: list[str] = []
    answers = await ask_all(cluster.servers, (b"PUBSUB", b"NUMSUB", OPERATOR_CHANNEL), link=link)
    for server, answer in zip(cluster.servers, answers, strict=True):
        if isinstance(answer, LinkError):
            faults.append(answer)
        elif isinstance(count := answer[0], ErrorReply):
            refusals.append(f"{server.redacted()}: {count}: check the user's permissions")
        elif count[1]:
            return server
    if refusals:
        raise RequestRefused(refusals[0])
    if len(faults) == len(cluster.servers):
        raise _unavailable(faults)
    raise ClusterUnavailable(NO_BALANCER)


async def ask_all(
    servers: Sequence[ServerAddress], *commands: Sequence[CommandPart], link: LinkOptions
) -> list[list[Any] | LinkError]:
    """Send all servers the same commands at once; return the replies of each, or why there are none.

    When one has answered, the others have ``LATE_S`` to do so: one that hangs does not hold people up.
    """
    tasks = [
        asyncio.create_task(query(server, *commands, options=link, timeout_s=ANSWER_TIMEOUT_S)) for server in servers
    ]
    try:
        await _first_success(tasks)
        await asyncio.wait(tasks, timeout=LATE_S)
        found: list[list[Any] | LinkError] = []
        for server, task in zip(servers, tasks, strict=True):
            fault = task.exception() if task.done() else connect_timed_out(server, LATE_S)
            if fault is not None and not isinstance(fault, LinkError):
                raise fault
            found.append(task.result() if fault is None else fault)
        return found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _first_success(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Wait until one of these tasks has succeeded, or all have ended."""
    left = set(tasks)
    while left:
        done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
        if any(task.exception() is None for task in done):
            return


async def read_plan(
    cluster: ClusterAddress, link: LinkOptions = _DEFAULTS, on_fault: Callable[[LinkError], None] = lambda _: None
) -> Plan:
    """Return the plan that a server stores: the newest of those that the URL names.

    Args:
        cluster: its servers.
        link: credentials, TLS.
        on_fault: called for each server that does not answer, when another one does.

    Raises:
        ClusterUnavailable: no server answers, or none stores a plan.

    """
    return await _newest(cluster, link, READ_WHOLE, lambda reply: parse_whole(reply, None), on_fault)


async def read_header(cluster: ClusterAddress, link: LinkOptions = _DEFAULTS) -> Plan:
    """Return the same without the entries of channels, which may be many. Raises as ``read_plan``."""

    def parse(reply: Any) -> Plan | None:
        header = parse_header(reply, None)
        return None if header is None else header.plan

    return await _newest(cluster, link, READ_HEADER, parse, lambda _: None)


async def _newest(
    cluster: ClusterAddress,
    link: LinkOptions,
    command: tuple[CommandPart, ...],
    parse: Callable[[Any], Plan | None],
    on_fault: Callable[[LinkError], None],
) -> Plan:
    plans: list[Plan] = []
    damage: list[MalformedMessage] = []
    faults: list[LinkError] = []
    refusals: list[str] = []
    for answer in await ask_all(cluster.servers, command, link=link):
        if isinstance(answer, LinkError):
            faults.append(answer)
        elif isinstance(answer[0], ErrorReply):
            refusals.append(f"the stored plan cannot be read: {answer[0]}: check the user's permissions")
        else:
            try:
                plan = parse(answer[0])
            except MalformedMessage as error:
                damage.append(error)
                continue
            if plan is not None:
                plans.append(plan)
    if plans:
        for fault in faults:
            on_fault(fault)
        return max(plans, key=lambda plan: plan.version)
    if refusals:
        raise RequestRefused(refusals[0])
    if len(faults) == len(cluster.servers):
        raise _unavailable(faults)
    for reason in damage:
        if isinstance(reason, OtherFormat):  # it says what to do; no balancer of this version writes over it
            raise ClusterUnavailable(str(reason))
    if damage:
        raise ClusterUnavailable(f"{damage[0]}: start 'dynamoth balancer', which writes it again")
    raise ClusterUnavailable(_no_plan_yet(faults))


def _no_plan_yet(faults: list[LinkError]) -> str:
    cure = "start 'dynamoth balancer', which writes it"
    if not faults:
        return f"no server stores a plan yet: {cure}"
    when = "as soon as it reaches more than half of the servers"
    return f"no server that answers stores a plan: {cure} {when}:{_lines(faults)}"


def _unavailable(faults: list[LinkError]) -> ClusterUnavailable:
    return ClusterUnavailable(f"no server of the cluster answers:{_lines(faults)}")


def _lines(faults: list[LinkError]) -> str:
    return "".join(f"\n  {fault}" for fault in faults)
