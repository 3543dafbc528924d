"""A provisioner of the simulated world: it starts servers of a cluster with their agents, and stops them for good.

It may also do its work badly, in one of the ways of :class:`Manner`.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, assert_never

from dynamoth_balancer.events import ListServers, ProvisionerAnswered, ProvisionerRequest
from dynamoth_balancer.provision.fleet import FreeServer, StartServer

if TYPE_CHECKING:
    from dynamoth_sim.cluster import Cluster
    from dynamoth_sim.world.process import Process

ANSWER_S_MAX = 0.4
"""Longest time until it answers, unless it hangs."""


class Manner(enum.Enum):
    """How a provisioner does its work."""

    WORKS = "works"
    FAILS = "fails"
    """It answers that it cannot."""
    HANGS = "hangs"
    """It does nothing, and never answers."""
    LIES = "lies"
    """It announces a server that does not run."""
    HALF = "half"
    """It starts a server without an agent."""
    FORGETS = "forgets"
    """It does what it is asked for, and its answer is lost."""


class Provisioner:
    """Carries out the requests of the balancers of one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self.manner = Manner.WORKS
        #: The servers that it runs, in the order of their start.
        self.running: dict[str, None] = {}
        #: What it was asked for, and when.
        self.requests: list[tuple[float, ProvisionerRequest]] = []

    def request(self, process: Process, request: ProvisionerRequest) -> None:
        """Carry out a request of a balancer, after a while."""
        self.requests.append((self._world.now, request))
        self._world.after(
            ANSWER_S_MAX * self._world.random.random(), self._carry_out, process, process.machine, request
        )

    def times(self, kind: type[ProvisionerRequest]) -> list[float]:
        """Return when it was asked for something of this kind."""
        return [at for at, request in self.requests if isinstance(request, kind)]

    def _carry_out(self, process: Process, machine: object, request: ProvisionerRequest) -> None:
        manner = self.manner
        if manner is Manner.HANGS:
            return
        refusal = ProvisionerAnswered(request, "no credit left")
        answer = refusal if manner is Manner.FAILS else self._do(request, manner)
        if manner is not Manner.FORGETS and process.machine is machine:
            process.handle(answer)

    def _do(self, request: ProvisionerRequest, manner: Manner) -> ProvisionerAnswered:
        cluster = self._cluster
        match request:
            case StartServer(id_):
                if id_ in self.running:
                    cluster.start_what_is_missing(id_, has_agent=manner is not Manner.HALF)
                else:
                    self.running[id_] = None
                    cluster.provision(id_, is_up=manner is not Manner.LIES, has_agent=manner is not Manner.HALF)
                return ProvisionerAnswered(request, url=cluster.servers[id_].url)
            case FreeServer(id_):
                if id_ in self.running:
                    del self.running[id_]
                    cluster.stop_for_good(id_, orderly=True)
                return ProvisionerAnswered(request)
            case ListServers():
                return ProvisionerAnswered(request, ids=tuple(self.running))
            case _:
                assert_never(request)
