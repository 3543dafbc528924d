"""The drop-in client: redis-py's pub/sub over many servers.

``import dynamoth_client as redis`` stands for ``import redis``: what is not ours is redis-py's.
"""

from types import ModuleType as _Module
from typing import Any as _Any

import redis as _redis

from dynamoth_client import asyncio
from dynamoth_client.asyncio import ChannelPlan, GapInfo, GuaranteesOff, OptionIgnored
from dynamoth_client.sync import PubSub, Redis, StrictRedis, from_url

__all__ = ["ChannelPlan", "GapInfo", "GuaranteesOff", "OptionIgnored", "PubSub", "Redis", "StrictRedis", "asyncio"]
__all__ += ["from_url"]
__all__ += _redis.__all__


def __getattr__(name: str) -> _Any:
    """Hand on redis-py's public names, modules and version."""
    if name in _redis.__all__ or name in ("VERSION", "__version__"):
        return getattr(_redis, name)
    found = None if name.startswith("_") else getattr(_redis, name, None)
    if isinstance(found, _Module):
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
