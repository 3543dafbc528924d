"""Credential providers: ``redis.credentials``; see ``_redis_modules.py``."""

from redis.credentials import *
