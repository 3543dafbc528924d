"""The plan that a dispatcher acts on: read from its server's copy, then changed by each delta of the balancer."""

from __future__ import annotations

from collections import Counter
from typing import Any

from dynamoth.errors import MalformedMessage, PlanError
from dynamoth.machine.events import ErrorReply, Send
from dynamoth.names import BALANCER_CHANNEL
from dynamoth.plan.plan import Plan, PlanDelta
from dynamoth.protocol import stored_plan
from dynamoth.protocol.control import PlanAck, pack_control
from dynamoth_dispatcher.events import LOCAL, DispatcherAction

DELTA_VERSIONS_MAX = 10_000
"""A delta that leaves out more versions is not believed: the stored plan is read instead. A new balancer leaves out
1000."""

TAG_PLAN = "plan"


class FollowedPlan:
    """Reads, changes and acknowledges the plan of one dispatcher.

    Args:
        server: id of the server.
        incarnation: that of the agent.
        retry_s: how soon the stored plan is read again when there is none.
        counters: those of the dispatcher.

    """

    def __init__(self, server: str, incarnation: int, retry_s: float, counters: Counter[str]) -> None:
        self._server = server
        self._incarnation = incarnation
        self._retry_s = retry_s
        self._counters = counters
        #: None until the first plan is read; never None again.
        self.plan: Plan | None = None
        self._run_id: str | None = None
        #: The process of the server that stored ``plan``.
        self._plan_run_id: str | None = None
        #: Whether the reply of a reading is outstanding; False while the link is down.
        self.is_reading = False
        #: When to read again; None while nothing is to be read.
        self.retry_at: float | None = None
        #: Whether somebody else may have changed the stored plan, so that it is to be read (again).
        self.is_doubtful = False
        #: Whether the outstanding reading began when the plan was doubtful.
        self._is_checking = False

    def link_up(self, run_id: str | None) -> list[DispatcherAction]:
        """Read the stored plan over a new connection."""
        self._run_id = run_id
        return self.read()

    def link_down(self) -> None:
        """Forget the connection. The plan stays."""
        self.is_doubtful = self.is_doubtful or self._is_checking
        self.is_reading = self._is_checking = False
        self.retry_at = None

    def read(self) -> list[DispatcherAction]:
        """Ask for the stored plan, unless that is under way."""
        self.retry_at = None
        if self.is_reading:
            return []
        self.is_reading = True
        self._is_checking, self.is_doubtful = self.is_doubtful, False
        return [Send(LOCAL, stored_plan.READ_WHOLE, (TAG_PLAN,))]

    def doubt(self) -> list[DispatcherAction]:
        """Read the stored plan, as somebody else may have changed it; again, if a reading is under way."""
        self.is_doubtful = True
        return self.read()

    def on_stored(self, reply: Any, now: float) -> tuple[Plan | None, bool]:
        """Return the plan in the reply; None, and try again later, where there is none to be believed.

        And whether it holds even if it is older than that of this dispatcher, as the latter may be forged.
        """
        self.is_reading, is_checking, self._is_checking = False, self._is_checking, False
        plan = None
        try:
            if isinstance(reply, ErrorReply):
                self._counters["refused_commands"] += 1
            else:
                plan = stored_plan.parse_whole(reply, self._run_id)
        except (MalformedMessage, PlanError):
            self._counters["malformed_plans"] += 1
        if plan is None:
            self.retry_at = now + self._retry_s
            self.is_doubtful = self.is_doubtful or is_checking
        return plan, is_checking

    def adopt(self, plan: Plan) -> None:
        """Act on a whole plan that was stored at this server."""
        self.plan = plan
        self._plan_run_id = self._run_id

    @property
    def is_of_this_process(self) -> bool:
        """Whether the plan was stored at this server since it was started: clients may be connected since then."""
        return self._plan_run_id == self._run_id

    def apply(self, delta: PlanDelta) -> bool:
        """Apply a delta; return False where it does not fit, so that the stored plan must be read."""
        plan = self.plan
        if plan is None or delta.base != plan.version or delta.version - delta.base > DELTA_VERSIONS_MAX:
            return False
        try:
            self.plan = plan.apply(delta)
        except PlanError:
            self._counters["malformed_plans"] += 1
            return False
        return True

    def contradicts(self, delta: PlanDelta) -> bool:
        """Return whether a delta that is no newer than the plan is of another plan, which the stored copy shows."""
        plan = self.plan
        return plan is not None and any(
            known is None or entry.newer_than(known) or (delta.version == plan.version and entry != known)
            for known, entry in ((plan.entries.get(channel), entry) for channel, entry in delta.entries.items())
        )

    def acknowledge(self) -> list[DispatcherAction]:
        """Send the balancer the version of the plan."""
        if self.plan is None:
            return []
        ack = PlanAck(self._server, self._incarnation, self.plan.version)
        return [Send(LOCAL, (b"PUBLISH", BALANCER_CHANNEL, pack_control(ack)))]
