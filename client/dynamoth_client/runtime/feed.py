"""Runs the subscriber machines of one PubSub: their links, their acknowledgements, and the queue that they fill.

There is one machine for channels, and, from the first pattern on, one for patterns, with links of its own. The machines
do not know of sharded channels: these are channels with a prefix, which is put on and taken off here. A feed knows
nothing of the PubSub that reads its queue, so that a PubSub that the application drops is collected, and ends its feed.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, assert_never

import redis.exceptions

from dynamoth.machine.events import Machine, OnPushes, Start
from dynamoth.names import SHARDED_PREFIX, sharded_channel
from dynamoth_client.machines.acks import HOLD_S_MAX, Ack, Acks, Subject
from dynamoth_client.machines.local_plan import LocalPlan, NewerSoftware
from dynamoth_client.machines.patterns.events import (
    DeliverMatched,
    PatternGapDetected,
    PatternMessage,
    SubscribePatterns,
    UnsubscribePatterns,
)
from dynamoth_client.machines.patterns.machine import PatternMachine
from dynamoth_client.machines.reachability import (
    LinkClosed,
    LinkOpened,
    Ping,
    Ponged,
    ReachabilityAction,
    Unreachable,
    WatchedSubscriber,
)
from dynamoth_client.machines.subscriber.events import (
    BarrierPassed,
    Deliver,
    GapDetected,
    RaiseBarrier,
    RegisterAction,
    Subscribe,
    SubscriberOptions,
    SubscriptionConfirmed,
    SubscriptionEnded,
    SubscriptionFailed,
    Unsubscribe,
)
from dynamoth_client.machines.subscriber.machine import SubscriberMachine
from dynamoth_client.redis_py import errors
from dynamoth_client.runtime.backpressure import SPILL_BYTES_MAX, Blocking
from dynamoth_client.runtime.queue import (
    Dropped,
    Failure,
    GapInfo,
    Message,
    MessageQueue,
    Notice,
    ShardedMessage,
    WhenFull,
)
from dynamoth_link.driver import Driver
from dynamoth_link.errors import LinkError, MachineCrashed
from dynamoth_link.link import Link
from dynamoth_link.options import LinkOptions

GAP_LOG_INTERVAL_S = 1.0
"""Gaps that the application does not ask for are logged at most this often: a lost server means one for each
channel."""

_SHARDED_COMMANDS = ("ssubscribe", "sunsubscribe")

FeedAction = (
    RegisterAction | Deliver | GapDetected | BarrierPassed | DeliverMatched | PatternGapDetected | NewerSoftware
    | ReachabilityAction
)  # fmt: skip
"""The machines' actions that the feed executes itself, not the driver."""

_logger = logging.getLogger("dynamoth_client")


class Feed:
    """The runtime of one PubSub's subscriptions, until ``stop`` or ``close``. Belongs to the running event loop."""

    def __init__(
        self,
        queue: MessageQueue,
        local_plan: LocalPlan,
        link_options: LinkOptions,
        *,
        unreachable_s: float,
        wants_gaps: bool,
        when_full: WhenFull = "block",
        numbered: bool = False,
    ) -> None:
        """Begin without subscriptions and without links.

        Args:
            queue: gets the messages; this feed becomes its watcher.
            local_plan: shared by the machines of one client.
            link_options: for every link.
            unreachable_s: readers get an error each time that no server has been reachable for this long.
            wants_gaps: whether gaps go into the queue; they are logged otherwise.
            when_full: how a full queue is treated; see ``WhenFull``.
            numbered: whether payloads of channels have their places: see ``SubscriberOptions``.

        """
        self._queue = queue
        self._local_plan = local_plan
        self._link_options = link_options
        self._unreachable_s = unreachable_s
        self._wants_gaps = wants_gaps
        self._loop = asyncio.get_running_loop()
        self._acks = Acks()
        #: Done when requests have been confirmed, or when nobody should wait for that. Waiters make it.
        self._news: asyncio.Future[None] | None = None
        #: Whether any message may be of a sharded channel.
        self._has_sharded = False
        #: Whether ``disconnect`` was called.
        self._was_cut = False
        self._release_timer: asyncio.TimerHandle | None = None
        #: The latest gap in the queue by name, by whether it is a pattern's or a sharded one's; some were read.
        self._gaps_waiting: dict[tuple[bytes, bool, bool], Notice] = {}
        self._gap_logged_at = float("-inf")
        self._gaps_not_logged = 0
        #: How many gaps there have been.
        self.gaps = 0
        options = SubscriberOptions(numbered=True) if numbered else None
        self._subscriber = SubscriberMachine(secrets.randbits(64), local_plan, options)
        self._channels = self._run_machine(self._subscriber, self._take_expected)
        #: Made with the first pattern.
        self._patterns: _MachineRun | None = None
        #: Keeps messages while the queue is full; None where messages do not wait.
        self._blocking: Blocking | None = None
        if when_full == "block":
            self._blocking = Blocking(queue, pause=self._pause, resume=self._resume, later=self._loop.call_later)
            queue.watch(self._blocking.on_full, self._make_room)
        else:
            queue.watch(self._drop_oldest if when_full == "drop_oldest" else self._give_up, self._make_room)
        #: By subscription, the gap of the messages skipped while the queue is full; None where gaps are logged.
        self._gaps_of_skipped: dict[Dropped, Notice | None] = {}
        #: Gaps of messages that were dropped, and how many of them had not been read when that was last looked at: more
        #: of the same subscription are added to those that are not read.
        self._gaps_of_dropped: dict[Dropped, Notice] = {}
        self._gaps_not_read = 0

    @property
    def is_stopped(self) -> bool:
        """Whether the feed has ended."""
        return self._channels.driver.is_stopped

    @property
    def is_connected(self) -> bool:
        """Whether the feed is at work. False after ``disconnect`` until a link is up.

        While this is True, links may still be down: they reconnect by themselves.
        """
        return not self.is_stopped and (not self._was_cut or any(link.is_up for link in self._opened()))

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that the feed belongs to."""
        return self._loop

    def request(self, command: str, names: Iterable[bytes]) -> None:
        """Subscribe or unsubscribe, as the ``command`` says; the acknowledgements come through the queue.

        A request to end all subscriptions is acknowledged even if there are none, as Redis does.
        """
        wanted = tuple(_inner_name(command, name) for name in names)
        for name in wanted:
            self._acks.request(command, name)
        if not wanted:
            self._acknowledge(self._acks.end_nothing(command))
        if command == "psubscribe":
            if self._patterns is None:
                machine = PatternMachine(self._local_plan)
                self._patterns = self._run_machine(machine)
            self._patterns.driver.handle(SubscribePatterns(wanted))
        elif command == "punsubscribe":
            if self._patterns is not None:
                self._patterns.driver.handle(UnsubscribePatterns(wanted))
                return
            for pattern in wanted:
                self._acknowledge(self._acks.on_ended(pattern, is_pattern=True))
        elif command.endswith("unsubscribe"):
            self._channels.driver.handle(Unsubscribe(wanted))
        else:
            self._has_sharded = self._has_sharded or command == "ssubscribe"
            self._channels.driver.handle(Subscribe(wanted))

    async def until_confirmed(self, command: str, names: Iterable[bytes]) -> None:
        """Wait until the subscriptions that were requested are confirmed, or have ended or failed.

        For ``connect_timeout_s`` at most; and not while the queue is full, as nothing is read then.
        """
        missing = [Subject(_inner_name(command, name), command == "psubscribe") for name in names]
        ends_at = self._loop.time() + self._link_options.connect_timeout_s
        while not self.is_stopped and not self._queue.is_full:
            while missing and not self._acks.is_open(missing[-1]):
                missing.pop()
            left_s = ends_at - self._loop.time()
            if not missing or left_s <= 0:
                return
            if self._news is None:
                self._news = self._loop.create_future()
            await asyncio.wait({self._news}, timeout=left_s)

    def _wake(self) -> None:
        """Wake the tasks that wait for confirmations, so that they look again."""
        news, self._news = self._news, None
        if news is not None:
            news.set_result(None)

    def ping(self, message: bytes | None) -> bool:
        """Send a PING over a link; the pong comes through the queue. False when there is no link at all.

        Raises ``redis.exceptions.ConnectionError`` (or AuthenticationError) when every link was lost or refused.
        """
        run = next((run for run in self._runs() if run.links), None)
        if run is None:
            return False
        links = run.opened()
        faults = [errors.from_link(link.fault) for link in links if link.fault is not None]
        if len(faults) == len(links):
            raise errors.joined(faults, "no server of the subscribed channels can be reached (still trying):")
        run.driver.handle(Ping(message))
        return True

    def raise_barrier(self, channel: bytes) -> None:
        """Have a notice ``barrier`` come behind everything that was published on the channel before."""
        self._channels.driver.handle(RaiseBarrier(channel))

    def pong(self, message: bytes) -> None:
        """Put a pong for a PING that was answered elsewhere."""
        self._queue.put(Notice("pong", None, message))

    def register_connect_callback(self, callback: object) -> None:
        """Do nothing: ``callback`` is never called, as subscriptions are restored without it."""

    def deregister_connect_callback(self, callback: object) -> None:
        """Do nothing, as ``register_connect_callback``."""

    async def disconnect(self, nowait: bool = False) -> None:
        """Cut all links, as one does with redis-py's connection; they are made again at once.

        Every subscription begins again: it is acknowledged again, counted from 1, and the promises hold from then on.
        The queue keeps its messages. ``nowait`` has no meaning here: nothing is waited for.
        """
        if self.is_stopped:
            return
        self._was_cut = True
        for link in self._opened():
            link.cut()
        # The machines end a subscription at once where no link is up, and know its numbers when it comes again.
        again = self._acks.start_over()
        channels = tuple(subject.name for subject in again if not subject.is_pattern)
        patterns = tuple(subject.name for subject in again if subject.is_pattern)
        self._channels.driver.handle(Unsubscribe(channels))
        if self._patterns is not None:
            self._patterns.driver.handle(UnsubscribePatterns(patterns))
        for subject in again:
            self._acks.request(subject.command, subject.name)
        self._channels.driver.handle(Subscribe(channels))
        if self._patterns is not None:
            self._patterns.driver.handle(SubscribePatterns(patterns))

    def stop(self) -> None:
        """End at once."""
        self._wake()
        self._cancel_timer()
        if self._blocking is not None:
            self._blocking.stop()
        for run in self._runs():
            run.driver.stop()

    def abandon(self) -> list[int]:
        """End as ``Driver.abandon``. The next feed may still ask which subscriptions there were (``resume_from``)."""
        self._release_timer = None
        self._queue.forget_waiters()
        return [number for run in self._runs() for number in run.driver.abandon()]

    def resume_from(self, other: Feed, reason: str) -> None:
        """Go on where another feed ended: its acknowledged subscriptions get a gap for ``reason``."""
        self.gaps += other.gaps
        for subject in other._acks.start_over():
            name, sharded = (subject.name, False) if subject.is_pattern else _users(subject.name)
            self._note_gap(GapInfo(name, None, None, reason, name if subject.is_pattern else None, sharded))

    def end(self, error: redis.exceptions.RedisError) -> None:
        """Close the queue after ``abandon``: readers get ``error`` once it is empty."""
        self._queue.close(error)

    def fail(self, error: redis.exceptions.RedisError) -> None:
        """Stop, and close the queue: readers get ``error`` once it is empty."""
        self.stop()
        self._queue.close(error)

    async def close(self) -> None:
        """Stop, and wait until sockets and tasks are gone."""
        self.stop()
        for run in self._runs():
            await run.driver.close()

    def _runs(self) -> list[_MachineRun]:
        return [self._channels] if self._patterns is None else [self._channels, self._patterns]

    def _run_machine(self, machine: Machine[Any, Any], on_pushes: OnPushes | None = None) -> _MachineRun:
        watched = WatchedSubscriber(machine, self._unreachable_s)
        return _MachineRun(watched, self._execute, self._crashed, self._link_options, on_pushes)

    # Actions of the machines.

    def _take_expected(self, link: str, pushes: list[list[Any]]) -> int:
        """Put messages into the queue without ``handle`` of the machine, if the effect is the same; return how many."""
        queue = self._queue
        if self._acks.held or self._has_sharded or queue.is_full:
            return 0
        taken = self._subscriber.take_expected(link, pushes, queue.items.append)
        queue.on_grown()
        return taken

    def _execute(self, run: _MachineRun, action: FeedAction) -> None:
        is_pattern = run is not self._channels
        match action:
            case Deliver(messages):
                if self._acks.held:
                    self._release_for(messages)
                self._put(map(_queued, messages) if self._has_sharded else messages)
            case DeliverMatched(matched):
                if self._acks.held:
                    self._release_for_matched(matched)
                self._put(matched)
            case SubscriptionConfirmed(name):
                self._acknowledge(self._acks.on_confirmed(name, is_pattern=is_pattern))
            case SubscriptionEnded(name):
                self._acknowledge(self._acks.on_ended(name, is_pattern=is_pattern))
            case SubscriptionFailed(name, reason):
                self._failed(name, reason, is_pattern)
            case GapDetected(name, publisher, count, reason):
                channel, sharded = _users(name)
                self._note_gap(GapInfo(channel, publisher, count, reason, sharded=sharded))
            case PatternGapDetected(pattern, matching, publisher, count, reason):
                self._note_gap(GapInfo(pattern if matching is None else matching, publisher, count, reason, pattern))
            case BarrierPassed(name):
                self._queue.put(Notice("barrier", name, 0))
            case LinkOpened(link):
                run.links.add(link)
                if self._blocking is not None and self._blocking.is_paused:
                    self._pause()
            case LinkClosed(link):
                run.links.discard(link)
            case Ponged(message):
                self._queue.put(Notice("pong", None, message))
            case Unreachable(reasons):
                self._unreachable(run, reasons)
            case NewerSoftware(text):
                _logger.warning("%s", text)
            case _:
                assert_never(action)

    def _put(self, messages: Iterable[Message]) -> None:
        if self._blocking is None or not self._queue.is_full:
            self._queue.extend(messages)
        elif skipped := self._blocking.put(messages):
            self._note_skipped(skipped)

    def _release_for(self, messages: list[tuple[bytes, bytes]]) -> None:
        """Put the held acknowledgements of channels before their messages."""
        for channel in {channel for channel, _ in messages if Subject(channel) in self._acks.held}:
            self._put_acks(self._acks.release(channel))

    def _release_for_matched(self, messages: list[PatternMessage]) -> None:
        """Put the held acknowledgements of patterns before their messages."""
        for pattern in {message.pattern for message in messages}:
            self._put_acks(self._acks.release(pattern, is_pattern=True))

    def _acknowledge(self, acks: list[Ack]) -> None:
        """Put acknowledgements into the queue, after a request was confirmed."""
        self._wake()
        self._put_acks(acks)
        if self._acks.held and self._release_timer is None:
            self._release_timer = self._loop.call_later(HOLD_S_MAX, self._release)

    def _release(self) -> None:
        self._release_timer = None
        self._put_acks(self._acks.release_all())

    def _put_acks(self, acks: Iterable[Ack]) -> None:
        for ack in acks:
            channel = ack.channel
            if channel is not None and ack.kind in _SHARDED_COMMANDS:
                channel = channel.removeprefix(SHARDED_PREFIX)
            self._queue.put(Notice(ack.kind, channel, ack.count))

    def _failed(self, name: bytes, reason: str, is_pattern: bool) -> None:
        self._acknowledge(self._acks.on_failed(name, is_pattern=is_pattern))
        subject = Subject(name, is_pattern)
        name = name if is_pattern else _users(name)[0]
        self._queue.put(Failure(errors.from_reply(reason), name, subject.command))

    def _unreachable(self, run: _MachineRun, reasons: dict[str, str]) -> None:
        """Put an error into the queue, unless the latest one was not read."""
        if self._acks.is_idle or (self._queue.items and isinstance(self._queue.items[-1], Failure)):
            return
        faults = [run.fault_of(link, reason) for link, reason in reasons.items()]
        self._queue.put(
            Failure(errors.joined(faults, "no server of the subscribed channels can be reached (still trying):"))
        )

    def _crashed(self, crash: MachineCrashed) -> None:
        self.stop()
        self._queue.close(redis.exceptions.ConnectionError(f"the subscriptions have ended: {crash}"))

    # Gaps.

    def _note_gap(self, gap: GapInfo) -> None:
        self.gaps += 1
        if not self._wants_gaps:
            self._log_gap(gap)
        else:
            self._put_gap(gap)

    def _put_gap(self, gap: GapInfo) -> None:
        """Put a gap in its place; where as many notices wait as messages may, add it to one that waits."""
        assert isinstance(gap.channel, bytes), "names are decoded by the reader"
        if not self._queue.notices:
            self._gaps_waiting.clear()
        # One for all channels of a pattern: there is no bound to these.
        name = gap.pattern if isinstance(gap.pattern, bytes) else gap.channel
        subject = (name, gap.pattern is not None, gap.sharded)
        waiting = self._gaps_waiting.get(subject)
        if waiting is not None and not waiting.is_read and self._queue.notices >= self._queue.bound:
            reason = f"several gaps; the latest: {gap.reason}"
            waiting.channel = name
            waiting.data = replace(gap, channel=name, publisher=None, count=None, reason=reason)
            return
        notice = self._gaps_waiting[subject] = Notice("gap", gap.channel, gap)
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
        self._wake()
        for link in self._opened():
            link.pause_reading()

    def _resume(self) -> None:
        for link in self._opened():
            link.resume_reading()

    def _make_room(self) -> None:
        """Go back to normal: half of the queue has been read."""
        self._gaps_of_skipped.clear()
        if self._blocking is not None:
            self._blocking.on_room()

    def _note_skipped(self, skipped: Counter[Dropped]) -> None:
        """Report skipped messages behind the queue: one gap for each subscription, with their number."""
        reason = f"the application reads too slowly: more than {SPILL_BYTES_MAX} bytes waited (when_full, max_queue)"
        gaps = self._gaps_of_skipped
        for subject, count in skipped.items():
            self.gaps += subject not in gaps
            gaps[subject] = self._report_dropped(subject, count, reason, gaps.get(subject), self._queue.put)

    def _drop_oldest(self) -> None:
        """Drop the oldest messages, and report a gap in their place for each subscription."""
        queue = self._queue
        if len(self._gaps_of_dropped) > 2 * self._gaps_not_read:
            self._gaps_of_dropped = {of: gap for of, gap in self._gaps_of_dropped.items() if not gap.is_read}
            self._gaps_not_read = len(self._gaps_of_dropped)
        reason = "the application reads too slowly: its oldest messages were dropped (when_full, max_queue)"
        for subject, count in queue.drop_oldest().items():
            self.gaps += 1
            earlier = self._gaps_of_dropped.get(subject)
            if (notice := self._report_dropped(subject, count, reason, earlier, queue.put_dropped)) is not None:
                self._gaps_of_dropped[subject] = notice

    def _report_dropped(
        self, subject: Dropped, count: int, reason: str, earlier: Notice | None, put: Callable[[Notice], None]
    ) -> Notice | None:
        """Add dropped messages to an ``earlier`` gap that was not read, or put another; None where gaps are logged."""
        channel, pattern, sharded = subject
        gap = GapInfo(channel, None, count, reason, pattern, sharded)
        if not self._wants_gaps:
            self._log_gap(gap)
            return None
        if earlier is not None and not earlier.is_read and isinstance(earlier.data, GapInfo):
            earlier.data = replace(gap, count=count + (earlier.data.count or 0))
            return earlier
        notice = Notice("gap", channel, gap)
        put(notice)
        return notice

    def _give_up(self) -> None:
        """End, with an error behind the messages in the queue."""
        bound = self._queue.bound
        self.fail(
            redis.exceptions.ConnectionError(
                f"disconnected, as {bound} messages waited for the application: read faster, allow more (max_queue), or"
                " choose another when_full; aclose() and subscribe again to go on"
            )
        )

    def _opened(self) -> list[Link]:
        return [link for run in self._runs() for link in run.opened()]

    def _cancel_timer(self) -> None:
        if self._release_timer is not None:
            self._release_timer.cancel()
            self._release_timer = None


class _MachineRun:
    """One machine, its driver and its links."""

    def __init__(
        self,
        machine: WatchedSubscriber,
        execute: Callable[[_MachineRun, FeedAction], None],
        crashed: Callable[[MachineCrashed], None],
        link_options: LinkOptions,
        on_pushes: OnPushes | None,
    ) -> None:
        """Start. ``execute`` is given this and each action that the driver does not execute itself."""
        #: The links that exist. All of them are paused together.
        self.links: set[str] = set()
        self.driver = Driver(
            machine,
            on_action=partial(execute, self),
            link_options=lambda _: link_options,
            on_crash=crashed,
            on_pushes=on_pushes,
        )
        self.driver.handle(Start())

    def opened(self) -> list[Link]:
        """Return the links."""
        return [link for name in self.links if (link := self.driver.link(name)) is not None]

    def fault_of(self, name: str, reason: str) -> redis.exceptions.RedisError:
        """Return why a link is down, as an exception of redis-py."""
        link = self.driver.link(name)
        fault: LinkError | None = link.fault if link is not None else None
        return redis.exceptions.ConnectionError(reason) if fault is None else errors.from_link(fault)


def _inner_name(command: str, name: bytes) -> bytes:
    """Return the machines' name of a channel or pattern that a command of the application names."""
    return sharded_channel(name) if command in _SHARDED_COMMANDS else name


def _users(channel: bytes) -> tuple[bytes, bool]:
    """Return the application's name of a channel, and whether it is a sharded one."""
    if channel.startswith(SHARDED_PREFIX):
        return channel[len(SHARDED_PREFIX) :], True
    return channel, False


def _queued(message: tuple[bytes, bytes]) -> tuple[bytes, bytes] | ShardedMessage:
    """Return a message as the queue has it, where some are of sharded channels."""
    channel, payload = message
    if channel.startswith(SHARDED_PREFIX):
        return ShardedMessage(channel[len(SHARDED_PREFIX) :], payload)
    return message
