"""Retrying: ``redis.asyncio.retry``; see ``_redis_modules.py``."""

from redis.asyncio.retry import *
