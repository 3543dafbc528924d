"""Changes the list of servers, and which of them are drained, as administrators and provisioners ask.

Theory of operation
-------------------
What was decided is in the plan (``Plan.administration`` and its list of servers), so it survives a restart of the
balancer. One change is under way at a time, and the first of a term begins when the term's own plan is stored at more
than half of the servers. A list counts as soon as it is in the plan, and is done when more than half of the old and of
the new servers store it. So any two lists that balancers may believe in at the same time differ by one server at most.
Then any majority of the one and any majority of the other have a server in common, and only one balancer can have the
lease there.

A server is tried before it is added (:class:`Candidate`), and the lease taken there. One that was removed gets a last
copy of the plan, by which its agent and its clients learn that it has left; :class:`Leaver` watches that they do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dynamoth.errors import RequestRefused
from dynamoth.machine.events import Connect, Disconnect, Send
from dynamoth.machine.lease import Lease
from dynamoth.names import SERVER_ID, SERVER_ID_WORDS, in_quotes
from dynamoth.plan.administration import Administration
from dynamoth.plan.plan import Server
from dynamoth.protocol.plan_wire import TEXT_MAX
from dynamoth_balancer.events import InnerAction
from dynamoth_balancer.install import candidate
from dynamoth_balancer.install.candidate import Candidate
from dynamoth_balancer.install.installer import Installer
from dynamoth_balancer.install.leaver import Leaver
from dynamoth_balancer.install.orders import Order
from dynamoth_balancer.install.quorum import Quorum

ADD, REMOVE, DRAIN, UNDRAIN = "add", "remove", "drain", "undrain"

ADD_TIMEOUT_S = 5.0
"""A server that cannot be used after this time is not added."""

LEAVE_TIMEOUT_S = 5.0
"""A removal is answered after this time even if somebody still listens at the server. Clients with patterns need about
two seconds."""

CREDENTIALS = (
    "the URL of a server has no user and no password, as the plan shows it to every client: leave them out, and set"
    " link.username and link.password of the daemons"
)

_LOST = "the balancer has lost its lease meanwhile: ask again"


@dataclass(slots=True)
class _Addition:
    """A server that is being tried."""

    candidate: Candidate
    order: Order
    provisioned: bool
    #: Whether the lease is being taken there.
    is_leased: bool = False


@dataclass(slots=True)
class _Departure:
    """A server that was removed from the plan."""

    leaver: Leaver
    order: Order
    #: Whether the order is done. The link stays open for a while, as the answer may go that way.
    is_over: bool = False


class Membership:
    """Begins changes of the list of servers, one at a time, and sees them through.

    Args:
        installer: returns the one that is at work, or raises RequestRefused where the balancer does not lead.
        lease: the lease of the balancer.
        quorum: which servers count.
        run_ids: the connected servers of the plan; kept up to date by the owner.

    """

    def __init__(
        self,
        installer: Callable[[], Installer],
        lease: Lease,
        quorum: Quorum,
        run_ids: Mapping[str, str | None],
    ) -> None:
        self._installer = installer
        self._lease = lease
        self._quorum = quorum
        self._run_ids = run_ids
        #: The change that was begun last.
        self._latest: Order | None = None
        self._addition: _Addition | None = None
        #: By id. No server of the plan is among them.
        self._departures: dict[str, _Departure] = {}

    # Changes.

    def add(self, server: Server, now: float, *, provisioned: bool = False) -> tuple[Order, list[InnerAction]]:
        """Add a server, once it has been tried. ``provisioned``: the balancer may free it.

        A server that is listed, or being tried, already changes nothing.

        Raises:
            RequestRefused: id or URL cannot be used, or another change is under way.

        """
        if self._addition is not None and self._addition.candidate.server == server:
            return self._addition.order, []
        installer = self._installer()
        if installer.plan.servers.get(server.id) == server:
            return self._unchanged(installer, ADD, server.id, "it is in the plan already", now), []
        self._check_new(server, installer)
        self._check_turn(installer)
        order = self._latest = Order(_result(ADD, server.id, url=server.url), installer.term, now)
        self._addition = _Addition(Candidate(server), order, provisioned)
        return order, [Connect(server.id, server.url)]

    @staticmethod
    def _check_new(server: Server, installer: Installer) -> None:
        if not SERVER_ID.fullmatch(server.id):
            raise RequestRefused(f"the id of a server is {SERVER_ID_WORDS}: give it another one")
        if not server.url or len(server.url) > TEXT_MAX or not server.url.isprintable():
            raise RequestRefused(f"the URL of a server has 1 to {TEXT_MAX} characters that can be printed")
        if "@" in server.url:
            raise RequestRefused(CREDENTIALS)
        plan = installer.plan
        if server.id in plan.servers:
            raise RequestRefused(
                f"server {server.id} is in the plan with the URL {plan.servers[server.id].url}: give the new server"
                " another id"
            )
        if plan.has_left(server.id):
            raise RequestRefused(
                f"the id {server.id} was used before, and somebody may still know that server: take another id"
            )
        if (same := next((id_ for id_, each in plan.servers.items() if each.url == server.url), None)) is not None:
            raise RequestRefused(f"{server.url} is the server {same}: a server has one id")

    def remove(self, server: str, now: float) -> tuple[Order, list[InnerAction]]:
        """Remove a server that is drained, or was provisioned, and has nothing left.

        Raises:
            RequestRefused: there is no such server, it is not empty, it is the last one, or another change is under
                way.

        """
        installer = self._installer()
        plan = installer.plan
        if plan.has_left(server):
            return self._unchanged(installer, REMOVE, server, "it was removed already", now), []
        self._check_known(server, installer)
        others = [each for each in plan.servers.values() if each.id != server]
        if not others:
            raise RequestRefused(f"server {server} cannot be removed, as it is the only one: add another one first")
        if server not in installer.draining and server not in plan.administration.provisioned:
            raise RequestRefused(
                f"server {server} cannot be removed, as it is not being drained: type 'dynamoth server drain {server}',"
                " and wait until 'dynamoth server list' shows nothing left there"
            )
        if (left := installer.left_at(server)) is not None:
            raise RequestRefused(f"server {server} cannot be removed yet: {left}")
        if {each.id for each in others} <= installer.draining:
            raise RequestRefused(
                f"server {server} cannot be removed, as all others are being drained: end that for one of them"
                " ('dynamoth server undrain'), or add a server"
            )
        if not self._lease.would_hold(self._quorum.voters(each.id for each in others), now):
            raise RequestRefused(
                f"server {server} cannot be removed, as more than half of the other servers must be reachable:"
                " 'dynamoth status' says which are down"
            )
        self._check_turn(installer)
        administration = plan.administration.without_server(server)
        return self._put(installer, REMOVE, server, administration, others, now)

    def drain(self, server: str, now: float) -> tuple[Order, list[InnerAction]]:
        """Have a server give up all its channels and slots.

        Raises:
            RequestRefused: there is no such server, no other one would be left, channels are pinned there, or another
                change is under way.

        """
        installer = self._installer()
        plan = installer.plan
        self._check_known(server, installer)
        if server in installer.draining:
            return self._unchanged(installer, DRAIN, server, "it is being drained already", now), []
        if plan.servers.keys() <= installer.draining | {server}:
            others = "all others are being drained" if len(plan.servers) > 1 else "it is the only one"
            raise RequestRefused(
                f"server {server} cannot be drained, as {others}, and its channels would have nowhere to go: add a"
                " server first ('dynamoth server add'), or end the draining of another one"
            )
        if pinned := sorted(channel for channel, pin in plan.administration.pins.items() if server in pin.servers):
            more = f" and {len(pinned) - 1} more" if len(pinned) > 1 else ""
            raise RequestRefused(
                f"server {server} cannot be drained, as channels are pinned there ({in_quotes(pinned[0])}{more}): unpin"
                " them, or pin them elsewhere"
            )
        self._check_turn(installer)
        administration = replace(plan.administration, draining=installer.draining | {server})
        return self._put(installer, DRAIN, server, administration, None, now)

    def undrain(self, server: str, now: float) -> tuple[Order, list[InnerAction]]:
        """Let a server keep its channels and slots, and get others. Raises RequestRefused as :meth:`drain`."""
        installer = self._installer()
        self._check_known(server, installer)
        if server not in installer.draining:
            return self._unchanged(installer, UNDRAIN, server, "it is not being drained", now), []
        self._check_turn(installer)
        administration = replace(installer.plan.administration, draining=installer.draining - {server})
        return self._put(installer, UNDRAIN, server, administration, None, now)

    @staticmethod
    def _check_known(server: str, installer: Installer) -> None:
        if server not in installer.plan.servers:
            raise RequestRefused(f"server {server!r:.80} is not known; known are {', '.join(installer.plan.servers)}")

    def _check_turn(self, installer: Installer) -> None:
        """Refuse a change while another one is under way, or may be that of an earlier balancer."""
        latest = self._latest
        if latest is not None and not latest.is_over(installer):
            what = f"{latest.result['action']} {latest.result['server']}"
            raise RequestRefused(
                f"another change of servers ({what}) is not stored at more than half of the servers yet: try again when"
                " it is"
            )
        if not installer.may_change_servers:
            raise RequestRefused(
                "the plan of this balancer is not stored at more than half of the servers yet: try again in a moment"
            )

    @staticmethod
    def _unchanged(installer: Installer, action: str, server: str, note: str, now: float) -> Order:
        version = installer.plan.administration.version
        return Order(_result(action, server, note=note), installer.term, now, version)

    def _put(
        self,
        installer: Installer,
        action: str,
        server: str,
        administration: Administration,
        servers: Iterable[Server] | None,
        now: float,
    ) -> tuple[Order, list[InnerAction]]:
        order = Order(_result(action, server), installer.term, now)
        self._latest = order
        return order, self._store(installer, order, administration, servers, now)

    @staticmethod
    def _store(
        installer: Installer,
        order: Order,
        administration: Administration,
        servers: Iterable[Server] | None,
        now: float,
    ) -> list[InnerAction]:
        action, server = order.result["action"], order.result["server"]
        provisioned = administration.provisioned | installer.plan.administration.provisioned
        is_fleet = action in (ADD, REMOVE) and server in provisioned - installer.draining
        reason = f"{'the fleet' if is_fleet else 'an administrator'}: {action} {server}"
        actions = installer.administer(administration, servers, reason, now)
        order.version, order.since = installer.plan.version, now
        return actions

    # What becomes of them. The owner passes on what concerns servers that are not in the plan.

    def knows(self, server: str) -> bool:
        """Return whether a link that is no server's of the plan is one of ours."""
        return server in self._departures or self._is_tried(server)

    def _is_tried(self, server: str) -> bool:
        return self._addition is not None and self._addition.candidate.server.id == server

    def link_up(self, server: str, run_id: str | None) -> list[Send]:
        """Handle a new connection to a server that comes or goes."""
        if server in self._departures:
            self._departures[server].leaver.link_up()
            return []
        assert self._addition is not None, "the owner has asked whether it is known"
        return self._addition.candidate.link_up(run_id)

    def link_down(self, server: str, reason: str) -> None:
        """Handle a lost connection."""
        if server in self._departures:
            self._departures[server].leaver.link_down()
        elif self._addition is not None:
            self._addition.candidate.link_down(reason)
            if self._addition.is_leased:
                self._lease.link_down(server)

    def on_reply(self, server: str, tag: tuple[str, ...], value: Any, now: float) -> list[InnerAction]:
        """Handle the reply to a question of ours."""
        if server in self._departures:
            self._departures[server].leaver.on_reply(value)
        elif self._addition is not None and tag[0] == candidate.TAG:
            fits = self._addition.candidate.on_reply(tag[1], value, self._installer().plan, dict(self._run_ids))
            return self.tick(now) if fits else self._give_up(self._addition.candidate.fault)
        return []

    def tick(self, now: float) -> list[InnerAction]:
        """Add a server that can be added, and let those go that have left."""
        actions: list[InnerAction] = [] if self._addition is None else self._try(self._addition, now)
        for server, departure in list(self._departures.items()):
            if departure.is_over:
                del self._departures[server]
                self._installer().link_down(server)
                actions.append(Disconnect(server))
            else:
                actions += self._watch(departure, now)
        return actions

    def _try(self, addition: _Addition, now: float) -> list[InnerAction]:
        tried, installer = addition.candidate, self._installer()
        server = tried.server
        sends: list[InnerAction] = []
        if tried.is_known and not addition.is_leased:
            addition.is_leased = True
            self._lease.add(server.id)
            sends = [*self._lease.link_up(server.id, now)]
        voters = self._quorum.voters([*installer.plan.servers, server.id])
        if tried.is_known and self._lease.holds_at(server.id, now) and self._lease.would_hold(voters, now):
            return [*sends, *self._join(addition, installer, now)]
        if now - addition.order.since < ADD_TIMEOUT_S:
            return sends
        why = tried.fault or f"{server.id} does not give the balancer its lease: {self._lease.why_not(server.id)}"
        return [*sends, *self._give_up(why)]

    def _join(self, addition: _Addition, installer: Installer, now: float) -> list[InnerAction]:
        """Put a server that can be used into the plan."""
        server, administration = addition.candidate.server, installer.plan.administration
        if addition.provisioned:
            administration = replace(administration, provisioned=administration.provisioned | {server.id})
        try:
            servers = [*installer.plan.servers.values(), server]
            return self._store(installer, addition.order, administration, servers, now)
        except RequestRefused as error:
            return self._give_up(str(error))

    def _give_up(self, reason: str) -> list[InnerAction]:
        """Do not add the server that was tried."""
        addition, self._addition = self._addition, None
        assert addition is not None, "only one that is tried is given up"
        addition.order.problem = f"{reason}; nothing has changed"
        id_ = addition.candidate.server.id
        return [*self._lease.drop(id_), Disconnect(id_)]

    def joined(self, server: str) -> Candidate | None:
        """Hand a server that the plan has now, with its link, over to the owner; None where it was not tried."""
        if self._addition is None or not self._is_tried(server):
            return None
        addition, self._addition = self._addition, None
        return addition.candidate

    def left(self, server: str, *, is_up: bool) -> list[Disconnect]:
        """Take the link to a server over that the plan does not have any more."""
        order = self._latest
        if order is None or (order.result["action"], order.result["server"]) != (REMOVE, server):
            return [Disconnect(server)]
        order.waits = "listeners to leave"
        self._departures[server] = _Departure(Leaver(server, is_up=is_up), order)
        return []

    def _watch(self, departure: _Departure, now: float) -> list[InnerAction]:
        """Note when a removed server has its last copy, and nobody listens there any more."""
        leaver, order, installer = departure.leaver, departure.order, self._installer()
        has_copy = not installer.is_leaving(leaver.server)
        if leaver.is_up and not (has_copy and leaver.listened == 0) and now - order.since < LEAVE_TIMEOUT_S:
            return [*leaver.tick(now)] if has_copy else []
        departure.is_over, order.waits = True, ""
        if not leaver.is_up:
            note = "it cannot be reached: clients that know no other server do not learn that it was removed"
        elif not has_copy:
            note = "it does not store the plan, so its clients do not learn that it was removed: stop it now"
        elif leaver.listened is None:
            note = f"it does not say who listens there ({leaver.fault or 'no answer'}): see 'PUBSUB CHANNELS' there"
        elif leaver.listened:
            note = f"{leaver.listened} channels and patterns still have listeners there: see 'PUBSUB CHANNELS' there"
        else:
            note = ""
        order.result = {**order.result, "note": note}
        return []

    def end_term(self) -> list[InnerAction]:
        """Give up what is under way, as the balancer does not lead any more."""
        actions: list[InnerAction] = [] if self._addition is None else self._give_up(_LOST)
        for departure in self._departures.values():
            departure.order.waits = ""
        actions += [Disconnect(server) for server in self._departures]
        self._departures.clear()
        return actions

    def check(self, servers: Iterable[str]) -> None:
        """Assert that no server comes or goes that the plan lists."""
        assert self._departures.keys().isdisjoint(servers), "a server that has left is not in the plan"
        assert not any(map(self._is_tried, servers)), "a server of the plan is not tried"


def _result(action: str, server: str, *, note: str = "", **more: Any) -> dict[str, Any]:
    return {"action": action, "server": server, "note": note, **more}
