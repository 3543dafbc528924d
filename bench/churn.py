"""Clients come and go for minutes while channels move and agents fail: is anything lost silently, doubled, reordered?

Run with ``python -m bench.churn``; ``--help`` tells the rest. Real servers, agents and balancer. Some 300 clients in
several processes: most live for seconds (``bench.churn_clients``). Channels go through assignments of every mode all
the time. Agents are killed, hung (SIGSTOP) and killed, hung and woken, flooded, flooded and killed, and restarted, one
after the other. On demand all keys of a server, or of all servers, are deleted (``--faults flush flush-all``), and more
balancers wait for the lease (``--rivals``). In the end everything recovers, and from then on nothing may be lost.

Processes of clients note how late their event loops are: a busy machine makes a publish last longer, too.

Every message is judged by the checker that the simulator uses (``bench.churn_journal``): a message that was due, and
neither delivered nor covered by a gap event, was lost silently. Exits with 1 on any violation of a guarantee.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import redis.asyncio
import redis.exceptions

from bench import churn_journal as journal
from bench.agent_cost import Publisher
from bench.churn_clients import QUIET_S_MAX, Slots, live
from bench.churn_journal import Journal, Judgement, judge, read_tag
from bench.transitions import all_assignments, change_between
from bench.workers import ANSWER_TIMEOUT_S, Worker
from dynamoth.errors import DynamothError, MalformedMessage
from dynamoth.plan.plan import Assignment, Mode
from dynamoth.protocol.envelope import open_envelope
from dynamoth_cli.admin import ask_balancer, read_plan
from dynamoth_cli.local.child import Child, interrupted_by_signals
from dynamoth_cli.local.cluster import LocalCluster
from dynamoth_daemon.event_loop import run
from dynamoth_link.urls import parse_cluster_url

SERVERS = 3
PREFIX = b"churn:"
PUBLISH_S_MAX = 10.5
"""A publish that takes longer breaks G4: the client itself gives up after 10 s."""
MOVE_TIMEOUT_S = 20.0
REPLICATED_RATIO = 0.2
"""This share of the changes replicates the channel, in either mode."""
FLOOD_CHANNELS = 10
SETTLE_S = 3.0
"""Time for everybody to find out that all daemons are back, before nothing may be lost any more."""


@dataclass(frozen=True)
class Load:
    """How much happens, and for how long."""

    seconds: float
    calm_s: float
    clients: int
    processes: int
    channels: int
    life_s: float
    interval_s: float
    moves_at_once: int
    fault_pause_s: float
    flood_per_s: float
    faults: tuple[str, ...]
    rivals: int
    seed: int


@dataclass(frozen=True)
class Result:
    """The results of a run."""

    clients: int
    published: int
    publishes_failed: int
    delivered: int
    lost: int
    duplicated: int
    reordered: int
    violations: int
    gaps: int
    covered_losses: int
    publish_s_max: float
    #: How late the event loop of a process of clients was at most, and the load of the machine in the last 5 minutes.
    client_lag_s_max: float
    load_average: float
    moves: dict[str, int]
    faults: dict[str, int]
    gap_reasons: dict[str, int]
    errors: dict[str, int]
    stories: list[str]

    @property
    def clean(self) -> bool:
        """Whether every guarantee was kept."""
        return not self.violations


# Processes beside those of the clients.


def observe(pipe: Connection, ports: dict[str, int], file: Path) -> None:
    """Run the process that notes which messages come to which server, and who published them."""
    written = Journal(file)

    async def watch(server: str, port: int) -> None:
        while True:
            try:
                plain: Any = redis.asyncio.Redis(port=port)  # redis-py is typed in part
                async with plain as client, client.pubsub() as pubsub:
                    await pubsub.psubscribe(b"*" + PREFIX + b"*")
                    async for message in pubsub.listen():
                        if message["type"] == "pmessage":
                            _note_seen(written, server, message["channel"], message["data"])
            except redis.exceptions.RedisError:
                await asyncio.sleep(0.1)

    async def work() -> None:
        watching = [asyncio.create_task(watch(*pair)) for pair in ports.items()]
        pipe.send("ready")
        await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)

    run(work())
    written.close()
    pipe.send("stopped")


def _note_seen(written: Journal, server: str, physical: bytes, data: bytes) -> None:
    try:
        envelope = open_envelope(data)
    except MalformedMessage:
        return
    if (tagged := read_tag(envelope.payload)) is not None:
        name, number = tagged
        channel = physical[physical.index(PREFIX) :]
        where = f"at {server} by {physical!r}, sequence {envelope.sequence}, flags {envelope.flags:#x}"
        written.note(journal.SEEN, envelope.publisher, name, number, where, channel)


def change_assignments(
    pipe: Connection, url: str, channels: list[bytes], servers: list[str], load: Load, file: Path
) -> None:
    """Run the process that moves channels, several at a time, until the pipe says stop. Answers with the outcomes."""
    written = Journal(file)
    cluster = parse_cluster_url(url)
    chance = random.Random(f"{load.seed} moves")
    outcomes: Counter[str] = Counter()
    stopping = asyncio.Event()

    async def change(channel: bytes) -> None:
        before = (await read_plan(cluster)).entry(channel).route.assignment
        after = _another(before, servers, chance)
        wanted = change_between(before, after)
        arguments = {**wanted.arguments, "channel": channel}
        text = f"{_short(before)} to {_short(after)}"
        written.note(journal.CHANGE, "begins:", text, channel)
        await ask_balancer(cluster, wanted.command, arguments, timeout_s=MOVE_TIMEOUT_S)
        written.note(journal.CHANGE, "has settled:", text, channel)

    async def go_on(mine: list[bytes]) -> None:
        while not stopping.is_set():
            channel = chance.choice(mine)
            try:
                await change(channel)
                outcomes["settled"] += 1
            except (DynamothError, OSError) as error:
                outcomes["refused or late"] += 1
                written.note(journal.CHANGE, "is refused or late:", str(error), channel)
                await asyncio.sleep(0.2)

    async def work() -> None:
        pipe.send("ready")
        async with asyncio.TaskGroup() as tasks:
            for index in range(load.moves_at_once):
                tasks.create_task(go_on(channels[index :: load.moves_at_once]))
            await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
            stopping.set()

    run(work())
    written.close()
    pipe.send(dict(outcomes))


def _another(before: Assignment, servers: list[str], chance: random.Random) -> Assignment:
    replicated = chance.random() < REPLICATED_RATIO
    return chance.choice(
        [
            after
            for after in all_assignments(servers)
            if after != before and (after.mode is not Mode.SINGLE) == replicated
        ]
    )


def _short(assignment: Assignment) -> str:
    return f"{assignment.mode.name} {'+'.join(assignment.servers)}"


def flood(pipe: Connection) -> None:
    """Run the process that floods servers: for each request, the server at a port, at a rate, for a time."""
    while True:
        port, rate_per_s, duration_s = pipe.recv()
        pipe.send(Publisher(port, FLOOD_CHANNELS).pace(rate_per_s, duration_s))


# Faults.


class Faults:
    """Injects faults into agents and servers, one after the other."""

    def __init__(
        self, cluster: LocalCluster, load: Load, written: Journal, flooder: Worker, rivals: list[Child]
    ) -> None:
        self._cluster = cluster
        self._load = load
        self._written = written
        self._flooder = flooder
        self._chance = random.Random(f"{load.seed} faults")
        self.counts: Counter[str] = Counter()
        self._rivals = rivals
        self._known: dict[str, Callable[[str], None]] = {
            "kill": self._kill,
            "hang-kill": self._hang_and_kill,
            "hang-wake": self._hang_and_wake,
            "flood": self._flood,
            "flood-kill": self._flood_and_kill,
            "restart": self._restart,
            "flush": self._flush,
            "flush-all": self._flush_all,
        }

    def happen(self, until: float) -> None:
        """Inject faults until a time of the monotonic clock. Every agent and one balancer run when this returns."""
        while time.monotonic() + self._load.fault_pause_s < until:
            self._sleep(self._chance.uniform(0.5, 1.5) * self._load.fault_pause_s)
            server = self._chance.choice(self._cluster.server_ids)
            fault = self._chance.choice(self._load.faults)
            self._note(f"{fault} of the agent of {server} begins")
            self._known[fault](server)
            self._note(f"{fault} of the agent of {server} is over")
            self.counts[fault] += 1
            self._supervise()
            self._cluster.check()
        for rival in self._rivals:
            rival.stop()
        self._cluster.balancer.start()

    def _supervise(self) -> None:
        """Start balancers again that have ended because another one is at work."""
        if self._rivals:
            for balancer in (self._cluster.balancer, *self._rivals):
                balancer.start()

    def _kill(self, server: str) -> None:
        self._cluster.agents[server].kill()
        self._away()
        self._cluster.agents[server].start()

    def _hang_and_kill(self, server: str) -> None:
        os.kill(self._cluster.agents[server].pid, signal.SIGSTOP)
        self._away()
        self._kill(server)

    def _hang_and_wake(self, server: str) -> None:
        pid = self._cluster.agents[server].pid
        os.kill(pid, signal.SIGSTOP)
        self._away()
        os.kill(pid, signal.SIGCONT)

    def _flood(self, server: str) -> None:
        duration_s = self._chance.uniform(0.5, 2.0)
        self._flooder.send((self._cluster.redis[server].port, self._load.flood_per_s, duration_s))
        self._flooder.receive()

    def _flood_and_kill(self, server: str) -> None:
        duration_s = self._chance.uniform(0.5, 2.0)
        self._flooder.send((self._cluster.redis[server].port, self._load.flood_per_s, duration_s))
        self._sleep(0.7 * duration_s)
        self._kill(server)
        self._flooder.receive()

    def _restart(self, server: str) -> None:
        self._cluster.agents[server].stop()
        self._cluster.agents[server].start()

    def _flush(self, server: str) -> None:
        """Delete all keys, the lease and the plan among them."""
        self._cluster.ask(server, (b"FLUSHALL",))

    def _flush_all(self, _: str) -> None:
        with ThreadPoolExecutor(SERVERS) as together:
            list(together.map(self._flush, self._cluster.server_ids))

    def _away(self) -> None:
        self._sleep(self._chance.choice((self._chance.uniform(0.1, 1.0), self._chance.uniform(1.0, 4.0))))

    def _sleep(self, duration_s: float) -> None:
        time.sleep(duration_s)  # how long a fault lasts is the workload

    def _note(self, text: str) -> None:
        self._written.note(journal.FAULT, text)


AGENT_FAULTS = ("kill", "hang-kill", "hang-wake", "flood", "flood-kill", "restart")
FAULTS = (*AGENT_FAULTS, "flush", "flush-all")


# The run.


def churn(load: Load, progress: Callable[[str], None] = lambda _: None) -> Result:
    """Run the load and judge it."""
    with tempfile.TemporaryDirectory(prefix="dynamoth-churn-") as folder, ExitStack() as cleanup:
        journals = Path(folder)
        cluster = cleanup.enter_context(LocalCluster(SERVERS))
        cluster.ask_balancer("pause")  # changes come from here only
        return _run(load, cluster, journals, cleanup, progress)


def _run(
    load: Load, cluster: LocalCluster, folder: Path, cleanup: ExitStack, progress: Callable[[str], None]
) -> Result:
    def begin(*what: Any) -> Worker:
        worker = Worker(*what)
        cleanup.callback(worker.stop)
        return worker

    channels = [PREFIX + b"%d" % number for number in range(load.channels)]
    ports = {id_: server.port for id_, server in cluster.redis.items()}
    flooder = begin(flood)
    observer = begin(observe, ports, folder / "observer")
    mover = begin(change_assignments, cluster.url, channels, cluster.server_ids, load, folder / "moves")
    clients = [begin(live, slots) for slots in _slots(load, cluster.url, tuple(channels), folder)]
    for worker in (observer, mover, *clients):
        assert worker.receive() == "ready"
    written = Journal(folder / "faults")
    rivals = [cluster.another_balancer(f"rival {number}") for number in range(load.rivals)]
    for rival in rivals:
        cleanup.callback(rival.stop)
    faults = Faults(cluster, load, written, flooder, rivals)
    progress(f"{load.clients} clients on {load.channels} channels; faults for {load.seconds:g} s")
    faults.happen(time.monotonic() + load.seconds)
    cluster.wait_ready()
    time.sleep(SETTLE_S)
    written.note(journal.CALM)
    progress(f"faults so far: {dict(faults.counts)}; {load.calm_s:g} s without any")
    time.sleep(load.calm_s)
    mover.send("stop")
    moves: dict[str, int] = mover.receive()
    for worker in clients:
        worker.send("stop")
    lives = sum(worker.receive(QUIET_S_MAX + ANSWER_TIMEOUT_S) for worker in clients)
    observer.send("stop")
    observer.receive()
    written.close()
    cluster.check()
    return _result(judge(sorted(folder.iterdir()), PUBLISH_S_MAX), lives, moves, faults.counts)


def _slots(load: Load, url: str, channels: tuple[bytes, ...], folder: Path) -> list[Slots]:
    return [
        Slots(
            url=url,
            channels=channels,
            process=process,
            seed=load.seed,
            count=load.clients // load.processes,
            journal=folder / f"clients-{process}",
            life_s=load.life_s,
            interval_s=load.interval_s,
        )
        for process in range(load.processes)
    ]


def _result(judgement: Judgement, lives: int, moves: dict[str, int], faults: Counter[str]) -> Result:
    totals = judgement.totals
    return Result(
        clients=lives,
        published=totals.published,
        publishes_failed=totals.failed,
        delivered=totals.delivered,
        lost=totals.lost,
        duplicated=totals.duplicated,
        reordered=totals.reordered,
        violations=judgement.violations,
        gaps=totals.gaps,
        covered_losses=totals.covered_losses,
        publish_s_max=judgement.publish_s_max,
        client_lag_s_max=judgement.client_lag_s_max,
        load_average=os.getloadavg()[1],
        moves=moves,
        faults=dict(faults),
        gap_reasons=dict(judgement.gap_reasons.most_common()),
        errors=dict(judgement.errors.most_common()),
        stories=judgement.stories,
    )


def show(result: Result) -> None:
    """Print a result, for people; the violations last."""
    for name, value in asdict(result).items():
        if isinstance(value, dict):
            counts = cast("dict[str, int]", value)
            sys.stdout.write(f"{name}:\n" + "".join(f"  {count:6} {key}\n" for key, count in counts.items()))
        elif name != "stories":
            sys.stdout.write(f"{name:16} {value:.3f}\n" if isinstance(value, float) else f"{name:16} {value}\n")
    for story in result.stories:
        sys.stdout.write(f"VIOLATION {story}\n")


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.churn", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0, help="how long faults happen (default %(default)g)")
    parser.add_argument("--calm-s", type=float, default=10.0, help="how long none do, in the end")
    parser.add_argument("--clients", type=int, default=300, help="at any time (default %(default)s)")
    parser.add_argument("--processes", type=int, default=3, help="of clients")
    parser.add_argument("--channels", type=int, default=60)
    parser.add_argument("--life-s", type=float, default=8.0, help="mean length of a client's life")
    parser.add_argument("--interval-s", type=float, default=0.2, help="mean time between two messages of a talker")
    parser.add_argument("--moves-at-once", type=int, default=4)
    parser.add_argument("--fault-pause-s", type=float, default=2.0, help="mean time between two faults")
    parser.add_argument("--flood-per-s", type=float, default=300_000.0, help="messages of a flood")
    parser.add_argument(
        "--faults", nargs="*", default=AGENT_FAULTS, choices=FAULTS, metavar="FAULT", help=", ".join(FAULTS)
    )
    parser.add_argument("--rivals", type=int, default=0, help="further balancers that wait for the lease")
    parser.add_argument("--seed", type=int, default=1, help="of everything that is left to chance but time")
    parser.add_argument("--json", action="store_true")
    values: dict[str, Any] = vars(parser.parse_args())
    as_json: bool = values.pop("json")
    values["faults"] = tuple(values["faults"])
    load = Load(**values)
    with interrupted_by_signals():
        result = churn(load, _say)
    if as_json:
        sys.stdout.write(json.dumps({**asdict(result), "clean": result.clean}) + "\n")
    else:
        show(result)
    return 0 if result.clean else 1


if __name__ == "__main__":
    sys.exit(main())
