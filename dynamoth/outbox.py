"""Commands that must arrive: kept until the server has answered, and sent again, in order, over the next connection.

A command may so be executed twice (the connection broke after it took effect and before its reply): the sequence
numbers in the envelopes make that harmless.

What a link is given and the server has not answered is bounded in bytes: the rest waits here until replies come. So
however much is put at once, a server that works takes it, and little is copied into the link's buffers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate, islice, repeat
from operator import itemgetter
from typing import Any

from dynamoth.events import Send, SendAll

Command = Sequence[bytes | str]
"""Its last part is the one that may be large."""

UNDER_WAY_BYTES_MAX = 64 * 1024 * 1024
"""Past so many unanswered bytes no more are sent until half of them are answered. More than a fast network holds, and
so little that a link that bounds what waits to be written (256 MiB) does not end for it. A larger command goes too,
when its turn has come."""

_last_part = itemgetter(-1)


class Outbox:
    """First in, first out, over one link, at least once, bounded.

    The owner calls :meth:`put` for each command, tells of the link's events, and executes what it is given. After
    replies it calls :meth:`flush` if something is ``held``.
    """

    __slots__ = ("_items", "_sent", "_sent_bytes", "_up", "bound", "held", "link")

    def __init__(self, link: str, bound: int) -> None:
        """Make an empty outbox that holds at most ``bound`` unanswered commands; the link is down at first."""
        self.link = link
        self.bound = bound
        #: Unanswered commands, oldest first.
        self._items: deque[tuple[Command, Any]] = deque()
        #: How many of them, from the oldest, were sent over the present connection.
        self._sent = 0
        #: Their bytes while something is held; else at least that, as what is answered stays counted until it matters.
        self._sent_bytes = 0
        self._up = False
        #: Whether the link is up, and the rest waits because too many bytes are unanswered.
        self.held = False

    def __len__(self) -> int:
        """Return how many commands are unanswered."""
        return len(self._items)

    @property
    def room(self) -> int:
        """Return how many commands more can be put."""
        return self.bound - len(self._items)

    @property
    def full(self) -> bool:
        """Whether the bound is reached; ``put`` then refuses."""
        return len(self._items) >= self.bound

    def put(self, args: Command, token: Any = None) -> list[Send | SendAll]:
        """Add a command. ``token`` comes back from :meth:`replied`. The caller has checked ``full``."""
        items = self._items
        assert len(items) < self.bound, f"outbox of {self.link} is full"
        items.append((args, token))
        if not self._up or self.held or len(items) - self._sent > 1 or self._sent_bytes > UNDER_WAY_BYTES_MAX:
            return self.flush()
        self._sent += 1
        self._sent_bytes += len(args[-1])
        return [Send(self.link, args, self)]

    def put_later(self, args: Command, token: Any = None) -> None:
        """Add a command as :meth:`put`, to be sent before the next one, or by :meth:`flush`."""
        assert len(self._items) < self.bound, f"outbox of {self.link} is full"
        self._items.append((args, token))

    def flush(self) -> list[Send | SendAll]:
        """Send what was put and not sent, as much of it as may be under way; while the link is down, when it is up."""
        unsent = len(self._items) - self._sent
        if not self._up or not unsent or (self.held and self._sent_bytes > UNDER_WAY_BYTES_MAX // 2):
            return []
        if unsent == 1 and self._sent_bytes <= UNDER_WAY_BYTES_MAX:
            args = self._items[-1][0]
            self._sent += 1
            self._sent_bytes += len(args[-1])
            self.held = False
            return [Send(self.link, args, self)]
        newest_first = [args for args, _ in islice(reversed(self._items), unsent)]
        commands = self._some_of(newest_first[::-1])
        return [SendAll(self.link, commands, self)] if commands else []

    def put_all(self, commands: Sequence[Command], token: Any) -> list[Send | SendAll]:
        """Add commands, at most ``room``, which have one token in common; only while the link is up."""
        assert self._up and len(commands) <= self.room, f"no room in the outbox of {self.link}, or it is down"
        assert self.held or self._sent == len(self._items), f"the outbox of {self.link} holds what is to be sent first"
        self._items.extend(zip(commands, repeat(token)))  # without strict: the second has no end
        if self.held:
            return self.flush()
        commands = self._some_of(commands)
        return [SendAll(self.link, commands, self)] if commands else []

    def _some_of(self, unsent: Sequence[Command]) -> Sequence[Command]:
        """Return as much as may be under way of everything that was not sent: it is sent now."""
        more_bytes = sum(map(len, map(_last_part, unsent)))
        if self._sent_bytes + more_bytes > UNDER_WAY_BYTES_MAX:
            if not self.held:
                self._sent_bytes = sum(len(args[-1]) for args, _ in islice(self._items, self._sent))
            unsent = _fitting(unsent, UNDER_WAY_BYTES_MAX - self._sent_bytes)
            more_bytes = sum(map(len, map(_last_part, unsent)))
        self._sent += len(unsent)
        self._sent_bytes += more_bytes
        self.held = self._sent < len(self._items)
        return unsent

    def link_up(self) -> list[Send]:
        """Send everything that is unanswered, or as much of it as may be under way, over a new connection."""
        self._up = True
        return [Send(self.link, args, self) for args in self._some_of([args for args, _ in self._items])]

    def link_down(self) -> None:
        """Keep everything for the next connection."""
        self._up = False
        self._sent = self._sent_bytes = 0
        self.held = False

    def replied(self) -> Any:
        """Take the reply to the oldest command (a reply whose tag is this outbox); return its token."""
        assert self._sent, f"a reply on {self.link} without a command"
        self._sent -= 1
        args, token = self._items.popleft()
        if self.held:
            self._sent_bytes -= len(args[-1])
        return token

    def replied_all(self, count: int) -> list[Any]:
        """Take the replies to the ``count`` oldest commands; return their tokens."""
        assert self._sent >= count, f"{count} replies on {self.link} to {self._sent} commands"
        self._sent -= count
        if self.held:
            self._sent_bytes -= sum(len(args[-1]) for args, _ in islice(self._items, count))
        take = self._items.popleft
        return [take()[1] for _ in range(count)]

    def replace_tokens(self, replacement: Callable[[Command, Any], Any]) -> None:
        """Give every unanswered command, oldest first, the token that ``replacement`` returns for it and its token."""
        self._items = deque((args, replacement(args, token)) for args, token in self._items)

    def unanswered(self) -> list[tuple[Command, Any]]:
        """Return the commands and their tokens, oldest first."""
        return list(self._items)

    def large_under_way(self) -> Any:
        """Return the token of the oldest command if it was sent and others have to wait for it; else None."""
        if not self._sent:
            return None
        args, token = self._items[0]
        return token if len(args[-1]) > UNDER_WAY_BYTES_MAX // 2 else None

    def discard_while(self, useless: Callable[[Any], bool]) -> int:
        """Forget commands that are not under way, from the oldest, as long as their tokens are ``useless``.

        Return how many.
        """
        sent = self._sent
        if sent == len(self._items):
            return 0
        self._items.rotate(-sent)
        left = len(self._items) - sent
        count = 0
        while count < left and useless(self._items[0][1]):
            self._items.popleft()
            count += 1
        self._items.rotate(sent)
        return count

    def discard(self, useless: Callable[[Any], bool]) -> None:
        """Forget all commands whose tokens are ``useless``; only while the link is down."""
        assert not self._up, f"replies of commands on {self.link} are still to come"
        self._items = deque(item for item in self._items if not useless(item[1]))


def _fitting(commands: Sequence[Command], room_bytes: int) -> Sequence[Command]:
    """Return the first commands, for which there is room; one at least, however large, if there is any room at all."""
    if room_bytes < 0:
        return ()
    for count, total_bytes in enumerate(accumulate(map(len, map(_last_part, commands)))):
        if total_bytes > room_bytes:
            return commands[: max(count, 1)]
    return commands
