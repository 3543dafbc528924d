"""Parses numbers of the command line, with errors that show the text, and formats numbers and names for people."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 channel``, ``2 channels``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def duration(seconds: float) -> str:
    """Return a length of time for people: ``95 s``, ``12 min``, ``5 h``, ``3 days``."""
    for unit, size in ((" days", 86_400), (" h", 3600), (" min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f} s"


def channel_name(channel: bytes) -> str:
    """Return the name of a channel, or a pattern, for people. Bytes that are no UTF-8 are escaped."""
    return channel.decode(errors="backslashreplace")


def count_up_to(maximum: int) -> Callable[[str], int]:
    """Return a function that reads a number from 1 to ``maximum``.

    It raises ArgumentTypeError, which argparse shows with the name of the option.
    """

    def read(text: str) -> int:
        try:
            count = int(text)
        except ValueError:
            raise ArgumentTypeError(f"a whole number expected, not {text!r}") from None
        if not 1 <= count <= maximum:
            raise ArgumentTypeError(f"a number from 1 to {maximum} expected, not {text}")
        return count

    return read


def number(text: str) -> float:
    """Read a number. Raises ArgumentTypeError, which argparse shows with the name of the option."""
    try:
        return float(text)
    except ValueError:
        raise ArgumentTypeError(f"a number expected, not {text!r}") from None
