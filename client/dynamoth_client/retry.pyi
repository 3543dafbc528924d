"""Retrying: ``redis.retry``; see ``_redis_modules.py``."""

from redis.retry import *
