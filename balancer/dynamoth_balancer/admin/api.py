"""Answers the requests of administrators.

Requests come as ``AdminRequest`` (``control.py``) on the operators' channel at any server. The answer goes to
``operator_inbox(request)`` at that server. A repeated request, whose answer may have been lost, is answered again and
not carried out again.

===========  ==============================  ================================================================
command      arguments                       result
===========  ==============================  ================================================================
status                                       see :mod:`dynamoth_balancer.admin.status`
plan         after: bytes, limit: 1..1000,   version, servers, base, entries (by channel name), and next: the
             all optional                    ``after`` of the next page, None at the end
plan         channel: bytes                  version, and entries with the one of the channel, also at home
move         channel: bytes, to: str         when it has settled: channel, mode, servers, epoch, version,
                                             duration_s, note; from and to
replicate    channel: bytes, mode: str,      when it has settled: the same; from, if it was at one server. With
             servers: [str] or count: int    count the least loaded servers, those that the channel is at first;
                                             the note says when there are fewer
unreplicate  channel: bytes, to: str         when it has settled: the same; to. Without ``to``, which is
                                             optional, at the least loaded of the replicas
compat...    action: add, lift, remove or    version, rules: [{pattern, server, plain}], in the order in which they
(-ibility)   list; pattern: bytes; for add   are looked at; see :mod:`dynamoth_balancer.admin.compatibility`
             server: str, plain: bool
server       action: add, remove, drain or   when more than half of the servers store it: action, server, version, and
             undrain, server: str, for add   note: why nothing had to be changed, or who still uses a removed server.
             url: str                        ``add`` tries the server first; ``remove`` waits until nobody listens there
rebalance    dry_run: bool,                  what the balancer would do now, or has done when its moves have settled:
             timeout_s, both optional        see :mod:`dynamoth_balancer.admin.rebalance`
explain      name: bytes, kind: "channel"    why a channel is where it is and stays there, or what a server carries
             or "server", which is optional  and does: see :mod:`dynamoth_balancer.admin.explain`
pin          channel: bytes, to: str         as move; and the balancer does not move the channel any more
unpin        channel: bytes                  channel, and servers: where it was pinned; version, note
pause                                        paused: True; version, note. No decisions of the balancer's own, drains
                                             among them; changes under way go on, administrators' are carried out
resume                                       paused: False; version, note
===========  ==============================  ================================================================

The last three are in the plan, and so is a pin: a later balancer reads them there.

The three changes, ``pin`` and ``rebalance`` also take ``timeout_s`` (above 0, at most ``CHANGE_TIMEOUT_S_MAX``): for a
change that has not settled by then, the answer says what it waits for, and the change goes on. Without ``timeout_s``,
``BalancerOptions.move_timeout_s`` applies. A change to where the channel is already succeeds at once, and the note says
so.

The modes are "all-subscribers" and "all-publishers", and "single" in results. A request that names a server being
drained is refused. Where the balancer chooses, it does not choose such a server; then the note says why there are fewer
than ``count``. The balancer leaves a channel as an administrator has replicated it, as long as its process lives; its
successor decides by load.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dynamoth.errors import RequestRefused
from dynamoth.machine.events import Send
from dynamoth.names import operator_inbox
from dynamoth.plan.plan import Mode, Server
from dynamoth.protocol.control import AdminReply, AdminRequest, pack_control
from dynamoth.protocol.wire import shortened
from dynamoth_balancer.admin.changes import BegunChange, Changes, ChangeState, mode_name
from dynamoth_balancer.admin.compatibility import describe_rules, new_rules
from dynamoth_balancer.admin.rebalance import Rebalance
from dynamoth_balancer.admin.standing import STANDING, begin_order
from dynamoth_balancer.events import InnerAction
from dynamoth_balancer.install.installer import Installer
from dynamoth_balancer.install.membership import ADD, DRAIN, REMOVE, UNDRAIN, Membership
from dynamoth_balancer.install.orders import Order
from dynamoth_balancer.options import BalancerOptions

CHANGES_PENDING_MAX = 1000
"""Bound of the changes that administrators wait for at one time."""

CHANGE_TIMEOUT_S_MAX = 86_400.0
"""Longest ``timeout_s`` of a change, so that abandoned requests do not fill ``CHANGES_PENDING_MAX`` for long."""

CHANGES = ("move", "replicate", "unreplicate", "pin")
"""The commands that are answered when their change has settled."""

UNDONE = (
    "the change was undone or replaced: an agent or a server that it needs has failed, or another balancer has changed"
    " the channel: see 'dynamoth status', then ask again"
)

REBALANCE = "rebalance"
"""The command that is answered when all moves have settled, or at once where it is a dry run."""

COMPATIBILITY = "compatibility"
"""The command that is answered when all agents have acknowledged the compatibility rules."""

SERVER = "server"
"""The command that is answered when more than half of the servers store the change."""

ANSWERED_LATER = (*CHANGES, COMPATIBILITY, REBALANCE, SERVER, *STANDING)

RULES_TIMEOUT_S = 5.0
"""Such a request is answered after this time even if some agent has not acknowledged the rules."""

Command = Callable[[Mapping[str, Any], float], Mapping[str, Any]]
"""Carries out a command at once, with its arguments, at a time; returns the result. Raises RequestRefused."""


@dataclass(slots=True)
class _Pending:
    """An unanswered request."""

    #: Where it came in last.
    server: str
    #: Returns the reply at a time; None while it is not due.
    reply: Callable[[float], AdminReply | None]


class Admin:
    """Answers the requests of administrators.

    Args:
        commands: those that are answered at once, by name.
        changes: begins ``CHANGES``.
        rebalance: makes and describes decisions.
        membership: changes the list of servers.
        installer: returns that of the present or latest term. All commands but ``status`` come only while the balancer
            leads; their answers may be due when it has lost the lease.
        options: those of the balancer.
        on_same_pause: called when the balancer is to be paused (True) or to resume and does so already.

    """

    def __init__(
        self,
        commands: Mapping[str, Command],
        changes: Changes,
        rebalance: Rebalance,
        membership: Membership,
        installer: Callable[[], Installer],
        options: BalancerOptions,
        on_same_pause: Callable[[bool, float], None],
        counters: Counter[str],
    ) -> None:
        self._commands = commands
        self._changes = changes
        self._rebalance = rebalance
        self._membership = membership
        self._installer = installer
        self._options = options
        self._on_same_pause = on_same_pause
        self._pending: OrderedDict[int, _Pending] = OrderedDict()
        #: The latest answers, oldest first, at most ``requests_max``.
        self._answered: OrderedDict[int, AdminReply] = OrderedDict()
        self._counters = counters

    def handle(self, server: str, request: AdminRequest, now: float) -> list[InnerAction]:
        """Answer a request that came in at ``server``, now or when its change has settled."""
        if (pending := self._pending.get(request.request)) is not None:
            pending.server = server
            return []
        if (answered := self._answered.get(request.request)) is not None:
            self._counters["requests_repeated"] += 1
            return [_send(server, answered)]
        self._counters["requests"] += 1
        try:
            if request.command in ANSWERED_LATER:
                return [*self._begin(server, request, now), *self._answer_due([request.request], now)]
            command = self._commands.get(request.command)
            if command is None:
                known = ", ".join(sorted([*self._commands, *ANSWERED_LATER]))
                raise RequestRefused(f"command {request.command!r:.60} is not known; known are {known}")
            return [self._answer(server, AdminReply(request.request, command(request.arguments, now)))]
        except RequestRefused as error:
            self._counters["requests_refused"] += 1
            return [self._answer(server, AdminReply(request.request, {}, str(error)))]

    def _begin(self, server: str, request: AdminRequest, now: float) -> list[InnerAction]:
        """Begin a change that is answered later."""
        if len(self._pending) >= CHANGES_PENDING_MAX:
            raise RequestRefused(f"{CHANGES_PENDING_MAX} changes are under way already; try again later")
        installer, number = self._installer(), request.request
        if request.command == COMPATIBILITY:
            rules = new_rules(installer.plan, request.arguments)
            reason = "an administrator has changed the compatibility rules"
            actions = [] if rules is None else installer.change_rules(rules, reason, now)
            self._pending[number] = _Pending(server, lambda at: self._rules_reply(number, now, at))
        elif request.command in STANDING:
            order, actions = begin_order(installer, request.command, request.arguments, now)
            if not actions and "paused" in order.result:
                self._on_same_pause(order.result["paused"], now)
            self._pending[number] = _Pending(server, lambda at: order.reply(self._installer(), number, at))
        elif request.command == SERVER:
            member, actions = self._change_servers(request.arguments, now)
            self._pending[number] = _Pending(server, lambda at: member.reply(self._installer(), number, at))
        elif request.command == REBALANCE:
            until = now + _timeout_s(request.arguments, self._options.move_timeout_s)
            begun, actions = self._rebalance.begin(installer, request.arguments, now)
            self._pending[number] = _Pending(
                server, lambda at: begun.reply(number, at) if begun.is_done or at >= until else None
            )
        else:
            timeout_s = _timeout_s(request.arguments, self._options.move_timeout_s)
            change, actions = self._changes.begin(installer, request.command, request.arguments, now)
            self._pending[number] = _Pending(server, lambda at: self._change_reply(number, change, now, timeout_s, at))
        return actions

    def tick(self, now: float) -> list[Send]:
        """Answer the changes that are in force everywhere, and those that took too long."""
        return self._answer_due(list(self._pending), now)

    def _answer_due(self, numbers: Iterable[int], now: float) -> list[Send]:
        """Answer those of some unanswered requests whose reply is due."""
        sends: list[Send] = []
        for number in numbers:
            pending = self._pending[number]
            if (reply := pending.reply(now)) is not None:
                del self._pending[number]
                self._counters["requests_refused"] += reply.error is not None
                sends.append(self._answer(pending.server, reply))
        return sends

    def check(self) -> None:
        """Assert that a request is waited for or answered, and that both are bounded."""
        assert self._pending.keys().isdisjoint(self._answered), "a request is answered once"
        assert len(self._pending) <= CHANGES_PENDING_MAX, f"{len(self._pending)} changes are waited for"
        assert len(self._answered) <= self._options.requests_max, f"{len(self._answered)} answers are kept"

    def _rules_reply(self, number: int, since: float, now: float) -> AdminReply | None:
        """Return the reply to a request for other rules; None while some agent has not acknowledged them."""
        installer = self._installer()
        if (waits := installer.rules_wait_for(now)) and now - since < RULES_TIMEOUT_S:
            return None
        text = f"the rules are stored, but not in force everywhere yet: they wait for {', '.join(waits)}"
        plan = installer.plan
        result: Mapping[str, Any] = {"version": plan.version, "rules": describe_rules(plan.compatibility)}
        return AdminReply(number, result, text if waits else None)

    def _change_servers(self, arguments: Mapping[str, Any], now: float) -> tuple[Order, list[InnerAction]]:
        action, server = arguments.get("action"), arguments.get("server")
        if not isinstance(server, str):
            raise RequestRefused(f"server must be the id of a server (text), not {shortened(server)}")
        if action == ADD:
            url = arguments.get("url")
            if not isinstance(url, str):
                raise RequestRefused(f"url must be where the server is (text), not {shortened(url)}")
            return self._membership.add(Server(server, url), now)
        changes = {REMOVE: self._membership.remove, DRAIN: self._membership.drain, UNDRAIN: self._membership.undrain}
        if not isinstance(action, str) or action not in changes:
            raise RequestRefused(f"action must be {ADD}, {', '.join(changes)}, not {shortened(action)}")
        return changes[action](server, now)

    def _change_reply(
        self, number: int, change: BegunChange, since: float, timeout_s: float, now: float
    ) -> AdminReply | None:
        """Return the reply to a request for a change; None while it has not settled."""
        installer = self._installer()
        state = self._changes.state(installer, change)
        if state is ChangeState.SUPERSEDED:
            return AdminReply(number, {}, UNDONE)
        if state is ChangeState.UNSETTLED and now - since < timeout_s:
            return None
        if state is ChangeState.UNSETTLED:
            waits = installer.why_unsettled(installer.transitions[change.channel], now)
            return AdminReply(number, {}, f"not settled after {timeout_s:g} s, but it goes on: it waits for {waits}")
        before, after = change.before, change.after
        result: dict[str, Any] = {
            "channel": change.channel,
            "mode": mode_name(after.mode),
            "servers": list(after.servers),
            "epoch": change.epoch,
            "version": installer.plan.version,
            "duration_s": now - since,
            "note": change.note,
        }
        if before.mode is Mode.SINGLE:
            result["from"] = before.servers[0]
        if after.mode is Mode.SINGLE:
            result["to"] = after.servers[0]
        return AdminReply(number, result)

    def _answer(self, server: str, reply: AdminReply) -> Send:
        self._answered[reply.request] = reply
        if len(self._answered) > self._options.requests_max:
            self._answered.popitem(last=False)
        return _send(server, reply)


def _timeout_s(arguments: Mapping[str, Any], default: float) -> float:
    value = arguments.get("timeout_s", default)
    if type(value) not in (int, float) or not 0 < value <= CHANGE_TIMEOUT_S_MAX:
        raise RequestRefused(f"timeout_s must be a number above 0, at most {CHANGE_TIMEOUT_S_MAX:g} (s)")
    return float(value)


def _send(server: str, reply: AdminReply) -> Send:
    return Send(server, (b"PUBLISH", operator_inbox(reply.request), pack_control(reply)))
