"""The users: they send their places once a second, subscribe, go away and come back.

    python -m emergency.citizens --brokers ws://... ws://... --keys keys.json --journal citizens0.jsonl --users 0:100

One process has many users, each with a client of its own. It ends at SIGTERM or at the end of its standard input: then
everybody reports how many locations were sent. Once a second it prints where its users are, as a line of JSON.
"""

# ruff: noqa: T201 - whoever started this process reads its lines

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

from dynamoth_user import Client, ClientFailed, Gap, Item, PublishFailed, RefusedError, Subscription
from emergency.ending import await_end
from emergency.journal import Journal
from emergency.reports import encode
from emergency.scenario import PlannedSubscription, UserPlan, plan_users
from emergency.tokens import TokenMaker
from emergency.town import Town, Walker, build_town, vehicle

LOCATION_INTERVAL_S = 1.0
STATS_INTERVAL_S = 1.0
LOCATIONS = "d:user_locations"


class MemoryStorage:
    """Keeps session and positions of a user who is away, within this process: the application of the user goes on."""

    def __init__(self) -> None:
        self._state: dict[str, Any] | None = None

    def load(self) -> dict[str, Any] | None:
        """Return what was saved last."""
        return self._state

    def save(self, state: dict[str, Any]) -> None:
        """Keep a copy."""
        self._state = json.loads(json.dumps(state))


class Citizen:
    """One user."""

    def __init__(self, plan: UserPlan, town: Town, brokers: list[str], token: str, journal: Journal) -> None:
        self._plan = plan
        make = vehicle if plan.is_vehicle else Walker
        self._walker = make(town, Random(plan.seed))
        self._brokers = Random(plan.seed).sample(brokers, len(brokers))
        self._token = token
        self._journal = journal
        self._storage = MemoryStorage()
        self._client: Client | None = None
        self._open: dict[PlannedSubscription, Subscription] = {}
        #: Interest ids of all subscriptions so far.
        self._subscribed: dict[PlannedSubscription, str] = {}
        self._moved = 0
        #: Locations by outcome.
        self._locations: Counter[str] = Counter()
        self.delivered = 0
        self.gaps = 0

    @property
    def broker(self) -> str:
        """The broker that serves this user; empty: none."""
        return (self._client.broker or "") if self._client is not None else ""

    @property
    def moved(self) -> int:
        """How often this user has moved between brokers without interruption."""
        return self._moved + (self._client.moved if self._client is not None else 0)

    async def live(self, begin_s: float, ended: asyncio.Event) -> None:
        """Follow the plan until the end of the run. ``begin_s`` is its beginning, by the monotonic clock."""
        plan = self._plan
        try:
            if await _is_over(ended, begin_s + plan.login_s):
                return
            if plan.away_s is not None:
                await self._be_there(begin_s, ended, begin_s + plan.away_s[0])
                if await _is_over(ended, begin_s + plan.away_s[1]):
                    return
            await self._be_there(begin_s, ended, None)
        finally:
            self._journal.write("location", user=plan.name, **self._locations)

    async def _be_there(self, begin_s: float, ended: asyncio.Event, until_s: float | None) -> None:
        """Be connected until a time, or the end of the run."""
        async with Client(self._brokers, token=self._token, storage=self._storage) as client:
            self._journal.write("back", user=self._plan.name, at=round(time.time(), 3))
            self._client = client
            tasks = [
                asyncio.create_task(self._send_locations(client, begin_s)),
                asyncio.create_task(self._keep_subscriptions(client, begin_s)),
            ]
            try:
                await _is_over(ended, until_s)
                failed = [task for task in tasks if task.done() and not task.cancelled() and task.exception()]
                for task in failed:
                    self._journal.write("refused", user=self._plan.name, what="life", reason=repr(task.exception()))
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                self._moved, self._client = self._moved + client.moved, None
                self._open.clear()

    async def _send_locations(self, client: Client, begin_s: float) -> None:
        """Send the place once a second. A place that cannot be sent is not sent again: there is a newer one then."""
        next_s = time.monotonic() + Random(self._plan.seed).random() * LOCATION_INTERVAL_S
        while True:
            await asyncio.sleep(next_s - time.monotonic())
            next_s = max(next_s + LOCATION_INTERVAL_S, time.monotonic())
            place = self._walker.place(time.monotonic() - begin_s)
            at = round(time.time(), 3)
            record: dict[str, object] = {"user": self._plan.name, "lat": place.lat, "lon": place.lon, "at": at}
            try:
                await client.publish(LOCATIONS, encode(record))
                self._locations["stored"] += 1
            except PublishFailed as error:
                self._locations["unknown" if error.code == "unknown_outcome" else "refused"] += 1
            except asyncio.CancelledError:
                self._locations["unknown"] += 1
                raise

    async def _keep_subscriptions(self, client: Client, begin_s: float) -> None:
        """Subscribe again after an absence, and then to the rest of the plan, each at its time."""
        for planned in sorted(self._plan.subscriptions, key=lambda each: each.at_s):
            if planned.until_s is not None and begin_s + planned.until_s < time.monotonic():
                self._note_end(planned)  # it was given up during an absence
                continue
            if planned not in self._subscribed:
                await asyncio.sleep(begin_s + planned.at_s - time.monotonic())
            await self._subscribe(client, planned)
        for planned, subscription in tuple(self._open.items()):
            if planned.until_s is not None:
                await asyncio.sleep(begin_s + planned.until_s - time.monotonic())
                del self._open[planned]
                await subscription.unsubscribe()
                self._note_end(planned)

    def _note_end(self, planned: PlannedSubscription) -> None:
        if planned in self._subscribed:
            self._journal.write("ended", user=self._plan.name, interest=self._subscribed[planned])

    async def _subscribe(self, client: Client, planned: PlannedSubscription) -> None:
        name = self._plan.name
        try:
            subscription = await client.subscribe_query(planned.query, planned.params, self._handle)
        except RefusedError as error:
            self._journal.write("refused", user=name, what=f"{planned.query} {planned.params}", reason=str(error))
            return
        position = subscription.position
        self._open[planned] = subscription
        if planned not in self._subscribed and position is not None:
            self._subscribed[planned] = subscription.interest.id
            place = {"epoch": position.epoch, "offset": position.offset}
            interest = subscription.interest
            self._journal.write(
                "subscribed", user=name, query=planned.query, params=planned.params, interest=interest.id, **place
            )

    def _handle(self, item: Item | Gap) -> None:
        """Note a result set. When this returns, it is handled."""
        name, interest = self._plan.name, item.interest.id
        if isinstance(item, Gap):
            self.gaps += 1
            epoch, offset = (0, 0) if item.position is None else (item.position.epoch, item.position.offset)
            missing = {"first": item.first, "last": item.last, "reason": item.reason}
            self._journal.write("gap", user=name, interest=interest, **missing, epoch=epoch, offset=offset)
            return
        assert item.position is not None, "standing queries have a log"
        self.delivered += 1
        position = item.position
        self._journal.write_item(name, interest, position.epoch, position.offset, time.time(), item.data)


async def _is_over(ended: asyncio.Event, until_s: float | None) -> bool:
    """Wait until a time by the monotonic clock, None: without end. Returns whether the run is over."""
    try:
        await asyncio.wait_for(ended.wait(), None if until_s is None else max(0.0, until_s - time.monotonic()))
    except TimeoutError:
        return False
    return True


async def _print_stats(citizens: list[Citizen], journal: Journal) -> None:
    while True:
        await asyncio.sleep(STATS_INTERVAL_S)
        where = Counter(each.broker for each in citizens)
        sums = {name: sum(getattr(each, name) for each in citizens) for name in ("moved", "delivered", "gaps")}
        print(json.dumps({"where": where, **sums}), flush=True)
        journal.flush()


async def run(options: argparse.Namespace) -> None:
    """Let all users live until the end."""
    town = build_town(Random(options.seed))
    first, _, end = options.users.partition(":")
    plans = plan_users(town, int(end), options.seconds, options.seed, hurried=options.hurried)[int(first) :]
    maker = TokenMaker(options.keys)
    journal = Journal(options.journal)
    citizens = [Citizen(plan, town, options.brokers, maker.token(plan.name, [LOCATIONS]), journal) for plan in plans]
    ended = asyncio.Event()
    begin_s = time.monotonic() + options.begin - time.time() if options.begin else time.monotonic()
    beside = [asyncio.create_task(_print_stats(citizens, journal)), asyncio.create_task(await_end(ended))]
    try:
        outcomes = await asyncio.gather(*(each.live(begin_s, ended) for each in citizens), return_exceptions=True)
        for plan, outcome in zip(plans, outcomes, strict=True):
            if isinstance(outcome, ClientFailed):
                journal.write("refused", user=plan.name, what="connection", reason=str(outcome))
            elif isinstance(outcome, BaseException):
                raise outcome
    finally:
        for task in beside:
            task.cancel()
        journal.close()


def main() -> None:
    """Read the arguments, and run."""
    parser = argparse.ArgumentParser(description="Users of the emergency application.")
    parser.add_argument("--brokers", nargs="+", required=True, metavar="URL")
    parser.add_argument("--keys", type=Path, required=True, help="the JSON Web Key Set of the brokers")
    parser.add_argument("--journal", type=Path, required=True, help="a new file")
    parser.add_argument("--users", default="0:400", metavar="FIRST:END", help="numbers of users, as a slice")
    parser.add_argument("--seconds", type=float, default=1800.0, help="length of the run, to which the plans are fit")
    parser.add_argument("--begin", type=float, default=0.0, metavar="UNIX", help="when the run began; 0: now")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hurried", action="store_true", help="one user has report_counts_hurried, too")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
