"""A simulated connection between an end user and a broker: frames in order, both ways, until it ends or breaks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from dynamoth_sim.world.network import Delays, End, Packet, Pipe
from dynamoth_sim.world.world import World

WireFrame = Mapping[str, Any]
"""A frame as ``dynamoth.edge.frames.to_wire`` makes it."""

LOST = 1006
"""The close code of a connection that has ended without one."""

FRAME_BYTES = 100


class WireEnd(Protocol):
    """What is at one end of a wire."""

    def receive(self, wire: Wire, frame: WireFrame) -> None:
        """Take a frame."""
        ...

    def ended(self, wire: Wire, code: int, reason: str) -> None:
        """Note that nothing more comes."""
        ...


class Wire:
    """One connection. ``number`` is the user's name of it, ``id`` the broker's.

    With more than ``unread_max`` frames that the user has not read, the broker's transport says that they are too many.
    """

    def __init__(
        self, world: World, delays: Delays, id_: int, number: int, user: WireEnd, broker: WireEnd, unread_max: int
    ) -> None:
        self.id = id_
        self.number = number
        #: Whether the broker knows of it.
        self.is_opened = False
        self._up = Pipe(world, delays, lambda packet: self._take(packet, broker))
        self._down = Pipe(world, delays, lambda packet: self._take(packet, user))
        self._user = user
        self._unread_max = unread_max
        #: Frames that were sent to the user and did not arrive.
        self.unread = 0
        self._is_full = False
        #: Called when too many frames wait, and when most of them have gone.
        self.on_full: Callable[[Wire], None] = lambda wire: None
        self.on_room: Callable[[Wire], None] = lambda wire: None

    @property
    def is_over(self) -> bool:
        """Whether nothing can be sent either way."""
        return self._up.ended and self._down.ended

    def _take(self, packet: Packet, end: WireEnd) -> None:
        for item in packet.items:
            if isinstance(item, End):
                code, _, reason = item.reason.partition(" ")
                end.ended(self, int(code), reason)
                continue
            if end is self._user:
                self.unread -= 1
                if self._is_full and self.unread <= self._unread_max // 4:
                    self._is_full = False
                    self.on_room(self)
            end.receive(self, item)

    def send_up(self, frame: WireFrame) -> None:
        """Send a frame to the broker."""
        self._up.send(frame, FRAME_BYTES)

    def send_down(self, frame: WireFrame) -> None:
        """Send a frame to the user."""
        if self._down.ended:
            return
        self.unread += 1
        self._down.send(frame, FRAME_BYTES)
        if self.unread > self._unread_max and not self._is_full:
            self._is_full = True
            self.on_full(self)

    def close_by_user(self, code: int, reason: str) -> None:
        """Close it from the user's end: the broker gets what was sent before."""
        self._up.end(f"{code} {reason}")
        self._down.ended = True

    def close_by_broker(self, code: int, reason: str) -> None:
        """Close it from the broker's end: the user gets what was sent before."""
        self._down.end(f"{code} {reason}")
        self._up.ended = True

    def lose(self, notice_s_max: float, random: Callable[[], float]) -> None:
        """Break it, with what is in flight. Each end learns of it at a time of its own."""
        self._up.cut(f"{LOST} lost", notice_s_max * random())
        self._down.cut(f"{LOST} lost", notice_s_max * random())

    def hold_down(self) -> None:
        """Let the user read nothing until ``release_down``."""
        self._down.hold()

    def release_down(self) -> None:
        """Let the user read again."""
        self._down.release()

    def hold_up(self) -> None:
        """Let nothing arrive at the broker until ``release_up``."""
        self._up.hold()

    def release_up(self) -> None:
        """Let everything arrive at the broker that was sent."""
        self._up.release()

    def hold(self) -> None:
        """Let nothing arrive either way, for good: nobody learns of it."""
        self._up.hold()
        self._down.hold()
