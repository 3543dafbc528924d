"""Reads the SQL of a standing query, and refuses what cannot be executed for all interests with the same result."""

# pyright: reportPrivateImportUsage=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

from typing import Any

import sqlglot
from sqlglot import exp
from sqlglot.errors import ParseError, SqlglotError

from dynamoth.data.queries import StandingQuery
from dynamoth.errors import ConfigError
from dynamoth_analytics.cluster.sql.dialect import StandingSql, keep_units

TICK = "execution_time"
"""Function without arguments: the time of the execution."""

TIMES = {
    "now", "current_timestamp", "current_date", "current_time", "localtimestamp", "curdate", "currenttimestamp",
    "currentdate", "currenttime", "localtime",
}  # fmt: skip
TIMES_WITHOUT_ARGUMENTS = {"unix_timestamp", "to_unix_timestamp"}
"""Functions that give the present time, which is another one when an execution is repeated."""

RANDOM = {"rand", "randn", "random", "uuid", "shuffle", "monotonically_increasing_id", "uniform", "randstr"}
"""Functions that give something else when an execution is repeated."""

FAILING = {
    "raise_error", "assert_true", "aes_decrypt", "aes_encrypt", "xpath", "xpath_boolean", "xpath_double", "xpath_float",
    "xpath_int", "xpath_long", "xpath_number", "xpath_short", "xpath_string", "map_from_arrays", "map_from_entries",
    "transform_keys", "bitmap_construct_agg",
}  # fmt: skip
"""Functions that end the execution for all interests: on purpose, or for some texts."""

OUTSIDE = {
    "java_method", "reflect", "try_reflect", "input_file_name", "input_file_block_start", "input_file_block_length",
    "current_user", "session_user", "user", "version", "current_database", "current_schema", "current_catalog",
    "current_path", "read_files", "spark_partition_id", "from_protobuf", "to_protobuf", "measure",
}  # fmt: skip
"""Functions that reach outside of the datasets."""

IMPOSSIBLE = (
    "limit", "offset", "into", "sample", "distribute", "cluster", "sort", "laterals", "pivots", "qualify", "hint",
)  # fmt: skip
"""Clauses of the outer SELECT."""


def refusal(query: StandingQuery, reason: str) -> ConfigError:
    """Return the error for a query that cannot be executed."""
    return ConfigError(f"query {query.name!r}: {reason}")


def read_statement(query: StandingQuery) -> exp.Select:
    """Return the SQL of a query as a tree. Raises ConfigError, which names cause and cure."""
    tree = _parse(query)
    _check_clauses(query, tree)
    _check_tables(query, tree)
    _check_functions(query, tree)
    keep_units(tree)
    return tree


def _parse(query: StandingQuery) -> exp.Select:
    try:
        statements: list[Any] = [each for each in sqlglot.parse(query.sql, dialect=StandingSql) if each is not None]
    except ParseError as error:
        where = error.errors[0] if error.errors else {}
        place = f" (line {where.get('line')}, column {where.get('col')})" if where.get("line") else ""
        reason = where.get("description") or str(error).splitlines()[0]
        raise refusal(query, f"the SQL cannot be read{place}: {reason}") from None
    except SqlglotError as error:
        raise refusal(query, f"the SQL cannot be read: {error.__cause__ or error}; is a quote missing?") from None
    if len(statements) != 1 or not isinstance(statements[0], exp.Select):
        kind = statements[0].key.upper() if len(statements) == 1 else f"{len(statements)} statements"
        raise refusal(query, f"the SQL is one SELECT, not {kind}")
    return statements[0]


def _check_clauses(query: StandingQuery, tree: exp.Select) -> None:
    for clause in IMPOSSIBLE:
        if tree.args.get(clause):
            cure = ": a result set has all rows; restrict them with WHERE" if clause in ("limit", "offset") else ""
            name = "LATERAL VIEW" if clause == "laterals" else clause.upper()
            raise refusal(query, f"{name} is not possible here{cure}")
    if tree.args.get("from_") is None:
        raise refusal(query, f"the SQL reads nothing: FROM {query.on}")
    for limit in tree.find_all(exp.Limit, exp.Fetch, exp.Offset):
        if limit.parent is None or not limit.parent.args.get("order"):
            raise refusal(query, "LIMIT takes any rows without an ORDER BY beside it")
    if next(tree.find_all(exp.TableSample), None) is not None:
        raise refusal(query, "TABLESAMPLE takes other rows each time, and an execution may be repeated")
    if next(tree.find_all(exp.QueryTransform), None) is not None:
        raise refusal(query, "TRANSFORM reaches outside of the datasets")


def _check_tables(query: StandingQuery, tree: exp.Select) -> None:
    shared = {cte.alias_or_name for cte in tree.find_all(exp.CTE)}
    for name in shared:
        if name.lower() in query.datasets or name.startswith("_"):
            raise refusal(query, f"WITH {name}: choose another name, which is no dataset's and does not begin with '_'")
    used: set[str] = set()
    for table in tree.find_all(exp.Table):
        if not isinstance(table.this, exp.Identifier):
            raise refusal(query, f"{table.sql('spark')} is no dataset")
        if table.db or (table.name not in query.datasets and table.name not in shared):
            known = ", ".join(query.datasets)
            raise refusal(query, f"{table.sql('spark')} is none of its datasets ({known}): name it in reads")
        used.add(table.name)
    if unused := [name for name in query.datasets if name not in used]:
        raise refusal(query, f"the SQL does not read {unused[0]!r}: remove it from on or reads")
    for join in tree.find_all(exp.Join):
        if (join.side or "").upper() in ("RIGHT", "FULL"):
            raise refusal(query, f"{join.side} JOIN is not possible: write it as LEFT JOIN")


def _check_functions(query: StandingQuery, tree: exp.Select) -> None:
    for call in tree.find_all(exp.Func):
        if isinstance(call, exp.Connector):
            continue
        name = _name_of(call)
        if name in TIMES or (name in TIMES_WITHOUT_ARGUMENTS and not call.expressions):
            reason = f"gives another time when an execution is repeated: use {TICK}(), the time of the execution"
        elif name in RANDOM:
            reason = "gives something else when an execution is repeated: compute it before the record is stored"
        elif name in FAILING:
            reason = "would end the execution for all users of the query: use WHERE"
        elif name in OUTSIDE or name.startswith("_"):
            reason = "reaches outside of the datasets"
        else:
            continue
        raise refusal(query, f"{name}() {reason}")


def _name_of(call: exp.Func) -> str:
    named = isinstance(call, exp.Anonymous | exp.AnonymousAggFunc)
    return (call.name if named else call.sql_name()).lower()
