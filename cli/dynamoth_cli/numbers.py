"""Parses numbers of the command line, with errors that show the text, and formats numbers for people."""

from __future__ import annotations

from argparse import ArgumentTypeError


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 channel``, ``2 channels``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def whole_number(text: str) -> int:
    """Read a whole number. Raises ArgumentTypeError, which argparse shows with the name of the option."""
    try:
        return int(text)
    except ValueError:
        raise ArgumentTypeError(f"a whole number expected, not {text!r}") from None


def number(text: str) -> float:
    """Read a number. Raises ArgumentTypeError, which argparse shows with the name of the option."""
    try:
        return float(text)
    except ValueError:
        raise ArgumentTypeError(f"a number expected, not {text!r}") from None
