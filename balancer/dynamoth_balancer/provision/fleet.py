"""Decides how many servers the cluster has: adds one before users notice a shortage, and frees one after low load.

Theory of operation
-------------------
The sources are Dynamoth, sections III-B.3 (a server is rented when load cannot be brought down) and III-B.4 (the least
loaded server is emptied and freed at low load), and section V-E (growing is quick, shrinking is slow). Only servers
that a provisioner has started are ever freed. Each goes through these stages::

    STARTING   the provisioner has been asked for it
    JOINING    it runs; it is being added to the plan, and has not reported its load
    ACTIVE     it takes part
    DRAINING   it gives up its channels and slots, and leaves the plan; ACTIVE again when the load rises
    GONE       it takes no part in anything; the provisioner is asked to free it

The fleet is level-triggered: :meth:`Fleet.look` compares the plan with the stages and returns the requests that bring
them together. So a request that is lost, refused or repeated does no harm. An id is in all requests about one server,
and a provisioner answers the same id with the same server. So asking again after a silence starts no second server.

A provisioner that fails, lies or does not answer is asked again, after a time that doubles with each failure. A server
that was announced but does not report its load (a lie) is given up. Nothing else waits: the servers that there are keep
serving, and the goals keep balancing them.

An agent may die later, while its Redis server lives. Then the provisioner is asked to start that server again, which
starts what is missing of it. A dead Redis server is left to the failover, which empties it; then it is freed.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from dynamoth_balancer.provision.options import FleetOptions

ID_PREFIX = "auto-"
"""Ids of servers that the fleet has started begin with this."""

FREED_AT_ONCE_MAX = 16
"""Most servers that are being freed at a time: a list of a provisioner may have many that nobody knows."""

CHANGE_RETRY_S = 1.0
"""A change of the plan's servers that has had no effect is asked for again after this time."""

UNHEARD_S = 10.0
"""A server of the plan that is not measured counts as one that takes part for this time: it, or the balancer, may have
just begun."""

AGENT_GONE_S = 2.0
"""A server whose agent is gone is started again after this time: whoever supervises the agent may be quicker."""

AGENT_GONE = "its agent is gone"

PROVISIONER = "provisioner"
"""The subject of problems that concern no server of the plan."""


class Life(enum.Enum):
    """The stage of a server; the docstring of the module explains each."""

    STARTING = "starting"
    JOINING = "joining"
    ACTIVE = "active"
    DRAINING = "draining"
    GONE = "gone"


TAKES_PART = (Life.ACTIVE, Life.DRAINING)
"""In these stages a server serves channels, and needs its agent."""


@dataclass(frozen=True, slots=True)
class Member:
    """A server of the plan."""

    #: Part of its capacity that it uses; None while it is not measured or is not heard.
    load_ratio: float | None
    #: Where it is, by the plan.
    url: str = ""
    #: Whether it says itself that nobody listens as its agent. A server that does not answer says nothing.
    agent_gone: bool = False
    #: Outgoing bytes/s; more than 0.
    capacity: float = 1.0
    #: Whether a provisioner has started it, by the plan.
    provisioned: bool = False
    #: Whether it is being emptied at low load, by the plan.
    releasing: bool = False
    #: Whether an administrator drains it. It is theirs, then.
    drained: bool = False
    #: Whether channels must stay there: pins or compatibility rules name it.
    pinned: bool = False
    #: Whether no channel, slot, transition, subscriber or pattern subscription needs it.
    unused: bool = False


@dataclass(frozen=True, slots=True)
class FleetView:
    """The cluster at one moment."""

    members: Mapping[str, Member]
    #: The servers that have left the plan, and at which somebody may still listen.
    leaving: Collection[str] = ()
    #: Whether a server is overloaded, and only another server can relieve it.
    short: bool = False
    #: Grows with each change of the plan; it makes new ids unique.
    version: int = 0


@dataclass(frozen=True, slots=True)
class StartServer:
    """Action: ask the provisioner for a server with this id. An answer is an ``on_...`` of the fleet."""

    id: str
    #: Why one that takes part is started again; empty for a new one.
    reason: str = ""


@dataclass(frozen=True, slots=True)
class AddServer:
    """Action: add a server to the plan."""

    id: str
    url: str


@dataclass(frozen=True, slots=True)
class RemoveServer:
    """Action: remove a server from the plan: it is unused, or it has never taken part."""

    id: str


@dataclass(frozen=True, slots=True)
class FreeServer:
    """Action: ask the provisioner to stop the server with this id; one that it does not know is free."""

    id: str


FleetAction = StartServer | AddServer | RemoveServer | FreeServer


@dataclass(slots=True)
class _Agent:
    """The agent of a server that takes part, and the requests to start it again."""

    #: Since when it is gone, and since when it is heard; None while it is not.
    gone_since: float | None = None
    heard_since: float | None = None
    #: How often the provisioner has been asked since it was last heard for long.
    requests: int = 0
    #: Whether the provisioner has not answered yet.
    is_asked: bool = False
    #: When the provisioner must have answered, or the agent be there; None while neither is waited for.
    expires_at: float | None = None
    #: When the next request may be made.
    retry_at: float = -math.inf
    #: Why it cannot be started; empty when nothing went wrong.
    problem: str = ""

    def follow(self, member: Member | None, now: float, steady_s: float) -> None:
        """Follow what is seen of it; ``member`` is None for a server that takes part no more.

        An agent that dies again soon is started more and more rarely, so requests are forgotten after ``steady_s``.
        """
        is_gone = member is not None and member.agent_gone
        is_heard = member is not None and member.load_ratio is not None
        self.gone_since = (now if self.gone_since is None else self.gone_since) if is_gone else None
        self.heard_since = (now if self.heard_since is None else self.heard_since) if is_heard else None
        if not is_gone:
            self.problem = ""
            self.expires_at = self.expires_at if self.is_asked else None
        if self.heard_since is not None and now - self.heard_since >= steady_s and not self.is_asked:
            self.requests = 0

    def answer(self, expires_at: float | None) -> None:
        """Note that the provisioner has answered. The agent must be there by then; None: it is not waited for."""
        self.is_asked, self.expires_at = False, expires_at


@dataclass(slots=True)
class _Server:
    """A server that a provisioner has been asked for."""

    life: Life
    #: Since when it is in this stage.
    since: float
    #: Empty while it is not known.
    url: str = ""
    #: When the request under way counts as failed; None while there is none.
    expires_at: float | None = None
    #: How often the provisioner has failed to free it.
    failures: int = 0
    #: When the next request may be made.
    retry_at: float = -math.inf
    #: Whether the provisioner has been asked for it.
    asked: bool = False
    #: Why it cannot be freed; empty when nothing went wrong.
    problem: str = ""
    agent: _Agent = field(default_factory=_Agent)


@dataclass(slots=True)
class Fleet:
    """The servers of a cluster, and those that are coming and going."""

    options: FleetOptions
    #: What the provisioner did, and how often it failed.
    counters: Counter[str] = field(default_factory=Counter[str])
    #: The time that servers have run, of all together: those of the plan, and those that come and go.
    server_seconds: float = 0.0
    _servers: dict[str, _Server] = field(default_factory=dict[str, _Server])
    #: Since when servers of the plan are not measured.
    _unheard_since: dict[str, float] = field(default_factory=dict[str, float])
    _looked_at: float | None = None
    #: Whether the plan says which server is being released: another balancer may have changed that.
    _adopts: bool = True
    #: Since when the load is high, and since when it is low; None while it is not.
    _high_since: float | None = None
    _low_since: float | None = None
    #: Failures to start a server since one has last become active, why the latest failed, and when to try again.
    _start_failures: int = 0
    _start_problem: str = ""
    _start_at: float = -math.inf

    # What others may read.

    @property
    def lives(self) -> Mapping[str, Life]:
        """The stage of each server that a provisioner has been asked for and that is not freed yet."""
        return {id_: server.life for id_, server in self._servers.items()}

    @property
    def closed(self) -> frozenset[str]:
        """The servers that may get no channels: they are being emptied, or have been given up."""
        return frozenset(self._in(Life.DRAINING, Life.GONE))

    @property
    def releasing(self) -> str | None:
        """The server that is to be emptied; None when there is none."""
        return next(self._in(Life.DRAINING), None)

    def life_s(self, id_: str, now: float) -> float:
        """Return for how long a server has been in its stage."""
        return now - self._servers[id_].since

    def url(self, id_: str) -> str:
        """Return the URL of a server; empty while it is not known."""
        return self._servers[id_].url

    def problems(self) -> Mapping[str, str]:
        """Return what went wrong, by server or ``PROVISIONER``, in words for people."""
        start = {PROVISIONER: self._start_problem} if self._start_problem else {}
        problems = {id_: server.problem or server.agent.problem for id_, server in self._servers.items()}
        return start | {id_: problem for id_, problem in problems.items() if problem}

    @property
    def started_again(self) -> frozenset[str]:
        """The servers that the provisioner has been asked to start again, and whose agents are not there yet."""
        return frozenset(id_ for id_, server in self._servers.items() if server.agent.expires_at is not None)

    def check(self) -> None:
        """Assert the invariants."""
        assert len(list(self._in(Life.DRAINING))) <= 1, "more than one server is released at a time"
        for id_, server in self._servers.items():
            assert server.url or server.life is not Life.JOINING, f"{id_} joins without a URL"
            waits = server.life in (Life.STARTING, Life.GONE)
            assert server.expires_at is None or waits, f"{id_} waits for the provisioner, and is {server.life.value}"
            agent = server.agent
            assert agent.expires_at is not None or not agent.is_asked, f"{id_} waits for an agent without end"
            assert agent.gone_since is None or server.life in TAKES_PART, (
                f"{id_} is {server.life.value}, needs no agent"
            )

    def begin_term(self) -> None:
        """Forget for how long the load has been high or low, what servers cost, and which one is being released.

        Another balancer was at work: the plan says what it has begun.
        """
        self._looked_at = self._high_since = self._low_since = None
        for server in self._servers.values():
            server.agent.gone_since = None
        self._adopts = True

    # Answers of the provisioner.

    def on_started(self, id_: str, url: str, now: float) -> None:
        """Note that a server runs. One that nobody waits for is freed."""
        server = self._servers.get(id_)
        if server is None:
            self._servers[id_] = _Server(Life.GONE, now, url)
        elif server.life is Life.STARTING:
            self.counters["servers_started"] += 1
            self._enter(server, Life.JOINING, now)
            server.url = url
        elif server.agent.is_asked and url != server.url:
            self._fail_agent(server, f"the provisioner has {id_} at {url}, and the plan has it at {server.url}", now)
        elif server.agent.is_asked:
            server.agent.answer(now + self.options.join_timeout_s if server.life in TAKES_PART else None)

    def on_start_failed(self, id_: str, reason: str, now: float) -> None:
        """Note that a server cannot be started. It is tried again later."""
        server = self._servers.get(id_)
        if server is None:
            return
        if server.life is Life.STARTING:
            server.expires_at = None
            self._fail_start(f"{id_} cannot be started: {reason}", now)
        elif server.agent.is_asked:
            self._fail_agent(server, reason, now)

    def on_freed(self, id_: str) -> None:
        """Note that a server has been stopped, or that the provisioner does not know it."""
        server = self._servers.get(id_)
        if server is not None and server.life is Life.GONE:
            self.counters["servers_freed"] += 1
            del self._servers[id_]

    def on_free_failed(self, id_: str, reason: str, now: float) -> None:
        """Note that a server cannot be stopped. It is tried again later, without end, as it costs money."""
        server = self._servers.get(id_)
        if server is not None and server.life is Life.GONE:
            self._fail_free(server, f"it cannot be freed: {reason}", now)

    def on_refused(self, id_: str, reason: str, now: float) -> None:
        """Note that the plan does not take a server that the provisioner has announced. It is given up."""
        server = self._servers.get(id_)
        if server is not None and server.life is Life.JOINING:
            self._give_up(server, f"{id_} at {server.url} cannot be added: {reason}", now)

    def on_delayed(self, id_: str, reason: str) -> None:
        """Note why the plan does not take a server now. It is asked again."""
        server = self._servers.get(id_)
        if server is not None and server.life is Life.JOINING:
            server.problem = reason

    def on_running(self, ids: Iterable[str], view: FleetView, now: float) -> None:
        """Note which servers the provisioner runs. Those that neither the plan nor the fleet knows are freed.

        A balancer that has died may have asked for them.
        """
        for id_ in ids:
            if id_.startswith(ID_PREFIX) and id_ not in view.members and id_ not in self._servers:
                self._servers[id_] = _Server(Life.GONE, now)

    # Decisions.

    def look(self, view: FleetView, now: float, *, acts: bool = True) -> list[FleetAction]:
        """Compare the plan with the stages, and return the requests to make now.

        Args:
            view: the cluster.
            now: the time, which never decreases.
            acts: whether anything may be begun; False while the balancer is paused or does not lead.

        """
        self._count(view, now)
        self._follow(view, now)
        if not acts:
            self._high_since = self._low_since = None
            return []
        self._expire(view, now)
        self._grow(view, now)
        self._release(view, now)
        return [*self._requests(view, now), *self._start_again(view, now)]

    def _count(self, view: FleetView, now: float) -> None:
        """Add up server-seconds."""
        running = view.members.keys() | self._servers.keys()
        if self._looked_at is not None:
            self.server_seconds += (now - self._looked_at) * len(running)
        self._looked_at = now

    def _follow(self, view: FleetView, now: float) -> None:
        """Follow what has become of the plan."""
        unheard = [id_ for id_, member in view.members.items() if member.load_ratio is None]
        self._unheard_since = {id_: self._unheard_since.get(id_, now) for id_ in unheard}
        for id_, member in view.members.items():
            server = self._servers.get(id_)
            if server is None:
                if member.provisioned:  # a balancer before this one has added it
                    self._servers[id_] = _Server(_adopted(member), now, member.url, asked=True)
            elif self._adopts and server.life in TAKES_PART:
                if server.life is not _adopted(member):
                    self._enter(server, _adopted(member), now)
            elif server.life is Life.JOINING and member.load_ratio is not None:
                self._enter(server, Life.ACTIVE, now)
                self._start_failures, self._start_problem, self._start_at = 0, "", -math.inf
            elif server.life is Life.DRAINING and (member.drained or member.pinned):
                self._enter(server, Life.ACTIVE, now)  # an administrator has decided otherwise
        self._adopts = False
        for id_, server in self._servers.items():
            if server.life in TAKES_PART and id_ not in view.members:
                self._enter(server, Life.GONE, now)
            served = view.members[id_] if server.life in TAKES_PART else None
            server.agent.follow(served, now, self.options.retry_s_max)

    def _expire(self, view: FleetView, now: float) -> None:
        """Give up waiting for answers, and servers that do not report."""
        no_answer = f"the provisioner has not answered for {self.options.answer_timeout_s:g} s"
        patience_s = self.options.join_timeout_s
        for id_, server in self._servers.items():
            if server.agent.expires_at is not None and now >= server.agent.expires_at:
                silent = f"the provisioner has started it, but it does not report after {patience_s:g} s"
                self._fail_agent(server, no_answer if server.agent.is_asked else silent, now)
            if server.expires_at is not None and now >= server.expires_at:
                if server.life is Life.STARTING:
                    self.on_start_failed(id_, no_answer, now)
                else:
                    self.on_free_failed(id_, no_answer, now)
            elif server.life is Life.JOINING and now - server.since >= patience_s:
                missing = "its agent does not report" if id_ in view.members else "it is not in the plan"
                why = f" ({server.problem})" if server.problem else ""
                text = f"{id_} was started at {server.url}, but {missing} after {patience_s:g} s{why}"
                self._give_up(server, text, now)
            elif server.life is Life.ACTIVE and self._is_lost(id_, view, now):
                self._enter(server, Life.GONE, now)

    def _is_lost(self, id_: str, view: FleetView, now: float) -> bool:
        """Return whether a server is dead, and its channels and slots are elsewhere."""
        member, since = view.members[id_], self._unheard_since.get(id_, now)
        return member.unused and not member.drained and now - since >= self.options.join_timeout_s

    def _give_up(self, server: _Server, reason: str, now: float) -> None:
        """Free a server that has not become part of the cluster."""
        self._enter(server, Life.GONE, now)
        self._fail_start(reason, now)

    def _fail_start(self, reason: str, now: float) -> None:
        self.counters["provisioner_failures"] += 1
        self._start_problem = reason
        self._start_at = now + self._backoff_s(self._start_failures)
        self._start_failures += 1

    def _fail_free(self, server: _Server, reason: str, now: float) -> None:
        self.counters["provisioner_failures"] += 1
        server.problem, server.expires_at = reason, None
        server.retry_at = now + self._backoff_s(server.failures)
        server.failures += 1

    def _fail_agent(self, server: _Server, reason: str, now: float) -> None:
        """Note that an agent cannot be started. Nobody minds if it is there by now, or if its server is given up."""
        agent = server.agent
        agent.answer(None)
        if agent.gone_since is not None:
            self.counters["provisioner_failures"] += 1
            agent.problem = f"{AGENT_GONE}, and cannot be started again: {reason}"
            agent.retry_at = now + self._backoff_s(agent.requests - 1)

    def _backoff_s(self, failures: int) -> float:
        return min(self.options.retry_s * 2.0 ** min(failures, 60), self.options.retry_s_max)

    def _enter(self, server: _Server, life: Life, now: float) -> None:
        server.life, server.since = life, now
        server.failures, server.retry_at, server.problem, server.expires_at = 0, -math.inf, "", None
        if life not in TAKES_PART:
            server.agent.gone_since, server.agent.problem = None, ""

    # Growing.

    def _grow(self, view: FleetView, now: float) -> None:
        """Ask for more servers: at once for the minimum, after ``grow_delay_s`` for load."""
        serving = self._serving(view)
        releasing = self.releasing
        if releasing is not None and self._is_high(view, serving):
            self.counters["releases_abandoned"] += 1
            self._enter(self._servers[releasing], Life.ACTIVE, now)
            serving = self._serving(view)
        missing = self._missing(view, serving, now)
        coming = list(self._in(Life.STARTING, Life.JOINING))
        if missing <= 0:
            self._call_off(now)
            return
        present = len(self._present(view, now) | set(coming))
        for _ in range(min(missing - len(coming), self.options.servers_max - present)):
            self._servers[self._new_id(view)] = _Server(Life.STARTING, now)

    def _missing(self, view: FleetView, serving: Collection[str], now: float) -> int:
        """Return how many servers are needed besides those that take part; may be negative."""
        high = self._is_high(view, serving)
        self._high_since = (now if self._high_since is None else self._high_since) if high else None
        joining = set(self._in(Life.JOINING))
        missing = self.options.servers_min - len(self._present(view, now) - joining - self.closed)
        if self._high_since is None or now - self._high_since < self.options.grow_delay_s:
            return missing
        capacity = sum(view.members[id_].capacity for id_ in serving)
        needed = _load(view) / self.options.grow_ratio - capacity
        return max(missing, 1, math.ceil(needed * len(serving) / capacity - ROUNDING))

    def _is_high(self, view: FleetView, serving: Collection[str]) -> bool:
        """Return whether the load is too high for these servers."""
        capacity = sum(view.members[id_].capacity for id_ in serving)
        return bool(serving) and (view.short or _load(view) > self.options.grow_ratio * capacity)

    def _serving(self, view: FleetView) -> list[str]:
        """Return the servers that are measured and may get channels."""
        closed = self.closed
        return [
            id_
            for id_, member in view.members.items()
            if member.load_ratio is not None and not member.drained and id_ not in closed
        ]

    def _present(self, view: FleetView, now: float) -> set[str]:
        """Return the servers of the plan that take part, or may only not have begun to report."""
        since = self._unheard_since
        return {id_ for id_, each in view.members.items() if not each.drained and now - since.get(id_, now) < UNHEARD_S}

    def _call_off(self, now: float) -> None:
        """Ask no more for servers that nobody needs now. A failed request may have started one, so it is freed."""
        for id_ in list(self._in(Life.STARTING)):
            server = self._servers[id_]
            if server.expires_at is None and server.asked:
                self._enter(server, Life.GONE, now)
            elif server.expires_at is None:
                del self._servers[id_]
        if now >= self._start_at + self.options.retry_s_max:  # what went wrong is shown for a while
            self._start_failures, self._start_problem = 0, ""

    def _new_id(self, view: FleetView) -> str:
        """Return an id that no server has had: a server that has been in the plan has changed its version."""
        ids = (f"{ID_PREFIX}{view.version}-{number}" for number in itertools.count(1))
        return next(id_ for id_ in ids if id_ not in self._servers and id_ not in view.members)

    # Shrinking.

    def _release(self, view: FleetView, now: float) -> None:
        """Begin to empty a server after low load."""
        candidate = None if self.releasing else self._candidate(view)
        if candidate is None or not self._can_spare(view, candidate, now):
            self._low_since = None
            return
        if self._low_since is None:
            self._low_since = now
        if now - self._low_since >= self.options.release_delay_s:
            self._enter(self._servers[candidate], Life.DRAINING, now)
            self._low_since = None

    def _candidate(self, view: FleetView) -> str | None:
        """Return the least loaded server that may be released; of several with the same load, the newest."""
        found = [
            ((member.load_ratio or 0.0) * member.capacity, -self._servers[id_].since, id_)
            for id_, member in view.members.items()
            if member.load_ratio is not None and not (member.drained or member.pinned) and self._is_in(id_, Life.ACTIVE)
        ]
        return min(found)[2] if found else None

    def _can_spare(self, view: FleetView, candidate: str, now: float) -> bool:
        """Return whether the others suffice, and would have little load with that of the candidate."""
        if view.short or next(self._in(Life.STARTING, Life.JOINING), None) is not None:
            return False
        others = [id_ for id_ in self._serving(view) if id_ != candidate]
        capacity = sum(view.members[id_].capacity for id_ in others)
        return len(others) >= self.options.servers_min and _load(view) <= self.options.release_ratio * capacity

    # Requests.

    def _requests(self, view: FleetView, now: float) -> Iterator[FleetAction]:
        freeing = sum(self._servers[id_].expires_at is not None for id_ in self._in(Life.GONE))
        for id_, server in self._servers.items():
            if server.expires_at is not None or now < server.retry_at:
                continue
            match server.life:
                case Life.STARTING if now >= self._start_at:
                    server.expires_at, server.asked = now + self.options.answer_timeout_s, True
                    yield StartServer(id_)
                case Life.JOINING if id_ not in view.members:
                    server.retry_at = now + CHANGE_RETRY_S
                    yield AddServer(id_, server.url)
                case Life.DRAINING if view.members[id_].unused:
                    server.retry_at = now + CHANGE_RETRY_S
                    yield RemoveServer(id_)
                case Life.GONE if id_ in view.members:
                    server.retry_at = now + CHANGE_RETRY_S
                    yield RemoveServer(id_)
                case Life.GONE if server.agent.is_asked:
                    pass  # what is being started would run on
                case Life.GONE if id_ not in view.leaving and freeing < FREED_AT_ONCE_MAX:
                    freeing += 1
                    server.expires_at = now + self.options.answer_timeout_s
                    yield FreeServer(id_)
                case _:
                    pass

    def _start_again(self, view: FleetView, now: float) -> Iterator[FleetAction]:
        """Ask for the servers again that need the agent which they have lost."""
        for id_, server in self._servers.items():
            agent = server.agent
            if agent.gone_since is None or now - agent.gone_since < AGENT_GONE_S:
                continue
            member = view.members[id_]
            if agent.expires_at is None and now >= agent.retry_at and not (member.drained and member.unused):
                self.counters["agents_started_again"] += 1
                agent.is_asked, agent.expires_at = True, now + self.options.answer_timeout_s
                agent.retry_at = now + self._backoff_s(agent.requests)
                agent.requests += 1
                yield StartServer(id_, AGENT_GONE)

    def _in(self, *lives: Life) -> Iterator[str]:
        return (id_ for id_, server in self._servers.items() if server.life in lives)

    def _is_in(self, id_: str, life: Life) -> bool:
        return id_ in self._servers and self._servers[id_].life is life


def _adopted(member: Member) -> Life:
    """Return the stage in which another balancer has left a server of the plan."""
    return Life.DRAINING if member.releasing else Life.ACTIVE


ROUNDING = 1e-9
"""Hides rounding errors where loads are compared with capacities: a server more is a lot for so little."""


def _load(view: FleetView) -> float:
    """Return the load of all measured servers together, in the unit of capacities."""
    return sum((member.load_ratio or 0.0) * member.capacity for member in view.members.values())
