"""What operators ask of a broker: its state, to be drained or not to be, and to move one user."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from dynamoth.edge.control import USER_MAX, parse_user_key
from dynamoth.edge.frames import URL_MAX, URLS_MAX
from dynamoth.errors import MalformedMessage
from dynamoth.protocol.control import AdminReply, AdminRequest
from dynamoth.protocol.wire import read_array, read_text, shortened
from dynamoth_broker.edge_links import OperatorAnswers
from dynamoth_broker.events import BrokerAction, BrokerOptions, Noted

if TYPE_CHECKING:
    from dynamoth_broker.control import Control, Controlled

DRAIN_PER_S = 500.0
"""The rate of a drain for which an operator gives none."""

ALL_BROKERS = "*"
"""The target of a request to everybody."""


class BrokerRequests:
    """The requests of operators to one broker."""

    def __init__(self, broker: Controlled, control: Control, options: BrokerOptions, counters: Counter[str]) -> None:
        """Begin without requests; all arguments are those of the broker."""
        self._broker = broker
        self._control = control
        self._options = options
        self._counters = counters
        self._answers = OperatorAnswers(counters)

    def on_request(self, link: str, data: bytes, now: float) -> list[BrokerAction]:
        """Carry out a request, and answer it."""

        def execute(request: AdminRequest) -> tuple[AdminReply, list[BrokerAction]]:
            try:
                result, actions = self._execute(request, now)
            except MalformedMessage as error:
                id_ = self._options.id
                return AdminReply(request.request, {"broker": id_}, f"{id_}: {error}"), []
            return AdminReply(request.request, result), actions

        return [*self._answers.on_request(link, data, (ALL_BROKERS, self._options.id), execute)]

    def _execute(self, request: AdminRequest, now: float) -> tuple[Mapping[str, Any], list[BrokerAction]]:
        """Carry out a request. Raises MalformedMessage: it cannot be read."""
        commands: dict[str, Callable[[Mapping[str, Any], float], tuple[dict[str, Any], list[BrokerAction]]]] = {
            "status": lambda arguments, now: ({}, []),
            "drain": self._drain,
            "undrain": self._undrain,
            "move": self._move,
        }
        command = commands.get(request.command)
        if command is None:
            raise MalformedMessage(f"brokers know no command {shortened(request.command)}")
        result, actions = command(request.arguments, now)
        return {**self._status(now), **result}, actions

    def _status(self, now: float) -> dict[str, Any]:
        control, counters = self._control, self._counters
        report = control.report()
        return {
            "role": "broker",
            "broker": report.broker,
            "url": report.url,
            "sessions": report.users,
            "interests": len(self._broker.interests),
            "draining": report.is_draining,
            "admitting": report.is_admitting,
            "load_bytes_per_s": round(report.load_bytes_per_s, 1),
            "load_ratio": round(max(report.load_bytes_per_s / report.capacity_bytes_per_s, report.other_ratio_max), 4),
            "capacity_bytes_per_s": report.capacity_bytes_per_s,
            "moves_asked": counters["moves_asked"],
            "moves_done": counters["moves_done"],
            "coordinated": control.is_coordinated(now),
            "alternates": list(control.alternates(now)),
            "logs_hash": report.logs_hash,
            "history_hash": report.history_hash,
            "presence_hash": report.presence_hash,
            "unreachable": control.faults,
            "unusable_logs": self._broker.logs.unusable,
        }

    def _drain(self, arguments: Mapping[str, Any], now: float) -> tuple[dict[str, Any], list[BrokerAction]]:
        rate = arguments.get("rate", DRAIN_PER_S)
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < 1e6:
            raise MalformedMessage(f"a rate above 0 expected, not {shortened(rate)}")
        is_forced = arguments.get("force") is True
        if not self._control.alternates(now) and self._broker.sessions and not is_forced:
            raise MalformedMessage(
                "there is no other broker to move users to: no coordinator runs, and broker.alternates is not set"
            )
        fields = {"users": len(self._broker.sessions), "rate": rate, "forced": is_forced}
        noted = Noted("an operator drains this broker", fields=fields)
        return {"draining": True}, [noted, *self._broker.moves.drain(float(rate), now)]

    def _undrain(self, arguments: Mapping[str, Any], now: float) -> tuple[dict[str, Any], list[BrokerAction]]:
        self._broker.moves.end_drain()
        return {"draining": False}, [Noted("an operator lets this broker take users again")]

    def _move(self, arguments: Mapping[str, Any], now: float) -> tuple[dict[str, Any], list[BrokerAction]]:
        user = read_text(arguments.get("session"), USER_MAX)
        to = tuple(read_text(url, URL_MAX) for url in read_array(arguments.get("to"))[:URLS_MAX])
        session = self._broker.session_of(*parse_user_key(user))
        if session is None or session.leaving_channels is not None:
            return {"here": False}, []
        if not to or self._options.url in to:
            raise MalformedMessage("the session is here: another broker expected")
        noted = Noted("an operator moves a user", fields={"session": user, "to": list(to)})
        return {"here": True}, [noted, *self._broker.moves.move(session, to, now)]
