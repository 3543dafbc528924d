"""Compares the ends of logs with what a broker has, now and then: a publisher may have died between append and publish.

All logs are compared once in ``tip_check_s``, in portions, so that very many do not hold up deliveries; one command
compares the logs of many interests. Only a log that has more than the broker is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

from dynamoth.edge.log import LogOptions, parse_tips, tips_command
from dynamoth.errors import MalformedMessage
from dynamoth.machine.events import CommandPart, ErrorReply
from dynamoth.machine.timers import Timers
from dynamoth_broker.delivery import Delivery
from dynamoth_broker.events import BrokerAction
from dynamoth_broker.interests import InterestTable, SharedInterest
from dynamoth_broker.logs import Logs

PORTION = 100
PORTIONS_MAX = 50
"""A round looks at ``PORTION`` logs at a time; at more, where it would have more portions than ``PORTIONS_MAX``."""

LOGS_PER_COMMAND_MAX = 250
"""A log server executes nothing else during one command: less than 1 ms."""


class TipChecks:
    """The comparisons of one broker."""

    def __init__(
        self,
        interval_s: float,
        interests: InterestTable,
        logs: Logs,
        delivery: Delivery,
        timers: Timers[BrokerAction],
        counters: Counter[str],
    ) -> None:
        """Begin with ``start``. A round takes ``interval_s``; the rest is shared with the owner."""
        self._interval_s = interval_s
        self._interests = interests
        self._logs = logs
        self._delivery = delivery
        self._timers = timers
        self._counters = counters
        #: Interests of this round that were not compared yet.
        self._left: list[SharedInterest] = []
        self._portion = 0
        self._portion_s = interval_s

    def start(self, now: float) -> None:
        """Begin the first round after ``interval_s``."""
        self._timers.add(now + self._interval_s, self._check)

    def _check(self, now: float) -> Sequence[BrokerAction]:
        """Compare the next portion."""
        if not self._left:
            self._left = [shared for shared in self._interests if shared.is_logged]
            portions = min(PORTIONS_MAX, 1 + len(self._left) // PORTION)
            self._portion_s = self._interval_s / portions
            self._portion = -(-len(self._left) // portions)
        self._timers.add(now + self._portion_s, self._check)
        by_server: dict[str, list[SharedInterest]] = {}
        for _ in range(min(self._portion, len(self._left))):
            shared = self._left.pop()
            by_server.setdefault(self._logs.server_of(shared.id), []).append(shared)
        actions: list[BrokerAction] = []
        for compared in by_server.values():
            for begin in range(0, len(compared), LOGS_PER_COMMAND_MAX):
                actions += self._compare(compared[begin : begin + LOGS_PER_COMMAND_MAX], now)
        return actions

    def _compare(self, compared: Sequence[SharedInterest], now: float) -> list[BrokerAction]:
        """Compare logs of one server."""

        def command(run_id: str, _: int, options: LogOptions) -> tuple[CommandPart, ...]:
            return tips_command([shared.id for shared in compared], run_id, options)

        return self._logs.request(compared[0].id, command, partial(self._compared, compared), now)

    def _compared(self, compared: Sequence[SharedInterest], reply: Any, now: float) -> list[BrokerAction]:
        if reply is None or isinstance(reply, ErrorReply):
            return []  # the next round compares again
        try:
            tips = parse_tips(reply, len(compared))
        except MalformedMessage:
            self._counters["malformed"] += 1
            return []
        actions: list[BrokerAction] = []
        for shared, (epoch, offset) in zip(compared, tips, strict=True):
            if epoch != shared.epoch or offset > shared.tip:
                actions += self._delivery.read_behind_tip(shared, now)
        return actions
