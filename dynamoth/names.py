"""Names under the one reserved prefix: a single ACL rule (``&__dynamoth__:*`` and ``~__dynamoth__:*``) covers them."""

from __future__ import annotations

RESERVED_PREFIX = b"__dynamoth__:"

PLAN_KEY = RESERVED_PREFIX + b"plan"
"""Hash at every server: the plan stored there. See ``dynamoth.stored_plan``."""
PLAN_KEY_NEW = RESERVED_PREFIX + b"plan.new"
"""Where a whole plan is written before it replaces ``PLAN_KEY`` at once (RENAME)."""
BALANCER_LEASE_KEY = RESERVED_PREFIX + b"balancer"
"""String at every server: which balancer process is at work. Expires by itself."""

AGENT_CHANNEL = RESERVED_PREFIX + b"agent"
"""The balancer speaks to the agent of a server: each agent subscribes to it, at its own server only.

Its NUMSUB tells how many agents observe the server: what G7 subtracts from the reply of a PUBLISH.
"""
BALANCER_CHANNEL = RESERVED_PREFIX + b"to-balancer"
"""Agents and administrators speak to the balancer, which subscribes to it at every server."""
CLIENTS_CHANNEL = RESERVED_PREFIX + b"clients"
"""An agent speaks to every client that is connected to its server."""
ANNOUNCE_CHANNEL = RESERVED_PREFIX + b"announce"
"""Subscribers tell the agent of a server which channels they have joined and left there."""
FORWARD_CHANNEL = RESERVED_PREFIX + b"forward"
"""Publishers ask the agent of a server to forward a message to replicas that they cannot reach themselves."""

_INBOX_PREFIX = RESERVED_PREFIX + b"inbox:"
_REPLICA_PREFIX = RESERVED_PREFIX + b"r:"
SHARDED_PREFIX = RESERVED_PREFIX + b"s:"
"""Before the name of a sharded channel: an application's channel like any other, which the name alone tells apart."""
_SHARDED_REPLICA_PREFIX = RESERVED_PREFIX + b"sr:"
"""Not ``_REPLICA_PREFIX``: a pattern subscriber listens at what ``replica_pattern`` matches, and would be counted."""
PATTERN_PREFIX = RESERVED_PREFIX + b"pattern:"
"""Before a pattern: its subscribers subscribe to this at every server, so that PUBSUB CHANNELS lists the patterns."""
RELAY_PREFIX = RESERVED_PREFIX + b"relay:"
"""Before a physical channel: agents speak to the agent of the server, who publishes there what it is given, once."""

_USERS_PREFIXES = (_REPLICA_PREFIX, SHARDED_PREFIX, _SHARDED_REPLICA_PREFIX)
"""What is an application's under the reserved prefix."""

SERVER_LOCAL_PREFIXES = (b"__keyspace@", b"__keyevent@", b"__redis__:")
"""Channels that Redis itself publishes on. They belong to one server and are never routed."""


def inbox(client: int) -> bytes:
    """Return the channel on which one client, or one administrator's request, is spoken to."""
    return _INBOX_PREFIX + b"%016x" % client


def sharded_channel(name: bytes) -> bytes:
    """Return the name under which Dynamoth has what the application calls the sharded channel ``name``."""
    return SHARDED_PREFIX + name


def replica_channel(channel: bytes, epoch: int) -> bytes:
    """Return the physical name of a replicated channel: tagged with its epoch, so that NUMSUB answers per epoch."""
    if channel.startswith(SHARDED_PREFIX):
        return _SHARDED_REPLICA_PREFIX + b"%x:" % epoch + channel[len(SHARDED_PREFIX) :]
    return _REPLICA_PREFIX + b"%x:" % epoch + channel


def replica_pattern(pattern: bytes) -> bytes:
    """Return the pattern that all physical names of replicated channels match whose user's name matches ``pattern``.

    Sharded channels match none. Others do that should not: those with a colon, and behind it something that matches.
    """
    return _REPLICA_PREFIX + b"*:" + pattern


def relay_channel(physical: bytes) -> bytes:
    """Return the channel on which an agent is given what it shall publish on a physical channel at its server."""
    return RELAY_PREFIX + physical


def logical_channel(physical: bytes) -> bytes:
    """Return the user's name of a physical channel; for a sharded one with ``SHARDED_PREFIX``."""
    if physical.startswith(_REPLICA_PREFIX):
        return physical[len(_REPLICA_PREFIX) :].partition(b":")[2]
    if physical.startswith(_SHARDED_REPLICA_PREFIX):
        return SHARDED_PREFIX + physical[len(_SHARDED_REPLICA_PREFIX) :].partition(b":")[2]
    return physical


def is_user_channel(physical: bytes) -> bool:
    """Tell whether messages on a physical channel are an application's, to be measured and forwarded."""
    if not physical.startswith(b"__"):
        return True
    if physical.startswith(RESERVED_PREFIX):
        return physical.startswith(_USERS_PREFIXES)
    return not physical.startswith(SERVER_LOCAL_PREFIXES)


def is_own_channel(channel: bytes) -> bool:
    """Tell whether a logical channel is Dynamoth's own, not to be subscribed to or published on by an application."""
    return channel.startswith(RESERVED_PREFIX) and not channel.startswith(SHARDED_PREFIX)
