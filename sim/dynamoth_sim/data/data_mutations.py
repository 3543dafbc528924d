"""Standing queries with one remedy switched off, and the random worlds that must find it."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import dynamoth.data.executions
import dynamoth.data.registrations
import dynamoth_broker.records
from dynamoth.data.executions import Checkpoint, Progress, Window, continuation
from dynamoth.data.records import append_records_command
from dynamoth.edge.log import append_many_command
from dynamoth_broker.queries import Queries
from dynamoth_broker.records import Outcome, Records
from dynamoth_sim.data import model_query
from dynamoth_sim.data.model_cluster import Program
from dynamoth_sim.data.model_query import Asking, ModelQuery
from dynamoth_sim.mutations.mutation import Mutation, no_actions, replaced, returning

# Mutations replace private methods.
# pyright: reportPrivateUsage=false


# Brokers.


def confirmed_before_registered() -> AbstractContextManager[None]:
    """A broker confirms a subscription while its interest is being registered."""
    begin = Queries.begin

    def go_on(self: Queries, subscription: Any, now: float) -> list[Any]:
        actions = begin(self, subscription, now)
        subscription.awaits_registration = False
        return [*actions, *self._delivery.begin(subscription, now)]

    return replaced(Queries, begin=go_on)


def interests_are_not_renewed() -> AbstractContextManager[None]:
    """A broker lets the interests of its users end."""
    return replaced(Queries, _renew=no_actions)


def lost_interests_are_not_registered() -> AbstractContextManager[None]:
    """A broker does not register again what a log server has lost."""
    return replaced(Queries, on_log_up=no_actions)


def records_come_twice() -> AbstractContextManager[None]:
    """A log server does not know the ids of records."""

    def append(dataset: Any, partition: int, records: Sequence[tuple[bytes, str]], run_id: str) -> Any:
        return append_records_command(replace(dataset, id=""), partition, records, run_id)

    return replaced(dynamoth_broker.records, append_records_command=append)


def acknowledged_before_stored() -> AbstractContextManager[None]:
    """A broker acknowledges a record before it sends it to the log server."""
    found = Records._found

    def acknowledge(self: Records, record: bytes, subject: str, on_outcome: Any, dataset: Any, now: float) -> Any:
        actions = on_outcome(Outcome("stored"), now)
        return [*actions, *found(self, record, subject, no_actions, dataset, now)]

    return replaced(Records, _found=acknowledge)


# Log servers.


def logs_outlive_interests() -> AbstractContextManager[None]:
    """A log stays when its interest ends: who comes back finds no gap."""
    evaluate = dynamoth.data.registrations.evaluate

    def keep(words: Sequence[bytes], execute: Any) -> Any:
        return evaluate(words, lambda *words: 0 if words[0] == b"DEL" else execute(*words))

    return replaced(dynamoth.data.registrations, evaluate=keep)


# The data cluster.


def interests_of_the_tick() -> AbstractContextManager[None]:
    """An execution is about the interests that were registered before its tick."""

    def seal(self: ModelQuery, tick_ms: int) -> Asking:
        end = {"tick_ms": tick_ms, "sealed_ms": tick_ms, "offsets": (yield from self._tips()), "static": {}}
        self._place.witness.sealed(self._query.name, end, self._place.machine.now)
        return end

    return replaced(ModelQuery, _seal=seal)


def sealed_before_it_ends() -> AbstractContextManager[None]:
    """A window is sealed first, and then the ends of partitions are read."""

    def seal(self: ModelQuery, tick_ms: int) -> Asking:
        sealed_ms = yield from self._now_ms()
        end = {"tick_ms": tick_ms, "sealed_ms": sealed_ms, "offsets": (yield from self._tips()), "static": {}}
        self._place.witness.sealed(self._query.name, end, self._place.machine.now)
        return end

    return replaced(ModelQuery, _seal=seal)


def executions_are_not_numbered() -> AbstractContextManager[None]:
    """Result sets are appended whatever execution a log has."""
    numbers = count(1)

    def append(publications: Any, run_id: str, options: Any, term: int, execution: int) -> Any:
        return append_many_command(publications, run_id, options, term, 1000 * execution + next(numbers))

    return replaced(model_query, append_many_command=append)


def progress_after_publishing() -> AbstractContextManager[None]:
    """The window of an execution is stored when its result sets are published."""

    def execute(self: ModelQuery, execution: int, window: Window) -> Asking:
        before = self._progress
        if before is not None and before.execution >= execution and before.is_done:
            return
        yield from self._publish_results(execution, window)
        yield from self._store_progress(Progress(execution, window, is_done=False))
        yield from self._store_progress(Progress(execution, window, is_done=True))
        self._place.witness.executed(self._query.name, execution, self._place.machine.now)

    return replaced(ModelQuery, _execute=execute)


@contextmanager
def terms_are_not_checked() -> Generator[None]:
    """A former data cluster goes on beside the newer one."""

    def begin(self: Program) -> Asking:
        yield from Program_begin(self)
        return 1

    def check(self: Program) -> Asking:
        return
        yield

    Program_begin = Program._begin
    with ExitStack() as stack:
        stack.enter_context(replaced(Program, _begin=begin, _check_term=check))
        for module in (model_query,):
            store, append = module.store_progress_command, module.append_many_command
            stack.enter_context(
                replaced(
                    module,
                    store_progress_command=lambda query, progress, term: store(query, progress, 10**9),
                    append_many_command=lambda new, run, options, term, number: append(
                        new, run, options, 10**9, number
                    ),
                )
            )
        yield


def checkpoints_always_fit() -> AbstractContextManager[None]:
    """A data cluster goes on with the checkpoint of its disk, whatever the log server says."""
    return replaced(Checkpoint, fits=returning(True))


def unfinished_executions_are_skipped() -> AbstractContextManager[None]:
    """A new checkpoint begins behind the last execution, though that may be published in part."""

    def skip(progress: Progress | None) -> Any:
        return continuation(None if progress is None else replace(progress, is_done=True))

    return replaced(dynamoth.data.executions, continuation=skip)


def progress_is_not_read() -> AbstractContextManager[None]:
    """A data cluster without a checkpoint begins behind the records that there are."""
    return replaced(dynamoth.data.executions, continuation=lambda progress: continuation(None))


@dataclass(frozen=True, slots=True)
class DataCheck:
    """A mutation, the profile that finds it, and a guarantee that is broken then."""

    profile: str
    mutation: Mutation
    broken: str


DATA_CHECKS: tuple[DataCheck, ...] = (
    DataCheck("data-calm", confirmed_before_registered, "D1"),
    DataCheck("data-calm", interests_are_not_renewed, "D1"),
    DataCheck("data-logs", lost_interests_are_not_registered, "D1"),
    DataCheck("data-crashes", records_come_twice, "D2"),
    DataCheck("data-crashes", acknowledged_before_stored, "D1"),
    DataCheck("data-crashes", logs_outlive_interests, "D1"),
    DataCheck("data-calm", interests_of_the_tick, "D1"),
    DataCheck("data-calm", sealed_before_it_ends, "D1"),
    DataCheck("data-crashes", executions_are_not_numbered, "D2"),
    DataCheck("data-crashes", progress_after_publishing, "D3"),
    DataCheck("data-crashes", terms_are_not_checked, "D3"),
    DataCheck("data-crashes", checkpoints_always_fit, "D3"),
    DataCheck("data-crashes", unfinished_executions_are_skipped, "D1"),
    DataCheck("data-crashes", progress_is_not_read, "D4"),
)
"""Every mutation of standing queries."""
