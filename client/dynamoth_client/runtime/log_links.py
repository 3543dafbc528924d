"""The links of a backend to the log servers: one for each, with what is under way on it.

Nothing is sent to a server before it has said which log servers the brokers have: whoever has others would write where
nobody reads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from dynamoth.edge.log import SERVERS_KEY, servers_value
from dynamoth.errors import ConfigError, DynamothError
from dynamoth.machine.events import CommandPart, ErrorReply
from dynamoth.refusals import with_cure
from dynamoth_client.redis_py.pools import Pool
from dynamoth_client.redis_py.settings import read_settings
from dynamoth_link.link import Link
from dynamoth_link.options import LinkOptions
from dynamoth_link.urls import parse_server_url

NO_RUN_ID = "it does not say which process it is: the user needs the right to INFO"
NOT_COMPARED = "it has not said yet which log servers the brokers have"
LOST: Final = object()
"""In place of a reply: the connection was lost before it came."""

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
class LogServerLink:
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


class LogLinks:
    """The links to log servers. Belongs to the event loop on which it is opened. Raises ConfigError."""

    def __init__(self, logs: Mapping[str, str], options: LinkOptions | None, *, durable: bool) -> None:
        """Keep what is needed to begin.

        Args:
            logs: URLs by id, the same as ``broker.logs``.
            options: of the links; None: those of the pool that ``open`` gets.
            durable: whether a server need not say which process it is.

        """
        if not logs:
            raise ConfigError("a publisher needs the log servers of the brokers, as {'l1': 'redis://HOST:PORT'}")
        self._addresses = {id_: parse_server_url(url) for id_, url in logs.items()}
        self.ids = tuple(self._addresses)
        self._options = options
        self._durable = durable
        self.servers: dict[str, LogServerLink] = {}
        self._is_closed = False
        self._has_warned = False

    def open(self, pool: Pool | None) -> None:
        """Begin to connect; the options of the links are those of ``pool`` where none were given."""
        if self.servers or self._is_closed:
            raise RuntimeError("a publisher is opened once")
        options = self._options
        if options is None:
            options = LinkOptions() if pool is None else read_settings(pool, self._addresses.values()).link_options
        for id_, address in self._addresses.items():
            server = self.servers[id_] = LogServerLink(id_)

            def on_up(run_id: str | None, server: LogServerLink = server) -> None:
                self._on_up(server, run_id)

            def on_down(reason: str, server: LogServerLink = server) -> None:
                self._on_down(server, reason)

            server.link = Link(address, on_up=on_up, on_down=on_down, on_pushes=_ignore, options=options)
            server.link.start()

    async def close(self) -> None:
        """End the links. What waits for them raises. Closing twice does nothing."""
        self._is_closed = True
        for server in self.servers.values():
            self._on_down(server, "the publisher was closed")
            server.is_up.set()  # those who wait raise
        await asyncio.gather(*(server.link.close() for server in self.servers.values() if server.link is not None))

    def server(self, id_: str) -> LogServerLink:
        """Return the link to a server. Raises RuntimeError: they are not open."""
        if not self.servers:
            raise RuntimeError("the publisher is not open: use it in a `with` block")
        return self.servers[id_]

    async def wait_up(self, server: LogServerLink, *, is_sent: bool) -> str:
        """Return the run id of the connection, once there is one to a server that has the same list as we."""
        if server.others is not None and server.run_id is not None:
            self._compare(server, server.run_id)  # The brokers may have been corrected in the meantime.
        while server.run_id is None:
            if self._is_closed:
                raise unknown(server) if is_sent else unavailable(server, server.fault)
            await server.is_up.wait()
        if server.others is None:
            return server.run_id
        if is_sent:
            raise unknown(server)
        raise ConfigError(server.fault)

    def send(self, server: LogServerLink, command: tuple[CommandPart, ...]) -> asyncio.Future[Any] | None:
        """Send a command; return what will be its reply, ``LOST`` if the connection is. None: it was not sent."""
        assert server.link is not None, "an open publisher has links"
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if not server.link.send(command, lambda reply: None if answer.done() else answer.set_result(reply)):
            self._on_down(server, "the connection was lost")
            return None
        server.answers.add(answer)
        return answer

    # The links.

    def _on_up(self, server: LogServerLink, run_id: str | None) -> None:
        if run_id is None and not self._durable:
            server.fault = NO_RUN_ID
            return
        self._compare(server, run_id or "")

    def _compare(self, server: LogServerLink, run_id: str) -> None:
        """Ask which log servers the brokers have; nothing is appended before the answer."""
        assert server.link is not None, "an open publisher has links"
        server.run_id, server.others, server.fault = None, None, NOT_COMPARED
        server.is_up.clear()
        server.link.send((b"GET", SERVERS_KEY), lambda reply: self._on_list(server, run_id, reply))

    def _on_list(self, server: LogServerLink, run_id: str, reply: Any) -> None:
        if self._is_closed:
            return
        server.fault = NO_REPLY
        ours = servers_value(self.ids)
        if isinstance(reply, ErrorReply):
            self._warn(server, reply)
        elif reply is not None and reply != ours:
            theirs = reply if isinstance(reply, bytes) else str(reply).encode()
            server.others = theirs.decode(errors="replace")
            server.fault = _difference(server.id, ours.decode(), server.others)
        server.run_id = run_id
        server.is_up.set()

    def _warn(self, server: LogServerLink, error: ErrorReply) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "log server %s does not say which log servers the brokers have, so nobody checks that they are those "
                "of this publisher: %s; give its user the right +get",
                server.id,
                error,
            )

    def _on_down(self, server: LogServerLink, reason: str) -> None:
        server.run_id, server.others, server.fault = None, None, reason
        server.is_up.clear()
        for answer in server.answers:
            if not answer.done():
                answer.set_result(LOST)


def _difference(id_: str, ours: str, theirs: str) -> str:
    return (
        f"this publisher has the log servers {ours!r}, and the brokers have {theirs!r}, says log server {id_}: the ids "
        "decide where a log is, so nobody would read what is published; give the publisher the same ids and URLs as "
        "`broker.logs`"
    )


def unavailable(server: LogServerLink, reason: str) -> LogUnavailable:
    """Return the error of what was not stored."""
    return LogUnavailable(
        f"log server {server.id}: {with_cure(reason)}; nothing was stored there: the same call may be repeated"
    )


def unknown(server: LogServerLink) -> UnknownOutcome:
    """Return the error of what was stored, or not."""
    return UnknownOutcome(f"log server {server.id} has not answered: {server.fault}; it is stored or not")


def _ignore(pushes: list[list[Any]]) -> None:
    """Ignore pushes: nothing is subscribed to on links of logs."""
