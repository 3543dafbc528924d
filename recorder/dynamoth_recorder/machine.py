"""The recorder: listens to agents and balancer at every server, and makes rows of what they say.

Theory of operation
-------------------
There is one link per server, named after it. At each server the recorder listens to three channels:

* ``BALANCER_CHANNEL``, on which agents report. NUMSUB of this channel is the number of balancers: clients and other
  balancers read it. So the recorder subscribes to it by a *pattern* that matches this name only, as NUMSUB does not
  count patterns. NUMPAT counts it once, however many recorders there are; ``PUBSUB NUMPAT`` of our clients subtracts it
  where ``RECORD_CHANNEL`` has subscribers.
* ``RECORD_CHANNEL``, on which the balancer says the same at each server; the first copy counts.
* a channel of its own, for a probe per ``PROBE_INTERVAL_S``: the time from PUBLISH to receipt.

The recorder also writes down what it does not know (table ``gaps``): reports left out, agents that saw nothing, its own
lost connections, probes that did not return, and when it was itself late. It never listens to ``AGENT_CHANNEL``, which
would make it an agent. While its recording cannot be written, it subscribes to ``RECORDER_FAILING_CHANNEL``, so that
``dynamoth status`` sees it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dynamoth.errors import MalformedMessage
from dynamoth.globs import literal_glob
from dynamoth.machine.bounded import BoundedTable
from dynamoth.machine.events import (
    Connect,
    Disconnect,
    ErrorReply,
    LinkDown,
    LinkUp,
    Pushed,
    Replied,
    RepliedAll,
    Send,
    Start,
    Tick,
)
from dynamoth.names import BALANCER_CHANNEL, RECORD_CHANNEL, RECORDER_FAILING_CHANNEL, probe_channel
from dynamoth.plan.plan import Server
from dynamoth.protocol.control import REPORT_CODE
from dynamoth.protocol.records import unpack_rows
from dynamoth.protocol.reports import Report, unpack_report
from dynamoth.recording import LATENCY
from dynamoth_recorder.events import LinkChanged, RecorderAction, RecorderEvent, Refused, Rows, ServersChanged
from dynamoth_recorder.rows import gap, rows_of_balancer, rows_of_report

PROBE_INTERVAL_S = 1.0
PROBE_LOST_S = 5.0
"""A probe that has not returned after this time is lost."""

LATE_S_MIN = 2.0
"""A recorder that comes so late to its probes comes late to all else."""

LATE_INTERVALS = 0.5
"""A report that comes so late is dated by the report before it. Those that waited for a recorder come all at once."""

RESUBSCRIBE_S = 10.0
"""Where a server refuses a subscription, the recorder asks again after this time: rights may have been given."""

SEEN_MAX = 10_000
"""Messages of balancers that are remembered, to know their copies at other servers."""

PROBE_BYTES = 8


@dataclass(slots=True)
class _Watched:
    """A server, and the connection to it."""

    url: str
    #: Since when the recorder hears nothing there; None while it listens.
    away_since: float | None
    is_up: bool = False
    #: Whether the connection was lost, or could not be made, since ``away_since``.
    has_failed: bool = False
    #: Why it is down, as reported last; empty while it was never reported.
    reported: str | None = ""
    #: The refusal of the present connection.
    refusal: str = ""
    resubscribe_at: float = 0.0
    #: When something came over a connection for the last time.
    heard_at: float = 0.0
    #: Incarnation, sequence and date of the latest report over the present connection.
    latest: tuple[int, int, float] | None = None
    #: When each probe was sent that has not returned, by number; not older than ``PROBE_LOST_S`` and an interval.
    probes: dict[int, float] = field(default_factory=dict[int, float])


class RecorderMachine:
    """Records one cluster. Begins without servers: ``ServersChanged`` names them.

    Args:
        recorder: up to 63 bits, random, new with each start of the process.

    """

    def __init__(self, recorder: int) -> None:
        self.recorder = recorder
        self._probe_channel = probe_channel(recorder)
        #: By id.
        self._servers: dict[str, _Watched] = {}
        self._probe_at: float | None = None
        self._probe_number = 0
        #: At all servers: one that leaves and comes back goes on with other numbers.
        self._times_away = 0
        self._is_failing = False
        self._seen: BoundedTable[tuple[int, int], bool] = BoundedTable(SEEN_MAX, SEEN_MAX, lambda key, value: 1)
        self.counters: Counter[str] = Counter()

    @property
    def servers_known(self) -> int:
        """How many servers the cluster has, as far as is known."""
        return len(self._servers)

    @property
    def not_heard(self) -> dict[str, str]:
        """The servers at which the recorder does not listen now, each with the reason."""
        return {
            id_: watched.refusal or watched.reported or "not connected yet"
            for id_, watched in self._servers.items()
            if watched.away_since is not None or watched.refusal
        }

    def deadline(self) -> float | None:
        """Return when the next probe is due."""
        return self._probe_at

    def check(self) -> None:
        """Assert the invariants."""
        for watched in self._servers.values():
            assert watched.is_up or watched.away_since is not None, "it listens over a connection only"
            assert watched.is_up or not (watched.probes or watched.latest), "a lost connection is forgotten"

    def handle(self, event: RecorderEvent, now: float) -> list[RecorderAction]:
        """Handle one event; return the actions to execute, in order."""
        match event:
            case Pushed(link, messages):
                return self._on_pushes(link, messages, now)
            case Tick():
                return self._tick(now)
            case Replied(link, _, value):
                return self._on_reply(link, value, now)
            case LinkUp(link):
                return self._on_up(link)
            case LinkDown(link, reason):
                return self._on_down(link, reason, now)
            case ServersChanged(servers):
                return self._change_servers(servers, now)
            case Start():
                self._probe_at = now + PROBE_INTERVAL_S
                return []
            case RepliedAll():
                return []  # nothing is sent together
            case _:
                return self._change_store(event.failing)

    # Connections.

    def _change_servers(self, servers: tuple[Server, ...], now: float) -> list[RecorderAction]:
        """Connect to new servers, and leave those that are gone or have moved."""
        wanted = {server.id: server.url for server in servers}
        actions: list[RecorderAction] = []
        moved: dict[str, float | None] = {}
        for id_ in [id_ for id_, watched in self._servers.items() if wanted.get(id_) != watched.url]:
            actions += [*self._lose(id_, now), Disconnect(id_)]
            moved[id_] = self._servers.pop(id_).away_since
        for id_, url in wanted.items():
            if id_ not in self._servers:
                self._servers[id_] = _Watched(url, moved.get(id_, now), has_failed=id_ in moved)
                actions.append(Connect(id_, url))
        return actions

    def _on_up(self, id_: str) -> list[RecorderAction]:
        watched = self._servers[id_]
        watched.is_up, watched.refusal = True, ""
        return [*self._report_link(id_, None), *self._subscribe(id_)]

    def _subscribe(self, id_: str) -> list[RecorderAction]:
        """The probe's channel comes last: when it is confirmed, the others are."""
        channels = [RECORD_CHANNEL, *([RECORDER_FAILING_CHANNEL] if self._is_failing else []), self._probe_channel]
        return [
            Send(id_, (b"PSUBSCRIBE", literal_glob(BALANCER_CHANNEL)), "subscribe"),
            *(Send(id_, (b"SUBSCRIBE", channel), "subscribe") for channel in channels),
        ]

    def _on_down(self, id_: str, reason: str, now: float) -> list[RecorderAction]:
        lost = self._lose(id_, now)
        self._servers[id_].has_failed = True
        return [*lost, *self._report_link(id_, reason)]

    def _lose(self, id_: str, now: float) -> list[RecorderAction]:
        """Forget a connection; what was published since something last came over it is not known.

        That may be seconds ago: a cut connection is found by its silence. A recorder that stood still gets the last
        messages together with the loss, and cannot tell when they came, so it counts from its latest tick.
        """
        watched = self._servers[id_]
        watched.is_up, watched.latest = False, None
        if watched.away_since is None:
            assert self._probe_at is not None, "Start is the first event"
            watched.away_since = min(watched.heard_at, self._probe_at - PROBE_INTERVAL_S)
        return self._give_up_probes(id_, now, 0.0)

    def _report_link(self, id_: str, reason: str | None) -> list[RecorderAction]:
        """Report a link, unless it was reported like this: while a server is down, each attempt fails alike."""
        if self._servers[id_].reported == reason:
            return []
        self._servers[id_].reported = reason
        return [LinkChanged(id_, reason)]

    def _on_reply(self, id_: str, value: Any, now: float) -> list[RecorderAction]:
        watched = self._servers[id_]
        if not isinstance(value, ErrorReply) or str(value) == watched.refusal:
            return []
        watched.refusal, watched.resubscribe_at = str(value), now + RESUBSCRIBE_S
        self.counters["refused"] += 1
        return [Refused(id_, watched.refusal)]

    def _change_store(self, failing: bool) -> list[RecorderAction]:
        self._is_failing = failing
        command = b"SUBSCRIBE" if failing else b"UNSUBSCRIBE"
        ups = [id_ for id_, watched in self._servers.items() if watched.is_up]
        return [Send(id_, (command, RECORDER_FAILING_CHANNEL)) for id_ in ups]

    # Messages.

    def _on_pushes(self, id_: str, messages: Sequence[Sequence[Any]], now: float) -> list[RecorderAction]:
        self._servers[id_].heard_at = now
        actions: list[RecorderAction] = []
        for message in messages:
            match message:
                case [b"pmessage", _, channel, data] if channel == BALANCER_CHANNEL:
                    actions += self._on_agent(id_, data, now)
                case [b"message", channel, data] if channel == RECORD_CHANNEL:
                    actions += self._on_balancer(data)
                case [b"message", channel, data] if channel == self._probe_channel:
                    actions += self._on_probe(id_, data, now)
                case [b"subscribe", channel, _] if channel == self._probe_channel:
                    actions += self._on_subscribed(id_, now)
                case _:
                    pass
        return actions

    def _on_subscribed(self, id_: str, now: float) -> list[RecorderAction]:
        watched = self._servers[id_]
        since, watched.away_since = watched.away_since, None
        if since is None or not watched.has_failed:
            return []
        watched.has_failed = False
        self._times_away += 1
        return [gap("recorder_away", id_, now - since, "no connection to the server", sequence=self._times_away)]

    def _on_agent(self, id_: str, data: bytes, now: float) -> list[RecorderAction]:
        if data[1:2] != bytes((REPORT_CODE,)):  # an acknowledgement, for the balancer alone
            return []
        try:
            report = unpack_report(data)
        except MalformedMessage:
            self.counters["malformed"] += 1
            return []
        if report.server != id_:
            self.counters["wrong_server"] += 1
            return []
        return self._on_report(report, now)

    def _on_report(self, report: Report, now: float) -> list[RecorderAction]:
        watched = self._servers[report.server]
        incarnation, sequence, interval_s = report.incarnation, report.sequence, report.interval_s
        known, latest, latest_at = watched.latest or (None, 0, now)
        rows: list[Rows] = []
        at = now
        if known == incarnation:
            if sequence <= latest:
                self.counters["repeated"] += 1
                return []
            if missing := sequence - latest - 1:
                rows.append(self._gap_before(report, "report_missing", missing * interval_s, count=missing))
            due = latest_at + (sequence - latest) * interval_s
            at = due if now - due > LATE_INTERVALS * interval_s else now
        watched.latest = incarnation, sequence, at
        if report.observing and report.blind_s:  # a blind agent's reports say how long it lasts so far
            rows.append(self._gap_before(report, "agent_blind", report.blind_s))
        rows += rows_of_report(report)
        return [replace(each, age_s=now - at) for each in rows]

    def _gap_before(self, report: Report, kind: str, seconds: float, **more: int) -> Rows:
        reason = "the reports did not arrive" if kind == "report_missing" else "the agent saw nothing of its server"
        return gap(
            kind, report.server, seconds, reason, incarnation=report.incarnation, sequence=report.sequence, **more
        )

    def _on_balancer(self, data: bytes) -> list[RecorderAction]:
        try:
            message = unpack_rows(data)
        except MalformedMessage:
            self.counters["malformed"] += 1
            return []
        key = message.balancer, message.number
        if key in self._seen:
            return []
        self._seen.put(key, True)
        return [*rows_of_balancer(message)]

    # Probes.

    def _tick(self, now: float) -> list[RecorderAction]:
        if self._probe_at is None or now < self._probe_at:
            return []
        late_s, self._probe_at = now - self._probe_at, now + PROBE_INTERVAL_S
        actions: list[RecorderAction] = []
        for id_, watched in self._servers.items():
            if late_s > LATE_S_MIN and watched.away_since is None:
                reason = "the recorder did not run: what it heard afterwards, but reports, is dated too late"
                actions.append(gap("recorder_late", id_, late_s, reason, sequence=self._probe_number + 1))
            actions += self._give_up_probes(id_, now, PROBE_LOST_S)
            if watched.refusal and watched.is_up and now >= watched.resubscribe_at:
                watched.refusal = ""
                actions += self._subscribe(id_)
            if watched.away_since is None:
                self._probe_number += 1
                watched.probes[self._probe_number] = now
                data = self._probe_number.to_bytes(PROBE_BYTES, "big")
                actions.append(Send(id_, (b"PUBLISH", self._probe_channel, data), "probe"))
        return actions

    def _on_probe(self, id_: str, data: bytes, now: float) -> list[RecorderAction]:
        number = int.from_bytes(data, "big") if len(data) == PROBE_BYTES else -1
        sent_at = self._servers[id_].probes.pop(number, None)
        if sent_at is None:
            self.counters["unexpected"] += 1  # too late, or another's
            return []
        return [Rows(LATENCY.name, 1, {"server": id_, "number": number, "latency_s": now - sent_at})]

    def _give_up_probes(self, id_: str, now: float, age_s: float) -> list[RecorderAction]:
        """Record as lost the probes of at least this age."""
        probes = self._servers[id_].probes
        actions: list[RecorderAction] = []
        for number, sent_at in [*probes.items()]:
            if now - sent_at >= age_s:
                del probes[number]
                actions.append(Rows(LATENCY.name, 1, {"server": id_, "number": number}))
                actions.append(gap("probe_lost", id_, now - sent_at, "a probe did not return", sequence=number))
        return actions
