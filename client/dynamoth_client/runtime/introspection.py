"""PUBSUB CHANNELS, NUMSUB and NUMPAT for the whole cluster: every server is asked, and the answers are merged.

Dynamoth's own names (under the reserved prefix) and the agents' pattern are left out. A replicated
channel shows under the application's name. Sharded channels are asked for by themselves. A question opens connections
of its own and closes them: this is for people and for monitoring. It is about the servers that this client knows of.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import redis.exceptions

from dynamoth.errors import MalformedMessage
from dynamoth.globs import physical_patterns
from dynamoth.machine.events import CommandPart, ErrorReply
from dynamoth.names import (
    AGENT_CHANNEL,
    ANY_EPOCH,
    COORDINATOR_RECORD_CHANNEL,
    PATTERN_PREFIX,
    RECORD_CHANNEL,
    RESERVED_PREFIX,
    SHARDED_PREFIX,
    SHARDED_REPLICA_PREFIX,
    is_user_channel,
    logical_channel,
    replica_pattern,
    sharded_channel,
)
from dynamoth.plan.plan import Entry, Location, Mode, Route, Server
from dynamoth.protocol.stored_plan import parse_entry, read_entry
from dynamoth_client.redis_py import errors
from dynamoth_client.redis_py.constructor import ChannelPlan, encoded
from dynamoth_client.runtime.cluster import Cluster
from dynamoth_link.errors import LinkError
from dynamoth_link.options import LinkOptions
from dynamoth_link.query import query

_Replies = dict[str, list[Any]]
"""By server: the replies to the commands, in their order."""


async def read_channels(cluster: Cluster, encoder: Any, pattern: Any, sharded: bool = False) -> list[Any]:
    """Return the channels that match ``pattern``, as Redis understands it, and that somebody listens to; sorted.

    ``encoder`` is redis-py's. ``sharded`` asks for the sharded channels, by the applications' names, and for no others.
    Those that are only subscribed to by pattern are not among them, as in Redis.

    Raises:
        redis.exceptions.ConnectionError: a server cannot be reached, or none gave a plan; the text names it.
        redis.exceptions.ResponseError: a server refused.

    """
    globs = physical_globs(encoded(encoder.encode, pattern), sharded)
    replies = await _ask_all(cluster, [(b"PUBSUB", b"CHANNELS", each) for each in globs])
    found = merge_channels((name for lists in replies.values() for names in lists for name in names), sharded)
    return [encoder.decode(channel) for channel in found]


async def count_subscribers(
    cluster: Cluster, encoder: Any, names: Iterable[Any], sharded: bool = False
) -> list[tuple[Any, int]]:
    """Return the channels ``names``, each with its number of subscribers. Raises as ``read_channels``.

    ``encoder`` is redis-py's. ``sharded`` says that they are the applications' names of sharded channels. Dynamoth's
    own channels have none. A subscriber is counted once, however many replicas it listens at. While a channel moves, a
    subscriber that listens at both places is counted at both.
    """
    given = [encoded(encoder.encode, name) for name in names]
    shown = [encoder.decode(name) for name in given]
    channels = list(map(sharded_channel, given)) if sharded else given
    asked = [channel for channel in dict.fromkeys(channels) if sharded or not channel.startswith(RESERVED_PREFIX)]
    if not asked:
        return [(name, 0) for name in shown]
    commands: list[Sequence[CommandPart]] = [(b"PUBSUB", b"NUMSUB", *asked), *map(read_entry, asked)]
    replies = await _ask_all(cluster, commands)
    counts = _counts(replies)
    entries = {
        channel: _newest(answers[index] for answers in replies.values()) for index, channel in enumerate(asked, 1)
    }
    routes = {channel: entry.live_routes if entry else () for channel, entry in entries.items()}
    physical = {
        place.physical: None
        for channel, followed in routes.items()
        for route in followed
        for place in route.locations(channel)
        if place.physical != channel
    }
    if physical:
        counts |= _counts(await _ask_all(cluster, [(b"PUBSUB", b"NUMSUB", *physical)]))
    numbers = {channel: merge_subscribers(channel, routes[channel], counts) for channel in asked}
    return [(name, numbers.get(channel, 0)) for name, channel in zip(shown, channels, strict=True)]


async def count_patterns(cluster: Cluster) -> int:
    """Return how many patterns somebody subscribes to. Raises as ``read_channels``.

    Those of this library's clients are at every server, several for each, and channels there are named after them. What
    Redis counts besides, but for the agent's ``*`` and the two patterns of recorders, is plain clients': Redis gives no
    names, so one that is at several servers looks like several, and the number of the server that has most counts.
    """
    commands = [
        (b"PUBSUB", b"NUMPAT"),
        (b"PUBSUB", b"CHANNELS", PATTERN_PREFIX + b"*"),
        (b"PUBSUB", b"NUMSUB", AGENT_CHANNEL, RECORD_CHANNEL, COORDINATOR_RECORD_CHANNEL),
    ]
    ours: set[bytes] = set()
    others = 0
    for number, named, (_, agents, _, recorders, _, broker_recorders) in (await _ask_all(cluster, commands)).values():
        patterns = {name.removeprefix(PATTERN_PREFIX) for name in named}
        physical = {name for pattern in patterns for name in physical_patterns(pattern)}
        others = max(others, number - len(physical) - (agents > 0) - (recorders > 0) - (broker_recorders > 0))
        ours |= patterns
    return len(ours) + others


async def plan(cluster: Cluster, encoder: Any, channel: Any) -> ChannelPlan:
    """Return where this client believes a channel to be. Raises as ``Cluster.local_plan``."""
    name = encoded(encoder.encode, channel)
    route = (await cluster.local_plan()).route(name)
    return ChannelPlan(route.assignment.mode, route.assignment.servers, route.epoch)


# Merging.


def physical_globs(pattern: bytes, sharded: bool = False) -> list[bytes]:
    """Return the globs that match the physical names of the channels that ``pattern`` matches."""
    if sharded:
        return [SHARDED_PREFIX + pattern, SHARDED_REPLICA_PREFIX + ANY_EPOCH + pattern]
    return [pattern, replica_pattern(pattern)]


def merge_channels(physical: Iterable[bytes], sharded: bool = False) -> list[bytes]:
    """Return the applications' names of physical channels, each once, sorted; our own are left out.

    Either of the sharded channels, or of the others.
    """
    logical = {
        logical_channel(name)
        for name in physical
        if is_user_channel(name) or not name.startswith(RESERVED_PREFIX)  # the latter: __keyspace@0__:...
    }
    if sharded:
        return sorted(name.removeprefix(SHARDED_PREFIX) for name in logical if name.startswith(SHARDED_PREFIX))
    return sorted(name for name in logical if not name.startswith(SHARDED_PREFIX))


def merge_subscribers(channel: bytes, routes: Iterable[Route], counts: Mapping[Location, int]) -> int:
    """Return the number of subscribers of a channel.

    Args:
        channel: the application's name.
        routes: what some subscriber may follow.
        counts: connections that are subscribed, by place; a place that is missing counts as 0.

    """
    total = sum(count for place, count in counts.items() if place.physical == channel)
    for route in routes:
        mode = route.assignment.mode
        if mode is not Mode.SINGLE:
            each = [counts.get(place, 0) for place in route.locations(channel)]
            # ALL_SUBSCRIBERS: everybody listens at all of them, or is about to.
            total += max(each) if mode is Mode.ALL_SUBSCRIBERS else sum(each)
    return total


def _counts(replies: _Replies) -> dict[Location, int]:
    """Read NUMSUB, the first reply of each server: name, number, name, number ..."""
    return {
        Location(server, name): number
        for server, [numsub, *_] in replies.items()
        for name, number in zip(numsub[::2], numsub[1::2], strict=True)
    }


def _newest(replies: Iterable[Any]) -> Entry | None:
    """Return the entry that the newest stored plan has for a channel; None for one that it does not name."""
    newest: Entry | None = None
    for reply in replies:
        try:
            stored = parse_entry(reply, None)
        except MalformedMessage as error:
            raise redis.exceptions.ResponseError(
                f"the stored plan cannot be read: {error}; upgrade this client if it is older than the balancer"
            ) from error
        if stored is not None and stored.own is not None and stored.own.newer_than(newest):
            newest = stored.own
    return newest


# Asking.


async def _ask_all(cluster: Cluster, commands: Sequence[Sequence[CommandPart]]) -> _Replies:
    """Send the same commands to every server, again if need be. Raises as ``read_channels``."""
    servers = (await cluster.local_plan()).servers
    options = cluster.settings.link_options
    return await cluster.settings.retrying.call(lambda: _ask_each(servers, options, commands))


async def _ask_each(
    servers: Mapping[str, Server], options: LinkOptions, commands: Sequence[Sequence[CommandPart]]
) -> _Replies:
    async with asyncio.TaskGroup() as group:
        tasks = {id_: group.create_task(_ask(server, commands, options)) for id_, server in servers.items()}
    replies: _Replies = {}
    faults: list[redis.exceptions.RedisError] = []
    for id_, task in tasks.items():
        answer = task.result()
        if isinstance(answer, LinkError):
            fault = errors.from_link(answer)
            faults.append(type(fault)(f"{id_}: {fault}"))
        else:
            replies[id_] = answer
    if faults:
        raise errors.joined(faults, "the cluster cannot be asked as a whole, as these servers do not answer:")
    for id_, answer in replies.items():
        for reply in answer:
            if isinstance(reply, ErrorReply):
                refused = errors.from_reply(str(reply))
                raise type(refused)(f"{id_}: {refused}")
    return replies


async def _ask(
    server: Server, commands: Sequence[Sequence[CommandPart]], options: LinkOptions
) -> list[Any] | LinkError:
    try:
        return await query(server.url, *commands, options=options, timeout_s=options.connect_timeout_s)
    except LinkError as error:
        return error
