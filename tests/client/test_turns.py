"""The loop that threads drive in turns, by itself."""

from __future__ import annotations

import asyncio
import itertools
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import redis.exceptions

from dynamoth_client.threads import turns
from dynamoth_client.threads.loop import Loop
from dynamoth_client.threads.turns import SharedLoop
from tests.client.sync_helpers import Running, keepers, until


async def _nothing() -> None:
    """Nothing has to be ended."""


Gates = list[asyncio.Future[Any]]


@pytest.fixture
def loop() -> Iterator[SharedLoop]:
    loop = SharedLoop(_nothing)
    yield loop
    loop.close()
    assert keepers() == 0


@pytest.fixture
def gates() -> Gates:
    """Futures that ``_wait`` adds; a test sets their results."""
    return []


def _wait(gates: Gates) -> asyncio.Future[Any]:
    gates.append(asyncio.get_running_loop().create_future())
    return gates[-1]


def _task(coroutine: Coroutine[Any, Any, Any]) -> asyncio.Future[Any]:
    return asyncio.ensure_future(coroutine)


def _driver() -> asyncio.Future[int]:
    """Return a future with the id of the thread that drives the loop."""
    future = asyncio.get_running_loop().create_future()
    future.set_result(threading.get_ident())
    return future


def test_a_caller_drives_the_loop_itself(loop: SharedLoop) -> None:
    assert loop.run(_driver) == threading.get_ident()
    assert loop.run(lambda: _task(asyncio.sleep(0.001, "slept"))) == "slept"
    with pytest.raises(ZeroDivisionError):
        loop.run(lambda: 1 // 0)  # type: ignore[arg-type,return-value]


def test_the_driver_works_for_others_and_hands_the_turn_on(loop: SharedLoop, gates: Gates) -> None:
    def open_gate() -> asyncio.Future[int]:
        gates.pop(0).set_result(threading.get_ident())
        return _driver()

    waiting: list[Running] = []
    for number in range(3):
        waiting.append(Running(loop.run, lambda: _wait(gates)))
        until(lambda n=number: len(gates) == n + 1, "it has begun")  # type: ignore[misc]
    drivers = [loop.run(open_gate) for _ in range(3)]
    assert [one.result() for one in waiting] == drivers
    assert drivers[:2] == [waiting[0].ident, waiting[1].ident], "the one that has waited longest"


def test_a_socket_that_another_has_taken_out_is_not_read(loop: SharedLoop) -> None:
    pairs = [socket.socketpair() for _ in range(2)]
    read: list[int] = []

    def begin() -> asyncio.Future[None]:
        running = asyncio.get_running_loop()
        done = running.create_future()

        def take(number: int) -> None:
            read.append(number)
            for _, reader in pairs:
                running.remove_reader(reader)
            running.call_later(0.001, done.set_result, None)

        for number, (writer, reader) in enumerate(pairs):
            running.add_reader(reader, take, number)
            writer.send(b"x")
        return done

    loop.run(begin)
    assert len(read) == 1, "both were ready in one turn, and the first takes both out"
    for one in itertools.chain(*pairs):
        one.close()


def test_timers_and_callbacks_are_not_starved_by_sockets_that_are_always_ready(loop: SharedLoop) -> None:
    writer, reader = socket.socketpair()
    called: list[str] = []

    def begin() -> asyncio.Future[None]:
        running = asyncio.get_running_loop()
        done = running.create_future()
        running.add_reader(reader, lambda: called.append("socket"))  # the byte stays there
        writer.send(b"x")
        running.call_soon(called.append, "soon")
        running.call_later(0.01, called.append, "later")
        running.call_later(0.02, done.set_result, None)
        return done

    loop.run(begin)
    assert set(called) == {"socket", "soon", "later"}
    loop.run(lambda: _task(_removed(reader)))
    writer.close()
    reader.close()


async def _removed(reader: socket.socket) -> None:
    asyncio.get_running_loop().remove_reader(reader)


def test_one_that_is_always_answered_at_once_does_not_starve_the_loop(
    loop: SharedLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "KEEPER_IDLE_S", 3600.0)  # it would drive, too, when this thread has to wait
    counted: list[int] = []
    loop.run(_driver)

    def count() -> None:
        counted.append(threading.get_ident())
        asyncio.get_running_loop().call_soon(count)

    loop.call_soon(count)
    before = len(counted)
    for _ in range(50):
        loop.run(_driver)
    assert counted[before:].count(threading.get_ident()) >= 49


def test_the_keeper_drives_when_nobody_does(loop: SharedLoop) -> None:
    assert loop.run(_driver) == threading.get_ident()
    ticked: list[int] = []
    loop.call_soon(lambda: asyncio.get_running_loop().call_later(0.02, lambda: ticked.append(threading.get_ident())))
    until(lambda: bool(ticked), "a timer goes off")
    assert ticked != [threading.get_ident()]
    until(lambda: loop.run(_driver) == threading.get_ident(), "the keeper gives way")


def test_something_on_the_loop_cannot_call_it(loop: SharedLoop) -> None:
    """As the handler of a log line might."""

    def call() -> asyncio.Future[int]:
        with pytest.raises(RuntimeError, match="from inside itself"):
            loop.run(_driver)
        return _driver()

    assert loop.run(call) and loop.run(_driver)


def test_a_signal_handler_calls_while_its_thread_waits_for_the_turn(loop: SharedLoop, gates: Gates) -> None:
    """The turn must not go to the call that it has interrupted, which cannot use it."""
    from_handler: list[str] = []
    me = threading.get_ident()

    def handle(signum: int, frame: object) -> None:
        from_handler.append(loop.run(lambda: _wait(gates)))

    def interrupt() -> None:
        until(lambda: len(gates) == 2, "the main thread waits")
        signal.pthread_kill(me, signal.SIGUSR1)
        until(lambda: len(gates) == 3, "its handler waits")
        for number, text in ((0, "driver"), (2, "handler"), (1, "main")):
            loop.call_soon(lambda number=number, text=text: gates[number].set_result(text))  # type: ignore[misc]
            until(gates[number].done, "it is done")

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        driving = Running(loop.run, lambda: _wait(gates))
        until(lambda: len(gates) == 1, "it drives")
        interrupting = Running(interrupt)
        assert loop.run(lambda: _wait(gates)) == "main"
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (driving.result(), from_handler, interrupting.result()) == ("driver", ["handler"], None)


class _Struck:
    """A mutex at which something strikes: calls functions before it is taken, and while it is held."""

    def __init__(self, loop: SharedLoop, before: Callable[[], Any], held: Callable[[], Any]) -> None:
        turns: Any = loop
        self._mutex, self._before, self._held = turns._mutex, before, held
        turns._mutex = self

    def __enter__(self) -> None:
        self._before()
        self._mutex.acquire()
        self._held()

    def __exit__(self, *exception: object) -> None:
        self._mutex.release()

    def _is_owned(self) -> bool:
        return bool(self._mutex._is_owned())


def test_a_turn_that_comes_to_a_wait_that_has_just_been_interrupted_is_not_lost(loop: SharedLoop, gates: Gates) -> None:
    driving = Running(loop.run, lambda: _wait(gates))
    until(lambda: bool(gates), "it drives")
    taken: list[None] = []

    def take() -> None:
        if threading.current_thread() is threading.main_thread():
            taken.append(None)
            if len(taken) == 2:  # to give back what it may have
                loop.call_soon(lambda: gates[0].set_result("driver"))
                driving.result()

    def interrupted(number: int, frame: object) -> None:
        raise ZeroDivisionError

    def interrupt() -> None:
        until(lambda: len(gates) == 2, "the main thread waits")
        signal.pthread_kill(me, signal.SIGUSR1)

    me = threading.get_ident()
    _Struck(loop, take, lambda: None)
    before = signal.signal(signal.SIGUSR1, interrupted)
    try:
        interrupting = Running(interrupt)
        with pytest.raises(ZeroDivisionError):
            loop.run(lambda: _wait(gates))
        interrupting.result()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert loop.run(_driver) == me


def test_a_finalizer_is_refused_while_the_keeper_has_the_mutex(loop: SharedLoop) -> None:
    refused: list[str] = []

    def finalize() -> None:
        if threading.current_thread() is not threading.main_thread():
            with pytest.raises(RuntimeError, match="from inside itself"):
                loop.run(_driver)
            refused.append("keeper")

    _Struck(loop, lambda: None, finalize)
    loop.run(_driver)
    until(lambda: bool(refused), "the keeper has taken it")


def test_the_last_of_two_exceptions_in_one_turn_ends_a_drive_and_the_other_is_dropped(
    loop: SharedLoop, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail() -> None:
        raise ZeroDivisionError

    def interrupt() -> None:
        raise KeyboardInterrupt

    def begin() -> asyncio.Future[Any]:
        running = asyncio.get_running_loop()
        failing = _task(fail())
        running.call_soon(running.call_soon, interrupt)  # behind what looks at the task
        running.call_soon(failing.exception)
        return running.create_future()

    with pytest.raises(KeyboardInterrupt):
        loop.run(begin)
    until(lambda: keepers() == 0, "it has ended")
    assert not caplog.text


def test_what_waits_when_it_ends_gets_its_outcome(gates: Gates, caplog: pytest.LogCaptureFixture) -> None:
    async def end() -> None:
        for gate in gates:
            if not gate.done():
                gate.set_result("ended")

    loop = SharedLoop(end)
    waiting = [Running(loop.run, lambda: _wait(gates)) for _ in range(3)]
    until(lambda: len(gates) == 3, "all wait")
    loop.close()
    assert [one.result() for one in waiting] == ["ended"] * 3
    assert keepers() == 0
    with pytest.raises(redis.exceptions.ConnectionError, match="closed"):
        loop.run(_driver)
    loop.close()
    assert not caplog.records


def test_a_signal_in_the_midst_of_another_threads_request_is_the_drivers(loop: SharedLoop, gates: Gates) -> None:
    def interrupted() -> asyncio.Future[Any]:
        assert threading.current_thread() is threading.main_thread()
        raise ZeroDivisionError

    def ask() -> None:
        until(lambda: bool(gates), "the main thread drives")
        loop.run(interrupted)

    asking = Running(ask)
    with pytest.raises(ZeroDivisionError):
        loop.run(lambda: _wait(gates))
    assert loop.is_broken
    with pytest.raises(ZeroDivisionError):
        asking.result()


def test_a_forked_child_inherits_a_loop_that_a_signal_has_broken(loop: SharedLoop) -> None:
    """What its hook raised would leave the other clients of the child with the parent's connections."""

    def interrupted() -> asyncio.Future[Any]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop.run(interrupted)
    until(lambda: keepers() == 0, "the keeper has closed it")
    loop.disown()


def test_one_that_does_not_come_back_is_left_alone(
    gates: Gates, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "END_S_MAX", 0.05)
    loop = SharedLoop(_nothing)
    stubborn = Running(loop.run, lambda: _wait(gates))
    until(lambda: bool(gates), "it waits")
    loop.close()
    until(lambda: keepers() == 0, "the keeper has given up")
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    loop.call_soon(lambda: gates[0].set_result("at last"))
    assert stubborn.result() == "at last"
    with pytest.raises(RuntimeError, match="closed"):
        gates[0].get_loop().call_soon(print)


def test_a_keeper_that_fails_says_so(caplog: pytest.LogCaptureFixture) -> None:
    async def end() -> None:
        raise ZeroDivisionError

    loop = SharedLoop(end)
    loop.run(_driver)
    loop.close()
    assert "this is a bug" in caplog.text


@pytest.mark.parametrize("has_started", [True, False])
def test_a_keeper_that_cannot_be_started_leaves_nothing(has_started: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def fail(thread: threading.Thread) -> None:
        if has_started:
            start(thread)
        raise ZeroDivisionError

    loops: list[Loop] = []

    class Recorded(Loop):
        def __init__(self) -> None:
            super().__init__()
            loops.append(self)

    with monkeypatch.context() as context:
        context.setattr(turns, "Loop", Recorded)
        context.setattr(threading.Thread, "start", fail)
        loop = SharedLoop(_nothing)
        with pytest.raises(ZeroDivisionError):
            loop.run(_driver)
    assert loop.is_broken
    until(lambda: keepers() == 0, "a thread that was started has ended")
    assert [one.is_closed() for one in loops] == [True], "no descriptors are left"
    loop.close()


def test_many_threads_and_an_eager_keeper(loop: SharedLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way to get and to lose the turn, with requests that take no turn, one, or some time."""
    monkeypatch.setattr(turns, "KEEPER_IDLE_S", 0.0)

    def call(name: int) -> int:
        for number in range(300):
            kind = (name + number) % 4
            if kind == 0:
                loop.run(_driver)
            elif kind == 1:
                loop.run(lambda: _task(asyncio.sleep(0)))
            elif kind == 2:
                loop.run(lambda: _task(asyncio.sleep(0.0005)))
            else:
                time.sleep(0.0001)
        return name

    def call_from_a_loop(name: int) -> int:
        async def run() -> int:
            return call(name)

        return asyncio.run(run())

    calling = [Running(call, name) for name in range(6)] + [Running(call_from_a_loop, name) for name in (6, 7)]
    assert [one.result() for one in calling] == list(range(8))
