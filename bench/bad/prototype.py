"""Runs the prototype's workload on real processes: Redis, brokers, a coordinator, users, and a matcher (BAD, 6.1).

Redis servers, log servers and brokers serve one run after the other; each run has its own coordinator, users and
matcher. Time is compressed: periods, the 30 minutes, and the coordinator's intervals are divided by a factor, so rates
are multiplied by it, and loads have the same shapes.
"""

from __future__ import annotations

import json
import math
import re
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import jwt

from bench.bad.emergencies import BROKER_PLACES, END_S, USERS
from bench.bad.matcher import MatcherOptions, match_here
from bench.bad.people import PeopleOptions, live_here
from bench.bad.runs import Run
from bench.bad.town import degrees
from bench.edge_broker import SECRET, write_keys
from bench.edge_processes import wait_for, wait_until_started
from bench.workers import Worker
from dynamoth_broker.coordinator.model import LoadModel
from dynamoth_broker.coordinator.placement import Newcomer, Placement, RandomPlacement, RoundRobinPlacement
from dynamoth_cli.local.child import Child
from dynamoth_cli.local.cluster import LocalCluster
from dynamoth_cli.local.embedded import EmbeddedRedis, reserve_port

SERVERS, LOGS = 2, 2
BROKERS = tuple(f"b{number + 1}" for number in range(len(BROKER_PLACES)))

LOAD_RATIO = 0.5
MEAN_LOAD_BYTES_PER_S = 85_000.0
"""The mean load of a broker when all have subscribed, in the paper's time. Capacities make ``LOAD_RATIO`` of it."""

CAPACITY_BYTES_PER_S = MEAN_LOAD_BYTES_PER_S / LOAD_RATIO

ALPHA, ALPHA_TARGET, BETA = 0.05, 0.03, 0.3
"""Relief begins above cov 0.05 and a mean load ratio of 0.3, and goes on to cov 0.03. The paper does not give its own:
they have to be below the cov that random placement gives, as the paper moves users there.
"""

GAMMA = 0.4
"""A shuffle begins above this cov. The paper does not give its own: it has to be below that of nearest-broker
placement, 0.52 to 0.71 here, and well above that of random and round-robin placement, 0.03 to 0.14.
"""

NEVER = 1e9
REPORT_S, DECIDE_S, WAIT_S, REST_S, HALF_LIFE_S = 10.0, 10.0, 20.0, 120.0, 30.0
"""Of the coordinator, in the paper's time."""

SAMPLE_S = 0.5
"""Real time between two looks at the brokers."""

LEAD_S = 2.0
"""Processes have this long to get ready before the paper's time begins."""

LATE_S = 5.0
"""A report or an answer that is late by up to this counts, in real time."""

SCHEMES: Mapping[str, tuple[str, ...]] = {
    "none": ("--dry-run", "true"),
    "LDM": ("--scheme", "load", "--shuffle-cov-min", str(NEVER)),
    "SDM": ("--scheme", "similarity", "--shuffle-cov-min", str(NEVER)),
    # Nothing but cov and mean decides about a shuffle, as in the paper: moves are free, and any gain will do.
    "LDM+GSH": ("--scheme", "load", "--shuffle-cov-min", str(GAMMA), "--move-cost-ratio", "0", "--gain-ratio-min", "0"),
    "SDM+GSH": (
        *("--scheme", "similarity", "--shuffle-cov-min", str(GAMMA)),
        *("--move-cost-ratio", "0", "--gain-ratio-min", "0"),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Task:
    """One run."""

    placement: str
    scheme: str
    seed: int


class Prototype:
    """The processes that serve all runs. They end when ``stack`` is closed."""

    def __init__(self, stack: ExitStack, compression: float) -> None:
        self._compression = compression
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dynamoth-bad-")))
        self._decisions: dict[int, dict[str, Any]] = {}
        self._lock = threading.Lock()
        self._cluster = stack.enter_context(LocalCluster(SERVERS, on_line=self._on_line))
        self._logs = {f"l{number + 1}": stack.enter_context(EmbeddedRedis()) for number in range(LOGS)}
        self._ports = {id_: (_free_port(), _free_port()) for id_ in BROKERS}
        self._urls = {id_: f"ws://127.0.0.1:{port}/connect" for id_, (port, _) in self._ports.items()}
        keys = write_keys(self._folder)
        children = [self._broker(id_, keys) for id_ in BROKERS]
        for child in children:
            stack.callback(child.kill)
            child.start()
        for child in children:
            wait_until_started(child)

    def _log_urls(self) -> dict[str, str]:
        return {id_: f"redis://127.0.0.1:{server.port}" for id_, server in self._logs.items()}

    def _broker(self, id_: str, keys: Path) -> Child:
        port, http_port = self._ports[id_]
        latitude, longitude = degrees(BROKER_PLACES[BROKERS.index(id_)])
        return self._cluster.beside(
            f"broker {id_}",
            *("broker", "--id", id_, "--port", str(port), "--http-port", str(http_port)),
            *("--logs", " ".join(f"{log}={url}" for log, url in self._log_urls().items())),
            *("--token-keys-file", str(keys), "--location", f"{latitude:.6f},{longitude:.6f}"),
            *("--capacity-bytes-per-s", str(int(CAPACITY_BYTES_PER_S * self._compression))),
            # Nobody is refused: without balancing, a broker may be loaded to more than all that it has.
            *("--ratio-accept", "1000", "--linger-s", "0.5", "--report-s", f"{self._real(REPORT_S):g}"),
        )

    def _real(self, seconds: float) -> float:
        """Return real time."""
        return max(0.1, seconds / self._compression)

    def _coordinator(self, task: Task, http_port: int) -> Child:
        real = self._real
        return self._cluster.beside(
            "coordinator",
            *("coordinator", "--http-port", str(http_port), *SCHEMES[task.scheme]),
            *("--cov-max", str(ALPHA), "--cov-target", str(ALPHA_TARGET), "--ratio-mean-min", str(BETA)),
            *("--ratio-high", str(NEVER), "--ratio-accept", str(NEVER), "--looks", "2"),
            *("--report-s", f"{real(REPORT_S):g}", "--decide-s", f"{real(DECIDE_S):g}"),
            *("--wait-s", f"{real(WAIT_S):g}", "--rest-s", f"{real(REST_S):g}"),
            *("--slow-half-life-s", f"{real(HALF_LIFE_S):g}", "--fast-half-life-s", f"{real(HALF_LIFE_S):g}"),
            # Delays of a busy machine do not shrink with the time: a report that is late by less than this is not old.
            *("--suspect-reports", str(max(3, math.ceil(LATE_S / real(REPORT_S)))), "--ask-timeout-s", f"{LATE_S:g}"),
            # The paper has no weight of connections.
            *("--connection-bytes-per-s", "0", "--appear-s", "0"),
        )

    # One run.

    def run(self, task: Task) -> Run:
        """Run one task to its end."""
        with ExitStack() as stack:
            with self._lock:
                self._decisions.clear()
            http_port = _free_port()
            coordinator = self._coordinator(task, http_port)
            stack.callback(coordinator.kill)
            coordinator.start()
            wait_for(lambda: _metric(http_port, "dynamoth_coordinator_brokers") == len(BROKERS))
            begin = time.monotonic() + LEAD_S
            name = f"{task.placement}-{task.scheme.replace('+', '')}-{task.seed}-{int(time.time())}"
            people = PeopleOptions(
                seed=task.seed,
                run=name,
                token=_token(),
                begin=begin,
                compression=self._compression,
                urls=self._orders(task),
                place_url=f"http://127.0.0.1:{http_port}",
            )
            matcher = MatcherOptions(
                seed=task.seed,
                cluster=self._cluster.url,
                logs=self._log_urls(),
                begin=begin,
                compression=self._compression,
            )
            workers = [Worker(live_here, people), Worker(match_here, matcher)]
            for worker in workers:
                stack.callback(worker.stop)
                worker.receive()
            late_s = max(0.0, time.monotonic() - begin)
            return self._finish(task, workers, self._sample(begin, http_port), late_s)

    def _orders(self, task: Task) -> list[list[str]] | None:
        """Return the URLs that each user tries; None for nearest, which the coordinator places."""
        if task.placement == "NR":
            return None
        placements: dict[str, Placement] = {
            "RND": RandomPlacement(Random(f"placement {task.seed}")),
            "RR": RoundRobinPlacement(),
        }
        model = LoadModel()
        for id_ in BROKERS:
            model.add_broker(id_, 1.0)
        placement, orders = placements[task.placement], list[list[str]]()
        for number in range(USERS):
            chosen = placement.place(Newcomer(id=str(number)), model, 0.0)
            assert chosen is not None
            orders.append([self._urls[chosen], *(url for id_, url in self._urls.items() if id_ != chosen)])
        return orders

    def _sample(self, begin: float, http_port: int) -> dict[str, list[Any]]:
        samples: dict[str, list[Any]] = {
            name: [] for name in ("times", "loads", "users", "moves", "egress", "shuffled")
        }
        due = begin
        while due < begin + END_S / self._compression:
            time.sleep(max(0.0, due - time.monotonic()))  # samples are of certain times
            texts = [_metrics(self._ports[id_][1]) for id_ in BROKERS]
            loads = [_value(text, "dynamoth_broker_load_bytes_per_second") for text in texts]
            inbound = [_value(text, "dynamoth_broker_inbound_bytes_per_second") for text in texts]
            samples["times"].append((time.monotonic() - begin) * self._compression)
            samples["loads"].append([load / self._compression for load in loads])
            samples["egress"].append(sum(inbound) / self._compression)
            samples["users"].append([int(_value(text, "dynamoth_broker_sessions")) for text in texts])
            samples["moves"].append(int(_metric(http_port, "dynamoth_coordinator_moves_left_total")))
            samples["shuffled"].append(sum(each["moved"] for each in self._shuffles()))
            samples["coordinator"] = [_metrics(http_port)]
            due = max(due + SAMPLE_S, time.monotonic())
        return samples

    def _finish(self, task: Task, workers: Sequence[Worker], samples: dict[str, list[Any]], late_s: float) -> Run:
        people, matcher = workers
        published, matcher_late_s = matcher.receive()
        time.sleep(1.0)  # what has not arrived by then is late, and shows as lost
        people.send("close")
        look = people.receive()
        people.receive()
        for fault in look["faults"][:5]:
            sys.stderr.write(f"  {task}: {fault}\n")
        shuffled = samples.pop("shuffled")
        [coordinator] = samples.pop("coordinator")
        shuffles = self._shuffles()
        last = max((index for index in range(1, len(shuffled)) if shuffled[index] > shuffled[index - 1]), default=None)
        counts = ("delivered", "gaps", "lost", "repeated", "moved", "interrupted", "faults", "subscriptions")
        more = {name: float(look["counts"].get(name, 0)) for name in counts}
        more |= look["latencies"]
        for name in ("terms", "decisions", "moves_asked", "moves_gone", "moves_refused", "moves_deadline"):
            more[f"coordinator_{name}"] = _value(coordinator, f"dynamoth_coordinator_{name}_total")
        more |= {"published": float(published), "late_s": max(late_s, matcher_late_s)}
        return Run(
            world="prototype",
            workload="emergencies",
            placement=task.placement,
            scheme=task.scheme,
            seed=task.seed,
            compression=self._compression,
            **samples,
            shuffles=len(shuffles),
            shuffle_moves=sum(each["moved"] for each in shuffles),
            shuffle_end=-1.0 if last is None else samples["times"][last],
            more=more,
        )

    def _on_line(self, name: str, line: str) -> None:
        """Keep the decisions of the coordinator: the latest record of each."""
        if name != "coordinator" or '"decision"' not in line:
            return
        data = json.loads(line)
        if "number" in data and not data.get("dry_run"):
            with self._lock:
                self._decisions[data["number"]] = data

    def _shuffles(self) -> list[dict[str, Any]]:
        with self._lock:
            return [each for each in self._decisions.values() if each["kind"] == "shuffle" and each["moves"]]


def _token() -> str:
    """Return a token that allows every query for an hour."""
    claims = {"sub": "bench", "exp": time.time() + 3600, "queries": ["*"]}
    return jwt.encode(claims, SECRET, "HS256", headers={"kid": "k"})


def _free_port() -> int:
    with reserve_port() as reserved:
        port: int = reserved.getsockname()[1]
        return port


def _metrics(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text: str = answer.read().decode()
        return text


def _value(text: str, name: str) -> float:
    found = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def _metric(port: int, name: str) -> float:
    """Return a metric; not a number while nothing listens there yet."""
    try:
        return _value(_metrics(port), name)
    except OSError:
        return math.nan
