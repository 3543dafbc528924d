"""Runs the agent of one server as a process: ``dynamoth agent``."""

from __future__ import annotations

import asyncio
import gc
import logging
import secrets
from dataclasses import dataclass, field
from typing import Any, assert_never

from prometheus_client import CollectorRegistry

from dynamoth.settings.declare import values_of
from dynamoth.settings.sections import AgentSettings, ReportSettings
from dynamoth_agent.events import (
    AgentNews,
    AlreadyRunning,
    BlindnessChanged,
    GuardRefused,
    HungAgentReplaced,
    LinkChanged,
    NotListed,
    ObservationRefused,
    PlanFollowed,
    ServerAdvice,
)
from dynamoth_agent.machine import AgentMachine
from dynamoth_agent.process.gathering import Gathering
from dynamoth_agent.process.metrics import make_registry
from dynamoth_agent.stand_in import LIMIT_WANTED
from dynamoth_daemon import event_loop
from dynamoth_daemon.exit_codes import EXIT_REFUSED
from dynamoth_daemon.process import INCARNATION_BITS, DaemonProcess
from dynamoth_dispatcher.events import LOCAL
from dynamoth_dispatcher.options import DispatcherOptions
from dynamoth_link.options import LinkOptions
from dynamoth_link.urls import parse_server_url
from dynamoth_lla.options import LoadAnalyzerOptions
from dynamoth_lla.round import ObservationLate

GC_THRESHOLDS = (10_000, 10, 100)
"""An agent counts in some hundred thousand small objects and leaves hardly any garbage in cycles (a lost connection is
some). With Python's own thresholds the collector looks at all of them several times per second."""


@dataclass(frozen=True, kw_only=True)
class AgentConfig(AgentSettings):
    """The configuration of an agent process.

    ``url``: where its server is (``redis://``, ``rediss://``, ``unix://``).
    ``outgoing_bytes_per_s_max``: what the server can send (T_i of Dynamoth, eq. 1); from 1.
    ``link``: credentials, TLS and timeouts of all links. ``dispatcher``: its bounds and periods.

    Raises:
        ConfigError: a value cannot be used.

    """

    url: str
    outgoing_bytes_per_s_max: int
    link: LinkOptions = field(default_factory=LinkOptions)
    dispatcher: DispatcherOptions = field(default_factory=DispatcherOptions)

    def __post_init__(self) -> None:
        """Check now: a link to a URL that cannot be parsed would wait without end."""
        parse_server_url(self.url)
        self.load_analyzer_options()

    def load_analyzer_options(self) -> LoadAnalyzerOptions:
        """Return the part for the load analyzer."""
        shared = values_of(ReportSettings, self)
        return LoadAnalyzerOptions(**shared, outgoing_bytes_per_s_max=self.outgoing_bytes_per_s_max)


async def run_agent(config: AgentConfig, stop: asyncio.Event | None = None) -> int:
    """Run an agent until ``stop``, SIGTERM or SIGINT; return the exit code of the process.

    While its server is down, it waits for it. Another agent at the same server ends it with ``EXIT_REFUSED``, a bug
    with ``EXIT_FAILED``. The reason is logged.

    Raises:
        ConfigError: the HTTP port cannot be listened at.

    """
    return await _AgentProcess(config, stop or asyncio.Event()).run()


def run(config: AgentConfig) -> int:
    """Run an agent in an event loop of its own, that of uvloop where it is installed; see :func:`run_agent`.

    Sets the garbage collector of the process to ``GC_THRESHOLDS``.
    """
    collect_rarely()
    return event_loop.run(run_agent(config))


def collect_rarely() -> None:
    """Set the garbage collector of this process to ``GC_THRESHOLDS``."""
    gc.set_threshold(*GC_THRESHOLDS)
    gc.freeze()


class _AgentProcess(DaemonProcess[AgentNews]):
    """One agent process."""

    def __init__(self, config: AgentConfig, stop: asyncio.Event) -> None:
        self._config = config
        self._knows_plan = False
        self._machine = AgentMachine(
            config.server,
            secrets.randbits(INCARNATION_BITS),
            config.dispatcher,
            config.load_analyzer_options(),
            config.url,
        )
        loop = asyncio.get_running_loop()
        transitions = self._machine.dispatcher.transitions
        self._gathering = Gathering(loop, LOCAL, lambda: self._driver.link(LOCAL), lambda: not transitions)
        observed = self._gathering.observed
        super().__init__("agent", self._machine, config, config.link, stop, observed, server=config.server)

    def registry(self) -> CollectorRegistry:
        """Return the metrics of the agent."""
        return make_registry(self._machine, self._loop.time)

    def plan_version(self) -> int | None:
        """Return the version that the dispatcher acts on."""
        return self._machine.plan_version

    def describe(self) -> dict[str, Any]:
        """Return where the server is."""
        return {"url": parse_server_url(self._config.url).redacted()}

    def execute(self, action: AgentNews) -> None:
        """Log the reports of the agent; end when another agent is at work."""
        write = self._log.write
        match action:
            case LinkChanged(link, None):
                if link == LOCAL:
                    self._gathering.link_up()
                write(logging.INFO, "connected", link=link, limited=True)
            case LinkChanged(link, reason):
                write(logging.WARNING, "no connection; trying again", reason, link=link)
            case PlanFollowed(version):
                level = logging.DEBUG if self._knows_plan else logging.INFO
                self._knows_plan = True
                write(level, "following the plan", plan_version=version)
            case ObservationLate(late, lag_s):
                if late:
                    cause = "the agent does not get the CPU that it needs"
                    write(logging.WARNING, "the observation is late", cause, lag_s=round(lag_s, 3))
                else:
                    write(logging.INFO, "the observation is in time again", lag_s=round(lag_s, 3), limited=True)
            case BlindnessChanged(True, blind_s, times):
                cause = "its connection was down, it reads too slowly, or Redis disconnects it for that"
                message = "the agent does not see what is published"
                write(logging.ERROR, message, cause, blind_s=round(blind_s, 1), interruptions=times)
            case BlindnessChanged(interruptions=times):
                write(logging.INFO, "the agent sees what is published again", interruptions=times, limited=True)
            case ServerAdvice(advice, None):
                for text in advice:
                    write(logging.WARNING, "a setting of the server does harm", text, limited=False)
            case ServerAdvice(refused=refused):
                message = f"the server's settings are not known: see that {LIMIT_WANTED} is set, or allow +config|get"
                write(logging.INFO, message, refused)
            case ObservationRefused(reason):
                write(logging.ERROR, "the agent cannot observe its server", reason)
            case NotListed(reason):
                write(logging.WARNING, "the server takes no part in the cluster", reason)
            case GuardRefused(reason):
                write(logging.WARNING, "whether another agent is at work is not known", reason)
            case HungAgentReplaced(reason):
                write(logging.WARNING, "another agent hung, and this one has replaced it", reason)
            case AlreadyRunning(reason):
                write(logging.ERROR, "another agent is at work", reason)
                self.end(EXIT_REFUSED)
            case _:
                assert_never(action)

    def why_not_ready(self) -> str | None:
        """Return why the agent does not do its work now."""
        if not self._machine.is_up:
            return f"no connection to the Redis server ({LOCAL} link)"
        if (problem := self._machine.problem) is not None:
            return problem
        if self._machine.plan_version is None:
            return (
                "the server stores no plan yet: start 'dynamoth balancer', or if the server is new, type 'dynamoth"
                f" server add {self._config.server} URL'"
            )
        if (reason := self._machine.not_listed) is not None:
            return reason
        if self._machine.stand_in.blind:
            blind_s = self._machine.stand_in.blind_s(self._loop.time())
            return f"the agent has not seen what is published for {blind_s:.0f} s: it reads too slowly ({LOCAL} link)"
        return None
