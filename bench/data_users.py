"""What users cost an execution whose interests are the same: nothing, as it is made once for each interest.

Run with ``python -m bench.data_users``; ``--help`` has the rest. A real ``dynamoth data-cluster`` has two log servers
and a broker, and the users, in a process of their own, subscribe to the same interests of one query, each to one. The
records of an execution are stored together. Few and many users take turns; each execution counts when every user has
got its result sets. The cost is the processor time of the data cluster and what it has started, Java and workers, from
the storing of the records to the entry in the journal. The journal's own times are shown, too: the first result sets
are delivered while the last ones are computed, so on a machine with few processors, many users make an execution late.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jwt

from bench.data_cluster import QUERIES, REPORTS, execution_of, interests_of, records_of
from bench.data_servers import DataCluster, DataServers
from bench.edge_broker import SECRET, write_keys
from bench.edge_processes import allow_files, wait_for, wait_until_started
from bench.workers import Worker
from dynamoth_cli.local.child import Child, dynamoth_command
from dynamoth_cli.local.cluster import environment_without_settings
from dynamoth_cli.local.embedded import reserve_port
from dynamoth_daemon import event_loop
from dynamoth_user import Client, Gap, Item

QUERY = QUERIES["of_kind"]
CONNECTS_AT_ONCE = 20


class _Users:
    """Users with one subscription each. They count what they get."""

    def __init__(self, url: str, count: int, parameters: Sequence[dict[str, Any]]) -> None:
        self._url = url
        self._count = count
        self._parameters = parameters
        self._clients: list[Client] = []
        claims = {"sub": "bench", "exp": time.time() + 3600, "queries": ["*"]}
        self._token = jwt.encode(claims, SECRET, "HS256", headers={"kid": "k"})
        self.counts: Counter[str] = Counter()

    async def join(self) -> None:
        """Connect all users; return when every subscription is confirmed."""
        gate = asyncio.Semaphore(CONNECTS_AT_ONCE)

        async def join_one(number: int) -> None:
            async with gate:
                client = Client([self._url], token=self._token, proxy=None)
                await client.__aenter__()
                self._clients.append(client)
                parameters = self._parameters[number % len(self._parameters)]
                await client.subscribe_query(QUERY.name, parameters, partial(self._take, number))

        await asyncio.gather(*map(join_one, range(self._count)))

    def _take(self, number: int, item: Item | Gap) -> None:
        self.counts["gaps" if isinstance(item, Gap) else "delivered"] += 1

    async def close(self) -> None:
        await asyncio.gather(*(client.close() for client in self._clients), return_exceptions=True)


def _live_here(pipe: Connection, url: str, count: int, parameters: Sequence[dict[str, Any]]) -> None:
    """Run users: the target of a worker. ``counts`` is answered; anything else ends them."""
    event_loop.run(_live(pipe, _Users(url, count, parameters)))


async def _live(pipe: Connection, users: _Users) -> None:
    await users.join()
    pipe.send("joined")
    orders: asyncio.Queue[str] = asyncio.Queue()
    asyncio.get_running_loop().add_reader(pipe.fileno(), lambda: orders.put_nowait(pipe.recv()))
    while await orders.get() == "counts":
        pipe.send(users.counts)
    await users.close()
    pipe.send("closed")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--users", type=int, nargs=2, default=[200, 2000], metavar="N", help="few, and many")
    parser.add_argument("--interests", type=int, default=200, metavar="N")
    parser.add_argument("--records", type=int, default=10_000, metavar="N")
    parser.add_argument("--executions", type=int, default=3, metavar="N", help="of each turn")
    parser.add_argument("--turns", type=int, default=3, metavar="N")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    arguments = parser.parse_args()
    few, many = arguments.users
    if arguments.interests > few:
        parser.error("each interest needs a user: fewer --interests, or more --users")
    allow_files(4 * many + 1000)
    with ExitStack() as stack:
        found = _measure(stack, arguments)
    results: dict[str, Any] = {"benchmark": "data_users"}
    for index, name in enumerate(("cpu_s", "seconds")):
        values = {users: [each[index] for each in measured] for users, measured in found.items()}
        medians = {users: statistics.median(each) for users, each in values.items()}
        for users, each in values.items():
            sys.stdout.write(
                f"{users:>9,} users, {arguments.interests:,} interests, {name}: {medians[users]:.2f}"
                f" ({min(each):.2f} to {max(each):.2f}), {len(each)} executions\n"
            )
        results[name] = medians
        results[f"ratio_{name}"] = medians[many] / medians[few]
    sys.stdout.write(json.dumps(results) + "\n")
    return 0


def _measure(stack: ExitStack, arguments: argparse.Namespace) -> dict[int, list[tuple[float, float]]]:
    """Return processor time and duration of the executions that count, in seconds, by number of users."""
    chance = random.Random(arguments.seed)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    servers = DataServers(stack)
    servers.define(REPORTS, QUERY)
    cluster = DataCluster(stack, servers, folder)
    url = _start_broker(stack, folder, cluster.config_file, servers)
    parameters = list(interests_of(QUERY.name, arguments.interests, chance))
    found: dict[int, list[tuple[float, float]]] = {users: [] for users in arguments.users}
    for turn in range(1 + arguments.turns):
        for users in arguments.users:
            with ExitStack() as ending:
                worker = Worker(_live_here, url, users, parameters)
                ending.callback(worker.stop)
                worker.receive()
                for number in range(arguments.executions):
                    records = records_of(arguments.records, arguments.interests, chance)
                    before = cluster.family_cpu_s()
                    execution = execution_of(servers, cluster, QUERY, records, arguments.interests)
                    cpu_s = cluster.family_cpu_s() - before
                    wait_for(partial(_has_all, worker, users * (number + 1)))
                    if turn:
                        found[users].append((cpu_s, execution["seconds"]))
                worker.send("end")
                worker.receive()
    return found


def _has_all(worker: Worker, count: int) -> bool:
    """Tell whether the users have got this many result sets. Raises SystemExit where some have a gap."""
    worker.send("counts")
    counts: Counter[str] = worker.receive()
    if counts["gaps"] or counts["delivered"] > count:
        raise SystemExit(f"{count} result sets expected, not {dict(counts)}")
    return counts["delivered"] == count


def _start_broker(stack: ExitStack, folder: Path, config_file: Path, servers: DataServers) -> str:
    """Start a broker, and return the URL for users."""
    with reserve_port() as reserved:
        port: int = reserved.getsockname()[1]
    command = dynamoth_command(
        *("broker", "--config", str(config_file), "--id", "b1", "--port", str(port), "--http-port", "0"),
        *("--logs", servers.logs, "--data-cluster", "true", "--token-keys-file", str(write_keys(folder))),
        *("--new-interests-per-hour-max", "0"),  # one token has all users
    )
    broker = Child("broker", command, environment=environment_without_settings())
    stack.callback(broker.kill)
    broker.start()
    wait_until_started(broker)
    return f"ws://127.0.0.1:{port}/connect"


if __name__ == "__main__":
    sys.exit(main())
