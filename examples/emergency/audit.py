"""The audit of a run: recomputes every result set from the archive, and compares it with logs and journals.

    python -m emergency.audit --folder data --logs l1=redis://... --shelters shelters.jsonl --journals run

It reads Parquet files and streams by itself, and evaluates the queries in Python (``evaluate``). All that it takes from
the data cluster are the names of keys, and the records of which execution had which window. Exit status 0: all is well.
"""

# ruff: noqa: T201 - a terminal is where this script writes

# pyright: reportMissingTypeStubs=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet
import redis

from dynamoth.data.records import partition_keys
from dynamoth.data.registrations import registration_keys
from dynamoth.edge.log import log_keys
from emergency.evaluate import History, Row, Window
from emergency.journal import read_journal
from emergency.judge import (
    Execution,
    Faults,
    Interest,
    Log,
    LogJudge,
    UserJudge,
    judge_executions,
    judge_locations,
    judge_reports,
    latencies_ms,
    offsets_of,
    quantile,
)

DEFINITIONS = Path(__file__).with_name("emergency.toml")
P50_S = 1.5
P99_S = 3.0
"""What an execution and its delivery may take behind the wait for a tick, of half of the reports, and of 99%."""

PERIODS_JUDGED = 5
"""Reports of fewer periods say little about how long others wait for the end of theirs."""

SHOWN_FAULTS = 20
PAGE = 10_000

Server = Any
"""A ``redis.Redis``, whose types do not say whether it decodes."""


# Records.


def read_dataset(archive: Path, servers: Sequence[Server], name: str, partitions: int, faults: Faults) -> Any:
    """Return all records of a dataset by partition: from Parquet, and those that are not archived yet from streams."""
    found: dict[str, dict[int, Row]] = {f"{name}/{number}": {} for number in range(partitions)}
    for file in sorted((archive / name).rglob("*.parquet")):
        if file.name.startswith((".", "_")):
            continue
        for row in pyarrow.parquet.ParquetFile(file).read().to_pylist():
            partition, offset = _partition(name, row.pop("_partition")), row.pop("_offset")
            if offset in found[partition]:
                faults.add(f"{partition} has offset {offset} twice in the archive")
            found[partition][offset] = _with_ms(row)
    for partition, records in found.items():
        for server in servers:
            for offset, row in _stream(server, partition_keys(partition)[1]):
                records.setdefault(offset, _with_ms(row))
    return {partition: sorted(records.items()) for partition, records in found.items()}


def _partition(name: str, value: object) -> str:
    """Return the name of a partition, of which a column has the number or the name."""
    return f"{name}/{value}" if isinstance(value, int) or "/" not in str(value) else str(value)


def _stream(server: Server, key: bytes) -> Iterable[tuple[int, dict[str, Any]]]:
    after = b"-"
    while entries := server.xrange(key, after, b"+", count=PAGE):
        for id_, fields in entries:
            yield int(id_.partition(b"-")[0]), json.loads(fields[b"d"])
        after = b"(" + entries[-1][0]


def _with_ms(row: Mapping[str, Any]) -> Row:
    """Return a record whose time is in ms: Parquet has a timestamp, and the stream has microseconds."""
    at = row["at"]
    ms = at // 1000 if isinstance(at, int) else round(at.timestamp() * 1000)
    return {**{name: value for name, value in row.items() if not name.startswith("_")}, "at": ms}


def read_shelters(path: Path) -> list[Row]:
    """Return the shelters that were loaded."""
    return [json.loads(line) for line in path.read_text().splitlines()]


# Executions, interests and logs.


def read_executions(folder: Path) -> dict[str, list[Execution]]:
    """Return the recorded executions by query, in their order. One that was repeated counts once."""
    found: dict[str, dict[int, Execution]] = defaultdict(dict)
    for file in sorted(folder.rglob("*.jsonl")):
        *lines, part = file.read_text().split("\n")
        if part:
            print(f"{file} ends with a part of a line, of an execution that was repeated", file=sys.stderr)
        for line in lines:
            entry = json.loads(line)
            window = Window(offsets_of(entry["start"]["offsets"]), offsets_of(entry["end"]["offsets"]))
            end = entry["end"]
            execution = Execution(
                entry["query"], entry["execution"], end["tick_ms"], window, entry["seconds"], end.get("sealed_ms")
            )
            found[execution.query][execution.number] = execution
    return {query: [numbers[number] for number in sorted(numbers)] for query, numbers in found.items()}


def read_interests(servers: Sequence[Server], queries: Iterable[str]) -> list[tuple[Interest, Log]]:
    """Return every registered interest with its log."""
    found: list[tuple[Interest, Log]] = []
    for server in servers:
        for query in queries:
            for id_, value in server.hgetall(registration_keys(query)[0]).items():
                at_ms, _, params = value.partition(b" ")
                interest = Interest(id_.decode(), query, json.loads(params), int(at_ms))
                found.append((interest, _read_log(server, interest.id)))
    return found


def _read_log(server: Server, interest_id: str) -> Log:
    meta, entries = log_keys(interest_id)
    epoch, offset = server.hmget(meta, "epoch", "offset")
    payloads = {int(id_.partition(b"-")[0]): fields[b"d"] for id_, fields in server.xrange(entries)}
    return Log(int(epoch or b"0", 16), int(offset or 0), payloads)


# The whole.


def audit(options: argparse.Namespace) -> dict[str, Any]:
    """Judge a run. Returns figures; ``faults`` is 0 where all is well."""
    faults = Faults()
    servers: list[Server] = [redis.Redis.from_url(each.partition("=")[2]) for each in options.logs]
    datasets: dict[str, Any] = {}
    queries: dict[str, Any] = {}
    for file in options.definitions:
        definitions = tomllib.loads(file.read_text())
        datasets |= definitions.get("datasets", {})
        queries |= definitions.get("queries", {})

    def read(name: str) -> Any:
        return read_dataset(options.folder / "archive", servers, name, datasets[name]["partitions"], faults)

    history = History(read("reports"), read("user_locations"), read_shelters(options.shelters))
    executions = read_executions(options.folder / "executions")
    interests = read_interests(servers, queries)
    journals = [list(read_journal(path)) for path in sorted(options.journals.glob("citizens*.jsonl"))]
    reporters = [entry for path in options.journals.glob("reporters*.jsonl") for entry in read_journal(path)]
    summary: dict[str, Any] = {"reports": judge_reports(history, reporters, faults)}
    summary["locations"] = sum(judge_locations(history, entries, faults) for entries in journals)
    summary["executions"] = {query: len(executions.get(query, ())) for query in queries}
    summary["ticks_skipped"] = {
        query: judge_executions(executions.get(query, ()), history, queries[query]["period_s"], faults)
        for query in queries
    }
    summary["overruns"] = {
        query: sum(each.seconds > queries[query]["period_s"] for each in executions.get(query, ())) for query in queries
    }
    log_judge = LogJudge(history, executions, faults)
    for interest, log in interests:
        log_judge.judge(interest, log)
    user_judge = UserJudge({interest.id: log for interest, log in interests}, faults)
    for entries in journals:
        user_judge.judge(entries)
    for query in queries:
        if not log_judge.result_sets[query]:
            faults.add(f"{query} has no result set: nothing was compared")
    summary |= {
        "interests": len(interests),
        "subscriptions": user_judge.totals.subscriptions,
        "result_sets": dict(log_judge.result_sets),
        "rows": dict(log_judge.rows),
        "delivered": user_judge.totals.delivered,
        "gaps": user_judge.totals.gaps,
        "missed_in_gaps": user_judge.totals.missed_in_gaps,
        "latency_s": _latencies(journals, interests, queries, options.outages),
        "faults": faults.count,
        "texts": faults.texts,
    }
    return summary


def _latencies(
    journals: Sequence[Sequence[Mapping[str, Any]]],
    interests: Iterable[tuple[Interest, Log]],
    queries: Mapping[str, Any],
    outages: Sequence[tuple[float, float]],
) -> dict[str, Any]:
    """Return the time from a report to the handler by the period of queries, in seconds.

    Reports of an outage, and those of the period before it, which were not executed yet, count apart. The others are
    ``quick`` if half of them take half a period and ``P50_S`` at most, and 99% a period and ``P99_S``; that is judged
    where they are of ``PERIODS_JUDGED`` periods at least, as those of a part of a period are not spread over it.
    """
    names = {interest.id: interest.query for interest, _ in interests}
    by_period: dict[tuple[int, bool], list[float]] = defaultdict(list)
    periods: dict[int, set[int]] = defaultdict(set)
    for entries in journals:
        for query, values in latencies_ms(entries, names).items():
            period_s: int = queries[query]["period_s"]
            for at_ms, latency_ms in values:
                is_outage = any(begin - period_s <= at_ms / 1000 <= end for begin, end in outages)
                by_period[period_s, is_outage].append(latency_ms)
                if not is_outage:
                    periods[period_s].add(int(at_ms / 1000 // period_s))
    figures: dict[str, Any] = {}
    for period_s, is_outage in sorted(by_period):
        ordered = sorted(by_period[period_s, is_outage])
        p50_s, p99_s = (round(quantile(ordered, part) / 1000, 2) for part in (0.5, 0.99))
        own = {"count": len(ordered), "p50": p50_s, "p99": p99_s, "max": round(ordered[-1] / 1000, 2)}
        if not is_outage and len(periods[period_s]) >= PERIODS_JUDGED:
            own["quick"] = p50_s <= period_s / 2 + P50_S and p99_s <= period_s + P99_S
        figures[f"{period_s} s" + ", outages" * is_outage] = own
    return figures


def _read_outage(text: str) -> tuple[float, float]:
    begin, _, end = text.partition(":")
    return float(begin), float(end)


def show(summary: Mapping[str, Any]) -> None:
    """Print what the audit has found."""
    for name, value in summary.items():
        if name in ("texts", "latency_s", "faults"):
            continue
        values = value.items() if isinstance(value, Mapping) else [("", value)]
        shown = ", ".join(f"{key} {count:,}".strip() for key, count in values)
        print(f"  {name.replace('_', ' '):16} {shown}")
    for name, figures in summary["latency_s"].items():
        slow = "" if figures.get("quick", True) else f"; SLOW: above half a period + {P50_S} s, or a period + {P99_S} s"
        print(
            f"  report to handler, queries of {name}: p50 {figures['p50']} s, p99 {figures['p99']} s,"
            f" at most {figures['max']} s ({figures['count']:,} deliveries){slow}"
        )
    for text in summary["texts"][:SHOWN_FAULTS]:
        print(f"  FAULT {text}")
    print("the audit is clean" if not summary["faults"] else f"the audit is NOT clean: {summary['faults']:,} faults")


def main() -> int:
    """Read the arguments, and judge."""
    parser = argparse.ArgumentParser(description="The audit of a run of the emergency application.")
    parser.add_argument("--folder", type=Path, required=True, help="data_cluster.folder")
    parser.add_argument("--logs", nargs="+", required=True, metavar="ID=URL", help="the log servers")
    parser.add_argument("--shelters", type=Path, required=True, help="the file that was loaded")
    parser.add_argument("--journals", type=Path, required=True, help="folder of citizens*.jsonl, reporters*.jsonl")
    parser.add_argument("--definitions", type=Path, nargs="+", default=[DEFINITIONS], metavar="FILE")
    parser.add_argument(
        "--outages", type=_read_outage, nargs="*", default=[], metavar="BEGIN:END",
        help="when the data cluster did not run, or caught up, in s since 1970: latencies of then are shown apart",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    summary = audit(options)
    show(summary)
    if options.json is not None:
        options.json.write_text(json.dumps(summary))
    return 1 if summary["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
