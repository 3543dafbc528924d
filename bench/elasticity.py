"""Experiment 3 of the Dynamoth paper (section V-E, figure 7): servers come and go with the players.

Run as root with ``python -m bench.elasticity``; ``--help`` tells the rest. It takes about ten minutes. Players join,
most of them leave, and many join again, as in the paper: 800, 200, 600, scaled down to a fourth as in
``bench.scalability``. Updates have 1,400 bytes: at the peak all servers together are as far from full as those of the
paper, which hold 1,000 players. One server runs at first. The balancer asks for more when the load is high (provisioner
``command``), and frees them when it is low. Each is a redis-server and an agent, started on a machine of their own.

What is compared
    Server-seconds, from the moment a server is asked for until it is freed, against the best fixed number of servers in
    hindsight. That number is at least the demand at the peak, divided by what one server can send: no fixed fleet,
    however well balanced, can do with fewer. So the ratio that is shown is the worst one that is possible.
    ``--fixed N`` runs the same game on N servers that stay.

Demand
    The bytes that servers must send so that everybody in a tile gets all updates of everybody there. Players take the
    same paths in every run, so it is computed from these. It is not measured, as a full server sends less.

How quickly servers follow
    The longest time in which the demand was above the load ratio at which the balancer asks for more, for all servers
    together; and the longest in which servers were kept although one fewer would have had little enough for a release.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import mean
from types import TracebackType
from typing import Self

from bench.elastic_machines import Machines
from bench.game import GRACE_S, PAPER_RESPONSE_MS_MAX, WINDOW_S, Schedule, mean_response_ms, overloaded_s
from bench.game_main import Shown, measure_and_show, parser_of, say
from bench.game_run import GamePlan, Moment, run_game
from bench.game_systems import USABLE_RATIO, Balanced
from bench.replication_network import Network

FOLLOW_S_MAX = 60.0
SERVER_SECONDS_RATIO_MAX = 1.3
"""Bounds of the experiment."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The size of the experiment."""

    servers_max: int
    bytes_per_s_max: int
    payload_bytes: int
    tiles_per_side: int
    tile_side_m: float
    schedule: Schedule
    balancer: Mapping[str, float]
    grow_ratio: float = 0.5
    release_ratio: float = 0.35
    release_delay_s: float = 2.0

    def plan(self, seed: int) -> GamePlan:
        """Return what is played."""
        world = {"name": f"rgame{seed}", "tiles_per_side": self.tiles_per_side, "tile_side_m": self.tile_side_m}
        return GamePlan(world=world, payload_bytes=self.payload_bytes, schedule=self.schedule, seed=seed)

    @property
    def fleet(self) -> dict[str, object]:
        """The settings of section ``[fleet]``, without the command."""
        return {
            "fleet.provisioner": "command",
            "fleet.servers_max": self.servers_max,
            "fleet.grow_ratio": self.grow_ratio,
            "fleet.release_ratio": self.release_ratio,
            "fleet.release_delay_s": self.release_delay_s,
        }


FULL = Setting(
    servers_max=8,
    bytes_per_s_max=1_250_000,
    payload_bytes=1400,
    tiles_per_side=8,
    tile_side_m=50.0,
    schedule=Schedule(((0.0, 50), (260.0, 200), (290.0, 200), (310.0, 50), (410.0, 50), (530.0, 150), (570.0, 150))),
    balancer={"balancer.averaging_s": 3.0, "balancer.wait_s": 4.0, "balancer.channel_rest_s": 6.0},
)
SMALL = Setting(
    servers_max=4,
    bytes_per_s_max=500_000,
    payload_bytes=2000,
    tiles_per_side=6,
    tile_side_m=50.0,
    schedule=Schedule(((0.0, 18), (50.0, 40), (65.0, 40), (70.0, 15), (105.0, 15))),
    balancer={"balancer.averaging_s": 4.0, "balancer.wait_s": 4.0, "balancer.channel_rest_s": 5.0},
)
"""Takes two minutes, in ``make bench``."""


class Elastic(Balanced):
    """Dynamoth with one server, whose balancer starts and frees others.

    Args:
        network: gets a machine for each server.
        setting: the size of the experiment.

    """

    def __init__(self, network: Network, setting: Setting) -> None:
        self._machines = Machines(network, int(setting.bytes_per_s_max * USABLE_RATIO))
        self._stack = ExitStack()
        settings = {**setting.balancer, **setting.fleet, "fleet.command": self._machines.command}
        super().__init__(network, 1, setting.bytes_per_s_max, settings)

    def __enter__(self) -> Self:
        self._stack.enter_context(self._machines)
        try:
            return super().__enter__()
        except BaseException:
            self._stack.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            super().__exit__(kind, error, trace)  # the balancer first: it would ask for servers
        finally:
            self._stack.close()

    @property
    def servers(self) -> Sequence[str]:
        """The first server, and those that were started and are not freed."""
        return [*super().servers, *self._machines.servers]

    def second(self, ratios: Mapping[str, float]) -> int:
        """Return how many channels and slots the balancer has begun to move since the call before."""
        self._machines.check()
        return super().second(ratios)

    @property
    def processes(self) -> Mapping[str, int]:
        """The ids of its processes, by name."""
        return {**super().processes, **self._machines.processes}


@dataclass(frozen=True)
class Outcome:
    """What came of a run: times in seconds."""

    server_s: float
    #: Of the best fixed number of servers, at least.
    fixed_server_s: float
    fixed_servers: int
    servers_most: int
    #: The longest time with too few servers, and with too many.
    short_s: float
    spare_s: float
    #: The longest time in which the mean response time was too high.
    slow_s: int
    response_ms: float | None
    response_ms_wan: float | None
    lost: int
    out_of_order: int
    gaps: int
    publish_failed: int
    busy_ratio_mean: float

    @property
    def ratio(self) -> float:
        """Server-seconds against those of the best fixed number."""
        return self.server_s / self.fixed_server_s


def judge(moments: Sequence[Moment], setting: Setting, bytes_due: Sequence[float]) -> Outcome:
    """Compare the servers that there were with those that were needed, for a demand of ``bytes_due`` in each second."""
    times_s = [moments[0].at_s, *(later.at_s - earlier.at_s for earlier, later in pairwise(moments))]
    # In parts of what one server can send.
    due = [each / (setting.bytes_per_s_max * USABLE_RATIO) for each in bytes_due]
    loads = [mean(due[max(0, end - WINDOW_S) : end]) for end in range(1, len(due) + 1)]
    fixed = max(1, math.ceil(max(loads)))
    short = [
        each.servers < setting.servers_max and load > setting.grow_ratio * each.servers
        for load, each in zip(loads, moments, strict=True)
    ]
    spare = [
        each.servers > 1 and load <= setting.release_ratio * (each.servers - 1)
        for load, each in zip(loads, moments, strict=True)
    ]
    responses = [moment.response(wan=False) for moment in moments]
    return Outcome(
        server_s=sum(moment.servers * time_s for moment, time_s in zip(moments, times_s, strict=True)),
        fixed_server_s=fixed * moments[-1].at_s,
        fixed_servers=fixed,
        servers_most=max(moment.servers for moment in moments),
        short_s=longest_s(short, times_s),
        spare_s=longest_s(spare, times_s),
        slow_s=max(overloaded_s(responses[:end]) for end in range(1, len(responses) + 1)),
        response_ms=mean_response_ms(responses),
        response_ms_wan=mean_response_ms([moment.response(wan=True) for moment in moments]),
        lost=sum(moment.lost for moment in moments),
        out_of_order=sum(moment.out_of_order for moment in moments),
        gaps=sum(moment.gaps for moment in moments),
        publish_failed=sum(moment.publish_failed for moment in moments),
        busy_ratio_mean=mean(moment.busy_ratio or 0.0 for moment in moments),
    )


def longest_s(holds: Sequence[bool], times_s: Sequence[float]) -> float:
    """Return the longest time without a break in which something holds."""
    longest = present = 0.0
    for each, time_s in zip(holds, times_s, strict=True):
        present = present + time_s if each else 0.0
        longest = max(longest, present)
    return longest


def measure(setting: Setting, seed: int, fixed: int | None, say: Callable[[str], None]) -> list[Moment]:
    """Play the game; ``fixed``: on so many servers that stay. Raises NotPossible."""
    plan = setting.plan(seed)
    with Network(setting.bytes_per_s_max) as network, ExitStack() as stack:
        if fixed is None:
            system: Balanced = Elastic(network, setting)
        else:
            system = Balanced(network, fixed, setting.bytes_per_s_max, setting.balancer)
        stack.enter_context(system)
        return run_game("dynamoth", system, network, plan, setting.bytes_per_s_max, say)


def table(outcome: Outcome, setting: Setting) -> Iterator[str]:
    """Give the lines of a table."""
    players = ", ".join(f"{number} at {at_s:g} s" for at_s, number in setting.schedule.points)
    yield f"players: {players}"
    yield "the paper: 800, down to 200, up to almost 600; 1 to 8 servers"
    row = "{:44}{:>10}"
    yield row.format("most servers at a time", outcome.servers_most)
    yield row.format("server-seconds", f"{outcome.server_s:.0f}")
    yield row.format(
        f"  of {outcome.fixed_servers} fixed servers, the fewest for the peak", f"{outcome.fixed_server_s:.0f}"
    )
    yield row.format(f"  ratio (at most {SERVER_SECONDS_RATIO_MAX:g})", f"{outcome.ratio:.2f}")
    yield row.format(f"longest time with too few (at most {FOLLOW_S_MAX:g} s)", f"{outcome.short_s:.0f} s")
    yield row.format(f"  with too many (at most {FOLLOW_S_MAX:g} s)", f"{outcome.spare_s:.0f} s")
    yield row.format(
        f"longest time above {PAPER_RESPONSE_MS_MAX:g} ms mean (at most {GRACE_S} s)", f"{outcome.slow_s} s"
    )
    yield row.format("mean response", _ms(outcome.response_ms))
    yield row.format("  with the wide area", _ms(outcome.response_ms_wan))
    yield row.format(
        "messages lost; doubled or out of order; gaps", f"{outcome.lost}; {outcome.out_of_order}; {outcome.gaps}"
    )
    yield row.format("processors busy, mean", f"{outcome.busy_ratio_mean:.0%}")


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} ms"


def main() -> int:
    """Measure and print. Returns the exit status."""
    parser = parser_of("elasticity", __doc__)
    parser.add_argument("--fixed", type=int, metavar="N", help="on N servers that stay, for comparison")
    arguments = parser.parse_args()
    setting = SMALL if arguments.small else FULL

    def measured() -> Shown:
        moments = measure(setting, arguments.seed, arguments.fixed, say)
        due = [sum(second.values()) for second in setting.plan(arguments.seed).bytes_due()]
        outcome = judge(moments, setting, due)
        results = {**asdict(outcome), "ratio": outcome.ratio, "setting": asdict(setting)}
        return Shown(table(outcome, setting), results, moments)

    return measure_and_show("elasticity", arguments, measured)


if __name__ == "__main__":
    sys.exit(main())
