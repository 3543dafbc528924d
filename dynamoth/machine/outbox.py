"""Commands that must arrive: kept until the server has answered, and sent again, in order, over the next connection.

A command may so be executed twice (the connection broke after it took effect and before its reply): the sequence
numbers in the envelopes make that harmless.

The unanswered bytes on a link are bounded: the rest waits here until replies come. So
however much is put at once, a server that works takes it, and little is copied into the link's buffers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, islice, repeat
from operator import itemgetter
from typing import Any, cast

from dynamoth.machine.events import Send, SendAll

Command = Sequence[bytes | str]
"""The parts of one Redis command. Only the last part may be large."""

UNDER_WAY_BYTES_MAX = 64 * 1024 * 1024
"""With more unanswered bytes than this, nothing is sent until half of them are answered. More than a fast network
holds, and well below the 256 MiB of unwritten bytes at which a link ends its connection. A larger command is sent by
itself when its turn has come."""

_last_part = itemgetter(-1)


class _Run:
    """Commands with one token that were sent together over the present connection: cheaper than each by itself."""

    __slots__ = ("answered", "commands", "token")

    def __init__(self, commands: Sequence[Command], token: Any) -> None:
        self.commands = commands
        self.token = token
        #: How many the server has answered: the first ones.
        self.answered = 0

    def unanswered(self) -> Sequence[Command]:
        """Return the commands that the server has not answered."""
        return self.commands[self.answered :]


class Outbox:
    """First in, first out, over one link, at least once, bounded.

    The owner calls :meth:`put` for each command, reports the link's events, and executes the returned actions. After
    replies it calls :meth:`flush` if something is ``held``.
    """

    __slots__ = ("_count", "_items", "_sent", "_sent_bytes", "_up", "bound", "held", "link")

    def __init__(self, link: str, bound: int) -> None:
        """Make an empty outbox that holds at most ``bound`` unanswered commands; the link is down at first."""
        self.link = link
        self.bound = bound
        #: Unanswered commands, oldest first, and their number. No ``_Run`` contains unsent commands.
        self._items: deque[tuple[Command, Any] | _Run] = deque()
        self._count = 0
        #: How many of them, from the oldest, were sent over the present connection.
        self._sent = 0
        #: Bytes in flight: exact while ``held``, otherwise an upper bound (answered bytes are subtracted lazily).
        self._sent_bytes = 0
        self._up = False
        #: Whether the link is up, and the rest waits because too many bytes are unanswered.
        self.held = False

    def __len__(self) -> int:
        """Return how many commands are unanswered."""
        return self._count

    @property
    def room(self) -> int:
        """Return how many commands more can be put."""
        return self.bound - self._count

    @property
    def full(self) -> bool:
        """Whether the bound is reached; ``put`` then refuses."""
        return self._count >= self.bound

    def put(self, args: Command, token: Any = None) -> list[Send | SendAll]:
        """Add a command. ``token`` comes back from :meth:`on_reply`. The caller has checked ``full``."""
        self.put_later(args, token)
        if not self._up or self.held or self._count - self._sent > 1 or self._sent_bytes > UNDER_WAY_BYTES_MAX:
            return self.flush()
        self._sent += 1
        self._sent_bytes += len(args[-1])
        return [Send(self.link, args, self)]

    def put_later(self, args: Command, token: Any = None) -> None:
        """Add a command as :meth:`put`, to be sent before the next one, or by :meth:`flush`."""
        assert self._count < self.bound, f"outbox of {self.link} is full"
        self._items.append((args, token))
        self._count += 1

    def put_past_bound(self, args: Command, token: Any = None) -> list[Send | SendAll]:
        """Add a command as :meth:`put`, full or not: for a command that another outbox accepted and cannot deliver."""
        self._items.append((args, token))
        self._count += 1
        return self.flush()

    def flush(self) -> list[Send | SendAll]:
        """Send the unsent commands, within the bound on unanswered bytes; nothing while the link is down."""
        unsent = self._count - self._sent
        if not self._up or not unsent or (self.held and self._sent_bytes > UNDER_WAY_BYTES_MAX // 2):
            return []
        if unsent == 1 and self._sent_bytes <= UNDER_WAY_BYTES_MAX:
            args, _ = cast("tuple[Command, Any]", self._items[-1])
            self._sent += 1
            self._sent_bytes += len(args[-1])
            self.held = False
            return [Send(self.link, args, self)]
        newest_first = islice(cast("Iterator[tuple[Command, Any]]", reversed(self._items)), unsent)
        commands = self._some_of([args for args, _ in newest_first][::-1])
        return [SendAll(self.link, commands, self)] if commands else []

    def put_all(self, commands: Sequence[Command], token: Any) -> list[Send | SendAll]:
        """Add commands, at most ``room``, which have one token in common; only while the link is up."""
        assert self._up and len(commands) <= self.room, f"no room in the outbox of {self.link}, or it is down"
        assert self.held or self._sent == self._count, f"the outbox of {self.link} holds what is to be sent first"
        self._count += len(commands)
        if self.held:
            self._items.extend(zip(commands, repeat(token)))  # without strict: the second has no end
            return self.flush()
        sent = self._some_of(commands)
        if len(sent) == len(commands):
            self._items.append(_Run(commands, token))
        else:
            self._items.extend(zip(commands, repeat(token)))
        return [SendAll(self.link, sent, self)] if sent else []

    def _some_of(self, unsent: Sequence[Command]) -> Sequence[Command]:
        """Return the first unsent commands that fit the bound on unanswered bytes, and count them as sent."""
        more_bytes = sum(map(len, map(_last_part, unsent)))
        if self._sent_bytes + more_bytes > UNDER_WAY_BYTES_MAX:
            if not self.held:
                self._sent_bytes = sum(len(args[-1]) for args, _ in islice(self._each(), self._sent))
            unsent = _fitting(unsent, UNDER_WAY_BYTES_MAX - self._sent_bytes)
            more_bytes = sum(map(len, map(_last_part, unsent)))
        self._sent += len(unsent)
        self._sent_bytes += more_bytes
        self.held = self._sent < self._count
        return unsent

    def _each(self) -> Iterator[tuple[Command, Any]]:
        """Yield the unanswered commands and their tokens, oldest first."""
        for item in self._items:
            if isinstance(item, _Run):
                yield from zip(item.unanswered(), repeat(item.token))
            else:
                yield item

    def link_up(self) -> list[Send]:
        """Send the unanswered commands again over a new connection, within the bound on unanswered bytes."""
        self._up = True
        return [Send(self.link, args, self) for args in self._some_of([args for args, _ in self._each()])]

    def link_down(self) -> None:
        """Keep everything for the next connection."""
        self._up = False
        self._sent = self._sent_bytes = 0
        self.held = False
        self._items = deque(self._each())

    def on_reply(self) -> Any:
        """Take the reply to the oldest command (a reply whose tag is this outbox); return its token."""
        assert self._sent, f"a reply on {self.link} without a command"
        item = self._items[0]
        if isinstance(item, _Run):
            return self.replied_all(1)[0]
        args, token = item
        del self._items[0]
        self._sent -= 1
        self._count -= 1
        if self.held:
            self._sent_bytes -= len(args[-1])
        return token

    def replied_all(self, count: int) -> list[Any]:
        """Take the replies to the ``count`` oldest commands; return their tokens."""
        assert self._sent >= count, f"{count} replies on {self.link} to {self._sent} commands"
        self._sent -= count
        self._count -= count
        if self.held:
            self._sent_bytes -= sum(len(args[-1]) for args, _ in islice(self._each(), count))
        tokens: list[Any] = []
        while len(tokens) < count:
            item = self._items[0]
            if isinstance(item, _Run):
                number = min(count - len(tokens), len(item.commands) - item.answered)
                item.answered += number
                tokens += [item.token] * number
                if item.answered < len(item.commands):
                    break
            else:
                tokens.append(item[1])
            del self._items[0]
        return tokens

    def replace_tokens(self, replacement: Callable[[Command, Any], Any]) -> None:
        """Give every unanswered command, oldest first, the token that ``replacement`` returns for it and its token."""
        self._items = deque((args, replacement(args, token)) for args, token in self._each())

    def unanswered(self) -> list[tuple[Command, Any]]:
        """Return the commands and their tokens, oldest first."""
        return list(self._each())

    def large_under_way(self) -> Any:
        """Return the token of the oldest command if it was sent and others have to wait for it; else None."""
        if not self._sent:
            return None
        args, token = next(self._each())
        return token if len(args[-1]) > UNDER_WAY_BYTES_MAX // 2 else None

    def discard_while(self, useless: Callable[[Any], bool]) -> int:
        """Forget commands that are not under way, from the oldest, as long as their tokens are ``useless``.

        Return how many.
        """
        unsent = self._count - self._sent
        self._items.rotate(unsent)
        count = 0
        while count < unsent and useless(cast("tuple[Command, Any]", self._items[0])[1]):
            self._items.popleft()
            count += 1
        self._items.rotate(count - unsent)
        self._count -= count
        return count

    def discard(self, useless: Callable[[Any], bool]) -> None:
        """Forget all commands whose tokens are ``useless``; only while the link is down."""
        assert not self._up, f"replies of commands on {self.link} are still to come"
        self._items = deque(item for item in self._each() if not useless(item[1]))
        self._count = len(self._items)

    def check(self) -> None:
        """Assert the invariants that hold between events."""
        sizes = [len(args[-1]) for args, _ in self._each()]
        assert self._count == len(sizes), f"{len(sizes)} commands on {self.link} are counted as {self._count}"
        assert self._sent <= self._count, f"{self._sent} of {self._count} commands on {self.link} were sent"
        assert self._up or not (self._sent or self.held), f"{self.link} is down, and {self._sent} commands were sent"
        sent_bytes = sum(sizes[: self._sent])
        is_right = self._sent_bytes == sent_bytes if self.held else self._sent_bytes >= sent_bytes
        assert is_right, f"{sent_bytes} bytes are under way on {self.link}, not {self._sent_bytes}"


def _fitting(commands: Sequence[Command], room_bytes: int) -> Sequence[Command]:
    """Return the first commands, for which there is room; one at least, however large, if there is any room at all."""
    if room_bytes < 0:
        return ()
    for count, total_bytes in enumerate(accumulate(map(len, map(_last_part, commands)))):
        if total_bytes > room_bytes:
            return commands[: max(count, 1)]
    return commands
