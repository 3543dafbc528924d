"""Finds the problems of the cluster: one list, from which everything that people see is derived.

Theory of operation
-------------------
:func:`find` looks at the state of a balancer and yields everything that is stalled or refused. :class:`Health`
remembers since when each problem has lasted, and leaves out those that have not lasted long enough to matter. The
status (text, JSON and exit code), ``/readyz``, the metrics and the log are made of this list alone, so they cannot
contradict each other.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dynamoth.protocol.reports import CANNOT_OBSERVE, Report
from dynamoth.refusals import with_cure
from dynamoth_balancer.decide.cluster import Finding
from dynamoth_balancer.decide.model import ClusterModel
from dynamoth_balancer.events import Note
from dynamoth_balancer.install.agents import Agents
from dynamoth_balancer.install.installer import Installer

TRANSITION_SLOW_S = 10.0
"""A channel in transition for longer is stalled: a healthy one settles within a second or two."""

BEHIND_S = 5.0
"""Servers and agents apply a new version of the plan within a round trip; those that need longer are stalled."""

SEVERAL_S = 1.0
"""An agent that reconnects may be counted twice for a moment."""

LATE_S = 1.0
"""An agent whose observation lags by more does not get the CPU that it needs."""

UNANSWERED_S = 1.0
"""A server whose answers have been late for longer hangs, or is too busy to serve anybody."""

UNANSWERED = "it does not answer: it hangs, or is busy with a command that takes long"

MEMORY_LOW_RATIO = 0.9
"""Above this share of ``maxmemory`` a server will soon refuse to store the plan."""

TRANSITIONS_SHOWN_MAX = 10
"""Stalled transitions that are listed one by one, the oldest; the others are counted."""

CHANNEL_BYTES_SHOWN_MAX = 200


class Severity(enum.Enum):
    """How bad a problem is."""

    ERROR = "error"
    """Something does not work: the balancer is not ready."""
    WARNING = "warning"
    """Work goes on, slower or only for now."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of the cluster."""

    severity: Severity
    #: Stable, for scripts and metrics: ``server_unreachable``.
    kind: str
    #: The id of a server, the name of a channel, or ``balancer``.
    subject: str
    #: Cause and cure, in words.
    reason: str
    since: float

    def details(self, now: float) -> dict[str, Any]:
        """Return it as data, for the log and the status."""
        age_s = round(max(0.0, now - self.since), 1)
        return {"kind": self.kind, "subject": self.subject, "reason": self.reason, "age_s": age_s}


LOGGED_ELSEWHERE = frozenset({"not_leading", "server_unreachable", "agent_silent"})
"""Kinds whose beginning and end have log entries of their own, such as "connected to a server"."""

BEGIN_LOGGED_ELSEWHERE = frozenset({"plan_refused", "goal_unreached", "decision_refused"})
"""Kinds whose beginning has a log entry of its own, and whose end has none."""


@dataclass(frozen=True, slots=True)
class Found:
    """A problem as :func:`find` sees it; ``since`` None where only its time in the list shows its age."""

    severity: Severity
    kind: str
    subject: str
    reason: str
    since: float | None = None
    #: It counts only after this time.
    after_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The part of a balancer's state in which problems are found."""

    #: Why this balancer does not lead; None while it does.
    why_not_leading: str | None
    #: Whether that is as it should be: another balancer leads, and this one is its standby.
    stands_by: bool
    servers: Sequence[str]
    #: The servers that are not connected, and why.
    down: Mapping[str, str]
    #: The servers that are being drained and at which the plan has neither channel nor slot.
    emptied: Collection[str]
    #: The connected servers that do not answer.
    unanswered: Collection[str]
    #: The servers that refuse a command of the balancer, and their replies.
    refused: Mapping[str, str]
    #: None before the first term.
    installer: Installer | None
    agents: Agents
    model: ClusterModel
    #: The findings of the latest decision.
    unreached: Sequence[Finding]
    #: Why the latest decision could not be carried out; empty when it could.
    decision_refused: str
    #: The servers that do not count, as an operator has had this balancer take over.
    given_up: Collection[str]
    #: The servers that the configuration names and the plan does not list.
    not_listed: Collection[str]
    #: What the provisioner cannot do, by server, or ``provisioner``.
    fleet_problems: Mapping[str, str]
    #: The servers that are only being added, and what each waits for.
    joining: Mapping[str, str]
    #: The servers that the provisioner has been asked to start again, as their agents are gone.
    started_again: Collection[str]


def find(view: View, now: float) -> Iterator[Found]:
    """Yield the problems of the cluster."""
    if view.why_not_leading is not None and not view.stands_by:
        yield Found(Severity.ERROR, "not_leading", "balancer", view.why_not_leading)
    leading = view.installer if view.why_not_leading is None else None
    for server in view.servers:
        if server in view.down:
            yield _unreachable(server, view, leading)
            continue  # its agent speaks through it
        if server in view.unanswered:
            text = UNANSWERED + _taken_over(server, leading)
            yield Found(Severity.ERROR, "server_unreachable", server, text, after_s=UNANSWERED_S)
        elif leading is not None:
            yield from _of_copy(server, leading)
        if server in view.refused:
            yield Found(Severity.ERROR, "server_refuses", server, with_cure(view.refused[server]))
        yield from _of_agent(server, view, leading, now)
    for server in view.not_listed:
        yield _not_listed(server, leading)
    if view.given_up:
        text = (
            f"it has taken over and does not count {', '.join(sorted(view.given_up))}: remove them ('dynamoth server"
            " drain' and 'remove'), or start more than half of all servers again; until then it needs --take-over"
        )
        yield Found(Severity.WARNING, "servers_given_up", "balancer", text)
    if leading is not None:
        yield from _of_transitions(leading, now)
        yield from _of_pins(leading)
    for finding in view.unreached:
        subject = f"{finding.server} at load ratio {finding.load_ratio:.2f}"
        yield Found(Severity.WARNING, "goal_unreached", finding.server, f"{subject}: {finding.reason}")
    if view.decision_refused:
        yield Found(Severity.WARNING, "decision_refused", "balancer", view.decision_refused)
    for subject, problem in view.fleet_problems.items():
        yield Found(Severity.WARNING, "provisioner_failed", subject, problem)


def _not_listed(server: str, leading: Installer | None) -> Found:
    text = f"the configuration names it, and the plan does not list it: type 'dynamoth server add {server} URL'"
    if leading is not None and leading.plan.has_left(server):
        text = "it was removed from the plan: take it out of the configuration, too"
    return Found(Severity.WARNING, "server_not_listed", server, text)


def _unreachable(server: str, view: View, leading: Installer | None) -> Found:
    if server in view.emptied:
        text = f"it is drained and stopped: type 'dynamoth server remove {server}'"
        return Found(Severity.WARNING, "server_unreachable", server, text)
    text = f"no connection: {view.down[server]}{_taken_over(server, leading)}"
    return Found(Severity.ERROR, "server_unreachable", server, text)


def _taken_over(server: str, leading: Installer | None) -> str:
    """Return what has become of the channels of a server that counts as dead; empty for others."""
    if leading is None or server not in leading.dead:
        return ""
    if left := len(leading.index.named_at[server]) + len(leading.index.slots_named_at[server]):
        return (
            f"; {left} of its channels and slots wait for it: no other server can take them now, or a plain"
            " compatibility rule keeps them there"
        )
    return "; others have taken over its channels and slots"


def _of_pins(installer: Installer) -> Iterator[Found]:
    """Yield the pinned channels whose servers are dead."""
    for channel, pin in installer.plan.administration.pins.items() if installer.dead else ():
        if not installer.dead.isdisjoint(pin.servers):
            dead = ", ".join(sorted(installer.dead.intersection(pin.servers)))
            text = f"it is pinned to {dead}, which is dead: it is elsewhere until that is back"
            yield Found(Severity.WARNING, "pin_unmet", channel_text(channel), text)


def _of_copy(server: str, installer: Installer) -> Iterator[Found]:
    copy = installer.copy(server)
    if copy.problem:
        text = f"it does not keep the plan: {with_cure(copy.problem)}; until then no channel moves to it or from it"
        yield Found(Severity.ERROR, "plan_refused", server, text)


def _of_agent(server: str, view: View, leading: Installer | None, now: float) -> Iterator[Found]:
    agents = view.agents
    if server in view.joining and not agents.is_alive(server, now):
        after_s = 0.0 if agents[server].listeners == 0 else BEHIND_S
        text = f"it joins, and waits for {view.joining[server]}"
        yield Found(Severity.WARNING, "agent_silent", server, text, after_s=after_s)
        return
    if agents.is_gone(server, now):
        text = no_agent(server, is_started_again=server in view.started_again)
        yield Found(Severity.ERROR, "agent_silent", server, text, agents[server].deserted_at)
        return
    if not agents.is_alive(server, now):
        known = agents.incarnation(server) is not None
        since, after_s = (agents.heard_at(server), 0.0) if known else (None, BEHIND_S)
        text = f"its agent is not heard: see whether 'dynamoth agent --server {server}' runs"
        yield Found(Severity.ERROR, "agent_silent", server, text, since, after_s)
        return
    if agents.is_in_conflict(server, now):
        yield Found(Severity.ERROR, "agents_in_conflict", server, agents.why_not(server, now) or "")
    elif (listeners := agents[server].listeners or 0) > 1:
        yield Found(Severity.WARNING, "agents_in_conflict", server, several_agents(listeners), after_s=SEVERAL_S)
    elif problem := agents.unobserved(server, now):
        yield Found(Severity.ERROR, CANNOT_OBSERVE, server, problem)
    elif leading is not None and server in leading.versions_refused:
        text = (
            f"its agent claims version {leading.versions_refused[server]} of the plan, which no balancer has issued:"
            " nothing that it acknowledges counts; restart it"
        )
        yield Found(Severity.ERROR, "version_refused", server, text)
    elif leading is not None and agents.acked(server, now) < leading.plan.version:
        text = f"its agent has not acknowledged version {leading.plan.version} of the plan"
        yield Found(Severity.ERROR, "agent_behind", server, text, after_s=BEHIND_S)
    report = view.model.latest(server)
    if report is not None:
        yield from _of_report(server, report)
    if why := view.model.why_full(server):
        text = (
            f"it uses {why}, so it gets no channels: raise maxclients or maxmemory (or memory_bytes_max of [balancer])"
        )
        yield Found(Severity.WARNING, "server_full", server, text)
    if (blind := view.model.blindness(server)) is not None:
        yield Found(Severity.ERROR, "agent_blind", server, blind.reason, blind.since)


def no_agent(server: str, *, is_started_again: bool = False) -> str:
    """Return the problem that nobody listens as the agent of a server, and who starts it."""
    cure = "the provisioner has been asked to start it again" if is_started_again else start_agent(server)
    return f"it has no agent: {cure}"


def start_agent(server: str) -> str:
    """Return how an operator starts the agent of a server."""
    return f"start 'dynamoth agent --server {server}'"


def several_agents(number: int) -> str:
    """Return the problem that several connections listen as the agent of a server."""
    return f"{number} connections listen as its agent (one that was cut may be among them): stop all agents but one"


def _of_report(server: str, report: Report) -> Iterator[Found]:
    lag_s = report.observation_lag_s
    if report.observing and lag_s > LATE_S:
        text = f"its agent sees messages {lag_s:.1f} s late: it does not get the CPU that it needs"
        yield Found(Severity.WARNING, "agent_late", server, text)
    if report.memory_bytes_max and report.memory_bytes >= MEMORY_LOW_RATIO * report.memory_bytes_max:
        full = report.memory_bytes >= report.memory_bytes_max
        used = f"{report.memory_bytes / 1e6:.1f} of {report.memory_bytes_max / 1e6:.1f} MB of maxmemory are used"
        text = f"{used}: at the limit it refuses the plan; raise maxmemory"
        kind = "memory_full" if full else "memory_low"
        yield Found(Severity.ERROR if full else Severity.WARNING, kind, server, text)
    if report.outgoing_is_estimate:
        text = "it does not permit its agent INFO, so its load is an estimate: give the agent +info"
        yield Found(Severity.WARNING, "load_estimated", server, text)
    for kind, text in report.problems:
        yield Found(Severity.WARNING, kind, server, text)


def _of_transitions(installer: Installer, now: float) -> Iterator[Found]:
    slow = [
        (transition.since, channel)
        for channel, transition in installer.transitions.items()
        if now - transition.since >= TRANSITION_SLOW_S
    ]
    for since, channel in heapq.nsmallest(TRANSITIONS_SHOWN_MAX, slow):
        transition = installer.transitions[channel]
        waits = installer.why_unsettled(transition, now) or "its next phase"
        text = f"the channel is {transition.entry.phase.name.lower()} and waits for {waits}"
        yield Found(Severity.WARNING, "transition_stalled", channel_text(channel), text, since)
    if (more := len(slow) - TRANSITIONS_SHOWN_MAX) > 0:
        what = "1 more channel does" if more == 1 else f"{more} more channels do"
        yield Found(Severity.WARNING, "transition_stalled", "balancer", f"{what} not settle")


def channel_text(channel: bytes) -> str:
    """Return the name of a channel as text, of bounded length."""
    return channel[:CHANNEL_BYTES_SHOWN_MAX].decode(errors="backslashreplace")


@dataclass(slots=True)
class Health:
    """Remembers since when problems have lasted."""

    #: The problems at the latest look that have lasted long enough; errors first.
    problems: list[Problem] = field(default_factory=list[Problem])
    _since: dict[tuple[str, str], float] = field(default_factory=dict[tuple[str, str], float])

    def look(self, found: Iterable[Found], now: float) -> tuple[list[Problem], list[Problem]]:
        """Replace the problems; return those that have begun, and those that are over."""
        since: dict[tuple[str, str], float] = {}
        problems: dict[tuple[str, str], Problem] = {}
        for each in found:
            key = (each.kind, each.subject)
            known = since.get(key, self._since.get(key, now))
            since[key] = known if each.since is None else each.since
            if key not in problems and now - since[key] >= each.after_s:
                problems[key] = Problem(each.severity, each.kind, each.subject, each.reason, since[key])
        before = {(problem.kind, problem.subject): problem for problem in self.problems}
        self._since = since
        self.problems = sorted(problems.values(), key=lambda problem: problem.severity is not Severity.ERROR)
        begun = [problem for key, problem in problems.items() if key not in before]
        over = [problem for key, problem in before.items() if key not in problems]
        return begun, over

    def report(self, found: Iterable[Found], now: float) -> list[Note]:
        """Replace the problems; return log entries about the difference."""
        begun, over = self.look(found, now)
        notes = [
            Note(each.severity.value, "a problem has begun", each.details(now))
            for each in begun
            if each.kind not in LOGGED_ELSEWHERE | BEGIN_LOGGED_ELSEWHERE
        ]
        ended = [each for each in over if each.kind not in LOGGED_ELSEWHERE]
        return notes + [Note("info", "a problem is over", each.details(now)) for each in ended]

    @property
    def errors(self) -> list[Problem]:
        """The problems that stop something from working."""
        return [problem for problem in self.problems if problem.severity is Severity.ERROR]
