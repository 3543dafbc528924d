"""Random worlds with standing queries: one seed is one world."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from dynamoth.data.catalog import QUERIES_KEY
from dynamoth.data.datasets import Dataset
from dynamoth.data.progress import progress_key
from dynamoth.data.records import partition_name, partition_names, partition_of
from dynamoth_sim.audit import Violation
from dynamoth_sim.cluster import Cluster, short_options
from dynamoth_sim.data.folder import Folder
from dynamoth_sim.data.users import Reporter
from dynamoth_sim.data.world import DATASETS, QUERIES, QUICK_TO_LEARN, TYPES, DataOptions, DataWorld, data_edge
from dynamoth_sim.edge.run import (
    CRASHES,
    DOWN_S_MAX,
    HOLD_S_MAX,
    PLANNED,
    RECOVERY_S,
    SETTLE_S_MAX,
    EdgeChaos,
    EdgeProfile,
)
from dynamoth_sim.world.network import Pipe
from dynamoth_sim.world.redis import RedisServer
from dynamoth_sim.world.redis_keys import Snapshot
from dynamoth_sim.world.world import World

USERS = 5
REPORTERS = 3
THINK_S_MAX = 0.08

KILL_COMMANDS_MAX = 40
"""A data cluster is killed within this many commands: an execution needs some ten to twenty."""

HANG_S_MAX = 1.0
"""How long a data cluster hangs, at most: shorter than an interest without users is kept."""

HOLD_CLUSTER_S_MAX = 0.2
SLOW_LOG_S_MAX = 0.3
AWAY_S_MAX = 4.5

DROPPED_S_MAX = 2.5
"""How long a query is dropped, at most: a data cluster ends it after ``BROKERS_KNOW_S``."""

EXECUTED_S = 1.5
"""Within this, where nothing fails, what was reported is executed, and users have it."""


@dataclass(frozen=True, slots=True)
class DataProfile(EdgeProfile):
    """The faults of a run with standing queries."""

    data: DataOptions = field(default_factory=DataOptions)


KILLS = ("kill cluster", "kill cluster", "kill cluster", "cut cluster", "slow cluster", "slow log")
TAKE_OVERS = ("take over", "old folder")

DATA_PROFILES: dict[str, DataProfile] = {
    profile.name: profile
    for profile in (
        DataProfile(
            name="data-calm",
            servers=2,
            faults=("join", "leave", "slow cluster", "slow log"),
            edge=data_edge(),
        ),
        DataProfile(
            name="data-crashes",
            servers=2,
            faults=(*PLANNED, *CRASHES, *KILLS, *TAKE_OVERS, "away"),
            losses_allowed=True,
            edge=data_edge(),
        ),
        # Log servers restart, and lose nothing.
        DataProfile(
            name="data-durable",
            servers=2,
            faults=(*PLANNED, *CRASHES, *KILLS, *TAKE_OVERS, "stop log", "stop log", "pause broker", "slow user"),
            losses_allowed=True,
            edge=data_edge(logs_are_durable=True),
        ),
        # They restart, and nobody knows that they have lost nothing: logs begin again.
        DataProfile(
            name="data-restarts",
            servers=2,
            faults=(*PLANNED, *CRASHES, *KILLS, *TAKE_OVERS, "stop log", "away"),
            losses_allowed=True,
            edge=data_edge(logs_may_fail=True),
        ),
        # They lose records, interests and progress; data clusters lose their disks, maybe just then.
        DataProfile(
            name="data-logs",
            servers=2,
            faults=(*PLANNED, *CRASHES, *KILLS, *TAKE_OVERS, "stop log", "lose log", "restore log"),
            losses_allowed=True,
            edge=data_edge(logs_may_fail=True),
            data=DataOptions(records_may_be_lost=True),
        ),
        # Operators drop queries, and register them again before or after their end is published.
        DataProfile(
            name="data-drops",
            servers=2,
            faults=(*CRASHES, *KILLS, *TAKE_OVERS, "stop log", *["drop query"] * 8),
            losses_allowed=True,
            work_s=5.0,
            edge=data_edge(broker=QUICK_TO_LEARN, logs_are_durable=True),
        ),
    )
}


class DataChaos(EdgeChaos):
    """Does to log servers and data clusters, too, what a profile allows."""

    def __init__(self, edge: DataWorld, profile: DataProfile) -> None:
        self._data = edge
        super().__init__(edge, profile)
        #: Log servers that do not run, or are about to be restored.
        self._in_trouble: set[str] = set()
        #: Backups of folders, by data cluster.
        self._backups: dict[str, dict[str, Folder]] = {}

    def _by_name(self) -> dict[str, Callable[[], None]]:
        return super()._by_name() | {
            "kill cluster": self._kill_cluster,
            "cut cluster": self._cut_cluster,
            "slow cluster": self._slow_cluster,
            "take over": self._take_over,
            "old folder": self._old_folder,
            "stop log": self._stop_log,
            "lose log": self._lose_log,
            "slow log": self._slow_log,
            "away": self._send_away,
            "drop query": self._drop_query,
        }

    # The data cluster.

    def _kill_cluster(self) -> None:
        random = self._random
        self._data.current.kill_after(random.randint(1, KILL_COMMANDS_MAX), before=random.random() < 0.5)

    def _pipes(self) -> list[tuple[Pipe, Pipe]]:
        network = self._edge.cluster.network
        return [(each.to_server, each.to_client) for each in network.connections(process=self._data.current.name)]

    def _cut_cluster(self) -> None:
        network = self._edge.cluster.network
        connections = network.connections(process=self._data.current.name)
        if connections:
            network.break_connection(self._random.choice(connections))

    def _slow_cluster(self) -> None:
        """What the data cluster asks one server, or what that answers, is late."""
        pipes = self._pipes()
        if pipes:
            pipe = self._random.choice(self._random.choice(pipes))
            pipe.hold()
            self._until(HOLD_CLUSTER_S_MAX * self._random.random(), pipe.release)

    def _take_over(self) -> None:
        """The data cluster hangs, and another machine runs it from then on."""
        former = self._data.current
        [other] = [each for each in self._data.data_clusters if each is not former]
        if other.is_running:
            return
        former.pause(HANG_S_MAX * self._random.random())
        self._data.current = other
        self._note(f"{other.name} takes over")

    def _old_folder(self) -> None:
        """A data cluster loses its disk, and gets a backup of it, or an empty one."""
        app = self._data.current
        backup = self._backups.get(app.name)
        if backup is None or self._random.random() < 0.3:
            self._backups[app.name] = {name: folder.copy() for name, folder in app.folders.items()}
            return
        app.kill("its disk is lost")
        is_empty = self._random.random() < 0.3
        app.folders = {name: Folder() if is_empty else folder.copy() for name, folder in backup.items()}
        self._note(f"{app.name} gets {'an empty disk' if is_empty else 'an old one'}")

    # Log servers.

    def _server(self) -> RedisServer | None:
        """Choose a log server that nothing is done to."""
        free = [each for each in self._edge.logs.values() if each.id not in self._in_trouble]
        return self._random.choice(free) if free else None

    def _stop(self, server: RedisServer, snapshot: Snapshot | None) -> None:
        """Stop a log server, and start it after a while with this content; None: empty."""
        server.stop()
        self._in_trouble.add(server.id)

        def start() -> None:
            self._in_trouble.discard(server.id)
            server.start(snapshot)

        self._until(DOWN_S_MAX * self._random.random(), start)

    def _stop_log(self) -> None:
        """A log server restarts, with everything."""
        server = self._server()
        if server is not None:
            self._stop(server, server.snapshot())

    def _restore_log(self) -> None:
        """A log server takes a snapshot, goes on, and restarts with the snapshot."""
        server = self._server()
        if server is None or not server.hash(QUERIES_KEY) or not self._has_copies():
            return
        self._in_trouble.add(server.id)
        snapshot = server.snapshot()
        self._world.after(0.5 * self._random.random(), self._stop, server, snapshot)

    def _has_copies(self) -> bool:
        """Return whether all log servers have the same progress: what they all have lost, nobody knows."""
        copies = {
            tuple(self._data.execute(server, (b"GET", progress_key(query.name))) for query in QUERIES)
            for server in self._edge.logs.values()
            if server.up
        }
        return not self._in_trouble and len(copies) == 1

    def _lose_log(self) -> None:
        """A log server restarts empty, if all have definitions and progress; perhaps the data cluster dies, too."""
        server = self._server()
        others = [each for each in self._edge.logs.values() if each is not server]
        if server is None or not all(each.up and each.hash(QUERIES_KEY) for each in others) or not self._has_copies():
            return
        self._stop(server, None)
        if self._random.random() < 0.5:
            self._data.current.kill()

    def _slow_log(self) -> None:
        """What brokers ask one log server, or what that answers, is late."""
        network, server = self._edge.cluster.network, self._random.choice(list(self._edge.logs.values()))
        is_to_server = self._random.random() < 0.5
        for each in network.connections(server=server.id):
            if each.process in {broker.name for broker in self._edge.brokers.values()}:
                pipe = each.to_server if is_to_server else each.to_client
                pipe.hold()
                self._until(SLOW_LOG_S_MAX * self._random.random(), pipe.release)

    # Operators.

    def _drop_query(self) -> None:
        """A query is dropped, and registered again later."""
        if self._data.dropped or not self._are_all_up():
            return
        name = self._random.choice(list(self._data.queries))
        self._data.drop(name)
        self._note(f"{name} is dropped")
        self._until(DROPPED_S_MAX * self._random.random(), partial(self._register_again, name))

    def _register_again(self, name: str) -> None:
        if not self._are_all_up():
            self._world.after(0.05, self._register_again, name)
            return
        self._data.register_again(name)
        self._note(f"{name} is registered again")

    def _are_all_up(self) -> bool:
        return all(each.up for each in self._edge.logs.values())

    # Users.

    def _send_away(self) -> None:
        """A user's application is closed for some time, perhaps for longer than interests are kept."""
        user = self._random.choice(self._edge.users)
        if user.is_alive:
            user.crash()
            self._until(AWAY_S_MAX * self._random.random(), lambda: None if user.is_alive else user.start())


def run_data_profile(world: World, profile: DataProfile) -> tuple[DataWorld, Callable[[], list[Violation]]]:
    """Build one world; the function runs it from start to audit, and returns what went wrong."""
    cluster = Cluster(world, short_options(profile, hold_s_max=HOLD_S_MAX))
    edge = DataWorld(cluster, profile.edge, profile.data)
    return edge, partial(_live, edge, profile)


def _live(edge: DataWorld, profile: DataProfile) -> list[Violation]:
    world, cluster, audit = edge.world, edge.cluster, edge.data_audit
    workload = _Workload(edge)
    cluster.start()
    edge.register()
    world.run_until(0.5)
    for broker in edge.brokers.values():
        broker.start()
    world.run_until(1.0)
    edge.supervise()
    workload.start()
    world.run_until(1.5)
    chaos = DataChaos(edge, profile)
    chaos.start()
    world.run_until(world.now + profile.work_s)
    chaos.stop()
    workload.stop()
    cluster.network.calm()
    violations: list[Violation] = []
    world.run_until(world.now + RECOVERY_S)
    if not world.run_until_true(cluster.settled, world.now + SETTLE_S_MAX):
        violations.append(Violation("settling", "; ".join(cluster.unsettled()), world.now))
    violations += [*edge.problems(), *edge.problems_of_reporters()]
    audit.calm()
    workload.report_everything()
    world.run_until(world.now + EXECUTED_S)
    violations += [*edge.problems_of_reporters(), *audit.finish(edge.streams())]
    return violations


class _Workload:
    """What users and reporters do."""

    def __init__(self, edge: DataWorld) -> None:
        self._edge = edge
        self._world = edge.world
        self._random = edge.world.random
        self._stopped = False

    def start(self) -> None:
        edge, random = self._edge, self._random
        for number in range(USERS):
            interests = random.sample(edge.logged, random.randint(1, 3))
            self._world.after(0.6 * random.random(), edge.add_query_user(f"u{number}", interests).start)
        for number in range(REPORTERS):
            reporter = edge.add_reporter(f"r{number}")
            self._world.after(0.3 * random.random(), reporter.start)
            self._world.after(0.3 + random.random(), self._report, number)

    def stop(self) -> None:
        self._stopped = True

    def _report(self, number: int) -> None:
        reporter = self._edge.reporters[number]
        if self._stopped:
            return
        if reporter.is_alive and not reporter.is_reporting:
            reporter.report()
        self._world.after(THINK_S_MAX * self._random.random(), self._report, number)

    def report_everything(self) -> None:
        """Report records of each type, and go on until every partition has one."""
        left = [(dataset, type_) for dataset in DATASETS for type_ in TYPES]
        without = {name for dataset in DATASETS for name in partition_names(dataset)}
        for reporter in self._edge.reporters:
            self._report_next(reporter, left, without)

    def _report_next(self, reporter: Reporter, left: list[tuple[Dataset, str]], without: set[str]) -> None:
        if not left and not without:
            return
        if not reporter.is_reporting:
            dataset, type_ = left.pop() if left else (_dataset_of(without), self._random.choice(TYPES))
            reporter.choose = lambda: (dataset.name, type_)
            id_ = reporter.report()
            without.discard(partition_name(dataset.stream, partition_of(dataset, id_, 0)))
        self._world.after(0.02, self._report_next, reporter, left, without)


def _dataset_of(names: set[str]) -> Dataset:
    """Return the first dataset that has one of these partitions."""
    return next(each for each in DATASETS if names.intersection(partition_names(each)))
