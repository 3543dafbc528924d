"""Spark's SQL as it is written: read and written again, it means exactly the same.

sqlglot translates between dialects, and functions on the way: it gives ``listagg`` a comma, and makes
``percentile_disc`` an approximation. Here functions have no meaning but whether they aggregate, and are written again
as they were read. Names count capitals, so that results have the names that the SQL gives them.
"""

# pyright: reportPrivateImportUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from sqlglot import exp
from sqlglot.dialects.dialect import NormalizationStrategy
from sqlglot.dialects.spark import Spark
from sqlglot.parsers.spark import SparkParser

AGGREGATES = {
    "any_value", "approx_count_distinct", "approx_percentile", "approx_top_k", "approx_top_k_accumulate",
    "approx_top_k_combine", "array_agg", "avg", "bit_and", "bit_or", "bit_xor", "bitmap_and_agg",
    "bitmap_construct_agg", "bitmap_or_agg", "bool_and", "bool_or", "collect_list", "collect_set", "collect_union",
    "corr", "count", "count_if", "count_min_sketch", "covar_pop", "covar_samp", "every", "first", "first_value",
    "grouping", "grouping_id", "histogram_numeric", "hll_sketch_agg", "hll_union_agg", "kll_merge_agg_bigint",
    "kll_merge_agg_double", "kll_merge_agg_float", "kll_sketch_agg_bigint", "kll_sketch_agg_double",
    "kll_sketch_agg_float", "kurtosis", "last", "last_value", "listagg", "max", "max_by", "mean", "measure",
    "median", "min", "min_by", "mode", "percentile", "percentile_approx", "percentile_cont", "percentile_disc",
    "regr_avgx", "regr_avgy", "regr_count", "regr_intercept", "regr_r2", "regr_slope", "regr_sxx", "regr_sxy",
    "regr_syy", "schema_of_variant_agg", "skewness", "some", "std", "stddev", "stddev_pop", "stddev_samp",
    "string_agg", "sum", "theta_intersection_agg", "theta_sketch_agg", "theta_union_agg", "try_avg", "try_sum",
    "tuple_intersection_agg_double", "tuple_intersection_agg_integer", "tuple_sketch_agg_double",
    "tuple_sketch_agg_integer", "tuple_union_agg_double", "tuple_union_agg_integer", "var_pop", "var_samp",
    "variance", "vector_avg", "vector_sum",
}  # fmt: skip
"""Spark's functions that make one value of many rows, besides ``any``, which is a word of the grammar."""

NOT_IN_PYTHON = {
    "approx_top_k_estimate", "bigint", "binary", "boolean", "date", "decimal", "double", "float", "if", "int", "len",
    "luhn_check", "map", "mod", "smallint", "space", "string", "time", "timestamp", "tinyint",
}  # fmt: skip
"""Spark's functions that ``pyspark.sql.functions`` does not have."""

WITH_UNIT = {"dateadd", "date_add", "datediff", "date_diff", "timestampadd", "timestampdiff", "timediff", "time_diff"}
"""Functions whose first argument may be a unit of time, which looks like the name of a column."""

UNITS = {
    "year", "quarter", "month", "week", "day", "dayofyear", "hour", "minute", "second", "millisecond", "microsecond",
}  # fmt: skip

_WITH_GRAMMAR = ("CAST", "TRY_CAST", "EXTRACT", "TRIM", "POSITION", "OVERLAY", "SUBSTRING", "SUBSTR")


def _aggregate(name: str, arguments: list[Any]) -> exp.Expression:
    return exp.AnonymousAggFunc(this=name, expressions=arguments)


class StandingSql(Spark):
    """The dialect of standing queries."""

    NORMALIZATION_STRATEGY = NormalizationStrategy.CASE_SENSITIVE

    class Tokenizer(Spark.Tokenizer):
        """Reads two quotes in a text as one, as Spark does: else they would be two texts behind each other."""

        STRING_ESCAPES: ClassVar[list[str]] = ["\\", "'", '"']

    class Parser(SparkParser):
        """Reads functions by their names only."""

        FUNCTIONS: ClassVar[dict[str, Callable[..., Any]]] = {
            name.upper(): partial(_aggregate, name) for name in AGGREGATES
        }
        FUNCTION_PARSERS: ClassVar[dict[str, Callable[..., Any]]] = {
            name: SparkParser.FUNCTION_PARSERS[name] for name in _WITH_GRAMMAR
        }
        #: Else the brackets in ``array(1, 2)[0]`` would be taken for those of an array, and the call be lost.
        ARRAY_CONSTRUCTORS: ClassVar[dict[str, type[Any]]] = {}


def keep_units(tree: exp.Expression) -> None:
    """Make units of time words, where they would be taken for columns."""
    for call in tree.find_all(exp.Anonymous):
        first = call.expressions[0] if call.expressions and call.name.lower() in WITH_UNIT else None
        if isinstance(first, exp.Column) and not first.table and first.name.lower() in UNITS:
            first.replace(exp.Var(this=first.name))
