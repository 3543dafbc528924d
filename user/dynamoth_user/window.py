"""Bounds the publications without an answer: who publishes more waits until others are answered."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress

PUBLICATIONS_MAX = 1000
"""Publications that a client has under way. More calls of ``publish`` wait, in their order."""

PUBLICATION_BYTES_MAX = 4 * 1024 * 1024
"""The same for the bytes of their payloads."""


class PublishWindow:
    """Room for publications. ``enter`` waits for it, in the order of the calls; ``leave`` gives it back."""

    def __init__(self) -> None:
        """Begin empty."""
        self._count = 0
        self._bytes = 0
        #: Those who wait, with their bytes; the first one does not fit.
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()

    async def enter(self, nbytes: int) -> None:
        """Wait for room, and take it. If it is cancelled, nothing is taken."""
        if not self._waiting and self._fits(nbytes):
            self._take(nbytes)
            return
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((admitted, nbytes))
        try:
            await admitted
        except asyncio.CancelledError:
            if admitted.done() and not admitted.cancelled():
                self.leave(nbytes)
            else:
                with suppress(ValueError):  # `_admit` has passed it over
                    self._waiting.remove((admitted, nbytes))
                self._admit()
            raise

    def leave(self, nbytes: int) -> None:
        """Give the room of one publication back."""
        self._count -= 1
        self._bytes -= nbytes
        self._admit()

    def _fits(self, nbytes: int) -> bool:
        return self._count < PUBLICATIONS_MAX and (not self._count or self._bytes + nbytes <= PUBLICATION_BYTES_MAX)

    def _take(self, nbytes: int) -> None:
        self._count += 1
        self._bytes += nbytes

    def _admit(self) -> None:
        while self._waiting and self._fits(self._waiting[0][1]):
            admitted, nbytes = self._waiting.popleft()
            if not admitted.done():  # else its task was cancelled, and takes nothing
                self._take(nbytes)
                admitted.set_result(None)
