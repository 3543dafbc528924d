"""A model of the data cluster: a process that takes a term, executes queries and ends interests, until it is killed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from dynamoth.data.catalog import DATASETS_KEY, QUERIES_KEY, catalog_of, entry_of, merged, parse_entries, put_command
from dynamoth.data.datasets import Dataset
from dynamoth.data.queries import StandingQuery
from dynamoth.data.terms import claim_command, parse_claim, take_term
from dynamoth_client.machines.local_plan import LocalPlan
from dynamoth_client.machines.publisher.events import Publish, Published, PublishedAll, PublishFailed
from dynamoth_client.machines.publisher.machine import PublisherMachine
from dynamoth_sim.cluster import Cluster
from dynamoth_sim.data.folder import Folder
from dynamoth_sim.data.interest_table import expire_interests
from dynamoth_sim.data.query import Asking, ModelQuery, Place, Witness
from dynamoth_sim.data.tasks import (
    Die,
    Ended,
    ProcessEnds,
    PublishResults,
    ResultsPublished,
    ServerFailed,
    Sleep,
    Task,
    TaskMachine,
    ask,
)
from dynamoth_sim.load.clients import HeaderRead, HeaderReader
from dynamoth_sim.world.process import Process

LOOK_S = 0.2
"""It looks this often whether a newer data cluster has begun."""

TIDY_LOOKS = 3
"""After this number of looks it ends interests, and writes definitions to servers that lack them."""

BROKERS_KNOW_S = 0.8
"""A query that was dropped is ended after this time: brokers know it then. They believe definitions for half of it."""

TIMEOUT_S = 0.6
"""A command that a log server does not answer within this has failed."""


class Program:
    """The tasks of one life of a data cluster, as ``ClusterRunner`` has them."""

    def __init__(self, place: Place, queries: Mapping[StandingQuery, float], folders: Mapping[str, Folder]) -> None:
        self._place = place
        self._periods = {query.name: period_s for query, period_s in queries.items()}
        self._folders = folders
        #: The latest entry of each query that it has seen. What all servers have lost, an operator registers again.
        self._entries = {query.name: entry_of(query) for query in queries}
        self._running: dict[str, tuple[StandingQuery, Task]] = {}
        #: When it has found that a query was dropped, by name and version.
        self._dropped_at: dict[tuple[str, int], float] = {}
        #: The versions of dropped queries whose users got their last publication.
        self._ended: dict[str, int] = {}

    def run(self) -> Task:
        """Take a term, and look after the queries of the catalog."""
        place, looks = self._place, 0
        while not place.term:
            try:
                place.term = yield from self._begin()
            except ServerFailed:
                yield Sleep(place.machine.now + LOOK_S)
        while True:
            try:
                yield from self._check_term()
                yield from self._follow_catalog()
                if looks % TIDY_LOOKS == 0:
                    yield from self._tidy()
                looks += 1
            except ServerFailed:
                pass
            yield Sleep(place.machine.now + LOOK_S)

    def _begin(self) -> Asking:
        """Return a term that no other data cluster has, once every server has it."""
        steps, reply = take_term(self._place.servers, self._place.owner), None
        while True:
            try:
                server, command = steps.send(reply)
            except StopIteration as end:
                return end.value
            reply = yield from ask(server, *command)

    def _check_term(self) -> Asking:
        for id_ in self._place.servers:
            taken, is_own = parse_claim((yield from ask(id_, *claim_command(self._place.term, self._place.owner))))
            if not is_own:
                raise ProcessEnds(f"another data cluster has term {taken}")

    def _follow_catalog(self) -> Asking:
        """Stop, end and start queries, as the catalog says."""
        for id_ in self._place.servers:
            stored = parse_entries((yield from ask(id_, b"HGETALL", QUERIES_KEY)))
            self._entries = merged([self._entries, stored])
        catalog, machine = catalog_of({}, self._entries), self._place.machine
        for name, (query, task) in [*self._running.items()]:
            if catalog.queries.get(name) != query:
                machine.cancel(task)
                del self._running[name]
        for name, version in catalog.dropped_queries.items():
            found_at = self._dropped_at.setdefault((name, version), machine.now)
            if self._ended.get(name) != version and machine.now >= found_at + BROKERS_KNOW_S:
                yield from self._model(StandingQuery(name, "", "", 0, retained_min=1000)).end_dropped(version)
                self._ended[name] = version
        for name, query in catalog.queries.items():
            if name not in self._running:
                task = self._model(query).run()
                self._running[name] = query, task
                machine.add(task)

    def _model(self, query: StandingQuery) -> ModelQuery:
        return ModelQuery(self._place, query, self._periods[query.name], self._folders[query.name])

    def _tidy(self) -> Asking:
        place, catalog = self._place, catalog_of({}, self._entries)
        for id_ in place.servers:
            for dataset in place.datasets.values():
                yield from ask(id_, *put_command(DATASETS_KEY, dataset.name, entry_of(dataset)))
            for query in catalog.queries.values():
                yield from ask(id_, *put_command(QUERIES_KEY, query.name, entry_of(query)))
        for name in self._entries:
            yield from expire_interests(place.servers, name)


class DataClusterApp:
    """A data cluster that can be killed and started again; its folders outlive it.

    Args:
        cluster: the Dynamoth cluster on which it publishes.
        urls: of the log servers, by id.
        durable: whether these lose nothing when they restart.
        datasets: all that queries need.
        queries: what it executes, and the seconds between ticks of each.
        witness: the audit.
        folders: one for each query; a process elsewhere may have had them before.

    """

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        urls: Mapping[str, str],
        durable: bool,
        datasets: Sequence[Dataset],
        queries: Mapping[StandingQuery, float],
        witness: Witness,
    ) -> None:
        self.name = name
        self._cluster = cluster
        self._world = cluster.world
        self._urls = urls
        self._durable = durable
        self._datasets = {each.name: each for each in datasets}
        self._queries = queries
        self._witness = witness
        self.folders = {query.name: Folder() for query in queries}
        self._reader: Process | None = None
        self._publisher: Process | None = None
        self._process: Process | None = None
        self._place: Place | None = None
        #: How often it was started: messages of a former life may still be answered.
        self._life = 0
        #: Messages that are not published yet, by the number of their ``PublishResults``.
        self._unpublished: dict[int, int] = {}
        #: Why it has ended by itself, last.
        self.ended = ""

    @property
    def is_running(self) -> bool:
        """Whether it runs, or begins to."""
        return self._process is not None or self._reader is not None

    @property
    def processes(self) -> list[Process]:
        """Everything that runs now."""
        every = (self._reader, self._publisher, self._process)
        return [process for process in every if process is not None]

    @property
    def term(self) -> int:
        """Its term; 0 before it has one."""
        return 0 if self._place is None or self.machine is None else self._place.term

    # Life.

    def start(self) -> None:
        """Begin by reading the plan."""
        assert not self.is_running, f"{self.name} runs already"
        self._life += 1
        url = self._world.random.choice([server.url for server in self._cluster.servers.values()])
        self._reader = self._new_process(".reader", lambda _: HeaderReader(url), self._begin)
        self._reader.start()

    def _new_process(self, suffix: str, make: Callable[[int], Any], act: Callable[[Any], None]) -> Process:
        return Process(self._world, self._cluster.network, self.name + suffix, make, act)

    def _begin(self, action: HeaderRead) -> None:
        assert self._reader is not None
        reader, self._reader = self._reader, None
        reader.crash("has read the plan")
        options = self._cluster.options.client
        plan = LocalPlan(action.plan, options.entry_idle_s)
        self._unpublished.clear()
        self._publisher = self._new_process(
            ".p", lambda incarnation: PublisherMachine(incarnation, plan, options.publisher), self._on_publisher
        )
        self._process = self._new_process("", self._make_machine, self._act)
        self._publisher.start()
        self._process.start()

    def _make_machine(self, _incarnation: int) -> TaskMachine:
        machine = TaskMachine(self._urls, TIMEOUT_S)
        self._place = place = Place(
            machine,
            tuple(self._urls),
            self._durable,
            self._witness,
            partial(self._world.random.getrandbits, 64),
            f"{self.name}/{self._life}",
            datasets=self._datasets,
        )
        machine.add(Program(place, self._queries, self.folders).run())
        return machine

    def kill(self, reason: str = "is killed") -> None:
        """End at once."""
        for process in self.processes:
            process.crash(reason)
        self._reader = self._publisher = self._process = None

    @property
    def machine(self) -> TaskMachine | None:
        """The machine that runs its tasks; None while it does not run."""
        machine = None if self._process is None else self._process.machine
        assert machine is None or isinstance(machine, TaskMachine)
        return machine

    def kill_after(self, commands: int, *, before: bool) -> None:
        """Kill it at the command that is this many away, before or after it is sent."""
        if self.machine is not None:
            self.machine.commands_left, self.machine.dies_before = commands, before

    def pause(self, duration_s: float) -> None:
        """Let it hang for a time."""
        for process in self.processes:
            process.pause(duration_s)

    # Its tasks.

    def _act(self, action: Any) -> None:
        match action:
            case Die():
                self.kill()
            case Ended(reason):
                self.ended = reason
                self.kill(f"ends: {reason}")
            case PublishResults(messages, number):
                self._publish(messages, number)
            case _:
                raise AssertionError(f"not an action of a data cluster: {action!r}")

    def _publish(self, messages: Sequence[tuple[bytes, bytes]], number: int) -> None:
        assert self._publisher is not None and self._process is not None
        if not messages:
            self._process.handle(ResultsPublished(number))
            return
        self._unpublished[number] = len(messages)
        for channel, payload in messages:
            self._publisher.handle(Publish((self._life, number), channel, payload))

    def _on_publisher(self, action: Any) -> None:
        """Note that messages are published, or could not be: brokers find those in the log."""
        match action:
            case PublishedAll(tokens, _):
                done: list[Any] = list(tokens)
            case Published(token, _) | PublishFailed(token, _):
                done = [token]
            case _:
                raise AssertionError(f"not an action of a publisher: {action!r}")
        for life, number in done:
            if life != self._life or self._process is None:
                continue
            self._unpublished[number] -= 1
            if not self._unpublished[number]:
                del self._unpublished[number]
                self._process.handle(ResultsPublished(number))
