"""Terms: at most one data cluster works with the log servers, and a former one changes nothing any more.

Theory of operation
-------------------
A data cluster that begins takes a *term*, a number that is larger than those before it, at every log server. A server
gives a term to the one that claims it first, and knows its *owner*, an id that each start of a data cluster draws. So
two that begin at once and claim the same term do not both get it: one of them is refused at some server, and claims a
larger term. A data cluster that finds a larger term than its own, or its own term with another owner, ends.

All read the terms first: where a server is down, a data cluster cannot begin, and refuses no other one.

What a data cluster stores or removes, it does with its term (``store_command``, ``trim_command``): the server refuses
it with ``FENCED`` where a larger term is taken. A server that has lost its term gets it again at the next claim of the
data cluster, which claims it again and again (``claim_command``).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from dynamoth.data.records import DATA_PREFIX, partition_keys
from dynamoth.edge.log import FENCED
from dynamoth.errors import DynamothError
from dynamoth.machine.events import CommandPart
from dynamoth.protocol.wire import parser, read_array

TERM_KEY = DATA_PREFIX + b"term"
"""String at every log server: the term of the newest data cluster. One with a smaller term is refused by logs."""

OWNER_KEY = DATA_PREFIX + b"term:owner"
"""String at every log server: a term and the id of the data cluster that has it, ``5 3f0c...``."""

CLAIMS_MAX = 10
"""At most this many terms are claimed: each is refused only where another data cluster begins just then."""

CLAIM_SCRIPT = b"""local term = tonumber(redis.call('GET', KEYS[1]) or '0')
local owner = ARGV[1] .. ' ' .. ARGV[2]
if term < tonumber(ARGV[1]) then
  redis.call('SET', KEYS[1], ARGV[1])
  redis.call('SET', KEYS[2], owner)
  return {tonumber(ARGV[1]), 1}
end
if term == tonumber(ARGV[1]) and redis.call('GET', KEYS[2]) == owner then return {term, 1} end
return {term, 0}
"""
"""Raises the term of a server for an owner; returns the term after that, and whether the owner has it."""

REFUSE_FORMER = (
    b"""local term = redis.call('GET', KEYS[1])
if term and tonumber(term) > tonumber(ARGV[1]) then
  return redis.error_reply('"""
    + FENCED.encode()
    + b""" by a newer data cluster, term ' .. term)
end
"""
)
"""The first lines of scripts that only the newest data cluster may call: its term is their first argument."""

STORE_SCRIPT = (
    REFUSE_FORMER
    + b"""redis.call('SET', KEYS[2], ARGV[2])
return redis.status_reply('OK')
"""
)
"""Stores a value, unless a newer data cluster is there."""

TRIM_SCRIPT = REFUSE_FORMER + b"return redis.call('XTRIM', KEYS[2], 'MINID', ARGV[2])\n"
"""Removes the first records of a stream, unless a newer data cluster is there."""

Command = tuple[CommandPart, ...]


class NoTerm(DynamothError):
    """Raised when others have taken every term that a data cluster has claimed."""

    code = "no-term"


def claim_command(term: int, owner: str) -> Command:
    """Return the command that raises the term of a server to ``term``, unless this or a larger one is taken."""
    return b"EVAL", CLAIM_SCRIPT, b"2", TERM_KEY, OWNER_KEY, b"%d" % term, owner.encode()


@parser("the reply to a claim")
def parse_claim(reply: Any) -> tuple[int, bool]:
    """Read the reply of ``claim_command``: the term of the server, and whether the owner has it."""
    term, is_own = read_array(reply)
    return int(term), bool(is_own)


def take_term(servers: Sequence[str], owner: str) -> Generator[tuple[str, Command], Any, int]:
    """Yield commands, each with its server, and get their replies; return a term that no other data cluster has.

    All that begin ask the servers in the same order, so that one of them gets its term. Raises NoTerm.
    """
    ordered, term = sorted(servers), 0
    for server in ordered:
        term = max(term, int((yield server, (b"GET", TERM_KEY)) or 0))
    for _ in range(CLAIMS_MAX):
        term += 1
        for server in ordered:
            taken, is_own = parse_claim((yield server, claim_command(term, owner)))
            if not is_own:
                term = taken
                break
        else:
            return term
    raise NoTerm("other data clusters begin again and again with these log servers: run one of them only")


def store_command(key: bytes, value: bytes, term: int) -> Command:
    """Return the command that stores a value; refused with ``FENCED`` for a former data cluster."""
    return b"EVAL", STORE_SCRIPT, b"2", TERM_KEY, key, b"%d" % term, value


def trim_command(name: str, until: int, term: int) -> Command:
    """Return the command that removes the records of a partition up to ``until``; call it once they are archived.

    Refused with ``FENCED`` for a former data cluster: the newest one has an archive of its own, which needs them.
    """
    return b"EVAL", TRIM_SCRIPT, b"2", TERM_KEY, partition_keys(name)[1], b"%d" % term, b"%d-0" % (until + 1)
