"""The state that the parts of a publisher share, and their base."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from dynamoth_client.machines.local_plan import LocalPlan
from dynamoth_client.machines.publisher.channels import Channels
from dynamoth_client.machines.publisher.events import PublisherOptions
from dynamoth_client.machines.publisher.records import Servers


@dataclass(frozen=True, slots=True)
class Shared:
    """The state of one publisher that its parts share."""

    client_id: int
    plan: LocalPlan
    options: PublisherOptions
    counters: Counter[str]
    channels: Channels
    servers: Servers


class Part:
    """A part of one publisher. Methods that return actions return those to execute."""

    def __init__(self, shared: Shared) -> None:
        """Share the state of the publisher."""
        self._client_id = shared.client_id
        self._plan = shared.plan
        self._options = shared.options
        self._counters = shared.counters
        self._channels = shared.channels
        self._by_name = shared.channels.by_name
        self._servers = shared.servers
