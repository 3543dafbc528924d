"""The driver: a machine with real links, its time, its re-entrancy, and its crash."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from dynamoth.machine.events import (
    Connect,
    Disconnect,
    ErrorReply,
    LinkDown,
    LinkUp,
    Pushed,
    Replied,
    RepliedAll,
    Send,
    SendAll,
    Tick,
)
from dynamoth_cli.local.embedded import EmbeddedRedis
from dynamoth_link.driver import CLOCK_STEP_S, PUSHES_SHOWN, RECENT_EVENTS, Driver, OnPushes
from dynamoth_link.errors import MachineCrashed
from dynamoth_link.options import LinkOptions
from tests.link.harness import HASTY, Recorder, Runner


@dataclass
class Do:
    """The test tells the machine what to ask for."""

    actions: list[Any]


@dataclass
class Puppet:
    """A machine that does what it is told, and notes what else it hears."""

    heard: Callable[[Any], None]
    wants_tick_at: float | None = None
    times: list[float] = field(default_factory=list[float])
    entered: bool = False

    def handle(self, event: Any, now: float) -> list[Any]:
        assert not self.entered
        self.entered = True
        self.times.append(now)
        if isinstance(event, Do):
            actions = event.actions
        elif isinstance(event, ZeroDivisionError):
            raise event
        else:
            self.heard(event)
            actions = []
            if isinstance(event, Tick):
                self.wants_tick_at = None
        self.entered = False
        return actions

    def deadline(self) -> float | None:
        return self.wants_tick_at


class Stage:
    """A driver with a puppet; everything goes into one recorder."""

    def __init__(
        self,
        on_action: Callable[[Any], None] | None = None,
        link_options: Callable[[Connect], LinkOptions] = lambda action: HASTY,
        on_crash: Callable[[MachineCrashed], None] | None = None,
        on_pushes: OnPushes | None = None,
    ) -> None:
        self.calls = Recorder()
        self.puppet = Puppet(self.calls.record("event"))
        self.driver = Driver(
            self.puppet,
            on_action=on_action or self.calls.record("action"),
            link_options=link_options,
            on_crash=on_crash,
            on_pushes=on_pushes,
        )

    def do(self, *actions: Any) -> None:
        self.driver.handle(Do(list(actions)))

    @property
    def events(self) -> list[Any]:
        return self.calls.of("event")


def test_a_machine_talks_to_a_server(redis: EmbeddedRedis, run_async: Runner) -> None:
    async def main() -> None:
        stage = Stage()
        stage.do(Send("a", ["ECHO", "dropped: no link"], tag=0), Connect("a", redis.url))
        stage.do(Send("a", ["ECHO", "dropped: not up"], tag=0))
        await stage.calls.count("event", 1)
        stage.do(
            Send("a", ["ECHO", 1], tag=("x", 1)),
            Send("a", ["ECHO", 2]),
            Send("a", ["SUBSCRIBE", "c"], tag="only an error"),
            Send("a", ["NONSENSE"], tag=3),
            Send("a", ["ECHO", 4], tag=0),
            SendAll("a", [["ECHO", 5], ["ECHO", 6]], tag="both"),
            SendAll("b", [["ECHO", "dropped: no link"]], tag=0),
        )
        await stage.calls.until(lambda: sum(len(e.values) for e in stage.events if isinstance(e, RepliedAll)) == 2)
        together = [event for event in stage.events if isinstance(event, RepliedAll)]
        assert [(event.link, event.tag) for event in together] == [("a", "both")] * len(together)
        assert [value for event in together for value in event.values] == [b"5", b"6"]
        up, first, pushed, error, last = stage.events[:5]
        assert isinstance(up, LinkUp)
        assert up.run_id is not None
        assert first == Replied("a", ("x", 1), b"1")
        assert pushed == Pushed("a", [[b"subscribe", b"c", 1]])
        assert isinstance(error, Replied)
        assert isinstance(error.value, ErrorReply)
        assert last == Replied("a", 0, b"4")
        assert stage.driver.link("a") is not None
        stage.do(Disconnect("a"))
        assert stage.driver.link("a") is None
        await stage.driver.close()
        assert len(stage.events) == 5 + len(together)

    run_async(main)


def test_links_come_and_go(redis: EmbeddedRedis, run_async: Runner) -> None:
    async def main() -> None:
        stage = Stage()
        stage.do(Connect("a", redis.url), Connect("b", redis.url))
        await stage.calls.count("event", 2)
        redis.restart()
        await stage.calls.until(lambda: sum(isinstance(event, LinkUp) for event in stage.events) == 4)
        for name in ("a", "b"):
            of_link = [event for event in stage.events if event.link == name]
            assert [type(event) for event in (of_link[0], of_link[1], of_link[-1])] == [LinkUp, LinkDown, LinkUp]
            assert of_link[0].run_id != of_link[-1].run_id
        # A name is free at once, and nothing of the old link is heard under it.
        seen = len(stage.events)
        stage.do(Send("a", ["ECHO", "old"], tag=1), Disconnect("a"), Connect("a", redis.url))
        await stage.calls.count("event", seen + 1)
        stage.do(Send("a", ["ECHO", "new"], tag=2))
        await stage.calls.count("event", seen + 2)
        assert isinstance(stage.events[seen], LinkUp)
        assert stage.events[seen + 1 :] == [Replied("a", 2, b"new")]
        await stage.driver.close()

    run_async(main)


def test_no_event_of_a_link_comes_after_its_disconnect(redis: EmbeddedRedis, run_async: Runner) -> None:
    """Not even what the same read has brought."""

    async def main() -> None:
        stage = Stage()
        stage.do(Connect("a", redis.url))
        await stage.calls.count("event", 1)

        def hear(event: Any) -> None:
            stage.calls.record("event")(event)
            stage.do(Disconnect("a"))

        stage.puppet.heard = hear
        stage.do(Send("a", ["ECHO", 1], tag=1), Send("a", ["SUBSCRIBE", "c"]), Send("a", ["ECHO", 2], tag=2))
        await stage.calls.count("event", 2)
        await stage.driver.close()
        assert stage.events[1:] == [Replied("a", 1, b"1")]

    run_async(main)


def test_options_belong_to_the_link(redis: EmbeddedRedis, run_async: Runner) -> None:
    async def main() -> None:
        stage = Stage(link_options=lambda action: LinkOptions(client_name=f"link-{action.link}"))
        stage.do(Connect("a", redis.url), Connect("b", redis.url))
        await stage.calls.count("event", 2)
        stage.do(Send("a", ["CLIENT", "GETNAME"], tag=0), Send("b", ["CLIENT", "GETNAME"], tag=0))
        await stage.calls.count("event", 4)
        assert {event.value for event in stage.events[2:]} == {b"link-a", b"link-b"}
        await stage.driver.close()

    run_async(main)


def test_a_url_that_is_none_is_an_event(run_async: Runner) -> None:
    async def main() -> None:
        stage = Stage()
        stage.do(Connect("a", "redis://u:secret@h:port"), "after")
        (down,) = stage.events
        assert isinstance(down, LinkDown)
        assert "is no port" in down.reason
        assert "secret" not in down.reason
        assert [name for name, _ in stage.calls.calls] == ["action", "event"]
        stage.do(Disconnect("a"), Disconnect("never heard of"))
        await stage.driver.close()

    run_async(main)


def test_other_actions_are_handed_on_in_order_and_events_wait(run_async: Runner) -> None:
    async def main() -> None:
        order: list[Any] = []

        def act(action: Any) -> None:
            order.append(action)
            if action == 1:
                stage.do(10, 11)
                stage.do(20)
            if action == 10:
                stage.do(30)

        stage = Stage(act)
        stage.do(1, 2, 3)
        assert order == [1, 2, 3, 10, 11, 20, 30]
        await stage.driver.close()

    run_async(main)


def test_a_broken_on_action_is_reported_and_the_rest_is_done(run_async: Runner) -> None:
    async def main() -> None:
        done: list[int] = []

        def act(action: int) -> None:
            done.append(action)
            raise ValueError(f"bug {action}")

        stage = Stage(on_action=act)
        stage.do(1, 2)
        stage.do(3)
        assert done == [1, 2, 3]
        assert not stage.driver.is_stopped
        await stage.driver.close()

    reported = run_async(main, bugs=3)
    assert "on_action of Puppet" in reported[0]


def test_ticks_come_at_the_deadline_and_never_before(run_async: Runner) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        stage = Stage()
        wanted: list[float] = []
        stage.puppet.wants_tick_at = loop.time() + 0.0204
        stage.driver.start()
        for number in range(1, 10):
            wanted.append(stage.puppet.wants_tick_at or 0)
            await stage.calls.count("event", number)
            stage.puppet.wants_tick_at = loop.time() + 0.0011 * number
            stage.do()
        ticked = stage.puppet.times[::2]
        assert all(tick >= want for tick, want in zip(ticked, wanted, strict=False)), (ticked, wanted)
        assert stage.puppet.times == sorted(stage.puppet.times)
        await stage.driver.close()

    run_async(main)


def test_a_deadline_may_move(run_async: Runner) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        stage = Stage()
        began_at = loop.time()
        stage.puppet.wants_tick_at = began_at + 0.03
        stage.do()
        stage.puppet.wants_tick_at = began_at + 0.09  # later
        stage.do()
        await stage.calls.count("event", 1)
        assert stage.puppet.times[-1] >= began_at + 0.09
        assert loop.time() >= began_at + 0.09 - CLOCK_STEP_S
        stage.puppet.wants_tick_at = began_at + 100
        stage.do()
        stage.puppet.wants_tick_at = began_at  # earlier, and past
        stage.do()
        await stage.calls.count("event", 2)
        stage.puppet.wants_tick_at = loop.time() + 0.02
        stage.do()
        stage.puppet.wants_tick_at = None  # no more
        stage.do()
        await asyncio.sleep(0.05)  # that nothing happens in it
        assert stage.events == [Tick(), Tick()]
        await stage.driver.close()

    run_async(main)


def test_a_crash_stops_the_driver_and_tells_how_it_came_about(redis: EmbeddedRedis, run_async: Runner) -> None:
    async def main() -> None:
        crashes: list[MachineCrashed] = []
        stage = Stage(on_crash=crashes.append)
        stage.do(Connect("a", redis.url))
        await stage.calls.count("event", 1)
        for number in range(100):
            stage.do(f"action {number}")
        stage.driver.handle(ZeroDivisionError("boom"))
        (crash,) = crashes
        assert isinstance(crash.__cause__, ZeroDivisionError)
        lines = str(crash).splitlines()
        assert "Puppet crashed with ZeroDivisionError('boom')" in lines[0]
        assert len(lines) == 1 + RECENT_EVENTS
        assert "action 99" in lines[-2]
        assert stage.driver.is_stopped
        assert stage.driver.link("a") is None
        stage.do("nothing more")
        assert stage.calls.of("action")[-1] == "action 99"
        await stage.driver.close()

    run_async(main)


def test_a_crash_report_shows_the_first_pushes_of_earlier_events_and_the_driver_keeps_no_more(
    run_async: Runner,
) -> None:
    async def main() -> None:
        crashes: list[MachineCrashed] = []
        stage = Stage(on_crash=crashes.append)
        for number in range(RECENT_EVENTS):
            stage.driver.handle(Pushed("a", [[b"message", b"c", b"%d of %d" % (index, number)] for index in range(5)]))
        kept = [event for event in stage.driver._recent if isinstance(event, Pushed)]  # pyright: ignore[reportPrivateUsage]
        assert [len(event.messages) for event in kept] == RECENT_EVENTS * [PUSHES_SHOWN]
        stage.driver.handle(ZeroDivisionError("boom"))
        assert f"1 of {RECENT_EVENTS - 1}" in str(crashes[0])
        await stage.driver.close()

    run_async(main)


@pytest.mark.parametrize(
    "actions",
    [
        [Connect("a", "redis://127.0.0.1:1"), Connect("a", "redis://127.0.0.1:1")],
    ],
)
def test_asking_for_the_impossible_is_a_crash(actions: list[Any], run_async: Runner) -> None:
    async def main() -> None:
        stage = Stage()
        stage.do(*actions)
        assert stage.driver.is_stopped
        await stage.driver.close()

    (reported,) = run_async(main, bugs=1)
    assert "MachineCrashed" in reported
    assert "connected twice" in reported


def test_close_in_the_midst_of_everything(redis: EmbeddedRedis, run_async: Runner) -> None:
    async def main() -> None:
        def stop(_: Any) -> None:
            stage.driver.stop()

        stage = Stage(stop)
        stage.puppet.wants_tick_at = asyncio.get_running_loop().time() + 0.01
        stage.do(*(Connect(str(number), redis.url) for number in range(20)))
        await stage.calls.count("event", 5)
        heard = len(stage.events)
        stage.do(Send("1", ["ECHO", 1], tag=1), "stop", Connect("never", redis.url))
        assert stage.driver.link("never") is None
        closing = asyncio.ensure_future(stage.driver.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait({closing})
        await stage.driver.close()
        assert len(stage.events) == heard

    run_async(main)


def test_pushes_are_offered_and_the_machine_is_told_of_those_that_are_left(
    redis: EmbeddedRedis, run_async: Runner
) -> None:
    async def main() -> None:
        offered: list[list[bytes]] = []

        def take_until_x(link: str, pushes: list[list[Any]]) -> int:
            assert link == "a"
            texts = [push[2] for push in pushes]
            offered.append(texts)
            return texts.index(b"x") if b"x" in texts else len(texts)

        stage = Stage(on_pushes=take_until_x)
        stage.do(Connect("a", redis.url))
        await stage.calls.count("event", 1)
        stage.do(Send("a", [b"SUBSCRIBE", b"c"]))
        texts = [b"1", b"x", b"2", b"3"]
        stage.do(*(Send("a", [b"PUBLISH", b"c", text]) for text in texts), Send("a", [b"PING"], tag="behind"))
        await stage.calls.until(lambda: any(isinstance(event, Replied) for event in stage.events))
        told = [push[2] for event in stage.events if isinstance(event, Pushed) for push in event.messages]
        assert [text for batch in offered for text in batch][1:] == texts, "the first is the acknowledgement"
        begin = next(index for index, batch in enumerate(offered) if b"x" in batch)
        assert told == offered[begin][offered[begin].index(b"x") :]
        await stage.driver.close()

    run_async(main)


def test_who_is_offered_pushes_and_raises_has_crashed(redis: EmbeddedRedis, run_async: Runner) -> None:
    async def main() -> None:
        def raise_it(link: str, pushes: list[list[Any]]) -> int:
            raise ZeroDivisionError

        stage = Stage(on_pushes=raise_it, on_crash=lambda crash: stage.calls.record("crash")(crash))
        stage.do(Connect("a", redis.url))
        await stage.calls.count("event", 1)
        stage.do(Send("a", [b"SUBSCRIBE", b"c"]))
        [crash] = await stage.calls.count("crash", 1)
        assert isinstance(crash.__cause__, ZeroDivisionError)
        assert stage.driver.is_stopped
        assert not any(isinstance(event, Pushed) for event in stage.events)
        await stage.driver.close()

    run_async(main)
