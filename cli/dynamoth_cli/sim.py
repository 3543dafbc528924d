"""``dynamoth sim``: thousands of worlds with faults, each from a seed; exits with 1 when one breaks a guarantee."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Iterable

from dynamoth_sim.faults import PROFILES
from dynamoth_sim.run import Outcome, run_seeds

FAILURES_SHOWN_MAX = 3
"""Stories are long; the other seeds are only named."""

PROGRESS_INTERVAL_S = 5.0
SEEDS_MAX = 10_000_000


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "--seeds", type=seed_range, required=True, metavar="A-B", help="from A to B, both included; or one"
    )
    parser.add_argument("--scenario", choices=sorted(PROFILES), help="what goes wrong (default: drawn from each seed)")
    parser.add_argument(
        "--jobs", type=_jobs, default=os.cpu_count() or 1, metavar="N", help="processes (default %(default)s)"
    )
    parser.add_argument("--verbose", action="store_true", help="tell of every seed")


def run(arguments: argparse.Namespace) -> int:
    """Run the seeds."""
    began = time.monotonic()
    outcomes = run_seeds(arguments.seeds, arguments.scenario, arguments.jobs)
    failed, done, messages = _follow(outcomes, len(arguments.seeds), verbose=arguments.verbose)
    duration_s = time.monotonic() - began
    sys.stdout.write(f"{done} seeds, {messages:,} messages delivered, {len(failed)} failed, {duration_s:.1f} s\n")
    if not failed:
        return 0
    scenario = f" --scenario {arguments.scenario}" if arguments.scenario else ""
    for seed in failed:
        sys.stdout.write(f"again with: dynamoth sim --seeds {seed}{scenario}\n")
    return 1


def _follow(outcomes: Iterable[Outcome], count: int, *, verbose: bool) -> tuple[list[int], int, int]:
    """Tell of each outcome; return the seeds that failed, and how many seeds and messages there were."""
    failed: list[int] = []
    done = messages = 0
    said_at = time.monotonic()
    for outcome in outcomes:
        done += 1
        messages += outcome.totals.delivered
        if verbose:
            sys.stdout.write(f"{outcome}\n")
        if not outcome.clean:
            failed.append(outcome.seed)
            if len(failed) <= FAILURES_SHOWN_MAX:
                _tell(outcome)
        if time.monotonic() - said_at > PROGRESS_INTERVAL_S:
            said_at = time.monotonic()
            sys.stderr.write(f"{done} of {count} seeds, {len(failed)} failed\n")
    return failed, done, messages


def _tell(outcome: Outcome) -> None:
    sys.stdout.write(f"{outcome}\n")
    for violation in outcome.violations:
        sys.stdout.write(f"{violation}\n")


def seed_range(text: str) -> range:
    """Read ``--seeds``."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"two numbers, A-B, or one expected, not {text!r}")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first or last - first >= SEEDS_MAX:
        raise argparse.ArgumentTypeError(f"B must be from A to A + {SEEDS_MAX - 1}, not {last}")
    return range(first, last + 1)


def _jobs(text: str) -> int:
    jobs = int(text)
    if not 1 <= jobs <= 1024:
        raise argparse.ArgumentTypeError(f"a number from 1 to 1024 expected, not {text}")
    return jobs
