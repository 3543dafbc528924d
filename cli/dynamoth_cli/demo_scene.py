"""The scene of the demo: a world whose crowd is where one server has to carry it, and what the servers can carry.

The load is uneven on purpose. Most players stay in a hot spot, whose tiles have names that the ring puts on one
server, above its capacity; the others are nearly idle. Half-way the crowd moves to another corner, whose tiles are all
on the next server.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, count

from dynamoth.envelope import HEADER_BYTES
from dynamoth.ring import Ring
from dynamoth_sim.rgame import UPDATES_PER_S, GameWorld, Tile

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

HOT_LOAD_RATIO = 1.3
MEAN_LOAD_RATIO_MAX = 0.5
"""Servers can send so little that the one with the hot spot is above its capacity; but so much that, when the load is
spread, all are below LR_safe (0.6)."""

DEMO_SETTINGS: Mapping[str, object] = {
    "balancer.wait_s": 4.0,
    "balancer.averaging_s": 3.0,
    "balancer.channel_rest_s": 8.0,
}
"""Quicker than is wise for real loads: a minute must show everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What the demo plays."""

    world: GameWorld
    players: int
    auditors: int
    payload_bytes: int
    #: What counts as load ratio 1 of each server.
    outgoing_bytes_per_s_max: int
    #: What is to be expected, in all.
    deliveries_per_s: float


def make_scene(players: int, servers: list[str], seconds: float) -> Scene:
    """Return a scene for these players and servers.

    Args:
        players: how many, from 1.
        servers: their ids, all in the ring.
        seconds: how long the demo runs; half-way the crowd moves on.

    """
    side = max(4, round(math.sqrt(players * TILES_PER_PLAYER)))
    hot_side = max(1, min(side // 2, round(math.sqrt(players * HOT_TILES_PER_PLAYER))))
    plain = GameWorld(
        tiles_per_side=side,
        speed_m_per_s=SPEED_M_PER_S,
        hot_ratio=HOT_RATIO,
        hot_tiles_per_side=hot_side,
        hot_spot_period_s=seconds / 2,
    )
    world = replace(plain, suffixes=dict(_suffixes(plain, Ring(servers))))
    deliveries_per_s = expected_deliveries_per_s(world, players)
    total = deliveries_per_s * (PAYLOAD_BYTES + HEADER_BYTES + PUSH_BYTES)
    capacity = max(total / HOT_LOAD_RATIO, total / len(servers) / MEAN_LOAD_RATIO_MAX)
    return Scene(
        world=world,
        players=players,
        auditors=AUDITORS,
        payload_bytes=PAYLOAD_BYTES,
        outgoing_bytes_per_s_max=max(1, round(capacity)),
        deliveries_per_s=deliveries_per_s,
    )


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
            yield f"{tile.column}:{tile.row}", _suffix(world, tile, ring, wanted)


def _suffix(world: GameWorld, tile: Tile, ring: Ring, wanted: str) -> str:
    """Return the first suffix that brings a tile to ``wanted``: that takes as many tries as there are servers."""
    name = world.channel(tile)
    suffixes = chain([""], (f":{number}" for number in count()))
    return next(suffix for suffix in suffixes if ring.home(name + suffix.encode()) == wanted)
