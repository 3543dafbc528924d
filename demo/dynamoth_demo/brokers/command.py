"""``dynamoth demo-brokers``: end users on edge brokers that are drained and killed, while an audit looks on.

Three Redis servers with agents and balancer, two log servers, three brokers, a coordinator, and some hundred users in
processes of their own. Most users begin at one broker, which the coordinator relieves. Another one is drained and comes
back, and one is killed. A page for a browser is one more user: it shows its own migrations.
"""

from __future__ import annotations

import argparse
import base64
import functools
import json
import os
import queue
import sys
import tempfile
import threading
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jwt

import dynamoth_user
from dynamoth.errors import DynamothError
from dynamoth_cli.local.child import Child, interrupted_by_signals
from dynamoth_cli.local.cluster import LocalCluster
from dynamoth_cli.local.embedded import EmbeddedRedis, keep_port
from dynamoth_cli.numbers import count_up_to
from dynamoth_daemon.exit_codes import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED
from dynamoth_demo.brokers.users import UsersOptions
from dynamoth_demo.latency import LatencyCounts

USERS = 500
USERS_MAX = 20_000
SECONDS = 45.0
SERVERS = 3
LOGS = 2
BROKERS = ("b1", "b2", "b3")
CROWD_RATIO = 0.7
"""This share of the users begins at the first broker."""

SETTINGS = {
    "broker.capacity_bytes_per_s": 1_000_000,
    "broker.report_s": 0.5,
    "coordinator.report_s": 0.5,
    "coordinator.decide_s": 1.0,
    "coordinator.looks": 2,
    "coordinator.wait_s": 3.0,
    "coordinator.rest_s": 5.0,
    "coordinator.slow_half_life_s": 2.0,
    "coordinator.fast_half_life_s": 1.0,
    "coordinator.ratio_mean_min": 0.01,
    "coordinator.shuffle_ratio_mean_min": 10.0,
}
"""Short times, as a demo is short, and thresholds that a few hundred users reach."""

READY_TIMEOUT_S = 60.0
JUDGE_TIMEOUT_S = 60.0
SHOW_INTERVAL_S = 1.0
LOGGED = [f"log.{number}" for number in range(20)]
LIVE = [f"live.{number}" for number in range(10)]
PAGE_CHANNEL = LOGGED[0]


class DemoFailed(DynamothError):
    """Raised when a process of the demo does not answer in time."""

    code = "demo-failed"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "--users", type=count_up_to(USERS_MAX), default=USERS, metavar="N", help="number of users (default %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, metavar="S", help="how long it goes on (default %(default)g)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to this file")
    parser.add_argument(
        "--seed", type=int, default=1, metavar="N", help="seed of what users subscribe to (default %(default)s)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the demo. Returns 0 when the audit is clean and everything has happened."""
    with interrupted_by_signals():
        try:
            with ExitStack() as stack:
                return _Demo(arguments, stack).run()
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED


@dataclass
class _Workers:
    """One process of users."""

    child: Child
    events: queue.Queue[dict[str, Any]] = field(default_factory=queue.Queue[dict[str, Any]])
    stats: dict[str, Any] = field(default_factory=dict[str, Any])

    def read(self) -> None:
        for line in self.child.stdout:
            event = json.loads(line)
            if event.get("event") == "stats":
                self.stats = event
            self.events.put(event)

    def order(self, name: str, **fields: Any) -> None:
        self.child.stdin.write(json.dumps({"order": name, **fields}).encode() + b"\n")
        self.child.stdin.flush()

    def wait(self, name: str, timeout_s: float, latencies: LatencyCounts) -> dict[str, Any]:
        """Return the next event of a name; count the latencies of others."""
        end = time.monotonic() + timeout_s
        while (left := end - time.monotonic()) > 0:
            try:
                event = self.events.get(timeout=min(left, 0.5))
            except queue.Empty:
                if self.child.ended_by_itself:
                    raise self.child.failure() from None
                continue
            if event["event"] == "stats":
                latencies.merge({int(of): count for of, count in event["latencies"].items()})
            if event["event"] == name:
                return event
        raise DemoFailed(f"{self.child.name} has not said {name!r} within {timeout_s:g} s")


class _Demo:
    """The processes of one demo."""

    def __init__(self, arguments: argparse.Namespace, stack: ExitStack) -> None:
        self._arguments = arguments
        self._stack = stack
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dynamoth-demo-")))
        self._cluster = stack.enter_context(LocalCluster(SERVERS, settings=SETTINGS))
        self._logs = [stack.enter_context(EmbeddedRedis()) for _ in range(LOGS)]
        self._ports = [keep_port(stack) for _ in BROKERS]
        self._secret = os.urandom(32)
        self._brokers = {id_: self._broker(id_) for id_ in BROKERS}
        self._coordinator = self._cluster.beside("coordinator", "coordinator")
        stack.callback(self._coordinator.stop)
        self._workers: list[_Workers] = []
        self._latencies = LatencyCounts()

    def _url(self, id_: str) -> str:
        return f"ws://127.0.0.1:{self._ports[BROKERS.index(id_)]}/connect"

    def _broker(self, id_: str) -> Child:
        keys = self._folder / "keys.json"
        secret = base64.urlsafe_b64encode(self._secret).rstrip(b"=").decode()
        keys.write_text(json.dumps({"keys": [{"kty": "oct", "kid": "demo", "alg": "HS256", "k": secret}]}))
        logs = " ".join(f"l{index}=redis://127.0.0.1:{log.port}" for index, log in enumerate(self._logs, 1))
        child = self._cluster.beside(
            f"broker {id_}",
            *("broker", "--id", id_),
            *("--port", str(self._ports[BROKERS.index(id_)]), "--logs", logs, "--history", "log.*"),
            *("--alternates", " ".join(self._url(other) for other in BROKERS if other != id_)),
            *("--token-keys-file", str(keys), "--anonymous", "true", "--origins", self._origin),
        )
        self._stack.callback(child.kill)
        return child

    @functools.cached_property
    def _page(self) -> ThreadingHTTPServer | None:
        """A server for the page; None where the page is not installed."""
        folder = Path(dynamoth_user.__file__).parents[1] / "js"
        if not (folder / "example.html").exists():
            return None
        server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_QuietHandler, directory=str(folder)))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self._stack.callback(server.shutdown)
        return server

    @property
    def _origin(self) -> str:
        return "" if self._page is None else f"http://127.0.0.1:{self._page.server_port}"

    def _start_broker(self, id_: str) -> None:
        child = self._brokers[id_]
        child.start()
        try:
            child.wait_for_line('"the broker has started"', READY_TIMEOUT_S)
        except TimeoutError as error:
            raise DemoFailed(str(error)) from error

    def _start_users(self) -> None:
        claims = {"sub": "demo", "exp": time.time() + 3600, "channels": ["*"], "publish": ["*"]}
        token = jwt.encode(claims, self._secret, "HS256", headers={"kid": "demo"})
        users = self._arguments.users
        crowd = round(users * CROWD_RATIO)
        parts = [(BROKERS, crowd // 2), (BROKERS, crowd - crowd // 2)]
        parts += [
            (BROKERS[1:] + BROKERS[:1], (users - crowd) // 2),
            (BROKERS[2:] + BROKERS[:2], users - crowd - (users - crowd) // 2),
        ]
        for index, (order, count) in enumerate(parts):
            child = Child(
                f"users {index}",
                [sys.executable, "-P", "-m", "dynamoth_demo.brokers.users"],
                environment=dict(os.environ),
                pipes=True,
            )
            self._stack.callback(child.kill)
            child.start()
            options = UsersOptions(
                name=f"w{index}u",
                url=self._cluster.url,
                brokers=[self._url(id_) for id_ in order],
                token=token,
                users=max(4, count),
                logged=LOGGED,
                live=LIVE,
                logged_per_user=2,
                live_per_user=1,
                logged_per_s=8.0,
                live_per_s=5.0,
                seed=self._arguments.seed + index,
            )
            child.stdin.write(json.dumps(asdict(options)).encode() + b"\n")
            child.stdin.flush()
            workers = _Workers(child)
            threading.Thread(target=workers.read, daemon=True).start()
            self._workers.append(workers)

    def run(self) -> int:
        """Play it, and judge."""
        for id_ in BROKERS:
            self._start_broker(id_)
        self._coordinator.start()
        if self._page is not None:
            brokers = quote(",".join(self._url(id_) for id_ in BROKERS), safe="")
            url = f"{self._origin}/example.html?brokers={brokers}&channel={PAGE_CHANNEL}"
            _say(f"to be one of the users, open in a browser:\n  {url}")
        self._start_users()
        for workers in self._workers:
            workers.wait("ready", READY_TIMEOUT_S, self._latencies)
        _say(f"{self._arguments.users} users are connected, most of them at b1")
        for workers in self._workers:
            workers.order("publish")
        with self._showing():
            self._play()
        for workers in self._workers:
            workers.order("stop")
        stopped = [workers.wait("stopped", READY_TIMEOUT_S, self._latencies) for workers in self._workers]
        published = [each for event in stopped for each in event["published"]]
        failed = [each for event in stopped for each in event["failed"]]
        for workers in self._workers:
            workers.order("judge", published=published, failed=failed)
        results = [workers.wait("result", JUDGE_TIMEOUT_S, self._latencies) for workers in self._workers]
        return self._conclude(results, len(failed))

    def _play(self) -> None:
        """Let the coordinator work; drain a broker, and bring it back; kill another one, and bring it back."""
        part_s = self._arguments.seconds / 5
        time.sleep(2 * part_s)
        _say("b2 is drained: it moves its users, and ends")
        self._brokers["b2"].stop(timeout_s=60.0)
        time.sleep(part_s)
        _say("b2 comes back; b3 is killed")
        self._start_broker("b2")
        self._brokers["b3"].kill()
        time.sleep(part_s)
        self._start_broker("b3")
        time.sleep(part_s)

    @contextmanager
    def _showing(self) -> Generator[None]:
        """Show where the users are, once a second."""
        ended = threading.Event()

        def show() -> None:
            begin = time.monotonic()
            while not ended.wait(SHOW_INTERVAL_S):
                _say(f"{time.monotonic() - begin:5.0f} s  {self._state()}")

        thread = threading.Thread(target=show, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _sum(self, name: str) -> int:
        return sum(workers.stats.get(name, 0) for workers in self._workers)

    def _state(self) -> str:
        where: dict[str, int] = {}
        for workers in self._workers:
            for broker, count in workers.stats.get("users", {}).items():
                where[broker] = where.get(broker, 0) + count
        places = ", ".join(f"{broker or 'nowhere'} {where[broker]}" for broker in sorted(where))
        done = f"delivered {self._sum('delivered'):,}; moved {self._sum('moved')}; gaps {self._sum('gaps')}"
        return f"users: {places}; {done}"

    def _conclude(self, results: list[dict[str, Any]], failed: int) -> int:
        totals: dict[str, int] = {}
        for result in results:
            for name, value in result["totals"].items():
                totals[name] = totals.get(name, 0) + value
        violations = sum(result["violations"] for result in results)
        published = totals["published"] // len(results)
        moved = self._sum("moved")
        summary = {
            "users": self._arguments.users,
            "published": published,
            "delivered": totals["delivered"],
            "lost": totals["lost"],
            "duplicated": totals["duplicated"],
            "reordered": totals["reordered"],
            "covered_losses": totals["covered_losses"],
            "gaps": totals["gaps"],
            "violations": violations,
            "publishes_failed": failed,
            "migrations": moved,
            "latency_ms_p50": self._quantile_ms(0.5),
            "latency_ms_p99": self._quantile_ms(0.99),
        }
        for name, value in summary.items():
            _say(
                f"  {name.replace('_', ' '):18} {value:,}"
                if isinstance(value, int)
                else f"  {name.replace('_', ' '):18} {value}"
            )
        for story in (story for result in results for story in result["stories"]):
            _say(story)
        if self._arguments.json is not None:
            self._arguments.json.write_text(json.dumps(summary))
        is_clean = not violations and moved > 0 and totals["delivered"] > 0
        _say("the audit is clean" if is_clean else "the audit is NOT clean")
        return EXIT_DONE if is_clean else EXIT_FAILED

    def _quantile_ms(self, ratio: float) -> float:
        quantile = self._latencies.quantile_ms(ratio)
        return 0.0 if quantile is None else round(quantile, 1)


class _QuietHandler(SimpleHTTPRequestHandler):
    """Serves the page, and writes nothing."""

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing."""


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
