"""Mutations for the known failures of load managers. See ``mutations``."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

from dynamoth_balancer.decide import model, relieve
from dynamoth_balancer.decide.cluster import Cluster, ServerLoad
from dynamoth_balancer.decide.decider import Decider
from dynamoth_balancer.decide.model import ClusterModel
from dynamoth_balancer.decide.replicate import Judgement
from dynamoth_balancer.decide.samples import Sample
from dynamoth_balancer.decide.worth import Worth
from dynamoth_balancer.install.agents import Agents
from dynamoth_balancer.install.installer import Installer
from dynamoth_sim.mutations.mutation import Check, nothing, replaced, returning


def every_move_is_worth_it() -> AbstractContextManager[None]:
    """An overloaded server gives its busiest channel to the least loaded one, whatever comes of it, as published."""
    return replaced(relieve, judge=returning(Worth.WORTH_IT), can_be_worth_it=returning(True))


def only_ratios_replicate() -> AbstractContextManager[None]:
    """A channel is replicated only for its publications or its subscribers, as published, not for its load."""
    return replaced(Judgement, outgrown=False)


def new_servers_stay_new() -> AbstractContextManager[None]:
    """A server that has come while there were others takes part in no decision."""

    def joins_in(_self: Installer, server: str, _now: float) -> float:
        return 1.0 if server == "s4" else 0.0

    return replaced(Installer, joins_in=joins_in)


@contextmanager
def silent_servers_take_part() -> Generator[None]:
    """The latest figures of a server count until there are newer ones."""
    forget_old = ClusterModel._forget_old  # pyright: ignore[reportPrivateUsage]

    def forget(self: ClusterModel, model: Any, now: float) -> None:
        forget_old(self, model, min(now, model.latest_at))

    with replaced(ClusterModel, _forget_old=forget), replaced(Agents, is_alive=returning(True)):
        yield


def the_smallest_ratio_has_most_room() -> AbstractContextManager[None]:
    """The server with the smallest load ratio takes the channels, as published, however small it is."""

    def roomiest(self: Cluster, besides: str) -> ServerLoad:
        return min((each for each in self.targets if each.id != besides), key=lambda each: each.load_ratio)

    return replaced(Cluster, roomiest=roomiest)


def moves_count_when_they_are_measured() -> AbstractContextManager[None]:
    """Proposals are made for the loads that were measured, without the moves that the plan has already."""
    return replaced(ServerLoad, add=nothing)


def every_gain_is_worth_it() -> AbstractContextManager[None]:
    """Channels leave an overloaded server even if that hardly relieves it."""
    return replaced(relieve, is_worth_moves=returning(True))


def only_what_was_sent_counts() -> AbstractContextManager[None]:
    """The load of a server is what it has sent, and not what waits there."""

    def sample(*fields: Any) -> Sample:
        return replace(Sample(*fields), due_bytes=0.0)

    return replaced(model, Sample=sample)


def changes_settle_first() -> AbstractContextManager[None]:
    """No plan is made while changes are under way, also for an overloaded server."""
    return replaced(Decider, _decide_urgently=returning(None))


CHECKS = (
    Check("76-ping-pong", every_move_is_worth_it, "expected"),
    Check("77-hotter-than-any-server", only_ratios_replicate, "expected"),
    Check("78-all-overloaded", every_move_is_worth_it, "expected"),
    Check("79-new-server", new_servers_stay_new, "expected"),
    Check("120-steady", every_move_is_worth_it, "expected"),
    Check("121-stale-reports", silent_servers_take_part, "expected"),
    Check("122-different-sizes", the_smallest_ratio_has_most_room, "expected"),
    Check("123-herd", moves_count_when_they_are_measured, "expected"),
    Check("124-little-gain", every_gain_is_worth_it, "expected"),
    Check("125-full", only_what_was_sent_counts, "expected"),
    Check("125-full", changes_settle_first, "expected"),
)
