"""Bounds how many new interests of standing queries one user has registered at a broker.

A registered interest is executed until its time is over, also for a user who unsubscribes at once. So each user has a
bucket of ``per_hour`` tokens, which fills in an hour. An interest that this broker has registered, for whomever, and
whose time is not over takes none: whoever subscribes again, or shares what others have, is never refused.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

_K = TypeVar("_K", bound=Hashable)

HOUR_S = 3600.0

PURGED_MIN = 1000
"""What is over is forgotten whenever a table has doubled, and has more entries than this."""


class _Times(Generic[_K]):
    """Times by key; those that are over are forgotten sooner or later."""

    def __init__(self) -> None:
        self._by_key: dict[_K, float] = {}
        self._purge_above = PURGED_MIN

    def __len__(self) -> int:
        return len(self._by_key)

    def get(self, key: _K, now: float) -> float:
        """Return the time of a key, ``now`` if it is over or there is none."""
        return max(now, self._by_key.get(key, now))

    def put(self, key: _K, time: float, now: float) -> None:
        """Set the time of a key, unless it has a later one."""
        self._by_key[key] = max(time, self._by_key.get(key, time))
        if len(self._by_key) > self._purge_above:
            self._by_key = {each: at for each, at in self._by_key.items() if at > now}
            self._purge_above = max(PURGED_MIN, 2 * len(self._by_key))


class NewInterests:
    """The new interests of one broker's users. Memory: some 150 bytes for each that is registered."""

    def __init__(self, per_hour: int) -> None:
        """Begin without any. ``per_hour`` 0: no bound."""
        self._per_hour = per_hour
        #: When the bucket of each user is full again.
        self._full_at = _Times[Hashable]()
        #: Until when interests are registered.
        self._until = _Times[str]()

    def note(self, interest_id: str, until: float, now: float) -> None:
        """Note that an interest is registered until then."""
        if self._per_hour:
            self._until.put(interest_id, until, now)

    def wait_s(self, user: Hashable, interest_id: str, now: float) -> float:
        """Return 0 if a user may have this interest registered, and count it; else after how many seconds it may."""
        if not self._per_hour or self._until.get(interest_id, now) > now:
            return 0.0
        each_s = HOUR_S / self._per_hour
        full_at = self._full_at.get(user, now) + each_s
        too_soon_s = full_at - now - HOUR_S
        if too_soon_s > each_s / 2:  # sums of floats are not exact
            return too_soon_s
        self._full_at.put(user, full_at, now)
        return 0.0

    @property
    def size(self) -> int:
        """How many users and interests are remembered."""
        return len(self._full_at) + len(self._until)
