"""Connections and pools: ``redis.connection``; see ``redis_py/modules.py``."""

from redis.connection import *
