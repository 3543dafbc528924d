"""The users of the prototype's workload, in a process of their own: each is a ``dynamoth_user.Client``.

They log in and subscribe when their plan says so, count what is lost or comes twice, and measure latencies: apart,
those of users who have not moved, who move, and who have moved.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Literal
from urllib.parse import urlsplit

from bench.bad.emergencies import Emergencies, UserPlan
from bench.bad.town import degrees
from dynamoth_daemon import event_loop
from dynamoth_demo.latency import LatencyCounts
from dynamoth_user import Client, Failed, Gap, Interrupted, Item, Served
from dynamoth_user.client import State

PhaseName = Literal["before", "during", "after"]
DURING_S = 1.0
"""A delivery this close after a move belongs to it."""

FAULTS_MAX = 20

PLACE_TRIES, PLACE_PAUSE_S = 20, 0.3
"""A coordinator serves 64 requests at once, and drops others; here all users log in within seconds."""


@dataclass(frozen=True, kw_only=True)
class PeopleOptions:
    """What the process does."""

    seed: int
    #: Names the run: sessions of different runs are different.
    run: str
    token: str
    #: When the paper's time begins, as ``time.monotonic``, and how much faster it runs.
    begin: float
    compression: float
    #: For each user, the URLs to try in order; None: ask the coordinator at ``place_url`` for the nearest broker.
    urls: Sequence[Sequence[str]] | None
    place_url: str = ""


class _People:
    def __init__(self, options: PeopleOptions) -> None:
        self._options = options
        self._clients: list[Client] = []
        self._positions: dict[tuple[int, str], tuple[int, int]] = {}
        self._moved_at: dict[int, float] = {}
        self.counts: Counter[str] = Counter()
        self.latencies: dict[PhaseName, LatencyCounts] = {
            "before": LatencyCounts(),
            "during": LatencyCounts(),
            "after": LatencyCounts(),
        }
        self.faults: list[str] = []

    async def live(self) -> None:
        """Log everybody in, and subscribe; return when all that is planned is done."""
        plans = Emergencies(self._options.seed).users
        await asyncio.gather(*map(self._live_one, plans))

    async def _live_one(self, plan: UserPlan) -> None:
        try:
            await self._until(plan.login_at)
            client = Client(
                await self._urls(plan),
                session=f"{self._options.run}-{plan.number}",
                token=self._options.token,
                on_state=partial(self._on_state, plan.number),
                on_error=lambda error: self._blame(repr(error)),
                proxy=None,
            )
            await client.__aenter__()
            self._clients.append(client)
            for planned in plan.subscriptions:
                await self._until(planned.at)
                handler = partial(self._take, plan.number, f"{planned.query} {planned.values}")
                await client.subscribe_query(planned.query, planned.params, handler)
                self.counts["subscriptions"] += 1
        except Exception as error:
            self._blame(f"user {plan.number}: {error!r}")

    def _blame(self, text: str) -> None:
        self.counts["faults"] += 1
        if len(self.faults) < FAULTS_MAX:
            self.faults.append(text[:300])

    async def _until(self, at: float) -> None:
        options = self._options
        await asyncio.sleep(max(0.0, options.begin + at / options.compression - time.monotonic()))

    async def _urls(self, plan: UserPlan) -> Sequence[str]:
        """Return the URLs that a user tries; asks the coordinator again where it is busy with others."""
        options = self._options
        if options.urls is not None:
            return options.urls[plan.number]
        for _ in range(PLACE_TRIES - 1):
            if urls := await self._place(plan):
                return urls
            self.counts["place_retries"] += 1
            await asyncio.sleep(PLACE_PAUSE_S)
        return await self._place(plan)

    async def _place(self, plan: UserPlan) -> Sequence[str]:
        """Ask the coordinator for the nearest broker; return nothing where it does not answer."""
        options = self._options
        latitude, longitude = degrees(plan.home)
        parts = urlsplit(options.place_url)
        path = f"/place?session={options.run}-{plan.number}&near={latitude:.6f},{longitude:.6f}"
        try:
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            writer.write(f"GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
            answer = await reader.read()
            writer.close()
            urls: list[str] = json.loads(answer.partition(b"\r\n\r\n")[2])["urls"]
        except (OSError, ValueError):
            return ()
        return urls

    def _on_state(self, user: int, state: State) -> None:
        match state:
            case Served(_, _, True):
                self.counts["moved"] += 1
                self._moved_at[user] = time.monotonic()
            case Served():
                self.counts["served"] += 1
            case Interrupted(reason):
                self.counts["interrupted"] += 1
                self._blame(f"user {user}: interrupted: {reason}")
            case Failed(code, reason):
                self._blame(f"user {user}: {code} {reason}")

    def _take(self, user: int, interest: str, item: Item | Gap) -> None:
        assert item.position is not None, "results are logged"
        position = item.position.epoch, item.position.offset
        if isinstance(item, Gap):
            self.counts["gaps"] += 1
            self._positions[user, interest] = position
            return
        self.counts["delivered"] += 1
        former = self._positions.get((user, interest))
        if former is not None and former[0] == position[0]:
            self.counts["lost"] += max(0, position[1] - former[1] - 1)
            self.counts["repeated"] += position[1] <= former[1]
        self._positions[user, interest] = position
        sent_ns = int(item.data[: item.data.index(b" ")])
        now_ns = time.monotonic_ns()
        moved_at = self._moved_at.get(user)
        phase: PhaseName = "before"
        if moved_at is not None:
            phase = "during" if now_ns / 1e9 - moved_at <= DURING_S else "after"
        self.latencies[phase].add(now_ns - sent_ns)

    def look(self) -> dict[str, Any]:
        """Return what was counted, where users are, and latencies."""
        latencies = {
            f"{phase}_ms_{name}": counts.quantile_ms(ratio) or 0.0
            for phase, counts in self.latencies.items()
            for name, ratio in (("p50", 0.5), ("p99", 0.99))
        }
        numbers = {f"{phase}_count": float(counts.total) for phase, counts in self.latencies.items()}
        return {"counts": dict(self.counts), "latencies": latencies | numbers, "faults": self.faults}

    async def close(self) -> None:
        """Close all clients."""
        await asyncio.gather(*(client.close() for client in self._clients), return_exceptions=True)


def live_here(pipe: Connection, options: PeopleOptions) -> None:
    """Run the users: the target of a worker. ``look`` is answered; ``close`` ends them."""
    event_loop.run(_live(pipe, options))


async def _live(pipe: Connection, options: PeopleOptions) -> None:
    people = _People(options)
    pipe.send("ready")
    living = asyncio.create_task(people.live())
    orders: asyncio.Queue[str] = asyncio.Queue()
    asyncio.get_running_loop().add_reader(pipe.fileno(), lambda: orders.put_nowait(pipe.recv()))
    while True:
        order = await orders.get()
        if order == "look":
            pipe.send(people.look())
            continue
        living.cancel()
        await asyncio.gather(living, return_exceptions=True)
        pipe.send(people.look())
        await people.close()
        pipe.send("closed")
        return
