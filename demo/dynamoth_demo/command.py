"""``dynamoth demo``: a crowd of players on a cluster of its own, whose channels move while an audit looks on.

The demo starts a ``LocalCluster``, then workers with auditors, players and performers (``worker.py``), watches the
plan and the balancer, and shows everything. The players overload two servers, so the balancer adds further ones and
moves channels there. A festival is too much for any one server, and the balancer spreads its channel and folds it back.
Meanwhile a server is killed, and others take its channels. In the end the demo stops the players, waits until servers
that nobody needs are freed, has every worker judge what arrived, and prints the result.

With a fixed number of servers (``--servers``), none is added and none is killed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import queue
import secrets
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console

from dynamoth.errors import DynamothError
from dynamoth_cli.admin import ask_balancer, read_plan
from dynamoth_cli.commands.up import SERVERS_MAX
from dynamoth_cli.local.beside import add_record
from dynamoth_cli.local.child import Child, interrupted_by_signals
from dynamoth_cli.local.cluster import LocalCluster
from dynamoth_cli.numbers import count_up_to, number
from dynamoth_demo.festival import Festival
from dynamoth_demo.scene import ELASTIC_SERVERS, FESTIVAL_SERVERS_MIN, Elasticity, Scene, make_scene
from dynamoth_demo.state import DemoState, WorkerState
from dynamoth_demo.view import View, show_summary
from dynamoth_demo.worker import WorkerOptions
from dynamoth_link.urls import parse_cluster_url

PLAYERS = 100
SECONDS = 50.0
ELASTIC_SECONDS = 100.0
"""A new server gets no channels for ten seconds, whatever the pace is."""

PLAYERS_PER_WORKER_MIN = 25
PLAYERS_MAX = 5000

UPDATE_INTERVAL_S = 0.25
"""Time between two looks of the view."""

WATCH_INTERVAL_S = 0.5
"""Time between two questions to plan and balancer."""

ANSWER_TIMEOUT_S = 3.0
READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0
JUDGE_TIMEOUT_S = 60.0
"""Bounds of what workers may take to get ready, to stop, and to judge."""

CROWDING_S = 8.0
CROWDING_RATIO_MAX = 0.25
"""The balancer is paused this long, but at most for this share of the whole time: so people see the overload first."""

SHRINK_TIMEOUT_S = 120.0
"""Bound of the time in which servers that nobody needs are freed."""

START_DELAY_S = 0.3
"""Players begin this long after the command to begin, so that all workers begin at the same time."""

_JUDGED = ("published", "failed")
"""What publishers say in the end, and auditors need to judge."""

EVENTS_MAX = 10_000
"""Bound of events that wait to be looked at; workers wait then."""

AUDITOR_NUMBERS_FROM = 1_000_000
PERFORMER_NUMBERS_FROM = 2_000_000
"""Auditors and performers have other numbers than players."""


class DemoFailed(DynamothError):
    """Raised when a worker of the demo does not answer in time."""

    code = "demo-failed"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "--players",
        type=count_up_to(PLAYERS_MAX),
        default=PLAYERS,
        metavar="N",
        help="number of players (default %(default)s)",
    )
    parser.add_argument(
        "--servers",
        type=count_up_to(SERVERS_MAX),
        metavar="M",
        help=f"a fixed number of Redis servers; a channel can be spread from {FESTIVAL_SERVERS_MIN} on (default:"
        f" {ELASTIC_SERVERS} at first, more under load, and one is killed)",
    )
    parser.add_argument(
        "--seconds",
        type=_seconds,
        metavar="S",
        help=f"how long the players play (default {ELASTIC_SECONDS:g}, with a fixed number of servers {SECONDS:g})",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to this file")
    add_record(parser)
    parser.add_argument("--seed", type=int, metavar="N", help="seed of the players' moves (default: random)")


def run(arguments: argparse.Namespace) -> int:
    """Run the demo. Returns 0 when the audit is clean, 1 when it is not or nothing was measured."""
    console = Console(soft_wrap=False)
    seed = secrets.randbits(32) if arguments.seed is None else arguments.seed
    is_elastic = arguments.servers is None
    servers = [f"s{index + 1}" for index in range(ELASTIC_SERVERS if is_elastic else arguments.servers)]
    seconds = arguments.seconds or (ELASTIC_SECONDS if is_elastic else SECONDS)
    scene = make_scene(arguments.players, servers, seconds, elastic=is_elastic)
    state = DemoState(servers, scene.world.channels(), seconds, scene.festival, scene.elasticity)
    with interrupted_by_signals():
        with View(state, console) as view, ExitStack() as running:
            state.stage = f"starting {len(servers)} Redis servers, their agents and the balancer"
            view.update()
            Demo(scene, state, seed, view.update, arguments.record).play(running)
        summary = {"players": scene.players, "seed": seed, **state.summary()}
    show_summary(summary, console)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(summary, indent=2) + "\n")
    return 0 if summary["clean"] else 1


@dataclass(slots=True)
class _Worker:
    """A worker's process, and its events."""

    child: Child
    state: WorkerState


class Demo:
    """One run of the demo.

    Args:
        scene: what is played.
        state: where everything that comes to be known goes.
        seed: of the players.
        show: called whenever there may be something new to see.
        record: the folder of a recording; None for none.
    """

    def __init__(
        self, scene: Scene, state: DemoState, seed: int, show: Callable[[], None], record: Path | None = None
    ) -> None:
        self._scene = scene
        self._state = state
        self._seed = seed
        self._show = show
        #: What other threads have found, as calls to be made in ours.
        self._events: queue.Queue[Callable[[], None]] = queue.Queue(EVENTS_MAX)
        self._workers: list[_Worker] = []
        self._cluster = LocalCluster(
            len(state.servers),
            outgoing_bytes_per_s_max=scene.outgoing_bytes_per_s_max,
            settings=scene.settings,
            servers_max=None if scene.elasticity is None else scene.elasticity.servers_max,
            record=record,
        )

    def play(self, running: ExitStack) -> None:
        """Play from start to end. What must be stopped then goes to ``running``.

        Raises:
            DynamothError: a process has ended, or does not get on.

        """
        state = self._state
        running.enter_context(self._cluster)
        self._cluster.ask_balancer("pause")
        running.callback(self._stop_workers)
        self._start_workers()
        self._stage("connecting the auditors", lambda: all(w.ready for w in state.workers), READY_TIMEOUT_S)
        watcher = _Watcher(self._cluster.url, state, self._events)
        running.callback(watcher.stop)
        watcher.start()
        at = time.monotonic() + START_DELAY_S
        self._order("start", at=at)
        crowded = at + min(CROWDING_S, state.seconds * CROWDING_RATIO_MAX)
        self._until("the crowd gathers, the balancer is paused", at, crowded)
        self._cluster.ask_balancer("resume")
        playing = f"{self._scene.players} players play"
        if self._scene.festival is not None:
            self._until(playing, at, at + self._scene.festival.begins_s)
            self._hold_festival(self._scene.festival, at)
        if self._scene.elasticity is not None:
            self._lose_and_shrink(self._scene.elasticity, at)
        self._until(playing, at, at + state.seconds)
        self._order("stop")
        self._stage("stopping the players", lambda: all(w.stopped is not None for w in state.workers), STOP_TIMEOUT_S)
        stopped = [w.stopped for w in state.workers if w.stopped]
        published, failed = ([item for each in stopped for item in each.get(name, ())] for name in _JUDGED)
        self._order("finish", published=published, failed=failed)
        self._stage("auditing", lambda: all(w.result is not None for w in state.workers), JUDGE_TIMEOUT_S)
        state.take_plan(asyncio.run(read_plan(parse_cluster_url(self._cluster.url))), time.monotonic())
        state.stage = "done"

    def _hold_festival(self, festival: Festival, at: float) -> None:
        """Start the performers, with the balancer paused at first, so that the overload is seen."""
        self._cluster.ask_balancer("pause")
        self._until("a festival begins, the balancer is paused", at, at + festival.begins_s + festival.gathers_s)
        self._cluster.ask_balancer("resume")
        self._until("a festival is on", at, at + festival.ends_s)

    # Going on.

    def _until(self, stage: str, at: float, end: float) -> None:
        """Handle events and show them, while the players play, from one time until another."""
        self._state.stage = stage
        while (now := time.monotonic()) < end:
            self._state.elapsed_s = max(0.0, now - at)
            self._look(min(UPDATE_INTERVAL_S, end - now))

    def _lose_and_shrink(self, elasticity: Elasticity, at: float) -> None:
        """Kill a server and its agent, as if their machine had died; then most players go home."""
        state, players = self._state, self._scene.players
        self._until(f"{players} players play", at, at + elasticity.kill_at_s)
        killed = state.servers[1]
        self._cluster.lose(killed)
        state.on_kill(killed, time.monotonic())
        self._until(f"{killed} was killed, {players} players play", at, at + elasticity.leave_at_s)
        self._order("leave", stay_ratio=elasticity.stay_ratio)
        self._until("most players go home, servers are freed", at, at + state.seconds)
        end = at + state.seconds + SHRINK_TIMEOUT_S
        while not state.has_shrunk and (now := time.monotonic()) < end:
            state.elapsed_s = now - at
            self._look(UPDATE_INTERVAL_S)

    def _stage(self, stage: str, done: Callable[[], bool], timeout_s: float) -> None:
        """Wait until something has been done."""
        self._state.stage = stage
        deadline = time.monotonic() + timeout_s
        while not done():
            if time.monotonic() > deadline:
                raise DemoFailed(f"{stage}: not done after {timeout_s:g} s: is this machine too busy for the demo?")
            self._look(UPDATE_INTERVAL_S)

    def _look(self, duration_s: float) -> None:
        """Handle new events, show them, and make sure that all processes are alive."""
        end = time.monotonic() + duration_s
        while (left_s := end - time.monotonic()) > 0:
            try:
                self._events.get(timeout=left_s)()
            except queue.Empty:
                break
        self._cluster.check()
        for worker in self._workers:
            if worker.child.ended_by_itself:
                raise worker.child.failure()
        self._state.sample(time.monotonic())
        self._show()

    # Workers.

    def _start_workers(self) -> None:
        scene = self._scene
        processes = max(1, min(os.cpu_count() or 1, scene.players // PLAYERS_PER_WORKER_MIN))
        self._start_worker("auditors", AUDITOR_NUMBERS_FROM, scene.auditors)
        bounds = [scene.players * index // processes for index in range(processes + 1)]
        for first, end in pairwise(bounds):
            self._start_worker("players", first, end - first)
        if scene.festival is not None:
            self._start_worker("performers", PERFORMER_NUMBERS_FROM, scene.festival.performers)

    def _start_worker(self, role: str, first: int, count: int) -> None:
        child = Child(f"{role} {first}", worker_command(), environment=os.environ, pipes=True)
        worker = _Worker(child, WorkerState(role))
        self._workers.append(worker)
        self._state.workers.append(worker.state)
        child.start()
        options = WorkerOptions(
            role=role,
            url=self._cluster.url,
            world=_world_as_json(self._scene),
            seed=self._seed,
            first=first,
            count=count,
            payload_bytes=self._scene.payload_bytes,
            losses_allowed=self._scene.elasticity is not None,
            festival=None if self._scene.festival is None else asdict(self._scene.festival),
        )
        _write_line(child, asdict(options))
        threading.Thread(target=self._listen, args=(worker,), name=f"events of {child.name}", daemon=True).start()

    def _order(self, order: str, **fields: Any) -> None:
        for worker in self._workers:
            _write_line(worker.child, {"order": order, **fields})

    def _listen(self, worker: _Worker) -> None:
        """Read the events of one worker, in a thread, until it closes its stdout."""
        try:
            for line in worker.child.stdout:
                event: dict[str, Any] = json.loads(line)
                self._events.put(partial(self._state.take_event, worker.state, event))
        except Exception as error:
            self._events.put(partial(_raise, error))

    def _stop_workers(self) -> None:
        for worker in self._workers:
            worker.child.kill()  # they hold nothing that must be put in order


class _Watcher:
    """Asks for the plan and the balancer's status, in a thread, so that nothing waits for them."""

    def __init__(self, url: str, state: DemoState, events: queue.Queue[Callable[[], None]]) -> None:
        self._cluster = parse_cluster_url(url)
        self._state = state
        self._events = events
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watcher", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End, when the present question is answered or was given up."""
        self._stopping.set()
        self._thread.join()

    def _watch(self) -> None:
        try:
            while not self._stopping.wait(WATCH_INTERVAL_S):
                asyncio.run(self._ask())
        except Exception as error:
            self._tell(partial(_raise, error))

    async def _ask(self) -> None:
        state = self._state
        try:
            plan = await read_plan(self._cluster)
            self._tell(partial(state.take_plan, plan, time.monotonic()))
            status = await ask_balancer(self._cluster, "status", timeout_s=ANSWER_TIMEOUT_S)
            self._tell(partial(state.take_balancer, status))
        except DynamothError as error:
            self._tell(partial(state.take_problem, str(error)))

    def _tell(self, call: Callable[[], None]) -> None:
        with suppress(queue.Full):  # the next answer will do as well
            self._events.put_nowait(call)


def worker_command() -> list[str]:
    """Return the command line of a worker."""
    return [sys.executable, "-P", "-m", "dynamoth_demo.worker"]


def _world_as_json(scene: Scene) -> dict[str, Any]:
    """Return the world as JSON can hold it."""
    return {**asdict(scene.world), "suffixes": dict(scene.world.suffixes)}


def _write_line(child: Child, fields: dict[str, Any]) -> None:
    """Send a command to a worker. One that has ended is noticed by the next look."""
    try:
        child.stdin.write(json.dumps(fields).encode() + b"\n")
        child.stdin.flush()
    except BrokenPipeError as error:
        raise child.failure() from error


def _raise(error: Exception) -> None:
    """Raise a fault of another thread, which ends the demo."""
    raise error


def _seconds(text: str) -> float:
    seconds = number(text)
    if not 1 <= seconds <= 86400:
        raise argparse.ArgumentTypeError(f"from 1 s to a day expected, not {text}")
    return seconds
