"""Errors: ``redis.exceptions``; see ``redis_py/modules.py``."""

from redis.exceptions import *
