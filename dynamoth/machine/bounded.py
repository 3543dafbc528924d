"""A table that stays small however much others put into it: bounded in entries and in bytes, the oldest are evicted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")

ENTRY_BYTES = 200
"""Approximate memory of an entry besides its name: the slot of the table, a tuple, a few numbers."""


def _nothing(key: object, value: object) -> None:
    """Ignore an evicted entry."""


class BoundedTable(Generic[K, V]):
    """A mapping that evicts the entries with the oldest ``put``.

    Args:
        entries_max: most entries.
        bytes_max: most bytes, as ``size`` counts them. A larger entry is not kept.
        size: the approximate bytes of an entry.
        on_evicted: called with each evicted entry.

    """

    __slots__ = ("_entries", "_entries_max", "_on_evicted", "_size", "_sizes_max", "evicted", "size_bytes")

    def __init__(
        self,
        entries_max: int,
        bytes_max: int,
        size: Callable[[K, V], int],
        on_evicted: Callable[[K, V], None] = _nothing,
    ) -> None:
        self._entries_max = entries_max
        self._sizes_max = bytes_max
        self._size = size
        self._on_evicted = on_evicted
        #: The value and the size of each entry, by key; the latest ``put`` comes last.
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()
        #: Sum of the sizes.
        self.size_bytes = 0
        #: How many entries were evicted.
        self.evicted = 0

    def __len__(self) -> int:
        """Return how many entries there are."""
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        """Tell whether there is an entry."""
        return key in self._entries

    def __iter__(self) -> Iterator[K]:
        """Yield the keys, the oldest ``put`` first."""
        return iter(self._entries)

    def get(self, key: K) -> V | None:
        """Return the value of an entry; None where there is none."""
        entry = self._entries.get(key)
        return None if entry is None else entry[0]

    def put(self, key: K, value: V) -> None:
        """Set the value of an entry, as the newest one, and evict the oldest until the bounds hold."""
        self.pop(key)
        size = self._size(key, value)
        self._entries[key] = value, size
        self.size_bytes += size
        while len(self._entries) > self._entries_max or self.size_bytes > self._sizes_max:
            oldest, (old_value, old_size) = self._entries.popitem(last=False)
            self.size_bytes -= old_size
            self.evicted += 1
            self._on_evicted(oldest, old_value)

    def pop(self, key: K) -> V | None:
        """Remove an entry and return its value; None where there is none."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return None
        self.size_bytes -= entry[1]
        return entry[0]

    def clear(self) -> None:
        """Remove all entries."""
        self._entries.clear()
        self.size_bytes = 0
