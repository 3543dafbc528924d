"""The channels that a publisher publishes to, and the numbering of their messages.

Only the methods here change these records (``tests/machines/test_writers.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

from dynamoth.plan.plan import Location
from dynamoth.protocol.envelope import QUIET_BITS, whole_ms
from dynamoth_client.machines.publisher.events import PublisherOptions
from dynamoth_client.machines.publisher.records import Check, PublisherServer

LEFT_MAX = 4
"""Servers that a channel has left and that are remembered: its latest messages there may not have been observed."""


@dataclass(slots=True, eq=False)
class PublishedChannel:
    """A channel that a publisher publishes to."""

    #: The number of the latest message; equal to ``floor`` before the first.
    sequence: int
    floor: int
    #: Where the latest message went, or the first will go; several under ALL_PUBLISHERS only.
    locations: tuple[Location, ...]
    epoch: int
    #: Of the local plan, when locations and epoch were looked up there.
    generation: int
    used_at: float
    #: Its messages carry no envelopes and no numbers.
    plain: bool = False
    #: Servers that the channel has left, or where the latest number is to be published; the latest last.
    left: tuple[str, ...] = ()
    #: The server of the only location, while messages need no decision: the hot path's one look-up.
    direct_server: PublisherServer | None = None
    physical: bytes = b""
    #: The latest check of the present route; None when it was confirmed, or is not in doubt.
    check: Check | None = None
    #: The version of the stored plan that named the present route when it was last read. -1: none has.
    version: int = -1

    @property
    def is_new(self) -> bool:
        """Whether no message has a number yet."""
        return self.sequence == self.floor

    def number(self, count: int, now: float) -> int:
        """Number the next ``count`` messages; return the first number, with the time since the message before it.

        It is packed as envelopes have it.
        """
        first = (self.sequence + 1) << QUIET_BITS | whole_ms(now - self.used_at)
        self.sequence += count
        self.used_at = now
        return first

    def decide(self, generation: int, now: float) -> None:
        """Note that the route of a message was decided by this generation of the local plan."""
        self.generation, self.used_at = generation, now

    def send_directly(self, server: PublisherServer | None) -> None:
        """Send the next messages to a server without a decision, or not any more."""
        self.direct_server, self.physical = server, self.locations[0].physical

    def doubt(self, check: Check) -> None:
        """Wait for a check of the present route."""
        self.check = check

    def confirm(self, check: Check, server: PublisherServer | None) -> None:
        """End a check; ``server`` is where the next messages may be sent directly."""
        if self.check is check:
            self.check = None
            if server is not None:
                self.direct_server = server

    def note_version(self, version: int) -> None:
        """Note the version of the stored plan that names the present route."""
        self.version = version

    def uses(self, server: str) -> bool:
        """Return whether messages went to a server lately, or go there."""
        return server in self.left or any(location.server == server for location in self.locations)

    def note_left(self, *servers: str) -> None:
        """Remember servers where some of the messages may be missing."""
        self.left = (*self.left, *servers)[-LEFT_MAX:]

    def follow(self, locations: tuple[Location, ...], epoch: int) -> bool:
        """Note where messages go from now on; return whether that is elsewhere than before."""
        changed = locations != self.locations
        if changed:
            servers = {location.server for location in locations}
            self.note_left(*(location.server for location in self.locations if location.server not in servers))
        self.locations, self.epoch = locations, epoch
        return changed

    def change_format(self, *, plain: bool) -> None:
        """Go on with envelopes, or without; numbers begin again (FIRST), as plain messages have none."""
        self.plain = plain
        self.floor = self.sequence

    def assert_consistent(self, name: bytes) -> None:
        """Assert the invariants that hold between events."""
        assert self.floor <= self.sequence, f"{name!r} is below its floor: {self.sequence} < {self.floor}"
        assert self.locations, f"{name!r} goes nowhere"
        assert len(self.left) <= LEFT_MAX, f"{name!r} has left {self.left}"
        assert self.check is None or self.check.channel == name, f"{name!r} waits for a check of {self.check}"
        if (server := self.direct_server) is not None:
            assert [server.id] == [each.server for each in self.locations], f"{name!r}: {server.id}, {self.locations}"
            assert self.physical == self.locations[0].physical, f"{name!r} goes to {self.physical!r}, {self.locations}"
            assert not self.plain and self.check is None, f"{name!r} needs a decision"


class Channels:
    """The channels of one publisher; the idle ones are forgotten."""

    def __init__(self, options: PublisherOptions) -> None:
        """Begin without channels."""
        self._options = options
        self.by_name: dict[bytes, PublishedChannel] = {}
        #: Every forgotten channel ended at or below this number, so that one that comes back begins above its past.
        self._floor = 0
        self._swept_at = 0.0

    def add(
        self, name: bytes, locations: tuple[Location, ...], epoch: int, generation: int, now: float, *, plain: bool
    ) -> PublishedChannel:
        """Begin to number a channel."""
        floor = self._floor
        channel = PublishedChannel(floor, floor, locations, epoch, generation, now, plain)
        self.by_name[name] = channel
        return channel

    def sweep(self, now: float) -> list[bytes]:
        """Forget the numbering of idle channels, and return their names. Called before the table grows."""
        channels, idle_s, channels_max = self.by_name, self._options.channel_idle_s, self._options.channels_max
        is_crowded = len(channels) >= channels_max
        if now - self._swept_at < idle_s / 4 and not is_crowded:
            return []
        self._swept_at = now
        idle = [name for name, channel in channels.items() if now - channel.used_at >= idle_s]
        if is_crowded and len(idle) * 4 < channels_max:
            by_age = sorted(channels.items(), key=lambda item: item[1].used_at)
            idle = [name for name, _ in by_age[: channels_max // 4]]
        for name in idle:
            self._floor = max(self._floor, channels.pop(name).sequence)
        return idle

    def check(self) -> None:
        """Assert the invariants that hold between events."""
        for name, channel in self.by_name.items():
            channel.assert_consistent(name)
