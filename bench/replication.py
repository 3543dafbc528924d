"""Experiment 1 of the Dynamoth paper (section V-C, Figure 4): how many clients of a channel one server and three hold.

Run as root with ``python -m bench.replication``; ``--help`` tells the rest. It takes about five minutes. Real servers,
each with its agent on a machine of its own as far as the network goes (``replication_network``), and real clients
(``replication_clients``).

all-publishers: one publisher, more and more subscribers. all-subscribers: one subscriber, more and more publishers. A
publisher sends 10 messages per second. Each is done with the channel at one server, and replicated over three.

What limits a server
    What it may send, as in the paper's model (eq. 1): 100 Mbit/s here. The size of a message is such that this is
    enough for 5% more clients than the paper's server held: 500 subscribers, or 200 publishers. Processors are meant
    not to limit anything; how busy they were is in the results. In the paper it was the server's processor that gave
    way in the first case, and the output buffer of the subscriber in the second.

What is compared
    The largest number of clients for which every message is delivered, once and in order, and p99 of the response time
    is at most 150 ms: the bound that the paper has for players (section V-D), there for the average. Near the limit the
    numbers that are tried are a tenth apart: the ratio is as exact as that.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import exit_status
from bench.replication_clients import Clients, Step
from bench.replication_network import LimitedCluster, Network, NotPossible
from dynamoth_cli.local.child import interrupted_by_signals

SERVERS = 3
BYTES_PER_S_MAX = 12_500_000
"""100 Mbit/s: little enough for two processor cores to serve three of them."""
RESPONSE_MS_MAX = 150.0
STEP_S = 4.0


@dataclass(frozen=True)
class Paper:
    """The claims of the text of section V-C; Figure 4 itself gives no numbers."""

    held_by_one: int
    held_by_three: int
    three: str
    tried: int = 800
    """The most clients that it tried."""


@dataclass(frozen=True)
class Experiment:
    """One half of the experiment: which clients become more, and how many of them there are in each step."""

    mode: str
    growing: str
    payload_bytes: int
    #: With the channel at one server.
    one: tuple[int, ...]
    #: With the channel replicated.
    three: tuple[int, ...]
    #: For subscribers, for publishers.
    processes: tuple[int, int]
    paper: Paper

    def clients(self, count: int) -> tuple[int, int]:
        """Return how many subscribers and publishers there are in the step of ``count``."""
        return (count, 1) if self.growing == "subscribers" else (1, count)


UPTO_800 = (100, 200, 300, 400, 500, 600, 700, 800)
"""The numbers of the paper's Figure 4."""

EXPERIMENTS = (
    Experiment(
        mode="all-publishers",
        growing="subscribers",
        payload_bytes=2150,
        one=tuple(sorted({*UPTO_800, 450, 550})),
        three=(*UPTO_800, 1200, 1350, 1500, 1650),
        processes=(2, 1),
        paper=Paper(500, 800, "'response times remain very low' up to the 800 that were tried"),
    ),
    Experiment(
        mode="all-subscribers",
        growing="publishers",
        payload_bytes=5500,
        one=tuple(sorted({*UPTO_800, 180, 220})),
        three=tuple(sorted({*UPTO_800, 540, 660})),
        processes=(1, 2),
        paper=Paper(200, 600, "'nearly up to 600'"),
    ),
)


@dataclass(frozen=True)
class Ladder:
    """The steps of one experiment with ``servers`` servers, in order, and what was found."""

    servers: int
    steps: dict[int, Step]
    #: Steps that held when they were tried again only.
    second_attempts: tuple[int, ...]
    dropped_packets: int

    @property
    def held(self) -> int:
        """The largest number of clients that was held, all smaller ones too; 0 for none."""
        held = 0
        for count, step in self.steps.items():
            if not step.held(RESPONSE_MS_MAX):
                break
            held = count
        return held

    def as_json(self) -> dict[str, Any]:
        """Return all of it."""
        steps = [
            {
                "clients": count,
                "held": step.held(RESPONSE_MS_MAX),
                "delivered_ratio": step.delivered_ratio,
                **asdict(step),
            }
            for count, step in self.steps.items()
        ]
        return {
            "servers": self.servers,
            "held": self.held,
            "second_attempts": list(self.second_attempts),
            "dropped_packets": self.dropped_packets,
            "steps": steps,
        }


@dataclass(frozen=True)
class Outcome:
    """The result of one experiment."""

    experiment: Experiment
    one: Ladder
    three: Ladder

    @property
    def ratio(self) -> float:
        """How many times as many clients three servers hold as one does; 0 when one holds none."""
        return self.three.held / self.one.held if self.one.held else 0.0

    def as_json(self) -> dict[str, Any]:
        """Return all of it."""
        return {
            "growing": self.experiment.growing,
            "ratio": self.ratio,
            "one": self.one.as_json(),
            "three": self.three.as_json(),
            "paper": asdict(self.experiment.paper),
        }


# The measurement.


def measure(experiments: Sequence[Experiment], step_s: float) -> list[Outcome]:
    """Carry out the experiments on one cluster. Raises NotPossible where that cannot be made."""
    with Network(BYTES_PER_S_MAX) as network, LimitedCluster(network, SERVERS) as cluster:
        return [
            Outcome(
                experiment,
                one=climb(network, cluster, experiment, 1, step_s),
                three=climb(network, cluster, experiment, SERVERS, step_s),
            )
            for experiment in experiments
        ]


def climb(network: Network, cluster: LimitedCluster, experiment: Experiment, servers: int, step_s: float) -> Ladder:
    """Do the steps of an experiment, with a channel of its own."""
    channel = f"{experiment.mode}:{servers}".encode()
    if servers > 1:
        replicas = {"mode": experiment.mode, "servers": cluster.server_ids[:servers]}
        cluster.ask_balancer("replicate", {"channel": channel, **replicas})
    dropped = network.dropped()
    steps: dict[int, Step] = {}
    again: list[int] = []
    all_held = True
    with Clients(cluster.url, channel, experiment.payload_bytes, experiment.processes) as clients:
        for count in experiment.one if servers == 1 else experiment.three:
            if not all_held and count > max(UPTO_800):
                break  # what is beyond the paper's figure is there to find the limit only
            clients.grow(*experiment.clients(count))
            step = clients.step(step_s)
            if all_held and not step.held(RESPONSE_MS_MAX):
                # Once, at the supposed limit: something else may have had the processors for a moment.
                step = clients.step(step_s)
                again += [count] if step.held(RESPONSE_MS_MAX) else []
            all_held = all_held and step.held(RESPONSE_MS_MAX)
            steps[count] = step
            cluster.check()
            spread = "1 server" if servers == 1 else f"{servers} servers"
            sys.stderr.write(f"{experiment.mode}, {spread}, {count} {experiment.growing}: {in_words(step)}\n")
    return Ladder(servers, steps, tuple(again), network.dropped() - dropped)


# What people read.


def in_words(step: Step) -> str:
    """Return a step for people who wait."""
    held = "held" if step.held(RESPONSE_MS_MAX) else "not held"
    p50, p99, delivered = _cells(step)
    return f"p50 {p50}, p99 {p99}, {delivered} delivered, processors {step.busy_ratio or 0:.0%} busy: {held}"


def _cells(step: Step | None) -> tuple[str, str, str]:
    if step is None:
        return "", "", ""
    if step.response_ms_p50 is None or step.response_ms_p99 is None:
        return "-", "-", "0%"
    # Rounded down: 100% is all of it.
    return (
        f"{step.response_ms_p50:.1f} ms",
        f"{step.response_ms_p99:.1f} ms",
        f"{int(step.delivered_ratio * 1000) / 10:g}%",
    )


def table(outcome: Outcome) -> Iterator[str]:
    """Give the lines of a table like Figure 4."""
    one, three, paper = outcome.one, outcome.three, outcome.experiment.paper
    yield f"{outcome.experiment.mode}: response time by number of {outcome.experiment.growing}"
    row = "{:>8} |{:>11}{:>11}{:>10} |{:>11}{:>11}{:>10}"
    yield f"{'':8} |{'one server':^33}|{f'{three.servers} servers':^33}"
    yield row.format("clients", *("p50", "p99", "delivered") * 2)
    for count in sorted({*one.steps, *three.steps}):
        yield row.format(count, *_cells(one.steps.get(count)), *_cells(three.steps.get(count)))
    what = f"held (p99 up to {RESPONSE_MS_MAX:g} ms, everything delivered)"
    yield f"{what}: {one.held} and {three.held}, {outcome.ratio:.2f}x"
    yield f"the paper's text: {paper.held_by_one} and {paper.held_by_three} ({paper.three})"


def as_json(outcomes: Sequence[Outcome], step_s: float) -> dict[str, Any]:
    """Return everything."""
    return {
        "response_ms_max": RESPONSE_MS_MAX,
        "server_bytes_per_s_max": BYTES_PER_S_MAX,
        "step_s": step_s,
        **{outcome.experiment.mode: outcome.as_json() for outcome in outcomes},
    }


def main() -> int:
    """Measure and print. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.replication", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    modes = [experiment.mode for experiment in EXPERIMENTS]
    parser.add_argument("--only", choices=modes, help="one half of the experiment")
    parser.add_argument("--step-s", type=float, default=STEP_S, help="how long is published (default %(default)g s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them there: .svg or .png; needs matplotlib")
    arguments = parser.parse_args()
    plot: Path | None = arguments.plot
    draw = None if plot is None else _drawer()
    chosen = [experiment for experiment in EXPERIMENTS if arguments.only in (None, experiment.mode)]
    try:
        with interrupted_by_signals():
            outcomes = measure(chosen, arguments.step_s)
    except NotPossible as error:
        sys.stderr.write(f"skipped: the benchmark of replication {error}\n")
        return exit_status.SKIPPED
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: networks and processes are removed\n")
        return exit_status.INTERRUPTED
    results = as_json(outcomes, arguments.step_s)
    for outcome in outcomes:
        sys.stdout.write("\n".join([*table(outcome), "", ""]))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")
    if draw is not None and plot is not None:
        draw(results, plot)
    return 0


def _drawer() -> Callable[[Mapping[str, Any], Path], None]:
    """Return the function that draws. Called before the measurement, so that a missing matplotlib shows at once."""
    from bench.replication_plot import draw

    return draw


if __name__ == "__main__":
    sys.exit(main())
