"""A whole edge for the trials: a cluster, log servers, brokers and coordinators, each a process that can be killed.

Every process is a child of this one, so only these are ever ended.
"""

from __future__ import annotations

import os
import re
import signal
import tempfile
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bench.edge_broker import resident_bytes, write_keys
from bench.edge_processes import wait_until_started
from dynamoth_cli.local.child import Child
from dynamoth_cli.local.cluster import LocalCluster
from dynamoth_cli.local.embedded import EmbeddedRedis, reserve_port

DURABLE = {"appendonly": "yes", "appendfsync": "always"}
"""Options of a log server that loses nothing when it is killed."""

HISTORY = "log.*"


@dataclass(frozen=True, slots=True)
class BrokerLook:
    """What one broker holds at one moment."""

    resident_bytes: int
    files: int
    sessions: int
    subscriptions: int
    interests: int


class EdgeFleet:
    """The processes. All have ended when ``stack`` is closed.

    Args:
        stack: gets what ends them.
        brokers: their ids.
        servers: Redis servers of the cluster.
        logs: log servers.
        coordinators: how many; one acts.
        durable: whether log servers lose nothing when they are killed, and brokers know that.
        settings: of the daemons, by key.
        broker_arguments: more of the command line of each broker.

    """

    def __init__(
        self,
        stack: ExitStack,
        brokers: Sequence[str] = ("b1", "b2", "b3"),
        *,
        servers: int = 3,
        logs: int = 2,
        coordinators: int = 0,
        durable: bool = False,
        settings: Mapping[str, Any] = MappingProxyType({}),
        broker_arguments: Sequence[str] = (),
    ) -> None:
        self._stack = stack
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dynamoth-edge-")))
        self._keys = write_keys(folder)
        self.cluster = stack.enter_context(LocalCluster(servers, settings=settings))
        options = DURABLE if durable else {}
        self.logs = {f"l{index + 1}": stack.enter_context(EmbeddedRedis(options=options)) for index in range(logs)}
        self._ports = {id_: _free_port() for id_ in brokers}
        self._http_ports = {id_: _free_port() for id_ in brokers}
        self._arguments = (*broker_arguments, *(("--log-durable", "true") if durable else ()))
        self.brokers = {id_: self._broker(id_) for id_ in brokers}
        self.coordinators = {
            f"c{index + 1}": self.cluster.beside(f"coordinator {index + 1}", "coordinator")
            for index in range(coordinators)
        }
        for id_ in brokers:
            self.start_broker(id_)
        for child in self.coordinators.values():
            stack.callback(child.kill)
            child.start()

    def url(self, broker: str) -> str:
        """Return where users reach a broker."""
        return f"ws://127.0.0.1:{self._ports[broker]}/connect"

    @property
    def urls(self) -> list[str]:
        """Where users reach the brokers."""
        return [self.url(id_) for id_ in self._ports]

    def start_broker(self, id_: str) -> None:
        """Start a broker, and wait until it serves users."""
        child = self.brokers[id_]
        child.start()
        wait_until_started(child)

    def _broker(self, id_: str) -> Child:
        logs = " ".join(f"{log}=redis://127.0.0.1:{server.port}" for log, server in self.logs.items())
        others = " ".join(self.url(other) for other in self._ports if other != id_)
        child = self.cluster.beside(
            f"broker {id_}",
            *("broker", "--id", id_, "--port", str(self._ports[id_]), "--http-port", str(self._http_ports[id_])),
            *("--logs", logs, "--history", HISTORY, "--token-keys-file", str(self._keys)),
            *(("--alternates", others) if others else ()),
            *("--accepts-per-s-max", "5000", *self._arguments),
        )
        self._stack.callback(child.kill)
        return child

    def process(self, kind: str, id_: str) -> int:
        """Return the process id of a member: a broker, coordinator, log, server, agent or the balancer."""
        return self._member(kind, id_).pid

    def kill(self, kind: str, id_: str) -> None:
        """Kill a member (SIGKILL)."""
        self._member(kind, id_).kill()

    def restart(self, kind: str, id_: str) -> None:
        """Start a member that was killed."""
        if kind == "broker":
            self.start_broker(id_)
        else:
            self._member(kind, id_).start()

    def hang(self, kind: str, id_: str, *, is_hanging: bool) -> None:
        """Stop a member with SIGSTOP, or let it go on."""
        os.kill(self.process(kind, id_), signal.SIGSTOP if is_hanging else signal.SIGCONT)

    def _member(self, kind: str, id_: str) -> Child | EmbeddedRedis:
        members: dict[str, Mapping[str, Child | EmbeddedRedis]] = {
            "broker": self.brokers,
            "coordinator": self.coordinators,
            "log": self.logs,
            "server": self.cluster.redis,
            "agent": self.cluster.agents,
            "balancer": {"": self.cluster.balancer},
        }
        return members[kind][id_]

    def victims(self) -> list[tuple[str, str]]:
        """Return kind and id of every member."""
        return [
            *(("broker", id_) for id_ in self.brokers),
            *(("coordinator", id_) for id_ in self.coordinators),
            *(("log", id_) for id_ in self.logs),
            *(("server", id_) for id_ in self.cluster.redis),
            *(("agent", id_) for id_ in self.cluster.agents),
            ("balancer", ""),
        ]

    def look(self, broker: str) -> BrokerLook:
        """Return what a broker holds."""
        process = self.brokers[broker].pid
        text = self._metrics(broker)

        def value(name: str) -> int:
            return _value(text, name)

        files = len(os.listdir(f"/proc/{process}/fd"))
        return BrokerLook(resident_bytes(process), files, value("sessions"), value("subscriptions"), value("interests"))

    def counter(self, broker: str, name: str) -> int:
        """Return a counter of a broker."""
        return _value(self._metrics(broker), f"{name}_total")

    def _metrics(self, broker: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._http_ports[broker]}/metrics", timeout=10) as answer:
            text: str = answer.read().decode()
            return text

    def faults(self) -> list[str]:
        """Return the errors that brokers and coordinators have logged since their start, each once."""
        children = [*self.brokers.values(), *self.coordinators.values()]
        marks = '"level": "error"', "Traceback"
        return [
            f"{child.name}: {line[:600]}"
            for child in children
            for line in dict.fromkeys(child.lines)
            if any(mark in line for mark in marks)
        ]


def _value(text: str, name: str) -> int:
    found = re.search(rf"^dynamoth_broker_{name} (\S+)$", text, re.MULTILINE)
    assert found is not None, name
    return int(float(found[1]))


def _free_port() -> int:
    with reserve_port() as reserved:
        port: int = reserved.getsockname()[1]
        return port
