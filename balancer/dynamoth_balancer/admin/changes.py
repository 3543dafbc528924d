"""Carries out the changes of administrators: turns a request into an assignment, and says how far the change is.

A request names a channel and its new mode or place. Where it does not name the servers, they are chosen here: the least
loaded ones, and those that the channel has before others, as its clients are connected there. A refusal names cause and
cure.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from dynamoth.errors import RequestRefused
from dynamoth.names import in_quotes, is_user_channel, logical_channel
from dynamoth.plan.administration import PINS_MAX
from dynamoth.plan.plan import Assignment, Entry, Mode, Phase, single
from dynamoth.plan.slots import is_slot
from dynamoth.protocol.wire import shortened
from dynamoth_balancer.events import InnerAction
from dynamoth_balancer.install.installer import Installer

REPLICAS_MIN = 2
"""A replica set of one would be a single server by another name."""

PROBLEMS_NAMED_MAX = 5
"""Most servers whose problems an answer lists."""

MODES: Mapping[str, Mode] = MappingProxyType({mode.name.lower().replace("_", "-"): mode for mode in Mode})
"""The names of modes in requests and for people."""

ALREADY_THERE = "it was there already"
"""The note of a change that changed nothing."""

_ARGUMENTS = {
    "move": "channel (bytes) and to (the id of a server, text)",
    "replicate": "channel (bytes), mode (text), and either servers (a list of ids) or count (how many)",
    "unreplicate": "channel (bytes), and optionally to (the id of a server, text)",
    "pin": "channel (bytes) and to (the id of a server, text)",
}

_NAMES = {mode: name for name, mode in MODES.items()}
_REPLICATED = ", ".join(name for name, mode in MODES.items() if mode is not Mode.SINGLE)


def mode_name(mode: Mode) -> str:
    """Return what a mode is called in requests, and wherever people read it."""
    return _NAMES[mode]


class ChangeState(enum.Enum):
    """How far a change has come."""

    UNSETTLED = "unsettled"
    SETTLED = "settled"
    SUPERSEDED = "superseded"
    """A later change of the channel has replaced it."""


@dataclass(frozen=True, slots=True)
class BegunChange:
    """A change that an administrator waits for."""

    channel: bytes
    before: Assignment
    after: Assignment
    epoch: int
    #: How the request was understood, for the administrator; empty for nothing.
    note: str = ""


LoadRatio = Callable[[str, float], float | None]
"""Returns the estimated load ratio of a server at a time, None where it is not known."""

CarryOut = Callable[[Mapping[bytes, Assignment], str, float], list[InnerAction]]
"""Begins the transition of channels, for a reason, at a time; returns the actions to execute. Raises RequestRefused."""


Hold = Callable[[bytes, Assignment], None]
"""Makes the balancer leave a channel as it has been replicated."""


class Changes:
    """Begins the changes of administrators: ``move``, ``replicate``, ``unreplicate`` and ``pin``."""

    def __init__(self, load_ratio: LoadRatio, carry_out: CarryOut, hold: Hold) -> None:
        self._load_ratio = load_ratio
        self._carry_out = carry_out
        self._hold = hold
        self._resolve = {
            "move": self._move,
            "replicate": self._replicate,
            "unreplicate": self._unreplicate,
            "pin": self._pin,
        }

    def begin(
        self, installer: Installer, command: str, arguments: Mapping[str, Any], now: float
    ) -> tuple[BegunChange, list[InnerAction]]:
        """Begin a change; return also the actions to execute.

        A request for the same change as one under way joins it. A change to where the channel is has settled.

        Raises:
            RequestRefused: the arguments make no sense, or it cannot be done now.

        """
        channel = arguments.get("channel")
        if not isinstance(channel, bytes):
            raise _nonsense(command)
        if not channel:
            raise RequestRefused("the name of the channel is empty: name one")
        is_application = is_user_channel(channel) and logical_channel(channel) == channel
        if not is_application and not (is_slot(channel) and command == "move"):
            raise RequestRefused(
                f"channel {in_quotes(channel)} is not an application's: it cannot be moved or replicated"
            )
        entry = installer.plan.entry(channel)
        if entry.phase is not Phase.SETTLED and installer.plan.slot_above(channel) is not None:
            raise RequestRefused(
                f"the slot of channel {in_quotes(channel)} is in transition; wait until it has settled"
            )
        route, before, actions = entry.route, entry.route.assignment, list[InnerAction]()
        after, note = self._resolve[command](installer, channel, entry, arguments, now)
        pins = installer.plan.administration.pins
        if command != "pin" and (pin := pins.get(channel)) is not None and not _same(pin, after):
            raise RequestRefused(
                f"channel {in_quotes(channel)} is pinned to {', '.join(pin.servers)}: 'dynamoth unpin' ends that"
            )
        if not _same(route.assignment, after):
            actions = self._carry_out({channel: after}, f"an administrator's {command}", now)
            route = installer.plan.entries[channel].route
        elif entry.phase is Phase.SETTLED:
            note = f"{ALREADY_THERE}; {note}" if note else ALREADY_THERE
        else:
            before = entry.previous[-1].assignment
        if command == "pin" and pins.get(channel) != after:
            administration = installer.plan.administration.with_pin(channel, after)
            actions += installer.administer(administration, None, f"an administrator's {command}", now)
            note = ""
        if route.assignment.mode is not Mode.SINGLE:
            self._hold(channel, route.assignment)
        return BegunChange(channel, before, route.assignment, route.epoch, note), actions

    @staticmethod
    def state(installer: Installer, change: BegunChange) -> ChangeState:
        """Return how far a change is."""
        entry = installer.plan.entry(change.channel)
        if entry.route.epoch != change.epoch:
            return ChangeState.SUPERSEDED
        return ChangeState.SETTLED if entry.phase is Phase.SETTLED else ChangeState.UNSETTLED

    # From arguments to an assignment, and a note.

    def _move(
        self, installer: Installer, channel: bytes, entry: Entry, arguments: Mapping[str, Any], now: float
    ) -> tuple[Assignment, str]:
        target = arguments.get("to")
        if not isinstance(target, str):
            raise _nonsense("move")
        if entry.phase is Phase.SETTLED and entry.route.assignment.mode is not Mode.SINGLE:
            raise RequestRefused(
                f"channel {in_quotes(channel)} is replicated over {', '.join(entry.route.assignment.servers)}:"
                " 'dynamoth plan unreplicate CHANNEL --to SERVER' puts it at one server"
            )
        return single(target), ""

    def _pin(
        self, installer: Installer, channel: bytes, entry: Entry, arguments: Mapping[str, Any], now: float
    ) -> tuple[Assignment, str]:
        target = arguments.get("to")
        if not isinstance(target, str):
            raise _nonsense("pin")
        if target not in installer.plan.servers:
            raise RequestRefused(
                f"server {target!r:.80} is not known; known are {', '.join(installer.plan.servers)}: name one of them"
            )
        if target in installer.draining:
            raise RequestRefused(
                f"server {target} is being drained, and no channel can be pinned to it: name another, or type 'dynamoth"
                f" server undrain {target}' first"
            )
        administration = installer.plan.administration
        if channel not in administration.pins and len(administration.pins) >= PINS_MAX:
            raise RequestRefused(
                f"{PINS_MAX} channels are pinned, and that is the most: 'dynamoth unpin' one that need not be"
            )
        return single(target), ""

    def _replicate(
        self, installer: Installer, channel: bytes, entry: Entry, arguments: Mapping[str, Any], now: float
    ) -> tuple[Assignment, str]:
        mode = _mode(arguments.get("mode"))
        servers, count = arguments.get("servers"), arguments.get("count")
        if (servers is None) == (count is None):
            raise _nonsense("replicate")
        if count is None:
            return Assignment(mode, _named_servers(servers)), ""
        if type(count) is not int:
            raise RequestRefused(f"count must be a whole number, not {shortened(count)}")
        _check_number(count)
        chosen, note = self._choose(installer, entry, count, now)
        return Assignment(mode, chosen), note

    def _unreplicate(
        self, installer: Installer, channel: bytes, entry: Entry, arguments: Mapping[str, Any], now: float
    ) -> tuple[Assignment, str]:
        target = arguments.get("to")
        if not (target is None or isinstance(target, str)):
            raise _nonsense("unreplicate")
        replicated = [route.assignment for route in entry.live_routes if route.assignment.mode is not Mode.SINGLE]
        if not replicated:
            where = entry.route.assignment.servers[0]
            if target in (None, where):
                return single(where), ""
            raise RequestRefused(
                f"channel {in_quotes(channel)} is not replicated: it is at {where:.80}, and 'dynamoth plan move' moves"
                " it"
            )
        if target is None:
            under_way = entry.route.assignment.mode is Mode.SINGLE
            servers = entry.route.assignment.servers if under_way else replicated[0].servers
            able = [server for server in servers if installer.why_not_to(server, now) is None]
            target = self._by_load(able or servers, now)[0]
        return single(target), ""

    def _choose(self, installer: Installer, entry: Entry, count: int, now: float) -> tuple[tuple[str, ...], str]:
        """Choose servers for a replicated channel; the note says when there are fewer than requested."""
        problems = {server: installer.why_not_to(server, now) for server in installer.plan.servers}
        able = [server for server, problem in problems.items() if problem is None]
        present = [server for server in able if server in entry.route.assignment.servers]
        others = [server for server in able if server not in entry.route.assignment.servers]
        chosen = (*self._by_load(present, now), *self._by_load(others, now))[:count]
        if len(chosen) == count:
            return chosen, ""
        reasons = [problem for problem in problems.values() if problem is not None][:PROBLEMS_NAMED_MAX]
        why = "; ".join(reasons) or "add servers"
        if len(chosen) < REPLICAS_MIN:
            raise RequestRefused(
                f"a replica set has at least {REPLICAS_MIN} servers, and {len(chosen)} can take part: {why}"
            )
        return chosen, f"{len(chosen)} servers instead of {count}, as no more can take part: {why}"

    def _by_load(self, servers: Iterable[str], now: float) -> list[str]:
        """Return servers, the least loaded first; those of unknown load last."""
        ratios = {server: self._load_ratio(server, now) for server in servers}
        return sorted(ratios, key=lambda server: (ratios[server] is None, ratios[server] or 0.0, server))


def _nonsense(command: str) -> RequestRefused:
    return RequestRefused(f"{command} takes the arguments {_ARGUMENTS[command]}")


def _same(one: Assignment, other: Assignment) -> bool:
    """Return whether two assignments are equal; the order of replicas means nothing to an administrator."""
    return one.mode is other.mode and set(one.servers) == set(other.servers)


def _mode(name: Any) -> Mode:
    mode = MODES.get(name) if isinstance(name, str) else None
    if mode is None or mode is Mode.SINGLE:
        raise RequestRefused(f"mode {shortened(name)} is not one of a replicated channel; these are {_REPLICATED}")
    return mode


def _named_servers(value: Any) -> tuple[str, ...]:
    servers: list[Any] = [*value] if isinstance(value, list) else []
    if not servers or not all(isinstance(server, str) for server in servers):
        raise RequestRefused(f"servers must be a list of ids of servers (text), not {shortened(value)}")
    [(server, times)] = Counter(servers).most_common(1)
    if times > 1:
        raise RequestRefused(f"server {server!r:.80} is named twice: name each replica once")
    _check_number(len(servers))
    return tuple(servers)


def _check_number(count: int) -> None:
    if count < REPLICAS_MIN:
        raise RequestRefused(
            f"a replica set has at least two servers, not {count}; 'dynamoth plan move' puts a channel at one"
        )
