"""Connections and pools: ``redis.asyncio.connection``; see ``redis_py/modules.py``."""

from redis.asyncio.connection import *
