"""The data cluster's part in the prototype's workload, in a process of its own: queries run, results are published.

At the end of each period of a query it computes which interests the reports of the period match, by type and by place,
and publishes a result set for each. Spark does this in the product (``dynamoth_analytics``); here it would take the
processors that brokers are measured on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection

from bench.bad.emergencies import BY_NAME, END_S, QUERIES, Emergencies, Values
from dynamoth_client.asyncio import Redis
from dynamoth_client.logs import LogPublisher
from dynamoth_daemon import event_loop

AT_ONCE = 32
"""Result sets that are published at once."""


@dataclass(frozen=True, kw_only=True)
class MatcherOptions:
    """What the process does."""

    seed: int
    cluster: str
    logs: Mapping[str, str]
    #: As in ``PeopleOptions``.
    begin: float
    compression: float


def match_here(pipe: Connection, options: MatcherOptions) -> None:
    """Match and publish: the target of a worker. Sends how many result sets were published, and the longest delay."""
    event_loop.run(_match(pipe, options))


async def _match(pipe: Connection, options: MatcherOptions) -> None:
    emergencies = Emergencies(options.seed)
    due = sorted(
        (end, query.name)
        for query in QUERIES
        for end in range(int(query.period_s), int(END_S) + 1, int(query.period_s))
    )
    pipe.send("ready")
    client = Redis.from_url(options.cluster)
    gate = asyncio.Semaphore(AT_ONCE)
    published, late_s_max = 0, 0.0
    async with LogPublisher(client, options.logs) as publisher:

        async def publish(name: str, values: Values, text: str) -> None:
            params = dict(zip(BY_NAME[name].parameters, values, strict=True))
            async with gate:
                await publisher.publish_result(name, params, f"{time.monotonic_ns()} {text}")

        async with asyncio.TaskGroup() as group:
            for end, name in due:
                at = options.begin + end / options.compression
                await asyncio.sleep(max(0.0, at - time.monotonic()))
                late_s_max = max(late_s_max, time.monotonic() - at)
                for values, reports in emergencies.results(BY_NAME[name], end).items():
                    text = emergencies.payload(BY_NAME[name], reports)
                    group.create_task(publish(name, values, text))
                    published += 1
    await client.aclose()
    pipe.send((published, late_s_max))
