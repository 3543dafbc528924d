"""Connections and pools: ``redis.asyncio.connection``; see ``_redis_modules.py``."""

from redis.asyncio.connection import *
