"""Which interests of standing queries exist: registered by brokers, read by the data cluster.

Each interest of a query is registered at the server of its log, before its first user is confirmed. It stays registered
while brokers renew it, and ``keep_s`` longer (for users with stored positions, as long as these are kept). When it
expires, its log is deleted with it. So a user who comes back later than that finds another epoch, and gets a gap: no
result is missing silently.

Keys, per query and server: a hash of the interests, a sorted set of the times at which they expire, and a stream of the
changes, from which the data cluster keeps its own table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dynamoth.data.records import DATA_PREFIX
from dynamoth.edge.log import log_keys
from dynamoth.machine.events import CommandPart
from dynamoth.protocol.wire import parser, read_array, read_bytes

CHANGES_MAX = 10_000
"""Changes that the stream keeps; a reader that is farther behind reads the whole hash."""

REGISTRATIONS_PER_COMMAND_MAX = 500
"""Interests of one command: a log server executes nothing else meanwhile, some milliseconds."""

REGISTER_SCRIPT = b"""redis.replicate_commands()
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local added = 0
for i = 2, #ARGV, 3 do
  local until_ms = now + tonumber(ARGV[i + 2])
  local stored = redis.call('ZSCORE', KEYS[2], ARGV[i])
  if not stored then
    local value = string.format('%.0f ', now) .. ARGV[i + 1]
    redis.call('HSET', KEYS[1], ARGV[i], value)
    redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[1], '*', 'i', ARGV[i], 'v', value)
    added = added + 1
  end
  if not stored or tonumber(stored) < until_ms then
    redis.call('ZADD', KEYS[2], string.format('%.0f', until_ms), ARGV[i])
  end
end
return added
"""
"""Registers interests, or renews them; returns how many are new."""

EXPIRE_SCRIPT = b"""redis.replicate_commands()
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local gone = 0
for i = 2, #ARGV do
  local score = redis.call('ZSCORE', KEYS[2], ARGV[i])
  if score and tonumber(score) <= now then
    redis.call('ZREM', KEYS[2], ARGV[i])
    redis.call('HDEL', KEYS[1], ARGV[i])
    redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[1], '*', 'i', ARGV[i], 'v', '')
    redis.call('DEL', KEYS[2 * i], KEYS[2 * i + 1])
    gone = gone + 1
  end
end
return gone
"""
"""Ends interests whose time is over, with their logs; returns how many."""


@dataclass(frozen=True, slots=True)
class Registration:
    """One registered interest. ``params`` is None where it has ended."""

    interest_id: str
    #: When it was registered, by the clock of its server, in ms since 1970.
    at_ms: int
    #: Canonical parameters.
    params: str | None


def registration_keys(query: str) -> tuple[bytes, bytes, bytes]:
    """Return the keys of a query's interests at each server: hash, times of expiry, changes."""
    prefix = DATA_PREFIX + b"{" + query.encode() + b"}"
    return prefix + b":interests", prefix + b":expiry", prefix + b":changes"


def register_command(query: str, interests: Sequence[tuple[str, str, float]]) -> tuple[CommandPart, ...]:
    """Return the command that registers interests of one server, or renews them.

    Args:
        query: whose interests.
        interests: id, canonical parameters, and for how many seconds from now; at most
            ``REGISTRATIONS_PER_COMMAND_MAX``.

    """
    arguments: list[bytes] = [b"%d" % CHANGES_MAX]
    for interest_id, params, keep_s in interests:
        arguments += interest_id.encode(), params.encode(), b"%d" % round(keep_s * 1000)
    return b"EVAL", REGISTER_SCRIPT, b"3", *registration_keys(query), *arguments


def expire_command(query: str, interest_ids: Sequence[str]) -> tuple[CommandPart, ...]:
    """Return the command that ends those of these interests of one server whose time is over."""
    keys = [*registration_keys(query), *(key for interest_id in interest_ids for key in log_keys(interest_id))]
    ids = [interest_id.encode() for interest_id in interest_ids]
    return b"EVAL", EXPIRE_SCRIPT, b"%d" % len(keys), *keys, b"%d" % CHANGES_MAX, *ids


def is_registrations_script(words: Sequence[bytes]) -> bool:
    """Return whether a command is a script of this module."""
    return len(words) > 1 and words[0] == b"EVAL" and words[1] in (REGISTER_SCRIPT, EXPIRE_SCRIPT)


def evaluate(words: Sequence[bytes], execute: Callable[..., Any]) -> Any:
    """Do what Redis does with a script of ours: for models of Redis.

    ``execute`` gets the words of a command (TIME, HSET, HDEL, XADD, ZADD, ZREM, ZSCORE, DEL) and returns its reply.
    """
    keys, arguments = words[3 : 3 + int(words[2])], words[3 + int(words[2]) :]
    interests, expiry, changes = keys[:3]
    seconds, microseconds = map(int, execute(b"TIME"))
    now = seconds * 1000 + microseconds // 1000
    count = 0
    if words[1] == REGISTER_SCRIPT:
        for interest_id, params, keep_ms in zip(arguments[1::3], arguments[2::3], arguments[3::3], strict=True):
            stored = execute(b"ZSCORE", expiry, interest_id)
            if stored is None:
                value = b"%d " % now + params
                execute(b"HSET", interests, interest_id, value)
                execute(b"XADD", changes, b"MAXLEN", b"~", arguments[0], b"*", b"i", interest_id, b"v", value)
                count += 1
            if stored is None or int(stored) < now + int(keep_ms):
                execute(b"ZADD", expiry, b"%d" % (now + int(keep_ms)), interest_id)
        return count
    for number, interest_id in enumerate(arguments[1:]):
        stored = execute(b"ZSCORE", expiry, interest_id)
        if stored is not None and int(stored) <= now:
            execute(b"ZREM", expiry, interest_id)
            execute(b"HDEL", interests, interest_id)
            execute(b"XADD", changes, b"MAXLEN", b"~", arguments[0], b"*", b"i", interest_id, b"v", b"")
            execute(b"DEL", *keys[3 + 2 * number : 5 + 2 * number])
            count += 1
    return count


@parser("a registration")
def parse_registration(interest_id: bytes, value: bytes) -> Registration:
    """Read one field of the hash, or one change. Raises MalformedMessage."""
    at_ms, _, params = value.partition(b" ")
    if not value:
        return Registration(interest_id.decode(), 0, None)
    json.loads(params)
    return Registration(interest_id.decode(), int(at_ms), params.decode())


@parser("the changes of registrations")
def parse_changes(reply: Any) -> list[tuple[str, Registration]]:
    """Read the reply of an XRANGE over changes: id of the stream's entry, and registration. Raises MalformedMessage."""
    changes: list[tuple[str, Registration]] = []
    for entry in read_array(reply):
        id_, pairs = read_array(entry)
        fields = dict(zip(pairs[::2], pairs[1::2], strict=True))
        changes.append(
            (read_bytes(id_).decode(), parse_registration(read_bytes(fields[b"i"]), read_bytes(fields[b"v"])))
        )
    return changes
