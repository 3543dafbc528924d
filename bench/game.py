"""What the benchmarks of RGame decide without I/O: how many players there are, where channels live, what is held.

They repeat experiments 2 and 3 of the Dynamoth paper (sections V-D and V-E, figures 5 to 7).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random

from dynamoth.plan.slots import slot_number, slot_of
from dynamoth_sim.load.rgame import GameWorld, Join, Player

PAPER_RESPONSE_MS_MAX = 150.0
"""A game is good to play while the mean response time is below this (Dynamoth, section V-D)."""


# The number of players.


@dataclass(frozen=True)
class Schedule:
    """How many players there are at what time: straight lines between points (seconds, players)."""

    points: tuple[tuple[float, int], ...]

    def __post_init__(self) -> None:
        """Check the order of the points."""
        times = [at_s for at_s, _ in self.points]
        if not times or any(later <= earlier for earlier, later in pairwise(times)):
            raise ValueError("a schedule needs points whose times increase")

    @property
    def duration_s(self) -> float:
        """The time of the last point."""
        return self.points[-1][0]

    def players(self, at_s: float) -> int:
        """Return how many players there are at ``at_s`` seconds after the start."""
        before_s, before = self.points[0]
        if at_s <= before_s:
            return before
        for after_s, after in self.points[1:]:
            if at_s <= after_s:
                return round(before + (after - before) * (at_s - before_s) / (after_s - before_s))
            before_s, before = after_s, after
        return before


# Latency of a wide area network.

WAN_MS_MEDIAN = 30.0
WAN_SIGMA = 0.5
"""One sample is log-normal with this median and this standard deviation of its logarithm: mean 34 ms, p99 96 ms. The
paper takes samples from measurements between hosts in North America (King), which are not ours to distribute. Two of
its samples make up nearly all of the 75 ms that it shows for servers with time to spare; two of ours are 68 ms on
average."""


class WideArea:
    """Samples of what a message from client to client takes in a wide area network (section V-B, rule 3)."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._mu = math.log(WAN_MS_MEDIAN * 1e6)

    def round_trip_ns(self) -> int:
        """Return two samples, added: from the client to the server, and from there to the client."""
        draw = self._random.lognormvariate
        return int(draw(self._mu, WAN_SIGMA) + draw(self._mu, WAN_SIGMA))


# Consistent hashing.


class FairHashing:
    """Consistent hashing at its best: all servers have equally many slots, and nothing moves but to a new server.

    A server that is added takes 1/(n+1) of the slots, the same share from each of the n others.
    """

    def __init__(self, channels: Iterable[bytes], slots: int) -> None:
        """Give everything to no server.

        Args:
            channels: all that there are.
            slots: how many slots names are hashed to; those of ``dynamoth.plan.slots``.

        """
        self._slot_of = {channel: slot_number(slot_of(channel)) or 0 for channel in channels}
        self._owners: list[str | None] = [None] * slots
        #: In the order in which they were added.
        self.servers: list[str] = []

    def add(self, server: str) -> dict[bytes, str]:
        """Add a server. Returns the channels that move to it."""
        count = len(self.servers) + 1
        taken: set[int] = set()
        sources: Sequence[str | None] = self.servers or [None]
        for number, source in enumerate(sources):
            mine = [slot for slot, owner in enumerate(self._owners) if owner == source]
            keep = len(self._owners) // count + (number < len(self._owners) % count) if self.servers else 0
            # Slots are spread like hashes: every n-th of them, not the first.
            Random(f"{server} {source}").shuffle(mine)
            taken.update(mine[keep:])
        for slot in taken:
            self._owners[slot] = server
        self.servers.append(server)
        return {channel: server for channel, slot in self._slot_of.items() if slot in taken}

    def slots_of(self, server: str) -> int:
        """Return how many slots a server has."""
        return self._owners.count(server)


@dataclass
class AddWhenLoaded:
    """The rule that adds a server to consistent hashing: one is above ``ratio_high``, averaged over some time.

    The thresholds and times are those of our balancer. ``servers_max``: 8 in the paper.
    """

    servers_max: int
    ratio_high: float = 0.8
    averaging_s: int = 10
    wait_s: float = 20.0

    def __post_init__(self) -> None:
        """Begin without any measurement."""
        self._latest: list[Mapping[str, float]] = []
        self._rested_s = math.inf

    def observe(self, ratios: Mapping[str, float], servers: int) -> bool:
        """Take the load ratios of one second. Returns whether a server is to be added now."""
        self._latest = [*self._latest, ratios][-self.averaging_s :]
        self._rested_s += 1.0
        if len(self._latest) < self.averaging_s or self._rested_s < self.wait_s or servers >= self.servers_max:
            return False
        mean = {id_: sum(each[id_] for each in self._latest) / len(self._latest) for id_ in ratios}
        if max(mean.values()) <= self.ratio_high:
            return False
        self._rested_s = 0.0
        return True


# Demand.


def deliveries_due(world: GameWorld, schedule: Schedule, seed: int) -> list[Mapping[bytes, float]]:
    """Return for each second of a game how many messages servers should send on each channel.

    Players take the same paths in every run, so this does not depend on what a system achieves. Everybody in a tile
    gets the updates of everybody there, and so does the agent of its server.
    """
    players: list[Player] = []
    tiles: list[bytes | None] = []
    due: list[Mapping[bytes, float]] = []
    for second in range(int(schedule.duration_s)):
        count = schedule.players(second)
        del players[count:], tiles[count:]
        for number in range(len(players), count):
            players.append(Player(number, world, Random(f"{seed}:{number}"), float(second), game_start_s=0.0))
            tiles.append(None)
        for number, player in enumerate(players):
            for action in player.step(second + 1.0):
                if isinstance(action, Join):
                    tiles[number] = action.channel
        crowds = Counter(tile for tile in tiles if tile is not None)
        due.append({tile: world.updates_per_s * crowd * (crowd + 1) for tile, crowd in crowds.items()})
    return due


# What is held.

WINDOW_S = 5
GRACE_S = 20
"""A mean over ``WINDOW_S`` that is too high for longer than ``GRACE_S`` is no burst: the paper has short ones when
a plan changes, and does not count them."""


@dataclass(frozen=True)
class Second:
    """The response times that clients saw in one second: their number and their sum."""

    players: int
    responses: int
    response_ms_sum: float


def mean_response_ms(seconds: Sequence[Second]) -> float | None:
    """Return the mean over all responses; None when there was none."""
    responses = sum(second.responses for second in seconds)
    return sum(second.response_ms_sum for second in seconds) / responses if responses else None


def overloaded_s(seconds: Sequence[Second], response_ms_max: float = PAPER_RESPONSE_MS_MAX) -> int:
    """Return for how many seconds, up to the last one, the mean response time has been too high.

    No response at all is too high, too.
    """
    count = 0
    for end in range(len(seconds), 0, -1):
        mean = mean_response_ms(seconds[max(0, end - WINDOW_S) : end])
        if mean is not None and mean <= response_ms_max:
            break
        count += 1
    return count


def players_held(seconds: Sequence[Second], response_ms_max: float = PAPER_RESPONSE_MS_MAX) -> int:
    """Return the most players that there were before the mean response time got too high, and stayed so."""
    most = 0
    for end in range(1, len(seconds) + 1):
        high_s = overloaded_s(seconds[:end], response_ms_max)
        if high_s == 0:
            most = max(most, seconds[end - 1].players)
        elif high_s > GRACE_S:
            break
    return most


def queued(due: Sequence[Sequence[float]], players: Sequence[int], bytes_per_s_max: float) -> list[Second]:
    """Return what clients would see of servers that are ideal queues.

    Each sends ``bytes_per_s_max`` at most, and nothing is lost: a message waits for all that came before.

    Args:
        due: what falls due at each server, in bytes, second by second.
        players: how many there are in each of these seconds.
        bytes_per_s_max: of each server.

    """
    waiting = [0.0] * (len(due[0]) if due else 0)
    seconds: list[Second] = []
    for count, loads in zip(players, due, strict=True):
        sent = [min(bytes_per_s_max, before + load) for before, load in zip(waiting, loads, strict=True)]
        waiting = [before + load - out for before, load, out in zip(waiting, loads, sent, strict=True)]
        waits_ms = (1000 * out * left / bytes_per_s_max for out, left in zip(sent, waiting, strict=True))
        seconds.append(Second(count, round(sum(sent)), sum(waits_ms)))
    return seconds
