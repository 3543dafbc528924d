"""The latest frames of all interests, for users who come back soon: within one bound of memory for the whole broker."""

from __future__ import annotations

from dynamoth.edge.frames import Data
from dynamoth_broker.events import BrokerOptions
from dynamoth_broker.interests import SharedInterest


class Recents:
    """Keeps frames. Those of the interest on which nothing was published for the longest time go first."""

    def __init__(self, options: BrokerOptions) -> None:
        """Begin without frames."""
        self._options = options
        #: Interests that have some, the latest publication last.
        self._used: dict[SharedInterest, None] = {}
        #: About how many bytes all of them take.
        self.size_bytes = 0

    def add(self, interest: SharedInterest, frame: Data) -> None:
        """Keep the frame at the tip of an interest."""
        self.size_bytes += interest.remember(frame, self._options)
        used = self._used
        used.pop(interest, None)
        used[interest] = None
        while self.size_bytes > self._options.recent_bytes_all_max and len(used) > 1:
            self.forget(next(iter(used)))

    def forget(self, interest: SharedInterest) -> None:
        """Drop the frames of an interest: they are in its log."""
        self._used.pop(interest, None)
        self.size_bytes -= interest.recent_bytes
        interest.recent.clear()
        interest.recent_bytes = 0

    def check(self) -> None:
        """Assert the invariants."""
        assert self.size_bytes == sum(interest.recent_bytes for interest in self._used), "a wrong sum"
