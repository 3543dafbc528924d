"""What an execution of a standing query costs: for all of its interests at once, on Spark.

Run with ``python -m bench.data_cluster``; ``--help`` has the rest. A real ``dynamoth data-cluster`` has two log
servers. Three queries, one after the other: of a kind and above a value, near a place and of a type, and near the user,
whose place is in a keyed dataset. The interests have 100 to 1,000 metres; records, interests and users' places are
spread evenly. The data cluster is paused while records are stored, so one execution is for all of them; it reads them
from the log servers and stores the result sets there, as always. The times are those of its journal. The first three
executions are shown, and do not count: Java is slow when it has just started, and each process that publishes has to
learn the route of each interest's channel once.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.data_servers import DataCluster, DataServers
from dynamoth.data.datasets import Dataset, read_dataset
from dynamoth.data.queries import StandingQuery, read_query

TYPES = 8
PER_KIND = 100
"""Interests of one kind: there are as many kinds as that makes."""

VALUE_MAX = 0.1
"""Records have values from 0 to 1, and interests ask for those above one of up to this: most records of their kind."""

WARM_UPS = 3
"""Executions that do not count."""

WAITING_MAX = 10_000_000
TEXT = "x" * 300

REPORTS: Dataset = read_dataset(
    "reports",
    {
        "kind": "append",
        "waiting_max": WAITING_MAX,
        "fields": {
            "number": "int", "kind": "string", "value": "float", "type": "string", "lat": "float", "lon": "float",
            "text": "string",
        },
    },
)  # fmt: skip
PLACES: Dataset = read_dataset(
    "places",
    {
        "kind": "keyed",
        "key": "user",
        "waiting_max": WAITING_MAX,
        "fields": {"user": "string", "lat": "float", "lon": "float"},
    },
)

METRES = {"type": "float", "min": 100, "max": 1000}

QUERIES: dict[str, StandingQuery] = {
    name: read_query(name, {"on": "reports", "period_s": 1, **definition})
    for name, definition in {
        "of_kind": {
            "sql": "SELECT r.number, r.text FROM reports r WHERE r.kind = :kind AND r.value > :value",
            "parameters": {"kind": "string", "value": "float"},
        },
        "near_place": {
            "sql": "SELECT r.number, r.text FROM reports r"
            " WHERE r.type = :type AND near(r.lat, r.lon, :lat, :lon, :metres)",
            "parameters": {"type": "string", "lat": "float", "lon": "float", "metres": METRES},
        },
        "near_user": {
            "sql": "SELECT r.number, r.text FROM reports r JOIN places p ON p.user = :user"
            " WHERE near(r.lat, r.lon, p.lat, p.lon, :metres)",
            "reads": ["places"],
            "parameters": {"user": "string", "metres": METRES},
        },
    }.items()
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--interests", type=int, nargs="+", default=[100_000], metavar="N")
    parser.add_argument("--records", type=int, nargs="+", default=[10_000], metavar="N")
    parser.add_argument("--users", type=int, metavar="N", help="users' places; default: as many as interests")
    parser.add_argument("--queries", nargs="+", default=[*QUERIES], choices=[*QUERIES])
    parser.add_argument("--runs", type=int, default=5, metavar="N")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    arguments = parser.parse_args()
    results: list[dict[str, Any]] = []
    for name in arguments.queries:
        for interests in arguments.interests:
            for each in _measure(name, interests, arguments):
                results.append(each)
                sys.stdout.write(
                    f"{name:12} {interests:>9,} interests {each['records']:>9,} records: {each['seconds']:6.2f} s"
                    f" ({min(each['all']):.2f} to {max(each['all']):.2f}; first {', '.join(map(str, each['first']))}),"
                    f" {each['result_sets']:,} result sets, {each['rows']:,} rows\n"
                )
                sys.stdout.flush()
    seconds = {each["query"]: each["seconds"] for each in results}
    sys.stdout.write(json.dumps({"benchmark": "data_cluster", "seconds": seconds, "measured": results}) + "\n")
    return 0


def _measure(name: str, interests: int, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the figures of one query for each number of records, of one data cluster."""
    chance = random.Random(arguments.seed)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = DataServers(stack)
        query = QUERIES[name]
        servers.define(REPORTS, PLACES, query)
        if PLACES.name in query.datasets:
            users = arguments.users or interests
            servers.store(PLACES, ({"user": f"u{number}", **_place(chance)} for number in range(users)))
        count = servers.register(name, interests_of(name, interests, chance))
        cluster = DataCluster(stack, servers, folder)
        for records in arguments.records:
            found = [
                execution_of(servers, cluster, query, records_of(records, interests, chance), count)
                for _ in range(WARM_UPS + arguments.runs)
            ]
            first, found = found[:WARM_UPS], found[WARM_UPS:]
            yield {
                "query": name,
                "interests": count,
                "records": records,
                "seconds": statistics.median(each["seconds"] for each in found),
                "first": [each["seconds"] for each in first],
                "all": [each["seconds"] for each in found],
                "result_sets": found[-1].get("result_sets", 0),
                "rows": found[-1].get("rows", 0),
            }


def execution_of(
    servers: DataServers,
    cluster: DataCluster,
    query: StandingQuery,
    records: Sequence[Mapping[str, Any]],
    interests: int,
) -> Mapping[str, Any]:
    """Store records, and return what the journal says of their execution. Raises SystemExit where it was of others."""
    following = cluster.next_executions(query.name)
    cluster.pause()
    try:
        servers.store(REPORTS, records)
    finally:
        cluster.resume()
    execution = next(following)
    states = servers.servers.states({REPORTS.stream: REPORTS.partitions})
    start, end = (execution[each]["offsets"] for each in ("start", "end"))
    found = sum(state.count(start.get(name, 0), end[name]) for name, state in states.items())
    if (found, execution["interests"]) != (len(records), interests):
        raise SystemExit(f"an execution was not of {len(records)} records and {interests} interests: {execution}")
    return execution


def records_of(count: int, interests: int, chance: random.Random) -> list[dict[str, Any]]:
    """Return records for a query that has this many interests."""
    kinds = _kinds(interests)
    return [
        {
            "number": number, "kind": f"k{number % kinds}", "value": chance.random(), "type": f"t{number % TYPES}",
            "text": TEXT, **_place(chance),
        }
        for number in range(count)
    ]  # fmt: skip


def interests_of(name: str, count: int, chance: random.Random) -> Iterator[dict[str, Any]]:
    """Yield the parameters of this many interests of a query, which are all different."""
    for number in range(count):
        metres = {"metres": 100 + 900 * chance.random()}
        if name == "of_kind":
            yield {"kind": f"k{number % _kinds(count)}", "value": VALUE_MAX * chance.random()}
        elif name == "near_place":
            yield {"type": f"t{number % TYPES}", **_place(chance), **metres}
        else:
            yield {"user": f"u{number}", **metres}


def _kinds(interests: int) -> int:
    return max(TYPES, interests // PER_KIND)


def _place(chance: random.Random) -> dict[str, float]:
    return {"lat": 60 + chance.random(), "lon": 24 + 2 * chance.random()}


if __name__ == "__main__":
    sys.exit(main())
