"""What a dispatcher tells the clients at its server: new routes, changed rules, and messages they may have missed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from dynamoth.machine.bounded import ENTRY_BYTES, BoundedTable
from dynamoth.machine.events import ErrorReply, Send
from dynamoth.names import CLIENTS_CHANNEL, inbox, is_user_channel, logical_channel
from dynamoth.plan.plan import Location, Plan, Route
from dynamoth.protocol.control import (
    LossNotice,
    ObservationGap,
    RouteNotice,
    RulesChanged,
    pack_control,
    seal_control,
)
from dynamoth_dispatcher.events import LOCAL, DispatcherAction
from dynamoth_dispatcher.options import DispatcherOptions
from dynamoth_dispatcher.transitions import Transition

TAG_LISTENERS = "listeners"


def observation_gap(server: str) -> Send:
    """Make the publishers at ``server`` send heartbeats: some of their messages may not have been forwarded."""
    return Send(LOCAL, (b"PUBLISH", CLIENTS_CHANNEL, pack_control(ObservationGap(server))))


class ClientNotices:
    """Makes the notices of one dispatcher; remembers which publishers have got one lately."""

    def __init__(self, server: str, options: DispatcherOptions, counters: Counter[str]) -> None:
        self._server = server
        self._again_s = options.tell_again_s
        self._counters = counters
        #: (publisher, channel) to (epoch, time) of the latest notice.
        self._sent: BoundedTable[tuple[int, bytes], tuple[int, float]] = BoundedTable(
            options.told_max, options.names_bytes_max, lambda key, _: len(key[1]) + ENTRY_BYTES
        )

    def redirect_publisher(self, channel: bytes, route: Route, publisher: int, now: float) -> list[DispatcherAction]:
        """Send a publisher the route to use, unless that was done just now."""
        key = (publisher, channel)
        epoch, at = self._sent.get(key) or (-1, 0.0)
        if epoch == route.epoch and now - at < self._again_s:
            return []
        self._sent.put(key, (route.epoch, now))
        self._counters["redirected_publishers"] += 1
        notice = pack_control(RouteNotice(channel, route))
        return [Send(LOCAL, (b"PUBLISH", inbox(publisher), notice))]

    def redirect_listeners(self, transition: Transition, locations: Iterable[Location]) -> list[DispatcherAction]:
        """Send the listeners at old locations the new route of a channel."""
        notice = seal_control(RouteNotice(transition.channel, transition.entry.route))
        actions: list[DispatcherAction] = [
            Send(LOCAL, (b"PUBLISH", location.physical, notice)) for location in locations
        ]
        self._counters["route_notices"] += len(actions)
        return actions

    def change_of_rules(self, plan: Plan, publisher: int | None = None) -> list[DispatcherAction]:
        """Make one publisher, or all clients here, read the compatibility rules."""
        version = plan.compatibility.version
        channel = CLIENTS_CHANNEL if publisher is None else inbox(publisher)
        return [Send(LOCAL, (b"PUBLISH", channel, pack_control(RulesChanged(version))))]

    def ask_for_listeners(self, plan: Plan, known: Plan) -> list[DispatcherAction]:
        """Ask who listens here, if ``plan`` does not continue the one that was ``known``.

        Balancers never remove an entry, nor change the ring. But all servers may have lost their copies while no
        balancer was at work: then the next one begins a new plan, of which listeners here would not hear otherwise.
        """
        same_homes = plan.ring_mark == known.ring_mark
        if same_homes and not any(
            each.newer_than(plan.entries.get(channel)) for channel, each in known.entries.items()
        ):
            return []
        return [Send(LOCAL, (b"PUBSUB", b"CHANNELS"), (TAG_LISTENERS,))]

    def on_listeners(self, reply: Any, plan: Plan) -> list[DispatcherAction]:
        """Make subscribers verify their subscriptions where the plan does not send them here."""
        if isinstance(reply, ErrorReply):
            self._counters["refused_commands"] += 1
            return []
        actions: list[DispatcherAction] = []
        for physical in filter(is_user_channel, reply):
            channel = logical_channel(physical)
            places = [place for route in plan.entry(channel).live_routes for place in route.locations(channel)]
            if Location(self._server, physical) not in places:
                actions.append(Send(LOCAL, (b"PUBLISH", physical, seal_control(LossNotice(channel, None)))))
        return actions
