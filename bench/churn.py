"""Clients come and go for minutes while channels move and agents fail: is anything lost silently, doubled, reordered?

Run with ``python -m bench.churn``; ``--help`` tells the rest. Real servers, agents and balancer. Some 300 clients in
several processes: most live for seconds (``bench.churn_clients``). Channels go through assignments of every mode all
the time. Agents are killed, hung (SIGSTOP) and killed, hung and woken, flooded, flooded and killed, and restarted, one
after the other. On demand (``--faults``) all keys of a server, or of all servers, are deleted, servers are killed and
start empty, or hang, balancers are killed or hang, and whole processes of clients are killed; more balancers wait for
the lease (``--rivals``), and players of RGame walk about (``--players``). In the end everything recovers, and from then
on nothing may be lost. ``make soak`` has all of it.

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
from dataclasses import asdict, dataclass, replace
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import redis.asyncio
import redis.exceptions

from bench import churn_journal as journal
from bench.agent_cost import Publisher
from bench.churn_clients import QUIET_S_MAX, Slots, live
from bench.churn_journal import Journal, Judgement, judge, read_tag
from bench.processors import children_of_ours, resident_mib
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
from dynamoth_sim.load.rgame import GameWorld

SERVERS = 3
PREFIX = b"churn:"
PUBLISH_S_MAX = 10.5
"""A publish that takes longer breaks G4: the client itself gives up after 10 s."""
MOVE_TIMEOUT_S = 20.0
REPLICATED_RATIO = 0.2
"""This share of the changes replicates the channel, in either mode."""
FLOOD_CHANNELS = 10
MEMORY_RATIO_MAX = 1.25
MEMORY_MIB_MAX = 10.0
"""Memory is flat when a daemon has at most so much more in the second half of a run than in the first."""
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
    players: int = 0


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
    #: The most memory that an agent had in the first half of the run, and in the second, in MiB, and a balancer: any
    #: agent may be flooded, and any balancer may lead.
    memory_mib: dict[str, tuple[float, float]]
    #: The command lines of processes that were left when all had been asked to end.
    leaked: list[str]
    stories: list[str]

    @property
    def grown(self) -> list[str]:
        """The kinds of daemons whose memory was not flat."""
        return [
            name
            for name, (first, second) in self.memory_mib.items()
            if second > first * MEMORY_RATIO_MAX + MEMORY_MIB_MAX
        ]

    @property
    def clean(self) -> bool:
        """Whether every guarantee was kept, no process is left, and memory was flat."""
        return not self.violations and not self.leaked and not self.grown


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
        self,
        cluster: LocalCluster,
        load: Load,
        written: Journal,
        flooder: Worker,
        rivals: list[Child],
        clients: Clients,
    ) -> None:
        self._cluster = cluster
        self._load = load
        self._written = written
        self._flooder = flooder
        self._chance = random.Random(f"{load.seed} faults")
        self.counts: Counter[str] = Counter()
        #: See ``Result``.
        self.memory_mib: dict[str, tuple[float, float]] = {}
        self._rivals = rivals
        self._clients = clients
        self._known: dict[str, Callable[[str], None]] = {
            "kill": self._kill,
            "hang-kill": self._hang_and_kill,
            "hang-wake": self._hang_and_wake,
            "flood": self._flood,
            "flood-kill": self._flood_and_kill,
            "restart": self._restart,
            "flush": self._flush,
            "flush-all": self._flush_all,
            "server-kill": self._kill_server,
            "server-hang": self._hang_server,
            "balancer-kill": self._kill_balancer,
            "balancer-hang": self._hang_balancer,
            "client-kill": self._kill_clients,
        }

    def happen(self, until: float) -> None:
        """Inject faults until a time of the monotonic clock. Every agent and one balancer run when this returns."""
        half = (time.monotonic() + until) / 2
        while time.monotonic() + self._load.fault_pause_s < until:
            self._measure_memory(second_half=time.monotonic() >= half)
            self._sleep(self._chance.uniform(0.5, 1.5) * self._load.fault_pause_s)
            server = self._chance.choice(self._cluster.server_ids)
            fault = self._chance.choice(self._load.faults)
            self._note(f"{fault} ({server}) begins")
            self._known[fault](server)
            self._note(f"{fault} ({server}) is over")
            self.counts[fault] += 1
            self._supervise()
            self._cluster.check()
        for rival in self._rivals:
            rival.stop()
        self._cluster.balancer.start()

    def _measure_memory(self, *, second_half: bool) -> None:
        kinds = {"agent": self._cluster.agents.values(), "balancer": (self._cluster.balancer, *self._rivals)}
        for kind, children in kinds.items():
            sizes = list(self.memory_mib.get(kind, (0.0, 0.0)))
            sizes[second_half] = max(
                sizes[second_half], *(resident_mib(each.pid) for each in children if each.running), 0
            )
            self.memory_mib[kind] = sizes[0], sizes[1]

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

    def _kill_server(self, server: str) -> None:
        """Kill a server; it comes back empty."""
        self._cluster.redis[server].kill()
        self._away()
        self._cluster.redis[server].start()

    def _hang_server(self, server: str) -> None:
        self._cluster.redis[server].pause()
        self._away()
        self._cluster.redis[server].resume()

    def _kill_balancer(self, _: str) -> None:
        balancer = self._a_balancer()
        balancer.kill()
        self._away()
        balancer.start()

    def _hang_balancer(self, _: str) -> None:
        pid = self._a_balancer().pid
        os.kill(pid, signal.SIGSTOP)
        self._away()
        os.kill(pid, signal.SIGCONT)

    def _a_balancer(self) -> Child:
        running = [balancer for balancer in (self._cluster.balancer, *self._rivals) if balancer.running]
        return self._chance.choice(running)

    def _kill_clients(self, _: str) -> None:
        self._clients.replace(self._chance.randrange(self._load.processes))

    def _away(self) -> None:
        self._sleep(self._chance.choice((self._chance.uniform(0.1, 1.0), self._chance.uniform(1.0, 4.0))))

    def _sleep(self, duration_s: float) -> None:
        time.sleep(duration_s)  # how long a fault lasts is the workload

    def _note(self, text: str) -> None:
        self._written.note(journal.FAULT, text)


AGENT_FAULTS = ("kill", "hang-kill", "hang-wake", "flood", "flood-kill", "restart")
FAULTS = (
    *AGENT_FAULTS, "flush", "flush-all", "server-kill", "server-hang", "balancer-kill", "balancer-hang", "client-kill",
)  # fmt: skip


class Clients:
    """The processes of clients: one for each place, which another can take.

    Args:
        load: what they do.
        url: of the cluster.
        channels: of all clients.
        world: the name of that of the players.
        folder: of their journals.
        written: where the end of a process that was killed is noted.
    """

    def __init__(self, load: Load, url: str, channels: list[bytes], world: str, folder: Path, written: Journal) -> None:
        self._load = load
        self._written = written
        self._numbers = count()
        self._folder = folder
        self._slots = Slots(
            url=url,
            channels=tuple(channels),
            process=0,
            seed=load.seed,
            count=load.clients // load.processes,
            journal=folder,
            life_s=load.life_s,
            interval_s=load.interval_s,
            players=load.players // load.processes,
            world=world,
            may_be_killed="client-kill" in load.faults,
        )
        self._places = [self._begin() for _ in range(load.processes)]

    def wait_ready(self) -> None:
        """Wait until every process has begun."""
        for _, worker in self._places:
            assert worker.receive() == "ready"

    def replace(self, place: int) -> None:
        """Kill a process, and start another in its place."""
        process, worker = self._places[place]
        worker.kill()
        self._written.note(journal.KILLED, process)
        self._places[place] = self._begin()
        assert self._places[place][1].receive() == "ready"

    def end(self) -> int:
        """Have all clients end; return how many there were, without those of processes that were killed."""
        for _, worker in self._places:
            worker.send("stop")
        return sum(worker.receive(QUIET_S_MAX + ANSWER_TIMEOUT_S) for _, worker in self._places)

    def stop(self) -> None:
        """End every process, whatever it is doing."""
        for _, worker in self._places:
            worker.stop()

    def _begin(self) -> tuple[int, Worker]:
        process = next(self._numbers)
        slots = replace(
            self._slots,
            process=process,
            first_player=process * self._slots.players,
            journal=self._folder / f"clients-{process}",
        )
        return process, Worker(live, slots)


# The run.


def churn(load: Load, progress: Callable[[str], None] = lambda _: None) -> Result:
    """Run the load and judge it."""
    before = children_of_ours()
    with tempfile.TemporaryDirectory(prefix="dynamoth-churn-") as folder, ExitStack() as cleanup:
        journals = Path(folder)
        cluster = cleanup.enter_context(LocalCluster(SERVERS))
        cluster.ask_balancer("pause")  # changes come from here only
        result = _run(load, cluster, journals, cleanup, progress)
    # The tracker of the multiprocessing module lives as long as we do.
    leaked = [command for pid, command in children_of_ours().items() if pid not in before and "_tracker" not in command]
    return replace(result, leaked=leaked)


def _run(
    load: Load, cluster: LocalCluster, folder: Path, cleanup: ExitStack, progress: Callable[[str], None]
) -> Result:
    def begin(*what: Any) -> Worker:
        worker = Worker(*what)
        cleanup.callback(worker.stop)
        return worker

    world = f"{PREFIX.decode()}rgame"
    channels = (
        GameWorld(name=world).channels()
        if load.players
        else [PREFIX + b"%d" % number for number in range(load.channels)]
    )
    ports = {id_: server.port for id_, server in cluster.redis.items()}
    flooder = begin(flood)
    observer = begin(observe, ports, folder / "observer")
    mover = begin(change_assignments, cluster.url, channels, cluster.server_ids, load, folder / "moves")
    written = Journal(folder / "faults")
    clients = Clients(load, cluster.url, channels, world, folder, written)
    cleanup.callback(clients.stop)
    for worker in (observer, mover):
        assert worker.receive() == "ready"
    clients.wait_ready()
    rivals = [cluster.another_balancer(f"rival {number}") for number in range(load.rivals)]
    for rival in rivals:
        cleanup.callback(rival.stop)
    faults = Faults(cluster, load, written, flooder, rivals, clients)
    progress(f"{load.clients} clients on {load.channels} channels; faults for {load.seconds:g} s")
    faults.happen(time.monotonic() + load.seconds)
    cluster.wait_ready()
    time.sleep(SETTLE_S)
    written.note(journal.CALM)
    progress(f"faults so far: {dict(faults.counts)}; {load.calm_s:g} s without any")
    time.sleep(load.calm_s)
    mover.send("stop")
    moves: dict[str, int] = mover.receive()
    lives = clients.end()
    observer.send("stop")
    observer.receive()
    written.close()
    cluster.check()
    return _result(judge(sorted(folder.iterdir()), PUBLISH_S_MAX), lives, moves, faults)


def _result(judgement: Judgement, lives: int, moves: dict[str, int], faults: Faults) -> Result:
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
        faults=dict(faults.counts),
        gap_reasons=dict(judgement.gap_reasons.most_common()),
        errors=dict(judgement.errors.most_common()),
        memory_mib=faults.memory_mib,
        leaked=[],
        stories=judgement.stories,
    )


def show(result: Result) -> None:
    """Print a result, for people; the violations last."""
    for name, value in asdict(result).items():
        if isinstance(value, dict):
            counts = cast("dict[str, int | tuple[float, float]]", value)
            sys.stdout.write(f"{name}:\n" + "".join(f"  {_in_words(each):>6} {key}\n" for key, each in counts.items()))
        elif name != "stories":
            sys.stdout.write(f"{name:16} {value:.3f}\n" if isinstance(value, float) else f"{name:16} {value}\n")
    for story in result.stories:
        sys.stdout.write(f"VIOLATION {story}\n")


def _in_words(value: int | tuple[float, float]) -> str:
    return str(value) if isinstance(value, int) else " then ".join(f"{each:.1f}" for each in value)


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
    parser.add_argument(
        "--players", type=int, default=0, help="of RGame; the channels are the tiles of their world then"
    )
    parser.add_argument("--seed", type=int, help="of everything that is left to chance but time (default: a new one)")
    parser.add_argument("--json", action="store_true")
    values: dict[str, Any] = vars(parser.parse_args())
    as_json: bool = values.pop("json")
    values["faults"] = tuple(values["faults"])
    if values["seed"] is None:
        values["seed"] = random.SystemRandom().randrange(2**32)
    _say(f"seed {values['seed']}")
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
