"""The asyncio client of end users: connects to an edge broker, and lets the broker move it without losing anything.

The client is thin: ``dynamoth_user.machine`` decides, ``engine`` runs it, ``subscription`` queues items for the
application, and ``storage`` keeps positions.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import ssl as ssl_module
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Literal, cast
from urllib.parse import urlsplit

from dynamoth.edge.frames import EXACT_MAX, PublishRequest
from dynamoth.edge.interests import (
    NAME_BYTES_MAX,
    Interest,
    Scalar,
    channel_interest,
    presence_interest,
    query_interest,
)
from dynamoth.edge.publications import Position
from dynamoth.errors import ConfigError
from dynamoth_user.complaints import Complaints
from dynamoth_user.connection import ConnectionOptions
from dynamoth_user.encoding import CODECS, Encoding
from dynamoth_user.engine import ApplicationAction, Engine, Token
from dynamoth_user.errors import ClientFailed, PublishFailed, RefusedError
from dynamoth_user.items import Gap, Item
from dynamoth_user.machine.events import (
    AddSubscription,
    Complained,
    Confirmed,
    Deliver,
    DeliverGap,
    Failed,
    ForgetPublication,
    Handled,
    Interrupted,
    MemberChanged,
    MembersListed,
    PublishEnded,
    PublishMessage,
    Refused,
    RemoveSubscription,
    Served,
    UserOptions,
)
from dynamoth_user.presence import Presence
from dynamoth_user.storage import SavedState, Saver, Storage, load_state
from dynamoth_user.subscription import NORMAL, Handler, Since, Subscription, set_exception
from dynamoth_user.window import PublishWindow

State = Served | Interrupted | Failed
"""What ``on_state`` gets: a broker serves the session; none does for now; the client has given up."""

REQUEST_BYTES_MAX = 64 * 1024
"""Bound of the frame of one publication: a broker ends the session of a client that sends more."""

ESCAPED_BYTES_MAX = 6
"""Bytes that JSON takes for one byte of text, at most: ``\\u0001``."""

GENERATIONS_PER_RUN = 1000
"""Connections of the former run whose numbers may be missing in the storage after a crash."""

_SESSION = re.compile(r"[A-Za-z0-9_-]{1,64}")

_log = logging.getLogger("dynamoth_user")


class Client:
    """An end user's client; ``async with`` opens and closes it.

    ``async with`` does not wait for a broker; ``subscribe`` and ``publish`` do. The client reconnects by itself, and
    its subscriptions go on. Publications of a logged channel come in order, each once, with a :class:`Gap` where some
    are missing. After a crash of the application it gets again what it has not handled, if it has a storage.

    Why no broker serves it is logged as a warning by the logger ``dynamoth_user``: each reason once, and not more often
    than every 10 s.

    Args:
        urls: of brokers: ``wss://host/connect``. ``ws://`` is for tests: a token can be read on its way then.
        session: the name of this user on this device: up to 64 letters, digits, ``-`` and ``_``. None: the one in the
            storage; without that, a random one. A service that always has the same session, and a token of the same
            user, continues where it was with stored subscriptions.
        token: for the broker, or a function that returns one for each connection and before the last one expires.
        storage: keeps session and positions between runs.
        ssl: for ``wss://``; None: certificates are checked as Python does by default.
        encoding: of frames. msgpack is smaller where payloads are not text.
        on_state: called with each :class:`Served`, :class:`Interrupted` and :class:`Failed`.
        on_error: called with what handlers, the function for tokens, and the storage raise. All of it is logged, too.
        proxy: True: the one of the environment; None: none; else its URL.

    Raises ConfigError.

    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        session: str | None = None,
        token: Token = None,
        storage: Storage | None = None,
        ssl: ssl_module.SSLContext | None = None,
        encoding: Encoding = "json",
        on_state: Callable[[State], object] | None = None,
        on_error: Callable[[Exception], object] | None = None,
        proxy: str | Literal[True] | None = True,
    ) -> None:
        self._urls = _checked(urls)
        if session is not None and _SESSION.fullmatch(session) is None:
            raise ConfigError("a session is named by 1 to 64 letters, digits, - and _")
        if encoding not in CODECS:
            raise ConfigError(f"the encoding is one of {', '.join(CODECS)}, not {encoding!r}")
        self._session = session
        #: Whether the next process of this application has the same session.
        self._has_lasting_session = session is not None or storage is not None
        self._token = token
        self._storage = storage
        self._connections = ConnectionOptions(CODECS[encoding], ssl, proxy)
        self._on_state = on_state
        self._on_error = on_error
        self._engine: Engine | None = None
        self._saver: Saver | None = None
        self._subscriptions: dict[str, Subscription] = {}
        self._presences: dict[str, Presence] = {}
        #: Subscriptions with a full queue: while there is one, nothing is read from brokers.
        self._full: set[Subscription] = set()
        self._broker: str | None = None
        self._moved = 0
        #: Set at the next move, and at the end of the client.
        self._next_move = asyncio.Event()
        #: Publications that are waited for.
        self._answers: set[asyncio.Future[Position | None]] = set()
        self._window = PublishWindow()
        self._complaints = Complaints(time.monotonic)
        #: Close code and reason, once the client has ended.
        self._end: tuple[int, str] | None = None

    # Life.

    async def __aenter__(self) -> Client:
        """Load what the storage has, and begin to connect. Raises StorageError, and what the storage raises."""
        if self._engine is not None:
            raise RuntimeError("a client is opened once")
        loaded = None if self._storage is None else await load_state(self._storage)
        state = loaded or SavedState("")
        state.session = self._session or state.session or secrets.token_urlsafe(16)
        # A session without a storage has the clock instead.
        state.generation = max(state.generation + GENERATIONS_PER_RUN, int(time.time() * 1000))
        self._session = state.session
        options = UserOptions(
            urls=self._urls,
            session=state.session,
            has_token=self._token is not None,
            has_fixed_token=isinstance(self._token, str),
            generation=state.generation,
        )
        self._saver = Saver(self._storage, state, self.report_error)
        self._engine = Engine(options, self._connections, self._token, self)
        self._engine.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for subscription in self._subscriptions.values():
            subscription.leave(is_regular=kind is None)
        await self.close()

    async def close(self) -> None:
        """End all subscriptions, acknowledge and save what was handled, and close the connections.

        Handlers are cancelled: what they are at work with comes again in the next run. Closing twice does nothing.
        """
        if self._end is None:
            self._end = NORMAL, "closed by the application"
        subscriptions = tuple(self._subscriptions.values())
        for each in subscriptions:
            each.end()
        for presence in self._presences.values():
            presence.end()
        for each in subscriptions:
            await each.join()
        if self._engine is not None:
            await self._engine.close()
        self._subscriptions.clear()
        self._presences.clear()
        self._broker = None
        self._next_move.set()
        if self._saver is not None:
            await self._saver.close()

    # What the application asks.

    @property
    def session(self) -> str | None:
        """The name of the session; None until the client is opened, where none was given."""
        return self._session

    @property
    def broker(self) -> str | None:
        """The name of the broker that serves the session; None while none does."""
        return self._broker

    @property
    def moved(self) -> int:
        """How often the session has moved to another broker without interruption."""
        return self._moved

    async def wait_moved(self) -> None:
        """Wait until the session moves to another broker the next time. Raises ClientFailed."""
        self._running()
        await self._next_move.wait()
        self._running()

    async def subscribe(
        self,
        channel: str,
        handler: Handler | None = None,
        since: Since = None,
        *,
        stored: bool = False,
        present: bool = False,
    ) -> Subscription:
        """Subscribe to a channel, and wait until a broker has confirmed it.

        Args:
            channel: its name.
            handler: called with each :class:`Item` and :class:`Gap`, one after the other. None: iterate over the
                subscription. If it raises, that is logged and goes to ``on_error``, and the next item follows. The item
                is not acknowledged by itself, only with the next one that is handled: if the application ends before,
                the item comes again.
            since: where to begin, if the channel has a log. None: behind what was handled, as the storage knows it;
                without that, from now on. ``"new"``: from now on.
            stored: let the brokers keep the position, for this session and the user of the token: a process that has
                the same ones begins behind what was handled, on any machine. The channel needs a log, and the client
                a token and a ``session``. At first it begins with what is published from now on. ``since`` may be a
                position then, to begin there instead.
            present: whether others are to see that this session is on the channel (``presence``).

        If it is cancelled, there is no subscription. Raises RefusedError, ClientFailed, MalformedMessage (the name),
        and ValueError (it is subscribed to already; ``stored`` with ``since`` "new", or without a lasting session).
        """
        return await self._subscribe(channel_interest(channel), handler, since, stored=stored, present=present)

    async def subscribe_query(
        self,
        query: str,
        params: Mapping[str, Scalar] | None = None,
        handler: Handler | None = None,
        since: Since = None,
        *,
        stored: bool = False,
    ) -> Subscription:
        """Subscribe to a standing query with parameters, as ``subscribe`` does to a channel."""
        return await self._subscribe(query_interest(query, params or {}), handler, since, stored=stored)

    async def presence(self, channel: str) -> Presence:
        """Watch who is present on a channel, and wait until that is known: see :class:`Presence`.

        If it is cancelled, nothing is watched. Raises RefusedError, ClientFailed, MalformedMessage (the name), and
        ValueError (it is watched already).
        """
        engine, interest = self._running(), presence_interest(channel)
        if interest.id in self._presences:
            raise ValueError(f"this client watches {channel!r} already")
        presence = self._presences[interest.id] = Presence(self, interest)
        engine.handle(AddSubscription(interest))
        try:
            await presence.ready
        except BaseException:
            self.remove_presence(presence)
            raise
        return presence

    async def publish(self, channel: str, payload: bytes | str) -> Position | None:
        """Publish on a channel; return the position if the channel has a log.

        Waits for a broker, and for its answer. If it is cancelled, the message may be published or not. While 1,000
        publications or 4 MiB of payloads have no answer, further calls wait for their turn, in order.

        Raises PublishFailed, ClientFailed, MalformedMessage (the name), TypeError (the payload).
        """
        self._running()
        interest, data = channel_interest(channel), _bytes_of(payload)
        self._check_size(interest, data)
        await self._window.enter(len(data))
        try:
            return await self._publish(interest, data)
        finally:
            self._window.leave(len(data))

    async def _publish(self, interest: Interest, data: bytes) -> Position | None:
        engine = self._running()
        answer: asyncio.Future[Position | None] = asyncio.get_running_loop().create_future()
        self._answers.add(answer)
        engine.handle(PublishMessage(answer, interest, data))
        try:
            return await answer
        except asyncio.CancelledError:
            engine.handle(ForgetPublication(answer))
            raise
        finally:
            self._answers.discard(answer)

    def _check_size(self, interest: Interest, data: bytes) -> None:
        if (len(data) + NAME_BYTES_MAX) * ESCAPED_BYTES_MAX < REQUEST_BYTES_MAX:
            return
        message = self._connections.codec.encode(PublishRequest(EXACT_MAX, interest, data))
        size = len(message.encode() if isinstance(message, str) else message)
        if size > REQUEST_BYTES_MAX:
            raise PublishFailed("too_large", f"the frame has {size} bytes; brokers take at most {REQUEST_BYTES_MAX}")

    def _running(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("the client is not open: use `async with Client(...) as client`")
        if self._end is not None:
            raise ClientFailed(*self._end)
        return self._engine

    async def _subscribe(
        self, interest: Interest, handler: Handler | None, since: Since, *, stored: bool, present: bool = False
    ) -> Subscription:
        engine = self._running()
        if interest.id in self._subscriptions:
            raise ValueError(f"this client is subscribed to {interest.name!r} already")
        if stored and since == "new":
            raise ValueError("a stored subscription begins at a position, or at the stored one")
        if stored and not self._has_lasting_session:
            raise ValueError("a stored subscription needs the client's `session` or `storage`: the next process has it")
        assert self._saver is not None
        begin = self._saver.state.positions.get(interest.id) if since is None and not stored else since
        subscription = Subscription(self, interest, None if begin == "new" else begin)
        self._subscriptions[interest.id] = subscription
        engine.handle(AddSubscription(interest, subscription.position, stored, present))
        try:
            await subscription.confirmation
        except BaseException:
            self._drop(subscription)
            raise
        self._running()
        if handler is not None:
            subscription.start(handler)
        return subscription

    def _drop(self, subscription: Subscription) -> None:
        interest = subscription.interest
        if self._subscriptions.get(interest.id) is subscription:
            del self._subscriptions[interest.id]
            assert self._engine is not None
            self._engine.handle(RemoveSubscription(interest))
        subscription.end()

    # What subscriptions report.

    def set_full(self, subscription: Subscription, *, is_full: bool) -> None:
        """Note whether the queue of a subscription is full. For subscriptions only."""
        if is_full:
            self._full.add(subscription)
        elif subscription in self._full:
            self._full.discard(subscription)
            if not self._full and self._engine is not None:
                self._engine.resume()

    def note_handled(self, subscription: Subscription, position: Position) -> None:
        """Acknowledge and save a position, unless the subscription has ended. For subscriptions only."""
        assert self._engine is not None
        assert self._saver is not None
        interest = subscription.interest
        if self._subscriptions.get(interest.id) is subscription:  # and not its successor
            self._saver.set_position(interest.id, position)
            self._engine.handle(Handled(interest, position))

    def remove(self, subscription: Subscription) -> None:
        """Unsubscribe, and forget the position. For subscriptions only."""
        assert self._saver is not None
        if self._subscriptions.get(subscription.interest.id) is subscription and self._end is None:
            self._saver.forget(subscription.interest.id)
        self._drop(subscription)

    def remove_presence(self, presence: Presence) -> None:
        """End a presence. For presences only."""
        if self._presences.get(presence.interest.id) is presence:
            del self._presences[presence.interest.id]
            assert self._engine is not None
            self._engine.handle(RemoveSubscription(presence.interest))
        presence.end()

    # What the engine reports.

    @property
    def is_behind(self) -> bool:
        """Whether the queue of a subscription is full, so that nothing is read from brokers."""
        return bool(self._full)

    def note_generation(self, generation: int) -> None:
        """Keep the number of a connection. For the engine only."""
        assert self._saver is not None
        self._saver.set_generation(generation)

    def report_error(self, error: Exception) -> None:
        """Give an error to ``on_error``."""
        if self._on_error is not None:
            _call(self._on_error, error)

    def act(self, action: ApplicationAction) -> None:
        """Execute an action of the machine. For the engine only."""
        match action:
            case Deliver(interest, payload, position):
                self._put(Item(interest, payload, position))
            case DeliverGap(interest, reason, first, last, count, position):
                self._put_gap(Gap(interest, reason, first, last, count, position))
            case MembersListed() | MemberChanged():
                self._change_members(action)
            case PublishEnded():
                self._end_publish(action)
            case Confirmed(interest, position):
                self._confirm(interest, position)
            case Refused(interest, code, reason):
                ended = self._subscriptions.pop(interest.id, None) or self._presences.pop(interest.id, None)
                if ended is not None:
                    ended.end(RefusedError(interest, code, reason))
            case Complained(code, message, url):
                self._complaints.add(f"a broker reports {code}: {message}", url)
            case Served() | Interrupted() | Failed():
                self._change_state(action)

    def _put(self, item: Item | Gap) -> None:
        subscription = self._subscriptions.get(item.interest.id)
        if subscription is not None:
            subscription.put(item)

    def _put_gap(self, gap: Gap) -> None:
        presence = self._presences.get(gap.interest.id)
        if presence is None:
            self._put(gap)
        else:
            presence.on_gap(gap)

    def _change_members(self, action: MembersListed | MemberChanged) -> None:
        presence = self._presences.get(action.interest.id)
        if presence is None:
            return
        if isinstance(action, MembersListed):
            presence.on_listed(action)
        else:
            presence.on_changed(action)

    def _end_publish(self, action: PublishEnded) -> None:
        answer = cast("asyncio.Future[Position | None]", action.token)
        if answer.done():
            return
        if action.code is None:
            answer.set_result(action.position)
        else:
            error = PublishFailed(action.code, action.reason, retryable=action.is_retryable)
            set_exception(answer, error if self._end is None else ClientFailed(*self._end))

    def _confirm(self, interest: Interest, position: Position | None) -> None:
        subscription = self._subscriptions.get(interest.id)
        if subscription is None:
            return
        if position is not None:
            assert self._saver is not None
            subscription.position = subscription.position or position
            self._saver.set_position(interest.id, subscription.position)
        if not subscription.confirmation.done():
            subscription.confirmation.set_result(None)

    def _change_state(self, state: State) -> None:
        match state:
            case Served(broker, _, moved):
                self._complaints.clear()
                self._broker = broker
                self._moved += moved
                if moved:
                    self._next_move.set()
                    self._next_move = asyncio.Event()
            case Interrupted(reason, _, url):
                self._broker = None
                self._complaints.add(f"no broker serves this client, which tries again: {reason}", url)
            case Failed(code, reason):
                self._broker = None
                self._fail(code, reason)
        if self._on_state is not None:
            _call(self._on_state, state)

    def _fail(self, code: int, reason: str) -> None:
        """End the client, as no broker will serve it: subscriptions raise ``ClientFailed`` after the queued items."""
        error = ClientFailed(code, reason)
        _log.error("%s", error)
        self._end = code, reason
        for subscription in tuple(self._subscriptions.values()):
            subscription.end(ClientFailed(code, reason))
        for presence in self._presences.values():
            presence.end(ClientFailed(code, reason))
        for answer in self._answers:
            if not answer.done():
                set_exception(answer, ClientFailed(code, reason))
        self._next_move.set()
        self.report_error(error)


def _checked(urls: Sequence[str]) -> tuple[str, ...]:
    if isinstance(urls, str):
        raise ConfigError("`urls` is a list of URLs, not one")
    if not urls:
        raise ConfigError("a client needs the URL of a broker")
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme not in ("ws", "wss") or not parts.hostname:
            raise ConfigError(f"the URL of a broker is ws://... or wss://..., not {url!r}")
    return tuple(urls)


def _bytes_of(payload: object) -> bytes:
    """The payload as bytes. What is found out only when it is sent would end the client, with all subscriptions."""
    if isinstance(payload, str):
        return payload.encode()
    if isinstance(payload, bytes | bytearray | memoryview):
        return bytes(cast("bytes", payload))
    raise TypeError(f"a payload is text or bytes, not {type(payload).__name__}: json.dumps makes text of an object")


def _call(function: Callable[..., object], argument: object) -> None:
    try:
        function(argument)
    except Exception:
        _log.exception("a function of the application has failed")
