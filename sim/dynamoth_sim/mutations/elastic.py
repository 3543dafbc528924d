"""Mutations for the scenarios about resources, and about servers that come and go. See ``mutations``."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

from dynamoth_balancer.decide import relieve
from dynamoth_balancer.decide.cluster import ChannelRate, Cluster, ServerLoad, busiest_first
from dynamoth_sim.mutations.mutation import Check, replaced


def only_bytes_count() -> AbstractContextManager[None]:
    """The load ratio of a server is that of its outgoing bytes, as published."""
    return replaced(ServerLoad, load_ratio=ServerLoad.outgoing_ratio)


def largest_first() -> AbstractContextManager[None]:
    """A server that is short of CPU is relieved of the channels with most bytes."""

    def by_bytes(loads: Iterable[ChannelRate], _server: ServerLoad) -> list[ChannelRate]:
        return busiest_first(loads)

    return replaced(relieve, busiest_first=by_bytes)


def full_servers_are_filled() -> AbstractContextManager[None]:
    """Channels are put at servers that are nearly out of connections or memory."""
    return replaced(Cluster, _closed=property(lambda self: self.blind))


CHECKS: tuple[Check, ...] = (
    Check("74-short-of-cpu", only_bytes_count, "expected"),
    Check("74-short-of-cpu", largest_first, "expected"),
    Check("74-short-of-cpu", full_servers_are_filled, "expected"),
)
