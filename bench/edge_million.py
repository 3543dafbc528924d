"""A million deliveries while users move between brokers, and channels between Redis servers: is anything lost?

Run with ``python -m bench.edge_million``; ``--help`` tells the rest. Brokers are drained and taken back, single users
are moved, and channels, logged and live, are moved between servers, replicated over several, and put back. No process
dies, so there is no gap either. ``bench.edge_judge`` audits. For the users of two steady channels the time between two
deliveries is compared: at rest, and while the user moves. The last line is a summary as JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

from bench.edge_broker import make_token
from bench.edge_fleet import EdgeFleet
from bench.edge_judge import Judge
from bench.edge_people import PeopleOptions, live_here
from bench.workers import Worker
from dynamoth.edge.interests import channel_interest
from dynamoth.errors import DynamothError
from dynamoth_cli.local.child import dynamoth_command
from dynamoth_demo.brokers.command import SETTINGS

LOGGED = [f"log.{number}" for number in range(10)]
LIVE = [f"live.{number}" for number in range(10)]
STEADY = ["log.steady", "live.steady"]
STEADY_PER_S = 20.0
STEADY_RATIO = 0.25
"""This share of the users is subscribed to the steady channels."""

WRITERS = "b4"
"""Those who publish are at this broker, and are pinned: what others see of moves is not the publishers' part."""

REST_S = 20.0
AROUND_S = 1.0
"""A delivery this close to a move belongs to it."""

PLAN_WAIT_S = 0.5


class _Million:
    def __init__(self, stack: ExitStack, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._random = Random(arguments.seed)
        settings = {**SETTINGS, "balancer.replicas_max": 1}
        self._fleet = EdgeFleet(stack, ("b1", "b2", "b3", WRITERS), coordinators=1, settings=settings)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dynamoth-people-")))
        if arguments.keep is not None:
            folder = arguments.keep
            folder.mkdir(parents=True, exist_ok=True)
        urls, token = self._fleet.urls, make_token()
        rates: dict[str, float] = dict.fromkeys([*LOGGED, *LIVE], float(arguments.per_s))
        rates |= dict.fromkeys(STEADY, STEADY_PER_S)
        users = arguments.users // 2
        choices = [
            self._random.sample(LOGGED, 3) + self._random.sample(LIVE, 3) + (STEADY if number % 4 == 0 else [])
            for number in range(users)
        ]
        self._options = [
            PeopleOptions(
                name="writer", record=folder / "writer", brokers=urls[3:] + urls[:3], token=token, users=1,
                channels=[[LOGGED[0]]], cluster=self._fleet.cluster.url, rates=rates, publishers=1,
            )
        ]  # fmt: skip
        for name in ("one", "two"):
            self._options.append(
                PeopleOptions(
                    name=name, record=folder / name, brokers=urls[:3], token=token, users=users, channels=choices,
                    rates={},
                )
            )  # fmt: skip
        self._people: list[Worker] = []
        stack.callback(self._stop_people)
        for options in self._options:
            self._people.append(Worker(live_here, options))
            self._people[-1].receive()
        self._has_ended = threading.Event()
        self.done: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()

    def _stop_people(self) -> None:
        for worker in self._people:
            worker.stop()

    def _ask(self, index: int, order: str) -> Any:
        self._people[index].send(order)
        return self._people[index].receive()

    def _looks(self) -> list[dict[str, Any]]:
        return [self._ask(index, "look") for index in (1, 2)]

    def run(self) -> dict[str, Any]:
        for session in self._ask(0, "look")["sessions"]:
            self._operate("pin", f"{session}@bench")
        self._ask(0, "publish")
        time.sleep(3)  # the rest is measured under load
        rest_begin = time.monotonic()
        time.sleep(REST_S)
        begin = time.monotonic()
        channels = threading.Thread(target=self._change_channels, daemon=True)
        channels.start()
        while not self._is_enough(begin):
            self._move_users()
        self._has_ended.set()
        channels.join()
        end = time.monotonic()
        self._ask(0, "hush")
        time.sleep(3)
        self._ask(0, "probe")
        time.sleep(5)  # what has not arrived within these times counts as lost
        summary = Judge().judge(options.record for options in self._options)
        return {
            **summary,
            "seconds": round(end - begin, 1),
            "changes": dict(self.done),
            "refused": dict(self.refused),
            **_steady_gaps((options.record for options in self._options[1:]), rest_begin, begin, end),
            "faults": self._fleet.faults(),
        }

    def _is_enough(self, begin: float) -> bool:
        arguments = self._arguments
        if time.monotonic() - begin > arguments.seconds_max:
            return True
        moved = sum(look["moved"] for look in self._looks())
        return bool(moved >= arguments.migrations and self._delivered() >= arguments.deliveries)

    def _delivered(self) -> int:
        """Estimate, from the size of the files, how much was delivered."""
        return sum(options.record.stat().st_size for options in self._options[1:]) // 75

    # What happens.

    def _move_users(self) -> None:
        """Drain a broker, and take it back; then move some single users."""
        broker = self._random.choice(["b1", "b2", "b3"])
        self._operate("drain", broker, "--rate", str(self._arguments.rate))
        deadline = time.monotonic() + 60
        while any(look["where"].get(broker, 0) for look in self._looks()):
            if time.monotonic() > deadline:
                self.refused["drain takes more than 60 s"] += 1
                break
            time.sleep(0.5)
        self._operate("undrain", broker)
        for _ in range(3):
            sessions = self._random.choice(self._looks())["sessions"]
            session = self._random.choice(sorted(sessions))
            to = self._random.choice([each for each in ("b1", "b2", "b3") if each != sessions[session]])
            self._operate("move", f"{session}@bench", "--to", to)

    def _operate(self, *words: str) -> None:
        command = dynamoth_command("broker", *words, "--url", self._fleet.cluster.url_of("operator"))
        ended = subprocess.run(command, check=False, capture_output=True, timeout=60, text=True)
        if ended.returncode:
            self.refused[f"{words[0]}: {ended.stderr.strip()[-200:]}"] += 1
        else:
            self.done[words[0]] += 1

    def _change_channels(self) -> None:
        """Move, replicate and put back channels, one after the other."""
        servers = self._fleet.cluster.server_ids
        replicated: dict[bytes, str] = {}
        while not self._has_ended.is_set():
            name = self._random.choice([*LOGGED, *LIVE, *STEADY * 4])
            channel = channel_interest(name).log_channel if name in LOGGED or name == STEADY[0] else name.encode()
            arguments: dict[str, Any] = {"channel": channel}
            if channel in replicated and self._random.random() < 0.6:
                command = "unreplicate"
                arguments["to"] = self._random.choice(servers)
                del replicated[channel]
            elif channel in replicated or self._random.random() < 0.4:
                command = "replicate"
                mode = replicated.get(channel) or self._random.choice(["all-subscribers", "all-publishers"])
                arguments |= {"mode": mode, "servers": self._random.sample(servers, self._random.choice([2, 3]))}
                replicated[channel] = mode
            else:
                command = "move"
                arguments["to"] = self._random.choice(servers)
            try:
                self._fleet.cluster.ask_balancer(command, arguments)
                self.done[f"channel: {command}"] += 1
            except DynamothError as error:
                self.refused[f"channel: {command}: {error}"[:200]] += 1
            self._has_ended.wait(PLAN_WAIT_S)


def _steady_gaps(files: Iterable[Path], rest_begin: float, begin: float, end: float) -> dict[str, Any]:
    """Return quantiles of the time between two deliveries of a user on a steady channel, in ms."""
    gaps: dict[str, list[float]] = {"rest": [], "moving": [], "others": []}
    longest_per_move: list[float] = []
    for path in files:
        times: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        moves: defaultdict[str, list[float]] = defaultdict(list)
        with path.open() as lines:
            for line in lines:
                fields = line.rstrip("\n").split("\t")
                if fields[0] == "D" and fields[2] in STEADY:
                    times[fields[1], fields[2]].append(float(fields[7]))
                elif fields[0] == "V" and fields[3] == "1":
                    moves[fields[1]].append(float(fields[4]))
        for (user, _), each in times.items():
            per_move: defaultdict[float, float] = defaultdict(float)
            for former, latter in pairwise(each):
                gap = (latter - former) * 1000
                if rest_begin <= former and latter < begin:
                    gaps["rest"].append(gap)
                elif begin <= former and latter < end:
                    near = [at for at in moves[user] if former - AROUND_S < at < latter + AROUND_S]
                    gaps["moving" if near else "others"].append(gap)
                    for at in near:
                        per_move[at] = max(per_move[at], gap)
            longest_per_move += per_move.values()
    found: dict[str, Any] = {}
    for name, values in [*gaps.items(), ("longest_per_move", longest_per_move)]:
        values.sort()
        quantiles = {f"p{round(ratio * 1000) / 10:g}": ratio for ratio in (0.5, 0.99, 0.999)}
        found[f"gap_ms_{name}"] = {
            "count": len(values),
            **{
                quantile: round(values[math.ceil(ratio * len(values)) - 1], 1) if values else None
                for quantile, ratio in quantiles.items()
            },
            "max": round(values[-1], 1) if values else None,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--deliveries", type=int, default=1_000_000)
    parser.add_argument("--migrations", type=int, default=1_000)
    parser.add_argument("--seconds-max", type=float, default=600.0)
    parser.add_argument("--users", type=int, default=200)
    parser.add_argument("--per-s", type=float, default=1.2, help="publications per second and channel")
    parser.add_argument("--rate", type=float, default=25.0, help="users that a drained broker asks to move per second")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="write what the users have seen to this folder")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        result = _Million(stack, arguments).run()
    sys.stdout.write(json.dumps(result) + "\n")
    sys.exit(1 if result["violations"] or result.get("gaps") else 0)


if __name__ == "__main__":
    main()
