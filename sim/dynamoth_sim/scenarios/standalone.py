"""Scripts about a standalone server that becomes one of a cluster while it is used.

See ``scenarios`` for the words; ``mutations`` has what must make each of them fail.
"""

from __future__ import annotations

from contextlib import ExitStack

from dynamoth.names import BALANCER_CHANNEL, PLAN_KEY
from dynamoth.plan.plan import Phase, Plan, Server, single
from dynamoth_balancer.install.leadership import Stage as BalancerStage
from dynamoth_balancer.machine import BalancerMachine
from dynamoth_client.machines.standalone import FRESH_S
from dynamoth_sim.scenarios.stage import Scenario, Stage
from dynamoth_sim.world.process import Process

PUBLISH_INTERVAL_S = 0.02

LOOKED_S = 15.0
"""A subscriber gives up a route within this after its agent has reported that the plan has lost it: the lease of the
balancer that was killed, and ``distrust_s``."""

LEASE_LOST_S = 5.0
"""Longer than a balancer waits for the lease of another one that is connected and does nothing."""

RESTORED_S = 0.3
"""How soon a plan that was deleted is written again, as real balancers do it: what they wait for is not scaled here."""


def grows(stage: Stage) -> None:
    """Case 50. Clients use s1 alone; agents and a balancer come, for three servers, while they publish and listen.

    Channels whose home is now another server move there, and no message is lost or comes twice.
    """
    channels = _begin_alone(stage)
    subscribers = [stage.subscriber(f"S{number}", *channels) for number in range(3)]
    publishers = [stage.publisher(f"P{number}") for number in range(2)]
    stage.pattern_subscriber("T", b"away*")
    clients = stage.cluster.clients
    stage.expect("all of them are alone", all(client.local_plan and client.local_plan.is_alone for client in clients))
    for number in range(400):
        if number == 50:
            stage.cluster.start()
        for publisher in publishers:
            publisher.publish(channels[number % len(channels)])
        stage.run(PUBLISH_INTERVAL_S)
    stage.expect("nobody is alone", not any(client.local_plan and client.local_plan.is_alone for client in clients))
    for channel in channels:
        home = _homes(stage).ring.home(channel)
        listening = {id_ for id_, server in stage.cluster.servers.items() if server.subscribers(channel)}
        stage.expect(f"they listen at {home} only, not at {listening}", listening == {home}, channel)
    stage.expect("where nothing can be missing there is no gap", channels[0] not in _gaps(stage), channels[0])
    stage.expect("the pattern gets a gap event", b"away*" in _gaps(stage))
    newcomer = stage.publisher("Q")
    for channel in channels:
        stage.publish(newcomer, channel)
    stage.run(0.5)
    for app in subscribers:
        heard = [record.data for record in stage.records("DELIVERS", who=app.name) if record.data is not None]
        stage.expect("they hear newcomers", sum(data.startswith(b"Q:") for data in heard) == len(channels))


def overtaken_by_newcomers(stage: Stage) -> None:
    """Case 51. Somebody who came with the plan publishes before those follow it who were alone: that is a gap."""
    channels = _begin_alone(stage)
    stage.subscriber("S", *channels)
    with stage.held("S", "s1", to_server=False):
        stage.open()
        newcomer = stage.publisher("Q")
        for channel in channels:
            stage.publish(newcomer, channel)
        stage.cluster.audit.calm()
    stage.run(2.0)
    gaps = _gaps(stage)
    stage.expect("there are gaps where something may be missing, and only there", gaps == set(channels[1:]))


def moved_before_it_is_seen(stage: Stage) -> None:
    """Case 69. A plan appears, and a channel moves before a subscriber that was alone has seen the plan.

    No marker comes to the connection that it had alone, so it leaves that one without, with a gap. Else it would wait
    for the end of the move, and the move for it.
    """
    channel, *_ = _begin_alone(stage)
    stage.subscriber("S", channel)
    publisher = stage.publisher("P")
    with stage.held("S", "s1", to_server=False):
        stage.open()
        stage.publish(publisher, channel)
        stage.move(channel, "s3", Phase.ACTIVE)
        stage.publish(publisher, channel)
    stage.wait_settled(channel)
    stage.publish(publisher, channel)
    stage.expect("there is a gap where something may be missing", channel in _gaps(stage))


def empty_member(stage: Stage) -> None:
    """Case 52. A server of a cluster restarts without its data, and a client begins there at once: it is not alone."""
    cluster = stage.cluster
    server = cluster.servers["s1"]
    for process in (cluster.agents["s1"], cluster.balancer):
        process.pause(FRESH_S / 2)  # they would connect again at once
    server.stop()
    stage.run(0.2)
    server.start()
    stage.expect("the server stores no plan", not server.hash(PLAN_KEY))
    cluster.begin_at("s1")
    client = stage.client("C", 1)
    assert client.publisher is not None
    stage.publish(client.publisher, b"c")
    stage.expect("it follows the plan", client.local_plan is not None and not client.local_plan.is_alone)


def flushed(stage: Stage) -> None:
    """Case 53. Somebody deletes all keys of s1; a client that begins there has the plan within ``RESTORED_S``."""
    cluster = stage.cluster
    cluster.begin_at("s1")
    for number in range(5):
        stage.run(0.37)
        cluster.servers["s1"].flush()
        client = cluster.add_client(f"C{number}", 1)
        client.start()
        stage.run(RESTORED_S)
        stage.expect("the client has read the plan", client.ready)
        stage.expect("it follows the plan", client.local_plan is not None and not client.local_plan.is_alone)
        if client.publisher is not None:
            stage.publish(client.publisher, b"c")


def flushed_without_balancer(stage: Stage) -> None:
    """Case 54. All keys of all servers are deleted while no balancer is at work; the next one begins a new plan.

    A channel that had been moved is at home again. Those who listen at its old place get a gap and come home.
    """
    cluster = stage.cluster
    channel = stage.channel_at("s1")
    subscriber = stage.subscriber("S", channel)
    stage.move(channel, "s2")
    stage.run(1.0)
    cluster.balancer.crash()
    stage.flush_all()
    cluster.balancer.start()
    stage.run(LOOKED_S)
    stage.expect("the subscriber gets a gap event", channel in _gaps(stage), channel)
    stage.publisher("Q", channel)
    stage.run(0.5)
    heard = [record.data for record in stage.records("DELIVERS", who=subscriber.name) if record.data is not None]
    stage.expect("it hears newcomers", any(data.startswith(b"Q:") for data in heard), channel)


def plan_lost_and_larger(stage: Stage) -> None:
    """Case 55. All servers have lost the plan, and the balancer that begins a new one has one server more.

    Channels that the plan never named have other homes then. S and P, who know the old ring, find them there: P behind
    its next message, S as its agent tells that the plan does not continue the one that it knew.
    """
    cluster = stage.cluster
    added = Server("s4", "redis://s4:6379")
    ring = Plan.initial([*cluster.server_list, added], cluster.options.balancer.virtual_nodes).ring
    channel = next(name for name in (b"c%d" % number for number in range(1000)) if ring.home(name) == added.id)
    subscriber = stage.subscriber("S", channel)
    publisher = stage.publisher("P", channel)
    stage.move(stage.channel_at("s1", "moved"), "s2")
    cluster.balancer.crash()
    stage.flush_all()
    cluster.configured.append(cluster.add_server())
    cluster.balancer.start()
    stage.run(LOOKED_S)
    stage.expect("S listens at its new home", bool(cluster.servers[added.id].subscribers(channel)), channel)
    heard = len(stage.records("DELIVERS", who=subscriber.name))
    stage.publish(publisher, channel)
    stage.publisher("Q", channel)
    stage.run(0.5)
    stage.expect("S hears both", len(stage.records("DELIVERS", who=subscriber.name)) == heard + 2, channel)


def flushed_and_older_plan(stage: Stage) -> None:
    """Case 66. The balancer that leads dies, and all keys of all servers are deleted; the next one has an older plan.

    Agents hold versions that it does not know. It believes them, and goes on above.
    """
    channel = _led_by_rival(stage)
    stage.cluster.rival.crash()
    stage.flush_all()
    stage.run(LOOKED_S)
    stage.expect("the subscriber gets a gap event", channel in _gaps(stage), channel)
    stage.move(channel, "s3")
    stage.publisher("P", channel)


def plan_lost_and_moved(stage: Stage) -> None:
    """Case 67. All servers have lost the plan, and in the new one a channel moves before agents tell of the old one.

    S follows an epoch of the old plan, higher than that of the move: it looks at what is stored, and follows.
    """
    channel = stage.channel_with_subscriber("s1")
    for server in ("s2", "s1"):
        stage.move(channel, server)
    _move_before_agents_are_heard(stage, [channel], "s2")
    stage.publisher("P", channel)


def plan_lost_and_moved_unseen(stage: Stage) -> None:
    """Case 70. All servers have lost the plan; in the new one a channel moves while the agent of its old place hangs.

    For that agent the channel has a newer entry than before. S, who listens there, gets a gap and follows all the same.
    """
    cluster = stage.cluster
    channel = stage.channel_with_subscriber("s1")
    stage.move(channel, "s2")
    cluster.balancer.crash()
    stage.flush_all()
    cluster.agents["s2"].pause(2.0)
    cluster.balancer.start()
    stage.run(0.5)  # a plan is stored, and the other agents report: else the balancer refuses to move the channel
    stage.move(channel, "s3")
    stage.run(LOOKED_S)
    stage.expect("S gets a gap event", channel in _gaps(stage), channel)
    stage.publisher("P", channel)


def plan_lost_and_version_reached(stage: Stage) -> None:
    """Case 71. All servers have lost the plan, and the new one reaches the version that the agents had in the old one.

    They see that a change of that version is of another plan, and read it. S, at an old place, gets a gap and follows.
    """
    channel = stage.channel_with_subscriber("s1")
    others = [stage.channel_at("s1", f"other{number}") for number in range(2)]
    stage.move(channel, "s2")
    _move_before_agents_are_heard(stage, [*others, channel], "s3")
    stage.expect("S gets a gap event", channel in _gaps(stage), channel)
    stage.publisher("P", channel)


def _move_before_agents_are_heard(stage: Stage, channels: list[bytes], server: str) -> None:
    """Delete all keys while a new balancer begins, and have it move channels before agents name their versions."""
    cluster = stage.cluster
    cluster.balancer.crash()
    cluster.balancer.start()
    stage.run(0.5)  # it hears that there are agents
    with ExitStack() as stack:
        for model in cluster.servers.values():
            model.flush()
            stack.enter_context(stage.losing(model.id, lambda name, _: name == BALANCER_CHANNEL))
        stage.wait("a plan is stored", lambda: all(cluster.stored_plan(id_) for id_ in cluster.servers))
        for channel in channels:
            cluster.change(channel, single(server))
        stage.wait("the moves begin", lambda: stage.entry(channels[-1]).route.assignment == single(server))
    stage.wait_settled(channels[-1])
    stage.run(LOOKED_S)


def _led_by_rival(stage: Stage) -> bytes:
    """The balancer leads, then waits while another one leads and moves a channel to s2; return the channel."""
    cluster = stage.cluster
    channel = stage.channel_at("s1")
    stage.move(channel, "s3")
    stage.subscriber("S", channel)
    cluster.rival.start()
    cluster.balancer.pause(LEASE_LOST_S)
    for _ in range(3):
        stage.run(1.0)
        if not cluster.rival.alive:  # it took the other one for a balancer at work, and ended
            cluster.rival.start()
    stage.wait("the rival leads", lambda: _leads(cluster.rival))
    stage.run(1.0)
    stage.move(channel, "s2")
    return channel


def flushed_beside_rival(stage: Stage) -> None:
    """Case 56. All keys of all servers are deleted, again and again, while a second balancer waits for the lease.

    The balancer at work stays at work. A client that subscribes meanwhile gets everything, as the plan is never one
    that has lost its entries.
    """
    cluster = stage.cluster
    channel = stage.channel_at("s1")
    publisher = stage.publisher("P")
    stage.subscriber("S", channel)
    stage.move(channel, "s2")
    for number in range(40):
        if not cluster.rival.alive:
            cluster.rival.start()
        stage.run(0.2 + 0.037 * (number % 20))
        stage.flush_all()
        stage.run(0.1)
        stage.subscriber(f"N{number}", channel)
        for _ in range(5):
            stage.publish(publisher, channel)
            stage.run(0.02)
        leaders = [one for one in (cluster.balancer, cluster.rival) if _leads(one)]
        stage.expect("the first balancer leads, and no other", leaders == [cluster.balancer])
    stage.expect("nobody has a gap", channel not in _gaps(stage), channel)


def _leads(process: Process) -> bool:
    return isinstance(process.machine, BalancerMachine) and process.machine.stage is BalancerStage.LEADING


def _gaps(stage: Stage) -> set[bytes | None]:
    """Return the channels, and patterns, of which gaps were reported."""
    return {record.channel for record in stage.world.trace if "GAP of" in f"{record.kind} {record.note}"}


def _homes(stage: Stage) -> Plan:
    return Plan.initial(stage.cluster.server_list, stage.cluster.options.balancer.virtual_nodes)


def _begin_alone(stage: Stage) -> list[bytes]:
    """Start clients that know s1 only, without daemons; return channels whose homes will be s1, s2 and s3."""
    stage.run(FRESH_S + 1.0)
    stage.cluster.begin_at("s1")
    ring = _homes(stage).ring
    names = [b"away%d" % number for number in range(1000)]
    return [next(name for name in names if ring.home(name) == id_) for id_ in stage.cluster.servers]


SCENARIOS: dict[str, Scenario] = {
    "50-alone-grows": Scenario(grows, opened=False),
    "51-alone-overtaken": Scenario(overtaken_by_newcomers, opened=False, losses_allowed=True),
    "52-empty-member": Scenario(empty_member),
    "53-flushed": Scenario(flushed),
    "54-flushed-without-balancer": Scenario(flushed_without_balancer, losses_allowed=True),
    "55-plan-lost-and-larger": Scenario(plan_lost_and_larger, losses_allowed=True),
    "56-flushed-beside-rival": Scenario(flushed_beside_rival),
    "66-flushed-and-older-plan": Scenario(flushed_and_older_plan, losses_allowed=True),
    "67-plan-lost-and-moved": Scenario(plan_lost_and_moved, losses_allowed=True),
    "70-plan-lost-and-moved-unseen": Scenario(plan_lost_and_moved_unseen, losses_allowed=True),
    "71-plan-lost-and-version-reached": Scenario(plan_lost_and_version_reached, losses_allowed=True),
    "69-alone-and-moved": Scenario(moved_before_it_is_seen, opened=False, losses_allowed=True),
}
