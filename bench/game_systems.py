"""The systems that the benchmarks of RGame compare: Dynamoth, consistent hashing with elastic servers, a Redis Cluster.

All have machines with the same limits. Consistent hashing uses Dynamoth's own clients, agents and lossless moves; only
the rule that says where channels live differs. So what is compared is the rule.
"""

from __future__ import annotations

import asyncio
import re
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Self

from bench.agent_cost import free_port
from bench.game import AddWhenLoaded, FairHashing
from bench.replication_network import REQUEST_TIMEOUT_S, LimitedCluster, Network
from bench.sharded_cluster import ShardedCluster
from dynamoth.plan.slots import SLOTS
from dynamoth_cli.admin import ask_balancer
from dynamoth_link.urls import parse_cluster_url

METRICS_TIMEOUT_S = 5.0

USABLE_RATIO = 0.95
"""The part of a machine's limit that Redis can use. It does not count headers of Ethernet, IP and TCP: 66 bytes for
each 1448."""


class System:
    """A system that carries the game. As a context manager it is ready on entry, and gone on exit."""

    #: Of ``game_players.TRANSPORTS``.
    transport = "dynamoth"

    def __init__(self, cluster: LimitedCluster | ShardedCluster) -> None:
        self._cluster = cluster

    def __enter__(self) -> Self:
        self._cluster.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cluster.__exit__(kind, error, trace)

    @property
    def url(self) -> str:
        """The URL for players."""
        return self._cluster.url

    @property
    def servers(self) -> Sequence[str]:
        """The servers that are in use now."""
        return self._cluster.server_ids

    @property
    def processes(self) -> Mapping[str, int]:
        """The ids of its processes, by name; those of Redis are ``server ID``."""
        return self._cluster.processes

    def second(self, ratios: Mapping[str, float]) -> int:
        """Take the load ratios of one second, by server. Returns how many channels have begun to move.

        Raises ChildEnded if a process has ended.
        """
        self._cluster.check()
        return 0


class Balanced(System):
    """Dynamoth: its balancer decides where channels live. All servers are in the plan from the start.

    Args:
        network: gets a machine for each server.
        servers: how many.
        bytes_per_s_max: what a machine can send.
        settings: those of the balancer.

    """

    def __init__(self, network: Network, servers: int, bytes_per_s_max: int, settings: Mapping[str, object]) -> None:
        self._port = free_port()
        settings = {
            **settings,
            "cluster.outgoing_bytes_per_s_max": int(bytes_per_s_max * USABLE_RATIO),
            "balancer.http_port": self._port,
        }
        super().__init__(LimitedCluster(network, servers, settings=settings, paused=False))
        self._moves = 0

    def second(self, ratios: Mapping[str, float]) -> int:
        """Return how many channels and slots the balancer has begun to move since the call before."""
        super().second(ratios)
        before, self._moves = self._moves, read_counter(self._port, "dynamoth_balancer_moves_begun_total")
        return self._moves - before


def read_counter(port: int, name: str) -> int:
    """Return a counter of the balancer, over HTTP, where no limit applies. Raises OSError."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=METRICS_TIMEOUT_S) as answer:
        text: str = answer.read().decode()
    found = re.search(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
    assert found is not None, f"the balancer counts no {name}"
    return int(float(found[1]))


class Hashed(System):
    """Consistent hashing with elastic servers: all channels are at one server first, and others are added by load.

    Args:
        network: gets a machine for each server.
        servers: how many there can be.
        channels: all that there are.
        rule: says when a server is added.

    """

    def __init__(self, network: Network, servers: int, channels: Sequence[bytes], rule: AddWhenLoaded) -> None:
        super().__init__(LimitedCluster(network, servers, paused=True))
        self._hashing = FairHashing(channels, SLOTS)
        self._rule = rule
        self._mover = ThreadPoolExecutor(1)
        #: The latest moves that were begun.
        self._moving: Future[None] | None = None

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            self._move(self._hashing.add(self._cluster.server_ids[0]))
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._mover.shutdown()
        super().__exit__(kind, error, trace)

    @property
    def servers(self) -> Sequence[str]:
        """The servers that were added so far."""
        return self._hashing.servers

    def second(self, ratios: Mapping[str, float]) -> int:
        """Add a server if it is time to. Returns how many channels begin to move to it."""
        super().second(ratios)
        if self._moving is not None and self._moving.done():
            self._moving.result()  # raises what went wrong
        count = len(self.servers)
        if not self._rule.observe({id_: ratios[id_] for id_ in self.servers}, count):
            return 0
        moved = self._hashing.add(self._cluster.server_ids[count])
        self._moving = self._mover.submit(self._move, moved)
        return len(moved)

    def _move(self, moves: Mapping[bytes, str]) -> None:
        asyncio.run(_move_all(self._cluster.url, moves))


async def _move_all(url: str, moves: Mapping[bytes, str]) -> None:
    """Have the balancer move channels; returns when all have settled."""
    ask = partial(ask_balancer, parse_cluster_url(url), "move", timeout_s=REQUEST_TIMEOUT_S)
    async with asyncio.TaskGroup() as tasks:
        for channel, server in moves.items():
            tasks.create_task(ask({"channel": channel, "to": server}))


class Sharded(System):
    """A Redis Cluster with sharded pub/sub, whose servers share the slots evenly from the start. It moves nothing."""

    transport = "sharded"

    def __init__(self, network: Network, servers: int) -> None:
        super().__init__(ShardedCluster(network, servers))
