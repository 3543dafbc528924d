"""A dispatcher machine in a test, with servers that answer when the test says so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dynamoth.machine.events import Connect, Pushed, Replied, Send, Start
from dynamoth.machine.outbox import Outbox
from dynamoth.names import AGENT_CHANNEL, ANNOUNCE_CHANNEL, RELAY_PREFIX, inbox
from dynamoth.plan.plan import Plan
from dynamoth.protocol.control import Announcement, ControlMessage, Marker, PlanChange, pack_control, unpack_control
from dynamoth.protocol.envelope import open_envelope
from dynamoth_dispatcher.events import LOCAL
from dynamoth_dispatcher.forwarder import forward_link
from dynamoth_dispatcher.machine import DispatcherMachine
from dynamoth_dispatcher.options import DispatcherOptions, ForwarderOptions
from tests.machines.helpers import RUN, C, Subject, commands, only, sends, whole_reply

INCARNATION = 0x1234_5678_9ABC
SUBSCRIBER = 0xABCD
EVERYWHERE = ("s1", "s2", "s3", "s4")


class Agent(Subject):
    """The dispatcher of one server."""

    def __init__(self, server: str = "s1", options: DispatcherOptions | None = None) -> None:
        self.dispatcher = DispatcherMachine(server, INCARNATION, options)
        super().__init__(self.dispatcher)
        #: The links that the machine has asked for, in order.
        self.links: list[str] = []
        self.tell(Start())

    @property
    def counters(self) -> dict[str, int]:
        return self.dispatcher.counters

    def tell(self, *events: Any) -> list[Any]:
        actions = super().tell(*events)
        self.links += [connect.link for connect in only(Connect, actions)]
        return actions

    def holding(self, plan: Plan, *servers: str) -> Agent:
        """Come up with ``plan`` stored, all said that is said at the start, and links to ``servers`` up."""
        self.up(LOCAL)
        self.read(plan)
        self.answer(self.connect_all())
        for link in self.links:
            self.down(link)
        for server in servers:
            self.connect(server)
        return self

    def up(self, link: str, run_id: str | None = RUN, *, confirmed: bool = True) -> list[Any]:
        """Let a link come up; at the server of the agent, what it subscribes to is confirmed."""
        actions = super().up(link, run_id)
        if link == LOCAL and confirmed:
            confirmations = [[b"psubscribe", b"*", 1], [b"subscribe", AGENT_CHANNEL, 2]]
            actions = [*actions, *self.tell(Pushed(LOCAL, confirmations))]
        return actions

    def connect_all(self) -> list[Any]:
        """Let every link come up that the machine has asked for."""
        return [action for link in list(self.links) for action in self.up(link)]

    def read(self, plan: Plan | None) -> list[Any]:
        """Answer the reading of the whole plan."""
        return self.tell(Replied(LOCAL, ("plan",), {} if plan is None else whole_reply(plan)))

    def connect(self, server: str) -> list[Any]:
        return self.up(forward_link(server))

    def change(self, older: Plan, newer: Plan) -> list[Any]:
        """Let the balancer tell of a change."""
        return self.hear(PlanChange(older.diff(newer)))

    def hear(self, message: ControlMessage) -> list[Any]:
        return self.push(LOCAL, AGENT_CHANNEL, pack_control(message))

    def observe(self, *payloads: bytes, physical: bytes = C) -> list[Any]:
        """Let messages be published at the server."""
        return self.tell(Pushed(LOCAL, [[b"pmessage", b"*", physical, payload] for payload in payloads]))

    def announce(self, *joined: bytes, number: int = 1, leaving: tuple[str, ...] = EVERYWHERE) -> list[Any]:
        """Let a subscriber announce what it has joined at the server."""
        return self.observe(announcement(*joined, number=number, leaving=leaving), physical=ANNOUNCE_CHANNEL)

    def send_later(self) -> list[Any]:
        """Let the time pass in which others relay the same."""
        return self.pass_time(ForwarderOptions().relay_delay_s)

    def answer(self, actions: Iterable[Any], value: Any = 1) -> list[Any]:
        """Let the servers answer what was forwarded."""
        copies = [send for send in sends(actions) if isinstance(send.tag, Outbox)]
        return [action for copy in copies for action in self.tell(Replied(copy.link, copy.tag, value))]

    def listeners(self, actions: Iterable[Any], count: int | Mapping[bytes, int]) -> list[Any]:
        """Answer every NUMSUB: ``count`` connections listen at each place, or as many as it says of the place."""
        out: list[Any] = []
        for send in only(Send, actions):
            if send.args[:2] == (b"PUBSUB", b"NUMSUB"):
                names = [name for name in send.args[2:] if isinstance(name, bytes)]
                counts = [count if isinstance(count, int) else count[name] for name in names]
                pairs = [part for pair in zip(names, counts, strict=True) for part in pair]
                out += self.tell(Replied(send.link, send.tag, pairs))
        return out


def announcement(*joined: bytes, number: int = 1, leaving: tuple[str, ...] = EVERYWHERE) -> bytes:
    return pack_control(Announcement(SUBSCRIBER, number, joined, (), leaving))


def marks(actions: Iterable[Any]) -> list[tuple[str, Marker]]:
    """Return the markers to the subscriber, and over which links they go: published, or given to a dispatcher."""
    found: list[tuple[str, Marker]] = []
    for link in dict.fromkeys(send.link for send in sends(actions)):
        for name, data in commands(actions, b"PUBLISH", link):
            if name.removeprefix(RELAY_PREFIX) == inbox(SUBSCRIBER):
                marker = unpack_control(open_envelope(data).payload)
                assert isinstance(marker, Marker)
                found.append((link, marker))
    return found


def copies(actions: Iterable[Any], server: str, physical: bytes = C) -> list[bytes]:
    """Return what is forwarded to a server."""
    return [data for channel, data in commands(actions, b"PUBLISH", forward_link(server)) if channel == physical]
