"""A server that answers a load analyzer, without a network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from dynamoth.machine.events import ErrorReply, LinkDown, LinkUp, Pushed, Replied, Send, Tick
from dynamoth.names import ANNOUNCE_CHANNEL, BALANCER_CHANNEL
from dynamoth.protocol.control import Announcement, pack_control
from dynamoth.protocol.envelope import seal
from dynamoth.protocol.reports import ChannelLoad, Report, unpack_report
from dynamoth_lla.machine import LoadAnalyzer
from dynamoth_lla.options import LoadAnalyzerOptions
from dynamoth_sim.world.invariants import Checker

OUTGOING_BYTES_PER_S_MAX = 1_000_000


def push(channel: bytes, data: bytes) -> list[Any]:
    return [b"pmessage", b"*", channel, data]


def publication(publisher: int, sequence: int = 1, payload: bytes = b"payload!", flags: int = 0) -> bytes:
    return seal(publisher, sequence, 0, payload, flags)


class FakeServer:
    """Holds what INFO and NUMSUB answer; ``refused`` are the commands (first word) that it answers with an error."""

    def __init__(self) -> None:
        self.output_bytes = 0
        self.input_bytes = 0
        self.cpu_s = 0.0
        self.subscribers: Counter[bytes] = Counter()
        self.more_fields = "maxclients:10000\r\nconnected_clients:7\r\nused_memory:1000\r\nmaxmemory:0\r\n"
        self.channels_elsewhere = 0
        #: Who hears a report: the balancer, and the agent itself.
        self.hearers = 2
        self.refused: set[bytes] = set()

    def answer(self, args: tuple[Any, ...]) -> Any:
        if args[0] in self.refused:
            return ErrorReply("NOPERM this user has no permissions")
        match args:
            case (b"INFO", b"stats"):
                channels = len(self.subscribers) + self.channels_elsewhere
                return (
                    f"# Stats\r\ntotal_net_output_bytes:{self.output_bytes}\r\n"
                    f"total_net_input_bytes:{self.input_bytes}\r\npubsub_channels:{channels}\r\n"
                ).encode()
            case (b"INFO", b"cpu"):
                return f"# CPU\r\nused_cpu_sys:{self.cpu_s}\r\nused_cpu_user:0.0\r\n".encode()
            case (b"INFO", _):
                return self.more_fields.encode()
            case (b"PUBSUB", b"NUMSUB", *names):
                return [part for name in names for part in (name, self.subscribers[name])]
            case (b"PUBSUB", b"CHANNELS"):
                return list(self.subscribers)
            case (b"PUBLISH", _, _):
                return self.hearers
            case _:
                raise AssertionError(f"not a command that an analyzer sends: {args!r}")


class Bench:
    """Drives one analyzer with a clock of its own. ``reports`` are those that it has sent."""

    def __init__(self, server: FakeServer | None = None, **options: Any) -> None:
        self.server = server or FakeServer()
        self.analyzer = LoadAnalyzer(
            "s1", 11, LoadAnalyzerOptions(outgoing_bytes_per_s_max=OUTGOING_BYTES_PER_S_MAX, **options)
        )
        self._checker = Checker(self.analyzer, every=1)
        self.now = 100.0
        #: Commands that were not answered yet.
        self.unanswered: list[Send] = []
        self.sent: list[tuple[Any, ...]] = []
        self.other_actions: list[Any] = []
        self.reports: list[Report] = []

    def tell(self, event: Any) -> None:
        actions = self.analyzer.handle(event, self.now)
        self._checker.after(event)
        for action in actions:
            if not isinstance(action, Send):
                self.other_actions.append(action)
                continue
            assert action.link == "local"
            assert action.tag[0] == "lla"
            self.unanswered.append(action)
            self.sent.append(tuple(action.args))
            if action.args[0] == b"PUBLISH":
                _, channel, data = action.args
                assert channel == BALANCER_CHANNEL and isinstance(data, bytes)
                self.reports.append(unpack_report(data))

    def answer_all(self) -> None:
        """Answer everything, and go on with the analyzer's work, until it is at rest."""
        while self.unanswered or self.is_busy:
            if self.unanswered:
                self.answer_one()
            else:
                self.tell(Tick())

    def answer_one(self) -> None:
        command = self.unanswered.pop(0)
        self.tell(Replied("local", command.tag, self.server.answer(tuple(command.args))))

    @property
    def is_busy(self) -> bool:
        deadline = self.analyzer.deadline()
        return deadline is not None and deadline <= self.now

    def up(self, run_id: str | None = "run1") -> None:
        self.tell(LinkUp("local", run_id))
        self.answer_all()

    def down(self) -> None:
        self.unanswered.clear()
        self.tell(LinkDown("local", "lost"))

    def observe(self, *messages: list[Any]) -> None:
        self.tell(Pushed("local", messages))

    def announce(self, client: int, joined: Iterable[bytes] = (), left: Iterable[bytes] = ()) -> None:
        self.observe(push(ANNOUNCE_CHANNEL, pack_control(Announcement(client, 1, tuple(joined), tuple(left)))))

    def next_deadline(self) -> None:
        deadline = self.analyzer.deadline()
        assert deadline is not None and deadline > self.now
        self.now = deadline

    def next_report(self) -> Report:
        """Let the interval end and the server answer at once."""
        self.next_deadline()
        count = len(self.reports)
        self.tell(Tick())
        self.answer_all()
        assert len(self.reports) == count + 1
        return self.reports[-1]


def rows(report: Report) -> dict[bytes, ChannelLoad]:
    return {row.channel: row for row in report.columns.rows()}
