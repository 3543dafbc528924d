"""Mutations for the scenarios of servers that are alone. See ``mutations``."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import dynamoth_balancer.install.copies
import dynamoth_balancer.install.takeover
from dynamoth.machine.events import Send
from dynamoth.machine.lease import Lease
from dynamoth.plan.plan import Plan
from dynamoth_balancer.install.book import PlanBook
from dynamoth_client.machines import standalone
from dynamoth_client.machines.local_plan import LocalPlan
from dynamoth_client.machines.publisher.standalone import AloneServer
from dynamoth_client.machines.standalone import ALONE
from dynamoth_client.machines.subscriber.routing import Routing
from dynamoth_client.machines.subscriber.subscription import Subscription
from dynamoth_dispatcher.followed_plan import FollowedPlan
from dynamoth_dispatcher.machine import DispatcherMachine
from dynamoth_sim.mutations.mutation import Check, no_actions, replaced, returning


def no_overlap() -> AbstractContextManager[None]:
    """Publishers leave a server that was alone as soon as they know the plan."""
    return replaced(AloneServer, copy=no_actions)


def plan_not_looked_for() -> AbstractContextManager[None]:
    """Publishers do not look behind their messages whether a server is still alone."""
    return replaced(AloneServer, has_plan=returning(False))


def no_gap_for_the_alone() -> AbstractContextManager[None]:
    """Subscribers follow a plan that has come as if nobody could have followed it before."""

    def leave(self: Routing, subscription: Any) -> list[Any]:
        return [Send(ALONE, (b"PING",), ("alone", subscription.channel))]

    return replaced(Routing, _begin_to_leave_alone=leave)


def alone_at_once() -> AbstractContextManager[None]:
    """A server where nobody is at work is taken for one alone, however lately it has started."""
    return replaced(standalone, FRESH_S=0.0)


def seldom_looked() -> AbstractContextManager[None]:
    """The balancer looks as seldom as it did whether a plan is still stored."""
    return replaced(dynamoth_balancer.install.copies, PROBE_INTERVAL_S=2.5)


def agents_do_not_look_back() -> AbstractContextManager[None]:
    """Agents go on with any plan that they read as if they knew how it came about, and tell nobody."""
    return replaced(DispatcherMachine, _catch_up_with=no_actions)


@contextmanager
def versions_identify_plans() -> Generator[None]:
    """Agents acknowledge each version that they have, whatever plan it is of, and do not look back later either."""
    with agents_do_not_look_back(), replaced(FollowedPlan, contradicts=returning(False)):
        yield


def ring_read_once() -> AbstractContextManager[None]:
    """Clients follow the ring with which they began."""
    return replaced(LocalPlan, has_other_ring=returning(False))


def own_plan_is_the_newest() -> AbstractContextManager[None]:
    """A balancer takes the plan of its earlier term for the newest, where servers store none."""

    def complete(plan: Plan, known: Any, *, term: int, is_complete: bool = False) -> PlanBook:
        return PlanBook(plan, known, term=term, is_complete=True)

    return replaced(dynamoth_balancer.install.takeover, PlanBook=complete)


def older_notices_are_ignored() -> AbstractContextManager[None]:
    """Subscribers take no notice of routes that are older than theirs."""
    return replaced(Routing, verify_all=no_actions)


def left_when_settled() -> AbstractContextManager[None]:
    """A subscriber that was alone leaves that connection only while its channel is at home."""
    begin_to_leave = Routing._begin_to_leave_alone  # pyright: ignore[reportPrivateUsage]

    def at_home(self: Routing, subscription: Subscription) -> list[Any]:
        return [] if subscription.route.epoch else begin_to_leave(self, subscription)

    return replaced(Routing, _begin_to_leave_alone=at_home)


def rivals_overlooked() -> AbstractContextManager[None]:
    """A balancer takes the lease as soon as the key is absent, whoever else is connected."""
    looked = Lease.on_reply

    def no_rival(self: Lease, server: str, what: str, value: Any, now: float) -> list[Send]:
        return looked(self, server, what, [b"", 1] if what == "balancers" else value, now)

    return replaced(Lease, on_reply=no_rival)


CHECKS: tuple[Check, ...] = (
    Check("50-alone-grows", no_overlap, "G1"),
    Check("50-alone-grows", plan_not_looked_for, "expected"),
    Check("51-alone-overtaken", no_gap_for_the_alone, "G5"),
    Check("69-alone-and-moved", left_when_settled, "expected"),
    Check("52-empty-member", alone_at_once, "expected"),
    Check("53-flushed", seldom_looked, "expected"),
    Check("56-flushed-beside-rival", rivals_overlooked, "expected"),
    Check("54-flushed-without-balancer", agents_do_not_look_back, "expected"),
    Check("55-plan-lost-and-larger", ring_read_once, "G5"),
    Check("55-plan-lost-and-larger", agents_do_not_look_back, "G5"),
    Check("66-flushed-and-older-plan", own_plan_is_the_newest, "expected"),
    Check("67-plan-lost-and-moved", older_notices_are_ignored, "expected"),
    Check("70-plan-lost-and-moved-unseen", agents_do_not_look_back, "expected"),
    Check("71-plan-lost-and-version-reached", versions_identify_plans, "expected"),
)
