"""Decides which servers count where more than half of them must agree.

These are all servers of the plan. If half of them or more are lost for good, nothing could ever be changed again. So an
operator may let a balancer *take over*: it gives up the servers that it cannot reach at its start, and needs more than
half of the others only. All count again when it has the lease of more than half of them.

Two balancers that take over, each with other servers, would not know of each other. Nothing here can prevent that: the
operator accepts the risk.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable

from dynamoth.errors import ConfigError

CURE = (
    "start them again; if they are lost for good, stop all balancers and start one with --take-over, which counts only"
    " the servers that it can reach"
)
"""What an operator can do when too many servers are dead."""


def is_majority(some: int, servers: int) -> bool:
    """Return whether so many are more than half of the servers."""
    return 2 * some > servers


class Quorum:
    """The servers that count.

    Args:
        may_give_up: whether an operator lets the balancer give up servers, once.

    """

    def __init__(self, *, may_give_up: bool = False) -> None:
        #: Whether the balancer is to take over, and has not yet.
        self.may_give_up = may_give_up
        #: The servers that do not count; some may have left the plan meanwhile.
        self.given_up: frozenset[str] = frozenset()

    def voters(self, servers: Iterable[str]) -> list[str]:
        """Return those of these servers that count."""
        return [server for server in servers if server not in self.given_up]

    def decides(self, some: Container[str], servers: Iterable[str]) -> bool:
        """Return whether ``some`` are more than half of those of ``servers`` that count."""
        voters = self.voters(servers)
        return is_majority(sum(server in some for server in voters), len(voters))

    def take_over(self, alive: Collection[str], servers: Collection[str]) -> None:
        """Give up all servers that are not alive.

        Raises:
            ConfigError: more than half are alive.

        """
        if self.decides(alive, servers):
            raise self.refusal(len(alive), len(servers))
        self.may_give_up = False
        self.given_up = frozenset(servers) - frozenset(alive)

    @staticmethod
    def refusal(alive: int, servers: int) -> ConfigError:
        """Return why the balancer may not take over, as so many of the servers can be reached."""
        return ConfigError(
            f"--take-over is refused, as {alive} of {servers} servers can be reached, which are enough to lead: nothing"
            " has changed; start the balancer without --take-over"
        )
