"""Pauses between retries: ``redis.backoff``; see ``redis_py/modules.py``."""

from redis.backoff import *
