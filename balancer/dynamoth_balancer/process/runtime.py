"""Runs the balancer of a cluster as a process: ``dynamoth balancer``."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from dataclasses import dataclass, field
from typing import Any, assert_never

from prometheus_client import CollectorRegistry

from dynamoth.errors import ConfigError
from dynamoth.plan.plan import Mode, Server
from dynamoth.plan.slots import is_slot
from dynamoth.settings.sections import HttpSettings
from dynamoth_balancer.admin.changes import mode_name
from dynamoth_balancer.admin.overview import PROBLEMS_SHOWN_MAX
from dynamoth_balancer.decide.cluster import Decision, Move
from dynamoth_balancer.events import (
    BalancerNews,
    Decided,
    ListServers,
    Note,
    PlanChanged,
    ProvisionerRequest,
    Shutdown,
    Stopped,
)
from dynamoth_balancer.install.hearing import RESTARTED
from dynamoth_balancer.install.leadership import Stage
from dynamoth_balancer.machine import CONNECTED, BalancerMachine
from dynamoth_balancer.options import BalancerOptions
from dynamoth_balancer.process.metrics import make_registry
from dynamoth_balancer.process.provisioners import Provisioner
from dynamoth_balancer.process.provisioning import Provisioning
from dynamoth_balancer.provision.fleet import FreeServer, StartServer
from dynamoth_balancer.provision.options import FleetOptions
from dynamoth_daemon import event_loop
from dynamoth_daemon.exit_codes import EXIT_DONE, EXIT_REFUSED
from dynamoth_daemon.logs import DaemonLog
from dynamoth_daemon.process import INCARNATION_BITS, DaemonProcess
from dynamoth_link.options import LinkOptions
from dynamoth_link.urls import parse_server_url

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


@dataclass(frozen=True, kw_only=True)
class BalancerConfig(HttpSettings):
    """The configuration of a balancer process.

    ``servers``: all servers of the cluster, at least one. ``options``: those of the machine.
    ``provisioner``: starts and frees servers, by the rules of ``fleet``; None for none.
    ``link``: credentials, TLS and timeouts of all links.

    Raises:
        ConfigError: a value cannot be used.

    """

    servers: tuple[Server, ...]
    options: BalancerOptions = field(default_factory=BalancerOptions)
    provisioner: Provisioner | None = None
    fleet: FleetOptions = field(default_factory=FleetOptions)
    link: LinkOptions = field(default_factory=LinkOptions)

    def __post_init__(self) -> None:
        """Check now: a link to a URL that cannot be parsed would wait without end."""
        if not self.servers:
            raise ConfigError("a balancer needs at least one server")
        for server in self.servers:
            parse_server_url(server.url)


async def run_balancer(config: BalancerConfig, stop: asyncio.Event | None = None) -> int:
    """Run a balancer until ``stop``, SIGTERM or SIGINT; return the exit code of the process.

    While servers are down, it waits for them. At the end the lease is given back first, and channels in transition stay
    so until the next balancer. Another balancer at work, or a configuration that contradicts the stored plan, ends it
    with ``EXIT_REFUSED``, a bug with ``EXIT_FAILED``. The reason is logged.

    Raises:
        ConfigError: the HTTP port cannot be listened at.

    """
    return await _BalancerProcess(config, stop or asyncio.Event()).run()


def run(config: BalancerConfig) -> int:
    """Run a balancer in an event loop of its own, that of uvloop where it is installed; see :func:`run_balancer`."""
    return event_loop.run(run_balancer(config))


class _BalancerProcess(DaemonProcess[BalancerNews | ProvisionerRequest]):
    """One balancer process."""

    def __init__(self, config: BalancerConfig, stop: asyncio.Event) -> None:
        self._config = config
        incarnation, provisioner = secrets.randbits(INCARNATION_BITS), config.provisioner
        fleet = None if provisioner is None else config.fleet
        process = f"process {os.getpid()} on {socket.gethostname()}"
        self._machine = BalancerMachine(config.servers, incarnation, config.options, fleet, process)
        super().__init__("balancer", self._machine, config, config.link, stop)
        self._provisioning = (
            None
            if provisioner is None
            else Provisioning(provisioner, config.fleet.answer_timeout_s, self._driver.handle)
        )

    def plan_version(self) -> int | None:
        """Return the version of the present or latest term."""
        plan = self._machine.plan
        return None if plan is None else plan.version

    def shut_down(self) -> None:
        """Give the lease back; the machine ends after that."""
        self._driver.handle(Shutdown())

    def registry(self) -> CollectorRegistry:
        """Return the metrics of the balancer."""
        return make_registry(self._machine, self._loop.time)

    def describe(self) -> dict[str, Any]:
        """Return the servers, those being drained, and the incarnation of this balancer."""
        return {
            "servers": {server.id: parse_server_url(server.url).redacted() for server in self._config.servers},
            "draining": sorted(self._config.options.draining),
            "incarnation": self._machine.incarnation,
        }

    async def close(self) -> None:
        """End what the provisioner is doing."""
        if self._provisioning is not None:
            await self._provisioning.close()

    def execute(self, action: BalancerNews | ProvisionerRequest) -> None:
        """Log what the machine says, ask the provisioner, and end with the machine."""
        write = self._log.write
        match action:
            case Note(level, message, details):
                fields = dict(details)
                cause = fields.pop("reason", None) or fields.get("reply")
                # Connections that come and go are repeated, too, and so is what anybody can say.
                limited = True if message in (CONNECTED, RESTARTED) else None
                write(_LEVELS[level], message, cause, limited=limited, **fields)
            case PlanChanged(plan, reason):
                message, in_transition = "the plan has a new version", self._machine.overview.transitions
                write(logging.INFO, message, reason, plan_version=plan.version, in_transition=in_transition)
                if self._provisioning is not None:
                    self._provisioning.adopt({server.id: server.url for server in plan.servers.values()})
            case Decided(decision):
                _log_decision(self._log, decision)
            case Stopped(error):
                if error is not None:
                    write(logging.ERROR, "the balancer must not run", str(error), code=error.code)
                self.end(EXIT_DONE if error is None else EXIT_REFUSED)
            case StartServer() | FreeServer() | ListServers():
                assert self._provisioning is not None, "the machine has a fleet exactly where there is a provisioner"
                self._provisioning.request(action)
            case _:
                assert_never(action)

    def why_not_ready(self) -> str | None:
        """Return the errors of the cluster, or why the balancer does not lead."""
        errors = self._machine.health.errors
        if not errors and self._machine.stage is not Stage.LEADING and not self._machine.overview.stands_by:
            return f"the balancer is {self._machine.stage.value}, not leading: its log says why"
        now = self._loop.time()
        lines = [f"{each.subject}: {each.reason} ({each.kind}, for {now - each.since:.0f} s)" for each in errors]
        return "\n".join(lines[:PROBLEMS_SHOWN_MAX]) or None


def _log_decision(log: DaemonLog, decision: Decision) -> None:
    """Log each move of a channel with its reason, slots in one line for each pair of servers, and the findings."""
    slots: dict[tuple[str, tuple[str, ...], tuple[str, ...]], list[Move]] = {}
    for move in decision.moves:
        if is_slot(move.channel):
            slots.setdefault((move.reason, move.before.servers, move.after.servers), []).append(move)
            continue
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
    for (reason, before, after), moves in slots.items():
        where: dict[str, Any] = {"from": before[0], "to": after[0]}
        log.write(logging.INFO, "decided to move slots", reason, slots=len(moves), **where)
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
