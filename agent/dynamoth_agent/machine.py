"""The agent of a server: dispatcher and load analyzer on one connection, as in Dynamoth, section III.

Theory of operation
-------------------
Both use the link ``local``: the dispatcher subscribes it to everything, and both handle every message. A reply goes to
the part that sent the command, by its tag. All other links are the dispatcher's, but for ``reports``, a second
connection to the same server over which an agent that sees nothing reports (``stand_in``). The agent also makes sure
that it is the only one of its server (``guard``).
"""

from __future__ import annotations

from typing import Any, assert_never
from urllib.parse import quote

from dynamoth.machine.events import Connect, LinkDown, LinkUp, Pushed, Replied, RepliedAll, Send, Start, Tick, earliest
from dynamoth.names import BALANCER_CHANNEL
from dynamoth.protocol.reports import CANNOT_OBSERVE, REPORT_PROBLEM_CHARACTERS_MAX
from dynamoth_agent.events import AgentAction, AgentEvent, LinkChanged, NotListed, ObservationRefused, PlanFollowed
from dynamoth_agent.guard import TAG as GUARD_TAG
from dynamoth_agent.guard import AgentGuard
from dynamoth_agent.stand_in import REPORTS, StandIn
from dynamoth_dispatcher.events import LOCAL
from dynamoth_dispatcher.machine import DispatcherMachine
from dynamoth_dispatcher.options import DispatcherOptions
from dynamoth_lla.machine import TAG as LLA_TAG
from dynamoth_lla.machine import LoadAnalyzer
from dynamoth_lla.options import LoadAnalyzerOptions


class AgentMachine:
    """The agent of one server.

    Args:
        server: id of the server.
        incarnation: up to 63 bits, random, new with each start of the process.
        dispatcher_options: None for the defaults.
        lla_options: what the server can send, and bounds.
        url: where the server is.

    """

    def __init__(
        self,
        server: str,
        incarnation: int,
        dispatcher_options: DispatcherOptions | None,
        lla_options: LoadAnalyzerOptions,
        url: str,
    ) -> None:
        self.server = server
        self.dispatcher = DispatcherMachine(server, incarnation, dispatcher_options)
        self.load_analyzer = LoadAnalyzer(server, incarnation, lla_options)
        self._guard = AgentGuard(
            server, incarnation, lla_options.report_interval_s, lambda: self.dispatcher.observation.why_blind
        )
        name = f"dynamoth-agent-reports:{quote(server, safe='')}"
        self.stand_in = StandIn(self.load_analyzer, lla_options.report_interval_s, name)
        self._url = url
        #: Whether the link ``local`` is up.
        self.is_up = False
        #: The latest report of each link: None for up, else why it is down.
        self._reported: dict[str, str | None] = {}
        #: Whether a plan that was followed has listed the server.
        self._was_listed = False
        #: Why the server takes no part in the cluster, as it was reported last.
        self._not_listed: str | None = None
        #: The refusal that was reported last.
        self._refusal: str | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the agent works: it observes its server and knows a plan."""
        return self.is_up and self.dispatcher.plan is not None and self.problem is None

    @property
    def problem(self) -> str | None:
        """Why this agent cannot observe its server, and the cure; None when it can."""
        reason = self.dispatcher.why_blind
        if reason is None or self.dispatcher.observation.refusal is None:
            return reason
        return (
            f"the server refuses what an agent needs ({reason}): its user must have allchannels, +psubscribe and"
            " +subscribe, as 'dynamoth acl' prints it"
        )

    @property
    def not_listed(self) -> str | None:
        """Why the server takes no part in the cluster, and what to do; None when the plan lists it, or without one."""
        plan, server = self.dispatcher.plan, self.server
        if plan is None or server in plan.servers:
            return None
        if self._was_listed or plan.has_left(server):
            return f"server {server} was removed from the plan: stop this agent, and take the server out of its file"
        return f"the plan does not list server {server}: type 'dynamoth server add {server} URL', or stop this agent"

    @property
    def plan_version(self) -> int | None:
        """The version of the plan that is acted upon; None while none is known."""
        plan = self.dispatcher.plan
        return None if plan is None else plan.version

    def handle(self, event: AgentEvent, now: float) -> list[AgentAction]:
        """Handle one event; return the actions to execute, in order."""
        was_clear = self._guard.is_clear
        actions = self._route(event, now)
        if not self._guard.is_clear:
            actions = [action for action in actions if not _speaks_to_balancer(action)]
            self.stand_in.may_speak &= not self._guard.has_met_another
        elif not was_clear:
            self.stand_in.may_speak = True
            actions += self.dispatcher.acknowledge()
        if self.dispatcher.observation.refusal != self._refusal:
            self._refusal, problem = self.dispatcher.observation.refusal, self.problem
            actions += [] if problem is None or self._refusal is None else [ObservationRefused(problem)]
        self.load_analyzer.problems = self._problems()
        plan = self.dispatcher.plan
        if (reason := self.not_listed) != self._not_listed:
            self._not_listed = reason
            actions += [] if reason is None else [NotListed(reason)]
        self._was_listed |= plan is not None and reason is None
        if plan is not None and plan.version != self.load_analyzer.plan_version:
            self.load_analyzer.plan_version, self.load_analyzer.planned = plan.version, plan.entries
            actions.append(PlanFollowed(plan.version))
        return actions

    def _problems(self) -> tuple[tuple[str, str], ...]:
        """Return the problems to report besides the figures."""
        problems = list(self.stand_in.problems)
        if self._refusal is not None:
            problems.append((CANNOT_OBSERVE, (self.problem or "")[:REPORT_PROBLEM_CHARACTERS_MAX]))
        if refused := self.dispatcher.forwarder.refusals:
            server, reply = next(iter(refused.items()))
            text = f"server {server} refuses forwarded messages, so they are lost: {reply}; give the agent its rights"
            problems.append(("forwards_refused", text[:REPORT_PROBLEM_CHARACTERS_MAX]))
        if (refused_to_leave := self.dispatcher.observation.leave_refusal) is not None:
            text = f"the agent gets each keyspace notification ({refused_to_leave}): give its user +punsubscribe"
            problems.append(("keyspace_notifications", text[:REPORT_PROBLEM_CHARACTERS_MAX]))
        return tuple(problems)

    def deadline(self) -> float | None:
        """Return the earliest deadline of the parts."""
        return earliest(
            self.dispatcher.deadline(), self.load_analyzer.deadline(), self._guard.deadline(), self.stand_in.deadline()
        )

    def check(self) -> None:
        """Assert the invariants between the parts, after each event."""
        self.dispatcher.check()
        self.load_analyzer.check()
        assert self.load_analyzer.plan_version == self.plan_version, "reports name the plan that is acted upon"
        assert self.stand_in.may_speak or not self._guard.is_clear, "the only agent may speak"
        assert self.is_up or not self._guard.is_clear, "without a connection another agent may be at work"

    def _route(self, event: AgentEvent, now: float) -> list[AgentAction]:
        if isinstance(event, Pushed):  # nearly all of them, so without a match
            actions: list[AgentAction] = [*self.dispatcher.handle(event, now)]
            if event.link == LOCAL:
                actions += self.load_analyzer.handle(event, now)
                if not self._guard.is_clear:
                    actions += self._guard.on_pushes(event.messages)
            return actions
        match event:
            case Replied():
                return self._on_reply(event, now)
            case RepliedAll():
                return [*self.dispatcher.handle(event, now)]
            case Tick():
                parts = (self.dispatcher.handle(event, now), self.load_analyzer.handle(event, now))
                return [*parts[0], *parts[1], *self._guard.tick(now), *self.stand_in.tick(now)]
            case LinkUp(link) if link == REPORTS:
                return self.stand_in.link_up(now)
            case LinkDown(link) if link == REPORTS:
                self.stand_in.link_down()
                return []
            case LinkUp(link):
                went_up = self._local_up(event, now) if link == LOCAL else self.dispatcher.handle(event, now)
                return [*self._report_link(link, None), *went_up]
            case LinkDown(link, reason):
                went_down = self._local_down(event, now) if link == LOCAL else self.dispatcher.handle(event, now)
                return [*self._report_link(link, reason), *went_down]
            case Start():
                return [Connect(LOCAL, self._url), Connect(REPORTS, self._url), *self.dispatcher.handle(event, now)]
            case _:
                assert_never(event)

    def _on_reply(self, event: Replied, now: float) -> list[AgentAction]:
        if event.link == REPORTS:
            return self.stand_in.on_reply(event, now)
        tag = event.tag
        owner: Any = tag[0] if isinstance(tag, tuple) else None  # pyright: ignore[reportUnknownVariableType]
        if event.link == LOCAL and owner == LLA_TAG:
            return [*self.load_analyzer.handle(event, now)]
        if event.link == LOCAL and owner == GUARD_TAG:
            return self._guard.on_reply(event, now)
        return [*self.dispatcher.handle(event, now)]

    def _local_up(self, event: LinkUp, now: float) -> list[AgentAction]:
        """Begin a connection: named before it is subscribed, and measured from where it is."""
        self.is_up = True
        return [
            *self._guard.introduce(),
            *self.dispatcher.handle(event, now),
            *self._guard.check(now),
            *self.load_analyzer.handle(event, now),
        ]

    def _local_down(self, event: LinkDown, now: float) -> list[AgentAction]:
        self.is_up = False
        self._guard.link_down()
        return [*self.dispatcher.handle(event, now), *self.load_analyzer.handle(event, now)]

    def _report_link(self, link: str, reason: str | None) -> list[AgentAction]:
        """Report a link, unless it was reported like this: while a server is down, each attempt fails alike."""
        if link in self._reported and self._reported[link] == reason:
            return []
        self._reported[link] = reason
        return [LinkChanged(link, reason)]


def _speaks_to_balancer(action: AgentAction) -> bool:
    """Return whether the balancer would believe this: an agent that may not be the only one must not send it."""
    if not isinstance(action, Send) or action.link != LOCAL:
        return False
    return action.args[0] == b"PUBLISH" and action.args[1] == BALANCER_CHANNEL
