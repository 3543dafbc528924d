"""Starts and frees servers: one interface, with a pool of standby servers and the operator's own command.

Requests carry the id of the server, and may be repeated: starting an id that runs returns the same server, and freeing
one that does not run does nothing. A provisioner may take as long as it wants: its caller cancels what takes too long.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

from dynamoth.errors import ConfigError, DynamothError
from dynamoth.protocol.plan_wire import TEXT_MAX
from dynamoth_link.urls import parse_server_url

ANSWER_BYTES_MAX = 1_000_000
"""Bound of what a command may write. Its answers have some hundred bytes."""

IDS_MAX = 1000
"""Most servers that a list may have: each of those that nobody knows is freed by a command of its own."""

SHOWN_CHARACTERS_MAX = 200
"""Bound of what a problem shows of a command's output."""

END_S = 2.0
"""A command that was cancelled has this time after SIGTERM before it is killed, with what it has started."""

LAST_OUTPUT_S = 1.0
"""After its end the output of a command arrives within this time."""


class ProvisionerFailed(DynamothError):
    """Raised when a provisioner cannot do what it is asked for, or answers nonsense. A retry may help."""

    code = "provisioner-failed"


class Provisioner(Protocol):
    """Starts and frees servers, each a Redis server with its agent. Every request may be repeated.

    A server of the plan whose agent is gone is started again, too: what is missing of it, at its URL.
    """

    def adopt(self, servers: Mapping[str, str]) -> None:
        """Note the servers of the plan, URLs by id, some of which this provisioner may have started."""
        ...

    async def start(self, id_: str) -> str:
        """Start a server and its agent under this id, and return its URL; of one that runs, too.

        Raises:
            ProvisionerFailed: it cannot be started.

        """
        ...

    async def free(self, id_: str) -> None:
        """Stop a server and its agent for good. One that is not known is free already.

        Raises:
            ProvisionerFailed: it cannot be stopped.

        """
        ...

    async def running(self) -> list[str]:
        """Return the ids of the servers that it runs.

        Raises:
            ProvisionerFailed: that cannot be found out.

        """
        ...


class CommandProvisioner:
    """Runs a command of the operator for each request, which makes any cloud usable.

    The command gets the request as one JSON object on stdin, and answers with one on stdout:

    ==========================================  ==========================================
    request                                     answer
    ==========================================  ==========================================
    ``{"action": "start", "id": "auto-7-1"}``   ``{"url": "redis://10.0.0.7:6379"}``
    ``{"action": "free", "id": "auto-7-1"}``    ``{}``
    ``{"action": "list"}``                      ``{"ids": ["auto-7-1"]}``
    ==========================================  ==========================================

    Any other answer, and any exit status but 0, is a failure. A command that is cancelled is ended, with its children:
    SIGTERM first, SIGKILL ``END_S`` later.

    Args:
        command: the program and its arguments.

    Raises:
        ConfigError: the command is empty.

    """

    def __init__(self, command: Sequence[str]) -> None:
        if not command:
            raise ConfigError("the provisioner 'command' needs a command: set fleet.command to a program")
        self._command = list(command)

    def adopt(self, servers: Mapping[str, str]) -> None:
        """Ignore the plan: the command knows what it runs."""

    async def start(self, id_: str) -> str:
        """Start a server; see :class:`Provisioner`."""
        answer = await self._ask({"action": "start", "id": id_})
        url = answer.get("url")
        if not isinstance(url, str):
            raise ProvisionerFailed(f"{self._name} answers without a url: {_shown(json.dumps(answer))}")
        if not _is_short(url):
            raise ProvisionerFailed(f"{self._name} answers with a url that cannot be used: {_shown(ascii(url))}")
        try:
            _check_url(url)
        except ConfigError as error:
            raise ProvisionerFailed(f"{self._name} answers with a url that cannot be used: {error}") from error
        return url

    async def free(self, id_: str) -> None:
        """Stop a server; see :class:`Provisioner`."""
        await self._ask({"action": "free", "id": id_})

    async def running(self) -> list[str]:
        """Return the ids of its servers; see :class:`Provisioner`."""
        answer = await self._ask({"action": "list"})
        ids: Any = answer.get("ids")
        if not _is_list_of_text(ids):
            raise ProvisionerFailed(f"{self._name} answers without a list of ids: {_shown(json.dumps(answer))}")
        if len(ids) > IDS_MAX:
            raise ProvisionerFailed(f"{self._name} answers with {len(ids)} ids, and may list at most {IDS_MAX}")
        if strange := [id_ for id_ in ids if not _is_short(id_)]:
            raise ProvisionerFailed(f"{self._name} answers with an id that no server has: {_shown(ascii(strange[0]))}")
        return list(ids)

    @property
    def _name(self) -> str:
        return f"the command {self._command[0]}"

    async def _ask(self, request: Mapping[str, str]) -> dict[str, Any]:
        """Run the command; return the object that it answers with."""
        status, output, errors = await self._run(json.dumps(request).encode() + b"\n")
        if status != 0:
            how = f"was killed by {_signal_name(-status)}" if status < 0 else f"ends with status {status}"
            raise ProvisionerFailed(f"{self._name} {how}: {_shown(errors or output) or 'it writes nothing'}")
        try:
            answer: object = json.loads(output)
        except (ValueError, RecursionError) as error:
            text = _shown(output) or "nothing"
            raise ProvisionerFailed(f"{self._name} must write one JSON object to stdout, not: {text}") from error
        if not isinstance(answer, dict):
            raise ProvisionerFailed(f"{self._name} must write one JSON object to stdout, not: {_shown(output)}")
        return cast("dict[str, Any]", answer)

    async def _run(self, request: bytes) -> tuple[int, str, str]:
        """Run the command with a request; return its exit status, and what it wrote to stdout and stderr."""
        try:
            transport, run = await _begin(self._command)
        except OSError as error:
            raise ProvisionerFailed(f"{self._name} cannot be run: {error.strerror}") from error
        try:
            stdin = cast("asyncio.WriteTransport", transport.get_pipe_transport(0))  # uvloop's is no subclass of it
            stdin.write(request)
            stdin.close()
            await run.ended.wait()
            if run.wrote_too_much:
                raise ProvisionerFailed(f"{self._name} writes more than {ANSWER_BYTES_MAX} bytes")
            # A server that the command has started may have inherited stdout, and keep it open.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(run.closed.wait(), LAST_OUTPUT_S)
            status = transport.get_returncode()
            assert status is not None, "it has ended"
            return status, run.text(1), run.text(2)
        finally:
            await _end(transport, run)


async def _begin(command: Sequence[str]) -> tuple[asyncio.SubprocessTransport, _CommandRun]:
    """Start a command. If this is cancelled, the command is ended with all that it has started in the meantime."""
    loop = asyncio.get_running_loop()
    starting = asyncio.ensure_future(loop.subprocess_exec(_CommandRun, *command, start_new_session=True))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        with contextlib.suppress(OSError):
            await _end(*await starting)
        raise


class _CommandRun(asyncio.SubprocessProtocol):
    """Collects the output of one run of a command."""

    def __init__(self) -> None:
        self._output = {1: bytearray(), 2: bytearray()}
        self.wrote_too_much = False
        #: The process has exited, or need not be waited for because it wrote too much.
        self.ended = asyncio.Event()
        self.exited = asyncio.Event()
        #: It has exited, and all pipes are closed.
        self.closed = asyncio.Event()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Keep output, up to the bound."""
        if len(self._output[fd]) + len(data) > ANSWER_BYTES_MAX:
            self.wrote_too_much = True
            self.ended.set()
        elif not self.wrote_too_much:
            self._output[fd] += data

    def process_exited(self) -> None:
        """Note the end of the process."""
        self.exited.set()
        self.ended.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that nothing more will come."""
        self.closed.set()

    def text(self, fd: int) -> str:
        """Return the output to a pipe."""
        return self._output[fd].decode(errors="replace").strip()


async def _end(transport: asyncio.SubprocessTransport, run: _CommandRun) -> None:
    """End a command and what it has started, unless it has ended by itself."""
    try:
        if not run.exited.is_set():
            _signal(transport.get_pid(), signal.SIGTERM)
            try:
                await asyncio.wait_for(run.exited.wait(), END_S)
            finally:
                _signal(transport.get_pid(), signal.SIGKILL)
    except TimeoutError:
        await run.exited.wait()
    finally:
        transport.close()


def _signal(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _signal_name(number: int) -> str:
    """Return the name of a signal; most real-time signals have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _is_short(text: str) -> bool:
    """Return whether a plan can have this as an id or a URL."""
    return 0 < len(text) <= TEXT_MAX and text.isprintable()


def _check_url(url: str) -> None:
    """Refuse a URL that no plan should have. Raises ConfigError."""
    address = parse_server_url(url)
    if address.username is not None or address.password is not None:
        raise ConfigError(
            f"{address.redacted()} has credentials, and the plan shows URLs to every client: leave them out, and set"
            " link.username and link.password of the daemons"
        )


def _is_list_of_text(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))  # pyright: ignore[reportUnknownArgumentType] - _is_text takes any


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _shown(text: str) -> str:
    """Return output of a command in one line of bounded length, which a terminal shows as it is."""
    line = "".join(each if each.isprintable() else "?" for each in " ".join(text.split()))
    return line if len(line) <= SHOWN_CHARACTERS_MAX else line[:SHOWN_CHARACTERS_MAX] + " ..."


class PoolProvisioner:
    """Takes servers from a pool of standby servers that always run, each with its agent, under fixed URLs.

    No server or agent is started or stopped: a server of the pool is in use or not. Which id has which server is kept
    here only; after a restart, ``adopt`` says what the plan uses. A server that is put back is the last one to be taken
    again: it may have been found to be down.

    Args:
        urls: the standby servers, each once.

    Raises:
        ConfigError: there is none, one is named twice, or a URL cannot be used.

    """

    def __init__(self, urls: Sequence[str]) -> None:
        if not urls:
            raise ConfigError("the provisioner 'pool' needs standby servers: name their URLs in fleet.pool")
        for url in urls:
            _check_url(url)
        if twice := sorted({url for url in urls if urls.count(url) > 1}):
            raise ConfigError(f"fleet.pool names servers twice: {', '.join(twice)}")
        self._urls = list(urls)
        self._used: dict[str, str] = {}
        self._listed: Mapping[str, str] = {}

    def adopt(self, servers: Mapping[str, str]) -> None:
        """Note the servers of the plan, URLs by id: those of the pool are in use."""
        self._listed = servers
        self._used |= {id_: url for id_, url in servers.items() if url in self._urls}

    async def start(self, id_: str) -> str:
        """Take a free server; see :class:`Provisioner`. One of the plan is in use, and its agent is the operator's."""
        if id_ in self._listed:
            raise ProvisionerFailed(
                f"the agents of a pool are yours: start 'dynamoth agent --standby {self._listed[id_]}' again"
            )
        if id_ not in self._used:
            free = next((url for url in self._urls if url not in self._used.values()), None)
            if free is None:
                raise ProvisionerFailed(
                    f"all {len(self._urls)} servers of the pool are in use: add some to fleet.pool, or lower"
                    " fleet.servers_max"
                )
            self._used[id_] = free
        return self._used[id_]

    async def free(self, id_: str) -> None:
        """Put a server back; see :class:`Provisioner`."""
        url = self._used.pop(id_, None)
        if url is not None:
            self._urls.remove(url)
            self._urls.append(url)

    async def running(self) -> list[str]:
        """Return the ids that are in use; see :class:`Provisioner`."""
        return list(self._used)
