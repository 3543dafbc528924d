"""Reports in place of a blind agent: over a second connection, which observes nothing.

Theory of operation
-------------------
Redis disconnects a subscriber whose output buffer passes ``client-output-buffer-limit pubsub``. Under a flood that
happens to the agent again and again. Its reports come behind everything that was published, so they never get through,
and the server would look idle to the balancer. So the agent has a second connection to its server. After
``PATIENCE_INTERVALS`` without a complete report, reports go over this one: the figures of INFO, since when the agent is
blind, and how often it was disconnected.

The agent also asks there, once, for the settings of the server that matter to it. Where its user may not read them, it
asks once on each connection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dynamoth.machine.events import ErrorReply, Replied, Send
from dynamoth.names import BALANCER_CHANNEL
from dynamoth.protocol.reports import pack_report
from dynamoth_agent.events import AgentAction, BlindnessChanged, ServerAdvice
from dynamoth_lla.machine import LoadAnalyzer
from dynamoth_lla.server_info import SECTIONS, Rates, ServerInfo, parse_info, rates

REPORTS = "reports"
"""The link of this connection."""

TAG = "stand-in"
"""The tags of its commands are tuples that begin with this."""

PATIENCE_INTERVALS = 3.0
PATIENCE_S_MIN = 1.5
"""An agent is blind after this many intervals without a complete report, or after this time if that is longer. The
balancer gives up an agent after ``agent_stale_s`` (5 s) of silence."""

PUBSUB_HARD_BYTES_MIN = 256 * 1024 * 1024
"""The recommended least hard limit of ``client-output-buffer-limit pubsub``: some seconds of a saturated gigabit link.
Redis' own default is 32 MB, which a flood fills within a second."""

LIMIT_WANTED = "client-output-buffer-limit pubsub 256mb 128mb 60"

CONFIG_ASKED = (b"client-output-buffer-limit", b"maxmemory-policy")


class StandIn:
    """Watches whether the agent sees, and reports while it does not.

    Args:
        analyzer: makes the reports.
        interval_s: time between two reports.
        name: of the connection, for CLIENT LIST.

    """

    def __init__(self, analyzer: LoadAnalyzer, interval_s: float, name: str) -> None:
        self._analyzer = analyzer
        self._interval_s = interval_s
        self._patience_s = max(PATIENCE_S_MIN, PATIENCE_INTERVALS * interval_s)
        self._name = name
        #: Whether this agent was the only one of its server when that was known last. Set by the owner.
        self.may_speak = False
        #: Whether the agent does not see published messages, or sees them only long after.
        self.blind = False
        #: When to look next; None while the connection is down.
        self._look_at: float | None = None
        #: When the connection first came up. Blindness counts from the later of this and the latest complete report.
        self._since: float | None = None
        self._asked_at = 0.0
        #: Whether INFO is under way.
        self._asking = False
        self._fields: dict[str, str] = {}
        self._before: tuple[float, ServerInfo] | None = None
        self._settings: dict[bytes, str] = {}
        #: Whether the server has refused to show its settings.
        self._settings_refused = False
        #: Problems of the settings to report: see ``Report.problems``.
        self.problems: tuple[tuple[str, str], ...] = ()

    def deadline(self) -> float | None:
        """Return when to look next."""
        return self._look_at

    def link_up(self, now: float) -> list[AgentAction]:
        """Begin a connection: name it and ask for settings."""
        self._look_at = now + self._interval_s
        self._since = now if self._since is None else self._since
        self._asking = False
        self._before = None
        return [Send(REPORTS, (b"CLIENT", b"SETNAME", self._name)), *self._ask_settings()]

    def _ask_settings(self) -> list[AgentAction]:
        """Ask for the next setting: one by one, as each refusal is an entry in the ACL LOG of the server."""
        missing = [name for name in CONFIG_ASKED if name not in self._settings]
        return [Send(REPORTS, (b"CONFIG", b"GET", name), (TAG, "config", name)) for name in missing[:1]]

    def link_down(self) -> None:
        """Forget the connection."""
        self._look_at = None
        self._asking = False

    def blind_s(self, now: float) -> float:
        """Return for how long no complete report has been made."""
        latest = self._analyzer.reported_until
        known = [at for at in (latest, self._since) if at is not None]
        return now - max(known, default=now)

    def tick(self, now: float) -> list[AgentAction]:
        """Judge whether the agent sees, when it is time, and ask for INFO while it does not."""
        if self._look_at is None or now < self._look_at:
            return []
        self._look_at = now + self._interval_s
        actions = self._judge_sight(now)
        if self.blind and self.may_speak and not self._asking:
            self._asking = True
            self._asked_at = now
            self._fields = {}
            actions += [Send(REPORTS, (b"INFO", section), (TAG, "info", section)) for section in SECTIONS]
        elif not self.blind:
            self._before = None
        return actions

    def _judge_sight(self, now: float) -> list[AgentAction]:
        blind = self.blind_s(now) > self._patience_s
        if blind == self.blind:
            return []
        self.blind = blind
        return [BlindnessChanged(blind, self.blind_s(now), self._analyzer.counters["interruptions"])]

    def on_reply(self, event: Replied, now: float) -> list[AgentAction]:
        """Handle the reply to a command of this connection."""
        _, what, name = event.tag
        if what == "config":
            return self._take_setting(name, event.value)
        self._fields.update(parse_info(event.value))
        if name != SECTIONS[-1] or not self._asking:
            return []
        self._asking = False
        info = ServerInfo.parse(self._fields)
        before, self._before = self._before, (self._asked_at, info)
        if not self.may_speak or before is None or self._asked_at <= before[0]:
            return []  # rates need two measurements; the next is an interval away
        interval_s = self._asked_at - before[0]
        measured: Rates = rates(before[1], info, interval_s, 0)
        report = self._analyzer.report_blind(info, measured, interval_s, self.blind_s(now))
        return [Send(REPORTS, (b"PUBLISH", BALANCER_CHANNEL, pack_report(report)))]

    def _take_setting(self, name: bytes, value: Any) -> list[AgentAction]:
        if isinstance(value, ErrorReply):
            said, self._settings_refused = self._settings_refused, True
            return [] if said else [ServerAdvice((), str(value))]
        self._settings[name] = _value(value, name)
        if missing := self._ask_settings():
            return missing
        found = advice(self._settings)
        self.problems = tuple((kind, text) for kind, text in found if kind == EVICTABLE)
        return [ServerAdvice(tuple(text for _, text in found), None)]


def _value(reply: Any, name: bytes) -> str:
    """Return the value in the reply of CONFIG GET; empty where there is none."""
    found: Any = reply.get(name, b"") if isinstance(reply, dict) else b""  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType]  # whatever the server says
    return found.decode(errors="replace") if isinstance(found, bytes) else ""


EVICTABLE = "plan_evictable"
"""The one kind of advice that the status shows: the others are harmless until the agent is blind, and are only logged.
"""


def advice(settings: Mapping[bytes, str]) -> list[tuple[str, str]]:
    """Return a kind, and a text with value and reason, for each setting of a server that should be changed."""
    judged = ((kind, judge(settings.get(name, ""))) for name, (kind, judge) in _JUDGES.items())
    return [(kind, text) for kind, text in judged if text]


def _judge_limit(value: str) -> str:
    """Judge ``normal 0 0 0 slave 268435456 67108864 60 pubsub 33554432 8388608 60``."""
    words = value.split()
    if "pubsub" not in words:
        return ""
    hard, soft, *_ = [int(word) if word.isdigit() else 0 for word in words[words.index("pubsub") + 1 :]] + [0, 0]
    limits = [limit for limit in (hard, 2 * soft) if limit]
    if not limits or min(limits) >= PUBSUB_HARD_BYTES_MIN:
        return ""
    return (
        f"client-output-buffer-limit pubsub is {hard} {soft}: Redis disconnects an agent that falls that many bytes"
        f" behind, which a burst does within a second; set {LIMIT_WANTED}"
    )


def _judge_policy(value: str) -> str:
    if not value.startswith("allkeys-"):
        return ""
    return (
        f"maxmemory-policy is {value}: Redis may evict the stored plan; set noeviction or one of volatile-*, which"
        " leave keys without expiry alone"
    )


_JUDGES: Mapping[bytes, tuple[str, Callable[[str], str]]] = {
    b"client-output-buffer-limit": ("output_buffer_small", _judge_limit),
    b"maxmemory-policy": (EVICTABLE, _judge_policy),
}
