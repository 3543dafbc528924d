"""Mutations for the scenarios about resources, and about servers that come and go. See ``mutations``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from dynamoth_balancer.decide import relieve
from dynamoth_balancer.decide.cluster import ChannelRate, Cluster, ServerLoad, busiest_first
from dynamoth_balancer.decide.release import Release
from dynamoth_balancer.install.listeners import Listeners
from dynamoth_balancer.install.membership import Membership
from dynamoth_balancer.provision import fleet
from dynamoth_balancer.provision.fleet import Fleet, FleetAction, FleetView, FreeServer, Life, Member
from dynamoth_balancer.provision.scaling import Scaling
from dynamoth_sim.mutations.mutation import Check, no_actions, nothing, replaced, returning


def only_bytes_count() -> AbstractContextManager[None]:
    """The load ratio of a server is that of its outgoing bytes, as published."""
    return replaced(ServerLoad, load_ratio=ServerLoad.outgoing_ratio)


def largest_first() -> AbstractContextManager[None]:
    """A server that is short of CPU is relieved of the channels with most bytes."""

    def by_bytes(loads: Iterable[ChannelRate], _server: ServerLoad) -> list[ChannelRate]:
        return busiest_first(loads)

    return replaced(relieve, busiest_first=by_bytes)


def full_servers_are_filled() -> AbstractContextManager[None]:
    """Channels are put at servers that are nearly out of connections or memory."""
    return replaced(Cluster, _closed=property(lambda self: self.blind))


def never_grows() -> AbstractContextManager[None]:
    """No server is asked for."""
    return replaced(Fleet, _grow=nothing)


def nothing_leaves() -> AbstractContextManager[None]:
    """The channels of a server that is released stay there."""
    return replaced(Release, propose=no_actions)


def freed_while_used() -> AbstractContextManager[None]:
    """A server is freed as soon as it is released."""
    requests = Fleet.__dict__["_requests"]

    def hasty(self: Fleet, view: FleetView, now: float) -> Iterator[FleetAction]:
        yield from requests(self, view, now)
        if self.releasing is not None:
            yield FreeServer(self.releasing)

    return replaced(Fleet, _requests=hasty)


def release_goes_on() -> AbstractContextManager[None]:
    """A release is not abandoned when the load rises."""
    return replaced(Fleet, releasing=property(returning(None)))


def no_backoff() -> AbstractContextManager[None]:
    """A provisioner that fails is asked again at once."""
    return replaced(Fleet, _backoff_s=returning(0.0))


def waits_without_end() -> AbstractContextManager[None]:
    """A request is never given up."""
    return replaced(Fleet, _expire=nothing)


def refusals_are_ignored() -> AbstractContextManager[None]:
    """A server that the plan cannot take is not given up."""
    return replaced(Fleet, on_refused=nothing)


def never_gives_up() -> AbstractContextManager[None]:
    """A server that does not report stays."""
    return replaced(Fleet, _give_up=nothing)


def orphans_stay() -> AbstractContextManager[None]:
    """Servers that a balancer before this one has asked for are not looked for."""
    return replaced(Fleet, on_running=nothing)


def unmarked() -> AbstractContextManager[None]:
    """The plan does not say which servers a provisioner has started."""
    add = Membership.add

    def unmarked_add(self: Membership, *arguments: Any, **_: Any) -> Any:
        return add(self, *arguments)

    return replaced(Membership, add=unmarked_add)


def releases_are_forgotten() -> AbstractContextManager[None]:
    """A balancer does not know which server the one before it was releasing."""
    return replaced(fleet, _adopted=returning(Life.ACTIVE))


def agents_stay_away() -> AbstractContextManager[None]:
    """A server whose agent dies is not started again."""
    return replaced(Fleet, _start_again=no_actions)


def dead_servers_are_started_again() -> AbstractContextManager[None]:
    """The provisioner is asked to start every server again that is not heard."""
    member = Scaling.__dict__["_member"]

    def blamed(self: Scaling, *arguments: Any) -> Member:
        seen: Member = member(self, *arguments)
        return replace(seen, agent_gone=seen.load_ratio is None)

    return replaced(Scaling, _member=blamed)


def late_answers_are_believed() -> AbstractContextManager[None]:
    """What a server has said counts also when it answers no more."""
    return replaced(Listeners, is_unanswered=returning(False))


CHECKS: tuple[Check, ...] = (
    Check("110-grow-and-shrink", never_grows, "expected"),
    Check("110-grow-and-shrink", nothing_leaves, "expected"),
    Check("110-grow-and-shrink", freed_while_used, "expected"),
    Check("111-release-abandoned", release_goes_on, "expected"),
    Check("112-provisioner-fails", no_backoff, "expected"),
    Check("113-provisioner-hangs", waits_without_end, "expected"),
    Check("114-provisioner-lies", refusals_are_ignored, "expected"),
    Check("115-server-without-agent", never_gives_up, "expected"),
    Check("116-balancer-dies-in-between", orphans_stay, "expected"),
    Check("117-successor-releases", unmarked, "expected"),
    Check("118-dies-while-joining", never_gives_up, "expected"),
    Check("119-successor-goes-on", releases_are_forgotten, "expected"),
    Check("131-agent-dies-later", agents_stay_away, "expected"),
    Check("131-agent-dies-later", no_backoff, "expected"),
    Check("131-agent-dies-later", unmarked, "expected"),
    Check("132-server-dies-later", dead_servers_are_started_again, "expected"),
    Check("132-server-hangs-later", late_answers_are_believed, "expected"),
    Check("74-short-of-cpu", only_bytes_count, "expected"),
    Check("74-short-of-cpu", largest_first, "expected"),
    Check("74-short-of-cpu", full_servers_are_filled, "expected"),
)
