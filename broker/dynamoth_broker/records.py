"""Records that users publish: each belongs to a dataset, and is stored before it is acknowledged.

The records of one event that go to the same partition are one command. A refused record goes to the dataset's dead
letters, and its user gets the reason. A dead letter that cannot be stored is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from dynamoth.data.datasets import DATASET_PREFIX, BadRecord, Dataset, dead_letter, dead_letters
from dynamoth.data.records import (
    RECORDS_PER_COMMAND_MAX,
    append_records_command,
    is_full,
    parse_appended_records,
    partition_name,
    partition_of,
    partition_server,
)
from dynamoth.edge.frames import Error, Published, PublishRequest
from dynamoth.edge.log import LogOptions
from dynamoth.errors import MalformedMessage
from dynamoth.machine.events import CommandPart, ErrorReply
from dynamoth.refusals import with_cure
from dynamoth_broker.definitions import UNAVAILABLE, Definitions
from dynamoth_broker.events import RETRY_MS, BrokerAction, Transmit
from dynamoth_broker.logs import Logs
from dynamoth_broker.sessions import Session

Code = Literal[
    "stored", "duplicate", "bad_record", "unknown_dataset", "dataset_full", "log_unavailable", "unknown_outcome"
]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a record; for one that is not stored, why."""

    code: Code
    reason: str = ""


OnOutcome = Callable[[Outcome, float], Sequence[BrokerAction]]

_UNKNOWN = Outcome("unknown_outcome", "the connection to the log server was lost: it may or may not be stored")
_NO_DATASET = Outcome(
    "unknown_dataset", "there is no such dataset, or it is static, or has dead letters: nobody publishes there"
)
_NO_DEFINITION = Outcome(
    "log_unavailable",
    "the definition of the dataset is not known: log servers do not answer, or it cannot be read; nothing is stored",
)
_DOWN = Outcome("log_unavailable", "the log server of this record does not answer: nothing is stored")


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A checked record that was not sent yet."""

    value: bytes
    id: str
    on_outcome: OnOutcome


class Records:
    """Stores the records of one broker's users. ``unix_offset`` is Unix time less the machine's time, in seconds."""

    def __init__(
        self,
        definitions: Definitions,
        logs: Logs,
        server_ids: Sequence[str],
        unix_offset: float,
        counters: Counter[str],
    ) -> None:
        """Begin; all arguments are shared with the owner."""
        self.definitions = definitions
        self._logs = logs
        self._ids = tuple(server_ids)
        self._unix_offset = unix_offset
        self._counters = counters
        self._turn = 0
        #: What the next flush sends, by dataset and partition.
        self._to_store: dict[tuple[Dataset, int], list[_Waiting]] = {}

    def publish(self, session: Session, request: PublishRequest, now: float) -> list[BrokerAction]:
        """Store a record that a user publishes on ``d:NAME``; the user gets the answer when the outcome is known."""
        name = request.channel.name.removeprefix(DATASET_PREFIX)
        connection, ref = session.connection, request.ref

        def answer(outcome: Outcome, now: float) -> Sequence[BrokerAction]:
            if outcome.code in ("stored", "duplicate"):
                return [Transmit(connection, Published(ref))]
            is_lasting = outcome.code in ("bad_record", "unknown_dataset")
            if is_lasting:
                return [Transmit(connection, Error(outcome.code, outcome.reason, ref=ref))]
            return [Transmit(connection, Error(outcome.code, outcome.reason, "later", RETRY_MS, ref))]

        return self.store(name, request.payload, session.grant.user, answer, now)

    def store(self, name: str, record: bytes, subject: str, on_outcome: OnOutcome, now: float) -> list[BrokerAction]:
        """Store a record of a user whose token has this subject.

        ``on_outcome`` gets what became of it: at once where it is refused, else when its log server has answered or is
        lost. The record is sent with the next ``flush``.
        """
        found = partial(self._found, record, subject, on_outcome)
        return self.definitions.dataset(name, found, now)

    def _found(
        self, record: bytes, subject: str, on_outcome: OnOutcome, dataset: Dataset | str | None, now: float
    ) -> Sequence[BrokerAction]:
        if dataset == UNAVAILABLE:
            self._counters["records_log_unavailable"] += 1
            return on_outcome(_NO_DEFINITION, now)
        if not isinstance(dataset, Dataset) or dataset.kind == "static":
            self._counters["records_without_dataset"] += 1
            return on_outcome(_NO_DATASET, now)
        unix = now + self._unix_offset
        try:
            value, place, id_ = dataset.normalize(record, unix, subject)
        except BadRecord as error:
            self._counters["records_refused"] += 1
            letter = dead_letter(record, str(error), f"user {subject}", unix)
            self._to_store.setdefault((dead_letters(dataset.name), 0), []).append(_Waiting(letter, "", self._on_letter))
            return on_outcome(Outcome("bad_record", str(error)), now)
        self._turn += 1
        partition = partition_of(dataset, place, self._turn)
        self._to_store.setdefault((dataset, partition), []).append(_Waiting(value, id_, on_outcome))
        return []

    def _on_letter(self, outcome: Outcome, now: float) -> Sequence[BrokerAction]:
        """Count a dead letter that is not stored; its user was answered before, and nobody sends it again."""
        if outcome.code != "stored":
            self._counters["dead_letters_lost"] += 1
        return []

    def flush(self, now: float) -> list[BrokerAction]:
        """Send the records of an event, those of each partition in commands of ``RECORDS_PER_COMMAND_MAX`` at most."""
        actions: list[BrokerAction] = []
        while self._to_store:
            (dataset, partition), waiting = self._to_store.popitem()
            server = partition_server(partition_name(dataset.stream, partition), self._ids)
            if not self._logs.is_up(server):
                actions += self._end(waiting, [_DOWN] * len(waiting), now)
                continue
            for begin in range(0, len(waiting), RECORDS_PER_COMMAND_MAX):
                part = waiting[begin : begin + RECORDS_PER_COMMAND_MAX]
                command = partial(_command, dataset, partition, part)
                actions += self._logs.request_at(server, command, partial(self._stored, server, part), now)
        return actions

    def _stored(self, server: str, waiting: Sequence[_Waiting], reply: Any, now: float) -> Sequence[BrokerAction]:
        outcomes = [_UNKNOWN] * len(waiting)
        if isinstance(reply, ErrorReply):
            text = str(reply)
            reason = f"log server {server}: {with_cure(text)}; nothing is stored"
            outcomes = [Outcome("dataset_full" if is_full(text) else "log_unavailable", reason)] * len(waiting)
        elif reply is not None:
            try:
                offsets = parse_appended_records(reply, len(waiting))
                outcomes = [Outcome("stored" if offset else "duplicate") for offset in offsets]
            except MalformedMessage:
                self._counters["malformed"] += 1
        return self._end(waiting, outcomes, now)

    def _end(self, waiting: Sequence[_Waiting], outcomes: Sequence[Outcome], now: float) -> Sequence[BrokerAction]:
        """Count what has become of records, and answer."""
        actions: list[BrokerAction] = []
        for each, outcome in zip(waiting, outcomes, strict=True):
            self._counters[f"records_{outcome.code}"] += 1
            actions += each.on_outcome(outcome, now)
        return actions


def _command(
    dataset: Dataset, partition: int, waiting: Sequence[_Waiting], run_id: str, new_epoch: int, options: LogOptions
) -> tuple[CommandPart, ...]:
    run = "" if options.durable else run_id
    return append_records_command(dataset, partition, [(each.value, each.id) for each in waiting], run)
