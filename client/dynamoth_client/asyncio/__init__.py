"""The drop-in asyncio client: ``dynamoth_client.asyncio`` stands for ``redis.asyncio``."""

from typing import Any as _Any

import redis.asyncio as _redis

from dynamoth_client.asyncio._client import Pipeline as Pipeline
from dynamoth_client.asyncio._client import Redis, StrictRedis, from_url
from dynamoth_client.asyncio._pubsub import PubSub
from dynamoth_client.redis_py import modules as _modules
from dynamoth_client.redis_py.constructor import ChannelPlan, GuaranteesOff
from dynamoth_client.redis_py.settings import OptionIgnored
from dynamoth_client.runtime.queue import GapInfo

__all__ = ["ChannelPlan", "GapInfo", "GuaranteesOff", "OptionIgnored", "PubSub", "Redis", "StrictRedis", "from_url"]
__all__ += _redis.__all__  # pyright: ignore[reportUnsupportedDunderAll]  # what is not ours is redis-py's


def __getattr__(name: str) -> _Any:
    """Hand on redis-py's public names and modules, so that this module stands for ``redis.asyncio``."""
    if name in _redis.__all__:
        return getattr(_redis, name)
    return _modules.submodule(__name__, name)
