"""``dynamoth sim``: simulated worlds with faults, each from a seed; exits with 1 when a guarantee breaks."""

from __future__ import annotations

import argparse
import sys

from dynamoth_cli.numbers import count_up_to
from dynamoth_sim.data.run import DATA_PROFILES
from dynamoth_sim.data.scenarios import DATA_SCENARIOS
from dynamoth_sim.edge.run import EDGE_PROFILES
from dynamoth_sim.edge.scenarios import EDGE_SCENARIOS
from dynamoth_sim.faults.profiles import PROFILES
from dynamoth_sim.run import parse_seeds, run_and_report
from dynamoth_sim.scenarios.registry import SCENARIOS

JOBS_MAX = 1024


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    profiles = (*PROFILES, *EDGE_PROFILES, *DATA_PROFILES)
    parser.add_argument(
        "--seeds", type=_seeds, required=True, metavar="A-B", help="seeds from A to B, both included, or one seed"
    )
    parser.add_argument(
        "--scenario",
        choices=[*SCENARIOS, *EDGE_SCENARIOS, *DATA_SCENARIOS, *profiles],
        metavar="NAME",
        help=f"a scenario, or a profile of faults: {', '.join(profiles)} (default: a profile drawn from each seed). An"
        " unknown name lists all scenarios",
    )
    parser.add_argument(
        "--jobs", type=count_up_to(JOBS_MAX), metavar="N", help="number of processes (default: one for each core)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the seeds."""
    return 0 if run_and_report(arguments.seeds, arguments.scenario, arguments.jobs, sys.stdout.write) else 1


def _seeds(text: str) -> range:
    try:
        return parse_seeds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
