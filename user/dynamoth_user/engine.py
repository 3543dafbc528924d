"""Runs the machine of an end user's client on asyncio: its connections, its timer, and the tokens that it asks for."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import secrets
from base64 import urlsafe_b64decode
from collections import deque
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import Any, Protocol

from dynamoth.edge.frames import BrokerFrame
from dynamoth.machine.events import Start, Tick
from dynamoth_user.connection import LOST, BrokerConnection, ConnectionOptions
from dynamoth_user.machine.events import (
    Close,
    CloseConnection,
    Complained,
    Confirmed,
    ConnectionClosed,
    ConnectionOpened,
    Deliver,
    DeliverGap,
    Failed,
    FrameReceived,
    Interrupted,
    MemberChanged,
    MembersListed,
    NeedToken,
    OpenConnection,
    PublishEnded,
    ReadingPaused,
    Refused,
    SendFrame,
    Served,
    TokenReady,
    UserAction,
    UserEvent,
    UserOptions,
)
from dynamoth_user.machine.machine import UserMachine

INTERNAL_ERROR = 1011

TOKEN_S_MAX = 10.0
"""Time for the application to give a token; the attempt to connect fails when it takes longer."""

Token = str | Callable[[], Awaitable[str] | str] | None
"""A token, or a function that returns one and may be asynchronous."""

ApplicationAction = (
    Deliver | DeliverGap | MembersListed | MemberChanged | Confirmed | Refused | PublishEnded
    | Served | Interrupted | Complained | Failed
)  # fmt: skip

TOKEN_CHARACTERS_MAX = 64 * 1024
"""A longer token is not read; brokers take none either."""

_log = logging.getLogger("dynamoth_user")


class Application(Protocol):
    """What the engine reports to. Each method returns at once."""

    @property
    def is_behind(self) -> bool:
        """Whether nothing more is to be read from brokers; ``Engine.resume`` ends it."""
        ...

    def act(self, action: ApplicationAction) -> None:
        """Execute an action of the machine that concerns the application."""
        ...

    def note_generation(self, generation: int) -> None:
        """Keep the number of a connection that is opened."""
        ...

    def report_error(self, error: Exception) -> None:
        """Give an error to the application."""
        ...


class Engine:
    """One machine with its connections. Needs a running event loop from the beginning."""

    def __init__(
        self, options: UserOptions, connections: ConnectionOptions, token: Token, application: Application
    ) -> None:
        """Connect."""
        self._loop = asyncio.get_running_loop()
        self._options = options
        self._connection_options = connections
        self._token = token
        self._application = application
        self._machine = UserMachine(options, secrets.randbits(64))
        self._connections: dict[int, BrokerConnection] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        #: When it goes off. Not every event loop has handles that know it.
        self._timer_due = 0.0
        #: Events that have come while the machine was at work.
        self._events: deque[UserEvent] = deque()
        self._is_at_work = False
        self._is_broken = False

    @property
    def is_behind(self) -> bool:
        """Whether nothing more is to be read from brokers."""
        return self._application.is_behind

    def start(self) -> None:
        """Begin to connect."""
        self.handle(Start())

    def handle(self, event: UserEvent) -> None:
        """Hand an event to the machine, and execute its actions; those of earlier events first."""
        self._events.append(event)
        if self._is_at_work:
            return
        self._is_at_work = True
        try:
            while self._events and not self._is_broken:
                for action in self._machine.handle(self._events.popleft(), self._loop.time()):
                    self._execute(action)
        except Exception:
            _log.exception("a fault of the client")
            self._break()
        finally:
            self._is_at_work = False
        self._set_timer()

    def resume(self) -> None:
        """Read from brokers again."""
        for connection in self._connections.values():
            connection.resume()

    async def close(self) -> None:
        """Close all connections, and wait until they are."""
        self.handle(Close())
        others = self._tasks - {asyncio.current_task()}
        for task in others - {connection.task for connection in self._connections.values()}:
            task.cancel()  # it asks the application for a token
        if others:
            await asyncio.wait(others)

    # What connections report.

    def connection_opened(self, number: int) -> None:
        """Hand it to the machine."""
        self.handle(ConnectionOpened(number))

    def connection_closed(self, number: int, code: int, reason: str) -> None:
        """Hand it to the machine."""
        self.handle(ConnectionClosed(number, code, reason))

    def frame_received(self, number: int, frame: BrokerFrame) -> None:
        """Hand it to the machine."""
        self.handle(FrameReceived(number, frame))

    def reading_paused(self, number: int, *, is_paused: bool) -> None:
        """Hand it to the machine."""
        self.handle(ReadingPaused(number, is_paused))

    # Actions.

    def _execute(self, action: UserAction) -> None:
        match action:
            case SendFrame(number, frame):
                connection = self._connections.get(number)
                if connection is not None:
                    connection.send(frame)
            case OpenConnection(number, url):
                self._open(number, url)
            case CloseConnection(number, code, reason):
                connection = self._connections.get(number)
                if connection is not None:
                    connection.close(code, reason)
            case NeedToken(number):
                self._watch(asyncio.create_task(self._fetch_token(number), name="dynamoth user: token"))
            case _:
                self._application.act(action)

    def _open(self, number: int, url: str) -> None:
        self._application.note_generation(self._options.generation + number)
        if not may_connect(url, self._options.urls):
            self.handle(ConnectionClosed(number, LOST, f"{url} is no broker that may be trusted with a token"))
            return
        connection = BrokerConnection(number, url, self._connection_options, self)
        self._connections[number] = connection
        self._watch(connection.task)
        connection.task.add_done_callback(lambda _: self._connections.pop(number, None))

    def _watch(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("a fault of the client", exc_info=task.exception())
            self._break()

    async def _fetch_token(self, number: int) -> None:
        """Ask the application for a token. If it has none, the connection is not used; another one is opened later."""
        try:
            async with asyncio.timeout(TOKEN_S_MAX):
                token = self._token() if callable(self._token) else self._token
                if isawaitable(token):
                    token = await token
        except Exception as error:
            _log.exception("the application has no token")
            self._application.report_error(error)
            self._give_up_without_token(number)
        else:
            token = token if token is None else token.strip()  # a file ends with a new line
            self.handle(TokenReady(number, token, _expiry_of(token)))

    def _give_up_without_token(self, number: int) -> None:
        """Close a connection that waits for its first token. One that is in use goes on until its token expires."""
        known = self._machine.connections.get(number)
        connection = self._connections.get(number)
        if known is not None and not known.is_asked and connection is not None:
            connection.close(1000, "no token")
            self.handle(ConnectionClosed(number, LOST, "the application has no token"))

    def _set_timer(self) -> None:
        due = None if self._is_broken else self._machine.deadline()
        if self._timer is not None:
            if self._timer_due == due:
                return
            self._timer.cancel()
            self._timer = None
        if due is not None:
            self._timer = self._loop.call_at(due, self._tick)
            self._timer_due = due

    def _tick(self) -> None:
        self._timer = None
        self.handle(Tick())

    def _break(self) -> None:
        """End a client whose code has failed: its machine gets no event any more."""
        if self._is_broken:
            return
        self._is_broken = True
        for connection in tuple(self._connections.values()):
            connection.close(INTERNAL_ERROR, "a fault of the client")
        self._application.act(Failed(INTERNAL_ERROR, "a fault of the client: its log has the error"))


def _expiry_of(token: str | None) -> float | None:
    """Return the claim ``exp`` of a JSON Web Token, unchecked; None where it cannot be read."""
    parts = (token or "")[:TOKEN_CHARACTERS_MAX].split(".")
    if len(parts) != 3:
        return None
    try:
        expires_at: Any = json.loads(urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))["exp"]
        return expires_at if isinstance(expires_at, int | float) and math.isfinite(expires_at) else None
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
        return None


def may_connect(url: str, given: tuple[str, ...]) -> bool:
    """Return whether a URL that a broker has named is used: never one without TLS where all given URLs have it."""
    if url.startswith("wss://"):
        return True
    return url.startswith("ws://") and any(each.startswith("ws://") for each in given)
