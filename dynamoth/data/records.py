"""The stream of a dataset's partition at one log server, written by a script and read with XRANGE.

Theory of operation
-------------------
A dataset's records are spread over partitions. Each is a Redis stream and a hash, at the log server that rendezvous
hashing gives (``partition_server``). A record has an **offset**: the first part of its id in the stream. Offsets only
grow, whatever happens to the server: a stream that is new, or whose server has restarted and may have lost its last
records, goes on at ``TIME * 2^20``, the server's clock in seconds with their fraction. So no offset is ever given
twice, while a server stores less than a million records per second. A restart that may have lost records is counted
(``restarts``).

A record is durable once the script has answered, as durable as the server makes it (``appendfsync``). The archive
copies records to Parquet files and then trims the stream. Where it falls behind, records are refused (``FULL``), and
none is dropped.

*Duplicates.* A producer that gets no answer sends its records again. Where the dataset has an ``id``, the script knows
the ids of the last ``duplicate_s``, and stores each once.

As for logs, the script's effects are written here in Python, too (``evaluate``); a test holds both to the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from dynamoth.data.datasets import Dataset
from dynamoth.errors import MalformedMessage
from dynamoth.machine.events import CommandPart, ErrorReply
from dynamoth.names import RESERVED_PREFIX
from dynamoth.protocol.wire import parser, read_array, read_bytes

DATA_PREFIX = RESERVED_PREFIX + b"data:"
"""Prefix of the keys of the data cluster, all of them at log servers."""

FULL = "FULL"
"""The first word of the error that refuses records until the archive has caught up."""

OFFSET_BITS = 20
"""Offsets begin at the server's clock in seconds, shifted by so many bits."""

RECORDS_PER_COMMAND_MAX = 500
"""Records of one command: a log server executes nothing else meanwhile, some milliseconds."""

APPEND_SCRIPT = b"""redis.replicate_commands()
local meta = redis.call('HMGET', KEYS[1], 'run', 'offset')
local offset, time = tonumber(meta[2]), redis.call('TIME')
if not offset or (ARGV[1] ~= '' and meta[1] ~= ARGV[1]) then
  if offset and meta[1] then redis.call('HINCRBY', KEYS[1], 'restarts', 1) end
  offset = math.max(offset or 0, tonumber(time[1]) * 1048576 + math.floor(tonumber(time[2]) * 1.048576))
  redis.call('HSET', KEYS[1], 'run', ARGV[1], 'offset', string.format('%.0f', offset))
end
local count = (#ARGV - 3) / 2
if redis.call('XLEN', KEYS[2]) + count > tonumber(ARGV[2]) then
  return redis.error_reply('FULL: ' .. ARGV[2] .. ' records wait for the archive')
end
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local reply = {}
if tonumber(ARGV[3]) > 0 then redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', now - tonumber(ARGV[3])) end
for i = 4, #ARGV, 2 do
  local is_new = ARGV[i] == '' or redis.call('ZADD', KEYS[3], 'NX', now, ARGV[i]) == 1
  if is_new then
    offset = offset + 1
    redis.call('XADD', KEYS[2], string.format('%.0f-0', offset), 't', now, 'd', ARGV[i + 1])
  end
  reply[#reply + 1] = is_new and offset or 0
end
if tonumber(ARGV[3]) > 0 then redis.call('PEXPIRE', KEYS[3], ARGV[3]) end
redis.call('HSET', KEYS[1], 'offset', string.format('%.0f', offset))
return reply
"""
"""Stores records; returns the offset of each, 0 for one that was stored before."""


@dataclass(frozen=True, slots=True)
class Record:
    """A stored record."""

    offset: int
    #: When it was stored, by the server's clock, in ms since 1970.
    arrived_ms: int
    #: JSON, as ``Dataset.normalize`` returns it.
    value: bytes


def partition_name(dataset: str, partition: int) -> str:
    """Return the name of a partition, for texts and keys: ``reports/0``."""
    return f"{dataset}/{partition}"


def partition_keys(name: str) -> tuple[bytes, bytes, bytes]:
    """Return the keys of a partition: its hash, its stream, and the ids of its latest records."""
    prefix = DATA_PREFIX + b"{" + name.encode() + b"}"
    return prefix + b":meta", prefix + b":records", prefix + b":ids"


def partition_server(name: str, servers: Sequence[str]) -> str:
    """Return which of the log servers has a partition (rendezvous hashing, by id)."""
    return max(servers, key=lambda server: blake2b(f"{server} data {name}".encode(), digest_size=8).digest())


def partition_of(dataset: Dataset, place: str, turn: int) -> int:
    """Return the partition of a record with this key or id; without one, records go in turn."""
    if not place:
        return turn % dataset.partitions
    return int.from_bytes(blake2b(place.encode(errors="replace"), digest_size=8).digest()) % dataset.partitions


def append_records_command(
    dataset: Dataset, partition: int, records: Sequence[tuple[bytes, str]], run_id: str
) -> tuple[CommandPart, ...]:
    """Return the command that stores records in a partition.

    Args:
        dataset: whose.
        partition: which of its partitions.
        records: stored form and id of each, as ``Dataset.normalize`` returns them; ``RECORDS_PER_COMMAND_MAX`` at most.
        run_id: of the process of the server at the other end; empty where the server loses nothing when it restarts.

    """
    keys = partition_keys(partition_name(dataset.stream, partition))
    remembered_ms = round(dataset.duplicate_s * 1000) if dataset.id else 0
    arguments: list[bytes] = [run_id.encode(), b"%d" % dataset.waiting_max, b"%d" % remembered_ms]
    for value, id_ in records:
        arguments += id_.encode() if remembered_ms else b"", value
    return b"EVAL", APPEND_SCRIPT, b"3", *keys, *arguments


@parser("the reply of a dataset's server")
def parse_appended_records(reply: Any) -> list[int]:
    """Read the reply of ``append_records_command``: the offset of each record, 0 for one that was stored before."""
    return [int(offset) for offset in read_array(reply)]


def is_full(error: str) -> bool:
    """Tell whether an error of a log server refuses records because the archive has fallen behind."""
    return FULL in "".join(error.split()[:2])


def range_command(name: str, after: int, until: int, count: int) -> tuple[CommandPart, ...]:
    """Return the command that reads up to ``count`` records of a partition, behind ``after`` and up to ``until``."""
    return b"XRANGE", partition_keys(name)[1], b"%d-0" % (after + 1), b"%d-0" % until, b"COUNT", b"%d" % count


@parser("the reply of a dataset's server")
def parse_records(reply: Any) -> list[Record]:
    """Read the reply of ``range_command``. Raises MalformedMessage."""
    records: list[Record] = []
    for entry in read_array(reply):
        id_, pairs = read_array(entry)
        fields = dict(zip(pairs[::2], pairs[1::2], strict=True))
        offset = int(read_bytes(id_).partition(b"-")[0])
        if records and offset <= records[-1].offset:
            raise MalformedMessage(f"a partition has offset {offset} behind {records[-1].offset}")
        records.append(Record(offset, int(fields[b"t"]), read_bytes(fields[b"d"])))
    return records


def tip_command(name: str) -> tuple[CommandPart, ...]:
    """Return the command that reads the last offset of a partition, and how often its server may have lost records."""
    return b"HMGET", partition_keys(name)[0], b"offset", b"restarts"


@parser("the reply of a dataset's server")
def parse_tip(reply: Any) -> tuple[int, int]:
    """Read the reply of ``tip_command``: last offset (0: nothing was stored yet), and restarts."""
    offset, restarts = read_array(reply)
    return int(offset or 0), int(restarts or 0)


def latest_command(name: str, count: int) -> tuple[CommandPart, ...]:
    """Return the command that reads the last records of a partition, the newest first."""
    return b"XREVRANGE", partition_keys(name)[1], b"+", b"-", b"COUNT", b"%d" % count


@parser("the reply of a dataset's server")
def parse_latest(reply: Any) -> list[Record]:
    """Read the reply of ``latest_command``; the oldest comes first. Raises MalformedMessage."""
    return parse_records(list(reversed(read_array(reply))))


def trim_command(name: str, until: int) -> tuple[CommandPart, ...]:
    """Return the command that removes the records of a partition up to ``until``; call it once they are archived."""
    return b"XTRIM", partition_keys(name)[1], b"MINID", b"%d-0" % (until + 1)


def is_records_script(words: Sequence[bytes]) -> bool:
    """Tell whether a command is the script of this module."""
    return len(words) > 1 and words[0] == b"EVAL" and words[1] == APPEND_SCRIPT


def evaluate(words: Sequence[bytes], execute: Callable[..., Any]) -> Any:
    """Do what Redis does with the script: for models of Redis.

    ``execute`` gets the words of a command (HMGET, HINCRBY, HSET, TIME, XLEN, XADD, ZADD, ZREMRANGEBYSCORE, PEXPIRE).
    """
    meta, stream, ids = words[3:6]
    run_id, waiting_max, remembered_ms, *records = words[6:]
    run, stored = execute(b"HMGET", meta, b"run", b"offset")
    seconds, microseconds = map(int, execute(b"TIME"))
    offset = int(stored or 0)
    if stored is None or (run_id and run != run_id):
        if stored is not None and run is not None:
            execute(b"HINCRBY", meta, b"restarts", b"1")
        offset = max(offset, (seconds << OFFSET_BITS) + (microseconds << OFFSET_BITS) // 1_000_000)
        execute(b"HSET", meta, b"run", run_id, b"offset", b"%d" % offset)
    if execute(b"XLEN", stream) + len(records) // 2 > int(waiting_max):
        return ErrorReply(f"{FULL}: {int(waiting_max)} records wait for the archive")
    now = seconds * 1000 + microseconds // 1000
    is_remembered = int(remembered_ms) > 0
    if is_remembered:
        execute(b"ZREMRANGEBYSCORE", ids, b"-inf", b"%d" % (now - int(remembered_ms)))
    reply: list[int] = []
    for id_, value in zip(records[::2], records[1::2], strict=True):
        is_new = not id_ or execute(b"ZADD", ids, b"NX", b"%d" % now, id_) == 1
        if is_new:
            offset += 1
            execute(b"XADD", stream, b"%d-0" % offset, b"t", b"%d" % now, b"d", value)
        reply.append(offset if is_new else 0)
    if is_remembered:
        execute(b"PEXPIRE", ids, remembered_ms)
    execute(b"HSET", meta, b"offset", b"%d" % offset)
    return reply
