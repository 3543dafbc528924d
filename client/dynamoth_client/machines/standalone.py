"""A standalone server: how a client works with one plain Redis, without agents and balancer.

Theory of operation
-------------------
Where an application names one server only, and that stores no plan, a client makes one up: every channel is at home at
that server (``plan_of``). Listening and publishing work as they always do, and the absence of a stored plan confirms
the routes.

It must not happen in a cluster whose plan is missing for a moment: such a client would reach nobody else. So no agent
or balancer may be at work at the server (``Look.is_occupied``), and the server must be up for ``FRESH_S``:
one that has just restarted without its data is found by its agent and by the balancer within that time.

When the plan appears, at that same server, machines follow it:

* A publisher reads the plan's header behind each message. A message behind which there was none has reached everybody,
  as nobody leaves the server before it stores a plan. One behind which there is one is sent again by the right route,
  with its number. For ``OVERLAP_S`` after that, each message goes to the server as well.
* A subscriber looks for the plan every ``LOOK_INTERVAL_S``. It joins the right places, and leaves the former one when
  they are verified and what had been sent before on that connection has come. Where the right place is a server of its
  own, others may have published there before it came: that is a gap. Where it is the same process, it is none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from dynamoth.machine.events import CommandPart, ErrorReply
from dynamoth.names import AGENT_CHANNEL, BALANCER_CHANNEL
from dynamoth.plan.plan import Plan, Server

ALONE = "(alone)"
"""The id of the server until a plan gives it another one. No id in a plan looks like this."""

FRESH_S = 3.0
"""How long a server must be up. Agents and balancers pause for at most 1 s between two attempts to connect, and an
attempt takes less than that where a server is up; the rest is for a machine that is busy."""

LOOK_INTERVAL_S = 0.2
"""How often a subscriber, whose server was alone, looks for a plan."""

OVERLAP_S = 2.0
"""How long a publisher goes on at the server that was alone, in addition to the right place: ten times what subscribers
take to see that there is a plan."""

READ_PRESENCE: tuple[CommandPart, ...] = (b"PUBSUB", b"NUMSUB", AGENT_CHANNEL, BALANCER_CHANNEL)

_UPTIME = re.compile(rb"^uptime_in_seconds:(\d+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Look:
    """The state of a server that stores no plan: who listens there, and since when it is up."""

    #: How many agents and balancers listen there. None: the server does not tell.
    agents: int | None
    balancers: int | None
    #: Since when the process is up, in seconds. None: the server does not tell.
    uptime_s: float | None

    @property
    def is_occupied(self) -> bool:
        """Whether an agent or a balancer is, or may be, at work there."""
        return self.agents is None or self.balancers is None or self.agents + self.balancers > 0

    def is_alone(self, watched_s: float) -> bool:
        """Return whether the server is standalone; ``watched_s``: for how long nobody else was seen there."""
        return not self.is_occupied and max(watched_s, self.uptime_s or 0.0) >= FRESH_S


def read_look(presence: Any, info: Any) -> Look:
    """Read the replies to ``READ_PRESENCE`` and INFO."""
    match = _UPTIME.search(info) if isinstance(info, bytes) else None
    uptime_s = float(match[1]) if match else None
    if isinstance(presence, ErrorReply) or not isinstance(presence, list):
        return Look(None, None, uptime_s)
    counts: list[Any] = [*presence]
    return Look(int(counts[1]), int(counts[3]), uptime_s)


def plan_of(url: str) -> Plan:
    """Return the plan that a client makes up for a standalone server."""
    return Plan.initial([Server(ALONE, url)])
