"""Closes, in a forked child, the connections that it has inherited."""

from __future__ import annotations

import os
from collections.abc import Iterable


def point_to_nowhere(numbers: Iterable[int]) -> None:
    """Close inherited descriptors, without a word to servers or to the parent; negative ones are closed already.

    They are made to point to nowhere, as the objects that have them would close their numbers again.
    """
    inherited = {number for number in numbers if number >= 0}
    if not inherited:
        return
    try:
        nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # the process has reached its limit of open files, so one of these has to make room
        os.close(min(inherited))
        nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for number in inherited - {nowhere}:
        os.dup2(nowhere, number, inheritable=False)
    if nowhere not in inherited:
        os.close(nowhere)
