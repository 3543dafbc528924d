"""The state that the parts of a subscriber share, and their base."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from dynamoth.machine.timers import Timers
from dynamoth_client.machines.local_plan import LocalPlan
from dynamoth_client.machines.register import Register
from dynamoth_client.machines.sequences import Sequences
from dynamoth_client.machines.subscriber.events import SubscriberAction, SubscriberOptions
from dynamoth_client.machines.subscriber.subscription import Subscription


@dataclass(frozen=True, slots=True)
class Shared:
    """The state of one subscriber that its parts share."""

    client_id: int
    plan: LocalPlan
    options: SubscriberOptions
    counters: Counter[str]
    register: Register[Subscription, Sequences]
    timers: Timers[SubscriberAction]


class Part:
    """A part of one subscriber. Methods that return actions return those to execute."""

    def __init__(self, shared: Shared) -> None:
        """Share the state of the subscriber."""
        self._client_id = shared.client_id
        self._plan = shared.plan
        self._options = shared.options
        self._counters = shared.counters
        self._register = shared.register
        self._timers = shared.timers
