"""Decides when a silent connection is checked by a PING, and when it is given up.

Theory of operation
-------------------
:class:`Liveness` is pure: the connection asks :meth:`Liveness.look`, and asks again after the time that it returns.
After ``interval_s`` without a byte from the server a PING is due; ``timeout_s`` later, without an answer, the
connection is lost.

The answer to a PING comes behind everything that was sent before, so it may take as long as the network takes to carry
that. While the server's side acknowledges bytes ahead of the PING, the timeout begins again. Only bytes ahead of it
count as progress. The PING itself, and what is sent behind it, prove nothing: sending them moves bytes from one of our
own buffers into another.
"""

from __future__ import annotations

import sys
from enum import Enum, auto

ANSWER_GRACE_S = 0.05
"""After a pause of the whole process, timers may run before the socket is read: the answer may be here."""

LOOKS_PER_TIMEOUT = 8
"""How often progress is looked for within a timeout. Progress is seen late by one such step at most, and a connection
that was cut while it made progress is lost that much later."""


class Verdict(Enum):
    """The next step for a silent connection."""

    WAIT = auto()
    PING = auto()
    LOST = auto()


class Liveness:
    """Watches the silence of one connection."""

    __slots__ = (
        "_ahead_bytes",
        "_grace_given",
        "_interval_s",
        "_pinged_at",
        "_progress_at",
        "_taken_bytes",
        "_timeout_s",
        "heard_at",
    )

    def __init__(self, interval_s: float, timeout_s: float, now: float) -> None:
        """Begin.

        Args:
            interval_s: silence after which a PING is due.
            timeout_s: the longest wait for its answer without progress.
            now: the present time.

        """
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        #: When bytes came last. The connection sets it.
        self.heard_at = now
        #: When the latest PING was sent. It is unanswered while this is later than ``heard_at``.
        self._pinged_at = float("-inf")
        #: How many bytes had been sent on this connection before that PING.
        self._ahead_bytes = 0
        #: How many bytes the server's side had acknowledged at the latest look.
        self._taken_bytes = 0
        #: When the PING was sent or, if later, progress was seen.
        self._progress_at = now
        self._grace_given = False

    def look(self, now: float, sent_bytes: int, taken_bytes: int) -> tuple[Verdict, float]:
        """Return what is due, and when to look again, in seconds from now.

        Args:
            now: the present time.
            sent_bytes: how many bytes have been sent on this connection, whether they have left or not.
            taken_bytes: how many of them the server's side has acknowledged.

        """
        if self.heard_at >= self._pinged_at:
            silence_s = now - self.heard_at
            if silence_s < self._interval_s:
                return Verdict.WAIT, self._interval_s - silence_s
            self._pinged_at = self._progress_at = now
            self._ahead_bytes, self._taken_bytes = sent_bytes, taken_bytes
            self._grace_given = False
            # After the interval at the latest: when the answer has come, the next PING may be due then.
            return Verdict.PING, min(self._interval_s, self._step_s(self._timeout_s))
        if self._taken_bytes < min(taken_bytes, self._ahead_bytes):
            self._progress_at = now
            self._grace_given = False
        self._taken_bytes = taken_bytes
        left_s = self._progress_at + self._timeout_s - now
        if left_s > 0:
            return Verdict.WAIT, self._step_s(left_s)
        if self._grace_given:
            return Verdict.LOST, 0.0
        self._grace_given = True
        return Verdict.WAIT, ANSWER_GRACE_S

    def _step_s(self, left_s: float) -> float:
        """Return when to look again: often only while there may be progress to see."""
        return min(left_s, self._timeout_s / LOOKS_PER_TIMEOUT) if self._taken_bytes < self._ahead_bytes else left_s


if sys.platform == "win32":

    def unacknowledged_bytes(fileno: int) -> int:
        """Return 0: the operating system does not say."""
        return 0

else:
    import fcntl
    import termios

    def unacknowledged_bytes(fileno: int) -> int:
        """Return how many bytes the operating system keeps of what was sent; 0 where it does not say.

        With a slow network these are megabytes: seconds of sending, while our own buffer is empty.
        """
        if fileno < 0:
            return 0
        try:
            return int.from_bytes(fcntl.ioctl(fileno, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
        except OSError:  # not every kind of socket knows
            return 0
