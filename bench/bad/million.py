"""A hundred times the simulation of the paper: 1,000,000 users at 200 brokers, in virtual time.

Interests are regional, of the region where users live; users have subscribed when the run begins. The production
controller has its default bounds, but for larger plans. It never has all users: brokers report totals, and answer with
candidates.
"""

from __future__ import annotations

import math
import resource
import time
from random import Random

from bench.bad.claims import Claim, Finding, Runs, bounded, compare
from bench.bad.runs import Run
from bench.bad.simulated import SimWorkload
from bench.bad.virtual import CAPACITY_BYTES_PER_S, SimScheme, VirtualEdge, settings
from dynamoth_broker.coordinator.relieve import Scheme

BROKERS = 200
END_S = 10 * 60.0
REPORT_S = 20.0
SKEW = 0.5
"""How unevenly people live: the logarithms of the numbers near each broker have this standard deviation."""

DECISION_S_MAX = 5.0
LAST_S = END_S - 2 * 60.0


def workload(users: int, brokers: int) -> SimWorkload:
    """Return the workload: as many interests per broker as the paper has in all, and its mean load."""
    rng = Random("million")
    shares = tuple(math.exp(rng.gauss(0.0, SKEW)) for _ in range(brokers))
    # The mean load is that of the paper's workload: users have 20 interests each.
    rate = 418e6 / (users / brokers * 20)
    return SimWorkload(
        users=users,
        brokers=brokers,
        interests="local",
        regions=brokers,
        interests_per_region=500,
        rate_mean=rate,
        rate_deviation=rate / 4,
        shares=shares,
        is_subscribed_at_once=True,
    )


SCHEME = SimScheme(
    name="ours",
    settings=settings(
        cov_max=0.15,
        mean_min_bytes_per_s=300e6,
        scheme=Scheme.SIMILARITY,
        cov_target=0.05,
        looks=1,
        candidates_max=100_000,
        moves_per_plan_max=20_000,
        moves_in_max=1_000,
        rest_s=120.0,
    ),
)


def run(users: int, brokers: int, seed: int) -> Run:
    """Run one seed; takes minutes, and some GB."""
    begin = time.perf_counter()
    made = VirtualEdge(workload(users, brokers), seed, SCHEME, [CAPACITY_BYTES_PER_S] * brokers, REPORT_S)
    built_s = time.perf_counter() - begin
    found = made.run(END_S, 30.0)
    found.more["seconds"] = time.perf_counter() - begin
    found.more["built_s"] = built_s
    found.more["rss_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    found.more["users"] = float(users)
    return found


def title(users: int, brokers: int) -> str:
    """Return the title of the table."""
    return f"Beyond: {users:,} users at {brokers} brokers"


def _evened(runs: Runs) -> Finding:
    [one] = runs["NR/ours"]
    covs = one.covs()
    texts = f"cov {covs[0]:.3f} at the start, {covs[-1]:.3f} after {one.times[-1] / 60:.0f} min; {one.moved:,} moves"
    return Finding(texts, covs[-1] <= 0.15)


CLAIMS = (
    Claim("uneven loads are repaired: cov at the end at most alpha (0.15)", "-", _evened),
    Claim(
        f"the longest step of the controller takes at most {DECISION_S_MAX:g} s of CPU",
        "-",
        bounded("NR/ours", lambda run: run.more["handle_s_max"], most=DECISION_S_MAX),
    ),
    Claim("largest load, MB/s, in the last two minutes", "-", compare(
        ("NR/ours",), lambda run: run.mean_max(LAST_S), 1e6, ".0f")),
    Claim("memory of the simulation, all users included, MiB", "-", compare(
        ("NR/ours",), lambda run: run.more["rss_mib"], 1.0, ".0f")),
)  # fmt: skip
