"""The interests of one query, as the model of the data cluster knows them.

It follows ``InterestTable`` of the data cluster command by command, without Spark's file.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dynamoth.data.queries import StandingQuery
from dynamoth.data.registrations import (
    CHANGES_MAX,
    Registration,
    expire_command,
    parse_changes,
    parse_registration,
    register_command,
    registration_keys,
)
from dynamoth_sim.data.tasks import Ask, ask

CHANGES_PER_READ = 5
"""Few, so that a reader that is behind needs several commands."""

EXPIRED_MAX = 10


@dataclass(slots=True)
class _Mirror:
    """The registrations at one server. ``position``: of the last change that was read; None: nothing was read yet."""

    position: str | None = None
    registrations: dict[str, Registration] = field(default_factory=dict[str, Registration])


class ModelTable:
    """The interests of one query."""

    def __init__(self, servers: Sequence[str], query: StandingQuery) -> None:
        self._query = query
        self._mirrors = {id_: _Mirror() for id_ in servers}

    def until(self, sealed_ms: int) -> list[Registration]:
        """Return the interests that were registered up to a time, of those that were read last."""
        every = [each for mirror in self._mirrors.values() for each in mirror.registrations.values()]
        return [each for each in every if each.at_ms <= sealed_ms]

    def refresh(self) -> Generator[Ask, Any, None]:
        """Read what has changed. Raises ServerFailed."""
        for id_, mirror in self._mirrors.items():
            if mirror.position is None or not (yield from self._has_all_changes(id_, mirror)):
                yield from self._read_all(id_, mirror)
            else:
                yield from self._read_changes(id_, mirror)

    def _read_changes(self, id_: str, mirror: _Mirror) -> Generator[Ask, Any, None]:
        changes = registration_keys(self._query.name)[2]
        while True:
            position = b"(" + (mirror.position or "0-0").encode()
            reply = yield from ask(id_, b"XRANGE", changes, position, b"+", b"COUNT", b"%d" % CHANGES_PER_READ)
            new = parse_changes(reply)
            for mirror.position, registration in new:
                _put(mirror, registration)
            if len(new) < CHANGES_PER_READ:
                return

    def _has_all_changes(self, id_: str, mirror: _Mirror) -> Generator[Ask, Any, bool]:
        changes, position = registration_keys(self._query.name)[2], mirror.position or "0-0"
        first = yield from ask(id_, b"XRANGE", changes, b"-", b"+", b"COUNT", b"1")
        last = yield from ask(id_, b"XREVRANGE", changes, b"+", b"-", b"COUNT", b"1")
        if not first or not last:
            return not mirror.registrations
        return _number(first[0][0]) <= _number(position.encode()) <= _number(last[0][0])

    def _read_all(self, id_: str, mirror: _Mirror) -> Generator[Ask, Any, None]:
        """Read everything; store again what the server has lost."""
        interests, _, changes = registration_keys(self._query.name)
        last = yield from ask(id_, b"XREVRANGE", changes, b"+", b"-", b"COUNT", b"1")
        changed = yield from ask(id_, b"XLEN", changes)
        stored = yield from ask(id_, b"HGETALL", interests)
        former, mirror.position = mirror.registrations, last[0][0].decode() if last else "0-0"
        mirror.registrations = {}
        for interest_id, value in stored.items():
            _put(mirror, parse_registration(interest_id, value))
        if changed >= CHANGES_MAX:
            return
        lost = [each for interest_id, each in former.items() if interest_id not in mirror.registrations]
        if lost:
            again = [(each.interest_id, each.params or "{}", self._query.keep_s) for each in lost]
            yield from ask(id_, *register_command(self._query.name, again))
        for each in lost:
            _put(mirror, each)


def _put(mirror: _Mirror, registration: Registration) -> None:
    if registration.params is None:
        mirror.registrations.pop(registration.interest_id, None)
    else:
        mirror.registrations[registration.interest_id] = registration


def _number(id_: bytes) -> int:
    return int(id_.partition(b"-")[0])


def expire_interests(servers: Sequence[str], query: str) -> Generator[Ask, Any, None]:
    """End the interests of a query whose time is over. Raises ServerFailed."""
    _, expiry, _ = registration_keys(query)
    for id_ in servers:
        seconds, _ = yield from ask(id_, b"TIME")
        until = b"%d" % (int(seconds) * 1000)
        late = yield from ask(id_, b"ZRANGEBYSCORE", expiry, b"-inf", until, b"LIMIT", b"0", b"%d" % EXPIRED_MAX)
        if late:
            yield from ask(id_, *expire_command(query, [each.decode() for each in late]))
