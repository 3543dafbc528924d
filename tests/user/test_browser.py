"""The browser client in a real Chromium, against brokers that a test plays; and its machine tests in Node.js."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import random
import subprocess
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import aiohttp
import pytest
from aiohttp import web

from tests.user.chromium import Browser, Page, browser, find_node

__all__ = ["browser"]  # a fixture

ROOT = Path(__file__).parents[2]
CLIENT = ROOT / "user" / "js"
EPOCH = "00000000000000aa"
TEST_S_MAX = 30.0
FRAME_S_MAX = 10.0

PAGE = """<!doctype html><title>test</title><script type="module">
    import { Dynamoth } from "/dynamoth.js";
    window.seen = [];
    window.events = [];
    window.connect = (names, options = {}) => {
        const urls = names.map((name) => `ws://${location.host}/brokers/${name}`);
        window.client = new Dynamoth(urls, { random: () => 0, ...options });
        for (const type of ["state", "moved", "gap"]) {
            client.addEventListener(type, ({ detail }) => events.push({ type, ...detail }));
        }
        client.addEventListener("error", ({ detail }) => events.push({ type: "error", code: detail.code }));
        return client;
    };
    window.take = (publication) => { seen.push(publication.offset ?? publication.number ?? publication.data); };
    window.errors = () => events.filter(({ type }) => type === "error").map(({ code }) => code);
</script>"""

P = ParamSpec("P")
T = TypeVar("T")


def asynchronous(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), TEST_S_MAX))

    return run


async def soon(awaitable: Awaitable[T], what: str) -> T:
    """Wait for a limited time; a failure says for what."""
    try:
        return await asyncio.wait_for(awaitable, FRAME_S_MAX)
    except TimeoutError:
        raise AssertionError(f"waited in vain for {what}") from None


class Connection:
    """One connection of the client, as its broker sees it."""

    def __init__(self, request: web.Request, socket: web.WebSocketResponse) -> None:
        self._request = request
        self._socket = socket
        self._frames: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self.closed = asyncio.Event()

    async def serve(self) -> None:
        async for message in self._socket:
            assert message.type is aiohttp.WSMsgType.TEXT
            self._frames.put_nowait(message.json())
        self._frames.put_nowait(None)
        self.closed.set()

    @property
    def close_code(self) -> int | None:
        return self._socket.close_code

    async def receive(self, kind: str) -> dict[str, Any]:
        """The next frame of the client, which must be of this type."""
        frame = await soon(self._frames.get(), kind)
        assert frame is not None, f"closed with {self.close_code} before {kind}"
        assert frame.pop("type") == kind, frame
        return frame

    async def receive_any(self) -> dict[str, Any] | None:
        """The next frame of the client; None when it has closed the connection."""
        return await self._frames.get()

    async def send(self, kind: str, **fields: Any) -> None:
        """Send a frame, unless the client has gone."""
        with contextlib.suppress(ConnectionResetError):
            await self._socket.send_str(json.dumps({"type": kind, **fields}))

    async def send_raw(self, data: str | bytes) -> None:
        if isinstance(data, str):
            await self._socket.send_str(data)
        else:
            await self._socket.send_bytes(data)

    async def greet(self, name: str = "a", **fields: Any) -> dict[str, Any]:
        """Take `connect` and answer it; returns its fields."""
        connect = await self.receive("connect")
        await self.send(
            "connected", session=connect["session"], broker=name, alternates=[], ping_s=20, ack_s=0, **fields
        )
        return connect

    async def confirm(self, subscription: dict[str, Any], offset: int = 0, name: str | None = None) -> None:
        """Answer a subscription of a logged interest, which the broker calls ``name``; by default as its channel."""
        since = subscription["since"]
        offset = offset if isinstance(since, str) else since["offset"]
        name = name or subscription["channel"]
        await self.send("subscribed", ref=subscription["ref"], s=name, epoch=EPOCH, offset=offset, recovered=True)

    async def accept(
        self, name: str = "a", name_of: Callable[[dict[str, Any]], str | None] = lambda _: None
    ) -> dict[str, Any]:
        """Greet, and confirm all subscriptions as logged ones at offset 0."""
        connect = await self.greet(name)
        for subscription in connect["subs"]:
            await self.confirm(subscription, name=name_of(subscription))
        return connect

    async def data(self, *offsets: int, s: str = "news") -> None:
        for offset in offsets:
            await self.send("data", s=s, o=offset, d=f"text {offset}")

    async def close(self, code: int) -> None:
        await self._socket.close(code=code)

    def kill(self) -> None:
        """Cut the TCP connection, without a close frame."""
        assert self._request.transport is not None
        self._request.transport.abort()


class World:
    """A web server with a page and brokers, and a browser that shows the page."""

    def __init__(self) -> None:
        self.page: Page
        self.address = ""
        self._waiting: dict[str, asyncio.Queue[Connection]] = {}

    def queue(self, broker: str) -> asyncio.Queue[Connection]:
        return self._waiting.setdefault(broker, asyncio.Queue())

    async def connection(self, broker: str = "a") -> Connection:
        """The next connection of the client to this broker."""
        return await soon(self.queue(broker).get(), f"a connection to {broker}")

    def broker_url(self, broker: str) -> str:
        return f"ws://{self.address}/brokers/{broker}"

    async def on_websocket(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(protocols=["dynamoth.v1.json"], compress=False)
        await socket.prepare(request)
        assert socket.ws_protocol == "dynamoth.v1.json"
        connection = Connection(request, socket)
        self.queue(request.match_info["name"]).put_nowait(connection)
        await connection.serve()
        return socket


async def _page(_request: web.Request) -> web.Response:
    return web.Response(text=PAGE, content_type="text/html")


@asynccontextmanager
async def world(browser: Browser, path: str = "/") -> AsyncGenerator[World]:
    made = World()
    app = web.Application()
    app.router.add_get("/", _page)
    app.router.add_get("/brokers/{name}", made.on_websocket)
    app.router.add_static("/", CLIENT)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        made.address = f"{host}:{port}"
        async with browser.open(f"http://{made.address}{path.replace('ADDRESS', made.address)}") as page:
            made.page = page
            yield made
    finally:
        await runner.cleanup()


def test_machine_in_node() -> None:
    tests = sorted(str(path) for path in (ROOT / "tests" / "user" / "js").glob("*.test.js"))
    assert tests
    done = subprocess.run([find_node(), "--test", *tests], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@asynchronous
async def test_publications_are_handed_over_in_order_to_slow_handlers(browser: Browser) -> None:
    async with world(browser) as w:
        await w.page.evaluate("""connect(["a"]).subscribe({ channel: "news" }, async (publication) => {
            await new Promise((resolve) => setTimeout(resolve, publication.offset % 3));
            take(publication);
        }) && null""")
        connection = await w.connection()
        await connection.accept()
        await connection.data(*range(1, 101))
        await w.page.wait_for("seen.length === 100")
        assert await w.page.evaluate("seen") == list(range(1, 101))


@asynchronous
async def test_text_bytes_gaps_and_failing_handlers(browser: Browser) -> None:
    async with world(browser) as w:
        await w.page.evaluate("""connect(["a"]).subscribe({ channel: "news" }, ({ data }) => {
            seen.push(typeof data === "string" ? data : [...data]);
            if (data === "bad") throw new Error("a handler's own");
        }, { onGap: (gap) => { seen.push(gap); } }) && null""")
        connection = await w.connection()
        await connection.accept()
        await connection.send("data", s="news", o=1, d="bad")
        await connection.send("data", s="news", o=2, b="AP8=")
        await connection.send("gap", s="news", reason="trimmed", **{"from": 3, "to": 4}, epoch=EPOCH, offset=4)
        await connection.send("data", s="news", o=5, d="é")
        await w.page.wait_for("seen.length === 4")
        gap = {"reason": "trimmed", "from": 3, "to": 4, "epoch": EPOCH, "offset": 4}
        assert await w.page.evaluate("seen") == ["bad", [0, 255], gap, "é"]
        assert await w.page.evaluate("errors()") == ["handler_failed"]


@asynchronous
async def test_who_is_present(browser: Browser) -> None:
    async with world(browser) as w:
        await w.page.evaluate("""connect(["a"]).subscribe({ channel: "room", present: true }, take)
            && (window.room = client.presence("room", ({ type, user }) => {
                events.push([type, user, [...room.members.values()].sort().join(), room.count]);
            })) && null""")
        connection = await w.connection()
        own, watched = (await connection.accept("a", name_of=lambda each: each.get("channel", "members")))["subs"]
        assert (own["present"], watched["presence"]) == (True, "room")
        asked = await connection.receive("members")
        assert asked["channel"] == "room"
        members = [["ann", "m1"], ["bob", "m2"]]
        await connection.send("members", ref=asked["ref"], members=members, count=2, epoch=EPOCH, offset=0)
        await connection.send("data", s="members", o=1, d=json.dumps({"leave": {"user": "ann", "member": "m1"}}))
        await connection.send("gap", s="members", reason="retention", **{"from": 2, "to": 9}, epoch=EPOCH, offset=9)
        asked = await connection.receive("members")
        members = [["eve", "m3"], ["bob", "m2"]]
        await connection.send("members", ref=asked["ref"], members=members, count=2, epoch=EPOCH, offset=9)
        await w.page.wait_for("room.members.has('m3') && events.at(-1)[0] === 'join'")
        assert await w.page.evaluate("events.filter(Array.isArray)") == [
            ["list", None, "ann,bob", 2],
            ["leave", "ann", "bob", 1],
            ["gap", None, "bob", 1],
            ["join", "eve", "bob,eve", 2],
        ]
        await w.page.evaluate("room.close()")
        assert await connection.receive("unsubscribe") == {"s": "members"}


@asynchronous
async def test_a_killed_socket_is_replaced_and_resumes(browser: Browser) -> None:
    async with world(browser) as w:
        await w.page.evaluate("""connect(["a"]).subscribe({ channel: "news" }, take) && null""")
        first = await w.connection()
        connect = await first.accept()
        await first.data(1, 2)
        await w.page.wait_for("seen.length === 2")
        first.kill()
        second = await w.connection()
        again = await second.accept()
        assert again["session"] == connect["session"]
        assert again["generation"] == connect["generation"] + 1
        assert again["subs"][0]["since"] == {"epoch": EPOCH, "offset": 2}
        await second.data(3)
        await w.page.wait_for("seen.length === 3")
        assert await w.page.evaluate("seen") == [1, 2, 3]
        states = await w.page.evaluate("""events.map(({ state }) => state)""")
        assert states == ["connecting", "connected", "waiting", "connecting", "connected"]


@asynchronous
async def test_an_ack_follows_the_handler(browser: Browser) -> None:
    async with world(browser) as w:
        await w.page.evaluate("""connect(["a"]).subscribe({ channel: "news" }, async (publication) => {
            take(publication);
            await new Promise((resolve) => { window.finish = resolve; });
        }, { stored: true }) && null""")
        connection = await w.connection()
        await connection.accept()
        await connection.data(1, 2)
        await w.page.wait_for("seen.length === 1")
        await connection.send("ping")
        await connection.receive("pong")
        await w.page.evaluate("finish()")
        assert await connection.receive("ack") == {"p": {"news": {"epoch": EPOCH, "offset": 1}}}
        await w.page.wait_for("seen.length === 2")
        assert await w.page.evaluate("seen") == [1, 2]


@pytest.mark.parametrize(("code", "errors"), [(4001, ["token_refused"]), (4004, []), (4005, ["bad_frame"])])
@asynchronous
async def test_close_codes_that_end_the_session(browser: Browser, code: int, errors: list[str]) -> None:
    async with world(browser) as w:
        await w.page.evaluate("""connect(["a", "b"]).subscribe({ channel: "news" }, take) && null""")
        connection = await w.connection()
        await connection.accept()
        await connection.close(code)
        await w.page.wait_for("client.state === 'stopped'")
        assert await w.page.evaluate("errors()") == errors
        assert await w.page.evaluate("client.publish('news', 'x').catch(({ code }) => code)") == "closed"
        # A second client connects after the first one would have: with `random` it would not have waited.
        await w.page.evaluate("""connect(["c"]) && null""")
        await w.connection("c")
        assert w.queue("a").empty()
        assert w.queue("b").empty()


@pytest.mark.parametrize("raw", ["{", '{"type": "hello"}', '{"type": "data", "s": "news", "o": 1}', b"\x00"])
@asynchronous
async def test_a_bad_frame_is_reported_and_the_client_comes_again(browser: Browser, raw: str | bytes) -> None:
    async with world(browser) as w:
        await w.page.evaluate("""connect(["a"]).subscribe({ channel: "news" }, take) && null""")
        first = await w.connection()
        await first.accept()
        await first.data(1)
        await first.send_raw(raw)
        await first.data(2)
        second = await w.connection()
        assert (await second.accept())["subs"][0]["since"] == {"epoch": EPOCH, "offset": 1}
        await second.data(2)
        await w.page.wait_for("seen.length === 2")
        await soon(first.closed.wait(), "the close")
        assert first.close_code == 4005
        assert await w.page.evaluate("errors()") == ["bad_frame"]
        assert await w.page.evaluate("seen") == [1, 2]


@asynchronous
async def test_a_reload_resumes_behind_what_was_handled(browser: Browser) -> None:
    subscribe = """connect(["a"]).subscribe({ channel: "news" }, (publication) => {
        take(publication);
        return publication.offset === 3 ? new Promise(() => {}) : null;
    }) && null"""
    async with world(browser) as w:
        await w.page.evaluate(subscribe)
        first = await w.connection()
        connect = await first.accept()
        await first.data(1, 2, 3, 4)
        await w.page.wait_for("seen.length === 3")
        await w.page.reload()
        await w.page.evaluate(subscribe)
        again = await (await w.connection()).accept()
        assert again["session"] == connect["session"]
        assert again["generation"] == connect["generation"] + 1
        assert again["subs"][0]["since"] == {"epoch": EPOCH, "offset": 2}


@asynchronous
async def test_a_storage_of_the_application(browser: Browser) -> None:
    async with world(browser) as w:
        await w.page.evaluate("""connect(["a"], { storage: {
            load: async () => ({ session: "mine", generation: 8, positions: {
                "channel\\nnews\\n{}": { epoch: "00000000000000aa", offset: 7 },
            } }),
            save: (state) => { window.saved = state; },
        } }).subscribe({ channel: "news" }, take) && null""")
        connection = await w.connection()
        connect = await connection.accept()
        assert (connect["session"], connect["generation"]) == ("mine", 9)
        assert connect["subs"][0]["since"] == {"epoch": EPOCH, "offset": 7}
        await connection.data(8)
        await w.page.wait_for("""saved.positions["channel\\nnews\\n{}"].offset === 8""")
        assert await w.page.evaluate("Object.keys(localStorage)") == []


@asynchronous
async def test_publishing(browser: Browser) -> None:
    async with world(browser) as w:
        await w.page.evaluate("""window.results = [
            connect(["a"]).publish("news", "text"), client.publish("news", new Uint8Array([0, 255])),
            client.publish("secret", "").catch(({ code, retry }) => [code, retry]),
        ]; null""")
        connection = await w.connection()
        await connection.greet()
        text, data, secret = [await connection.receive("publish") for _ in range(3)]
        assert text == {"ref": text["ref"], "channel": "news", "d": "text"}
        assert data["b"] == "AP8="
        await connection.send("error", code="forbidden", message="no", retry="never", ref=secret["ref"])
        await connection.send("published", ref=data["ref"])
        await connection.send("published", ref=text["ref"], epoch=EPOCH, offset=5)
        results = await w.page.evaluate("Promise.all(results)")
        assert results == [{"epoch": EPOCH, "offset": 5}, {}, ["forbidden", "never"]]


@asynchronous
async def test_tokens_are_refreshed_and_replaced(browser: Browser) -> None:
    async with world(browser) as w:
        await w.page.evaluate(
            """window.count = 0; connect(["a"], { getToken: async () => `token ${++count}` }) && null"""
        )
        first = await w.connection()
        assert (await first.greet(expires_in_s=1))["token"] == "token 1"
        assert await first.receive("refresh") == {"token": "token 2"}
        await first.close(4002)
        second = await w.connection()
        assert (await second.greet())["token"] == "token 3"


@asynchronous
async def test_example_page(browser: Browser) -> None:
    async with world(browser, "/example.html?brokers=ws://ADDRESS/brokers/a&channel=news") as w:
        first = await w.connection()
        await first.accept("broker a")
        await first.data(1, 2)
        await w.page.wait_for("count.textContent === '2'")
        shown = await w.page.evaluate("[state.textContent, broker.textContent, position.textContent]")
        assert shown[:2] == ["connected", "broker a"]
        await first.send("move", to=[w.broker_url("b")], within_ms=0, deadline_ms=5000)
        second = await w.connection("b")
        await second.accept("broker b")
        await second.send("moved_in")
        while (frame := await first.receive_any()) != {"type": "leave"}:
            assert frame is not None
            assert frame["type"] == "ack"
        await first.send("bye", p={"news": 2})
        await w.page.wait_for("moves.textContent === '1'")
        assert await w.page.evaluate("broker.textContent") == "broker b"


PUBLICATIONS = 400
PUBLISHERS = 3


class Publications:
    """What is published at one logged and one live interest, a little at a time; brokers read it at their own pace."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.count = 0
        self.numbers = [0] * PUBLISHERS
        self.live: list[tuple[int, int]] = []
        self._grown = asyncio.Condition()

    async def publish_all(self) -> None:
        while self.count < PUBLICATIONS:
            async with self._grown:
                publisher = self._rng.randrange(PUBLISHERS)
                self.numbers[publisher] += 1
                self.live.append((publisher, self.numbers[publisher]))
                self.count += 1
                self._grown.notify_all()
            await asyncio.sleep(0.002)

    async def beyond(self, count: int) -> None:
        async with self._grown:
            await self._grown.wait_for(lambda: self.count > count)


class MovingBroker:
    """A broker that serves one connection, lags behind by chance, and takes part in migrations."""

    def __init__(self, name: str, connection: Connection, published: Publications, rng: random.Random) -> None:
        self.name = name
        self.connection = connection
        self._published = published
        self._rng = rng
        self._logged = 0
        self._live = 0
        self._sending = asyncio.Lock()

    async def accept(self) -> None:
        connect = await self.connection.greet(self.name)
        for subscription in connect["subs"]:
            if subscription["channel"] == "live":
                self._live = self._published.count
                await self.connection.send("subscribed", ref=subscription["ref"], s="live", live=True)
            else:
                await self.connection.confirm(subscription)
                self._logged = 0 if subscription["since"] == "new" else subscription["since"]["offset"]

    async def deliver(self) -> None:
        while True:
            await self._published.beyond(min(self._logged, self._live))
            await asyncio.sleep(self._rng.choice([0, 0, 0.001, 0.02]))
            await self._send_up_to(self._published.count)

    async def _send_up_to(self, count: int) -> None:
        async with self._sending:
            for self._logged in range(self._logged + 1, count + 1):  # noqa: B020
                await self.connection.data(self._logged, s="logged")
            while self._live < count:
                publisher, number = self._published.live[self._live]
                self._live += 1
                p = [f"{publisher:016x}", number]
                await self.connection.send("data", s="live", d=f"{publisher} {number}", p=p)

    async def answer(self) -> None:
        """Answer `leave`; acknowledgements need nothing."""
        while frame := await self.connection.receive_any():
            if frame["type"] == "leave":
                await self._send_up_to(self._published.count)
                await self.connection.send("bye", p={"logged": self._logged})


async def _migrations(w: World, rng: random.Random, published: Publications) -> int:
    """Serve the client, and move it from broker to broker until all is published. Returns the number of moves."""
    moves = 0
    async with asyncio.TaskGroup() as tasks:
        running: list[asyncio.Task[None]] = []

        async def serve(broker: MovingBroker) -> None:
            running.extend(tasks.create_task(part()) for part in (broker.deliver, broker.answer))

        broker = MovingBroker("a", await w.connection("a"), published, rng)
        await broker.accept()
        await serve(broker)
        publishing = tasks.create_task(published.publish_all())
        while published.count < PUBLICATIONS:
            target = "b" if broker.name == "a" else "a"
            await broker.connection.send("move", to=[w.broker_url(target)], ticket="t", within_ms=0, deadline_ms=9000)
            replacement = MovingBroker(target, await w.connection(target), published, rng)
            await replacement.accept()
            await serve(replacement)
            await asyncio.sleep(rng.choice([0, 0.01, 0.05]))
            await replacement.connection.send("moved_in")
            await soon(broker.connection.closed.wait(), f"the end of the move from {broker.name} to {target}")
            assert broker.connection.close_code == 1000
            broker = replacement
            moves += 1
        await publishing
        with contextlib.suppress(AssertionError):  # the test says what is missing
            await w.page.wait_for(f"logged.length >= {PUBLICATIONS} && live.length >= {PUBLICATIONS}")
        for task in running:
            task.cancel()
    return moves


@pytest.mark.parametrize("seed", [1, 2])
@asynchronous
async def test_migrations_lose_double_and_reorder_nothing(browser: Browser, seed: int) -> None:
    async with world(browser) as w:
        await w.page.evaluate("""window.logged = []; window.live = [];
            connect(["a"]).subscribe({ channel: "logged" }, async ({ offset }) => { logged.push(offset); }) &&
            client.subscribe({ channel: "live" }, ({ data }) => { live.push(data.split(" ").map(Number)); }) && null""")
        rng = random.Random(seed)
        published = Publications(rng)
        moves = await _migrations(w, rng, published)
        assert moves >= 3
        assert await w.page.evaluate("logged") == list(range(1, PUBLICATIONS + 1))
        live = await w.page.evaluate("live")
        for publisher, count in enumerate(published.numbers):
            assert [number for who, number in live if who == publisher] == list(range(1, count + 1))
        happened: list[dict[str, Any]] = await w.page.evaluate("events")
        assert [event["type"] for event in happened if event["type"] != "state"] == ["moved"] * moves
