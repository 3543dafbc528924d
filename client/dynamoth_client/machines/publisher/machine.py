"""The publisher machine: numbers messages, sends each to the server of its channel, and learns of newer routes.

Theory of operation
-------------------
A message is numbered and routed at the moment of :class:`Publish`, by the local plan. It then waits in the outbox of
its server's link until that server has answered. After a lost connection it is sent again with the same number, so that
subscribers drop the second copy. There is one link per server, so messages of one client to one server keep their
order. See ``sending.py``.

Under ALL_PUBLISHERS a message goes to every replica, under one number and with one outcome: the application gets it
when all replicas have answered, or ``straggler_s`` after the first. Then the dispatcher of a replica that has the
message is asked to forward it to those that cannot be reached, so that it outlives this client; the outcome follows the
dispatcher's acknowledgement. Under ALL_SUBSCRIBERS a message goes to one replica. If that is away for ``failover_s``,
its unanswered messages, and all that follow, go to the next one, as every subscriber listens there too. See
``answers.py``.

The first message on a channel, also after the agent of its server has gone, is followed by a reading of the plan that
is stored there. If the plan names another place, the message is sent there under its number. See ``checks.py``. A route
to a server that cannot be reached is looked up at another one. See ``unreachable.py``.

When a dispatcher says, in this client's inbox, that a channel has moved, the next message goes the new way and says so
(ROUTE_CHANGED): earlier ones may still be on their way through the old server's dispatcher. See ``routes.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, assert_never

from dynamoth.errors import MalformedMessage, UnknownMode
from dynamoth.machine.events import (
    Connect,
    Disconnect,
    ErrorReply,
    LinkDown,
    LinkUp,
    Pushed,
    Replied,
    RepliedAll,
    Send,
    Start,
    Tick,
)
from dynamoth.names import CLIENTS_CHANNEL, inbox
from dynamoth.plan.plan import Mode
from dynamoth.protocol.control import ObservationGap, RouteNotice, RulesChanged, unpack_control
from dynamoth.protocol.envelope import is_enveloped, rerouted
from dynamoth_client.machines.local_plan import LocalPlan
from dynamoth_client.machines.publisher.answers import (
    Answers,
    answer_together,
    discard_failed,
    has_failed,
    take_apart,
)
from dynamoth_client.machines.publisher.channels import Channels
from dynamoth_client.machines.publisher.checks import Checks
from dynamoth_client.machines.publisher.events import (
    Publish,
    PublishAll,
    PublisherAction,
    PublisherEvent,
    PublisherOptions,
)
from dynamoth_client.machines.publisher.part import Shared
from dynamoth_client.machines.publisher.records import CheckAt, PublisherServer, Servers, Token, VersionCheck
from dynamoth_client.machines.publisher.routes import PublisherRoutes
from dynamoth_client.machines.publisher.sending import Sending
from dynamoth_client.machines.publisher.standalone import AloneServer
from dynamoth_client.machines.publisher.unreachable import Elsewhere
from dynamoth_client.machines.publisher.waiting import HandOver, Together, Unconfirmed, Waiting
from dynamoth_client.machines.standalone import ALONE

_NEVER = float("inf")


class PublisherMachine:
    """Publishes for one client. See the module's text.

    Promises: G3 for its part (numbers grow by one per channel, in the order of ``Publish`` events), at-least-once
    delivery to the server while the client lives, an outcome for every ``Publish`` within ``publish_timeout_s``.
    """

    def __init__(self, client_id: int, local_plan: LocalPlan, options: PublisherOptions | None = None) -> None:
        """Make a publisher.

        Args:
            client_id: 64-bit number, different for every client, new with each start.
            local_plan: shared by the machines of the client.
            options: see :class:`PublisherOptions`.

        """
        self.client_id = client_id
        self.options = options or PublisherOptions()
        self.counters: Counter[str] = Counter()
        self._plan = local_plan
        self._channels = Channels(self.options)
        self._servers = Servers(local_plan, self.options)
        shared = Shared(client_id, local_plan, self.options, self.counters, self._channels, self._servers)
        alone = AloneServer(shared)
        self._answers = Answers(shared)
        self._routes = PublisherRoutes(shared)
        self._checks = Checks(shared, self._routes, self._answers, alone)
        self._sending = Sending(shared, self._routes, self._answers, self._checks, alone)
        self._elsewhere = Elsewhere(shared, self._routes, self._checks, self._sending)

    def handle(self, event: PublisherEvent, now: float) -> Sequence[PublisherAction]:
        """Handle one event; return the actions to execute, in order."""
        match event:
            case Publish():
                return self._sending.publish(event.token, event.channel, event.payload, now)
            case Replied():
                return self._on_reply(event, now)
            case PublishAll():
                return self._sending.publish_all(event.messages, now)
            case RepliedAll():
                return self._on_replies(event.link, event.values, now)
            case Pushed():
                return [action for push in event.messages for action in self._on_push(event.link, push, now)]
            case LinkUp():
                return self._on_link_up(event, now)
            case LinkDown():
                return self._on_link_down(event, now)
            case Tick():
                return self._on_tick(now)
            case Start():
                return []
            case _:
                assert_never(event)

    def deadline(self) -> float | None:
        """Return when the oldest message expires, a replica is replaced, or a reading is due."""
        earliest = self._answers.deadline()
        for server in self._servers.values():
            if server.waiting:
                expires_at = server.waiting[0].expires_at
                if expires_at < earliest:
                    earliest = expires_at
                if server.read_again_at < earliest:
                    earliest = server.read_again_at
                if not server.up and not server.avoided:
                    earliest = min(earliest, server.down_since + self.options.failover_s)
            if server.waiting or not server.up:
                look_at = self._elsewhere.deadline(server)
                if look_at < earliest:
                    earliest = look_at
        return None if earliest == _NEVER else earliest

    # Links.

    def _on_link_up(self, event: LinkUp, now: float) -> list[PublisherAction]:
        server = self._servers[event.link]
        server.up = True
        server.refused = False
        discard_failed(server, now)
        server.down_since, server.lost_at = float("inf"), None
        server.unasked.clear()
        server.asked.clear()
        if event.run_id != server.run_id and server.version is not None:
            server.version = None
            self._plan.touch()
        server.run_id = event.run_id
        server.missing_since = float("inf")
        server.confirmed.clear()
        if server.avoided:
            server.avoided = False
            self._plan.touch()
        needs_heartbeats, server.needs_heartbeats = server.needs_heartbeats, False
        avoided = [id_ for id_, other in self._servers.items() if other.avoided]
        again = [action for id_ in avoided for action in self._fail_over(id_, now)]
        return [
            Send(event.link, (b"SUBSCRIBE", inbox(self.client_id), CLIENTS_CHANNEL)),
            server.ask_observers(now),
            *(self._routes.read_rules(event.link) if needs_heartbeats else []),
            *server.outbox.link_up(),
            *again,
            *(self._sending.heartbeats(event.link, now) if needs_heartbeats else []),
        ]

    def _on_link_down(self, event: LinkDown, now: float) -> list[PublisherAction]:
        server = self._servers[event.link]
        if server.up:
            server.down_since = server.lost_at = now
            server.needs_heartbeats = True
        server.up = False
        server.clear_until = float("-inf")
        server.reason = event.reason
        server.outbox.link_down()
        self._checks.read_again(server)
        take_apart(server)
        server.outbox.discard(lambda token: token is None)  # heartbeats: the reconnection makes new ones
        self._routes.forget_asked(event.link)
        server.refused = event.refused
        actions: list[PublisherAction] = []
        if event.refused:  # replicas elsewhere may take it
            actions += [] if server.avoided else self._fail_over(event.link, now)
            actions += self._answers.on_untrusted(event.link, now)
        discard_failed(server, now)
        if event.link not in self._plan.servers and event.link != ALONE and not server.waiting:
            server.unlisted = True  # it was removed: nothing goes there any more
            actions.append(Disconnect(event.link))
        return actions

    def _fail_over(self, server_id: str, now: float) -> list[PublisherAction]:
        """Send the unanswered messages of a replica that is away to another one (ALL_SUBSCRIBERS)."""
        server = self._servers[server_id]
        server.avoided = True
        self._plan.touch()
        actions: list[PublisherAction] = []
        for args, token in server.outbox.unanswered():
            if not isinstance(token, Waiting) or token.done:
                continue
            if self._plan.route(token.channel).assignment.mode is not Mode.ALL_SUBSCRIBERS:
                continue
            [location], epoch = self._routes.find(token.channel)
            if location.server == server_id:
                continue
            other, connect = self._servers.open(location.server, now)
            actions += connect
            if other.outbox.full or not token.go_elsewhere(location.server):
                continue
            data = args[2]
            assert isinstance(data, bytes), "the payload of a PUBLISH"
            copy = rerouted(data, epoch) if is_enveloped(data) else data
            actions += other.outbox.put((b"PUBLISH", location.physical, copy), token)
            other.waiting.append(token)
        self.counters["failovers"] += 1
        return actions

    def _on_reply(self, event: Replied, now: float) -> list[PublisherAction]:
        server = self._servers[event.link]
        if event.tag is server.outbox:
            actions = self._on_answer(server.outbox.on_reply(), event.link, event.value, now)
            actions += self._tidy(server, now)
            return actions
        if isinstance(event.value, ErrorReply):
            self.counters["refused_commands"] += 1
            self._routes.forget_asked(event.link)
            return []
        match event.tag:
            case ("observers",):
                observers = int(event.value[1])
                if server.observers and not observers:
                    server.confirmed.clear()
                server.observers = observers
            case ("header",):
                self._routes.on_header(event, server, now)
            case ("rules",):
                return self._routes.on_rules(event, server)
            case ("elsewhere", channel, gone):
                return self._elsewhere.on_entry(channel, gone, event.link, event.value, now)
            case ("doubt", channel):
                return self._routes.on_doubt(channel, event, server)
            case ("entry", channel):
                return self._routes.on_entry(channel, event.link, event.value, server, now)
            case _:
                raise AssertionError(f"not a tag of a publisher: {event.tag!r}")
        return []

    def _on_replies(self, link: str, values: Sequence[Any], now: float) -> list[PublisherAction]:
        """Handle replies to the oldest commands of an outbox."""
        server = self._servers[link]
        actions: list[PublisherAction] = []
        tokens = server.outbox.replied_all(len(values))
        index = 0
        while index < len(tokens):
            token = tokens[index]
            if type(token) is Together:
                count = min(len(token.tokens) - token.answered, len(tokens) - index)
                actions += answer_together(token, values[index : index + count], server.observers)
                index += count
            else:
                actions += self._on_answer(token, link, values[index], now)
                index += 1
        return [*actions, *self._tidy(server, now)]

    def _tidy(self, server: PublisherServer, now: float) -> list[PublisherAction]:
        """Forget messages that are done, after replies; send what may be sent now."""
        waiting = server.waiting
        while waiting and waiting[0].done:
            waiting.popleft()
        actions: list[PublisherAction] = []
        if server.outbox.held:
            actions += server.outbox.flush()
        if server.needs_heartbeats and not len(server.outbox):
            server.needs_heartbeats = False
            actions += self._sending.heartbeats(server.id, now)
        return actions

    def _on_answer(self, token: Token, link: str, value: Any, now: float) -> list[PublisherAction]:
        """Handle the reply to a command of an outbox, by what the command is for."""
        if type(token) is Waiting:
            return [] if token.done else self._answers.on_answer(token, link, value, now)
        if type(token) is Together:
            return answer_together(token, (value,), self._servers[link].observers)
        if isinstance(token, Unconfirmed):
            return [] if token.done else self._answers.on_partial_answer(token, link, value, now)
        if isinstance(token, CheckAt):
            return self._checks.on_entry(token, link, value, now)
        if isinstance(token, VersionCheck):
            return self._checks.on_version(token, link, value, now)
        if isinstance(token, HandOver):
            return self._answers.on_hand_over(token.message, value, now)
        return []

    # Control messages of dispatchers.

    def _on_push(self, link: str, push: Any, now: float) -> list[PublisherAction]:
        if push[0] != b"message":
            return []
        try:
            message = unpack_control(push[2])
        except UnknownMode as error:
            return [*self._plan.too_old(error)]
        except MalformedMessage:
            self.counters["malformed_messages"] += 1
            return []
        match message:
            case RouteNotice(channel, route):
                return (
                    self._routes.on_route_notice(link, channel, route, now) if channel in self._channels.by_name else []
                )
            case ObservationGap(server):
                return self._sending.heartbeats(server, now)
            case RulesChanged(version):
                return self._routes.on_rules_changed(link, version)
            case _:
                self.counters["unexpected_messages"] += 1
                return []

    # Time.

    def _on_tick(self, now: float) -> list[PublisherAction]:
        actions = self._answers.run_due(now)
        for server_id, server in list(self._servers.items()):
            while server.waiting and (server.waiting[0].done or server.waiting[0].expires_at <= now):
                waiting = server.waiting.popleft()
                if not waiting.done:
                    actions += self._answers.on_late(waiting, server_id, now)
            if not server.up and not server.avoided and now - server.down_since >= self.options.failover_s:
                actions += self._fail_over(server_id, now)
            if self._elsewhere.deadline(server) <= now:
                actions += self._elsewhere.look(server_id, now)
            if has_failed(server.outbox.large_under_way(), now):
                actions += self._reconnect(server_id, now)
            discard_failed(server, now)
            if server.read_again_at <= now:
                actions += self._checks.read_again(server)
        return actions

    def _reconnect(self, server_id: str, now: float) -> list[PublisherAction]:
        """Replace a connection that is busy with a large message that has failed."""
        server = self._plan.servers.get(server_id)
        if server is None:
            return []
        reason = "its connection was busy with a large message that has failed"
        return [
            Disconnect(server_id),
            Connect(server_id, server.url),
            *self._on_link_down(LinkDown(server_id, reason), now),
        ]

    # Invariants.

    def check(self) -> None:
        """Assert the invariants that hold between events: for tests and for the simulator."""
        self._plan.check()
        self._channels.check()
        self._servers.check()
