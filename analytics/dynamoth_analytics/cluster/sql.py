"""SQL of standing queries: from one interest with parameters to all interests at once.

``SELECT ... WHERE r.type = :type`` becomes a join with the interest table, whose columns are the parameters: one job
for all interests, whatever their number (BAD, section 3: subscriptions are aggregated).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sqlglot
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from sqlglot import exp

from dynamoth.data.datasets import Dataset
from dynamoth.data.queries import StandingQuery
from dynamoth.errors import ConfigError

INTERESTS = "_interests"
INTEREST = "_interest"

NEAR = (
    "(2 * 6371008.8 * asin(least(1.0D, sqrt(pow(sin(radians({2} - {0}) / 2), 2) + cos(radians({0})) * cos(radians({2}))"
    " * pow(sin(radians({3} - {1}) / 2), 2)))) <= {4})"
)


@dataclass(frozen=True)
class CompiledQuery:
    """A query that runs for all of its interests at once."""

    query: StandingQuery
    tree: exp.Select

    def run(self, spark: SparkSession, views: Mapping[str, DataFrame], interests: DataFrame, tick_ms: int) -> DataFrame:
        """Return the result sets: columns interest, rows and result, a JSON array; none of interests without rows."""
        tree = self.tree.copy()
        named = {**views, INTERESTS: interests}
        for table in tree.find_all(exp.Table):
            if table.name in named:
                view = f"_{self.query.name}_{table.name}"
                named[table.name].createOrReplaceTempView(view)
                if not table.alias:
                    table.set("alias", exp.TableAlias(this=exp.to_identifier(table.name)))
                table.set("this", exp.to_identifier(view))
        rows = spark.sql(tree.sql(dialect="spark"))
        columns = [name for name in rows.columns if name != INTEREST]
        row = F.struct(*(F.col(f"`{name}`") for name in columns))
        grouped = rows.groupBy(INTEREST).agg(F.sort_array(F.collect_list(row)).alias("found"))
        return grouped.select(
            F.col(INTEREST).alias("interest"), F.size("found").alias("rows"), F.to_json("found").alias("result")
        )


def compile_query(query: StandingQuery, datasets: Mapping[str, Dataset]) -> CompiledQuery:
    """Compile the SQL of a query. Raises ConfigError, which names cause and cure."""
    where = f"query {query.name!r}"
    try:
        statements = sqlglot.parse(query.sql, dialect="spark")
    except sqlglot.errors.ParseError as error:
        raise ConfigError(f"{where}: the SQL cannot be read: {str(error).splitlines()[0]}") from None
    tree = statements[0] if len(statements) == 1 else None
    if not isinstance(tree, exp.Select):
        raise ConfigError(f"{where}: sql is one SELECT")
    for clause in ("limit", "offset", "order"):
        if tree.args.get(clause):
            raise ConfigError(f"{where}: {clause.upper()} is not possible")
    for table in tree.find_all(exp.Table):
        if table.name not in query.datasets or table.db:
            raise ConfigError(f"{where}: {table.sql()} is none of its datasets: {', '.join(query.datasets)}")
    for name in query.datasets:
        if name not in datasets:
            raise ConfigError(f"{where}: there is no dataset {name!r}: register it first")
    _replace_parameters(query, tree, where)
    for call in list(tree.find_all(exp.Anonymous)):
        if call.name.lower() == "near":
            call.replace(
                sqlglot.parse_one(
                    NEAR.format(*(f"({each.sql('spark')})" for each in call.expressions)), dialect="spark"
                )
            )
    _add_interest(tree)
    return CompiledQuery(query, tree)


def _replace_parameters(query: StandingQuery, tree: exp.Select, where: str) -> None:
    used: set[str] = set()
    for marker in list(tree.find_all(exp.Placeholder)):
        name = str(marker.this)
        if name not in query.by_name:
            raise ConfigError(f"{where}: parameter :{name} is not declared")
        used.add(name)
        marker.replace(exp.column(name, INTERESTS))
    if unused := query.by_name.keys() - used:
        raise ConfigError(f"{where}: the SQL does not use the parameter {min(unused)!r}")


def _add_interest(tree: exp.Select) -> None:
    interest: Any = exp.column(INTEREST, INTERESTS)
    tree.set("expressions", [interest.as_(INTEREST), *tree.expressions])
    first: Any = tree.args["from_"].this  # interests come first, so that conditions of joins can name them
    tree.set("from_", exp.From(this=exp.to_table(INTERESTS).as_(INTERESTS)))
    tree.set("joins", [exp.Join(this=first, kind="CROSS"), *(tree.args.get("joins") or [])])
    is_aggregate = any(isinstance(each.unalias(), exp.AggFunc) for each in tree.expressions)
    if (group := tree.args.get("group")) is not None:
        group.append("expressions", interest.copy())
    elif is_aggregate:
        tree.set("group", exp.Group(expressions=[interest.copy()]))
