"""Publishes what the coordinator decides for recorders: rows of the tables of ``dynamoth.recording``.

Theory of operation
-------------------
As the balancer's records: rows are gathered while the machine handles an event, and published at the end of it, at
every server whose link is up. Nobody answers, nothing is kept for recorders that are away, and nobody waits.

A decision has rows when it is made, when its moves have ended, and when the loads after it are measured. Of the moves
of one decision, ``MOVES_RECORDED_MAX`` have rows; the numbers in the rows of the decision count all of them.

Names of sessions may name people. So a recording has hashes of them, with a key that only this process knows: moves of
one user can be recognised, and nobody can find the user by trying names. Operators see the names where they are needed,
in ``dynamoth broker explain`` (pinned users) and in the log.

The settings are repeated every ``SETTINGS_REPEAT_S`` for recorders that start later.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from hashlib import blake2b
from typing import Any

from dynamoth.edge.control import Candidates, MoveEnd
from dynamoth.errors import ConfigError
from dynamoth.machine.events import Send
from dynamoth.names import COORDINATOR_RECORD_CHANNEL
from dynamoth.protocol.records import RecordedRows, pack_rows
from dynamoth.recording import (
    BROKER_DECISIONS,
    BROKER_MOVES,
    COORDINATOR_SETTINGS,
    COORDINATOR_TABLES,
    TEXT_CHARACTERS_MAX,
    BrokerDecisionState,
    Table,
)
from dynamoth_broker.coordinator.events import Decision
from dynamoth_broker.coordinator.model import Summary
from dynamoth_broker.coordinator.plan import Move
from dynamoth_broker.coordinator.relieve import Scheme
from dynamoth_broker.coordinator.settings import CoordinatorOptions, CoordinatorSettings

SETTINGS_REPEAT_S = 10.0
"""A recorder that starts later gets the settings within this time. They take 2 KB per server."""

MOVES_RECORDED_MAX = 5000
"""Most moves of one decision that have rows. A shuffle may have more: with their interests, they would take megabytes,
and Redis disconnects a subscriber for whom 32 MiB wait."""

INTERESTS_RECORDED_MAX = 50
"""Most interests of a user that a row names."""

ROWS_PER_MESSAGE_MAX = 500
"""Most rows of one message: some 300 KB with 20 interests each."""

CANDIDATES_REMEMBERED_MAX = 20_000
"""Most candidates of one decision whose interests are remembered: twice what it looks at by default. Anybody who
reaches a server can send more."""

SESSION_HASH_BYTES = 8

KEY_BYTES_MAX = 64
"""Of BLAKE2b: a longer secret is cut."""

TIMEOUT, UNFIT = "timeout", "unfit"
"""The ends of moves of which no broker says anything: see ``BROKER_MOVES``."""

_OF_RECORDER = frozenset(("at", "recorder", "coordinator", "number", "line"))
"""Columns that recorders fill, from the head of the message and their own clock."""

_COLUMNS = {
    table.name: dict.fromkeys(column.name for column in table.columns if column.name not in _OF_RECORDER)
    for table in COORDINATOR_TABLES.values()
}
"""The columns of a message, in their order, by table."""


@dataclass(slots=True)
class _Moving:
    """The moves of the decision that is carried out, by user, as far as they have rows."""

    moves: dict[str, Move]
    #: When brokers were asked.
    asked_at: dict[str, float]
    #: How moves have ended, and when.
    ends: dict[str, tuple[str, float]]


class Records:
    """Gathers the rows of one coordinator process.

    Args:
        incarnation: of the coordinator.
        settings: of the coordinator.
        secret: random, and nowhere else; the key of hashes of sessions. Empty: they have none.

    """

    def __init__(self, incarnation: int, settings: CoordinatorSettings, secret: bytes) -> None:
        self._incarnation = incarnation
        self._settings = settings
        self._secret = secret[:KEY_BYTES_MAX]
        #: 0 while it does not act.
        self._term = 0
        #: The number of the latest decision of this term that has a row.
        self._decision = 0
        self._is_paused = False
        self._moving = _Moving({}, {}, {})
        #: The latest question for candidates, and the interests of those who are offered.
        self._request = 0
        self._interests: dict[str, tuple[str, ...]] = {}
        #: Rows that are not published yet, by table.
        self._rows: dict[str, list[tuple[Any, ...]]] = {}
        #: The number of the latest message.
        self._number = 0
        self._settings_at = 0.0

    def begin_term(self, term: int, now: float) -> None:
        """Record the settings with the next tick; decisions are counted from 1 again."""
        self._term, self._decision, self._is_paused, self._settings_at = term, 0, False, now

    def end_term(self) -> None:
        """Forget what is not published, and the moves under way."""
        self._term, self._moving = 0, _Moving({}, {}, {})
        self._request = 0
        self._rows.clear()
        self._interests.clear()

    # What happens.

    def on_asking(self, request: int) -> None:
        """Note that brokers are asked for candidates, by one question each with the same number."""
        if request != self._request:
            self._request = request
            self._interests.clear()

    def on_candidates(self, request: int, candidates: Candidates) -> None:
        """Remember interests: a move that is decided names those of its user. Other answers do not count."""
        if request != self._request:
            return
        room = CANDIDATES_REMEMBERED_MAX - len(self._interests)
        self._interests.update((each.user, each.interests) for each in candidates.users[: max(0, room)])

    def on_decision(self, decision: Decision, now: float, ratios: Mapping[str, float]) -> None:
        """Record a decision, as it is now. ``ratios``: the present load ratios, by broker."""
        if decision.number != self._decision:
            self._decision = decision.number
            self._on_made(decision)
        elif decision.measured is None:
            self._on_settled(decision, now)
        else:
            self._on_measured(decision, decision.measured, now, ratios)

    def on_asked(self, moves: Iterable[Move], now: float) -> None:
        """Note that brokers are asked to move users."""
        self._moving.asked_at.update((move.user, now) for move in moves if move.user in self._moving.moves)

    def on_move_ended(self, user: str, end: MoveEnd, now: float) -> None:
        """Note how a move has ended; what comes too late does not count."""
        if user in self._moving.asked_at:
            self._moving.ends.setdefault(user, (end.value, now))

    def tick(self, is_paused: bool, now: float) -> None:
        """Record a pause when it begins or ends, and the settings when they are due."""
        if not self._term:
            return
        if is_paused != self._is_paused:
            self._is_paused = is_paused
            state = BrokerDecisionState.PAUSED if is_paused else BrokerDecisionState.RESUMED
            self._add(BROKER_DECISIONS, term=self._term, state=state, clock_s=now)
        if now >= self._settings_at:
            self._settings_at = now + SETTINGS_REPEAT_S
            for name, value in describe_settings(self._settings):
                self._add(COORDINATOR_SETTINGS, name=name, value=value)

    def publish(self, servers: Iterable[str]) -> list[Send]:
        """Return the messages with the rows since the last call, once for each of ``servers``."""
        if not self._rows:
            return []
        tables, self._rows = self._rows, {}
        sends: list[Send] = []
        targets = list(servers)
        for table, rows in tables.items():
            for start in range(0, len(rows), ROWS_PER_MESSAGE_MAX):
                self._number += 1
                some = tuple(rows[start : start + ROWS_PER_MESSAGE_MAX])
                data = pack_rows(RecordedRows(self._incarnation, self._number, table, tuple(_COLUMNS[table]), some))
                sends += [Send(server, (b"PUBLISH", COORDINATOR_RECORD_CHANNEL, data)) for server in targets]
        return sends

    # Rows.

    def _on_made(self, decision: Decision) -> None:
        self._add_decision(decision, BrokerDecisionState.MADE, decision.at, None)
        recorded = decision.plan.moves[:MOVES_RECORDED_MAX]
        for move in recorded:
            self._add(
                BROKER_MOVES,
                **self._place_of(move),
                load_bytes_per_s=move.load,
                interests=list(self._interests.get(move.user, ())[:INTERESTS_RECORDED_MAX]),
                from_ratio_before=move.source_ratio.before,
                from_ratio_predicted=move.source_ratio.after,
                to_ratio_before=move.target_ratio.before,
                to_ratio_predicted=move.target_ratio.after,
            )
        self._interests.clear()
        self._moving = _Moving({} if decision.is_dry_run else {move.user: move for move in recorded}, {}, {})

    def _on_settled(self, decision: Decision, now: float) -> None:
        self._add_decision(decision, BrokerDecisionState.SETTLED, now, None)
        moving, self._moving = self._moving, _Moving({}, {}, {})
        for user, move in moving.moves.items():
            asked_at = moving.asked_at.get(user)
            end, ended_at = moving.ends.get(user, (UNFIT if asked_at is None else TIMEOUT, None))
            seconds = None if ended_at is None or asked_at is None else ended_at - asked_at
            self._add(BROKER_MOVES, **self._place_of(move), end=end, seconds=seconds)

    def _on_measured(self, decision: Decision, measured: Summary, now: float, ratios: Mapping[str, float]) -> None:
        self._add_decision(decision, BrokerDecisionState.MEASURED, now, measured)
        for broker, (before, predicted) in touched(decision.plan.moves).items():
            self._add(
                BROKER_DECISIONS,
                term=self._term,
                decision=decision.number,
                state=BrokerDecisionState.MEASURED,
                kind=decision.kind.value,
                broker=broker,
                ratio_before=before,
                ratio_predicted=predicted,
                ratio_measured=ratios.get(broker),
            )

    def _add_decision(
        self, decision: Decision, state: BrokerDecisionState, clock_s: float, measured: Summary | None
    ) -> None:
        plan = decision.plan
        self._add(
            BROKER_DECISIONS,
            term=self._term,
            decision=decision.number,
            state=state,
            kind=decision.kind.value,
            reason=decision.reason,
            outcome=plan.outcome.value,
            is_dry_run=decision.is_dry_run,
            moves=len(plan.moves),
            moved=decision.moved,
            failed=decision.failed,
            clock_s=clock_s,
            **_figures("before", plan.before),
            **_figures("predicted", plan.after),
            **({} if measured is None else _figures("measured", measured)),
        )

    def _place_of(self, move: Move) -> dict[str, Any]:
        return {
            "term": self._term,
            "decision": self._decision,
            "session": self.session_hash(move.user),
            "from_broker": move.source,
            "to_broker": move.target,
        }

    def session_hash(self, user: str) -> str:
        """Return what a recording has in the place of a user's session."""
        text = user.encode(errors="surrogatepass")
        return blake2b(text, digest_size=SESSION_HASH_BYTES, key=self._secret, person=b"records").hexdigest()

    def _add(self, table: Table, **cells: Any) -> None:
        columns = _COLUMNS[table.name]
        assert cells.keys() <= columns.keys(), f"{table.name} has no column {', '.join(cells.keys() - columns.keys())}"
        self._rows.setdefault(table.name, []).append(tuple(_cell(cells.get(name)) for name in columns))


def _cell(value: Any) -> Any:
    """Return a value that a message can carry: texts are cut, and lone surrogates escaped."""
    if not isinstance(value, str):
        return value
    text = str(value) if value.isascii() else value.encode(errors="backslashreplace").decode()
    return text[:TEXT_CHARACTERS_MAX]


def _figures(when: str, summary: Summary) -> dict[str, float]:
    return {
        f"ratio_{when}": summary.ratio_max,
        f"ratio_mean_{when}": summary.ratio_mean,
        f"cov_{when}": summary.cov,
        f"redis_egress_{when}": summary.redis_egress,
    }


def touched(moves: Sequence[Move]) -> dict[str, tuple[float, float]]:
    """Return the load ratios of the brokers of a plan, before its first and after its last move, by broker."""
    found: dict[str, tuple[float, float]] = {}
    for move in moves:
        for broker, change in ((move.source, move.source_ratio), (move.target, move.target_ratio)):
            first, _ = found.get(broker, change)
            found[broker] = first, change.after
    return found


# Settings.

_TYPES: dict[str, type[Any] | tuple[type[Any], ...]] = {
    item.name: (int, float) if isinstance(item.default, float) else type(item.default)
    for item in fields(CoordinatorSettings)
}
"""The settings of a recording, and what may be their values."""


def describe_settings(settings: CoordinatorSettings) -> list[tuple[str, str]]:
    """Return the settings as names and JSON. Those of a process, as its lease, are not among them."""
    values = {name: getattr(settings, name) for name in _TYPES} | {"scheme": settings.scheme.value}
    return [(name, json.dumps(value)) for name, value in values.items()]


def read_settings(rows: Iterable[tuple[str, str]]) -> CoordinatorOptions:
    """Read the rows that ``describe_settings`` has returned. Unknown names are left out; what is missing is default.

    Raises:
        ConfigError: a value cannot be read, or is out of range.

    """
    try:
        values = {name: json.loads(value) for name, value in rows if name in _TYPES}
        if "scheme" in values:
            values["scheme"] = Scheme(values["scheme"])
        for name, value in values.items():
            if not isinstance(value, _TYPES[name]):
                raise TypeError(f"{name} is {value!r:.80}")
        return CoordinatorOptions(**values)
    except (RecursionError, TypeError, ValueError) as error:  # ConfigError is none of these
        raise ConfigError(f"the coordinator's settings of the recording cannot be read ({error})") from error
