"""What a broker bears: users who do not read, very many interests, subscriptions that come and go, logins.

Run with ``python -m bench.edge_limits WHAT``; ``--help`` tells the rest. ``stalled``: the latency of the others with 1%
of the users reading and not reading, in turns. ``interests``: memory of very many different interests. ``churn``: users
subscribe and unsubscribe at a rate; what stays. ``logins``: with TLS and without. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.edge_broker import make_token, resident_bytes
from bench.edge_crowd import Crowd, CrowdOptions
from bench.edge_fleet import EdgeFleet
from bench.edge_processes import allow_files, certificate, wait_for
from dynamoth_client import Redis
from dynamoth_demo.latency import LatencyCounts
from dynamoth_user import Client

MIB = 1 << 20
REST_S = 10.0
HEAVY_PER_S, HEAVY_BYTES = 100.0, 8000
"""What those who do not read get besides: their connections are full soon."""


def _crowd(stack: ExitStack, fleet: EdgeFleet, **fields: Any) -> Crowd:
    port = int(fleet.url("b1").rpartition(":")[2].partition("/")[0])
    crowd = Crowd(CrowdOptions(port=port, token=make_token(), **fields))
    stack.callback(crowd.stop)
    return crowd


def _quantile_ms(counts: dict[int, int], ratio: float) -> float:
    latencies = LatencyCounts()
    latencies.merge(counts)
    return round(latencies.quantile_ms(ratio) or 0.0, 1)


class _Publisher:
    """Publishes on channels, each at a rate and with a size, from a thread, until it is stopped."""

    def __init__(self, url: str, rates: dict[str, tuple[float, int]]) -> None:
        self._client = Redis.from_url(url)
        self._has_ended = threading.Event()
        self.published = 0
        self._threads = [
            threading.Thread(target=self._run, args=(channel, *rate), daemon=True) for channel, rate in rates.items()
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, channel: str, per_s: float, size: int) -> None:
        due = time.monotonic()
        while not self._has_ended.wait(max(0.0, due - time.monotonic())):
            self._client.publish(channel, b"sent=%d %s" % (time.monotonic_ns(), b"x" * size))
            self.published += 1
            due += 1 / per_s

    def stop(self) -> None:
        self._has_ended.set()
        for thread in self._threads:
            thread.join()
        self._client.close()


class _LoggedPublisher:
    """Publishes on a logged channel from a thread, until it is stopped."""

    def __init__(self, url: str, channel: str) -> None:
        self.published = 0
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run(url, channel)), daemon=True)
        self._thread.start()

    async def _run(self, url: str, channel: str) -> None:
        async with Client([url], token=make_token(), proxy=None) as client:
            while not self._has_ended.is_set():
                await client.publish(channel, f"sent={time.monotonic_ns()} {'x' * HEAVY_BYTES}")
                self.published += 1
                await asyncio.sleep(1 / HEAVY_PER_S)

    def stop(self) -> None:
        self._has_ended.set()
        self._thread.join()


def stalled(stack: ExitStack, arguments: argparse.Namespace) -> dict[str, Any]:
    """Alternate: 1% of the users read, or do not.

    Pings come so rarely here that nobody is closed for silence: with usual ones those who do not read would be gone
    after half a minute, and later parts would compare nothing. For the same reason it is an error if somebody was
    closed, or if the broker has not seen each of those who do not read as slow before a part is measured.
    """
    fleet = EdgeFleet(stack, ("b1",), servers=1, logs=1, broker_arguments=("--ping-s", "3600"))
    stalling = max(1, arguments.users // 100)
    crowd = _crowd(stack, fleet, users=arguments.users, channels=["all"], stalling=stalling, heavy=arguments.heavy)
    rates = {"all": (arguments.per_s, 180)}
    publisher = _Publisher(fleet.cluster.url, rates)
    stack.callback(publisher.stop)
    if arguments.heavy.startswith("log."):
        heavy: _Publisher | _LoggedPublisher = _LoggedPublisher(fleet.url("b1"), arguments.heavy)
    else:
        heavy = _Publisher(fleet.cluster.url, {arguments.heavy: (HEAVY_PER_S, HEAVY_BYTES)})
    stack.callback(heavy.stop)
    time.sleep(5)  # the first part is measured under load, as the others
    parts: list[dict[str, Any]] = []
    for part in range(arguments.parts):
        is_reading = part % 2 == 0
        slow = fleet.counter("b1", "slow_sessions")
        crowd.ask("reading", is_reading)
        time.sleep(arguments.settle_s)  # buffers fill, or empty, before a part is measured
        slow = fleet.counter("b1", "slow_sessions") - slow
        if not is_reading and slow < stalling:
            raise SystemExit(f"only {slow} of {stalling} are slow: this part would compare nothing")
        before = crowd.ask("take")
        time.sleep(arguments.part_s)
        taken, look = crowd.ask("take"), fleet.look("b1")
        if taken["lost"] or look.sessions < arguments.users:
            raise SystemExit(f"{look.sessions} users are left: this part compares nothing")
        parts.append(
            {
                "reading": is_reading,
                "p50_ms": _quantile_ms(taken["latencies"], 0.5),
                "p99_ms": _quantile_ms(taken["latencies"], 0.99),
                "deliveries": sum(taken["latencies"].values()),
                "sessions": look.sessions,
                "gaps": taken["gaps"],
                "heavy": heavy.published,
                "slow": slow,
                "frames_of_stalling": taken["frames_of_stalling"] - before["frames_of_stalling"],
                "rss_mib": round(look.resident_bytes / MIB, 1),
            }
        )
        sys.stderr.write(f"{parts[-1]}\n")

    def p99(is_reading: bool) -> float:
        values: list[float] = [each["p99_ms"] for each in parts if each["reading"] is is_reading]
        return statistics.median(values)

    return {
        "users": arguments.users,
        "stalling": stalling,
        "ratio_p99": round(p99(False) / p99(True), 2),
        "parts": parts,
    }


def interests(stack: ExitStack, arguments: argparse.Namespace) -> dict[str, Any]:
    """Let users subscribe to very many different channels."""
    fleet = EdgeFleet(stack, ("b1",), servers=2, logs=2)
    before = fleet.look("b1")
    each = 100
    prefix = "log.own" if arguments.logged else "own"
    crowd = _crowd(stack, fleet, users=arguments.interests // each, own_channels=each, own_prefix=prefix)
    wait_for(lambda: fleet.look("b1").interests == arguments.interests, timeout_s=120)
    processes = {"b1": fleet.brokers["b1"].pid, **{id_: server.pid for id_, server in fleet.logs.items()}}
    used = {id_: _processor_s(process) for id_, process in processes.items()}
    time.sleep(REST_S)
    used = {id_: _processor_s(process) - used[id_] for id_, process in processes.items()}
    after = fleet.look("b1")
    redis = {id_: round(resident_bytes(server.pid) / MIB) for id_, server in fleet.cluster.redis.items()}
    taken = crowd.ask("take")
    return {
        "interests": after.interests,
        "logged": arguments.logged,
        "seconds": round(crowd.login_s, 1),
        "rss_mib_before": round(before.resident_bytes / MIB, 1),
        "rss_mib": round(after.resident_bytes / MIB, 1),
        "bytes_per_interest": round((after.resident_bytes - before.resident_bytes) / after.interests),
        "redis_rss_mib": redis,
        "processor_at_rest": {id_: round(each / REST_S, 2) for id_, each in used.items()},
        "errors": taken["errors"],
        "lost": taken["lost"],
        "faults": fleet.faults(),
    }


def churn(stack: ExitStack, arguments: argparse.Namespace) -> dict[str, Any]:
    """Let users subscribe and unsubscribe; then look at what stays."""
    fleet = EdgeFleet(stack, ("b1",), servers=2, logs=1)
    crowd = _crowd(stack, fleet, users=200, channels=["all"])
    rounds: list[dict[str, Any]] = []
    for _ in range(arguments.rounds):
        before = fleet.look("b1")
        prefix = "log.churn" if arguments.logged else "churn"
        done = crowd.ask("churn", arguments.churn_per_s, arguments.churn_s, arguments.pool, prefix)
        high = fleet.look("b1")
        time.sleep(13)  # nobody's interests are kept for 10 s
        after = fleet.look("b1")
        rounds.append(
            {
                "pairs_per_s": round(done["pairs"] / done["seconds"]),
                "answer_s_max": round(done["answer_s_max"], 2),
                "interests": [before.interests, high.interests, after.interests],
                "rss_mib": [round(look.resident_bytes / MIB, 1) for look in (before, high, after)],
                "files": [before.files, high.files, after.files],
            }
        )
        sys.stderr.write(f"{rounds[-1]}\n")
    taken = crowd.ask("take")
    return {"pool": arguments.pool, "logged": arguments.logged, "rounds": rounds, "errors": taken["errors"],
            "lost": taken["lost"], "faults": fleet.faults()}  # fmt: skip


def logins(stack: ExitStack, arguments: argparse.Namespace) -> dict[str, Any]:
    """Let users log in with a token and three subscriptions, without TLS and with it."""
    result: dict[str, Any] = {}
    for tls in (False, True):
        with ExitStack() as inner:
            words: tuple[str, ...] = ("--accepts-per-s-max", "100000")
            if tls:
                folder = inner.enter_context(tempfile.TemporaryDirectory())
                path = inner.enter_context(certificate(Path(folder)))
                words += ("--tls-cert-file", str(path), "--tls-key-file", str(path))
            fleet = EdgeFleet(inner, ("b1",), servers=1, logs=1, broker_arguments=words)
            three = ["all", "log.all", "some"]
            _crowd(inner, fleet, users=200, channels=three, tls=tls, name="first")
            before, used = fleet.look("b1"), _processor_s(fleet.brokers["b1"].pid)
            crowd = _crowd(inner, fleet, users=arguments.users, channels=three, tls=tls)
            used = _processor_s(fleet.brokers["b1"].pid) - used
            after = fleet.look("b1")
            result["tls" if tls else "plain"] = {
                "users": arguments.users,
                "logins_per_s": round(arguments.users / crowd.login_s),
                "logins_per_processor_s": round(arguments.users / used),
                "kib_per_user": round((after.resident_bytes - before.resident_bytes) / arguments.users / 1024, 1),
            }
    stack.close()
    return result


def _processor_s(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


WHAT: dict[str, Callable[[ExitStack, argparse.Namespace], dict[str, Any]]] = {
    "stalled": stalled,
    "interests": interests,
    "churn": churn,
    "logins": logins,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=list(WHAT))
    parser.add_argument("--users", type=int, default=2000)
    parser.add_argument("--per-s", type=float, default=5.0, help="stalled: publications per second for everybody")
    parser.add_argument("--heavy", default="heavy", help="stalled: the channel of those who do not read")
    parser.add_argument("--parts", type=int, default=6)
    parser.add_argument("--part-s", type=float, default=15.0)
    parser.add_argument("--settle-s", type=float, default=5.0)
    parser.add_argument("--interests", type=int, default=200_000)
    parser.add_argument("--logged", action="store_true", help="interests, churn: logged channels")
    parser.add_argument("--churn-per-s", type=float, default=2000.0)
    parser.add_argument("--churn-s", type=float, default=30.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--pool", type=int, default=0, help="churn: how many different names; 0: each is new")
    arguments = parser.parse_args()
    allow_files(arguments.users + 3000)
    with ExitStack() as stack:
        result = WHAT[arguments.what](stack, arguments)
    sys.stdout.write(json.dumps({"what": arguments.what, **result}) + "\n")


if __name__ == "__main__":
    main()
