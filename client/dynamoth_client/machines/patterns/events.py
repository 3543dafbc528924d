"""The vocabulary of a pattern subscriber: its own events and actions, and its options."""

from __future__ import annotations

from dataclasses import dataclass

from dynamoth.machine.events import LinkAction
from dynamoth.plan.plan import JOIN_S
from dynamoth_client.machines.subscriber.events import ListenerEvent, RegisterAction


@dataclass(slots=True)
class SubscribePatterns:
    """Event: the application subscribes. Each pattern is confirmed once per time that it is named."""

    patterns: tuple[bytes, ...]


@dataclass(slots=True)
class UnsubscribePatterns:
    """Event: the application unsubscribes."""

    patterns: tuple[bytes, ...]


@dataclass(slots=True)
class PatternMessage:
    """A message for the application."""

    pattern: bytes
    channel: bytes
    payload: bytes


@dataclass(slots=True)
class DeliverMatched:
    """Action: messages for the application, in order."""

    messages: list[PatternMessage]


@dataclass(slots=True)
class PatternGapDetected:
    """Action: messages of a pattern were, or may have been, lost (G5). None means unknown, or any."""

    pattern: bytes
    channel: bytes | None
    publisher: int | None
    count: int | None
    reason: str


PatternEvent = ListenerEvent | SubscribePatterns | UnsubscribePatterns

PatternAction = LinkAction | RegisterAction | DeliverMatched | PatternGapDetected


@dataclass(frozen=True, slots=True)
class PatternOptions:
    """Options of a pattern subscriber."""

    hold_s_max: float = 2.0
    """How long a message waits for an earlier one of its publisher before the gap is reported. Longer than a busy
    machine keeps an agent from forwarding."""
    header_interval_s: float = 3.0
    """How often each server is asked for the servers of the plan."""
    retry_s: float = 0.1
    """How soon a server is asked again that held no plan, or refused for the moment."""
    failover_s: float = 5.0
    """How long a server may be away, or hold no plan, before a pattern is confirmed without it; and how long it may be
    away before the application gets the gap event."""
    join_s: float = JOIN_S
    """A server carries no channel until this time after the plan has listed it: who joins before has missed nothing."""
    link_idle_s: float = 30.0
    """The links are closed this time after the last pattern."""
    stream_idle_s: float = 600.0
    """A publisher is forgotten when nothing has come from it for this time, or for up to twice this."""
    channels_max: int = 10_000
    """Channels per pattern whose delivered numbers are remembered; past it the longest idle quarter is forgotten. A
    channel that holds messages is not: ``hold_s_max`` bounds these."""
    ended_max: int = 100
    """Ended patterns whose numbers are remembered at most, for a new subscription."""
