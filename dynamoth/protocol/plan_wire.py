"""The wire form of the parts of a plan: in control messages and in the stored plan.

Everything is a msgpack array. A reader ignores elements after those that it knows, so that newer software may add some.
The administration is a map, and a writer keeps what it does not know.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from dynamoth.errors import MalformedMessage, UnknownMode
from dynamoth.plan.administration import PINS_MAX, REMOVED_MAX, Administration
from dynamoth.plan.compatibility import RULES_MAX, Compatibility, CompatibilityRule
from dynamoth.plan.plan import EPOCH_MAX, Assignment, Entry, Mode, Phase, Route, Server, single
from dynamoth.protocol.wire import (
    pack,
    parser,
    read_array,
    read_bytes,
    read_natural,
    read_text,
    read_text_map,
    shortened,
    unpack,
)

TEXT_MAX = 2000
"""Characters of the id or the URL of a server."""

MODE_MAX = max(Mode)

ENTRIES_KEPT = 8192
"""Stored entries that need not be read again."""


def route_to_wire(route: Route) -> list[Any]:
    """Return the wire form of a route."""
    return [route.epoch, int(route.assignment.mode), list(route.assignment.servers)]


@parser("a route")
def route_from_wire(value: Any) -> Route:
    """Read the wire form of a route. Raises MalformedMessage."""
    epoch, mode, servers = value[:3]
    return Route(read_natural(epoch, EPOCH_MAX), _assignment_from_wire(mode, servers))


def _assignment_from_wire(mode: Any, servers: Any) -> Assignment:
    if type(mode) is int and mode == Mode.SINGLE and len(read_array(servers)) == 1:
        return single(read_text(servers[0]))  # by far the most: one object for all
    if isinstance(mode, int) and mode > MODE_MAX:
        raise UnknownMode(f"mode {mode} of a route is unknown here: upgrade this software")
    return Assignment(Mode(read_natural(mode)), tuple(map(read_text, read_array(servers))))


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


def servers_to_wire(servers: Iterable[Server]) -> list[Any]:
    """Return the wire form of a list of servers."""
    return [[server.id, server.url] for server in servers]


@parser("a list of servers")
def servers_from_wire(value: Any) -> tuple[Server, ...]:
    """Read the wire form of a list of servers. Raises MalformedMessage."""
    return tuple(Server(_name(item[0]), _name(item[1])) for item in map(read_array, read_array(value)))


def _name(value: Any) -> str:
    return read_text(value, TEXT_MAX)


def administration_to_wire(administration: Administration) -> dict[str, Any]:
    """Return the wire form of an administration."""
    return {
        **administration.others,
        "version": administration.version,
        "paused": administration.paused,
        "draining": sorted(administration.draining),
        "pins": [[channel, int(pin.mode), list(pin.servers)] for channel, pin in administration.pins.items()],
        "removed": list(administration.removed),
        "provisioned": sorted(administration.provisioned),
        "releasing": administration.releasing,
        "outgoing_bytes_per_s_max": dict(administration.outgoing_bytes_per_s_max),
    }


@parser("the administration of a plan")
def administration_from_wire(value: Any) -> Administration:
    """Read the wire form of an administration; what is missing has its default. Raises MalformedMessage."""
    fields = read_text_map(value)
    paused = fields.pop("paused", False)
    if not isinstance(paused, bool):
        raise MalformedMessage(f"a balancer is paused or not, True or False, not {shortened(paused)}")
    pins = map(read_array, read_array(fields.pop("pins", []))[: PINS_MAX + 1])
    limits = read_text_map(fields.pop("outgoing_bytes_per_s_max", {}))
    return Administration(
        version=read_natural(fields.pop("version", 0), EPOCH_MAX),
        paused=paused,
        draining=frozenset(map(_name, read_array(fields.pop("draining", [])))),
        pins=MappingProxyType({read_bytes(pin[0]): _assignment_from_wire(pin[1], pin[2]) for pin in pins}),
        removed=tuple(map(_name, read_array(fields.pop("removed", []))[: REMOVED_MAX + 1])),
        provisioned=frozenset(map(_name, read_array(fields.pop("provisioned", [])))),
        releasing=_name(fields.pop("releasing", "")),
        outgoing_bytes_per_s_max=MappingProxyType({_name(id_): read_natural(limit) for id_, limit in limits.items()}),
        others=MappingProxyType(fields),
    )


def pack_administration(administration: Administration) -> bytes:
    """Serialise an administration for the stored plan."""
    return pack(administration_to_wire(administration))


def pack_compatibility(compatibility: Compatibility) -> bytes:
    """Serialise compatibility rules for the stored plan."""
    return pack(compatibility_to_wire(compatibility))


def pack_entry(entry: Entry) -> bytes:
    """Serialise an entry for the stored plan."""
    return pack(entry_to_wire(entry))


@lru_cache(maxsize=ENTRIES_KEPT)
def unpack_entry(data: bytes) -> Entry:
    """Read a stored entry. Raises MalformedMessage. Every server stores the same: the newest are read once."""
    return entry_from_wire(unpack(data))
