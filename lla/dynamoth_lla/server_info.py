"""Parses the replies of INFO, and computes rates from two of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SECTIONS = (b"memory", b"clients", b"cpu", b"stats")
"""The sections to ask for, each by a command of its own (Redis 6.2 takes one only), the counters last."""

DIGITS_MAX = 19
"""Redis counts in 64 bits; a longer number is no counter."""


def parse_info(reply: Any) -> dict[str, str]:
    """Read the reply of INFO; empty when the server refused it."""
    if not isinstance(reply, bytes | str):
        return {}
    text = reply.decode(errors="replace") if isinstance(reply, bytes) else reply
    pairs = (line.partition(":") for line in text.splitlines() if not line.startswith("#"))
    return {name: value for name, colon, value in pairs if colon}


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """A server's counters and gauges at one time. Counters are None where the server does not show them."""

    #: Bytes since the start, or since CONFIG RESETSTAT.
    net_output_bytes: int | None
    net_input_bytes: int | None
    #: CPU time since the start: of the main thread, which executes commands and can use one core, if the server shows
    #: it.
    cpu_s: float | None
    memory_bytes: int
    memory_bytes_max: int
    connections: int
    connections_max: int
    output_buffer_bytes_max: int
    client_buffers_bytes: int
    channels_subscribed: int

    @classmethod
    def parse(cls, fields: Mapping[str, str]) -> ServerInfo:
        """Read the fields of all sections together; missing fields and those without a number count as unknown."""
        of_main = _seconds(fields, "used_cpu_user_main_thread", "used_cpu_sys_main_thread")
        of_process = _seconds(fields, "used_cpu_user", "used_cpu_sys")
        return cls(
            net_output_bytes=_count(fields, "total_net_output_bytes"),
            net_input_bytes=_count(fields, "total_net_input_bytes"),
            cpu_s=of_process if of_main is None else of_main,
            memory_bytes=_count(fields, "used_memory") or 0,
            memory_bytes_max=_count(fields, "maxmemory") or 0,
            connections=_count(fields, "connected_clients") or 0,
            connections_max=_count(fields, "maxclients") or 0,
            output_buffer_bytes_max=_count(fields, "client_recent_max_output_buffer") or 0,
            client_buffers_bytes=_count(fields, "mem_clients_normal") or 0,
            channels_subscribed=_count(fields, "pubsub_channels") or 0,
        )


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates between two :class:`ServerInfo` of one process; None where they are unknown."""

    outgoing_bytes_per_s: float | None
    incoming_bytes_per_s: float | None
    cpu_ratio: float | None

    def or_else(self, earlier: Rates) -> Rates:
        """Return these rates, with ``earlier`` ones for the unknown."""
        return Rates(
            _first(self.outgoing_bytes_per_s, earlier.outgoing_bytes_per_s),
            _first(self.incoming_bytes_per_s, earlier.incoming_bytes_per_s),
            _first(self.cpu_ratio, earlier.cpu_ratio),
        )


def rates(before: ServerInfo, after: ServerInfo, interval_s: float, agent_bytes: int) -> Rates:
    """Return the rates between two measurements. Counters that went back (CONFIG RESETSTAT) make them unknown.

    Args:
        before: the earlier measurement.
        after: the later one, of the same process.
        interval_s: the time between, more than 0.
        agent_bytes: bytes that the server sent to the agent itself in this time; not counted as its output.

    """
    out = _growth(before.net_output_bytes, after.net_output_bytes)
    return Rates(
        # The server counts bytes when the socket takes them, so some of the agent's may belong to the next interval.
        outgoing_bytes_per_s=None if out is None else max(0.0, out - agent_bytes) / interval_s,
        incoming_bytes_per_s=_per_s(_growth(before.net_input_bytes, after.net_input_bytes), interval_s),
        cpu_ratio=_per_s(_growth(before.cpu_s, after.cpu_s), interval_s),
    )


def _growth(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None or after < before else after - before


def _first(latest: float | None, earlier: float | None) -> float | None:
    return earlier if latest is None else latest


def _per_s(growth: float | None, interval_s: float) -> float | None:
    return None if growth is None else growth / interval_s


def _count(fields: Mapping[str, str], name: str) -> int | None:
    text = fields.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) <= DIGITS_MAX else None


def _seconds(fields: Mapping[str, str], *names: str) -> float | None:
    try:
        total = sum(float(fields[name]) for name in names)
    except (KeyError, ValueError):
        return None
    return total if math.isfinite(total) else None
