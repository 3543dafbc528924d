"""The metrics of a broker for Prometheus. Labels never name users, channels or queries."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from dynamoth_broker.machine import BrokerMachine
from dynamoth_broker.process.tokens import CAUSES
from dynamoth_daemon import metrics

_COUNTERS = {
    "deliveries": "Publications that were handed to users' connections",
    "publications": "Publications that came from Redis",
    "frames_received": "Frames of users",
    "malformed": "Messages of Redis that could not be read",
    "malformed_frames": "Frames of users that could not be read",
    "gaps": "Gaps that were sent to users",
    "positions_without_log": "Subscriptions with a position to what has no log here: compare broker.history",
    "logs_lost": "Lives of logs that began while users had subscribed",
    "log_errors": "Errors of log servers",
    "unlogged": "Publications on the plain names of logged channels, which reach no user",
    "positions_stored": "Positions of users that log servers have stored",
    "positions_new": "Stored subscriptions without a position yet",
    "positions_dropped": "Positions that were not stored, as too many waited for log servers",
    "acks_ignored": "Acknowledgements of users that are of no stored subscription, or of what the log does not have",
    "interests_refused": "Subscriptions that were refused for now, as a user had too many new interests registered",
    "queries_refused": "Subscriptions to standing queries that do not exist, or whose parameters do not fit",
    "definitions_malformed": "Definitions of datasets and queries that could not be read: users are to try again later",
    "records_stored": "Records of users that were stored, those among the dead letters included",
    "records_duplicate": "Records of users that were stored before",
    "records_refused": "Records of users that do not belong to their dataset: they are among the dead letters",
    "records_without_dataset": "Records of users for which there is no dataset that users may write to",
    "records_dataset_full": "Records of users that were refused for now, as too many wait for the archive",
    "records_log_unavailable": "Records of users that a log server has refused, or was not there to take",
    "records_unknown_outcome": "Records of users that are stored or not: a log server's answer was lost",
    "dead_letters_lost": "Refused records of users that may not be among the dead letters, as a log server failed",
    "presence_failed": "Changes of presence that a log server has not answered: the next refresh repairs them",
    "slow_sessions": "Times that a user has fallen behind, as the connection was full",
    "slow_sessions_closed": "Connections that were closed as their users were behind for too long, or too many were",
    "conflated": "Publications that a user who was behind did not get, as a later one replaced them",
    "sessions_lost": "Users that did not answer a ping",
    "moves_asked": "Users that were asked to move to another broker",
    "moves_done": "Users that have moved to another broker",
    "subscriptions_refused_by_redis": "Channels that Redis does not let this broker subscribe to",
    "control_refused": "Commands for coordinators and operators that a server has refused",
    "refused_taken_over": "Connections that came later than a newer one of their session",
    "refused_full": "Users that were sent elsewhere, as this broker was full",
    "refused_draining": "Users that were sent elsewhere, as this broker was drained",
    "refused_token_refused": "Connections with a token that is not valid",
    "refused_token_expired": "Connections with a token that has expired",
    **{f"token_refusals_{cause}": f"Tokens that were refused: {text}" for cause, text in CAUSES.items()},
}

_FAMILIES = metrics.Families("dynamoth_broker_")


def make_registry(machine: BrokerMachine, lag_s: Callable[[], float]) -> CollectorRegistry:
    """Return a registry with the metrics of a broker and of its process. ``lag_s``: of the event loop."""
    return metrics.make_registry("broker", lambda: _collect(machine, lag_s))


def _collect(machine: BrokerMachine, lag_s: Callable[[], float]) -> Iterator[Metric]:
    gauge = _FAMILIES.gauge
    subscriptions = sum(interest.users for interest in machine.interests)
    yield gauge("sessions", "Users that are connected", len(machine.sessions))
    yield gauge("subscriptions", "Subscriptions of users", subscriptions)
    yield gauge("interests", "Different subscriptions; Redis sees each once", len(machine.interests))
    yield gauge("members", "Users who are present on a channel, once for each channel", machine.presence.members)
    yield gauge("draining", "1 while users are moved away, and none are taken", machine.is_draining)
    yield gauge("logs_down", "Log servers that do not answer", len(machine.logs.faults))
    yield gauge("logs_refusing", "Log servers that answer and refuse commands", len(machine.logs.refusals))
    rates = machine.control.rates
    load, inbound = rates.load_bytes_per_s, rates.inbound_bytes_per_s
    yield gauge("load_bytes_per_second", "What comes from Redis and goes to users, as it was reported last", load)
    yield gauge("inbound_bytes_per_second", "What comes from Redis, as it was reported last", inbound)
    yield gauge(
        "control_down", "Redis servers through which coordinators cannot be reached", len(machine.control.faults)
    )
    yield gauge("event_loop_lag_seconds", "How late the event loop was lately", lag_s())
    yield from _FAMILIES.counters(_COUNTERS, machine.counters)
