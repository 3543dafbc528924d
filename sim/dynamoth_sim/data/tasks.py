"""Sequential programs in the simulator: each asks a server, sleeps, asks again, and can be killed in between.

Theory of operation
-------------------
The data cluster is written with threads that wait for each command. Here a thread is a *task*, a generator: it yields
what it waits for, and gets the outcome. ``TaskMachine`` is the machine that runs tasks over links to log servers, one
to each, as a pool with one connection does. A command fails with ``ServerFailed`` where the server refuses it, where it
is not connected, where the connection is lost before the reply, and after ``timeout_s``. In the last two cases it may
have been executed.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from dynamoth.machine.events import (
    CommandPart,
    Connect,
    ErrorReply,
    LinkDown,
    LinkUp,
    Replied,
    Send,
    Start,
    Tick,
)

Command = Sequence[CommandPart]


class ServerFailed(Exception):
    """Raised in a task when a server does not answer, or refuses a command."""


@dataclass(slots=True)
class Ask:
    """A task waits for the reply to one command."""

    server: str
    command: Command


@dataclass(slots=True)
class Sleep:
    """A task waits for a time."""

    until: float


@dataclass(slots=True)
class PublishResults:
    """A task waits until messages, channel and payload each, are published, or cannot be. Also the machine's action."""

    messages: Sequence[tuple[bytes, bytes]]
    number: int = 0


@dataclass(slots=True)
class ResultsPublished:
    """Event: the messages of the ``PublishResults`` with this number are published, or cannot be."""

    number: int


@dataclass(slots=True)
class Die:
    """Action: the process is killed now."""


@dataclass(slots=True)
class Ended:
    """Action: a task has ended the process."""

    reason: str


class ProcessEnds(Exception):
    """Raised by a task to end its process; the argument is the reason."""


Task = Generator[Ask | Sleep | PublishResults, Any, None]


def ask(server: str, *command: CommandPart) -> Generator[Ask, Any, Any]:
    """Execute one command, and return the reply. Raises ServerFailed."""
    reply = yield Ask(server, command)
    if isinstance(reply, ErrorReply):
        raise ServerFailed(f"{server}: {reply}")
    return reply


@dataclass(slots=True, eq=False)
class _Running:
    """A task, and what it waits for."""

    task: Task
    #: The server that it waits for, and the command that this has not answered.
    server: str | None = None
    command: Command = ()
    #: When it goes on, or when it gives the server up.
    until: float | None = None
    #: Numbers what it waits for: an answer to something before that comes too late.
    turn: int = 0


@dataclass(slots=True)
class TaskMachine:
    """Runs tasks.

    Args:
        urls: of the servers, by id.
        timeout_s: after which a command that is not answered has failed.

    """

    urls: Mapping[str, str]
    timeout_s: float
    now: float = 0.0
    #: The process is killed at the command that makes this 0; None: it is not.
    commands_left: int | None = None
    #: Whether it is killed before that command is sent; else behind it, and the server executes it.
    dies_before: bool = False
    _up: set[str] = field(default_factory=set[str])
    _tasks: dict[_Running, None] = field(default_factory=dict[_Running, None])
    _publishing: dict[int, _Running] = field(default_factory=dict[int, _Running])
    _numbers: count[int] = field(default_factory=count)
    _new: list[Task] = field(default_factory=list[Task])

    def add(self, task: Task) -> None:
        """Begin a task, with the next event at the latest."""
        self._new.append(task)

    def cancel(self, task: Task) -> None:
        """End a task now. A command that it has sent may still be executed."""
        self._new = [each for each in self._new if each is not task]
        for running in [each for each in self._tasks if each.task is task]:
            del self._tasks[running]
        task.close()

    def asked(self, server: str | None = None) -> list[Command]:
        """Return the commands that are not answered yet, by any server or by this one."""
        return [each.command for each in self._tasks if each.server is not None and server in (None, each.server)]

    def handle(self, event: Any, now: float) -> list[Any]:
        """Handle one event; return the actions to execute, in order."""
        self.now = now
        actions: list[Any] = []
        match event:
            case Start():
                actions += [Connect(id_, url) for id_, url in self.urls.items()]
            case LinkUp(link, _):
                self._up.add(link)
            case LinkDown(link, reason):
                self._up.discard(link)
                for running in [each for each in self._tasks if each.server == link]:
                    if running not in self._tasks:
                        continue  # another one has cancelled it
                    actions += self._step(running, ServerFailed(f"{link}: {reason}"))
            case Replied(_, (running, turn), value):
                if running in self._tasks and running.turn == turn:
                    actions += self._step(running, value)
            case ResultsPublished(number):
                running = self._publishing.pop(number)
                if running in self._tasks:
                    actions += self._step(running, None)
            case Tick():
                for running in [each for each in self._tasks if each.until is not None and each.until <= now]:
                    if running not in self._tasks:
                        continue
                    late = None if running.server is None else ServerFailed(f"{running.server}: it does not answer")
                    actions += self._step(running, late)
            case _:
                raise AssertionError(f"not an event of tasks: {event!r}")
        while self._new:
            running = _Running(self._new.pop(0))
            self._tasks[running] = None
            actions += self._step(running, None)
        return actions

    def deadline(self) -> float | None:
        """Return when a task goes on by itself."""
        return min((each.until for each in self._tasks if each.until is not None), default=None)

    def _step(self, running: _Running, outcome: Any) -> list[Any]:
        """Hand a task what it waits for; return what it does next."""
        while True:
            running.server, running.until = None, None
            running.turn += 1
            try:
                is_failure = isinstance(outcome, ServerFailed)
                wanted = running.task.throw(outcome) if is_failure else running.task.send(outcome)
            except StopIteration:
                del self._tasks[running]
                return []
            except ProcessEnds as error:
                self._tasks.clear()
                return [Ended(str(error))]
            match wanted:
                case Sleep(until):
                    running.until = until
                    return []
                case PublishResults(messages):
                    number = next(self._numbers)
                    self._publishing[number] = running
                    return [PublishResults(messages, number)]
                case Ask(server, command):
                    if server in self._up:
                        return self._send(running, server, command)
                    outcome = ServerFailed(f"{server}: there is no connection")

    def _send(self, running: _Running, server: str, command: Command) -> list[Any]:
        running.server, running.command, running.until = server, command, self.now + self.timeout_s
        send = Send(server, command, (running, running.turn))
        if self.commands_left is None:
            return [send]
        self.commands_left -= 1
        if self.commands_left:
            return [send]
        self.commands_left = None
        return [Die()] if self.dies_before else [send, Die()]
