"""Both drivers keep the contract of ``dynamoth.machine.events``: the real one on three event loops, and the simulated.

``tests/link/test_driver.py`` and ``tests/sim/test_process.py`` have what only one of them does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest
import uvloop

from dynamoth.machine.events import Connect, Disconnect, ErrorReply, LinkDown, LinkUp, Replied, Send, SendAll, Tick
from dynamoth_client.threads.loop import Loop
from tests.contract.drivers import BUG, DriverUnderTest, RealDriver, SimulatedDriver
from tests.redis_servers import RedisServerFactory


@pytest.fixture(params=["simulated", "asyncio", "uvloop", "threads"])
def driver(
    request: pytest.FixtureRequest, redis_server_factory: RedisServerFactory, free_port: int
) -> Iterator[DriverUnderTest]:
    if request.param == "simulated":
        simulated = SimulatedDriver()
        yield simulated
        simulated.close()
        return
    factory = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop, "threads": Loop}[request.param]
    loop = factory()

    def run(main: Coroutine[Any, Any, Any]) -> Any:
        if not isinstance(loop, Loop):
            return loop.run_until_complete(main)
        loop.enter()
        try:
            task = loop.create_task(main)
            loop.drive(task)
        finally:
            loop.leave()
        return task.result()

    real = RealDriver(redis_server_factory(port=free_port), run)
    yield real
    real.close()
    loop.close()


def connect(driver: DriverUnderTest, *names: str) -> None:
    """Open links, and forget the events of that."""
    driver.do(*(Connect(name, driver.url) for name in names))
    driver.until(lambda: len(driver.of(LinkUp)) == len(names))
    driver.events.clear()


def test_replies_and_pushes_come_in_the_order_of_the_commands(driver: DriverUnderTest) -> None:
    driver.do(Connect("a", driver.url))
    driver.until(lambda: driver.events)
    (up,) = driver.events
    assert isinstance(up, LinkUp) and up.link == "a" and up.run_id
    tag = ("any", ["object"])
    driver.do(
        Send("a", ["PING", 1], tag=tag),
        Send("a", ["PING", "untagged"]),
        Send("a", [b"SUBSCRIBE", "c"], tag="comes back with an error only"),
        Send("a", [b"HGET", b"no such key", b"f"], tag=2),
        Send("a", [b"UNSUBSCRIBE", b"c"]),
        Send("a", ["PING", "last"], tag=0),
    )
    driver.until(lambda: driver.values(0))
    assert driver.values(tag) == [b"1"] and driver.values(2) == [None]
    flat = driver.events[1:]
    assert [event.tag for event in flat if isinstance(event, Replied)] == [tag, 2, 0]
    assert driver.pushes() == [[b"subscribe", b"c", 1], [b"unsubscribe", b"c", 0]]
    order = [type(event).__name__ for event in flat]
    assert order == ["Replied", "Pushed", "Replied", "Pushed", "Replied"], "a reply proves what was sent before it"
    assert flat[0].tag is tag


def test_commands_that_are_sent_together_are_answered_in_order(driver: DriverUnderTest) -> None:
    connect(driver, "a")
    driver.do(
        Send("a", ["PING", 0], tag="before"),
        SendAll("a", [["PING", number] for number in range(100)], tag="all"),
        Send("a", ["PING", 0], tag="behind"),
    )
    driver.until(lambda: driver.values("behind"))
    assert driver.values("all") == [b"%d" % number for number in range(100)]
    tags = [event.tag for event in driver.events]
    assert tags[0] == "before" and tags[-1] == "behind" and set(tags[1:-1]) == {"all"}


def test_a_refused_command_is_answered_with_an_error_and_others_are_not_affected(driver: DriverUnderTest) -> None:
    connect(driver, "a")
    driver.forbid("hget")
    driver.forbid("psubscribe")
    commands: list[list[bytes | str | int]] = [["PING", 1], [b"HGET", b"k", b"f"], ["PING", 2]]
    driver.do(SendAll("a", commands, tag="all"), Send("a", [b"PSUBSCRIBE", b"*"], tag=b"*"))
    driver.do(*(Send("a", command, tag=command[-1]) for command in commands))
    driver.until(lambda: driver.values(2))
    first, refused, last = driver.values("all")
    assert (first, last) == (b"1", b"2") and isinstance(refused, ErrorReply) and refused.lacks_permission
    for tag in (b"f", b"*"):
        (error,) = driver.values(tag)
        assert isinstance(error, ErrorReply)
    assert not driver.pushes()


def test_commands_for_a_link_that_is_not_up_are_dropped(driver: DriverUnderTest) -> None:
    driver.do(Send("a", ["PING"], tag="unknown"), Connect("a", driver.url), Send("a", ["PING"], tag="coming up"))
    driver.do(SendAll("b", [["PING"]], tag="unknown"))
    driver.until(lambda: driver.events)
    driver.stop_server()
    driver.until(lambda: driver.of(LinkDown))
    driver.do(Send("a", ["PING"], tag="down"), SendAll("a", [["PING"]], tag="down"))
    driver.start_server()
    driver.until(lambda: len(driver.of(LinkUp)) == 2)
    driver.do(Send("a", ["PING"], tag="up"))
    driver.until(lambda: driver.values("up"))
    assert {type(event) for event in driver.events[:-1]} == {LinkUp, LinkDown}


def test_a_lost_link_is_opened_again_until_the_server_is_back(driver: DriverUnderTest) -> None:
    driver.do(Connect("a", driver.url), Connect("b", driver.url))
    driver.until(lambda: len(driver.of(LinkUp)) == 2)
    driver.do(Send("a", ["SUBSCRIBE", "c"]), Send("a", ["PING"], tag="behind"))
    driver.until(lambda: driver.values("behind"))
    driver.stop_server()
    driver.until(lambda: all(sum(down.link == name for down in driver.of(LinkDown)) > 1 for name in "ab"))
    driver.start_server()
    driver.until(lambda: len(driver.of(LinkUp)) == 4)
    for name in "ab":
        ups = [event for event in driver.of(LinkUp) if event.link == name]
        assert ups[0].run_id != ups[1].run_id, "another process"
        states = [type(e) for e in driver.events if isinstance(e, LinkUp | LinkDown) and e.link == name]
        assert states == [LinkUp, *[LinkDown] * (len(states) - 2), LinkUp]
    driver.publish(b"c", b"lost")
    driver.do(Send("a", ["PING"], tag="last"))
    driver.until(lambda: driver.values("last"))
    assert driver.pushes() == [[b"subscribe", b"c", 1]], "the driver subscribes to nothing by itself"


def test_no_event_of_a_link_comes_after_its_disconnect(driver: DriverUnderTest) -> None:
    """Not even what the same read has brought; and its name is free at once."""
    connect(driver, "a")
    driver.puppet.answer = lambda event: (
        [Disconnect("a"), Connect("a", driver.url)] if isinstance(event, Replied) and event.tag == 1 else []
    )
    driver.do(Send("a", ["PING"], tag=1), Send("a", ["SUBSCRIBE", "c"]), Send("a", ["PING"], tag=2))
    driver.until(lambda: driver.of(LinkUp))
    driver.do(Send("a", ["PING", "new"], tag=3))
    driver.until(lambda: driver.values(3))
    assert [type(event) for event in driver.events] == [Replied, LinkUp, Replied]


def test_a_link_that_is_coming_up_or_does_not_exist_can_be_disconnected(driver: DriverUnderTest) -> None:
    driver.do(Connect("a", driver.url), Disconnect("a"), Disconnect("a"), Disconnect("never connected"))
    driver.do(Connect("b", driver.url), Disconnect("a"))
    driver.until(lambda: driver.events)
    driver.wait(0.05)
    assert [event.link for event in driver.events] == ["b"] and not driver.crashed


def test_own_actions_are_executed_in_order_and_events_that_they_cause_wait(driver: DriverUnderTest) -> None:
    def act(action: Any) -> None:
        if action == 1:
            driver.do(10, 11)
            driver.do(20)
        if action == 10:
            driver.do(30)

    driver.on_action = act
    driver.do(1, 2, 3)
    assert driver.own == [1, 2, 3, 10, 11, 20, 30]


def test_pushes_come_in_order_however_many_are_put_together(driver: DriverUnderTest) -> None:
    connect(driver, "a")
    driver.do(Send("a", ["SUBSCRIBE", "c"]), Send("a", ["PSUBSCRIBE", "d*"]), Send("a", ["PING"], tag=1))
    driver.until(lambda: driver.values(1))
    sent = [b"%d" % number for number in range(50)]
    driver.publish(b"c", *sent)
    driver.publish(b"dd", b"last")
    driver.until(lambda: driver.pushes()[-1][-1] == b"last")
    assert driver.pushes()[2:] == [*([b"message", b"c", data] for data in sent), [b"pmessage", b"d*", b"dd", b"last"]]


def test_a_tick_comes_at_the_deadline_and_never_before(driver: DriverUnderTest) -> None:
    wanted: list[float] = []
    for number in range(1, 10):
        wanted.append(driver.now + 0.0011 * number)
        driver.puppet.wants_tick_at = wanted[-1]
        driver.do()
        driver.until(lambda: len(driver.of(Tick)) == len(wanted))
    ticks = driver.puppet.times[-17::2]
    assert len(ticks) == 9 and all(tick >= want for tick, want in zip(ticks, wanted, strict=True))
    assert driver.puppet.times == sorted(driver.puppet.times), "time never runs backwards"


def test_a_deadline_may_move_and_be_taken_back(driver: DriverUnderTest) -> None:
    began = driver.now
    for wanted in (began + 0.03, began + 0.09):
        driver.puppet.wants_tick_at = wanted
        driver.do()
    driver.until(lambda: driver.puppet.wants_tick_at is None)
    assert driver.puppet.times[-1] >= began + 0.09, "it moved later"
    for wanted in (began + 100, began):
        driver.puppet.wants_tick_at = wanted
        driver.do()
    driver.until(lambda: driver.puppet.wants_tick_at is None)
    assert driver.now < began + 50, "it moved into the past"
    for no_more in (driver.now + 0.02, None):
        driver.puppet.wants_tick_at = no_more
        driver.do()
    ticks = len(driver.events)  # 2, or more where a deadline was over before it was moved
    driver.wait(0.05)
    assert driver.events == ticks * [Tick()]


def test_a_machine_that_raises_is_stopped(driver: DriverUnderTest) -> None:
    connect(driver, "a")
    driver.handle(BUG)
    assert driver.crashed
    heard = len(driver.puppet.times)
    driver.do("nothing more")
    driver.wait(0.02)
    assert driver.own == [] and len(driver.puppet.times) == heard


def test_a_link_that_is_connected_twice_is_a_bug_of_the_machine(driver: DriverUnderTest) -> None:
    driver.do(Connect("a", driver.url), Connect("a", driver.url), "nothing more")
    assert driver.crashed and driver.own == []
    driver.wait(0.02)
    assert driver.events == []
