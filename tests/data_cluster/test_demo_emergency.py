"""``dynamoth demo-emergency``: a whole data cluster that is killed twice, brokers, users, and the independent audit.

A person in a browser is one more user.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread

from tests.user.chromium import Browser, Page, browser

__all__ = ["browser"]  # a fixture

TIMEOUT_S = 1800
POLL_S = 0.2

SUBSCRIBE_JS = """(() => {
    const query = document.getElementById("query"), type = document.getElementById("type");
    query.value = "reports_of_type";
    query.dispatchEvent(new Event("change"));
    for (const { value } of type.options) {
        type.value = value;
        document.querySelector("#subscribe button").click();
    }
    return type.options.length;
})()"""

CLICK_JS = """(() => {
    const map = document.getElementById("map"), box = map.getBoundingClientRect();
    const at = { clientX: box.x + box.width / 5, clientY: box.y + box.height / 5 };
    map.dispatchEvent(new MouseEvent("click", at));
})()"""

FAULTS_JS = '[...document.querySelectorAll("#log .fault")].map((each) => each.textContent)'
ME_JS = 'document.querySelector("#me circle:last-child").getAttribute("cx")'


def _text(id_: str) -> str:
    return f'document.getElementById("{id_}").textContent'


async def _until(page: Page, condition: str) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not await page.evaluate(condition):
        assert time.monotonic() < end, f"{condition}; the page: {await page.evaluate('document.body.innerText')}"
        await asyncio.sleep(POLL_S)


async def _be_a_user(browser: Browser, url: str) -> None:
    """Open the page, walk, subscribe to all reports, and see some."""
    async with browser.open(url) as page:
        await _until(page, f'{_text("state")} === "connected"')
        assert await page.evaluate(SUBSCRIBE_JS) == 8
        await _until(page, 'document.querySelectorAll("#subscriptions li").length === 9')
        here = await page.evaluate(ME_JS)
        await page.evaluate(CLICK_JS)
        await _until(page, f"{ME_JS} !== {json.dumps(here)}")
        await _until(page, f"Number({_text('sent')}) > 0")
        await _until(page, f"Number({_text('results')}) > 0")
        await _until(page, 'document.querySelectorAll("#reports circle").length > 0')
        assert await page.evaluate(_text("gaps")) == "0"
        assert (
            await page.evaluate('[...document.querySelectorAll("#log .fault")].map((each) => each.textContent)') == []
        )


def test_the_audit_of_the_demo_is_clean_and_a_browser_sees_reports(tmp_path: Path, browser: Browser) -> None:
    file = tmp_path / "result.json"
    command = [sys.executable, "-P", "-m", "dynamoth_cli", "demo-emergency"]
    command += ["--users", "40", "--brokers", "3", "--minutes", "2", "--json", str(file)]
    # Java as users have it: one query has to be overrun, and with the options of other tests Spark may be too quick.
    own = {name: value for name, value in os.environ.items() if name != "SPARK_SUBMIT_OPTS"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=own) as demo:
        assert demo.stdout is not None
        lines: list[str] = []
        try:
            for line in demo.stdout:
                lines.append(line)
                if "http://" in line:
                    break
            else:
                raise AssertionError("".join(lines))
            reading = Thread(target=lines.extend, args=(demo.stdout,), daemon=True)
            reading.start()
            asyncio.run(_be_a_user(browser, line.strip()))
            status = demo.wait(TIMEOUT_S)
            reading.join()
        except BaseException:
            demo.terminate()
            raise
    assert status == 0, "".join(lines)
    result = json.loads(file.read_text())
    assert result["texts"] == [] and result["faults"] == 0
    assert result["gaps"] == 0, "log servers lose nothing here, and nobody reads slowly"
    assert result["moved"] > 0
    assert all(count > 0 for count in result["result_sets"].values())
    assert result["delivered"] > 100
    assert result["overruns"]["report_counts_hurried"] > 0
