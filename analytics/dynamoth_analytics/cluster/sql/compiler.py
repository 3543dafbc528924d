"""Compiles the SQL of one interest to a statement for all interests at once: see ``compiled``."""

# pyright: reportPrivateImportUsage=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pyspark.sql import functions
from sqlglot import exp
from sqlglot.errors import SqlglotError
from sqlglot.optimizer.qualify import qualify

from dynamoth.data.datasets import Dataset
from dynamoth.data.queries import StandingQuery
from dynamoth_analytics.cluster.sql.dialect import AGGREGATES, NOT_IN_PYTHON, StandingSql
from dynamoth_analytics.cluster.sql.near import NEAR, NearJoins, column_of
from dynamoth_analytics.cluster.sql.nulls import give_null_for_wrong
from dynamoth_analytics.cluster.sql.schema import (
    INTEREST,
    INTERESTS,
    OWN_COLUMNS,
    PARAMETER_PREFIX,
    interest_columns,
    view_columns,
)
from dynamoth_analytics.cluster.sql.statement import TICK, read_statement, refusal


class Ordering(NamedTuple):
    """One column of ORDER BY."""

    name: str
    is_descending: bool
    has_nulls_first: bool


@dataclass
class Compiler:
    """Compiles one query. ``tree``, ``exact_tree``, ``order`` and ``warnings`` are the result."""

    query: StandingQuery
    datasets: Mapping[str, Dataset]
    tree: exp.Select = field(default_factory=exp.Select)
    #: The same statement without grids: each ``near`` is its exact distance.
    exact_tree: exp.Select = field(default_factory=exp.Select)
    order: tuple[Ordering, ...] = ()
    warnings: list[str] = field(default_factory=list[str])

    def compile(self) -> None:
        """Compile it. Raises ConfigError."""
        try:
            self._compile()
        except RecursionError:
            raise refusal(self.query, "the SQL is nested too deeply") from None

    def _compile(self) -> None:
        for name in self.query.datasets:
            if name not in self.datasets:
                known = ", ".join(sorted(self.datasets)) or "none"
                raise refusal(self.query, f"there is no dataset {name!r}: register it first; those are {known}")
        self._check_kinds()
        self.tree = read_statement(self.query)
        self._warn_of_functions()
        self._replace_parameters()
        self._join_interests()
        self._qualify()
        self._check_names()
        self._take_order()
        self._add_interest()
        give_null_for_wrong(self.query, self.tree)
        self.exact_tree = self.tree.copy()
        NearJoins(self.query, self.exact_tree).replace_exactly()
        joins = NearJoins(self.query, self.tree, self.warnings)
        joins.replace()
        joins.find_cross_joins()

    def _check_kinds(self) -> None:
        on, *reads = (self.datasets[name] for name in self.query.datasets)
        if on.kind == "static":
            cure = "name it in reads, and in on the dataset whose new records the query is about"
            raise refusal(self.query, f"it is on {on.name!r}, a static dataset, which has no new records: {cure}")
        for dataset in reads:
            if dataset.kind == "append":
                cure = "only the new records of `on` are read of such a one"
                raise refusal(self.query, f"reads has {dataset.name!r}, which is neither keyed nor static: {cure}")

    def _warn_of_functions(self) -> None:
        """Warn of functions that look misspelt: whether Spark has them is only known to Spark."""
        known = {*NEAR, TICK, *AGGREGATES, *NOT_IN_PYTHON, *dir(functions)}
        for name in dict.fromkeys(call.name.lower() for call in self.tree.find_all(exp.Anonymous)):
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]}()? " if near else ""
                self.warnings.append(
                    f"{name}() is no known function: {hint}`dynamoth query try` says whether Spark has it"
                )

    def _replace_parameters(self) -> None:
        used: set[str] = set()
        for marker in list(self.tree.find_all(exp.Placeholder)):
            name = str(marker.this or "?")
            if name not in self.query.by_name:
                known = ", ".join(f":{each}" for each in self.query.by_name) or "none"
                raise refusal(self.query, f"parameter :{name} is not declared; those are {known}")
            if marker.parent_select is not self.tree:
                raise refusal(self.query, f"parameter :{name} is in a subquery: use it in the outer WHERE or in a JOIN")
            used.add(name)
            marker.replace(exp.column(PARAMETER_PREFIX + name, INTERESTS))
        if unused := [name for name in self.query.by_name if name not in used]:
            raise refusal(self.query, f"the SQL does not use the parameter :{unused[0]}: remove it, or use it")

    def _join_interests(self) -> None:
        """Put the interests first in FROM, so that conditions of joins can name them."""
        first: Any = self.tree.args["from_"].this
        self.tree.set("from_", exp.From(this=exp.alias_(exp.to_table(INTERESTS), INTERESTS, table=True)))
        self.tree.set("joins", [exp.Join(this=first, kind="CROSS"), *(self.tree.args.get("joins") or [])])

    def _qualify(self) -> None:
        """Name the table of each column."""
        if any(isinstance(each, exp.Star) for each in self.tree.expressions):
            raise refusal(self.query, "SELECT * would select the parameters, too: name a table (r.*), or the columns")
        schema: dict[str, Any] = {name: view_columns(self.datasets[name]) for name in self.query.datasets}
        schema[INTERESTS] = interest_columns(self.query)
        try:
            self.tree = qualify(self.tree, schema=schema, dialect=StandingSql, quote_identifiers=True)
        except SqlglotError as error:
            text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).splitlines()[0]
            raise refusal(
                self.query, f"{text}: fields of datasets are those of their definitions, in small letters"
            ) from None

    def _check_names(self) -> None:
        names = [each.alias_or_name for each in self.tree.expressions]
        for name in names:
            if not name or name.startswith("_col_"):
                raise refusal(self.query, "an expression of the result has no name: give it one with AS")
            if name.startswith("_") and name not in OWN_COLUMNS:
                raise refusal(self.query, f"{name} begins with '_': such names are ours; choose another with AS")
            if [each.lower() for each in names].count(name.lower()) > 1:
                raise refusal(self.query, f"the result has two columns {name!r}: name one of them with AS")

    def _take_order(self) -> None:
        """Take ORDER BY away: rows are sorted when they are put together to a result set."""
        order = self.tree.args.get("order")
        self.tree.set("order", None)
        self.order = tuple(self._ordering(each) for each in ([] if order is None else order.expressions))

    def _ordering(self, ordered: exp.Ordered) -> Ordering:
        value = ordered.this
        for each in self.tree.expressions:
            is_named = isinstance(value, exp.Column) and not value.table and value.name == each.alias_or_name
            if is_named or value == each.unalias():
                return Ordering(
                    each.alias_or_name, bool(ordered.args.get("desc")), bool(ordered.args.get("nulls_first"))
                )
        raise refusal(self.query, f"ORDER BY {value.sql(StandingSql)}: the result has no such column")

    def _add_interest(self) -> None:
        """Select the interest, and group and partition by it."""
        tree, interest = self.tree, column_of(INTERESTS, INTEREST)
        for window in tree.find_all(exp.Window):
            if window.parent_select is tree and not window.args.get("alias"):  # else the WINDOW clause has it
                window.set("partition_by", [interest.copy(), *(window.args.get("partition_by") or [])])
        group = tree.args.get("group")
        if group is not None and any(group.args.get(each) for each in _GROUPINGS):
            raise refusal(self.query, "GROUP BY names its expressions, CUBE (...), ROLLUP (...) or GROUPING SETS (...)")
        if group is not None or self._has_aggregates():
            keys = [interest.copy(), *self._parameters_of_groups(), *(group.expressions if group is not None else [])]
            tree.set("group", exp.Group(expressions=keys))
        tree.set("expressions", [interest.copy().as_(INTEREST, quoted=True), *tree.expressions])

    def _has_aggregates(self) -> bool:
        parts = [*self.tree.expressions, *([self.tree.args["having"]] if self.tree.args.get("having") else [])]
        return any(
            each.parent_select is self.tree and not _is_windowed(each) and not _is_of_pattern(each)
            for part in parts
            for each in part.find_all(exp.AggFunc, exp.Any)
        )

    def _parameters_of_groups(self) -> list[exp.Expression]:
        """Return the parameters that are used of groups: of one interest each has one value."""
        having = self.tree.args.get("having")
        parts = [*self.tree.expressions, *([] if having is None else [having])]
        found = (column for part in parts for column in part.find_all(exp.Column) if column.table == INTERESTS)
        return [column_of(INTERESTS, name) for name in sorted({column.name for column in found} - {INTEREST})]


_GROUPINGS = ("grouping_sets", "cube", "rollup", "totals", "all")


def _is_windowed(call: exp.Expression) -> bool:
    """Return whether an aggregate is one over a window."""
    while isinstance(call.parent, exp.IgnoreNulls | exp.RespectNulls | exp.Filter | exp.WithinGroup):
        call = call.parent
    return isinstance(call.parent, exp.Window) and call.parent.this is call


def _is_of_pattern(call: exp.Expression) -> bool:
    """Return whether it is the ANY of LIKE ANY, and no aggregate."""
    return isinstance(call, exp.Any) and isinstance(call.parent, exp.Binary) and call.arg_key == "expression"
