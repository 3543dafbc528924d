"""Makes values that cannot be computed NULL: one user or record neither fails a query for all, nor makes it wrong.

Spark has two ways. With ANSI mode, ``a / 0`` and an overflow fail the whole execution, so all users wait. Without it,
which is what sessions here have, most of that is NULL, but sums and products of integers wrap, and casts of numbers
that are too large give others, as do ``floor``, ``abs``, ``round`` and arguments of 32 bits. So what wraps or fails is
replaced by Spark's functions that give NULL then: ``try_add``, ``try_cast`` ... Where there is none, the argument that
can be wrong has to be a literal (``LITERALS``), which the operator who registers the query can check.
"""

# pyright: reportPrivateImportUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from typing import Any

import sqlglot
from sqlglot import exp

from dynamoth.data.queries import StandingQuery
from dynamoth_analytics.cluster.sql.dialect import StandingSql
from dynamoth_analytics.cluster.sql.near import is_near
from dynamoth_analytics.cluster.sql.statement import refusal

OPERATORS: dict[type[Any], str] = {
    exp.Add: "try_add", exp.Sub: "try_subtract", exp.Mul: "try_multiply", exp.Div: "try_divide",
}  # fmt: skip

TRIED = {
    "sum": "try_sum", "avg": "try_avg", "mean": "try_avg", "parse_json": "try_parse_json", "parse_url": "try_parse_url",
    "to_binary": "try_to_binary", "to_number": "try_to_number", "url_decode": "try_url_decode",
    "validate_utf8": "try_validate_utf8", "variant_get": "try_variant_get",
}  # fmt: skip
"""Functions that have another one, which gives NULL where they wrap or fail."""

CASTS = {"tinyint", "smallint", "int", "bigint"}
"""Functions that cast, and wrap."""

LEAST, MOST = -(2**63), 2**63
"""Integers are from the first to below the second. A record never has the first one, which has no opposite."""

TIME_MIN, TIME_MAX = "0001-01-01 00:00:00+00:00", "9999-12-31 23:59:59.999999+00:00"
"""A cast to a time gives Spark's first or last one for a number that is too large."""

INTS = {
    "date_from_unix_date": (0,), "make_date": (0, 1, 2), "make_timestamp": (0, 1, 2, 3, 4), "left": (1,), "right": (1,),
    "get": (1,), "substring_index": (2,), "locate": (2,), "shiftleft": (1,), "shiftright": (1,), "levenshtein": (2,),
    "shiftrightunsigned": (1,),
}  # fmt: skip
"""By function, the arguments of 32 bits: Spark wraps larger ones without a word."""

SECONDS_OF_TIME = -62_135_596_800, 253_402_300_799
"""Unix seconds of the years 1 to 9999: more of them wrap, or fail."""

UNITS_PER_SECOND = {"timestamp_seconds": 1, "timestamp_millis": 1000, "from_unixtime": 1}
"""Functions of Unix time, whose argument is NULL where it is no time."""

ALL = range(10)
LITERALS = {
    **dict.fromkeys(("regexp_count", "regexp_instr"), (1,)),
    **dict.fromkeys(("regexp_extract", "regexp_extract_all", "regexp_replace", "str_to_map"), (1, 2)),
    **dict.fromkeys(("format_string", "printf"), (0,)),
    **dict.fromkeys(("date_format", "from_unixtime", "unix_timestamp", "to_unix_timestamp", "format_number"), (1,)),
    **dict.fromkeys(("to_date", "try_to_date", "to_timestamp", "try_to_timestamp"), (1,)),
    **dict.fromkeys(("to_timestamp_ltz", "to_timestamp_ntz"), (1,)),
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

    The functions of the statement have the names that Spark gives them. Arithmetic inside of ``near`` stays as it is:
    its arguments are floats, and ``near`` has to know their bounds.
    """
    for node in list(tree.walk(bfs=False))[::-1]:  # what is inside comes first
        _check(query, node)
        if isinstance(node, exp.Anonymous | exp.AnonymousAggFunc) or not _is_in_distance(node):
            _replace(node)


def _check(query: StandingQuery, node: Any) -> None:
    name, arguments = "", list[Any]()
    if isinstance(node, exp.Anonymous):
        name = node.name.lower()
        literals = (0, 1) if name == "convert_timezone" and len(node.expressions) > 2 else LITERALS.get(name, ())
        arguments = [each for number, each in enumerate(node.expressions) if number in literals]
        _check_coding(query, name, node.expressions)
    elif isinstance(node, exp.RegexpLike | exp.RegexpILike):
        name, arguments = "rlike", [node.expression]
    elif isinstance(node, exp.Escape):
        name, arguments = "like", _patterns(node.this)
    if not all(map(_is_literal, arguments)):
        raise refusal(
            query, f"{name}() fails for some values, for all users of the query: write a literal for what it is given"
        )


def _check_coding(query: StandingQuery, name: str, arguments: list[Any]) -> None:
    """Refuse codings of characters that do not have all of them. Raises ConfigError."""
    if name not in ("encode", "decode") or len(arguments) != 2 or not _is_literal(arguments[1]):
        return
    coding = arguments[1].unnest().name.upper()
    if coding not in (("UTF-8",) if name == "decode" else ("UTF-8", "UTF-16", "UTF-16BE", "UTF-16LE", "UTF-32")):
        raise refusal(query, f"{name}() with {coding} fails for some values, for all users of the query: use UTF-8")


def _replace(node: Any) -> None:
    if type(node) in OPERATORS:
        node.replace(_call(OPERATORS[type(node)], node.this, node.expression))
    elif isinstance(node, exp.Neg) and not _is_literal(node):
        node.replace(_call("try_multiply", node.this, exp.Literal.number(-1)))
    elif isinstance(node, exp.TryCast):  # which is what sqlglot takes a CAST of Spark's for
        node.set("safe", True)
        if node.to.is_type("timestamp", "timestamptz", "timestampltz"):
            _keep_if(node, exp.Between(this=node.copy(), low=_time(TIME_MIN), high=_time(TIME_MAX)))
    elif isinstance(node, exp.IntDiv):
        node.replace(_call("nullif", node.copy(), _number(LEAST)))
    elif isinstance(node, exp.Substring):
        for name in ("start", "length"):
            if (argument := node.args.get(name)) is not None:
                _cast_to_int(argument)
    elif isinstance(node, exp.Like | exp.ILike):
        for pattern in _patterns(node):
            if not _is_literal(pattern):
                pattern.replace(_call("regexp_replace", pattern.copy(), _text(LONE_BACKSLASH), _text(WITHOUT_IT)))
    elif isinstance(node, exp.Anonymous | exp.AnonymousAggFunc):
        _replace_call(node, node.name.lower(), node.expressions)


def _replace_call(node: Any, name: str, arguments: list[Any]) -> None:
    if name in CASTS:
        node.replace(exp.TryCast(this=arguments[0], to=exp.DataType.build(name, dialect="spark"), safe=True))
    elif name in ("timestamp", "to_timestamp", "try_to_timestamp", "to_timestamp_ltz") and len(arguments) == 1:
        _keep_if(node, exp.Between(this=node.copy(), low=_time(TIME_MIN), high=_time(TIME_MAX)))
    elif name == "negative":
        node.replace(_call("try_multiply", arguments[0], _number(-1)))
    elif name == "abs":  # that of the least integer of each size is itself
        opposite = _call("try_multiply", node.copy(), _call("tinyint", _number(-1)))
        node.replace(_call("if", exp.Is(this=opposite, expression=exp.Null()), exp.Null(), node.copy()))
    elif name in ("floor", "ceil", "ceiling") and len(arguments) == 1:
        _give_null_for_large(node, arguments[0])
    elif name in ("round", "bround") and len(arguments) == 2:  # before the point, what is too large changes its sign
        signs = exp.Mul(this=_call("sign", node.copy()), expression=_call("sign", arguments[0].copy()))
        _keep_if(node, exp.GTE(this=signs, expression=_number(0)))
    elif name in INTS:
        for number in INTS[name]:
            if number < len(arguments):
                _cast_to_int(arguments[number])
    elif name == "unbase64":
        node.replace(_call("try_to_binary", *arguments, _text("base64")))
    elif name == "decode" and len(arguments) == 2:
        text = exp.TryCast(this=arguments[0], to=exp.DataType.build("string", dialect="spark"), safe=True)
        node.replace(_call("try_validate_utf8", text))
    elif name in UNITS_PER_SECOND and arguments and not _is_literal(arguments[0]):
        low, high = (exp.Literal.number(str(each * UNITS_PER_SECOND[name])) for each in SECONDS_OF_TIME)
        is_time = exp.Between(this=arguments[0].copy(), low=low, high=high)
        arguments[0].replace(_call("if", is_time, arguments[0].copy(), exp.Null()))
    elif name == "map" and (keys := [each for each in arguments[::2] if not _is_literal(each)]):
        has_none = exp.or_(*(exp.Is(this=exp.paren(each.copy()), expression=exp.Null()) for each in keys))
        node.replace(_call("if", has_none, exp.Null(), node.copy()))
    else:
        node.set("this", TRIED.get(name, node.this))


def _keep_if(node: Any, condition: Any) -> None:
    """Replace a value by NULL where a condition does not hold."""
    node.replace(_call("if", condition, node.copy(), exp.Null()))


def _give_null_for_large(node: Any, argument: Any) -> None:
    """Give NULL where the whole part of a float, which becomes an integer, is none of 64 bits. NaN is a large one."""
    floats = ", ".join(f"'{each}'" for each in ("double", "float", "string"))
    is_float: Any = sqlglot.parse_one(f"typeof(x) IN ({floats})", dialect=StandingSql)
    is_float.this.set("expressions", [argument.copy()])
    low = exp.GTE(this=exp.paren(argument.copy()), expression=_number(f"{float(LEAST)!r}D"))
    high = exp.LT(this=exp.paren(argument.copy()), expression=_number(f"{float(MOST)!r}D"))
    is_large = exp.not_(exp.and_(low, high))
    node.replace(_call("if", exp.and_(is_float, is_large), exp.Null(), node.copy()))


def _cast_to_int(argument: Any) -> None:
    if not _is_literal(argument):
        to = exp.DataType.build("int", dialect="spark")
        argument.replace(exp.TryCast(this=argument.copy(), to=to, safe=True))


def _time(text: str) -> Any:
    return exp.Cast(this=_text(text), to=exp.DataType.build("timestamp", dialect="spark"))


def _number(value: object) -> Any:
    return exp.Literal.number(str(value))


def _patterns(like: Any) -> list[Any]:
    """Return the patterns of LIKE, also of LIKE ANY (...)."""
    pattern = like.expression
    if isinstance(pattern, exp.Any | exp.All):
        pattern = pattern.this
        return list(pattern.expressions) if isinstance(pattern, exp.Tuple) else [pattern.unnest()]
    return [pattern]


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
