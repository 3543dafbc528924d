"""A recording with planted facts.

Three servers report each second from 10:00 to 10:10 and, after a restart, from 12:00 to 12:05. ``CHANNELS`` channels
have a popularity of Zipf's law. The facts are the constants below.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from dynamoth.recording import TABLES
from tests.analytics.loads import read_rows, write_rows
from tests.analytics.planted_brokers import broker_tables

Row = Mapping[str, Any]

BEGIN = datetime(2026, 11, 23, 10, tzinfo=UTC)
REPORTS, RESTART = 900, 600
CHANNELS = 45
EXPONENT = 0.9
CAPACITY = 1_000_000

HOT = "<script>alert('hot')</script>"
"""The busiest channel. It overloads s3 from 10:02 to 10:08."""
HOT_FROM, HOT_TO = 120, 480

ODD_AT = 300
"""s2 sends three times as much in the report of this second, and nothing else is odd there."""

LOST_AT = 330
"""No recorder got this report of s2."""

BREAK = 0.6
"""The latency of s1 rises from this load ratio on; its load rises slowly in the second part."""

PING_PONG, LATER_BACK, ONWARD = "c20", "c21", "c22"
"""Moved to s2 and, after 5 minutes, back; back after two hours; from s1 to s2 to s3."""

EVERYWHERE, EVERYWHERE_AT = "00000000000000ff", 450
"""This publisher of c5 is among the busiest of 30 more channels from this second on, for half a minute."""

ALONE = f"c{CHANNELS - 1}"
"""The only channel with one publisher."""

SETTINGS = {
    "load_ratio_high": 0.8,
    "load_ratio_safe": 0.6,
    "servers": {f"s{n}": f"redis://10.0.0.{n}:6379" for n in (1, 2, 3)},
}


def plant(folder: Path) -> None:
    """Write the recording, as one recorder does: a file per table and hour."""
    channels = list(_channels())
    servers = list(_servers(channels))
    tables = {
        "channels": channels,
        "servers": servers,
        "latency": _latency(servers),
        "plans": _plans(),
        "decisions": _decisions(),
        "settings": _settings(),
        **broker_tables(),
    }
    for name, rows in tables.items():
        write_rows(folder, name, [{**row, "recorder": "r1"} for row in rows])


def second_recording(planted: Path, folder: Path) -> None:
    """Write the same events again: by two recorders, in another order, in more files."""
    shuffle = random.Random(1).shuffle
    for name in TABLES:
        if not (planted / name).is_dir():
            continue
        rows = read_rows(planted, name)
        # Its own probes are a recorder's own.
        rows += [] if name == "latency" else [_by_another(row) for row in rows if row["at"].second != 7]
        shuffle(rows)
        write_rows(folder, name, rows, files=3)


def _by_another(row: Row) -> dict[str, Any]:
    return {**row, "at": row["at"] + timedelta(milliseconds=30), "recorder": "r2"}


def _noise(*key: object) -> float:
    """Return a number between -0.02 and 0.02 that depends on the key only."""
    return random.Random(repr(key)).uniform(-0.02, 0.02)


def _at(second: float, late_s: float = 1.05) -> datetime:
    """Return when the report of an interval that begins at ``second`` of the recorded time arrived."""
    gap = 7200 - RESTART if second >= RESTART else 0
    return BEGIN + timedelta(seconds=second + gap + late_s)


def _channels() -> Iterator[Row]:
    usual = {rank: 5000 * max(rank, 1) ** -EXPONENT for rank in range(CHANNELS + 1)}
    for second in range(REPORTS):
        for rank in range(CHANNELS + 1):
            server = "s3" if rank == 0 else f"s{rank % 3 + 1}"
            if (server, second) == ("s2", LOST_AT):
                continue
            publications = round(usual[rank] * (1 + _noise(second, rank)))
            if rank == 0:
                publications = 1100 + second % 7 if HOT_FROM <= second < HOT_TO else 100
            everywhere = 11 <= rank <= 40 and EVERYWHERE_AT <= second < EVERYWHERE_AT + 30
            own = f"{rank:016x}"
            subscribers = 10 if rank == 0 else 1
            yield {
                "at": _at(second),
                "server": server,
                "incarnation": 1 if second < RESTART else 2,
                "sequence": second,
                "interval_s": 1.0,
                "channel": f"c{rank}" if rank else HOT,
                "channels": 1,
                "publications": publications,
                "publishers": 1 if rank == CHANNELS - 1 else 4,
                "subscribers": subscribers,
                "publisher_ids": bytes.fromhex(EVERYWHERE + own if rank == 5 or everywhere else own),
                "messages_sent": publications * subscribers,
                "bytes_in": publications * 60,
                "bytes_out": publications * subscribers * (20 if rank else 60),
            }


def _servers(channels: Iterable[Row]) -> Iterator[Row]:
    names = ("at", "server", "incarnation", "sequence", "interval_s")
    sums: dict[tuple[Any, ...], int] = {}
    for row in channels:
        key = tuple(row[name] for name in names)
        sums[key] = sums.get(key, 0) + row["bytes_out"]
    for key, sent in sums.items():
        report = dict(zip(names, key, strict=True))
        server, second = report["server"], report["sequence"]
        rising = max(second - RESTART, 0) * 1920.0 if server == "s1" else 0.0
        odd = 3.0 if (server, second) == ("s2", ODD_AT) else 1.0
        figures = {"outgoing_bytes_per_s_max": CAPACITY, "cpu_ratio": 0.3, "observation_lag_s": 0.0}
        yield {**report, **figures, "outgoing_bytes_per_s": (sent + rising) * odd}


def _latency(servers: Iterable[Row]) -> Iterator[Row]:
    for row in servers:
        server, second = row["server"], row["sequence"]
        rising = max(row["outgoing_bytes_per_s"] / CAPACITY - BREAK, 0.0) * 0.02 if server == "s1" else 0.0
        latency_s = (0.0004 + rising) * (1 + _noise(server, second))
        yield {"server": server, "at": _at(second, 0.5), "number": second, "latency_s": latency_s}


def _plans() -> Iterator[Row]:
    moves = [
        (PING_PONG, 7, 300, "s1", "s2"),
        (PING_PONG, 11, 570, "s2", "s1"),
        (LATER_BACK, 8, 310, "s1", "s2"),
        (LATER_BACK, 12, 800, "s2", "s1"),
        (ONWARD, 9, 320, "s1", "s2"),
        (ONWARD, 10, 350, "s2", "s3"),
    ]
    for channel, epoch, second, source, target in moves:
        for phase, after in (("prepared", 0.0), ("active", 0.2), ("settled", 0.7)):
            yield {
                **{"at": _at(second, after), "balancer": 5, "number": round((epoch + after) * 10), "line": 0},
                **{"version": epoch, "channel": channel, "phase": phase, "epoch": epoch, "reason": "s1 is too full"},
                **{"from_mode": "single", "from_servers": [source], "to_mode": "single", "to_servers": [target]},
            }


def _decisions() -> Iterator[Row]:
    rows = [
        # decision, kind, seconds, server, before, predicted, measured; the second one gained nothing.
        (1, "move", 300, "s1", 0.85, 0.55, None),
        (1, "move", 300, "s2", 0.20, 0.50, None),
        (1, "outcome", 320, "s1", None, None, 0.57),
        (1, "outcome", 320, "s2", None, None, 0.48),
        (2, "move", 350, "s2", 0.82, 0.60, None),
        (2, "outcome", 370, "s2", None, None, 0.83),
    ]
    for decision, kind, second, server, before, predicted, measured in rows:
        yield {
            **{"at": _at(second, 0.0), "balancer": 5, "number": second * 10 + int(server[1:]), "line": 0},
            **{"decision": decision, "kind": kind, "server": server, "channel": "c20", "reason": "s1 is too full"},
            **{"goal": "relieve" if kind == "move" else None, "ratio_before": before, "ratio_predicted": predicted},
            "ratio_measured": measured,
        }


def _settings() -> Iterator[Row]:
    texts = [(name, json.dumps(value)) for name, value in SETTINGS.items()]
    # As balancers do with long values: continued in the next row.
    pieces = [(name, text[start : start + 40]) for name, text in texts for start in range(0, len(text), 40)]
    for line, (name, piece) in enumerate(pieces):
        yield {"at": BEGIN, "balancer": 5, "number": 1, "line": line, "name": name, "value": piece}
