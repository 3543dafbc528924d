"""The log of an interest: a Redis stream and a hash at one server, written and read by scripts.

Theory of operation
-------------------
A publication is appended to the log *before* it is published, so whoever has subscribed and reads the log afterwards
has everything. Its id in the stream is its offset: 1, 2, 3 ... without holes. The hash has the epoch, the last offset,
the run id of the Redis process, and the term and last execution of the writer.

*Epoch.* A server that was restarted from an old snapshot, or a replica that was promoted, would give offsets again to
other publications. So the log is bound to the server's process: a caller gives the run id of its connection, and where
that differs from the stored one, the log begins again under a new epoch. An operator who knows that every append is
durable (``appendfsync always``) leaves the run id empty, and the epoch stays.

*Fence.* A writer with a term below the stored one is refused: another one has taken over. An execution that was
appended before is not appended again, so a writer may repeat what was not answered.

The scripts' effects are written here in Python, too (``evaluate``), for models of Redis; a test holds both to the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import Any

from dynamoth.errors import MalformedMessage
from dynamoth.machine.events import CommandPart, ErrorReply
from dynamoth.names import RESERVED_PREFIX
from dynamoth.protocol.wire import parser, read_array, read_bytes, shortened

LOG_PREFIX = RESERVED_PREFIX + b"log:"
"""Prefix of the keys of logs."""

FENCED = "FENCED"
"""The first word of the error that refuses a writer of an older term."""

BEGIN_SCRIPT = b"""redis.replicate_commands()
local meta = redis.call('HMGET', KEYS[1], 'run', 'epoch', 'offset', 'term', 'execution')
local epoch, offset = meta[2], tonumber(meta[3])
if not epoch or (ARGV[1] ~= '' and meta[1] ~= ARGV[1]) then
  epoch, offset, meta[5] = ARGV[2], 0, false
  redis.call('DEL', KEYS[2])
  redis.call('HDEL', KEYS[1], 'execution')
  redis.call('HSET', KEYS[1], 'run', ARGV[1], 'epoch', epoch, 'offset', 0)
end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
"""
"""The beginning of every script: it sets ``epoch`` and ``offset``, of a new life where the log was lost."""

APPEND_SCRIPT = (
    BEGIN_SCRIPT
    + b"""local term, execution = tonumber(ARGV[4]), tonumber(ARGV[5])
if meta[4] and tonumber(meta[4]) > term then
  return redis.error_reply('FENCED by a newer writer, term ' .. meta[4])
end
if execution > 0 and meta[5] and tonumber(meta[5]) >= execution then return {epoch, offset, 0} end
offset = offset + 1
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[6], offset .. '-0', 'd', ARGV[7])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
redis.call('HSET', KEYS[1], 'offset', offset, 'term', term)
if execution > 0 then redis.call('HSET', KEYS[1], 'execution', execution) end
return {epoch, offset, 1}
"""
)

READ_SCRIPT = (
    BEGIN_SCRIPT
    + b"""local first = redis.call('XRANGE', KEYS[2], '-', '+', 'COUNT', 1)[1]
first = first and tonumber(string.match(first[1], '^%d+')) or offset + 1
local after, count, entries = tonumber(ARGV[4]), tonumber(ARGV[5]), {}
if count > 0 and after < offset then
  entries = redis.call('XRANGE', KEYS[2], (after + 1) .. '-0', '+', 'COUNT', count)
end
local reply = {epoch, offset, first}
for _, entry in ipairs(entries) do
  reply[#reply + 1] = tonumber(string.match(entry[1], '^%d+'))
  reply[#reply + 1] = entry[2][2]
end
return reply
"""
)
"""Reads up to ``count`` publications behind an offset. It writes, as reading a lost log begins its next epoch."""

TTL_S = 7 * 24 * 3600.0
"""A log that nobody has written or read for this time is forgotten."""


@dataclass(frozen=True, slots=True)
class LogOptions:
    """How long logs keep what is appended."""

    #: Publications that a log keeps at least; Redis drops older ones in whole nodes of its stream.
    retained_min: int = 10_000
    #: A log without readers and writers is forgotten after this time.
    ttl_s: float = TTL_S
    #: Whether the servers lose nothing when they restart (``appendfsync always``): the epoch stays then.
    durable: bool = False


@dataclass(frozen=True, slots=True)
class Appended:
    """The place that an append was given; ``is_new`` is False where the execution was appended before."""

    epoch: int
    offset: int
    is_new: bool


@dataclass(frozen=True, slots=True)
class LogPage:
    """A part of a log. ``tip`` is the last offset of the whole log, ``first`` the first one that it still has.

    An empty log has ``first = tip + 1``.
    """

    epoch: int
    tip: int
    first: int
    #: Offset and payload, in order, without holes.
    entries: tuple[tuple[int, bytes], ...]


def log_keys(interest_id: str) -> tuple[bytes, bytes]:
    """Return the keys of the hash and of the stream of a log."""
    name = LOG_PREFIX + b"{" + interest_id.encode() + b"}"
    return name + b":meta", name + b":entries"


def log_server(interest_id: str, servers: Sequence[str]) -> str:
    """Return which of the log servers has the log of an interest (rendezvous hashing, by id)."""
    return max(servers, key=lambda server: blake2b(f"{server} {interest_id}".encode(), digest_size=8).digest())


def append_command(
    interest_id: str,
    payload: bytes,
    run_id: str,
    new_epoch: int,
    options: LogOptions,
    term: int = 0,
    execution: int = 0,
) -> tuple[CommandPart, ...]:
    """Return the command that appends a publication.

    Args:
        interest_id: whose log.
        payload: what.
        run_id: of the process of the server at the other end of the connection.
        new_epoch: a random number, for the case that the log is new.
        options: how long it is kept.
        term: of the writer, larger with each take-over; 0 for writers that need no fence.
        execution: numbers what one writer appends, from 1, so that it can be repeated; 0 appends in any case.

    """
    return (
        b"EVAL", APPEND_SCRIPT, b"2", *log_keys(interest_id), *begin_arguments(run_id, new_epoch, options),
        b"%d" % term, b"%d" % execution, b"%d" % options.retained_min, payload,
    )  # fmt: skip


def read_command(
    interest_id: str, run_id: str, new_epoch: int, options: LogOptions, after: int = 0, count: int = 0
) -> tuple[CommandPart, ...]:
    """Return the command that reads the tip of a log, and up to ``count`` publications behind the offset ``after``."""
    return (
        b"EVAL", READ_SCRIPT, b"2", *log_keys(interest_id), *begin_arguments(run_id, new_epoch, options),
        b"%d" % after, b"%d" % count,
    )  # fmt: skip


def begin_arguments(run_id: str, new_epoch: int, options: LogOptions) -> tuple[bytes, bytes, bytes]:
    """Return the arguments of ``BEGIN_SCRIPT``."""
    return b"" if options.durable else run_id.encode(), b"%016x" % new_epoch, b"%d" % round(options.ttl_s * 1000)


@parser("the reply of a log's server")
def parse_appended(reply: Any) -> Appended:
    """Read the reply of ``append_command``. Raises MalformedMessage."""
    epoch, offset, is_new = read_array(reply)
    return Appended(read_epoch(epoch), int(offset), bool(is_new))


@parser("the reply of a log's server")
def parse_page(reply: Any) -> LogPage:
    """Read the reply of ``read_command``. Raises MalformedMessage."""
    epoch, tip, first, *rest = read_array(reply)
    entries = tuple(zip(map(int, rest[::2]), map(read_bytes, rest[1::2]), strict=True))
    for (before, _), (after, _) in pairwise(entries):
        if after != before + 1:
            raise MalformedMessage(f"a log has offset {after} behind {before}")
    return LogPage(read_epoch(epoch), int(tip), int(first), entries)


def read_epoch(value: Any) -> int:
    """Read an epoch in a reply of a script. Raises MalformedMessage."""
    if not isinstance(value, bytes) or len(value) != 16:
        raise MalformedMessage(f"an epoch has 16 digits, not {shortened(value)}")
    return int(value, 16)


def is_script(words: Sequence[bytes]) -> bool:
    """Tell whether a command is a script of this module."""
    return len(words) > 1 and words[0] == b"EVAL" and words[1] in (APPEND_SCRIPT, READ_SCRIPT)


def evaluate(words: Sequence[bytes], execute: Callable[..., Any]) -> Any:
    """Do what Redis does with a script of ours: for models of Redis.

    ``execute`` gets the words of a command (HMGET, HSET, DEL, PEXPIRE, XADD, XRANGE) and returns its reply.
    """
    meta_key, stream_key = words[3:5]
    arguments = words[5:]
    epoch, offset, term_text, executed = evaluate_begin(meta_key, stream_key, arguments, execute)
    if words[1] == READ_SCRIPT:
        after, count = map(int, arguments[3:5])
        return _evaluate_read(stream_key, epoch, offset, after, count, execute)
    term, execution = map(int, arguments[3:5])
    if term_text is not None and int(term_text) > term:
        return ErrorReply(f"{FENCED} by a newer writer, term {int(term_text)}")
    if execution > 0 and executed is not None and int(executed) >= execution:
        return [epoch, offset, 0]
    offset += 1
    execute(b"XADD", stream_key, b"MAXLEN", b"~", arguments[5], b"%d-0" % offset, b"d", arguments[6])
    execute(b"PEXPIRE", stream_key, arguments[2])
    execute(b"HSET", meta_key, b"offset", b"%d" % offset, b"term", b"%d" % term)
    if execution > 0:
        execute(b"HSET", meta_key, b"execution", b"%d" % execution)
    return [epoch, offset, 1]


def evaluate_begin(
    meta_key: bytes, stream_key: bytes, arguments: Sequence[bytes], execute: Callable[..., Any]
) -> tuple[bytes, int, bytes | None, bytes | None]:
    """Do what ``BEGIN_SCRIPT`` does; return epoch, offset, term and execution."""
    run, epoch, offset_text, term, executed = execute(
        b"HMGET", meta_key, b"run", b"epoch", b"offset", b"term", b"execution"
    )
    offset = int(offset_text or 0)
    if epoch is None or (arguments[0] and run != arguments[0]):
        epoch, offset, executed = arguments[1], 0, None
        execute(b"DEL", stream_key)
        execute(b"HDEL", meta_key, b"execution")
        execute(b"HSET", meta_key, b"run", arguments[0], b"epoch", epoch, b"offset", b"0")
    execute(b"PEXPIRE", meta_key, arguments[2])
    execute(b"PEXPIRE", stream_key, arguments[2])
    return epoch, offset, term, executed


def _evaluate_read(
    stream_key: bytes, epoch: bytes, offset: int, after: int, count: int, execute: Callable[..., Any]
) -> list[Any]:
    oldest = execute(b"XRANGE", stream_key, b"-", b"+", b"COUNT", b"1")
    first = _offset(oldest[0]) if oldest else offset + 1
    entries: list[Any] = []
    if count > 0 and after < offset:
        entries = execute(b"XRANGE", stream_key, b"%d-0" % (after + 1), b"+", b"COUNT", b"%d" % count)
    reply: list[Any] = [epoch, offset, first]
    for entry in entries:
        reply += [_offset(entry), entry[1][1]]
    return reply


def _offset(entry: Any) -> int:
    return int(entry[0].partition(b"-")[0])
