"""Publishes at a formerly standalone server for a while after a plan has appeared; see ``machines/standalone.py``."""

from __future__ import annotations

from typing import Any

from dynamoth.errors import MalformedMessage
from dynamoth.protocol import stored_plan
from dynamoth_client.machines.publisher.events import PublisherAction
from dynamoth_client.machines.publisher.part import Part, Shared
from dynamoth_client.machines.standalone import ALONE, OVERLAP_S


class AloneServer(Part):
    """The formerly standalone server of one publisher."""

    def __init__(self, shared: Shared) -> None:
        """Begin with a standalone server if the local plan has one."""
        super().__init__(shared)
        #: Until when messages go there as well: infinite while there is no plan, set when one is first seen.
        self._until = float("inf") if self._plan.is_alone else float("-inf")

    def is_over(self, now: float) -> bool:
        """Return whether no subscriber needs messages there any more."""
        if self._until == float("inf") and not self._plan.is_alone:
            self._until = now + OVERLAP_S
        return now >= self._until

    def copy(self, channel: bytes, data: bytes) -> list[PublisherAction]:
        """Send a copy of a message there: some subscribers may not know yet that there is a plan."""
        server = self._servers.get(ALONE)
        if server is None or self._plan.is_alone or server.outbox.full:
            return []
        return [*server.outbox.put((b"PUBLISH", channel, data))]

    def has_plan(self, reply: Any) -> bool:
        """Follow the plan whose header was read behind a message; return whether there is one."""
        try:
            header = stored_plan.parse_header(reply, self._servers[ALONE].run_id)
        except MalformedMessage:
            self._counters["malformed_messages"] += 1
            return False
        if header is None or not header.believed:
            return False
        if self._plan.is_alone:
            self._plan.update_header(header.plan)
        return True
