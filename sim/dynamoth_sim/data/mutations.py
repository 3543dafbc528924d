"""Standing queries with one remedy switched off, and the scripts and random worlds that must fail then."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import count
from typing import Any

import dynamoth.data.progress
import dynamoth.data.records
import dynamoth.data.registrations
import dynamoth.data.terms
import dynamoth_broker.records
from dynamoth.data.progress import (
    Checkpoint,
    Continuation,
    Progress,
    Window,
    WindowEnd,
    continuation,
    parse_progress,
    progress_key,
    query_server,
    store_progress_command,
)
from dynamoth.data.records import append_records_command
from dynamoth.data.terms import claim_command
from dynamoth.edge.log import append_many_command
from dynamoth_broker.definitions import Definitions
from dynamoth_broker.queries import Queries
from dynamoth_broker.records import Outcome, Records
from dynamoth_sim.data import cluster as model_cluster
from dynamoth_sim.data import query as model_query
from dynamoth_sim.data.cluster import Program
from dynamoth_sim.data.query import Asking, ModelQuery
from dynamoth_sim.data.tasks import ask
from dynamoth_sim.mutations.mutation import Check, no_actions, nothing, replaced, returning

SAME_TERM = 1_000_000

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
    return replaced(Queries, on_log_up=no_actions, _on_log_lost=nothing)


def interests_without_users_count() -> AbstractContextManager[None]:
    """A broker takes interests without users for registered, though their log server may have lost them."""
    found, on_log_up = Queries._found, Queries.on_log_up

    def go_on(self: Queries, subscription: Any, query: Any, now: float) -> list[Any]:
        renew_at, _ = self._renew_at.get(subscription.interest.id, (0.0, 0.0))
        if now >= renew_at:
            return found(self, subscription, query, now)
        subscription.awaits_registration = False
        return self._delivery.begin(subscription, now)

    def keep(self: Queries, server: str, now: float) -> list[Any]:
        before = dict(self._renew_at)
        actions = on_log_up(self, server, now)
        self._renew_at = {**before, **self._renew_at}
        return actions

    return replaced(Queries, _found=go_on, on_log_up=keep)


def lost_logs_tell_nothing_of_interests() -> AbstractContextManager[None]:
    """A broker that finds a log lost takes its interest for registered."""
    return replaced(Queries, _on_log_lost=nothing)


def one_server_knows_definitions() -> AbstractContextManager[None]:
    """A broker takes the answer of any log server for that of all."""
    replied = Definitions._replied

    def believe(self: Definitions, place: Any, known: Any, reply: Any, now: float) -> Sequence[Any]:
        if known.unanswered == 1 and (known.answers or reply is not None):
            known.answers = len(self._ids) - (reply is not None)
        return replied(self, place, known, reply, now)

    return replaced(Definitions, _replied=believe)


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


def offsets_begin_with_seconds() -> AbstractContextManager[None]:
    """Offsets of a new stream begin with the second of the server's clock."""
    evaluate = dynamoth.data.records.evaluate

    def whole_seconds(words: Sequence[bytes], execute: Any) -> Any:
        return evaluate(words, lambda *words: _without_fraction(execute(*words), words))

    return replaced(dynamoth.data.records, evaluate=whole_seconds)


def _without_fraction(reply: Any, words: Sequence[bytes]) -> Any:
    return [reply[0], b"0"] if words[0] == b"TIME" else reply


# The data cluster.


def interests_of_the_tick() -> AbstractContextManager[None]:
    """An execution is about the interests that were registered before its tick."""

    def seal(self: ModelQuery, tick_ms: int, before: Any) -> Asking:
        ends = yield from self._ends(before)
        end: WindowEnd = {"tick_ms": tick_ms, "sealed_ms": tick_ms, "offsets": ends, "static": {}}
        self._place.witness.sealed(self._query.name, end, self._place.machine.now)
        return end

    return replaced(ModelQuery, _seal=seal)


def sealed_before_it_ends() -> AbstractContextManager[None]:
    """A window is sealed first, and then the ends of partitions are read."""

    def seal(self: ModelQuery, tick_ms: int, before: Any) -> Asking:
        sealed_ms = yield from self._now_ms()
        ends = yield from self._ends(before)
        end: WindowEnd = {"tick_ms": tick_ms, "sealed_ms": sealed_ms, "offsets": ends, "static": {}}
        self._place.witness.sealed(self._query.name, end, self._place.machine.now)
        return end

    return replaced(ModelQuery, _seal=seal)


def executions_are_not_numbered() -> AbstractContextManager[None]:
    """Result sets are appended whatever execution a log has."""
    numbers = count(1)

    def append(publications: Any, run_id: str, options: Any, term: int, execution: int, fence: bytes) -> Any:
        return append_many_command(publications, run_id, options, term, 1000 * execution + next(numbers), fence)

    return replaced(model_query, append_many_command=append)


def progress_after_publishing() -> AbstractContextManager[None]:
    """The window of an execution is stored when its result sets are published."""

    def execute(self: ModelQuery, execution: int, window: Window) -> Asking:
        if self._is_done(execution):
            return
        yield from self._publish_results(execution, window)
        yield from self._store_progress(Progress(execution, window, is_done=False))
        yield from self._store_progress(Progress(execution, window, is_done=True))
        self._place.witness.executed(self._query.name, execution, self._place.machine.now)

    def begin_window(self: ModelQuery, execution: int, window: Window) -> Asking:
        self._folder.write_end(execution - self._base - 1, window.end)
        yield from ()

    return replaced(ModelQuery, _execute=execute, _begin_window=begin_window)


def windows_are_those_of_the_folder() -> AbstractContextManager[None]:
    """A window is written to the checkpoint first, and each window begins where the checkpoint says."""

    def stream(self: ModelQuery) -> Asking:
        yield from self._prepare()
        execution, folder = self._folder.committed + 1, self._folder
        while True:
            start = folder.end(execution - 1)
            end = folder.ends.get(execution) or (yield from self._next_end(start))
            folder.ends[execution] = end
            yield from self._begin_window(execution, Window(start, end))
            yield from self._execute(execution, Window(start, end))
            folder.committed, execution = execution, execution + 1

    return replaced(ModelQuery, _stream=stream)


@contextmanager
def terms_are_not_checked() -> Generator[None]:
    """All data clusters have the same term: a former one goes on beside the newer one."""

    def look_away(self: Program) -> Asking:
        yield from ()

    def store(query: str, progress: Progress, term: int, *, follows: bool) -> Any:
        return store_progress_command(query, progress, SAME_TERM, follows=follows)

    def append(publications: Any, run_id: str, options: Any, term: int, execution: int, fence: bytes) -> Any:
        return append_many_command(publications, run_id, options, SAME_TERM, execution, fence)

    look = replaced(Program, _check_term=look_away)
    with look, replaced(model_query, store_progress_command=store, append_many_command=append):
        yield


def logs_have_terms_alone() -> AbstractContextManager[None]:
    """A log refuses a former data cluster only when the newer one has written it."""

    def append(publications: Any, run_id: str, options: Any, term: int, execution: int, _fence: bytes) -> Any:
        return append_many_command(publications, run_id, options, term, execution)

    return replaced(model_query, append_many_command=append)


@contextmanager
def terms_have_no_owners() -> Generator[None]:
    """A term belongs to all data clusters that claim it."""

    def claim(term: int, _owner: str) -> Any:
        return claim_command(term, "everybody")

    with replaced(dynamoth.data.terms, claim_command=claim), replaced(model_cluster, claim_command=claim):
        yield


def checkpoints_always_fit() -> AbstractContextManager[None]:
    """A data cluster goes on with the checkpoint of its disk, whatever the log server says."""
    return replaced(Checkpoint, fits=returning(True))


def checkpoints_are_in_order() -> AbstractContextManager[None]:
    """A data cluster takes every window of its disk for its own."""
    return replaced(Checkpoint, is_in_order=True)


def unfinished_executions_are_skipped() -> AbstractContextManager[None]:
    """A new checkpoint begins behind the last execution, though that may be published in part."""

    def skip(progress: Progress) -> Any:
        return continuation(replace(progress, is_done=True))

    return replaced(dynamoth.data.progress, continuation=skip)


def progress_is_not_read() -> AbstractContextManager[None]:
    """A data cluster without a checkpoint begins behind the records that there are."""

    def begin_now(_: Progress) -> Continuation:
        return Continuation(0)

    return replaced(dynamoth.data.progress, continuation=begin_now)


def progress_of_one_server() -> AbstractContextManager[None]:
    """A data cluster reads the progress of a query at one log server only, which may have an older copy."""

    def stored(self: ModelQuery) -> Asking:
        name = self._query.name
        server = query_server(name, self._place.servers)
        return parse_progress((yield from ask(server, b"GET", progress_key(name))))

    return replaced(ModelQuery, _stored_progress=stored)


def progress_need_not_follow() -> AbstractContextManager[None]:
    """A log server that was restored from an older copy takes any progress."""

    def store(query: str, progress: Progress, term: int, *, follows: bool) -> Any:
        return store_progress_command(query, progress, term)

    return replaced(model_query, store_progress_command=store)


def ends_are_not_finished() -> AbstractContextManager[None]:
    """A query that is registered again goes on, though not all users know that it was dropped."""
    publish_dropped = ModelQuery._publish_dropped

    def publish(self: ModelQuery, progress: Progress) -> Asking:
        if self._query.sql:  # it is registered
            return
        yield from publish_dropped(self, progress)

    return replaced(ModelQuery, _publish_dropped=publish)


def drops_have_no_versions() -> AbstractContextManager[None]:
    """A query whose end was published once is not ended again."""

    def parse(reply: Any) -> Progress | None:
        progress = parse_progress(reply)
        return progress and replace(progress, dropped_version=SAME_TERM * progress.is_dropped)

    return replaced(model_query, parse_progress=parse)


def begins_are_not_read() -> AbstractContextManager[None]:
    """A dropped query begins behind the records that there are when the data cluster starts it again."""

    def begin(self: ModelQuery) -> Asking:
        yield from ()

    return replaced(ModelQuery, _begin_again=begin)


def ends_before_brokers_know() -> AbstractContextManager[None]:
    """A dropped query is ended at once."""
    return replaced(model_cluster, BROKERS_KNOW_S=0.0)


DATA_CHECKS: tuple[Check, ...] = (
    Check("data-registered-before-confirmed", confirmed_before_registered, "D1"),
    Check("data-registered-in-a-window", sealed_before_it_ends, "D1"),
    Check("data-registered-in-a-window", interests_of_the_tick, "D1"),
    Check("data-comes-back-late", logs_outlive_interests, "D1"),
    Check("data-stays-registered", interests_are_not_renewed, "D1"),
    Check("data-definition-is-elsewhere", one_server_knows_definitions, "B1"),
    Check("data-log-server-loses-interests", lost_interests_are_not_registered, "D1"),
    Check("data-log-server-loses-interests-without-users", interests_without_users_count, "D1"),
    Check("data-keys-are-deleted-without-users", interests_without_users_count, "D1"),
    Check("data-keys-are-deleted-twice", offsets_begin_with_seconds, "expected"),
    Check("data-keys-are-deleted-twice", lost_logs_tell_nothing_of_interests, "expected"),
    Check("data-durable-server-is-restored", progress_need_not_follow, "expected"),
    Check("data-answer-is-lost", records_come_twice, "D2"),
    Check("data-record-is-lost", acknowledged_before_stored, "D1"),
    Check("data-dies-after-appending", executions_are_not_numbered, "D2"),
    Check("data-loses-its-disk-after-appending", progress_after_publishing, "D3"),
    Check("data-loses-its-disk-after-appending", progress_is_not_read, "D4"),
    Check("data-hangs-while-appending", terms_are_not_checked, "expected"),
    Check("data-hangs-while-appending", unfinished_executions_are_skipped, "D1"),
    Check("data-appends-when-an-interest-is-new", logs_have_terms_alone, "D5"),
    Check("data-goes-on-with-the-same-folder", windows_are_those_of_the_folder, "expected"),
    Check("data-comes-back-with-an-old-disk", checkpoints_always_fit, "D4"),
    Check("data-writes-to-the-checkpoint-of-its-successor", checkpoints_are_in_order, "D2"),
    Check("data-two-begin-at-once", terms_have_no_owners, "expected"),
    Check("data-is-dropped", begins_are_not_read, "D4"),
    Check("data-is-dropped-twice", drops_have_no_versions, "expected"),
    Check("data-is-registered-while-it-ends", ends_are_not_finished, "expected"),
    Check("data-subscribes-while-brokers-believe", ends_before_brokers_know, "expected"),
)
"""Every mutation of standing queries, with the script that must fail under it."""

RANDOM_CHECKS: tuple[Check, ...] = (
    Check("data-crashes", progress_after_publishing, "D3"),
    Check("data-crashes", terms_are_not_checked, "D3"),
    Check("data-crashes", unfinished_executions_are_skipped, "D1"),
    Check("data-durable", checkpoints_always_fit, "D4"),
    Check("data-logs", progress_of_one_server, "D4"),
    Check("data-drops", begins_are_not_read, "D4"),
)
"""Mutations that random worlds find, too."""
