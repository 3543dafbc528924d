"""Runs the balancer of a cluster as a process: ``dynamoth balancer``."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dynamoth.errors import ConfigError, DynamothError
from dynamoth.machine.events import Connect, Start
from dynamoth.plan.plan import Mode, Plan, Server
from dynamoth.settings.sections import BalancerProcessSettings
from dynamoth_balancer.admin.changes import mode_name
from dynamoth_balancer.decide.cluster import Decision
from dynamoth_balancer.events import Decided, Note, PlanChanged, ReportReceived, Shutdown, Stopped
from dynamoth_balancer.machine import CONNECTED, PROBLEMS_SHOWN_MAX, BalancerMachine, Stage
from dynamoth_balancer.options import BalancerOptions
from dynamoth_balancer.process.metrics import make_registry
from dynamoth_balancer.process.recorder import Recorder, report_row
from dynamoth_daemon import daemon
from dynamoth_daemon.http import HttpServer
from dynamoth_daemon.logs import DaemonLog
from dynamoth_link.driver import Driver
from dynamoth_link.errors import MachineCrashed
from dynamoth_link.options import LinkOptions
from dynamoth_link.urls import parse_server_url

EXIT_STOPPED = 0
"""Ended because it was told to."""
EXIT_CRASHED = 1
"""Ended because of a bug."""
EXIT_REFUSED = 2
"""Ended because it must not run: another balancer is at work, or the configuration contradicts the stored plan."""

INCARNATION_BITS = 63

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

_logger = logging.getLogger("dynamoth.balancer")


@dataclass(frozen=True, kw_only=True)
class BalancerConfig(BalancerProcessSettings):
    """The configuration of a balancer process.

    ``servers``: all servers of the cluster, at least one. ``options``: those of the machine.
    ``link``: credentials, TLS and timeouts of all links.

    Raises:
        ConfigError: a value cannot be used.

    """

    servers: tuple[Server, ...]
    options: BalancerOptions = field(default_factory=BalancerOptions)
    link: LinkOptions = field(default_factory=LinkOptions)

    def __post_init__(self) -> None:
        """Check now: a link to a URL that cannot be parsed would wait without end."""
        if not self.servers:
            raise ConfigError("a balancer needs at least one server")
        for server in self.servers:
            parse_server_url(server.url)


async def run_balancer(config: BalancerConfig, stop: asyncio.Event | None = None) -> int:
    """Run a balancer until it is told to stop; return the exit code of the process.

    While servers are down, it waits for them. ``stop``, SIGTERM and SIGINT end it with ``EXIT_STOPPED``: the lease is
    given back first, and what is in transition stays so until the next balancer. Another balancer at work, or a
    configuration that the stored plan contradicts, ends it with ``EXIT_REFUSED``, a bug with ``EXIT_CRASHED``. The
    reason is logged.

    Raises:
        ConfigError: the HTTP port cannot be listened at, or the metrics file not written.

    """
    return await _BalancerProcess(config, stop or asyncio.Event()).run()


def run(config: BalancerConfig) -> int:
    """Run a balancer in an event loop of its own, that of uvloop where it is installed; see :func:`run_balancer`."""
    return daemon.run(run_balancer(config))


class _BalancerProcess:
    """One balancer process: machine, driver, HTTP, recorder and signals."""

    def __init__(self, config: BalancerConfig, stop: asyncio.Event) -> None:
        self._config = config
        self._loop = asyncio.get_running_loop()
        #: Set when the process shall end in an orderly way.
        self._stop = stop
        #: Set when the machine has ended.
        self._done = asyncio.Event()
        self._exit_code = EXIT_STOPPED
        self._machine = BalancerMachine(config.servers, secrets.randbits(INCARNATION_BITS), config.options)
        self._log = DaemonLog(_logger, self._plan_version)
        self._recorder = Recorder(Path(config.metrics_file), self._log) if config.metrics_file else None

    async def run(self) -> int:
        try:
            registry = make_registry(self._machine, self._loop.time, self._recorder)
            http = await daemon.serve_http(
                self._config.http_host, self._config.http_port, registry, self._why_not_ready
            )
            try:
                await self._run_machine(http)
            finally:
                if http is not None:
                    await http.close()
        finally:
            if self._recorder is not None:
                self._recorder.close()
        self._log.write(logging.INFO, "the balancer has ended", exit_code=self._exit_code)
        return self._exit_code

    def _plan_version(self) -> int | None:
        plan = self._machine.plan
        return None if plan is None else plan.version

    async def _run_machine(self, http: HttpServer | None) -> None:
        driver = Driver(self._machine, on_action=self._execute, link_options=self._link_options, on_crash=self._crashed)
        stopping = self._loop.create_task(self._shut_down(driver), name="shut down")
        try:
            with daemon.ended_by_signals(self._stop):
                self._log_started(http)
                driver.handle(Start())
                await self._done.wait()
        finally:
            stopping.cancel()
            await driver.close()

    async def _shut_down(self, driver: Driver) -> None:
        await self._stop.wait()
        driver.handle(Shutdown())

    def _end(self, exit_code: int) -> None:
        self._exit_code = exit_code
        self._done.set()

    def _link_options(self, action: Connect) -> LinkOptions:
        return self._config.link

    # What is reported.

    def _execute(self, action: Any) -> None:
        match action:
            case ReportReceived(report):
                if self._recorder is not None:
                    ratio = self._machine.load_ratio(report.server, self._loop.time())
                    self._recorder.write(report_row(report, time.time(), ratio))
            case Note(level, message, details):
                self._note(_LEVELS[level], message, dict(details))
            case PlanChanged(plan, reason):
                self._log_plan(plan, reason)
            case Decided(decision):
                _log_decision(self._log, decision)
            case Stopped(error):
                self._stopped(error)
            case _:
                raise AssertionError(f"not an action of a balancer: {action!r}")

    def _note(self, level: int, message: str, details: dict[str, Any]) -> None:
        cause = details.pop("reason", None) or details.get("reply")
        # Connections that come and go are repeated, too.
        self._log.write(level, message, cause, limited=True if message == CONNECTED else None, **details)

    def _log_plan(self, plan: Plan, reason: str) -> None:
        in_transition = self._machine.transitions
        message = "the plan has a new version"
        self._log.write(logging.INFO, message, reason, plan_version=plan.version, in_transition=in_transition)

    def _stopped(self, error: DynamothError | None) -> None:
        if error is not None:
            self._log.write(logging.ERROR, "the balancer must not run", str(error), code=error.code)
        self._end(EXIT_STOPPED if error is None else EXIT_REFUSED)

    def _crashed(self, crash: MachineCrashed) -> None:
        self._log.write(
            logging.CRITICAL,
            "the balancer ends because of a bug: please report this line",
            str(crash),
            exception=crash.__cause__,
        )
        self._end(EXIT_CRASHED)

    def _log_started(self, http: HttpServer | None) -> None:
        extra: dict[str, Any] = {
            "servers": {server.id: parse_server_url(server.url).redacted() for server in self._config.servers},
            "draining": sorted(self._config.options.draining),
            "incarnation": self._machine.incarnation,
            "event_loop": type(self._loop).__module__.partition(".")[0],
        }
        if http is not None:
            extra["http_port"] = http.port
        self._log.write(logging.INFO, "the balancer has started", **extra)

    def _why_not_ready(self) -> str | None:
        if self._stop.is_set():
            return "the balancer is ending"
        errors = self._machine.health.errors
        if not errors and self._machine.stage is not Stage.LEADING and not self._machine.stands_by:
            return f"the balancer is {self._machine.stage.value}, not leading: its log says why"
        now = self._loop.time()
        lines = [f"{each.subject}: {each.reason} ({each.kind}, for {now - each.since:.0f} s)" for each in errors]
        return "\n".join(lines[:PROBLEMS_SHOWN_MAX]) or None


def _log_decision(log: DaemonLog, decision: Decision) -> None:
    """Log each move with its reason, and what could not be reached: at most ``moves_per_plan_max`` lines per plan."""
    for move in decision.moves:
        fields: dict[str, Any] = {
            "channel": move.channel,
            "mode": mode_name(move.after.mode),
            "from": list(move.before.servers),
            "to": list(move.after.servers),
            "load_ratio_before": {server: round(ratios.before, 3) for server, ratios in move.ratios.items()},
            "load_ratio_after": {server: round(ratios.after, 3) for server, ratios in move.ratios.items()},
        }
        message = _DECIDED[move.before.mode is Mode.SINGLE, move.after.mode is Mode.SINGLE]
        log.write(logging.INFO, message, move.reason, **fields)
    for finding in decision.findings:
        details: dict[str, Any] = {"server": finding.server, "load_ratio": round(finding.load_ratio, 3)}
        if finding.channel is not None:
            details["channel"] = finding.channel
        log.write(logging.WARNING, "the balancer cannot relieve a server", finding.reason, **details)


_DECIDED = {
    (True, True): "decided to move a channel",
    (True, False): "decided to replicate a channel",
    (False, False): "decided to change the replicas of a channel",
    (False, True): "decided to fold back a replicated channel",
}
"""By whether the channel was, and will be, at one server."""
