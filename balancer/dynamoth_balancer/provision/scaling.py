"""Connects the fleet with the balancer: shows it the cluster, and has its requests carried out.

The fleet decides (``fleet.py``); ``Membership`` changes the plan's list of servers, and the process asks the
provisioner and hands its answers back as events. All of it is repeated, so nothing has to arrive.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, assert_never

from dynamoth.errors import RequestRefused
from dynamoth.plan.plan import Server
from dynamoth_balancer.decide.decider import Decider
from dynamoth_balancer.decide.model import ClusterModel
from dynamoth_balancer.events import InnerAction, ListServers, Note, ProvisionerAnswered
from dynamoth_balancer.install.agents import Agents
from dynamoth_balancer.install.installer import Installer
from dynamoth_balancer.install.listeners import Listeners
from dynamoth_balancer.install.membership import Membership
from dynamoth_balancer.install.orders import Order
from dynamoth_balancer.provision.fleet import (
    AddServer,
    Fleet,
    FleetAction,
    FleetView,
    FreeServer,
    Life,
    Member,
    RemoveServer,
    StartServer,
)
from dynamoth_balancer.provision.options import FleetOptions

LIST_S = 60.0
"""How often the provisioner is asked what runs: a request of a balancer that has died may have succeeded late."""


class Scaling:
    """The fleet of one balancer process, over all its terms.

    Args:
        options: of the fleet.
        look_s: time between two looks at the cluster.
        agents: says whose reports are heard, and which are gone.
        listeners: says which servers do not answer.
        model: has the load of each server.
        decider: has found where another server is needed.
        membership: changes the list of servers.

    """

    def __init__(
        self,
        options: FleetOptions,
        look_s: float,
        agents: Agents,
        listeners: Listeners,
        model: ClusterModel,
        decider: Decider,
        membership: Membership,
    ) -> None:
        self.fleet = Fleet(options)
        self._look_s = look_s
        self._agents = agents
        self._listeners = listeners
        self._model = model
        self._decider = decider
        self._membership = membership
        self._look_at = 0.0
        self._list_at = 0.0
        #: The additions to the plan that were begun, by server.
        self._additions: dict[str, Order] = {}
        #: When a server was last too new to get channels: goals that were asked before did not count on it.
        self._joined_at = 0.0

    def begin_term(self, installer: Installer, now: float) -> None:
        """Begin again: another balancer may have started and freed servers in the meantime."""
        self.fleet.begin_term()
        installer.close(
            frozenset({installer.plan.administration.releasing} & installer.plan.servers.keys()), frozenset()
        )
        self._additions.clear()
        self._look_at = self._list_at = now

    def tick(self, installer: Installer, now: float) -> list[InnerAction]:
        """Look at the cluster, if it is time; return the actions that follow."""
        if now < self._look_at:
            return []
        self._look_at = now + self._look_s
        acts = not installer.plan.administration.paused
        actions: list[InnerAction] = []
        if acts and now >= self._list_at:
            self._list_at = now + LIST_S
            actions.append(ListServers())
        self._follow_additions(now)
        requests = self.fleet.look(self._view(installer, now), now, acts=acts)
        servers = installer.plan.servers
        unheard = [id_ for id_ in self.fleet.lives if id_ in servers and not self._agents.is_alive(id_, now)]
        installer.close(self.fleet.closed, frozenset(unheard))
        actions += self._store_release(installer, now) if acts else []
        for request in requests:
            actions += self._carry_out(request, now)
        return actions

    def _store_release(self, installer: Installer, now: float) -> list[InnerAction]:
        """Store in the plan which server is being released, so that the next balancer goes on with it."""
        releasing, administration = self.fleet.releasing or "", installer.plan.administration
        if releasing == administration.releasing:
            return []
        reason = f"{releasing} is not needed" if releasing else f"the release of {administration.releasing} has ended"
        try:
            return installer.administer(replace(administration, releasing=releasing), None, reason, now)
        except RequestRefused:  # the versions of this term are used up: the next one stores it
            return []

    def figures(self) -> dict[str, float]:
        """Return the figures for the metrics."""
        lives = Counter(self.fleet.lives.values())
        by_life = {f"fleet_{life.value}": lives[life] for life in Life}
        return {**by_life, "fleet_server_seconds": self.fleet.server_seconds}

    def describe(self, now: float) -> dict[str, Any]:
        """Return the state of the fleet, for people."""
        fleet, options = self.fleet, self.fleet.options
        return {
            "servers_min": options.servers_min,
            "servers_max": options.servers_max,
            "server_seconds": fleet.server_seconds,
            "servers": {
                id_: {"life": life.value, "life_s": fleet.life_s(id_, now), "url": fleet.url(id_)}
                for id_, life in fleet.lives.items()
            },
        }

    def on_answer(self, answer: ProvisionerAnswered, installer: Installer | None, now: float) -> None:
        """Pass an answer of the provisioner on."""
        match answer.request:
            case StartServer(id_):
                if answer.problem:
                    self.fleet.on_start_failed(id_, answer.problem, now)
                else:
                    self.fleet.on_started(id_, answer.url, now)
            case FreeServer(id_):
                if answer.problem:
                    self.fleet.on_free_failed(id_, answer.problem, now)
                else:
                    self.fleet.on_freed(id_)
            case ListServers():
                if installer is not None:
                    self.fleet.on_running(answer.ids, self._view(installer, now), now)
            case _:
                assert_never(answer.request)

    def _carry_out(self, request: FleetAction, now: float) -> list[InnerAction]:
        match request:
            case StartServer(id_, reason) if reason:
                text = "the provisioner is asked to start a server again"
                return [Note("warning", text, {"server": id_, "reason": reason}), request]
            case StartServer() | FreeServer():
                return [request]
            case AddServer(id_, url):
                return self._add(Server(id_, url), now)
            case RemoveServer(id_):
                return self._remove(id_, now)
            case _:
                assert_never(request)

    def _add(self, server: Server, now: float) -> list[InnerAction]:
        """Begin to add a server to the plan."""
        try:
            order, actions = self._membership.add(server, now, provisioned=True)
        except RequestRefused as error:
            self.fleet.on_delayed(server.id, str(error))
            return []
        self._additions[server.id] = order
        return actions

    def _remove(self, id_: str, now: float) -> list[InnerAction]:
        """Begin to remove a server from the plan. One that cannot be removed now is tried again."""
        try:
            return self._membership.remove(id_, now)[1]
        except RequestRefused as error:
            return [Note("info", "a server cannot be removed from the plan yet", {"server": id_, "reason": str(error)})]

    def _follow_additions(self, now: float) -> None:
        """Give up the servers that cannot be added."""
        for id_, order in list(self._additions.items()):
            if order.problem:
                self.fleet.on_refused(id_, order.problem, now)
            if order.problem or order.version is not None:
                del self._additions[id_]

    def _view(self, installer: Installer, now: float) -> FleetView:
        plan = installer.plan
        if any(installer.joins_in(id_, now) for id_ in plan.servers):
            self._joined_at = now
        asked_since = self._decider.asked_at > self._joined_at
        short = asked_since and any(finding.short for finding in self._decider.unreached)
        members = {id_: self._member(id_, installer, now) for id_ in plan.servers}
        leaving = [id_ for id_ in self.fleet.lives if self._membership.knows(id_)]
        return FleetView(members, leaving, short, plan.version)

    def _member(self, id_: str, installer: Installer, now: float) -> Member:
        plan = installer.plan
        administration = plan.administration
        load = self._model.load(id_, now) if self._agents.is_alive(id_, now) else None
        return Member(
            load_ratio=None if load is None else load.load_ratio,
            url=plan.servers[id_].url,
            agent_gone=self._agents.is_gone(id_, now) and not self._listeners.is_unanswered(id_, now),
            capacity=1.0 if load is None else load.outgoing_bytes_per_s_max,
            provisioned=id_ in administration.provisioned,
            releasing=id_ == administration.releasing,
            drained=id_ in administration.draining,
            pinned=id_ in administration.pinned_servers or any(r.server == id_ for r in plan.compatibility.rules),
            unused=installer.index.is_unused(id_),
        )
