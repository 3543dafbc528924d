"""The local load analyzer: measures one server and reports to the balancer (Dynamoth, section III-A).

Theory of operation
-------------------
It shares the agent's connection with the dispatcher, which has subscribed it to everything. Messages are counted as
they come (``counting``, or ``sampling`` at a busy server). Once per interval there is a round (``round``) in three
stages::

    MEASURING   INFO was sent. Its last reply closes the window, so both describe the time between the same two
                points of the connection. The messages of the window are added up by channel (``digest``).
    ASKING      NUMSUB was sent for the channels of the window: how many copies went out.
    COMPOSING   the report is put together, and published at this server for the balancer.

The reply of INFO comes after everything that the server had sent before it. So the time that the reply takes is the
delay of the observation; nothing is published to measure it.

The analyzer is blind from the last report before the connection is lost until it is up again. The next report says for
how long. Redis disconnects an observer that is too slow, which is such an interruption.

To find channels without messages, it asks for all channels now and then, unless there are so many that the question
would delay the server.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import replace
from typing import Any, assert_never

from dynamoth.errors import MalformedMessage
from dynamoth.machine.events import ErrorReply, LinkDown, LinkUp, Pushed, Replied, Send, Start, Tick
from dynamoth.names import BALANCER_CHANNEL
from dynamoth.protocol.control import Announcement, unpack_control
from dynamoth.protocol.reports import Report, pack_report
from dynamoth_lla.channels import TrackedChannels
from dynamoth_lla.counting import Window
from dynamoth_lla.digest import Composed, Digest, NamedBounds, compose, digest
from dynamoth_lla.options import LoadAnalyzerOptions
from dynamoth_lla.round import LoadAnalyzerAction, Measurement, ObservationLate, Round, Sample, Stage, Work
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


LoadAnalyzerEvent = Start | Pushed | Tick | Replied | LinkUp | LinkDown


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
        #: The version of the plan that the dispatcher acts upon. Set by the owner of both.
        self.plan_version: int | None = None
        #: The channels that the plan names: they do not follow their slot. Set with the version.
        self.planned: Container[bytes] = ()
        self.counters: Counter[str] = Counter()
        #: The time that no report has described.
        self.blind_s_total = 0.0
        #: The latest report that was sent.
        self.last_report: Report | None = None
        #: Other problems to report: see ``Report.problems``. Set by the owner.
        self.problems: tuple[tuple[str, str], ...] = ()
        #: Whether the latest observation was later than ``lag_s_max``.
        self.late = False
        self._run_id: str | None = None
        #: The present round, or the latest one.
        self.round = Round()
        #: When the next round begins; None while the link is down.
        self._round_at: float | None = None
        #: Pushes of any kind since the window was opened.
        self._pushes = 0
        #: The sampling stride, and the size from which on messages are large, both from the interval before.
        self._stride = 1
        self._large_bytes = large_from(0, 0)
        self._window = self._new_window()
        #: The followed channels.
        self.channels = TrackedChannels(
            options.channels_max, options.announced_per_channel_max, options.announced_clients_max
        )
        #: The measurement that the next one is compared with; None at the beginning of a connection.
        self._before: Sample | None = None
        #: The latest known rates of this connection.
        self._rates = Rates(None, None, None)
        #: Bytes of the replies to our own commands since the latest measurement.
        self._reply_bytes = 0
        self._sequence = 0
        #: Whether the link was up before.
        self._was_up = False
        #: The end of the time that reports have described; None before the first.
        self.reported_until: float | None = None
        self._blind_s = 0.0
        self._lag_s = 0.0
        self._discover_at = 0.0
        #: The time of the latest event other than Pushed.
        self._now = 0.0

    def handle(self, event: LoadAnalyzerEvent, now: float) -> list[LoadAnalyzerAction]:
        """Handle one event of the link ``local``, or a tick; return the actions to execute, in order."""
        if isinstance(event, Pushed):  # nearly all of them, so without a match
            if event.link == LOCAL:
                self._pushes += len(event.messages)
                if announcements := self._window.observe(event.messages):
                    self._on_announcements(announcements)
            return []
        match event:
            case Tick():
                self._now = now
                return self._on_tick()
            case Replied(link, (owner, *_)) if link == LOCAL and owner == TAG:
                self._now = now
                return self._on_reply(event)
            case LinkUp(link, run_id) if link == LOCAL:
                self._now = now
                return self._on_link_up(run_id)
            case LinkDown(link) if link == LOCAL:
                self._now = now
                self._on_link_down()
                return []
            case Start() | Replied() | LinkUp() | LinkDown():
                return []  # of another link, or of another part of the agent
            case _:
                assert_never(event)

    def deadline(self) -> float | None:
        """Return when the next round begins, or a time that is past while there is work left of the present one."""
        if self.round.work is not None:
            return self._now
        return self._round_at if self.round.stage is Stage.RESTING else None

    def check(self) -> None:
        """Assert the invariants between the records, after each event."""
        self.round.check()
        self.channels.check()
        assert self._round_at is not None or self.round.stage is Stage.RESTING, "a round needs a connection"

    def observation_lag_s(self, now: float) -> float:
        """Return how late the observation is: as measured last, or as it must be by now."""
        waiting_s = 0.0 if self.round.waiting_since is None else now - self.round.waiting_since
        return max(self._lag_s, waiting_s)

    # The connection.

    def _on_link_up(self, run_id: str | None) -> list[LoadAnalyzerAction]:
        restarted = self._run_id is not None and run_id != self._run_id
        if restarted:
            self.channels.clear()
        self._run_id = run_id
        self._before = None
        self._rates = Rates(None, None, None)
        self._reply_bytes = 0
        self._window = self._new_window()
        self.counters["interruptions"] += self._was_up and not restarted  # a restart says nothing about the agent
        self._was_up = True
        if self.reported_until is not None:
            self._blind_s = self._now - self.reported_until
        self._round_at = self._now
        return self._begin_round()

    def _on_link_down(self) -> None:
        """Drop the counts since the last report, as nothing says until when they are complete."""
        self.round.abandon()
        self._round_at = None

    # The round.

    def _on_tick(self) -> list[LoadAnalyzerAction]:
        if self.round.work is not None:
            return self._go_on()
        if self.round.stage is Stage.RESTING and self._round_at is not None and self._now >= self._round_at:
            return self._begin_round()
        return []

    def _begin_round(self) -> list[LoadAnalyzerAction]:
        """Ask the server for INFO. Rounds keep to a grid; one that took too long skips those it missed."""
        interval_s = self._options.report_interval_s
        assert self._round_at is not None, "a round begins while the link is up"
        self._round_at += interval_s
        if self._round_at <= self._now:
            self._round_at = self._now + interval_s
        self.round.begin(self._now)
        return [Send(LOCAL, (b"INFO", section), (TAG, self.round.number, section)) for section in SECTIONS]

    def _on_reply(self, event: Replied) -> list[LoadAnalyzerAction]:
        _, number, subject = event.tag
        value = event.value
        if isinstance(value, ErrorReply):
            self.counters["replies_refused"] += 1
        if subject == "report":
            # One of the receivers is the agent itself.
            self.counters["reports_unheard"] += not isinstance(value, int) or value < 2
        elif subject == "channels":
            self._on_channels(value)
        elif number != self.round.number:
            return []
        elif subject == "subscribers":
            return self._on_subscribers(value)
        else:
            self._reply_bytes += len(value) if isinstance(value, bytes) else 0
            self.round.fields.update(parse_info(value))
            if subject == SECTIONS[-1]:
                return self._measured()
        return []

    def _measured(self) -> list[LoadAnalyzerAction]:
        """Close the window: everything that the server had sent before it answered has been counted."""
        self._lag_s = self._now - self.round.asked_at
        self.round.waiting_since = None
        before, self._before = self._before, Sample(self.round.asked_at, ServerInfo.parse(self.round.fields))
        if before is None:  # the beginning of a connection: there is nothing to compare with yet
            self._reply_bytes = 0
            self.round.stage = Stage.RESTING
            return self._alarm()
        self._stride = stride_for(self._pushes)
        window, self._window = self._window, self._new_window()
        self.round.work = self._digest(window, before, self._before)
        return self._alarm() + self._go_on()

    def _alarm(self) -> list[LoadAnalyzerAction]:
        late = self._lag_s > self._options.lag_s_max
        self.counters["intervals_late"] += int(late)
        if late == self.late:
            return []
        self.late = late
        return [ObservationLate(late, self._lag_s)]

    def _go_on(self) -> list[LoadAnalyzerAction]:
        """Do one step of the present task; the last step returns actions."""
        work = self.round.work
        assert work is not None, "there is work to go on with"
        try:
            next(work)
        except StopIteration as done:
            if self.round.work is work:
                self.round.work = None
            actions: list[LoadAnalyzerAction] = done.value
            return actions
        return []

    def _digest(self, window: Window | SampledWindow, before: Sample, after: Sample) -> Work:
        digested = Digest()
        yield from digest(window, self.channels, digested)
        self._large_bytes = large_from(digested.agent_messages, digested.agent_bytes)
        interval_s = after.at - before.at
        agent_bytes = digested.agent_bytes + self._reply_bytes
        self._reply_bytes = 0
        latest = rates(before.info, after.info, interval_s, agent_bytes)
        self._rates = latest.or_else(self._rates)
        return self._ask(Measurement(digested, after, interval_s, window.publishers_uncounted))

    def _ask(self, measured: Measurement) -> list[LoadAnalyzerAction]:
        """Ask for the subscribers of the channels with messages, and of others whose turn it is."""
        self.round.stage = Stage.ASKING
        self.round.waiting_since = self._now
        self.round.measurement = measured
        now, limit = self.round.asked_at, self._options.numsub_per_round_max
        tracks = [load.track for load in measured.digested.loads]
        if len(tracks) > limit:
            turn_s = (math.ceil(len(tracks) / limit) - 0.5) * self._options.report_interval_s
            tracks = [track for track in tracks if track.asked_at < now - turn_s][:limit]
        self.channels.take_asked(tracks, now)
        self.round.idle = self.channels.stale(now - self._options.discovery_interval_s, limit - len(tracks))
        self.channels.take_asked(self.round.idle, now)
        tracks += self.round.idle
        actions = self._discover(now, measured.after.info)
        tag = (TAG, self.round.number, "subscribers")
        for start in range(0, len(tracks), NAMES_PER_NUMSUB):
            names = [track.physical for track in tracks[start : start + NAMES_PER_NUMSUB]]
            actions.append(Send(LOCAL, (b"PUBSUB", b"NUMSUB", *names), tag))
            self.round.missing += 1
        if self.round.missing:
            return actions
        self.round.waiting_since = None
        return actions + self._begin_composing(measured)

    def _discover(self, now: float, info: ServerInfo) -> list[LoadAnalyzerAction]:
        """Ask for all channels, unless that would delay the server."""
        if now < self._discover_at:
            return []
        self._discover_at = now + self._options.discovery_interval_s
        if (
            "pubsub_channels" not in self.round.fields
            or info.channels_subscribed > self._options.discovery_channels_max
        ):
            self.counters["discoveries_left_out"] += 1
            return []
        return [Send(LOCAL, (b"PUBSUB", b"CHANNELS"), (TAG, self.round.number, "channels"))]

    def _on_channels(self, reply: Any) -> None:
        names = [name for name in reply if isinstance(name, bytes)] if isinstance(reply, list) else []  # pyright: ignore[reportUnknownVariableType]
        self._reply_bytes += sum(map(len, names)) + REPLY_ITEM_BYTES * len(names)
        self.channels.discover(names)

    def _on_subscribers(self, reply: Any) -> list[LoadAnalyzerAction]:
        if isinstance(reply, list):
            self._take_counts(reply[0::2], reply[1::2])  # pyright: ignore[reportUnknownArgumentType]
        self.round.missing -= 1
        if self.round.missing:
            return []
        self.round.waiting_since = None
        self.channels.drop_deserted(self.round.idle)
        assert self.round.measurement is not None, "a round asks after it has measured"
        return self._begin_composing(self.round.measurement)

    def _take_counts(self, names: Sequence[Any], counts: Sequence[Any]) -> None:
        for name, count in zip(names, counts, strict=False):
            if isinstance(name, bytes) and isinstance(count, int):
                self.channels.take_count(name, count)
                self._reply_bytes += len(name) + 2 * REPLY_ITEM_BYTES

    def _begin_composing(self, measured: Measurement) -> list[LoadAnalyzerAction]:
        self.round.stage = Stage.COMPOSING
        self.round.measurement = None
        self.round.work = self._compose(measured)
        return self._go_on()

    def _compose(self, measured: Measurement) -> Work:
        options = self._options
        composed = Composed()
        bounds = NamedBounds(
            channels_max=options.channels_per_report_max,
            who_channels_max=options.who_channels_max,
            who_per_channel_max=options.who_per_channel_max,
        )
        yield from compose(
            measured.digested, self.channels, bounds, self.planned, measured.publishers_uncounted, composed
        )
        self.channels.make_room()
        report = self._report(measured, composed)
        self.last_report = report
        self.reported_until = measured.after.at
        self._sequence += 1
        self.blind_s_total += self._blind_s
        self._blind_s = 0.0
        self.round.stage = Stage.RESTING
        self._count(measured, composed)
        return [Send(LOCAL, (b"PUBLISH", BALANCER_CHANNEL, pack_report(report)), (TAG, self.round.number, "report"))]

    def _count(self, measured: Measurement, composed: Composed) -> None:
        rest, total = composed.rest, composed.total
        self.counters += Counter(
            reports_sent=1,
            messages_observed=measured.digested.agent_messages,
            publications=total.publications,
            messages_sent=total.messages_sent,
            messages_untracked=rest.messages_untracked,
            publishers_uncounted=rest.publishers_uncounted,
        )

    def report_blind(self, info: ServerInfo, measured: Rates, interval_s: float, blind_s: float) -> Report:
        """Return a report for an agent that sees nothing at present: the figures of INFO, and for how long.

        Outgoing bytes include those that the server sent to the agent, which are not known then.
        """
        report = self._make_report(info, measured.or_else(Rates(0.0, 0.0, 0.0)), interval_s, observing=False)
        report = replace(report, observation_lag_s=max(self._lag_s, blind_s), blind_s=blind_s)
        self._sequence += 1
        self.counters["reports_sent"] += 1
        return report

    def _report(self, measured: Measurement, composed: Composed) -> Report:
        interval_s, total = measured.interval_s, self._rates.outgoing_bytes_per_s
        estimate = Rates(composed.total.bytes_out / interval_s, composed.total.bytes_in / interval_s, 0.0)
        report = self._make_report(measured.after.info, self._rates.or_else(estimate), interval_s)
        control = measured.digested.control_bytes / interval_s
        if total is not None:  # nobody may have heard the control messages, but somebody those of applications
            control = min(control, max(0.0, total - composed.total.bytes_out / interval_s))
            report = replace(report, outgoing_bytes_per_s=total - control)
        return replace(
            report,
            outgoing_is_estimate=total is None,
            control_bytes_per_s=control,
            columns=composed.columns,
            rest=composed.rest,
            slots=composed.slots,
        )

    def _make_report(self, info: ServerInfo, measured: Rates, interval_s: float, *, observing: bool = True) -> Report:
        """Return a report of the server without channels."""
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

    # Observation.

    def _new_window(self) -> Window | SampledWindow:
        """Return a window for the next interval; it samples if the interval before had many messages."""
        self._pushes = 0
        options = self._options
        bounds = options.channels_max, options.records_max, options.publishers_max
        return Window(*bounds) if self._stride == 1 else SampledWindow(*bounds, self._stride, self._large_bytes)

    def _on_announcements(self, announcements: Sequence[bytes]) -> None:
        for data in announcements:
            try:
                message = unpack_control(data)
            except MalformedMessage:
                self.counters["announcements_malformed"] += 1
                continue
            if isinstance(message, Announcement):
                self.channels.take_announcement(message)
            else:
                self.counters["announcements_malformed"] += 1
        self.counters["announcements_dropped"] = self.channels.announcements_dropped
