"""Scripts about operators who add and remove servers, and about balancers that die or are cut off meanwhile.

See ``scenarios`` for the words; ``mutations`` has what must make each of them fail.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from functools import partial

from dynamoth.plan.plan import Phase
from dynamoth.plan.slots import SLOTS, slot_name
from dynamoth_agent.machine import AgentMachine
from dynamoth_balancer.decide.spread import BEGIN_RATIO, END_RATIO
from dynamoth_balancer.install.contention import HEADERS_INTERVAL_S
from dynamoth_balancer.install.leadership import Stage as BalancerStage
from dynamoth_balancer.machine import BalancerMachine
from dynamoth_sim.load.clients import PublisherApp
from dynamoth_sim.scenarios.stage import PATIENCE_S, Scenario, SceneFailed, Stage
from dynamoth_sim.world.process import Process
from dynamoth_sim.world.redis import read_only

PERIOD_S = 0.02
"""Between two rounds of messages."""

STEP_S = 0.0002
"""Less than any message takes: to look what has happened before the next one arrives."""

LEASE_OVER_S = 2.0
"""Two balancers have noticed by then who leads: a lease of 0.9 s, and renewals of 0.3 s."""

DOWN_S = 0.2
"""How long the balancer is down."""

PATTERN = b"*"


def add_under_load(stage: Stage) -> None:
    """Case 100. A server is added under load, while one of the first three takes no writes.

    The balancer leads all the time, as it has the lease of three of four servers. The new server takes channels, and S
    moves there without a gap. New clients that know only the new server find every channel.
    """
    _pause(stage)
    channels = [stage.channel_at(server, name) for server in ("s1", "s2") for name in ("a", "b")]
    stage.subscriber("S", *channels)
    stage.pattern_subscriber("T", PATTERN)
    publisher = stage.publisher("P", *channels)
    stage.cluster.servers["s3"].refuse = read_only
    stage.run(LEASE_OVER_S)
    began_at = stage.world.now
    added = stage.cluster.add_server()
    _order(stage, publisher, "add", added)
    _publish(stage, publisher, 0.5)
    lost = [record for record in stage.records("says", since=began_at) if "lost the lease" in str(record.note)]
    stage.expect(f"the balancer leads all the time: {lost[:1]}", not lost)
    stage.cluster.servers["s3"].refuse = None
    stage.wait_settled(*channels)
    _publish(stage, publisher, stage.cluster.options.balancer.join_s)
    for channel in channels[::2]:
        stage.move(channel, added)
    _find_everything(stage, added, channels)
    stage.expect_gaps(0, channels[0])


def remove_under_load(stage: Stage) -> None:
    """Case 101. A server is drained, removed and stopped under load, while S only waits for two of its channels.

    Nobody misses anything. Whoever reads the plan there before it is stopped learns that it has left, and its agent
    says so. New clients that know one of the servers that are left find every channel.
    """
    idle = [stage.channel_at("s1", name) for name in ("i", "j")]
    busy = [stage.channel_at("s1", "a"), stage.channel_at("s2", "b")]
    stage.subscriber("S", *idle, *busy)
    stage.pattern_subscriber("T", PATTERN)
    publisher = stage.publisher("P", *busy)
    _drain(stage, publisher, "s1")
    _order(stage, publisher, "remove", "s1")
    agent = stage.cluster.agents["s1"].machine
    assert isinstance(agent, AgentMachine)
    stage.expect("the agent of s1 says that its server was removed", agent.not_listed is not None)
    stage.cluster.stop_for_good("s1", orderly=True)
    _publish(stage, publisher, 0.5)
    _find_everything(stage, "s3", [*idle, *busy])
    stage.expect_gaps(0, idle[0])


def dies_while_adding(stage: Stage) -> None:
    """Case 102. The balancer dies three times while it adds a server.

    Once before the server has answered it, once when less than half of the servers store the new list, and once when
    most do. The operator asks again until it is done, and each time it is.
    """
    _pause(stage)
    channel = stage.channel_with_subscriber("s1")
    publisher = stage.publisher("P", channel)
    for stored_at in ((), ("s1",), ("s1", "s2", "s3")):
        added = stage.cluster.add_server()
        request = stage.cluster.change_server("add", added)
        if stored_at:
            _crash_when_stored(stage, stored_at, added, is_listed=True)
        else:
            _soon(stage, f"the balancer tries {added}", partial(_is_connected, stage, added))
            stage.cluster.balancer.crash()
        _publish(stage, publisher, DOWN_S)
        stage.cluster.balancer.start()
        _finish(stage, publisher, "add", added, request)
        stage.wait_settled(channel)
        _publish(stage, publisher, stage.cluster.options.balancer.join_s)
        stage.move(channel, added)
    stage.expect_gaps(0, channel)


def dies_while_removing(stage: Stage) -> None:
    """Case 103. The balancer dies three times while it removes a server.

    Once when less than half of the servers store the new list, once when most do, and once when all do but the one that
    leaves. The operator asks again until it is done, and then stops the server. Nobody misses anything.
    """
    _pause(stage)
    channel = stage.channel_with_subscriber("s1")
    publisher = stage.publisher("P", channel)
    servers = [stage.add_server() for _ in range(3)]
    stage.pattern_subscriber("T", PATTERN)
    stage.run(1.0)
    stays = ("s1", "s2", "s3")
    for removed, stored_at in zip(servers, (("s1",), stays, stays), strict=True):
        _order(stage, publisher, "drain", removed)
        request = stage.cluster.change_server("remove", removed)
        _crash_when_stored(stage, stored_at, removed, is_listed=False)
        _publish(stage, publisher, DOWN_S)
        stage.cluster.balancer.start()
        _finish(stage, publisher, "remove", removed, request)
        stage.cluster.stop_for_good(removed, orderly=True)
        stage.wait_settled(channel)
    stage.expect_gaps(0, channel)


def split_while_adding(stage: Stage) -> None:
    """Case 104. A balancer finds a list with s4 that only s1 and s4 store, and is asked for s5 at once.

    Before its plan is stored anywhere, a split cuts it off from s2 and s3. There another balancer leads, by the first
    list. So the first one must not go by a list of five servers: it has three of them.
    """
    _pause(stage)
    channel = stage.channel_with_subscriber("s2")
    publisher = stage.publisher("P", channel)
    cluster = stage.cluster
    balancer, rival = cluster.balancer, cluster.rival
    added = [cluster.add_server(), cluster.add_server()]
    requests = [cluster.change_server("add", added[0])]
    _crash_when_stored(stage, ("s1",), added[0], is_listed=True)
    balancer.start()
    _soon(stage, "the balancer leads, by four servers", lambda: _leads(balancer) and added[0] in _servers(balancer))
    parted = [
        cluster.network.part([balancer.name, cluster.administrator.name], ["s2", "s3"]),
        cluster.network.part([rival.name], ["s1", *added]),
    ]
    requests.append(cluster.change_server("add", added[1]))
    rival.start()
    stage.wait("the other balancer leads", lambda: _leads(rival))
    both: list[float] = []
    for _ in range(round(LEASE_OVER_S / PERIOD_S)):
        _publish(stage, publisher, PERIOD_S)
        both += [stage.world.now] if _leads(rival) and _leads(balancer) else []
    stage.expect(f"never do both balancers lead: {both[:1]}", not both)
    for heal in parted:
        heal()
    for server, request in zip(added, requests, strict=True):
        _finish(stage, publisher, "add", server, request)
    stage.expect_gaps(0, channel)


def former_list(stage: Stage) -> None:
    """Case 105. A standby has read the list of servers before one is added, and a channel moves there.

    Then the balancer dies. The standby goes by the new list, and the channel stays where it is.
    """
    _pause(stage)
    channel = stage.channel_with_subscriber("s1")
    publisher = stage.publisher("P", channel)
    rival = stage.cluster.rival
    stage.cluster.rival_stands_by = True
    rival.start()
    stage.run(1.0)
    added = stage.add_server()
    stage.run(stage.cluster.options.balancer.join_s)
    stage.move(channel, added)
    stage.expect(f"the standby knows the former list: {_servers(rival)}", added not in _servers(rival))
    epoch = stage.entry(channel).route.epoch
    stage.cluster.balancer.crash()
    stage.wait("the standby leads", lambda: _leads(rival))
    stage.wait_settled(channel)
    stage.expect("the channel has not moved", stage.entry(channel).route.epoch == epoch, channel)
    stage.publish(publisher, channel)
    stage.expect_gaps(0, channel)


def former_leader(stage: Stage) -> None:
    """Case 126. A balancer that stood still for longer than its lease is a standby now. A server is added meanwhile.

    It goes by the new list, and can say how the servers on it are, as an operator may ask.
    """
    _pause(stage)
    channel = stage.channel_with_subscriber("s1")
    publisher = stage.publisher("P", channel)
    former, rival = stage.cluster.balancer, stage.cluster.rival
    stage.cluster.rival_stands_by = True
    rival.start()
    stage.run(0.5)
    former.pause()
    stage.wait("the standby leads", lambda: _leads(rival))
    added = stage.add_server()
    former.resume()
    stage.run(HEADERS_INTERVAL_S + LEASE_OVER_S)
    stage.expect(f"it goes by the new list: {_servers(former)}", added in _servers(former))
    stage.expect("the former leader is a standby", _leads(rival) and not _leads(former))
    stage.expect(f"it can say how {added} is", _can_describe(former, added, stage.world.now))
    stage.publish(publisher, channel)
    stage.expect_gaps(0, channel)


def asked_together(stage: Stage) -> None:
    """Case 133. While the balancer stands still for a moment, a server is to be removed, and the status is asked for.

    The balancer gets both requests in one read. It answers both, and the status is without the server that has left.
    """
    channel = stage.channel_with_subscriber("s2")
    publisher = stage.publisher("P", channel)
    cluster = stage.cluster
    _drain(stage, publisher, "s1")
    cluster.balancer.pause()
    removal, status = cluster.change_server("remove", "s1"), cluster.ask("status", {})
    _publish(stage, publisher, DOWN_S)
    cluster.balancer.resume()
    _until(stage, publisher, "both are answered", lambda: cluster.is_done(removal) and cluster.is_done(status))
    listed = set(cluster.results[status]["servers"])
    stage.expect(f"the status has the servers of the plan: {sorted(listed)}", listed == {"s2", "s3"})
    stage.expect_gaps(0, channel)


def away_while_growing(stage: Stage) -> None:
    """Case 134. A server is added, and its agent stands still when the server has got the first part of its slots.

    When the agent goes on, the server gets the rest of its share.
    """
    channel = stage.channel_with_subscriber("s1")
    stage.move(channel, "s2")
    publisher = stage.publisher("P", channel)
    added = stage.add_server()
    share = SLOTS / len(stage.cluster.present)
    what = f"{added} has got the first of its slots"
    _until(stage, publisher, what, lambda: _slots_settled(stage, added) >= BEGIN_RATIO * share)
    agent = stage.cluster.agents[added]
    agent.pause()
    _publish(stage, publisher, 2 * stage.cluster.options.balancer.agent_stale_s)
    slots = _slots_settled(stage, added)
    stage.expect(f"it has not got its share yet: {slots} slots", slots < END_RATIO * share)
    agent.resume()
    _until(stage, publisher, f"{added} has its share", lambda: _slots_settled(stage, added) >= END_RATIO * share)
    stage.expect_gaps(0, channel)


# What an operator does, while P publishes.


def _publish(stage: Stage, publisher: PublisherApp, duration_s: float) -> None:
    """Publish for so long, on each channel of a publisher."""
    for _ in range(round(duration_s / PERIOD_S)):
        for channel in publisher.channels:
            publisher.publish(channel)
        stage.run(PERIOD_S)


def _until(stage: Stage, publisher: PublisherApp, what: str, condition: Callable[[], bool]) -> None:
    """Publish until a condition holds; if it does not in time, the scenario fails and ends."""
    for _ in range(round(PATIENCE_S / PERIOD_S)):
        if condition():
            return
        _publish(stage, publisher, PERIOD_S)
    stage.wait(what, condition, 0.0)


def _order(stage: Stage, publisher: PublisherApp, action: str, server: str) -> None:
    """Have a server added, drained or removed."""
    _finish(stage, publisher, action, server, stage.cluster.change_server(action, server))


def _finish(stage: Stage, publisher: PublisherApp, action: str, server: str, request: int) -> None:
    """Wait until a request is carried out, and ask again where it was refused, as operators do."""
    cluster, requests = stage.cluster, [request]

    def is_done() -> bool:
        if requests[-1] in cluster.answers and not cluster.is_done(requests[-1]):
            requests.append(cluster.change_server(action, server))
        return cluster.is_done(requests[-1])

    try:
        _until(stage, publisher, f"{action} {server} is carried out", is_done)
    except SceneFailed:
        refusals = {answer for each in requests if (answer := cluster.answers.get(each)) is not None}
        stage.expect(f"{action} {server} is not refused: {refusals}", not refusals)
        raise


def _pause(stage: Stage) -> None:
    """Have the balancer move no slots to new servers: they are many, and nothing here is about them."""
    request = stage.cluster.ask("pause", {})
    stage.wait("the balancer is paused", lambda: stage.cluster.is_done(request))


def _drain(stage: Stage, publisher: PublisherApp, server: str) -> None:
    _order(stage, publisher, "drain", server)
    _until(stage, publisher, f"{server} is empty", lambda: stage.cluster.left_at(server) == 0)


def _find_everything(stage: Stage, server: str, channels: Sequence[bytes]) -> None:
    """Have new clients that know one server only subscribe to all channels, and publish there."""
    stage.cluster.begin_at(server)
    stage.subscriber("N", *channels)
    stage.publisher("M", *channels)


# The balancer.


def _crash_when_stored(stage: Stage, servers: Sequence[str], changed: str, *, is_listed: bool) -> None:
    """Let the balancer die when these servers store the new list, and none of the others that had the old one."""
    cluster = stage.cluster
    others = [server for server in cluster.present if _is_connected(stage, server) and server not in servers]
    with ExitStack() as held:
        for server in others:
            held.enter_context(stage.held("balancer", server, to_server=True))
        what = f"{', '.join(servers)} store the new list"
        _soon(stage, what, lambda: all((changed in _stored_list(stage, each)) is is_listed for each in servers))
        for server in others:
            stage.cut("balancer", server)
        cluster.balancer.crash()


def _soon(stage: Stage, what: str, condition: Callable[[], bool]) -> None:
    """Advance the clock until a condition holds, and not further."""
    if not stage.world.run_until_true(condition, stage.world.now + PATIENCE_S, poll_s=STEP_S):
        stage.wait(what, condition, 0.0)


def _is_connected(stage: Stage, server: str) -> bool:
    return bool(stage.cluster.network.connections("balancer", server))


def _stored_list(stage: Stage, server: str) -> Collection[str]:
    plan = stage.cluster.stored_plan(server)
    assert plan is not None, f"{server} stores a plan"
    return plan.servers.keys()


def _slots_settled(stage: Stage, server: str) -> int:
    """Return how many slots are at a server, and do not move."""
    plan = stage.cluster.newest_plan()
    assert plan is not None, "some server stores a plan"
    entries = [plan.entry(slot_name(slot)) for slot in range(SLOTS)]
    return sum(entry.phase is Phase.SETTLED and server in entry.route.assignment.servers for entry in entries)


def _leads(process: Process) -> bool:
    return isinstance(process.machine, BalancerMachine) and process.machine.stage is BalancerStage.LEADING


def _servers(process: Process) -> list[str]:
    """Return the servers by which a balancer goes."""
    assert isinstance(process.machine, BalancerMachine)
    return [*process.machine.overview.server_figures(0.0)["agent_blind"]]


def _can_describe(process: Process, server: str, now: float) -> bool:
    assert isinstance(process.machine, BalancerMachine)
    try:
        return bool(process.machine.overview.status(now)["servers"][server]["link"] == "up")
    except KeyError:
        return False


SCENARIOS: dict[str, Scenario] = {
    "100-add-under-load": Scenario(add_under_load),
    "101-remove-under-load": Scenario(remove_under_load),
    "102-balancer-dies-adding": Scenario(dies_while_adding),
    "103-balancer-dies-removing": Scenario(dies_while_removing),
    "104-split-while-adding": Scenario(split_while_adding),
    "105-former-list": Scenario(former_list),
    "126-former-leader": Scenario(former_leader),
    "133-asked-together": Scenario(asked_together),
    "134-away-while-growing": Scenario(away_while_growing),
}
