"""The parser of a command's arguments."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn, cast


class CommandParser(argparse.ArgumentParser):
    """A parser that names a misspelt flag.

    Where a command has actions, argparse takes the value of an unknown flag for the action, and complains about that.
    """

    #: The first unknown flag before the action, among the arguments that are parsed; empty for none.
    _unknown = ""

    def parse_known_args(  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        """Parse arguments; see argparse."""
        given = list(sys.argv[1:] if args is None else args)
        self._unknown = next(self._unknown_flags(given), "")
        return super().parse_known_args(given, namespace)

    def _unknown_flags(self, given: Iterable[str]) -> Iterator[str]:
        choices: list[Any] = [action.choices for action in self._actions]
        actions: set[str] = {
            name for each in choices if isinstance(each, dict) for name in cast("dict[str, Any]", each)
        }
        for word in given:
            if word in actions or word == "--":
                return
            flag = word.partition("=")[0]
            if flag.startswith("--") and flag not in self._option_string_actions:
                yield flag

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and exit."""
        if self._unknown and "invalid choice" in message:
            message = f"unrecognized arguments: {self._unknown}"
        super().error(message)
