"""The records of a publisher: its servers, and the readings of stored plans that messages wait for."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

from dynamoth.machine.events import Connect, Send
from dynamoth.machine.outbox import Outbox
from dynamoth.names import AGENT_CHANNEL
from dynamoth.plan.plan import Location
from dynamoth_client.machines.local_plan import LocalPlan
from dynamoth_client.machines.publisher.events import PublisherAction, PublisherOptions
from dynamoth_client.machines.publisher.waiting import HandOver, Together, Waiting

LOOKED_UP_MAX = 1000
"""Channels of an unreachable server that are looked up at once at most; the others the next time."""


@dataclass(slots=True, eq=False)
class Check:
    """A reading of the stored plan, and the messages of a channel that wait for it."""

    channel: bytes
    #: Where the messages went.
    locations: tuple[Location, ...]
    begun_at: float
    #: They and their envelopes, in the order of their numbers.
    messages: list[tuple[Waiting, bytes]] = field(default_factory=list[tuple[Waiting, bytes]])
    #: No reply is waited for: the messages are confirmed, or were sent again.
    over: bool = False


@dataclass(slots=True, eq=False)
class CheckAt:
    """The token of the reading at one location; under ALL_PUBLISHERS there are several, and the first reply counts."""

    check: Check
    location: Location
    #: The reading is repeated, behind one of the header.
    is_again: bool = False


@dataclass(slots=True, eq=False)
class VersionCheck:
    """A reading of the version of a server's stored plan, and the checks that an unchanged version confirms."""

    #: When it was begun; messages share it until the reply.
    begun_at: float
    checks: list[Check] = field(default_factory=list[Check])
    is_sent: bool = False


Token = Waiting | Together | HandOver | CheckAt | VersionCheck | None
"""What a command in an outbox is for; None: nothing waits for its answer."""


@dataclass(slots=True, eq=False)
class PublisherServer:
    """A server that a publisher publishes to."""

    id: str
    outbox: Outbox
    #: The messages in the outbox, oldest first; those that are done leave from the left.
    waiting: deque[Waiting | Together] = field(default_factory=deque["Waiting | Together"])
    #: The messages of the present event that go out together, and their tokens; empty between events.
    commands: list[tuple[bytes, bytes, bytes]] = field(default_factory=list[tuple[bytes, bytes, bytes]])
    tokens: list[Hashable] = field(default_factory=list[Hashable])
    run_id: str | None = None
    up: bool = False
    #: Since when the link is down; infinity while it is up.
    down_since: float = float("inf")
    #: When the connection was lost, until its channels were looked up at another server.
    lost_at: float | None = None
    #: When another server may be asked again, at the earliest, where its channels are.
    look_at: float = float("-inf")
    #: Channels with messages that wait for it while it is down: those that are to be looked up at once, and those that
    #: were looked up since another server was last asked for all of them.
    unasked: dict[bytes, None] = field(default_factory=dict[bytes, None])
    asked: set[bytes] = field(default_factory=set[bytes])
    #: How often one was asked.
    looks: int = 0
    #: It was away for ``failover_s``, so other replicas take its place.
    avoided: bool = False
    #: Whether messages may have been lost on the way here: subscribers there need the latest numbers.
    needs_heartbeats: bool = False
    #: Why the link is down, in words for the application.
    reason: str = "not connected yet: check that it is up and can be reached"
    #: The link was closed, as the plan did not list the server any more.
    unlisted: bool = False
    #: We do not connect there: it is not trusted with our credentials. Messages to it fail at once.
    refused: bool = False
    #: Channels whose messages failed so, to be looked up at another server.
    refused_channels: dict[bytes, None] = field(default_factory=dict[bytes, None])
    #: Agents that observe it: receivers of every message that are no clients.
    observers: int = 0
    #: Channels whose route the plan stored here has confirmed since the latest connection, and since the agents were
    #: last seen to be gone. It stays right until then, as no channel is moved away from a server without an agent.
    confirmed: set[bytes] = field(default_factory=set[bytes])
    observers_asked_at: float = float("-inf")
    #: The version of the plan that this process stored when it was last read; None before.
    version: int | None = None
    #: The reading of the version that is under way.
    version_check: VersionCheck | None = None
    #: Whether the latest reading of an entry found a plan to be believed, or one that this software cannot read.
    has_plan: bool = True
    #: Since when the plan stored here is missing, or not to be believed; infinity while it is there.
    missing_since: float = float("inf")
    #: Readings that found no plan to be believed, and when they are repeated.
    unread: list[CheckAt | VersionCheck] = field(default_factory=list["CheckAt | VersionCheck"])
    read_again_at: float = float("inf")
    #: Until when a message needs no other command beside it, if its channel is confirmed; minus infinity while down.
    clear_until: float = float("-inf")

    def note_refused(self, channel: bytes) -> None:
        """Note that a message of a channel failed, as this server is not trusted."""
        if len(self.refused_channels) < LOOKED_UP_MAX:
            self.refused_channels[channel] = None

    def note_waiting(self, channel: bytes) -> None:
        """Note that a message of a channel waits for this server, which is down: it may be looked up at another one."""
        if channel not in self.asked and len(self.unasked) < LOOKED_UP_MAX:
            self.unasked[channel] = None

    def is_clear_for(self, count: int, now: float) -> bool:
        """Return whether ``count`` messages of confirmed channels can go out here with no other command beside them."""
        return now < self.clear_until and count <= self.outbox.room

    def ask_observers_again(self, now: float, interval_s: float) -> list[Send]:
        """Ask how many agents observe this server if the latest answer may be too old to count receivers with it."""
        return [self.ask_observers(now)] if self.up and now - self.observers_asked_at >= interval_s else []

    def ask_observers(self, now: float) -> Send:
        """Ask how many agents observe this server; the link is up."""
        self.observers_asked_at = now
        return Send(self.id, (b"PUBSUB", b"NUMSUB", AGENT_CHANNEL), ("observers",))

    def check(self) -> None:
        """Assert the invariants that hold between events."""
        self.outbox.check()
        assert not self.commands and not self.tokens, f"{self.id}: messages were not sent"
        assert self.up == (self.down_since == float("inf")), f"{self.id} is up: {self.up}, down since {self.down_since}"
        assert self.up or self.clear_until == float("-inf"), f"{self.id} is down, and clear until {self.clear_until}"
        assert bool(self.unread) == (self.read_again_at < float("inf")), (
            f"{self.id} reads again at {self.read_again_at}"
        )
        assert not (self.up and self.unasked), f"{self.id} is up, and channels are to be looked up: {self.unasked}"
        assert self.version_check is None or self.version_check.is_sent, f"{self.id}: a version is not read"
        listed = {id(waiting) for waiting in self.waiting}
        for _, token in self.outbox.unanswered():
            if isinstance(token, (Waiting, Together)) and not token.done:
                assert id(token) in listed, f"{self.id}: nobody fails this message: {token}"
        for waiting in self.waiting:
            if isinstance(waiting, Waiting):
                waiting.check()


class Servers(dict[str, PublisherServer]):
    """The servers of one publisher by id, each with one link."""

    def __init__(self, plan: LocalPlan, options: PublisherOptions) -> None:
        """Begin without servers."""
        super().__init__()
        self._plan = plan
        self._unanswered_max = options.unanswered_max

    def open(self, server_id: str, now: float) -> tuple[PublisherServer, list[PublisherAction]]:
        """Return a server, and the action that opens the link to it if there is none."""
        server = self.get(server_id)
        if server is not None and not server.unlisted:
            return server, []
        if server is not None:  # a new cluster lists it again
            server.unlisted = False
            return server, [Connect(server_id, self._plan.servers[server_id].url)]
        outbox = Outbox(server_id, self._unanswered_max)
        server = self[server_id] = PublisherServer(server_id, outbox, down_since=now)
        return server, [Connect(server_id, self._plan.servers[server_id].url)]

    def check(self) -> None:
        """Assert the invariants that hold between events."""
        for server in self.values():
            server.check()
