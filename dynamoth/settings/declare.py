"""Declares settings, and parses and checks their values. The settings themselves are in ``sections.py``."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, TypeVar

from dynamoth.errors import ConfigError

_T = TypeVar("_T")

ENVIRONMENT_PREFIX = "DYNAMOTH_"

SECONDS_MAX = 1_000_000
"""Bound of every setting in seconds that has no other: eleven days, far below what overflows a timer."""

BYTES_MAX = 10**15
"""Bound of every setting in bytes that has no other: a petabyte, far below what overflows a division."""

SHARED_SECTION = "cluster"
"""The section whose name environment variables and flags leave out, because every process has its settings."""


_UPPER: Mapping[str, float] = MappingProxyType({"s": SECONDS_MAX, "bytes": BYTES_MAX})


@dataclass(frozen=True, slots=True)
class Setting:
    """The declaration of one setting, apart from its name and default."""

    meaning: str
    unit: str = ""
    #: The smallest value that is accepted, None for no bound.
    minimum: float | None = None
    #: Values must be larger than this, None for no bound.
    above: float | None = None
    maximum: float | None = None
    #: The values that are accepted, empty for any.
    choices: tuple[str, ...] = ()
    #: A secret: it is never shown, and has no flag, because a process list shows flags.
    secret: bool = False

    @property
    def upper(self) -> float | None:
        """The largest accepted value, None for no bound."""
        return _UPPER.get(self.unit) if self.maximum is None else self.maximum

    @property
    def bounds(self) -> str:
        """The bounds and the unit, in words."""
        up_to = "to" if self.above is None else "up to"
        limits = (("from", self.minimum), ("more than", self.above), (up_to, self.upper))
        words = [f"{word} {limit:.16g}" for word, limit in limits if limit is not None]
        return " ".join([*words, f"({self.unit})"] if self.unit else words)

    def admits(self, value: Any) -> bool:
        """Tell whether a value of the right type is accepted."""
        if isinstance(value, str):
            return not self.choices or value in self.choices
        return (
            (isinstance(value, int) or math.isfinite(value))
            and (self.minimum is None or value >= self.minimum)
            and (self.above is None or value > self.above)
            and (self.upper is None or value <= self.upper)
        )


def setting(default: _T, meaning: str, **options: Any) -> _T:
    """Declare a setting: a dataclass field with a :class:`Setting`, of which ``options`` are the fields."""
    declared: _T = field(default=default, metadata={"setting": Setting(meaning, **options)})
    return declared


def required(meaning: str, **options: Any) -> Any:
    """Declare a value without a default, for options that are no settings; see :func:`setting`."""
    return field(metadata={"setting": Setting(meaning, **options)})


@dataclass(frozen=True, slots=True)
class Declared:
    """A setting with its section, name and default."""

    section: str
    name: str
    default: Any
    setting: Setting

    @property
    def key(self) -> str:
        """Its name in messages: ``section.name``."""
        return f"{self.section}.{self.name}"

    @property
    def variable(self) -> str:
        """Its environment variable."""
        words = (self.name,) if self.section == SHARED_SECTION else (self.section, self.name)
        return ENVIRONMENT_PREFIX + "_".join(words).upper()

    def flag(self, own_section: str) -> str:
        """Its flag, for a command whose own settings are ``own_section`` and go without the name of the section."""
        words = (self.name,) if self.section in (SHARED_SECTION, own_section) else (self.section, self.name)
        return "--" + "-".join(words).replace("_", "-")

    @property
    def accepted(self) -> str:
        """The accepted values, in words."""
        if self.setting.choices:
            return "one of " + ", ".join(self.setting.choices)
        if isinstance(self.default, bool):
            return "true or false"
        if isinstance(self.default, int | float):
            kind = "a whole number" if isinstance(self.default, int) else "a number"
            return f"{kind} {self.setting.bounds}".strip()
        if self.key == "cluster.compatibility":
            return f"PATTERN=SERVER, separated by spaces (in TOML: [[{self.key}]] with pattern, server and plain)"
        if isinstance(self.default, tuple):
            return f"ID=URL, separated by spaces (in TOML: [[{self.key}]] tables with id and url)"
        return "text"

    @property
    def help(self) -> str:
        """Meaning, accepted values, default and environment variable: for ``--help``."""
        accepted = "" if self.accepted == "text" else f"; {self.accepted}"
        default = "" if self.default in ("", ()) else f"; default {to_text(self.default)}"
        return f"{self.setting.meaning}{accepted}{default} [{self.variable}]"

    def parse(self, raw: Any, place: str) -> Any:
        """Read a value from text or TOML. Raises ConfigError."""
        value = _from_text(self.default, raw) if isinstance(raw, str) else _from_toml(self.default, raw)
        if value is None or not self.setting.admits(value):
            raise fault(self.key, "***" if self.setting.secret else raw, self.accepted, place)
        return value


def check_ranges(options: Any) -> None:
    """Check each field of a dataclass that :func:`setting` declares; None is accepted. Raises ConfigError."""
    for item in fields(options):
        value = getattr(options, item.name)
        declared: Setting | None = item.metadata.get("setting")
        if declared is not None and isinstance(value, int | float) and not declared.admits(value):
            raise ConfigError(f"{item.name} must be a number {declared.bounds}, not {value}")


def values_of(declaring: type[Any], settings: Any) -> dict[str, Any]:
    """Return the values in ``settings`` of the fields that the dataclass ``declaring`` has, by name."""
    return {item.name: getattr(settings, item.name) for item in fields(declaring)}


def fault(key: str, found: object, accepted: str, place: str) -> ConfigError:
    """Return the error for a value that is not accepted; what was ``found`` is shown."""
    try:
        shown = f"{found!r:.200}"
    except ValueError:  # Python writes no whole number with more than 4300 digits
        shown = "a number with thousands of digits"
    return ConfigError(f"{key}: {accepted} expected, not {shown} (from {place})")


def one_of(found: str, known: Iterable[str]) -> str:
    """Suggest the known name that is nearest to ``found``, or list all where none is near."""
    names = list(known)
    nearest = difflib.get_close_matches(found, names, n=1, cutoff=0.5)
    return f"did you mean {nearest[0]}?" if nearest else f"known are {', '.join(names)}"


def to_text(value: Any, *, quoted: bool = False) -> str:
    """Return a value as text for a flag or, ``quoted``, for TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if not quoted and isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML lets no DEL stand as it is


_BOOLEANS = MappingProxyType(
    {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
)


def _from_text(default: Any, text: str) -> Any:
    """Read a value of the type of ``default``; None when it is none."""
    try:
        if isinstance(default, bool):
            return _BOOLEANS.get(text.strip().lower())
        if isinstance(default, int):
            return int(text)
        if isinstance(default, float):
            return float(text)
    except ValueError:
        return None
    return text


def _from_toml(default: Any, value: Any) -> Any:
    """Return a TOML value that is not text; None when it has not the type of ``default``."""
    if isinstance(default, bool) or isinstance(value, bool):
        return value if isinstance(default, bool) and isinstance(value, bool) else None
    if isinstance(default, float) and isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:  # a whole number with hundreds of digits
            return None
    return value if isinstance(default, int) and isinstance(value, int) else None
