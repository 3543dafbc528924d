"""Recorded loads of brokers: a scripted cluster of brokers under the production controller, with a recorder."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dynamoth.edge.control import MoveEnd, Stamp
from dynamoth.protocol.records import unpack_rows
from dynamoth.recording import COORDINATOR_TABLES
from dynamoth_analytics.replay.brokers.replay import MOVE_S, BrokerWindow, RecordedMigration, RecordedReport
from dynamoth_broker.coordinator.events import (
    Answered,
    ControllerEvent,
    DecisionRecorded,
    MoveEnded,
    MoveUsers,
    Reported,
)
from dynamoth_broker.coordinator.model import LoadModel
from dynamoth_broker.coordinator.records import Records
from dynamoth_broker.coordinator.settings import CoordinatorOptions
from dynamoth_recorder.rows import rows_of_broker
from tests.analytics.loads import write_rows
from tests.coordinator.scripted_cluster import ScriptedCluster

BEGIN = 1_700_000_000.0
CAPACITY = 250_000.0


def crowded(seed: int = 1, users: tuple[int, ...] = (90, 20, 10), interests: int = 20) -> LoadModel:
    """Return brokers of which the first has most users; each user has three interests of all."""
    rng = random.Random(seed)
    model = LoadModel(64.0)
    names = [f"k{number}" for number in range(interests)]
    for name in names:
        model.set_rate(name, float(rng.randint(500, 1500)))
    for number, count in enumerate(users, 1):
        model.add_broker(f"b{number}", CAPACITY)
        for place in range(count):
            model.attach(f"b{number}u{place}@ann", f"b{number}", rng.sample(names, 3))
    return model


@dataclass
class RecordedBrokers(ScriptedCluster):
    """A scripted cluster, and what a recorder hears of it."""

    reports: list[RecordedReport] = field(default_factory=list)
    migrations: list[RecordedMigration] = field(default_factory=list)
    tables: defaultdict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        super().__post_init__()
        self._records = Records(9, self.settings, b"secret")
        self._records.begin_term(1, 0.0)
        self._moving: dict[str, tuple[str, str, tuple[str, ...]]] = {}
        execute = self._execute

        def heard(action: Any) -> None:
            match action:
                case DecisionRecorded(decision):
                    self._records.on_decision(decision, self.now, {})
                case MoveUsers(_, moves):
                    self._records.on_asked(moves, self.now)
                    self._moving = {
                        move.user: (move.source, move.target, self.model.users[move.user].interests) for move in moves
                    }
                case _:
                    pass
            execute(action)
            self._publish()

        self._execute = heard  # type: ignore[method-assign]

    @property
    def at(self) -> float:
        return BEGIN + self.now

    def send(self, event: ControllerEvent) -> None:
        if isinstance(event, Reported):
            self.reports.append(RecordedReport(self.at, event.report))
            for rows in rows_of_broker(Stamp(1, len(self.reports)), event.report):
                for index in range(rows.count):
                    cells = {name: column[index] for name, column in rows.columns.items()}
                    self._write(rows.table, {**rows.same, **cells})
        elif isinstance(event, MoveEnded):
            self._records.on_move_ended(event.user, MoveEnd.LEFT if event.moved else MoveEnd.DEADLINE, self.now)
            if event.moved:
                self.migrations.append(RecordedMigration(self.at + MOVE_S, event.user, *self._moving[event.user]))
        else:
            if isinstance(event, Answered):
                self._records.on_asking(event.request)
                self._records.on_candidates(event.request, event.candidates)
        self._records.tick(False, self.now)
        self._publish()
        super().send(event)

    def _publish(self) -> None:
        for send in self._records.publish(["s1"]):
            said = unpack_rows(bytes(send.args[2]), COORDINATOR_TABLES)  # type: ignore[arg-type]
            for line, row in enumerate(said.rows):
                cells = dict(zip(said.columns, row, strict=True))
                self._write(said.table, {"coordinator": said.sender, "number": said.number, "line": line, **cells})

    def _write(self, table: str, cells: dict[str, Any]) -> None:
        self.tables[table].append({"at": datetime.fromtimestamp(self.at, UTC), "recorder": "r1", **cells})

    def write(self, folder: Path) -> None:
        """Write what was heard as a recording."""
        for name, rows in self.tables.items():
            write_rows(folder, name, rows)


def recorded(settings: CoordinatorOptions, seconds: int, model: LoadModel | None = None) -> RecordedBrokers:
    """Record a cluster of brokers."""
    cluster = RecordedBrokers(model or crowded(), settings)
    cluster.run(seconds)
    return cluster


def window_of(cluster: RecordedBrokers) -> BrokerWindow:
    """Return all of a recording as one window."""
    return BrokerWindow(BEGIN, cluster.at, cluster.reports, cluster.migrations)
