"""Servers that have machines of their own, as far as the network goes: for the benchmarks of the paper's experiments.

Theory of operation
-------------------
::

       clients, balancer (our own network namespace)
                         |
                  bridge 198.18.n.1/24
               /         |         \
           veth        veth        veth        of limited rate towards the bridge
             |           |           |
       namespace s1      s2          s3        redis-server and its agent in each

A token bucket (``tbf``) at the namespace's end of a veth limits what the machine sends. Between Redis and its agent
nothing is limited, as both are on one machine (Dynamoth, section III-A); what the agent sends to another server is.

The addresses are of the block that is set aside for benchmarks of networks (RFC 2544). All names carry our process id,
so that two runs do not meet. Everything is undone on exit, in reverse order, whatever has happened before.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

from dynamoth.errors import ClusterUnavailable, DynamothError
from dynamoth.settings.declare import to_text
from dynamoth_cli.admin import ask_balancer
from dynamoth_cli.cluster_access import Access
from dynamoth_cli.commands.status import read_status
from dynamoth_cli.local.child import Child, dynamoth_command
from dynamoth_cli.local.cluster import environment_without_settings
from dynamoth_cli.local.embedded import find_redis_server
from dynamoth_link.errors import LinkError
from dynamoth_link.query import query
from dynamoth_link.urls import parse_cluster_url

BURST_BYTES = 65_536
"""What a machine may send at once. A segment that TCP hands over in one piece is at most as large."""
QUEUE_S = 1.0
"""The queue before the limit holds what is sent in this time: more than TCP puts there, so that nothing is dropped."""

SUBNETS = 512
"""The /24 networks of 198.18.0.0/15."""

PORT = 6379
READY_TIMEOUT_S = 30.0
POLL_INTERVAL_S = 0.05
REQUEST_TIMEOUT_S = 60.0
COMMAND_TIMEOUT_S = 10.0

_INTERFACE = "eth0"
"""What a machine calls its only interface."""


class NotPossible(DynamothError):
    """Raised when this machine, or our rights on it, do not allow the benchmark; says what to do."""

    code = "not-possible"


class Network:
    """A bridge, and machines at it. As a context manager; nothing of it is left on exit.

    Args:
        bytes_per_s: what each machine can send, Ethernet headers included.

    Raises (on entry):
        NotPossible: there is something that it needs and does not have.

    """

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._name = f"dyb{os.getpid()}"
        self._undo = ExitStack()
        #: 198.18.n, from entry to exit.
        self._subnet = ""
        #: The machines by id: their addresses.
        self.addresses: dict[str, str] = {}
        #: The same machines: our ends of their cables.
        self._cables: dict[str, str] = {}

    def __enter__(self) -> Self:
        check_possible()
        self._subnet = _free_subnet()
        try:
            self._undo.callback(_remove, "link", self._name)
            _ip("link", "add", self._name, "type", "bridge")
            _ip("address", "add", f"{self._subnet}.1/24", "dev", self._name)
            _ip("link", "set", self._name, "up")
        except BaseException:
            self._undo.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()

    def add(self, id_: str) -> None:
        """Add a machine. Raises NotPossible."""
        number = len(self.addresses) + 2  # .1 is ours
        namespace, cable = self.namespace(id_), f"{self._name}v{number}"
        self._undo.callback(_remove, "netns", namespace)
        _ip("netns", "add", namespace)
        self._undo.callback(_remove, "link", cable)
        _ip("link", "add", cable, "type", "veth", "peer", "name", _INTERFACE, "netns", namespace)
        _ip("link", "set", cable, "master", self._name, "up")
        _ip("-n", namespace, "address", "add", f"{self._subnet}.{number}/24", "dev", _INTERFACE)
        _ip("-n", namespace, "link", "set", "lo", "up")
        _ip("-n", namespace, "link", "set", _INTERFACE, "up")
        limit = ("rate", f"{self._bytes_per_s}bps", "burst", str(BURST_BYTES))  # bps: bytes, in the words of tc
        queue = ("limit", str(int(self._bytes_per_s * QUEUE_S)))
        _call("tc", "-n", namespace, "qdisc", "add", "dev", _INTERFACE, "root", "tbf", *limit, *queue)
        self.addresses[id_] = f"{self._subnet}.{number}"
        self._cables[id_] = cable

    def namespace(self, id_: str) -> str:
        """Return the name of a machine's namespace."""
        return f"{self._name}-{id_}"

    def inside(self, id_: str, command: list[str]) -> list[str]:
        """Return the command line that runs ``command`` on a machine; the process id stays."""
        return [_tool("ip"), "netns", "exec", self.namespace(id_), *command]

    def cut(self, id_: str) -> None:
        """Pull the cable of a machine: nothing passes, and no connection is closed."""
        _ip("link", "set", self._cables[id_], "down")

    def mend(self, id_: str) -> None:
        """Put the cable back."""
        _ip("link", "set", self._cables[id_], "up")

    def dropped(self) -> int:
        """Return how many packets the machines' limits have dropped."""
        return sum(self._dropped(id_) for id_ in self.addresses)

    def sent_bytes(self) -> dict[str, int]:
        """Return how many bytes each machine has sent so far, behind its limit, Ethernet headers included."""
        return {
            id_: int(Path(f"/sys/class/net/{cable}/statistics/rx_bytes").read_text())
            for id_, cable in self._cables.copy().items()
        }

    def _dropped(self, id_: str) -> int:
        shown = _call("tc", "-n", self.namespace(id_), "-s", "-json", "qdisc", "show", "dev", _INTERFACE)
        return sum(int(queue["drops"]) for queue in json.loads(shown))


def check_possible() -> None:
    """Raise NotPossible where a benchmark cannot make networks."""
    if sys.platform != "linux":
        raise NotPossible("needs Linux: each server gets a network namespace")
    for tool in ("ip", "tc"):
        _tool(tool)
    if os.geteuid() != 0:
        again = f"sudo {' '.join([sys.executable, *sys.orig_argv[1:]])}"
        raise NotPossible(f"needs root, to make network namespaces and to limit their rate: run '{again}'")


def _free_subnet() -> str:
    """Return a network that this machine has no address in, two runs most probably different ones."""
    shown = json.loads(_ip("-json", "address", "show"))
    used = {address["local"] for link in shown for address in link.get("addr_info", ())}
    for offset in range(SUBNETS):
        high, low = divmod((os.getpid() + offset) % SUBNETS, 256)
        subnet = f"198.{18 + high}.{low}"
        if not any(address.startswith(f"{subnet}.") for address in used):
            return subnet
    raise NotPossible("every network of 198.18.0.0/15 is in use on this machine: remove one")


def _remove(kind: str, name: str) -> None:
    """Remove a link or a namespace, if it is there. A failure is printed, and others are removed all the same."""
    shown = _call("ip", "-o", kind, "show") if kind == "link" else _call("ip", "netns", "list")
    if name not in shown.replace(":", " ").replace("@", " ").split():
        return
    try:
        _ip(kind, "delete", name)
    except NotPossible as error:
        sys.stderr.write(f"{error}\n")


def _ip(*arguments: str) -> str:
    return _call("ip", *arguments)


def _call(tool: str, *arguments: str) -> str:
    """Run a command to its end; return what it prints. In its own process group: Ctrl-C does not stop it half way."""
    done = subprocess.run(
        [_tool(tool), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=COMMAND_TIMEOUT_S,
        process_group=0,
    )
    if done.returncode:
        raise NotPossible(
            f"cannot do '{tool} {' '.join(arguments)}': {done.stderr.strip()}: it needs a kernel with network"
            " namespaces, veth, bridge and sch_tbf, and the right to use them (in a container: --privileged)"
        )
    return done.stdout


def _tool(name: str) -> str:
    found = shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")
    if found is None:
        raise NotPossible(f"needs the program '{name}': install iproute2 (apt-get install iproute2)")
    return found


def redis_command(
    address: str, folder: Path, options: Mapping[str, str] = MappingProxyType({}), program: Path | None = None
) -> list[str]:
    """Return how a server is started: as it comes, but for what keeps it off the disk and lets others in."""
    all_options = {
        "bind": address,
        "port": str(PORT),
        "protected-mode": "no",  # there is no way to it but over the bridge
        "dir": str(folder),
        "save": "",
        "logfile": "/dev/stderr",
        **options,
    }
    program = find_redis_server() if program is None else program
    return [str(program), *(word for name, value in all_options.items() for word in (f"--{name}", value))]


class LimitedCluster:
    """Redis servers with their agents, each on a machine of ``network``, and a balancer.

    As a context manager it is ready on entry, and all of its processes have ended on exit.

    Args:
        network: gets a machine for each server.
        servers: how many.
        settings: by key, for agents and balancer: ``{"balancer.wait_s": 4.0}``.
        paused: whether the balancer decides nothing by itself.

    Raises (on entry):
        ChildEnded: a process has ended.
        ClusterUnavailable: the cluster has not become ready.
        NotPossible: no machine can be made.

    """

    def __init__(
        self,
        network: Network,
        servers: int,
        *,
        settings: Mapping[str, object] = MappingProxyType({}),
        paused: bool = True,
    ) -> None:
        self._network = network
        self._settings = settings
        self._paused = paused
        self.server_ids = [f"s{index + 1}" for index in range(servers)]
        self._undo = ExitStack()
        self._children: list[Child] = []
        self._config_file: Path | None = None
        self._balancer: Child | None = None

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._undo.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()

    @property
    def url(self) -> str:
        """The URL for clients."""
        addresses = (self._network.addresses[id_] for id_ in self.server_ids)
        return "dynamoth://" + ",".join(f"{address}:{PORT}" for address in addresses)

    def ask_balancer(self, command: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Have the balancer carry out a request; return its result. Raises as ``admin.ask_balancer``."""
        return asyncio.run(ask_balancer(parse_cluster_url(self.url), command, arguments, timeout_s=REQUEST_TIMEOUT_S))

    @property
    def balancer(self) -> Child:
        """The balancer's process."""
        assert self._balancer is not None, "the cluster has begun"
        return self._balancer

    @property
    def processes(self) -> dict[str, int]:
        """The ids of the processes, by name."""
        return {child.name: child.pid for child in self._children}

    def check(self) -> None:
        """Raise ChildEnded if a process has ended."""
        for child in self._children:
            if child.ended_by_itself:
                raise child.failure()

    def daemon(self, *arguments: str) -> list[str]:
        """Return the command line of a daemon of this cluster."""
        assert self._config_file is not None, "the cluster has begun"
        return dynamoth_command(*arguments, "--config", str(self._config_file))

    def run(self, name: str, command: list[str]) -> Child:
        """Start a process that must not end before the cluster."""
        child = Child(name, command, environment=environment_without_settings())
        self._undo.callback(child.stop)
        self._children.append(child)
        child.start()
        return child

    def _start(self) -> None:
        folder = Path(tempfile.mkdtemp(prefix="dynamoth-bench-"))
        self._undo.callback(shutil.rmtree, folder, ignore_errors=True)
        for id_ in self.server_ids:
            self._network.add(id_)
        for id_ in self.server_ids:
            command = redis_command(self._network.addresses[id_], folder)
            self.run(f"server {id_}", self._network.inside(id_, command))
        self._wait(self._silent_server)
        self._config_file = folder / "dynamoth.toml"
        self._config_file.write_text(self._configuration())
        for id_ in self.server_ids:
            command = self.daemon("agent", "--server", id_)
            self.run(f"agent {id_}", self._network.inside(id_, command))
        self._balancer = self.run("balancer", self.daemon("balancer"))
        self._wait(self._not_at_work)
        if self._paused:
            self.ask_balancer("pause", {})

    def _configuration(self) -> str:
        sections: dict[str, list[str]] = {}
        for key, value in self._settings.items():
            section, _, name = key.partition(".")
            sections.setdefault(section, []).append(f"{name} = {to_text(value, quoted=True)}")
        lines = [line for section, values in sections.items() for line in (f"[{section}]", *values)]
        for id_ in self.server_ids:
            url = f"redis://{self._network.addresses[id_]}:{PORT}"
            lines += ["[[cluster.servers]]", f"id = {to_text(id_, quoted=True)}", f"url = {to_text(url, quoted=True)}"]
        return "\n".join([*lines, ""])

    def _wait(self, missing: Callable[[], str]) -> None:
        """Wait until nothing is missing."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        while problem := missing():
            self.check()
            if time.monotonic() > deadline:
                raise ClusterUnavailable(f"not ready after {READY_TIMEOUT_S:g} s: {problem}")
            time.sleep(POLL_INTERVAL_S)

    def _silent_server(self) -> str:
        """Say which server does not answer yet; empty when all do."""
        for server in parse_cluster_url(self.url).servers:
            try:
                asyncio.run(query(server, (b"PING",)))
            except LinkError as error:
                return str(error)
        return ""

    def _not_at_work(self) -> str:
        """Say what agents and balancer have not done yet; empty when they are at work."""
        try:
            status = asyncio.run(read_status(Access(parse_cluster_url(self.url))))
        except ClusterUnavailable as error:
            return str(error)
        if status["problems"]:
            return str(status["problems"][0]["reason"])
        stage = status["balancer"]["stage"]
        return "" if stage == "leading" else f"the balancer is {stage}, not leading"
