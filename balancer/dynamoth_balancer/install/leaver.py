"""Watches a server that was removed from the plan, until nobody listens there any more."""

from __future__ import annotations

import math
from typing import Any

from dynamoth.machine.events import ErrorReply, Send
from dynamoth.names import PATTERN_PREFIX, is_user_channel

TAG = "leaver"

ASK_INTERVAL_S = 0.5


class Leaver:
    """A server that was removed. Subscribers of patterns leave when they read the plan that is stored there last."""

    def __init__(self, server: str, *, is_up: bool) -> None:
        self.server = server
        #: Whether the link is up.
        self.is_up = is_up
        #: How many channels and patterns have listeners; None while unknown.
        self.listened: int | None = None
        #: Why it does not say that; empty where it does.
        self.fault = ""
        self._ask_at = -math.inf

    def link_up(self) -> None:
        """Ask again over a new connection."""
        self.is_up, self._ask_at = True, -math.inf

    def link_down(self) -> None:
        """Note that the server cannot be reached, as it was stopped."""
        self.is_up, self.listened = False, None

    def tick(self, now: float) -> list[Send]:
        """Ask who listens, when it is time."""
        if not self.is_up or now < self._ask_at:
            return []
        self._ask_at = now + ASK_INTERVAL_S
        return [Send(self.server, (b"PUBSUB", b"CHANNELS"), (TAG,))]

    def on_reply(self, value: Any) -> None:
        """Count the channels of applications, and the patterns of our clients."""
        if isinstance(value, ErrorReply):
            self.listened, self.fault = None, str(value)
            return
        self.listened, self.fault = sum(map(_is_listened, value)), ""


def _is_listened(name: bytes) -> bool:
    return is_user_channel(name) or name.startswith(PATTERN_PREFIX)
