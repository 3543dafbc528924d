"""Makes values that cannot be computed NULL: one user or record neither fails a query for all, nor makes it wrong.

Spark has two ways. With ANSI mode, ``a / 0`` and an overflow fail the whole execution, so all users wait. Without it,
which is what sessions here have, most of that is NULL, but sums and products of integers wrap, and casts of numbers
that are too large give others. So what wraps or fails is replaced by Spark's functions that give NULL then:
``try_add``, ``try_cast`` ... Where there is none, the argument that can be wrong has to be a literal (``LITERALS``),
which the operator who registers the query can check.
"""

# pyright: reportPrivateImportUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from typing import Any

from sqlglot import exp

from dynamoth.data.queries import StandingQuery
from dynamoth_analytics.cluster.sql.near import is_near
from dynamoth_analytics.cluster.sql.statement import refusal

OPERATORS: dict[type[Any], str] = {exp.Add: "try_add", exp.Sub: "try_subtract", exp.Mul: "try_multiply"}

TRIED = {
    "sum": "try_sum", "avg": "try_avg", "mean": "try_avg", "parse_json": "try_parse_json", "parse_url": "try_parse_url",
    "to_binary": "try_to_binary", "to_number": "try_to_number", "url_decode": "try_url_decode",
    "validate_utf8": "try_validate_utf8", "variant_get": "try_variant_get",
}  # fmt: skip
"""Functions that have another one, which gives NULL where they wrap or fail."""

CASTS = {"tinyint", "smallint", "int", "bigint"}
"""Functions that cast, and wrap."""

ALL = range(10)
LITERALS = {
    **dict.fromkeys(("regexp_count", "regexp_extract", "regexp_extract_all", "regexp_instr", "regexp_replace"), (1,)),
    **dict.fromkeys(("regexp_substr", "rlike", "regexp", "regexp_like", "split", "like", "ilike"), (1,)),
    **dict.fromkeys(("decode", "encode", "from_utc_timestamp", "to_utc_timestamp"), (1,)),
    **dict.fromkeys(("element_at", "try_element_at", "bit_get", "getbit", "array_insert"), (1,)),
    **dict.fromkeys(("repeat", "array_repeat", "lpad", "rpad", "add_months", "date_add", "date_sub"), (1,)),
    **dict.fromkeys(("dateadd", "timestampadd"), (1,)),
    **dict.fromkeys(("sequence", "space", "make_interval", "make_dt_interval", "make_ym_interval"), ALL),
    "slice": (1, 2), "split_part": (2,), "convert_timezone": (0,),
}  # fmt: skip
"""By function, the arguments whose values can fail an execution: a wrong pattern, an index 0, a text without end ..."""

LONE_BACKSLASH, WITHOUT_IT = r"(\\[%_\\])|\\", "$1"
"""In a pattern of LIKE, a backslash before anything but ``%``, ``_`` and another one is an error."""


def give_null_for_wrong(query: StandingQuery, tree: exp.Select) -> None:
    """Replace operators and functions that wrap or fail by those that give NULL. Raises ConfigError.

    The functions of the statement have the names that Spark gives them. The arguments of ``near`` stay as they are:
    they are floats, and ``near`` has to know their bounds.
    """
    for node in list(tree.walk(bfs=False))[::-1]:  # what is inside comes first
        if not _is_in_distance(node):
            _check(query, node)
            _replace(node)


def _check(query: StandingQuery, node: Any) -> None:
    name, arguments = "", list[Any]()
    if isinstance(node, exp.Anonymous):
        name = node.name.lower()
        arguments = [each for number, each in enumerate(node.expressions) if number in LITERALS.get(name, ())]
    elif isinstance(node, exp.RegexpLike | exp.RegexpILike):
        name, arguments = "rlike", [node.expression]
    if not all(map(_is_literal, arguments)):
        raise refusal(
            query, f"{name}() fails for some values, for all users of the query: write a literal for what it is given"
        )


def _replace(node: Any) -> None:
    if type(node) in OPERATORS:
        node.replace(_call(OPERATORS[type(node)], node.this, node.expression))
    elif isinstance(node, exp.Neg) and not _is_literal(node):
        node.replace(_call("try_multiply", node.this, exp.Literal.number(-1)))
    elif isinstance(node, exp.TryCast):  # which is what sqlglot takes a CAST of Spark's for
        node.set("safe", True)
    elif isinstance(node, exp.Like | exp.ILike):
        pattern = node.expression
        is_one = not isinstance(pattern, exp.Any | exp.All | exp.Tuple)
        if is_one and not _is_literal(pattern) and not isinstance(node.parent, exp.Escape):
            sound = _call("regexp_replace", pattern, _text(LONE_BACKSLASH), _text(WITHOUT_IT))
            node.set("expression", sound)
    elif isinstance(node, exp.Anonymous | exp.AnonymousAggFunc):
        name = node.name.lower()
        if name in CASTS:
            node.replace(exp.TryCast(this=node.expressions[0], to=exp.DataType.build(name, dialect="spark"), safe=True))
        else:
            node.set("this", TRIED.get(name, node.this))


def _is_literal(value: Any) -> bool:
    value = value.unnest()
    value = value.this if isinstance(value, exp.Neg) else value
    return isinstance(value, exp.Literal | exp.Boolean | exp.Null | exp.Var)


def _is_in_distance(node: Any) -> bool:
    call = node.find_ancestor(exp.Anonymous)
    while call is not None and not is_near(call):
        call = call.find_ancestor(exp.Anonymous)
    return call is not None


def _call(name: str, *arguments: Any) -> exp.Expression:
    return exp.Anonymous(this=name, expressions=[each.unnest() for each in arguments])


def _text(value: str) -> exp.Expression:
    return exp.Literal.string(value)
