"""The reporters: eight who roam the town, and POST what they see to a broker.

    python -m emergency.reporters --brokers http://... http://... --keys keys.json --journal reporters.jsonl

Reports have an id, so one whose answer was lost is sent again, to the next broker, and is stored once. The process ends
at SIGTERM, or at the end of its standard input.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from random import Random

import aiohttp

from emergency.ending import await_end
from emergency.journal import Journal
from emergency.reports import REPORTERS, REPORTS_PER_S, draw_report, encode
from emergency.tokens import TokenMaker
from emergency.town import Town, build_town, vehicle

REPORTS = "d:reports"
ATTEMPTS_S = 60.0
"""A report that no broker takes for this time is given up; the journal has it as doubtful."""

RETRY_S = 0.5
ANSWER_TIMEOUT_S = 10.0
REPEATED = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)
"""Statuses from 400 to 499 with which a report is sent again; with others, repeating does not help."""


class Reporter:
    """One reporter."""

    def __init__(self, name: str, town: Town, options: argparse.Namespace, token: str, journal: Journal) -> None:
        self._name = name
        self._random = Random(f"{options.seed} {name}")
        self._walker = vehicle(town, Random(self._random.getrandbits(32)))
        self._brokers: list[str] = self._random.sample(options.brokers, len(options.brokers))
        self._headers = {"Authorization": f"Bearer {token}"}
        self._interval_s = REPORTERS / (REPORTS_PER_S * options.speed)
        self._journal = journal
        self._number = 0

    async def work(self, session: aiohttp.ClientSession, ended: asyncio.Event) -> None:
        """Report until the end of the run."""
        begin_s = time.monotonic()
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), self._random.expovariate(1 / self._interval_s))
                return
            self._number += 1
            place = self._walker.place(time.monotonic() - begin_s)
            report = draw_report(self._random, self._name, self._number, place, time.time())
            await self._store(session, report)

    async def _store(self, session: aiohttp.ClientSession, report: dict[str, object]) -> None:
        """Send a report until it is stored or refused, for up to ``ATTEMPTS_S``."""
        end_s = time.monotonic() + ATTEMPTS_S
        while time.monotonic() < end_s:
            reason = await self._post(session, encode(report))
            if reason is None:
                self._journal.write("report", id=report["id"], at=report["at"])
                return
            if reason:
                self._journal.write("refused", user=self._name, what=report["id"], reason=reason)
                return
            self._brokers.append(self._brokers.pop(0))
            await asyncio.sleep(RETRY_S)
        self._journal.write("doubtful", id=report["id"])

    async def _post(self, session: aiohttp.ClientSession, body: bytes) -> str | None:
        """Send it once. Return None where it is stored, else why it never will be; empty: send it again."""
        url = f"{self._brokers[0]}/datasets/reports"
        try:
            async with session.post(url, data=body, headers=self._headers) as response:
                if response.status == 200:
                    refused = (await response.json())["refused"]
                    return str(refused[0]["reason"]) if refused else None
                is_final = 400 <= response.status < 500 and response.status not in REPEATED
                return f"{response.status} {await response.text()}" if is_final else ""
        except (aiohttp.ClientError, TimeoutError):
            return ""


async def run(options: argparse.Namespace) -> None:
    """Let all reporters work until the end."""
    town = build_town(Random(options.seed))
    journal = Journal(options.journal)
    maker = TokenMaker(options.keys)
    ended = asyncio.Event()
    ending = asyncio.create_task(await_end(ended))
    timeout = aiohttp.ClientTimeout(ANSWER_TIMEOUT_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session, asyncio.TaskGroup() as group:
            for number in range(REPORTERS):
                name = f"reporter{number}"
                reporter = Reporter(name, town, options, maker.token(name, [REPORTS]), journal)
                group.create_task(reporter.work(session, ended))
    finally:
        ending.cancel()
        journal.close()


def main() -> None:
    """Read the arguments, and run."""
    parser = argparse.ArgumentParser(description="Reporters of the emergency application.")
    parser.add_argument("--brokers", nargs="+", required=True, metavar="URL", help="http://HOST:SSE-PORT of each")
    parser.add_argument("--keys", type=Path, required=True, help="the JSON Web Key Set of the brokers")
    parser.add_argument("--journal", type=Path, required=True, help="a new file")
    parser.add_argument("--speed", type=float, default=1.0, help="times the reports of the paper, 5.6 per second")
    parser.add_argument("--seed", type=int, default=1)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
