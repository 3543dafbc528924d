"""The agent of a server: dispatcher and load analyzer on one connection (the paper puts both on the server's agent).

Theory of operation
-------------------
The link ``local`` belongs to both: the dispatcher subscribes it to everything, and each is told of every message.
Replies go to whoever asked, by tag. All other links are the dispatcher's. Here the agent also makes sure that it is
the only one of its server (``guard``), and says what people want to know: links that go up and down, and plans. A
second link, ``reports``, speaks for an agent that sees nothing (``watch``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from dynamoth.machine.events import Connect, LinkDown, LinkUp, Pushed, Replied, RepliedAll, Send, Start, Tick, earliest
from dynamoth.names import BALANCER_CHANNEL
from dynamoth.protocol.reports import CANNOT_OBSERVE, REPORT_PROBLEM_CHARACTERS_MAX
from dynamoth_agent.guard import LOCAL, AgentGuard
from dynamoth_agent.guard import TAG as GUARD_TAG
from dynamoth_agent.stand_in import REPORTS, Watch
from dynamoth_dispatcher.machine import DispatcherMachine, DispatcherOptions
from dynamoth_lla.machine import TAG as LLA_TAG
from dynamoth_lla.machine import LoadAnalyzer
from dynamoth_lla.options import LoadAnalyzerOptions


@dataclass(frozen=True, slots=True)
class LinkChanged:
    """Action, for people: a link is up (``reason`` None), or down for a reason that is not the one said last."""

    link: str
    reason: str | None


@dataclass(frozen=True, slots=True)
class ObservationRefused:
    """Action, for people: the server does not let this agent observe it, so it does nothing. Said once per reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class PlanFollowed:
    """Action, for people: the dispatcher acts on this version of the plan now."""

    version: int


class AgentMachine:
    """The agent of one server.

    Its own actions are :class:`LinkChanged`, :class:`PlanFollowed`, :class:`ObservationRefused`,
    ``guard.AlreadyRunning`` (the process shall end), ``guard.GuardRefused``, ``watch.BlindnessChanged``,
    ``watch.ServerSettings`` and the analyzer's ``ObservationLate``. A driver that does not know them may ignore all but
    ``AlreadyRunning``.

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
        self._guard = AgentGuard(server, incarnation)
        name = f"dynamoth-agent-reports:{quote(server, safe='')}"
        self._watch = Watch(self.load_analyzer, lla_options.report_interval_s, name)
        self._url = url
        #: Whether the link ``local`` is up.
        self.is_up = False
        #: What was said last of each link: None for up, else why it is down.
        self._said: dict[str, str | None] = {}
        #: The refusal that was said last.
        self._refusal: str | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the agent does its work: it observes its server and knows a plan."""
        return self.is_up and self.dispatcher.plan is not None and self.problem is None

    @property
    def problem(self) -> str | None:
        """Why this agent cannot observe its server, and what to do; None when it can."""
        reason = self.dispatcher.why_blind
        if reason is None or self.dispatcher.refusal is None:
            return reason
        return (
            f"the server refuses what an agent needs ({reason}): its user must have allchannels, +psubscribe and"
            " +subscribe, as 'dynamoth acl' prints it"
        )

    @property
    def is_blind(self) -> bool:
        """Whether the agent sees nothing of what is published, or only long after."""
        return self._watch.blind

    def blind_s(self, now: float) -> float:
        """Return for how long reports have been missing."""
        return self._watch.blind_s(now)

    @property
    def plan_version(self) -> int | None:
        """The version of the plan that is acted upon; None while none is known."""
        plan = self.dispatcher.plan
        return None if plan is None else plan.version

    def handle(self, event: Any, now: float) -> list[Any]:
        """Take one event; return the actions to execute, in order."""
        was_clear = self._guard.is_clear
        actions = self._route(event, now)
        if not self._guard.is_clear:
            actions = [action for action in actions if not _speaks_to_balancer(action)]
        elif not was_clear:
            self._watch.may_speak = True
            actions += self.dispatcher.acknowledge()
        if self.dispatcher.refusal != self._refusal:
            self._refusal, problem = self.dispatcher.refusal, self.problem
            actions += [] if problem is None or self._refusal is None else [ObservationRefused(problem)]
        self.load_analyzer.problems = self._problems()
        version = self.plan_version
        if version is not None and version != self.load_analyzer.plan_version:
            self.load_analyzer.plan_version = version
            actions.append(PlanFollowed(version))
        return actions

    def _problems(self) -> tuple[tuple[str, str], ...]:
        """Return what reports say besides the figures."""
        problems = list(self._watch.problems)
        if self._refusal is not None:
            problems.append((CANNOT_OBSERVE, (self.problem or "")[:REPORT_PROBLEM_CHARACTERS_MAX]))
        if refused := self.dispatcher.forwards_refused:
            server, reply = next(iter(refused.items()))
            text = f"server {server} refuses forwarded messages, so they are lost: {reply}; give the agent its rights"
            problems.append(("forwards_refused", text[:REPORT_PROBLEM_CHARACTERS_MAX]))
        if (refused_to_leave := self.dispatcher.leave_refusal) is not None:
            text = f"the agent gets each keyspace notification ({refused_to_leave}): give its user +punsubscribe"
            problems.append(("keyspace_notifications", text[:REPORT_PROBLEM_CHARACTERS_MAX]))
        return tuple(problems)

    def deadline(self) -> float | None:
        """Return when the first of the parts has something to do."""
        return earliest(
            self.dispatcher.deadline(), self.load_analyzer.deadline(), self._guard.deadline(), self._watch.deadline()
        )

    def _route(self, event: Any, now: float) -> list[Any]:
        if type(event) is Pushed:  # nearly all of them
            actions = self.dispatcher.handle(event, now)
            return actions + self.load_analyzer.handle(event, now) if event.link == LOCAL else actions
        match event:
            case Replied():
                return self._replied(event, now)
            case RepliedAll():
                return self.dispatcher.handle(event, now)
            case Tick():
                actions = self.dispatcher.handle(event, now)
                actions += self.load_analyzer.handle(event, now) + self._guard.tick(now)
                return actions + self._watch.tick(now)
            case LinkUp(link) if link == REPORTS:
                return self._watch.link_up(now)
            case LinkDown(link) if link == REPORTS:
                self._watch.link_down()
                return []
            case LinkUp(link):
                said = self._say(link, None)
                return said + (self._local_up(event, now) if link == LOCAL else self.dispatcher.handle(event, now))
            case LinkDown(link, reason):
                said = self._say(link, reason)
                return said + (self._local_down(event, now) if link == LOCAL else self.dispatcher.handle(event, now))
            case Start():
                return [Connect(LOCAL, self._url), Connect(REPORTS, self._url), *self.dispatcher.handle(event, now)]
            case _:
                raise AssertionError(f"not an event of an agent: {event!r}")

    def _replied(self, event: Replied, now: float) -> list[Any]:
        if event.link == REPORTS:
            return self._watch.replied(event, now)
        tag = event.tag
        owner: Any = tag[0] if isinstance(tag, tuple) else None  # pyright: ignore[reportUnknownVariableType]
        if event.link == LOCAL and owner == LLA_TAG:
            return self.load_analyzer.handle(event, now)
        if event.link == LOCAL and owner == GUARD_TAG:
            return self._guard.replied(event)
        return self.dispatcher.handle(event, now)

    def _local_up(self, event: LinkUp, now: float) -> list[Any]:
        """Begin a connection: named before it is subscribed, and measured from where it is."""
        self.is_up = True
        return [
            *self._guard.introduce(),
            *self.dispatcher.handle(event, now),
            *self._guard.check(now),
            *self.load_analyzer.handle(event, now),
        ]

    def _local_down(self, event: LinkDown, now: float) -> list[Any]:
        self.is_up = False
        self._guard.link_down()
        return [*self.dispatcher.handle(event, now), *self.load_analyzer.handle(event, now)]

    def _say(self, link: str, reason: str | None) -> list[Any]:
        """Report a link, unless that has been said already: while a server is down, each attempt tells so."""
        if link in self._said and self._said[link] == reason:
            return []
        self._said[link] = reason
        return [LinkChanged(link, reason)]


def _speaks_to_balancer(action: Any) -> bool:
    """Tell what an agent must not do before it knows that it is the only one: the balancer would believe it."""
    publishes = isinstance(action, Send) and action.link == LOCAL and action.args[0] == b"PUBLISH"
    return publishes and action.args[1] == BALANCER_CHANNEL
