"""A broker with very many users is killed: do all of them go on at its neighbours, and does nobody else notice?

Run with ``python -m bench.edge_resume``; ``--help`` tells the rest. The users run the machine of the client over raw
sockets, with one logged and one live channel each. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from bench.edge_broker import make_token
from bench.edge_fleet import EdgeFleet
from bench.edge_moves import LIVE, use
from bench.edge_processes import allow_files
from bench.workers import Worker
from dynamoth_client.asyncio import Redis
from dynamoth_demo.latency import LatencyCounts
from dynamoth_user import Client

LOGGED_NAME = "log-all"


class _Resume:
    def __init__(self, stack: ExitStack, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        words = ("--history", "log-*")
        self._fleet = EdgeFleet(stack, servers=2, logs=1, coordinators=arguments.coordinators, broker_arguments=words)
        self._token = make_token()
        one, two, three = self._fleet.urls
        crowds = [
            ((one, two, three), arguments.users),
            ((two, three), arguments.others),
            ((three, two), arguments.others),
        ]
        self._workers: list[Worker] = []
        self._counts: list[int] = []
        begin = time.monotonic()
        first = 0
        for urls, users in crowds:
            worker = Worker(use, urls, users, self._token, first)
            stack.callback(worker.stop)
            worker.receive(300.0)
            self._workers.append(worker)
            self._counts.append(users)
            first += users
        self._connect_s = time.monotonic() - begin

    async def _publish(self) -> None:
        client = Redis.from_url(self._fleet.cluster.url)
        async with Client([self._fleet.urls[1]], token=self._token) as logged:
            number = 0
            while True:
                number += 1
                text = b"%d %d" % (number, time.monotonic_ns())
                await asyncio.gather(client.publish(LIVE.name, text), logged.publish(LOGGED_NAME, text))
                await asyncio.sleep(1 / self._arguments.per_s)

    def _ask(self) -> list[tuple[dict[str, int], dict[str, int], int, dict[int, int]]]:
        for worker in self._workers:
            worker.send(None)
        return [worker.receive() for worker in self._workers]

    async def run(self) -> dict[str, Any]:
        publishing = asyncio.create_task(self._publish())
        await asyncio.sleep(5)
        before = await asyncio.to_thread(self._ask)
        await asyncio.sleep(5)
        rest = await asyncio.to_thread(self._ask)
        looks_before = {id_: asdict(self._fleet.look(id_)) for id_ in ("b2", "b3")}
        killed = time.monotonic()
        self._fleet.kill("broker", "b1")
        resumed_s = None
        others: list[dict[int, int]] = []
        where: dict[str, int] = {}
        while time.monotonic() - killed < 60:
            answers = await asyncio.to_thread(self._ask)
            others += [answers[1][3], answers[2][3]]
            where = answers[0][1]
            if where.get("b2", 0) + where.get("b3", 0) == self._arguments.users:
                resumed_s = time.monotonic() - killed
                break
            await asyncio.sleep(0.1)
        await asyncio.sleep(5)
        publishing.cancel()
        await asyncio.gather(publishing, return_exceptions=True)
        await asyncio.sleep(3)
        answers = await asyncio.to_thread(self._ask)
        others += [answers[1][3], answers[2][3]]
        return {
            "users": self._arguments.users,
            "connect_s": round(self._connect_s, 1),
            "resumed_s": None if resumed_s is None else round(resumed_s, 2),
            "where": where,
            "users_of_the_killed": answers[0][0],
            "others": [answers[1][0], answers[2][0]],
            "others_rest_ms_p99": _quantile_ms([rest[1][3], rest[2][3]], 0.99),
            "others_after_ms_p99": _quantile_ms(others, 0.99),
            "delivered_before": [each[0]["delivered"] for each in before],
            "looks": [looks_before, {id_: asdict(self._fleet.look(id_)) for id_ in ("b2", "b3")}],
            "faults": self._fleet.faults(),
        }


def _quantile_ms(counts: list[dict[int, int]], ratio: float) -> float:
    latencies = LatencyCounts()
    for each in counts:
        latencies.merge(each)
    return round(latencies.quantile_ms(ratio) or 0.0, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--users", type=int, default=4000, help="users of the broker that is killed")
    parser.add_argument("--others", type=int, default=500, help="users of each of the two others")
    parser.add_argument("--per-s", type=float, default=1.0, help="publications per second on each channel")
    parser.add_argument("--coordinators", type=int, default=0)
    arguments = parser.parse_args()
    allow_files(arguments.users + 3000)
    with ExitStack() as stack:
        trial = _Resume(stack, arguments)
        result = asyncio.run(trial.run())
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
