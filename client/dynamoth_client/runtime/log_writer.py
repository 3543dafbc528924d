"""Appends to the logs of interests over one link per log server, for backends."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict

from dynamoth.edge.frames import EXACT_MAX
from dynamoth.edge.interests import Interest
from dynamoth.edge.log import (
    SERVERS_KEY,
    TTL_S,
    Appended,
    LogOptions,
    append_command,
    is_fenced,
    log_server,
    parse_appended,
    servers_value,
)
from dynamoth.errors import ConfigError, DynamothError, MalformedMessage
from dynamoth.machine.events import CommandPart, ErrorReply
from dynamoth_client.redis_py.pools import Pool
from dynamoth_client.redis_py.settings import read_settings
from dynamoth_link.link import Link
from dynamoth_link.options import LinkOptions
from dynamoth_link.urls import parse_server_url

TIMEOUT_S = 5.0
"""How long a publication waits for its log server by default."""

RETAINED_MIN = LogOptions().retained_min
"""Publications that a log keeps at least, by default."""

EPOCH_BITS = 64

NO_RUN_ID = "it does not say which process it is: the user needs the right to INFO"
NOT_COMPARED = "it has not said yet which log servers the brokers have"
NO_REPLY = "no reply has come in time"

_log = logging.getLogger("dynamoth_client")


class LogError(DynamothError):
    """Base of the errors of a publication. It is not stored, unless the error is ``UnknownOutcome``."""


class LogUnavailable(LogError):
    """Raised when the log server cannot be reached, or refuses. Nothing is stored: the same call may succeed later."""


class Fenced(LogError):
    """Raised when a writer with a larger term has taken over. Nothing is stored, and this writer has to end."""


class UnknownOutcome(LogError):
    """Raised when the connection was lost before the answer: the publication is stored, or not.

    With an ``execution``, the same call is repeated safely.
    """


@dataclass(slots=True, eq=False)
class _Server:
    """One log server."""

    id: str
    link: Link | None = None
    #: Of the connection that is up and whose list of log servers was read; None while there is none.
    run_id: str | None = None
    #: The ids that the brokers have, where those are others than ours.
    others: str | None = None
    fault: str = "it was not reached yet"
    #: Set while it is up.
    is_up: asyncio.Event = field(default_factory=asyncio.Event)
    #: Appends without an answer.
    answers: set[asyncio.Future[Any]] = field(default_factory=set["asyncio.Future[Any]"])


class LogArguments(TypedDict, total=False):
    """The optional arguments of a publisher."""

    retained_min: int
    ttl_s: float
    durable: bool
    timeout_s: float
    options: LinkOptions | None


class LogWriter:
    """The links to log servers. Belongs to the event loop on which it is opened. Raises ConfigError."""

    def __init__(
        self,
        logs: Mapping[str, str],
        *,
        retained_min: int = RETAINED_MIN,
        ttl_s: float = TTL_S,
        durable: bool = False,
        timeout_s: float = TIMEOUT_S,
        options: LinkOptions | None = None,
    ) -> None:
        """Keep what is needed to begin; arguments as those of ``LogPublisher``."""
        if not logs:
            raise ConfigError("a publisher needs the log servers of the brokers, as {'l1': 'redis://HOST:PORT'}")
        if retained_min < 1 or ttl_s <= 0 or timeout_s <= 0:
            raise ConfigError("retained_min, ttl_s and timeout_s are more than 0")
        self._addresses = {id_: parse_server_url(url) for id_, url in logs.items()}
        self._ids = tuple(self._addresses)
        self._log_options = LogOptions(retained_min, ttl_s, durable)
        self._timeout_s = timeout_s
        self._options = options
        self._servers: dict[str, _Server] = {}
        self._is_closed = False
        self._has_warned = False

    def open(self, pool: Pool) -> None:
        """Begin to connect; the options of the links are those of ``pool`` where none were given."""
        if self._servers or self._is_closed:
            raise RuntimeError("a publisher is opened once")
        options = self._options or read_settings(pool, self._addresses.values()).link_options
        for id_, address in self._addresses.items():
            server = self._servers[id_] = _Server(id_)

            def on_up(run_id: str | None, server: _Server = server) -> None:
                self._on_up(server, run_id)

            def on_down(reason: str, server: _Server = server) -> None:
                self._on_down(server, reason)

            server.link = Link(address, on_up=on_up, on_down=on_down, on_pushes=_ignore, options=options)
            server.link.start()

    async def close(self) -> None:
        """End the links. What waits for them raises. Closing twice does nothing."""
        self._is_closed = True
        for server in self._servers.values():
            self._on_down(server, "the publisher was closed")
            server.is_up.set()  # those who wait raise
        await asyncio.gather(*(server.link.close() for server in self._servers.values() if server.link is not None))

    async def append(self, interest: Interest, data: bytes, execution: int | None, term: int) -> Appended:
        """Append; with an execution, again and again until the time is over."""
        if not self._servers:
            raise RuntimeError("the publisher is not open: use it in a `with` block")
        if execution is not None and (type(execution) is not int or not 1 <= execution <= EXACT_MAX):
            raise ValueError(f"executions are numbered 1, 2, 3 ..., not {execution!r}")
        if type(term) is not int or not 0 <= term <= EXACT_MAX:
            raise ValueError(
                f"a term is a number from 0 to 2^53 - 1, not {term!r}: Redis cannot tell larger ones apart"
            )
        if interest.is_reserved:
            raise ValueError(f"{interest.name!r} is a reserved name: no user gets what is published there")
        server = self._servers[log_server(interest.id, self._ids)]
        is_sent = False
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    run_id = await self._wait_up(server, is_sent=is_sent)
                    epoch = secrets.randbits(EPOCH_BITS)
                    command = append_command(interest.id, data, run_id, epoch, self._log_options, term, execution or 0)
                    answer = self._send(server, command)
                    if answer is None:
                        continue
                    is_sent = True
                    try:
                        reply = await answer
                    finally:
                        server.answers.discard(answer)
                    if reply is not None:
                        return _appended(reply, server)
                    if not execution:
                        raise _unknown(server)
        except TimeoutError:
            if is_sent:
                raise _unknown(server) from None
            raise _unavailable(server, server.fault) from None

    async def _wait_up(self, server: _Server, *, is_sent: bool) -> str:
        """Return the run id of the connection, once there is one to a server that has the same list as we."""
        if server.others is not None and server.run_id is not None:
            self._compare(server, server.run_id)  # The brokers may have been corrected in the meantime.
        while server.run_id is None:
            if self._is_closed:
                raise _unknown(server) if is_sent else _unavailable(server, server.fault)
            await server.is_up.wait()
        if server.others is None:
            return server.run_id
        if is_sent:
            raise _unknown(server)
        raise ConfigError(server.fault)

    def _send(self, server: _Server, command: tuple[CommandPart, ...]) -> asyncio.Future[Any] | None:
        """Send a command; return what will be its reply, None if the connection is lost. None: it was not sent."""
        assert server.link is not None, "an open publisher has links"
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if not server.link.send(command, lambda reply: None if answer.done() else answer.set_result(reply)):
            self._on_down(server, "the connection was lost")
            return None
        server.answers.add(answer)
        return answer

    # The links.

    def _on_up(self, server: _Server, run_id: str | None) -> None:
        if run_id is None and not self._log_options.durable:
            server.fault = NO_RUN_ID
            return
        self._compare(server, run_id or "")

    def _compare(self, server: _Server, run_id: str) -> None:
        """Ask which log servers the brokers have; nothing is appended before the answer."""
        assert server.link is not None, "an open publisher has links"
        server.run_id, server.others, server.fault = None, None, NOT_COMPARED
        server.is_up.clear()
        server.link.send((b"GET", SERVERS_KEY), lambda reply: self._on_list(server, run_id, reply))

    def _on_list(self, server: _Server, run_id: str, reply: Any) -> None:
        if self._is_closed:
            return
        server.fault = NO_REPLY
        ours = servers_value(self._ids)
        if isinstance(reply, ErrorReply):
            self._warn(server, reply)
        elif reply is not None and reply != ours:
            theirs = reply if isinstance(reply, bytes) else str(reply).encode()
            server.others = theirs.decode(errors="replace")
            server.fault = _difference(server.id, ours.decode(), server.others)
        server.run_id = run_id
        server.is_up.set()

    def _warn(self, server: _Server, error: ErrorReply) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "log server %s does not say which log servers the brokers have, so nobody checks that they are those "
                "of this publisher: %s; give its user the right +get",
                server.id,
                error,
            )

    def _on_down(self, server: _Server, reason: str) -> None:
        server.run_id, server.others, server.fault = None, None, reason
        server.is_up.clear()
        for answer in server.answers:
            if not answer.done():
                answer.set_result(None)


def _difference(id_: str, ours: str, theirs: str) -> str:
    return (
        f"this publisher has the log servers {ours!r}, and the brokers have {theirs!r}, says log server {id_}: the ids "
        "decide where a log is, so nobody would read what is published; give the publisher the same ids and URLs as "
        "`broker.logs`"
    )


def _appended(reply: Any, server: _Server) -> Appended:
    if isinstance(reply, ErrorReply):
        text = str(reply)
        if is_fenced(text):
            raise Fenced(f"log server {server.id} refuses this writer: {text}")
        raise _unavailable(server, text)
    try:
        return parse_appended(reply)
    except MalformedMessage as error:
        raise UnknownOutcome(f"log server {server.id} answers with something else: {error}") from error


def _unavailable(server: _Server, reason: str) -> LogUnavailable:
    return LogUnavailable(f"log server {server.id}: {reason}; the publication is not stored, and may be repeated")


def _unknown(server: _Server) -> UnknownOutcome:
    return UnknownOutcome(f"log server {server.id} has not answered: {server.fault}; the publication is stored or not")


def _ignore(pushes: list[list[Any]]) -> None:
    """Ignore pushes: nothing is subscribed to on links of logs."""
