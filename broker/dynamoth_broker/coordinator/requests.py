"""What operators ask of a coordinator: status, explanations, and orders that the servers store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from dynamoth.edge.control import USER_MAX
from dynamoth.errors import MalformedMessage
from dynamoth.machine.events import Send
from dynamoth.machine.timers import Timers
from dynamoth.protocol.control import AdminReply, AdminRequest
from dynamoth.protocol.wire import read_text, shortened
from dynamoth_broker.coordinator.events import Decision
from dynamoth_broker.coordinator.orders import PINS_MAX, Orders, StoredOrders
from dynamoth_broker.edge_links import OperatorAnswers
from dynamoth_broker.events import Noted

if TYPE_CHECKING:
    from dynamoth_broker.coordinator.machine import CoordinatorAction, CoordinatorMachine

TARGETS = ("*", "coordinator")
"""The targets of requests that a coordinator obeys."""

SHOWN_MAX = 100
"""Bound of the pinned users that an explanation names."""

STORE_S_MAX = 1.5
"""An operator hears after this time that an order is not stored at enough servers."""


@dataclass(slots=True)
class _Waiting:
    """A request whose orders are being stored."""

    link: str
    request: AdminRequest


def _pin(orders: Orders, user: str) -> Orders:
    if len(orders.pinned) >= PINS_MAX and user not in orders.pinned:
        raise MalformedMessage(f"{PINS_MAX} users are pinned already: unpin some")
    return Orders(orders.number, orders.is_paused, orders.pinned | {user})


_ORDERS: dict[str, Callable[[Orders, str], Orders]] = {
    "pause": lambda orders, _: Orders(orders.number, True, orders.pinned),
    "resume": lambda orders, _: Orders(orders.number, False, orders.pinned),
    "pin": _pin,
    "unpin": lambda orders, user: Orders(orders.number, orders.is_paused, orders.pinned - {user}),
}


class Requests:
    """The requests of operators to one coordinator."""

    def __init__(
        self,
        machine: CoordinatorMachine,
        orders: StoredOrders,
        timers: Timers[CoordinatorAction],
        counters: Counter[str],
    ) -> None:
        """Begin without requests; all arguments are shared with the coordinator."""
        self._machine = machine
        self._orders = orders
        self._timers = timers
        self._answers = OperatorAnswers(counters)
        self._waiting: list[_Waiting] = []

    def on_request(self, link: str, data: bytes, now: float) -> list[CoordinatorAction]:
        """Carry out a request, and answer it; one that changes orders is answered when these are stored."""

        def execute(request: AdminRequest) -> tuple[AdminReply | None, list[CoordinatorAction]]:
            try:
                return self._execute(link, request, now)
            except MalformedMessage as error:
                return AdminReply(request.request, self.status(), f"coordinator: {error}"), []

        return [*self._answers.on_request(link, data, TARGETS, execute)]

    def _execute(
        self, link: str, request: AdminRequest, now: float
    ) -> tuple[AdminReply | None, list[CoordinatorAction]]:
        """Carry out a request. Raises MalformedMessage: it cannot be read, or not be carried out."""
        if request.command in _ORDERS:
            return self._order(link, request, now)
        if request.command not in ("status", "move", "explain"):
            raise MalformedMessage(f"a coordinator knows no command {shortened(request.command)}")
        result = {"explanation": self.explain(now)} if request.command == "explain" else {}  # brokers move
        return AdminReply(request.request, {**self.status(), **result}), []

    # Orders.

    def _order(self, link: str, request: AdminRequest, now: float) -> tuple[AdminReply | None, list[CoordinatorAction]]:
        """Change orders. Of several coordinators, only the one that acts does so; the others read what it stores."""
        is_about_user = request.command in ("pin", "unpin")
        user = read_text(request.arguments.get("session"), USER_MAX) if is_about_user else ""
        if not self._machine.is_leading:
            return AdminReply(request.request, self.status()), []
        orders = _ORDERS[request.command](self._orders.present, user)
        if orders == self._orders.present and self._orders.is_stored:
            return AdminReply(request.request, self.status()), []
        sends = self._orders.change(orders.is_paused, orders.pinned)
        self._machine.obey()
        waiting = _Waiting(link, request)
        self._waiting.append(waiting)
        self._timers.add(now + STORE_S_MAX, self._give_up, waiting)
        noted = Noted(f"an operator's order: {request.command}", fields={"user": user} if user else {})
        return None, [noted, *sends]

    def on_stored(self) -> list[Send]:
        """Answer the requests whose orders are stored at the majority of the servers."""
        if not self._waiting or not self._orders.is_stored:
            return []
        ready, self._waiting = self._waiting, []
        return [self._answers.answer(each.link, AdminReply(each.request.request, self.status())) for each in ready]

    def on_lease_lost(self) -> list[Send]:
        """Answer the requests that wait: whether their orders count is for the next coordinator to say."""
        error = "coordinator: it lost its lease meanwhile, and cannot say whether the order counts: order it again"
        waiting, self._waiting = self._waiting, []
        return [self._refuse(each, error) for each in waiting]

    def _give_up(self, waiting: _Waiting, now: float) -> Sequence[CoordinatorAction]:
        if waiting not in self._waiting:
            return []
        self._waiting.remove(waiting)
        error = (
            f"coordinator: the order is in force, but stored at {self._orders.places} only: it may be forgotten when"
            " this coordinator ends. See which servers cannot be used ('dynamoth broker status'), and order it again"
        )
        return [self._refuse(waiting, error)]

    def _refuse(self, waiting: _Waiting, error: str) -> Send:
        return self._answers.answer(waiting.link, AdminReply(waiting.request.request, self.status(), error))

    # For people.

    def status(self) -> dict[str, Any]:
        """Return what this coordinator is, as plain data."""
        machine = self._machine
        return {
            "role": "coordinator",
            "process": machine.options.process,
            "leading": machine.is_leading,
            "paused": machine.controller.is_paused,
            "pinned_users": len(machine.controller.pinned),
            "dry_run": machine.options.dry_run,
            "stage": machine.controller.stage.name.lower(),
            "brokers": machine.brokers,
            "differing": machine.roster.differing(),
            "decisions": len(machine.controller.decisions),
            "moves_asked": machine.counters["moves_asked"],
            "moves_done": machine.counters["moves_left"],
            "unreachable": machine.faults,
            "elsewhere": machine.others,
        }

    def explain(self, now: float) -> dict[str, Any]:
        """Return what the controller does now, and why, as plain data."""
        found = self._machine.controller.explain(now)
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
