"""The scene of the demo: a world whose crowd is where one server has to carry it, and what the servers can carry.

The load is uneven on purpose. Most players stay in a hot spot, whose tiles have names that the ring puts on one
server, above its capacity; the others are nearly idle. Then there is a festival (``festival.py``). When it is over,
the crowd moves to another corner, whose tiles are all on the next server.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, count

from dynamoth.plan.ring import Ring
from dynamoth.protocol.envelope import HEADER_BYTES
from dynamoth_demo.festival import Festival
from dynamoth_sim.load.rgame import UPDATES_PER_S, GameWorld

PAYLOAD_BYTES = 200
AUDITORS = 2

HOT_RATIO = 0.7
TILES_PER_PLAYER = 0.64
HOT_TILES_PER_PLAYER = 0.09
"""For 100 players: 8 x 8 tiles, of which 3 x 3 are hot. More players have a larger world: the load grows with them."""

SPEED_M_PER_S = 8.0
"""The way to the next corner of 8 tiles takes some 6 s."""

PUSH_BYTES = 45
"""RESP3 around each message, and the name of its channel."""

HOT_LOAD_RATIO = 1.2
MEAN_LOAD_RATIO_MAX = 0.5
"""The capacity of servers is small enough that the one with the hot spot exceeds it, and large enough that all are
below ``load_ratio_safe`` (0.6) when the load is spread."""

FESTIVAL_NAME = "rgame:festival"
FESTIVAL_REPLICAS = 3
PERFORMERS = 36
FESTIVAL_MESSAGES_PER_S_MAX = 300.0
"""What makes the festival heavy is the size of its messages, up to what two busy cores can take."""

FESTIVAL_LOAD_RATIO = 1.1
"""What the festival makes one server send, over its capacity. Three servers have room for it and the tiles."""

FESTIVAL_BEGINS_RATIO = 0.34
FESTIVAL_ENDS_RATIO = 0.58
CROWD_MOVES_RATIO = 0.6
"""Of the whole time. Before, the crowd is dealt with; from the end on the festival's channel is folded back. The crowd
moves while that goes on, as players need some seconds to finish their ways and to walk."""

ELASTIC_SERVERS = 2
ELASTIC_SERVERS_MAX = 4
"""A demo whose servers come and go begins with as many, and has at most as many."""

ELASTIC_LOAD_RATIO = 1.35
"""What all tiles together make of the capacity of one server there: too much for two, with the festival for three."""

ELASTIC_BYTES_PER_S_MIN = 4_000_000
"""Capacity of a server there, at least: messages are so large that plans, which name some thousand slots while a server
joins or leaves, are little besides."""

KILL_RATIO = 0.7
LEAVE_RATIO = 0.85
STAY_RATIO = 0.2
"""When a server is killed, of the whole time: the crowd has moved there. When players go home; this share stays."""

SERVER_DEAD_S = 3.0
SERVED_S_MAX = SERVER_DEAD_S + 3.0
"""A server that is silent for this time counts as dead, in a shorter demo sooner; bound of the time for which its
channels are not served."""

FESTIVAL_SERVERS_MIN = 2
"""With fewer there is no festival, as nothing could be spread."""

WAIT_S = 4.0
AVERAGING_S = 3.0
AVERAGING_S_MIN = 2.0
CHANNEL_REST_S = 8.0
REPORT_INTERVAL_S = 0.5
"""Balancing is quicker than is wise for real loads: a minute must show everything. The least averaging time has the
reports that the balancer needs, and one more."""

GROW_DELAY_S = 1.5
RELEASE_DELAY_S = 8.0
"""Servers come and go sooner than is wise, too."""

LEASE_S = 10.0
"""Nobody waits for the lease: a machine that is busy with other things must not cost the balancer its term."""

UNHURRIED_S = 40.0
"""In a shorter demo the balancer is quicker still, in proportion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Elasticity:
    """How servers come and go. All times are from the moment at which the players begin.

    ``servers_max``: up to how many servers the balancer may bring the cluster. ``kill_at_s``: when a server is killed.
    ``leave_at_s``: when most players go home; ``stay_ratio`` of them stay. ``served_s_max``: bound of the time after
    which others serve the channels of the server that was killed.
    """

    servers_max: int
    kill_at_s: float
    leave_at_s: float
    stay_ratio: float = STAY_RATIO
    served_s_max: float = SERVED_S_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """The world, the load, the festival and the settings of one run of the demo."""

    world: GameWorld
    players: int
    auditors: int
    payload_bytes: int
    #: What counts as load ratio 1 of each server.
    outgoing_bytes_per_s_max: int
    #: Expected deliveries per second on all tiles together.
    deliveries_per_s: float
    #: None in a demo without a festival.
    festival: Festival | None
    #: None where the number of servers is fixed.
    elasticity: Elasticity | None
    #: Settings of agents and balancer, by key.
    settings: Mapping[str, object]


def make_scene(players: int, servers: list[str], seconds: float, *, elastic: bool = False) -> Scene:
    """Return a scene for these players and servers.

    Args:
        players: how many, from 1.
        servers: their ids, all in the ring.
        seconds: how long the demo runs; everything in it is in proportion.
        elastic: whether servers come and go; otherwise there are these, always.

    """
    side = max(4, round(math.sqrt(players * TILES_PER_PLAYER)))
    hot_side = max(1, min(side // 2, round(math.sqrt(players * HOT_TILES_PER_PLAYER))))
    plain = GameWorld(
        tiles_per_side=side,
        speed_m_per_s=SPEED_M_PER_S,
        hot_ratio=HOT_RATIO,
        hot_tiles_per_side=hot_side,
        hot_spot_period_s=seconds * CROWD_MOVES_RATIO,
    )
    ring = Ring(servers)
    world = replace(plain, suffixes=dict(_suffixes(plain, ring)))
    deliveries_per_s = expected_deliveries_per_s(world, players)
    payload_bytes, overhead_bytes = PAYLOAD_BYTES, HEADER_BYTES + PUSH_BYTES
    if elastic:
        needed = ELASTIC_BYTES_PER_S_MIN * ELASTIC_LOAD_RATIO / deliveries_per_s - overhead_bytes
        payload_bytes = max(PAYLOAD_BYTES, round(needed))
    total = deliveries_per_s * (payload_bytes + overhead_bytes)
    capacity = max(total / HOT_LOAD_RATIO, total / len(servers) / MEAN_LOAD_RATIO_MAX)
    if elastic:
        capacity = total / ELASTIC_LOAD_RATIO
    festival = make_festival(capacity, ring, seconds) if len(servers) >= FESTIVAL_SERVERS_MIN else None
    return Scene(
        world=world,
        players=players,
        auditors=AUDITORS,
        payload_bytes=payload_bytes,
        outgoing_bytes_per_s_max=max(1, round(capacity)),
        deliveries_per_s=deliveries_per_s,
        festival=festival,
        elasticity=_elasticity(seconds) if elastic else None,
        settings={
            **_pace(seconds),
            **(_elastic_pace(seconds) if elastic else {}),
            **({} if festival is None else festival.thresholds(AUDITORS)),
        },
    )


def make_festival(capacity: float, ring: Ring, seconds: float) -> Festival:
    """Return a festival that is too much for one server: for that of the crowd, so that the others have room for it.

    Args:
        capacity: outgoing bytes/s of a server.
        ring: of two servers or more.
        seconds: how long the demo runs.

    """
    deliveries_bytes_per_s = capacity * FESTIVAL_LOAD_RATIO / AUDITORS
    overhead_bytes = HEADER_BYTES + PUSH_BYTES
    messages_per_s = min(FESTIVAL_MESSAGES_PER_S_MAX, deliveries_bytes_per_s / (PAYLOAD_BYTES + overhead_bytes))
    begins_s, ends_s = seconds * FESTIVAL_BEGINS_RATIO, seconds * FESTIVAL_ENDS_RATIO
    return Festival(
        name=FESTIVAL_NAME + _suffix(FESTIVAL_NAME, ring, ring.servers[0]),
        replicas=min(FESTIVAL_REPLICAS, len(ring.servers)),
        performers=PERFORMERS,
        messages_per_s=messages_per_s,
        payload_bytes=round(deliveries_bytes_per_s / messages_per_s) - overhead_bytes,
        begins_s=begins_s,
        gathers_s=min(_averaging_s(seconds) + 2 * REPORT_INTERVAL_S, (ends_s - begins_s) / 2),
        ends_s=ends_s,
    )


def _elasticity(seconds: float) -> Elasticity:
    return Elasticity(servers_max=ELASTIC_SERVERS_MAX, kill_at_s=seconds * KILL_RATIO, leave_at_s=seconds * LEAVE_RATIO)


def _elastic_pace(seconds: float) -> Mapping[str, object]:
    pace = min(1.0, seconds / UNHURRIED_S)
    return {
        "fleet.grow_delay_s": GROW_DELAY_S * pace,
        "fleet.release_delay_s": RELEASE_DELAY_S * pace,
        "balancer.server_dead_s": SERVER_DEAD_S * pace,
        "balancer.lease_s": LEASE_S,
    }


def _pace(seconds: float) -> Mapping[str, object]:
    """Return how quick agents and balancer are."""
    pace = min(1.0, seconds / UNHURRIED_S)
    return {
        "agent.report_interval_s": REPORT_INTERVAL_S,
        "balancer.averaging_s": _averaging_s(seconds),
        "balancer.wait_s": WAIT_S * pace,
        "balancer.channel_rest_s": CHANNEL_REST_S * pace,
        "balancer.replication_rest_s": WAIT_S * pace,
    }


def _averaging_s(seconds: float) -> float:
    return max(AVERAGING_S_MIN, AVERAGING_S * min(1.0, seconds / UNHURRIED_S))


def expected_deliveries_per_s(world: GameWorld, players: int) -> float:
    """Return how many messages Redis sends per second, to players, auditors and agents.

    Each update goes to everybody in its tile. In a tile with ``m`` players on average there are about ``m`` others for
    each, as they come and go independently.
    """
    tiles, hot_tiles = world.tiles_per_side**2, world.hot_tiles_per_side**2
    hot_players = players * world.hot_ratio
    others_per_tile = (players - hot_players) / tiles
    hot_mean = hot_players / hot_tiles + others_per_tile
    observers = AUDITORS + 1
    hot = hot_mean * hot_tiles * (1 + hot_mean + observers)
    cold = others_per_tile * (tiles - hot_tiles) * (1 + others_per_tile + observers)
    return UPDATES_PER_S * (hot + cold)


def _suffixes(world: GameWorld, ring: Ring) -> Iterator[tuple[str, str]]:
    """Give suffixes to the tiles of the first hot spot, so that they are at the first server; then at the next."""
    for half, at_s in enumerate((0.0, world.hot_spot_period_s)):
        wanted = ring.servers[half % len(ring.servers)]
        for tile in world.hot_tiles(at_s):
            yield f"{tile.column}:{tile.row}", _suffix(world.channel(tile).decode(), ring, wanted)


def _suffix(name: str, ring: Ring, wanted: str) -> str:
    """Return the first suffix that brings a channel to ``wanted``: that takes as many tries as there are servers."""
    suffixes = chain([""], (f":{number}" for number in count()))
    return next(suffix for suffix in suffixes if ring.home((name + suffix).encode()) == wanted)
