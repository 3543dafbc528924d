"""Judges what end users have seen, from the files of ``bench.edge_people``. It knows nothing of the product.

Of a logged channel every user must have each offset once and in order from where the subscription began, with the
same publication at the same place for everybody, and that of the publisher's answer; a gap stands in for exactly the
offsets that it names. Of a live channel, numbers of each publisher rise, and what is missing follows a gap.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STORIES_MAX = 30
LATE_S = 1.0
"""What comes this long after the publisher had its answer counts as late."""


@dataclass(frozen=True, slots=True)
class Disturbance:
    """What a trial has done to the system: from when until when."""

    what: str
    begin: float
    end: float


@dataclass(slots=True)
class _Logged:
    """One user's subscription to a logged channel."""

    epoch: str
    offset: int


@dataclass(slots=True)
class _Live:
    """One user's subscription to a live channel."""

    #: By publisher: the latest number, and how many gaps there were before it.
    latest: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    gaps: int = 0
    #: Whether it has begun before anything was published.
    is_first: bool = True


class Judge:
    """Reads files, and finds violations.

    Args:
        log_losses_allowed: whether log servers may lose everything (a gap with another epoch follows).
        retention_allowed: whether a gap within an epoch is right.
        disturbances: to say how late deliveries were after them.

    """

    def __init__(
        self,
        *,
        log_losses_allowed: bool = False,
        retention_allowed: bool = False,
        disturbances: Sequence[Disturbance] = (),
    ) -> None:
        self._log_losses_allowed = log_losses_allowed
        self._retention_allowed = retention_allowed
        self._disturbances = disturbances
        self.counts: Counter[str] = Counter()
        #: The first violations, and how many there were of each kind.
        self.stories: list[str] = []
        self.violations: Counter[str] = Counter()
        #: (channel, publisher, number) to when the publisher had its answer.
        self._answered: dict[tuple[str, str, str], float] = {}
        self._begun: dict[tuple[str, str, str], float] = {}
        #: The publication at each channel, epoch and offset.
        self._content: dict[tuple[str, str, int], tuple[str, str]] = {}
        self._places: dict[tuple[str, str, str], tuple[str, int]] = {}
        #: By channel: the place of the latest answered publication.
        self._tips: dict[str, tuple[float, str, int]] = {}
        self._last_numbers: dict[tuple[str, str], int] = {}
        self._publish_errors: Counter[str] = Counter()
        self._logged: dict[tuple[str, str], _Logged] = {}
        self._live: dict[tuple[str, str], _Live] = {}
        self._interrupted: dict[str, float] = {}
        self._interruptions: list[float] = []
        self._gap_reasons: Counter[str] = Counter()
        self._after_s: defaultdict[str, float] = defaultdict(float)
        self._late_s_max = 0.0
        self._latencies: list[float] = []
        self._publish_s_max = 0.0
        self._repeats_after_crash_max = 0

    def judge(self, files: Iterable[Path]) -> dict[str, Any]:
        """Judge, and return a summary."""
        paths = list(files)
        for path in paths:
            self._read_publications(path)
        for path in paths:
            self._read_deliveries(path)
        self._judge_ends()
        self._latencies.sort()
        return {
            **self.counts,
            "violations": dict(self.violations),
            "gap_reasons": dict(self._gap_reasons),
            "publish_errors": dict(self._publish_errors),
            "publish_s_max": round(self._publish_s_max, 2),
            "interruptions": len(self._interruptions),
            "interruption_s_max": round(max(self._interruptions, default=0.0), 2),
            "still_interrupted": len(self._interrupted),
            "latency_ms_p50": self._quantile_ms(0.5),
            "latency_ms_p99": self._quantile_ms(0.99),
            "late_s_max": round(self._late_s_max, 2),
            "late_after_return_s_max": {what: round(late, 2) for what, late in sorted(self._after_s.items())},
            "repeats_after_crash_max": self._repeats_after_crash_max,
            "stories": self.stories,
        }

    def _quantile_ms(self, ratio: float) -> float:
        if not self._latencies:
            return 0.0
        return round(self._latencies[math.ceil(ratio * len(self._latencies)) - 1] * 1000, 1)

    def _blame(self, kind: str, story: str) -> None:
        self.violations[kind] += 1
        if len(self.stories) < STORIES_MAX and self.violations[kind] <= STORIES_MAX // 4:
            self.stories.append(f"{kind}: {story}")

    # Publications.

    def _read_publications(self, path: Path) -> None:
        with path.open() as lines:
            for line in lines:
                if line[0] in "BPX":
                    self._take_publication(line.rstrip("\n").split("\t"))

    def _take_publication(self, fields: list[str]) -> None:
        kind, publisher, channel, number = fields[:4]
        key = channel, publisher, number
        if kind == "B":
            self._begun[key] = float(fields[4])
        elif kind == "X":
            self.counts["publishes_failed"] += 1
            self._publish_errors[fields[5][:110]] += 1
            self._publish_s_max = max(self._publish_s_max, float(fields[4]) - self._begun[key])
        else:
            at = float(fields[6])
            self.counts["published"] += 1
            self._answered[key] = at
            self._publish_s_max = max(self._publish_s_max, at - self._begun[key])
            self._last_numbers[channel, publisher] = int(number)
            if fields[4] != "-":
                place = fields[4], int(fields[5])
                self._store(channel, place, publisher, number, "a publisher's answer")
                if at > self._tips.get(channel, (0.0,))[0]:
                    self._tips[channel] = at, *place

    def _store(self, channel: str, place: tuple[str, int], publisher: str, number: str, who: str) -> None:
        content = self._content.setdefault((channel, *place), (publisher, number))
        if content != (publisher, number):
            self._blame("different", f"{channel} {place}: {content}, but for {who} {publisher} {number}")
        first = self._places.setdefault((channel, publisher, number), place)
        if first != place:
            self._blame("stored twice", f"{channel} {publisher} {number}: at {first} and at {place}")

    # Deliveries.

    def _read_deliveries(self, path: Path) -> None:
        with path.open() as lines:
            for line in lines:
                fields = line.rstrip("\n").split("\t")
                match fields[0]:
                    case "D":
                        self._deliver(*fields[1:8])
                    case "S":
                        self._subscribe(*fields[1:5])
                    case "G":
                        self._gap(fields)
                    case "V":
                        self._serve(fields[1], fields[3] == "1", float(fields[4]))
                    case "I":
                        self._interrupted.setdefault(fields[1], float(fields[2]))
                    case "F":
                        self._blame("user failed", " ".join(fields[1:]))
                    case _:
                        pass

    def _serve(self, user: str, moved: bool, at: float) -> None:
        self.counts["moves"] += moved
        begun = self._interrupted.pop(user, None)
        if begun is not None:
            self._interruptions.append(at - begun)

    def _subscribe(self, user: str, channel: str, epoch: str, offset: str) -> None:
        if epoch == "-":
            former = self._live.get((user, channel))
            self._live[user, channel] = _Live(is_first=former is None)
            return
        former_place = self._logged.get((user, channel))
        begin = _Logged(epoch, int(offset))
        self._logged[user, channel] = begin
        if former_place is not None and former_place.epoch == epoch:
            repeats = former_place.offset - begin.offset
            self._repeats_after_crash_max = max(self._repeats_after_crash_max, repeats)
            if repeats < 0:
                self._blame("position ahead", f"{user} {channel}: {-repeats} were stored as handled, and were not")

    def _deliver(
        self, user: str, channel: str, epoch: str, offset: str, publisher: str, number: str, at_text: str
    ) -> None:
        self.counts["delivered"] += 1
        self._time(channel, publisher, number, float(at_text))
        if epoch == "-":
            self._deliver_live(user, channel, publisher, int(number))
            return
        place, to = self._logged[user, channel], int(offset)
        self._store(channel, (epoch, to), publisher, number, user)
        if epoch != place.epoch:
            self._blame("epoch", f"{user} {channel}: from {place} to {epoch} {offset} without a gap")
        elif to <= place.offset:
            self._blame("repeated", f"{user} {channel}: {offset} behind {place}")
            return
        elif to > place.offset + 1:
            self._blame("lost", f"{user} {channel}: from {place} to {offset} without a gap")
        place.epoch, place.offset = epoch, to

    def _deliver_live(self, user: str, channel: str, publisher: str, number: int) -> None:
        state = self._live[user, channel]
        known = state.latest.get(publisher)
        if known is None:
            if not state.is_first:
                state.latest[publisher] = number, state.gaps
                return
            known = 0, 0
        latest, gaps = known
        if number <= latest:
            if (channel, publisher, str(number)) in self._answered:
                self._blame("live order", f"{user} {channel} {publisher}: {number} behind {latest}")
            return
        missing = [each for each in range(latest + 1, number) if (channel, publisher, str(each)) in self._answered]
        if missing:
            self.counts["live_missing"] += len(missing)
            if gaps == state.gaps:
                when = self._answered[channel, publisher, str(missing[0])]
                self._blame(
                    "live lost", f"{user} {channel} {publisher}: {missing[:3]} before {number} at {when:.2f}, no gap"
                )
        state.latest[publisher] = number, state.gaps

    def _gap(self, fields: list[str]) -> None:
        _, user, channel, first, last, _, epoch, offset, at, *reason = fields
        self.counts["gaps"] += 1
        self._gap_reasons[" ".join(reason)] += 1
        if (live := self._live.get((user, channel))) is not None:
            live.gaps += 1
            return
        place = self._logged[user, channel]
        story = f"{user} {channel}: from {place} {fields[3:]} at {at}"
        if epoch == "-":
            self._blame("gap without place", story)
            return
        if first != str(place.offset + 1):
            self._blame("gap not exact", story)
        if epoch == place.epoch:
            if last != offset or int(offset) <= place.offset:
                self._blame("gap not exact", story)
            if not self._retention_allowed:
                self._blame("gap within an epoch", story)
            self.counts["offsets_in_gaps"] += int(offset) - place.offset
        else:
            self.counts["logs_lost"] += 1
            self.counts["skipped_in_new_epoch"] += int(offset)
            if not self._log_losses_allowed:
                self._blame("log lost", story)
        place.epoch, place.offset = epoch, int(offset)

    # Times.

    def _time(self, channel: str, publisher: str, number: str, at: float) -> None:
        key = channel, publisher, number
        self._latencies.append(at - self._begun[key])
        late = at - self._answered.get(key, at)
        if late < LATE_S:
            return
        self._late_s_max = max(self._late_s_max, late)
        since = at - late
        after = [
            (at - max(since, each.end), each.what)
            for each in self._disturbances
            if each.begin < at and since < each.end
        ]
        what = min(after)[1] if after else "none"
        self._after_s[what] = max(self._after_s[what], min(after)[0] if after else late)

    # The end.

    def _judge_ends(self) -> None:
        for (user, channel), place in self._logged.items():
            tip = self._tips.get(channel)
            if tip is not None and (place.epoch != tip[1] or place.offset < tip[2]):
                self._blame("end missing", f"{user} {channel}: at {place}, of {tip}")
        for (user, channel), state in self._live.items():
            for (of, publisher), number in self._last_numbers.items():
                if of == channel and state.latest.get(publisher, (0, 0))[0] < number:
                    latest = state.latest.get(publisher)
                    self._blame("end missing", f"{user} {channel} {publisher}: at {latest}, of {number}")
