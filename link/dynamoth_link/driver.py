"""Runs one machine against real servers.

Theory of operation
-------------------
The driver is a loop of its own on top of asyncio's: an event goes into the machine, the actions that come out
are executed in their order, and only then the next event goes in. An event that arrives while a machine is at
work (because executing an action caused it) waits in a queue, so a machine is never entered twice.

Time is the event loop's clock, never running backwards. One timer stands for ``Machine.deadline``. It is
moved only when the deadline comes *earlier*: a deadline that moved later, as most do with each event, is
looked at again when the timer goes off. That keeps the hot path free of timers.
"""

from __future__ import annotations

import asyncio
import reprlib
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from dynamoth.machine.events import (
    Connect,
    Disconnect,
    LinkDown,
    LinkUp,
    Machine,
    OnPushes,
    Pushed,
    Replied,
    RepliedAll,
    Send,
    SendAll,
    Tick,
)
from dynamoth_link.connection import report_exception
from dynamoth_link.errors import MachineCrashed
from dynamoth_link.link import Link
from dynamoth_link.options import LinkOptions
from dynamoth_link.urls import InvalidUrl

RECENT_EVENTS = 20
"""How many of the latest events a crash report shows: enough to see how it came about, little to keep."""

PUSHES_SHOWN = 2
"""How many pushes of an earlier event a crash report shows. Keeping thousands of messages costs a busy process about as
much as parsing them: their memory has left the processor's caches by the time it is used again."""

CLOCK_STEP_S = 0.002
"""Timers may go off this much early: the clock of uvloop, and its timers, have steps of a millisecond."""

_DEFAULTS = LinkOptions()


class Driver:
    """Executes the actions of one machine, and hands it the events that follow.

    ``Connect``, ``Disconnect``, ``Send`` and ``SendAll`` are executed here; every other action goes to ``on_action``.
    It keeps the contract of ``dynamoth.machine.events`` about links. In addition:

    * ``Connect`` with a URL that cannot be parsed is answered with one ``LinkDown`` that says so, and no
      retry.
    * ``Send`` to a link that is down, or unknown, is dropped.
    * ``Connect`` with the name of a link that exists is a bug of the machine. After ``Disconnect`` the name
      is free.

    Args:
        machine: what decides.
        on_action: executes the component's own actions. It may call ``handle``: that event waits until all
            actions of the current one have been executed. If it raises, that is reported to the loop's
            exception handler, and the next action follows.
        link_options: gives the options for the link that a ``Connect`` asks for.
        on_crash: called once when the machine raises, or asks for the impossible, which is a bug: the driver
            has stopped then. Without it the loop's exception handler gets the error.
        on_pushes: see :data:`dynamoth.machine.events.OnPushes`. If it raises, the machine has crashed.
    """

    def __init__(
        self,
        machine: Machine[Any, Any],
        *,
        on_action: Callable[[Any], None],
        link_options: Callable[[Connect], LinkOptions] = lambda _: _DEFAULTS,
        on_crash: Callable[[MachineCrashed], None] | None = None,
        on_pushes: OnPushes | None = None,
    ) -> None:
        self._machine = machine
        self._on_action = on_action
        self._link_options = link_options
        self._on_crash = on_crash
        self._on_pushes = on_pushes
        self._loop = asyncio.get_running_loop()
        self._time = self._loop.time
        self._execute_own: dict[type, Callable[[Any], None]] = {
            Send: self._send,
            SendAll: self._send_all,
            Connect: self._connect,
            Disconnect: lambda action: self._disconnect(action.link),
        }
        self._links: dict[str, Link] = {}
        #: Links that were disconnected and whose sockets are being closed.
        self._closing: set[asyncio.Task[None]] = set()
        #: Events that came while the machine was busy, oldest first. Empty while it is not.
        self._waiting: deque[Any] = deque()
        self._busy = False
        self._stopped = False
        #: The latest events, the present one included. Pushes are cut off after they have been handled.
        self._recent: deque[Any] = deque(maxlen=RECENT_EVENTS)
        #: The latest time that the machine was given; never decreases.
        self._now = self._loop.time()
        #: When the timer goes off; never later than the machine's deadline. None while there is no timer.
        self._timer_at: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_stopped(self) -> bool:
        """Whether the driver was closed, or stopped because its machine crashed."""
        return self._stopped

    def start(self) -> None:
        """Set the timer, for a machine that has a deadline before its first event."""
        deadline = self._machine.deadline()
        if deadline is not None:
            self._set_timer(deadline)

    def link(self, name: str) -> Link | None:
        """Return a link between its ``Connect`` and its ``Disconnect``, to see its buffers or to pause it."""
        return self._links.get(name)

    def handle(self, event: Any) -> None:
        """Hand an event to the machine and execute its actions; while the machine is at work, queue the event.

        After the driver has stopped, events are dropped.
        """
        if self._stopped:
            return
        if self._busy:
            self._waiting.append(event)
            return
        self._busy = True
        try:
            self._step(event)
            while self._waiting:  # empty when stopped
                self._step(self._waiting.popleft())
            deadline = self._machine.deadline()
            if deadline is not None and (self._timer_at is None or deadline < self._timer_at):
                self._set_timer(deadline)
        except Exception as error:
            self._crash(error)
        finally:
            self._busy = False

    def stop(self) -> None:
        """End at once: no event, no action any more. ``close`` waits until what was sent has gone out."""
        if self._stopped:
            return
        self._stopped = True
        self._waiting.clear()
        self._cancel_timer()
        for name in list(self._links):
            self._disconnect(name)

    def abandon(self) -> list[int]:
        """Stop without touching sockets or the event loop, which is closed, or runs in the parent of this process.

        Returns the descriptors of the sockets: nobody closes them.
        """
        self._stopped = True
        self._waiting.clear()
        return [link.fileno for link in self._links.values() if link.fileno >= 0]

    async def close(self) -> None:
        """Stop, and wait until all sockets and tasks are gone: at most the longest ``close_timeout_s``."""
        self.stop()
        try:
            if self._closing:
                await asyncio.wait(self._closing)
        finally:
            for task in self._closing:
                task.cancel()

    # The machine.

    def _step(self, event: Any) -> None:
        self._recent.append(event)
        now = self._time()
        if now > self._now:
            self._now = now
        own = self._execute_own
        for action in self._machine.handle(event, self._now):
            kind = type(action)  # pyright: ignore[reportUnknownVariableType]
            if kind in own:
                own[kind](action)
            else:
                try:
                    self._on_action(action)
                except Exception as error:
                    report_exception(self._loop, error, f"on_action of {type(self._machine).__name__}")
            if self._stopped:
                return
        if type(event) is Pushed and len(event.messages) > PUSHES_SHOWN:
            self._recent[-1] = Pushed(event.link, event.messages[:PUSHES_SHOWN])

    def _crash(self, error: Exception) -> None:
        events = "\n".join(f"  {_short.repr(event)}" for event in self._recent)
        name = type(self._machine).__name__
        crash = MachineCrashed(
            f"{name} crashed with {error!r}: this is a bug, unless a signal's handler has raised it;"
            f" its latest events, oldest first:\n{events}"
        )
        crash.__cause__ = error
        self.stop()
        if self._on_crash is None:
            report_exception(self._loop, crash, name)
            return
        try:
            self._on_crash(crash)
        except Exception as failure:
            report_exception(self._loop, failure, f"on_crash of {name}")

    # Links.

    def _connect(self, action: Connect) -> None:
        name = action.link
        assert name not in self._links, f"link {name!r} was connected twice"

        def down(reason: str) -> None:
            self.handle(LinkDown(name, reason, link.refused))

        try:
            link = Link(
                action.url,
                options=self._link_options(action),
                on_up=lambda run_id: self.handle(LinkUp(name, run_id)),
                on_down=down,
                on_pushes=partial(self._pushed, name),
            )
        except InvalidUrl as error:
            self.handle(LinkDown(name, str(error)))
            return
        self._links[name] = link
        link.start()

    def _disconnect(self, name: str) -> None:
        link = self._links.pop(name, None)
        if link is not None:
            link.stop()
            task = self._loop.create_task(link.close(), name=f"close link {name}")
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def _send(self, action: Send) -> None:
        link = self._links.get(action.link)
        if link is not None:
            tag = action.tag
            link.send(action.args, None if tag is None else partial(self._replied, action.link, tag))

    def _send_all(self, action: SendAll) -> None:
        link = self._links.get(action.link)
        if link is not None:
            link.send_all(action.commands, partial(self._replied_all, action.link, action.tag))

    def _pushed(self, name: str, messages: list[list[Any]]) -> None:
        if self._on_pushes is not None and not self._busy:
            try:
                taken = self._on_pushes(name, messages)
            except Exception as error:
                self._crash(error)
                return
            if taken == len(messages):
                return
            if taken:
                messages = messages[taken:]
        self.handle(Pushed(name, messages))

    def _replied(self, name: str, tag: Any, value: Any) -> None:
        self.handle(Replied(name, tag, value))

    def _replied_all(self, name: str, tag: Any, values: list[Any]) -> None:
        self.handle(RepliedAll(name, tag, values))

    # Time.

    def _set_timer(self, deadline: float) -> None:
        """Move the timer to the machine's deadline, which is earlier than the timer's present time."""
        if self._stopped:
            return
        self._cancel_timer()
        self._timer_at = deadline
        self._timer = self._loop.call_at(deadline, self._time_is_up)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_at = None

    def _time_is_up(self) -> None:
        self._timer = None
        self._timer_at = None
        try:
            deadline = self._machine.deadline()
        except Exception as error:
            self._crash(error)
            return
        now = max(self._now, self._loop.time())
        if deadline is None:
            return
        if deadline <= now + CLOCK_STEP_S:
            self._now = max(now, deadline)
            self.handle(Tick())
        else:
            self._set_timer(deadline)


_short = reprlib.Repr()
_short.maxstring = _short.maxother = 300
