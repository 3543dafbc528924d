"""The stream of a dataset's partition at one log server, written by a script and read with XRANGE.

Theory of operation
-------------------
A dataset's records are spread over partitions. Each is a Redis stream and a hash, at the log server that rendezvous
hashing gives (``partition_server``). A record has an **offset**: the first part of its id in the stream. Offsets only
grow, whatever happens to the server: a stream that is new, or whose server has restarted and may have lost its last
records, goes on at ``TIME * 2^20``, the server's clock with its fraction of a second. So no offset is ever given twice,
while a server stores less than a million records per second. A restart that may have lost records is counted
(``restarts``).

A record is durable once the script has answered, as durable as the server makes it (``appendfsync``). The archive
copies records to Parquet files and then trims the stream. Where it falls behind, records are refused (``FULL``), and
none is dropped.

*Losses.* Offsets that follow one another without a jump are a **run**. The hash has the last offset before each run, as
the server knew it, and the offset from which the run counts (``runs``). So a jump can be judged: a reader that misses
records asks ``PartitionState.given`` which offsets of the jump the server had given. Those are lost. A server that
forgets its last records forgets that it gave them, too. Only a reader that saw such an offset can know, and asks
``PartitionState.has_forgotten``. The last offset of a partition is always that of a record.

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

REMEMBERED_BYTES_MAX = 64
"""Longest id that a server remembers as it is: users choose ids, which may be as long as a record."""

OFFSET_BITS = 20
"""Offsets begin at the server's clock, in seconds, with this many bits of its fraction: about its microseconds."""

RECORDS_PER_COMMAND_MAX = 500
"""Records of one command: a log server executes nothing else meanwhile, some milliseconds."""

RUNS_BYTES_MAX = 4000
"""The hash of a partition has the runs of about this many bytes, some 100 runs; it forgets older ones."""

APPEND_SCRIPT = b"""redis.replicate_commands()
local meta = redis.call('HMGET', KEYS[1], 'run', 'offset', 'runs')
local last, time = tonumber(meta[2]), redis.call('TIME')
local is_new_run = not last or (ARGV[1] ~= '' and meta[1] ~= ARGV[1])
local begin = last
if is_new_run then
  begin = math.max(last or 0, tonumber(time[1]) * 1048576 + math.floor(tonumber(time[2]) * 1048576 / 1000000))
end
local count = (#ARGV - 3) / 2
if redis.call('XLEN', KEYS[2]) + count > tonumber(ARGV[2]) then
  return redis.error_reply('FULL: ' .. ARGV[2] .. ' records wait for the archive')
end
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local offset, reply = begin, {}
if tonumber(ARGV[3]) > 0 then
  redis.call('ZADD', KEYS[3], 'XX', now, '')
  redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', now - tonumber(ARGV[3]))
end
for i = 4, #ARGV, 2 do
  local is_new = ARGV[i] == '' or redis.call('ZADD', KEYS[3], 'NX', now, ARGV[i]) == 1
  if is_new then
    offset = offset + 1
    redis.call('XADD', KEYS[2], string.format('%.0f-0', offset), 't', now, 'd', ARGV[i + 1])
  end
  reply[#reply + 1] = is_new and offset or 0
end
if tonumber(ARGV[3]) > 0 then redis.call('PEXPIRE', KEYS[3], ARGV[3]) end
if offset == begin then return reply end
if is_new_run then
  if last then redis.call('HINCRBY', KEYS[1], 'restarts', 1) end
  local runs = (meta[3] or '') .. string.format('%.0f-%.0f ', last or 0, begin)
  if #runs > 4000 then runs = string.sub(runs, string.find(runs, ' ', #runs - 4000, true) + 1) end
  redis.call('HSET', KEYS[1], 'run', ARGV[1], 'runs', runs)
end
redis.call('HSET', KEYS[1], 'offset', string.format('%.0f', offset))
return reply
"""
"""Stores records; returns the offset of each, 0 for one that was stored before.

Redis refuses the first write of a script for lack of memory, and none behind another write. ZREMRANGEBYSCORE is a write
that takes no memory, so before it comes a ZADD that changes nothing: no id is empty.
"""


@dataclass(frozen=True, slots=True)
class Record:
    """A stored record."""

    offset: int
    #: When it was stored, by the server's clock, in ms since 1970.
    arrived_ms: int
    #: JSON, as ``Dataset.normalize`` returns it.
    value: bytes


def partition_name(stream: str, partition: int) -> str:
    """Return the name of a partition, for texts and keys: ``reports/0``. ``stream`` is that of its dataset."""
    return f"{stream}/{partition}"


def partition_names(dataset: Dataset) -> list[str]:
    """Return the names of all partitions of a dataset."""
    return [partition_name(dataset.stream, number) for number in range(dataset.partitions)]


def partition_keys(name: str) -> tuple[bytes, bytes, bytes]:
    """Return the keys of a partition: its hash, its stream, and the ids of its latest records."""
    prefix = DATA_PREFIX + b"{" + name.encode() + b"}"
    return prefix + b":meta", prefix + b":records", prefix + b":ids"


def partition_server(name: str, servers: Sequence[str]) -> str:
    """Return which of the log servers has a partition (rendezvous hashing, by id)."""
    return max(servers, key=lambda server: blake2b(f"{server} data {name}".encode(), digest_size=8).digest())


def partition_of(dataset: Dataset, place: str, turn: int) -> int:
    """Return the partition of a record with this key or id; without one, records go in turn.

    An empty key is one like others: which of its records is the latest, only one partition can say.
    """
    if not place and dataset.kind != "keyed":
        return turn % dataset.partitions
    return int.from_bytes(blake2b(place.encode(errors="replace"), digest_size=8).digest()) % dataset.partitions


def append_records_command(
    dataset: Dataset, partition: int, records: Sequence[tuple[bytes, str]], run_id: str
) -> tuple[CommandPart, ...]:
    """Return the command that stores records in a partition.

    Args:
        dataset: to which the records belong.
        partition: its number, from 0.
        records: stored form and id of each, as ``Dataset.normalize`` returns them; ``RECORDS_PER_COMMAND_MAX`` at most.
        run_id: of the process of the server at the other end; empty where the server loses nothing when it restarts.

    """
    keys = partition_keys(partition_name(dataset.stream, partition))
    remembered_ms = round(dataset.duplicate_s * 1000) if dataset.id else 0
    arguments: list[bytes] = [run_id.encode(), b"%d" % dataset.waiting_max, b"%d" % remembered_ms]
    for value, id_ in records:
        arguments += _remembered(id_) if remembered_ms else b"", value
    return b"EVAL", APPEND_SCRIPT, b"3", *keys, *arguments


def _remembered(id_: str) -> bytes:
    """Return by what a server remembers an id: a long one by its hash, which is longer than any short one."""
    as_it_is = id_.encode()
    return as_it_is if len(as_it_is) <= REMEMBERED_BYTES_MAX else blake2b(as_it_is).hexdigest().encode()


@parser("the reply of a dataset's server")
def parse_appended_records(reply: Any, count: int) -> list[int]:
    """Read the reply of ``append_records_command``: the offset of each record, 0 for one that was stored before.

    ``count`` is how many records the command had. Raises MalformedMessage, also where the reply has another number.
    """
    offsets = [int(offset) for offset in read_array(reply)]
    if len(offsets) != count:
        raise MalformedMessage(f"the offsets of {count} records expected, not {len(offsets)}")
    return offsets


def is_full(error: str) -> bool:
    """Return whether an error of a log server refuses records because the archive has fallen behind."""
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


@dataclass(frozen=True, slots=True)
class PartitionState:
    """What the server of a partition knows about the offsets that it has given."""

    #: That of the last record; 0: there was none, or the server has lost all that it knew.
    offset: int
    #: How often the server may have lost records.
    restarts: int = 0
    #: Of each run the last offset before it, which the server knew when it began (0: none), and the offset from which
    #: it counts: its first record has the next one. The latest is last; very old ones are forgotten.
    runs: tuple[tuple[int, int], ...] = ()

    def given(self, after: int, until: int) -> list[tuple[int, int]]:
        """Return the offsets behind ``after`` and up to ``until`` that the server has given: first and last, by run.

        Of what was before its oldest run, it knows only the last offset.
        """
        ends = [last for last, _ in self.runs] + [self.offset]
        begins = [ends[0] - 1, *(begin for _, begin in self.runs)]
        spans = [(max(begin, after) + 1, min(end, until)) for begin, end in zip(begins, ends, strict=True) if end > 0]
        return [(first, last) for first, last in spans if first <= last]

    def count(self, after: int, until: int) -> int:
        """Return how many records have offsets behind ``after`` and up to ``until``."""
        return sum(last - first + 1 for first, last in self.given(after, until))

    def has_forgotten(self, offset: int) -> bool:
        """Return whether the server has lost records: it is behind an offset that somebody saw as the last one."""
        return offset > self.offset or any(last < offset <= begin for last, begin in self.runs)


def state_command(name: str) -> tuple[CommandPart, ...]:
    """Return the command that reads what the server knows about the offsets of a partition."""
    return b"HMGET", partition_keys(name)[0], b"offset", b"restarts", b"runs"


@parser("the reply of a dataset's server")
def parse_state(reply: Any) -> PartitionState:
    """Read the reply of ``state_command``. Raises MalformedMessage."""
    offset, restarts, runs = read_array(reply)
    pairs = (word.split(b"-") for word in read_bytes(runs or b"").split())
    return PartitionState(int(offset or 0), int(restarts or 0), tuple((int(last), int(begin)) for last, begin in pairs))


def finish_load_command(name: str, count: int) -> tuple[CommandPart, ...]:
    """Return the command that says that a partition of a load of a static dataset is complete, with ``count`` records.

    Without it, a load that is gone would look like one without records.
    """
    return b"HSET", partition_keys(name)[0], b"records", b"%d" % count


def load_size_command(name: str) -> tuple[CommandPart, ...]:
    """Return the command that reads how many records a partition of a load has."""
    return b"HGET", partition_keys(name)[0], b"records"


@parser("the reply of a dataset's server")
def parse_load_size(reply: Any) -> int | None:
    """Read the reply of ``load_size_command``; None: the partition is not there, or not complete."""
    return None if reply is None else int(reply)


def latest_command(name: str, count: int) -> tuple[CommandPart, ...]:
    """Return the command that reads the last records of a partition, the newest first."""
    return b"XREVRANGE", partition_keys(name)[1], b"+", b"-", b"COUNT", b"%d" % count


@parser("the reply of a dataset's server")
def parse_latest(reply: Any) -> list[Record]:
    """Read the reply of ``latest_command``; the oldest comes first. Raises MalformedMessage."""
    return parse_records(list(reversed(read_array(reply))))


def is_records_script(words: Sequence[bytes]) -> bool:
    """Return whether a command is the script of this module."""
    return len(words) > 1 and words[0] == b"EVAL" and words[1] == APPEND_SCRIPT


def evaluate(words: Sequence[bytes], execute: Callable[..., Any]) -> Any:
    """Do what Redis does with the script: for models of Redis.

    ``execute`` gets the words of a command (HMGET, HINCRBY, HSET, TIME, XLEN, XADD, ZADD, ZREMRANGEBYSCORE, PEXPIRE).
    """
    meta, stream, ids = words[3:6]
    run_id, waiting_max, remembered_ms, *records = words[6:]
    run, stored, runs = execute(b"HMGET", meta, b"run", b"offset", b"runs")
    seconds, microseconds = map(int, execute(b"TIME"))
    last = int(stored or 0)
    is_new_run = stored is None or bool(run_id and run != run_id)
    clock = (seconds << OFFSET_BITS) + (microseconds << OFFSET_BITS) // 1_000_000
    begin = max(last, clock) if is_new_run else last
    if execute(b"XLEN", stream) + len(records) // 2 > int(waiting_max):
        return ErrorReply(f"{FULL}: {int(waiting_max)} records wait for the archive")
    now = seconds * 1000 + microseconds // 1000
    is_remembered = int(remembered_ms) > 0
    if is_remembered:
        execute(b"ZREMRANGEBYSCORE", ids, b"-inf", b"%d" % (now - int(remembered_ms)))
    offset, reply = begin, list[int]()
    for id_, value in zip(records[::2], records[1::2], strict=True):
        is_new = not id_ or execute(b"ZADD", ids, b"NX", b"%d" % now, id_) == 1
        if is_new:
            offset += 1
            execute(b"XADD", stream, b"%d-0" % offset, b"t", b"%d" % now, b"d", value)
        reply.append(offset if is_new else 0)
    if is_remembered:
        execute(b"PEXPIRE", ids, remembered_ms)
    if offset == begin:
        return reply
    if is_new_run:
        if stored is not None:
            execute(b"HINCRBY", meta, b"restarts", b"1")
        runs = (runs or b"") + b"%d-%d " % (last, begin)
        if len(runs) > RUNS_BYTES_MAX:
            runs = runs[runs.index(b" ", len(runs) - RUNS_BYTES_MAX - 1) + 1 :]
        execute(b"HSET", meta, b"run", run_id, b"runs", runs)
    execute(b"HSET", meta, b"offset", b"%d" % offset)
    return reply
