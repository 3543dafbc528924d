"""Who is present on a channel, as the application sees it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from types import MappingProxyType, TracebackType
from typing import Protocol

from dynamoth.edge.interests import Interest
from dynamoth_user.errors import ClientFailed
from dynamoth_user.items import Gap, Join, Leave
from dynamoth_user.machine.events import MemberChanged, MembersListed

CHANGES_MAX = 1000
"""Changes that wait for the application; of more, the oldest are dropped, and a gap takes their place."""

TOO_SLOW = "the application has not taken these changes"
NORMAL = 1000


class PresenceOwner(Protocol):
    """What a presence needs of its client."""

    def remove_presence(self, presence: Presence) -> None:
        """End it."""
        ...


class Presence:
    """Who is present on a channel, made by ``Client.presence``. ``members`` is current, whether one iterates or not.

    It iterates over :class:`Join`, :class:`Leave` and :class:`Gap`, for one task at a time. After a gap it asks for the
    members again by itself; the joins and leaves that make up the difference follow the gap, unless there are, or were,
    more than 10,000 members: nobody knows the difference then. Iteration ends when it or the client is closed; when a
    broker has ended either, it raises ``ClientFailed`` or ``RefusedError``.

    ``async with presence:`` ends it at its end.
    """

    def __init__(self, owner: PresenceOwner, interest: Interest) -> None:
        """Begin without members. For the client only."""
        self.interest = interest
        #: Done when the members are known, or a broker has refused.
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._owner = owner
        self._members: dict[str, str] = {}
        self._count = 0
        self._changes: deque[Join | Leave | Gap] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._is_ended = False
        self._error: Exception | None = None

    # What the application uses.

    @property
    def members(self) -> Mapping[str, str]:
        """The user of each member. Of more than 10,000 members not all are here."""
        return MappingProxyType(self._members)

    @property
    def count(self) -> int:
        """How many members there are."""
        return self._count

    def close(self) -> None:
        """End it."""
        self._owner.remove_presence(self)

    async def __aenter__(self) -> Presence:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __aiter__(self) -> Presence:
        return self

    async def __anext__(self) -> Join | Leave | Gap:
        """Return the next change. Raises RuntimeError where another task waits for it."""
        if self._waiter is not None:
            raise RuntimeError("another task waits for the next change of this presence")
        while not self._changes:
            if self._is_ended:
                if self._error is not None:
                    raise self._error
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._changes.popleft()

    # What the client reports.

    def on_listed(self, action: MembersListed) -> None:
        """Begin with these members; where all others were known, note the difference."""
        before, was_complete = self._members, self._is_complete
        self._members, self._count = dict(action.members), action.count
        if not self.ready.done():
            self.ready.set_result(None)
            return
        if not (was_complete and self._is_complete):
            return  # Who is in one part of the members and not in the other one may be present all the time.
        for member in before.keys() - self._members.keys():
            self._put(Leave(member, before[member]))
        for member in self._members.keys() - before.keys():
            self._put(Join(member, self._members[member]))

    def on_changed(self, action: MemberChanged) -> None:
        """Note that a member has joined or left."""
        if action.is_join:
            self._members[action.member] = action.user
            self._count += 1
            self._put(Join(action.member, action.user))
        else:
            self._members.pop(action.member, None)
            self._count -= 1
            self._put(Leave(action.member, action.user))

    def on_gap(self, gap: Gap) -> None:
        """Note that changes are missing: the members come again."""
        self._put(gap)

    def end(self, error: Exception | None = None) -> None:
        """End the iteration, with ``error`` after the changes that wait."""
        if self._is_ended:
            return
        self._is_ended = True
        self._error = error
        if error is None:
            self._changes.clear()
        if not self.ready.done():
            self.ready.set_exception(error or ClientFailed(NORMAL, "closed by the application"))
            self.ready.exception()  # else it is logged where nobody waits
        self._wake()

    @property
    def _is_complete(self) -> bool:
        """Whether each member is listed."""
        return self._count == len(self._members)

    def _put(self, change: Join | Leave | Gap) -> None:
        if self._is_ended:
            return
        self._changes.append(change)
        if len(self._changes) > CHANGES_MAX:
            self._changes.popleft()
            self._changes[0] = Gap(self.interest, TOO_SLOW)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
