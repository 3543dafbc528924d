"""Scripts about replicated channels: the cases of the published protocol that concern them, and every pair of modes.

See ``scenarios`` for the words; ``mutations`` has what must make each of them fail.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import product

from dynamoth.plan.plan import Assignment, Mode, Phase, single
from dynamoth_sim.load.clients import PublisherApp, SubscriberApp
from dynamoth_sim.scenarios.stage import LITTLE_BYTES_PER_S, Scenario, Stage

SETTLE_S_MAX = 2.0
"""Longest time in which a change settles that nothing holds up."""

RESUME_S_MAX = 2.0
"""Longest time until delivery goes on without a replica that is away."""

_SETS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "overlapping": (("s1", "s2"), ("s2", "s3")),
    "disjoint": (("s1", "s2"), ("s3", "s4")),
    "grown": (("s1", "s2"), ("s1", "s2", "s3")),
    "shrunk": (("s1", "s2", "s3"), ("s1", "s2")),
}
"""Old and new servers. SINGLE takes the first of them: the same server, where the other mode is replicated."""


def pairs() -> Iterator[tuple[str, Assignment, Assignment]]:
    """Go through all changes between two assignments, each with a name."""
    for (old, new), (sets, (old_servers, new_servers)) in product(product(Mode, Mode), _SETS.items()):
        before, after = _assignment(old, old_servers), _assignment(new, new_servers)
        if before != after:
            yield f"25-{_word(old)}-to-{_word(new)}-{sets}", before, after


def _assignment(mode: Mode, servers: tuple[str, ...]) -> Assignment:
    return single(servers[0]) if mode is Mode.SINGLE else Assignment(mode, servers)


def _word(mode: Mode) -> str:
    return mode.name.lower().replace("_", "-")


def changes(before: Assignment, after: Assignment, stage: Stage) -> None:
    """Case 25. Change between two assignments. Subscribers join late, and what is forwarded for them comes later still.

    N publishes where a channel will be, before anybody listens there; P, who has not heard of the change, where it was.
    Every subscriber stays where it was until the markers of all its new places have come round to it.
    """
    servers = list(stage.cluster.servers)
    others = [stage.channel_at(server, "other") for server in servers]  # so that everybody is connected everywhere
    channel = stage.channel_at("s1")
    subscribers = [stage.subscriber(f"S{number}", channel, *others) for number in range(4)]
    stale, fresh = stage.publisher("P"), stage.publisher("N")
    for other in others:
        stage.publish(fresh, other)
    if before != single("s1"):
        stage.change(channel, before)
    for publisher in (stale, fresh, stale, fresh):
        stage.publish(publisher, channel)
        stage.run(0.05)
    with ExitStack() as later:
        with ExitStack() as joining:
            for subscriber, server in product(subscribers, servers):
                joining.enter_context(stage.held(subscriber.name, server, to_server=True))
            stage.cluster.change(channel, after)
            stage.wait("the change is active", partial(stage.holds, channel, after, Phase.ACTIVE))
            stage.publish(fresh, channel)  # by the old route: N gets a route notice, and dispatchers connect
            stage.run(0.2)
            for agent, server in product(servers, servers):
                if stage.pipes(f"agent-{agent}", server, to_server=True):
                    later.enter_context(stage.held(f"agent-{agent}", server, to_server=True))
            stage.publish(fresh, channel)
            stage.publish(stale, channel)
            stage.run(0.1)
        stage.wait("all have joined", lambda: all(_listens_as(stage, channel, after, app) for app in subscribers))
        for publisher in (fresh, stale):
            stage.publish(publisher, channel)
        stage.run(0.3)
    stage.wait("it settles", partial(stage.holds, channel, after, Phase.SETTLED), SETTLE_S_MAX)


def _listens_as(stage: Stage, channel: bytes, assignment: Assignment, app: SubscriberApp) -> bool:
    """Tell whether a subscriber listens where it should by an assignment, at other places besides or not."""
    route = stage.entry(channel).route
    listens = [
        app.name in stage.cluster.servers[place.server].subscribers(place.physical)
        for place in route.locations(channel)
    ]
    return any(listens) if assignment.mode is Mode.ALL_PUBLISHERS else all(listens)


def never_empty(stage: Stage) -> None:
    """Case 5. SINGLE {H0} becomes ALL_SUBSCRIBERS {H0, H1}: H0 never empties, so the transition never ends.

    Each epoch has a name of its own at a server, and NUMSUB answers for that.
    """
    channel = stage.channel_with_subscriber("s1")
    publisher = stage.publisher("P", channel)
    both = Assignment(Mode.ALL_SUBSCRIBERS, ("s1", "s2"))
    with stage.held("S", "s1", to_server=False):
        stage.cluster.change(channel, both)
        stage.run(1.0)
        settled = stage.holds(channel, both, Phase.SETTLED)
        stage.expect("it does not settle before S has followed", not settled, channel)
    stage.wait("it settles", partial(stage.holds, channel, both, Phase.SETTLED), SETTLE_S_MAX)
    stage.publish(publisher, channel, times=3)


def some_server_has_it(stage: Stage) -> None:
    """Case 6. SINGLE becomes ALL_PUBLISHERS; a stale P sends to one server only, and S listens at another.

    A message is forwarded to every replica that lacks it.
    """
    channel = stage.channel_at("s1")
    publisher = stage.trusting_publisher("P", channel)
    replicas = Assignment(Mode.ALL_PUBLISHERS, ("s1", "s2", "s3"))
    with stage.held("P", "s1", to_server=False):  # P does not hear of it
        stage.change(channel, replicas)
        for number in range(6):
            stage.subscriber(f"S{number}", channel)
        for _ in range(3):
            publisher.publish(channel)
        stage.run(0.2)


def no_flapping(mode: Mode, stage: Stage) -> None:
    """Case 7. Under ALL_SUBSCRIBERS the sum of subscribers is n times the truth, under ALL_PUBLISHERS the publications.

    So the ratio that made the balancer replicate the channel now makes it fold it back, and so on. It must look at what
    is true of the channel, which does not depend on its mode.
    """
    channel = stage.channel_at("s1", "hot")
    few, many = (2, 6) if mode is Mode.ALL_SUBSCRIBERS else (10, 2)
    for number in range(few):
        stage.subscriber(f"S{number}", channel)
    publishers = [stage.publisher(f"P{number}") for number in range(many)]
    messages_per_s = 45 if mode is Mode.ALL_SUBSCRIBERS else 30
    for number in range(6 * messages_per_s):
        publishers[number % many].publish(channel, size_bytes=48_000 // few // messages_per_s)
        stage.run(1 / messages_per_s)
    routes = {
        entry.route
        for record in stage.records("moves")
        for name, entry in record.note.entries.items()
        if name == channel
    }
    found = [route.assignment for route in sorted(routes, key=lambda route: route.epoch)]
    replicas = [len(assignment.servers) for assignment in found]
    only_grows = {assignment.mode for assignment in found} == {mode} and replicas == sorted(replicas)
    stage.expect(f"the channel is spread, perhaps once more, and that is it, not {found}", only_grows, channel)


def every_replica_forwards(stage: Stage) -> None:
    """Case 24. Under ALL_PUBLISHERS all dispatchers see a message, but at different times.

    N's message reaches one replica before S has joined it, and the other one long after S has left H0. If only the
    dispatcher of the other one forwarded it to H0, the markers that S has waited for would not tell of it. There are
    eight such S, so that some are at each replica whatever their ids are.
    """
    channel = stage.channel_at("s1")
    others = [stage.channel_at(server, "other") for server in ("s2", "s3")]
    subscribers = [stage.subscriber(f"S{number}", channel, *others) for number in range(8)]
    publisher = stage.publisher("N")
    for name in (channel, *others):
        stage.publish(publisher, name)
    replicas = Assignment(Mode.ALL_PUBLISHERS, ("s2", "s3"))
    with ExitStack() as later:
        with ExitStack() as joining:
            for subscriber, server in product(subscribers, ("s2", "s3")):
                joining.enter_context(stage.held(subscriber.name, server, to_server=True))
            stage.cluster.change(channel, replicas)
            stage.wait("the change is active", partial(stage.holds, channel, replicas, Phase.ACTIVE))
            stage.publish(publisher, channel)  # by the old route: N gets a route notice, and dispatchers connect
            stage.run(0.2)
            later.enter_context(stage.held("N", "s2", to_server=True))
            publisher.publish(channel)
            stage.run(0.1)
        stage.wait("nobody listens at s1", lambda: not stage.cluster.servers["s1"].subscribers(channel))
        stage.run(0.3)


def replica_away(mode: Mode, stage: Stage) -> None:
    """Case 23. A replica dies for some time: nobody waits for it, and subscribers report what may be missing.

    Publishers and subscribers of ALL_SUBSCRIBERS do without it, subscribers of ALL_PUBLISHERS go to another one.
    """
    channel = stage.channel_at("s1")
    replicas = Assignment(mode, ("s2", "s3"))
    stage.change(channel, replicas)
    subscribers = _some_at(stage, channel, "s3")
    publishers = [stage.publisher(f"P{number}") for number in range(4)]
    newcomers = [stage.client(f"N{number}", 1).subscribers[0] for number in range(4)]
    _publish_all(stage, publishers, channel)
    dead = stage.cluster.servers["s3"]
    dead.stop()
    stage.run(RESUME_S_MAX)
    delivered = stage.cluster.audit.totals.delivered
    _publish_all(stage, publishers, channel)
    stage.run(0.2)
    arrived = stage.cluster.audit.totals.delivered - delivered
    count = 4 * len(subscribers)
    stage.expect(f"all get everything without s3, not {arrived} of {count} messages", arrived == count, channel)
    for newcomer in newcomers:
        newcomer.subscribe(channel)
    stage.run(RESUME_S_MAX)
    confirmed = [stage.cluster.audit.is_open(newcomer.name, channel) for newcomer in newcomers]
    stage.expect(f"newcomers are confirmed without s3: {confirmed}", all(confirmed), channel)
    dead.start()
    stage.run(RESUME_S_MAX)
    stage.expect("subscribers report that something may be missing", stage.cluster.audit.totals.gaps > 0, channel)
    stage.cluster.audit.calm()
    _publish_all(stage, publishers, channel)
    stage.expect("all are still subscribed", all(stage.cluster.audit.is_open(s.name, channel) for s in subscribers))


def dies_cut_off(noticed: bool, stage: Stage) -> None:
    """Case 26. A publisher that cannot reach one of its replicas gets a confirmation, and dies.

    ALL_PUBLISHERS waits for no replica that is away; so a dispatcher must know what that may lack. If the publisher had
    noticed that its connection was lost, the dispatcher forwards its messages; if not, subscribers report a gap.
    """
    channel = stage.channel_at("s1")
    stage.change(channel, Assignment(Mode.ALL_PUBLISHERS, ("s2", "s3")))
    _some_at(stage, channel, "s3")
    survivor = stage.publisher("Q")
    client = stage.client("P", 0)
    publisher = client.publisher
    assert publisher is not None
    for app in (survivor, publisher, survivor, publisher):  # by the home route; the dispatcher there tells them
        stage.publish(app, channel)
        stage.run(0.1)
    network, process = stage.cluster.network, publisher.process.name
    [connection] = network.connections(process, "s3")
    if noticed:
        network.break_connection(connection, notice_s_max=0.0)
        stage.wait("P knows", lambda: not network.connections(process, "s3"))
    heal = network.part([process], ["s3"])
    stage.publish(publisher, channel, times=3)
    if not noticed:
        network.break_connection(connection, lose_all=True)
    client.crash()
    heal()
    if not noticed:
        stage.wait("subscribers at s3 report a gap", lambda: stage.cluster.audit.totals.gaps > 0)
        stage.cluster.audit.calm()


def _some_at(stage: Stage, channel: bytes, server: str) -> list[SubscriberApp]:
    """Start subscribers to a replicated channel: four, or more until one of them listens at a server."""
    subscribers: list[SubscriberApp] = []
    while len(subscribers) < 4 or not any(
        "S" in "".join(stage.cluster.servers[server].subscribers(location.physical))
        for location in stage.entry(channel).route.locations(channel)
    ):
        subscribers.append(stage.subscriber(f"S{len(subscribers)}", channel))
    return subscribers


def _publish_all(stage: Stage, publishers: Iterable[PublisherApp], channel: bytes) -> None:
    for publisher in publishers:
        stage.publish(publisher, channel)


_OF_MODE = {"all-subscribers": Mode.ALL_SUBSCRIBERS, "all-publishers": Mode.ALL_PUBLISHERS}

SCENARIOS: dict[str, Scenario] = {
    "05-never-empty": Scenario(never_empty, servers=4),
    "06-some-server-has-it": Scenario(some_server_has_it, servers=4),
    **{
        f"07-{name}-no-flapping": Scenario(
            partial(no_flapping, mode), outgoing_bytes_per_s_max=LITTLE_BYTES_PER_S, replicas_max=3
        )
        for name, mode in _OF_MODE.items()
    },
    **{
        f"23-{name}-replica-away": Scenario(partial(replica_away, mode), losses_allowed=True, server_dead_s=1000.0)
        for name, mode in _OF_MODE.items()
    },
    "24-every-replica-forwards": Scenario(every_replica_forwards, servers=4),
    "26-dies-cut-off": Scenario(partial(dies_cut_off, True), servers=4),
    "26-dies-cut-off-unnoticed": Scenario(partial(dies_cut_off, False), losses_allowed=True),
    **{name: Scenario(partial(changes, before, after), servers=4) for name, before, after in pairs()},
}
