"""Positions that brokers keep for users: one key per interest and session, at the server of the interest's log.

Theory of operation
-------------------
A stored position says up to where a user's application has handled an interest. It is beside the log, so a script sees
both at once:

* It only moves forward within one epoch. Acknowledgements of one session may come from several brokers, in any order.
* A position of another epoch than the present one is ignored, and so is one that the log has not reached: a user who
  begins there would miss what is published meanwhile.
* A position of the present epoch replaces one of a former epoch.

Where nothing is stored, looking for the position stores the end of the log. So a user who dies before its first
acknowledgement loses nothing.

As in ``log``, the scripts' effects are written here in Python, too (``evaluate``); a test holds both to the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

from dynamoth.edge.log import KEEP, OPEN, LogOptions, begin_arguments, evaluate_begin, log_keys
from dynamoth.edge.publications import Position
from dynamoth.errors import MalformedMessage
from dynamoth.machine.events import CommandPart
from dynamoth.names import RESERVED_PREFIX
from dynamoth.protocol.wire import parser, read_array, read_bytes, shortened

POSITION_PREFIX = RESERVED_PREFIX + b"position:"
"""Prefix of the keys of positions."""

POSITIONS_PER_COMMAND_MAX = 200
"""Positions that one command stores: a log server executes nothing else meanwhile, about 1 ms."""

TTL_S = 30 * 24 * 3600.0
"""A position that nobody has used for this time is forgotten."""

_POSITION = re.compile(rb"([0-9a-f]{16}) (\d+)")

FIND_SCRIPT = (
    OPEN
    + b"""local found = redis.call('GET', KEYS[3])
local is_new = not found
if is_new then
  found = string.format('%s %d', epoch, offset)
  redis.call('SET', KEYS[3], found, 'PX', ARGV[4])
else
  redis.call('PEXPIRE', KEYS[3], ARGV[4])
end
"""
    + KEEP
    + b"return {found, is_new and 1 or 0}\n"
)

STORE_SCRIPT = b"""local stored = 0
for i = 1, #KEYS, 2 do
  local meta = redis.call('HMGET', KEYS[i], 'run', 'epoch', 'offset')
  local epoch, offset = ARGV[i + 2], tonumber(ARGV[i + 3])
  local is_present = meta[2] == epoch and (ARGV[1] == '' or meta[1] == ARGV[1])
  if is_present and offset <= tonumber(meta[3]) then
    local found_epoch, found_offset = string.match(redis.call('GET', KEYS[i + 1]) or '', '^(%x+) (%d+)$')
    if found_epoch == epoch and tonumber(found_offset) >= offset then
      redis.call('PEXPIRE', KEYS[i + 1], ARGV[2])
    else
      redis.call('SET', KEYS[i + 1], epoch .. ' ' .. ARGV[i + 3], 'PX', ARGV[2])
    end
    stored = stored + 1
  end
end
return stored
"""
"""Stores positions; returns how many of them it has not ignored."""


def position_key(interest_id: str, user: str, session: str) -> bytes:
    """Return the key of a position: the same for every process that has this session, and for no other user."""
    owner = blake2b(f"{session}\n{user}".encode(errors="surrogatepass"), digest_size=16).hexdigest()
    return POSITION_PREFIX + b"{" + interest_id.encode() + b"}:" + owner.encode()


def find_command(
    interest_id: str, key: bytes, run_id: str, new_epoch: int, options: LogOptions, ttl_s: float
) -> tuple[CommandPart, ...]:
    """Return the command that reads a position; where there is none, it stores the end of the log, and returns that.

    Args:
        interest_id: whose log.
        key: of the position.
        run_id: of the process of the server at the other end of the connection.
        new_epoch: a random number, for the case that the log is new.
        options: of the log.
        ttl_s: how long the position is kept if nobody uses it.

    """
    return (
        b"EVAL", FIND_SCRIPT, b"3", *log_keys(interest_id), key, *begin_arguments(run_id, new_epoch, options),
        _ms(ttl_s),
    )  # fmt: skip


def store_command(
    positions: Sequence[tuple[str, bytes, Position]], run_id: str, options: LogOptions, ttl_s: float
) -> tuple[CommandPart, ...]:
    """Return the command that stores positions, each with interest id and key, of logs of one server.

    At most ``POSITIONS_PER_COMMAND_MAX``. The reply is how many of them were not ignored.
    """
    keys: list[bytes] = []
    arguments: list[bytes] = [b"" if options.durable else run_id.encode(), _ms(ttl_s)]
    for interest_id, key, position in positions:
        keys += log_keys(interest_id)[0], key
        arguments += b"%016x" % position.epoch, b"%d" % position.offset
    return b"EVAL", STORE_SCRIPT, b"%d" % len(keys), *keys, *arguments


def _ms(time_s: float) -> bytes:
    return b"%d" % round(time_s * 1000)


@parser("the reply of a log's server")
def parse_found(reply: Any) -> tuple[Position, bool]:
    """Read the reply of ``find_command``: the position, and whether it is a new one. Raises MalformedMessage."""
    found, is_new = read_array(reply)
    matched = _POSITION.fullmatch(read_bytes(found))
    if matched is None:
        raise MalformedMessage(f"epoch and offset expected, not {shortened(found)}")
    return Position(int(matched[1], 16), int(matched[2])), bool(is_new)


# The model of Redis.


def is_script(words: Sequence[bytes]) -> bool:
    """Tell whether a command is a script of this module."""
    return len(words) > 1 and words[0] == b"EVAL" and words[1] in (FIND_SCRIPT, STORE_SCRIPT)


def evaluate(words: Sequence[bytes], execute: Callable[..., Any]) -> Any:
    """Do what Redis does with a script of ours: for models of Redis.

    ``execute`` gets the words of a command (those of logs, and GET and SET) and returns its reply.
    """
    return _find(words, execute) if words[1] == FIND_SCRIPT else _store(words, execute)


def _find(words: Sequence[bytes], execute: Callable[..., Any]) -> list[Any]:
    epoch, offset, *_ = evaluate_begin(words, execute)
    key, ttl_ms = words[5], words[9]
    found = execute(b"GET", key)
    if found is not None:
        execute(b"PEXPIRE", key, ttl_ms)
        return [found, 0]
    found = b"%b %d" % (epoch, offset)
    execute(b"SET", key, found, b"PX", ttl_ms)
    return [found, 1]


def _store(words: Sequence[bytes], execute: Callable[..., Any]) -> int:
    count = int(words[2])
    keys, (run, ttl_ms, *places) = words[3 : 3 + count], words[3 + count :]
    stored = 0
    for meta_key, key, epoch, offset in zip(keys[::2], keys[1::2], places[::2], places[1::2], strict=True):
        meta = execute(b"HMGET", meta_key, b"run", b"epoch", b"offset")
        if may_be_stored(run, epoch, int(offset), meta):
            found = _POSITION.fullmatch(execute(b"GET", key) or b"")
            if found is not None and is_behind(epoch, int(offset), found[1], int(found[2])):
                execute(b"PEXPIRE", key, ttl_ms)
            else:
                execute(b"SET", key, epoch + b" " + offset, b"PX", ttl_ms)
            stored += 1
    return stored


def may_be_stored(run: bytes, epoch: bytes, offset: int, meta: Sequence[bytes | None]) -> bool:
    """Tell whether a position is one of the present epoch of a log, and not ahead of its end."""
    present_run, present_epoch, tip = meta
    return present_epoch == epoch and (not run or present_run == run) and offset <= int(tip or 0)


def is_behind(epoch: bytes, offset: int, found_epoch: bytes, found_offset: int) -> bool:
    """Tell whether a position is not ahead of the stored one."""
    return found_epoch == epoch and found_offset >= offset
