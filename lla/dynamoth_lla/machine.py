"""The local load analyzer: measures one server and reports to the balancer (Dynamoth, section III-A).

Theory of operation
-------------------
It shares the agent's connection with the dispatcher, which has subscribed it to everything. Messages are written
down as they come (``window``). Once per interval comes a *round*, in three stages::

    MEASURING   INFO was sent. Its last reply closes the window, so both describe the time between the same two
                points of the connection. The window is gone through (``digest``).
    ASKING      NUMSUB was sent for the channels of the window: how many copies went out.
    COMPOSING   the report is put together, and published at this server for the balancer.

The reply of INFO comes after everything that the server had sent before it. So the time it takes is the time by which
the observation is late, without anything being published to find out.

From the last report before the connection is lost until it is up again, the analyzer is blind. The next report says
for how long. Redis drops an observer that is too slow; that is such an interruption.

Channels without messages are found by asking for all channels now and then, unless there are so many that the
question would hold up the server.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dynamoth.errors import MalformedMessage
from dynamoth.machine.events import ErrorReply, LinkDown, LinkUp, Pushed, Replied, Send, Tick
from dynamoth.names import BALANCER_CHANNEL
from dynamoth.protocol.control import Announcement, unpack_control
from dynamoth.protocol.reports import Report, pack_report
from dynamoth_lla.channels import Track, TrackedChannels
from dynamoth_lla.counting import Window
from dynamoth_lla.digest import Composed, Digest, NamedBounds, compose, digest
from dynamoth_lla.options import LoadAnalyzerOptions
from dynamoth_lla.sampling import SampledWindow, large_from, stride_for
from dynamoth_lla.server_info import SECTIONS, Rates, ServerInfo, parse_info, rates

LOCAL = "local"
"""The link that the analyzer shares with the dispatcher."""

TAG = "lla"
"""The tags of the analyzer's commands are tuples that begin with this."""

NAMES_PER_NUMSUB = 500
"""Bound of one NUMSUB: about 0.1 ms of the server, so that messages pass in between."""

REPLY_ITEM_BYTES = 12
"""About what a name or a number in a reply takes besides its text."""


@dataclass(frozen=True, slots=True)
class ObservationLate:
    """Action: the observation has become late (an alarm), or is in time again."""

    late: bool
    lag_s: float


class Stage(enum.Enum):
    """How far a round has come."""

    RESTING = "resting"
    MEASURING = "measuring"
    ASKING = "asking"
    COMPOSING = "composing"


@dataclass(slots=True)
class _Sample:
    """The server at the time at which it was asked."""

    at: float
    info: ServerInfo


@dataclass(frozen=True, slots=True)
class _Measurement:
    """What one round has measured; only who subscribes is missing."""

    digested: Digest
    after: _Sample
    interval_s: float
    publishers_uncounted: int


_Work = Generator[None, None, list[Any]]


class LoadAnalyzer:
    """Measures one server. Asks for :class:`Send` on the link ``local`` only, and for :class:`ObservationLate`.

    Args:
        server: id of the server.
        incarnation: new with each start of the agent.
        options: bounds and periods.

    """

    def __init__(self, server: str, incarnation: int, options: LoadAnalyzerOptions) -> None:
        self._server = server
        self._incarnation = incarnation
        self._options = options
        #: The version of the plan that the dispatcher beside acts upon. Set by the owner of both.
        self.plan_version: int | None = None
        self.counters: dict[str, int] = {
            "messages_observed": 0,
            "publications": 0,
            "messages_sent": 0,
            "messages_untracked": 0,
            "publishers_uncounted": 0,
            "announcements_malformed": 0,
            "announcements_dropped": 0,
            "replies_refused": 0,
            "intervals_late": 0,
            "interruptions": 0,
            "discoveries_left_out": 0,
            "reports_sent": 0,
            "reports_unheard": 0,
        }
        #: All the time that reports could not tell of.
        self.blind_s_total = 0.0
        #: The latest report that was sent.
        self.last_report: Report | None = None
        #: What else reports shall say: see ``Report.problems``. Set by the owner.
        self.problems: tuple[tuple[str, str], ...] = ()
        #: Whether the latest observation was later than ``lag_s_max``.
        self.late = False
        self._run_id: str | None = None
        self._stage = Stage.RESTING
        #: When the next round begins; None while the link is down.
        self._round_at: float | None = None
        #: When the present round began: when the server was asked. Meaningful unless RESTING.
        self._asked_at = 0.0
        #: When the question was sent whose answer is waited for.
        self._waiting_since: float | None = None
        #: Grows with each round and each connection: replies to older questions are dropped.
        self._round = 0
        #: What takes long and is done step by step; unless it is None, the deadline is now.
        self._work: _Work | None = None
        #: What INFO has answered in this round.
        self._fields: dict[str, str] = {}
        #: What the round has measured, while ASKING.
        self._measurement: _Measurement | None = None
        #: Replies of NUMSUB that are still to come; 0 unless ASKING.
        self._missing = 0
        #: Channels without messages whose subscribers are asked for; those that have none are not followed any more.
        self._idle: list[Track] = []
        #: Pushes since the window was opened, of whatever kind.
        self._pushes = 0
        #: One of so many messages is looked at, and from which size on all of them; by what came before.
        self._stride = 1
        self._large_bytes = large_from(0, 0)
        self._window = self._new_window()
        self._channels = TrackedChannels(
            options.channels_max, options.announced_per_channel_max, options.announced_clients_max
        )
        #: The measurement that the next one is compared with; None at the beginning of a connection.
        self._before: _Sample | None = None
        #: The latest that are known of this connection.
        self._rates = Rates(None, None, None)
        #: What the replies to our own commands have taken since the latest measurement.
        self._reply_bytes = 0
        self._sequence = 0
        #: Whether the link was up before.
        self._was_up = False
        #: Up to when reports have told what happened; None before the first.
        self._reported_until: float | None = None
        self._blind_s = 0.0
        self._lag_s = 0.0
        self._discover_at = 0.0
        #: The time of the latest event other than Pushed.
        self._now = 0.0

    def handle(self, event: Any, now: float) -> list[Any]:
        """Take one event; see :class:`dynamoth.machine.events.Machine`."""
        if isinstance(event, Pushed):
            if event.link == LOCAL:
                self._pushes += len(event.messages)
                announcements = self._window.observe(event.messages)
                if announcements:
                    self._take_announcements(announcements)
            return []
        self._now = now
        if isinstance(event, Tick):
            return self._tick()
        if isinstance(event, Replied) and event.link == LOCAL and _is_mine(event.tag):
            return self._take_reply(event)
        if isinstance(event, LinkUp) and event.link == LOCAL:
            return self._link_up(event.run_id)
        if isinstance(event, LinkDown) and event.link == LOCAL:
            self._link_down()
        return []

    def deadline(self) -> float | None:
        """Return when the next round begins, or a time that is past while there is work left of the present one."""
        if self._work is not None:
            return self._now
        return self._round_at if self._stage is Stage.RESTING else None

    def observation_lag_s(self, now: float) -> float:
        """Return by how much the observation is late: as measured last, or as it must be by now."""
        waiting_s = 0.0 if self._waiting_since is None else now - self._waiting_since
        return max(self._lag_s, waiting_s)

    @property
    def reported_until(self) -> float | None:
        """Up to when reports have said what happened; None before the first."""
        return self._reported_until

    @property
    def stage(self) -> Stage:
        """How far the present round has come."""
        return self._stage

    @property
    def channels_tracked(self) -> int:
        """How many physical channels are followed."""
        return len(self._channels)

    # The connection.

    def _link_up(self, run_id: str | None) -> list[Any]:
        restarted = self._run_id is not None and run_id != self._run_id
        if restarted:
            self._channels.clear()
        self._run_id = run_id
        self._before = None
        self._rates = Rates(None, None, None)
        self._reply_bytes = 0
        self._window = self._new_window()
        self.counters["interruptions"] += self._was_up and not restarted  # a restart says nothing about the agent
        self._was_up = True
        if self._reported_until is not None:
            self._blind_s = self._now - self._reported_until
        self._round_at = self._now
        return self._begin_round()

    def _link_down(self) -> None:
        """What was counted since the last report is dropped, as nothing tells until when it is complete."""
        self._stage = Stage.RESTING
        self._round_at = None
        self._waiting_since = None
        self._round += 1
        self._missing = 0
        self._work = None

    # The round.

    def _tick(self) -> list[Any]:
        if self._work is not None:
            return self._go_on()
        if self._stage is Stage.RESTING and self._round_at is not None and self._now >= self._round_at:
            return self._begin_round()
        return []

    def _begin_round(self) -> list[Any]:
        """Ask the server how it is. Rounds keep to a grid, and one that took too long leaves out what it missed."""
        interval_s = self._options.report_interval_s
        assert self._round_at is not None, "a round begins while the link is up"
        self._round_at += interval_s
        if self._round_at <= self._now:
            self._round_at = self._now + interval_s
        self._stage = Stage.MEASURING
        self._asked_at = self._waiting_since = self._now
        self._round += 1
        self._fields = {}
        return [Send(LOCAL, (b"INFO", section), (TAG, self._round, section)) for section in SECTIONS]

    def _take_reply(self, event: Replied) -> list[Any]:
        _, round_, subject = event.tag
        value = event.value
        if isinstance(value, ErrorReply):
            self.counters["replies_refused"] += 1
        if subject == "report":
            # One of the receivers is the agent itself.
            self.counters["reports_unheard"] += not isinstance(value, int) or value < 2
        elif subject == "channels":
            self._take_channels(value)
        elif round_ != self._round:
            return []
        elif subject == "subscribers":
            return self._take_subscribers(value)
        else:
            self._reply_bytes += len(value) if isinstance(value, bytes) else 0
            self._fields.update(parse_info(value))
            if subject == SECTIONS[-1]:
                return self._measured()
        return []

    def _measured(self) -> list[Any]:
        """Close the window: everything that the server had sent before it answered has been counted."""
        self._lag_s = self._now - self._asked_at
        self._waiting_since = None
        before, self._before = self._before, _Sample(self._asked_at, ServerInfo.parse(self._fields))
        if before is None:  # the beginning of a connection: there is nothing to compare with yet
            self._reply_bytes = 0
            self._stage = Stage.RESTING
            return self._alarm()
        self._stride = stride_for(self._pushes)
        window, self._window = self._window, self._new_window()
        self._work = self._digest(window, before, self._before)
        return self._alarm() + self._go_on()

    def _alarm(self) -> list[Any]:
        late = self._lag_s > self._options.lag_s_max
        self.counters["intervals_late"] += int(late)
        if late == self.late:
            return []
        self.late = late
        return [ObservationLate(late, self._lag_s)]

    def _go_on(self) -> list[Any]:
        """Do one step of the work in hand; with the last one come actions."""
        work = self._work
        assert work is not None, "there is work to go on with"
        try:
            next(work)
        except StopIteration as done:
            if self._work is work:
                self._work = None
            actions: list[Any] = done.value
            return actions
        return []

    def _digest(self, window: Window | SampledWindow, before: _Sample, after: _Sample) -> _Work:
        digested = Digest()
        yield from digest(window, self._channels, digested)
        self._large_bytes = large_from(digested.agent_messages, digested.agent_bytes)
        interval_s = after.at - before.at
        agent_bytes = digested.agent_bytes + self._reply_bytes
        self._reply_bytes = 0
        latest = rates(before.info, after.info, interval_s, agent_bytes)
        self._rates = latest.or_else(self._rates)
        return self._ask(_Measurement(digested, after, interval_s, window.publishers_uncounted))

    def _ask(self, measured: _Measurement) -> list[Any]:
        """Ask for the subscribers of the channels that messages came on, and of others whose turn it is."""
        self._stage = Stage.ASKING
        self._waiting_since = self._now
        self._measurement = measured
        now, limit = self._asked_at, self._options.numsub_per_round_max
        tracks = [load.track for load in measured.digested.loads]
        if len(tracks) > limit:
            turn_s = (math.ceil(len(tracks) / limit) - 0.5) * self._options.report_interval_s
            tracks = [track for track in tracks if track.asked_at < now - turn_s][:limit]
        self._channels.take_asked(tracks, now)
        self._idle = self._channels.stale(now - self._options.discovery_interval_s, limit - len(tracks))
        self._channels.take_asked(self._idle, now)
        tracks += self._idle
        actions = self._discover(now, measured.after.info)
        tag = (TAG, self._round, "subscribers")
        for start in range(0, len(tracks), NAMES_PER_NUMSUB):
            names = [track.physical for track in tracks[start : start + NAMES_PER_NUMSUB]]
            actions.append(Send(LOCAL, (b"PUBSUB", b"NUMSUB", *names), tag))
            self._missing += 1
        if self._missing:
            return actions
        self._waiting_since = None
        return actions + self._begin_composing(measured)

    def _discover(self, now: float, info: ServerInfo) -> list[Any]:
        """Ask for all channels, where that does not hold up the server."""
        if now < self._discover_at:
            return []
        self._discover_at = now + self._options.discovery_interval_s
        if "pubsub_channels" not in self._fields or info.channels_subscribed > self._options.discovery_channels_max:
            self.counters["discoveries_left_out"] += 1
            return []
        return [Send(LOCAL, (b"PUBSUB", b"CHANNELS"), (TAG, self._round, "channels"))]

    def _take_channels(self, reply: Any) -> None:
        names = [name for name in reply if isinstance(name, bytes)] if isinstance(reply, list) else []  # pyright: ignore[reportUnknownVariableType]
        self._reply_bytes += sum(map(len, names)) + REPLY_ITEM_BYTES * len(names)
        self._channels.discover(names)

    def _take_subscribers(self, reply: Any) -> list[Any]:
        if isinstance(reply, list):
            self._take_counts(reply[0::2], reply[1::2])  # pyright: ignore[reportUnknownArgumentType]
        self._missing -= 1
        if self._missing:
            return []
        self._waiting_since = None
        self._channels.drop_deserted(self._idle)
        assert self._measurement is not None, "a round asks after it has measured"
        return self._begin_composing(self._measurement)

    def _take_counts(self, names: Sequence[Any], counts: Sequence[Any]) -> None:
        for name, count in zip(names, counts, strict=False):
            if isinstance(name, bytes) and isinstance(count, int):
                self._channels.take_count(name, count)
                self._reply_bytes += len(name) + 2 * REPLY_ITEM_BYTES

    def _begin_composing(self, measured: _Measurement) -> list[Any]:
        self._stage = Stage.COMPOSING
        self._measurement = None
        self._work = self._compose(measured)
        return self._go_on()

    def _compose(self, measured: _Measurement) -> _Work:
        options = self._options
        composed = Composed()
        bounds = NamedBounds(
            channels_max=options.channels_per_report_max,
            who_channels_max=options.who_channels_max,
            who_per_channel_max=options.who_per_channel_max,
        )
        yield from compose(measured.digested, self._channels, bounds, measured.publishers_uncounted, composed)
        self._channels.make_room()
        report = self._report(measured, composed)
        self.last_report = report
        self._reported_until = measured.after.at
        self._sequence += 1
        self.blind_s_total += self._blind_s
        self._blind_s = 0.0
        self._stage = Stage.RESTING
        self._count(measured, composed)
        return [Send(LOCAL, (b"PUBLISH", BALANCER_CHANNEL, pack_report(report)), (TAG, self._round, "report"))]

    def _count(self, measured: _Measurement, composed: Composed) -> None:
        self.counters["reports_sent"] += 1
        self.counters["messages_observed"] += measured.digested.agent_messages
        self.counters["publications"] += composed.total.publications
        self.counters["messages_sent"] += composed.total.messages_sent
        self.counters["messages_untracked"] += composed.rest.messages_untracked
        self.counters["publishers_uncounted"] += composed.rest.publishers_uncounted

    def report_blind(self, info: ServerInfo, measured: Rates, interval_s: float, blind_s: float) -> Report:
        """Return a report of an agent that sees nothing at present: what INFO says of the server, and for how long.

        Outgoing bytes include what the server sent to the agent, which is not known then.
        """
        report = self._make_report(info, measured.or_else(Rates(0.0, 0.0, 0.0)), interval_s, observing=False)
        report = replace(report, observation_lag_s=max(self._lag_s, blind_s), blind_s=blind_s)
        self._sequence += 1
        self.counters["reports_sent"] += 1
        return report

    def _report(self, measured: _Measurement, composed: Composed) -> Report:
        interval_s = measured.interval_s
        estimate = Rates(composed.total.bytes_out / interval_s, composed.total.bytes_in / interval_s, 0.0)
        report = self._make_report(measured.after.info, self._rates.or_else(estimate), interval_s)
        is_estimate = self._rates.outgoing_bytes_per_s is None
        return replace(report, outgoing_is_estimate=is_estimate, columns=composed.columns, rest=composed.rest)

    def _make_report(self, info: ServerInfo, measured: Rates, interval_s: float, *, observing: bool = True) -> Report:
        """Return a report of the server alone."""
        return Report(
            server=self._server,
            incarnation=self._incarnation,
            sequence=self._sequence,
            interval_s=interval_s,
            plan_version=self.plan_version,
            outgoing_bytes_per_s_max=self._options.outgoing_bytes_per_s_max,
            outgoing_bytes_per_s=measured.outgoing_bytes_per_s or 0.0,
            incoming_bytes_per_s=measured.incoming_bytes_per_s or 0.0,
            cpu_ratio=measured.cpu_ratio or 0.0,
            memory_bytes=info.memory_bytes,
            memory_bytes_max=info.memory_bytes_max,
            connections=info.connections,
            connections_max=info.connections_max,
            output_buffer_bytes_max=info.output_buffer_bytes_max,
            client_buffers_bytes=info.client_buffers_bytes,
            channels_subscribed=info.channels_subscribed,
            observation_lag_s=self._lag_s,
            blind_s=self._blind_s,
            interruptions=self.counters["interruptions"],
            observing=observing,
            problems=self.problems,
        )

    # What is observed.

    def _new_window(self) -> Window | SampledWindow:
        """Return a window for the next interval, which samples when the one before had many messages."""
        self._pushes = 0
        options = self._options
        bounds = options.channels_max, options.records_max, options.publishers_max
        return Window(*bounds) if self._stride == 1 else SampledWindow(*bounds, self._stride, self._large_bytes)

    def _take_announcements(self, announcements: Sequence[bytes]) -> None:
        for data in announcements:
            try:
                message = unpack_control(data)
            except MalformedMessage:
                self.counters["announcements_malformed"] += 1
                continue
            if isinstance(message, Announcement):
                self._channels.take_announcement(message)
            else:
                self.counters["announcements_malformed"] += 1
        self.counters["announcements_dropped"] = self._channels.announcements_dropped


def _is_mine(tag: Any) -> bool:
    return isinstance(tag, tuple) and tag[:1] == (TAG,)  # pyright: ignore[reportUnknownVariableType]
