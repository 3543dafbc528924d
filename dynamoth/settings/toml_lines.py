"""Finds the line of each key in a TOML document, which ``tomllib`` does not show.

``tomllib`` has checked before that the document is valid. So this reader parses only as much as it needs to tell keys
from values: headers, dotted and quoted keys, strings of all four kinds, arrays and inline tables.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping

Path = tuple[str | int, ...]
"""The keys that lead to a value, and the indices of arrays (from 0): ``("cluster", "servers", 1, "url")``."""

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_STRING = re.compile(
    r'"{3}(?:\\.|[^\\])*?"{3,5}' r"|'{3}.*?'{3,5}" r'|"(?:\\.|[^"\\\n])*"' r"|'[^'\n]*'",
    re.DOTALL,
)
_SCALAR = re.compile(r"[^,\]}\n#]+")


def lines_of(text: str) -> Mapping[Path, int]:
    """Return the line, from 1, on which each key, table and item of an array begins."""
    return _Reader(text).read()


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


class _Reader:
    """Goes through a document once."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._lines: dict[Path, int] = {}
        #: How many tables each array of tables has so far.
        self._tables: dict[Path, int] = {}

    def read(self) -> Mapping[Path, int]:
        table: Path = ()
        while self._skip_blank():
            start = self._at
            if self._take("[["):
                table = self._begin_item(self._key(), start)
                self._take("]]")
            elif self._take("["):
                table = self._inside(self._key())
                self._note(table, start)
                self._take("]")
            else:
                self._pair(table)
        return self._lines

    def _begin_item(self, key: Path, start: int) -> Path:
        array = self._inside(key)
        number = self._tables.get(array, 0)
        self._tables[array] = number + 1
        self._note(array, start)
        self._note((*array, number), start)
        return (*array, number)

    def _inside(self, key: Path) -> Path:
        """Return the path of a header: it goes through the latest item of each array of tables."""
        path: Path = ()
        for name in key[:-1]:
            path = (*path, name)
            if path in self._tables:
                path = (*path, self._tables[path] - 1)
        return (*path, *key[-1:])

    def _pair(self, table: Path) -> None:
        start = self._at
        key = self._key()
        for length in range(1, len(key) + 1):
            self._note((*table, *key[:length]), start)
        self._take("=")
        self._value((*table, *key))

    def _key(self) -> Path:
        """Read a dotted key."""
        names: list[str | int] = []
        while True:
            self._skip_blank()
            if match := _STRING.match(self._text, self._at):
                names.append(_unquoted(match[0]))
            else:
                match = _BARE.match(self._text, self._at)
                assert match is not None, f"no key at {self._text[self._at : self._at + 40]!r} of a valid document"
                names.append(match[0])
            self._at = match.end()
            self._skip_blank()
            if not self._take("."):
                return tuple(names)

    def _value(self, path: Path) -> None:
        self._skip_blank()
        if self._take("["):
            number = 0
            while not self._ends("]"):
                self._note((*path, number), self._at)
                self._value((*path, number))
                number += 1
        elif self._take("{"):
            while not self._ends("}"):
                self._pair(path)
        else:
            match = _STRING.match(self._text, self._at) or _SCALAR.match(self._text, self._at)
            assert match is not None, f"no value at {self._text[self._at : self._at + 40]!r} of a valid document"
            self._at = match.end()

    def _ends(self, bracket: str) -> bool:
        """Pass a comma, and the bracket if it comes; tell whether it does."""
        self._skip_blank()
        if self._take(","):
            self._skip_blank()
        return self._take(bracket)

    def _take(self, token: str) -> bool:
        self._skip_spaces()
        if not self._text.startswith(token, self._at):
            return False
        self._at += len(token)
        return True

    def _skip_spaces(self) -> None:
        while self._text[self._at : self._at + 1] in (" ", "\t"):
            self._at += 1

    def _skip_blank(self) -> bool:
        """Pass spaces, ends of lines and comments; tell whether anything follows."""
        match = _BLANK.match(self._text, self._at)
        self._at = match.end() if match else self._at
        return self._at < len(self._text)

    def _note(self, path: Path, start: int) -> None:
        if path not in self._lines:
            self._lines[path] = self._text.count("\n", 0, start) + 1


def _unquoted(text: str) -> str:
    if text.startswith("'"):
        return text[1:-1]
    try:
        return str(ast.literal_eval(text))  # TOML's escapes in basic strings are among Python's
    except (SyntaxError, ValueError):
        return text[1:-1]
