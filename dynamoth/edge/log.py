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

*Fence.* A writer with a term below the stored one is refused: another one has taken over. A log that the other one has
not written knows nothing of it: so writers of many logs also name a key with the term of the newest one (``fence``). An
execution that was appended before is not appended again, so a writer may repeat what was not answered.

The scripts' effects are written here in Python, too (``evaluate``), for models of Redis; a test holds both to the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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

SERVERS_KEY = LOG_PREFIX + b"servers"
"""At each log server, the ids of all of them, by a broker: who appends with others would append where nobody reads."""

FENCED = "FENCED"
"""The first word of the error that refuses a writer of an older term."""


def is_fenced(error: str) -> bool:
    """Tell whether an error of a log server refuses a writer of an older term."""
    return FENCED in error.split()[:2]  # Redis puts ``ERR`` before it in some versions


OPEN = b"""redis.replicate_commands()
local meta = redis.call('HMGET', KEYS[1], 'run', 'epoch', 'offset', 'term', 'execution', 'executed_at')
local epoch, offset = meta[2], tonumber(meta[3])
if not epoch or (ARGV[1] ~= '' and meta[1] ~= ARGV[1]) then
  epoch, offset, meta[5] = ARGV[2], 0, false
  redis.call('HSET', KEYS[1], 'run', ARGV[1], 'epoch', epoch, 'offset', 0)
  redis.call('HDEL', KEYS[1], 'execution')
  redis.call('DEL', KEYS[2])
end
"""
"""The first lines of every script: they begin the log where it is new, and know ``epoch`` and ``offset`` of its end.

Redis refuses the first write of a script for lack of memory, and none behind another write. So the first one is always
one that takes memory: not DEL, HDEL or PEXPIRE.
"""

KEEP = b"""redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
"""
"""Keeps the log from being forgotten. An append does this last."""

BEGIN = OPEN + KEEP

APPEND_SCRIPT = (
    OPEN
    + b"""local term, execution = tonumber(ARGV[4]), tonumber(ARGV[5])
if meta[4] and tonumber(meta[4]) > term then
  return redis.error_reply('FENCED by a newer writer, term ' .. meta[4])
end
if execution > 0 and meta[5] and tonumber(meta[5]) >= execution then
  if tonumber(meta[5]) == execution and meta[6] then return {epoch, tonumber(meta[6]), 0} end
  return {epoch, offset, 2}
end
offset = offset + 1
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[6], offset .. '-0', 'd', ARGV[7])
redis.call('HSET', KEYS[1], 'offset', offset, 'term', term)
if execution > 0 then redis.call('HSET', KEYS[1], 'execution', execution, 'executed_at', offset) end
"""
    + KEEP
    + b"return {epoch, offset, 1}\n"
)

APPEND_MANY_SCRIPT = b"""redis.replicate_commands()
local run, ttl, term, execution, reply = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), {}
local fences = #KEYS % 2
local newest = fences == 1 and redis.call('GET', KEYS[1])
if newest and tonumber(newest) > term then
  return redis.error_reply('FENCED by a newer writer, term ' .. newest)
end
for i = 1, #KEYS - fences, 2 do
  local key, stream = KEYS[fences + i], KEYS[fences + i + 1]
  local meta = redis.call('HMGET', key, 'run', 'epoch', 'offset', 'term', 'execution', 'executed_at')
  local epoch, offset = meta[2], tonumber(meta[3])
  if not epoch or (run ~= '' and meta[1] ~= run) then
    epoch, offset, meta[5] = ARGV[i + 5], 0, false
    redis.call('HSET', key, 'run', run, 'epoch', epoch, 'offset', 0)
    redis.call('HDEL', key, 'execution')
    redis.call('DEL', stream)
  end
  if meta[4] and tonumber(meta[4]) > term then
    return redis.error_reply('FENCED by a newer writer, term ' .. meta[4])
  end
  local is_new = 1
  if meta[5] and tonumber(meta[5]) >= execution then
    is_new = (tonumber(meta[5]) == execution and meta[6]) and 0 or 2
    if is_new == 0 then offset = tonumber(meta[6]) end
  else
    offset = offset + 1
    redis.call('XADD', stream, 'MAXLEN', '~', ARGV[5], offset .. '-0', 'd', ARGV[i + 6])
    redis.call('HSET', key, 'offset', offset, 'term', term, 'execution', execution, 'executed_at', offset)
  end
  redis.call('PEXPIRE', key, ttl)
  redis.call('PEXPIRE', stream, ttl)
  reply[#reply + 1] = epoch
  reply[#reply + 1] = offset
  reply[#reply + 1] = is_new
end
return reply
"""
"""Appends one publication to each of many logs, with one execution: for each, what ``APPEND_SCRIPT`` does.

An odd number of keys begins with the fence.
"""

READ_SCRIPT = (
    BEGIN
    + b"""local first = redis.call('XRANGE', KEYS[2], '-', '+', 'COUNT', 1)[1]
first = first and tonumber(string.match(first[1], '^%d+')) or offset + 1
local after, count, entries = tonumber(ARGV[4]), tonumber(ARGV[5]), {}
if count > 0 and after < offset then
  entries = redis.call('XRANGE', KEYS[2], (after + 1) .. '-0', '+', 'COUNT', count)
end
local reply, size = {epoch, offset, first}, 0
for number, entry in ipairs(entries) do
  size = size + #entry[2][2]
  if number > 1 and size > tonumber(ARGV[6]) then break end
  reply[#reply + 1] = tonumber(string.match(entry[1], '^%d+'))
  reply[#reply + 1] = entry[2][2]
end
return reply
"""
)
"""Reads publications behind an offset, up to a number of them and of their bytes, but at least one.

It writes, as reading a lost log begins its next epoch.
"""

TIPS_SCRIPT = b"""redis.replicate_commands()
local reply = {}
for i = 1, #KEYS, 2 do
  local meta = redis.call('HMGET', KEYS[i], 'run', 'epoch', 'offset')
  redis.call('PEXPIRE', KEYS[i], ARGV[2])
  redis.call('PEXPIRE', KEYS[i + 1], ARGV[2])
  local is_lost = not meta[2] or (ARGV[1] ~= '' and meta[1] ~= ARGV[1])
  reply[#reply + 1] = is_lost and '' or meta[2]
  reply[#reply + 1] = is_lost and 0 or tonumber(meta[3])
end
return reply
"""
"""Returns epoch and last offset of many logs; no epoch for one that is new, or lost: reading it begins the next."""

PAGE_BYTES_MAX = 128 * 1024
"""Payloads that are read from a log at a time have at most so many bytes, or are one."""

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
    """The position that an append was given; ``is_new`` is False where the execution was appended before.

    Of an execution before the last one only the log's end is known: ``is_exact`` is False then.
    """

    epoch: int
    offset: int
    is_new: bool
    is_exact: bool = True


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


def servers_value(ids: Iterable[str]) -> bytes:
    """Return the value of ``SERVERS_KEY``: the ids of the log servers, sorted, joined by one space."""
    return " ".join(sorted(ids)).encode()


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


def append_many_command(
    publications: Sequence[tuple[str, bytes, int]],
    run_id: str,
    options: LogOptions,
    term: int,
    execution: int,
    fence: bytes = b"",
) -> tuple[CommandPart, ...]:
    """Return the command that appends one publication to each of several logs of one server.

    Args:
        publications: id of the interest, payload, and a random number for the case that the log is new.
        run_id: of the process of the server at the other end of the connection.
        options: how long they are kept.
        term: of the writer; see ``append_command``.
        execution: the same for all of them, 1 or more.
        fence: the key of a string with the term of the newest writer: one with a smaller term appends to none of the
            logs. Empty: only the terms of the logs themselves count.

    """
    keys = [fence] if fence else []
    keys += [key for interest_id, _, _ in publications for key in log_keys(interest_id)]
    run, _, ttl = begin_arguments(run_id, 0, options)
    arguments = [part for _, payload, epoch in publications for part in (b"%016x" % epoch, payload)]
    return (
        b"EVAL", APPEND_MANY_SCRIPT, b"%d" % len(keys), *keys, run, ttl, b"%d" % term, b"%d" % execution,
        b"%d" % options.retained_min, *arguments,
    )  # fmt: skip


@parser("the reply of a log's server")
def parse_appended_many(reply: Any) -> list[Appended]:
    """Read the reply of ``append_many_command``. Raises MalformedMessage."""
    values = read_array(reply)
    return [
        Appended(read_epoch(epoch), int(offset), is_new == 1, is_new != 2)
        for epoch, offset, is_new in zip(values[::3], values[1::3], values[2::3], strict=True)
    ]


def read_command(
    interest_id: str,
    run_id: str,
    new_epoch: int,
    options: LogOptions,
    after: int = 0,
    count: int = 0,
    bytes_max: int = PAGE_BYTES_MAX,
) -> tuple[CommandPart, ...]:
    """Return the command that reads the tip of a log, and up to ``count`` publications behind the offset ``after``.

    There are fewer where they would have more than ``bytes_max``, but at least one.
    """
    return (
        b"EVAL", READ_SCRIPT, b"2", *log_keys(interest_id), *begin_arguments(run_id, new_epoch, options),
        b"%d" % after, b"%d" % count, b"%d" % bytes_max,
    )  # fmt: skip


def tips_command(interest_ids: Sequence[str], run_id: str, options: LogOptions) -> tuple[CommandPart, ...]:
    """Return the command that reads the tips of many logs at one server, and keeps them from being forgotten."""
    keys = [key for interest_id in interest_ids for key in log_keys(interest_id)]
    run, _, ttl = begin_arguments(run_id, 0, options)
    return (b"EVAL", TIPS_SCRIPT, b"%d" % len(keys), *keys, run, ttl)


def begin_arguments(run_id: str, new_epoch: int, options: LogOptions) -> tuple[bytes, bytes, bytes]:
    """Return the first arguments of every script that begins with ``OPEN``."""
    return b"" if options.durable else run_id.encode(), b"%016x" % new_epoch, b"%d" % round(options.ttl_s * 1000)


@parser("the reply of a log's server")
def parse_appended(reply: Any) -> Appended:
    """Read the reply of ``append_command``. Raises MalformedMessage."""
    epoch, offset, is_new = read_array(reply)
    return Appended(read_epoch(epoch), int(offset), is_new == 1, is_new != 2)


@parser("the reply of a log's server")
def parse_page(reply: Any) -> LogPage:
    """Read the reply of ``read_command``. Raises MalformedMessage."""
    epoch, tip, first, *rest = read_array(reply)
    entries = tuple(zip(map(int, rest[::2]), map(read_bytes, rest[1::2]), strict=True))
    for (before, _), (after, _) in pairwise(entries):
        if after != before + 1:
            raise MalformedMessage(f"a log has offset {after} behind {before}")
    return LogPage(read_epoch(epoch), int(tip), int(first), entries)


@parser("the reply of a log's server")
def parse_tips(reply: Any, count: int) -> list[tuple[int | None, int]]:
    """Read the reply of ``tips_command`` for ``count`` logs: epoch (None: it is new, or lost) and last offset of each.

    Raises MalformedMessage.
    """
    values = read_array(reply)
    if len(values) != 2 * count:
        raise MalformedMessage(f"the tips of {count} logs expected, not {len(values)} values")
    return [
        (None if epoch == b"" else read_epoch(epoch), int(offset))
        for epoch, offset in zip(values[::2], values[1::2], strict=True)
    ]


def read_epoch(value: Any) -> int:
    """Read an epoch in a reply of a script. Raises MalformedMessage."""
    if not isinstance(value, bytes) or len(value) != 16:
        raise MalformedMessage(f"an epoch has 16 digits, not {shortened(value)}")
    return int(value, 16)


SCRIPTS = (APPEND_SCRIPT, APPEND_MANY_SCRIPT, READ_SCRIPT, TIPS_SCRIPT)


def is_script(words: Sequence[bytes]) -> bool:
    """Tell whether a command is a script of this module."""
    return len(words) > 1 and words[0] == b"EVAL" and words[1] in SCRIPTS


def evaluate(words: Sequence[bytes], execute: Callable[..., Any]) -> Any:
    """Do what Redis does with a script of ours: for models of Redis.

    ``execute`` gets the words of a command (GET, HMGET, HSET, DEL, PEXPIRE, XADD, XRANGE) and returns its reply.
    """
    if words[1] == TIPS_SCRIPT:
        return _evaluate_tips(words, execute)
    if words[1] == APPEND_MANY_SCRIPT:
        return _evaluate_append_many(words, execute)
    epoch, offset, term_text, executed, executed_at = _evaluate_open(words, execute)
    meta_key, stream_key = words[3:5]
    arguments = words[5:]
    if words[1] == READ_SCRIPT:
        _evaluate_keep(words, execute)
        after, count, bytes_max = map(int, arguments[3:6])
        reply = _evaluate_read(stream_key, epoch, offset, after, count, execute)
        while len(reply) > 5 and sum(map(len, reply[4::2])) > bytes_max:
            del reply[-2:]
        return reply
    term, execution = map(int, arguments[3:5])
    if term_text is not None and int(term_text) > term:
        return ErrorReply(f"{FENCED} by a newer writer, term {int(term_text)}")
    if execution > 0 and executed is not None and int(executed) >= execution:
        if int(executed) == execution and executed_at is not None:
            return [epoch, int(executed_at), 0]
        return [epoch, offset, 2]
    offset += 1
    execute(b"XADD", stream_key, b"MAXLEN", b"~", arguments[5], b"%d-0" % offset, b"d", arguments[6])
    execute(b"HSET", meta_key, b"offset", b"%d" % offset, b"term", b"%d" % term)
    if execution > 0:
        execute(b"HSET", meta_key, b"execution", b"%d" % execution, b"executed_at", b"%d" % offset)
    _evaluate_keep(words, execute)
    return [epoch, offset, 1]


def _evaluate_append_many(words: Sequence[bytes], execute: Callable[..., Any]) -> Any:
    """Append to one log after the other; those before one that refuses keep what they got, as in Redis."""
    count = int(words[2])
    keys, (run_id, ttl_ms, term, execution, retained_min, *rest) = words[3 : 3 + count], words[3 + count :]
    if count % 2:
        newest, keys = execute(b"GET", keys[0]), keys[1:]
        if newest is not None and int(newest) > int(term):
            return ErrorReply(f"{FENCED} by a newer writer, term {int(newest)}")
    reply: list[Any] = []
    for number in range(0, len(keys), 2):
        epoch, payload = rest[number : number + 2]
        arguments = (run_id, epoch, ttl_ms, term, execution, retained_min, payload)
        one = evaluate([b"EVAL", APPEND_SCRIPT, b"2", *keys[number : number + 2], *arguments], execute)
        if isinstance(one, ErrorReply):
            return one
        reply += one
    return reply


def _evaluate_tips(words: Sequence[bytes], execute: Callable[..., Any]) -> list[Any]:
    count = int(words[2])
    keys, (run_id, ttl_ms) = words[3 : 3 + count], words[3 + count :]
    reply: list[Any] = []
    for meta_key, stream_key in zip(keys[::2], keys[1::2], strict=True):
        run, epoch, offset = execute(b"HMGET", meta_key, b"run", b"epoch", b"offset")
        execute(b"PEXPIRE", meta_key, ttl_ms)
        execute(b"PEXPIRE", stream_key, ttl_ms)
        is_lost = epoch is None or (run_id and run != run_id)
        reply += [b"", 0] if is_lost else [epoch, int(offset)]
    return reply


def evaluate_begin(
    words: Sequence[bytes], execute: Callable[..., Any]
) -> tuple[bytes, int, bytes | None, bytes | None, bytes | None]:
    """Do what ``BEGIN`` does; return epoch and offset of the log's end, the term, the last execution and its offset."""
    end = _evaluate_open(words, execute)
    _evaluate_keep(words, execute)
    return end


def _evaluate_open(
    words: Sequence[bytes], execute: Callable[..., Any]
) -> tuple[bytes, int, bytes | None, bytes | None, bytes | None]:
    meta_key, stream_key = words[3:5]
    run_id, new_epoch = words[3 + int(words[2]) :][:2]
    run, epoch, offset_text, term, executed, executed_at = execute(
        b"HMGET", meta_key, b"run", b"epoch", b"offset", b"term", b"execution", b"executed_at"
    )
    offset = int(offset_text or 0)
    if epoch is None or (run_id and run != run_id):
        epoch, offset, executed = new_epoch, 0, None
        execute(b"DEL", stream_key)
        execute(b"HDEL", meta_key, b"execution")
        execute(b"HSET", meta_key, b"run", run_id, b"epoch", epoch, b"offset", b"0")
    return epoch, offset, term, executed, executed_at


def _evaluate_keep(words: Sequence[bytes], execute: Callable[..., Any]) -> None:
    """Do what ``KEEP`` does."""
    ttl_ms = words[3 + int(words[2]) + 2]
    for key in words[3:5]:
        execute(b"PEXPIRE", key, ttl_ms)


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
