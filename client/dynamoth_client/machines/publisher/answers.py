"""What becomes of publications: from the answers of servers to what the application is told.

A message for one server has the outcome of its answer. One for several replicas ends when all have answered, or when
the dispatcher of one that has it has been asked to forward it to the others; see the text of
:mod:`dynamoth_client.machines.publisher.machine`.

Messages that wait for a server expire in the order of its queue, except for those that were sent there again. These
have timers, and so has a message that is looked at before it expires.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import Any

from dynamoth.machine.events import ErrorReply
from dynamoth.machine.outbox import Command
from dynamoth.names import forward_channel, logical_channel
from dynamoth.plan.plan import Location
from dynamoth.protocol.control import ForwardRequest, pack_control
from dynamoth.protocol.envelope import HEARTBEAT, open_envelope, rerouted, seal, whole_ms
from dynamoth_client.machines.publisher.publication import (
    PUBLISH_TIMEOUT_S_MAX,
    CheckAt,
    HandOver,
    Published,
    PublishedAll,
    PublisherOptions,
    PublisherServer,
    PublishFailed,
    PublishRefused,
    Together,
    Token,
    Unconfirmed,
    VersionCheck,
    Waiting,
)


class Answers:
    """Finds the outcomes of one publisher's messages. All methods return the actions to execute."""

    def __init__(
        self,
        client_id: int,
        servers: Mapping[str, PublisherServer],
        options: PublisherOptions,
        counters: Counter[str],
    ) -> None:
        """Share the servers and the counters with the publisher."""
        self._client_id = client_id
        self._servers = servers
        self._options = options
        self._counters = counters
        #: When messages are to be looked at, a number that orders those of one time, and a server that each waits for.
        self._timers: list[tuple[float, int, Waiting, str]] = []
        self._timer_numbers = count()

    def set_timer(self, waiting: Waiting, server_id: str, at: float) -> None:
        """Look at a message at a time, in the place of an earlier timer of it. It waits for a server, among others."""
        waiting.tell_at = min(at, waiting.expires_at)
        heappush(self._timers, (waiting.tell_at, next(self._timer_numbers), waiting, server_id))

    def deadline(self) -> float:
        """Return when the first timer ends; infinity when there is none."""
        timers = self._timers
        while timers and (timers[0][2].done or timers[0][0] != timers[0][2].tell_at):
            heappop(timers)
        return timers[0][0] if timers else float("inf")

    def due(self, now: float) -> list[Any]:
        """See to the messages whose timers have ended."""
        actions: list[Any] = []
        while self.deadline() <= now:
            _, _, waiting, server_id = heappop(self._timers)
            actions += self.late(waiting, server_id, now)
        return actions

    def answered(self, waiting: Waiting, link: str, value: Any, now: float) -> list[Any]:
        """Take the answer of one server; tell the application when no other is worth waiting for."""
        if type(value) is int and not waiting.missing:  # nearly always
            waiting.done = True
            return [Published(waiting.token, (waiting.receivers or 0) + max(0, value - self._servers[link].observers))]
        return self.answered_in_part(waiting, link, value, now)

    def answered_in_part(self, waiting: Waiting, link: str, value: Any, now: float) -> list[Any]:
        """Take the answer of one server of several, or to a message that waits for its confirmation besides."""
        if isinstance(value, ErrorReply):
            waiting.refusal = str(value)
        else:
            waiting.receivers = (waiting.receivers or 0) + max(0, value - self._servers[link].observers)
            if waiting.missing:
                waiting.holders = (*waiting.holders, link)
        if waiting.missing:
            waiting.missing = tuple(server_id for server_id in waiting.missing if server_id != link)
            if not all(self._servers[server_id].avoided for server_id in waiting.missing):
                if waiting.receivers is not None and now + self._options.straggler_s < waiting.tell_at:
                    self.set_timer(waiting, link, now + self._options.straggler_s)
                return []
            if waiting.missing:
                return self.hand_over(waiting, now)
        return self._answered_by_all(waiting)

    def _answered_by_all(self, waiting: Waiting) -> list[Any]:
        """Tell the application, unless the message waits for its confirmation."""
        if not isinstance(waiting, Unconfirmed) or waiting.confirmed:
            return self.end(waiting)
        waiting.answered = True
        waiting.tell_at = waiting.expires_at
        return []

    def confirmed(self, message: Waiting) -> list[Any]:
        """Note that a message went where the stored plan says; tell the application if servers have answered."""
        assert isinstance(message, Unconfirmed), "every message of a check is one"
        message.confirmed = True
        return self.end(message) if message.answered and not message.done else []

    def begin_again(self, message: Waiting, locations: Sequence[Location]) -> Unconfirmed:
        """Wait for the answers of other servers to a message that is sent again; what was answered counts no more."""
        message.done = True
        again = Unconfirmed(message.token, message.expires_at, message.channel)
        if len(locations) > 1:
            again.missing = tuple(location.server for location in locations)
        return again

    def hand_over(self, waiting: Waiting, now: float) -> list[Any]:
        """Ask the dispatcher of the next replica that has a message to see to those that have not answered; or end.

        It is to forward the message where this client is not connected. A replica that is connected and slow has the
        message on its way, and twice would make it slower still: its subscribers are only to be told of the number.
        """
        while waiting.missing and waiting.holders and waiting.sent is not None:
            server_id, *others = waiting.holders
            waiting.holders = tuple(others)
            server = self._servers[server_id]
            if not server.up or server.outbox.full:
                continue
            self.set_timer(waiting, server_id, now + self._options.straggler_s)
            waiting.requests += 1
            physical, data = waiting.sent
            request = pack_control(self._request(waiting, data, now))
            return server.outbox.put((b"PUBLISH", forward_channel(physical), request), HandOver(waiting))
        if waiting.missing and waiting.requests:
            waiting.tell_at = waiting.expires_at
            return []
        return self._answered_by_all(waiting)

    def _request(self, waiting: Waiting, data: bytes, now: float) -> ForwardRequest:
        """Return what each replica that has not answered is to be sent by somebody else."""
        envelope = open_envelope(data)
        quiet_ms = whole_ms(now - waiting.expires_at + self._options.publish_timeout_s)
        heartbeat = seal(self._client_id, envelope.sequence, envelope.epoch, b"", HEARTBEAT, quiet_ms)
        copy = rerouted(data, envelope.epoch)
        servers = waiting.missing
        return ForwardRequest(tuple((id_, heartbeat if self._servers[id_].up else copy) for id_ in servers))

    def handed_over(self, waiting: Waiting, value: Any, now: float) -> list[Any]:
        """Tell the application, if a dispatcher was there to hear."""
        waiting.requests -= 1
        if waiting.done:
            return []
        if isinstance(value, ErrorReply) or value == 0:
            self._counters["unheard_requests"] += 1
            return self.hand_over(waiting, now)
        self._counters["handed_over"] += 1
        return self._answered_by_all(waiting)

    def late(self, waiting: Waiting | Together, server_id: str, now: float) -> list[Any]:
        """See to messages that a server should have answered by now: somebody else is asked, or they have failed."""
        if isinstance(waiting, Together):
            waiting.done = True
            reason, late = self._why_unanswered(server_id)
            return [PublishFailed(token, reason, late) for token in waiting.tokens[waiting.answered :]]
        if waiting.expires_at > now:
            return self.hand_over(waiting, now)
        if isinstance(waiting, Unconfirmed) and waiting.answered:
            return self._end_unconfirmed(waiting, server_id)
        return self.end(waiting, *self._why_unanswered(server_id, *waiting.also_at, *waiting.missing))

    def _end_unconfirmed(self, waiting: Waiting, server_id: str) -> list[Any]:
        """Fail a message that a server has taken without saying whether its channel is there."""
        waiting.done = True
        if waiting.receivers is None:
            return [PublishRefused(waiting.token, waiting.refusal)]
        reason = f"server {server_id} took the message and did not confirm that the channel is there"
        connected = self._servers[server_id].up
        return [PublishFailed(waiting.token, reason if connected else f"{reason}: it was lost", late=connected)]

    def refused(self, server_id: str, now: float) -> list[Any]:
        """Fail the messages that wait for a server that is not trusted, and for no other one."""
        server = self._servers[server_id]
        actions: list[Any] = []
        for waiting in server.waiting:
            assert isinstance(waiting, Waiting), "those that went out together were taken apart"
            others = (*waiting.also_at, *waiting.missing, *waiting.holders)
            if waiting.done or waiting.requests or not all(self._servers[id_].refused for id_ in others):
                continue
            waiting.expires_at = now
            server.note_refused(waiting.channel)
            actions += self.end(waiting, self.why_refused(server_id))
        server.waiting = deque(waiting for waiting in server.waiting if not waiting.done)
        return actions

    def why_refused(self, server_id: str) -> str:
        """Return why nothing is published at a server that is not trusted, in words."""
        return f"server {server_id}: {self._servers[server_id].reason}"

    def _why_unanswered(self, *server_ids: str) -> tuple[str, bool]:
        """Return why none of these servers has answered, in words, and whether one of them is connected."""
        connected = next((id_ for id_ in server_ids if self._servers[id_].up), None)
        server_id = connected or server_ids[0]
        reason = f"server {server_id} did not answer for {self._options.publish_timeout_s:g} s"
        if connected is None:
            return f"{reason}: {self._servers[server_id].reason}", False
        return (
            f"{reason}: it is connected, so the message may have been delivered: look for commands that block the"
            f" server (SLOWLOG), or allow more time by socket_timeout and retry ({PUBLISH_TIMEOUT_S_MAX:g} s at most)",
            True,
        )

    def end(self, waiting: Waiting, reason: str = "", late: bool = False) -> list[Any]:
        """Tell the application; ``reason`` is why no server has answered, and ``late`` as in ``PublishFailed``."""
        waiting.done = True
        return [self._outcome(waiting, reason, late)]

    def _outcome(self, waiting: Waiting, reason: str, late: bool) -> Published | PublishRefused | PublishFailed:
        """Return what the application is told: that it was published, if any server has it."""
        if waiting.receivers is not None:
            self._counters["copies_refused"] += bool(waiting.refusal)
            return Published(waiting.token, waiting.receivers)
        if waiting.refusal:
            return PublishRefused(waiting.token, waiting.refusal)
        return PublishFailed(waiting.token, reason, late)


def answered_together(together: Together, values: Sequence[Any], observers: int) -> list[Any]:
    """Take the answers to the next messages of those that went out together; return what the application is told."""
    begin = together.answered
    together.answered = end = begin + len(values)
    if together.done:
        return []
    together.done = end == len(together.tokens)
    tokens = together.tokens[begin:end]
    if ErrorReply not in set(map(type, values)):
        if observers:
            values = [value - observers if value > observers else 0 for value in values]
        return [PublishedAll(tokens, values)]
    return [
        PublishRefused(token, str(value))
        if isinstance(value, ErrorReply)
        else Published(token, max(0, value - observers))
        for token, value in zip(tokens, values, strict=True)
    ]


def take_apart(server: PublisherServer) -> None:
    """Wait for each message that went out with others by itself, as what becomes of them may be different now."""
    parts: dict[int, list[Waiting]] = {}

    def part(args: Command, token: Any) -> Any:
        if type(token) is not Together:
            return token
        physical = args[1]
        assert isinstance(physical, bytes), "the channel of a PUBLISH"
        waiting = Waiting(token.tokens[token.answered], token.expires_at, logical_channel(physical))
        waiting.done = token.done
        token.answered += 1
        parts.setdefault(id(token), []).append(waiting)
        return waiting

    server.outbox.replace_tokens(part)
    server.waiting = deque(
        single
        for waiting in server.waiting
        for single in (parts.get(id(waiting), ()) if type(waiting) is Together else (waiting,))
    )


def has_failed(token: Token, now: float) -> bool:
    """Tell whether the application has been told that what a command is for has failed, or may have."""
    if isinstance(token, (Together, HandOver)):
        return token.done if isinstance(token, Together) else token.message.done
    messages: list[Waiting | None]
    if isinstance(token, VersionCheck):
        messages = [message for check in token.checks for message, _ in check.messages]
    else:
        messages = [message for message, _ in token.check.messages] if isinstance(token, CheckAt) else [token]
    return all(message is not None and message.done and message.expires_at <= now for message in messages)


def discard_failed(server: PublisherServer, now: float) -> None:
    """Forget what has failed and is not under way: it would only be in the way of what has not."""

    def is_useless(token: Token) -> bool:
        useless = has_failed(token, now) or (token is None and not server.up)
        if useless and isinstance(token, Together):
            token.tokens.pop()  # their number tells which replies are its own
        if useless and isinstance(token, CheckAt):
            token.check.done = True  # the next message of the channel is followed by another one
        if useless and isinstance(token, VersionCheck):
            server.version_check = None
            for check in token.checks:
                check.done = True
        return useless

    if server.outbox.discard_while(is_useless):
        server.owes_heartbeats = True
