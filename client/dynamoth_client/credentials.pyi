"""Credential providers: ``redis.credentials``; see ``redis_py/modules.py``."""

from redis.credentials import *
