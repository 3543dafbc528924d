"""Commands that must arrive: kept until the server has answered, and sent again, in order, over the next connection.

A command may so be executed twice (the connection broke after it took effect and before its reply): the sequence
numbers in the envelopes make that harmless.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice, repeat
from typing import Any

from dynamoth.events import CommandPart, Send, SendAll


class Outbox:
    """First in, first out, over one link, at least once, bounded.

    The owner calls :meth:`put` for each command, tells of the link's events, and executes what it is given.
    """

    __slots__ = ("_items", "_sent", "_up", "bound", "link")

    def __init__(self, link: str, bound: int) -> None:
        """Make an empty outbox that holds at most ``bound`` unanswered commands; the link is down at first."""
        self.link = link
        self.bound = bound
        #: Unanswered commands, oldest first.
        self._items: deque[tuple[Sequence[CommandPart], Any]] = deque()
        #: How many of them, from the oldest, were sent over the present connection.
        self._sent = 0
        self._up = False

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

    def put(self, args: Sequence[CommandPart], token: Any = None) -> list[Send | SendAll]:
        """Add a command. ``token`` comes back from :meth:`replied`. The caller has checked ``full``."""
        self.put_later(args, token)
        return self.flush()

    def put_later(self, args: Sequence[CommandPart], token: Any = None) -> None:
        """Add a command as :meth:`put`, to be sent before the next one, or by :meth:`flush`."""
        assert len(self._items) < self.bound, f"outbox of {self.link} is full"
        self._items.append((args, token))

    def flush(self) -> list[Send | SendAll]:
        """Send what was put and not sent; while the link is down, when it is up again."""
        unsent = len(self._items) - self._sent
        if not self._up or not unsent:
            return []
        self._sent += unsent
        if unsent == 1:
            return [Send(self.link, self._items[-1][0], self)]
        newest_first = [args for args, _ in islice(reversed(self._items), unsent)]
        return [SendAll(self.link, newest_first[::-1], self)]

    def put_all(self, commands: Sequence[Sequence[CommandPart]], token: Any) -> SendAll:
        """Add commands, at most ``room``, which have one token in common; only while the link is up."""
        assert self._up and len(commands) <= self.room, f"no room in the outbox of {self.link}, or it is down"
        assert self._sent == len(self._items), f"the outbox of {self.link} holds what is to be sent first"
        self._items.extend(zip(commands, repeat(token)))  # without strict: the second has no end
        self._sent += len(commands)
        return SendAll(self.link, commands, self)

    def link_up(self) -> list[Send]:
        """Send everything that is unanswered, over a new connection."""
        self._up = True
        self._sent = len(self._items)
        return [Send(self.link, args, self) for args, _ in self._items]

    def link_down(self) -> None:
        """Keep everything for the next connection."""
        self._up = False
        self._sent = 0

    def replied(self) -> Any:
        """Take the reply to the oldest command (a reply whose tag is this outbox); return its token."""
        assert self._sent, f"a reply on {self.link} without a command"
        self._sent -= 1
        return self._items.popleft()[1]

    def replied_all(self, count: int) -> list[Any]:
        """Take the replies to the ``count`` oldest commands; return their tokens."""
        assert self._sent >= count, f"{count} replies on {self.link} to {self._sent} commands"
        self._sent -= count
        take = self._items.popleft
        return [take()[1] for _ in range(count)]

    def replace_tokens(self, replacement: Callable[[Sequence[CommandPart], Any], Any]) -> None:
        """Give every unanswered command, oldest first, the token that ``replacement`` returns for it and its token."""
        self._items = deque((args, replacement(args, token)) for args, token in self._items)

    def unanswered(self) -> list[tuple[Sequence[CommandPart], Any]]:
        """Return the commands and their tokens, oldest first."""
        return list(self._items)

    def discard_while(self, useless: Callable[[Any], bool]) -> int:
        """Forget the oldest commands as long as their tokens are ``useless``; return how many.

        Only while the link is down.
        """
        assert not self._up, f"replies of commands on {self.link} are still to come"
        count = 0
        while self._items and useless(self._items[0][1]):
            self._items.popleft()
            count += 1
        return count

    def discard(self, useless: Callable[[Any], bool]) -> None:
        """Forget all commands whose tokens are ``useless``; only while the link is down."""
        assert not self._up, f"replies of commands on {self.link} are still to come"
        self._items = deque(item for item in self._items if not useless(item[1]))
