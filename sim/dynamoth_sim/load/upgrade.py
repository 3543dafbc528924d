"""A fleet that is upgraded, and goes back: channels become plain and are lifted again while everybody goes on.

While the channels are plain, plain Redis clients listen at the server of the rule. They leave before it is lifted, as
they could not read what comes then, and come back some time after the channels have become plain again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dynamoth.plan.compatibility import Compatibility, CompatibilityRule
from dynamoth.plan.plan import Phase, single
from dynamoth_sim.cluster import Cluster
from dynamoth_sim.load.plain import PlainSubscriberApp

SERVER = "s1"
"""The server that plain clients know."""

PATTERN = b"ch[01]"
"""The pattern of the rule: it matches two channels of the workload."""

RULES = (CompatibilityRule(PATTERN, SERVER),)
"""The compatibility rules with which the cluster begins."""

LOOK_S = 0.2
"""How often an operator looks whether the next step is done."""

QUIET_S = 1.0
"""How long an operator waits before channels become plain, and before plain clients come back: longer than a client is
paused."""


class Upgrade:
    """Takes ``plain`` away and gives it back, again and again, until ``is_over``."""

    def __init__(
        self, cluster: Cluster, channels: Sequence[bytes], listeners: int, is_over: Callable[[], bool]
    ) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self._is_over = is_over
        self._listeners = listeners
        self._running: list[PlainSubscriberApp] = []
        self._started = 0
        rules = Compatibility(0, RULES)
        self.channels = [channel for channel in channels if rules.is_plain(channel)]
        #: Whether nobody may move the channels: they are on their way back to ``SERVER``.
        self.is_returning = False

    def start(self) -> None:
        """Begin, with plain channels."""
        self._listen()

    def _later(self, delay_s: float, step: Callable[[], None]) -> None:
        self._world.after(delay_s, lambda: None if self._is_over() else step())

    def _draw(self, least_s: float, most_s: float) -> float:
        return least_s + (most_s - least_s) * self._world.random.random()

    def _listen(self) -> None:
        for _ in range(self._listeners):
            self._started += 1
            app = PlainSubscriberApp(self._cluster, f"l{self._started}", SERVER, self.channels)
            self._running.append(app)
            app.start()
        self._later(self._draw(0.4, 1.2), self._leave)

    def _change(self, action: str, then: Callable[[], None], server: str | None = None) -> None:
        """Change the rules, and go on when the balancer says that they are in force; ask again if it refuses."""
        request = self._cluster.change_rules(action, PATTERN, server)

        def look() -> None:
            if request not in self._cluster.answers:
                self._later(LOOK_S, look)
            elif self._cluster.answers[request] is None:
                then()
            else:
                self._later(LOOK_S, lambda: self._change(action, then, server))

        self._later(LOOK_S, look)

    def _leave(self) -> None:
        for app in self._running:
            app.stop()
        self._running.clear()
        self._change("lift", lambda: self._later(self._draw(1.0, 2.0), self._come_back))

    def _come_back(self) -> None:
        """Bring the channels back to the server of the rule, which is plain again when they have been there a while."""
        self.is_returning = True
        elsewhere = [channel for channel in self.channels if not self._is_back(channel)]
        for channel in elsewhere:
            self._cluster.change(channel, single(SERVER))
        if elsewhere:
            self._later(LOOK_S, self._come_back)
        else:
            self._later(QUIET_S, self._become_plain)

    def _become_plain(self) -> None:
        def plain() -> None:
            self.is_returning = False
            self._later(QUIET_S, self._listen)

        self._change("add", plain, SERVER)

    def _is_back(self, channel: bytes) -> bool:
        plan = self._cluster.newest_plan()
        entry = None if plan is None else plan.entry(channel)
        return entry is not None and entry.phase is Phase.SETTLED and entry.route.assignment == single(SERVER)
