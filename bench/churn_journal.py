"""The journals of the processes of ``bench.churn``, and the verdict on all of them.

Theory of operation
-------------------
Each process writes its events to a file of its own, with times of the machine's one monotonic clock. After the run
the files are merged by time and shown to the checker that judges the simulator (``dynamoth_sim.audit``). So the
checker knows what began before what, also across processes: a publish is noted before it begins, a delivery after it.

Gap events name a publisher by its client's 64-bit id, which only envelopes show. The observers at the servers note it
for each message that they see, and so a gap event covers messages of the publisher that it names and no others.
"""

from __future__ import annotations

import heapq
import marshal
import time
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

from dynamoth_sim.audit import Audit, Totals, Violation

PUBLISHED = "published"
PUBLISH_ENDED = "publish ended"
CONFIRMED = "confirmed"
ENDING = "ending"
ENDED = "ended"
DIED = "died"
KILLED = "process of clients killed"
DELIVERED = "delivered"
GAP = "gap"
SEEN = "seen"
CALM = "calm"
CHANGE = "change"
FAULT = "fault"
LAG = "event loop is late"
ERROR = "error"

BATCH = 500
"""Events are written together: each write is a call of the system. One at a time where the process may be killed."""

STORIES_MAX = 10
"""Violations that are described with all that is known of their message."""
STORY_S = 3.0
"""A story covers this time before and after its message."""
STORY_LINES_MAX = 60

Event = tuple[Any, ...]
"""Time, kind, and what belongs to the kind."""


def tag(publisher: str, number: int) -> bytes:
    """Return a payload that names its publisher and its number."""
    return b"churn %b %d " % (publisher.encode(), number)


def read_tag(payload: bytes) -> tuple[str, int] | None:
    """Return publisher and number of a payload of ours; None for others."""
    parts = payload.split(b" ", 3)
    if len(parts) != 4 or parts[0] != b"churn":
        return None
    return parts[1].decode(), int(parts[2])


def client_name(process: int, number: int) -> str:
    """Return the name of a client, by the number of its process and its own number there."""
    return f"{process}.{number}"


def process_of(client: str) -> int:
    """Return the number of the process of a client; -1 for names that ``client_name`` did not make."""
    process, _, number = client.partition(".")
    return int(process) if number else -1


class Journal:
    """The events of one process, in order of time."""

    def __init__(self, file: Path, batch: int = BATCH) -> None:
        self._file = file.open("wb", buffering=0)
        self._batch = batch
        self._events: list[Event] = []

    def note(self, kind: str, *details: Any) -> None:
        """Write an event down, at the present time."""
        self._events.append((time.monotonic(), kind, *details))
        if len(self._events) >= self._batch:
            self._flush()

    def close(self) -> None:
        """Write what is left."""
        self._flush()
        self._file.close()

    def _flush(self) -> None:
        self._file.write(marshal.dumps(self._events))
        self._events = []


def read(file: Path) -> Generator[Event]:
    """Yield the events of a journal. One whose process was killed may end in the middle."""
    with file.open("rb") as journal:
        while True:
            try:
                events: list[Event] = marshal.load(journal)
            except (EOFError, ValueError, TypeError):
                return
            yield from events


def read_all(files: Iterable[Path]) -> Iterator[Event]:
    """Yield the events of several journals in the order of time."""
    return heapq.merge(*map(read, files), key=itemgetter(0))


@dataclass
class Judgement:
    """The verdict on a run."""

    totals: Totals
    violations: int
    #: The first of them, each with what happened to its message.
    stories: list[str]
    #: Gap events by their reason, numbers and names left out.
    gap_reasons: Counter[str] = field(default_factory=Counter[str])
    #: Why calls of clients failed.
    errors: Counter[str] = field(default_factory=Counter[str])
    publish_s_max: float = 0.0
    client_lag_s_max: float = 0.0


class _Judge:
    """Shows events to the audit."""

    def __init__(self, names: Mapping[int, str], publish_s_max: float) -> None:
        self._names = names
        self._began: dict[tuple[str, bytes, int], float] = {}
        #: The names of clients, by the number of their process.
        self._clients: dict[int, set[str]] = {}
        self._audit = Audit(losses_allowed=True, publish_s_max=publish_s_max)
        self._gap_reasons: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self._slowest_s = 0.0
        self._lag_s_max = 0.0

    def show(self, event: Event) -> None:
        audit, (at, kind, *details) = self._audit, event
        if kind == DELIVERED:
            subscriber, channel, publisher, number = details
            audit.delivered(subscriber, channel, publisher, number, at)
        elif kind == PUBLISHED:
            publisher, channel, number = details
            self._know(publisher)
            audit.published(publisher, channel, number, at)
            self._began[publisher, channel, number] = at
        elif kind == PUBLISH_ENDED:
            self._publish_ended(*details, at=at)
        elif kind == GAP:
            self._gap(*details, at=at)
        elif kind == CONFIRMED:
            subscriber, channel = details
            self._know(subscriber)
            audit.confirmed(subscriber, channel, at)
        elif kind == ENDING:
            audit.ending(*details)
        elif kind == ENDED:
            subscriber, channel = details
            audit.ended(subscriber, channel, at)
        elif kind == DIED:
            [subscriber] = details
            audit.subscriber_died(subscriber, at)
        elif kind == KILLED:
            [process] = details
            self._killed(process, at)
        elif kind == CALM:
            audit.calm()
        elif kind == LAG:
            self._lag_s_max = max(self._lag_s_max, details[1])
        elif kind == ERROR:
            self._errors[details[0]] += 1

    def _know(self, client: str) -> None:
        self._clients.setdefault(process_of(client), set()).add(client)

    def _killed(self, process: int, at: float) -> None:
        """Handle the end of a process: its clients are gone, and what they had not finished is due to nobody."""
        for name in self._clients.pop(process, ()):
            self._audit.publisher_died(name, at)
            self._audit.subscriber_died(name, at)

    def _publish_ended(self, publisher: str, channel: bytes, number: int, why: str | None, *, at: float) -> None:
        self._audit.publish_ended(publisher, channel, number, at, failed=why is not None)
        self._slowest_s = max(self._slowest_s, at - self._began.pop((publisher, channel, number)))
        if why is not None:
            self._errors[f"publish: {why}"] += 1

    def _gap(
        self, subscriber: str, channel: bytes, publisher: int | None, count: int | None, reason: str, *, at: float
    ) -> None:
        name = None if publisher is None else self._names.get(publisher, publisher)
        self._audit.gap(subscriber, channel, name, count, at, reason)
        self._gap_reasons[_without_numbers(reason)] += 1

    def judge(self) -> tuple[list[Violation], Judgement]:
        """Judge what was shown; return the violations, and all else."""
        audit = self._audit
        violations = audit.finish(time.monotonic())
        return violations, Judgement(
            audit.totals,
            audit.violations_count,
            [],
            self._gap_reasons,
            self._errors,
            self._slowest_s,
            self._lag_s_max,
        )


def judge(files: list[Path], publish_s_max: float) -> Judgement:
    """Judge a run by its journals."""
    names = {event[2]: event[3] for event in read_all(files) if event[1] == SEEN}
    judging = _Judge(names, publish_s_max)
    for event in read_all(files):
        judging.show(event)
    violations, judgement = judging.judge()
    judgement.stories = [_story(violation, files) for violation in violations[:STORIES_MAX]]
    return judgement


def _story(violation: Violation, files: list[Path]) -> str:
    """Tell what happened to the message, where it was seen, and what happened to the daemons meanwhile."""
    began = next(
        (
            at
            for at, kind, *details in read_all(files)
            if kind == PUBLISHED and details == [violation.publisher, violation.channel, violation.number]
        ),
        violation.at,
    )
    lines = [f"  published at {began:.3f}"]
    for at, kind, *details in read_all(files):
        if at > max(began, violation.at) + STORY_S:
            break
        if at >= began - STORY_S and _concerns(violation, kind, details):
            lines.append(f"  {at - began:+8.3f} {kind} {' '.join(map(str, details))}")
    left_out = len(lines) - STORY_LINES_MAX
    return "\n".join([str(violation), *lines[:STORY_LINES_MAX], *([f"  ... {left_out} more"] if left_out > 0 else [])])


def _concerns(violation: Violation, kind: str, details: list[Any]) -> bool:
    if kind in (FAULT, CALM, LAG, KILLED):
        return True
    if kind in (SEEN, CHANGE):
        return details[-1] == violation.channel and (kind == CHANGE or details[1] == violation.publisher)
    if violation.channel not in details:
        return False
    if kind in (PUBLISHED, PUBLISH_ENDED):
        return violation.publisher in details
    if kind == DELIVERED:
        return violation.publisher in details and violation.subscriber in details
    return violation.subscriber in details


def _without_numbers(reason: str) -> str:
    """Return a reason by which gap events can be counted."""
    return " ".join("N" if any(letter.isdigit() for letter in word) else word for word in reason.split())
