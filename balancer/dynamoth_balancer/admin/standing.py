"""Carries out ``pause``, ``resume`` and ``unpin``: standing orders of administrators, which the plan keeps.

They are in force at once, and survive a restart of the balancer as soon as most servers store them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dynamoth.errors import RequestRefused
from dynamoth.names import in_quotes
from dynamoth.protocol.control import AdminReply
from dynamoth_balancer.events import InnerAction
from dynamoth_balancer.install.installer import Installer

STANDING = ("pause", "resume", "unpin")
"""The commands that are answered when most servers store their effect."""

STORE_TIMEOUT_S = 5.0
"""Such a request is answered after this time even if too few servers store its effect."""


@dataclass(frozen=True, slots=True)
class StandingOrder:
    """An order that an administrator has given."""

    #: The version of the plan that has it.
    version: int
    since: float
    result: Mapping[str, Any]

    def reply(self, installer: Installer, number: int, now: float) -> AdminReply | None:
        """Return the reply to a request with this number; None while too few servers store the order."""
        if installer.is_stored(self.version):
            return AdminReply(number, self.result)
        if now - self.since < STORE_TIMEOUT_S:
            return None
        stored, servers = installer.stored_at(self.version), len(installer.plan.servers)
        return AdminReply(
            number,
            {},
            f"it is in force, but only {stored} of {servers} servers store it, and a restart may lose it:"
            " 'dynamoth status' says which servers are down",
        )


def begin_order(
    installer: Installer, command: str, arguments: Mapping[str, Any], now: float
) -> tuple[StandingOrder, list[InnerAction]]:
    """Put an order into the plan; return also the actions to execute. One that is in force already changes nothing.

    Raises:
        RequestRefused: the arguments make no sense, or the channel to unpin is not pinned.

    """
    old = installer.plan.administration
    result: dict[str, Any]
    if command == "unpin":
        channel = _pinned_channel(installer, arguments)
        new, result = old.without_pin(channel), {"channel": channel, "servers": list(old.pins[channel].servers)}
    else:
        new, result = replace(old, paused=command == "pause"), {"paused": command == "pause"}
    result["note"] = "it was so already" if new == old else ""
    reason = f"an administrator's {command}"
    actions = [] if new == old else installer.administer(new, None, reason, now)
    version = installer.plan.administration.version
    return StandingOrder(version, now, {**result, "version": version}), actions


def _pinned_channel(installer: Installer, arguments: Mapping[str, Any]) -> bytes:
    channel = arguments.get("channel")
    if not isinstance(channel, bytes) or not channel:
        raise RequestRefused("unpin takes the argument channel (bytes, not empty)")
    if channel not in installer.plan.administration.pins:
        raise RequestRefused(f"channel {in_quotes(channel)} is not pinned: 'dynamoth status' shows those that are")
    return channel
