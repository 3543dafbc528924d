"""Reads and appends to the logs of interests, at the log servers; sends them scripts of other modules, too.

Reads are shared: whoever asks for the same page while it is under way gets the same answer. A read that the loss of a
connection has interrupted is sent again; an append is not, as nobody knows whether it took effect.

*Refusals.* A server may answer and still refuse what it is sent: it has no memory left, or has become a replica. Our
callers repeat what was refused, or ask their users to. Here it is noted once, and the server is tried every ``TRY_S``
until it accepts everything again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any

from dynamoth.edge.log import (
    SERVERS_KEY,
    Appended,
    LogOptions,
    LogPage,
    append_command,
    is_fenced,
    log_server,
    parse_appended,
    parse_page,
    read_command,
    servers_value,
)
from dynamoth.errors import MalformedMessage
from dynamoth.machine.events import CommandPart, Connect, ErrorReply, LinkDown, LinkUp, Replied, Send
from dynamoth.machine.timers import Timers
from dynamoth.refusals import refusal_code, with_cure
from dynamoth_broker.events import BrokerAction, LogLinkChanged, Noted

LINK_PREFIX = "log:"

NO_RUN_ID = "it does not say which process it is: our user needs the right to INFO"

TRY_S = 1.0
"""A server that refuses commands is tried this often."""

CALM_S = 5.0
"""It accepts commands again once it has refused none for this time: one without memory still takes some of them."""

TRIED_ID = "tried"
"""Stands for the id of an interest in the keys of the log at which servers are tried; no interest has it."""

TRIED_LOG = LogOptions(retained_min=1, ttl_s=60.0)
"""That log keeps a few empty publications, and is forgotten soon."""

OnPage = Callable[[LogPage | None, float], Sequence[BrokerAction]]
"""Gets a page, or None if the log cannot be read, and the time."""

LogCommand = Callable[[str, int, LogOptions], tuple[CommandPart, ...]]
"""Makes a command of the run id of the log server's process, a new epoch, and the options of logs."""

OnReply = Callable[[Any, float], Sequence[BrokerAction]]
"""Gets the reply to a command, None if it may not have come to the server, and the time."""

OnAppended = Callable[[Appended | str, float], Sequence[BrokerAction]]
"""Gets the position of what was appended, or why it was not, and the time."""


@dataclass(frozen=True, slots=True)
class _Page:
    """Names what is read."""

    interest_id: str
    after: int
    count: int


@dataclass(slots=True, eq=False)
class _Read:
    """A read that is under way, or waits for the connection."""

    page: _Page
    waiting: list[OnPage]


@dataclass(slots=True, eq=False)
class _Append:
    """An append that is under way."""

    on_appended: OnAppended


@dataclass(slots=True, eq=False)
class _Request:
    """A command of somebody else that is under way; one that *waits* is sent, again, when there is a connection."""

    command: LogCommand
    on_reply: OnReply
    waits: bool


@dataclass(slots=True)
class _LogServer:
    """One log server."""

    url: str
    #: Of the connection that is up; None while there is none.
    run_id: str | None = None
    #: Why there is no connection.
    fault: str = "it was not reached yet"
    #: The error with which it has refused a command lately, with the cure; empty while it accepts commands.
    refusal: str = ""
    refused_at: float = 0.0
    #: Whether it is being tried.
    is_tried: bool = False
    #: Reads that are not answered, oldest first.
    reads: dict[_Read, None] = field(default_factory=dict["_Read", None])
    #: Those of publications, which others may share.
    shared: dict[_Page, _Read] = field(default_factory=dict[_Page, _Read])
    appends: dict[_Append, None] = field(default_factory=dict[_Append, None])
    requests: dict[_Request, None] = field(default_factory=dict[_Request, None])


class Logs:
    """The logs of all interests. The owner hands it the events of its links."""

    def __init__(
        self,
        servers: dict[str, str],
        options: LogOptions,
        incarnation: int,
        wait_s: float,
        timers: Timers[BrokerAction],
        counters: Counter[str],
    ) -> None:
        """Begin without connections.

        Args:
            servers: URLs by id.
            options: how long logs are kept.
            incarnation: a random number of 64 bits, for new epochs.
            wait_s: a read that is not answered for this time fails.
            timers: of the owner.
            counters: of the owner.

        """
        self._servers = {id_: _LogServer(url) for id_, url in servers.items()}
        self._ids = tuple(self._servers)
        self._options = options
        self._incarnation = incarnation
        self._wait_s = wait_s
        self._timers = timers
        self._counters = counters
        self._epochs = 0

    @property
    def is_configured(self) -> bool:
        """Whether there is a log server."""
        return bool(self._servers)

    @property
    def faults(self) -> dict[str, str]:
        """The log servers that do not answer, and why."""
        return {id_: server.fault for id_, server in self._servers.items() if server.run_id is None}

    @property
    def refusals(self) -> dict[str, str]:
        """The log servers that answer but refuse commands, and why, with the cure."""
        return {id_: server.refusal for id_, server in self._servers.items() if server.refusal}

    @property
    def unusable(self) -> dict[str, str]:
        """The log servers that do not answer or refuse commands, and why."""
        return {**self.faults, **self.refusals}

    def start(self) -> list[BrokerAction]:
        """Connect to all log servers."""
        return [Connect(LINK_PREFIX + id_, server.url) for id_, server in self._servers.items()]

    def read(self, interest_id: str, after: int, count: int, on_page: OnPage, now: float) -> list[BrokerAction]:
        """Read the tip of a log, and up to ``count`` publications behind the offset ``after``.

        With ``count`` 0 the tip is one of after this call: that of a read that is under way may be older.
        """
        id_ = self.server_of(interest_id)
        server = self._servers[id_]
        page = _Page(interest_id, after, count)
        under_way = server.shared.get(page)
        if under_way is not None:
            under_way.waiting.append(on_page)
            return []
        read = _Read(page, [on_page])
        server.reads[read] = None
        if count:
            server.shared[page] = read
        self._timers.add(now + self._wait_s, self._timed_out, id_, read)
        return self._send(id_, [read])

    def append(self, interest_id: str, payload: bytes, on_appended: OnAppended, now: float) -> list[BrokerAction]:
        """Append a publication to a log; ``on_appended`` gets the outcome.

        Without a connection it fails at once. Without a reply there is no outcome and no time bound: who appends waits
        until the server answers or the connection is lost. After a loss the outcome is ``"unknown"``, and the append is
        not repeated: the server may have stored it.
        """
        id_ = self.server_of(interest_id)
        server = self._servers[id_]
        if server.run_id is None:
            return [*on_appended(server.fault, now)]
        append = _Append(on_appended)
        server.appends[append] = None
        command = append_command(interest_id, payload, server.run_id, self._new_epoch(), self._options)
        return [Send(LINK_PREFIX + id_, command, append)]

    def server_of(self, interest_id: str) -> str:
        """Return the id of the server that has the log of an interest."""
        return log_server(interest_id, self._ids)

    def is_up(self, id_: str) -> bool:
        """Whether there is a connection to a log server."""
        return self._servers[id_].run_id is not None

    def request(
        self, interest_id: str, command: LogCommand, on_reply: OnReply, now: float, *, waits: bool = False
    ) -> list[BrokerAction]:
        """Send a command to the server that has the log of an interest, behind those that were sent before.

        It fails after ``wait_s``. Unless it ``waits``, it also fails at once without a connection, and when the
        connection is lost; else it is sent with the next one, perhaps twice.
        """
        return self.request_at(self.server_of(interest_id), command, on_reply, now, waits=waits)

    def request_at(
        self, id_: str, command: LogCommand, on_reply: OnReply, now: float, *, waits: bool = False
    ) -> list[BrokerAction]:
        """Send a command to this log server, as ``request`` does."""
        server = self._servers[id_]
        if server.run_id is None and not waits:
            return [*on_reply(None, now)]
        request = _Request(command, on_reply, waits)
        server.requests[request] = None
        self._timers.add(now + self._wait_s, self._give_up, id_, request)
        return self._send_requests(id_, [request])

    def _send_requests(self, id_: str, requests: Iterable[_Request]) -> list[BrokerAction]:
        run_id, link = self._servers[id_].run_id, LINK_PREFIX + id_
        if run_id is None:
            return []
        return [Send(link, each.command(run_id, self._new_epoch(), self._options), each) for each in requests]

    def _give_up(self, id_: str, request: _Request, now: float) -> Sequence[BrokerAction]:
        return self._replied(self._servers[id_], request, None, now)

    def _replied(self, server: _LogServer, request: _Request, value: Any, now: float) -> Sequence[BrokerAction]:
        if request not in server.requests:
            return []  # it was given up
        del server.requests[request]
        if isinstance(value, ErrorReply):
            self._counters["log_errors"] += 1
        return request.on_reply(value, now)

    def _send(self, id_: str, reads: Iterable[_Read]) -> list[BrokerAction]:
        server = self._servers[id_]
        if server.run_id is None:
            return []
        actions: list[BrokerAction] = []
        for read in reads:
            page = read.page
            command = read_command(
                page.interest_id, server.run_id, self._new_epoch(), self._options, page.after, page.count
            )
            actions.append(Send(LINK_PREFIX + id_, command, read))
        return actions

    def _new_epoch(self) -> int:
        self._epochs += 1
        seed = b"%d %d" % (self._incarnation, self._epochs)
        return int.from_bytes(blake2b(seed, digest_size=8).digest())

    # Events of the links.

    def on_up(self, event: LinkUp) -> list[BrokerAction]:
        """Send what waits."""
        id_ = event.link.removeprefix(LINK_PREFIX)
        server = self._servers[id_]
        if event.run_id is None and not self._options.durable:
            server.fault = NO_RUN_ID
            return [LogLinkChanged(id_, NO_RUN_ID)]
        server.run_id = event.run_id or ""
        server.requests[_Request(self._names_command, _nothing_follows, waits=False)] = None
        return [
            LogLinkChanged(id_, None),
            *self._send(id_, server.reads),
            *self._send_requests(id_, server.requests),
        ]

    def _names_command(self, run_id: str, new_epoch: int, options: LogOptions) -> tuple[CommandPart, ...]:
        """Return the command that says which log servers there are, for those who append without a broker."""
        return b"SET", SERVERS_KEY, servers_value(self._ids)

    # Refusals.

    def _note_refusal(self, id_: str, error: str, now: float) -> list[BrokerAction]:
        """Note an error that says that a server refuses commands, and begin to try the server."""
        code = refusal_code(error)
        if code is None:
            return []
        server = self._servers[id_]
        is_known, server.refused_at = refusal_code(server.refusal) == code, now
        server.refusal = with_cure(error)
        if not server.is_tried:
            server.is_tried = True
            self._timers.add(now + TRY_S, self._try, id_)
        if is_known:
            return []
        what = "a log server refuses commands; trying again"
        return [Noted(what, server.refusal, {"server": id_}, is_warning=True)]

    def _try(self, id_: str, now: float) -> Sequence[BrokerAction]:
        """Send a server that refuses commands what it may have missed, and append to a log that nobody reads."""
        names = self.request_at(id_, self._names_command, _nothing_follows, now)
        return [*names, *self.request_at(id_, _try_command, partial(self._tried, id_), now)]

    def _tried(self, id_: str, reply: Any, now: float) -> Sequence[BrokerAction]:
        """Note that a server accepts commands again, or try it once more. A refusal in ``reply`` was noted before."""
        server = self._servers[id_]
        if server.refusal and (reply is None or now - server.refused_at < CALM_S):
            self._timers.add(now + TRY_S, self._try, id_)
            return []
        server.is_tried = False
        if not server.refusal:
            return []  # the connection was lost
        server.refusal = ""
        return [Noted("a log server accepts commands again", fields={"server": id_})]

    def on_down(self, event: LinkDown, now: float) -> list[BrokerAction]:
        """Fail appends; reads wait for the next connection."""
        id_ = event.link.removeprefix(LINK_PREFIX)
        server = self._servers[id_]
        server.run_id = None
        server.fault = event.reason
        server.refusal = ""
        appends, server.appends = server.appends, {}
        actions: list[BrokerAction] = [LogLinkChanged(id_, event.reason)]
        for append in appends:
            actions += append.on_appended("unknown", now)
        for request in [each for each in server.requests if not each.waits]:
            actions += self._replied(server, request, None, now)
        return actions

    def on_reply(self, event: Replied, now: float) -> list[BrokerAction]:
        """Note a refusal, and hand an answer to those who wait for it."""
        id_ = event.link.removeprefix(LINK_PREFIX)
        is_error = isinstance(event.value, ErrorReply)
        noted = self._note_refusal(id_, str(event.value), now) if is_error else []
        return noted + self._answered(self._servers[id_], event, now)

    def _answered(self, server: _LogServer, event: Replied, now: float) -> list[BrokerAction]:
        tag = event.tag
        if isinstance(tag, _Append):
            del server.appends[tag]
            return self._appended(tag, event.value, now)
        if isinstance(tag, _Request):
            return [*self._replied(server, tag, event.value, now)]
        assert isinstance(tag, _Read), f"not a request to a log: {tag!r}"
        if not self._forget(server, tag):
            return []  # it has timed out
        return self._answer(tag, self._page_of(event.value), now)

    @staticmethod
    def _forget(server: _LogServer, read: _Read) -> bool:
        """Forget a read that is answered or given up; return whether it was still waited for."""
        if read not in server.reads:
            return False
        del server.reads[read]
        if server.shared.get(read.page) is read:
            del server.shared[read.page]
        return True

    def _appended(self, append: _Append, value: object, now: float) -> list[BrokerAction]:
        if isinstance(value, ErrorReply):
            self._counters["log_errors"] += not is_fenced(str(value))
            return [*append.on_appended(str(value), now)]
        try:
            return [*append.on_appended(parse_appended(value), now)]
        except MalformedMessage:
            self._counters["malformed"] += 1
            return [*append.on_appended("unknown", now)]

    def _page_of(self, value: object) -> LogPage | None:
        if isinstance(value, ErrorReply):
            self._counters["log_errors"] += 1
            return None
        try:
            return parse_page(value)
        except MalformedMessage:
            self._counters["malformed"] += 1
            return None

    def _timed_out(self, id_: str, read: _Read, now: float) -> Sequence[BrokerAction]:
        return self._answer(read, None, now) if self._forget(self._servers[id_], read) else []

    @staticmethod
    def _answer(read: _Read, page: LogPage | None, now: float) -> list[BrokerAction]:
        actions: list[BrokerAction] = []
        for on_page in read.waiting:
            actions += on_page(page, now)
        return actions


def _try_command(run_id: str, new_epoch: int, options: LogOptions) -> tuple[CommandPart, ...]:
    return append_command(TRIED_ID, b"", run_id, new_epoch, TRIED_LOG)


def _nothing_follows(value: Any, now: float) -> Sequence[BrokerAction]:
    return []
