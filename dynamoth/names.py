"""The names of Dynamoth's own channels and keys: one reserved prefix, with a part for each role that sends there.

Who sends a message shows in the channel's name, so that the ACL of Redis decides who may send it: clients send on
``client:`` and ``forward:``, agents on ``agent:``, the balancer on ``balancer:``, edge brokers on ``broker:``, their
coordinator on ``coordinator:``, operators on ``operator:request`` and ``operator:broker``.
``inbox:`` is what clients listen to, ``operator:inbox:`` what operators do, ``recorder:`` is for recorders. A name that
is made of an application's channel ends with that channel, behind a prefix of fixed length: so one ACL pattern covers
exactly the names of the channels that the application may use. ``dynamoth acl`` prints the rules.
"""

from __future__ import annotations

import re

SERVER_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,63}")
"""Matches what a server may be called. ``ID=URL`` in a list with spaces names every server."""
SERVER_ID_WORDS = "a name of up to 64 letters, digits, '.', '_' and '-'"
"""The same in words."""

RESERVED_PREFIX = b"__dynamoth__:"

PLAN_KEY = RESERVED_PREFIX + b"plan"
"""Hash at every server: the plan stored there. See ``dynamoth.protocol.stored_plan``."""
PLAN_KEY_NEW = RESERVED_PREFIX + b"plan.new"
"""Where a whole plan is written before it replaces ``PLAN_KEY`` at once (RENAME)."""
BALANCER_LEASE_KEY = RESERVED_PREFIX + b"balancer"
"""String at every server: which balancer process is at work. Expires by itself."""
TERM_KEY = RESERVED_PREFIX + b"balancer.term"
"""String at every server: the newest term of a balancer that it has granted. See ``dynamoth.protocol.fence``."""

AGENT_CHANNEL = RESERVED_PREFIX + b"balancer:to-agent"
"""The balancer sends to the agent of a server: each agent subscribes to it, at its own server only.

Its NUMSUB is the number of agents that observe the server. Clients subtract it from the reply of a PUBLISH: G7,
docs/guarantees.md.
"""
BALANCER_CHANNEL = RESERVED_PREFIX + b"agent:to-balancer"
"""Agents send reports and acknowledgements to the balancer, which subscribes to it at every server."""
RECORD_CHANNEL = RESERVED_PREFIX + b"balancer:record"
"""The balancer sends what it decides and changes to recorders, which subscribe to it, at every server."""
RECORDER_PREFIX = RESERVED_PREFIX + b"recorder:"
"""Recorders send to themselves, to measure how long a server takes."""
RECORDER_FAILING_CHANNEL = RECORDER_PREFIX + b"failing"
"""Nobody sends here. Its NUMSUB is the number of recorders that cannot write their recording."""
OPERATOR_CHANNEL = RESERVED_PREFIX + b"operator:request"
"""Operators send requests to the balancer, which subscribes to it at every server."""
OPERATOR_EDGE_CHANNEL = RESERVED_PREFIX + b"operator:broker"
"""Operators send requests to edge brokers and coordinators, which subscribe to it at every server."""
COORDINATOR_CHANNEL = RESERVED_PREFIX + b"broker:to-coordinator"
"""Edge brokers send reports and answers to the coordinator. Only coordinators subscribe to it, at every server: its
NUMSUB is their number."""
BROKERS_CHANNEL = RESERVED_PREFIX + b"coordinator:to-brokers"
"""The coordinator sends to all edge brokers, which subscribe to it at every server."""
BROKER_PREFIX = RESERVED_PREFIX + b"coordinator:to-broker:"
"""Prefix of the id of an edge broker: the coordinator sends to this one."""
COORDINATOR_RECORD_CHANNEL = RESERVED_PREFIX + b"coordinator:record"
"""The coordinator sends what it decides to recorders, which subscribe to it, at every server."""
COORDINATOR_LEASE_KEY = RESERVED_PREFIX + b"coordinator"
"""String at every server: which coordinator of edge brokers is at work. Expires by itself."""
COORDINATOR_ORDERS_KEY = RESERVED_PREFIX + b"coordinator.orders"
"""String at every server: the pause and the pinned users that operators have ordered. The coordinator writes it."""
ANNOUNCE_CHANNEL = RESERVED_PREFIX + b"client:announce"
"""Subscribers tell the agent of a server which channels they have joined and left there."""

INBOX_PREFIX = RESERVED_PREFIX + b"inbox:"
CLIENTS_CHANNEL = INBOX_PREFIX + b"all"
"""An agent sends to every client that is connected to its server."""
OPERATOR_INBOX_PREFIX = RESERVED_PREFIX + b"operator:inbox:"

REPLICA_PREFIX = RESERVED_PREFIX + b"r:"
SHARDED_PREFIX = RESERVED_PREFIX + b"s:"
"""Prefix of the names of sharded channels. In everything else they are ordinary channels of the application."""
SHARDED_REPLICA_PREFIX = RESERVED_PREFIX + b"sr:"
"""Differs from ``REPLICA_PREFIX``: pattern subscribers subscribe to ``replica_pattern``, and would be counted here."""
PATTERN_PREFIX = RESERVED_PREFIX + b"pattern:"
"""Prefix of a pattern. Its subscribers subscribe to this channel everywhere, so that PUBSUB CHANNELS lists patterns."""
SLOT_PREFIX = RESERVED_PREFIX + b"slot:"
"""Prefix of the number of a slot. The plan names slots as it does channels; nobody publishes there."""
RELAY_PREFIX = RESERVED_PREFIX + b"agent:relay:"
"""Prefix of a physical channel. Other agents send messages here, and the server's agent publishes each once."""
FORWARD_PREFIX = RESERVED_PREFIX + b"forward:"
"""In place of the reserved prefix of a replicated channel: publishers ask the agent of a server to forward a message.

One ACL pattern covers both: a client that may not publish on the channel cannot request it either.
"""

SHOWN_BYTES_MAX = 80
"""Longest part of a channel's name in texts for people."""

_EPOCH_DIGITS = 8
"""Hexadecimal digits of an epoch in a name. A fixed number: ``*`` in an ACL pattern would match colons, too."""

NOTIFICATION_PREFIXES = (b"__keyspace@", b"__keyevent@")
"""Channels of keyspace notifications: messages about each change of a key, where ``notify-keyspace-events`` is set."""

SERVER_LOCAL_PREFIXES = (*NOTIFICATION_PREFIXES, b"__redis__:")
"""Channels that Redis itself publishes on. They belong to one server and are never routed."""


def inbox(client: int) -> bytes:
    """Return the channel on which agents speak to one client."""
    return INBOX_PREFIX + b"%016x" % client


def probe_channel(recorder: int) -> bytes:
    """Return the channel of a recorder's probes."""
    return RECORDER_PREFIX + b"%016x" % recorder


def broker_channel(broker: str) -> bytes:
    """Return the channel on which the coordinator sends to one edge broker."""
    return BROKER_PREFIX + broker.encode()


def operator_inbox(request: int) -> bytes:
    """Return the channel on which balancer, brokers and coordinators answer one request of an operator."""
    return OPERATOR_INBOX_PREFIX + b"%016x" % request


def sharded_channel(name: bytes) -> bytes:
    """Return Dynamoth's name of the application's sharded channel ``name``."""
    return SHARDED_PREFIX + name


def replica_channel(channel: bytes, epoch: int) -> bytes:
    """Return the physical name of a replicated channel: tagged with its epoch, so that NUMSUB answers per epoch."""
    if channel.startswith(SHARDED_PREFIX):
        return SHARDED_REPLICA_PREFIX + b"%0*x:" % (_EPOCH_DIGITS, epoch) + channel[len(SHARDED_PREFIX) :]
    return REPLICA_PREFIX + b"%0*x:" % (_EPOCH_DIGITS, epoch) + channel


def replica_pattern(pattern: bytes) -> bytes:
    """Return the pattern that all physical names of replicated channels match whose user's name matches ``pattern``.

    Sharded channels match none.
    """
    return REPLICA_PREFIX + ANY_EPOCH + pattern


ANY_EPOCH = b"?" * _EPOCH_DIGITS + b":"
"""Matches an epoch in a name, as part of a pattern."""


def relay_channel(physical: bytes) -> bytes:
    """Return the channel on which an agent gets messages to publish on a physical channel at its server."""
    return RELAY_PREFIX + physical


def forward_channel(physical: bytes) -> bytes:
    """Return the channel on which an agent is asked to forward messages of a replicated physical channel."""
    return FORWARD_PREFIX + physical[len(RESERVED_PREFIX) :]


def forwarded_channel(name: bytes) -> bytes | None:
    """Return the physical channel that a name made by ``forward_channel`` is about; None for any other name."""
    if not name.startswith(FORWARD_PREFIX):
        return None
    physical = RESERVED_PREFIX + name[len(FORWARD_PREFIX) :]
    return physical if logical_channel(physical) != physical else None


def logical_channel(physical: bytes) -> bytes:
    """Return the user's name of a physical channel; for a sharded one with ``SHARDED_PREFIX``."""
    if physical.startswith(REPLICA_PREFIX):
        return _behind_epoch(physical, REPLICA_PREFIX, b"")
    if physical.startswith(SHARDED_REPLICA_PREFIX):
        return _behind_epoch(physical, SHARDED_REPLICA_PREFIX, SHARDED_PREFIX)
    return physical


def _behind_epoch(physical: bytes, prefix: bytes, instead: bytes) -> bytes:
    """Return the channel behind an epoch of the one width that ACL patterns allow for; else the name as it is."""
    end = len(prefix) + _EPOCH_DIGITS
    return instead + physical[end + 1 :] if physical[end : end + 1] == b":" else physical


def is_user_channel(physical: bytes) -> bool:
    """Tell whether messages on a physical channel are an application's, to be measured and forwarded."""
    if not physical.startswith(b"__"):
        return True
    if physical.startswith(RESERVED_PREFIX):
        return physical.startswith(SHARDED_PREFIX) or logical_channel(physical) != physical
    return not physical.startswith(SERVER_LOCAL_PREFIXES)


def in_quotes(channel: bytes) -> str:
    """Return the name of a channel for texts that people read, of bounded length: ``'news'``."""
    name = channel[:SHOWN_BYTES_MAX]
    try:
        return repr(name.decode())
    except UnicodeDecodeError:
        return repr(name)[1:]


def is_own_channel(channel: bytes) -> bool:
    """Tell whether a logical channel is Dynamoth's own, not to be subscribed to or published on by an application."""
    return channel.startswith(RESERVED_PREFIX) and not channel.startswith(SHARDED_PREFIX)
