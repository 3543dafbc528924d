"""The key space of the simulated Redis: strings, hashes, sets, streams, expiry; no more than our machines use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dynamoth.machine.events import ErrorReply

KEY_BYTES = 100
"""About what a key takes besides its name, for the memory that INFO tells."""

WRONG_TYPE = "WRONGTYPE Operation against a key holding the wrong kind of value"


class UnknownCommand(Exception):
    """Raised when a machine sends what this model does not know: teach the model, after reading what Redis does."""


@dataclass(slots=True)
class Snapshot:
    """The content of an RDB file: values, and the times at which some expire."""

    strings: dict[bytes, bytes] = field(default_factory=dict[bytes, bytes])
    hashes: dict[bytes, dict[bytes, bytes]] = field(default_factory=dict[bytes, dict[bytes, bytes]])
    streams: dict[bytes, dict[int, list[bytes]]] = field(default_factory=dict[bytes, dict[int, list[bytes]]])
    sorted_sets: dict[bytes, dict[bytes, float]] = field(default_factory=dict[bytes, dict[bytes, float]])
    expiries: dict[bytes, float] = field(default_factory=dict[bytes, float])


class KeySpace:
    """The keys of one server.

    Args:
        clock: tells the time.
        snapshot: what it begins with.

    """

    def __init__(self, clock: Callable[[], float], snapshot: Snapshot) -> None:
        self._clock = clock
        self._strings = dict(snapshot.strings)
        self._hashes = {key: dict(fields) for key, fields in snapshot.hashes.items()}
        #: By key: the fields of each entry, by the first part of its id; the second part is always 0.
        self._streams = {key: dict(entries) for key, entries in snapshot.streams.items()}
        self._sorted_sets = {key: dict(scores) for key, scores in snapshot.sorted_sets.items()}
        self._expiries = dict(snapshot.expiries)
        self._commands: dict[bytes, Callable[[Sequence[bytes]], Any]] = {
            b"HSET": self._hset,
            b"HGET": self._hget,
            b"HMGET": self._hmget,
            b"HGETALL": self._hgetall,
            b"HLEN": self._hlen,
            b"HDEL": self._hdel,
            b"HINCRBY": self._hincrby,
            b"RENAME": self._rename,
            b"DEL": self._del,
            b"GET": self._get,
            b"SET": self._set,
            b"INCR": self._incr,
            b"PEXPIRE": self._pexpire,
            b"PTTL": self._pttl,
            b"XADD": self._xadd,
            b"XLEN": self._xlen,
            b"XRANGE": self._xrange,
            b"XREVRANGE": self._xrevrange,
            b"XTRIM": self._xtrim,
            b"ZADD": self._zadd,
            b"ZREM": self._zrem,
            b"ZREMRANGEBYSCORE": self._zremrangebyscore,
            b"ZSCORE": self._zscore,
            b"ZRANGEBYSCORE": self._zrangebyscore,
        }

    def execute(self, words: Sequence[bytes]) -> Any:
        """Execute a command, given with its name; return the reply."""
        if words[0] == b"TIME":
            return [b"%d" % part for part in divmod(int(self._clock() * 1e6), 1_000_000)]
        command = self._commands.get(words[0])
        if command is None:
            raise UnknownCommand(f"{words!r:.200}")
        self._expire(words[1])
        if words[0].startswith(b"H") and words[1] in self._strings:
            return ErrorReply(WRONG_TYPE)
        return command(words)

    def snapshot(self) -> Snapshot:
        """Return a copy of everything."""
        hashes = {key: dict(fields) for key, fields in self._hashes.items()}
        streams = {key: dict(entries) for key, entries in self._streams.items()}
        sorted_sets = {key: dict(scores) for key, scores in self._sorted_sets.items()}
        return Snapshot(dict(self._strings), hashes, streams, sorted_sets, dict(self._expiries))

    def hash(self, key: bytes) -> dict[bytes, bytes]:
        """Return the fields of a hash; none where there is no such key."""
        self._expire(key)
        return self._hashes.get(key, {})

    @property
    def size_bytes(self) -> int:
        """About how much memory the keys take."""
        return sum(len(key) + KEY_BYTES for key in self._names())

    def _names(self) -> list[bytes]:
        return [*self._strings, *self._hashes, *self._streams, *self._sorted_sets]

    def _expire(self, key: bytes) -> None:
        if self._expiries.get(key, float("inf")) <= self._clock():
            self._delete(key)

    def _exists(self, key: bytes) -> bool:
        self._expire(key)
        return any(key in table for table in (self._strings, self._hashes, self._streams, self._sorted_sets))

    def _delete(self, key: bytes) -> None:
        self._strings.pop(key, None)
        self._hashes.pop(key, None)
        self._streams.pop(key, None)
        self._sorted_sets.pop(key, None)
        self._expiries.pop(key, None)

    # Hashes.

    def _hset(self, words: Sequence[bytes]) -> Any:
        stored = self._hashes.setdefault(words[1], {})
        fields = dict(zip(words[2::2], words[3::2], strict=True))
        new = sum(name not in stored for name in fields)
        stored.update(fields)
        return new

    def _hget(self, words: Sequence[bytes]) -> Any:
        return self.hash(words[1]).get(words[2])

    def _hmget(self, words: Sequence[bytes]) -> Any:
        stored = self.hash(words[1])
        return [stored.get(name) for name in words[2:]]

    def _hgetall(self, words: Sequence[bytes]) -> Any:
        return dict(self.hash(words[1]))

    def _hlen(self, words: Sequence[bytes]) -> Any:
        return len(self.hash(words[1]))

    def _hincrby(self, words: Sequence[bytes]) -> Any:
        _, key, name, increment = words
        fields = self._hashes.setdefault(key, {})
        value = int(fields.get(name, b"0")) + int(increment)
        fields[name] = b"%d" % value
        return value

    def _hdel(self, words: Sequence[bytes]) -> Any:
        stored = self.hash(words[1])
        removed = sum(stored.pop(name, None) is not None for name in words[2:])
        if not stored:
            self._delete(words[1])
        return removed

    # Any key.

    def _rename(self, words: Sequence[bytes]) -> Any:
        _, old, new = words
        if not self._exists(old):
            return ErrorReply("ERR no such key")
        self._delete(new)
        for table in (self._strings, self._hashes, self._streams, self._sorted_sets, self._expiries):
            _move(table, old, new)
        return b"OK"

    def _del(self, words: Sequence[bytes]) -> Any:
        there = [key for key in words[1:] if self._exists(key)]
        for key in there:
            self._delete(key)
        return len(there)

    def _pexpire(self, words: Sequence[bytes]) -> Any:
        if not self._exists(words[1]):
            return 0
        self._expiries[words[1]] = self._clock() + int(words[2]) / 1000
        return 1

    def _pttl(self, words: Sequence[bytes]) -> Any:
        if not self._exists(words[1]):
            return -2
        expiry = self._expiries.get(words[1])
        return -1 if expiry is None else int((expiry - self._clock()) * 1000)

    # Streams.

    def _xadd(self, words: Sequence[bytes]) -> Any:
        """Append an entry, and drop the oldest: at once, where Redis waits until it can drop a whole node (``~``)."""
        key, most, rest = words[1], None, words[2:]
        if rest[0] == b"MAXLEN":
            assert rest[1] == b"~", f"XADD with {words!r:.200}"
            most, rest = int(rest[2]), rest[3:]
        id_, *fields = rest
        entries = self._streams.setdefault(key, {})
        last = max(entries, default=0)
        number = max(last + 1, int(self._clock() * 1000)) if id_ == b"*" else int(id_.removesuffix(b"-0"))
        assert number > last, "ids of a stream increase"
        entries[number] = list(fields)
        while most is not None and len(entries) > most:
            del entries[next(iter(entries))]
        return b"%d-0" % number

    def _xlen(self, words: Sequence[bytes]) -> Any:
        return len(self._streams.get(words[1], {}))

    def _xrange(self, words: Sequence[bytes]) -> Any:
        _, key, first, last, count, most = words
        assert count == b"COUNT", f"XRANGE with {words!r:.200}"
        is_open = first.startswith(b"(")
        begin = 0 if first == b"-" else int(first.removeprefix(b"(").removesuffix(b"-0")) + is_open
        end = float("inf") if last == b"+" else int(last.removesuffix(b"-0"))
        entries = self._streams.get(key, {}).items()
        found = [[b"%d-0" % number, fields] for number, fields in entries if begin <= number <= end]
        return found[: int(most)]

    def _xrevrange(self, words: Sequence[bytes]) -> Any:
        _, key, last, first, count, most = words
        assert (last, first, count) == (b"+", b"-", b"COUNT"), f"XREVRANGE with {words!r:.200}"
        entries = self._streams.get(key, {})
        newest = list(reversed(entries))[: int(most)]
        return [[b"%d-0" % number, entries[number]] for number in newest]

    def _xtrim(self, words: Sequence[bytes]) -> Any:
        assert words[2] == b"MINID", f"XTRIM with {words!r:.200}"
        entries, first_kept = self._streams.get(words[1], {}), int(words[3].removesuffix(b"-0"))
        gone = [number for number in entries if number < first_kept]
        for number in gone:
            del entries[number]
        return len(gone)

    # Sorted sets.

    def _zadd(self, words: Sequence[bytes]) -> Any:
        *options, score, member = words[2:]
        scores = self._sorted_sets.setdefault(words[1], {})
        is_new = member not in scores
        if is_new or b"NX" not in options:
            scores[member] = float(score)
        return int(is_new)

    def _zremrangebyscore(self, words: Sequence[bytes]) -> Any:
        _, key, least, most = words
        assert least == b"-inf", f"ZREMRANGEBYSCORE with {words!r:.200}"
        gone = [member for member, score in self._sorted_sets.get(key, {}).items() if score <= float(most)]
        return self._zrem([b"ZREM", key, *gone]) if gone else 0

    def _zrem(self, words: Sequence[bytes]) -> Any:
        scores = self._sorted_sets.get(words[1], {})
        removed = sum(scores.pop(member, None) is not None for member in words[2:])
        if not scores:
            self._delete(words[1])
        return removed

    def _zscore(self, words: Sequence[bytes]) -> Any:
        score = self._sorted_sets.get(words[1], {}).get(words[2])
        return None if score is None else b"%d" % score

    def _zrangebyscore(self, words: Sequence[bytes]) -> Any:
        _, key, least, most, limit, skip, count = words
        assert (least, limit, skip) == (b"-inf", b"LIMIT", b"0"), f"ZRANGEBYSCORE with {words!r:.200}"
        scores = self._sorted_sets.get(key, {})
        found = sorted((score, member) for member, score in scores.items() if score <= float(most))
        return [member for _, member in found[: int(count)]]

    # Strings.

    def _get(self, words: Sequence[bytes]) -> Any:
        return ErrorReply(WRONG_TYPE) if words[1] in self._hashes else self._strings.get(words[1])

    def _incr(self, words: Sequence[bytes]) -> Any:
        value = int(self._strings.get(words[1], b"0")) + 1
        self._strings[words[1]] = b"%d" % value
        return value

    def _set(self, words: Sequence[bytes]) -> Any:
        key, value = words[1:3]
        options = iter(words[3:])
        expiry: float | None = None
        for option in options:
            match option.upper():
                case b"NX" | b"XX":
                    if self._exists(key) == (option.upper() == b"NX"):
                        return None
                case b"PX":
                    expiry = self._clock() + int(next(options)) / 1000
                case b"EX":
                    expiry = self._clock() + int(next(options))
                case _:
                    raise UnknownCommand(f"SET with {option!r}")
        self._delete(key)
        self._strings[key] = value
        if expiry is not None:
            self._expiries[key] = expiry
        return b"OK"


def _move(table: dict[bytes, Any], old: bytes, new: bytes) -> None:
    if old in table:
        table[new] = table.pop(old)
