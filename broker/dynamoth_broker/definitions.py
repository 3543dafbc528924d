"""The definitions of datasets and queries, as a broker reads them from the catalog at the log servers.

A definition is read when it is needed, and believed for ``believed_s``. Whoever asks for one that is being read waits
for the same answer. The latest version of any server counts: a server that was away may have an older one. That there
is no definition is believed only if all servers say so: one that has lost its data knows nothing of those that others
have. So is an older version than the one that is known: then all of them have lost it, or were restored from copies.
A definition that this broker cannot read, as that of a newer version, is there: users are to try again later.

A name that no definition can have is not asked for: users choose it. Of names without a definition, the latest
``UNKNOWN_MAX`` are remembered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dynamoth.data.catalog import DATASETS_KEY, QUERIES_KEY, Entry, parse_entry
from dynamoth.data.datasets import DEAD_SUFFIX, NAME, Dataset, read_dataset
from dynamoth.data.queries import StandingQuery, read_query
from dynamoth.edge.log import LogOptions
from dynamoth.errors import ConfigError, MalformedMessage
from dynamoth.machine.events import CommandPart, ErrorReply
from dynamoth.protocol.wire import read_array, read_bytes
from dynamoth_broker.events import BrokerAction
from dynamoth_broker.logs import Logs

UNKNOWN_MAX = 1000
"""Names without a definition that are remembered: users who ask for them again cost no command."""

UNAVAILABLE = "unavailable"
"""In place of a definition: not all log servers have answered, or this broker cannot read it."""

Definition = Dataset | StandingQuery | str | None
"""A definition, or ``UNAVAILABLE``; None where the catalog has none of this name."""

OnDefinition = Callable[[Any, float], Sequence[BrokerAction]]
"""Gets a definition, as ``Definition`` says, and the time."""


_NOTHING = Entry(0, None)
"""In place of an entry that no server has."""


@dataclass(slots=True)
class _Known:
    """One name of the catalog."""

    definition: Definition = None
    #: When it was read; None: not yet.
    read_at: float | None = None
    version: int = 0
    #: Callbacks of the present reading, how many servers have not answered, and how many have.
    waiting: list[OnDefinition] = field(default_factory=list[OnDefinition])
    unanswered: int = 0
    answers: int = 0
    #: The latest entry of the present reading, and whether every answer so far could be read.
    latest: Entry = _NOTHING
    is_whole: bool = True


class Definitions:
    """The definitions that one broker has needed."""

    def __init__(self, server_ids: Sequence[str], logs: Logs, counters: Counter[str], believed_s: float) -> None:
        """Begin without any; ``logs`` and ``counters`` are shared with the owner."""
        self._ids = tuple(server_ids)
        self._believed_s = believed_s
        self._logs = logs
        self._counters = counters
        self._known: dict[tuple[bytes, str], _Known] = {}
        #: Those without a definition that are not being read, the oldest first.
        self._unknown: dict[tuple[bytes, str], None] = {}

    @property
    def size(self) -> int:
        """How many names are remembered or being read."""
        return len(self._known)

    def query(self, name: str, then: OnDefinition, now: float) -> list[BrokerAction]:
        """Have ``then`` get the definition of a query."""
        return self._find(QUERIES_KEY, name, then, now)

    def dataset(self, name: str, then: OnDefinition, now: float) -> list[BrokerAction]:
        """Have ``then`` get the definition of a dataset that users may write to: there is none for dead letters."""
        if name.endswith(DEAD_SUFFIX):
            return [*then(None, now)]
        return self._find(DATASETS_KEY, name, then, now)

    def _find(self, key: bytes, name: str, then: OnDefinition, now: float) -> list[BrokerAction]:
        if not NAME.fullmatch(name):
            return [*then(None, now)]
        known = self._known.setdefault((key, name), _Known())
        if known.read_at is not None and now < known.read_at + self._believed_s:
            return [*then(known.definition, now)]
        known.waiting.append(then)
        if known.unanswered:
            return []
        known.unanswered, known.answers, known.latest, known.is_whole = len(self._ids), 0, _NOTHING, True
        self._unknown.pop((key, name), None)

        def command(run_id: str, new_epoch: int, options: LogOptions) -> tuple[CommandPart, ...]:
            return b"HMGET", key, name.encode()

        def replied(reply: Any, now: float) -> Sequence[BrokerAction]:
            return self._replied((key, name), known, reply, now)

        actions: list[BrokerAction] = []
        for id_ in self._ids:
            actions += self._logs.request_at(id_, command, replied, now)
        return actions

    def _replied(self, place: tuple[bytes, str], known: _Known, reply: Any, now: float) -> Sequence[BrokerAction]:
        known.unanswered -= 1
        try:
            if reply is None or isinstance(reply, ErrorReply):
                known.is_whole = False
            else:
                (value,) = read_array(reply)
                entry = _NOTHING if value is None else parse_entry(read_bytes(value))
                known.answers += 1
                known.latest = max(known.latest, entry, key=lambda each: each.version)
        except (MalformedMessage, ValueError):
            known.is_whole = False
            self._counters["malformed"] += 1
        if known.unanswered:
            return []
        if known.latest.version > known.version or known.is_whole:
            self._take(place, known, known.latest)
        waiting, known.waiting = known.waiting, []
        is_known = known.answers == len(self._ids) or (known.answers > 0 and known.version > 0)
        if is_known:
            known.read_at = now
        if known.version == 0:
            self._unknown[place] = None
            if len(self._unknown) > UNKNOWN_MAX:
                oldest = next(iter(self._unknown))
                del self._unknown[oldest], self._known[oldest]
        actions: list[BrokerAction] = []
        for then in waiting:
            actions += then(known.definition if is_known else UNAVAILABLE, now)
        return actions

    def _take(self, place: tuple[bytes, str], known: _Known, entry: Entry) -> None:
        """Take what the servers say."""
        known.version, known.definition = entry.version, None
        if entry.definition is None:
            return  # it was dropped, or there is none
        key, name = place
        values = {**entry.definition, "version": entry.version}
        try:
            known.definition = read_query(name, values) if key == QUERIES_KEY else read_dataset(name, values)
        except ConfigError:
            self._counters["definitions_malformed"] += 1
            known.definition = UNAVAILABLE
