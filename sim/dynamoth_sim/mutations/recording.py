"""Mutations for the scenario of a recorder. See ``mutations``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import dynamoth_recorder.machine
from dynamoth.machine.events import Send
from dynamoth.names import RECORD_CHANNEL, RECORDER_FAILING_CHANNEL
from dynamoth.protocol.reports import Report
from dynamoth.recording import GapKind
from dynamoth_recorder.events import Rows
from dynamoth_recorder.machine import RecorderMachine
from dynamoth_sim.mutations.mutation import Check, no_actions, replaced


def _changed(name: str, change: Callable[[Any], Any]) -> AbstractContextManager[None]:
    """Change the actions that a method of a recorder returns; None leaves one out."""
    method = getattr(RecorderMachine, name)

    def changed(self: RecorderMachine, *arguments: Any) -> list[Any]:
        return [new for action in method(self, *arguments) if (new := change(action)) is not None]

    return replaced(RecorderMachine, **{name: changed})


def _without_gap(name: str, kind: GapKind) -> AbstractContextManager[None]:
    return _changed(
        name, lambda action: None if isinstance(action, Rows) and action.same.get("kind") == kind else action
    )


def copies_are_recorded() -> AbstractContextManager[None]:
    """A recorder takes what a balancer says at another server for something new."""

    def always(*_: Any) -> bool:
        return True

    return replaced(RecorderMachine, _is_new=always)


def one_server_is_enough() -> AbstractContextManager[None]:
    """A recorder listens to balancers at one server only."""
    on_pushes = RecorderMachine._on_pushes  # pyright: ignore[reportPrivateUsage]

    def listen(self: RecorderMachine, id_: str, messages: Any, now: float) -> list[Any]:
        kept = messages if id_ == "s2" else [each for each in messages if each[1] != RECORD_CHANNEL]
        return on_pushes(self, id_, kept, now)

    return replaced(RecorderMachine, _on_pushes=listen)


def missing_reports_are_not_noted() -> AbstractContextManager[None]:
    """A recorder does not look at the numbers of reports."""
    return _without_gap("_on_report", GapKind.REPORT_MISSING)


def counted_as_balancer() -> AbstractContextManager[None]:
    """A recorder subscribes to the reports by their channel's name, as balancers do."""

    def by_name(action: Any) -> Any:
        is_pattern = isinstance(action, Send) and action.args[0] == b"PSUBSCRIBE"
        return replace(action, args=(b"SUBSCRIBE", *action.args[1:])) if is_pattern else action

    return _changed("_subscribe", by_name)


def absences_are_not_noted() -> AbstractContextManager[None]:
    """A recorder that was away from a server does not say so."""
    return _without_gap("_on_subscribed", GapKind.RECORDER_AWAY)


def away_since_it_is_known() -> AbstractContextManager[None]:
    """A recorder takes the time at which it learns that a connection was lost for the time of the loss."""
    lose = RecorderMachine._lose  # pyright: ignore[reportPrivateUsage]

    def forget(self: RecorderMachine, id_: str, now: float) -> list[Any]:
        watched = self._servers[id_]  # pyright: ignore[reportPrivateUsage]
        watched.away_since = now if watched.away_since is None else watched.away_since
        return lose(self, id_, now)

    return replaced(RecorderMachine, _lose=forget)


def away_since_it_was_read() -> AbstractContextManager[None]:
    """A recorder that stood still takes the time at which it reads on for the time of what it reads."""
    lose = RecorderMachine._lose  # pyright: ignore[reportPrivateUsage]

    def forget(self: RecorderMachine, id_: str, now: float) -> list[Any]:
        watched = self._servers[id_]  # pyright: ignore[reportPrivateUsage]
        watched.away_since = watched.heard_at if watched.away_since is None else watched.away_since
        return lose(self, id_, now)

    return replaced(RecorderMachine, _lose=forget)


def never_late() -> AbstractContextManager[None]:
    """A recorder that stood still does not say that it was late."""
    return replaced(dynamoth_recorder.machine, LATE_S_MIN=float("inf"))


def dated_by_arrival() -> AbstractContextManager[None]:
    """A recorder that stood still takes the time at which it reads on for that of all reports which it then reads."""
    return replaced(dynamoth_recorder.machine, LATE_INTERVALS=float("inf"))


def blind_times_are_late() -> AbstractContextManager[None]:
    """A recorder takes the time in which an agent was blind for a time that its report waited."""
    end_of = dynamoth_recorder.machine._end_of  # pyright: ignore[reportPrivateUsage]

    def end(report: Report, latest: Any, now: float) -> float:
        return end_of(replace(report, blind_s=0.0), latest, now)

    return replaced(dynamoth_recorder.machine, _end_of=end)


def successors_leave_no_gap() -> AbstractContextManager[None]:
    """A recorder does not note the time between an agent and the next one."""
    return _without_gap("_on_report", GapKind.AGENT_RESTARTED)


def refusals_are_forgotten() -> AbstractContextManager[None]:
    """A recorder that asks again takes the refusal for past before there is an answer."""
    subscribe = RecorderMachine._subscribe  # pyright: ignore[reportPrivateUsage]

    def forget(self: RecorderMachine, id_: str) -> list[Any]:
        self._servers[id_].refusals.clear()  # pyright: ignore[reportPrivateUsage]
        return subscribe(self, id_)

    return replaced(RecorderMachine, _subscribe=forget)


def half_is_enough() -> AbstractContextManager[None]:
    """A recorder listens, in its own view, if a server refuses it only the reports."""
    return replaced(dynamoth_recorder.machine, _LISTENING=frozenset[bytes]())


def lost_probes_are_forgotten() -> AbstractContextManager[None]:
    """A recorder forgets the probes on a connection that it has lost."""
    return replaced(RecorderMachine, _give_up_probes=no_actions)


def failing_is_said_once() -> AbstractContextManager[None]:
    """A recorder that cannot write does not show it over new connections."""
    return _changed(
        "_subscribe",
        lambda action: None if isinstance(action, Send) and RECORDER_FAILING_CHANNEL in action.args else action,
    )


CHECKS: tuple[Check, ...] = tuple(
    Check("72-recorded", mutation, "expected")
    for mutation in (
        copies_are_recorded,
        one_server_is_enough,
        missing_reports_are_not_noted,
        counted_as_balancer,
        absences_are_not_noted,
        away_since_it_is_known,
        away_since_it_was_read,
        never_late,
        dated_by_arrival,
        blind_times_are_late,
        successors_leave_no_gap,
        refusals_are_forgotten,
        half_is_enough,
        lost_probes_are_forgotten,
        failing_is_said_once,
    )
)
