"""Mutations for the scenarios about first messages and lost clients. See ``mutations``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from dynamoth.plan.plan import Location
from dynamoth.protocol.envelope import FORWARDED, Envelope
from dynamoth_client.machines import sequences
from dynamoth_client.machines.publisher.answers import Answers
from dynamoth_client.machines.publisher.channels import PublishedChannel
from dynamoth_client.machines.publisher.checks import Checks
from dynamoth_client.machines.publisher.records import CheckAt, PublisherServer, VersionCheck
from dynamoth_client.machines.publisher.unreachable import Elsewhere
from dynamoth_client.machines.sequences import Gap, Stream
from dynamoth_client.machines.subscriber.routing import Routing
from dynamoth_dispatcher.options import TransitionOptions
from dynamoth_dispatcher.transitions import Transitions
from dynamoth_sim.mutations.mutation import Check, no_actions, nothing, replaced, returning


def agents_are_trusted() -> AbstractContextManager[None]:
    """A publisher believes that an agent forwards what it has published in the wrong place."""

    def replied(self: Checks, at: CheckAt, link: str, value: Any, now: float) -> list[Any]:
        self._routes.on_entry(at.check.channel, link, value, self._servers[link], now)  # pyright: ignore[reportPrivateUsage]
        return self._confirm(at.check, now)  # pyright: ignore[reportPrivateUsage]

    return replaced(Checks, on_entry=replied)


def versions_are_not_read() -> AbstractContextManager[None]:
    """A publisher relies on agents to say that a channel it knows has moved."""

    def confirm(self: Checks, asked: VersionCheck, link: str, value: Any, now: float) -> list[Any]:
        server = self._servers[link]  # pyright: ignore[reportPrivateUsage]
        server.clear_until = asked.begun_at + self._options.observers_interval_s  # pyright: ignore[reportPrivateUsage]
        return self._confirm_all(asked, server, now)  # pyright: ignore[reportPrivateUsage]

    return replaced(Checks, on_version=confirm)


def versions_of_replicas_are_not_read() -> AbstractContextManager[None]:
    """A publisher relies on agents to say that a replicated channel that it knows has moved."""
    begin = Checks.begin

    def first_only(
        channel: PublishedChannel, name: bytes, locations: tuple[Location, ...], *rest: Any
    ) -> tuple[Any, Sequence[PublisherServer]]:
        if len(locations) > 1 and channel.sequence != channel.floor:
            return None, ()
        return begin(channel, name, locations, *rest)

    return replaced(Checks, begin=staticmethod(first_only))


def one_replica_confirms() -> AbstractContextManager[None]:
    """The version is read at the first replica alone."""
    put = Checks.put_version_check

    def at_first(server: PublisherServer) -> list[Any]:
        return put(server) if server.outbox.link == "s1" else []

    return replaced(Checks, put_version_check=staticmethod(at_first))


def moves_settle_at_once() -> AbstractContextManager[None]:
    """A move settles when nobody listens at the old location, though publishers may not have seen that it was begun."""
    init = Transitions.__init__

    def hasty(self: Transitions, server: str, options: TransitionOptions, counters: Counter[str]) -> None:
        init(self, server, replace(options, settle_after_s=options.poll_interval_s), counters)

    return replaced(Transitions, __init__=hasty)


def silence_is_waited_out() -> AbstractContextManager[None]:
    """Publishers wait until the link to a server that hangs is given up."""
    deadline = Elsewhere.deadline

    def when_down(self: Elsewhere, server: PublisherServer) -> float:
        return float("inf") if server.up else deadline(self, server)

    return replaced(Elsewhere, deadline=when_down)


def outcomes_in_the_order_of_queues() -> AbstractContextManager[None]:
    """A message that is sent again has its outcome when the messages before it in its server's queue have theirs."""
    return replaced(Answers, set_timer=nothing)


def no_number_is_too_far() -> AbstractContextManager[None]:
    """A subscriber follows whatever number comes in a publisher's name."""
    return replaced(sequences, HELD_MAX=2**60)


def late_is_suspicious() -> AbstractContextManager[None]:
    """A subscriber does not look who sends it what is too late to be a copy."""
    below = Stream._below  # pyright: ignore[reportPrivateUsage]

    def blind(self: Stream, publisher: int, sequence: int, flags: int, now: float) -> list[Any]:
        return below(self, publisher, sequence, flags & ~FORWARDED, now)

    return replaced(Stream, _below=blind)


def begun_without_a_gap() -> AbstractContextManager[None]:
    """A subscriber that is new to a publisher begins with what it has when it has waited, and says nothing."""
    release = Stream._release  # pyright: ignore[reportPrivateUsage]

    def silent(self: Stream, publisher: int, reason: str, now: float) -> list[Any]:
        was_opening = self.next is None
        released = release(self, publisher, reason, now)
        return [outcome for outcome in released if not (was_opening and isinstance(outcome, Gap))]

    return replaced(Stream, _release=silent)


def everything_is_due() -> AbstractContextManager[None]:
    """A subscriber expects every message that was published before it heard of the publisher."""

    def now_of(self: Envelope, now: float) -> float:
        return now

    return replaced(Envelope, previous_at=now_of)


def nobody_is_asked_for_publishers() -> AbstractContextManager[None]:
    """Publishers wait for a server that cannot be reached."""
    return replaced(Elsewhere, deadline=returning(float("inf")))


def nobody_is_asked_for_subscribers() -> AbstractContextManager[None]:
    """Subscribers wait for a server that cannot be reached."""
    return replaced(Routing, _look_elsewhere=no_actions)


def markers_may_be_late() -> AbstractContextManager[None]:
    """A subscriber waits for the agent of its new place, and says nothing."""
    return replaced(Routing, _look_for_markers=no_actions)


def each_jump_begins_anew() -> AbstractContextManager[None]:
    """What is below a stream is a late copy for a while after each time that somebody moves it ahead."""

    def go_on(self: Stream, sequence: int, now: float, *, is_reported: bool = False) -> None:
        self.next = self.begun = sequence
        self._begun_at = now  # pyright: ignore[reportPrivateUsage]

    return replaced(Stream, _go_on=go_on)


CHECKS: tuple[Check, ...] = (
    Check("34-first-message-agent-hangs", agents_are_trusted, "G1"),
    Check("35-first-message-agent-lags", agents_are_trusted, "expected"),
    Check("36-lost-before-it-was-known", begun_without_a_gap, "G5"),
    Check("37-not-due", everything_is_due, "expected"),
    Check("47-stale-and-gone", versions_are_not_read, "G1"),
    Check("57-forwarded-late", late_is_suspicious, "truth"),
    Check("42-last-message-of-an-interval", moves_settle_at_once, "G5"),
    Check("43-stale-and-gone-replicated", versions_of_replicas_are_not_read, "G1"),
    Check("49-old-server-hangs", silence_is_waited_out, "expected"),
    Check("59-replica-hangs", one_replica_confirms, "expected"),
    Check("58-sent-again-late", outcomes_in_the_order_of_queues, "expected"),
    Check("65-new-agent-is-gone", markers_may_be_late, "expected"),
    Check("48-copied-id", no_number_is_too_far, "expected"),
    Check("106-moved-ahead", each_jump_begins_anew, "expected"),
    Check("38-old-server-dies", nobody_is_asked_for_publishers, "expected"),
    Check("39-home-is-down", nobody_is_asked_for_publishers, "expected"),
    Check("39-home-is-down", nobody_is_asked_for_subscribers, "expected"),
)
