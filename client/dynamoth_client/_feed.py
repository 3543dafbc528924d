"""One subscriber machine at work: its links, its acknowledgements, and the queue that it fills.

A feed knows nothing of the PubSub that reads its queue, so that a PubSub that the application drops is collected, and
ends its feed.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Iterable
from typing import Any, cast

import redis.exceptions

from dynamoth.events import Start
from dynamoth_client import _errors
from dynamoth_client._acks import HOLD_S_MAX, Ack, Acks
from dynamoth_client._queue import Failure, GapInfo, MessageQueue, Notice
from dynamoth_client._watch import LinkClosed, LinkOpened, Ping, Ponged, Unreachable, WatchedSubscriber
from dynamoth_client.local_plan import LocalPlan, NewerSoftware
from dynamoth_client.subscriber import (
    Deliver,
    GapDetected,
    Subscribe,
    SubscriberMachine,
    SubscriptionConfirmed,
    SubscriptionEnded,
    SubscriptionFailed,
    Unsubscribe,
)
from dynamoth_link.driver import Driver
from dynamoth_link.errors import LinkError, MachineCrashed
from dynamoth_link.options import LinkOptions

GAP_LOG_INTERVAL_S = 1.0
"""Gaps that the application does not ask for are logged at most this often: a lost server means one for each
channel."""

_logger = logging.getLogger("dynamoth_client")


class Feed:
    """The runtime of one PubSub's subscriptions, until ``stop`` or ``close``. Belongs to the running event loop."""

    def __init__(
        self, queue: MessageQueue, local_plan: LocalPlan, link_options: LinkOptions, *, wants_gaps: bool
    ) -> None:
        """Begin without subscriptions and without links.

        Args:
            queue: what is filled; this feed becomes its watcher.
            local_plan: shared by the machines of one client.
            link_options: for every link.
            wants_gaps: whether gaps go into the queue; they are logged otherwise.

        """
        self._queue = queue
        self._wants_gaps = wants_gaps
        self._loop = asyncio.get_running_loop()
        self._acks = Acks()
        self._release_timer: asyncio.TimerHandle | None = None
        #: The links that exist. All of them are paused while the queue is full.
        self._links: set[str] = set()
        #: Gaps that were put into the full queue, by channel: more of the same channel are added to these.
        self._gaps_while_full: dict[bytes, Notice] = {}
        self._gap_logged_at = float("-inf")
        self._gaps_not_logged = 0
        #: How many gaps there have been.
        self.gaps = 0
        machine = SubscriberMachine(secrets.randbits(64), local_plan)
        self.counters = machine.counters
        self._driver = Driver(
            WatchedSubscriber(machine, link_options.connect_timeout_s),
            on_action=self._execute,
            link_options=lambda _: link_options,
            on_crash=self._crashed,
        )
        queue.watch(self._pause, self._resume)
        self._driver.handle(Start())

    @property
    def is_connected(self) -> bool:
        """Whether the feed is at work; its links may be down all the same, and come back by themselves."""
        return not self._driver.is_stopped

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that the feed belongs to."""
        return self._loop

    def subscribe(self, channels: Iterable[bytes]) -> None:
        """Subscribe; the acknowledgements come through the queue."""
        for channel in (wanted := tuple(channels)):
            self._acks.request("subscribe", channel)
        self._driver.handle(Subscribe(wanted))

    def unsubscribe(self, channels: Iterable[bytes]) -> None:
        """Unsubscribe; the acknowledgements come through the queue."""
        for channel in (wanted := tuple(channels)):
            self._acks.request("unsubscribe", channel)
        self._driver.handle(Unsubscribe(wanted))

    def acknowledge_nothing(self, kind: str) -> None:
        """Put the acknowledgement that Redis gives when there was nothing to unsubscribe from."""
        self._queue.put(Notice(kind, None, self._acks.count))

    def ping(self, message: bytes | None) -> bool:
        """Send a PING over a link; the pong comes through the queue. False when there is no link at all.

        Raises ``redis.exceptions.ConnectionError`` (or AuthenticationError) when every link was lost or refused.
        """
        if not self._links:
            return False
        links = [link for name in self._links if (link := self._driver.link(name)) is not None]
        faults = [_errors.from_link(link.fault) for link in links if link.fault is not None]
        if len(faults) == len(links):
            raise _errors.joined(faults, "no server of the subscribed channels can be reached (still trying):")
        self._driver.handle(Ping(message))
        return True

    def pong(self, message: bytes) -> None:
        """Put a pong for a PING that was answered elsewhere."""
        self._queue.put(Notice("pong", None, message))

    def stop(self) -> None:
        """End at once."""
        self._cancel_timer()
        self._driver.stop()

    def fail(self, error: redis.exceptions.RedisError) -> None:
        """Stop, and let ``error`` meet whoever reads the queue once it is empty."""
        self.stop()
        self._queue.close(error)

    async def close(self) -> None:
        """Stop, and wait until sockets and tasks are gone."""
        self._cancel_timer()
        await self._driver.close()

    # What the machine asks for.

    def _execute(self, action: Any) -> None:
        if type(action) is Deliver:
            if self._acks.held:
                self._release_for(action.messages)
            self._queue.extend(action.messages)
            return
        kind = cast("type[object]", type(action))
        if kind is SubscriptionConfirmed:
            self._acknowledge(self._acks.confirmed(action.channel))
        elif kind is SubscriptionEnded:
            self._acknowledge(self._acks.ended(action.channel))
        elif kind is SubscriptionFailed:
            self._failed(action.channel, action.reason)
        elif kind is GapDetected:
            self._note_gap(GapInfo(action.channel, action.publisher, action.count, action.reason))
        elif kind is LinkOpened:
            self._links.add(action.link)
            if self._queue.is_full:
                self._pause()
        elif kind is LinkClosed:
            self._links.discard(action.link)
        elif kind is Ponged:
            self._queue.put(Notice("pong", None, action.message))
        elif kind is Unreachable:
            self._unreachable(action.reasons)
        elif kind is NewerSoftware:
            _logger.warning("%s", action.text)
        else:
            raise AssertionError(f"not an action of a subscriber: {action!r}")

    def _release_for(self, messages: list[tuple[bytes, bytes]]) -> None:
        """Let no message come before the acknowledgement of its channel."""
        for channel in {channel for channel, _ in messages if channel in self._acks.held}:
            self._put_acks(self._acks.release(channel))

    def _acknowledge(self, acks: list[Ack]) -> None:
        self._put_acks(acks)
        if self._acks.held and self._release_timer is None:
            self._release_timer = self._loop.call_later(HOLD_S_MAX, self._release)

    def _release(self) -> None:
        self._release_timer = None
        self._put_acks(self._acks.release_all())

    def _put_acks(self, acks: Iterable[Ack]) -> None:
        for ack in acks:
            self._queue.put(Notice(ack.kind, ack.channel, ack.count))

    def _failed(self, channel: bytes, reason: str) -> None:
        self._acknowledge(self._acks.failed(channel))
        self._queue.put(Failure(_errors.from_reply(reason), channel))

    def _unreachable(self, reasons: dict[str, str]) -> None:
        """Tell the reader, unless it has not read the last such news."""
        if self._acks.is_idle or (self._queue.items and isinstance(self._queue.items[-1], Failure)):
            return
        faults = [self._fault_of(link, reason) for link, reason in reasons.items()]
        self._queue.put(
            Failure(_errors.joined(faults, "no server of the subscribed channels can be reached (still trying):"))
        )

    def _fault_of(self, name: str, reason: str) -> redis.exceptions.RedisError:
        link = self._driver.link(name)
        fault: LinkError | None = link.fault if link is not None else None
        return redis.exceptions.ConnectionError(reason) if fault is None else _errors.from_link(fault)

    def _crashed(self, crash: MachineCrashed) -> None:
        self._cancel_timer()
        self._queue.close(redis.exceptions.ConnectionError(f"the subscriptions have ended: {crash}"))

    # Gaps.

    def _note_gap(self, gap: GapInfo) -> None:
        self.gaps += 1
        if not self._wants_gaps:
            self._log_gap(gap)
        elif self._queue.is_full:
            self._put_gap_while_full(gap)
        else:
            self._queue.put(Notice("gap", gap.channel if isinstance(gap.channel, bytes) else None, gap))

    def _put_gap_while_full(self, gap: GapInfo) -> None:
        """Keep the full queue bounded: at most one more unread gap per channel."""
        assert isinstance(gap.channel, bytes), "names are decoded by the reader"
        unread = self._gaps_while_full.get(gap.channel)
        if unread is not None and not unread.is_read:
            unread.data = GapInfo(gap.channel, None, None, f"several gaps; the latest: {gap.reason}")
            return
        notice = self._gaps_while_full[gap.channel] = Notice("gap", gap.channel, gap)
        self._queue.put(notice)

    def _log_gap(self, gap: GapInfo) -> None:
        self._gaps_not_logged += 1
        now = self._loop.time()
        if now - self._gap_logged_at < GAP_LOG_INTERVAL_S:
            return
        self._gap_logged_at = now
        _logger.warning(
            "%d gap(s) since the last such line; the latest: channel %r, publisher %s, %s message(s): %s"
            " (pubsub(on_gap=...) or pubsub(gaps=True) hands gaps to the application)",
            self._gaps_not_logged, gap.channel, gap.publisher, gap.count, gap.reason,
        )  # fmt: skip
        self._gaps_not_logged = 0

    # Back-pressure.

    def _pause(self) -> None:
        for name in self._links:
            if (link := self._driver.link(name)) is not None:
                link.pause_reading()

    def _resume(self) -> None:
        self._gaps_while_full.clear()
        for name in self._links:
            if (link := self._driver.link(name)) is not None:
                link.resume_reading()

    def _cancel_timer(self) -> None:
        if self._release_timer is not None:
            self._release_timer.cancel()
            self._release_timer = None
