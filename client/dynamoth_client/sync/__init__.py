"""The drop-in synchronous client; ``dynamoth_client`` hands its names on."""

from dynamoth_client.sync._client import Pipeline as Pipeline
from dynamoth_client.sync._client import Redis, StrictRedis, from_url
from dynamoth_client.sync._pubsub import PubSub

__all__ = ["PubSub", "Redis", "StrictRedis", "from_url"]
