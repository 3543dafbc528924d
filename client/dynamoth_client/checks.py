"""Confirms by the stored plan where messages were published, and sends those again that went elsewhere.

Theory of operation
-------------------
A route that nobody has confirmed may be wrong: a client that is new to a channel knows only its home, and where a
server has no agent, nobody can tell that the channel has moved. A message that takes such a route is *unconfirmed*.
Behind it, on the same connection, goes a reading of the plan stored there: the :class:`Check`. Messages of the channel
that follow before its reply share it.

* The plan names the place: the messages were published where subscribers listen. They are confirmed.
* The plan sends the channel elsewhere: all of them are published there, with their numbers, behind one another, and
  a check of that place follows. An agent at the first place may have forwarded them: subscribers drop second copies.
  Whether it has does not matter, so an agent that hangs or dies costs no message.
* The plan cannot be read: nothing better can be known, and the messages count as confirmed.

The application learns the outcome of an unconfirmed message behind its confirmation, in the same round trip: so the
number of receivers is that of the right place, and a ``publish`` that returned does not depend on an agent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dynamoth import stored_plan
from dynamoth.envelope import is_enveloped, rerouted
from dynamoth.events import ErrorReply
from dynamoth.plan import Location
from dynamoth_client.alone import ALONE
from dynamoth_client.outcomes import Outcomes
from dynamoth_client.publication import (
    Check,
    CheckAt,
    PublishedChannel,
    PublisherServer,
    Waiting,
)
from dynamoth_client.publisher_alone import AloneServer
from dynamoth_client.publisher_routes import PublisherRoutes


class Checks:
    """The unconfirmed messages of one publisher. All methods return the actions to execute."""

    def __init__(
        self,
        channels: Mapping[bytes, PublishedChannel],
        servers: Mapping[str, PublisherServer],
        routes: PublisherRoutes,
        outcomes: Outcomes,
        connect: Callable[[str, float], list[Any]],
        alone: AloneServer,
        counters: Counter[str],
    ) -> None:
        """Share the publisher's state; ``connect`` opens a link to a server unless there is one."""
        self._alone = alone
        self._channels = channels
        self._servers = servers
        self._routes = routes
        self._outcomes = outcomes
        self._connect = connect
        self._counters = counters

    @staticmethod
    def begin(
        channel: PublishedChannel, name: bytes, locations: tuple[Location, ...], servers: Sequence[PublisherServer]
    ) -> tuple[Check | None, Sequence[PublisherServer]]:
        """Return the check that the next message on a channel waits for, if any, and where it is to be put behind it.

        It goes to ``servers``.
        """
        check = channel.check
        is_alone = locations[0].server == ALONE  # then each message needs a reading of its own
        if check is not None and not check.done and check.locations == locations and not is_alone:
            return check, ()
        read_at = servers
        if not is_alone and check is None and channel.sequence != channel.floor:
            # Nobody may be there to say that it has moved.
            read_at = [s for s in servers if s.up and not s.observers and name not in s.confirmed]
            if not read_at:
                return None, ()
        check = channel.check = Check(name, locations)
        return check, read_at

    @staticmethod
    def put(check: Check, location: Location, server: PublisherServer) -> list[Any]:
        """Read the stored plan behind what was just published at a location."""
        read = stored_plan.READ_HEADER if location.server == ALONE else stored_plan.read_entry(check.channel)
        return list(server.outbox.put_past_bound(read, CheckAt(check, location)))

    def replied(self, at: CheckAt, link: str, value: Any, now: float) -> list[Any]:
        """Take what a server stores of a channel: confirm the messages that wait for it, or send them again."""
        check = at.check
        if isinstance(value, ErrorReply):
            self._counters["refused_commands"] += 1
            return self._confirm(check, now)
        server = self._servers[link]
        if link == ALONE:
            return self._replied_alone(check, value, now)
        told = self._routes.entry_read(check.channel, link, value, server, now)
        locations, _ = self._routes.find(check.channel)
        if self._routes.waits_for_header(check.channel) and not at.is_again and not check.done:
            again = CheckAt(check, at.location, is_again=True)
            return [*told, *server.outbox.put_past_bound(stored_plan.read_entry(check.channel), again)]
        if at.location in locations:
            server.confirmed.add(check.channel)
            return [*told, *self._confirm(check, now)]
        if check.done:
            return told
        check.done = True
        return [*told, *self.send_again(check.channel, check.messages, now)]

    def _replied_alone(self, check: Check, value: Any, now: float) -> list[Any]:
        """Take the header of a plan, if there is one now, of the server that was alone when a message was published."""
        if not self._alone.has_plan(value):
            return self._confirm(check, now)
        check.done = True
        return self.send_again(check.channel, check.messages, now)

    def _confirm(self, check: Check, now: float) -> list[Any]:
        check.done = True
        channel = self._channels.get(check.channel)
        if channel is not None and channel.check is check:
            channel.check = None
            if len(check.locations) == 1 and not channel.plain and self._alone.is_over(now):
                channel.lane = self._servers[check.locations[0].server]
        messages, check.messages = check.messages, []
        return [action for message, _ in messages for action in self._outcomes.confirmed(message)]

    def send_again(self, name: bytes, messages: Iterable[tuple[Waiting, bytes]], now: float) -> list[Any]:
        """Publish messages of one channel by the route that is known now, under their numbers, and check that."""
        locations, epoch = self._routes.find(name)
        actions = [action for location in locations for action in self._connect(location.server, now)]
        check = Check(name, locations)
        for message, data in messages:
            if message.done:  # it has failed
                continue
            again = self._outcomes.begin_again(message, locations)
            copy = rerouted(data, epoch) if is_enveloped(data) else data
            if again.missing:
                again.sent = locations[0].physical, copy
            check.messages.append((again, copy))
            for location in locations:
                server = self._servers[location.server]
                server.waiting.append(again)
                actions += server.outbox.put_past_bound((b"PUBLISH", location.physical, copy), again)
        for location in locations:
            actions += self.put(check, location, self._servers[location.server])
        if (channel := self._channels.get(name)) is not None:
            channel.follow(locations, epoch)
            channel.check, channel.lane, channel.physical = check, None, locations[0].physical
        return actions
