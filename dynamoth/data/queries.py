"""What a standing query is, and which parameters it has.

A *standing query* (BAD: a repetitive channel) is SQL over datasets with ``:parameters``, which the data cluster
executes again and again. An interest is a query with values for all its parameters. One execution computes the results
of all interests; the result set of one interest is one publication of its log.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

from dynamoth.data.datasets import SUBJECT, check_name, check_settings
from dynamoth.edge.interests import EXACT_INTEGER_MAX, Scalar
from dynamoth.errors import ConfigError, DynamothError
from dynamoth.protocol.wire import shortened

ParameterType = Literal["string", "int", "float", "bool"]
Delivery = Literal["inline", "pull"]

PARAMETER_TYPES: tuple[ParameterType, ...] = get_args(ParameterType)
DELIVERIES: tuple[Delivery, ...] = get_args(Delivery)

PARAMETERS_MAX = 32
SQL_CHARACTERS_MAX = 20_000
INLINE_BYTES_MAX = 16_384
RESULT_BYTES_MAX = 1_048_576

KEEP_S_MIN = 60
"""Operators may not register less: brokers renew interests several times meanwhile, also where one reconnects."""


class BadParameters(DynamothError):
    """Raised when values do not fit the parameters of a query; the message is the reason."""

    code = "bad-parameters"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One declared parameter."""

    name: str
    type: ParameterType
    #: Bounds of a number. Radiuses need both: they decide the grid (``near``).
    min: float | None = None
    max: float | None = None
    #: The values that are allowed; empty: all of the type.
    choices: tuple[Scalar, ...] = ()

    def check(self, value: object) -> str | None:
        """Return what is wrong with a value, None if nothing is."""
        types: dict[ParameterType, type | tuple[type, ...]] = {
            "string": str, "int": int, "float": (int, float), "bool": bool,
        }  # fmt: skip
        is_type = isinstance(value, types[self.type]) and (self.type == "bool" or not isinstance(value, bool))
        if isinstance(value, float) and self.type == "int" and value.is_integer():
            is_type = True  # 1 and 1.0 are one interest
        if not is_type:
            return f"parameter {self.name!r} is of type {self.type}, not {shortened(value)}"
        if isinstance(value, int | float):
            if self.type == "int" and abs(value) > EXACT_INTEGER_MAX:
                return f"parameter {self.name!r} is a whole number of at most 2^53: larger ones are not exact"
            if not _is_finite(value):
                return f"parameter {self.name!r} is not a finite number"
            if self.min is not None and value < self.min:
                return f"parameter {self.name!r} is at least {self.min:g}, not {value:g}"
            if self.max is not None and value > self.max:
                return f"parameter {self.name!r} is at most {self.max:g}, not {value:g}"
        if self.choices and value not in self.choices:
            return f"parameter {self.name!r} is one of {', '.join(map(str, self.choices))}, not {shortened(value)}"
        return None


@dataclass(frozen=True)
class StandingQuery:
    """The definition of a standing query. Made by ``read_query``."""

    name: str
    sql: str
    #: The dataset whose new records an execution is about. SQL sees exactly those under the dataset's name.
    on: str
    #: Seconds between executions; 0: continuous.
    period_s: int
    parameters: tuple[Parameter, ...] = ()
    #: Other datasets that the SQL reads: the latest record of each key, or all of a static one.
    reads: tuple[str, ...] = ()
    #: Rows come with the notification up to ``inline_bytes_max``, or brokers always fetch them.
    delivery: Delivery = "inline"
    inline_bytes_max: int = INLINE_BYTES_MAX
    #: A larger result set is replaced by an error that says so.
    result_bytes_max: int = RESULT_BYTES_MAX
    #: Result sets that are kept of each interest, at least.
    retained_min: int = 1000
    #: An interest without users is executed for this time, so that who returns has missed nothing.
    keep_s: float = 86_400.0
    #: Parameters that have to equal a claim of the user's token: ``{"user": "$sub"}``.
    bind: tuple[tuple[str, str], ...] = ()
    #: Counts the changes of the definition, from 1.
    version: int = 1

    @cached_property
    def by_name(self) -> dict[str, Parameter]:
        """The parameters by name."""
        return {parameter.name: parameter for parameter in self.parameters}

    @property
    def is_continuous(self) -> bool:
        """Whether it is executed as soon as there are records."""
        return self.period_s == 0

    @property
    def datasets(self) -> tuple[str, ...]:
        """All datasets that it needs."""
        return (self.on, *self.reads)

    def fault(self, values: Mapping[str, Scalar]) -> str | None:
        """Return why an interest with these values cannot be executed, None if it can.

        A value of a parameter that the query has no longer does no harm.
        """
        for parameter in self.parameters:
            if parameter.name not in values:
                return f"parameter {parameter.name!r} is missing: it is of type {parameter.type}"
            if fault := parameter.check(values[parameter.name]):
                return fault
        return None

    def check(self, values: Mapping[str, Scalar]) -> None:
        """Check that an interest has exactly the declared parameters. Raises BadParameters."""
        for name in values:
            if name not in self.by_name:
                known = ", ".join(self.by_name) or "none"
                raise BadParameters(f"query {self.name!r} has no parameter {shortened(name)}: those are {known}")
        if fault := self.fault(values):
            raise BadParameters(fault)


_SETTINGS: dict[str, type | tuple[type, ...]] = {
    "sql": str,
    "on": str,
    "reads": list,
    "period_s": int,
    "parameters": dict,
    "delivery": str,
    "inline_bytes_max": int,
    "result_bytes_max": int,
    "retained_min": int,
    "keep_s": (int, float),
    "bind": dict,
    "version": int,
}

_PARAMETER_SETTINGS: dict[str, type | tuple[type, ...]] = {
    "type": str, "min": (int, float), "max": (int, float), "choices": list,
}  # fmt: skip


def read_query(name: str, definition: Mapping[str, Any]) -> StandingQuery:
    """Read a definition, as it is in TOML or in the catalog. Raises ConfigError, which names cause and cure."""
    where = f"query {name!r}"
    check_name(name, where)
    check_settings(definition, _SETTINGS, where)
    for each in ("sql", "on", "period_s"):
        if each not in definition:
            raise ConfigError(f"{where} needs {each}")
    given = {each: definition[each] for each in _SETTINGS if each in definition}
    given["parameters"] = _read_parameters(given.get("parameters", {}), where)
    given["reads"] = tuple(given.get("reads", ()))
    given["bind"] = tuple(sorted(given.get("bind", {}).items()))
    query = StandingQuery(name, **given)
    _check(query, where)
    return query


def write_query(query: StandingQuery) -> dict[str, Any]:
    """Return the definition as ``read_query`` reads it."""
    written: dict[str, Any] = {each: getattr(query, each) for each in _SETTINGS}
    written["parameters"] = {each.name: _write_parameter(each) for each in query.parameters}
    written["reads"] = list(query.reads)
    written["bind"] = dict(query.bind)
    return written


def canonical_values(params: str) -> dict[str, Scalar]:
    """Return the values in the canonical parameters of an interest."""
    values: dict[str, Scalar] = json.loads(params)
    return values


def _read_parameters(parameters: Mapping[str, Any], where: str) -> tuple[Parameter, ...]:
    if len(parameters) > PARAMETERS_MAX:
        raise ConfigError(f"{where} has {len(parameters)} parameters, and {PARAMETERS_MAX} are allowed")
    read: list[Parameter] = []
    for name, given in parameters.items():
        here = f"{where}, parameter {shortened(name)}"
        check_name(name, here)
        settings: Mapping[str, Any] = {"type": given} if isinstance(given, str) else given
        check_settings(settings, _PARAMETER_SETTINGS, here)
        if settings.get("type") not in PARAMETER_TYPES:
            found = f", not {shortened(settings['type'])}" if "type" in settings else ""
            raise ConfigError(f"{here}: type is one of {', '.join(PARAMETER_TYPES)}{found}")
        is_number = settings["type"] in ("int", "float")
        if not is_number and ("min" in settings or "max" in settings):
            raise ConfigError(f"{here}: only numbers have min and max")
        if not all(_is_finite(settings.get(each, 0)) for each in ("min", "max")):
            raise ConfigError(f"{here}: min and max are finite numbers")
        if "min" in settings and "max" in settings and settings["min"] > settings["max"]:
            raise ConfigError(f"{here}: no value fits, as min = {settings['min']} is more than max = {settings['max']}")
        parameter = Parameter(
            name, settings["type"], settings.get("min"), settings.get("max"), tuple(settings.get("choices", ()))
        )
        for choice in parameter.choices:
            if fault := Parameter(name, parameter.type, parameter.min, parameter.max).check(choice):
                raise ConfigError(f"{here}: choices: {fault}")
        read.append(parameter)
    return tuple(read)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float can hold
        return False


def _write_parameter(parameter: Parameter) -> dict[str, Any]:
    written: dict[str, Any] = {"type": parameter.type}
    if parameter.min is not None:
        written["min"] = parameter.min
    if parameter.max is not None:
        written["max"] = parameter.max
    if parameter.choices:
        written["choices"] = list(parameter.choices)
    return written


def _check(query: StandingQuery, where: str) -> None:
    """Check what the settings mean together. Raises ConfigError."""
    if not query.sql.strip() or len(query.sql) > SQL_CHARACTERS_MAX:
        raise ConfigError(f"{where}: sql is a SELECT of at most {SQL_CHARACTERS_MAX} characters")
    for dataset in query.datasets:
        check_name(dataset, f"{where}, dataset {shortened(dataset)}")
    if len(set(query.datasets)) < len(query.datasets):
        raise ConfigError(f"{where}: on and reads name each dataset once")
    if query.delivery not in DELIVERIES:
        raise ConfigError(f"{where}: delivery is one of {', '.join(DELIVERIES)}, not {query.delivery!r}")
    for name, claim in query.bind:
        if name not in query.by_name or query.by_name[name].type != "string" or claim != SUBJECT:
            raise ConfigError(f'{where}: bind is {{ PARAMETER = "{SUBJECT}" }}, with a parameter of type string')
    ranges = (
        ("period_s", 0, 86_400), ("inline_bytes_max", 0, RESULT_BYTES_MAX), ("result_bytes_max", 1024, 16 * 2**20),
        ("retained_min", 1, 10**7), ("keep_s", 1, 31_536_000),
    )  # fmt: skip
    for setting, least, most in ranges:
        if not least <= getattr(query, setting) <= most:
            raise ConfigError(f"{where}: {setting} is between {least} and {most}")
