"""A coordinator as a machine: its controller, with links to the servers of the cluster and a lease.

Theory of operation
-------------------
There is a link per server of the configuration, named by its id. The coordinator listens at all of them to brokers and
operators, and drops the copies of what comes twice. What it says goes through two servers that are up.

Several coordinators may run. All hear the reports, so each knows the loads, and answers operators and ``place``; all
obey ``pause`` and ``pin``. Only the one that holds the lease, at more than half of the servers, decides and acts. One
that loses the lease forgets what it was about to do, and keeps what it knows. Nothing breaks when two act for a moment,
as after a long pause of one: a move loses nothing, whoever asks for it. So brokers need no fence against old orders.

Brokers do not depend on a coordinator: without one, nobody is moved, and users are sent to configured alternates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, assert_never

from dynamoth.edge.control import (
    MOVES_MAX,
    USER_MAX,
    BrokerReport,
    CandidatesOffer,
    CandidatesRequest,
    EdgeMessage,
    MoveEnd,
    MovesEnded,
    MovesRequest,
    OpenBrokers,
    Stamp,
    pack_edge,
    unpack_edge,
)
from dynamoth.edge.frames import URLS_MAX
from dynamoth.errors import MalformedMessage
from dynamoth.machine import lease
from dynamoth.machine.bounded import ENTRY_BYTES, BoundedTable
from dynamoth.machine.events import (
    Connect,
    ErrorReply,
    LinkAction,
    LinkDown,
    LinkEvent,
    LinkUp,
    Pushed,
    Replied,
    RepliedAll,
    Send,
    Start,
    Tick,
    earliest,
)
from dynamoth.machine.lease import Lease, LeaseNames
from dynamoth.machine.timers import Timers
from dynamoth.names import (
    BROKERS_CHANNEL,
    COORDINATOR_CHANNEL,
    COORDINATOR_LEASE_KEY,
    OPERATOR_EDGE_CHANNEL,
    broker_channel,
    operator_inbox,
)
from dynamoth.plan.plan import Server
from dynamoth.protocol.control import AdminReply, AdminRequest, pack_control, unpack_control
from dynamoth.protocol.wire import read_text, shortened
from dynamoth_broker.coordinator import events as controlling
from dynamoth_broker.coordinator.controller import Controller, Stage
from dynamoth_broker.coordinator.events import AskCandidates, Decision, DecisionRecorded, MoveUsers, Refused
from dynamoth_broker.coordinator.model import LoadModel, Standing
from dynamoth_broker.coordinator.placement import Newcomer, Reservations, ReservingPlacement
from dynamoth_broker.coordinator.settings import CoordinatorSettings

LEASE = LeaseNames(COORDINATOR_LEASE_KEY, COORDINATOR_CHANNEL, "coordinator")

TICK_S = 0.1
"""The lease is looked after this often."""

COPIES = 2
"""A message travels through this many servers."""

SEEN_MAX = 10_000
"""Messages that are remembered to recognise copies, and answers to operators."""

ANSWERED_BYTES_MAX = 1024 * 1024
"""Bound of the answers to operators that are remembered."""

BROKERS_MAX = 1000
"""Bound of the brokers whose reports are heard: each costs up to 200 KB, with what their reports name."""

SHOWN_MAX = 100
"""Bound of the pinned users that an explanation names."""

TARGETS = ("*", "coordinator")
"""The targets of operators' requests that a coordinator obeys."""


@dataclass(frozen=True, kw_only=True)
class CoordinatorOptions(CoordinatorSettings):
    """Options of a coordinator."""

    lease_s: float = 2.5
    forget_s: float = 30.0
    #: Which process this is, for people.
    process: str = ""


@dataclass(slots=True)
class ServerChanged:
    """Action: a server can be reached (``reason`` None), or not. For the log of the process."""

    server: str
    reason: str | None


@dataclass(slots=True)
class Noted:
    """Action: something for the log of the process."""

    message: str
    cause: str = ""
    fields: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(slots=True)
class Stop:
    """Event: give the lease back."""


@dataclass(slots=True)
class Stopped:
    """Action: the lease was given back, as far as servers answer."""


CoordinatorEvent = LinkEvent | Stop
CoordinatorNews = ServerChanged | Noted | Stopped | DecisionRecorded
"""Actions for the process."""
CoordinatorAction = LinkAction | CoordinatorNews


@dataclass(slots=True)
class _Server:
    """One server of the cluster."""

    url: str
    is_up: bool = False
    #: Why it cannot be used; empty while all is well.
    fault: str = "it was not reached yet"


@dataclass(slots=True)
class _Broker:
    """What is known of a broker besides its loads."""

    url: str
    incarnation: int
    number: int
    heard_at: float
    #: The incarnation that reported before; None where there was one only.
    former: int | None = None
    #: Whether two processes report in turns under this name.
    is_ambiguous: bool = False


class CoordinatorMachine:
    """One coordinator.

    Args:
        servers: those of the configuration, at least one.
        incarnation: up to 63 bits, random, new with each start of the process.
        options: every threshold, interval and bound.

    """

    def __init__(self, servers: Sequence[Server], incarnation: int, options: CoordinatorOptions) -> None:
        self.options = options
        self._incarnation = incarnation
        self._servers = {server.id: _Server(server.url) for server in servers}
        self._lease = Lease(LEASE, list(self._servers), incarnation, options.lease_s, options.lease_s / 5)
        self._reservations = Reservations(options.appear_s)
        self._placement = ReservingPlacement(self._reservations)
        self.controller = Controller(options, self._placement, 0.0, self._reservations)
        self._timers: Timers[CoordinatorAction] = Timers()
        self._brokers: dict[str, _Broker] = {}
        self._number = 0
        self._seen: BoundedTable[Stamp, bool] = BoundedTable(SEEN_MAX, SEEN_MAX, lambda key, value: 1)
        self._answered: BoundedTable[int, bytes] = BoundedTable(
            SEEN_MAX, ANSWERED_BYTES_MAX, lambda key, value: len(value) + ENTRY_BYTES
        )
        #: Whether it acts, as far as the latest look at the lease says.
        self.is_leading = False
        self._is_stopping = False
        #: What happened, by kind, for metrics.
        self.counters: Counter[str] = Counter()

    # The contract of machines.

    def handle(self, event: CoordinatorEvent, now: float) -> list[CoordinatorAction]:
        """Handle one event; return the actions to execute, in order."""
        actions = self._follow_lease(now)
        actions += self._handle(event, now)
        return actions

    def deadline(self) -> float | None:
        """Return when the next timer is due."""
        return earliest(self._timers.next_at, self.controller.deadline() if self.is_leading else None)

    def _handle(self, event: CoordinatorEvent, now: float) -> list[CoordinatorAction]:
        match event:
            case Start():
                self._timers.add(now + TICK_S, self._look_after_lease)
                self._timers.add(now + self.options.report_s, self._announce)
                return [Connect(id_, server.url) for id_, server in self._servers.items()]
            case Tick():
                actions = self._timers.run_due(now)
                if self.is_leading and now >= self.controller.deadline():
                    actions += self._control(controlling.Tick(), now)
                return actions
            case LinkUp(link):
                return self._on_up(link, now)
            case LinkDown(link, reason):
                return self._on_down(link, reason)
            case Replied(link, tag, value):
                return self._on_reply(link, tag, value, now)
            case Pushed(link, messages):
                return self._on_pushes(link, messages, now)
            case RepliedAll():
                return []  # nothing is sent together
            case Stop():
                return self._on_stop(now)
            case _:
                assert_never(event)

    # Links and lease.

    def _on_up(self, id_: str, now: float) -> list[CoordinatorAction]:
        server = self._servers[id_]
        server.is_up, server.fault = True, ""
        channels = COORDINATOR_CHANNEL, OPERATOR_EDGE_CHANNEL
        return [
            ServerChanged(id_, None),
            Send(id_, (b"SUBSCRIBE", *channels), "subscribe"),
            *self._lease.link_up(id_, now),
        ]

    def _on_down(self, id_: str, reason: str) -> list[CoordinatorAction]:
        server = self._servers[id_]
        if server.is_up:
            self._lease.link_down(id_)
        server.is_up = False
        if server.fault == reason:
            return []
        server.fault = reason
        return [ServerChanged(id_, reason)]

    def _on_reply(self, id_: str, tag: Any, value: Any, now: float) -> list[CoordinatorAction]:
        if tag[0] == lease.TAG:
            actions: list[CoordinatorAction] = [*self._lease.on_reply(id_, tag[1], value, now)]
            if self._is_stopping and not self._lease.is_releasing:
                actions.append(Stopped())
            return [*actions, *self._follow_lease(now)]
        if isinstance(value, ErrorReply):
            self.counters["refused"] += 1
            server, reason = self._servers[id_], str(value)
            if server.fault != reason:
                server.fault = reason
                return [ServerChanged(id_, reason)]
        return []

    def _look_after_lease(self, now: float) -> list[CoordinatorAction]:
        self._timers.add(now + TICK_S, self._look_after_lease)
        return [*self._lease.tick(now), *self._follow_lease(now), *self._forget_silent(now)]

    def _follow_lease(self, now: float) -> list[CoordinatorAction]:
        """Begin or end to act."""
        is_held = self._lease.is_held(now) and not self._is_stopping
        if is_held == self.is_leading:
            return []
        self.is_leading = is_held
        if is_held:
            self.counters["terms"] += 1
            return [Noted("this coordinator acts now")]
        self._begin_again(now)
        return [Noted("this coordinator waits", f"it has not the lease of {self._lease.needed}")]

    def _begin_again(self, now: float) -> None:
        """Forget what the controller was about to do; keep what it knows."""
        former = self.controller
        self.controller = Controller(self.options, self._placement, now, self._reservations)
        self.controller.fleet = former.fleet
        self.controller.pinned = former.pinned
        self.controller.is_paused = former.is_paused

    def _on_stop(self, now: float) -> list[CoordinatorAction]:
        self._is_stopping = True
        self.is_leading = False
        released = self._lease.release(now)
        return [*released] if released else [Stopped()]

    @property
    def needed(self) -> str:
        """At how many servers the lease is needed, in words."""
        return self._lease.needed

    @property
    def others(self) -> dict[str, str]:
        """Where another coordinator holds the lease."""
        return self._lease.others()

    @property
    def faults(self) -> dict[str, str]:
        """The servers that cannot be used, and why."""
        refused = self._lease.problems()
        return {id_: fault for id_, server in self._servers.items() if (fault := server.fault or refused.get(id_, ""))}

    @property
    def brokers(self) -> list[str]:
        """The brokers that report."""
        return sorted(self._brokers)

    def _publish(self, channel: bytes, message: EdgeMessage) -> list[CoordinatorAction]:
        """Send through two servers that are up."""
        up = [id_ for id_, server in self._servers.items() if server.is_up]
        if not up:
            return []
        self._number += 1
        data = pack_edge(Stamp(self._incarnation, self._number), message)
        chosen = {up[(self._number + copy) % len(up)] for copy in range(COPIES)}
        return [Send(id_, (b"PUBLISH", channel, data), ("publish", None)) for id_ in sorted(chosen)]

    # Messages.

    def _on_pushes(self, id_: str, messages: Sequence[Sequence[Any]], now: float) -> list[CoordinatorAction]:
        actions: list[CoordinatorAction] = []
        for push in messages:
            match push:
                case [b"message", channel, data] if channel == COORDINATOR_CHANNEL:
                    actions += self._on_broker(data, now)
                case [b"message", channel, data] if channel == OPERATOR_EDGE_CHANNEL:
                    actions += self._on_operator(id_, data, now)
                case _:
                    pass
        return actions

    def _on_broker(self, data: bytes, now: float) -> list[CoordinatorAction]:
        try:
            stamp, message = unpack_edge(data)
        except MalformedMessage:
            self.counters["malformed"] += 1
            return []
        if stamp in self._seen:
            return []
        self._seen.put(stamp, True)
        match message:
            case BrokerReport():
                return self._on_report(stamp, message, now)
            case CandidatesOffer(request, candidates):
                return self._control(controlling.Answered(request, candidates), now)
            case MovesEnded(_, ends):
                actions: list[CoordinatorAction] = []
                for user, end in ends:
                    self.counters[f"moves_{end.value}"] += self.is_leading
                    actions += self._control(controlling.MoveEnded(user, end is MoveEnd.LEFT), now)
                return actions
            case _:
                self.counters["malformed"] += 1
        return []

    def _on_report(self, stamp: Stamp, report: BrokerReport, now: float) -> list[CoordinatorAction]:
        known = self._brokers.get(report.broker)
        if known is not None and known.incarnation == stamp.incarnation and stamp.number < known.number:
            return []
        if known is None and len(self._brokers) >= BROKERS_MAX:
            self.counters["events_refused"] += 1
            return []
        self.counters["reports"] += 1
        present = self._brokers[report.broker] = _Broker(report.url, stamp.incarnation, stamp.number, now)
        fields = {"subject": report.broker, "url": report.url}
        notes: list[CoordinatorAction] = []
        if known is None:
            notes.append(Noted("a broker has begun to report", fields=fields))
        elif known.incarnation == stamp.incarnation:
            present.former, present.is_ambiguous = known.former, known.is_ambiguous
        else:
            self.counters["broker_restarts"] += 1
            present.former = known.incarnation
            present.is_ambiguous = known.former == stamp.incarnation
            if not present.is_ambiguous:
                notes.append(Noted("a broker was restarted", fields=fields))
            elif not known.is_ambiguous:
                why = "two processes report in turns: give each broker an id of its own"
                notes.append(Noted("the name of a broker is ambiguous", why, fields))
        return [*notes, *self._control(controlling.Reported(report), now)]

    def _forget_silent(self, now: float) -> list[CoordinatorAction]:
        actions: list[CoordinatorAction] = []
        for id_ in [id_ for id_, each in self._brokers.items() if now - each.heard_at > self.options.forget_s]:
            del self._brokers[id_]
            actions.append(Noted("a broker is gone", "it has not reported for long", {"subject": id_}))
            actions += self._control(controlling.BrokerGone(id_), now)
        return actions

    def _announce(self, now: float) -> list[CoordinatorAction]:
        """Tell brokers where users can go."""
        self._timers.add(now + self.options.report_s, self._announce)
        return self._publish(BROKERS_CHANNEL, OpenBrokers(self._open_urls(now))) if self.is_leading else []

    # The controller.

    def _control(self, event: controlling.ControllerEvent, now: float) -> list[CoordinatorAction]:
        actions: list[CoordinatorAction] = []
        for action in self.controller.handle(event, now):
            match action:
                case AskCandidates(request, broker, load, users_max, rest_s):
                    wanted = CandidatesRequest(request, load, users_max, rest_s)
                    actions += self._publish(broker_channel(broker), wanted)
                case MoveUsers():
                    actions += self._move_users(action)
                case DecisionRecorded(decision):
                    self.counters["decisions"] += not (decision.moved or decision.failed or decision.measured)
                    actions.append(action)
                case Refused(reason):
                    self.counters["events_refused"] += 1
                    actions.append(Noted("something was ignored", reason))
                case _:
                    assert_never(action)
        return actions

    def _move_users(self, action: MoveUsers) -> list[CoordinatorAction]:
        by_source: dict[str, list[tuple[str, str]]] = {}
        for move in action.moves:
            by_source.setdefault(move.source, []).append((move.user, move.target))
        self.counters["moves_asked"] += len(action.moves)
        actions: list[CoordinatorAction] = []
        for source, moves in by_source.items():
            for begin in range(0, len(moves), MOVES_MAX):
                part = moves[begin : begin + MOVES_MAX]
                targets = list(dict.fromkeys(target for _, target in part))
                urls = tuple((self._brokers[target].url,) if target in self._brokers else () for target in targets)
                request = MovesRequest(urls, tuple((user, targets.index(target)) for user, target in part))
                actions += self._publish(broker_channel(source), request)
        return actions

    # Newcomers.

    def _open_urls(self, now: float, first: str | None = None) -> tuple[str, ...]:
        """Return the URLs of the brokers that admit users: ``first``, and then the least loaded ones."""
        model = self.controller.fleet.for_placement(now)
        admitting = [each for each in model.brokers.values() if each.standing is Standing.OPEN]
        ranked = sorted(admitting, key=lambda each: (each.id != first, each.ratio, each.id))
        urls = [known.url for each in ranked if (known := self._brokers.get(each.id)) is not None and known.url]
        return tuple(urls[:URLS_MAX])

    def place(self, session: str, now: float) -> tuple[str, ...]:
        """Return the URLs that a newcomer tries, in order; none where no broker admits users.

        Not an event: it changes nothing but the reservations of the placement.
        """
        self.counters["placed"] += 1
        return self._open_urls(now, self.controller.place(Newcomer(id=session), now))

    # Operators.

    def _on_operator(self, id_: str, data: bytes, now: float) -> list[CoordinatorAction]:
        try:
            request = unpack_control(data)
        except MalformedMessage:
            self.counters["malformed"] += 1
            return []
        if not isinstance(request, AdminRequest) or request.arguments.get("target") not in TARGETS:
            return []
        actions: list[CoordinatorAction] = []
        answer = self._answered.get(request.request)
        if answer is None:
            try:
                result, actions = self._execute(request, now)
                reply = AdminReply(request.request, {**self._status(), **result})
            except MalformedMessage as error:
                reply = AdminReply(request.request, self._status(), f"coordinator: {error}")
            answer = pack_control(reply)
            self._answered.put(request.request, answer)
        return [*actions, Send(id_, (b"PUBLISH", operator_inbox(request.request), answer), ("publish", None))]

    def _execute(self, request: AdminRequest, now: float) -> tuple[dict[str, Any], list[CoordinatorAction]]:
        """Carry out a request. Raises MalformedMessage: it cannot be read."""
        wanted: dict[str, Callable[[Mapping[str, Any]], controlling.ControllerEvent]] = {
            "pause": lambda _: controlling.Pause(),
            "resume": lambda _: controlling.Resume(),
            "pin": lambda arguments: controlling.Pin(read_text(arguments.get("session"), USER_MAX)),
            "unpin": lambda arguments: controlling.Unpin(read_text(arguments.get("session"), USER_MAX)),
        }
        if request.command in ("status", "move"):  # brokers move
            return {}, []
        if request.command == "explain":
            return {"explanation": self.explain(now)}, []
        make = wanted.get(request.command)
        if make is None:
            raise MalformedMessage(f"a coordinator knows no command {shortened(request.command)}")
        actions = self._control(make(request.arguments), now)
        return self._status(), actions

    def _status(self) -> dict[str, Any]:
        return {
            "role": "coordinator",
            "process": self.options.process,
            "leading": self.is_leading,
            "paused": self.controller.is_paused,
            "dry_run": self.options.dry_run,
            "stage": self.controller.stage.name.lower(),
            "brokers": self.brokers,
            "decisions": len(self.controller.decisions),
            "moves_asked": self.counters["moves_asked"],
            "moves_done": self.counters["moves_left"],
            "unreachable": self.faults,
            "elsewhere": self.others,
        }

    def explain(self, now: float) -> dict[str, Any]:
        """Return what the controller does now, and why, as plain data."""
        found = self.controller.explain(now)
        return {
            "stage": found.stage.lower(),
            "loads": asdict(found.loads),
            "brokers": {
                id_: {"load_ratio": ratio, "standing": standing.lower()}
                for id_, (ratio, standing) in found.brokers.items()
            },
            "due": found.due,
            "looks": found.looks,
            "obstacles": list(found.obstacles),
            "suspects": list(found.suspects),
            "pinned": list(found.pinned[:SHOWN_MAX]),
            "pinned_users": len(found.pinned),
            "in_flight": found.in_flight,
            "latest": None if found.latest is None else decision_as_data(found.latest),
        }

    # For metrics and tests.

    def model(self, now: float) -> LoadModel:
        """Return the loads that decisions go by."""
        return self.controller.fleet.for_moves(now)

    def check(self) -> None:
        """Assert the invariants that hold between events."""
        self.controller.check()
        assert self.is_leading or self.controller.stage is Stage.WATCHING, "it acts without the lease"


def decision_as_data(decision: Decision) -> dict[str, Any]:
    """Return a decision as JSON and msgpack can have it. Users are counted by source and target, not named."""
    moves = Counter((move.source, move.target) for move in decision.plan.moves)
    return {
        "number": decision.number,
        "kind": decision.kind.value,
        "reason": decision.reason,
        "outcome": decision.plan.outcome.value,
        "dry_run": decision.is_dry_run,
        "moves": [{"from": source, "to": target, "users": users} for (source, target), users in sorted(moves.items())],
        "moved": decision.moved,
        "failed": decision.failed,
        "before": asdict(decision.plan.before),
        "predicted": asdict(decision.plan.after),
        "measured": None if decision.measured is None else asdict(decision.measured),
    }
