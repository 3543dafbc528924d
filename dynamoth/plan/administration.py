"""What administrators have decided and the plan carries, so that it survives a restart of the balancer.

Only balancers read it, and an agent its server's ``outgoing_bytes_per_s_max``. It changes together with the list of
servers: each change of either has a plan version of its own, which is the ``version`` here. So of several copies of a
plan, the one with the newest administration has the newest list of servers, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from dynamoth.errors import PlanError

if TYPE_CHECKING:
    from dynamoth.plan.plan import Assignment

PINS_MAX = 1000
"""Most pinned channels. All of them are written with each change of the administration."""

REMOVED_MAX = 1000
"""Ids of removed servers that are remembered. The oldest is forgotten first."""


def _no_pins() -> Mapping[bytes, Assignment]:
    return MappingProxyType({})


def _nothing() -> Mapping[str, Any]:
    return MappingProxyType({})


@dataclass(frozen=True)
class Administration:
    """What administrators have decided since plan version ``version``; 0: from its beginning.

    Raises:
        PlanError: there are too many pins, or the server of one is to be drained.

    """

    version: int = 0
    #: Whether the balancer makes no decisions of its own.
    paused: bool = False
    #: The servers that are to give up all channels and slots. Some server of the plan is not among them.
    draining: frozenset[str] = frozenset()
    #: The assignments that the balancer must not change, by channel.
    pins: Mapping[bytes, Assignment] = field(default_factory=_no_pins)
    #: The latest ids of removed servers, oldest first. No new server gets one of them: somebody may still know the old.
    removed: tuple[str, ...] = ()
    #: The servers that a provisioner has started. Only these may be freed by the balancer itself.
    provisioned: frozenset[str] = frozenset()
    #: The provisioned server that is being emptied at low load; empty for none. An older balancer, which does not know
    #: it, may have removed that server.
    releasing: str = ""
    #: What a server can send, for servers that were added with a number. For others the agent's configuration says it.
    outgoing_bytes_per_s_max: Mapping[str, int] = field(default_factory=_nothing)
    #: What newer software has stored, and this one does not know. It is kept.
    others: Mapping[str, Any] = field(default_factory=_nothing)

    def __post_init__(self) -> None:
        """Refuse an administration that no plan can carry."""
        if len(self.pins) > PINS_MAX:
            raise PlanError(f"a plan has at most {PINS_MAX} pinned channels, not {len(self.pins)}")
        if len(self.removed) > REMOVED_MAX:
            raise PlanError(f"a plan remembers at most {REMOVED_MAX} removed servers, not {len(self.removed)}")
        if drained := sorted(self.pinned_servers & self.draining):
            raise PlanError(f"channels are pinned to servers that are being drained: {', '.join(drained)}")

    @property
    def pinned_servers(self) -> frozenset[str]:
        """The servers to which channels are pinned."""
        return frozenset(server for assignment in self.pins.values() for server in assignment.servers)

    def why_unfit(self, servers: Iterable[str]) -> str | None:
        """Return why a plan with these servers cannot have this administration; None when it can."""
        listed = set(servers)
        if strange := sorted((self.draining | self.pinned_servers) - listed):
            return f"servers that the plan does not list are drained, or have pinned channels: {', '.join(strange)}"
        if strange := sorted(self.provisioned - listed):
            return f"servers that the plan does not list are provisioned: {', '.join(strange)}"
        if listed and listed <= self.draining:
            return "all servers are being drained"
        if back := sorted(listed.intersection(self.removed)):
            return f"removed servers are listed: {', '.join(back)}"
        return None

    def fitting(self, servers: Iterable[str], version: int) -> Administration:
        """Return it for a plan with these servers, with this version if something had to be left out."""
        listed = frozenset(servers)
        draining = self.draining & listed
        fit = replace(
            self,
            draining=draining if listed - draining else frozenset(),
            provisioned=self.provisioned & listed,
            pins=MappingProxyType({name: pin for name, pin in self.pins.items() if listed.issuperset(pin.servers)}),
            removed=tuple(id_ for id_ in self.removed if id_ not in listed),
        )
        return self if fit == self else replace(fit, version=version)

    def with_pin(self, channel: bytes, assignment: Assignment) -> Administration:
        """Return it with a channel pinned, or pinned elsewhere. Raises PlanError."""
        return replace(self, pins=MappingProxyType({**self.pins, channel: assignment}))

    def without_pin(self, channel: bytes) -> Administration:
        """Return it without the pin of a channel."""
        return replace(self, pins=MappingProxyType({name: pin for name, pin in self.pins.items() if name != channel}))

    def without_server(self, server: str) -> Administration:
        """Return it after a server was removed."""
        return replace(
            self,
            draining=self.draining - {server},
            provisioned=self.provisioned - {server},
            releasing="" if self.releasing == server else self.releasing,
            removed=(*self.removed, server)[-REMOVED_MAX:],
            outgoing_bytes_per_s_max=MappingProxyType(
                {id_: limit for id_, limit in self.outgoing_bytes_per_s_max.items() if id_ != server}
            ),
        )


NO_ADMINISTRATION = Administration()
"""Nothing was decided: the administration of plan 0."""
