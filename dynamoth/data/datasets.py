"""What a dataset is, and which records belong to it.

A *dataset* is a named collection of records (BAD, section 3). There are three kinds: of an ``append`` dataset every
record counts, of a ``keyed`` one the latest record of each key, and a ``static`` one is loaded as a whole.

A record is a JSON object. ``Dataset.normalize`` turns one into the bytes that are stored: exactly the declared fields,
each of its type. Everything else is refused with a reason, and nothing is guessed: a number in quotes is no number.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any, Literal, get_args

from dynamoth.errors import ConfigError, DynamothError
from dynamoth.protocol.wire import cut, shortened

Kind = Literal["append", "keyed", "static"]
FieldType = Literal["string", "int", "float", "bool", "timestamp"]

KINDS: tuple[Kind, ...] = get_args(Kind)
FIELD_TYPES: tuple[FieldType, ...] = get_args(FieldType)

DATASET_PREFIX = "d:"
"""Prefix of the names on which users and applications publish records: ``d:reports``."""

NAME = re.compile(r"[a-z][a-z0-9_]{0,47}")
NAME_WORDS = "up to 48 small letters, digits and '_', the first a letter"

DEAD_SUFFIX = "_dead"
"""Suffix of the dataset that has the refused records of another one."""

FIELDS_MAX = 200
PARTITIONS_MAX = 64
RECORD_BYTES_MAX = 65_536
"""Default of the longest record."""
SHOWN_RECORD_BYTES = 4096
"""A dead letter keeps this many bytes of the refused record."""

INT_MIN = -(2**63)
INT_MAX = 2**63 - 1
SUBJECT = "$sub"
"""In ``bind``: the subject of the user's token."""


class BadRecord(DynamothError):
    """Raised when a record does not belong to its dataset; the message is the reason."""

    code = "bad-record"


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a dataset. A record may lack an optional one, or have null there."""

    name: str
    type: FieldType
    is_optional: bool = False


@dataclass(frozen=True)
class Dataset:
    """The definition of a dataset. Made by ``read_dataset``."""

    name: str
    kind: Kind
    fields: tuple[Field, ...]
    #: Of a keyed dataset: the field whose latest record counts.
    key: str = ""
    #: A field that identifies a record: one that comes again within ``duplicate_s`` is not stored again. Empty: none.
    id: str = ""
    #: In seconds; 0: no record is a duplicate.
    duplicate_s: float = 3600.0
    #: A field with the time of what happened. Empty: none.
    time: str = ""
    #: A record whose ``time`` is longer ago than this is refused, in seconds; 0: none is.
    late_s: float = 0.0
    #: Streams over which records are spread: by key, by id, or in turn.
    partitions: int = 2
    record_bytes_max: int = RECORD_BYTES_MAX
    #: Records of one partition that wait at Redis to be archived; more are refused until the archive has caught up.
    waiting_max: int = 500_000
    #: Fields that have to equal a claim of the user's token, for records that users publish: ``{"user": "$sub"}``.
    bind: tuple[tuple[str, str], ...] = ()
    #: Types of former fields that were left out, by name: stored records may have them.
    left_out: tuple[tuple[str, str], ...] = ()
    #: Of a static dataset: counts how often it was loaded. 0: never.
    loaded: int = 0
    #: Counts the changes of the definition, from 1.
    version: int = 1

    @property
    def stream(self) -> str:
        """What the names of its partitions begin with: each load of a static dataset has partitions of its own."""
        return f"{self.name}@{self.loaded}" if self.kind == "static" else self.name

    @cached_property
    def by_name(self) -> dict[str, Field]:
        """The fields by name."""
        return {field.name: field for field in self.fields}

    def normalize(self, record: bytes, now: float, subject: str | None = None) -> tuple[bytes, str, str]:
        """Check a record; return its stored form, its key or id by which its partition is chosen, and its id.

        The last two are empty where the dataset has none.

        Args:
            record: a JSON object in UTF-8, no key of which is there twice.
            now: Unix time, for records that are late.
            subject: of the token of the user who publishes; None for a backend, which may publish for anybody.

        Raises BadRecord.

        """
        values = self._parsed(record)
        stored: dict[str, Any] = {}
        for field in self.fields:
            value = values.pop(field.name, None)
            if value is not None:
                stored[field.name] = _READERS[field.type](field.name, value)
            elif not field.is_optional:
                unknown = [name for name in values if name not in self.by_name]
                misspelt = f", and the dataset has no field {shortened(min(unknown))}" if unknown else ""
                raise BadRecord(f"field {field.name!r} is missing{misspelt}")
        if values:
            raise BadRecord(f"the dataset has no field {shortened(min(values))}")
        if subject is not None:
            self._check_bound(stored, subject)
        if self.time and self.late_s and (at := stored.get(self.time)) is not None and at / 1e6 < now - self.late_s:
            raise BadRecord(f"it is {now - at / 1e6:.0f} s late, and {self.late_s:.0f} s are allowed")
        id_ = _text_of(stored.get(self.id)) if self.id else ""
        if self.id and not id_:
            raise BadRecord(f"field {self.id!r} is empty, and has to identify the record")
        place = _text_of(stored[self.key]) if self.kind == "keyed" else id_
        text = json.dumps(stored, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        try:
            return text.encode(), place, id_
        except UnicodeEncodeError:
            raise BadRecord("text has to be valid Unicode") from None

    def _parsed(self, record: bytes) -> dict[str, Any]:
        if len(record) > self.record_bytes_max:
            raise BadRecord(f"it has {len(record)} bytes, and {self.record_bytes_max} are allowed")
        try:
            values: Any = json.loads(
                record.decode(), parse_constant=_refuse_constant, object_pairs_hook=_without_duplicates
            )
        except (ValueError, RecursionError) as error:
            raise BadRecord(f"it is no JSON: {error!s:.100}") from None
        if not isinstance(values, dict):
            raise BadRecord(f"a JSON object expected, not {shortened(values)}")
        return values  # pyright: ignore[reportUnknownVariableType]

    def _check_bound(self, stored: Mapping[str, Any], subject: str) -> None:
        for name, claim in self.bind:
            if claim == SUBJECT and stored.get(name) != subject:
                raise BadRecord(f"field {name!r} has to be the subject of the token")


def dead_letters(name: str) -> Dataset:
    """Return the definition of the dataset that has the refused records of another one."""
    fields = (
        Field("reason", "string"),
        Field("source", "string"),
        Field("record", "string"),
        Field("at", "timestamp"),
    )
    return Dataset(name + DEAD_SUFFIX, "append", fields, partitions=1, record_bytes_max=4 * SHOWN_RECORD_BYTES)


def dead_letter(record: bytes, reason: str, source: str, now: float) -> bytes:
    """Return the stored form of a dead letter: reason and source, and the beginning of the refused record."""
    values = {
        "reason": cut(reason, 500),
        "source": cut(source, 200),
        "record": record[:SHOWN_RECORD_BYTES].decode(errors="replace"),
        "at": round(now * 1e6),
    }
    return json.dumps(values, separators=(",", ":")).encode()


# Definitions.

_SETTINGS: dict[str, type | tuple[type, ...]] = {
    "kind": str,
    "fields": dict,
    "key": str,
    "id": str,
    "duplicate_s": (int, float),
    "time": str,
    "late_s": (int, float),
    "partitions": int,
    "record_bytes_max": int,
    "waiting_max": int,
    "bind": dict,
    "left_out": dict,
    "loaded": int,
    "version": int,
}


_OWN_SETTINGS = ("left_out", "loaded", "version")
"""Those that the program sets itself: stored definitions have them."""

_TABLES = ("bind", "left_out")
"""Those that are tables in definitions, and sorted pairs in a ``Dataset``."""


def read_dataset(name: str, definition: Mapping[str, Any]) -> Dataset:
    """Read a definition, as it is in TOML or in the catalog. Raises ConfigError, which names cause and cure."""
    where = f"dataset {name!r}"
    check_name(name, where)
    if name.endswith(DEAD_SUFFIX):
        raise ConfigError(f"{where}: names that end with {DEAD_SUFFIX} are those of refused records: choose another")
    check_settings(definition, _SETTINGS, where)
    kind = definition.get("kind")
    if kind not in KINDS:
        raise ConfigError(f"{where}: kind is one of {', '.join(KINDS)}, not {kind!r}")
    dataset = Dataset(
        name,
        kind,
        _read_fields(definition.get("fields"), where),
        **{
            each: definition[each]
            for each in _SETTINGS
            if each in definition and each not in ("kind", "fields", *_TABLES)
        },
        bind=tuple(sorted(definition.get("bind", {}).items())),
        left_out=tuple(sorted(definition.get("left_out", {}).items())),
    )
    _check(dataset, where)
    return dataset


def write_dataset(dataset: Dataset) -> dict[str, Any]:
    """Return the definition as ``read_dataset`` reads it."""
    written: dict[str, Any] = {each: getattr(dataset, each) for each in _SETTINGS}
    written["fields"] = {field.name: field.type + "?" * field.is_optional for field in dataset.fields}
    written |= {each: dict(getattr(dataset, each)) for each in _TABLES}
    return written


def check_name(name: object, where: str) -> None:
    """Check the name of a dataset, field, query or parameter: SQL can use it as it is. Raises ConfigError."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ConfigError(f"{where}: a name has {NAME_WORDS}")


def check_settings(definition: object, known: Mapping[str, type | tuple[type, ...]], where: str) -> None:
    """Check the names and types of settings. Raises ConfigError."""
    if not isinstance(definition, Mapping):
        raise ConfigError(f"{where}: a table expected, not {shortened(definition)}")
    for each, value in definition.items():  # pyright: ignore[reportUnknownVariableType]
        if each not in known:
            offered = ", ".join(setting for setting in known if setting not in _OWN_SETTINGS)
            raise ConfigError(f"{where} has no setting {shortened(each)}: those are {offered}")
        type_ = known[each]
        if not isinstance(value, type_) or (isinstance(value, bool) and type_ is not bool):
            expected = {str: "text", int: "a whole number", dict: "a table", list: "a list", bool: "true or false"}
            name = "a number" if isinstance(type_, tuple) else expected[type_]
            raise ConfigError(f"{where}: {each} is {name}, not {shortened(value)}")


def _read_fields(fields: Any, where: str) -> tuple[Field, ...]:
    if not fields:
        raise ConfigError(f"{where} has no fields: give them as fields = {{ id = 'string', at = 'timestamp' }}")
    if len(fields) > FIELDS_MAX:
        raise ConfigError(f"{where} has {len(fields)} fields, and {FIELDS_MAX} are allowed")
    read: list[Field] = []
    for name, type_ in fields.items():
        check_name(name, f"{where}, field {shortened(name)}")
        plain = type_.removesuffix("?") if isinstance(type_, str) else type_
        if plain not in FIELD_TYPES:
            raise ConfigError(
                f"{where}: field {name!r} has the type {shortened(type_)}; types are {', '.join(FIELD_TYPES)}, with '?'"
                " behind it for a field that may be missing"
            )
        read.append(Field(name, plain, type_.endswith("?")))
    return tuple(read)


def _check(dataset: Dataset, where: str) -> None:
    """Check what the settings mean together. Raises ConfigError."""
    fields = dataset.by_name
    for setting, types in (("key", ("string", "int")), ("id", ("string", "int")), ("time", ("timestamp",))):
        name = getattr(dataset, setting)
        if name and (name not in fields or fields[name].type not in types or fields[name].is_optional):
            raise ConfigError(
                f"{where}: {setting} = {name!r} has to be a field that is never missing: {' or '.join(types)}"
            )
    if (dataset.kind == "keyed") != bool(dataset.key):
        raise ConfigError(f"{where}: a keyed dataset has a key, and no other one has")
    if dataset.late_s and not dataset.time:
        raise ConfigError(f"{where}: late_s needs time, the field that says when something happened")
    if dataset.kind == "keyed" and dataset.id:
        raise ConfigError(f"{where}: a keyed dataset has a key and no id: a record that comes again changes nothing")
    for name, claim in dataset.bind:
        if name not in fields or fields[name].type != "string" or claim != SUBJECT:
            raise ConfigError(f'{where}: bind is {{ FIELD = "{SUBJECT}" }}, with a field of type string')
    ranges = (("partitions", 1, PARTITIONS_MAX), ("record_bytes_max", 64, 1_048_576), ("waiting_max", 1000, 10**8))
    for setting, least, most in ranges:
        if not least <= getattr(dataset, setting) <= most:
            raise ConfigError(f"{where}: {setting} is between {least} and {most}")
    for setting in ("duplicate_s", "late_s"):
        if not 0 <= getattr(dataset, setting) <= 31_536_000:
            raise ConfigError(f"{where}: {setting} is between 0 and a year")


# Values.


def _read_string(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise BadRecord(f"field {name!r} is text, not {shortened(value)}")
    return value


def _read_int(name: str, value: object) -> int:
    if type(value) is not int or not INT_MIN <= value <= INT_MAX:
        raise BadRecord(f"field {name!r} is a whole number of 64 bits, not {shortened(value)}")
    return value


def _read_float(name: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise BadRecord(f"field {name!r} is a number, not {shortened(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise BadRecord(f"field {name!r} is not a finite number")
    return number


def _read_bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise BadRecord(f"field {name!r} is true or false, not {shortened(value)}")
    return value


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_TIME_MIN = (datetime.min.replace(tzinfo=UTC) - _EPOCH) // _MICROSECOND
_TIME_MAX = (datetime.max.replace(tzinfo=UTC) - _EPOCH) // _MICROSECOND


def read_time(value: object) -> int | None:
    """Return microseconds since 1970 of a time in ISO 8601 with its zone, or of Unix seconds; None for other values.

    Times are in the years 1 to 9999 of UTC.
    """
    try:
        if isinstance(value, str):
            at = datetime.fromisoformat(value)
            if at.tzinfo is None:
                return None
            microseconds = (at - _EPOCH) // _MICROSECOND
        elif isinstance(value, int | float) and not isinstance(value, bool):
            microseconds = round(value * 1_000_000)
        else:
            return None
    except (ValueError, OverflowError):
        return None
    return microseconds if _TIME_MIN <= microseconds <= _TIME_MAX else None


def _read_timestamp(name: str, value: object) -> int:
    at = read_time(value)
    if at is None:
        raise BadRecord(
            f"field {name!r} is a time in ISO 8601 with its zone (2026-01-31T12:00:00Z) or in Unix seconds, in"
            f" the years 1 to 9999 of UTC, not {shortened(value)}"
        )
    return at


_READERS: dict[FieldType, Callable[[str, object], Any]] = {
    "string": _read_string,
    "int": _read_int,
    "float": _read_float,
    "bool": _read_bool,
    "timestamp": _read_timestamp,
}


def _text_of(value: object) -> str:
    return "" if value is None else str(value)


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    if len(values) < len(pairs):
        counts = Counter(name for name, _ in pairs)  # of many names: whoever sends them holds up nobody
        twice = next(name for name, count in counts.items() if count > 1)
        raise BadRecord(f"it has {shortened(twice)} twice")
    return values


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not a number of JSON")
