"""Turns the answers of servers, or their absence, into the outcomes of messages.

A message for one server has the outcome of its answer. One for several replicas ends when all have answered, or when
the dispatcher of one that has it has been asked to forward it to the others; see the text of
:mod:`dynamoth_client.machines.publisher.machine`.

Messages that wait for a server expire in the order of its queue, except for those that were sent there again. These
have timers, and so has a message that is looked at before it expires.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count
from typing import Any

from dynamoth.machine.events import ErrorReply
from dynamoth.machine.outbox import Command
from dynamoth.names import forward_channel, logical_channel
from dynamoth.protocol.control import ForwardRequest, pack_control
from dynamoth.protocol.envelope import HEARTBEAT, open_envelope, rerouted, seal, whole_ms
from dynamoth_client.machines.publisher.events import (
    PUBLISH_TIMEOUT_S_MAX,
    Outcome,
    Published,
    PublishedAll,
    PublisherAction,
    PublishFailed,
    PublishRefused,
)
from dynamoth_client.machines.publisher.part import Part, Shared
from dynamoth_client.machines.publisher.records import CheckAt, PublisherServer, Token, VersionCheck
from dynamoth_client.machines.publisher.waiting import HandOver, Together, Unconfirmed, Waiting


class Answers(Part):
    """Finds the outcomes of one publisher's messages."""

    def __init__(self, shared: Shared) -> None:
        """Begin without timers."""
        super().__init__(shared)
        #: When messages are looked at, a number that orders those of one time, and a server that each waits for.
        self._timers: list[tuple[float, int, Waiting, str]] = []
        self._timer_numbers = count()

    def set_timer(self, waiting: Waiting, server_id: str, at: float) -> None:
        """Look at a message at a time, in the place of an earlier timer. It waits for ``server_id``, among others."""
        waiting.wait_until(at)
        heappush(self._timers, (waiting.due_at, next(self._timer_numbers), waiting, server_id))

    def deadline(self) -> float:
        """Return when the first timer ends; infinity when there is none."""
        timers = self._timers
        while timers and (timers[0][2].done or timers[0][0] != timers[0][2].due_at):
            heappop(timers)
        return timers[0][0] if timers else float("inf")

    def run_due(self, now: float) -> list[PublisherAction]:
        """Look at the messages whose timers have ended."""
        actions: list[PublisherAction] = []
        while self.deadline() <= now:
            _, _, waiting, server_id = heappop(self._timers)
            actions += self.on_late(waiting, server_id, now)
        return actions

    def on_answer(self, waiting: Waiting, link: str, value: Any, now: float) -> list[PublisherAction]:
        """Handle the answer of one server; end the message when no other answer is worth waiting for."""
        if type(value) is int and not waiting.missing:  # nearly always
            waiting.end()
            return [Published(waiting.token, (waiting.receivers or 0) + max(0, value - self._servers[link].observers))]
        return self.on_partial_answer(waiting, link, value, now)

    def on_partial_answer(self, waiting: Waiting, link: str, value: Any, now: float) -> list[PublisherAction]:
        """Handle the answer of one server of several, or to a message that also waits for its confirmation."""
        is_replicated = bool(waiting.missing)
        if isinstance(value, ErrorReply):
            waiting.refuse(link, str(value))
        else:
            waiting.answer(link, max(0, value - self._servers[link].observers))
        if is_replicated:
            if not all(self._servers[server_id].avoided for server_id in waiting.missing):
                if waiting.receivers is not None and now + self._options.straggler_s < waiting.due_at:
                    self.set_timer(waiting, link, now + self._options.straggler_s)
                return []
            if waiting.missing:
                return self.hand_over(waiting, now)
        return self._on_all_answered(waiting)

    def _on_all_answered(self, waiting: Waiting) -> list[PublisherAction]:
        """End a message, unless it waits for its confirmation."""
        if isinstance(waiting, Unconfirmed) and waiting.wait_for_confirmation():
            return []
        return self.end(waiting)

    def confirm(self, message: Waiting) -> list[PublisherAction]:
        """Note that a message went where the stored plan says; end it if servers have answered."""
        assert isinstance(message, Unconfirmed), "every message of a check is one"
        return self.end(message) if message.confirm() else []

    @staticmethod
    def begin_again(message: Waiting) -> Unconfirmed:
        """Wait for the answers of other servers to a message that is sent again; earlier answers count no more."""
        message.end()
        return Unconfirmed(message.token, message.expires_at, message.channel)

    def hand_over(self, waiting: Waiting, now: float) -> list[PublisherAction]:
        """Ask the dispatcher of the next replica that has a message to forward it to those that have not answered.

        It forwards the message where this client is not connected. A replica that is connected and slow has the message
        on its way, and a second copy would make it slower still: its subscribers only get the number. When all holders
        were asked and one is to answer, that is waited for; without a request, the message ends.
        """
        while (server_id := waiting.take_holder()) is not None:
            server = self._servers[server_id]
            if not server.up or server.outbox.full or waiting.sent is None:
                continue
            self.set_timer(waiting, server_id, now + self._options.straggler_s)
            waiting.request(1)
            physical, data = waiting.sent
            request = pack_control(self._request(waiting, data, now))
            return [*server.outbox.put((b"PUBLISH", forward_channel(physical), request), HandOver(waiting))]
        if waiting.missing and waiting.requests:
            waiting.wait_until()
            return []
        return self._on_all_answered(waiting)

    def _request(self, waiting: Waiting, data: bytes, now: float) -> ForwardRequest:
        """Return the request for a dispatcher: what it sends to each replica that has not answered."""
        envelope = open_envelope(data)
        quiet_ms = whole_ms(now - waiting.expires_at + self._options.publish_timeout_s)
        heartbeat = seal(self._client_id, envelope.sequence, envelope.epoch, b"", HEARTBEAT, quiet_ms)
        copy = rerouted(data, envelope.epoch)
        servers = waiting.missing
        return ForwardRequest(tuple((id_, heartbeat if self._servers[id_].up else copy) for id_ in servers))

    def on_hand_over(self, waiting: Waiting, value: Any, now: float) -> list[PublisherAction]:
        """Handle the reply to a request: the message ends if a dispatcher has it, else the next one is asked."""
        waiting.request(-1)
        if waiting.done:
            return []
        if isinstance(value, ErrorReply) or value == 0:
            self._counters["unheard_requests"] += 1
            return self.hand_over(waiting, now)
        self._counters["handed_over"] += 1
        return self._on_all_answered(waiting)

    def on_late(self, waiting: Waiting | Together, server_id: str, now: float) -> list[PublisherAction]:
        """Handle messages that a server should have answered by now: ask a dispatcher, or fail them."""
        if isinstance(waiting, Together):
            reason, late = self._why_unanswered(server_id)
            return [PublishFailed(token, reason, late) for token in waiting.end()]
        if waiting.expires_at > now:
            return self.hand_over(waiting, now)
        if isinstance(waiting, Unconfirmed) and waiting.answered:
            return self._end_unconfirmed(waiting, server_id)
        return self.end(waiting, *self._why_unanswered(server_id, *waiting.also_at, *waiting.missing))

    def _end_unconfirmed(self, waiting: Waiting, server_id: str) -> list[PublisherAction]:
        """Fail a message that a server has taken without saying whether its channel is there."""
        waiting.end()
        if waiting.receivers is None:
            return [PublishRefused(waiting.token, waiting.refusal)]
        reason = f"server {server_id} took the message and did not confirm that the channel is there"
        connected = self._servers[server_id].up
        return [PublishFailed(waiting.token, reason if connected else f"{reason}: it was lost", late=connected)]

    def on_untrusted(self, server_id: str, now: float) -> list[PublisherAction]:
        """Fail the messages that wait for a server that is not trusted, and for no other one."""
        server = self._servers[server_id]
        actions: list[PublisherAction] = []
        for waiting in server.waiting:
            assert isinstance(waiting, Waiting), "those that went out together were taken apart"
            others = (*waiting.also_at, *waiting.missing, *waiting.holders)
            if waiting.done or waiting.requests or not all(self._servers[id_].refused for id_ in others):
                continue
            waiting.expire(now)
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

    def end(self, waiting: Waiting, reason: str = "", late: bool = False) -> list[PublisherAction]:
        """End a message; ``reason`` is why no server has answered, and ``late`` as in ``PublishFailed``."""
        waiting.end()
        return [self._outcome(waiting, reason, late)]

    def _outcome(self, waiting: Waiting, reason: str, late: bool) -> Outcome:
        """Return the outcome of a message: it was published if any server has it."""
        if waiting.receivers is not None:
            self._counters["copies_refused"] += bool(waiting.refusal)
            return Published(waiting.token, waiting.receivers)
        if waiting.refusal:
            return PublishRefused(waiting.token, waiting.refusal)
        return PublishFailed(waiting.token, reason, late)


def answer_together(together: Together, values: Sequence[Any], observers: int) -> list[PublisherAction]:
    """Return the outcomes of the next messages of those that went out together, given the answers to them."""
    tokens = together.answer(len(values))
    if not tokens:
        return []
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
    """Make messages that went out together wait by themselves, as their outcomes may differ now."""
    parts: dict[int, list[Waiting]] = {}

    def part(args: Command, token: Any) -> Any:
        if type(token) is not Together:
            return token
        physical = args[1]
        assert isinstance(physical, bytes), "the channel of a PUBLISH"
        waiting = token.take_first(logical_channel(physical))
        parts.setdefault(id(token), []).append(waiting)
        return waiting

    server.outbox.replace_tokens(part)
    server.waiting = deque(
        single
        for waiting in server.waiting
        for single in (parts.get(id(waiting), ()) if type(waiting) is Together else (waiting,))
    )


def has_failed(token: Token, now: float) -> bool:
    """Return whether all messages that a command serves have failed, or may have, for the application."""
    if isinstance(token, (Together, HandOver)):
        return token.done if isinstance(token, Together) else token.message.done
    messages: list[Waiting | None]
    if isinstance(token, VersionCheck):
        messages = [message for check in token.checks for message, _ in check.messages]
    else:
        messages = [message for message, _ in token.check.messages] if isinstance(token, CheckAt) else [token]
    return all(message is not None and message.done and message.expires_at <= now for message in messages)


def discard_failed(server: PublisherServer, now: float) -> None:
    """Forget commands that are not under way and whose messages have failed: others are waiting behind them."""

    def is_useless(token: Token) -> bool:
        useless = has_failed(token, now) or (token is None and not server.up)
        if useless and isinstance(token, Together):
            token.drop_last()  # the number of messages says which replies are theirs
        if useless and isinstance(token, CheckAt):
            token.check.over = True  # the next message of the channel is followed by another one
        if useless and isinstance(token, VersionCheck):
            server.version_check = None
            for check in token.checks:
                check.over = True
        return useless

    if server.outbox.discard_while(is_useless):
        server.needs_heartbeats = True
