"""What the tests of the machines share: a small cluster, a machine with a clock, and answers of servers."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgpack

from dynamoth.machine.events import LinkDown, LinkUp, Machine, Pushed, Replied, Send, SendAll, Tick
from dynamoth.plan.plan import Assignment, Mode, Phase, Plan, Route, Server, single
from dynamoth.protocol.control import ControlMessage, RouteNotice, pack_control, seal_control
from dynamoth.protocol.envelope import seal
from dynamoth.protocol.plan_wire import pack_entry
from dynamoth.protocol.stored_plan import HEADER_FIELD, RUN_FIELD, VERSION_FIELD, write_whole
from dynamoth_sim.world.invariants import Checker

SERVERS = tuple(Server(id_, f"redis://{id_}:6379") for id_ in ("s1", "s2", "s3"))
URLS = {server.id: server.url for server in SERVERS}
PLAN_0 = Plan.initial(SERVERS, virtual_nodes=8)
RUN = "run-1"

_Action = TypeVar("_Action")


def channel_at(server: str, number: int = 0, plan: Plan = PLAN_0) -> bytes:
    """Return a channel whose home is ``server``; another one for each ``number``."""
    found = (name for name in map(b"c%d".__mod__, range(10_000)) if plan.ring.home(name) == server)
    return next(name for index, name in enumerate(found) if index == number)


C = channel_at("s1")
"""The channel of most tests; its home is s1."""

PREPARED = PLAN_0.begin({C: single("s2")})
"""Version 1: C is about to move from s1 to s2."""
ACTIVE = PREPARED.activate([C])
SETTLED = ACTIVE.settle([C])

GROWN = Plan(3, {**PLAN_0.servers, "s4": Server("s4", "redis://s4:6379")}, PLAN_0.base, virtual_nodes=8)
"""A plan that lists one more server, and a route to it."""
TO_S4 = Route(3, single("s4"))


def to_replicas(mode: Mode, *servers: str, epoch: int = 1) -> Route:
    return Route(epoch, Assignment(mode, servers or tuple(server.id for server in SERVERS)))


def phases(plan: Plan, assignment: Assignment, channel: bytes = C) -> tuple[Plan, Plan, Plan]:
    """Return the three versions in which the channel gets another assignment: PREPARED, ACTIVE, SETTLED."""
    prepared = plan.begin({channel: assignment})
    active = prepared.activate([channel])
    return prepared, active, active.settle([channel])


class Subject:
    """A machine and its clock. Its invariants are checked after each event."""

    def __init__(self, machine: Machine[Any, Any], now: float = 100.0) -> None:
        self.machine = machine
        self.now = now
        self._checker = Checker(machine, every=1)

    def tell(self, *events: Any) -> list[Any]:
        actions: list[Any] = []
        for event in events:
            actions += self.machine.handle(event, self.now)
            self._checker.after(event)
        return actions

    def up(self, link: str, run_id: str | None = RUN) -> list[Any]:
        return self.tell(LinkUp(link, run_id))

    def down(self, link: str) -> list[Any]:
        return self.tell(LinkDown(link, "reset by peer"))

    def push(self, link: str, channel: bytes, *payloads: bytes) -> list[Any]:
        """Let messages come on a channel that the machine is subscribed to."""
        return self.tell(Pushed(link, [[b"message", channel, payload] for payload in payloads]))

    def pass_time(self, seconds: float) -> list[Any]:
        """Let time pass; the machine gets its ticks exactly when it wants them. Return all that it did."""
        end = self.now + seconds
        actions: list[Any] = []
        ticks = 0
        while (deadline := self.machine.deadline()) is not None and deadline <= end:
            self.now = max(self.now, deadline)
            actions += self.tell(Tick())
            ticks += 1
            assert ticks < 100_000, f"the machine wants a tick at {deadline} again and again"
        self.now = end
        return actions


def only(kind: type[_Action], actions: Iterable[Any]) -> list[_Action]:
    """Return the actions of one kind."""
    return [action for action in actions if isinstance(action, kind)]


def sends(actions: Iterable[Any]) -> list[Send]:
    """Return the commands, also those that are sent together."""
    out: list[Send] = []
    for action in actions:
        if isinstance(action, SendAll):
            out += [Send(action.link, args, action.tag) for args in action.commands]
        elif isinstance(action, Send):
            out.append(action)
    return out


def commands(actions: Iterable[Any], name: bytes, link: str | None = None) -> list[tuple[Any, ...]]:
    """Return the arguments of every command of one name (and over one link), without the name."""
    return [tuple(s.args[1:]) for s in sends(actions) if s.args[0] == name and link in (None, s.link)]


def over(link: str, actions: Iterable[Any]) -> list[Any]:
    """Return the commands over one link, to be answered by its server alone."""
    return [send for send in sends(actions) if send.link == link]


def published(actions: Iterable[Any], channel: bytes, link: str | None = None) -> list[bytes]:
    """Return what is published on a channel."""
    return [args[1] for args in commands(actions, b"PUBLISH", link) if args[0] == channel]


def tagged(actions: Iterable[Any], tag: str) -> list[Send]:
    """Return the commands whose tag is a tuple that begins with ``tag``."""
    tags: list[tuple[Send, Any]] = [(send, send.tag) for send in only(Send, actions)]
    return [send for send, found in tags if type(found) is tuple and found[0] == tag]


def entry_reply(plan: Plan | None, channel: bytes, run_id: str | None = RUN) -> list[bytes | None]:
    """Return what HMGET says of a channel where ``plan`` is stored."""
    if plan is None:
        return [None, None, None]
    entry = plan.entries.get(channel)
    return [
        b"%d" % plan.version,
        None if run_id is None else run_id.encode(),
        None if entry is None else pack_entry(entry),
        None,
        plan.ring_mark,
    ]


def unknown_entry(version: int = 1, run_id: str = RUN) -> list[bytes | None]:
    """Return what HMGET says of a channel whose mode only newer software knows."""
    packed: bytes = msgpack.packb([int(Phase.SETTLED), [version, max(Mode) + 1, ["s2", "s3"]], []])
    return [b"%d" % version, run_id.encode(), packed]


def unknown_notice(channel: bytes = C, epoch: int = 1) -> bytes:
    """Return a RouteNotice with such a mode, as newer software packs it."""
    code, name, (number, _, servers) = msgpack.unpackb(
        pack_control(RouteNotice(channel, to_replicas(Mode.ALL_PUBLISHERS, epoch=epoch)))
    )
    packed: bytes = msgpack.packb([code, name, [number, max(Mode) + 1, servers]])
    return packed


def whole_reply(plan: Plan, run_id: str | None = RUN) -> dict[Any, Any]:
    """Return what HGETALL says where ``plan`` is stored."""
    fields = [part for command in write_whole(plan, run_id) if command[0] == b"HSET" for part in command[2:]]
    return dict(zip(fields[::2], fields[1::2], strict=True))


def header_reply(plan: Plan, run_id: str | None = RUN) -> list[bytes | None]:
    """Return what HMGET says of the header where ``plan`` is stored."""
    stored = whole_reply(plan, run_id)
    return [stored.get(name) for name in (VERSION_FIELD, RUN_FIELD, HEADER_FIELD)]


def reply(send: Send, value: Any) -> Replied:
    return Replied(send.link, send.tag, value)


def message(number: int, payload: bytes | None = None, *, flags: int = 0, publisher: int = 7, epoch: int = 0) -> bytes:
    """Return message ``number`` of a publisher; its payload names it."""
    return seal(publisher, number, epoch, b"m%d" % number if payload is None else payload, flags)


def control(got: ControlMessage) -> bytes:
    return seal_control(got)


def kept_bytes(flood: Callable[[], object]) -> int:
    """Return how much more memory is in use after a flood than before."""
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    flood()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return after - before
