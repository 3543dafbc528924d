"""The driver of real links beyond the contract of all drivers (``tests/contract``): options, crashes, pushes, end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from dynamoth.machine.events import Connect, Disconnect, LinkDown, OnPushes, Pushed, Replied, Send
from dynamoth_cli.local.embedded import EmbeddedRedis
from dynamoth_link.driver import PUSHES_SHOWN, RECENT_EVENTS, Driver
from dynamoth_link.errors import MachineCrashed
from dynamoth_link.options import LinkOptions
from tests.contract.drivers import BUG, Do, Puppet
from tests.link.harness import HASTY, Recorder, Runner


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
        self.puppet = Puppet()
        self.puppet.answer = self._hear
        self.driver = Driver(
            self.puppet,
            on_action=on_action or self.calls.record("action"),
            link_options=link_options,
            on_crash=on_crash,
            on_pushes=on_pushes,
        )

    def _hear(self, event: Any) -> list[Any]:
        self.calls.record("event")(event)
        return []

    def do(self, *actions: Any) -> None:
        self.driver.handle(Do(actions))

    @property
    def events(self) -> list[Any]:
        return self.calls.of("event")


async def test_options_belong_to_the_link(redis: EmbeddedRedis) -> None:
    stage = Stage(link_options=lambda action: LinkOptions(client_name=f"link-{action.link}"))
    stage.do(Connect("a", redis.url), Connect("b", redis.url))
    await stage.calls.count("event", 2)
    stage.do(Send("a", ["CLIENT", "GETNAME"], tag=0), Send("b", ["CLIENT", "GETNAME"], tag=0))
    await stage.calls.count("event", 4)
    assert {event.value for event in stage.events[2:]} == {b"link-a", b"link-b"}
    await stage.driver.close()


async def test_a_url_that_is_none_is_an_event() -> None:
    stage = Stage()
    stage.do(Connect("a", "redis://u:secret@h:port"), "after")
    (down,) = stage.events
    assert isinstance(down, LinkDown)
    assert "is no port" in down.reason
    assert "secret" not in down.reason
    assert [name for name, _ in stage.calls.calls] == ["action", "event"]
    stage.do(Disconnect("a"), Disconnect("never heard of"))
    await stage.driver.close()


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


async def test_a_crash_stops_the_driver_and_says_how_it_came_about(redis: EmbeddedRedis) -> None:
    crashes: list[MachineCrashed] = []
    stage = Stage(on_crash=crashes.append)
    stage.do(Connect("a", redis.url))
    await stage.calls.count("event", 1)
    for number in range(100):
        stage.do(f"action {number}")
    stage.driver.handle(BUG)
    (crash,) = crashes
    assert isinstance(crash.__cause__, ZeroDivisionError)
    lines = str(crash).splitlines()
    assert "Puppet crashed with ZeroDivisionError(): this is a bug, unless a signal's handler" in lines[0]
    assert len(lines) == 1 + RECENT_EVENTS
    assert "action 99" in lines[-2]
    assert stage.driver.is_stopped
    assert stage.driver.link("a") is None
    stage.do("nothing more")
    assert stage.calls.of("action")[-1] == "action 99"
    await stage.driver.close()


async def test_a_crash_report_shows_the_first_pushes_of_earlier_events_and_the_driver_keeps_no_more() -> None:
    crashes: list[MachineCrashed] = []
    stage = Stage(on_crash=crashes.append)
    for number in range(RECENT_EVENTS):
        stage.driver.handle(Pushed("a", [[b"message", b"c", b"%d of %d" % (index, number)] for index in range(5)]))
    kept = [event for event in stage.driver._recent if isinstance(event, Pushed)]  # pyright: ignore[reportPrivateUsage]
    assert [len(event.messages) for event in kept] == RECENT_EVENTS * [PUSHES_SHOWN]
    stage.driver.handle(BUG)
    assert f"1 of {RECENT_EVENTS - 1}" in str(crashes[0])
    await stage.driver.close()


async def test_close_in_the_midst_of_everything(redis: EmbeddedRedis) -> None:
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


async def test_pushes_are_offered_and_the_machine_gets_those_that_are_left(redis: EmbeddedRedis) -> None:
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
    rest = [push[2] for event in stage.events if isinstance(event, Pushed) for push in event.messages]
    assert [text for batch in offered for text in batch][1:] == texts, "the first is the acknowledgement"
    begin = next(index for index, batch in enumerate(offered) if b"x" in batch)
    assert rest == offered[begin][offered[begin].index(b"x") :]
    await stage.driver.close()


async def test_who_is_offered_pushes_and_raises_has_crashed(redis: EmbeddedRedis) -> None:
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
