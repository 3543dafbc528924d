"""Runs a broker as a process: ``dynamoth broker``."""

from __future__ import annotations

import asyncio
import logging
import secrets
import ssl
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, assert_never, cast

from prometheus_client import CollectorRegistry

from dynamoth.data.datasets import DATASET_PREFIX
from dynamoth.edge.frames import (
    Connect,
    Data,
    Error,
    Frame,
    Refresh,
    Subscribe,
    UserFrame,
    read_user_frame,
    to_wire,
)
from dynamoth.errors import ConfigError, MalformedMessage
from dynamoth.protocol.wire import cut
from dynamoth.refusals import with_cure
from dynamoth.settings.sections import BrokerSettings
from dynamoth_broker.events import (
    PROTOCOL_ERROR,
    TOKEN_EXPIRED,
    TOKEN_REFUSED,
    Broadcast,
    BrokerAction,
    BrokerOptions,
    CloseConnection,
    Closed,
    ControlLinkChanged,
    Drain,
    Grant,
    LogLinkChanged,
    Noted,
    Opened,
    Overflowed,
    PublishMessage,
    RaiseBarrier,
    Received,
    RecordsAnswered,
    RecordsPosted,
    Refreshed,
    ResourcesMeasured,
    Stop,
    Stopped,
    SubscribeChannel,
    Transmit,
    UnsubscribeChannel,
    Writable,
)
from dynamoth_broker.machine import BrokerMachine
from dynamoth_broker.process.event_ids import StreamPositions, resumed
from dynamoth_broker.process.metrics import make_registry
from dynamoth_broker.process.sse import SseServer, StoreRecords
from dynamoth_broker.process.subscriptions import Subscriptions
from dynamoth_broker.process.tokens import TokenExpired, TokenRefused, Tokens
from dynamoth_broker.process.transport import Prepared, TransportOptions, UserConnection, prepare
from dynamoth_broker.process.websocket import WebSocketServer
from dynamoth_client.asyncio import Redis
from dynamoth_daemon import event_loop
from dynamoth_daemon.exit_codes import EXIT_FAILED
from dynamoth_daemon.process import INCARNATION_BITS, DaemonProcess
from dynamoth_link.options import LinkOptions

CONNECT_TIMEOUT_S = 10.0
"""A connection sends its ``connect`` within this time."""

SAVE_S_MAX = 2.0
"""A broker that ends waits this long for log servers to confirm what users have acknowledged."""

REASON_CHARACTERS_MAX = 200
"""Of why a frame cannot be read, to its user."""

LAG_INTERVAL_S = 0.5
"""The lag of the event loop is measured this often."""

BUSY_WEIGHT = 0.1
"""Weight of the latest interval in the average use of the processor: half of it is of the latest 3 s."""


@dataclass(frozen=True, kw_only=True)
class BrokerConfig(BrokerSettings):
    """The configuration of a broker process.

    ``options`` are those of its machine, ``make_client`` makes the client of the cluster, ``link`` has the credentials
    and timeouts of the connections to log servers, ``tls`` is for users' connections.

    Raises:
        ConfigError: users could not log in.

    """

    options: BrokerOptions
    make_client: Callable[[], Redis]
    link: LinkOptions = field(default_factory=LinkOptions)
    tls: ssl.SSLContext | None = None

    def __post_init__(self) -> None:
        """Check what only shows in combination."""
        if not self.token_keys_file and not self.anonymous:
            raise ConfigError(
                "broker.token_keys_file is not set, so nobody could log in: give the file with the keys of tokens, or"
                " broker.anonymous = true to let everybody in"
            )


async def run_broker(
    config: BrokerConfig, stop: asyncio.Event | None = None, on_ready: Callable[[int, int], None] | None = None
) -> int:
    """Run a broker until ``stop``, SIGTERM or SIGINT; return the exit code of the process.

    At the end, users are moved to the alternates first. ``on_ready`` gets the ports for WebSockets and for server-sent
    events (0: none).

    Raises:
        ConfigError: a port is not free, or the keys of tokens cannot be used.

    """
    return await BrokerProcess(config, stop or asyncio.Event(), on_ready).run()


def run(config: BrokerConfig) -> int:
    """Run a broker in an event loop of its own; see :func:`run_broker`."""
    return event_loop.run(run_broker(config))


@dataclass(slots=True)
class _User:
    """What the runtime knows of one connection."""

    #: Whether the machine knows of it.
    is_opened: bool = False
    #: Of a stream of server-sent events: where it is.
    positions: StreamPositions | None = None
    timeout: asyncio.TimerHandle | None = None


class BrokerProcess(DaemonProcess[BrokerAction]):
    """One broker process: the machine, its log servers, the Dynamoth client, and the transports of users."""

    def __init__(
        self, config: BrokerConfig, stop: asyncio.Event, on_ready: Callable[[int, int], None] | None = None
    ) -> None:
        self._config = config
        self._machine = BrokerMachine(
            config.options,
            secrets.randbits(INCARNATION_BITS),
            time.time() - asyncio.get_running_loop().time(),
        )
        super().__init__("broker", self._machine, config, config.link, stop, broker=config.options.id)
        self._tokens = Tokens(
            config.token_keys_file, anonymous=config.anonymous, now=self._loop.time, audience=config.audience
        )
        self._on_ready = on_ready
        self._client = config.make_client()
        self._subscriptions = Subscriptions(self._client, self._driver.handle, self._report_cluster)
        self._transport = TransportOptions(
            origins=frozenset(config.origins.split()),
            unsent_bytes_max=config.unsent_bytes_max,
            accepts_per_s=config.accepts_per_s_max,
        )
        self._websockets: WebSocketServer | None = None
        self._sse: SseServer | None = None
        #: Whether anybody uses server-sent events: they need a position for each frame.
        self._has_streams = False
        #: Set while no user is connected.
        self._is_empty = asyncio.Event()
        self._has_stopped = asyncio.Event()
        self._lag_s = 0.0
        #: How much of the processor the event loop takes, lately.
        self._busy_ratio = 0.0
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> int:
        """Run until the end; return the exit code."""
        config = self._config
        self._websockets = WebSocketServer.start(self, config.host, config.port, self._transport, config.tls)
        if config.sse_port:
            self._sse = await SseServer.start(
                self, config.host, config.sse_port, self._transport, config.tls, self._event_id, self._user_of,
                self._post_records if config.data_cluster else None,
            )  # fmt: skip
        self._tasks = [self._loop.create_task(self._measure_lag())]
        self._subscriptions.listening.add_done_callback(self._on_listener_done)
        if self._on_ready is not None:
            self._on_ready(self._websockets.port, 0 if self._sse is None else self._sse.port)
        return await super().run()

    async def close(self) -> None:
        """End transports and the Dynamoth client."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._websockets is not None:
            await self._websockets.close()
        if self._sse is not None:
            await self._sse.close()
        await self._subscriptions.close()
        await self._client.aclose()

    # The daemon.

    def registry(self) -> CollectorRegistry:
        """Return the metrics of the broker."""
        return make_registry(self._machine, lambda: self._lag_s)

    def plan_version(self) -> int | None:
        """Return None: the client follows the plan, not the broker."""
        return None

    def describe(self) -> dict[str, Any]:
        """Return where users connect."""
        assert self._websockets is not None
        return {"port": self._websockets.port, "sse_port": 0 if self._sse is None else self._sse.port}

    def why_not_ready(self) -> str | None:
        """Return why this broker should get no new users now."""
        if self._machine.is_draining:
            return "the broker is being drained"
        if self._subscriptions.fault is not None:
            return f"the cluster cannot be reached: {self._subscriptions.fault}"
        unreachable = self._machine.control.faults
        if unreachable and len(unreachable) == len(self._config.options.control):
            return "no server of the cluster can be reached: " + "; ".join(map(with_cure, unreachable.values()))
        faults = [f"log server {id_}: {fault}" for id_, fault in self._machine.logs.unusable.items()]
        if self._tokens.fault:
            faults.append(self._tokens.fault)
        return "\n".join(faults) or None

    def shut_down(self) -> None:
        """Move users to other brokers, then end."""
        self._tasks.append(self._loop.create_task(self._drain_and_end()))

    async def _drain_and_end(self) -> None:
        config = self._config
        if self._machine.control.alternates(self._loop.time()) and config.drain_s and self._machine.sessions:
            self._log.write(logging.INFO, "moving users to other brokers", sessions=len(self._machine.sessions))
            self._driver.handle(Drain(config.evict_per_s_max))
            with suppress(TimeoutError):
                async with asyncio.timeout(config.drain_s):
                    await self._is_empty.wait()
        self._driver.handle(Stop())
        with suppress(TimeoutError):
            async with asyncio.timeout(SAVE_S_MAX):
                await self._has_stopped.wait()
        self.end()

    async def _measure_lag(self) -> None:
        """Measure how late the event loop is, and how much of its processor it takes."""
        while True:
            began_at, busy_before_s = self._loop.time(), time.thread_time()
            await asyncio.sleep(LAG_INTERVAL_S)
            elapsed_s = self._loop.time() - began_at
            self._lag_s = max(0.0, elapsed_s - LAG_INTERVAL_S)
            self._busy_ratio += BUSY_WEIGHT * ((time.thread_time() - busy_before_s) / elapsed_s - self._busy_ratio)
            self._driver.handle(ResourcesMeasured(self._busy_ratio))

    def _on_listener_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.write(logging.CRITICAL, "the broker ends because of a bug: please report this", exception=error)
            self.end(EXIT_FAILED)

    def _report_cluster(self, fault: str | None) -> None:
        if fault is None:
            self._log.write(logging.INFO, "the cluster can be reached", limited=True)
        else:
            self._log.write(logging.WARNING, "trouble with the cluster; trying again", fault)

    # Actions of the machine.

    def execute(self, action: BrokerAction) -> None:
        """Execute an action of the machine."""
        match action:
            case Broadcast(connections, frame):
                self._broadcast(cast("Sequence[UserConnection]", connections), frame)
            case Transmit(connection, frame):
                self._send(cast(UserConnection, connection), frame)
            case CloseConnection(connection, code, reason):
                cast(UserConnection, connection).close(code, reason)
            case SubscribeChannel(channel):
                self._subscriptions.subscribe(channel)
            case UnsubscribeChannel(channel):
                self._subscriptions.unsubscribe(channel)
            case RaiseBarrier(channel):
                self._subscriptions.raise_barrier(channel)
            case PublishMessage(channel, payload, token):
                self._subscriptions.publish(channel, payload, token)
            case RecordsAnswered(request, outcomes):
                answer = cast("asyncio.Future[Any]", request)
                if not answer.done():  # whoever asked may have gone
                    answer.set_result(outcomes)
            case Stopped():
                self._has_stopped.set()
            case LogLinkChanged(server, None):
                self._log.write(logging.INFO, "connected to a log server", server=server, limited=True)
            case LogLinkChanged(server, reason):
                self._log.write(logging.WARNING, "no connection to a log server; trying again", reason, server=server)
            case ControlLinkChanged(link, None):
                self._log.write(logging.INFO, "coordinators can reach this broker", link=link, limited=True)
            case ControlLinkChanged(link, reason):
                message = "coordinators cannot reach this broker through a server; trying again"
                self._log.write(logging.WARNING, message, with_cure(reason or ""), link=link)
            case Noted(message, cause, fields, is_warning):
                self._log.write(logging.WARNING if is_warning else logging.INFO, message, cause or None, **fields)
            case _:
                assert_never(cast("Any", action))

    def _broadcast(self, connections: Sequence[UserConnection], frame: Frame) -> None:
        """Send a frame to all, as the same bytes."""
        prepared = _prepared(frame)
        if isinstance(frame, Data):
            self._machine.counters["deliveries"] += len(connections)
        if self._has_streams:
            for connection in connections:
                _note_position(connection, frame)
                connection.send(prepared)
        else:
            for connection in connections:
                connection.send(prepared)

    def _send(self, connection: UserConnection, frame: Frame) -> None:
        if isinstance(frame, Data):
            self._machine.counters["deliveries"] += 1
        if self._has_streams:
            _note_position(connection, frame)
        connection.send(_prepared(frame))

    def _event_id(self, connection: UserConnection) -> str | None:
        """Return the id of an event: all positions, so that a browser that reconnects goes on from there."""
        user: _User = connection.user
        return None if user.positions is None else user.positions.event_id()

    def _user_of(self, token: str | None) -> str | None:
        """Return whose token this is, empty for nobody's; None for one that is not valid."""
        try:
            return self._tokens.grant(token).user
        except TokenRefused:
            return None

    def _post_records(self, token: str | None, dataset: str) -> StoreRecords | None:
        """Return what stores records for a user; None: it may not. Raises TokenRefused."""
        grant = self._tokens.grant(token)
        return partial(self._store_records, grant, dataset) if grant.may_publish(DATASET_PREFIX + dataset) else None

    async def _store_records(self, grant: Grant, dataset: str, records: Sequence[bytes]) -> Sequence[tuple[str, str]]:
        """Store records; return what has become of each."""
        answer: asyncio.Future[Sequence[tuple[str, str]]] = self._loop.create_future()
        self._driver.handle(RecordsPosted(answer, dataset, records, grant))
        return await answer

    # Users. The transports call these.

    def opened(self, conn: UserConnection) -> None:
        """Wait for the user's ``connect``."""
        timeout = self._loop.call_later(CONNECT_TIMEOUT_S, conn.close, PROTOCOL_ERROR, "no connect frame came")
        conn.user = _User(timeout=timeout)

    def received(self, conn: UserConnection, frame: dict[str, Any]) -> None:
        """Handle a frame of a user."""
        self._machine.counters["frames_received"] += 1
        try:
            read = read_user_frame(frame)
        except MalformedMessage as error:
            self.malformed(conn, str(error))
            return
        user: _User = conn.user
        if isinstance(read, Connect):
            if user.is_opened:
                self.malformed(conn, "connect is the first frame, and comes once")
            else:
                self._connect(conn, user, read)
        elif not user.is_opened:
            self.malformed(conn, "the first frame is connect")
        elif isinstance(read, Refresh):
            self._refresh(conn, read)
        elif user.positions is not None and (refusal := self._stream_refuses(user.positions, read)) is not None:
            conn.send(_prepared(refusal))
        else:
            self._driver.handle(Received(conn, cast(UserFrame, read)))

    def _stream_refuses(self, positions: StreamPositions, frame: UserFrame) -> Error | None:
        is_logged = isinstance(frame, Subscribe) and self._machine.is_logged(frame.request.interest)
        return positions.refusal(frame, is_logged=is_logged)

    def malformed(self, conn: UserConnection, reason: str) -> None:
        """Close the connection of a user who sends what cannot be read."""
        self._machine.counters["malformed_frames"] += 1
        self._refuse(conn, Error("bad_frame", cut(reason, REASON_CHARACTERS_MAX)), PROTOCOL_ERROR)

    def overflowed(self, conn: UserConnection) -> None:
        """Let a user fall behind."""
        self._driver.handle(Overflowed(conn))

    def writable(self, conn: UserConnection) -> None:
        """Let a user catch up."""
        self._driver.handle(Writable(conn))

    def closed(self, conn: UserConnection) -> None:
        """Forget a user."""
        user: _User = conn.user
        if user.timeout is not None:
            user.timeout.cancel()
        if user.is_opened:
            self._driver.handle(Closed(conn, conn.close_code))
            if not self._machine.sessions:
                self._is_empty.set()

    def _connect(self, conn: UserConnection, user: _User, connect: Connect) -> None:
        if user.timeout is not None:
            user.timeout.cancel()
            user.timeout = None
        try:
            grant = self._tokens.grant(connect.token)
        except TokenRefused as error:
            self._note_refusal(conn, error)
            code = TOKEN_EXPIRED if isinstance(error, TokenExpired) else TOKEN_REFUSED
            self._refuse(conn, Error(error.code, str(error)), code)
            return
        if conn.is_stream:
            self._has_streams = True
            connect = resumed(connect, conn.last_event_id)
            user.positions = StreamPositions()
            for each in connect.subs:  # a request has room for fewer than a stream may have
                self._stream_refuses(user.positions, Subscribe(each))
        user.is_opened = True
        self._is_empty.clear()
        self._driver.handle(Opened(conn, connect, grant, conn.peer.rpartition(":")[0]))

    def _refresh(self, conn: UserConnection, frame: Refresh) -> None:
        try:
            grant = self._tokens.grant(frame.token)
        except TokenRefused as error:
            self._note_refusal(conn, error)
            conn.send(_prepared(Error(error.code, str(error))))  # the former token is valid until it expires
            return
        self._driver.handle(Refreshed(conn, grant))

    def _note_refusal(self, conn: UserConnection, error: TokenRefused) -> None:
        """Count a refused token by its cause, and log it without the token; the log bounds what is repeated."""
        self._machine.counters[f"refused_{error.code}"] += 1
        self._machine.counters[f"token_refusals_{error.cause}"] += 1
        self._log.write(logging.WARNING, "a user's token is refused", error.detail, kind=error.cause, peer=conn.peer)

    @staticmethod
    def _refuse(conn: UserConnection, error: Error, code: int) -> None:
        conn.send(_prepared(error))
        conn.close(code, error.code)


def _prepared(frame: Frame) -> Prepared:
    if isinstance(frame, Data):
        wire: dict[str, Any] = {"type": "data", "s": frame.s}
        if frame.o is not None:
            wire["o"] = frame.o
        elif frame.p is not None:
            wire["p"] = [f"{frame.p[0]:016x}", frame.p[1]]
        return prepare(wire, frame.payload)
    return prepare(to_wire(frame))


def _note_position(connection: UserConnection, frame: Frame) -> None:
    """Note where a stream is once this frame has been sent."""
    user: _User | None = connection.user
    if user is None or user.positions is None:
        return
    user.positions.note(frame)
