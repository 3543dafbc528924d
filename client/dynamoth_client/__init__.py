"""The drop-in client: redis-py's pub/sub over many servers.

``import dynamoth_client as redis`` stands for ``import redis``: what is not ours is redis-py's.
"""

from typing import Any, cast

import redis as _redis
from redis import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]  # its __all__, of any version
from redis import backoff as backoff
from redis import client as client
from redis import connection as connection
from redis import exceptions as exceptions
from redis import retry as retry
from redis import sentinel as sentinel
from redis import utils as utils

from dynamoth_client import asyncio as asyncio
from dynamoth_client.asyncio import ChannelPlan, GapInfo, GuaranteesOff
from dynamoth_client.sync import PubSub, Redis, StrictRedis, from_url

__version__ = _redis.__version__
"""redis-py's: applications compare it."""

VERSION = cast("tuple[int | str, ...]", cast("Any", _redis).VERSION)

__all__ = ["ChannelPlan", "GapInfo", "GuaranteesOff", "PubSub", "Redis", "StrictRedis", "asyncio", "from_url"]
__all__ += _redis.__all__
