"""The RESP protocol of one connection, without I/O: commands to bytes, bytes to replies and pushes.

Theory of operation
-------------------
Redis answers each command once, in the order of the connection, so replies are matched with commands by order alone.
``pending`` has the commands without an answer, oldest first.

Subscription commands are the exception. One push per channel answers them, or a single error when the server refuses
the whole command, so each waits in ``pending`` with the number of pushes that are missing. A push counts as an answer
only if its kind is the one that the *oldest* pending command waits for. All other pushes (messages, and what a server
sends of its own accord) are handed on and match nothing. So a reply is never taken for that of another command.

Consecutive pushes are handed on together, and so are consecutive replies to commands that were sent together: a call
for each costs more than parsing it.

Not supported, because they break the one-answer rule: MULTI around subscriptions, MONITOR, CLIENT REPLY, RESET.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any, cast, final

import hiredis

from dynamoth.machine.events import CommandPart, ErrorReply

OnReply = Callable[[Any], None]
"""Takes the reply to one command; an ``ErrorReply`` when the server refused it."""

OnReplies = Callable[[list[Any]], None]
"""Takes replies to consecutive commands, at least one, in order; an ``ErrorReply`` for each that was refused."""

OnPushBatch = Callable[[list[list[Any]]], None]
"""Takes consecutive pushes, at least one, as RESP3 lists."""

OnBug = Callable[[Exception, str], None]
"""Takes the exception that one of the callbacks above raised, and the name of that callback."""

Packed = bytes | memoryview
"""Commands as RESP."""

READER_BUFFER_BYTES_MAX = 1024 * 1024
"""hiredis frees its buffer whenever it is empty and larger than this. Its default of 16 KiB would mean an
allocation for each large read; reads bring up to 256 KiB."""

FEED_BYTES = 32 * 1024
"""hiredis gets at most this many bytes at a time: with a large buffer it takes several times longer per message."""

LARGE_BYTES = 1024 * 1024
"""A command with a larger last part is packed without the copies that hiredis makes, and written by itself: joining it
to others would copy it once more."""

_SUBSCRIPTIONS: dict[CommandPart, bytes] = {
    name: kind
    for kind in (b"subscribe", b"psubscribe", b"ssubscribe", b"unsubscribe", b"punsubscribe", b"sunsubscribe")
    for name in (kind.upper(), kind.decode().upper())
}
"""The commands that pushes answer, and the kind of these pushes."""

_HEADS = [b"\r\n$%d\r\n" % size for size in range(1024)]
"""What comes before a part of a command, by the size of the part: looking it up is faster than formatting."""

_NOT_ENOUGH_DATA = object()

_Push = hiredis.PushNotification
_ONLY_PUSHES: set[type] = {_Push}

_hiredis_pack = cast("Callable[[tuple[CommandPart, ...]], bytes]", hiredis.pack_command)


class Violation(Exception):
    """Raised when a server sends what the protocol does not allow. The connection cannot be used any more."""


class Refusal(Exception):
    """Raised when a server sends an error that answers no command: its reason for closing the connection."""


@final
class _Subscribing:
    """A subscription command that waits for its pushes."""

    __slots__ = ("kind", "missing", "on_reply")

    def __init__(self, kind: bytes, missing: int, on_reply: OnReply | None) -> None:
        self.kind = kind
        self.missing = missing
        self.on_reply = on_reply


@final
class _Run:
    """Commands that were sent together, and how many of their replies are missing."""

    __slots__ = ("missing", "on_replies")

    def __init__(self, missing: int, on_replies: OnReplies) -> None:
        self.missing = missing
        self.on_replies = on_replies


@final
class Resp:
    """One connection's protocol state. The owner writes what ``pack`` returns, in that order, and feeds what it reads.

    Args:
        on_pushes: takes all pushes, acknowledgements of subscriptions included.
        on_bug: called when a callback raises an exception, which does no other harm.

    """

    __slots__ = ("_gets", "_is_closed", "_on_bug", "_reader", "_subscribing", "on_pushes", "pending")

    def __init__(self, on_pushes: OnPushBatch, on_bug: OnBug) -> None:
        self.on_pushes = on_pushes
        self._on_bug = on_bug
        self._reader = hiredis.Reader(replyError=ErrorReply, notEnoughData=_NOT_ENOUGH_DATA)
        self._reader.setmaxbuf(READER_BUFFER_BYTES_MAX)
        self._gets = self._reader.gets
        self._is_closed = False
        #: The callbacks of commands without an answer, oldest first. Others only look at its length.
        self.pending: deque[OnReply | _Subscribing | _Run | None] = deque()
        #: How many of ``pending`` are ``_Subscribing``: while there are none, the kind of a push does not matter.
        self._subscribing = 0

    def pack(self, args: Sequence[CommandPart], on_reply: OnReply | None = None) -> Packed:
        """Return a command as RESP, and expect its answer.

        ``on_reply`` is called once, with the reply; for a subscription command only with an error. Raises TypeError
        when a part of the command is not a CommandPart, and ValueError for a subscription command without channels or
        no command at all; nothing is expected then.
        """
        if not args:
            raise ValueError("a command has at least its name")
        packed = _packed_alone(args)
        name = args[0]
        kind = _SUBSCRIPTIONS.get(name.upper()) if name != b"PUBLISH" and isinstance(name, (bytes, str)) else None
        if kind is None:
            self.pending.append(on_reply)
        else:
            if len(args) == 1:
                raise ValueError(f"{name!r} needs at least one channel: how many pushes answer it is unknown")
            self.pending.append(_Subscribing(kind, len(args) - 1, on_reply))
            self._subscribing += 1
        return packed

    def pack_all(self, commands: Sequence[Sequence[CommandPart]], on_replies: OnReplies) -> Packed:
        """Return commands, at least one, that each have one reply, as RESP, and expect their answers.

        ``on_replies`` is called with as many replies at once as came together. Raises TypeError for a part that is not
        a CommandPart; nothing is expected then.
        """
        packed = _packed(commands)
        self.pending.append(_Run(len(commands), on_replies))
        return packed

    def feed(self, data: bytes) -> None:
        """Parse what was read, and call back with complete replies and pushes, in their order.

        Raises ``Violation``, or ``Refusal``; everything before it has been handed on.
        """
        if len(data) <= FEED_BYTES:
            self._reader.feed(data)
            self._hand_on_complete()
            return
        for start in range(0, len(data), FEED_BYTES):
            self._reader.feed(data, start, min(FEED_BYTES, len(data) - start))
            self._hand_on_complete()
            if self._is_closed:
                return

    def close(self) -> None:
        """Call back no more; what is pending gets no answer. May be called by a callback."""
        self._is_closed = True
        self.pending.clear()
        self._subscribing = 0

    def _hand_on_complete(self) -> None:
        items: list[Any] = []
        fault = None
        try:
            items.extend(iter(self._gets, _NOT_ENOUGH_DATA))
        except hiredis.ProtocolError as error:  # what came before is in the list
            fault = error
        if not self._subscribing and items and type(items[0]) is _Push and set(map(type, items)) == _ONLY_PUSHES:
            self._hand_on_pushes(items)
        else:
            self._tell_apart(items)
        if fault is not None:
            raise Violation(str(fault)) from fault

    def _tell_apart(self, items: list[Any]) -> None:
        """Hand on consecutive pushes, consecutive replies to what was sent together, and other replies one by one."""
        begin = 0
        while begin < len(items) and not self._is_closed:
            first = items[begin]
            if type(first) is _Push:
                some = list(takewhile(_is_push, items[begin:]))
                for push in some:
                    if self._subscribing:
                        self._match(push)
                self._hand_on_pushes(some)
                begin += len(some)
            elif self.pending and isinstance(run := self.pending[0], _Run):
                some = items[begin : begin + run.missing]
                if _Push in map(type, some):
                    some = list(takewhile(_is_reply, some))
                self._hand_on_replies(run, some)
                begin += len(some)
            else:
                self._hand_on_reply(first)
                begin += 1

    def _match(self, push: list[Any]) -> None:
        """Count a push as an answer, if it is one."""
        oldest = self.pending[0]
        if isinstance(oldest, _Subscribing) and push and push[0] == oldest.kind:
            oldest.missing -= 1
            if oldest.missing == 0:
                self.pending.popleft()
                self._subscribing -= 1

    def _hand_on_pushes(self, pushes: list[list[Any]]) -> None:
        try:
            self.on_pushes(pushes)
        except Exception as error:
            self._on_bug(error, "on_pushes")

    def _hand_on_replies(self, run: _Run, values: list[Any]) -> None:
        """Hand on replies to the oldest pending commands, which were sent together."""
        run.missing -= len(values)
        if not run.missing:
            self.pending.popleft()
        try:
            run.on_replies(values)
        except Exception as error:
            self._on_bug(error, "on_replies")

    def _hand_on_reply(self, reply: Any) -> None:
        """Hand on the reply to the oldest pending command, which is no ``_Run``."""
        if not self.pending:
            if type(reply) is ErrorReply:
                raise Refusal(str(reply))
            raise Violation(f"a reply that nobody asked for: {reply!r:.200}")
        on_reply = self.pending.popleft()
        assert not isinstance(on_reply, _Run), "_tell_apart hands on its replies"
        if isinstance(on_reply, _Subscribing):
            self._subscribing -= 1
            if type(reply) is not ErrorReply:
                raise Violation(f"{on_reply.kind.decode()} was answered with {reply!r:.200}")
            on_reply = on_reply.on_reply
        if on_reply is not None:
            try:
                on_reply(reply)
            except Exception as error:
                self._on_bug(error, "on_reply")


def _is_push(item: Any) -> bool:
    return type(item) is _Push


def _is_reply(item: Any) -> bool:
    return type(item) is not _Push


def _pack(args: tuple[CommandPart, ...]) -> bytes:
    """Return a command as RESP. Raises TypeError for a part that is not a CommandPart.

    hiredis gets no numbers: it crashes when the handler of a signal raises while it asks Python for their text.
    """
    return _hiredis_pack(tuple([str(part) if isinstance(part, (int, float)) else part for part in args]))


def _packed_alone(args: Sequence[CommandPart]) -> Packed:
    """Return one command as RESP. Raises TypeError for a part that is not a CommandPart."""
    if len(args) == 3:
        head = _HEADS
        name, first, second = cast("Sequence[bytes]", args)
        try:  # three times as fast for short parts
            return b"".join((b"*3", head[len(name)], name, head[len(first)], first, head[len(second)], second, b"\r\n"))
        except (IndexError, TypeError):  # some are not of that kind
            if type(args[2]) is bytes and len(args[2]) > LARGE_BYTES:
                return _packed_large(args[:2], args[2])
    return _pack(tuple(args))


def _packed_large(first_parts: Sequence[CommandPart], last: bytes) -> memoryview:
    """Return a command with a large last part: hiredis would copy that twice, and transports what they write."""
    begin = _pack((*first_parts, b"")).removesuffix(b"$0\r\n\r\n")
    return memoryview(b"".join((begin, b"$%d\r\n" % len(last), last, b"\r\n")))


def _packed(commands: Sequence[Sequence[CommandPart]]) -> Packed:
    """Return commands as RESP. Raises TypeError for a part that is not a CommandPart."""
    try:
        return _packed_short(cast("Sequence[tuple[bytes, bytes, bytes]]", commands))
    except (IndexError, TypeError, ValueError):  # some are not of that kind
        return memoryview(b"".join([_pack(tuple(args)) for args in commands]))


def _packed_short(commands: Sequence[tuple[bytes, bytes, bytes]]) -> bytes:
    """Return commands of three short parts, as nearly all are PUBLISHes: twice as fast as packing them one by one.

    Raises IndexError, TypeError or ValueError for others.
    """
    head = _HEADS
    chunks: list[bytes] = []
    add = chunks.extend
    last_name = last_first = None
    begin = b""
    for name, first, second in commands:
        if first is not last_first or name is not last_name:  # many in a row are on one channel
            last_name, last_first = name, first
            begin = b"".join((b"*3", head[len(name)], name, head[len(first)], first))
        add((begin, head[len(second)], second, b"\r\n"))
    return b"".join(chunks)
