"""Retrying: ``redis.retry``; see ``redis_py/modules.py``."""

from redis.retry import *
