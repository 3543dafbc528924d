"""The end user's client of Dynamoth's edge brokers: ``async with Client(["wss://..."]) as client: ...``.

Names are imported when they are first used, so that the pure machine needs nothing but Dynamoth itself.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynamoth.edge.interests import Interest
    from dynamoth.edge.publications import Position
    from dynamoth_user.client import Client
    from dynamoth_user.errors import ClientFailed, PublishFailed, RefusedError, StorageError
    from dynamoth_user.items import Gap, Item, Join, Leave
    from dynamoth_user.machine.events import Failed, Interrupted, Served
    from dynamoth_user.presence import Presence
    from dynamoth_user.storage import FileStorage, Storage
    from dynamoth_user.subscription import Subscription

__all__ = [
    "Client",
    "ClientFailed",
    "Failed",
    "FileStorage",
    "Gap",
    "Interest",
    "Interrupted",
    "Item",
    "Join",
    "Leave",
    "Position",
    "Presence",
    "PublishFailed",
    "RefusedError",
    "Served",
    "Storage",
    "StorageError",
    "Subscription",
]

_MODULES = {
    "Client": "dynamoth_user.client",
    "ClientFailed": "dynamoth_user.errors",
    "Failed": "dynamoth_user.machine.events",
    "FileStorage": "dynamoth_user.storage",
    "Gap": "dynamoth_user.items",
    "Interest": "dynamoth.edge.interests",
    "Interrupted": "dynamoth_user.machine.events",
    "Item": "dynamoth_user.items",
    "Join": "dynamoth_user.items",
    "Leave": "dynamoth_user.items",
    "Position": "dynamoth.edge.publications",
    "Presence": "dynamoth_user.presence",
    "PublishFailed": "dynamoth_user.errors",
    "RefusedError": "dynamoth_user.errors",
    "Served": "dynamoth_user.machine.events",
    "Storage": "dynamoth_user.storage",
    "StorageError": "dynamoth_user.errors",
    "Subscription": "dynamoth_user.subscription",
}


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name != "websockets":
            raise
        raise ImportError(
            f"dynamoth_user.{name} needs websockets: install the extra 'user' (pip install '.[user]' in a checkout)",
            name=error.name,
        ) from error
