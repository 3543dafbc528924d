"""Where messages are forwarded that are published in the wrong place, or whose channel is in transition.

That depends on the plan's entry of the channel, the location, and what the envelope says of who published by which
epoch: not on the single message. So it is decided once for all messages that are alike, and remembered until the entry
changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynamoth.plan.plan import Entry, Location, Mode, Phase, Route, missing
from dynamoth.protocol.envelope import FORWARDED, Envelope


def is_relayed(route: Route) -> bool:
    """Tell whether several dispatchers see each message that is published by a route, and forward it to old ones."""
    return route.assignment.mode is Mode.ALL_PUBLISHERS and len(route.assignment.servers) > 1


@dataclass(frozen=True, slots=True)
class Forwarding:
    """What becomes of messages that are alike.

    ``forwarded`` are the locations that get a copy, ``relayed`` those whose dispatchers get one, and ``relayed_later``
    those whose dispatchers will have got one by then, as a rule. Copies carry ``epoch``. ``stale`` tells that they were
    published where clients are told not to be.
    """

    forwarded: tuple[Location, ...]
    relayed: tuple[Location, ...]
    relayed_later: tuple[Location, ...]
    epoch: int
    stale: bool


_Alike = tuple[int, int, int]
"""Publisher, epoch, and FORWARDED if it is set; of a raw message the dispatcher's own id and -1."""


_NO_FORWARDINGS: dict[_Alike, Forwarding] = {}
_NOTHING: dict[bytes, dict[_Alike, Forwarding]] = {}


class ForwardingTable:
    """The ways from the locations of one server."""

    def __init__(self, server: str, publisher: int, bound: int, names_bytes_max: int) -> None:
        """Begin without any.

        Args:
            server: the id of the server.
            publisher: the id under which the dispatcher numbers raw messages.
            bound: ways that are remembered at most; about 400 bytes each without the names.
            names_bytes_max: bytes of the names of their channels; past either bound all are forgotten.

        """
        self._server = server
        self._publisher = publisher
        self._bound = bound
        self._names_bytes_max = names_bytes_max
        self._count = 0
        #: Bytes of the names of their channels, counted for each way: an upper bound.
        self._names_bytes = 0
        #: By logical and by physical channel.
        self._known: dict[bytes, dict[bytes, dict[_Alike, Forwarding]]] = {}

    def has(self, channel: bytes, physical: bytes) -> bool:
        """Tell whether a way from this location of a channel is known: it is a user's channel then, and not at rest."""
        return physical in self._known.get(channel, _NOTHING)

    def find(self, channel: bytes, physical: bytes, entry: Entry, envelope: Envelope | None) -> Forwarding:
        """Return the way of a message that has arrived here; ``envelope`` None for a raw one."""
        if envelope is None:
            alike = (self._publisher, -1, 0)
        else:
            alike = (envelope.publisher, envelope.epoch, envelope.flags & FORWARDED)
        way = self._known.get(channel, _NOTHING).get(physical, _NO_FORWARDINGS).get(alike)
        if way is None:
            if self._count >= self._bound or self._names_bytes > self._names_bytes_max:
                self.clear()
            way = self._decide(Location(self._server, physical), channel, entry, alike)
            self._known.setdefault(channel, {}).setdefault(physical, {})[alike] = way
            self._count += 1
            self._names_bytes += len(channel) + len(physical)
        return way

    def forget(self, channel: bytes) -> None:
        """Forget the ways of a channel: the plan's entry of it has changed."""
        self._count -= sum(map(len, self._known.pop(channel, _NOTHING).values()))

    def clear(self) -> None:
        """Forget all."""
        self._known.clear()
        self._count = self._names_bytes = 0

    def _decide(self, here: Location, channel: bytes, entry: Entry, alike: _Alike) -> Forwarding:
        """Find the way of messages that arrive ``here``.

        Between old and new locations, messages are forwarded only by the dispatcher of the location where they arrived,
        as only that keeps the order between them and its markers. A message that arrived elsewhere goes to where
        clients are told to be, with an epoch that makes the dispatcher there forward it to the rest.
        """
        publisher, epoch, is_copy = alike
        stale = here not in entry.client_route.locations(channel)
        if is_copy and epoch >= entry.route.epoch:
            return Forwarding((), (), (), entry.route.epoch, stale)
        route = next((route for route in entry.live_routes if here in route.locations(channel)), None)
        if route is None and entry.phase is not Phase.SETTLED:
            targets = missing(channel, (entry.client_route,), {here}, publisher)
            return Forwarding(tuple(targets), (), (), max(entry.route.epoch - 1, 0), stale)
        reached = {here}
        if route is not None and not is_copy and epoch == route.epoch:
            reached.update(route.published_at(publisher, channel))  # under ALL_PUBLISHERS it was sent to all of them
        targets = missing(channel, entry.live_routes, reached, publisher)
        new = entry.route.locations(channel)
        if not is_relayed(entry.route) or here not in new:
            return Forwarding(tuple(targets), (), (), entry.route.epoch, stale)
        forwarded = tuple(target for target in targets if target in new)
        relayed = [target for target in targets if target not in new]
        at_once = tuple(target for target in relayed if self._server == _relays_first(target, new, publisher))
        later = tuple(target for target in relayed if target not in at_once)
        return Forwarding(forwarded, at_once, later, entry.route.epoch, stale)


def _relays_first(target: Location, new: Sequence[Location], publisher: int) -> str:
    """Return the server whose dispatcher relays a publisher's messages to ``target`` at once: its own where it can."""
    servers = [place.server for place in new]
    return target.server if target.server in servers else servers[publisher % len(servers)]
