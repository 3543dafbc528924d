"""The local plan: the routes that one client knows, of the channels that it uses (Dynamoth, section II-C)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from dynamoth.errors import UnknownMode
from dynamoth.plan.compatibility import Compatibility
from dynamoth.plan.plan import Plan, Route, Server, single
from dynamoth.protocol.stored_plan import StoredEntry
from dynamoth_client.machines.standalone import ALONE


@dataclass(frozen=True, slots=True)
class NewerSoftware:
    """Action, at most once per client: the plan has a part that this software does not understand and ignores."""

    text: str


ENTRIES_MAX = 100_000
"""Most learned routes without a subscription; past it the longest idle are forgotten. About 200 bytes each."""
NAMES_BYTES_MAX = 32 * 2**20
"""Most bytes of the names of all learned routes; past it, too, the longest idle are forgotten."""
ENTRY_IDLE_S = 300.0
"""A route that nobody used for this time is forgotten (Dynamoth's timer); the channel is at home again for this
client."""


class LocalPlan:
    """Routes of the channels that a client uses. Shared by the machines of one client; it does no I/O and has no clock.

    A channel without an entry is where compatibility rules or the ring put it, at epoch 0. Entries only move to newer
    epochs, except by :meth:`distrust`.
    """

    def __init__(
        self,
        header: Plan,
        entry_idle_s: float = ENTRY_IDLE_S,
        entries_max: int = ENTRIES_MAX,
    ) -> None:
        """Begin with the servers and the ring of ``header``; its entries are not used.

        Args:
            header: as read from any server of the cluster (``stored_plan.parse_header``).
            entry_idle_s: seconds without use after which a route is forgotten.
            entries_max: routes that are kept at most, those of subscribed channels apart.

        """
        self._header = header
        #: Whether there is no plan, but one standalone server; see ``standalone.py``. Once False, it stays False.
        self.is_alone = ALONE in header.servers
        #: Grows whenever any route may have changed: until then users keep the routes that they have looked up.
        self.generation = 0
        self._entry_idle_s = entry_idle_s
        self._entries_max = entries_max
        #: Channel to learned route and the time of its latest use.
        self._routes: dict[bytes, Route] = {}
        self._used_at: dict[bytes, float] = {}
        #: Sum of the lengths of these names.
        self._names_bytes = 0
        #: Channel to the number of subscriptions that need its route.
        self._pins: Counter[bytes] = Counter()
        self._swept_at = 0.0
        self._too_old = False

    @property
    def version(self) -> int:
        """The plan version of the header."""
        return self._header.version

    @property
    def servers(self) -> Mapping[str, Server]:
        """The servers of the plan by id. A client connects to no other."""
        return self._header.servers

    def update_header(self, header: Plan) -> None:
        """Follow the servers and the ring of a newer plan; an older one is ignored.

        One with another ring is never older: all servers have lost their plan, and a balancer has begun a new one.
        Routes to servers that are not listed any more are forgotten.
        """
        if header.version < self._header.version and header.ring_mark == self._header.ring_mark:
            return
        self.is_alone = False
        rules = self._header.compatibility
        self._header = header
        if rules.version > header.compatibility.version and rules.servers <= header.servers.keys():
            self._header = header.following(rules)
        self.generation += 1
        for channel in [channel for channel, route in self._routes.items() if not self.reachable(route)]:
            self._forget(channel)

    def has_other_ring(self, stored: StoredEntry) -> bool:
        """Return whether a stored plan has another ring: it is a new one, and its header must be read."""
        known = self._header
        return stored.ring not in (None, known.ring_mark) and stored.version != known.version

    def follow_rules(self, rules: Compatibility) -> bool:
        """Follow newer compatibility rules; return False if they name a server that is not known yet."""
        if rules.version <= self._header.compatibility.version:
            return True
        if not rules.servers <= self._header.servers.keys():
            return False
        self._header = self._header.following(rules)
        self.generation += 1
        return True

    @property
    def rules_version(self) -> int:
        """The version of the compatibility rules."""
        return self._header.compatibility.version

    def plain_route(self, channel: bytes) -> Route | None:
        """Return the route of a channel whose messages carry no envelopes, None for others.

        While it is plain it stays at the server of its rule, whatever has been learned of it before.
        """
        rule = self._header.compatibility.rule_of(channel)
        return Route(0, single(rule.server)) if rule is not None and rule.plain else None

    def home(self, channel: bytes) -> Route:
        """Return the route that a compatibility rule or the ring gives."""
        return self._header.home_route(channel)

    def route(self, channel: bytes) -> Route:
        """Return the route to follow for ``channel``."""
        return self._routes.get(channel) or self._header.home_route(channel)

    def epoch(self, channel: bytes) -> int:
        """Return the epoch of the route that :meth:`route` gives."""
        route = self._routes.get(channel)
        return 0 if route is None else route.epoch

    def reachable(self, route: Route) -> bool:
        """Return whether the plan lists every server of ``route``."""
        return all(server in self._header.servers for server in route.assignment.servers)

    def learn(self, channel: bytes, route: Route, now: float) -> bool:
        """Keep ``route`` if it is newer than the known one and its servers are listed; return whether it was kept."""
        if route.epoch <= self.epoch(channel) or not self.reachable(route):
            return False
        self._keep(channel, route, now)
        self.generation += 1
        self._sweep(now)
        return True

    def distrust(self, channel: bytes, truth: Route) -> None:
        """Replace a route that came from a hint, and that the servers do not confirm, by ``truth``."""
        self.generation += 1
        if truth.epoch:
            self._keep(channel, truth, self._used_at.get(channel, 0.0))
        else:
            self._forget(channel)

    def _keep(self, channel: bytes, route: Route, used_at: float) -> None:
        if channel not in self._routes:
            self._names_bytes += len(channel)
        self._routes[channel] = route
        self._used_at[channel] = used_at

    def _forget(self, channel: bytes) -> None:
        if self._routes.pop(channel, None) is not None:
            self._names_bytes -= len(channel)
            del self._used_at[channel]

    def touch(self) -> None:
        """Make users of the plan look up their routes again."""
        self.generation += 1

    def use(self, channel: bytes, now: float) -> None:
        """Note that the client used the channel: restarts the timer of its route."""
        if channel in self._used_at:
            self._used_at[channel] = now

    def too_old(self, error: UnknownMode) -> list[NewerSoftware]:
        """Note that a route was not understood; return the action for the application, the first time only."""
        if self._too_old:
            return []
        self._too_old = True
        return [NewerSoftware(f"{error}; until then this client keeps the routes that it knows")]

    def pin(self, channel: bytes) -> None:
        """Keep the route of a channel that is subscribed."""
        self._pins[channel] += 1

    def unpin(self, channel: bytes, now: float) -> None:
        """Undo one ``pin``: without any, the route is forgotten when it has been idle for long."""
        self.use(channel, now)
        self._pins[channel] -= 1
        if not self._pins[channel]:
            del self._pins[channel]

    def is_pinned(self, channel: bytes) -> bool:
        """Return whether the route of a channel is kept because the channel is subscribed to."""
        return channel in self._pins

    def check(self) -> None:
        """Assert the invariants that hold between events."""
        assert self._routes.keys() == self._used_at.keys(), "a route without the time of its use, or the reverse"
        assert self._names_bytes == sum(map(len, self._routes)), f"{self._names_bytes} bytes of names are wrong"
        assert all(map(self.reachable, self._routes.values())), "a route leads to a server that is not listed"
        assert min(self._pins.values(), default=1) > 0, f"pinned and not: {self._pins}"

    def _sweep(self, now: float) -> None:
        """Forget idle routes. Called where the plan grows, so that its cost is bounded by the growth."""
        too_large = self._names_bytes > NAMES_BYTES_MAX
        crowded = too_large or len(self._routes) - len(self._pins) > self._entries_max
        if now - self._swept_at < self._entry_idle_s / 4 and not crowded:
            return
        self._swept_at = now
        idle = [
            channel
            for channel, used_at in self._used_at.items()
            if now - used_at >= self._entry_idle_s and channel not in self._pins
        ]
        if too_large:
            idle = self._least_used()
        elif crowded and len(idle) * 4 < self._entries_max:
            oldest_first = sorted(self._used_at.items(), key=lambda item: item[1])
            idle = [channel for channel, _ in oldest_first if channel not in self._pins][: self._entries_max // 4]
        self.generation += 1
        for channel in idle:
            self._forget(channel)

    def _least_used(self) -> list[bytes]:
        """Return the channels whose routes to forget, the longest idle first, until their names have room again."""
        chosen: list[bytes] = []
        excess = self._names_bytes - NAMES_BYTES_MAX * 3 // 4
        for channel, _ in sorted(self._used_at.items(), key=lambda item: item[1]):
            if excess <= 0:
                break
            if channel not in self._pins:
                chosen.append(channel)
                excess -= len(channel)
        return chosen
