"""One busy channel that goes through assignments of every mode, on any servers: what is lost, how much slower it gets.

Run with ``python -m bench.transitions``; ``--help`` tells the rest, ``bench.busy_channel`` what is measured. The
assignments are drawn at random: one server, or two or three of them in one of the two ways of replication. So old and
new servers may be the same, overlap, or be others altogether.

What a change costs shows only where the machine has time to spare. Otherwise messages wait for a processor, and that
is measured instead. So there are two runs. The first is at a rate that leaves a third of the machine idle, which is
found by trials. The second is at ``--messages-per-s``, however busy that makes the machine: its results are
``saturated``.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import combinations, pairwise

from bench.busy_channel import CHANNEL, Change, Load, Result, add_arguments, find_rate, load_of, measure, show, where
from dynamoth.errors import DynamothError
from dynamoth.plan.plan import Assignment, Mode, single
from dynamoth_cli.local.child import interrupted_by_signals
from dynamoth_cli.local.cluster import LocalCluster

SERVERS = 3
SEED = 1
BUSY_RATIO = 0.55
"""How busy the machine is while nothing changes. While something does, subscribers listen in two places, so that it is
busier then: about two thirds in all (``busy_ratio`` of the results)."""
SATURATED_TRANSITIONS = 40
"""Transitions of the saturated run: enough for its figures, which are shown for comparison."""
PAUSE_S = 0.5
"""Long enough for each transition to be measured by itself: what one leaves behind would be waited for in the next."""


def all_assignments(servers: Sequence[str]) -> list[Assignment]:
    """Return every assignment to some of the servers."""
    several = [chosen for size in range(2, len(servers) + 1) for chosen in combinations(servers, size)]
    replicated = [
        Assignment(mode, chosen) for mode in (Mode.ALL_SUBSCRIBERS, Mode.ALL_PUBLISHERS) for chosen in several
    ]
    return [*map(single, servers), *replicated]


def walk(start: Assignment, servers: Sequence[str], count: int, chance: random.Random) -> Iterator[Assignment]:
    """Yield ``count`` assignments, each different from the one before it."""
    present = start
    for _ in range(count):
        present = chance.choice([other for other in all_assignments(servers) if other != present])
        yield present


def change_between(before: Assignment, after: Assignment) -> Change:
    """Return what an administrator asks for to get from one assignment to the other."""
    kind = f"{before.mode.name} to {after.mode.name}"
    if after.mode is not Mode.SINGLE:
        mode = after.mode.name.lower().replace("_", "-")
        return Change("replicate", {"channel": CHANNEL, "mode": mode, "servers": list(after.servers)}, kind)
    command = "move" if before.mode is Mode.SINGLE else "unreplicate"
    return Change(command, {"channel": CHANNEL, "to": after.servers[0]}, kind)


def go_through(load: Load, seed: int, busy_ratio: float | None = None) -> Result:
    """Run the load on a cluster, and have its channel go through assignments.

    With ``busy_ratio`` at a rate at which the machine is as busy as that while nothing changes, and at most that of the
    load.
    """
    with LocalCluster(SERVERS) as cluster:
        cluster.ask_balancer("pause")  # it might find that the channel should be replicated, or not
        if busy_ratio is not None:
            load = replace(load, messages_per_s=find_rate(load, cluster, busy_ratio))
            sys.stderr.write(f"{load.messages_per_s:.0f} messages/s to {load.subscribers} subscribers\n")
        start = single(where(cluster))
        path = [start, *walk(start, cluster.server_ids, load.changes, random.Random(seed))]
        return measure(load, cluster, [change_between(*pair) for pair in pairwise(path)])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.transitions", description=__doc__)
    add_arguments(parser, changes="transitions", pause_s=PAUSE_S)
    parser.add_argument("--seed", type=int, default=SEED, help="of the choice of assignments (default %(default)s)")
    arguments = parser.parse_args()
    load = load_of(arguments)
    with interrupted_by_signals():
        result = go_through(load, arguments.seed, BUSY_RATIO)
        full = _saturated(replace(load, changes=min(load.changes, SATURATED_TRANSITIONS)), arguments.seed)
    if arguments.json:
        sys.stdout.write(json.dumps({**asdict(result), "saturated": None if full is None else asdict(full)}) + "\n")
        return
    show(result, as_json=False)
    if full is not None:
        sys.stdout.write("\nsaturated:\n")
        show(full, as_json=False)


def _saturated(load: Load, seed: int) -> Result | None:
    """Return what comes out whatever the machine makes of the load; None where a change did not settle in time."""
    try:
        return go_through(load, seed)
    except DynamothError as error:
        sys.stderr.write(f"saturated: {error}\n")
        return None


if __name__ == "__main__":
    main()
