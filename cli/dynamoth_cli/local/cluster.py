"""A whole cluster on this machine, of real processes: for ``dynamoth up``, the demo, the tests and the benchmarks.

``LocalCluster`` starts Redis servers, an agent for each and the balancer, as separate processes that never outlive
the one that started them. Each can be stopped, killed and started again on its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self, TypeVar

from dynamoth.errors import ClusterUnavailable, DynamothError, RequestRefused
from dynamoth.machine.events import CommandPart
from dynamoth.names import AGENT_CHANNEL, BALANCER_CHANNEL, RECORD_CHANNEL
from dynamoth.protocol.stored_plan import READ_HEADER, parse_header
from dynamoth.settings.declare import to_text
from dynamoth.settings.load import declared_settings
from dynamoth.settings.sections import GIGABIT_BYTES_PER_S
from dynamoth_agent.stand_in import LIMIT_WANTED
from dynamoth_cli.admin import ask_balancer
from dynamoth_cli.local.beside import say_recorder_ended
from dynamoth_cli.local.child import Child, dynamoth_command
from dynamoth_cli.local.embedded import REDIS_SERVER_VARIABLE, EmbeddedRedis, RedisServerFailed
from dynamoth_cli.local.reaper import Reaper
from dynamoth_link.errors import LinkError
from dynamoth_link.handshake import run_id_in
from dynamoth_link.query import query
from dynamoth_link.urls import ClusterAddress, ServerAddress, parse_cluster_url

READY_TIMEOUT_S = 30.0
"""A cluster of three is ready in about a second; a machine that is busy with everything else gets this long."""

POLL_INTERVAL_S = 0.02
ANSWER_TIMEOUT_S = 5.0
REQUEST_TIMEOUT_S = 60.0
"""Bounds of one answer of a server, and of one request to the balancer."""

HOST = "127.0.0.1"

PUBSUB_LIMIT = LIMIT_WANTED.partition(" ")[2]
"""How far an agent, or any other subscriber, may fall behind before Redis disconnects it."""

_T = TypeVar("_T")


class ClusterNotReady(DynamothError):
    """Raised when a cluster that was started does not become ready; says what is missing."""

    code = "not-ready"


class LocalCluster:
    """Redis servers ``s1``, ``s2`` ... with their agents, and a balancer.

    As a context manager it is ready on entry, and all of its processes have ended on exit. Use it from one thread,
    which must live as long as the cluster: on Linux the kernel kills the processes when that thread ends.

    Args:
        servers: how many.
        port_base: the port of the first server, the others follow; None takes free ports.
        password: what every server asks for; None for none.
        outgoing_bytes_per_s_max: capacity of each server, or one number for all.
        settings: by key, for agents and balancer: ``{"balancer.wait_s": 4.0}``.
        redis_options: lines of redis.conf, for all servers.
        users: name and password of the Redis user of each role (``acl.ROLES``); the default user stays for ``ask``. The
            servers know them by an aclfile of ``redis_options``. None for a role: the default user.
        record: the folder of a recording, written by a recorder beside the cluster; None for none.
        redis_binary: the ``redis-server`` to run; None takes what ``find_redis_server`` finds.
        servers_max: up to how many servers there are under load, those the balancer starts itself included; None: only
            ``servers``, always. The others are not in ``redis``, and end with the cluster.
        on_line: called with each line of the log of an agent or the balancer: its name, the line. Called in
            other threads.
    """

    def __init__(
        self,
        servers: int = 3,
        *,
        port_base: int | None = None,
        password: str | None = None,
        outgoing_bytes_per_s_max: int | Sequence[int] = GIGABIT_BYTES_PER_S,
        settings: Mapping[str, Any] = MappingProxyType({}),
        redis_options: Mapping[str, str] = MappingProxyType({}),
        users: Mapping[str, tuple[str, str]] = MappingProxyType({}),
        record: Path | None = None,
        redis_binary: Path | None = None,
        servers_max: int | None = None,
        on_line: Callable[[str, str], None] | None = None,
    ) -> None:
        if servers < 1:
            raise ValueError(f"a cluster needs at least one server, not {servers}")
        limits = outgoing_bytes_per_s_max
        self.capacities = [limits] * servers if isinstance(limits, int) else list(limits)
        assert len(self.capacities) == servers, "one capacity for each server"
        self.password = password
        self._settings = dict(settings)
        self._redis_binary = redis_binary
        self._servers_max = servers_max
        #: The servers that were killed for good.
        self._lost: set[str] = set()
        #: Ends the servers that the balancer has started, where it may start some.
        self._reaper: Reaper | None = None
        self._users = dict(users)
        self._record = record
        self._on_line = on_line
        #: The servers by id. Each keeps its port when it is restarted.
        self.redis = {
            f"s{index + 1}": EmbeddedRedis(
                port=None if port_base is None else port_base + index,
                password=password,
                options=redis_options,
                binary=redis_binary,
            )
            for index in range(servers)
        }
        #: Holds the configuration file, from ``start`` to ``stop``.
        self._folder: Path | None = None
        #: The agents by server, and the balancer, once ``start`` has been called.
        self.agents: dict[str, Child] = {}
        self._balancer: Child | None = None
        #: The recorder, where there is one.
        self.recorder: Child | None = None

    def __enter__(self) -> Self:
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def server_ids(self) -> list[str]:
        """The ids of the servers."""
        return list(self.redis)

    @property
    def url(self) -> str:
        """The URL for clients, password included."""
        return self.url_of("client")

    def url_of(self, role: str) -> str:
        """Return the URL with the credentials of a role."""
        username, password = self._users.get(role, (None, self.password))
        servers = (ServerAddress(HOST, server.port, None, username, password) for server in self.redis.values())
        return ClusterAddress(tuple(servers)).url()

    @property
    def balancer(self) -> Child:
        """The balancer's process."""
        assert self._balancer is not None, "the cluster was never started"
        return self._balancer

    @property
    def config_file(self) -> Path:
        """The configuration that the daemons have."""
        assert self._folder is not None, "the cluster is not running"
        return self._folder / "dynamoth.toml"

    @property
    def fleet_folder(self) -> Path:
        """Where the balancer keeps the servers that it starts, each in a folder of its own."""
        return self.config_file.parent / "servers"

    def start(self) -> None:
        """Start every process, without waiting until agents and balancer are at work. Servers may run already."""
        for server in self.redis.values():
            if not server.running:
                server.start()
        self._folder = Path(tempfile.mkdtemp(prefix="dynamoth-cluster-"))
        self.config_file.write_text(self._configuration())
        if self._servers_max is not None:
            self._reaper = Reaper(self.fleet_folder)
        self.agents = {id_: self._agent(id_) for id_ in self.redis}
        self._balancer = self._daemon("balancer", "balancer")
        if self._record is not None:
            self.recorder = self._daemon("recorder", "record", "--out", str(self._record))
        for child in self._daemons():
            child.start()

    def stop(self) -> None:
        """End every process, and remove every file."""
        if self._balancer is not None:
            self._balancer.stop()  # first, as it would take the end of the agents for failures
        if self._reaper is not None:
            self._reaper.reap()
            self._reaper = None
        if self.recorder is not None:
            self.recorder.stop()
        for child in self.agents.values():
            child.ask_to_end()
        for child in self.agents.values():
            child.stop()
        for server in self.redis.values():
            server.stop()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait until exactly one agent observes each server, a balancer leads, and the plan is stored there.

        Raises:
            ChildEnded: a daemon has ended instead.
            RedisServerFailed: a server has ended.
            ClusterNotReady: ``timeout_s`` is over.

        """
        deadline = time.monotonic() + timeout_s
        while missing := next(self._missing(), None):
            self.check()
            if self.recorder is not None and self.recorder.ended_by_itself:
                raise self.recorder.failure()
            if time.monotonic() > deadline:
                raise ClusterNotReady(f"not ready after {timeout_s:g} s: {self._why_not_ready(missing)}")
            time.sleep(POLL_INTERVAL_S)

    def check(self) -> None:
        """Raise if a process has ended that nobody asked to, and that the others need.

        Raises:
            ChildEnded: an agent or the balancer.
            RedisServerFailed: a server.

        """
        for child in self._daemons():
            if child.ended_by_itself and child is not self.recorder:
                raise child.failure()
        for id_, server in self.redis.items():
            if not server.running and id_ not in self._lost:
                raise RedisServerFailed(f"the Redis server {id_} has ended: {server.failure()}")

    def add_server(self) -> str:
        """Add a server as an operator does: it and its agent are started, and it is added to the plan. Returns its id.

        ``wait_ready`` waits until all servers store that plan.
        """
        id_ = f"s{len(self.redis) + 1}"
        server = self.redis[id_] = EmbeddedRedis(password=self.password)
        server.start()
        self.capacities.append(self.capacities[-1])
        self.config_file.write_text(self._configuration())
        self.agents[id_] = self._agent(id_)
        self.agents[id_].start()
        url = f"redis://{HOST}:{server.port}"
        self.ask_balancer("server", {"action": "add", "server": id_, "url": url})
        return id_

    def remove_server(self, id_: str) -> None:
        """Take a drained server out of the plan as an operator does; then it and its agent are stopped for good."""
        self.ask_balancer("server", {"action": "remove", "server": id_})
        del self.capacities[list(self.redis).index(id_)]
        server = self.redis.pop(id_)
        self.config_file.write_text(self._configuration())
        self.agents.pop(id_).stop()
        server.stop()

    def log_in_as(self, users: Mapping[str, tuple[str, str]]) -> None:
        """Restart the daemons one by one as these users, which the servers know; ``url`` has that of clients then."""
        self._users = dict(users)
        for id_, agent in self.agents.items():
            agent.stop()
            self.agents[id_] = self._agent(id_)
            self.agents[id_].start()
            self.wait_ready()
        self.balancer.stop()
        self._balancer = self._daemon("balancer", "balancer")
        self._balancer.start()
        self.wait_ready()

    def lose(self, server: str) -> None:
        """Kill a server and its agent (SIGKILL), as if their machine had died for good. ``check`` does not mind."""
        self._lost.add(server)
        self.redis[server].kill()
        self.agents[server].kill()

    def restart_redis(self, server: str) -> None:
        """Stop a server and start it again on its port, with nothing in it."""
        self.redis[server].restart()

    def ask(self, server: str, *commands: Sequence[CommandPart]) -> list[Any]:
        """Send commands to one server and return their replies, in order. An error reply is an ``ErrorReply``.

        Raises:
            LinkError: the server does not answer.

        """
        address = ServerAddress(HOST, self.redis[server].port, password=self.password)
        return _run(query(address, *commands, timeout_s=ANSWER_TIMEOUT_S))

    def ask_balancer(
        self,
        command: str,
        arguments: Mapping[str, Any] = MappingProxyType({}),
        *,
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> Mapping[str, Any]:
        """Send a request to the balancer; return its result. Raises as ``admin.ask_balancer``."""
        return _run(ask_balancer(parse_cluster_url(self.url_of("operator")), command, arguments, timeout_s=timeout_s))

    def another_balancer(self, name: str, *arguments: str) -> Child:
        """Return a further balancer, for the caller to start and to stop."""
        return self._daemon(name, "balancer", *arguments)

    def another_agent(self, server: str) -> Child:
        """Return a further agent of a server, for the caller to start and to stop."""
        return self._agent(server)

    def beside(self, name: str, command: str, *arguments: str) -> Child:
        """Return another daemon with the configuration of the cluster, for the caller to start and to stop."""
        return self._daemon(name, command, *arguments)

    def standby_agent(self, url: str) -> Child:
        """Return the agent of a standby server, for the caller to start and to stop."""
        return self._daemon(f"agent of {url}", "agent", "--standby", url)

    def _daemons(self) -> Iterator[Child]:
        yield from self.agents.values()
        if self._balancer is not None:
            yield self._balancer
        if self.recorder is not None:
            yield self.recorder

    def _agent(self, server: str) -> Child:
        return self._daemon(f"agent {server}", "agent", "--server", server)

    def _daemon(self, name: str, command: str, *arguments: str) -> Child:
        on_line = self._on_line
        return Child(
            name,
            dynamoth_command(command, "--config", str(self.config_file), *arguments),
            environment=self._environment("recorder" if command == "record" else command),
            on_line=None if on_line is None else lambda line: on_line(name, line),
            on_end=say_recorder_ended if command == "record" else None,
        )

    def _environment(self, role: str) -> dict[str, str]:
        environment = environment_without_settings()
        if role in self._users:
            environment["DYNAMOTH_LINK_USERNAME"], environment["DYNAMOTH_LINK_PASSWORD"] = self._users[role]
        elif self.password is not None:
            environment["DYNAMOTH_LINK_PASSWORD"] = self.password
        if self._redis_binary is not None:
            environment[REDIS_SERVER_VARIABLE] = str(self._redis_binary)
        return environment

    def _configuration(self) -> str:
        sections: dict[str, list[str]] = {}
        for key, value in {**self._fleet_settings(), **self._settings}.items():
            section, _, name = key.partition(".")
            sections.setdefault(section, []).append(f"{name} = {to_text(value, quoted=True)}")
        lines: list[str] = []
        for section, values in sections.items():
            lines += [f"[{section}]", *values]
        for (id_, server), capacity in zip(self.redis.items(), self.capacities, strict=True):
            url = f"redis://{HOST}:{server.port}"
            lines += [
                "[[cluster.servers]]",
                f'id = "{id_}"',
                f'url = "{url}"',
                f"outgoing_bytes_per_s_max = {capacity}",
            ]
        return "\n".join([*lines, ""])

    def _fleet_settings(self) -> dict[str, Any]:
        if self._servers_max is None:
            return {}
        return {
            "cluster.outgoing_bytes_per_s_max": self.capacities[-1],
            "fleet.provisioner": "process",
            "fleet.folder": str(self.fleet_folder),
            "fleet.servers_min": len(self.redis),
            "fleet.servers_max": self._servers_max,
        }

    def _why_not_ready(self, missing: str) -> str:
        """Return everything that is missing, and what each daemon has logged about it."""
        every = list(self._missing()) or [missing]
        logs = [f"{child.name}: {latest_fault(child.lines)}" for child in self._daemons()]
        return "; ".join(every) + "".join(f"\n  {log}" for log in logs)

    def _missing(self) -> Iterator[str]:
        """Yield what is not there yet, in words."""
        channels = AGENT_CHANNEL, BALANCER_CHANNEL, RECORD_CHANNEL
        questions = (b"PUBSUB", b"NUMSUB", *channels), READ_HEADER, (b"INFO", b"server")
        for id_ in self.redis:
            try:
                (_, agents, _, balancers, _, recorders), header, info = self.ask(id_, *questions)
            except LinkError as error:
                yield f"server {id_} does not answer: {error}"
                continue
            if agents != 1:
                yield f"{agents} agents observe server {id_}, not 1"
            if balancers != 1:
                yield f"{balancers} balancers listen at server {id_}, not 1"
            if self.recorder is not None and recorders == 0:
                yield f"no recorder listens at server {id_}"
            stored = parse_header(header, run_id_in(info))
            if stored is None or not stored.believed:
                yield f"server {id_} does not store the plan"
        try:
            stage = self.ask_balancer("status", timeout_s=ANSWER_TIMEOUT_S)["stage"]
        except (ClusterUnavailable, RequestRefused) as error:
            yield str(error)
            return
        if stage != "leading":
            yield f"the balancer is {stage}, not leading"


def latest_fault(lines: Sequence[str]) -> str:
    """Return the latest error in the log of a daemon, in words; without one, its last line."""
    found = lines[-1] if lines else "it has logged nothing yet"
    for line in lines:
        if '"level": "error"' in line:
            found = line
    try:
        entry = json.loads(found)
        where = entry.get("subject") or entry.get("server")
        return ": ".join(str(part) for part in (entry["message"], where, entry["cause"]) if part)
    except (ValueError, KeyError, AttributeError):  # no entry of a log, or one that was cut off
        return found


def environment_without_settings() -> dict[str, str]:
    """Return our environment without any setting of Dynamoth, for daemons that have a configuration file."""
    settings = {declared.variable for declared in declared_settings().values()}
    return {name: value for name, value in os.environ.items() if name not in settings}


def _run(question: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine to its end, in a thread: the caller may have an event loop of its own."""
    with ThreadPoolExecutor(1) as elsewhere:
        return elsewhere.submit(asyncio.run, question).result()
