"""Starts and stops child processes. A child never outlives this process, and the last lines of its log are kept.

On Linux the kernel kills a child when the *thread* that started it ends, however that happens; so start children from
a thread that lives as long as they must. A child has its own process group: Ctrl-C reaches only this process, which
stops its children in order.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from threading import Thread
from types import FrameType
from typing import IO

from dynamoth.errors import DynamothError

STOP_TIMEOUT_S = 10.0
"""After this long a child that was asked to end is killed."""

POLL_S = 0.02
"""How often its log is looked at for a line."""

LINES_KEPT_MAX = 200
LINE_CHARACTERS_MAX = 4000
TAIL_LINES = 15
"""Bounds of the log that is kept, and of the part that an error shows."""

# Becomes the child by exec, so that the process id stays. A program of its own does this, rather than a preexec_fn,
# because Python code between fork and exec can deadlock when the parent has threads. If the parent dies before the
# prctl takes effect, no signal comes: hence the look at its id. 1 is PR_SET_PDEATHSIG.
_EXEC_AND_DIE_WITH_PARENT = """\
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


class ChildEnded(DynamothError):
    """Raised when a process that we started has ended unexpectedly; quotes its last lines."""

    code = "child-ended"


def dynamoth_command(*arguments: str) -> list[str]:
    """Return the command line that runs ``dynamoth`` with these arguments, in this Python."""
    return [sys.executable, "-P", "-m", "dynamoth_cli", *arguments]


class Child:
    """One process, from start to end. It can be started again after it has ended.

    Args:
        name: its name in messages.
        command: the program and its arguments.
        environment: all of its variables.
        on_line: called with each line of its log, in a thread of its own.
        on_end: called in that thread, with how it ended, when it has ended without being asked to.
        pipes: whether ``stdin`` and ``stdout`` are pipes to this process, and the log is stderr; otherwise it has no
            stdin, and the log is both.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        on_line: Callable[[str], None] | None = None,
        on_end: Callable[[str], None] | None = None,
        pipes: bool = False,
    ) -> None:
        self.name = name
        self._command = list(command)
        self._environment = dict(environment)
        self._on_line = on_line
        self._on_end = on_end
        self._pipes = pipes
        #: The process of the latest start, also after it has ended.
        self._process: subprocess.Popen[bytes] | None = None
        #: Reads its log until that is closed.
        self._reader: Thread | None = None
        #: What the process of the latest start wrote last.
        self._lines: deque[str] = deque(maxlen=LINES_KEPT_MAX)
        #: Whether we have asked it to end.
        self._asked_to_end = False

    @property
    def running(self) -> bool:
        """Whether the process is alive."""
        return self._process is not None and self._process.poll() is None

    @property
    def ended_by_itself(self) -> bool:
        """Whether it has ended without being asked to."""
        return self._process is not None and self._process.poll() is not None and not self._asked_to_end

    @property
    def pid(self) -> int:
        """The process id, also after its end."""
        assert self._process is not None, f"{self.name} was never started"
        return self._process.pid

    @property
    def stdin(self) -> IO[bytes]:
        """The pipe to it."""
        assert self._process is not None and self._process.stdin is not None, f"{self.name} has no pipes"
        return self._process.stdin

    @property
    def stdout(self) -> IO[bytes]:
        """The pipe from it."""
        assert self._process is not None and self._process.stdout is not None, f"{self.name} has no pipes"
        return self._process.stdout

    @property
    def lines(self) -> list[str]:
        """Its log since its latest start: the last ``LINES_KEPT_MAX`` lines."""
        return list(self._lines)

    def start(self) -> None:
        """Start it. Does nothing when it is running."""
        if self.running:
            return
        self._release()
        self._lines.clear()
        self._asked_to_end = False
        self._process = subprocess.Popen(
            tied_to_us(self._command),
            stdin=subprocess.PIPE if self._pipes else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if self._pipes else subprocess.STDOUT,
            env=self._environment,
            process_group=0,
        )
        log = self._process.stderr if self._pipes else self._process.stdout
        self._reader = Thread(target=self._read, args=(log,), name=f"log of {self.name}", daemon=True)
        self._reader.start()

    def ask_to_end(self) -> None:
        """Send SIGTERM; a child that hangs in SIGSTOP is woken for it. Does nothing when it has ended."""
        if self._process is not None and self.running:
            self._asked_to_end = True
            self._process.terminate()
            self._process.send_signal(signal.SIGCONT)

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> int | None:
        """Stop it with SIGTERM, and with SIGKILL after ``timeout_s``. Returns its status; None if it never ran."""
        if self._process is None:
            return None
        self.ask_to_end()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
        return self._release()

    def kill(self) -> None:
        """Kill it (SIGKILL), as a crash would, and wait until it has ended."""
        if self._process is not None:
            self._asked_to_end = True
            self._process.kill()
            self._release()

    def wait(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` for its end. Returns whether it has ended."""
        assert self._process is not None, f"{self.name} was never started"
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def wait_for_line(self, text: str, timeout_s: float) -> None:
        """Wait until a line of its log has ``text``. Raises ChildEnded, TimeoutError; both quote its last lines."""
        deadline = time.monotonic() + timeout_s
        while not any(text in line for line in self.lines):
            if self.ended_by_itself:
                raise self.failure()
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{self.name} has not logged {text!r} within {timeout_s:g} s; its last output:{self._tail()}"
                )
            time.sleep(POLL_S)

    def failure(self) -> ChildEnded:
        """Return an error that says how it ended, with its last lines."""
        self._release()
        return ChildEnded(f"{self._how_it_ended()}; its last output:{self._tail()}")

    def _tail(self) -> str:
        return "".join(f"\n  {line}" for line in self.lines[-TAIL_LINES:]) or " nothing"

    def _how_it_ended(self) -> str:
        assert self._process is not None, f"{self.name} was never started"
        status = self._process.wait()
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return f"{self.name} (process {self.pid}) {how}"

    def _release(self) -> int:
        """Wait for the end of the process and of its log; close the pipes. Returns its status."""
        process = self._process
        if process is None:
            return 0
        status = process.wait()
        if self._reader is not None:
            self._reader.join()
            self._reader = None
        for pipe in (process.stdin, process.stdout):
            if pipe is not None and not pipe.closed:
                _close(pipe)
        return status

    def _read(self, log: IO[bytes]) -> None:
        with log:
            while line := log.readline(LINE_CHARACTERS_MAX):
                text = line.decode(errors="replace").rstrip()
                self._lines.append(text)
                if self._on_line is not None:
                    self._on_line(text)
        if self._on_end is not None and not self._asked_to_end:
            self._on_end(self._how_it_ended())


def _close(pipe: IO[bytes]) -> None:
    with suppress(BrokenPipeError):  # nobody is left to read what was not flushed
        pipe.close()


def tied_to_us(command: list[str]) -> list[str]:
    """Return a command line whose process dies with the thread that starts it, where the system can do that."""
    if sys.platform != "linux":
        return command
    return [sys.executable, "-I", "-S", "-c", _EXEC_AND_DIE_WITH_PARENT, str(os.getpid()), *command]


@contextmanager
def interrupted_by_signals() -> Generator[None]:
    """Turn the first SIGINT, SIGTERM or SIGHUP into a KeyboardInterrupt, and let no further one disturb the clean-up.

    For the main thread. The handlers are as before afterwards.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number in before:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
