"""Runs the publisher machine of one client: each message gets a future for its outcome."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Hashable, Sequence
from operator import itemgetter
from typing import Any, assert_never, cast

import redis.exceptions

from dynamoth.machine.events import Start
from dynamoth.protocol.envelope import HEADER_BYTES
from dynamoth_client.machines.local_plan import LocalPlan, NewerSoftware
from dynamoth_client.machines.publisher.events import (
    Outcome,
    Publish,
    PublishAll,
    Published,
    PublishedAll,
    PublisherOptions,
    PublishFailed,
    PublishRefused,
)
from dynamoth_client.machines.publisher.machine import PublisherMachine
from dynamoth_client.redis_py import errors
from dynamoth_link.driver import Driver
from dynamoth_link.errors import MachineCrashed
from dynamoth_link.options import LinkOptions

_outcome_of = itemgetter(0)
_logger = logging.getLogger("dynamoth_client")


PAYLOAD_BYTES_MAX = 512 * 1024 * 1024 - HEADER_BYTES
"""Redis takes strings of 512 MB (``proto-max-bulk-len``), envelope included; at more it ends the connection, and what
was to be sent again after that would end the next one, too."""


class Publishing:
    """The runtime of one client's publications, until ``close``. Belongs to the running event loop."""

    def __init__(
        self, local_plan: LocalPlan, link_options: LinkOptions, *, envelope: bool, publish_timeout_s: float
    ) -> None:
        """Begin without links.

        Args:
            local_plan: shared by the machines of one client.
            link_options: for every link.
            envelope: False publishes plain payloads, without guarantees.
            publish_timeout_s: how long a message waits for an answer.

        """
        self._loop = asyncio.get_running_loop()
        #: Whether it was closed, or its machine crashed.
        self.is_stopped = False
        #: Publications without an outcome. The machine bounds them in number and in time.
        self._unanswered: set[asyncio.Future[int]] = set()
        #: Publications of this turn of the event loop, for the machine at its end.
        self._collected: list[tuple[asyncio.Future[int], bytes, bytes]] = []
        self._hand_over_scheduled = False
        options = PublisherOptions(envelope=envelope, publish_timeout_s=publish_timeout_s)
        machine = PublisherMachine(secrets.randbits(64), local_plan, options)
        self._driver = Driver(
            machine, on_action=self._execute, link_options=lambda _: link_options, on_crash=self._crashed
        )
        self._driver.handle(Start())

    def publish(self, channel: bytes, payload: bytes) -> asyncio.Future[int]:
        """Hand a message to the machine, in the order of the calls; the future gets the receivers.

        At once if no other is unanswered, else at the end of this turn of the loop, with all others of the turn. The
        future of a failed message gets an error of ``redis.exceptions``. Cancelling it does not recall the message.

        Raises:
            OtherLoop: called in another event loop. (Not always seen here; to await the future there fails then.)
            redis.exceptions.DataError: the payload is larger than ``PAYLOAD_BYTES_MAX``.

        """
        if len(payload) > PAYLOAD_BYTES_MAX:
            raise redis.exceptions.DataError(
                f"a message of {len(payload):,} bytes is too large: Redis takes {PAYLOAD_BYTES_MAX:,}; send it in parts"
            )
        outcome: asyncio.Future[int] = asyncio.Future(loop=self._loop)  # quicker than the loop's method
        if self._hand_over_scheduled:
            self._collected.append((outcome, channel, payload))
            return outcome
        if self._loop is not asyncio.get_running_loop():
            raise errors.OtherLoop
        if self._unanswered:
            self._collected.append((outcome, channel, payload))
            self._schedule_hand_over()
        else:
            self._unanswered.add(outcome)
            self._driver.handle(Publish(outcome, channel, payload))
        return outcome

    def _schedule_hand_over(self) -> None:
        if not self._hand_over_scheduled:
            self._hand_over_scheduled = True
            self._loop.call_soon(self._hand_over)

    def _hand_over(self) -> None:
        self._hand_over_scheduled = False
        if not self._collected:
            return
        collected, self._collected = self._collected, []
        self._unanswered.update(map(_outcome_of, collected))
        self._driver.handle(PublishAll(collected))

    def stop(self) -> None:
        """End at once; messages without an outcome fail. Those that were sent still go out."""
        self.is_stopped = True
        self._fail_all(errors.ClientClosed())
        self._driver.stop()

    def abandon(self) -> list[int]:
        """End as ``Driver.abandon``; messages without an outcome get none."""
        self.is_stopped = True
        self._unanswered.clear()
        self._collected.clear()
        return self._driver.abandon()

    async def close(self) -> None:
        """Stop, and wait until sockets and tasks are gone."""
        self.stop()
        await self._driver.close()

    def _execute(self, action: Outcome | NewerSoftware) -> None:
        match action:
            case Published():
                token: Any = action.token
                self._unanswered.discard(token)
                if not token.done():
                    token.set_result(action.receivers)
            case PublishedAll():
                self._published_all(cast("Sequence[asyncio.Future[int]]", action.tokens), action.receivers)
            case PublishFailed():
                error = redis.exceptions.TimeoutError if action.late else redis.exceptions.ConnectionError
                self._fail(action.token, error(action.reason))
            case PublishRefused():
                self._fail(action.token, errors.from_reply(action.error))
            case NewerSoftware():
                _logger.warning("%s", action.text)
            case _:
                assert_never(action)

    def _published_all(self, outcomes: Sequence[asyncio.Future[int]], receivers: Sequence[int]) -> None:
        self._unanswered.difference_update(outcomes)
        for outcome, number in zip(outcomes, receivers, strict=True):
            try:
                outcome.set_result(number)
            except asyncio.InvalidStateError:  # it was cancelled; to ask each whether it is done takes longer
                continue
        # Right behind the tasks that have waited: what they publish now goes together in this very turn.
        self._schedule_hand_over()

    def _fail(self, token: Hashable, error: redis.exceptions.RedisError) -> None:
        outcome = cast("asyncio.Future[int]", token)
        self._unanswered.discard(outcome)
        if not outcome.done():
            outcome.set_exception(error)

    def _crashed(self, crash: MachineCrashed) -> None:
        self.is_stopped = True
        error = redis.exceptions.ConnectionError(f"the message was not sent, or its outcome is unknown: {crash}")
        error.__cause__ = crash
        self._fail_all(error)

    def _fail_all(self, error: redis.exceptions.RedisError) -> None:
        unanswered, self._unanswered = self._unanswered, set()
        collected, self._collected = self._collected, []
        for outcome in (*unanswered, *(outcome for outcome, _, _ in collected)):
            if not outcome.done():
                outcome.set_exception(error)
