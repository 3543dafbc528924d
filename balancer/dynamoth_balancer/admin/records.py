"""Publishes the balancer's decisions and changes for recorders: rows of the tables of ``dynamoth.recording``.

Theory of operation
-------------------
Rows are gathered while the machine handles an event, and published at the end of it, at every server whose link is up.
Nobody answers, and nothing is kept for recorders that are away. So records cost a few microseconds per change of a
channel, and delay nothing.

A decision comes with the reports that the balancer has heard and the changes that have settled since the previous
decision, each with its time. So a replay can be in the same state.

The settings are repeated every ``SETTINGS_REPEAT_S`` for recorders that start later.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

from dynamoth.errors import ConfigError, PlanError
from dynamoth.machine.events import Send
from dynamoth.names import RECORD_CHANNEL
from dynamoth.plan.compatibility import CompatibilityRule
from dynamoth.plan.plan import Assignment, Entry, Plan
from dynamoth.protocol.records import RecordedRows, pack_rows
from dynamoth.recording import (
    DECISIONS,
    PLANS,
    SETTINGS,
    TEXT_CHARACTERS_MAX,
    DecisionKind,
    Table,
    channel_text,
)
from dynamoth_balancer.admin.changes import mode_name
from dynamoth_balancer.decide.history import MadeDecision
from dynamoth_balancer.events import Decided, PlanChanged
from dynamoth_balancer.install.hearing import HeardReport
from dynamoth_balancer.options import BalancerOptions

SETTINGS_REPEAT_S = 10.0
"""A recorder that starts later gets the settings within this time. They take 1 KB per server."""

SETTLED_MAX = 1000
"""Most settled changes that a decision names; the oldest are left out."""

ROWS_PER_MESSAGE_MAX = 1000
"""Most rows of one message: some 200 KB, far below ``ROWS_MAX`` and the output buffer of a subscriber in Redis."""

_OF_RECORDER = frozenset(("at", "recorder", "balancer", "number", "line"))
"""Columns that recorders fill, from the head of the message and their own clock."""

_COLUMNS = {
    table.name: dict.fromkeys(column.name for column in table.columns if column.name not in _OF_RECORDER)
    for table in (PLANS, DECISIONS, SETTINGS)
}
"""The columns of a message, in their order, by table."""


class Records:
    """Gathers the rows of one balancer process.

    Args:
        incarnation: of the balancer.
        options: of the balancer.
        reports: the reports heard since the last decision. Each decision empties it.

    """

    def __init__(self, incarnation: int, options: BalancerOptions, reports: deque[HeardReport]) -> None:
        self._incarnation = incarnation
        self._options = options
        self._reports = reports
        #: The changes that have settled since the last decision, and when.
        self._settled: deque[tuple[float, bytes]] = deque(maxlen=SETTLED_MAX)
        #: The latest plan of this process; None before its first term.
        self._plan: Plan | None = None
        #: Rows that are not published yet, by table.
        self._rows: dict[str, list[tuple[Any, ...]]] = {}
        #: The number of the latest message.
        self._number = 0
        self._settings_at = 0.0

    def begin_term(self, now: float) -> None:
        """Record the settings with the next tick."""
        self._settings_at = now

    def end_term(self) -> None:
        """Forget what is not published."""
        self._rows.clear()
        self._settled.clear()

    def on_plan(self, change: PlanChanged, now: float) -> None:
        """Record the entries that changed in a version of the plan, and whether it pauses the balancer now."""
        old, self._plan = self._plan, change.plan
        paused = change.plan.administration.paused
        if paused != (old is not None and old.administration.paused):
            self.on_pause(paused, now)
        for channel in change.channels:
            entry = change.plan.entries[channel]
            self._add(
                PLANS,
                version=change.plan.version,
                channel=channel_text(channel),
                **_assignments(_before(entry, None if old is None else old.entry(channel)), entry.route.assignment),
                phase=entry.phase.name.lower(),
                epoch=entry.route.epoch,
                reason=change.reason,
            )

    def on_pause(self, paused: bool, now: float) -> None:
        """Record that an administrator has paused the balancer, or resumed it."""
        self._add(DECISIONS, kind=DecisionKind.PAUSED if paused else DecisionKind.RESUMED, **self._state(now))

    def _state(self, now: float) -> dict[str, Any]:
        """Return the reports and settled changes since the last call, and the time."""
        reports = tuple(f"{each.server} {each.incarnation} {each.sequence} {each.at!r}" for each in self._reports)
        settled = tuple(f"{at!r} {channel_text(channel)}" for at, channel in self._settled)
        self._reports.clear()
        self._settled.clear()
        return {"clock_s": now, "reports": reports, "settled": settled}

    def on_decision(self, decided: Decided, now: float) -> None:
        """Record the moves and findings of a decision."""
        number, moves = decided.number, decided.decision.moves
        state = self._state(now)
        for move in moves:
            row = {"decision": number, "kind": DecisionKind.MOVE, "goal": move.goal, "reason": move.reason}
            places = {"channel": channel_text(move.channel), **_assignments(move.before, move.after)}
            for server, ratios in move.ratios.items():
                predicted = {"server": server, "ratio_before": ratios.before, "ratio_predicted": ratios.after}
                self._add(DECISIONS, **row, **places, **predicted, **state)
                state = {}
        for finding in decided.decision.findings:
            channel = None if finding.channel is None else channel_text(finding.channel)
            places = {"channel": channel, "server": finding.server, "ratio_before": finding.load_ratio}
            self._add(
                DECISIONS,
                decision=number,
                kind=DecisionKind.FINDING,
                goal=finding.goal,
                reason=finding.reason,
                **places,
                **state,
            )
            state = {}
        if decided.refused:
            reason = f"the moves cannot be carried out now: {decided.refused}"
            self._add(DECISIONS, decision=number, kind=DecisionKind.FINDING, reason=reason)

    def on_settled(self, channels: Iterable[bytes], now: float) -> None:
        """Note settled changes."""
        self._settled.extend((now, channel) for channel in frozenset(channels))

    def on_outcome(self, made: MadeDecision) -> None:
        """Record what was measured after the moves of a decision had settled."""
        for server, ratios in made.ratios.items():
            self._add(
                DECISIONS,
                decision=made.number,
                kind=DecisionKind.OUTCOME,
                server=server,
                ratio_before=ratios.before,
                ratio_predicted=ratios.after,
                ratio_measured=made.measured[server],
            )

    def tick(self, now: float) -> None:
        """Record the settings when they are due."""
        if self._plan is not None and now >= self._settings_at:
            self._settings_at = now + SETTINGS_REPEAT_S
            for name, value in describe_settings(self._options, self._plan):
                self._add(SETTINGS, name=name, value=value)

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
                sends += [Send(server, (b"PUBLISH", RECORD_CHANNEL, data)) for server in targets]
        return sends

    def _add(self, table: Table, **cells: Any) -> None:
        columns = _COLUMNS[table.name]
        row = tuple(map(_cell, map(cells.get, columns)))
        assert cells.keys() <= columns.keys(), f"{table.name} has no column {', '.join(cells.keys() - columns.keys())}"
        self._rows.setdefault(table.name, []).append(row)


def _cell(value: Any) -> Any:
    """Return a value that a message can carry: texts and lists are cut, and lone surrogates escaped."""
    if isinstance(value, str):
        text = value if value.isascii() else value.encode(errors="backslashreplace").decode()
        return text[:TEXT_CHARACTERS_MAX]
    if not isinstance(value, tuple):
        return value
    texts = cast("tuple[str, ...]", value)
    return [_cell(text) for text in texts[:TEXT_CHARACTERS_MAX]]


def _assignments(before: Assignment | None, after: Assignment) -> dict[str, Any]:
    return {
        "from_mode": None if before is None else mode_name(before.mode),
        "from_servers": None if before is None else before.servers,
        "to_mode": mode_name(after.mode),
        "to_servers": after.servers,
    }


def _before(entry: Entry, old: Entry | None) -> Assignment | None:
    """Return the assignment that an entry replaces, by its own routes or those of ``old``; None if it is not known."""
    routes = (*reversed(entry.previous), *(() if old is None else old.live_routes))
    return next((route.assignment for route in routes if route.epoch < entry.route.epoch), None)


# Settings.


@dataclass(frozen=True, slots=True)
class RecordedSettings:
    """The settings of a balancer while it led: enough to run its machine again.

    ``servers``: URLs by id, without credentials. ``ring``: ids of the servers that share the channels without an entry.
    """

    options: BalancerOptions
    servers: Mapping[str, str]
    ring: Sequence[str]


def describe_settings(options: BalancerOptions, plan: Plan) -> list[tuple[str, str]]:
    """Return options, servers and ring as rows of names and JSON; a long value is continued in the next row.

    ``virtual_nodes`` and ``compatibility`` are those of the plan.
    """
    in_force = replace(options, virtual_nodes=plan.virtual_nodes, compatibility=plan.compatibility.rules)
    values: dict[str, Any] = {item.name: getattr(in_force, item.name) for item in fields(BalancerOptions)}
    values["draining"] = sorted(in_force.draining)
    values["compatibility"] = [
        {"pattern": rule.pattern.decode(errors="surrogateescape"), "server": rule.server, "plain": rule.plain}
        for rule in in_force.compatibility
    ]
    values["servers"] = {server.id: _without_credentials(server.url) for server in plan.servers.values()}
    values["ring"] = plan.base
    rows: list[tuple[str, str]] = []
    for name, value in values.items():
        text = json.dumps(value)
        step = TEXT_CHARACTERS_MAX
        rows += [(name, text[start : start + step]) for start in range(0, len(text), step)]
    return rows


def read_settings(rows: Iterable[tuple[str, str]]) -> RecordedSettings:
    """Read the rows that ``describe_settings`` has returned, in their order. Unknown names are left out.

    Raises:
        ConfigError: a value cannot be read, or is out of range.

    """
    texts: dict[str, str] = {}
    for name, value in rows:
        texts[name] = texts.get(name, "") + value
    try:
        values = {name: json.loads(text) for name, text in texts.items()}
        servers, ring = dict(values.get("servers", {})), tuple(values.get("ring", ()))
        values["draining"] = frozenset(values.get("draining", ()))
        values["compatibility"] = tuple(
            CompatibilityRule(rule["pattern"].encode(errors="surrogateescape"), rule["server"], rule["plain"])
            for rule in values.get("compatibility", ())
        )
        known = {item.name for item in fields(BalancerOptions)}
        options = BalancerOptions(**{name: value for name, value in values.items() if name in known})
    except (AttributeError, KeyError, PlanError, RecursionError, TypeError, ValueError) as error:
        raise ConfigError(f"the settings of the recording cannot be read ({error}): record again") from error
    return RecordedSettings(options, servers, ring)


def _without_credentials(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    return scheme + separator + rest.rpartition("@")[2].partition("?")[0]
