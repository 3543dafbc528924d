"""Kills and hangs what an edge consists of, at random moments, while users publish and receive; and audits them.

Run with ``python -m bench.edge_chaos``; ``--help`` tells the rest. Three Redis servers with agents and balancer, two
log servers, three brokers, two coordinators and two processes of users. Every victim comes back after a while. The
second process of users dies, too: its users go on from the positions that they have stored. The audit is
``bench.edge_judge``. The last line is a summary as JSON; the status is 1 if there is a violation.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

from bench.edge_broker import make_token
from bench.edge_fleet import EdgeFleet
from bench.edge_judge import Disturbance, Judge
from bench.edge_people import PeopleOptions, live_here
from bench.workers import Worker
from dynamoth_demo.brokers.command import SETTINGS

LOGGED = [f"log.{number}" for number in range(12)]
LIVE = [f"live.{number}" for number in range(8)]
LOGGED_PER_USER, LIVE_PER_USER = 4, 3
PAIR_RATIO = 0.3
WEIGHTS = {"broker": 4, "log": 3, "server": 3, "users": 3, "coordinator": 1, "agent": 1, "balancer": 1}
AGAIN_S = 15.0
"""After the last failure everybody receives again within this time."""

Victim = tuple[str, str]


class _Chaos:
    def __init__(self, stack: ExitStack, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._random = Random(arguments.seed)
        self._fleet = EdgeFleet(stack, coordinators=2, durable=arguments.durable, settings=SETTINGS)
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dynamoth-people-")))
        if arguments.keep is not None:
            self._folder = arguments.keep
            self._folder.mkdir(parents=True, exist_ok=True)
        token = make_token()
        choices = [
            self._random.sample(LOGGED, LOGGED_PER_USER) + self._random.sample(LIVE, LIVE_PER_USER) for _ in range(60)
        ]
        rates = dict.fromkeys([*LOGGED, *LIVE], arguments.per_s)
        common: dict[str, Any] = {"brokers": self._fleet.urls, "token": token, "channels": choices, "rates": rates}
        users = arguments.users // 2
        self._options = [
            PeopleOptions(
                name="stays", record=self._folder / "stays", users=users, cluster=self._fleet.cluster.url, **common
            ),
            PeopleOptions(name="dies", record=self._folder / "dies", users=users, storage=self._folder, **common),
        ]
        self._people = [self._begin(options) for options in self._options]
        stack.callback(self._stop_people)
        #: Victims that are not at work now, with what brings them back, and when.
        self._out: list[tuple[float, float, Victim, bool]] = []
        self._disturbances: list[Disturbance] = []

    def _begin(self, options: PeopleOptions) -> Worker:
        worker = Worker(live_here, options)
        worker.receive()
        return worker

    def _stop_people(self) -> None:
        for worker in self._people:
            worker.stop()

    def _ask(self, index: int, order: str) -> Any:
        self._people[index].send(order)
        return self._people[index].receive()

    def _looks(self) -> dict[str, Any]:
        return {id_: asdict(self._fleet.look(id_)) for id_ in self._fleet.brokers}

    def run(self) -> dict[str, Any]:
        self._ask(0, "publish")
        time.sleep(5)  # the look before is one under load
        before = self._looks()
        end = time.monotonic() + self._arguments.seconds
        while time.monotonic() < end:
            self._disturb()
            while self._out:
                self._bring_back()
            time.sleep(self._random.uniform(2.0, 6.0))  # the pauses between faults are the workload
        quiet = self._rest()
        after = self._looks()
        where = [self._ask(index, "look")["where"] for index in (0, 1)]
        faults = self._fleet.faults()
        judge = Judge(log_losses_allowed=not self._arguments.durable, disturbances=self._disturbances)
        summary = judge.judge(options.record for options in self._options)
        return {
            "seed": self._arguments.seed,
            "durable": self._arguments.durable,
            "users": self._arguments.users,
            "disturbances": [f"{each.what} {each.end - each.begin:.1f} s" for each in self._disturbances],
            **summary,
            **quiet,
            "where": where,
            "before": before,
            "after": after,
            "faults": faults,
        }

    # What happens.

    def _disturb(self) -> None:
        """Kill or hang one or two victims of different kinds."""
        kinds = self._arguments.victims or list(WEIGHTS)
        first = self._random.choices(kinds, [WEIGHTS[kind] for kind in kinds])[0]
        chosen = [first]
        others = [kind for kind in kinds if kind != first]
        if others and self._random.random() < PAIR_RATIO:
            chosen.append(self._random.choices(others, [WEIGHTS[kind] for kind in others])[0])
        for index, kind in enumerate(chosen):
            if index:
                time.sleep(self._random.uniform(0.0, 2.0))  # how far two faults overlap is the workload
            self._hit(kind)

    def _hit(self, kind: str) -> None:
        victims = [("users", "")] if kind == "users" else [each for each in self._fleet.victims() if each[0] == kind]
        victim = self._random.choice(victims)
        hangs = kind != "users" and self._random.random() < self._arguments.hang_ratio
        now = time.monotonic()
        if kind == "users":
            self._people[1].kill()
        elif hangs:
            self._fleet.hang(*victim, is_hanging=True)
        else:
            self._fleet.kill(*victim)
        away_s = self._arguments.hang_s if hangs else self._random.uniform(0.5, 6.0)
        sys.stderr.write(f"{now:.2f} {'hang' if hangs else 'kill'} {' '.join(victim)} for {away_s:.1f} s\n")
        self._out.append((now + away_s, now, victim, hangs))

    def _bring_back(self) -> None:
        self._out.sort()
        due, begun, victim, hangs = self._out.pop(0)
        time.sleep(max(0.0, due - time.monotonic()))  # how long a victim is away is the workload
        if victim[0] == "users":
            self._people[1] = self._begin(self._options[1])
        elif hangs:
            self._fleet.hang(*victim, is_hanging=False)
        else:
            self._fleet.restart(*victim)
        what = f"{'hang' if hangs else 'kill'} {' '.join(victim)}".strip()
        self._disturbances.append(Disturbance(what, begun, time.monotonic()))

    def _rest(self) -> dict[str, Any]:
        """Let everything settle; publish once more on every channel, and wait for that."""
        time.sleep(AGAIN_S)  # what has not resumed within this time is a fault
        self._ask(0, "hush")
        time.sleep(1)  # what was published has this time to arrive: later, it counts as lost
        begin = time.monotonic()
        self._ask(0, "probe")
        probed_s = time.monotonic() - begin
        time.sleep(3)  # so has the last publication
        return {"probe_s": round(probed_s, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--users", type=int, default=120)
    parser.add_argument("--per-s", type=float, default=2.0, help="publications per second and channel")
    parser.add_argument("--durable", action="store_true", help="log servers lose nothing when they are killed")
    parser.add_argument("--victims", nargs="+", choices=list(WEIGHTS), help="only these")
    parser.add_argument("--hang-s", type=float, default=5.0, help="how long a victim of SIGSTOP hangs")
    parser.add_argument("--hang-ratio", type=float, default=0.25, help="this share hangs, the others are killed")
    parser.add_argument("--keep", type=Path, help="write what the users have seen to this folder")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        result = _Chaos(stack, arguments).run()
    sys.stdout.write(json.dumps(result) + "\n")
    sys.exit(1 if result["violations"] or result["still_interrupted"] else 0)


if __name__ == "__main__":
    main()
