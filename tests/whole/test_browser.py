"""The browser client in a real Chromium, on real brokers: one is ended and one is killed while a writer publishes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from dynamoth_cli.local.cluster import LocalCluster
from dynamoth_cli.local.embedded import EmbeddedRedis
from dynamoth_client.asyncio import Redis
from dynamoth_user import Client
from tests.broker.edge import running_broker, token, write_keys
from tests.user.chromium import Browser, Page, browser

__all__ = ["browser"]  # a fixture

CLIENT = Path(__file__).parents[2] / "user" / "js" / "dynamoth.js"
PERIOD_S = 0.01
TEST_S_MAX = 60.0

PAGE = """<!doctype html><title>test</title><script type="module">
    import { Dynamoth } from "/dynamoth.js";
    window.seen = { log: [], live: [] };
    window.gaps = { log: [], live: [] };
    window.brokers = [];
    window.begin = (urls) => {
        window.client = new Dynamoth(urls, { storage: null });
        client.addEventListener("state", ({ detail }) => { if (detail.broker) brokers.push(detail.broker); });
        const take = (name) => (publication) => { seen[name].push(Number(publication.data)); };
        const report = (name) => ({ onGap: (gap) => gaps[name].push(gap.reason) });
        client.subscribe({ channel: "log.page" }, take("log"), report("log"));
        client.subscribe({ channel: "page" }, take("live"), report("live"));
    };
    window.ready = true;
</script>"""


@asynccontextmanager
async def page_server() -> AsyncGenerator[str]:
    """Serve the page and the client; yields the origin."""
    app = web.Application()

    async def page(_: web.Request) -> web.Response:
        return web.Response(text=PAGE, content_type="text/html")

    async def client(_: web.Request) -> web.FileResponse:
        return web.FileResponse(CLIENT)

    app.router.add_get("/", page)
    app.router.add_get("/dynamoth.js", client)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        port = runner.addresses[0][1]
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()


class Writer:
    """Publishes numbers on the logged and on the live channel, until it is stopped."""

    def __init__(self, url: str, cluster: str) -> None:
        self.numbers = 0
        self._client = Client([url], token=token())
        self._redis = Redis.from_url(cluster)
        self._is_running = True
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        async with self._client as client:
            while self._is_running:
                number = self.numbers + 1
                await client.publish("log.page", str(number))
                await self._redis.publish("page", str(number))
                self.numbers = number
                await asyncio.sleep(PERIOD_S)

    async def stop(self) -> int:
        self._is_running = False
        assert self._task is not None
        await self._task
        await self._redis.aclose()
        return self.numbers


async def seen(page: Page, name: str) -> list[int]:
    numbers: list[int] = await page.evaluate(f"seen.{name}")
    return numbers


def test_a_page_is_moved_and_loses_nothing(browser: Browser, tmp_path: Path) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            cluster = stack.enter_context(LocalCluster(2))
            log = stack.enter_context(EmbeddedRedis())
            logs = {"l1": f"redis://127.0.0.1:{log.port}"}
            origin = await stack.enter_async_context(page_server())
            settings: dict[str, Any] = {
                "origins": origin,
                "history": ("log.*",),
                "token_keys_file": str(write_keys(tmp_path)),
            }
            third = await stack.enter_async_context(running_broker(cluster.url, logs, "b3", **settings))
            second = await stack.enter_async_context(
                running_broker(cluster.url, logs, "b2", alternates=(third.url,), **settings)
            )
            first = await stack.enter_async_context(
                running_broker(cluster.url, logs, "b1", alternates=(second.url,), drain_s=10.0, **settings)
            )
            page = await stack.enter_async_context(browser.open(origin))
            await page.wait_for("window.ready === true")
            await page.evaluate(f"begin({[first.url]})")
            await page.wait_for('brokers.at(-1) === "b1"')
            writer = Writer(third.url, cluster.url)
            writer.start()
            await page.wait_for("seen.log.length > 20 && seen.live.length > 20")
            assert await first.stop() == 0
            await page.wait_for('brokers.at(-1) === "b2"')
            count = len(await seen(page, "log"))
            await page.wait_for(f"seen.log.length > {count + 20}")
            assert await page.evaluate("gaps") == {"log": [], "live": []}
            await second.kill()
            await page.wait_for('brokers.at(-1) === "b3"')
            count = len(await seen(page, "log"))
            await page.wait_for(f"seen.log.length > {count + 20}")
            last = await writer.stop()
            await page.wait_for(f"seen.log.at(-1) === {last} && seen.live.at(-1) === {last}")
            logged, live = await seen(page, "log"), await seen(page, "live")
            assert logged == list(range(logged[0], last + 1)), "each once, in order"
            assert live == sorted(set(live)), "each once, in order"
            gaps = await page.evaluate("gaps")
            assert gaps["log"] == [] and len(gaps["live"]) == 1, "a lost connection is a gap of what has no log"

    asyncio.run(asyncio.wait_for(main(), TEST_S_MAX))
