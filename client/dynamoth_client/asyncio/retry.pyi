"""Retrying: ``redis.asyncio.retry``; see ``redis_py/modules.py``."""

from redis.asyncio.retry import *
