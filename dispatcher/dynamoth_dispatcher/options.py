"""The bounds and periods of a dispatcher."""

from __future__ import annotations

from dataclasses import dataclass, field

from dynamoth.protocol.stored_plan import VERSION_READ_INTERVAL_S


@dataclass(frozen=True, slots=True)
class TransitionOptions:
    """The pace of a transition. Every interval holds per channel; the bounds hold per tick and server."""

    tick_interval_s: float = 0.02
    """Time between two looks at the transitions, while there are any."""
    trickle_delay_s: float = 0.1
    """Subscribers of a channel without publications get their first notice this long after the activation."""
    notice_interval_s: float = 0.5
    """Time between two notices to subscribers that still listen at an old location."""
    settle_after_s: float = VERSION_READ_INTERVAL_S + 0.25
    """No old location counts as vacated for this long after the activation. By then every publisher has seen that the
    plan has changed. If this agent dies before, its successor still has the transition, and gap events reach the
    subscribers. The quarter of a second is for messages on their way."""
    poll_interval_s: float = 0.05
    """Time between two NUMSUB for an old location after that."""
    list_interval_s: float = 0.5
    """Time between two lists of the channels that somebody listens to, while a slot leaves this server. A list of
    100,000 channels takes Redis about 20 ms."""
    vacated_interval_s: float = 0.5
    """Time between two reports of a vacated location, until the balancer settles the channel."""
    per_tick_max: int = 500
    """Bound of the notices and polls of one tick together; the others have their turn in the next tick."""


@dataclass(frozen=True, slots=True)
class ForwarderOptions:
    """The bounds and delays of copies under way."""

    forwards_max: int = 100_000
    """Messages per server that wait to be forwarded; past it the newest are lost, and subscribers get a gap event."""
    forwards_bytes_max: int = 256 * 1024 * 1024
    """Their bytes per server; a larger message goes only where nothing else waits."""
    lost_max: int = 10_000
    """Locations per server whose lost messages are counted; past it publishers send heartbeats instead."""
    relayed_max: int = 10_000
    """Remembered relayed messages per location; one that is relayed again later arrives twice."""
    relay_channels_max: int = 10_000
    """Channels with remembered messages; the least recently used one is evicted."""
    relayed_bytes_max: int = 32 * 1024 * 1024
    """Approximate memory for them."""
    relay_delay_s: float = 0.02
    """How long a copy that another dispatcher relays too, and a marker behind it, wait for others."""
    heartbeat_delay_s: float = 5.0
    """How long a requested heartbeat waits for its message: longer than a slow server takes."""
    heartbeats_max: int = 100_000
    """Waiting heartbeats; past it the oldest is sent."""
    names_bytes_max: int = 32 * 1024 * 1024
    """Memory for the names of channels that wait for a heartbeat, and of those whose lost messages are counted."""


@dataclass(frozen=True, slots=True)
class DispatcherOptions:
    """The bounds and periods of a dispatcher."""

    transition: TransitionOptions = field(default_factory=TransitionOptions)
    forwarder: ForwarderOptions = field(default_factory=ForwarderOptions)
    backlog_max: int = 100_000
    """Messages that wait for the first plan; past it the oldest are dropped, and clients learn of the gap."""
    at_rest_max: int = 1_000_000
    """Remembered channels at rest, about 100 bytes each."""
    forwardings_max: int = 100_000
    """Entries of the forwarding table, about 400 bytes each."""
    names_bytes_max: int = 32 * 1024 * 1024
    """Approximate memory of each table of published names (raw channels, notified publishers). The backlog and the
    forwarding table may have twice as much, and channels at rest four times."""
    notified_max: int = 100_000
    """Remembered notices to publishers."""
    renotify_s: float = 1.0
    """A publisher that still uses an old route gets another notice after this time."""
    raw_channels_max: int = 100_000
    """Channels at a wrong server whose raw messages are numbered."""
    route_change_window_s: float = 5.0
    """Forwarded copies say ROUTE_CHANGED for this long after the plan changed for their channel, or after the
    dispatcher began to observe."""
    plan_retry_s: float = 0.5
    """The stored plan is read again after this time when there was none."""
    observe_retry_s: float = 2.0
    """A server that refuses observation is asked again after this time: its ACL may have been corrected."""
