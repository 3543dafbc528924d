"""A table that whoever fills it cannot make large: bounded in entries and in bytes, the oldest give way."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")

ENTRY_BYTES = 200
"""About what an entry takes besides its name: the slot of the table, a tuple, a few numbers."""

CHECKED_MAX = 1000
"""``check`` of a machine runs after each event of tests and simulations: it leaves out tables with more entries."""


def _nothing(key: object, value: object) -> None:
    """Do nothing about an entry that has given way."""


class BoundedTable(Generic[K, V]):
    """A mapping in which the entry that was put the longest ago gives way to new ones.

    Args:
        entries_max: entries at most.
        bytes_max: bytes at most, as ``size`` counts them. An entry that is larger by itself is not kept.
        size: the bytes of an entry, about.
        on_evicted: called with each entry that gives way.

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
        #: The value and the size of each entry, by key; the one that was put last comes last.
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()
        #: Sum of the sizes.
        self.size_bytes = 0
        #: How many entries have given way.
        self.evicted = 0

    def __len__(self) -> int:
        """Return how many entries there are."""
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        """Tell whether there is an entry."""
        return key in self._entries

    def __iter__(self) -> Iterator[K]:
        """Go through the keys, the one that was put the longest ago first."""
        return iter(self._entries)

    def get(self, key: K) -> V | None:
        """Return the value of an entry; None where there is none."""
        entry = self._entries.get(key)
        return None if entry is None else entry[0]

    def put(self, key: K, value: V) -> None:
        """Set the value of an entry, as the newest one, and let the oldest give way as far as need be."""
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
