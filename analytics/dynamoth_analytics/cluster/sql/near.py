"""Replaces ``near`` and ``near_xy`` in a statement by joins over the cells of a grid, and warns of cross joins.

``spatial`` has the cells. One table gets a column with the cell of its place. The other one gets its rows once for each
cell that its circle touches. The condition becomes an equality of the two cells, before the exact distance.

Of a LEFT, SEMI or ANTI JOIN, the table on the left keeps its rows as they are: it gets the one cell, at the level of
the largest distance, also where the place is unknown.
"""

# pyright: reportPrivateImportUsage=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import sqlglot
from sqlglot import exp

from dynamoth.data.queries import StandingQuery
from dynamoth_analytics.cluster.sql import spatial
from dynamoth_analytics.cluster.sql.dialect import StandingSql
from dynamoth_analytics.cluster.sql.schema import INTERESTS, PARAMETER_PREFIX
from dynamoth_analytics.cluster.sql.spatial import PLANE, SPHERE
from dynamoth_analytics.cluster.sql.statement import refusal

CELL = "_cell"
"""Prefix of the columns with cells."""

NEAR = {"near": SPHERE, "near_xy": PLANE}

Bounds = tuple[float, float]


@dataclass
class NearJoins:
    """Replaces the distances of one statement, whose columns are qualified with their tables."""

    query: StandingQuery
    tree: exp.Select
    warnings: list[str] = field(default_factory=list[str])
    #: How many pairs of tables have cells.
    _grids: int = 0

    def replace_exactly(self) -> None:
        """Replace all calls by the exact distance, without grids. Raises ConfigError."""
        for call in [each for each in self.tree.find_all(exp.Anonymous) if is_near(each)]:
            call.replace(self._exact(call))

    def replace(self) -> None:
        """Replace all calls, by joins over grids where that is possible; warn where it is not. Raises ConfigError."""
        for join in self.tree.args.get("joins") or []:
            right = None if is_inner(join) else join.this.alias_or_name
            self._replace_in(join.args.get("on"), right)
        where = self.tree.args.get("where")
        self._replace_in(None if where is None else where.this, None)
        for call in [each for each in self.tree.find_all(exp.Anonymous) if is_near(each)]:
            tables = {column.table for column in call.find_all(exp.Column)}
            if len(tables) > 1:
                self.warnings.append(
                    f"{call.name}() is not one of the conditions joined by AND: all pairs are compared"
                )
            call.replace(self._exact(call))

    def _replace_in(self, condition: exp.Expression | None, right: str | None) -> None:
        for part in list(conjuncts(condition)):
            if isinstance(part, exp.Anonymous) and is_near(part):
                link, exact = self._link(part, right), self._exact(part)
                part.replace(exact if link is None else exp.and_(link, exact))

    def _exact(self, call: exp.Anonymous) -> exp.Expression:
        a, b, c, d, radius = (f"({each.sql(StandingSql)})" for each in self._arguments(call))
        distance = spatial.distance_sql if NEAR[call.name.lower()] is SPHERE else spatial.distance_xy_sql
        return _parsed(f"({distance(a, b, c, d)} <= {radius})")

    def _arguments(self, call: exp.Anonymous) -> list[exp.Expression]:
        if len(call.expressions) != 5:
            raise refusal(self.query, f"{call.name}() has five arguments: two places and a distance")
        return call.expressions

    def _link(self, call: exp.Anonymous, right: str | None) -> exp.Expression | None:
        """Give the two tables of a call their cells; return the equality of these. None: there are no two tables."""
        a, b, c, d, radius = self._arguments(call)
        sources = {each.alias_or_name: each for each in sources_of(self.tree)}
        one, other = table_of(a, b), table_of(c, d)
        if len({column.table for each in (a, b, c, d) for column in each.find_all(exp.Column)}) < 2:
            return None  # a condition of one table, which is no join
        if one not in sources or other not in sources or one == other or (right and right not in (one, other)):
            self.warnings.append(f"{call.name}() compares places that are not of two tables: all pairs are compared")
            return None
        radius_table, least, most = table_of(radius), *self._bounds_of(call, radius)
        has_circle = other if right is None else right
        if right is None and (radius_table == one or (radius_table != other and one == INTERESTS)):
            has_circle = one
        if has_circle == one:
            (a, b), (c, d), one, other = (c, d), (a, b), other, one
        grid = NEAR[call.name.lower()]
        levels: Sequence[int] = [grid.level_of(most)]
        wide, level = repr(most), str(levels[0])
        if radius_table == other and right is None:
            levels, wide, level = grid.levels_between(least, most), radius.sql(StandingSql), "NULL"
        self._grids += 1
        name = f"{CELL}{self._grids}"
        at = ", ".join(_cells(grid, a, b, "NULL", str(each)) for each in levels)
        explode = "explode" if right is None else "explode_outer"
        _explode(sources[other], f"explode({_cells(grid, c, d, wide, level)})", name)
        _explode(sources[one], f"{explode}(concat({at}))", name)
        return exp.EQ(this=column_of(one, name), expression=column_of(other, name))

    def _bounds_of(self, call: exp.Anonymous, radius: exp.Expression) -> Bounds:
        """Return the least and the largest value of a distance."""
        bounds = self._bounds(radius)
        if bounds is None:
            raise refusal(
                self.query,
                f"the distance of {call.name}() needs bounds: it is a number, or a parameter with min and max, or a"
                " product of such",
            )
        if bounds[1] > spatial.RADIUS_MAX:
            raise refusal(self.query, f"the distance of {call.name}() is at most {spatial.RADIUS_MAX:g}")
        return bounds

    def _bounds(self, value: exp.Expression) -> Bounds | None:
        if isinstance(value, exp.Literal) and not value.is_string:
            return float(value.this), float(value.this)
        if isinstance(value, exp.Paren | exp.Cast):
            return self._bounds(value.this)
        if isinstance(value, exp.Column) and value.table == INTERESTS:
            parameter = self.query.by_name[value.name.removeprefix(PARAMETER_PREFIX)]
            return None if parameter.min is None or parameter.max is None else (parameter.min, parameter.max)
        if isinstance(value, exp.Mul):
            one, other = self._bounds(value.this), self._bounds(value.expression)
            if one is not None and other is not None:
                products = [a * b for a in one for b in other]
                return min(products), max(products)
        return None

    # What compares everything with everything.

    def find_cross_joins(self) -> None:
        """Warn of tables that no equality links with the parameters."""
        links = self._links()
        reached, open_ = set[str](), [INTERESTS]
        while open_:
            table = open_.pop()
            if table not in reached:
                reached.add(table)
                open_ += links[table]
        apart = sorted({each.alias_or_name for each in sources_of(self.tree)} - reached)
        if self.query.parameters and apart:
            self.warnings.append(
                f"no equality and no near() links {', '.join(apart)} with the parameters: all rows are compared with"
                " all interests"
            )

    def _links(self) -> dict[str, list[str]]:
        """Return for each table those that an equality finds from its rows."""
        links: dict[str, list[str]] = defaultdict(list)
        where = self.tree.args.get("where")
        joins: list[exp.Join] = self.tree.args.get("joins") or []
        conditions = [(None if where is None else where.this, "")]
        conditions += [(each.args.get("on"), "" if is_inner(each) else each.this.alias_or_name) for each in joins]
        for condition, right in conditions:
            for part in conjuncts(condition):
                if isinstance(part, exp.EQ | exp.NullSafeEQ):
                    one, other = table_of(part.this), table_of(part.expression)
                    if one and other and right in ("", other):
                        links[one].append(other)
                    if one and other and right in ("", one):
                        links[other].append(one)
        return links


def is_inner(join: exp.Join) -> bool:
    """Return whether rows on the left are only taken together with those on the right."""
    return not join.side and (join.kind or "").upper() in ("", "INNER", "CROSS")


def conjuncts(condition: exp.Expression | None) -> Iterator[exp.Expression]:
    """Yield the conditions that are joined by AND."""
    open_ = [] if condition is None else [condition]
    while open_:
        part = open_.pop()
        if isinstance(part, exp.And):
            open_ += [part.expression, part.this]
        elif isinstance(part, exp.Paren):
            open_.append(part.this)
        else:
            yield part


def table_of(*expressions: exp.Expression) -> str | None:
    """Return the one table that has all columns of expressions; None if there are several or none."""
    tables = {column.table for each in expressions for column in each.find_all(exp.Column)}
    return tables.pop() if len(tables) == 1 else None


def sources_of(tree: exp.Select) -> list[exp.Table | exp.Subquery]:
    """Return the tables and subqueries of FROM and its joins."""
    found = [tree.args["from_"].this, *(join.this for join in tree.args.get("joins") or [])]
    return [each for each in found if isinstance(each, exp.Table | exp.Subquery)]


def column_of(table: str, name: str) -> exp.Column:
    """Return a column of a table, in quotes."""
    return exp.column(exp.to_identifier(name, quoted=True), exp.to_identifier(table, quoted=True))


def is_near(call: exp.Anonymous) -> bool:
    """Return whether a call is one of ``NEAR``."""
    return call.name.lower() in NEAR


def _cells(grid: spatial.Grid, one: exp.Expression, other: exp.Expression, radius: str, level: str) -> str:
    values = [f"cast({each} AS double)" for each in (one.sql(StandingSql), other.sql(StandingSql), radius)]
    return f"{grid.function}({', '.join(values)}, cast({level} AS int))"


def _explode(table: exp.Table | exp.Subquery, cells: str, name: str) -> None:
    """Replace a table by one that has its rows once for each cell."""
    alias, inner = table.alias_or_name, table.copy()
    quoted = exp.to_identifier(alias, quoted=True)
    select: Any = _parsed(f"SELECT {quoted.sql(StandingSql)}.*, {cells} AS {name} FROM _inner")
    for each in list(select.find_all(exp.Table)):
        each.replace(inner)
    table.replace(cast("exp.Select", select).subquery(quoted.copy()))


def _parsed(text: str) -> exp.Expression:
    return cast("exp.Expression", sqlglot.parse_one(text, dialect=StandingSql))
