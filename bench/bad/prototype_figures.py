"""Figures 5 to 12, and latencies around migrations, on real processes: runs and claims."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bench.bad.claims import Claim, Finding, Runs, bounded, compare, of, ratio
from bench.bad.emergencies import END_S
from bench.bad.prototype import ALPHA, GAMMA
from bench.bad.runs import NoRuns, Run, spread

STEADY_S = 12 * 60.0
"""Four minutes after the last subscription, when the first plans have been executed. Means are from here on."""

LAST_S = END_S - 5 * 60.0
"""The end: the last five minutes."""

KB = 1e3
SHUFFLING = ("none", "LDM+GSH", "SDM+GSH")
"""With random and round-robin placement a shuffle may begin: that none does is a finding."""

ALL_NEAREST = ("none", "LDM", "SDM", "LDM+GSH", "SDM+GSH")


@dataclass(frozen=True)
class PrototypeFigure:
    """What a command runs, as ``placement/scheme``, and what is claimed of it."""

    title: str
    runs: tuple[str, ...]
    claims: tuple[Claim, ...]


def mean_max(run: Run) -> float:
    return run.mean_max(STEADY_S)


def mean_cov(run: Run) -> float:
    return run.mean_cov(STEADY_S)


def end_cov(run: Run) -> float:
    return run.mean_cov(LAST_S)


def mean_spread(run: Run) -> float:
    return run.mean_spread(STEADY_S)


def moved(run: Run) -> float:
    return float(run.moved)


def even_ratio(run: Run) -> float:
    """Return the part of the time in which the loads are even enough for relief not to begin."""
    covs = run.covs(STEADY_S)
    return sum(cov <= ALPHA for cov in covs) / len(covs)


def later_moves(run: Run) -> float:
    """Return the moves after ``STEADY_S``."""
    before = [moves for moves, at in zip(run.moves, run.times, strict=True) if at <= STEADY_S]
    return float(run.moved - before[-1])


def _names(placement: str, schemes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{placement}/{scheme}" for scheme in schemes)


def _nothing_lost(runs: Runs) -> Finding:
    everything = [run for each in runs.values() for run in each]
    if not everything:
        raise NoRuns("not run")
    totals = {name: sum(run.more[name] for run in everything) for name in ("lost", "repeated", "gaps", "faults")}
    delivered = sum(run.more["delivered"] for run in everything)
    text = f"{delivered:,.0f} delivered; " + ", ".join(f"{name} {total:.0f}" for name, total in totals.items())
    return Finding(text, not any(totals.values()) and delivered > 0)


_INTACT = Claim("Must reach: results lost, repeated or replaced by gaps: none", "not measured", _nothing_lost)


def _loads(placement: str) -> tuple[Claim, ...]:
    """Return the claims of figures 5 and 7: the lines of the brokers come closer."""
    ldm, sdm, none = (f"{placement}/{scheme}" for scheme in ("LDM+GSH", "SDM+GSH", "none"))
    return (
        Claim("the loads are a little uneven without balancing: cov", "slight", bounded(none, mean_cov, most=GAMMA)),
        *(
            Claim(
                f"{name}: largest minus least load, against none", "narrower", ratio(each, none, mean_spread, most=1.0)
            )
            for name, each in (("LDM+GSH", ldm), ("SDM+GSH", sdm))
        ),
        *(
            Claim(
                f"{name}: share of the time with cov at most alpha ({ALPHA:g})",
                "alpha not given",
                bounded(each, even_ratio, least=0.9),
                "alpha is close to the least cov that 400 users allow, and loads change between two plans",
            )
            for name, each in (("LDM+GSH", ldm), ("SDM+GSH", sdm))
        ),
        Claim("largest minus least load, kB/s", "curve only", compare((none, ldm, sdm), mean_spread, KB)),
        _INTACT,
    )


def _metrics(placement: str) -> tuple[Claim, ...]:
    """Return the claims of figure 6: largest load, cov, moves."""
    ldm, sdm, none = (f"{placement}/{scheme}" for scheme in ("LDM+GSH", "SDM+GSH", "none"))
    return (
        Claim("LDM+GSH: largest load, against none", "lower", ratio(ldm, none, mean_max, most=1.0)),
        Claim("SDM+GSH: largest load, against none", "lower", ratio(sdm, none, mean_max, most=1.0)),
        Claim("LDM+GSH: cov, against none", "lower", ratio(ldm, none, mean_cov, most=1.0)),
        Claim("SDM+GSH: cov, against none", "lower", ratio(sdm, none, mean_cov, most=1.0)),
        Claim("SDM+GSH is like LDM+GSH: largest load", "similar", ratio(sdm, ldm, mean_max, most=1.1, least=0.9)),
        Claim("few users move, of 400", "a few", bounded(ldm, moved, most=80)),
        Claim("no shuffle begins, in any seed", "none", bounded(ldm, lambda run: run.shuffles, most=0, is_every=True)),
        Claim("largest load, kB/s", "curve only", compare((none, ldm, sdm), mean_max, KB)),
        Claim("cov", "curve only", compare((none, ldm, sdm), mean_cov)),
        Claim("moves", "curve only", compare((ldm, sdm), moved, digits=".0f")),
        _INTACT,
    )


def _later(dm: str, gsh: str) -> Callable[[Runs], Finding]:
    def judge(runs: Runs) -> Finding:
        with_shuffle, without = of(runs, gsh, later_moves), of(runs, dm, later_moves)
        text = f"{with_shuffle.text(digits='.0f')} against {without.text(digits='.0f')}"
        return Finding(text, with_shuffle.median < without.median)

    return judge


def _five_times(scheme: str, nearest: str) -> Callable[[Runs], Finding]:
    def judge(runs: Runs) -> Finding:
        near, random = of(runs, f"NR/{nearest}", moved), of(runs, f"RND/{scheme}", moved)
        robin = of(runs, f"RR/{scheme}", moved)
        parts = (f"{name} {each.text(digits='.0f')}" for name, each in (("NR", near), ("RND", random), ("RR", robin)))
        return Finding("; ".join(parts), near.median >= 5 * random.median)

    return judge


def _latency(runs: Runs) -> Finding:
    texts: list[str] = []
    for phase in ("before", "during", "after"):
        values = [run.more for each in runs.values() for run in each if run.more[f"{phase}_count"]]
        p50, p99 = (spread(more[f"{phase}_ms_{name}"] for more in values) for name in ("p50", "p99"))
        texts.append(f"{phase}: p50 {p50.text(digits='.0f')}, p99 {p99.text(digits='.0f')}")
    return Finding("; ".join(texts), None)


FIGURES: Mapping[str, PrototypeFigure] = {
    "5": PrototypeFigure(
        "Figure 5: load of each broker, random placement", _names("RND", SHUFFLING), _loads("RND")
    ),
    "6": PrototypeFigure(
        "Figure 6: largest load, cov and moves, random placement", _names("RND", SHUFFLING), _metrics("RND")
    ),
    "7": PrototypeFigure(
        "Figure 7: load of each broker, round-robin placement", _names("RR", SHUFFLING), _loads("RR")
    ),
    "8": PrototypeFigure(
        "Figure 8: load of each broker, nearest-broker placement: none, LDM, SDM",
        _names("NR", ("none", "LDM", "SDM")),
        (
            Claim(
                f"none: extreme imbalance: cov above gamma ({GAMMA:g})",
                "extreme",
                bounded("NR/none", mean_cov, least=GAMMA),
            ),
            *(
                Claim(
                    f"{scheme} repairs it in time: cov in the last 5 minutes, at most alpha ({ALPHA:g})",
                    "repaired",
                    bounded(f"NR/{scheme}", end_cov, most=ALPHA),
                )
                for scheme in ("LDM", "SDM")
            ),
            Claim("moves", "curve only", compare(("NR/LDM", "NR/SDM"), moved, digits=".0f")),
            _INTACT,
        ),
    ),
    "9": PrototypeFigure(
        "Figure 9: load of each broker, nearest-broker placement with LDM+GSH, SDM+GSH",
        _names("NR", ("LDM", "SDM", "LDM+GSH", "SDM+GSH")),
        (
            Claim(
                "a shuffle begins, in every seed",
                "yes",
                bounded("NR/LDM+GSH", lambda run: run.shuffles, least=1, is_every=True),
            ),
            Claim("later moves (from minute 12 on), LDM+GSH against LDM", "fewer", _later("NR/LDM", "NR/LDM+GSH")),
            Claim("later moves, SDM+GSH against SDM", "fewer", _later("NR/SDM", "NR/SDM+GSH")),
            Claim(
                "moves of the shuffles themselves",
                "not counted",
                compare(("NR/LDM+GSH", "NR/SDM+GSH"), lambda run: float(run.shuffle_moves), digits=".0f"),
            ),
            Claim(
                "all moves, those of shuffles included",
                "curve only",
                compare(("NR/LDM", "NR/SDM", "NR/LDM+GSH", "NR/SDM+GSH"), moved, digits=".0f"),
                "a shuffle moves most of the users once, and that saves few later moves",
            ),
            _INTACT,
        ),
    ),
    "10": PrototypeFigure(
        "Figure 10: largest load, cov and moves, nearest-broker placement: none, LDM, SDM",
        _names("NR", ("none", "LDM", "SDM")),
        (
            Claim("LDM: largest load, against none", "much lower", ratio("NR/LDM", "NR/none", mean_max, most=0.8)),
            Claim("SDM: largest load, against none", "much lower", ratio("NR/SDM", "NR/none", mean_max, most=0.8)),
            Claim("SDM is like LDM: largest load", "similar", ratio(
                "NR/SDM", "NR/LDM", mean_max, most=1.1, least=0.9)),
            Claim("largest load, kB/s", "curve only", compare(_names("NR", ("none", "LDM", "SDM")), mean_max, KB)),
            Claim("cov", "curve only", compare(_names("NR", ("none", "LDM", "SDM")), mean_cov)),
            Claim("moves", "curve only", compare(("NR/LDM", "NR/SDM"), moved, digits=".0f")),
            _INTACT,
        ),
    ),
    "11": PrototypeFigure(
        "Figure 11: largest load, cov and moves, nearest-broker placement with LDM+GSH, SDM+GSH",
        _names("NR", ALL_NEAREST),
        (
            Claim("LDM+GSH: largest load, against none", "much lower", ratio(
                "NR/LDM+GSH", "NR/none", mean_max, most=0.8)),
            Claim("SDM+GSH: largest load, against none", "much lower", ratio(
                "NR/SDM+GSH", "NR/none", mean_max, most=0.8)),
            Claim("LDM+GSH is little better than LDM: largest load", "not much", ratio(
                "NR/LDM+GSH", "NR/LDM", mean_max, most=1.05, least=0.8)),
            Claim("largest load, kB/s", "curve only", compare(_names("NR", ALL_NEAREST), mean_max, KB)),
            Claim("cov", "curve only", compare(_names("NR", ALL_NEAREST), mean_cov)),
            Claim("Redis egress, kB/s", "not measured", compare(
                _names("NR", ALL_NEAREST), lambda run: run.mean_egress(STEADY_S), KB),
                "half of the interests are of one user each: there is little to group"),
            Claim("moves, those of shuffles included", "curve only", compare(
                _names("NR", ALL_NEAREST[1:]), moved, digits=".0f")),
            _INTACT,
        ),
    ),
    "12": PrototypeFigure(
        "Figure 12: moves for random, round-robin and nearest-broker placement; LDM, SDM",
        (
            *_names("RND", SHUFFLING[1:]),
            *_names("RR", SHUFFLING[1:]),
            *_names("NR", ("LDM", "SDM")),
        ),
        (
            Claim("LDM: NR needs at least 5 times the moves of RND", "much more", _five_times("LDM+GSH", "LDM")),
            Claim("SDM: NR needs at least 5 times the moves of RND", "much more", _five_times("SDM+GSH", "SDM")),
            _INTACT,
        ),
    ),
    "latency": PrototypeFigure(
        "Beyond: latency of users before, during (1 s) and after their move, in real ms; nearest-broker placement",
        _names("NR", ("LDM", "LDM+GSH", "SDM+GSH")),
        (
            Claim("from publication to handler, ms", "not measured", _latency),
            Claim(
                "p99 during a move, against before, of LDM+GSH",
                "not measured",
                lambda runs: Finding(
                    spread(
                        run.more["during_ms_p99"] / run.more["before_ms_p99"] for run in runs["NR/LDM+GSH"]
                    ).text(),
                    None,
                ),
                "results come in bursts at the end of a period, and 2 processors are shared by all processes",
            ),
            _INTACT,
        ),
    ),
}  # fmt: skip
