"""Which servers there are, by the plan and by the configuration, and which of them can be reached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dynamoth.machine.events import Connect, Disconnect, ErrorReply, Send
from dynamoth.names import BALANCER_CHANNEL, OPERATOR_CHANNEL
from dynamoth.plan.plan import Server


@dataclass(slots=True)
class Lookout:
    """The link to a configured server that the plan does not list."""

    is_up: bool = False
    run_id: str | None = None


class Servers:
    """The servers and their links. Each listed server is either up (``run_ids``) or down.

    Args:
        configured: those of the configuration: where to look first, and the servers of a new cluster.

    """

    def __init__(self, configured: Sequence[Server]) -> None:
        self.configured: Mapping[str, Server] = {server.id: server for server in configured}
        #: Those of the plan, as far as known. Their majority grants the lease.
        self.listed: dict[str, Server] = dict(self.configured)
        #: The version of the plan that lists them; -1 for the configuration.
        self.version = -1
        #: The listed servers that are connected, and which run of Redis each is.
        self.run_ids: dict[str, str | None] = {}
        #: The listed servers that are not connected, and why.
        self.down: dict[str, str] = dict.fromkeys(self.configured, "not connected yet")
        #: Configured servers that the plan does not list, while this balancer does not lead: one may know a newer plan.
        self.lookouts: dict[str, Lookout] = {}
        #: The servers that refuse the subscription, and their replies.
        self.refused: dict[str, str] = {}
        #: Those that refused it since the latest attempt; a dict, as it keeps its order.
        self._unsubscribed: dict[str, None] = {}

    @property
    def reachable(self) -> list[str]:
        """The connected servers, among them configured ones that the plan does not list."""
        return [*self.run_ids, *(id_ for id_, lookout in self.lookouts.items() if lookout.is_up)]

    def run_id(self, server: str) -> str | None:
        """Return which run of Redis a server is; None while it is not connected or does not say."""
        lookout = self.lookouts.get(server)
        return self.run_ids.get(server) if lookout is None else lookout.run_id

    def add(self, server: Server) -> None:
        """List a server. Where the configuration names it, its URL is from there."""
        self.listed[server.id] = self.configured.get(server.id, server)
        self.down[server.id] = "not connected yet"

    def remove(self, server: str) -> Lookout:
        """Forget a listed server, and return the state of its link."""
        lookout = Lookout(server in self.run_ids, self.run_ids.pop(server, None))
        del self.listed[server]
        for record in (self.down, self._unsubscribed, self.refused):
            record.pop(server, None)
        return lookout

    def link_up(self, server: str, run_id: str | None) -> Send:
        """Note that a listed server is connected, and subscribe there."""
        self.run_ids[server] = run_id
        self.down.pop(server, None)
        return _subscribe(server)

    def link_down(self, server: str, reason: str) -> bool:
        """Note that a listed server is not connected; return whether that, or the reason, is new."""
        is_new = server in self.run_ids or self.down.get(server) != reason
        self.run_ids.pop(server, None)
        self.refused.pop(server, None)
        self.down[server] = reason
        return is_new

    def on_subscribed(self, server: str) -> None:
        """Note that a server has accepted the subscription."""
        self.refused.pop(server, None)

    def on_subscribe_error(self, server: str, reply: Any) -> None:
        """Note that a server has refused it."""
        assert isinstance(reply, ErrorReply), f"SUBSCRIBE has no reply but an error: {reply!r}"
        self._unsubscribed[server] = None
        self.refused[server] = f"it does not let us hear its agent: {reply}"

    def resubscribe(self) -> list[Send]:
        """Subscribe again where that was refused."""
        servers = [server for server in self._unsubscribed if server in self.run_ids]
        self._unsubscribed.clear()
        return [_subscribe(server) for server in servers]

    def look_out(self) -> list[Connect]:
        """Connect to the configured servers that the plan does not list."""
        others = [each for id_, each in self.configured.items() if id_ not in self.listed.keys() | self.lookouts.keys()]
        self.lookouts |= {server.id: Lookout() for server in others}
        return [Connect(server.id, server.url) for server in others]

    def end_lookouts(self) -> list[Disconnect]:
        """Disconnect from those again."""
        actions = [Disconnect(id_) for id_ in self.lookouts]
        self.lookouts = {}
        return actions

    def check(self) -> None:
        """Assert the invariants that hold between events."""
        assert self.run_ids.keys().isdisjoint(self.down), "a server is up or down"
        assert self.run_ids.keys() | self.down.keys() == self.listed.keys(), "each server is up or down"
        assert self.lookouts.keys() <= self.configured.keys() - self.listed.keys(), "lookouts are not in the plan"


def _subscribe(server: str) -> Send:
    return Send(server, (b"SUBSCRIBE", BALANCER_CHANNEL, OPERATOR_CHANNEL), ("subscribe",))
