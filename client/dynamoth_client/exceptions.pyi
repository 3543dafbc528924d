"""Errors: ``redis.exceptions``; see ``_redis_modules.py``."""

from redis.exceptions import *
