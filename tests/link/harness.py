"""What the tests of links share: a runner that looks for leaks, a recorder, and servers that misbehave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Protocol

import hiredis

from dynamoth_link.link import Link
from dynamoth_link.options import LinkOptions

PATIENCE_S = 30.0
"""How long a condition is waited for before the test fails."""

NOBODY = "redis://127.0.0.1:1"
"""Nothing listens at this port."""

#: Quick to ask and to come back, so that tests of failures are short. Tests of silence set a shorter ping_timeout_s: on
#: a busy machine a server may stand still, and all others must not take that for silence.
HASTY = LinkOptions(
    connect_timeout_s=5.0,
    ping_interval_s=0.05,
    ping_timeout_s=5.0,
    backoff_s_min=0.01,
    backoff_s_max=0.05,
    close_timeout_s=0.2,
)


@asynccontextmanager
async def measured_lag() -> AsyncGenerator[Callable[[], float], None]:
    """Say how long the event loop has stood still: a busy machine must not fail a test that measures times."""
    late_s: list[float] = []

    async def watch() -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + 0.01
            await asyncio.sleep(0.01)
            late_s.append(loop.time() - due)

    watching = asyncio.create_task(watch())
    try:
        yield lambda: sum(late_s)
    finally:
        watching.cancel()
        await asyncio.wait({watching})


class Runner(Protocol):
    def __call__(self, main: Callable[[], Coroutine[Any, Any, None]], *, bugs: int = 0) -> list[str]: ...


def run(
    main: Callable[[], Coroutine[Any, Any, None]], factory: Callable[[], asyncio.AbstractEventLoop] | None, bugs: int
) -> list[str]:
    """Run ``main``; it must leave no task, and give ``bugs`` exceptions to the loop's exception handler."""
    reported: list[str] = []

    def report(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        reported.append(f"{context['message']}: {context.get('exception')!r}")

    async def watched() -> None:
        asyncio.get_running_loop().set_exception_handler(report)
        async with asyncio.timeout(4 * PATIENCE_S):
            await main()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"tasks left behind: {left}"

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(watched())
    assert len(reported) == bugs, reported
    return reported


class Recorder:
    """Keeps what a link calls back, in order, as (name, value)."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self._changed = asyncio.Event()

    def record(self, name: str) -> Callable[[Any], None]:
        def take(value: Any) -> None:
            self.calls.append((name, value))
            self._changed.set()

        return take

    def of(self, name: str) -> list[Any]:
        return [value for called, value in self.calls if called == name]

    @property
    def pushes(self) -> list[list[Any]]:
        return [push for batch in self.of("pushes") for push in batch]

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until the condition holds; it is looked at after each call."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(f"never came true; calls: {self.calls}") from None

    async def count(self, name: str, number: int) -> list[Any]:
        await self.until(lambda: len(self.of(name)) >= number)
        return self.of(name)


@asynccontextmanager
async def opened(url: str, options: LinkOptions = HASTY) -> AsyncGenerator[tuple[Link, Recorder], None]:
    """A started link, which need not be up, and its recorder."""
    recorder = Recorder()
    link = Link(
        url,
        options=options,
        on_up=recorder.record("up"),
        on_down=recorder.record("down"),
        on_pushes=recorder.record("pushes"),
    )
    link.start()
    try:
        yield link, recorder
    finally:
        await link.close()


@asynccontextmanager
async def up(url: str, options: LinkOptions = HASTY) -> AsyncGenerator[tuple[Link, Recorder], None]:
    """A link that is up, and its recorder."""
    async with opened(url, options) as (link, recorder):
        await recorder.count("up", 1)
        yield link, recorder


@asynccontextmanager
async def subscribed(url: str, options: LinkOptions = HASTY) -> AsyncGenerator[tuple[Link, Recorder], None]:
    """A link that is up and subscribed to the channel ``c``; its recorder has the acknowledgement."""
    async with up(url, options) as (link, recorder):
        link.send(["SUBSCRIBE", "c"])
        await recorder.until(lambda: recorder.pushes)
        yield link, recorder


Answer = Callable[[list[bytes]], bytes]


def polite(command: list[bytes]) -> bytes:
    """Answer as a Redis server does, as far as a link asks."""
    if command[0] == b"HELLO":
        return b"%2\r\n+version\r\n+7.0.0\r\n+proto\r\n:3\r\n"
    if command[0] == b"INFO":
        return b"$14\r\nrun_id:abcdef\n\r\n"
    return b"+PONG\r\n"


@asynccontextmanager
async def fake_server(answer: Answer) -> AsyncGenerator[str, None]:
    """A server that answers each command with whatever bytes ``answer`` says; its URL."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        parser = hiredis.Reader(notEnoughData=None)
        try:
            while data := await reader.read(65536):
                parser.feed(data)
                while (command := parser.gets()) is not None:
                    writer.write(answer(command))
        except OSError:
            pass  # the link cut the connection: what it does is what is being tested
        finally:
            writer.close()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    port: int = server.sockets[0].getsockname()[1]
    try:
        yield f"redis://127.0.0.1:{port}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
