"""The recorder: listens to agents, balancer, edge brokers and coordinator, and makes rows of their messages.

Theory of operation
-------------------
There is one link per server, named after it. At each server the recorder listens to five channels:

* ``BALANCER_CHANNEL``, on which agents report. NUMSUB of this channel is the number of balancers: clients and other
  balancers read it. So the recorder subscribes to it by a *pattern* that matches this name only, as NUMSUB does not
  count patterns. NUMPAT counts it once, however many recorders there are; ``PUBSUB NUMPAT`` of our clients subtracts it
  where ``RECORD_CHANNEL`` has subscribers.
* ``RECORD_CHANNEL``, on which the balancer publishes the same at each server; the first copy counts.
* ``COORDINATOR_CHANNEL``, on which edge brokers report. NUMSUB of this channel is the number of coordinators, so here,
  too, the recorder subscribes to a pattern; clients subtract it where ``COORDINATOR_RECORD_CHANNEL`` has subscribers.
  Brokers send other messages there, with names of sessions: they are dropped.
* ``COORDINATOR_RECORD_CHANNEL``, on which the coordinator publishes what it decides, the same at each server.
* a channel of its own, for a probe per ``PROBE_INTERVAL_S``: the time from PUBLISH to receipt.

It listens at a server once all are confirmed. A server that refuses only the two about brokers counts as heard: its
cluster may have no brokers, and the users that an older ``dynamoth acl`` printed. The log has the refusal.

The recorder also notes what its recording lacks (table ``gaps``; ``GapKind`` has the kinds). It never listens to
``AGENT_CHANNEL``, which would make it an agent. While its recording cannot be written, it subscribes to
``RECORDER_FAILING_CHANNEL``, so that ``dynamoth status`` sees it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, assert_never

from dynamoth.edge.control import BrokerReport, unpack_edge
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
from dynamoth.names import (
    BALANCER_CHANNEL,
    COORDINATOR_CHANNEL,
    COORDINATOR_RECORD_CHANNEL,
    RECORD_CHANNEL,
    RECORDER_FAILING_CHANNEL,
    probe_channel,
)
from dynamoth.plan.plan import Server
from dynamoth.protocol.control import REPORT_CODE
from dynamoth.protocol.records import unpack_rows
from dynamoth.protocol.reports import Report, unpack_report
from dynamoth.recording import BALANCER_TABLES, COORDINATOR_TABLES, LATENCY, GapKind, Table
from dynamoth_recorder.events import (
    LinkChanged,
    RecorderAction,
    RecorderEvent,
    Refused,
    Rows,
    ServersChanged,
    StoreChanged,
)
from dynamoth_recorder.rows import gap, rows_of_broker, rows_of_report, rows_of_sender

PROBE_INTERVAL_S = 1.0
PROBE_LOST_S = 5.0
"""A probe that has not returned after this time is lost."""

LATE_S_MIN = 2.0
"""If a probe is this late, the process did not run, and its other rows are late, too."""

LATE_INTERVALS = 0.5
"""A report that is late by more of its intervals waited for the recorder: it gets the time at which it was due."""

RESTART_INTERVALS_MIN = 0.5
"""A shorter time without measurement, in intervals of the new agent, is no gap: its report may have taken that long."""

RESUBSCRIBE_S = 10.0
"""If a server refuses a subscription, the recorder asks again after this time: it may have got the rights."""

SEEN_MAX = 10_000
"""Messages of balancers, brokers and coordinators that are remembered, to recognise their copies at other servers."""

PROBE_BYTES = 8

_AGENTS = literal_glob(BALANCER_CHANNEL)
"""The pattern that matches the channel of reports only."""

_LISTENING = frozenset((_AGENTS, RECORD_CHANNEL))
"""The subscriptions without which rows are missing."""

_BROKERS = literal_glob(COORDINATOR_CHANNEL)
"""The pattern that matches the channel of brokers' reports only."""

_ABOUT_BROKERS = frozenset((_BROKERS, COORDINATOR_RECORD_CHANNEL))
"""The subscriptions that a cluster without brokers does not need."""

_PUBLISH = b"PUBLISH"


@dataclass(frozen=True, slots=True)
class _Latest:
    """The latest report over the present connection."""

    incarnation: int
    sequence: int
    #: The end of its interval.
    at: float
    #: When the recorder got it.
    heard_at: float


@dataclass(slots=True)
class _Watched:
    """A server, and the connection to it."""

    url: str
    #: Since when the recorder does not listen there; None while it does.
    away_since: float | None
    #: Why it does not, if something has failed since ``away_since``; otherwise empty.
    away_because: str = ""
    is_up: bool = False
    #: The latest reported reason for which it is down; None if it is up; empty if nothing was reported yet.
    reported: str | None = ""
    #: The errors of the present connection that still apply, by channel or pattern, or ``_PUBLISH`` of probes.
    refusals: dict[bytes, str] = field(default_factory=dict[bytes, str])
    #: When to ask again for subscriptions that were refused.
    resubscribe_at: float = 0.0
    #: When the latest push came, over any connection.
    heard_at: float = 0.0
    latest: _Latest | None = None
    #: The incarnation of the agent that reported last, over any connection.
    agent: int | None = None
    #: Reports and gaps cover all time before this: the end of the latest report that was not of a blind agent, or when
    #: the recorder began to listen.
    known_until: float = 0.0
    #: When each probe that has not returned was sent, by number. At most ``PROBE_LOST_S`` and an interval ago.
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
        #: Absences so far, at all servers, so that a server that returns gets new numbers.
        self._times_away = 0
        #: Whether the recording cannot be written, and since when that is so, or not so.
        self._is_failing = False
        self._changed_at = 0.0
        #: Gaps of lost rows so far.
        self._times_lost = 0
        #: Messages by channel, incarnation of the sender and number.
        self._seen: BoundedTable[tuple[bytes, int, int], bool] = BoundedTable(SEEN_MAX, SEEN_MAX, lambda key, value: 1)
        self.counters: Counter[str] = Counter()

    @property
    def servers_known(self) -> int:
        """The number of servers in the latest ``ServersChanged``."""
        return len(self._servers)

    @property
    def not_heard(self) -> dict[str, str]:
        """The servers where something is not recorded now, each with the reason."""
        return {
            id_: "; ".join(dict.fromkeys(watched.refusals.values())) or watched.reported or "not connected yet"
            for id_, watched in self._servers.items()
            if watched.away_since is not None or watched.refusals.keys() - _ABOUT_BROKERS
        }

    def deadline(self) -> float | None:
        """Return when the next probe is due."""
        return self._probe_at

    def check(self) -> None:
        """Assert the invariants."""
        for watched in self._servers.values():
            assert watched.is_up or watched.away_since is not None, "it listens over a connection only"
            of_connection = watched.probes, watched.latest, watched.refusals
            assert watched.is_up or not any(of_connection), "a lost connection is forgotten"

    def handle(self, event: RecorderEvent, now: float) -> list[RecorderAction]:
        """Handle one event; return the actions to execute, in order."""
        match event:
            case Pushed(link, messages):
                return self._on_pushes(link, messages, now)
            case Tick():
                return self._tick(now)
            case Replied(link, tag, value):
                return self._on_reply(link, tag, value, now)
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
            case StoreChanged(failing, lost):
                return self._change_store(failing, lost, now)
            case _:
                assert_never(event)

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
                because = "the server moved" if id_ in moved else ""
                self._servers[id_] = _Watched(url, moved.get(id_, now), because)
                actions.append(Connect(id_, url))
        return actions

    def _on_up(self, id_: str) -> list[RecorderAction]:
        self._servers[id_].is_up = True
        return [*self._report_link(id_, None), *self._subscribe(id_)]

    def _subscribe(self, id_: str) -> list[RecorderAction]:
        """Ask for all subscriptions. That of the probes comes last: once it is confirmed, the others were answered."""
        failing = [RECORDER_FAILING_CHANNEL] if self._is_failing else []
        channels = [RECORD_CHANNEL, COORDINATOR_RECORD_CHANNEL, *failing, self._probe_channel]
        return [
            Send(id_, (b"PSUBSCRIBE", _AGENTS), _AGENTS),
            Send(id_, (b"PSUBSCRIBE", _BROKERS), _BROKERS),
            *(Send(id_, (b"SUBSCRIBE", channel), channel) for channel in channels),
        ]

    def _on_down(self, id_: str, reason: str, now: float) -> list[RecorderAction]:
        lost = self._lose(id_, now)
        self._servers[id_].away_because = "no connection to the server"
        return [*lost, *self._report_link(id_, reason)]

    def _lose(self, id_: str, now: float) -> list[RecorderAction]:
        """Forget a connection. Messages published since the latest push are missing in the recording.

        That may be seconds ago: a cut connection is noticed by its silence. A recorder that did not run gets the last
        messages together with the loss, and does not know when they came. So it counts from its latest tick.
        """
        watched = self._servers[id_]
        watched.is_up, watched.latest = False, None
        watched.refusals.clear()
        if watched.away_since is None:
            assert self._probe_at is not None, "Start is the first event"
            watched.away_since = min(watched.heard_at, self._probe_at - PROBE_INTERVAL_S)
        return self._give_up_probes(id_, now, 0.0)

    def _report_link(self, id_: str, reason: str | None) -> list[RecorderAction]:
        """Report the state of a link unless it is the reported one: while a server is down, every attempt fails."""
        if self._servers[id_].reported == reason:
            return []
        self._servers[id_].reported = reason
        return [LinkChanged(id_, reason)]

    def _on_reply(self, id_: str, what: bytes, value: Any, now: float) -> list[RecorderAction]:
        """Note an error, and report it if it is new. Subscriptions have no other replies: pushes confirm them."""
        watched = self._servers[id_]
        if not isinstance(value, ErrorReply):
            watched.refusals.pop(what, None)
            return []
        self.counters["refused"] += 1
        if what == RECORDER_FAILING_CHANNEL and not self._is_failing:
            return []
        reply, is_new = str(value), str(value) not in watched.refusals.values()
        watched.refusals[what] = reply
        if what != _PUBLISH:
            watched.resubscribe_at = now + RESUBSCRIBE_S
        if what in _LISTENING:
            watched.away_because = f"the server refused a subscription: {reply}"
        return [Refused(id_, reply)] if is_new else []

    def _change_store(self, failing: bool, lost: Mapping[str, int], now: float) -> list[RecorderAction]:
        actions: list[RecorderAction] = []
        for table, count in lost.items():
            self._times_lost += 1
            reason = f"rows of {table} were lost: the recording could not be written, and memory was full"
            number = self._times_lost
            actions.append(gap(GapKind.ROWS_LOST, None, now - self._changed_at, reason, sequence=number, count=count))
        self._is_failing, self._changed_at = failing, now
        for id_, watched in self._servers.items():
            if watched.is_up and failing:
                actions.append(Send(id_, (b"SUBSCRIBE", RECORDER_FAILING_CHANNEL), RECORDER_FAILING_CHANNEL))
            elif watched.is_up:
                watched.refusals.pop(RECORDER_FAILING_CHANNEL, None)
                actions.append(Send(id_, (b"UNSUBSCRIBE", RECORDER_FAILING_CHANNEL)))
        return actions

    # Messages.

    def _on_pushes(self, id_: str, messages: Sequence[Sequence[Any]], now: float) -> list[RecorderAction]:
        self._servers[id_].heard_at = now
        actions: list[RecorderAction] = []
        for message in messages:
            match message:
                case [b"pmessage", _, channel, data] if channel == BALANCER_CHANNEL:
                    actions += self._on_agent(id_, data, now)
                case [b"message", channel, data] if channel == RECORD_CHANNEL:
                    actions += self._on_rows(channel, data, BALANCER_TABLES, "balancer")
                case [b"pmessage", _, channel, data] if channel == COORDINATOR_CHANNEL:
                    actions += self._on_broker(data)
                case [b"message", channel, data] if channel == COORDINATOR_RECORD_CHANNEL:
                    actions += self._on_rows(channel, data, COORDINATOR_TABLES, "coordinator")
                case [b"message", channel, data] if channel == self._probe_channel:
                    actions += self._on_probe(id_, data, now)
                case [b"subscribe" | b"psubscribe", name, _]:
                    actions += self._on_subscribed(id_, name, now)
                case _:
                    pass
        return actions

    def _on_subscribed(self, id_: str, name: bytes, now: float) -> list[RecorderAction]:
        """Note that a subscription is confirmed. Once all are, the recorder listens, and an absence ends."""
        watched = self._servers[id_]
        watched.refusals.pop(name, None)
        if name != self._probe_channel or watched.away_since is None or watched.refusals.keys() & _LISTENING:
            return []
        since, reason = watched.away_since, watched.away_because
        watched.away_since, watched.away_because, watched.known_until = None, "", now
        if not reason:
            return []  # the recording begins
        self._times_away += 1
        return [gap(GapKind.RECORDER_AWAY, id_, now - since, reason, sequence=self._times_away)]

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
        latest = watched.latest
        if latest is not None and latest.incarnation == report.incarnation and report.sequence <= latest.sequence:
            self.counters["repeated"] += 1
            return []
        at = _end_of(report, latest, now)
        gaps = [*self._gaps_before(report, watched, at)]
        watched.latest = _Latest(report.incarnation, report.sequence, at, now)
        if report.observing or report.incarnation != watched.agent:
            watched.known_until = at
        watched.agent = report.incarnation
        return [replace(each, age_s=now - at) for each in (*gaps, *rows_of_report(report))]

    def _gaps_before(self, report: Report, watched: _Watched, at: float) -> Iterator[Rows]:
        """Yield what is missing between the latest report and this one, whose interval ends at ``at``."""
        latest, interval_s = watched.latest, report.interval_s
        unmeasured_s = at - interval_s - watched.known_until
        place = {"incarnation": report.incarnation, "sequence": report.sequence}
        if latest is not None and latest.incarnation == report.incarnation:
            if missing := report.sequence - latest.sequence - 1:
                reason = "the reports did not arrive"
                yield gap(GapKind.REPORT_MISSING, report.server, missing * interval_s, reason, count=missing, **place)
        elif watched.agent not in (None, report.incarnation) and unmeasured_s > RESTART_INTERVALS_MIN * interval_s:
            reason = "the agent has started again, and nobody measured in between"
            yield gap(GapKind.AGENT_RESTARTED, report.server, unmeasured_s, reason, **place)
        if report.observing and report.blind_s:  # a blind agent's reports say how long it lasts so far
            reason = "the agent saw nothing of its server"
            yield gap(GapKind.AGENT_BLIND, report.server, report.blind_s, reason, **place)

    def _on_rows(self, channel: bytes, data: bytes, tables: Mapping[str, Table], sender: str) -> list[RecorderAction]:
        """Record what a balancer or coordinator sends for ``tables``; ``sender`` is the column of its incarnation."""
        try:
            message = unpack_rows(data, tables)
        except MalformedMessage:
            self.counters["malformed"] += 1
            return []
        if not self._is_new(channel, message.sender, message.number):
            return []
        return [*rows_of_sender(message, sender)]

    def _on_broker(self, data: bytes) -> list[RecorderAction]:
        """Record the report of a broker. Its other messages are for the coordinator alone."""
        try:
            stamp, message = unpack_edge(data)
        except MalformedMessage:
            self.counters["malformed"] += 1
            return []
        if not isinstance(message, BrokerReport):
            return []
        if not self._is_new(COORDINATOR_CHANNEL, stamp.incarnation, stamp.number):
            return []
        return [*rows_of_broker(stamp, message)]

    def _is_new(self, channel: bytes, sender: int, number: int) -> bool:
        """Return whether a message has not come before, through another server."""
        key = channel, sender, number
        if key in self._seen:
            return False
        self._seen.put(key, True)
        return True

    # Probes.

    def _tick(self, now: float) -> list[RecorderAction]:
        if self._probe_at is None or now < self._probe_at:
            return []
        late_s, self._probe_at = now - self._probe_at, now + PROBE_INTERVAL_S
        actions: list[RecorderAction] = []
        for id_, watched in self._servers.items():
            if late_s > LATE_S_MIN and watched.away_since is None:
                reason = "the recorder did not run: what it heard afterwards, except reports, is dated too late"
                actions.append(gap(GapKind.RECORDER_LATE, id_, late_s, reason, sequence=self._probe_number + 1))
            actions += self._give_up_probes(id_, now, PROBE_LOST_S)
            if watched.refusals.keys() - {_PUBLISH} and now >= watched.resubscribe_at:
                watched.resubscribe_at = now + RESUBSCRIBE_S
                actions += self._subscribe(id_)
            if watched.away_since is None:
                self._probe_number += 1
                watched.probes[self._probe_number] = now
                data = self._probe_number.to_bytes(PROBE_BYTES, "big")
                actions.append(Send(id_, (_PUBLISH, self._probe_channel, data), _PUBLISH))
        return actions

    def _on_probe(self, id_: str, data: bytes, now: float) -> list[RecorderAction]:
        number = int.from_bytes(data, "big") if len(data) == PROBE_BYTES else -1
        sent_at = self._servers[id_].probes.pop(number, None)
        if sent_at is None:
            self.counters["unexpected"] += 1  # too late, or published by somebody else
            return []
        return [Rows(LATENCY.name, 1, {"server": id_, "number": number, "latency_s": now - sent_at})]

    def _give_up_probes(self, id_: str, now: float, age_s: float) -> list[RecorderAction]:
        """Record probes of at least this age as lost."""
        probes = self._servers[id_].probes
        actions: list[RecorderAction] = []
        for number, sent_at in [*probes.items()]:
            if now - sent_at >= age_s:
                del probes[number]
                actions.append(Rows(LATENCY.name, 1, {"server": id_, "number": number}))
                actions.append(gap(GapKind.PROBE_LOST, id_, now - sent_at, "a probe did not return", sequence=number))
        return actions


def _end_of(report: Report, latest: _Latest | None, now: float) -> float:
    """Return when the interval of a report ended: now or, if it waited for the recorder, when it was due.

    Reports that waited come all at once, and only the last of them is new. So if two late ones come far apart, they did
    not wait: something before them took longer than their intervals say.
    """
    if latest is None or latest.incarnation != report.incarnation:
        return now
    due = latest.at + (report.sequence - latest.sequence) * report.interval_s + report.blind_s
    allowed_s = LATE_INTERVALS * report.interval_s
    was_late = latest.at < latest.heard_at
    return now if now - due <= allowed_s or (was_late and now - latest.heard_at > allowed_s) else due
