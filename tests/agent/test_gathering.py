"""An agent of a busy server reads in large pieces; one that is behind, or has little to do, does not wait."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any, cast

from dynamoth_agent.process.gathering import BUSY_MESSAGES_PER_S, GATHER_S, READS_JUDGED, Gathering


class FakeLoop:
    """A clock, and what was put off."""

    def __init__(self) -> None:
        self.now = 100.0
        self.soon: list[Callable[[], None]] = []
        self.later: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now

    def call_soon(self, callback: Callable[[], None]) -> None:
        self.soon.append(callback)

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        self.later.append((delay_s, callback))

    def turn(self) -> None:
        soon, self.soon = self.soon, []
        for callback in soon:
            callback()


class FakeLink:
    def __init__(self, fileno: int = -1) -> None:
        self.fileno = fileno
        self.said: list[str] = []

    def pause_reading(self) -> None:
        self.said.append("pause")

    def resume_reading(self) -> None:
        self.said.append("resume")


class Stage:
    def __init__(self, fileno: int = -1, parts_max: int = 2) -> None:
        self.loop = FakeLoop()
        self.link: FakeLink | None = FakeLink(fileno)
        self.may_wait = True
        self.gathering = Gathering(
            cast("Any", self.loop), "local", lambda: cast("Any", self.link), lambda: self.may_wait
        )
        self.gathering._parts_max = parts_max  # pyright: ignore[reportPrivateUsage]

    def read(self, messages: int, parts: int = 1, name: str = "local", after_s: float = 0.001) -> list[str]:
        """Let one read bring messages; return what the link is asked."""
        self.loop.now += after_s
        for _ in range(parts):
            assert self.gathering.observed(name, [[b"pmessage"]] * messages) == 0, "the machine handles all of it"
        self.loop.turn()
        said = [] if self.link is None else self.link.said[:]
        if self.link is not None:
            self.link.said.clear()
        return said

    def become_busy(self) -> None:
        for _ in range(READS_JUDGED - 1):
            assert self.read(100) == []
        assert self.read(100) == ["pause"]
        [(delay_s, callback)] = self.loop.later
        self.loop.later.clear()
        assert delay_s == GATHER_S
        callback()
        assert self.link is not None and self.link.said == ["resume"]
        self.link.said.clear()


def test_a_busy_agent_pauses_after_each_read_and_reads_on_a_little_later() -> None:
    stage = Stage()
    stage.become_busy()
    assert stage.read(500, after_s=GATHER_S) == ["pause"]


def test_an_agent_with_few_messages_reads_them_at_once() -> None:
    stage = Stage()
    interval_s = 2 / BUSY_MESSAGES_PER_S
    for _ in range(5 * READS_JUDGED):
        assert stage.read(1, after_s=interval_s) == []


def test_an_agent_that_is_not_busy_any_more_does_not_wait_any_more() -> None:
    stage = Stage()
    stage.become_busy()
    for _ in range(READS_JUDGED):
        stage.read(1, after_s=GATHER_S)
    assert stage.read(1, after_s=GATHER_S) == []


def test_how_much_fits_into_the_socket_is_asked_of_the_socket() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        stage = Stage(ours.fileno())
        stage.gathering.link_up()
        parts_max = stage.gathering._parts_max  # pyright: ignore[reportPrivateUsage]
        assert parts_max >= 1
        assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) >= parts_max * 32 * 1024


def test_an_agent_that_is_behind_or_has_something_urgent_reads_on() -> None:
    stage = Stage(parts_max=4)
    stage.become_busy()
    assert stage.read(300, parts=4) == []
    assert stage.read(300, parts=3) == ["pause"]
    stage.may_wait = False
    assert stage.read(500) == []
    stage.may_wait = True
    assert stage.read(500) == ["pause"]


def test_other_links_and_links_that_are_gone_are_left_alone() -> None:
    stage = Stage()
    stage.become_busy()
    assert stage.read(1000, name="to:s2") == []
    assert stage.read(1000) == ["pause"]
    [(_, read_on)] = stage.loop.later
    stage.link = None
    read_on()
    stage.gathering.link_up()
    stage.read(1000)


def test_a_link_without_a_socket_is_left_alone() -> None:
    Stage(fileno=-1).gathering.link_up()
