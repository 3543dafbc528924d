"""Mutations for the scenarios about first messages and lost clients. See ``mutations``."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from dynamoth.envelope import FORWARDED, Envelope
from dynamoth_client import sequences
from dynamoth_client.checks import Checks
from dynamoth_client.elsewhere import Elsewhere
from dynamoth_client.moves import Moves
from dynamoth_client.publication import CheckAt, PublisherServer, VersionCheck
from dynamoth_client.sequences import Gap, Stream
from dynamoth_sim.mutating import Check, replaced


def agents_are_trusted() -> AbstractContextManager[None]:
    """A publisher believes that an agent forwards what it has published in the wrong place."""

    def replied(self: Checks, at: CheckAt, link: str, value: Any, now: float) -> list[Any]:
        self._routes.entry_read(at.check.channel, link, value, self._servers[link], now)  # pyright: ignore[reportPrivateUsage]
        return self._confirm(at.check, now)  # pyright: ignore[reportPrivateUsage]

    return replaced(Checks, replied=replied)


def versions_are_not_read() -> AbstractContextManager[None]:
    """A publisher relies on agents to say that a channel it knows has moved."""

    def confirm(self: Checks, asked: VersionCheck, link: str, value: Any, now: float) -> list[Any]:
        server = self._servers[link]  # pyright: ignore[reportPrivateUsage]
        server.clear_until = asked.begun_at + self._options.observers_interval_s  # pyright: ignore[reportPrivateUsage]
        return self._confirm_all(asked, server, now)  # pyright: ignore[reportPrivateUsage]

    return replaced(Checks, version_read=confirm)


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


def everything_is_owed() -> AbstractContextManager[None]:
    """A subscriber takes every message for owed that was published before it heard of the publisher."""

    def now_of(self: Envelope, now: float) -> float:
        return now

    return replaced(Envelope, previous_at=now_of)


def nobody_is_asked_for_publishers() -> AbstractContextManager[None]:
    """Publishers wait for a server that cannot be reached."""

    def never(self: Elsewhere, server: PublisherServer) -> float:
        return float("inf")

    return replaced(Elsewhere, deadline=never)


def nobody_is_asked_for_subscribers() -> AbstractContextManager[None]:
    """Subscribers wait for a server that cannot be reached."""

    def nothing(*_: Any) -> list[Any]:
        return []

    return replaced(Moves, _look_elsewhere=nothing)


CHECKS: tuple[Check, ...] = (
    Check("34-first-message-agent-hangs", agents_are_trusted, "G1"),
    Check("35-first-message-agent-lags", agents_are_trusted, "expected"),
    Check("36-lost-before-it-was-known", begun_without_a_gap, "G5"),
    Check("37-not-owed", everything_is_owed, "expected"),
    Check("47-stale-and-gone", versions_are_not_read, "G1"),
    Check("57-forwarded-late", late_is_suspicious, "truth"),
    Check("48-copied-id", no_number_is_too_far, "expected"),
    Check("38-old-server-dies", nobody_is_asked_for_publishers, "expected"),
    Check("39-home-is-down", nobody_is_asked_for_publishers, "expected"),
    Check("39-home-is-down", nobody_is_asked_for_subscribers, "expected"),
)
