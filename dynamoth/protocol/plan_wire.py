"""The wire form of routes, plan entries and compatibility rules: in control messages and in the stored plan.

Everything is a msgpack array. A reader ignores elements after those that it knows, so that newer software may add some.
"""

from __future__ import annotations

from typing import Any

import msgpack

from dynamoth.errors import MalformedMessage, PlanError, UnknownMode
from dynamoth.plan.compatibility import RULES_MAX, Compatibility, CompatibilityRule
from dynamoth.plan.plan import EPOCH_MAX, Assignment, Entry, Mode, Phase, Route
from dynamoth.protocol.wire import parser, shortened, unpack


def route_to_wire(route: Route) -> list[Any]:
    """Return the wire form of a route."""
    return [route.epoch, int(route.assignment.mode), list(route.assignment.servers)]


@parser("a route")
def route_from_wire(value: Any) -> Route:
    """Read the wire form of a route. Raises MalformedMessage."""
    epoch, mode, servers = value[:3]
    if isinstance(mode, int) and mode > max(Mode):
        raise UnknownMode(f"mode {mode} of a route is unknown here: upgrade this software")
    is_epoch = type(epoch) is int and 0 <= epoch <= EPOCH_MAX
    if not is_epoch or not isinstance(mode, int) or not isinstance(servers, list):
        raise MalformedMessage(f"not a route: {shortened(value)}")
    names: list[Any] = [*servers]
    if not all(isinstance(name, str) for name in names):
        raise MalformedMessage(f"a route names its servers as text: {shortened(value)}")
    return Route(epoch, Assignment(Mode(mode), tuple(names)))


def entry_to_wire(entry: Entry) -> list[Any]:
    """Return the wire form of an entry."""
    return [int(entry.phase), route_to_wire(entry.route), [route_to_wire(route) for route in entry.previous]]


@parser("a plan entry")
def entry_from_wire(value: Any) -> Entry:
    """Read the wire form of an entry. Raises MalformedMessage."""
    phase, route, previous = value[:3]
    if not isinstance(phase, int) or not isinstance(previous, list):
        raise MalformedMessage(f"not a plan entry: {shortened(value)}")
    older: list[Any] = [*previous]
    return Entry(route_from_wire(route), Phase(phase), tuple(map(route_from_wire, older)))


def compatibility_to_wire(compatibility: Compatibility) -> list[Any]:
    """Return the wire form of compatibility rules."""
    return [compatibility.version, [[rule.pattern, rule.server, rule.plain] for rule in compatibility.rules]]


def compatibility_from_wire(value: Any) -> Compatibility:
    """Read the wire form of compatibility rules. Raises MalformedMessage."""
    try:
        version, items = value[:2]
        rules = tuple(_rule_from_wire(*item[:3]) for item in items[: RULES_MAX + 1])
        if not isinstance(version, int) or not 0 <= version <= EPOCH_MAX:
            raise MalformedMessage(f"not compatibility rules: {shortened(value)}")
        return Compatibility(version, rules)
    except (TypeError, ValueError, KeyError, RecursionError, PlanError) as error:
        raise MalformedMessage(f"not compatibility rules: {shortened(value)}") from error


def _rule_from_wire(pattern: Any, server: Any, plain: Any) -> CompatibilityRule:
    if not (isinstance(pattern, bytes) and isinstance(server, str) and isinstance(plain, bool)):
        raise TypeError("a rule is a pattern, a server and whether it is plain")
    return CompatibilityRule(pattern, server, plain)


def pack_compatibility(compatibility: Compatibility) -> bytes:
    """Serialise compatibility rules for the stored plan."""
    packed: bytes = msgpack.packb(compatibility_to_wire(compatibility))
    return packed


def pack_entry(entry: Entry) -> bytes:
    """Serialise an entry for the stored plan."""
    packed: bytes = msgpack.packb(entry_to_wire(entry))
    return packed


def unpack_entry(data: bytes) -> Entry:
    """Read a stored entry. Raises MalformedMessage."""
    return entry_from_wire(unpack(data))
