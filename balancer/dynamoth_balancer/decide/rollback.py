"""Finds the moves that wait for failed agents, or for servers that refuse the plan, and can be undone.

A move that is PREPARED needs every server and agent that it involves. If an agent dies, hangs or falls behind, or a
server refuses to store the plan (its disk or memory is full), the move might wait for good, and no other one can take
the channel away. Nobody uses the new route before the move is ACTIVE, so it can be undone without them.

A move that is ACTIVE goes on: clients have followed it, and only a new agent can say that the old place is empty. The
same holds for a move of an earlier term, which may have been ACTIVE where this balancer could not read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from dynamoth.plan.plan import Assignment, Mode, Phase
from dynamoth_balancer.install.agents import Agents
from dynamoth_balancer.install.installer import Installer, Transition


def stuck(installer: Installer, agents: Agents, now: float) -> dict[bytes, Assignment]:
    """Return the channels whose moves wait for failed agents, and where they were.

    Agents that contradict each other are no reason: one late message of an agent that was restarted looks like that.
    """
    failed = {server for server in installer.plan.servers if agents.has_failed(server, now)} - installer.dead

    def is_stuck(each: Transition) -> bool:
        # An agent that is blind at an old server is no reason either: the move relieves it.
        return not failed.isdisjoint(each.involved) or not agents.blind.keys().isdisjoint(each.involved - each.old)

    return _undone(installer, is_stuck, failed)


def unstored(installer: Installer, patience_s: float, now: float) -> dict[bytes, Assignment]:
    """Return the channels whose moves have waited for ``patience_s`` as a server refuses the plan, and where they were.

    One that refuses it for a moment is no reason.
    """
    refusing = installer.refusing - installer.dead

    def is_unstored(each: Transition) -> bool:
        return now - each.since >= patience_s and not refusing.isdisjoint(each.involved)

    return _undone(installer, is_unstored, refusing) if refusing else {}


def _undone(
    installer: Installer, hangs: Callable[[Transition], bool], failed: Collection[str]
) -> dict[bytes, Assignment]:
    """Return the channels whose moves hang and can be undone, and where they were.

    A channel that was replicated must be prepared again, so it waits if an old replica is at one of ``failed``.
    """
    return {
        each.channel: before
        for each in installer.transitions.values()
        if each.is_own and each.entry.phase is Phase.PREPARED and hangs(each)
        for before in (each.entry.previous[0].assignment,)
        if before.mode is Mode.SINGLE or not any(server in failed for server in before.servers)
    }
