"""An event loop in a thread of its own, for tests in plain words."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

CALL_S_MAX = 120.0
"""Bound of one call: a hang fails here."""

_T = TypeVar("_T")


class LoopThread:
    """Runs an event loop until it is closed."""

    def __init__(self, name: str, factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop) -> None:
        self.loop = factory()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def call(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine there, and return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(CALL_S_MAX)

    def close(self) -> None:
        """End the loop and its thread."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
