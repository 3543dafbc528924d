"""Acknowledges subscriptions in the order of one Redis, and with its counts, although many servers confirm them.

Theory of operation
-------------------
One Redis server acknowledges each argument of SUBSCRIBE and UNSUBSCRIBE in the order of the calls, with the number of
subscriptions that the connection then has. Here the confirmations come from different servers, each in its own time.
So a request that is confirmed early is *held* until those before it are confirmed, but not for long: the owner calls
:meth:`Acks.release` before it hands on a message of a held channel (a message never comes before its
acknowledgement), and :meth:`Acks.release_all` after ``HOLD_S_MAX``. Requests that were then passed over are *late*
and hold nobody up any more.

Channels and patterns are counted together, and a pattern may be named as a channel is: so each is a :class:`Subject`.
Sharded channels are counted by themselves; their names tell them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from dynamoth.names import SHARDED_PREFIX

HOLD_S_MAX = 0.25
"""How long an acknowledgement waits for those before it: servers that are up confirm within a few milliseconds."""


class Subject(NamedTuple):
    """A channel or a pattern that is subscribed to."""

    name: bytes
    is_pattern: bool = False

    @property
    def is_sharded(self) -> bool:
        """Whether this is a sharded channel."""
        return not self.is_pattern and self.name.startswith(SHARDED_PREFIX)

    @property
    def command(self) -> str:
        """The command that subscribes to this."""
        return "psubscribe" if self.is_pattern else "ssubscribe" if self.is_sharded else "subscribe"


@dataclass(slots=True, frozen=True)
class Ack:
    """One acknowledgement: ``kind`` is redis-py's type, ``count`` the subscriptions of this sort there are then.

    ``channel`` is the pattern where it is about one, and None where nothing was left to end.
    """

    kind: str
    channel: bytes | None
    count: int


@dataclass(slots=True, eq=False)
class _Request:
    kind: str
    #: None: the end of all, where nothing is left.
    subject: Subject | None
    #: Confirmed, and held if it has not been acknowledged yet.
    done: bool = False
    acknowledged: bool = False
    late: bool = False


class Acks:
    """Requests in, confirmations in, acknowledgements out. It does no I/O and has no clock."""

    __slots__ = ("_open", "_order", "_sharded", "_subscribed", "held")

    def __init__(self) -> None:
        #: Requests that may still hold others up, oldest first.
        self._order: deque[_Request] = deque()
        #: The requests that are not confirmed, oldest first. No value is empty.
        self._open: dict[Subject, deque[_Request]] = {}
        #: Those whose latest acknowledgement was of a subscription: channels and patterns, and sharded channels.
        self._subscribed: set[Subject] = set()
        self._sharded: set[Subject] = set()
        #: The held requests, oldest first. No value is empty.
        self.held: dict[Subject | None, list[_Request]] = {}

    @property
    def count(self) -> int:
        """How many channels and patterns are acknowledged as subscribed."""
        return len(self._subscribed)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is subscribed and nothing is under way."""
        return not self._subscribed and not self._sharded and not self._open

    def is_open(self, subject: Subject) -> bool:
        """Whether requests of this subject are under way."""
        return subject in self._open

    def request(self, kind: str, name: bytes) -> None:
        """Note that the application asks to ``subscribe`` or ``unsubscribe``; ``p`` or ``s`` may be in front."""
        subject = Subject(name, kind.startswith("p"))
        request = _Request(kind, subject)
        self._order.append(request)
        self._open.setdefault(subject, deque()).append(request)

    def end_nothing(self, kind: str) -> list[Ack]:
        """Note a request to end all of one sort, where nothing is left; return the acks that are due.

        Redis acknowledges it in its turn, without a name.
        """
        request = _Request(kind, None)
        self._order.append(request)
        return self._done(request)

    def on_confirmed(self, name: bytes, *, is_pattern: bool = False) -> list[Ack]:
        """Confirm the oldest open request of ``name``, which is to subscribe; return the acks that are due."""
        subject = Subject(name, is_pattern)
        if subject not in self._open:
            return []
        return self._done(self._take_open(subject))

    def on_ended(self, name: bytes, *, is_pattern: bool = False) -> list[Ack]:
        """Confirm the oldest request to unsubscribe, and those before it; return the acks that are due.

        A subscription that ends before it was confirmed is acknowledged all the same, as Redis does.
        """
        subject = Subject(name, is_pattern)
        acks: list[Ack] = []
        while subject in self._open:
            request = self._take_open(subject)
            acks += self._done(request)
            if request.kind.endswith("unsubscribe"):
                break
        return acks

    def on_failed(self, name: bytes, *, is_pattern: bool = False) -> list[Ack]:
        """Drop all open requests of a subscription that the server refuses; return the acks that are due."""
        subject = Subject(name, is_pattern)
        for request in self._open.pop(subject, ()):
            request.acknowledged = True
        self._subscribed_like(subject).discard(subject)
        return self._drain()

    def start_over(self) -> list[Subject]:
        """Forget all subscriptions, as every connection was cut; return those to be asked for again, sorted.

        What has requests under way is not among them: those are acknowledged all the same.
        """
        subscribed = self._subscribed | self._sharded
        self._subscribed.clear()
        self._sharded.clear()
        return sorted(subject for subject in subscribed if subject not in self._open and subject not in self.held)

    def release(self, name: bytes, *, is_pattern: bool = False) -> list[Ack]:
        """Acknowledge the held requests of one channel, or pattern, out of their turn."""
        return [self._acknowledge(request) for request in self.held.pop(Subject(name, is_pattern), ())]

    def release_all(self) -> list[Ack]:
        """Acknowledge all held requests out of their turn; those passed over hold nobody up any more."""
        acks = [self._acknowledge(request) for request in self._order if request.done and not request.acknowledged]
        for request in self._order:
            request.late = True
        self._order.clear()
        self.held.clear()
        return acks

    def _take_open(self, subject: Subject) -> _Request:
        requests = self._open[subject]
        request = requests.popleft()
        if not requests:
            del self._open[subject]
        return request

    def _done(self, request: _Request) -> list[Ack]:
        request.done = True
        if request.late:
            return [self._acknowledge(request)]
        self.held.setdefault(request.subject, []).append(request)
        return self._drain()

    def _drain(self) -> list[Ack]:
        """Acknowledge the requests that no other one holds up any more."""
        acks: list[Ack] = []
        order = self._order
        while order and (order[0].done or order[0].acknowledged):
            request = order.popleft()
            if not request.acknowledged:
                self._unhold(request)
                acks.append(self._acknowledge(request))
        return acks

    def _unhold(self, request: _Request) -> None:
        """Hold a request no more. It is the oldest held one of its subject, as ``_order`` is oldest first."""
        requests = self.held[request.subject]
        requests.remove(request)
        if not requests:
            del self.held[request.subject]

    def _acknowledge(self, request: _Request) -> Ack:
        request.acknowledged = True
        if request.subject is None:
            subscribed = self._sharded if request.kind == "sunsubscribe" else self._subscribed
            return Ack(request.kind, None, len(subscribed))
        subscribed = self._subscribed_like(request.subject)
        if request.kind.endswith("unsubscribe"):
            subscribed.discard(request.subject)
        else:
            subscribed.add(request.subject)
        return Ack(request.kind, request.subject.name, len(subscribed))

    def _subscribed_like(self, subject: Subject) -> set[Subject]:
        return self._sharded if subject.is_sharded else self._subscribed
