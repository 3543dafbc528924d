"""Clients, PubSubs and pipelines: ``redis.client``; see ``redis_py/modules.py``."""

from redis.client import EMPTY_RESPONSE as EMPTY_RESPONSE
from redis.client import NEVER_DECODE as NEVER_DECODE
from redis.client import AbstractRedis as AbstractRedis
from redis.client import CaseInsensitiveDict as CaseInsensitiveDict
from redis.client import Monitor as Monitor
from redis.client import PubSubWorkerThread as PubSubWorkerThread

from dynamoth_client.sync import Pipeline as Pipeline
from dynamoth_client.sync import PubSub as PubSub
from dynamoth_client.sync import Redis as Redis
from dynamoth_client.sync import StrictRedis as StrictRedis
