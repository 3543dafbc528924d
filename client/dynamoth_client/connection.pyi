"""Connections and pools: ``redis.connection``; see ``_redis_modules.py``."""

from redis.connection import *
