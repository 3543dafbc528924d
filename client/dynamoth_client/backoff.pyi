"""Pauses between retries: ``redis.backoff``; see ``_redis_modules.py``."""

from redis.backoff import *
