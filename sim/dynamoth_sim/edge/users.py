"""Simulated end users: each runs the machine of the user's client, and tells the audit what its application sees."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from dynamoth.edge.frames import read_broker_frame, to_wire
from dynamoth.edge.interests import Interest
from dynamoth.edge.publications import Position
from dynamoth_sim.audit import Audit
from dynamoth_sim.edge.wires import LOST, Wire, WireFrame
from dynamoth_sim.load.clients import make_payload, read_payload
from dynamoth_sim.world.process import Process
from dynamoth_sim.world.world import World
from dynamoth_user.machine.events import (
    AddSubscription,
    Close,
    CloseConnection,
    Confirmed,
    ConnectionClosed,
    ConnectionOpened,
    Deliver,
    DeliverGap,
    Failed,
    FrameReceived,
    Handled,
    Interrupted,
    MemberChanged,
    MembersListed,
    NeedToken,
    OpenConnection,
    PublishEnded,
    PublishMessage,
    Refused,
    RemoveSubscription,
    SendFrame,
    Served,
    UserOptions,
)
from dynamoth_user.machine.machine import UserMachine

USER = "user"
"""The user whom all tokens name; sessions differ."""

HANDLE_S_MAX = 0.01
"""The longest time that an application takes for one publication."""


class Edge(Protocol):
    """What a user needs of the world of brokers."""

    world: World

    def connect(self, user: UserApp, number: int, url: str, opened: Callable[[Wire | None], None]) -> None:
        """Open a connection; calls ``opened`` with it, or with None if there is no broker."""
        ...

    def is_logged(self, interest: Interest) -> bool:
        """Return whether an interest has a log."""
        ...

    def audit_of(self, interest: Interest) -> Audit:
        """Return the audit for an interest."""
        ...

    def stored_position(self, session: str, interest: Interest) -> Position | None:
        """Return the position that the log server has for a session."""
        ...


class UserApp:
    """One end user: an application with a store for its positions, which outlives it.

    If it *is stored*, brokers have this store, and a new process has nothing but the name of its session.

    Args:
        edge: where brokers are.
        options: of the client; its session and generation are replaced.
        interests: what it subscribes to.
        is_stored: whether its subscriptions to logged interests are stored.

    """

    def __init__(
        self, edge: Edge, name: str, options: UserOptions, interests: list[Interest], *, is_stored: bool = False
    ) -> None:
        self.edge = edge
        self.world = edge.world
        self.name = name
        self._options = options
        self.interests = interests
        self.is_stored = is_stored
        self.process: Process | None = None
        self.wires: dict[int, Wire] = {}
        #: What survives a crash: positions of logged interests that were handled, and the generation.
        self._stored: dict[str, Position] = {}
        self._generation = 0
        #: What it had handled when it died or left last, and what brokers had stored at the last look. How much came
        #: again since.
        self._handled_before: dict[str, Position] = {}
        self._stored_before: dict[str, Position] = {}
        self.repeated = 0
        self._queue: deque[Deliver | DeliverGap] = deque()
        self._is_handling = False
        #: How often it was started.
        self._life = 0
        #: Interests that are confirmed in this life.
        self.confirmed: dict[str, None] = {}
        #: Channels on which others are to see it.
        self.present: set[str] = set()
        #: What it knows of who is present: user by member, by channel; and each change that it has seen in this life.
        self.rosters: dict[str, dict[str, str]] = {}
        self.changes: list[tuple[str, str]] = []
        self.moved = 0
        self.problems: list[str] = []
        # Publishing.
        self._publisher = name
        self._failures = 0
        self._numbers: dict[str, int] = {}
        self._publishing: tuple[Interest, int, str] | None = None

    @property
    def machine(self) -> UserMachine:
        """The user's machine."""
        assert self.process is not None
        assert isinstance(self.process.machine, UserMachine)
        return self.process.machine

    @property
    def is_alive(self) -> bool:
        """Whether the application runs."""
        return self.process is not None

    # Life.

    def start(self) -> None:
        """Start the application, with what it has stored."""
        self._life += 1
        self._generation += 1000
        options = self._options
        made = replace(options, session=self.name, generation=self._generation)
        self.process = Process(
            self.world, _NO_NETWORK, self.name, lambda incarnation: UserMachine(made, incarnation), self._act
        )
        self.process.start()
        for interest in self.interests:
            self.subscribe(interest)

    def subscribe(self, interest: Interest) -> None:
        """Subscribe to one of its interests."""
        assert self.process is not None
        is_stored = self._is_stored(interest)
        since = None if is_stored else self._stored.get(interest.id)
        is_present = interest.kind == "channel" and interest.name in self.present
        self.process.handle(AddSubscription(interest, since, is_stored, is_present))

    def _is_stored(self, interest: Interest) -> bool:
        return self.is_stored and interest.kind == "channel" and self.edge.is_logged(interest)

    def crash(self) -> None:
        """End at once. Positions that were handled stay; what it had of live interests is lost."""
        assert self.process is not None
        self._end_process("crashes")
        self._end_publish(failed=True)

    def quit(self) -> None:
        """End as applications do: close the client."""
        assert self.process is not None
        self.process.handle(Close())
        self._end_process("quits")
        self._end_publish(failed=True)

    def abandon(self) -> None:
        """End at once, and for good."""
        self.crash()
        for interest in self.interests:
            if interest.id in self._stored and interest.kind == "channel":
                channel, audit = interest.name.encode(), self.edge.audit_of(interest)
                audit.ended(self._subscriber(interest), channel, self.world.now)
        self.interests.clear()

    def _end_process(self, reason: str) -> None:
        assert self.process is not None
        self.process.crash(reason)
        self.process = None
        self.rosters.clear()
        self.changes.clear()
        for wire in self.wires.values():
            wire.lose(0.1, self.world.random.random)
        self.wires = {}
        self._queue.clear()
        self._is_handling = False
        self.confirmed.clear()
        now = self.world.now
        for interest in self.interests:
            self._note_end(interest)
            if interest.id not in self._stored and interest.kind == "channel":
                self.edge.audit_of(interest).ended(self._subscriber(interest), interest.name.encode(), now)

    def _note_end(self, interest: Interest) -> None:
        if not self._is_stored(interest):
            return
        self._look_at_stored(interest)
        handled = self._stored.get(interest.id)
        if handled is not None:
            self._handled_before[interest.id] = handled

    def _look_at_stored(self, interest: Interest) -> None:
        """Note what brokers have stored, and check that it has not moved back."""
        before, stored = self._stored_before.get(interest.id), self.edge.stored_position(self.name, interest)
        if stored is None:
            return
        if before is not None and stored.epoch == before.epoch and stored.offset < before.offset:
            self.problems.append(f"{stored} is stored for {self.name} on {interest.name} in place of {before}")
        self._stored_before[interest.id] = stored

    def _check_beginning(self, interest: Interest, position: Position) -> None:
        """Check that a new process does not begin before what was stored."""
        stored = self._stored_before.get(interest.id)
        if stored is not None and stored.epoch == position.epoch and position.offset < stored.offset:
            self.problems.append(f"{self.name} begins {interest.name} at {position}, though {stored} was stored")

    def _is_repeated(self, interest: Interest, position: Position | None) -> bool:
        """Tell whether a former process has handled a publication, without a stored acknowledgement."""
        before = self._handled_before.get(interest.id)
        if before is None or position is None:
            return False
        return before.epoch == position.epoch and position.offset <= before.offset

    def _subscriber(self, interest: Interest) -> str:
        """Return the audit's name: what a new life gets of live interests, it has never had."""
        return self.name if self.edge.is_logged(interest) else f"{self.name}.{self._life}"

    def leave(self, interest: Interest) -> None:
        """Unsubscribe; what waits of the interest is dropped."""
        assert self.process is not None
        self.interests.remove(interest)
        self.confirmed.pop(interest.id, None)
        self._note_end(interest)
        self._stored.pop(interest.id, None)
        if interest.kind == "presence":
            self.rosters.pop(interest.name, None)
            self.process.handle(RemoveSubscription(interest))
            return
        self._audit_left(interest)
        self.process.handle(RemoveSubscription(interest))
        waiting = [item for item in self._queue if item.interest != interest]
        if len(waiting) != len(self._queue):
            self._queue = deque(waiting)

    def prefer(self, url: str) -> None:
        """Let the next start try this broker first."""
        others = tuple(each for each in self._options.urls if each != url)
        self._options = replace(self._options, urls=(url, *others))

    # Connections.

    def receive(self, wire: Wire, frame: WireFrame) -> None:
        """Take a frame of a broker."""
        if self.process is not None and self.wires.get(wire.number) is wire:
            self.process.handle(FrameReceived(wire.number, read_broker_frame(frame)))

    def ended(self, wire: Wire, code: int, reason: str) -> None:
        """Note that a connection is gone."""
        if self.process is not None and self.wires.get(wire.number) is wire:
            del self.wires[wire.number]
            wire.close_by_user(code, reason)
            self.process.handle(ConnectionClosed(wire.number, code, reason))

    def _open(self, number: int, url: str) -> None:
        life = self._life

        def opened(wire: Wire | None) -> None:
            if self.process is None or self._life != life:
                if wire is not None:
                    wire.close_by_user(LOST, "the user is gone")
            elif wire is None:
                self.process.handle(ConnectionClosed(number, LOST, "connection refused"))
            else:
                self.wires[number] = wire
                self.process.handle(ConnectionOpened(number))

        self.edge.connect(self, number, url, opened)

    # The machine.

    def _act(self, action: Any) -> None:
        match action:
            case SendFrame(number, frame):
                wire = self.wires.get(number)
                if wire is not None:
                    wire.send_up(to_wire(frame))
            case MembersListed(interest, members, _):
                self.rosters[interest.name] = dict(members)
                self._note(f"sees {len(members)} members", interest)
            case MemberChanged():
                self._change_members(action)
            case DeliverGap(interest) if interest.kind == "presence":
                self._note(f"misses members: {action.reason}", interest)
            case Deliver() | DeliverGap():
                self._queue.append(action)
                self._handle_next()
            case OpenConnection(number, url):
                self._open(number, url)
            case CloseConnection(number, code, reason):
                wire = self.wires.pop(number, None)
                if wire is not None:
                    wire.close_by_user(code, reason)
            case Confirmed(interest, position):
                self._confirm(interest, position)
            case PublishEnded(_, position, code, reason):
                self._note(f"has published at {position}" if code is None else f"has not published: {reason}", None)
                self._end_publish(failed=code is not None)
            case Served(broker, _, moved):
                self.moved += moved
                self._note(f"is served by {broker}", None)
            case Interrupted(reason, _):
                self._note(f"is not served: {reason}", None)
            case Refused(interest, code, reason):
                self.problems.append(f"{self.name} may not subscribe to {interest.name}: {code}: {reason}")
            case Failed(code, reason):
                self.problems.append(f"{self.name} gave up: {code} {reason}")
            case NeedToken():
                raise AssertionError("simulated users have no tokens")
            case _:
                raise AssertionError(f"not an action of a user: {action!r}")

    def _confirm(self, interest: Interest, position: Position | None) -> None:
        self.confirmed[interest.id] = None
        if interest.kind == "presence":
            self._note("is confirmed", interest)
            return
        if position is not None:
            self._stored.setdefault(interest.id, position)
            self._check_beginning(interest, position)
        self._note("is confirmed", interest)
        self._audit_confirmed(interest)

    def _change_members(self, action: MemberChanged) -> None:
        roster, member = self.rosters[action.interest.name], action.member
        self.changes.append(("join" if action.is_join else "leave", member))
        if action.is_join == (member in roster):
            self.problems.append(f"{self.name} sees a second {self.changes[-1]} on {action.interest.name}")
        if action.is_join:
            roster[member] = action.user
        else:
            roster.pop(member, None)
        self._note(" ".join(self.changes[-1]), action.interest)

    def _handle_next(self) -> None:
        """Begin to handle the next publication, unless the application is at work."""
        if self._is_handling or not self._queue or self.process is None:
            return
        self._is_handling = True
        self.world.after(HANDLE_S_MAX * self.world.random.random(), self._handled, self._life)

    def _handled(self, life: int) -> None:
        """The application is done with a publication: it stores the position with what it did."""
        if life != self._life or self.process is None:
            return
        self._is_handling = False
        if not self._queue:
            return  # the application has unsubscribed meanwhile
        item = self._queue.popleft()
        interest = item.interest
        is_repeated = isinstance(item, Deliver) and self._is_repeated(interest, item.position)
        if is_repeated:
            self.repeated += 1
            self._note(f"handles {item.position} again", interest)
        elif isinstance(item, Deliver):
            channel = interest.name.encode()
            self.world.trace.add((self.world.now, "DELIVERS", self.name, None, channel, item.payload, None))
            self._audit_delivered(interest, item.payload)
        else:
            self._note(f"GAP {item.first}-{item.last}: {item.reason}", interest)
            self._audit_gap(interest, item)
        if item.position is not None:
            if not is_repeated:
                self._stored[interest.id] = item.position
            self.process.handle(Handled(interest, item.position))
            if self.is_stored:
                self._look_at_stored(interest)
        self._handle_next()

    # What the audit learns.

    def _audit_confirmed(self, interest: Interest) -> None:
        self.edge.audit_of(interest).confirmed(self._subscriber(interest), interest.name.encode(), self.world.now)

    def _audit_left(self, interest: Interest) -> None:
        channel, audit = interest.name.encode(), self.edge.audit_of(interest)
        audit.ending(self._subscriber(interest), channel)
        audit.ended(self._subscriber(interest), channel, self.world.now)

    def _audit_delivered(self, interest: Interest, payload: bytes) -> None:
        publisher, number = read_payload(payload)
        audit, channel = self.edge.audit_of(interest), interest.name.encode()
        audit.delivered(self._subscriber(interest), channel, publisher, number, self.world.now)

    def _audit_gap(self, interest: Interest, gap: DeliverGap) -> None:
        audit, channel = self.edge.audit_of(interest), interest.name.encode()
        audit.gap(self._subscriber(interest), channel, None, None, self.world.now, gap.reason)

    def _note(self, text: str, interest: Interest | None) -> None:
        channel = None if interest is None else interest.name.encode()
        self.world.trace.add((self.world.now, text, self.name, None, channel, None, None))

    # Publishing.

    @property
    def is_publishing(self) -> bool:
        """Whether a publish has not ended."""
        return self._publishing is not None

    def publish(self, interest: Interest) -> None:
        """Publish the next message on a logged channel; not before the one before it has ended."""
        assert self._publishing is None
        if self.process is None:
            return
        number = self._numbers[interest.id] = self._numbers.get(interest.id, 0) + 1
        self._publishing = interest, number, self._publisher
        channel, now = interest.name.encode(), self.world.now
        self.edge.audit_of(interest).published(self._publisher, channel, number, now)
        payload = make_payload(self._publisher, number)
        self.world.trace.add((now, "begins to publish", self.name, None, channel, payload, None))
        self.process.handle(PublishMessage(number, interest, payload))

    def _end_publish(self, *, failed: bool) -> None:
        if self._publishing is None:
            return
        (interest, number, publisher), self._publishing = self._publishing, None
        channel = interest.name.encode()
        self.edge.audit_of(interest).publish_ended(publisher, channel, number, self.world.now, failed=failed)
        if failed:  # it may still be stored, behind later ones: no order is promised between them
            self._failures += 1
            self._publisher = f"{self.name}_{self._failures}"
            self._numbers.clear()


_NO_NETWORK: Any = None
"""A user's machine asks for no link."""
