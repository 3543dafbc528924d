from __future__ import annotations

from typing import Any

from dynamoth.machine.events import Connect, Disconnect, LinkDown, LinkUp, Replied, Send, Tick
from dynamoth_client.machines.reachability import (
    NOT_CONNECTED_YET,
    LinkClosed,
    LinkOpened,
    Ping,
    Ponged,
    Unreachable,
    WatchedSubscriber,
)


class _Inner:
    """Asks for what the test says."""

    def __init__(self) -> None:
        self.next: list[Any] = []
        self.wish: float | None = None
        self.seen: list[Any] = []

    def handle(self, event: Any, now: float) -> list[Any]:
        self.seen.append(event)
        actions, self.next = self.next, []
        return actions

    def deadline(self) -> float | None:
        return self.wish


def _connected(*links: str, at: float = 0.0) -> tuple[_Inner, WatchedSubscriber]:
    inner = _Inner()
    watched = WatchedSubscriber(inner, unreachable_s=5.0)
    inner.next = [Connect(link, f"redis://{link}") for link in links]
    watched.handle("subscribe", at)
    return inner, watched


def test_links_are_announced_behind_their_actions() -> None:
    inner = _Inner()
    watched = WatchedSubscriber(inner, unreachable_s=5.0)
    inner.next = [connect := Connect("s1", "redis://s1"), send := Send("s1", ("PING",))]
    assert watched.handle("subscribe", 0.0) == [connect, LinkOpened("s1"), send]
    inner.next = [disconnect := Disconnect("s1")]
    assert watched.handle("unsubscribe", 0.0) == [disconnect, LinkClosed("s1")]
    assert watched.deadline() is None


def test_says_so_when_no_link_has_been_up_and_again_as_much_later() -> None:
    _, watched = _connected("s1", "s2", at=1.0)
    watched.handle(LinkDown("s1", "refused"), 2.0)
    assert watched.deadline() == 6.0
    assert watched.handle(Tick(), 5.9) == []
    assert watched.handle(Tick(), 6.0) == [Unreachable({"s1": "refused", "s2": NOT_CONNECTED_YET})]
    assert watched.deadline() == 11.0
    assert watched.handle(Tick(), 11.0) == [Unreachable({"s1": "refused", "s2": NOT_CONNECTED_YET})]


def test_one_link_that_is_up_is_enough() -> None:
    _, watched = _connected("s1", "s2")
    watched.handle(LinkUp("s2"), 4.0)
    assert watched.deadline() is None
    watched.handle(LinkDown("s2", "lost"), 7.0)
    assert watched.deadline() == 12.0
    watched.handle(LinkUp("s1"), 11.0)
    assert watched.handle(Tick(), 12.0) == []


def test_the_last_link_that_was_up_may_be_closed() -> None:
    inner, watched = _connected("s1", "s2")
    watched.handle(LinkUp("s2"), 1.0)
    inner.next = [Disconnect("s2")]
    watched.handle("unsubscribe", 3.0)
    assert watched.deadline() == 8.0


def test_the_inner_machine_s_wish_counts_too() -> None:
    inner, watched = _connected("s1")
    inner.wish = 3.0
    assert watched.deadline() == 3.0
    inner.wish = 9.0
    assert watched.deadline() == 5.0


def test_ping_goes_over_a_link_that_is_up_and_the_inner_machine_sees_nothing_of_it() -> None:
    inner, watched = _connected("s1", "s2")
    watched.handle(LinkDown("s1", "refused"), 1.0)
    watched.handle(LinkUp("s2"), 1.0)
    seen = list(inner.seen)
    (send,) = watched.handle(Ping(b"hello"), 1.0)
    assert (send.link, send.args) == ("s2", (b"PING", b"hello"))
    assert watched.handle(Replied("s2", send.tag, b"hello"), 1.0) == [Ponged(b"hello")]
    (send,) = watched.handle(Ping(None), 1.0)
    assert watched.handle(Replied("s2", send.tag, b"PONG"), 1.0) == [Ponged(b"")]
    assert inner.seen == seen


def test_a_ping_waits_for_a_link() -> None:
    inner, watched = _connected("s1", "s2")
    assert watched.handle(Ping(b"first"), 1.0) == []
    assert watched.handle(Ping(None), 1.0) == []
    inner.next = [subscribe := Send("s2", (b"SUBSCRIBE", b"c"))]
    actions = watched.handle(LinkUp("s2"), 1.0)
    assert actions[0] == subscribe
    assert [action.args for action in actions[1:]] == [(b"PING", b"first"), (b"PING",)]
    assert watched.handle(LinkUp("s1"), 1.0) == []
