"""Experiment 2 of the Dynamoth paper (section V-D, figures 5 and 6): how many players of RGame the servers hold.

Run as root with ``python -m bench.scalability``; ``--help`` tells the rest. It takes about nine minutes. Players
join all the time; each publishes 3 updates per second. Three systems carry the same game, one after the other:

dynamoth
    Clients, agents and balancer of this project. All servers are in the plan from the start.
hashing
    Consistent hashing as the paper compares with, at its best: servers have equally many slots, and one that is loaded
    for long enough brings in another server, which takes 1/(n+1) of the slots. Clients, agents and moves are those of
    Dynamoth, so that the rule alone is compared.
redis-cluster
    A real Redis Cluster: sharded pub/sub, redis-server 7 and redis-py's asyncio cluster client. All servers have their
    share of the slots from the start.

What limits a server
    What it may send, as in the paper's model (eq. 1): 10 Mbit/s, by a token bucket at its network interface. Processors
    are meant not to limit anything; how busy they were is in the results.

How it is scaled down for two processor cores
    A fifth of the paper's players: 24 to 240 for its 120 to 1,200. They join within four minutes, so the times of the
    balancer, and those of consistent hashing, are a fifth of the usual ones, too. The size of an update, 1,000 bytes,
    is such that eight servers are just too few for all players, as in the paper: the load grows with the square of the
    number of players. A server sends some 1,200 messages per second, about a hundredth of what Redis can, so the
    thresholds of Algorithm 1 are low (``THRESHOLDS``): most tiles are replicated before they are a burden.

What the paper does not give
    The number of tiles, their size, how fast players are, and the thresholds. The number of tiles matters most: the
    fewer a server has, the less even consistent hashing is. Here the world has 4 x 4 tiles of 100 m, so that 15 players
    meet in a tile at the end, and players run at 5 m/s. ``--wide`` plays in a world of 8 x 8 tiles of 50 m, with 30 to
    300 players, of whom five meet in a tile, updates of 2,000 bytes, and the usual thresholds.

What is possible
    ``most possible`` is the number of players whose demand (see ``bench.elasticity``) fills all servers. No system can
    hold more, however well it balances.

The latency of a wide area network is added to a response time when a message arrives, by the paper's rule: two samples
for a message from client to client. Results are shown without and with it. ``bench.game`` has the distribution.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from bench.game import (
    PAPER_RESPONSE_MS_MAX,
    WINDOW_S,
    AddWhenLoaded,
    FairHashing,
    Schedule,
    mean_response_ms,
    players_held,
    queued,
)
from bench.game_main import Shown, measure_and_show, parser_of, say
from bench.game_run import GamePlan, Moment, read_parquet, run_game
from bench.game_systems import USABLE_RATIO, Balanced, Hashed, Sharded, System
from bench.replication_network import Network
from bench.sharded_cluster import find_redis_7
from dynamoth.plan.slots import SLOTS
from dynamoth_sim.load.rgame import GameWorld

DYNAMOTH, HASHING, REDIS_CLUSTER = "dynamoth", "hashing", "redis-cluster"
SYSTEMS = (DYNAMOTH, HASHING, REDIS_CLUSTER)

PAPER_HELD: Mapping[str, str] = {DYNAMOTH: "almost 1000", HASHING: "625"}
"""The claims of the text of section V-D, of 1,200 players that were tried."""
PAPER_RATIO = 1.6

THRESHOLDS: Mapping[str, float] = {
    "balancer.replicate_load_ratio_min": 0.15,
    "balancer.replicate_keep_ratio": 0.4,
    "balancer.replicate_publications_per_s_min": 10,
    "balancer.replicate_subscribers_min": 1,
    "balancer.all_subscribers_ratio_min": 0.5,
}
"""Settings of the balancer: a tile that makes more than 0.15 of a server's load has two to six replicas, each with half
of that at least."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The size of the experiment. Times in seconds."""

    servers: int
    bytes_per_s_max: int
    payload_bytes: int
    tiles_per_side: int
    tile_side_m: float
    players: tuple[int, int]
    #: How long players join.
    growth_s: int
    averaging_s: int
    wait_s: float
    rest_s: float
    #: Settings of the balancer for Algorithm 1; empty for the usual ones.
    thresholds: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def schedule(self) -> Schedule:
        """How many players there are at what time."""
        first, last = self.players
        return Schedule(((0.0, first), (float(self.growth_s), last)))

    def plan(self, seed: int) -> GamePlan:
        """Return what is played. The names of channels, and so their hashes, depend on ``seed``."""
        world = {"name": f"rgame{seed}", "tiles_per_side": self.tiles_per_side, "tile_side_m": self.tile_side_m}
        return GamePlan(world=world, payload_bytes=self.payload_bytes, schedule=self.schedule, seed=seed)

    def most_possible(self, seed: int) -> int:
        """Return how many players have a demand that fills all servers together."""
        due = [sum(second.values()) for second in self.plan(seed).bytes_due()]
        most = self.servers * self.bytes_per_s_max * USABLE_RATIO
        seconds = range(len(due))
        full = (at_s for at_s in seconds if mean(due[max(0, at_s + 1 - WINDOW_S) : at_s + 1]) > most)
        return self.schedule.players(next(full, len(due)))

    def held_by_queues(self, seed: int) -> tuple[int, int]:
        """Return how many players ideal servers hold: with the load spread evenly, and by fair hashing."""
        plan, ids = self.plan(seed), [f"s{number + 1}" for number in range(self.servers)]
        hashing = FairHashing(GameWorld(**plan.world).channels(), SLOTS)
        owners = {channel: server for id_ in ids for channel, server in hashing.add(id_).items()}
        due = plan.bytes_due()
        hashed = [
            [sum(load for channel, load in second.items() if owners[channel] == id_) for id_ in ids] for second in due
        ]
        even = [[sum(second.values()) / self.servers] * self.servers for second in due]
        players = [self.schedule.players(at_s) for at_s in range(len(due))]
        most = self.bytes_per_s_max * USABLE_RATIO
        evenly, by_hash = (players_held(queued(loads, players, most)) for loads in (even, hashed))
        return evenly, by_hash

    def system(self, name: str, network: Network, plan: GamePlan) -> System:
        """Return a system that is not started."""
        if name == DYNAMOTH:
            settings = {
                **self.thresholds,
                "balancer.averaging_s": float(self.averaging_s),
                "balancer.wait_s": self.wait_s,
                "balancer.channel_rest_s": self.rest_s,
            }
            return Balanced(network, self.servers, self.bytes_per_s_max, settings)
        if name == HASHING:
            rule = AddWhenLoaded(self.servers, averaging_s=self.averaging_s, wait_s=self.wait_s)
            return Hashed(network, self.servers, GameWorld(**plan.world).channels(), rule)
        return Sharded(network, self.servers)


FULL = Setting(
    servers=8,
    bytes_per_s_max=1_250_000,
    payload_bytes=1000,
    tiles_per_side=4,
    tile_side_m=100.0,
    players=(24, 240),
    growth_s=230,
    averaging_s=3,
    wait_s=4.0,
    rest_s=6.0,
    thresholds=THRESHOLDS,
)
WIDE = replace(FULL, payload_bytes=2000, tiles_per_side=8, tile_side_m=50.0, players=(30, 300), thresholds={})
SMALL = Setting(
    servers=4,
    bytes_per_s_max=500_000,
    payload_bytes=1500,
    tiles_per_side=4,
    tile_side_m=50.0,
    players=(10, 80),
    growth_s=34,
    averaging_s=4,
    wait_s=4.0,
    rest_s=5.0,
)
"""Takes two minutes. ``make bench`` runs it with a seed that makes hashing uneven: an even spread holds 2.3 times the
players. Only the order of the systems means something there."""


@dataclass(frozen=True)
class Run:
    """What one system did."""

    system: str
    moments: tuple[Moment, ...]

    def held(self, *, wan: bool = False) -> int:
        """Return the most players that were held under 150 ms mean, without or with the wide area network."""
        return players_held([moment.response(wan=wan) for moment in self.moments])

    def before(self) -> list[Moment]:
        """Return the seconds up to the one with the most players that were held."""
        held = self.held()
        return [moment for moment in self.moments if moment.players <= held]

    def as_json(self) -> dict[str, Any]:
        """Return its results: figures of the time before response times got too high, where not said otherwise."""
        before = self.before()
        busy = [moment.busy_ratio for moment in before if moment.busy_ratio is not None]
        return {
            "held": self.held(),
            "held_wan": self.held(wan=True),
            "response_ms": mean_response_ms([moment.response(wan=False) for moment in before]),
            "response_ms_wan": mean_response_ms([moment.response(wan=True) for moment in before]),
            "servers": max((moment.servers for moment in before), default=0),
            "load_ratio_mean": _top(before, lambda moment: moment.load_ratio_mean),
            "load_ratio_max": _top(before, lambda moment: moment.load_ratio_max),
            "moves": sum(moment.moves for moment in before),
            "lost": sum(moment.lost for moment in before),
            "out_of_order": sum(moment.out_of_order for moment in before),
            "gaps": sum(moment.gaps for moment in before),
            "publish_failed": sum(moment.publish_failed for moment in before),
            "join_failed": sum(moment.join_failed for moment in before),
            "busy_ratio_median": median(busy) if busy else None,
            "busy_ratio_last": _top(before, lambda moment: moment.busy_ratio or 0.0),
            "redis_cores_max": max((moment.redis_cores_max for moment in before), default=0.0),
        }


LAST_S = 10


def _top(moments: Sequence[Moment], of: Callable[[Moment], float]) -> float:
    """Return the mean over the last ten seconds, where the load is highest."""
    return mean(map(of, moments[-LAST_S:])) if moments else 0.0


def measure(setting: Setting, names: Sequence[str], seed: int, say: Callable[[str], None]) -> list[Run]:
    """Have systems carry the game, one after the other, each in a network of its own. Raises NotPossible."""
    if REDIS_CLUSTER in names:
        find_redis_7()
    plan = setting.plan(seed)
    runs: list[Run] = []
    for name in names:
        with Network(setting.bytes_per_s_max) as network, setting.system(name, network, plan) as system:
            moments = run_game(name, system, network, plan, setting.bytes_per_s_max, say, until_overloaded=True)
        runs.append(Run(name, tuple(moments)))
    return runs


def runs_of(moments: Sequence[Moment]) -> list[Run]:
    """Return the runs that raw data consist of."""
    systems = dict.fromkeys(moment.system for moment in moments)
    return [Run(system, tuple(moment for moment in moments if moment.system == system)) for system in systems]


def ratio(runs: Sequence[Run], other: str, *, wan: bool = False) -> float | None:
    """Return how many times as many players Dynamoth holds as another system; None when one of them did not run."""
    held = {run.system: run.held(wan=wan) for run in runs}
    return held[DYNAMOTH] / held[other] if DYNAMOTH in held and held.get(other) else None


def as_json(setting: Setting, runs: Sequence[Run], seed: int) -> dict[str, Any]:
    """Return everything but the raw data."""
    return {
        "seed": seed,
        "setting": asdict(setting),
        "response_ms_max": PAPER_RESPONSE_MS_MAX,
        "most_possible": setting.most_possible(seed),
        "ratios": {
            f"{DYNAMOTH}/{other}{'_wan' if wan else ''}": ratio(runs, other, wan=wan)
            for other in (HASHING, REDIS_CLUSTER)
            for wan in (False, True)
        },
        "paper": {"held": PAPER_HELD, "ratio": PAPER_RATIO},
        "systems": {run.system: run.as_json() for run in runs},
    }


def table(results: Mapping[str, Any]) -> Iterator[str]:
    """Give the lines of a table, with the paper's numbers alongside."""
    systems: Mapping[str, Mapping[str, Any]] = results["systems"]
    yield f"players held under {PAPER_RESPONSE_MS_MAX:g} ms mean response time, of {results['setting']['players'][1]}"
    row = "{:28}" + "{:>15}" * len(systems)
    yield row.format("", *systems)

    def line(what: str, cell: Callable[[Mapping[str, Any]], str]) -> str:
        return row.format(what, *map(cell, systems.values()))

    yield line("players held", lambda each: str(each["held"]))
    yield line("  with the wide area", lambda each: str(each["held_wan"]))
    yield row.format("  most possible", *(str(results["most_possible"]) for _ in systems))
    yield row.format("  the paper, of 1,200", *(PAPER_HELD.get(name, "-") for name in systems))
    yield line("mean response until then", lambda each: _ms(each["response_ms"]))
    yield line("  with the wide area", lambda each: _ms(each["response_ms_wan"]))
    yield line("servers in use", lambda each: str(each["servers"]))
    yield line("load ratio at the end: mean", lambda each: f"{each['load_ratio_mean']:.2f}")
    yield line("  of the busiest server", lambda each: f"{each['load_ratio_max']:.2f}")
    yield line("channels moved", lambda each: str(each["moves"]))
    yield line("messages lost", lambda each: str(each["lost"]))
    yield line("  doubled or out of order", lambda each: str(each["out_of_order"]))
    yield line("  gaps reported", lambda each: str(each["gaps"]))
    yield line("  failed to publish, to join", lambda each: f"{each['publish_failed']}, {each['join_failed']}")
    yield line("processors busy, median", lambda each: f"{each['busy_ratio_median'] or 0:.0%}")
    yield line("  at the end", lambda each: f"{each['busy_ratio_last']:.0%}")
    yield line("busiest Redis, of a core", lambda each: f"{each['redis_cores_max']:.0%}")
    for other in (HASHING, REDIS_CLUSTER):
        without, with_ = (results["ratios"][f"{DYNAMOTH}/{other}{wan}"] for wan in ("", "_wan"))
        if without is not None:
            paper = f"; the paper: {PAPER_RATIO:g}x" if other == HASHING else ""
            yield f"dynamoth against {other}: {without:.2f}x ({with_ or 0:.2f}x with the wide area{paper})"


def possible(setting: Setting, seeds: Sequence[int]) -> Iterator[str]:
    """Give the lines of a table: what the hashes of the channels' names leave to gain, by seed. Runs no server."""
    row = "{:>8}{:>10}{:>10}{:>8}"
    yield "players that ideal servers hold"
    yield row.format("seed", "evenly", "hashing", "ratio")
    held = [setting.held_by_queues(seed) for seed in seeds]
    for seed, (evenly, by_hash) in zip(seeds, held, strict=True):
        yield row.format(seed, evenly, by_hash, f"{evenly / by_hash:.2f}x")
    yield row.format("median", "", "", f"{median(evenly / by_hash for evenly, by_hash in held):.2f}x")


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} ms"


def main() -> int:
    """Measure and print. Returns the exit status."""
    parser = parser_of("scalability", __doc__)
    parser.add_argument("--wide", action="store_true", help="a world of 64 tiles instead of 16")
    parser.add_argument("--only", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="some of the systems")
    parser.add_argument("--from", dest="raw", nargs="+", type=Path, metavar="FILE", help="show such raw data again")
    parser.add_argument(
        "--possible", type=int, metavar="N", help="run nothing: compute for seeds 1 to N what can be gained"
    )
    arguments = parser.parse_args()
    setting = SMALL if arguments.small else WIDE if arguments.wide else FULL
    if arguments.possible:
        sys.stdout.writelines(f"{line}\n" for line in possible(setting, range(1, arguments.possible + 1)))
        return 0

    def measured() -> Shown:
        if arguments.raw:
            runs = runs_of([moment for file in arguments.raw for moment in read_parquet(file)])
        else:
            runs = measure(setting, arguments.only, arguments.seed, say)
        results = as_json(setting, runs, arguments.seed)
        return Shown(table(results), results, [moment for run in runs for moment in run.moments])

    return measure_and_show("scalability", arguments, measured)


if __name__ == "__main__":
    sys.exit(main())
