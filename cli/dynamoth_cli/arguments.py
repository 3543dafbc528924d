"""The parser of a command's arguments."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn, cast


class CommandParser(argparse.ArgumentParser):
    """A parser that names a misspelt flag, and the flag that is nearest to it.

    Where a command has actions, argparse takes the value of an unknown flag for the action, and complains about that.
    """

    #: The first unknown flag before the action, among the arguments that are parsed; empty for none.
    _unknown = ""
    #: The arguments that are parsed.
    _given: Sequence[str] = ()

    def parse_known_args(  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        """Parse arguments; see argparse."""
        self._given = given = list(sys.argv[1:] if args is None else args)
        self._unknown = next(self._unknown_flags(given), "")
        return super().parse_known_args(given, namespace)

    def _actions_by_name(self) -> dict[str, CommandParser]:
        choices: list[Any] = [action.choices for action in self._actions]
        parsers = [cast("dict[str, CommandParser]", each) for each in choices if isinstance(each, dict)]
        return {name: parser for each in parsers for name, parser in each.items()}

    def _unknown_flags(self, given: Iterable[str]) -> Iterator[str]:
        actions = self._actions_by_name()
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
        super().error(message + self._hint(message))

    def _hint(self, message: str) -> str:
        _, found, unknown = message.partition("unrecognized arguments: ")
        if not found or not unknown.startswith("--"):
            return ""
        near = difflib.get_close_matches(unknown.split()[0].partition("=")[0], self._flags(), n=1)
        return f": did you mean {near[0]}?" if near else ""

    def _flags(self) -> set[str]:
        """Return the flags of this command, and of the action that is given."""
        actions = self._actions_by_name()
        action = next((actions[word] for word in self._given if word in actions), None)
        return {*self._option_string_actions, *(action._flags() if action else ())}
