"""Mutations for the scenarios about servers that are added and removed. See ``mutations``."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from dynamoth.errors import RequestRefused
from dynamoth.machine.lease import Lease
from dynamoth_balancer.admin.overview import Overview
from dynamoth_balancer.admin.status import describe_server
from dynamoth_balancer.decide.cluster import Cluster, Move
from dynamoth_balancer.decide.spread import Spread
from dynamoth_balancer.install.installer import Installer
from dynamoth_balancer.install.membership import Membership
from dynamoth_balancer.install.takeover import Takeover
from dynamoth_balancer.machine import BalancerMachine
from dynamoth_sim.mutations.mutation import Check, replaced, returning


def no_lease_at_new_servers() -> AbstractContextManager[None]:
    """A server is added before the balancer has its lease there, and without a look who would lead then."""
    return replaced(Lease, holds_at=returning(True), would_hold=returning(True))


def no_last_copy() -> AbstractContextManager[None]:
    """A server that is removed gets no plan that says so."""
    return replaced(Installer, is_leaving=returning(False))


def orders_are_not_repeated() -> AbstractContextManager[None]:
    """An order that an earlier balancer has carried out is refused."""

    def refuse(_installer: Installer, action: str, server: str, note: str, _now: float) -> Any:
        raise RequestRefused(f"{action} {server}: {note}")

    return replaced(Membership, _unchanged=staticmethod(refuse))


def any_list_can_change() -> AbstractContextManager[None]:
    """The list of servers is changed again before the last one is stored at a majority."""
    return replaced(Installer, may_change_servers=True)


def stored_lists_are_ignored() -> AbstractContextManager[None]:
    """A balancer that takes over goes by the servers that it knows, whatever the plans that it reads list."""
    return replaced(Takeover, listing=returning(None))


def status_of_an_earlier_term() -> AbstractContextManager[None]:
    """A balancer that does not lead describes the servers by the copies of its earlier term."""

    def describe(self: Overview, server: str, now: float) -> dict[str, Any]:
        return describe_server(server, self.agents, self.model, self.leadership.installer, now)

    return replaced(Overview, server_status=describe)


@contextmanager
def requests_do_not_wait_for_the_list() -> Generator[None]:
    """A request is handled though not all parts know the servers that an earlier one has put into the plan.

    The balancer would crash, as it describes a server that has left, so it describes that one as nothing.
    """
    server_status = Overview.server_status

    def describe(self: Overview, server: str, now: float) -> dict[str, Any]:
        plan = self.leadership.plan
        return {} if plan is None or server not in plan.servers else server_status(self, server, now)

    with replaced(BalancerMachine, _knows_servers=True), replaced(Overview, server_status=describe):
        yield


def servers_that_are_away_are_forgotten() -> AbstractContextManager[None]:
    """A server that cannot take part when the goals are asked gets no more slots, if it has a quarter of its share."""
    propose = Spread.propose

    def forget(self: Spread, cluster: Cluster) -> list[Move]:
        self.growing.intersection_update(server.id for server in cluster.targets)
        return propose(self, cluster)

    return replaced(Spread, propose=forget)


CHECKS: tuple[Check, ...] = (
    Check("100-add-under-load", no_lease_at_new_servers, "expected"),
    Check("101-remove-under-load", no_last_copy, "expected"),
    Check("102-balancer-dies-adding", orders_are_not_repeated, "expected"),
    Check("103-balancer-dies-removing", orders_are_not_repeated, "expected"),
    Check("104-split-while-adding", any_list_can_change, "expected"),
    Check("105-former-list", stored_lists_are_ignored, "expected"),
    Check("126-former-leader", status_of_an_earlier_term, "expected"),
    Check("133-asked-together", requests_do_not_wait_for_the_list, "expected"),
    Check("134-away-while-growing", servers_that_are_away_are_forgotten, "expected"),
)
