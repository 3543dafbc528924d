"""The process of a daemon: its machine with a driver, HTTP, log and signals, from the start to the exit code."""

from __future__ import annotations

import asyncio
import logging
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, Generic, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from dynamoth.machine.events import Machine, OnPushes, Start
from dynamoth.settings.sections import HttpSettings
from dynamoth_daemon.exit_codes import EXIT_DONE, EXIT_FAILED
from dynamoth_daemon.http import HttpAnswer, HttpQuery, HttpServer, health, readiness
from dynamoth_daemon.logs import DaemonLog
from dynamoth_link.driver import Driver
from dynamoth_link.errors import MachineCrashed
from dynamoth_link.options import LinkOptions

INCARNATION_BITS = 63
"""Width of the random number that identifies one run of a daemon."""

_Action = TypeVar("_Action")


class DaemonProcess(ABC, Generic[_Action]):
    """Runs one machine until a signal, its ``stop`` event, or the machine itself ends it.

    Args:
        name: what the log calls the daemon: ``agent``.
        machine: makes the decisions.
        http: where /metrics, /healthz and /readyz are served; with port 0 nowhere.
        link: credentials, TLS and timeouts of all links.
        stop: set by the caller, SIGTERM or SIGINT to end the process.
        log_fields: fields of every entry of the log.

    """

    def __init__(
        self,
        name: str,
        machine: Machine[Any, Any],
        http: HttpSettings,
        link: LinkOptions,
        stop: asyncio.Event,
        on_pushes: OnPushes | None = None,
        **log_fields: Any,
    ) -> None:
        self._name = name
        self._log = DaemonLog(logging.getLogger(f"dynamoth.{name}"), self.plan_version, **log_fields)
        self._http = http
        self._stop = stop
        #: Set when the machine has ended.
        self._ended = asyncio.Event()
        self._exit_code = EXIT_DONE
        self._loop = asyncio.get_running_loop()
        self._driver = Driver(
            machine, on_action=self.execute, link_options=lambda _: link, on_crash=self._crashed, on_pushes=on_pushes
        )

    async def run(self) -> int:
        """Run the machine to its end; return the exit code. Raises ConfigError when the port cannot be listened at."""
        http = await self._serve_http()
        stopping = self._loop.create_task(self._await_stop(), name=f"stop the {self._name}")
        try:
            with set_by_signals(self._stop):
                fields = self.describe()
                if http is not None:
                    fields["http_port"] = http.port
                event_loop = type(self._loop).__module__.partition(".")[0]
                self._log.write(logging.INFO, f"the {self._name} has started", **fields, event_loop=event_loop)
                self._driver.handle(Start())
                await self._ended.wait()
        finally:
            stopping.cancel()
            if http is not None:
                await http.close()
            await self.close()
            await self._driver.close()
        self._log.write(logging.INFO, f"the {self._name} has ended", exit_code=self._exit_code)
        return self._exit_code

    def end(self, exit_code: int = EXIT_DONE) -> None:
        """End the process with this exit code."""
        self._exit_code = exit_code
        self._ended.set()

    # The parts that differ between daemons.

    @abstractmethod
    def execute(self, action: _Action) -> None:
        """Execute an action of the machine that the driver does not know."""

    @abstractmethod
    def registry(self) -> CollectorRegistry:
        """Return the metrics to serve."""

    @abstractmethod
    def why_not_ready(self) -> str | None:
        """Return why the daemon does not do its work now, None when it does."""

    @abstractmethod
    def plan_version(self) -> int | None:
        """Return the version of the plan that the daemon acts on, None while it has none."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return the fields of the log entry that the daemon has started."""

    def queries(self) -> Mapping[str, HttpQuery]:
        """Return further paths of its HTTP, that take a query."""
        return {}

    def shut_down(self) -> None:
        """End in an orderly way, after ``stop`` was set; at once where the machine needs no time for that."""
        self.end()

    async def close(self) -> None:
        """End what the daemon does besides its machine; the machine has ended."""

    # Parts.

    async def _await_stop(self) -> None:
        await self._stop.wait()
        self.shut_down()

    def _crashed(self, crash: MachineCrashed) -> None:
        message = f"the {self._name} ends because of a bug: please report this line"
        self._log.write(logging.CRITICAL, message, str(crash), exception=crash.__cause__)
        self.end(EXIT_FAILED)

    async def _serve_http(self) -> HttpServer | None:
        """Serve /metrics, /healthz and /readyz; None where the port is 0."""
        if not self._http.http_port:
            return None
        registry = self.registry()

        def metrics() -> HttpAnswer:
            return HttpAnswer(HTTPStatus.OK, generate_latest(registry), CONTENT_TYPE_LATEST)

        paths: dict[str, Callable[[], HttpAnswer]] = {"/metrics": metrics, "/healthz": health, "/readyz": self._ready}
        return await HttpServer.start(self._http.http_host, self._http.http_port, paths, self.queries())

    def _ready(self) -> HttpAnswer:
        is_ending = self._stop.is_set() or self._ended.is_set()
        return readiness(f"the {self._name} is ending" if is_ending else self.why_not_ready())


_stops: list[asyncio.Event] = []
"""What SIGTERM and SIGINT set."""


@contextmanager
def set_by_signals(stop: asyncio.Event) -> Generator[None]:
    """Set ``stop`` at SIGTERM and SIGINT, and the events of those around it. In a coroutine of the main thread only."""
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)
    if any(each.is_set() for each in _stops):  # a signal came a moment ago
        stop.set()
    _stops.append(stop)
    if len(_stops) == 1:
        for number in signals:
            loop.add_signal_handler(number, _set_all)
    try:
        yield
    finally:
        _stops.remove(stop)
        if not _stops:
            for number in signals:
                loop.remove_signal_handler(number)


def _set_all() -> None:
    for stop in _stops:
        stop.set()
