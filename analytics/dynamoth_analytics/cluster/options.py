"""Reads the options of the Spark source and of the sink. Unknown ones are refused: Spark itself accepts any name."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from dynamoth.errors import ConfigError
from dynamoth.protocol.wire import shortened
from dynamoth.settings.declare import one_of


def check_names(options: Mapping[str, str], known: Collection[str], what: str) -> None:
    """Check the names of options, which Spark passes on in small letters. Raises ConfigError."""
    for name in options:
        if name.lower() not in known:
            raise ConfigError(f"the {what} has no option {shortened(name)}: {one_of(name.lower(), known)}")


def read_flag(options: Mapping[str, str], name: str, *, default: bool) -> bool:
    """Return an option that is ``true`` or ``false``. Raises ConfigError."""
    text = options.get(name, str(default)).lower()
    if text not in ("true", "false"):
        raise ConfigError(f"option {name} is true or false, not {shortened(text)}")
    return text == "true"


def read_offsets(options: Mapping[str, str], name: str) -> dict[str, int] | None:
    """Return offsets by partition; None: the option is missing or empty. Raises ConfigError."""
    if not (text := options.get(name)):
        return None
    try:
        value: Any = json.loads(text)
    except ValueError:
        value = None
    offsets = value.get("offsets") if isinstance(value, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    if not isinstance(offsets, dict) or any(type(each) is not int for each in offsets.values()):  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        raise ConfigError(f'option {name} has offsets as {{"offsets": {{"reports/0": 17}}}}, not {shortened(text)}')
    return offsets  # pyright: ignore[reportUnknownVariableType]
