"""Processes of clients, for the benchmarks: each is started, controlled over a pipe, and ended."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

ANSWER_TIMEOUT_S = 120.0
"""A worker that is silent for longer than this hangs."""
STOP_TIMEOUT_S = 5.0

_spawn = multiprocessing.get_context("spawn")


class WorkerFailed(Exception):
    """Raised when a worker has ended or is silent; what it wrote to stderr says why."""


class Worker:
    """One process, which runs ``target(pipe, *arguments)``.

    It ends when the pipe does, so it never outlives us. Ctrl-C is for us, who stop it.
    """

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        self._pipe, theirs = _spawn.Pipe()
        self._process = _spawn.Process(target=_run, args=(target, theirs, arguments), daemon=True)
        self._process.start()
        theirs.close()  # theirs is the only one left: when they end, we read the end

    def send(self, value: Any) -> None:
        """Send an object to the worker. Raises WorkerFailed."""
        try:
            self._pipe.send(value)
        except OSError as error:
            raise self._failure() from error

    def receive(self, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
        """Return the next object from the worker. Raises WorkerFailed."""
        try:
            if not self._pipe.poll(timeout_s):
                raise WorkerFailed(f"process {self._process.pid} of clients has been silent for {timeout_s:g} s")
            return self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self._failure() from error

    def stop(self) -> None:
        """End the process, whatever it is doing."""
        self._process.terminate()
        self._process.join(STOP_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._pipe.close()

    def kill(self) -> None:
        """Kill the process, as a crash would."""
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def _failure(self) -> WorkerFailed:
        self._process.join(STOP_TIMEOUT_S)
        return WorkerFailed(f"process {self._process.pid} of clients has ended (status {self._process.exitcode})")


def _run(target: Any, pipe: Connection, arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    target(pipe, *arguments)
