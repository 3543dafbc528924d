"""The fence around the stored plan: Redis itself refuses what a balancer writes after another one has taken over.

A *term* is the time in which one balancer leads, and a number: the first version of the plan that it may issue. It owns
the ``TAKEOVER_VERSIONS`` versions from there on, so no epoch has two meanings. A balancer claims its term at more than
half of the servers, each of which grants only terms above all earlier ones. Then every write of the plan is a script
that compares the terms first: a balancer that was paused for longer than its lease, or whose writes were on their way,
cannot change anything any more.

``TERM_KEY`` holds the term at each server. A value that no balancer can have written counts as 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dynamoth.machine.events import CommandPart
from dynamoth.names import TERM_KEY
from dynamoth.plan.plan import EPOCH_MAX, VERSIONS_IN_RESERVE

TERM_MAX = EPOCH_MAX - VERSIONS_IN_RESERVE
"""No balancer claims a higher term."""

REFUSAL = "FENCED"
"""The first word of the error that refuses a write of an older term."""

READ_TERM: tuple[bytes, ...] = (b"GET", TERM_KEY)

_BEGIN = b"""local stored = tonumber(redis.pcall('GET', KEYS[1]))
if not stored or not (stored >= 0 and stored <= 4294957295) then stored = 0 end
local term = tonumber(ARGV[1])
local function call(...)
  local reply = redis.pcall(...)
  if type(reply) ~= 'table' or not reply.err then return reply end
  return redis.error_reply((string.gsub(reply.err, '^.*@user_script: ?%d+: %-?', '')))
end
"""
"""Redis 6.2 puts the place in the script in front of an error; ``call`` returns what Redis says without the script."""

_SET = b"""local set = call('SET', KEYS[1], ARGV[1])
if set.err then return set end
"""

CLAIM_SCRIPT = _BEGIN + b"if stored >= term then return stored end\n" + _SET + b"return 0\n"
"""Returns 0 when the term is granted, else the term that is stored."""

WRITE_SCRIPT = (
    _BEGIN
    + b"if stored > term then return redis.error_reply('FENCED by a newer term, ' .. stored) end\n"
    + b"if stored < term then\n"
    + _SET
    + b"""end
if ARGV[2] ~= 'HSET' then
  return call(ARGV[2], unpack(KEYS, 2))
end
local added = 0
for first = 3, #ARGV, 2000 do
  local reply = call('HSET', KEYS[2], unpack(ARGV, first, math.min(first + 1999, #ARGV)))
  if type(reply) == 'table' then return reply end
  added = added + reply
end
return added
"""
)
"""Executes HSET, DEL or RENAME. Lua unpacks some 8000 values at most, so a long HSET is several, in one script."""


def claim(term: int) -> tuple[CommandPart, ...]:
    """Return the command that claims a term at a server. Its reply is 0, or the term that stands in the way."""
    return (b"EVAL", CLAIM_SCRIPT, b"1", TERM_KEY, b"%d" % term)


def fenced(term: int, command: Sequence[CommandPart]) -> tuple[CommandPart, ...]:
    """Return a command that executes HSET, DEL or RENAME unless the server has granted a newer term."""
    name, *rest = command
    keys = 1 if name == b"HSET" else len(rest)
    return (b"EVAL", WRITE_SCRIPT, b"%d" % (keys + 1), TERM_KEY, *rest[:keys], b"%d" % term, name, *rest[keys:])


def parse_term(reply: Any) -> int:
    """Read the reply of ``READ_TERM``; 0 where there is none, or no term."""
    return int(reply) if isinstance(reply, bytes) and reply.isdigit() and int(reply) <= TERM_MAX else 0


def unfenced(words: Sequence[bytes]) -> tuple[bytes, ...]:
    """Return the command inside a script of ours: for models of Redis."""
    keys_end = 3 + int(words[2])
    if words[1] == CLAIM_SCRIPT:
        return (b"SET", TERM_KEY, words[keys_end])
    assert words[1] == WRITE_SCRIPT, "a script that no balancer sends"
    return (words[keys_end + 1], *words[4:keys_end], *words[keys_end + 2 :])


def evaluate(words: Sequence[bytes], execute: Callable[..., Any], refuse: Callable[[str], Any]) -> Any:
    """Do what Redis does with a script of ours: for models of Redis.

    ``execute`` gets the words of a command and returns its reply; ``refuse`` makes an error of a text.
    """
    stored = parse_term(execute(*READ_TERM))
    term = words[3 + int(words[2])]
    if words[1] == CLAIM_SCRIPT:
        if stored >= int(term):
            return stored
    elif stored > int(term):
        return refuse(f"{REFUSAL} by a newer term, {stored}")
    if stored < int(term):
        execute(b"SET", TERM_KEY, term)
    return 0 if words[1] == CLAIM_SCRIPT else execute(*unfenced(words))
