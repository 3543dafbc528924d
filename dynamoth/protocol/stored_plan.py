"""The plan as every server stores it: one Redis hash, so that one HMGET verifies a subscription.

Fields: ``@version`` (decimal), ``@cluster`` (the header: servers, ring, number of slots), ``@run`` (the run id of the
Redis process that it was written to, empty where the server does not tell: a plan that Redis restored from disk after a
restart may be old and is not believed), ``@compatibility`` (the rules about channels that plain Redis clients use, too;
missing where there never were any), ``@ring`` (identifies the ring, for readers that do not read the header each time),
``@administration`` (what administrators have decided, for balancers; missing where they never did),
and ``c:<name>`` for each channel and slot that the plan names. Newer software may add fields; whoever writes the plan
keeps those that it does not know. Where older software could not use a plan, newer software also stores ``@format``,
a higher number: whoever does not know it leaves that plan alone. A change is one HSET, which Redis executes at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, cast

from dynamoth.errors import MalformedMessage, OtherFormat
from dynamoth.machine.events import CommandPart
from dynamoth.names import PLAN_KEY, PLAN_KEY_NEW
from dynamoth.plan.administration import NO_ADMINISTRATION, Administration
from dynamoth.plan.compatibility import NO_COMPATIBILITY, Compatibility
from dynamoth.plan.plan import EPOCH_MAX, Entry, Phase, Plan, PlanDelta, Route
from dynamoth.plan.slots import SLOTS, slot_of
from dynamoth.protocol.plan_wire import (
    TEXT_MAX,
    administration_from_wire,
    compatibility_from_wire,
    pack_administration,
    pack_compatibility,
    pack_entry,
    servers_from_wire,
    servers_to_wire,
    unpack_entry,
)
from dynamoth.protocol.wire import pack, parser, read_array, read_natural, read_text, shortened, unpack

VERSION_FIELD = b"@version"
HEADER_FIELD = b"@cluster"
OLD_HEADER_FIELD = b"@header"
"""The header of a plan without slots, as earlier software writes it."""
FORMAT_FIELD = b"@format"
FORMAT = 1
"""The format of plans that this software writes. Format 1 is not stored; a later one is, and gets another ``@ring`` so
that clients read the header again."""
RUN_FIELD = b"@run"
COMPATIBILITY_FIELD = b"@compatibility"
RING_FIELD = b"@ring"
ADMINISTRATION_FIELD = b"@administration"
_CHANNEL_PREFIX = b"c:"

_HEADER_FIELDS = 5
_KNOWN_FIELDS = frozenset(
    (
        *(VERSION_FIELD, HEADER_FIELD, OLD_HEADER_FIELD, FORMAT_FIELD, RUN_FIELD),
        *(COMPATIBILITY_FIELD, RING_FIELD, ADMINISTRATION_FIELD),
    )
)

ENTRIES_PER_COMMAND = 2000
"""Bound of one HSET of a whole plan: about 100 KB and a millisecond of Redis."""

READ_HEADER: tuple[bytes, ...] = (
    *(b"HMGET", PLAN_KEY, VERSION_FIELD, RUN_FIELD, HEADER_FIELD, COMPATIBILITY_FIELD),
    *(OLD_HEADER_FIELD, FORMAT_FIELD),
)
READ_RULES: tuple[CommandPart, ...] = (b"HMGET", PLAN_KEY, VERSION_FIELD, RUN_FIELD, VERSION_FIELD, COMPATIBILITY_FIELD)
READ_BELIEVED_VERSION: tuple[bytes, ...] = (b"HMGET", PLAN_KEY, VERSION_FIELD, RUN_FIELD)
READ_VERSION: tuple[bytes, ...] = (b"HMGET", PLAN_KEY, VERSION_FIELD)
READ_WHOLE: tuple[CommandPart, ...] = (b"HGETALL", PLAN_KEY)
READ_LENGTH: tuple[CommandPart, ...] = (b"HLEN", PLAN_KEY)

VERSION_READ_INTERVAL_S = 1.0
"""How often a publisher reads the version of the plan stored at a server that it uses. This long after a change, every
publisher has seen it, or sees it with its next message."""


def read_entry(channel: bytes) -> tuple[bytes, ...]:
    """Return the command that reads the entry of ``channel`` in a server's stored plan; see :func:`parse_entry`."""
    own, slot = _CHANNEL_PREFIX + channel, _CHANNEL_PREFIX + slot_of(channel)
    return (b"HMGET", PLAN_KEY, VERSION_FIELD, RUN_FIELD, own, COMPATIBILITY_FIELD, RING_FIELD, slot)


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """What a server's stored plan says of one channel.

    ``own`` is the entry of the channel and ``slot`` that of its slot, None where the plan does not name it.
    ``compatibility`` are all rules, whether they concern the channel or not. ``ring`` is the plan's ``ring_mark``; None
    where an older balancer has written it.
    """

    version: int
    own: Entry | None
    compatibility: Compatibility = NO_COMPATIBILITY
    ring: bytes | None = None
    slot: Entry | None = None

    def entry(self, channel: bytes, home: Route) -> Entry:
        """Return the entry that holds for ``channel``, which plan 0 puts at ``home``; as :meth:`Plan.entry`."""
        if self.own is not None:
            return self.own
        inherits = self.slot is not None and self.compatibility.rule_of(channel) is None
        return self.slot if inherits and self.slot is not None else Entry(home, Phase.SETTLED)


@parser("what a stored plan says of a channel")
def parse_entry(reply: Any, run_id: str | None) -> StoredEntry | None:
    """Read the reply of :func:`read_entry`.

    Returns None when the server holds no plan that can be believed: none at all, or one written to an earlier process
    (``run_id`` is that of the process that replied; None skips this check). The caller asks again later.

    Raises:
        MalformedMessage: when what is stored is not a plan.

    """
    version, run, own, rules, ring, slot = _fields(reply)
    if version is None or not _believed(run, run_id):
        return None
    number = _number(version)
    entries = [None if packed is None else _possible(unpack_entry(packed), number) for packed in (own, slot)]
    return StoredEntry(number, entries[0], _rules(rules, number), ring, entries[1])


def parse_rules(reply: Any, run_id: str | None) -> Compatibility | None:
    """Read the reply of ``READ_RULES``. None when the server stores no plan to be believed. Raises MalformedMessage."""
    version, run, _, rules, _, _ = _fields(reply)
    return None if version is None or not _believed(run, run_id) else _rules(rules, _number(version))


@parser("the version of a stored plan")
def parse_believed_version(reply: Any, run_id: str | None) -> int | None:
    """Read the reply of ``READ_BELIEVED_VERSION``. None when the server stores no plan to be believed.

    Raises MalformedMessage.
    """
    version, run, _, _, _, _ = _fields([*reply, None] if isinstance(reply, list) else reply)
    return None if version is None or not _believed(run, run_id) else _number(version)


@dataclass(frozen=True, slots=True)
class StoredHeader:
    """The part of a stored plan that is no channel's; ``plan`` has no entries."""

    version: int
    believed: bool
    plan: Plan


@parser("the header of a stored plan")
def parse_header(reply: Any, run_id: str | None, lost: list[str] | None = None) -> StoredHeader | None:
    """Read the reply of ``READ_HEADER``. None when the server stores no plan.

    With ``lost``, compatibility rules that cannot be believed are left out, and the reason put there.

    Raises:
        OtherFormat: software that knows no slots wrote it, or newer software.
        MalformedMessage: what is stored is not a plan.

    """
    version, run, header, rules, old, format_ = _fields(reply)
    _check_format(format_)
    if version is not None and header is None and old is not None:
        raise OtherFormat(
            "an older version of Dynamoth wrote it, in which channels had no slots: stop all clients, agents and the"
            " balancer, delete the plan at every server (DEL __dynamoth__:plan), and start the new version"
        )
    if version is None or header is None:
        return None
    return StoredHeader(_number(version), _believed(run, run_id), _header_plan(_number(version), header, rules, lost))


@parser("a stored plan")
def parse_whole(
    reply: Any, run_id: str | None, damaged: list[bytes] | None = None, lost: list[str] | None = None
) -> Plan | None:
    """Read the reply of ``READ_WHOLE``. None when the server stores no plan to be believed.

    Raises MalformedMessage, and OtherFormat where newer software wrote it.

    With ``damaged``, entries that cannot be read are left out, and the names of their channels put there: for a
    balancer, which else would have to begin without any. ``lost`` is that of :func:`parse_header`.
    """
    fields = _as_mapping(reply)
    _check_format(fields.get(FORMAT_FIELD))
    if VERSION_FIELD not in fields or HEADER_FIELD not in fields or not _believed(fields.get(RUN_FIELD), run_id):
        return None
    version, rules = _number(fields[VERSION_FIELD]), fields.get(COMPATIBILITY_FIELD)
    header = _header_plan(version, fields[HEADER_FIELD], rules, lost)
    administration = _administration(fields.get(ADMINISTRATION_FIELD))
    skip = len(_CHANNEL_PREFIX)
    entries: dict[bytes, Entry] = {}
    others: dict[bytes, bytes] = {}
    for name, value in fields.items():
        if not name.startswith(_CHANNEL_PREFIX):
            if name not in _KNOWN_FIELDS:
                others[name] = value
            continue
        try:
            entries[name[skip:]] = _entry_of(header, name[skip:], value)
        except MalformedMessage:
            if damaged is None:
                raise
            damaged.append(name[skip:])
    return replace(
        header, entries=MappingProxyType(entries), administration=administration, others=MappingProxyType(others)
    )


def _possible(entry: Entry, version: int) -> Entry:
    """Return an entry, unless no plan of this version can have it: later changes of the channel would be older."""
    if entry.route.epoch > version:
        raise MalformedMessage(f"an entry has epoch {entry.route.epoch}, and the stored plan only version {version}")
    return entry


def _entry_of(header: Plan, channel: bytes, value: bytes) -> Entry:
    entry = _possible(unpack_entry(value), header.version)
    for route in entry.live_routes:
        if any(server not in header.servers for server in route.assignment.servers):
            raise MalformedMessage(f"the stored plan sends channel {channel!r:.60} to a server that it does not list")
    return entry


def read_entries(channels: Iterable[bytes]) -> tuple[CommandPart, ...]:
    """Return the command that reads the entries of several channels; see :func:`parse_entries`."""
    return (b"HMGET", PLAN_KEY, *(_CHANNEL_PREFIX + channel for channel in channels))


@parser("entries of a stored plan")
def parse_entries(reply: Any) -> list[Entry | None]:
    """Read the reply of :func:`read_entries`, in order; None for a channel without one. Raises MalformedMessage."""
    values = cast("list[bytes | None]", reply) if isinstance(reply, list) else []
    return [None if value is None else unpack_entry(value) for value in values]


def is_absent(reply: Any) -> bool:
    """Tell whether the reply of :func:`read_entry`, or of ``READ_HEADER``, says that the server stores no plan."""
    return isinstance(reply, list) and all(part is None for part in cast("list[bytes | None]", reply))


def write_delta(delta: PlanDelta, plan: Plan) -> tuple[CommandPart, ...]:
    """Return the one command that brings a stored plan from ``delta.base`` to ``delta.version``, which ``plan`` is."""
    command: list[CommandPart] = [b"HSET", PLAN_KEY, VERSION_FIELD, b"%d" % delta.version]
    if delta.servers is not None:
        command += (HEADER_FIELD, _pack_header(plan))
    for channel, entry in delta.entries.items():
        command += (_CHANNEL_PREFIX + channel, pack_entry(entry))
    if delta.compatibility is not None:
        command += (COMPATIBILITY_FIELD, pack_compatibility(delta.compatibility))
    if delta.administration is not None:
        command += (ADMINISTRATION_FIELD, pack_administration(delta.administration))
    return tuple(command)


def write_whole(plan: Plan, run_id: str | None) -> list[tuple[CommandPart, ...]]:
    """Return the commands, to be sent in order, that store a whole plan; readers see the old one until the last."""
    commands: list[tuple[CommandPart, ...]] = [(b"DEL", PLAN_KEY_NEW)]
    fields: list[CommandPart] = [VERSION_FIELD, b"%d" % plan.version, HEADER_FIELD, _pack_header(plan)]
    fields += (RUN_FIELD, (run_id or "").encode())
    fields += (COMPATIBILITY_FIELD, pack_compatibility(plan.compatibility), RING_FIELD, plan.ring_mark)
    if plan.administration.version:
        fields += (ADMINISTRATION_FIELD, pack_administration(plan.administration))
    for name, value in plan.others.items():
        fields += (name, value)
    for channel, entry in plan.entries.items():
        fields += (_CHANNEL_PREFIX + channel, pack_entry(entry))
        if len(fields) >= 2 * ENTRIES_PER_COMMAND:
            commands.append((b"HSET", PLAN_KEY_NEW, *fields))
            fields = []
    if fields:
        commands.append((b"HSET", PLAN_KEY_NEW, *fields))
    commands.append((b"RENAME", PLAN_KEY_NEW, PLAN_KEY))
    return commands


def header_fields(plan: Plan) -> int:
    """Return how many fields of a stored plan are no channel's."""
    return _HEADER_FIELDS + bool(plan.administration.version) + len(plan.others)


def _pack_header(plan: Plan) -> bytes:
    return pack([servers_to_wire(plan.servers.values()), plan.base, plan.virtual_nodes, SLOTS])


def _believed(run: bytes | None, run_id: str | None) -> bool:
    """Tell whether to believe a plan. Without ``@run`` it is the rest of a deleted one; an empty one is not checked."""
    return run is not None and (not run or run_id is None or run == run_id.encode())


def _rules(packed: bytes | None, version: int, lost: list[str] | None = None) -> Compatibility:
    """Return the rules, unless no plan of this version can have them: later rules would be older."""
    try:
        rules = NO_COMPATIBILITY if packed is None else _unpacked_rules(packed)
        if rules.version > version:
            raise MalformedMessage(f"rules have version {rules.version}, and the stored plan only version {version}")
    except MalformedMessage as error:
        if lost is None:
            raise
        lost.append(str(error))
        return NO_COMPATIBILITY
    return rules


@lru_cache(maxsize=4)
def _unpacked_rules(packed: bytes) -> Compatibility:
    """Read stored rules: the same object for the same bytes, as every verification reads them."""
    return compatibility_from_wire(unpack(packed))


def _administration(packed: bytes | None) -> Administration:
    return NO_ADMINISTRATION if packed is None else administration_from_wire(unpack(packed))


def _header_plan(version: int, header: bytes, rules: bytes | None, lost: list[str] | None = None) -> Plan:
    listed, base, virtual_nodes, slots = read_array(unpack(header))[:4]
    if slots != SLOTS:
        raise MalformedMessage(f"the stored plan has {shortened(slots)} slots, not {SLOTS}: upgrade this software")
    ring = tuple(read_text(id_, TEXT_MAX) for id_ in read_array(base))
    by_id = {server.id: server for server in servers_from_wire(listed)}
    return Plan(
        version, by_id, ring, virtual_nodes=read_natural(virtual_nodes), compatibility=_rules(rules, version, lost)
    )


def _check_format(stored: bytes | None) -> None:
    if stored is not None and _number(stored) > FORMAT:
        raise OtherFormat(
            f"a newer version of Dynamoth wrote the stored plan, in format {_number(stored)}, and this one knows format"
            f" {FORMAT}: upgrade this software; if no newer version has run here, see who may write the key, and take"
            f" the field away (HDEL {PLAN_KEY.decode()} {FORMAT_FIELD.decode()})"
        )


_Fields = tuple[bytes | None, bytes | None, bytes | None, bytes | None, bytes | None, bytes | None]


def _fields(reply: Any) -> _Fields:
    """Return version, run id, the requested field, the rules, and two more fields that depend on the question."""
    parts: list[Any] = [*reply] if isinstance(reply, list) else []
    if 3 <= len(parts) <= 6 and all(part is None or isinstance(part, bytes) for part in parts):
        version, run, asked, rules, ring, slot = [*parts, None, None, None][:6]
        return version, run, asked, rules, ring, slot
    raise MalformedMessage(f"the key {PLAN_KEY.decode()} does not hold a plan: {shortened(reply)}")


def _as_mapping(reply: Any) -> Mapping[bytes, bytes]:
    if isinstance(reply, Mapping):
        return cast("Mapping[bytes, bytes]", reply)
    if isinstance(reply, list):
        pairs = iter(cast("list[bytes]", reply))
        return dict(zip(pairs, pairs, strict=False))
    raise MalformedMessage(f"the key {PLAN_KEY.decode()} does not hold a plan: {shortened(reply)}")


def _number(text: bytes) -> int:
    try:
        number = int(text)
    except ValueError:
        number = -1
    if not 0 <= number <= EPOCH_MAX:
        raise MalformedMessage(f"the stored plan has version {shortened(text)}, which is no version")
    return number
