"""Closes, in a forked child, the connections that it has inherited."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable


def point_to_nowhere(numbers: Iterable[int]) -> None:
    """Close inherited descriptors, without a word to servers or to the parent; negative ones are closed already.

    They are made to point to nowhere, as the objects that have them would close their numbers again. All are closed
    first: the child of a process that has reached its limit of open files has none that is free.
    """
    inherited = {number for number in numbers if number >= 0}
    if not inherited:
        return
    for number in inherited:
        with contextlib.suppress(OSError):  # it is closed already
            os.close(number)
    nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for number in inherited - {nowhere}:
        os.dup2(nowhere, number, inheritable=False)
    if nowhere not in inherited:
        os.close(nowhere)
