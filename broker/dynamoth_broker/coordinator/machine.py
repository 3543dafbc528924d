"""A coordinator as a machine: its controller, with links to the servers of the cluster and a lease.

Theory of operation
-------------------
There is a link per server of the configuration, named by its id: see ``dynamoth_broker.edge_links``. The coordinator
listens at all of them to brokers and operators.

Several coordinators may run. All hear the reports, so each knows the loads, and answers operators and ``place``. Only
the one that holds the lease, at more than half of the servers, decides and acts, when it has read there what operators
have ordered (``orders``). One that loses the lease forgets what it was about to do, and keeps what it knows. Nothing
breaks when two act for a moment, as after a long pause of one: a move loses nothing, whoever asks for it. So brokers
need no fence against old orders.

Brokers do not depend on a coordinator: without one, nobody is moved, and users are sent to configured alternates.

What the coordinator decides is published for recorders, too: see ``records``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, assert_never

from dynamoth.edge.control import (
    MOVES_MAX,
    BrokerReport,
    CandidatesOffer,
    CandidatesRequest,
    EdgeMessage,
    MoveEnd,
    MovesEnded,
    MovesRequest,
    OpenBrokers,
    Stamp,
)
from dynamoth.edge.tickets import key_of_period
from dynamoth.machine import lease
from dynamoth.machine.events import (
    LinkAction,
    LinkDown,
    LinkEvent,
    LinkUp,
    Pushed,
    Replied,
    RepliedAll,
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
)
from dynamoth.plan.plan import Server
from dynamoth_broker.coordinator import events as controlling
from dynamoth_broker.coordinator import orders
from dynamoth_broker.coordinator.controller import Controller, Stage
from dynamoth_broker.coordinator.events import AskCandidates, DecisionRecorded, MoveUsers, Refused
from dynamoth_broker.coordinator.model import LoadModel
from dynamoth_broker.coordinator.newcomers import Newcomers
from dynamoth_broker.coordinator.orders import StoredOrders
from dynamoth_broker.coordinator.records import Records
from dynamoth_broker.coordinator.requests import Requests
from dynamoth_broker.coordinator.roster import Roster
from dynamoth_broker.coordinator.settings import CoordinatorOptions
from dynamoth_broker.edge_links import EdgeLinks
from dynamoth_broker.events import ControlLinkChanged, Noted

LEASE = LeaseNames(COORDINATOR_LEASE_KEY, COORDINATOR_CHANNEL, "coordinator")

TICK_S = 0.1
"""The lease is looked after this often."""

SEEN_MAX = 10_000
"""Messages that are remembered to recognise copies."""


@dataclass(slots=True)
class Stop:
    """Event: give the lease back."""


@dataclass(slots=True)
class Stopped:
    """Action: the lease was given back, as far as servers answer."""


CoordinatorEvent = LinkEvent | Stop
CoordinatorNews = ControlLinkChanged | Noted | Stopped | DecisionRecorded
"""Actions for the process."""
CoordinatorAction = LinkAction | CoordinatorNews


class CoordinatorMachine:
    """One coordinator.

    Args:
        servers: those of the configuration, at least one.
        incarnation: up to 63 bits, random, new with each start of the process.
        options: every threshold, interval and bound.

    """

    def __init__(
        self, servers: Sequence[Server], incarnation: int, options: CoordinatorOptions, ticket_secret: bytes = b""
    ) -> None:
        """Begin to wait for the lease.

        Args:
            servers: of the cluster.
            incarnation: random, and new with each start.
            options: the settings.
            ticket_secret: random and new with each start, for the keys of tickets and of hashes of sessions; empty:
                brokers give no tickets, and the hashes have no key.

        """
        self.options = options
        #: What happened, by kind, for metrics.
        self.counters: Counter[str] = Counter()
        self._timers: Timers[CoordinatorAction] = Timers()
        self._ticket_secret = ticket_secret
        ids = self._servers = [server.id for server in servers]
        self._links = EdgeLinks(
            {server.id: server.url for server in servers},
            (COORDINATOR_CHANNEL, OPERATOR_EDGE_CHANNEL),
            incarnation,
            self._timers,
            self.counters,
            SEEN_MAX,
        )
        self._lease = Lease(LEASE, ids, incarnation, options.lease_s, options.lease_s / 5)
        self._orders = StoredOrders(ids)
        self._requests = Requests(self, self._orders, self._timers, self.counters)
        self._newcomers = Newcomers(self, options)
        self._records = Records(incarnation, options, ticket_secret)
        self.controller = self._new_controller(0.0)
        self.roster = Roster(options, self.counters)
        #: Whether it has the lease, as far as the latest look at it says.
        self._has_lease = False
        #: Whether it acts: it has the lease, and knows what operators have ordered.
        self.is_leading = False
        self._is_stopping = False

    # The contract of machines.

    def handle(self, event: CoordinatorEvent, now: float) -> list[CoordinatorAction]:
        """Handle one event; return the actions to execute, in order."""
        actions = self._follow_lease(now)
        actions += self._handle(event, now)
        if self.is_leading:
            self._records.tick(self.controller.is_paused, now)
            actions += self._records.publish(id_ for id_ in self._servers if self._links.is_up(id_))
        return actions

    def deadline(self) -> float | None:
        """Return when the next timer is due."""
        return earliest(self._timers.next_at, self.controller.deadline() if self.is_leading else None)

    def _handle(self, event: CoordinatorEvent, now: float) -> list[CoordinatorAction]:
        match event:
            case Start():
                self._timers.add(now + TICK_S, self._look_after_lease)
                self._timers.add(now + self.options.report_s, self._announce)
                self._timers.add(now + orders.CHECK_S, self._check_orders)
                return [*self._links.connect()]
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
        return [*self._links.on_up(id_), *self._lease.link_up(id_, now), *self._orders.on_up(id_)]

    def _on_down(self, id_: str, reason: str) -> list[CoordinatorAction]:
        if self._links.is_up(id_):
            self._lease.link_down(id_)
            self._orders.on_down(id_)
        return [*self._links.on_down(id_, reason)]

    def _on_reply(self, id_: str, tag: Any, value: Any, now: float) -> list[CoordinatorAction]:
        part, what = tag
        if part == lease.TAG:
            actions: list[CoordinatorAction] = [*self._lease.on_reply(id_, what, value, now)]
            if self._is_stopping and not self._lease.is_releasing:
                actions.append(Stopped())
            return [*actions, *self._follow_lease(now)]
        if part == orders.TAG:
            return self._on_orders(id_, what, value, now)
        return [*self._links.on_reply(id_, what, value, now)]

    def _look_after_lease(self, now: float) -> list[CoordinatorAction]:
        self._timers.add(now + TICK_S, self._look_after_lease)
        return [*self._lease.tick(now), *self._follow_lease(now), *self._forget_silent(now)]

    def _follow_lease(self, now: float) -> list[CoordinatorAction]:
        """Begin or end to act."""
        has_lease = self._lease.is_held(now) and not self._is_stopping
        actions: list[CoordinatorAction] = []
        if has_lease != self._has_lease:
            self._has_lease = has_lease
            if has_lease:
                actions += self._orders.begin_term()
            else:
                self._orders.end_term()
        if self._orders.are_known == self.is_leading:
            return actions
        self.is_leading = self._orders.are_known
        if self.is_leading:
            self.counters["terms"] += 1
            self._records.begin_term(self.counters["terms"], now)
            self.obey()
            fields = {"paused": self.controller.is_paused, "pinned_users": len(self.controller.pinned)}
            return [*actions, Noted("this coordinator acts now", fields=fields)]
        self._begin_again(now)
        self._records.end_term()
        return [*actions, *self._requests.on_lease_lost(), Noted("this coordinator waits", self.why_waiting)]

    # What operators have ordered.

    def _check_orders(self, now: float) -> list[CoordinatorAction]:
        self._timers.add(now + orders.CHECK_S, self._check_orders)
        return [*self._orders.check()]

    def _on_orders(self, id_: str, what: tuple[str, int], value: Any, now: float) -> list[CoordinatorAction]:
        before = self._orders.problems.get(id_)
        actions: list[CoordinatorAction] = [*self._orders.on_reply(id_, what, value)]
        problem = self._orders.problems.get(id_)
        if problem not in (None, before):
            actions.append(Noted("the orders of operators cannot be read or stored", problem, {"server": id_}))
        self.obey()
        return [*actions, *self._follow_lease(now), *self._requests.on_stored()]

    def obey(self) -> None:
        """Have the controller follow the orders as far as they are known."""
        present, controller = self._orders.present, self.controller
        if (present.is_paused, present.pinned) != (controller.is_paused, controller.pinned):
            controller.obey(present.is_paused, present.pinned)

    def _new_controller(self, now: float) -> Controller:
        newcomers = self._newcomers
        return Controller(self.options, newcomers.placement, now, newcomers.reservations)

    def _begin_again(self, now: float) -> None:
        """Forget what the controller was about to do; keep what it knows."""
        former = self.controller
        self.controller = self._new_controller(now)
        self.controller.fleet = former.fleet
        self.obey()

    def _on_stop(self, now: float) -> list[CoordinatorAction]:
        self._is_stopping = True
        actions = self._follow_lease(now)
        released = self._lease.release(now)
        return [*actions, *released] if released else [*actions, Stopped()]

    @property
    def why_waiting(self) -> str:
        """Why it does not act, in words."""
        if self._is_stopping:
            return "it ends"
        if not self._has_lease:
            return f"it has not the lease of {self._lease.needed}"
        return f"it has not read the orders of operators at {self._lease.needed}"

    @property
    def others(self) -> dict[str, str]:
        """Where another coordinator holds the lease."""
        return self._lease.others()

    @property
    def faults(self) -> dict[str, str]:
        """The servers that cannot be used, and why."""
        return {**self._orders.problems, **self._lease.problems(), **self._links.faults}

    @property
    def brokers(self) -> list[str]:
        """The brokers that report."""
        return self.roster.names

    def _publish(self, channel: bytes, message: EdgeMessage) -> list[CoordinatorAction]:
        return [*self._links.publish(channel, message)]

    # Messages.

    def _on_pushes(self, id_: str, messages: Sequence[Sequence[Any]], now: float) -> list[CoordinatorAction]:
        actions: list[CoordinatorAction] = []
        for push in messages:
            match push:
                case [b"message", channel, data] if channel == COORDINATOR_CHANNEL:
                    actions += self._on_broker(data, now)
                case [b"message", channel, data] if channel == OPERATOR_EDGE_CHANNEL:
                    actions += self._requests.on_request(id_, data, now)
                case [b"subscribe", *_]:
                    actions += self._links.on_subscribed(id_)
                case _:
                    pass
        return actions

    def _on_broker(self, data: bytes, now: float) -> list[CoordinatorAction]:
        read = self._links.read(data)
        if read is None:
            return []
        stamp, message = read
        match message:
            case BrokerReport():
                return self._on_report(stamp, message, now)
            case CandidatesOffer(request, candidates):
                if self.controller.stage is Stage.ASKING:
                    self._records.on_candidates(request, candidates)
                return self._control(controlling.Answered(request, candidates), now)
            case MovesEnded(_, ends):
                actions: list[CoordinatorAction] = []
                for user, end in ends:
                    self.counters[f"moves_{end.value}"] += self.is_leading
                    self._records.on_move_ended(user, end, now)
                    actions += self._control(controlling.MoveEnded(user, end is MoveEnd.LEFT), now)
                return actions
            case _:
                self.counters["malformed"] += 1
        return []

    def _on_report(self, stamp: Stamp, report: BrokerReport, now: float) -> list[CoordinatorAction]:
        notes = self.roster.on_report(stamp, report, now)
        if notes is None:
            return []
        if self.roster.is_odd(report.broker):  # users would lose their logs there
            report = replace(report, is_admitting=False)
        return [*notes, *self._control(controlling.Reported(report), now)]

    def _forget_silent(self, now: float) -> list[CoordinatorAction]:
        actions: list[CoordinatorAction] = []
        for id_ in self.roster.forget_silent(now):
            actions.append(Noted("a broker is gone", "it has not reported for long", {"subject": id_}))
            actions += self._control(controlling.BrokerGone(id_), now)
        return actions

    def _announce(self, now: float) -> list[CoordinatorAction]:
        """Send brokers the list of those that take users."""
        self._timers.add(now + self.options.report_s, self._announce)
        if not self.is_leading:
            return []
        key = key_of_period(self._ticket_secret, now)
        return self._publish(BROKERS_CHANNEL, OpenBrokers(self._newcomers.open_urls(now), key))

    # The controller.

    def _control(self, event: controlling.ControllerEvent, now: float) -> list[CoordinatorAction]:
        actions: list[CoordinatorAction] = []
        for action in self.controller.handle(event, now):
            match action:
                case AskCandidates(request, broker, load, users_max, rest_s):
                    self._records.on_asking(request)
                    wanted = CandidatesRequest(request, load, users_max, rest_s)
                    actions += self._publish(broker_channel(broker), wanted)
                case MoveUsers(_, moves):
                    self._records.on_asked(moves, now)
                    actions += self._move_users(action)
                case DecisionRecorded(decision):
                    self.counters["decisions"] += not (decision.moved or decision.failed or decision.measured)
                    self._records.on_decision(decision, now, self._ratios(now) if decision.measured else {})
                    actions.append(action)
                case Refused(reason):
                    self.counters["events_refused"] += 1
                    actions.append(Noted("something was ignored", reason))
                case _:
                    assert_never(action)
        return actions

    def _ratios(self, now: float) -> dict[str, float]:
        return {broker.id: broker.ratio for broker in self.model(now).brokers.values()}

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
                urls = tuple((url,) if (url := self.roster.url(target)) else () for target in targets)
                request = MovesRequest(urls, tuple((user, targets.index(target)) for user, target in part))
                actions += self._publish(broker_channel(source), request)
        return actions

    # Newcomers.

    def place(self, session: str, now: float, near: tuple[float, float] | None = None) -> tuple[str, ...]:
        """Return the URLs that a newcomer tries, in order; none where no broker admits users.

        Not an event: it changes nothing but the reservations of the placement.

        Args:
            session: the newcomer.
            now: the time.
            near: its latitude and longitude in degrees; None: the least loaded broker comes first.

        """
        self.counters["placed"] += 1
        return self._newcomers.place(session, now, near)

    # For metrics and tests.

    def model(self, now: float) -> LoadModel:
        """Return the loads that decisions go by."""
        return self.controller.fleet.for_moves(now)

    def check(self) -> None:
        """Assert the invariants that hold between events."""
        self.controller.check()
        assert self.is_leading or self.controller.stage is Stage.WATCHING, "it acts without the lease"
