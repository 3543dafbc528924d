"""Planted facts about edge brokers, for the recording of ``planted``.

Three brokers report each second of the first four minutes. Each user has the interest ``all``; each broker has ten
users with an interest of its own. ``b1`` is overloaded until the coordinator moves ``MOVED`` of its users to ``b2`` at
``DECIDED_AT``, and one more stays. Later it shuffles, in a dry run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

Row = Mapping[str, Any]

BEGIN = datetime(2026, 11, 23, 10, tzinfo=UTC)
REPORTS = 240
DECIDED_AT = 120
MOVED = 20
BEFORE = {"b1": 60, "b2": 20, "b3": 40}
"""Users of each broker."""
BROKER_CAPACITY = 55_000.0
RATE, OWN_RATE, OWN_USERS = 1000.0, 500.0, 10
BROKER_SETTINGS = {"ratio_high": 0.95, "connection_bytes_per_s": 0.0, "wait_s": 5.0}
BACK = "00000000000000aa"
"""The session of a user who was moved back."""

_PLAN = {"coordinator": 4, "term": 1, "decision": 1, "kind": "relieve"}


def at(second: float) -> datetime:
    return BEGIN + timedelta(seconds=second)


def users_at(broker: str, second: int) -> int:
    change = {"b1": -MOVED, "b2": MOVED}.get(broker, 0) if second >= DECIDED_AT else 0
    return BEFORE[broker] + change


def load_of(users: int) -> tuple[float, float]:
    """Return F_j and I_j of a broker."""
    return RATE * (1 + users) + OWN_RATE * (1 + OWN_USERS), RATE + OWN_RATE


def ratio_of(users: int) -> float:
    return load_of(users)[0] / BROKER_CAPACITY


def broker_tables() -> dict[str, list[Row]]:
    """Return the rows of each table."""
    return {
        "brokers": [*_brokers()],
        "broker_interests": [*_interests()],
        "broker_decisions": [*_numbered(_decisions())],
        "broker_moves": [*_numbered(_moves())],
        "coordinator_settings": [
            {"at": BEGIN, "coordinator": 4, "number": 1, "line": line, "name": name, "value": json.dumps(value)}
            for line, (name, value) in enumerate(BROKER_SETTINGS.items())
        ],
    }


def _brokers() -> Iterator[Row]:
    for second in range(REPORTS):
        for broker in BEFORE:
            users = users_at(broker, second)
            load, inbound = load_of(users)
            yield {
                **{"at": at(second), "broker": broker, "incarnation": 1, "number": second, "report_s": 1.0},
                **{"users": users, "capacity_bytes_per_s": BROKER_CAPACITY, "load_bytes_per_s": load},
                **{"inbound_bytes_per_s": inbound, "other_ratio_max": 0.1, "is_admitting": True, "is_draining": False},
                "user_loads": " ".join(["0"] * 10 + [str(users)]),
            }


def _interests() -> Iterator[Row]:
    for second in range(REPORTS):
        for broker in BEFORE:
            head = {"at": at(second), "broker": broker, "incarnation": 1, "number": second}
            yield {**head, "interest": "all", "rate": RATE, "users": users_at(broker, second)}
            yield {**head, "interest": broker, "rate": OWN_RATE, "users": OWN_USERS}


def _decisions() -> Iterator[dict[str, Any]]:
    before, after = {"ratio_before": ratio_of(60), "cov_before": 0.4}, {"ratio_predicted": 0.83, "cov_predicted": 0.02}
    plan = {**_PLAN, **before, **after, "moves": MOVED + 1, "reason": "cov 0.4: uneven", "is_dry_run": False}
    plan |= {"redis_egress_before": 4500.0}
    done = {"moved": MOVED, "failed": 1}
    yield {"at": at(DECIDED_AT), "state": "made", "clock_s": 50.0, **plan, "moved": 0, "failed": 0}
    yield {"at": at(DECIDED_AT + 2), "state": "settled", "clock_s": 52.5, **plan, **done}
    measured = {"ratio_measured": ratio_of(40), "cov_measured": 0.03, "redis_egress_measured": 4500.0}
    yield {"at": at(DECIDED_AT + 20), "state": "measured", "clock_s": 70.0, **plan, **done, **measured}
    for broker, ratios in {"b1": (ratio_of(60), 0.83, 0.85), "b2": (ratio_of(20), 0.8, 0.84)}.items():
        named = dict(zip(("ratio_before", "ratio_predicted", "ratio_measured"), ratios, strict=True))
        yield {"at": at(DECIDED_AT + 20), "state": "measured", **_PLAN, "broker": broker, **named}
    shuffle = {**_PLAN, "decision": 2, "kind": "shuffle", "is_dry_run": True, "moves": 5, "moved": 0, "failed": 0}
    yield {"at": at(DECIDED_AT + 60), "state": "made", "clock_s": 110.0, **shuffle, "cov_before": 0.6}
    yield {"at": at(DECIDED_AT + 70), "state": "paused", "coordinator": 4, "term": 1, "clock_s": 120.0}


def _moves() -> Iterator[dict[str, Any]]:
    """The rows of the first decision; one user was moved back half a minute later, by another decision."""
    sessions = [BACK, *(f"{number:016x}" for number in range(MOVED))]
    route = {"from_broker": "b1", "to_broker": "b2"}
    for number, session in enumerate(sessions):
        loads: dict[str, Any] = {
            "load_bytes_per_s": 1000.0 + number,
            "from_ratio_before": 1.2,
            "from_ratio_predicted": 1.18,
        }
        loads |= {"to_ratio_before": 0.4, "to_ratio_predicted": 0.42, "interests": ["all"]}
        yield {"at": at(DECIDED_AT), **_PLAN, **route, "session": session, **loads}
        end = {"end": "left", "seconds": 0.5} if number < MOVED else {"end": "deadline", "seconds": 10.0}
        yield {"at": at(DECIDED_AT + 2), **_PLAN, **route, "session": session, **end}
    back = {**_PLAN, "decision": 3, "from_broker": "b2", "to_broker": "b1", "session": BACK}
    yield {"at": at(DECIDED_AT + 30), **back, "load_bytes_per_s": 1000.0}


def _numbered(rows: Iterable[dict[str, Any]]) -> Iterator[Row]:
    for line, row in enumerate(rows):
        yield {"number": 1, "line": line, **row}
