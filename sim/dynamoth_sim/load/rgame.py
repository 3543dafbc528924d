"""RGame, the workload of the Dynamoth paper (section V-A): players who walk about a tiled world.

Theory of operation
-------------------
The world is a square, cut into square tiles; each tile is a channel. A player walks at a constant speed to a
random point, pauses, and walks to the next one. It subscribes to the tile where it is, and publishes its state
there three times per second (section V-D). So it hears everybody in the same tile.

A player decides what happens and does none of it: :meth:`Player.step` returns what is due, and a runtime (the
demo, a benchmark, the simulator) does it and measures. The path of a player is a function of its number, its
random source and the number of its update alone, not of how punctually it is called: the same seed gives the
same tiles and updates in every run.

``hot_ratio`` of the players stay in a *hot spot*, a square of some tiles in a corner, which may jump to the next
corner every now and then: an uneven load that changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import floor, hypot
from struct import Struct
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from random import Random

UPDATES_PER_S = 3.0
"""State updates of one player (Dynamoth, section V-D)."""

UPDATES_PER_STEP_MAX = 3
"""A player that is called late makes up for one second; what is older is skipped, and counted."""

GOLDEN_RATIO = 0.6180339887498949
"""Its multiples, modulo 1, are spread evenly: any range of player numbers has its share of hot players."""

_UPDATE = Struct(">2sIIQff")
_MAGIC = b"RG"

PAYLOAD_BYTES_MIN = _UPDATE.size


class Tile(NamedTuple):
    """A tile by its column and row, from 0."""

    column: int
    row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GameWorld:
    """The rules that all players share.

    ``name`` becomes part of the channels' names. ``pause_s_max``: a pause takes a random time up to this.
    ``hot_ratio``: the share of players that stay in the hot spot, 0 for none. ``hot_tiles_per_side``: its size.
    ``hot_spot_period_s``: after this time it jumps to the next corner; 0 means never. ``suffixes``: what is added to
    the names of some channels, by ``column:row``; so it can be chosen where the ring puts them.

    Raises:
        ValueError: a value that makes no world.
    """

    name: str = "rgame"
    tiles_per_side: int = 8
    tile_side_m: float = 10.0
    speed_m_per_s: float = 5.0
    pause_s_max: float = 2.0
    updates_per_s: float = UPDATES_PER_S
    hot_ratio: float = 0.0
    hot_tiles_per_side: int = 2
    hot_spot_period_s: float = 0.0
    suffixes: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not (self.tile_side_m > 0 and self.speed_m_per_s > 0 and self.updates_per_s > 0):
            raise ValueError("tile_side_m, speed_m_per_s and updates_per_s must be more than 0")
        if self.pause_s_max < 0 or self.hot_spot_period_s < 0:
            raise ValueError("pause_s_max and hot_spot_period_s must be 0 or more")
        if not 0 <= self.hot_ratio <= 1:
            raise ValueError(f"hot_ratio must be from 0 to 1, not {self.hot_ratio}")
        if not 1 <= self.hot_tiles_per_side <= self.tiles_per_side:
            raise ValueError(f"hot_tiles_per_side must be from 1 to tiles_per_side ({self.tiles_per_side})")

    @property
    def side_m(self) -> float:
        """The length of the world's side."""
        return self.tiles_per_side * self.tile_side_m

    def tile(self, x: float, y: float) -> Tile:
        """Return the tile of a point; points on the outer edge belong to the last tile."""
        last = self.tiles_per_side - 1
        return Tile(min(int(x / self.tile_side_m), last), min(int(y / self.tile_side_m), last))

    def channel(self, tile: Tile) -> bytes:
        """Return the channel of a tile."""
        place = f"{tile.column}:{tile.row}"
        return f"{self.name}:{place}{self.suffixes.get(place, '')}".encode()

    def channels(self) -> list[bytes]:
        """Return the channels of all tiles."""
        return [self.channel(tile) for tile in _square(Tile(0, 0), self.tiles_per_side)]

    def hot_corner(self, at_s: float) -> Tile:
        """Return the first tile of the hot spot at ``at_s`` seconds after the start of the game."""
        jumps = int(at_s / self.hot_spot_period_s) if self.hot_spot_period_s else 0
        far = self.tiles_per_side - self.hot_tiles_per_side
        return (Tile(0, 0), Tile(far, 0), Tile(far, far), Tile(0, far))[jumps % 4]

    def hot_channels(self, at_s: float) -> list[bytes]:
        """Return the channels of the hot spot at ``at_s`` seconds after the start."""
        return [self.channel(tile) for tile in self.hot_tiles(at_s)]

    def hot_tiles(self, at_s: float) -> list[Tile]:
        """Return the tiles of the hot spot at ``at_s`` seconds after the start."""
        return list(_square(self.hot_corner(at_s), self.hot_tiles_per_side))


def _square(first: Tile, side: int) -> Iterator[Tile]:
    for column in range(first.column, first.column + side):
        for row in range(first.row, first.row + side):
            yield Tile(column, row)


@dataclass(frozen=True, slots=True)
class Join:
    """Subscribe to a channel."""

    channel: bytes


@dataclass(frozen=True, slots=True)
class Leave:
    """Unsubscribe from a channel."""

    channel: bytes


@dataclass(frozen=True, slots=True)
class Update:
    """Publish on a channel: the state of a player, with its ``sequence`` there (from 1, +1 for each)."""

    channel: bytes
    player: int
    sequence: int
    x: float
    y: float

    def payload(self, sent_ns: int, size_bytes: int) -> bytes:
        """Return the message, padded to ``size_bytes``. ``sent_ns`` is any clock that the readers share."""
        packed = _UPDATE.pack(_MAGIC, self.player, self.sequence, sent_ns, self.x, self.y)
        return packed.ljust(size_bytes, b"\0")


class ReceivedUpdate(NamedTuple):
    """The content of a message."""

    player: int
    sequence: int
    sent_ns: int
    x: float
    y: float


def read_update(payload: bytes) -> ReceivedUpdate:
    """Read a message. Raises ValueError when it is none of RGame's."""
    if len(payload) < PAYLOAD_BYTES_MIN or payload[:2] != _MAGIC:
        raise ValueError(f"not an update of RGame: {payload[:40]!r}")
    return ReceivedUpdate(*_UPDATE.unpack_from(payload)[1:])


GameAction = Join | Leave | Update


class Player:
    """One player.

    Args:
        number: names it; all players of a game have different ones.
        world: the rules.
        random: its own source of randomness: seed it with the game's seed and the number.
        start_s: when it enters, in the time that :meth:`step` gets.
        game_start_s: when the game started: the hot spot jumps in its time. None: at ``start_s``.
    """

    def __init__(
        self, number: int, world: GameWorld, random: Random, start_s: float, game_start_s: float | None = None
    ) -> None:
        self.number = number
        #: Whether it prefers the hot spot.
        self.is_hot = (number * GOLDEN_RATIO) % 1.0 < world.hot_ratio
        #: How many updates were skipped because nobody called :meth:`step` in time.
        self.skipped = 0
        self._world = world
        self._random = random
        #: Seconds of the game at which this player's update 0 is due; spread, so that not all publish at once.
        self._entered_s = start_s - (start_s if game_start_s is None else game_start_s)
        self._first_s = start_s + random.random() / world.updates_per_s
        #: How many updates were due so far, skipped ones included.
        self._updates = 0
        self._x, self._y = self._random_point(self._entered_s)
        self._target = self._random_point(self._entered_s)
        #: What remains of the present pause.
        self._pause_s = 0.0
        #: The channel it has joined; None before the first step.
        self._channel: bytes | None = None
        #: The number of its latest update, by channel: at most one for each tile.
        self._sequences: dict[bytes, int] = {}

    @property
    def sequences(self) -> dict[bytes, int]:
        """The number of its latest update, by channel: what an audit compares with what arrived."""
        return dict(self._sequences)

    def deadline(self) -> float:
        """Return when :meth:`step` is to be called next."""
        return self._first_s + self._updates / self._world.updates_per_s

    def step(self, now: float) -> list[GameAction]:
        """Return what is due, in order: mostly one :class:`Update`, before it a change of tiles."""
        due = floor((now - self._first_s) * self._world.updates_per_s + 1e-6) + 1 - self._updates
        actions: list[GameAction] = []
        for remaining in range(due, 0, -1):
            self._walk(1 / self._world.updates_per_s if self._updates else 0.0)
            self._updates += 1
            if remaining > UPDATES_PER_STEP_MAX:
                self.skipped += 1
            else:
                actions += self._update()
        return actions

    def _update(self) -> Iterator[GameAction]:
        channel = self._world.channel(self._world.tile(self._x, self._y))
        if channel != self._channel:
            yield Join(channel)
            if self._channel is not None:
                yield Leave(self._channel)
            self._channel = channel
        sequence = self._sequences[channel] = self._sequences.get(channel, 0) + 1
        yield Update(channel, self.number, sequence, self._x, self._y)

    def _walk(self, duration_s: float) -> None:
        """Walk, pause, and choose the next point, for this long."""
        while duration_s > 0:
            if self._pause_s > 0:
                paused_s = min(self._pause_s, duration_s)
                self._pause_s -= paused_s
                duration_s -= paused_s
                continue
            distance_m = hypot(self._target[0] - self._x, self._target[1] - self._y)
            needed_s = distance_m / self._world.speed_m_per_s
            if needed_s > duration_s:
                self._x += (self._target[0] - self._x) * duration_s / needed_s
                self._y += (self._target[1] - self._y) * duration_s / needed_s
                return
            duration_s -= needed_s
            self._x, self._y = self._target
            self._target = self._random_point(self._game_s)
            self._pause_s = self._random.uniform(0.0, self._world.pause_s_max)

    @property
    def _game_s(self) -> float:
        return self._entered_s + self._updates / self._world.updates_per_s

    def _random_point(self, at_s: float) -> tuple[float, float]:
        world = self._world
        if not self.is_hot:
            return self._random.uniform(0.0, world.side_m), self._random.uniform(0.0, world.side_m)
        corner = world.hot_corner(at_s)
        side_m = world.hot_tiles_per_side * world.tile_side_m
        x = corner.column * world.tile_side_m + self._random.uniform(0.0, side_m)
        y = corner.row * world.tile_side_m + self._random.uniform(0.0, side_m)
        return x, y
