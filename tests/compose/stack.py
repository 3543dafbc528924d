"""Runs the services of compose/compose.yaml as processes of this machine.

Commands, environments, mounted files, secrets and health checks come from the compose file. What Docker would do is
done by replacing text: a path in a container by a folder of its own, the name of a service and its port by a free port
of a loopback address. So there is no second copy of any command here.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import pytest
from ruamel.yaml import YAML

from dynamoth_cli.local.child import Child
from dynamoth_cli.local.embedded import bundled_redis_server, find_redis_server

FOLDER = Path(__file__).parents[2] / "compose"

PATIENCE_S = 60.0
"""Bound of everything that is waited for: a machine that is busy with everything else gets this long."""

POLL_INTERVAL_S = 0.05

FIRST_PORT = 20_000
"""Below the ports that Linux gives to those who ask for any."""

_T = TypeVar("_T")


def load_yaml(path: Path) -> Any:
    """Return what a YAML file says."""
    yaml: Any = YAML(typ="safe")  # its methods have no types
    return yaml.load(path)


def services() -> dict[str, dict[str, Any]]:
    """Return the services of the compose file, by name."""
    found: dict[str, dict[str, Any]] = load_yaml(FOLDER / "compose.yaml")["services"]
    return found


def program(name: str) -> str:
    """Return the path of a program of Debian's package ``prometheus``. Without it: a failure in CI, else a skip."""
    if (found := shutil.which(name)) is None:
        missing = f"{name} is not installed: apt-get install prometheus"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    return found


def until(condition: Callable[[], _T], what: str, still_well: Callable[[], None] = lambda: None) -> _T:
    """Wait until a condition holds, and return what it returned. ``still_well`` raises when it never can."""
    deadline = time.monotonic() + PATIENCE_S
    while not (result := condition()):
        still_well()
        assert time.monotonic() < deadline, f"not within {PATIENCE_S:g} s: {what}"
        time.sleep(POLL_INTERVAL_S)
    return result


class Service:
    """One service as a process, with a folder in place of its container's root."""

    def __init__(self, name: str, stack: Stack) -> None:
        self.name = name
        self.definition = stack.definitions[name]
        self._stack = stack
        self._root = stack.folder / name
        #: Paths in the container, and what stands for them here; the longest first, as one may begin another.
        self._paths = dict(sorted(self._mounts(), key=lambda pair: -len(pair[0])))
        environment: Mapping[str, Any] = self.definition.get("environment", {})
        settings = {variable: self._here(str(value)) for variable, value in environment.items()}
        self.environment = {**_without_settings(), **settings, "PATH": _path()}
        self.child = Child(name, self.command(self.definition["command"]), environment=self.environment)

    def _mounts(self) -> Iterator[tuple[str, str]]:
        for mount in self.definition.get("volumes", []):
            source, target, *_ = mount.split(":")
            path = self._root / target.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            if not source.startswith("."):
                path.mkdir()
            elif (FOLDER / source).is_dir():
                shutil.copytree(FOLDER / source, path)
            else:
                shutil.copy(FOLDER / source, path)
            yield target, str(path)
        for secret in self.definition.get("secrets", []):
            yield f"/run/secrets/{secret}", str(self._stack.secrets / secret)

    def adapt_files(self) -> None:
        """Replace hosts, ports and paths in the files that are mounted."""
        for path in self._root.rglob("*"):
            if path.is_file():
                path.write_text(self._here(path.read_text()))

    def command(self, words: list[str]) -> list[str]:
        """Return a command of the service as it is run here."""
        here = [self._here(word) for word in words]
        programs = {"redis-server": str(find_redis_server()), "python": sys.executable}
        if words[0] in programs:
            return [programs[words[0]], *here[1:]]
        entry_points = {
            "dynamoth": [sys.executable, "-P", "-m", "dynamoth_cli"],
            "prom/prometheus": [program("prometheus")],
        }
        return [*entry_points[self.definition["image"].partition(":")[0]], *here]

    def _here(self, text: str) -> str:
        """Return text with the names of this machine for those of the container."""
        for path, path_here in self._paths.items():
            text = re.sub(rf"(?<![\w/.]){re.escape(path)}(?![\w-])", path_here, text)
        for (service, port), port_here in self._stack.ports.items():
            text = re.sub(rf"\b{service}:{port}\b", f"{self._stack.host}:{port_here}", text)
            if service == self.name:
                text = re.sub(rf"(?<![\w.]){port}\b", str(port_here), text)
        return re.sub(r"\b(0\.0\.0\.0|127\.0\.0\.1)\b", self._stack.host, text)

    @property
    def port(self) -> int:
        """The port where it listens here."""
        return next(here for (service, _), here in self._stack.ports.items() if service == self.name)

    @property
    def url(self) -> str:
        """Where its HTTP is."""
        return f"http://{self._stack.host}:{self.port}"

    def get(self, path: str, parameters: Mapping[str, str] | None = None) -> str:
        """Return what a path of its HTTP answers; empty while it does not answer, or with an error."""
        query = "?" + urllib.parse.urlencode(parameters) if parameters else ""
        try:
            with urllib.request.urlopen(f"{self.url}{path}{query}", timeout=PATIENCE_S) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            with error:
                assert parameters is None, f"{path}{query}: {error.read().decode()}"
                return ""
        except urllib.error.URLError:
            return ""

    def is_healthy(self) -> bool:
        """Run the health check of the compose file."""
        kind, *words = self.definition["healthcheck"]["test"]
        command = self.command(words) if kind == "CMD" else ["sh", "-c", self._here(words[0])]
        return subprocess.run(command, env=self.environment, capture_output=True, check=False).returncode == 0

    def wait_healthy(self) -> None:
        """Wait until the health check succeeds."""
        until(self.is_healthy, f"{self.name} is healthy", self._stack.check)


class Stack:
    """The services that are processes here: all but Grafana, which Debian does not have. They end on exit."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.definitions = services()
        #: A loopback address of this process' own, and ports that no system hands out by itself: so that none is taken.
        pid = os.getpid()
        self.host = f"127.{64 + (pid >> 16) % 64}.{(pid >> 8) % 256}.{pid % 254 + 1}"
        exposed = [(name, int(port)) for name, it in self.definitions.items() for port in it.get("expose", [])]
        self.ports = dict(zip(exposed, count(FIRST_PORT), strict=False))
        self.secrets = folder / "secrets"
        self._make_secrets()
        self.services = {name: Service(name, self) for name in self.definitions if name not in ("grafana", "operator")}
        self.operator = Service("operator", self)
        for service in (*self.services.values(), self.operator):
            service.adapt_files()

    def _make_secrets(self) -> None:
        version = subprocess.run([find_redis_server(), "--version"], capture_output=True, text=True, check=True).stdout
        major_minor = re.search(r"v=(\d+)\.(\d+)", version)
        assert major_minor is not None, version
        number = tuple(map(int, major_minor.groups()))
        shutil.copy(FOLDER / "make-secrets", self.folder)
        python = Path(sys.executable)
        environment = {
            **_without_settings(),
            # Found by PATH, as the shell would split a folder with spaces in its name.
            "PATH": f"{python.parent}:{os.environ['PATH']}",
            "DYNAMOTH": f"{python.name} -P -m dynamoth_cli",
            "REDIS": "6.2" if number < (7,) else "7" if number < (7, 2) else "7.2",
        }
        subprocess.run([self.folder / "make-secrets", "news.*"], env=environment, capture_output=True, check=True)

    def __enter__(self) -> Self:
        for service in self.services.values():
            service.child.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for service in reversed(self.services.values()):
            service.child.ask_to_end()
        for service in reversed(self.services.values()):
            service.child.stop()

    def check(self) -> None:
        """Raise if a service has ended that nobody asked to."""
        for service in self.services.values():
            if service.child.ended_by_itself:
                raise service.child.failure()

    def of_kind(self, kind: str) -> list[Service]:
        """Return the services whose name begins so."""
        return [service for name, service in self.services.items() if name.startswith(kind)]

    def query(self, expression: str) -> list[Any]:
        """Return what Prometheus answers to an expression; fails if that cannot be evaluated."""
        answer = json.loads(self.services["prometheus"].get("/api/v1/query", {"query": expression}))
        assert answer["status"] == "success", f"{expression}: {answer}"
        result: list[Any] = answer["data"]["result"]
        return result


def _path() -> str:
    """Return PATH with the redis-cli that came with the redis-server."""
    servers = (find_redis_server(), bundled_redis_server())
    return os.pathsep.join([os.environ["PATH"], *(str(server.parent) for server in servers if server is not None)])


def _without_settings() -> dict[str, str]:
    """Return our environment without settings of Dynamoth, which a container would not have."""
    return {name: value for name, value in os.environ.items() if not name.startswith("DYNAMOTH")}
