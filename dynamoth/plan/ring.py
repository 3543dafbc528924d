"""Consistent hashing: the server of every slot that the plan does not name.

The ring is over the *base* servers, a fixed list that every plan carries, so that clients, dispatchers and the balancer
compute it over the same set whatever servers come and go (Dynamoth's "plan 0", section II-C). Each server owns
``virtual_nodes`` points on a circle of 64-bit hashes; a slot belongs to the owner of the first point at or after its
middle, and so do the channels of the slot.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from functools import cached_property, lru_cache

from dynamoth.plan.slots import SLOTS, hash_of, middle, slot_name, slot_number, slot_of

VIRTUAL_NODES = 256
"""Points per server. The share of a server deviates by about 1/sqrt(256), that is 6%, from 1/N."""
VIRTUAL_NODES_MAX = 65_536
"""More would only cost memory."""
RING_POINTS_MAX = 4_000_000
"""Of all servers: a larger ring takes seconds to make. More than 10,000 servers with ``VIRTUAL_NODES`` each."""


class Ring:
    """An immutable consistent-hash ring over server ids.

    Two rings over the same set of servers and the same number of virtual nodes agree on every channel, whatever the
    order of the servers, the process, the machine or the Python version. Adding a server to N moves about 1/(N+1) of
    the channels, all of them to the new one.
    """

    def __init__(self, servers: Iterable[str], virtual_nodes: int = VIRTUAL_NODES) -> None:
        """Build the ring.

        Args:
            servers: ids of the base servers, at least one, all different.
            virtual_nodes: points per server, at least 1.

        Raises:
            ValueError: when there is no server, a server twice, or no virtual node.

        """
        self.servers = tuple(sorted(servers))
        self.virtual_nodes = virtual_nodes
        if not self.servers:
            raise ValueError("a ring needs at least one server")
        if len(set(self.servers)) != len(self.servers):
            raise ValueError(f"a server is named twice in the ring: {', '.join(self.servers)}")
        if virtual_nodes < 1:
            raise ValueError(f"a ring needs at least one virtual node per server, not {virtual_nodes}")
        points = sorted(
            (hash_of(f"{server}#{index}".encode()), server) for server in self.servers for index in range(virtual_nodes)
        )
        self._points = [point for point, _ in points]
        self._owners = [server for _, server in points]

    def home(self, name: bytes) -> str:
        """Return the id of the server that the ring gives for a channel, or for the name of a slot."""
        slot = slot_number(name)
        return self._homes[slot_number(slot_of(name)) or 0 if slot is None else slot]

    @cached_property
    def slots(self) -> Mapping[str, frozenset[bytes]]:
        """The names of the slots that each server gets."""
        return {
            server: frozenset(slot_name(slot) for slot, home in enumerate(self._homes) if home == server)
            for server in self.servers
        }

    @cached_property
    def _homes(self) -> list[str]:
        """The server of each slot."""
        found = (bisect_left(self._points, middle(slot)) for slot in range(SLOTS))
        return [self._owners[index if index < len(self._owners) else 0] for index in found]


@lru_cache(maxsize=1)
def ring_of(servers: tuple[str, ...], virtual_nodes: int) -> Ring:
    """Return the ring; the same object as the call before, if the arguments are. Plans of one cluster share it.

    Raises ValueError as ``Ring``.
    """
    return Ring(servers, virtual_nodes)
