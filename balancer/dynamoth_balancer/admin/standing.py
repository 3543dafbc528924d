"""Carries out ``pause``, ``resume`` and ``unpin``: standing orders of administrators, which the plan keeps.

They are in force at once, and survive a restart of the balancer as soon as most servers store them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dynamoth.errors import RequestRefused
from dynamoth.names import in_quotes
from dynamoth_balancer.events import InnerAction
from dynamoth_balancer.install.installer import Installer
from dynamoth_balancer.install.orders import Order

STANDING = ("pause", "resume", "unpin")
"""The commands that are answered when most servers store their effect."""


def begin_order(
    installer: Installer, command: str, arguments: Mapping[str, Any], now: float
) -> tuple[Order, list[InnerAction]]:
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
    return Order(result, installer.term, now, version), actions


def _pinned_channel(installer: Installer, arguments: Mapping[str, Any]) -> bytes:
    channel = arguments.get("channel")
    if not isinstance(channel, bytes) or not channel:
        raise RequestRefused("unpin takes the argument channel (bytes, not empty)")
    if channel not in installer.plan.administration.pins:
        raise RequestRefused(f"channel {in_quotes(channel)} is not pinned: 'dynamoth status' shows those that are")
    return channel
