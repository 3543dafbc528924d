"""``dynamoth query try``: executes a query on sample data, without any server."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pyspark.sql import DataFrame, SparkSession

from dynamoth.data.datasets import BadRecord, Dataset
from dynamoth.data.queries import BadParameters, StandingQuery
from dynamoth.data.records import Record
from dynamoth.edge.interests import query_interest
from dynamoth.errors import ConfigError, MalformedMessage, printable
from dynamoth_analytics.cluster.interest_table import column_value
from dynamoth_analytics.cluster.sql.compiled import compile_query
from dynamoth_analytics.cluster.sql.schema import interest_schema, view_schema
from dynamoth_analytics.cluster.storage.batches import OFFSET, to_batch
from dynamoth_analytics.files import arrow
from dynamoth_analytics.session import check_session, open_session
from dynamoth_client.runtime.record_files import read_records


class Defined(Protocol):
    """What a file of definitions has."""

    @property
    def datasets(self) -> Mapping[str, Dataset]:
        """The datasets by name."""
        ...

    @property
    def queries(self) -> Mapping[str, StandingQuery]:
        """The queries by name."""
        ...


@dataclass(frozen=True)
class Trial:
    """The result sets of one interest."""

    params: str
    rows: list[dict[str, Any]]


def try_query(given: Defined, arguments: argparse.Namespace) -> int:
    """Execute a query as ``arguments`` say, and print its result sets. Raises ConfigError, SparkFailed."""
    query = given.queries.get(arguments.name)
    if query is None:
        raise ConfigError(f"the file has no query {arguments.name!r}; it has {', '.join(given.queries) or 'none'}")
    if missing := [name for name in query.datasets if name not in given.datasets]:
        cure = f"copy its [datasets.{missing[0]}] to there, as `dynamoth query try` asks no server"
        raise ConfigError(f"query {query.name!r} reads {missing[0]!r}, which the file does not have: {cure}")
    samples = _samples(arguments.sample, query, given.datasets)
    interests = [_values(text, query) for text in arguments.params] or ([{}] if not query.parameters else [])
    if not interests:
        raise ConfigError(f"query {query.name!r} has parameters: give --params '{_example(query)}'")
    for warning in compile_query(query, given.datasets).warnings:
        sys.stderr.write(printable(f"dynamoth: {warning}\n"))
    place = argparse.Namespace(master="local[2]", remote=None, spark_log="off")
    check_session(place)
    with open_session(place, "dynamoth query try") as spark:
        for trial in run_trial(spark, query, given.datasets, samples, interests):
            if arguments.json:
                sys.stdout.write(json.dumps({"params": json.loads(trial.params), "rows": trial.rows}) + "\n")
                continue
            sys.stdout.write(f"{printable(trial.params)}: {len(trial.rows)} rows\n")
            for row in trial.rows:
                sys.stdout.write(f"  {printable(json.dumps(row, ensure_ascii=False))}\n")
    return 0


def run_trial(
    spark: SparkSession,
    query: StandingQuery,
    datasets: Mapping[str, Dataset],
    samples: Mapping[str, Iterable[bytes]],
    interests: Iterable[Mapping[str, Any]],
) -> list[Trial]:
    """Execute a query for interests on sample records of its datasets; a dataset without samples is empty.

    Raises ConfigError: a record does not belong to its dataset, or the SQL cannot be executed.
    """
    compiled = compile_query(query, datasets)
    compiled.check(spark, datasets)
    views = {name: _view(spark, datasets[name], samples.get(name, ())) for name in query.datasets}
    made = [(query_interest(query.name, dict(values)), values) for values in interests]
    rows = [
        (interest.id, *(column_value(each.type, values[each.name]) for each in query.parameters))
        for interest, values in made
    ]
    table = spark.createDataFrame(rows, interest_schema(query))
    results = compiled.run(spark, views, table, int(time.time() * 1000))
    found = {row["interest"]: json.loads(row["result"]) for row in results.collect()}
    return [Trial(interest.params, found.get(interest.id, [])) for interest, _ in made]


def _view(spark: SparkSession, dataset: Dataset, sample: Iterable[bytes]) -> DataFrame:
    records: list[Record] = []
    latest: dict[str, Record] = {}
    for number, line in enumerate(sample, start=1):
        try:
            value, place, _ = dataset.normalize(line, 0.0)
        except BadRecord as error:
            raise ConfigError(f"sample of {dataset.name}, record {number}: {error}") from error
        record = Record(number, 0, value)
        records.append(record)
        latest[place] = record
    kept = [*latest.values()] if dataset.kind == "keyed" else records
    if not kept:
        return spark.createDataFrame([], view_schema(dataset))
    table = arrow.Table.from_batches([to_batch(dataset, 0, kept)])
    return spark.createDataFrame(table).orderBy(OFFSET)


def _samples(given: Iterable[str], query: StandingQuery, datasets: Mapping[str, Dataset]) -> dict[str, Iterable[bytes]]:
    samples: dict[str, Iterable[bytes]] = {}
    for each in given:
        name, _, path = each.partition("=")
        if name not in query.datasets or not path:
            raise ConfigError(f"--sample {each}: DATASET=FILE expected, with one of {', '.join(query.datasets)}")
        if not Path(path).is_file():
            raise ConfigError(f"--sample {each}: there is no such file")
        samples[name] = read_records(Path(path), datasets[name])
    return samples


def _values(text: str, query: StandingQuery) -> dict[str, Any]:
    try:
        values = json.loads(text)
        query_interest(query.name, values)
        query.check(values)
    except (ValueError, MalformedMessage, BadParameters) as error:
        raise ConfigError(f"--params {text}: {error}") from error
    return dict(values)


def _example(query: StandingQuery) -> str:
    examples: dict[str, Any] = {"string": "text", "int": 1, "float": 1.5, "bool": True}
    return json.dumps(
        {each.name: each.choices[0] if each.choices else examples[each.type] for each in query.parameters}
    )
