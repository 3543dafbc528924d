"""A small cluster with datasets and standing queries whose every connection can be held up, for scripts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from dynamoth.data.records import partition_server, state_command
from dynamoth.edge.interests import Interest, query_interest
from dynamoth.edge.log import APPEND_MANY_SCRIPT
from dynamoth_sim.audit import Violation
from dynamoth_sim.data.cluster import DataClusterApp
from dynamoth_sim.data.tasks import Command
from dynamoth_sim.data.users import QueryUser, Reporter
from dynamoth_sim.data.world import DATASETS, TYPES, DataOptions, DataWorld
from dynamoth_sim.edge.stage import EdgeScenario, EdgeStage
from dynamoth_sim.edge.world import EdgeWorld
from dynamoth_sim.world.redis import RedisServer

EXECUTED_S = 1.2
"""Within this, where nothing is held up, a record is executed and users have the result."""


@dataclass(frozen=True, slots=True)
class DataScenario(EdgeScenario):
    """A script, and the world that it is written for."""

    play: Callable[[Any], None]
    data: DataOptions = field(default_factory=lambda: DataOptions(skew_s=0.0), kw_only=True)


class DataStage(EdgeStage):
    """A cluster with a data cluster under a script."""

    def _make_edge(self, scenario: EdgeScenario) -> EdgeWorld:
        assert isinstance(scenario, DataScenario), "it is of this module"
        return DataWorld(self.cluster, scenario.edge, scenario.data)

    @property
    def data(self) -> DataWorld:
        """The world with its data clusters."""
        assert isinstance(self.edge, DataWorld)
        return self.edge

    # Actors.

    def open(self) -> None:
        """Start everything, and a reporter, R, at the last broker."""
        super().open()
        self.data.register()
        self.start_data_cluster(self.data.current)
        self.reporter("R", at=list(self.edge.brokers.values())[-1].name)

    def start_data_cluster(self, app: DataClusterApp) -> None:
        """Start a data cluster, and wait until it has a term."""
        app.start()
        self.wait(f"{app.name} has begun", lambda: app.term > 0)

    def reporter(self, name: str, at: str) -> Reporter:
        """Start a reporter at a broker, and wait until it is served."""
        reporter = self.data.add_reporter(name, at)
        reporter.start()
        self.wait_served(reporter, at)
        return reporter

    def new_user(self, name: str, *interests: Interest, at: str = "b1") -> QueryUser:
        """Start a user at a broker."""
        user = self.data.add_query_user(name, list(interests), at)
        user.start()
        return user

    def query_user(self, name: str, *interests: Interest, at: str = "b1") -> QueryUser:
        """Start a user at a broker, and wait until all subscriptions are confirmed."""
        user = self.new_user(name, *interests, at=at)
        self.wait_served(user, at)
        return user

    # Records and results.

    def report(self, interest: Interest, reporter: Reporter | None = None) -> None:
        """Report a record that matches an interest, and wait until it is acknowledged."""
        reporter = reporter or self.data.reporters[0]
        self.begin_report(interest, reporter)
        self.wait(f"{reporter.name}'s record is acknowledged", lambda: not reporter.is_reporting)

    def begin_report(self, interest: Interest, reporter: Reporter) -> None:
        """Report a record that matches an interest."""
        dataset, type_ = interest.name.removesuffix("_of"), str(interest.values["type"])
        reporter.choose = lambda: (dataset, type_)
        reporter.report()

    def run_executions(self) -> None:
        """Wait until everything that was reported is executed and delivered."""
        self.run(EXECUTED_S)

    def partition_server(self, partition: str) -> RedisServer:
        """Return the log server that has a partition."""
        return self.edge.logs[partition_server(partition, tuple(self.edge.logs))]

    def wait_asked(
        self, app: DataClusterApp, what: str, is_it: Callable[[Command], bool], server: str | None = None
    ) -> None:
        """Wait until a data cluster has sent a command that is not answered, to any server or to this one."""

        def is_asked() -> bool:
            return app.machine is not None and any(map(is_it, app.machine.asked(server)))

        self.expect(f"{app.name} asks {what}", self.world.run_until_true(is_asked, self.world.now + 3.0, poll_s=0.0001))

    def wait_end_asked(self, app: DataClusterApp, partition: str) -> None:
        """Wait until a data cluster asks where a partition ends."""
        self.wait_asked(app, f"where {partition} ends", lambda command: command == state_command(partition))

    def wait_appending(self, app: DataClusterApp) -> None:
        """Wait until a data cluster appends result sets."""
        self.wait_asked(app, "to append", lambda command: command[1:2] == (APPEND_MANY_SCRIPT,))

    def expect_results(self, user: QueryUser, count: int) -> None:
        """Note a failure unless a user has got this many result sets."""
        self.expect_delivered(user, count)

    def expect_data_gaps(self, count: int) -> None:
        """Note a failure unless users got this many gaps."""
        gaps = self.data.data_audit.totals.gaps
        self.expect(f"users get {count} gaps, not {gaps}", gaps == count)

    # The end.

    def close(self) -> None:
        """Wait until every user is served; report once more for everybody, and wait until everybody has it."""
        if not self.data.current.is_running:
            self.start_data_cluster(self.data.current)
        for user in [each for each in self.edge.users if each.is_alive]:
            if not self.world.run_until_true(partial(self.is_served, user), self.world.now + 3.0):
                self.expect(f"{user.name} is served in the end, alone", False)
        self.data.data_audit.calm()
        for dataset in DATASETS:
            for type_ in TYPES:
                for _ in range(dataset.partitions):
                    self.report(query_interest(f"{dataset.name}_of", {"type": type_}))
        self.run_executions()

    def violations(self) -> list[Violation]:
        """Return everything that went wrong."""
        data = self.data
        return [*super().violations(), *data.problems_of_reporters(), *data.data_audit.finish(data.streams())]
