"""Checks against the stored plan where messages were published, and sends the misplaced ones again.

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
* There is no plan to be believed, as after a restart of Redis: it is read again until the balancer has written it, for
  ``plan_missing_s`` at most. Then the messages count as confirmed, as publishing needs no balancer.

A confirmed route is in doubt again when the plan may have changed. An agent that is alive says so. As it may hang, the
first message after each ``observers_interval_s`` is followed by a reading of the stored plan's version at its server:
the :class:`VersionCheck`. Messages of all channels until the reply are unconfirmed and share it. Those of channels
that this version has confirmed before are confirmed. Where it is another one, the entry of each channel is read: for
the messages that wait, and behind the next message of every other channel at that server. What is published earlier
than the next reading may still go a wrong way that only an agent notices; no change settles before it.

Under ALL_PUBLISHERS, versions and entries are read at every replica that is connected, and the first reply decides. So
a replica that hangs holds up nothing. One reply is enough: no change settles while a replica does not store it.

The application learns the outcome of an unconfirmed message behind its confirmation, in the same round trip: so the
number of receivers is that of the right place, and a ``publish`` that returned does not depend on an agent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dynamoth.errors import MalformedMessage
from dynamoth.machine.events import ErrorReply
from dynamoth.plan.plan import Location
from dynamoth.protocol import stored_plan
from dynamoth.protocol.envelope import is_enveloped, rerouted
from dynamoth_client.machines.publisher.answers import Answers
from dynamoth_client.machines.publisher.channels import PublishedChannel
from dynamoth_client.machines.publisher.events import PublisherAction
from dynamoth_client.machines.publisher.part import Part, Shared
from dynamoth_client.machines.publisher.records import Check, CheckAt, PublisherServer, VersionCheck
from dynamoth_client.machines.publisher.routes import PublisherRoutes
from dynamoth_client.machines.publisher.standalone import AloneServer
from dynamoth_client.machines.publisher.waiting import Waiting
from dynamoth_client.machines.standalone import ALONE

READ_AGAIN_S = 0.05
"""How soon a plan that is missing is read again; the balancer writes it within 0.2 s."""


class Checks(Part):
    """The unconfirmed messages of one publisher."""

    def __init__(self, shared: Shared, routes: PublisherRoutes, answers: Answers, alone: AloneServer) -> None:
        """Begin without any."""
        super().__init__(shared)
        self._routes = routes
        self._answers = answers
        self._alone = alone

    @staticmethod
    def begin(
        channel: PublishedChannel,
        name: bytes,
        locations: tuple[Location, ...],
        servers: Sequence[PublisherServer],
        now: float,
    ) -> tuple[Check | None, Sequence[PublisherServer]]:
        """Return the check that the next message on a channel waits for, if any, and where to read the entry.

        The message goes to ``servers``.
        """
        check = channel.check
        is_alone = locations[0].server == ALONE  # then each message needs a reading of its own
        if check is not None and not check.over and check.locations == locations and not is_alone:
            return check, ()
        read_at = servers
        known: list[PublisherServer] = []
        if not is_alone and check is None and not channel.is_new:
            up = [server for server in servers if server.up]
            read_at = [server for server in up if _is_in_doubt(channel, name, server)]
            known = [server for server in up if server not in read_at]
            if not up or any(server.version_check is None and now < server.clear_until for server in known):
                return None, ()
        check = Check(name, locations, now)
        channel.doubt(check)
        for server in known:
            server.version_check = server.version_check or VersionCheck(now)
            server.version_check.checks.append(check)
        return check, read_at

    @staticmethod
    def put_version_check(server: PublisherServer) -> list[PublisherAction]:
        """Read the version of the stored plan behind what was just published, if a check has begun."""
        asked = server.version_check
        if asked is None or asked.is_sent:
            return []
        asked.is_sent = True
        return list(server.outbox.put_past_bound(stored_plan.READ_BELIEVED_VERSION, asked))

    @staticmethod
    def put(check: Check, location: Location, server: PublisherServer) -> list[PublisherAction]:
        """Read the stored plan behind what was just published at a location."""
        read = stored_plan.READ_HEADER if location.server == ALONE else stored_plan.read_entry(check.channel)
        return list(server.outbox.put_past_bound(read, CheckAt(check, location)))

    def on_entry(self, at: CheckAt, link: str, value: Any, now: float) -> list[PublisherAction]:
        """Handle the stored entry of a channel: confirm the messages that wait for it, or send them again."""
        check = at.check
        if isinstance(value, ErrorReply):
            self._counters["refused_commands"] += 1
            return self._confirm(check, now)
        server = self._servers[link]
        if link == ALONE:
            return self._on_header_alone(check, value, now)
        actions = self._routes.on_entry(check.channel, link, value, server, now)
        if server.has_plan:
            server.clear_until = max(server.clear_until, check.begun_at + self._options.observers_interval_s)
        locations, _ = self._routes.find(check.channel)
        if self._routes.waits_for_header(check.channel) and not at.is_again and not check.over:
            again = CheckAt(check, at.location, is_again=True)
            return [*actions, *server.outbox.put_past_bound(stored_plan.read_entry(check.channel), again)]
        if at.location in locations:
            if not server.has_plan and not check.over and self._reads_again(at, server, now):
                return actions
            server.confirmed.add(check.channel)
            if server.has_plan and check.channel in self._by_name:
                self._by_name[check.channel].note_version(-1 if server.version is None else server.version)
            return [*actions, *self._confirm(check, now)]
        if check.over:
            return actions
        check.over = True
        return [*actions, *self.send_again(check.channel, check.messages, now)]

    def on_version(self, asked: VersionCheck, link: str, value: Any, now: float) -> list[PublisherAction]:
        """Handle the version of a stored plan: confirm channels that it has confirmed before, check all others."""
        server = self._servers[link]
        if isinstance(value, ErrorReply):
            self._counters["refused_commands"] += 1
            return self._confirm_all(asked, server, now)
        try:
            version = stored_plan.parse_believed_version(value, server.run_id)
        except MalformedMessage:
            self._counters["malformed_messages"] += 1
            return self._confirm_all(asked, server, now)
        if version is None:
            if server.version is None and self._reads_again(asked, server, now):
                return []
            return self._confirm_all(asked, server, now)
        self._routes.note_version(version, server)
        server.version_check = None
        server.clear_until = asked.begun_at + self._options.observers_interval_s
        actions: list[PublisherAction] = []
        for check in asked.checks:
            channel = self._by_name.get(check.channel)
            if check.over:
                continue
            if channel is None or channel.version == version:
                actions += self._confirm(check, now)
                continue
            for location in check.locations:
                if location.server == link:
                    actions += self.put(check, location, server)
        return actions

    def _confirm_all(self, asked: VersionCheck, server: PublisherServer, now: float) -> list[PublisherAction]:
        """Confirm the messages that wait for a version that cannot be read; the next ones cause another reading."""
        server.version_check = None
        return [action for check in asked.checks if not check.over for action in self._confirm(check, now)]

    def _reads_again(self, reading: CheckAt | VersionCheck, server: PublisherServer, now: float) -> bool:
        """Schedule another reading where no plan could be believed; False if that has lasted for too long."""
        server.missing_since = min(server.missing_since, now)
        if now - server.missing_since >= self._options.plan_missing_s:
            return False
        server.unread.append(reading)
        server.read_again_at = min(server.read_again_at, now + READ_AGAIN_S)
        return True

    def read_again(self, server: PublisherServer) -> list[PublisherAction]:
        """Repeat the readings that found no plan to be believed."""
        unread, server.unread = server.unread, []
        server.read_again_at = float("inf")
        actions: list[PublisherAction] = []
        for reading in unread:
            if isinstance(reading, VersionCheck):
                actions += server.outbox.put_past_bound(stored_plan.READ_BELIEVED_VERSION, reading)
            elif not reading.check.over:
                actions += self.put(reading.check, reading.location, server)
        return actions

    def _on_header_alone(self, check: Check, value: Any, now: float) -> list[PublisherAction]:
        """Handle a header that was read, behind a message, at the server that was alone."""
        if not self._alone.has_plan(value):
            return self._confirm(check, now)
        check.over = True
        return self.send_again(check.channel, check.messages, now)

    def _confirm(self, check: Check, now: float) -> list[PublisherAction]:
        check.over = True
        if (channel := self._by_name.get(check.channel)) is not None:
            is_direct = len(check.locations) == 1 and not channel.plain and self._alone.is_over(now)
            channel.confirm(check, self._servers[check.locations[0].server] if is_direct else None)
        messages, check.messages = check.messages, []
        return [action for message, _ in messages for action in self._answers.confirm(message)]

    def send_again(self, name: bytes, messages: Iterable[tuple[Waiting, bytes]], now: float) -> list[PublisherAction]:
        """Publish messages of one channel by the route that is known now, under their numbers, and check that."""
        locations, epoch = self._routes.find(name)
        actions = [action for location in locations for action in self._servers.open(location.server, now)[1]]
        check = Check(name, locations, now)
        for message, data in messages:
            if message.done:  # it has failed
                continue
            again = self._answers.begin_again(message)
            copy = rerouted(data, epoch) if is_enveloped(data) else data
            servers = [location.server for location in locations]
            if len(servers) > 1:
                again.go_to_replicas(servers, (locations[0].physical, copy))
            check.messages.append((again, copy))
            self._answers.set_timer(again, locations[0].server, again.expires_at)
            for location in locations:
                server = self._servers[location.server]
                actions += server.ask_observers_again(now, self._options.observers_interval_s)
                server.waiting.append(again)
                actions += server.outbox.put_past_bound((b"PUBLISH", location.physical, copy), again)
        for location in locations:
            actions += self.put(check, location, self._servers[location.server])
        if (channel := self._by_name.get(name)) is not None:
            channel.follow(locations, epoch)
            channel.doubt(check)
            channel.send_directly(None)
        return actions


def _is_in_doubt(channel: PublishedChannel, name: bytes, server: PublisherServer) -> bool:
    """Return whether the plan stored at a server has changed since it confirmed a channel, or no agent is there."""
    if server.version is not None and server.version != channel.version:
        return True
    return not server.observers and name not in server.confirmed
