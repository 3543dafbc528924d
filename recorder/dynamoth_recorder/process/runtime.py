"""Runs a recorder as a process: ``dynamoth record``."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, assert_never

from prometheus_client import CollectorRegistry

from dynamoth.errors import ConfigError, DynamothError, MalformedMessage
from dynamoth.plan.plan import Server
from dynamoth.recording import GAPS
from dynamoth.settings.sections import RecorderSettings
from dynamoth_daemon.exit_codes import EXIT_DONE, EXIT_FAILED
from dynamoth_daemon.process import INCARNATION_BITS, DaemonProcess
from dynamoth_link.options import LinkOptions
from dynamoth_recorder.events import LinkChanged, RecorderNews, Refused, Rows, ServersChanged, StoreChanged
from dynamoth_recorder.machine import RecorderMachine
from dynamoth_recorder.process.backlog import Backlog
from dynamoth_recorder.process.metrics import make_registry
from dynamoth_recorder.process.state import RecorderState
from dynamoth_recorder.process.store import Store
from dynamoth_recorder.process.tables import to_batch

FLUSH_S = 5.0
"""Rows are written this often. A crash loses at most this time plus that of one write."""

LARGE_BYTES = 32 * 1024 * 1024
"""Rows are written earlier when there are more bytes than this."""

UPKEEP_S = 30.0
"""Old hours are deleted and small files merged this often."""

SEARCH_S = 1.0
"""The servers of the cluster are read this often while they are not known."""

REFRESH_S = 10.0
"""The servers of the cluster are read this often once they are known, as they may change."""


@dataclass(frozen=True, kw_only=True)
class RecorderConfig(RecorderSettings):
    """The configuration of a recorder process.

    ``find_servers``: reads the servers of the cluster; raises DynamothError if that fails.
    ``link``: credentials, TLS and timeouts of all links.

    Raises:
        ConfigError: ``out`` is not set, or is a file.

    """

    find_servers: Callable[[], Awaitable[tuple[Server, ...]]]
    link: LinkOptions = field(default_factory=LinkOptions)

    def __post_init__(self) -> None:
        """Check the folder."""
        if not self.out:
            raise ConfigError("recorder.out is not set: give --out with the folder of the recording")
        if Path(self.out).is_file():
            raise ConfigError(f"recorder.out: {self.out} is a file: give the folder of a recording, or a new one")


async def run_recorder(config: RecorderConfig, stop: asyncio.Event | None = None) -> int:
    """Record until ``stop``, SIGTERM or SIGINT; return the exit code of the process.

    Waits for servers that are down, and for a cluster that has no plan yet. A full disk does not end it.

    Raises:
        ConfigError: the folder cannot be written, or the HTTP port is not free.
        DiskFull: the disk of the folder is full at the start.

    """
    to_batch(Rows(GAPS.name, 1, {}), 0, "")  # the first one imports much: rows and probes would wait for it
    recorder = secrets.randbits(INCARNATION_BITS)
    store = Store(Path(config.out), f"{recorder:016x}", config.keep_hours, config.keep_bytes_max)
    try:
        return await _RecorderProcess(config, RecorderMachine(recorder), store, stop or asyncio.Event()).run()
    finally:
        store.close()


def run(config: RecorderConfig) -> int:
    """Run a recorder in an event loop of its own; see :func:`run_recorder`.

    Uses asyncio's loop: uvloop's clock has steps of 1 ms, too coarse for probes.
    """
    return asyncio.run(run_recorder(config))


class _RecorderProcess(DaemonProcess[RecorderNews]):
    """One recorder process. The event loop gathers rows, one thread writes them, and another one merges files."""

    def __init__(self, config: RecorderConfig, machine: RecorderMachine, store: Store, stop: asyncio.Event) -> None:
        self._config = config
        self._machine = machine
        self._store = store
        super().__init__("recorder", machine, config, config.link, stop, recorder=store.recorder)
        self._state = RecorderState(machine, Backlog(), store)
        #: Rows whose loss is recorded, by table.
        self._lost_before: Counter[str] = Counter()
        #: Set when there are more than ``LARGE_BYTES`` to write.
        self._is_large = asyncio.Event()
        #: Held while rows are written.
        self._writing = asyncio.Lock()
        self._threads = ThreadPoolExecutor(2, "recording")
        #: Writes the last rows.
        self._finishing: asyncio.Task[None] | None = None

    async def run(self) -> int:
        """Run until the end; return the exit code."""
        work = self._follow_cluster(), self._keep_writing(), self._keep_tidy()
        tasks = [self._background(each) for each in work]
        try:
            return await super().run()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._threads.shutdown()

    def registry(self) -> CollectorRegistry:
        """Return the metrics of the recorder."""
        return make_registry(self._state)

    def plan_version(self) -> int | None:
        """Return None: a recorder acts on no plan."""
        return None

    def describe(self) -> dict[str, Any]:
        """Return the folder of the recording."""
        return {"folder": str(self._store.folder)}

    def why_not_ready(self) -> str | None:
        """Return why the recorder does not record everything now."""
        if self._state.failure:
            return f"the recording cannot be written: {self._state.failure}"
        if not self._machine.servers_known:
            return self._state.unreadable or "the servers of the cluster are not known yet"
        return "\n".join(f"{server}: {reason}" for server, reason in self._machine.not_heard.items()) or None

    def execute(self, action: RecorderNews) -> None:
        """Gather rows and log the rest."""
        match action:
            case Rows():
                self._gather(action)
            case LinkChanged(server, None):
                self._log.write(logging.INFO, "connected", server=server, limited=True)
            case LinkChanged(server, reason):
                self._log.write(logging.WARNING, "no connection; trying again", reason, server=server)
            case Refused(server, reply):
                message = "the server refuses what a recorder needs: give its user the rights of 'dynamoth acl'"
                self._log.write(logging.ERROR, message, reply, server=server)
            case _:
                assert_never(action)

    def shut_down(self) -> None:
        """Write the last rows, then end."""
        self._finishing = self._background(self._finish())

    def _gather(self, rows: Rows) -> None:
        if self._finishing is not None:
            return  # the recording has ended
        at_us = time.time_ns() // 1000 - round(rows.age_s * 1e6)
        try:
            batch = to_batch(rows, at_us, self._store.recorder)
        except MalformedMessage:
            self._machine.counters["malformed"] += 1
            return
        backlog = self._state.backlog
        backlog.add(rows.table, at_us, batch)
        if backlog.size_bytes > LARGE_BYTES and not self._state.failure:
            self._is_large.set()

    def _background(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = self._loop.create_task(work)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.write(logging.CRITICAL, "the recorder ends because of a bug: please report this", exception=error)
            self.end(EXIT_FAILED)

    # The cluster.

    async def _follow_cluster(self) -> None:
        """Read the servers of the cluster again and again."""
        while True:
            try:
                servers = await self._config.find_servers()
            except DynamothError as error:
                self._report_cluster(str(error))
            else:
                self._report_cluster("")
                self._driver.handle(ServersChanged(servers))
            await asyncio.sleep(REFRESH_S if self._machine.servers_known else SEARCH_S)

    def _report_cluster(self, failure: str) -> None:
        """Log why the servers cannot be read, each reason once in a row, and when they can be read again."""
        before, self._state.unreadable = self._state.unreadable, failure
        if failure == before:
            return
        if not self._machine.servers_known:
            if failure:
                self._log.write(logging.WARNING, "waiting for the cluster", failure)
        elif failure:
            message = "the servers of the cluster cannot be read; recording at those known before"
            self._log.write(logging.WARNING, message, failure)
        else:
            self._log.write(logging.INFO, "the servers of the cluster are read again")

    # The disk.

    async def _keep_writing(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_S):
                    await self._is_large.wait()
            self._is_large.clear()
            await self._write()

    async def _write(self) -> None:
        """Write all gathered rows, and keep those that cannot be written."""
        async with self._writing:
            portions = self._state.backlog.take()
            left, failure = await self._loop.run_in_executor(self._threads, self._store.write_all, portions)
            self._state.backlog.give_back(left)
            if portions:
                self._report_writing(failure)

    def _report_writing(self, failure: str) -> None:
        state = self._state
        if not failure:
            state.last_write = time.time()
        if failure == state.failure:
            return
        was_failing, state.failure = bool(state.failure), failure
        if failure:
            message = "the recording cannot be written: make room, or correct the folder; rows are kept meanwhile"
            self._log.write(logging.ERROR, message, failure, folder=str(self._store.folder))
        else:
            lost = Counter(state.backlog.lost).total()
            self._log.write(logging.INFO, "the recording is written again", rows_lost=lost)
        if was_failing != bool(failure):
            newly_lost = Counter(state.backlog.lost) - self._lost_before
            self._lost_before += newly_lost
            self._driver.handle(StoreChanged(bool(failure), newly_lost))

    async def _keep_tidy(self) -> None:
        """Delete old hours and, if rows can be written, merge small files, again and again."""
        while True:
            await asyncio.sleep(UPKEEP_S)
            upkeep = partial(self._store.upkeep, datetime.now(UTC), merge=not self._state.failure)
            try:
                await self._loop.run_in_executor(self._threads, upkeep)
            except OSError as error:
                self._log.write(logging.WARNING, "files of the recording cannot be merged or deleted", str(error))

    async def _finish(self) -> None:
        await self._write()
        backlog = self._state.backlog
        for portion in backlog.take():
            backlog.lost[portion.table] += portion.rows
        if lost := Counter(backlog.lost).total():
            self._log.write(logging.ERROR, "rows were lost, as they could not be written", rows_lost=lost)
        self.end(EXIT_FAILED if lost else EXIT_DONE)
