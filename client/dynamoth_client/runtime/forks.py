"""Closes, in a forked child, the connections that it has inherited."""

from __future__ import annotations

import os
from collections.abc import Iterable


def point_to_nowhere(numbers: Iterable[int]) -> None:
    """Close inherited descriptors, without a word to servers or to the parent; negative ones are closed already.

    They are made to point to nowhere, as the objects that have them would close their numbers again.
    """
    nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        for number in numbers:
            if number >= 0:
                os.dup2(nowhere, number, inheritable=False)
    finally:
        os.close(nowhere)
