"""What tests of the synchronous client share."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

from dynamoth_client import PubSub

PATIENCE_S = 20.0
"""Bound of every wait: a hang fails here."""


def next_of(pubsub: PubSub) -> dict[str, Any]:
    """Return the next message, past what handlers took."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        message = pubsub.get_message(timeout=PATIENCE_S)
        if message is not None:
            return message
    raise AssertionError("no message came")


def confirmed(pubsub: PubSub, *channels: str | bytes, **handlers: Any) -> None:
    pubsub.subscribe(*channels, **handlers)
    for _ in range(len(channels) + len(handlers)):
        assert next_of(pubsub)["type"] == "subscribe"


def message_of(kind: str, channel: Any, data: Any) -> dict[str, Any]:
    return {"type": kind, "pattern": None, "channel": channel, "data": data}


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for what nobody tells."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"not in {PATIENCE_S} s: {what}"
        time.sleep(0.002)


async def waiting() -> int:
    """Return how many waits for items there are on the loop of a synchronous client."""
    return sum("until_item" in str(task.get_coro()) for task in asyncio.all_tasks())


def keepers() -> int:
    """Return how many threads of clients there are."""
    return sum(thread.name == "dynamoth_client" for thread in threading.enumerate())


class Running(threading.Thread):
    """A function in a thread of its own; ``result`` waits for it and returns or raises its outcome."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        super().__init__(daemon=True)
        self._function, self._args = function, args
        self._result: Any = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._result = self._function(*self._args)
        except BaseException as error:
            self._error = error

    def result(self) -> Any:
        self.join(PATIENCE_S)
        assert not self.is_alive(), "it hangs"
        if self._error is not None:
            raise self._error
        return self._result
