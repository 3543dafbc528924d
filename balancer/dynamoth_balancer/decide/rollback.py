"""Finds the moves that wait for failed agents, and can be undone.

A move that is PREPARED needs every agent that it involves. If one of them dies, hangs or falls behind, the move might
wait for good, and no other one can take the channel away. Nobody uses the new route before the move is ACTIVE, so it
can be undone without the failed agent.

A move that is ACTIVE goes on: clients have followed it, and only a new agent can say that the old place is empty. The
same holds for a move of an earlier term, which may have been ACTIVE where this balancer could not read.
"""

from __future__ import annotations

from dynamoth.plan.plan import Assignment, Mode, Phase
from dynamoth_balancer.install.agents import Agents
from dynamoth_balancer.install.installer import Installer


def stuck(installer: Installer, agents: Agents, now: float) -> dict[bytes, Assignment]:
    """Return the channels whose moves are to be undone, and where they were.

    Agents that contradict each other are no reason: one late message of an agent that was restarted looks like that. A
    channel that was replicated must be prepared again, so it waits if the failed agent is that of an old replica.
    """
    prepared = [each for each in installer.transitions.values() if each.is_own and each.entry.phase is Phase.PREPARED]
    if not prepared:
        return {}
    failed = {server for server in installer.plan.servers if agents.has_failed(server, now)} - installer.dead
    # An agent that is blind at an old server is no reason either: the move relieves it.
    return {
        each.channel: before
        for each in prepared
        if not failed.isdisjoint(each.involved) or not agents.blind.keys().isdisjoint(each.involved - each.old)
        for before in (each.entry.previous[0].assignment,)
        if before.mode is Mode.SINGLE or failed.isdisjoint(before.servers)
    }
