"""One busy channel that is moved to and fro between two servers: what is lost, and how much slower it gets.

Run with ``python -m bench.moves``; ``--help`` tells the rest, ``bench.busy_channel`` what is measured.
"""

from __future__ import annotations

import argparse

from bench.busy_channel import CHANNEL, Change, Load, Result, add_arguments, load_of, measure, show, where
from dynamoth_cli.local.child import interrupted_by_signals
from dynamoth_cli.local.cluster import LocalCluster

PAUSE_S = 0.1


def moves(cluster: LocalCluster, count: int) -> list[Change]:
    """Return ``count`` moves, of which the first takes the channel away from where it is."""
    first = where(cluster)
    second = next(server for server in cluster.server_ids if server != first)
    targets = [(second, first)[index % 2] for index in range(count)]
    return [Change("move", {"channel": CHANNEL, "to": target}, "move") for target in targets]


def move_to_and_fro(load: Load) -> Result:
    """Run the load on a cluster of two servers, and move its channel."""
    with LocalCluster(2) as cluster:  # of ample capacity, so that the balancer moves nothing by itself
        return measure(load, cluster, moves(cluster, load.changes))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.moves", description=__doc__)
    add_arguments(parser, changes="moves", pause_s=PAUSE_S)
    arguments = parser.parse_args()
    with interrupted_by_signals():
        result = move_to_and_fro(load_of(arguments))
    show(result, as_json=arguments.json)


if __name__ == "__main__":
    main()
