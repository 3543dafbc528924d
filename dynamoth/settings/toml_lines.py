"""Finds the line of each key in a TOML document, which ``tomllib`` does not show.

A document is a sequence of statements, a header or a key with its value, each of which ``tomllib`` can read alone. One
that goes over several lines cannot be read before its last line; where it is an array, the items so far can.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

Path = tuple[str | int, ...]
"""The keys that lead to a value, and the indices of arrays (from 0): ``("cluster", "servers", 1, "url")``."""


def lines_of(text: str) -> Mapping[Path, int]:
    """Return the line, from 1, on which each key and table begins, and each item of an array that goes over lines."""
    found: dict[Path, int] = {}
    counts: Counter[Path] = Counter()
    table: Path = ()
    begin, line = 0, 1
    lines = text.replace("\r\n", "\n").split("\n")
    for end in range(1, len(lines) + 1):
        statement = "\n".join(lines[begin:end])
        complete = _parsed(statement)
        document = _parsed(f"{statement}\n]") if complete is None else complete
        if document is None:
            continue
        if statement.lstrip().startswith("["):
            table = _header(document, counts)
            for path in (table, table[:-1]) if isinstance(table[-1], int) else (table,):
                found.setdefault(path, line)
        else:
            for path in _parts(document, table):
                found.setdefault(path, line)
        line = end + 1
        if complete is not None:
            begin = end
    return found


class Place(str):
    """The place of a value in a file, in words; :meth:`at` gives the place of a part of the value."""

    _file: str
    _lines: Mapping[Path, int]
    _path: Path

    def __new__(cls, file: str, lines: Mapping[Path, int], *path: str | int) -> Place:
        """Describe the place of the value at ``path``, or of the nearest one around it that has a line."""
        known = next((path[:end] for end in range(len(path), 0, -1) if path[:end] in lines), ())
        line = f" line {lines[known]}" if known else ""
        section = f", section [{path[0]}]" if len(path) > 1 else ""
        place = super().__new__(cls, f"{file}{line}{section}")
        place._file, place._lines, place._path = file, lines, path
        return place

    def at(self, *path: str | int) -> Place:
        """Return the place of an item, or of a key of it."""
        return Place(self._file, self._lines, *self._path, *path)


def place_at(place: str, *path: str | int) -> str:
    """Return the place of a part of a value. Flags and environment variables have no lines."""
    return place.at(*path) if isinstance(place, Place) else place


def _parsed(statement: str) -> dict[str, Any] | None:
    try:
        return tomllib.loads(statement)
    except tomllib.TOMLDecodeError:
        return None


def _items(value: Any) -> Iterable[tuple[str | int, Any]]:
    """Return the parts of a table or an array, with their names."""
    if isinstance(value, dict):
        return cast("dict[str | int, Any]", value).items()
    return enumerate(value) if isinstance(value, list) else ()  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]


def _header(document: Any, counts: Counter[Path]) -> Path:
    """Return the path of a header: it goes through the latest item of each array of tables, or adds one in the end."""
    path: list[str | int] = []
    value = document
    while value:
        [(name, value)] = _items(value)
        path.append(name)
        if isinstance(value, list):
            counts[tuple(path)] += 1
            value = None
        if (count := counts[tuple(path)]) > 0:
            path.append(count - 1)
    return tuple(path)


def _parts(value: Any, path: Path) -> Iterator[Path]:
    """Yield the paths of everything in a value."""
    for name, part in _items(value):
        yield (*path, name)
        yield from _parts(part, (*path, name))
