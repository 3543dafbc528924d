"""Names and types of the tables that the SQL of standing queries is executed on."""

from __future__ import annotations

from dynamoth.data.datasets import Dataset, FieldType
from dynamoth.data.queries import StandingQuery

INTERESTS = "_interests"
"""The *interest table*: a row for each interest, with its id and its values."""
INTEREST = "_interest"
PARAMETER_PREFIX = "__"
"""Of the columns of the interest table: fields of datasets never begin so."""
OWN_COLUMNS = {"_partition": "int", "_offset": "bigint", "_arrived": "timestamp"}
"""Columns of every dataset besides its fields."""

SQL_TYPES: dict[FieldType, str] = {
    "string": "string",
    "int": "bigint",
    "float": "double",
    "bool": "boolean",
    "timestamp": "timestamp",
}


def view_columns(dataset: Dataset) -> dict[str, str]:
    """Return the types of a dataset's columns, by name."""
    return {field.name: SQL_TYPES[field.type] for field in dataset.fields} | OWN_COLUMNS


def interest_columns(query: StandingQuery) -> dict[str, str]:
    """Return the types of the columns of a query's interest table, by name."""
    return {INTEREST: "string"} | {PARAMETER_PREFIX + each.name: SQL_TYPES[each.type] for each in query.parameters}


def view_schema(dataset: Dataset) -> str:
    """Return the schema of a dataset's rows, as Spark's DDL."""
    return _ddl(view_columns(dataset))


def interest_schema(query: StandingQuery) -> str:
    """Return the schema of a query's interest table, as Spark's DDL."""
    return _ddl(interest_columns(query))


def _ddl(columns: dict[str, str]) -> str:
    return ", ".join(f"`{name}` {type_}" for name, type_ in columns.items())
