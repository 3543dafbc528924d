"""The vocabulary of a subscriber: its own events and actions, and its options."""

from __future__ import annotations

from dataclasses import dataclass

from dynamoth.machine.events import LinkAction, LinkDown, LinkUp, Pushed, Replied, Start, Tick
from dynamoth_client.machines.local_plan import NewerSoftware


@dataclass(slots=True)
class Subscribe:
    """Event: the application subscribes. Each channel is confirmed once per time that it is named."""

    channels: tuple[bytes, ...]


@dataclass(slots=True)
class Unsubscribe:
    """Event: the application unsubscribes."""

    channels: tuple[bytes, ...]


@dataclass(slots=True)
class RaiseBarrier:
    """Event: the application wants to know when everything that was published on the channel before has come."""

    channel: bytes


@dataclass(slots=True)
class BarrierPassed:
    """Action: it has come, or is covered by a gap."""

    channel: bytes


class NumberedPayload(bytes):
    """A payload with its place in the sequence of its publisher (``SubscriberOptions.numbered``)."""

    publisher: int
    number: int


def numbered(payload: bytes, publisher: int, number: int) -> NumberedPayload:
    """Return a payload with its place."""
    result = NumberedPayload(payload)
    result.publisher = publisher
    result.number = number
    return result


@dataclass(slots=True)
class SubscriptionConfirmed:
    """Action: from here on G1-G3 hold for the channel."""

    channel: bytes


@dataclass(slots=True)
class SubscriptionEnded:
    """Action: nothing of the channel is delivered any more. All servers have ended it, or their connections were lost.

    It comes once for each time that the channel was named in an :class:`Unsubscribe`.
    """

    channel: bytes


@dataclass(slots=True)
class SubscriptionFailed:
    """Action: the server refused (an ACL, for example). The subscription is gone."""

    channel: bytes
    reason: str


@dataclass(slots=True)
class Deliver:
    """Action: messages for the application, ``(channel, payload)``, in order."""

    messages: list[tuple[bytes, bytes]]


@dataclass(slots=True)
class GapDetected:
    """Action: messages of the channel were, or may have been, lost (G5). None means unknown."""

    channel: bytes
    publisher: int | None
    count: int | None
    reason: str


ListenerEvent = Start | LinkUp | LinkDown | Replied | Pushed | Tick
"""The events of a driver for a machine that never sends a ``SendAll``."""

SubscriberEvent = ListenerEvent | Subscribe | Unsubscribe | RaiseBarrier

RegisterAction = SubscriptionConfirmed | SubscriptionEnded | SubscriptionFailed
"""The actions that subscribers to channels and to patterns share."""

SubscriberAction = LinkAction | RegisterAction | Deliver | GapDetected | BarrierPassed | NewerSoftware


@dataclass(frozen=True, slots=True)
class SubscriberOptions:
    """Options of a subscriber."""

    hold_s_max: float = 2.0
    """How long a message waits for an earlier one of its publisher before the gap is reported. Longer than a busy
    machine keeps an agent from forwarding."""
    verify_retry_s: float = 0.1
    """How soon a place is verified again when the server held no plan, or one that is behind."""
    move_spread_s: float = 0.8
    """Each subscriber delays a move by its own time up to this, so that not all move at once. 0: no delay."""
    join_moving_s: float = 0.1
    """How long the confirmation of a subscription waits while its channel is in transition; 0: not at all.

    A message that was sent just before its publisher changed its route may have come to the new place before this
    subscriber did. When that was published is known only to within the time that messages travel. After a longer
    wait, it was surely before the confirmation, and is no gap."""
    distrust_s: float = 5.0
    """A route that came from a notice is given up for the stored plan's if its server does not confirm it in this
    time."""
    failover_s: float = 5.0
    """How long one of several replicas may be away before the subscription goes on without it. Longer than a busy
    process takes to connect, as that is a gap."""
    replace_s: float = 0.2
    """How long a replica that was lost, or refused to be connected to, may be away before another one is used
    (ALL_PUBLISHERS). Longer than a connection takes that was only cut. Shorter than ``failover_s``, as there is a gap
    event in any case."""
    look_again_s: float = 0.25
    """How soon, while a place is leaving, the route is verified again and markers are asked for again; then at doubling
    distance."""
    look_again_s_max: float = 2.0
    """The largest such distance."""
    look_elsewhere_s: float = 0.4
    """How long a server may be unreachable before another one is asked where the channel is; for each client, longer by
    another part of ``look_elsewhere_again_s``. Infinity: none is asked."""
    look_elsewhere_again_s: float = 1.0
    """How often it is asked again. All clients of a server that dies ask spread over this time, and connect to other
    servers when they get answers."""
    marker_s: float = 3.0
    """How long the marker of a new place may fail to come before the gap is reported: its agent is gone, or stands
    still, and forwards nothing to the place that is leaving. Longer than an agent takes on a busy machine.
    Infinity: it is not."""
    link_idle_s: float = 30.0
    """A link without subscriptions is closed after this time."""
    stream_idle_s: float = 600.0
    """A publisher is forgotten when nothing has come from it for this time, or for up to twice this."""
    ended_max: int = 1000
    """Ended channels whose numbers are remembered at most, for a new subscription."""
    numbered: bool = False
    """Whether payloads are :class:`NumberedPayload`, but for those of plain messages."""
