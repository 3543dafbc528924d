"""Runs a coordinator as a process: ``dynamoth coordinator``."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import platform
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, assert_never
from urllib.parse import parse_qs

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from dynamoth.edge.control import parse_location
from dynamoth.edge.tickets import KEY_BYTES
from dynamoth.plan.plan import Server
from dynamoth.refusals import with_cure
from dynamoth.settings.sections import HttpSettings
from dynamoth_broker.coordinator.events import DecisionRecorded
from dynamoth_broker.coordinator.machine import (
    CoordinatorMachine,
    CoordinatorNews,
    Stop,
    Stopped,
)
from dynamoth_broker.coordinator.requests import decision_as_data
from dynamoth_broker.coordinator.settings import CoordinatorOptions
from dynamoth_broker.events import ControlLinkChanged, Noted
from dynamoth_daemon import event_loop, metrics
from dynamoth_daemon.http import HttpAnswer, HttpQuery
from dynamoth_daemon.process import INCARNATION_BITS, DaemonProcess
from dynamoth_link.options import LinkOptions

STOP_TIMEOUT_S = 1.0
"""A server that does not answer within this time keeps the lease until it expires."""

JSON = "application/json"

_COUNTERS = {
    "reports": "Reports of brokers",
    "malformed": "Messages that could not be read",
    "control_refused": "Commands that a server has refused",
    "terms": "Times that this coordinator began to act",
    "decisions": "Decisions to move users",
    "moves_asked": "Users whom brokers were to move",
    "moves_left": "Users who have moved",
    "moves_refused": "Users who were on the move already",
    "moves_gone": "Users who were gone when they were to move",
    "moves_deadline": "Users who have stayed",
    "placed": "Newcomers who asked for a broker",
}

_FAMILIES = metrics.Families("dynamoth_coordinator_")


@dataclass(frozen=True, kw_only=True)
class CoordinatorConfig(HttpSettings):
    """The configuration of a coordinator process.

    ``link``: credentials, TLS and timeouts of all links.
    """

    servers: tuple[Server, ...]
    options: CoordinatorOptions
    link: LinkOptions = field(default_factory=LinkOptions)


async def run_coordinator(config: CoordinatorConfig, stop: asyncio.Event | None = None) -> int:
    """Run a coordinator until ``stop``, SIGTERM or SIGINT; return the exit code of the process.

    Raises ConfigError: the HTTP port is not free.
    """
    return await CoordinatorProcess(config, stop or asyncio.Event()).run()


def run(config: CoordinatorConfig) -> int:
    """Run a coordinator in an event loop of its own; see :func:`run_coordinator`."""
    return event_loop.run(run_coordinator(config))


def process_name() -> str:
    """Return which process this is, for people."""
    return f"{platform.node()}, process {os.getpid()}"


class CoordinatorProcess(DaemonProcess[CoordinatorNews]):
    """One coordinator process."""

    def __init__(self, config: CoordinatorConfig, stop: asyncio.Event) -> None:
        self._machine = CoordinatorMachine(
            config.servers, secrets.randbits(INCARNATION_BITS), config.options, secrets.token_bytes(KEY_BYTES)
        )
        super().__init__("coordinator", self._machine, config, config.link, stop)

    def execute(self, action: CoordinatorNews) -> None:
        """Log what the machine says."""
        match action:
            case ControlLinkChanged(server, None):
                self._log.write(logging.INFO, "connected", server=server, limited=True)
            case ControlLinkChanged(server, reason):
                self._log.write(
                    logging.WARNING, "a server cannot be used; trying again", with_cure(reason or ""), server=server
                )
            case Noted(message, cause, fields, is_warning):
                level = logging.WARNING if is_warning else logging.INFO
                self._log.write(level, message, with_cure(cause) or None, limited=True, **fields)
            case DecisionRecorded(decision):
                data = decision_as_data(decision)
                self._log.write(logging.INFO, "decision", data.pop("reason"), **data)
            case Stopped():
                self.end()
            case _:
                assert_never(action)

    def registry(self) -> CollectorRegistry:
        """Return the metrics of the coordinator."""
        return metrics.make_registry("coordinator", self._collect)

    def _collect(self) -> Iterator[Metric]:
        machine, now = self._machine, self._loop.time()
        gauge = _FAMILIES.gauge
        summary = machine.model(now).summary()
        yield gauge("leading", "1 while this coordinator acts", machine.is_leading)
        yield gauge("paused", "1 while an operator has paused decisions", machine.controller.is_paused)
        yield gauge("brokers", "Brokers that report", len(machine.brokers))
        yield gauge("brokers_suspect", "Brokers whose reports are late", len(machine.controller.fleet.suspects(now)))
        yield gauge("load_ratio_max", "The largest load ratio of a broker", summary.ratio_max)
        yield gauge("load_ratio_mean", "The mean load ratio of brokers", summary.ratio_mean)
        yield gauge("load_cov", "Standard deviation of the load ratios, relative to the mean", summary.cov)
        yield gauge("redis_egress_bytes_per_second", "What Redis sends to brokers", summary.redis_egress)
        yield gauge("servers_down", "Redis servers that cannot be used", len(machine.faults))
        yield from _FAMILIES.counters(_COUNTERS, machine.counters)

    def plan_version(self) -> int | None:
        """Return None: a coordinator acts on no plan of channels."""
        return None

    def describe(self) -> dict[str, Any]:
        """Return which process this is, as lists of coordinators name it."""
        return {"process": self._machine.options.process}

    def queries(self) -> Mapping[str, HttpQuery]:
        """Return the placement of newcomers."""
        return {"/place": self._place}

    def _place(self, query: str) -> HttpAnswer:
        asked = parse_qs(query, keep_blank_values=True)
        session = asked.get("session", [""])[0][:64]
        try:
            near = parse_location(asked["near"][0]) if "near" in asked else None
        except ValueError as error:
            return HttpAnswer(HTTPStatus.BAD_REQUEST, json.dumps({"error": f"near: {error}"}).encode() + b"\n", JSON)
        urls = self._machine.place(session, self._loop.time(), near)
        status = HTTPStatus.OK if urls else HTTPStatus.SERVICE_UNAVAILABLE
        return HttpAnswer(status, json.dumps({"urls": urls}).encode() + b"\n", JSON)

    def why_not_ready(self) -> str | None:
        """Return why it does not coordinate now. One that waits for another one is ready."""
        machine = self._machine
        if machine.is_leading or machine.others:
            return None
        faults = [f"{server}: {with_cure(fault)}" for server, fault in machine.faults.items()]
        return "\n".join([machine.why_waiting, *faults])

    def shut_down(self) -> None:
        """Give the lease back, then end."""
        self._loop.call_later(STOP_TIMEOUT_S, self.end)
        self._driver.handle(Stop())
