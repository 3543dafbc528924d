"""The wire form of routes, plan entries and compatibility rules: in control messages and in the stored plan.

Everything is a msgpack array. A reader ignores elements after those that it knows, so that newer software may add some.
"""

from __future__ import annotations

from typing import Any

from dynamoth.errors import MalformedMessage, UnknownMode
from dynamoth.plan.compatibility import RULES_MAX, Compatibility, CompatibilityRule
from dynamoth.plan.plan import EPOCH_MAX, Assignment, Entry, Mode, Phase, Route
from dynamoth.protocol.wire import pack, parser, read_array, read_bytes, read_natural, read_text, shortened, unpack


def route_to_wire(route: Route) -> list[Any]:
    """Return the wire form of a route."""
    return [route.epoch, int(route.assignment.mode), list(route.assignment.servers)]


@parser("a route")
def route_from_wire(value: Any) -> Route:
    """Read the wire form of a route. Raises MalformedMessage."""
    epoch, mode, servers = value[:3]
    if isinstance(mode, int) and mode > max(Mode):
        raise UnknownMode(f"mode {mode} of a route is unknown here: upgrade this software")
    names = tuple(map(read_text, read_array(servers)))
    return Route(read_natural(epoch, EPOCH_MAX), Assignment(Mode(read_natural(mode)), names))


def entry_to_wire(entry: Entry) -> list[Any]:
    """Return the wire form of an entry."""
    return [int(entry.phase), route_to_wire(entry.route), [route_to_wire(route) for route in entry.previous]]


@parser("a plan entry")
def entry_from_wire(value: Any) -> Entry:
    """Read the wire form of an entry. Raises MalformedMessage."""
    phase, route, previous = value[:3]
    older = tuple(map(route_from_wire, read_array(previous)))
    return Entry(route_from_wire(route), Phase(read_natural(phase)), older)


def compatibility_to_wire(compatibility: Compatibility) -> list[Any]:
    """Return the wire form of compatibility rules."""
    return [compatibility.version, [[rule.pattern, rule.server, rule.plain] for rule in compatibility.rules]]


@parser("compatibility rules")
def compatibility_from_wire(value: Any) -> Compatibility:
    """Read the wire form of compatibility rules. Raises MalformedMessage."""
    version, items = value[:2]
    rules = tuple(_rule_from_wire(*item[:3]) for item in items[: RULES_MAX + 1])
    return Compatibility(read_natural(version, EPOCH_MAX), rules)


def _rule_from_wire(pattern: Any, server: Any, plain: Any) -> CompatibilityRule:
    if not isinstance(plain, bool):
        raise MalformedMessage(f"a rule says True or False whether it is plain, not {shortened(plain)}")
    return CompatibilityRule(read_bytes(pattern), read_text(server), plain)


def pack_compatibility(compatibility: Compatibility) -> bytes:
    """Serialise compatibility rules for the stored plan."""
    return pack(compatibility_to_wire(compatibility))


def pack_entry(entry: Entry) -> bytes:
    """Serialise an entry for the stored plan."""
    return pack(entry_to_wire(entry))


def unpack_entry(data: bytes) -> Entry:
    """Read a stored entry. Raises MalformedMessage."""
    return entry_from_wire(unpack(data))
