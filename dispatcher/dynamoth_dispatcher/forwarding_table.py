"""Decides where stray messages go: those published in the wrong place, or on a channel in transition.

The decision depends on the plan's entry of the channel, on the location, and on the publisher and epoch in the
envelope, not on the single message. So it is made once for all messages that are alike, and kept until the entry
changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynamoth.plan.plan import Entry, Location, Mode, Phase, Route, missing
from dynamoth.protocol.envelope import FORWARDED, Envelope


def is_relayed(route: Route) -> bool:
    """Return whether several dispatchers see each message published by a route, and forward it to old locations."""
    return route.assignment.mode is Mode.ALL_PUBLISHERS and len(route.assignment.servers) > 1


@dataclass(frozen=True, slots=True)
class Forwarding:
    """The decision for messages that are alike.

    ``forwarded`` are the locations that get a copy; ``relayed`` those whose dispatchers get one at once;
    ``relayed_later`` those whose dispatchers usually have it by then from another dispatcher. Copies carry ``epoch``.
    ``stale``: the messages were published where clients should not publish.
    """

    forwarded: tuple[Location, ...]
    relayed: tuple[Location, ...]
    relayed_later: tuple[Location, ...]
    epoch: int
    stale: bool


_Alike = tuple[int, int, int]
"""Publisher, epoch, and FORWARDED if it is set; for a raw message the dispatcher's own id and -1."""


_NO_FORWARDINGS: dict[_Alike, Forwarding] = {}
_NOTHING: dict[bytes, dict[_Alike, Forwarding]] = {}


class ForwardingTable:
    """The decisions for the locations of one server.

    Args:
        server: the id of the server.
        publisher: the id under which the dispatcher numbers raw messages.
        bound: most entries; about 400 bytes each without the names.
        names_bytes_max: bytes of the names of their channels; past either bound the table is cleared.

    """

    def __init__(self, server: str, publisher: int, bound: int, names_bytes_max: int) -> None:
        self._server = server
        self._publisher = publisher
        self._bound = bound
        self._names_bytes_max = names_bytes_max
        self._count = 0
        #: Bytes of the names of their channels, counted for each entry: an upper bound.
        self._names_bytes = 0
        #: By logical and by physical channel.
        self._known: dict[bytes, dict[bytes, dict[_Alike, Forwarding]]] = {}

    def has(self, channel: bytes, physical: bytes) -> bool:
        """Return whether there is an entry for this location of a channel: a user's channel, and not at rest."""
        return physical in self._known.get(channel, _NOTHING)

    def find(self, channel: bytes, physical: bytes, entry: Entry, envelope: Envelope | None) -> Forwarding:
        """Return the decision for a message that has arrived here; ``envelope`` None for a raw one."""
        if envelope is None:
            alike = (self._publisher, -1, 0)
        else:
            alike = (envelope.publisher, envelope.epoch, envelope.flags & FORWARDED)
        forwarding = self._known.get(channel, _NOTHING).get(physical, _NO_FORWARDINGS).get(alike)
        if forwarding is None:
            if self._count >= self._bound or self._names_bytes > self._names_bytes_max:
                self.clear()
            forwarding = self._decide(Location(self._server, physical), channel, entry, alike)
            self._known.setdefault(channel, {}).setdefault(physical, {})[alike] = forwarding
            self._count += 1
            self._names_bytes += len(channel) + len(physical)
        return forwarding

    def forget(self, channel: bytes) -> None:
        """Remove the entries of a channel, as the plan's entry of it has changed."""
        self._count -= sum(map(len, self._known.pop(channel, _NOTHING).values()))

    def clear(self) -> None:
        """Remove all entries."""
        self._known.clear()
        self._count = self._names_bytes = 0

    def __len__(self) -> int:
        """Return the number of entries."""
        return self._count

    def check(self) -> None:
        """Assert that the entries are counted."""
        count = sum(len(alike) for places in self._known.values() for alike in places.values())
        assert self._count == count, f"{count} entries are counted as {self._count}"

    def _decide(self, here: Location, channel: bytes, entry: Entry, alike: _Alike) -> Forwarding:
        """Decide where messages go that arrive ``here``.

        Between old and new locations, only the dispatcher of the location where a message arrived forwards it: only
        that keeps the order between messages and markers. A message that arrived elsewhere goes to where clients should
        publish, with an epoch that makes the dispatcher there forward it to the rest.
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
    """Return the server that relays a publisher's messages to ``target`` at once: the target's own if it can."""
    servers = [place.server for place in new]
    return target.server if target.server in servers else servers[publisher % len(servers)]
