"""The drop-in client: redis-py's pub/sub over many servers.

``import dynamoth_client as redis`` stands for ``import redis``: all other names are redis-py's, submodules included.
"""

from typing import Any as _Any

import redis as _redis
import redis.asyncio as _asyncio
import redis.asyncio.client as _asyncio_client
import redis.client as _client

from dynamoth_client import asyncio
from dynamoth_client.asyncio import ChannelPlan, GapInfo, GuaranteesOff, OptionIgnored
from dynamoth_client.redis_py import modules
from dynamoth_client.redis_py.replacing import NotReplaced, Replacement, replace_redis
from dynamoth_client.sync import Pipeline as _Pipeline
from dynamoth_client.sync import PubSub, Redis, StrictRedis, from_url

__all__ = ["ChannelPlan", "GapInfo", "GuaranteesOff", "OptionIgnored", "PubSub", "Redis", "StrictRedis", "asyncio"]
__all__ += ["NotReplaced", "Replacement", "from_url", "replace_redis"]
__all__ += _redis.__all__

modules.install(
    [
        (_client.Redis, Redis),
        (_client.PubSub, PubSub),
        (_client.Pipeline, _Pipeline),
        (_redis.from_url, from_url),
        (_asyncio_client.Redis, asyncio.Redis),
        (_asyncio_client.PubSub, asyncio.PubSub),
        (_asyncio_client.Pipeline, asyncio.Pipeline),
        (_asyncio.from_url, asyncio.from_url),
    ]
)


def __getattr__(name: str) -> _Any:
    """Hand on redis-py's public names, modules and version."""
    if name in _redis.__all__ or name in ("VERSION", "__version__"):
        return getattr(_redis, name)
    return modules.submodule(__name__, name)
