"""Clients, PubSubs and pipelines: ``redis.asyncio.client``; see ``redis_py/modules.py``."""

from redis.asyncio.client import Monitor as Monitor

from dynamoth_client.asyncio import Pipeline as Pipeline
from dynamoth_client.asyncio import PubSub as PubSub
from dynamoth_client.asyncio import Redis as Redis
from dynamoth_client.asyncio import StrictRedis as StrictRedis
