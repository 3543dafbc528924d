"""Who is present on a channel: a table beside the log of the channel's presence, changed by scripts.

Theory of operation
-------------------
The presence of a channel is a logged interest of its own. Its log has a publication for each ``join`` and ``leave``;
the table has the members as they are behind the last one. One script changes the table and appends the publications,
so whoever reads the table with the position of the log has both exactly.

A member is a session of a user. It has a *lease*, which the broker that serves it renews; the time is that of the log's
server. When a lease ends, the next script that touches the channel removes the member and appends its ``leave``.

*Generations.* A session may be at several brokers for a while: it moves, or one of them does not know yet that its
connection is dead. Each change names the generation of the connection, and one of an older connection than the stored
one does nothing. So a former broker cannot remove a session that is elsewhere by now. But where the lease is half over,
the broker of the newer connection has failed to renew it: then one with an older connection takes the member over.

*Release.* A broker that does not know whether a session is over releases the member: the generation becomes 0, and the
lease a short one. Any broker that serves the session takes the member over, and nobody notices; else the lease ends.

*Fence.* A member that has left for good is remembered for a while with its generation. This keeps a broker that has not
noticed a dead connection from re-adding the member.

The scripts' effects are written here in Python, too (``evaluate``), for models of Redis; a test holds both to the same.
"""

from __future__ import annotations

import json
from base64 import urlsafe_b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal

from dynamoth.edge.interests import ID_BYTES
from dynamoth.edge.log import BEGIN, LogOptions, begin_arguments, evaluate_begin, log_keys, read_epoch
from dynamoth.edge.publications import Position
from dynamoth.errors import MalformedMessage
from dynamoth.machine.events import CommandPart
from dynamoth.protocol.wire import parser, read_array, read_bytes, read_text, read_text_map

MEMBERS_MAX = 10_000
"""Members that are named in one answer at most."""

MEMBERS_BYTES_MAX = 512 * 1024
"""Bound of the names of their users, as JSON: an answer is one frame."""

EXPIRED_MAX = 1000
"""Leases that end in one execution of a script at most, so that Redis is not held up."""

_LEASES = b"+"
_FENCES = b"-"
"""First characters of names that expire: the lease of a member, or the fence of one that has left."""

_BEGIN = (
    BEGIN
    + b"""local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local before, events = offset, {}
local function append(kind, member, stored)
  offset = offset + 1
  local user = string.match(stored, '^%d+ %S+ (.*)$')
  local event = '{"' .. kind .. '":{"user":' .. user .. ',"member":"' .. member .. '"}}'
  redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[4], offset .. '-0', 'd', event)
  events[#events + 1] = event
end
local function remove(member, stored)
  redis.call('HDEL', KEYS[3], member)
  redis.call('ZREM', KEYS[4], '+' .. member)
  append('leave', member, stored)
end
"""
)

_END = b"""local due = redis.call('ZRANGEBYSCORE', KEYS[4], '-inf', now, 'LIMIT', 0, ARGV[5])
for _, name in ipairs(due) do
  local member = string.sub(name, 2)
  local stored = string.sub(name, 1, 1) == '+' and redis.call('HGET', KEYS[3], member)
  if stored then
    remove(member, stored)
  else
    redis.call('HDEL', KEYS[5], member)
    redis.call('ZREM', KEYS[4], name)
  end
end
if offset > before then redis.call('HSET', KEYS[1], 'offset', offset) end
for key = 2, 5 do redis.call('PEXPIRE', KEYS[key], ARGV[3]) end
local reply = {epoch, offset, #due == tonumber(ARGV[5]) and 1 or 0, #events}
for _, event in ipairs(events) do reply[#reply + 1] = event end
"""

CHANGE_SCRIPT = (
    _BEGIN
    + b"""for each = 10, #ARGV, 4 do
  local kind, member, generation = ARGV[each], ARGV[each + 1], tonumber(ARGV[each + 2])
  local stored, left = redis.call('HGET', KEYS[3], member), redis.call('HGET', KEYS[5], member)
  local latest = tonumber(stored and string.match(stored, '^%d+') or left or 0)
  local lease = kind == 'enter' and stored and tonumber(redis.call('ZSCORE', KEYS[4], '+' .. member) or 0)
  if latest <= generation or (lease and lease - now < ARGV[7] / 2) then
    if kind == 'enter' then
      local entered = ARGV[each + 2] .. ' ' .. ARGV[6] .. ' ' .. ARGV[each + 3]
      if left then
        redis.call('HDEL', KEYS[5], member)
        redis.call('ZREM', KEYS[4], '-' .. member)
      end
      redis.call('HSET', KEYS[3], member, entered)
      redis.call('ZADD', KEYS[4], now + ARGV[7], '+' .. member)
      if not stored then append('join', member, entered) end
    elseif kind == 'exit' then
      if stored then remove(member, stored) end
      redis.call('HSET', KEYS[5], member, ARGV[each + 2])
      redis.call('ZADD', KEYS[4], now + ARGV[9], '-' .. member)
    elseif stored then
      redis.call('HSET', KEYS[3], member, (string.gsub(stored, '^%d+', '0')))
      redis.call('ZADD', KEYS[4], now + (kind == 'move' and ARGV[7] or ARGV[8]), '+' .. member)
    end
  end
end
"""
    + _END
    + b"return reply\n"
)
"""Makes changes, then ends what has expired: members that a broker names are connected, so their leases come first."""

MEMBERS_SCRIPT = (
    _BEGIN
    + _END
    + b"""local count, most = redis.call('HLEN', KEYS[3]), tonumber(ARGV[6])
reply[#reply + 1] = count
local rows = count <= most and redis.call('HGETALL', KEYS[3]) or redis.call('HSCAN', KEYS[3], 0, 'COUNT', most)[2]
for row = 1, math.min(#rows, 2 * most) do
  reply[#reply + 1] = row % 2 == 1 and rows[row] or string.match(rows[row], '^%d+ %S+ (.*)$')
end
return reply
"""
)
"""Ends what has expired, then reads the members."""

Kind = Literal["enter", "exit", "release", "move"]
"""What happens to a member.

=======  =============================================================================================
enter    it is connected: joins, or its lease is renewed
exit     it leaves, for good
release  its connection is lost: it leaves after the time of grace, unless a broker has it until then
move     another broker serves it, or will: it leaves after a whole lease, unless a broker has it then
=======  =============================================================================================
"""


@dataclass(frozen=True, slots=True)
class Leases:
    """Times of members, in seconds.

    ``lease_s`` is that of a lease; ``grace_s`` that of a lost connection; ``fence_s``: for which a session that has
    left cannot be brought back by an older connection.
    """

    lease_s: float
    grace_s: float
    fence_s: float


@dataclass(frozen=True, slots=True)
class Change:
    """What happened to one member, at a connection with this generation. ``user`` is JSON."""

    kind: Kind
    member: str
    generation: int
    user: str


@dataclass(frozen=True, slots=True)
class Appended:
    """What a script has appended: these events end at ``position``. ``has_more``: more has expired."""

    position: Position
    events: tuple[bytes, ...]
    has_more: bool

    def publications(self) -> list[tuple[int, bytes]]:
        """Return offset and payload of each event."""
        return list(enumerate(self.events, self.position.offset - len(self.events) + 1))


@dataclass(frozen=True, slots=True)
class Listed:
    """The members at the position of ``appended``: member and user. ``count`` is that of all, also those not named."""

    appended: Appended
    count: int
    members: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class PresenceEvent:
    """A publication of a presence: somebody has joined (``is_join``) or left."""

    is_join: bool
    member: str
    user: str


def member_id(user: str, session: str) -> str:
    """Return what others see of a session: 22 characters that do not tell the name of the session."""
    text = f"{user}\n{session}".encode("utf-8", "surrogatepass")
    return urlsafe_b64encode(blake2b(text, digest_size=ID_BYTES).digest()).rstrip(b"=").decode()


def user_text(user: str) -> str:
    """Return the name of a user as JSON, in ASCII."""
    return json.dumps(user)


@parser("a publication of a presence")
def read_event(payload: bytes) -> PresenceEvent:
    """Read a publication of a presence. Raises MalformedMessage."""
    [(kind, who)] = read_text_map(json.loads(payload)).items()
    if kind not in ("join", "leave"):
        raise MalformedMessage("it is neither a join nor a leave")
    fields = read_text_map(who)
    return PresenceEvent(kind == "join", read_text(fields.get("member")), read_text(fields.get("user")))


# Commands.


def presence_keys(interest_id: str) -> tuple[bytes, ...]:
    """Return the keys of a presence: those of its log, members, times of expiry, and fences."""
    keys = log_keys(interest_id)
    name = keys[0].removesuffix(b"meta")
    return *keys, name + b"members", name + b"due", name + b"left"


def change_command(
    interest_id: str,
    changes: Sequence[Change],
    broker: str,
    leases: Leases,
    run_id: str,
    new_epoch: int,
    options: LogOptions,
    expired_max: int = EXPIRED_MAX,
) -> tuple[CommandPart, ...]:
    """Return the command that makes these changes, in this order; without any, it only ends what has expired."""
    times = (leases.lease_s, leases.grace_s, leases.fence_s)
    words = [part for each in changes for part in (each.kind, each.member, str(each.generation), each.user)]
    return (
        b"EVAL", CHANGE_SCRIPT, b"5", *presence_keys(interest_id), *begin_arguments(run_id, new_epoch, options),
        b"%d" % options.retained_min, b"%d" % expired_max, broker.encode(),
        *(b"%d" % round(1000 * each) for each in times), *(word.encode() for word in words),
    )  # fmt: skip


def members_command(
    interest_id: str,
    run_id: str,
    new_epoch: int,
    options: LogOptions,
    expired_max: int = EXPIRED_MAX,
    members_max: int = MEMBERS_MAX,
) -> tuple[CommandPart, ...]:
    """Return the command that reads the members."""
    return (
        b"EVAL", MEMBERS_SCRIPT, b"5", *presence_keys(interest_id), *begin_arguments(run_id, new_epoch, options),
        b"%d" % options.retained_min, b"%d" % expired_max, b"%d" % members_max,
    )  # fmt: skip


@parser("the reply of a log's server")
def parse_appended(reply: Any) -> Appended:
    """Read the reply of ``change_command``. Raises MalformedMessage."""
    return _read_appended(read_array(reply))[0]


@parser("the reply of a log's server")
def parse_members(reply: Any) -> Listed:
    """Read the reply of ``members_command``; name no more users than an answer may. Raises MalformedMessage."""
    appended, [count, *rows] = _read_appended(read_array(reply))
    members: list[tuple[str, str]] = []
    size = 0
    for member, user in zip(map(read_bytes, rows[::2]), map(read_bytes, rows[1::2]), strict=True):
        size += len(user)
        if size > MEMBERS_BYTES_MAX:
            break
        members.append((member.decode(), read_text(json.loads(user))))
    return Listed(appended, int(count), tuple(members))


def _read_appended(reply: Sequence[Any]) -> tuple[Appended, Sequence[Any]]:
    epoch, offset, has_more, count, *rest = reply
    events = tuple(map(read_bytes, rest[: int(count)]))
    if len(events) != int(count):
        raise MalformedMessage(f"{count} events expected, not {len(events)}")
    return Appended(Position(read_epoch(epoch), int(offset)), events, bool(has_more)), rest[int(count) :]


# The model.


def is_script(words: Sequence[bytes]) -> bool:
    """Tell whether a command is a script of this module."""
    return len(words) > 1 and words[0] == b"EVAL" and words[1] in (CHANGE_SCRIPT, MEMBERS_SCRIPT)


def evaluate(words: Sequence[bytes], execute: Callable[..., Any]) -> Any:
    """Do what Redis does with a script of ours: for models of Redis.

    ``execute`` gets the words of a command (TIME, and those of hashes, sorted sets and streams) and returns its reply.
    """
    model = _Model(words, execute)
    if words[1] == CHANGE_SCRIPT:
        rest = model.arguments[9:]
        for kind, member, generation, user in zip(rest[::4], rest[1::4], rest[2::4], rest[3::4], strict=True):
            model.change(kind, member, generation, user)
        return model.end()
    reply = model.end()
    most = int(model.arguments[5])
    members: Mapping[bytes, bytes] = execute(b"HGETALL", model.members)
    reply.append(len(members))
    for member, stored in list(members.items())[:most]:
        reply += [member, stored.split(b" ", 2)[2]]
    return reply


class _Model:
    """One execution of a script."""

    def __init__(self, words: Sequence[bytes], execute: Callable[..., Any]) -> None:
        self.meta, self.stream, self.members, self._due, self._left = words[3:8]
        self.arguments = words[8:]
        self._execute = execute
        self._epoch, self._offset, *_ = evaluate_begin(words, execute)
        seconds, microseconds = execute(b"TIME")
        self._now = int(seconds) * 1000 + int(microseconds) // 1000
        self._events: list[bytes] = []

    def change(self, kind: bytes, member: bytes, generation: bytes, user: bytes) -> None:
        execute = self._execute
        _, lease, grace, fence = self.arguments[5:9]
        stored, left = execute(b"HGET", self.members, member), execute(b"HGET", self._left, member)
        latest = int(stored.split(b" ")[0] if stored else left or 0)
        if latest > int(generation) and not (kind == b"enter" and stored and self._is_half_over(member, int(lease))):
            return
        if kind == b"enter":
            entered = b"%b %b %b" % (generation, self.arguments[5], user)
            if left is not None:
                execute(b"HDEL", self._left, member)
                execute(b"ZREM", self._due, _FENCES + member)
            execute(b"HSET", self.members, member, entered)
            self._add_due(_LEASES + member, lease)
            if stored is None:
                self._append(b"join", member, entered)
        elif kind == b"exit":
            if stored is not None:
                self._remove(member, stored)
            execute(b"HSET", self._left, member, generation)
            self._add_due(_FENCES + member, fence)
        elif stored is not None:
            execute(b"HSET", self.members, member, b"0 " + stored.split(b" ", 1)[1])
            self._add_due(_LEASES + member, lease if kind == b"move" else grace)

    def end(self) -> list[Any]:
        execute = self._execute
        most = self.arguments[4]
        due = execute(b"ZRANGEBYSCORE", self._due, b"-inf", b"%d" % self._now, b"LIMIT", b"0", most)
        for name in due:
            member = name[1:]
            stored = execute(b"HGET", self.members, member) if name[:1] == _LEASES else None
            if stored is not None:
                self._remove(member, stored)
            else:
                execute(b"HDEL", self._left, member)
                execute(b"ZREM", self._due, name)
        if self._events:
            execute(b"HSET", self.meta, b"offset", b"%d" % self._offset)
        for key in (self.stream, self.members, self._due, self._left):
            execute(b"PEXPIRE", key, self.arguments[2])
        return [self._epoch, self._offset, int(len(due) == int(most)), len(self._events), *self._events]

    def _is_half_over(self, member: bytes, lease_ms: int) -> bool:
        due = self._execute(b"ZSCORE", self._due, _LEASES + member)
        return float(due or 0) - self._now < lease_ms / 2

    def _add_due(self, name: bytes, delay_ms: bytes) -> None:
        self._execute(b"ZADD", self._due, b"%d" % (self._now + int(delay_ms)), name)

    def _remove(self, member: bytes, stored: bytes) -> None:
        self._execute(b"HDEL", self.members, member)
        self._execute(b"ZREM", self._due, _LEASES + member)
        self._append(b"leave", member, stored)

    def _append(self, kind: bytes, member: bytes, stored: bytes) -> None:
        self._offset += 1
        event = b'{"%b":{"user":%b,"member":"%b"}}' % (kind, stored.split(b" ", 2)[2], member)
        most, id_ = self.arguments[3], b"%d-0" % self._offset
        self._execute(b"XADD", self.stream, b"MAXLEN", b"~", most, id_, b"d", event)
        self._events.append(event)
