"""SQL of standing queries: from one interest with parameters to all interests at once.

Theory of operation
-------------------
What a query means is simple: for each interest, put its values in place of the parameters, and execute the SQL. What is
executed is one statement for all interests: parameters become columns of the *interest table*, which is joined with the
rest, and the interest is added to what is selected, grouped and partitioned by. ``r.type = :type`` is then a join by
equality, so an interest costs nothing for the records that do not concern it (BAD, section 3: subscriptions are
aggregated; the parameter join is pushed down).

``near(lat1, lon1, lat2, lon2, metres)`` and ``near_xy(x1, y1, x2, y2, distance)`` become a join by the cells of a grid,
and the exact distance (``spatial``).

What cannot be executed for all interests with exactly the same result is refused when the query is registered.
"""

# pyright: reportPrivateImportUsage=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, cast

import sqlglot
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from sqlglot import exp
from sqlglot.errors import OptimizeError, ParseError
from sqlglot.optimizer.qualify import qualify

from dynamoth.data.datasets import Dataset, FieldType
from dynamoth.data.queries import Parameter, StandingQuery
from dynamoth.errors import ConfigError
from dynamoth_analytics.cluster import spatial

INTERESTS = "_interests"
INTEREST = "_interest"
PARAMETER_PREFIX = "__"
"""Of the columns of the interest table: fields of datasets never begin so."""
CELL = "_cell"
OWN_COLUMNS = {"_partition": "int", "_offset": "bigint", "_arrived": "timestamp"}
"""Columns of every dataset besides its fields."""

SQL_TYPES: dict[FieldType, str] = {
    "string": "string",
    "int": "bigint",
    "float": "double",
    "bool": "boolean",
    "timestamp": "timestamp",
}

TICK = "execution_time"
"""Function without arguments: the time of the execution."""

CHANGING = {
    "rand", "randn", "random", "uuid", "shuffle", "now", "current_timestamp", "current_date", "current_time",
    "localtimestamp", "curdate", "monotonically_increasing_id", "unix_timestamp", "currenttimestamp", "currentdate",
    "currenttime", "sample",
}  # fmt: skip
"""Functions that give something else when an execution is repeated."""

OUTSIDE = {
    "java_method", "reflect", "try_reflect", "input_file_name", "input_file_block_start", "input_file_block_length",
    "current_user", "session_user", "user", "version", "current_database", "current_catalog", "read_files",
    "spark_partition_id", "raise_error", "python_udf",
}  # fmt: skip
"""Functions that reach outside of the datasets."""


@dataclass(frozen=True)
class CompiledQuery:
    """A query that is executed for all of its interests at once."""

    query: StandingQuery
    tree: exp.Select
    #: Names of result columns by which the rows of a result set are sorted first, and whether descending.
    order: tuple[tuple[str, bool], ...]
    #: What makes it slow.
    warnings: tuple[str, ...] = ()

    def run(self, spark: SparkSession, views: Mapping[str, DataFrame], interests: DataFrame, tick_ms: int) -> DataFrame:
        """Return the result sets: columns interest, rows and result, a JSON array; none of interests without rows.

        Args:
            spark: the session; temporary views of it are replaced.
            views: the rows of each dataset, by name.
            interests: the interest table.
            tick_ms: time of the execution.

        """
        rows = spark.sql(self.sql(spark, views, interests, tick_ms))
        columns = [name for name in rows.columns if name != INTEREST]
        row = F.struct(*(F.col(f"`{name}`") for name in columns))
        found = F.array_sort(F.collect_list(row)) if not self.order else F.expr(self._sorted(columns))
        grouped = rows.groupBy(INTEREST).agg(found.alias("found"))
        return grouped.select(
            F.col(INTEREST).alias("interest"), F.size("found").alias("rows"), F.to_json("found").alias("result")
        )

    def sql(self, spark: SparkSession, views: Mapping[str, DataFrame], interests: DataFrame, tick_ms: int) -> str:
        """Return the statement, over temporary views that are made."""
        spatial.register(spark)
        tree = self.tree.copy()
        named = {**views, INTERESTS: interests}
        for name, rows in named.items():
            rows.createOrReplaceTempView(self._view(name))
        for table in tree.find_all(exp.Table):
            if table.name in named:
                table.set("this", exp.to_identifier(self._view(table.name)))
        for call in list(tree.find_all(exp.Anonymous)):
            if call.name.lower() == TICK:
                at = datetime.fromtimestamp(tick_ms / 1000, UTC)
                call.replace(sqlglot.parse_one(f"TIMESTAMP '{at:%Y-%m-%d %H:%M:%S.%f}+00:00'", dialect="spark"))
        return tree.sql(dialect="spark")

    def _view(self, name: str) -> str:
        return f"_{self.query.name}_{name}"

    def _sorted(self, columns: Sequence[str]) -> str:
        """Return SQL that collects rows by the query's own order, and then by all columns."""
        tests: list[str] = []
        for name, is_descending in (*self.order, *((name, False) for name in columns)):
            a, b = f"a.`{name}`", f"b.`{name}`"
            first, second = (b, a) if is_descending else (a, b)
            # As Spark's ORDER BY has it, null is less than everything.
            tests += [
                f"WHEN {first} IS NULL AND {second} IS NOT NULL THEN -1",
                f"WHEN {first} IS NOT NULL AND {second} IS NULL THEN 1",
                f"WHEN {first} < {second} THEN -1",
                f"WHEN {first} > {second} THEN 1",
            ]
        row = f"struct({', '.join(f'`{name}`' for name in columns)})"
        return f"array_sort(collect_list({row}), (a, b) -> CASE {' '.join(tests)} ELSE 0 END)"

    def check(self, spark: SparkSession, datasets: Mapping[str, Dataset]) -> list[str]:
        """Have Spark analyse the query on empty tables; return the names of the result columns. Raises ConfigError."""
        views = {name: spark.createDataFrame([], view_schema(datasets[name])) for name in self.query.datasets}
        interests = spark.createDataFrame([], interest_schema(self.query))
        try:
            columns = spark.sql(self.sql(spark, views, interests, 0)).columns
            self.run(spark, views, interests, 0).schema  # noqa: B018 analyses it
        except PySparkException as error:
            raise ConfigError(f"query {self.query.name!r}: {_spark_reason(error)}") from error
        return [name for name in columns if name != INTEREST]


def view_schema(dataset: Dataset) -> str:
    """Return the schema of a dataset's rows, as Spark's DDL."""
    columns = {field.name: SQL_TYPES[field.type] for field in dataset.fields} | OWN_COLUMNS
    return ", ".join(f"`{name}` {type_}" for name, type_ in columns.items())


def interest_schema(query: StandingQuery) -> str:
    """Return the schema of a query's interest table, as Spark's DDL."""
    columns = {INTEREST: "string"}
    columns |= {PARAMETER_PREFIX + each.name: SQL_TYPES[each.type] for each in query.parameters}
    return ", ".join(f"`{name}` {type_}" for name, type_ in columns.items())


def compile_query(query: StandingQuery, datasets: Mapping[str, Dataset]) -> CompiledQuery:
    """Compile the SQL of a query. Raises ConfigError, which names cause and cure."""
    return _Compiler(query, datasets).compile()


@dataclass
class _Compiler:
    query: StandingQuery
    datasets: Mapping[str, Dataset]
    warnings: list[str] = field(default_factory=list[str])
    #: How many pairs of tables have cells.
    grids: int = 0

    def compile(self) -> CompiledQuery:
        for name in self.query.datasets:
            if name not in self.datasets:
                raise self._fault(f"there is no dataset {name!r}: register it first")
        tree = self._parse()
        self._check_tables(tree)
        self._check_functions(tree)
        order = self._take_order(tree)
        self._replace_parameters(tree)
        self._join_interests(tree)
        tree = self._qualify(tree)
        self._check_names(tree)
        self._add_interest(tree)
        self._replace_near(tree)
        self._find_cross_joins(tree)
        return CompiledQuery(self.query, tree, self._checked_order(tree, order), tuple(self.warnings))

    def _fault(self, text: str) -> ConfigError:
        return ConfigError(f"query {self.query.name!r}: {text}")

    # The statement.

    def _parse(self) -> exp.Select:
        try:
            statements = [each for each in sqlglot.parse(self.query.sql, dialect="spark") if each is not None]
        except ParseError as error:
            where = error.errors[0] if error.errors else {}
            place = f" (line {where.get('line')}, column {where.get('col')})" if where.get("line") else ""
            reason = where.get("description") or str(error).splitlines()[0]
            raise self._fault(f"the SQL cannot be read{place}: {reason}") from None
        if len(statements) != 1 or not isinstance(statements[0], exp.Select):
            kind = statements[0].key.upper() if len(statements) == 1 else f"{len(statements)} statements"
            raise self._fault(f"the SQL is one SELECT, not {kind}")
        tree = statements[0]
        for clause in ("limit", "offset", "into", "sample", "distribute", "cluster", "sort", "laterals", "pivots"):
            if tree.args.get(clause):
                cure = ": a result set has all rows; restrict them with WHERE" if clause in ("limit", "offset") else ""
                raise self._fault(f"{clause.upper()} is not possible here{cure}")
        if tree.args.get("from_") is None:
            raise self._fault(f"the SQL reads nothing: FROM {self.query.on}")
        return tree

    def _check_tables(self, tree: exp.Select) -> None:
        shared = {cte.alias_or_name for cte in tree.find_all(exp.CTE)}
        used: set[str] = set()
        for table in tree.find_all(exp.Table):
            if not isinstance(table.this, exp.Identifier):
                raise self._fault(f"{table.sql('spark')} is no dataset")
            if table.db or (table.name not in self.query.datasets and table.name not in shared):
                known = ", ".join(self.query.datasets)
                raise self._fault(f"{table.sql('spark')} is none of its datasets ({known}): name it in reads")
            used.add(table.name)
        if unused := [name for name in self.query.datasets if name not in used]:
            raise self._fault(f"the SQL does not read {unused[0]!r}: remove it from on or reads")
        for join in tree.find_all(exp.Join):
            if (join.side or "").upper() in ("RIGHT", "FULL"):
                raise self._fault(f"{join.side} JOIN is not possible: write it as LEFT JOIN")

    def _check_functions(self, tree: exp.Select) -> None:
        for call in tree.find_all(exp.Func):
            name = (call.name if isinstance(call, exp.Anonymous) else call.sql_name()).lower()
            written = call.sql("spark").split("(")[0].lower()
            if CHANGING & {name, written}:
                raise self._fault(
                    f"{written}() gives something else each time, and an execution may be repeated: use {TICK}() for"
                    " the time of the execution"
                )
            if OUTSIDE & {name, written}:
                raise self._fault(f"{written}() reaches outside of the datasets")

    def _take_order(self, tree: exp.Select) -> list[tuple[str, bool]]:
        """Take ORDER BY away; return its columns and whether each is descending."""
        order = tree.args.get("order")
        if order is None:
            return []
        tree.set("order", None)
        found: list[tuple[str, bool]] = []
        for each in order.expressions:
            if not isinstance(each, exp.Ordered) or not isinstance(each.this, exp.Column):
                raise self._fault("ORDER BY names columns of the result, without expressions")
            found.append((each.this.name, bool(each.args.get("desc"))))
        return found

    def _checked_order(self, tree: exp.Select, order: Sequence[tuple[str, bool]]) -> tuple[tuple[str, bool], ...]:
        columns = {each.alias_or_name.lower(): each.alias_or_name for each in tree.expressions}
        for name, _ in order:
            if name.lower() not in columns:
                raise self._fault(f"ORDER BY {name}: the result has no such column")
        return tuple((columns[name.lower()], is_descending) for name, is_descending in order)

    # Interests.

    def _replace_parameters(self, tree: exp.Select) -> None:
        used: set[str] = set()
        for marker in list(tree.find_all(exp.Placeholder)):
            name = str(marker.this or "?")
            if name not in self.query.by_name:
                known = ", ".join(f":{each}" for each in self.query.by_name) or "none"
                raise self._fault(f"parameter :{name} is not declared; those are {known}")
            if marker.parent_select is not tree:
                raise self._fault(f"parameter :{name} is in a subquery: use it in the outer WHERE or in a JOIN")
            used.add(name)
            marker.replace(exp.column(PARAMETER_PREFIX + name, INTERESTS))
        if unused := [name for name in self.query.by_name if name not in used]:
            raise self._fault(f"the SQL does not use the parameter :{unused[0]}: remove it, or use it")

    def _join_interests(self, tree: exp.Select) -> None:
        """Put the interests first in FROM, so that conditions of joins can name them."""
        first: Any = tree.args["from_"].this
        tree.set("from_", exp.From(this=exp.alias_(exp.to_table(INTERESTS), INTERESTS, table=True)))
        tree.set("joins", [exp.Join(this=first, kind="CROSS"), *(tree.args.get("joins") or [])])

    def _qualify(self, tree: exp.Select) -> exp.Select:
        """Name the table of each column."""
        schema: dict[str, Any] = {
            name: {each.name: SQL_TYPES[each.type] for each in self.datasets[name].fields} | OWN_COLUMNS
            for name in self.query.datasets
        }
        parameters = {PARAMETER_PREFIX + each.name: SQL_TYPES[each.type] for each in self.query.parameters}
        schema[INTERESTS] = {INTEREST: "string"} | parameters
        if any(isinstance(each, exp.Star) for each in tree.expressions):
            raise self._fault("SELECT * would select the parameters, too: name a table (r.*), or the columns")
        try:
            return qualify(tree, schema=schema, dialect="spark", quote_identifiers=True)
        except OptimizeError as error:
            text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).splitlines()[0]
            raise self._fault(f"{text}: the fields of datasets are those of their definitions") from None

    def _check_names(self, tree: exp.Select) -> None:
        names = [each.alias_or_name for each in tree.expressions]
        for name in names:
            if not name or name.startswith("_col_"):
                raise self._fault("an expression of the result has no name: give it one with AS")
            if name.startswith("_") and name not in OWN_COLUMNS:
                raise self._fault(f"{name} begins with '_': such names are ours; choose another with AS")
            if [each.lower() for each in names].count(name.lower()) > 1:
                raise self._fault(f"the result has two columns {name!r}: name one of them with AS")

    def _add_interest(self, tree: exp.Select) -> None:
        """Select the interest, and group and partition by it."""
        interest = _column(INTERESTS, INTEREST)
        outer = [each for each in tree.find_all(exp.Window) if each.parent_select is tree]
        in_windows = {id(window.this) for window in outer}
        has_aggregates = any(
            each.parent_select is tree and id(each) not in in_windows for each in tree.find_all(exp.AggFunc)
        )
        for window in outer:
            window.set("partition_by", [interest.copy(), *(window.args.get("partition_by") or [])])
        group = tree.args.get("group")
        if group is not None:
            if any(group.args.get(each) for each in ("grouping_sets", "cube", "rollup", "totals", "all")):
                raise self._fault("GROUP BY has plain expressions only")
            group.set("expressions", [interest.copy(), *group.expressions])
        elif has_aggregates:
            tree.set("group", exp.Group(expressions=[interest.copy()]))
        tree.set("expressions", [interest.copy().as_(INTEREST), *tree.expressions])

    # Distances.

    def _replace_near(self, tree: exp.Select) -> None:
        joins: list[exp.Join] = tree.args.get("joins") or []
        conditions = [tree.args.get("where"), *(each for each in joins if not each.side)]
        for condition in conditions:
            if condition is None:
                continue
            for part in list(_conjuncts(_condition_of(condition))):
                if isinstance(part, exp.Anonymous) and part.name.lower() in ("near", "near_xy"):
                    link = self._grid(tree, part)
                    exact = _parsed(self._exact(part))
                    part.replace(exact if link is None else exp.and_(link, exact))
        for call in list(tree.find_all(exp.Anonymous)):
            if call.name.lower() in ("near", "near_xy"):
                self.warnings.append(
                    f"{call.name}() is not one of the conditions joined by AND: all pairs are compared"
                )
                call.replace(_parsed(self._exact(call)))

    def _exact(self, call: exp.Anonymous) -> str:
        if len(call.expressions) != 5:
            raise self._fault(f"{call.name}() has five arguments: two places and a distance")
        a, b, c, d, radius = (f"({each.sql('spark')})" for each in call.expressions)
        distance = spatial.distance_sql if call.name.lower() == "near" else spatial.distance_xy_sql
        return f"({distance(a, b, c, d)} <= {radius})"

    def _grid(self, tree: exp.Select, call: exp.Anonymous) -> exp.Expression | None:
        """Give the two tables of a ``near`` their cells; return the condition that joins them. None: not possible."""
        if len(call.expressions) != 5:
            raise self._fault(f"{call.name}() has five arguments: two places and a distance")
        a, b, c, d, radius = call.expressions
        one, other = _table_of(a, b), _table_of(c, d)
        radius_table = _table_of(radius)
        least, most = self._radius_bounds(radius)
        sources = {each.alias_or_name: each for each in _sources(tree)}
        if one is None or other is None or one == other or one not in sources or other not in sources:
            self.warnings.append(
                f"{call.name}() compares places that are not columns of two tables: all pairs are compared"
            )
            return None
        # The cells of the radius are those of the table that has it, or of the interests.
        if radius_table == one or (radius_table not in (one, other) and one == INTERESTS):
            (a, b), (c, d), one, other = (c, d), (a, b), other, one
        if most is None or least is None:
            raise self._fault(
                f"the distance of {call.name}() needs bounds: it is a number, or a parameter with min and max"
            )
        self.grids += 1
        name = f"{CELL}{self.grids}"
        cells = spatial.CELLS if call.name.lower() == "near" else spatial.CELLS_XY
        place, around = (f"{each.sql('spark')}, {also.sql('spark')}" for each, also in ((a, b), (c, d)))
        levels: Sequence[int] = [spatial.level_of(most)]
        wide, level = f"{most}D", str(levels[0])
        if radius_table == other:
            levels, wide, level = spatial.levels_between(least, most), radius.sql("spark"), "cast(NULL AS int)"
        at = ", ".join(f"{cells}({place}, cast(NULL AS double), {level})" for level in levels)
        _explode(sources[other], f"{cells}({around}, {wide}, {level})", name)
        _explode(sources[one], f"concat({at})", name)
        return exp.EQ(this=_column(one, name), expression=_column(other, name))

    def _radius_bounds(self, radius: exp.Expression) -> tuple[float | None, float | None]:
        """Return the least and the largest value of a distance."""
        if isinstance(radius, exp.Literal) and not radius.is_string:
            return float(radius.this), float(radius.this)
        if isinstance(radius, exp.Column) and radius.table == INTERESTS:
            parameter: Parameter = self.query.by_name[radius.name.removeprefix(PARAMETER_PREFIX)]
            return (0.0 if parameter.min is None else parameter.min), parameter.max
        return None, None

    def _find_cross_joins(self, tree: exp.Select) -> None:
        """Warn of tables that no equality links with the interests."""
        groups = {each.alias_or_name: {each.alias_or_name} for each in _sources(tree)}
        conditions = [tree.args.get("where"), *(tree.args.get("joins") or [])]
        for condition in conditions:
            for part in _conjuncts(_condition_of(condition)):
                if isinstance(part, exp.EQ):
                    sides = _table_of(part.this), _table_of(part.expression)
                    linked = [groups[side] for side in sides if side in groups]
                    if len(linked) == 2 and linked[0] is not linked[1]:
                        merged = linked[0] | linked[1]
                        groups.update(dict.fromkeys(merged, merged))
        apart = sorted(groups.keys() - groups.get(INTERESTS, set()))
        if self.query.parameters and apart:
            self.warnings.append(
                f"no equality and no near() links {', '.join(apart)} with the parameters: all rows are compared with"
                " all interests"
            )


def _column(table: str, name: str) -> exp.Column:
    return exp.column(exp.to_identifier(name, quoted=True), exp.to_identifier(table, quoted=True))


def _parsed(text: str) -> exp.Expression:
    return cast("exp.Expression", sqlglot.parse_one(text, dialect="spark"))


def _condition_of(node: exp.Expression | None) -> exp.Expression | None:
    if isinstance(node, exp.Join):
        return node.args.get("on")
    return None if node is None else node.this


def _conjuncts(condition: exp.Expression | None) -> Iterator[exp.Expression]:
    """Yield the conditions that are joined by AND."""
    if condition is None:
        return
    if isinstance(condition, exp.And):
        yield from _conjuncts(condition.this)
        yield from _conjuncts(condition.expression)
    elif isinstance(condition, exp.Paren):
        yield from _conjuncts(condition.this)
    else:
        yield condition


def _table_of(*expressions: exp.Expression) -> str | None:
    """Return the one table that has all columns of expressions; None if there are several or none."""
    tables = {column.table for each in expressions for column in each.find_all(exp.Column)}
    return tables.pop() if len(tables) == 1 else None


def _sources(tree: exp.Select) -> list[exp.Table | exp.Subquery]:
    """Return what is in FROM and in its joins."""
    found = [tree.args["from_"].this, *(join.this for join in tree.args.get("joins") or [])]
    return [each for each in found if isinstance(each, exp.Table | exp.Subquery)]


def _explode(table: exp.Table | exp.Subquery, cells: str, name: str) -> None:
    """Replace a table by one that has its rows once for each cell."""
    alias, inner = table.alias_or_name, table.copy()
    select = sqlglot.parse_one(f"SELECT `{alias}`.*, explode({cells}) AS {name} FROM _inner", dialect="spark")
    for each in list(select.find_all(exp.Table)):
        each.replace(inner)
    table.replace(cast("exp.Select", select).subquery(exp.to_identifier(alias, quoted=True)))


def _spark_reason(error: PySparkException) -> str:
    """Return the first sentence of what Spark says."""
    text = str(error).split("\n")[0]
    return re.sub(r"^\[[A-Z_.]+\] ", "", text)[:300]
