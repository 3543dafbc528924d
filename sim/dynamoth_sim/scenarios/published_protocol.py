"""Scenarios for the faults of the protocol that the Dynamoth paper describes: each provokes one, and expects no harm.

Cases 1 to 22 are numbered as they were found in that protocol; those about replicated channels are in
``scenarios/replication.py``. In all scenarios H0 is the old server of a channel and H1 the new one, S a subscriber, P a
publisher, D0 the dispatcher of H0. Each scenario must fail under its mutation (``mutations``), which switches off the
remedy.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

from dynamoth.errors import MalformedMessage
from dynamoth.names import BALANCER_CHANNEL, INBOX_PREFIX, is_user_channel, logical_channel
from dynamoth.plan.plan import Assignment, Mode, Phase, single
from dynamoth.protocol.control import Marker, RouteNotice
from dynamoth.protocol.reports import Report, unpack_report
from dynamoth_balancer.machine import BalancerMachine
from dynamoth_sim.scenarios.stage import LITTLE_BYTES_PER_S, Scenario, Stage, control_in

SETTLE_S_MAX = 2.0
"""Longest time in which a move settles that nothing holds up."""


def moved_twice(stage: Stage) -> None:
    """Case 1. A quiet channel moves twice, and S has not heard of the first move.

    A channel in transition is not moved again until S has followed.
    """
    channel = stage.channel_at("s1")
    subscriber = stage.subscriber("S", channel)
    with stage.held("S", "s1", to_server=False):
        stage.move(channel, "s2", Phase.ACTIVE)
        stage.cluster.change(channel, single("s3"))
        stage.run(0.5)
    stage.wait_settled(channel)
    if not stage.is_at(channel, "s3", Phase.ACTIVE):
        stage.move(channel, "s3")
    publisher = stage.publisher("P")
    stage.publish(publisher, channel, times=3)
    stage.expect("S still listens", stage.cluster.audit.is_open(subscriber.name, channel))


def forwarding_loop(stage: Stage) -> None:
    """Case 2. D0 forwards to H1, D1 forwards to H0, without end.

    A forwarded copy is marked, and a dispatcher that knows no newer epoch does not forward it again.
    """
    channel = stage.channel_with_subscriber("s1")
    publisher = stage.publisher("P")
    stage.publish(publisher, channel)  # a first message would be sent again by P itself
    with stage.held("S", "s1", to_server=False):
        stage.move(channel, "s2", Phase.ACTIVE)
        stage.publish(publisher, channel)
        stage.run(0.5)
    copies = [r for r in stage.records("publishes", channel=channel) if r.data is not None and b"P:2." in r.data]
    stage.expect(f"the message is published twice, not {len(copies)} times", len(copies) == 2, channel)


def different_versions(stage: Stage) -> None:
    """Case 3. "Never forward twice", with D0 and D1 at different versions of the plan: lost at H2.

    A copy carries the epoch of its forwarder; who knows a newer one forwards it again.
    """
    channel = stage.channel_with_subscriber("s1")
    publisher = stage.trusting_publisher("P", channel)
    stage.move(channel, "s2")
    with stage.deaf_agent("s1"):
        stage.move(channel, "s3", Phase.ACTIVE)
        stage.wait("S listens at s3 only", lambda: _listen_only(stage, channel, "s3"))
        stage.publish(publisher, channel, times=3)
        stage.run(0.2)


def quiet_channel(stage: Stage) -> None:
    """Case 4. Nothing is ever published at H0, so no message triggers the switch, and S never leaves.

    Subscribers at an old location get a notice now and then, messages or not.
    """
    channel = stage.channel_with_subscriber("s1")
    stage.cluster.change(channel, single("s2"))
    stage.wait(
        "the quiet channel has settled at s2",
        lambda: stage.is_at(channel, "s2", Phase.SETTLED),
        patience_s=SETTLE_S_MAX,
    )
    stage.publisher("P", channel)


def left_too_early(stage: Stage) -> None:
    """Case 8. S unsubscribes at H0 before its SUBSCRIBE at H1 took effect.

    S joins before it leaves.
    """
    channel, other = stage.channel_at("s1"), stage.channel_at("s2", "other")
    subscriber = stage.subscriber("S", channel, other)
    publisher = stage.publisher("P")
    with stage.held("S", "s2", to_server=True):
        stage.move(channel, "s2", Phase.ACTIVE)
        for _ in range(25):  # for longer than S may wait before it moves
            stage.publish(publisher, channel)
            stage.run(0.05)
    stage.expect("S still listens", stage.cluster.audit.is_open(subscriber.name, channel))


def left_before_the_forwarded(stage: Stage) -> None:
    """Case 9. S unsubscribes at H0 after it has joined at H1, but D1's forward of an earlier message comes after that.

    S leaves only after D1's marker, forwarded behind that message, has come to its inbox at H0.
    """
    channel, other = stage.channel_at("s1"), stage.channel_at("s2", "other")
    stage.subscriber("S", channel, other)
    publisher = stage.publisher("P", channel)
    with ExitStack() as later:
        with stage.held("S", "s1", to_server=False):  # S does not hear of the move yet
            stage.move(channel, "s2", Phase.ACTIVE)
            stage.publish(publisher, channel)  # at H0: P gets a route notice
            stage.run(0.1)
            later.enter_context(stage.held("agent-s2", "s1", to_server=True))
            stage.publish(publisher, channel)  # at H1, where S does not listen yet
            stage.run(0.1)
        stage.wait("S listens at s2", lambda: "S.s0" in stage.cluster.servers["s2"].subscribers(channel))
        stage.run(0.3)


def empty_too_early(stage: Stage) -> None:
    """Case 10. H0 is announced empty while a SUBSCRIBE is on its way there.

    Its verification, which comes behind it, reads the stored plan, and S goes to H1 before it is confirmed.
    """
    channel, other = stage.channel_at("s1"), stage.channel_at("s1", "other")
    subscriber = stage.subscriber("S", other)
    publisher = stage.publisher("P")
    with stage.held("S", "s1", to_server=True):
        subscriber.subscribe(channel)
        stage.publish(publisher, channel)
        stage.move(channel, "s2")
        stage.publish(publisher, channel)
        stage.publish(publisher, channel)
    stage.wait("S is confirmed", lambda: stage.cluster.audit.is_open(subscriber.name, channel))
    stage.publish(publisher, channel, times=3)


def late_plan(stage: Stage) -> None:
    """Case 11. One of the two dispatchers gets the plan later than the other, and does not forward.

    Clients get the new route only when all old and new dispatchers have acknowledged.
    """
    for number, deaf in enumerate(("s1", "s2")):
        channel = stage.channel_at("s1", f"deaf{deaf}x")
        stage.subscriber(f"S{number}", channel)
        stale = stage.trusting_publisher(f"P{number}", channel)
        with stage.deaf_agent(deaf):
            stage.cluster.change(channel, single("s2"))
            stage.run(0.4)
            newcomer = stage.client(f"N{number}", 1).subscribers[0]
            newcomer.subscribe(channel)
            stage.run(0.2)
            for _ in range(3):
                stage.publish(stale, channel)
                stage.run(0.05)
        stage.wait("the move goes on", partial(stage.is_at, channel, "s2", Phase.SETTLED))
        stage.close()


def balancer_dies(stage: Stage) -> None:
    """Case 12. The balancer dies after it has sent the plan to some servers and before it has to others.

    Its successor reads what servers store, and goes on.
    """
    moved, moving = stage.channel_at("s1", "moved"), stage.channel_at("s1", "moving")
    stage.subscriber("S", moved, moving)
    publisher = stage.publisher("P")
    stage.move(moved, "s2")
    for channel in (moved, moving):
        stage.publish(publisher, channel)
    balancer = stage.cluster.balancer
    connections = stage.cluster.network.connections(balancer.name)
    with stage.held(balancer.name, "s2", to_server=True), stage.held(balancer.name, "s3", to_server=True):
        stage.cluster.change(moving, single("s3"))
        stage.wait("s1 stores the change", lambda: stage.entry(moving, "s1").phase is Phase.PREPARED)
        stage.expect("s3 does not store it", stage.entry(moving, "s3").phase is Phase.SETTLED)
        for connection in connections:
            stage.cluster.network.break_connection(connection, notice_s_max=0.0)
        balancer.crash()
    stage.run(0.3)
    newcomer = stage.publisher("N")
    for channel in (moved, moving):
        stage.publish(newcomer, channel)
    balancer.start()
    stage.wait("the successor goes on", lambda: stage.is_at(moving, "s3", Phase.SETTLED))
    stage.expect("what had moved stays where it is", stage.is_at(moved, "s2", Phase.SETTLED), moved)
    for number, channel in enumerate((moved, moving)):
        stage.subscriber(f"T{number}", channel)
        stage.publish(publisher, channel)
        stage.publisher(f"M{number}", channel)


def stale_notice(stage: Stage) -> None:
    """Case 13. A stale switch message, late in a backlog, sends S or P back.

    Epochs only grow.
    """
    channel = stage.channel_at("s1")
    subscriber = stage.subscriber("S", channel)
    publisher = stage.trusting_publisher("P")
    for server in ("s2", "s3"):
        stage.publish(publisher, channel)
        stage.move(channel, server, Phase.ACTIVE)
        stage.publish(publisher, channel)
        stage.wait_settled(channel)
        stage.publish(publisher, channel)
    notices = [
        record
        for record in stage.records("publishes", where="s1")
        if isinstance(control_in(record.data), RouteNotice) and record.data is not None and record.channel is not None
    ]
    stage.expect("both got a notice of the first move", len(notices) >= 2)
    since = stage.world.now
    for record in notices:
        assert record.data is not None and record.channel is not None
        stage.cluster.servers["s3"].inject(record.channel, record.data)
    stage.run(0.2)
    stage.publish(publisher, channel, times=3)
    back = stage.records("subscribe", since=since, who=subscriber.name)
    stage.expect("S does not go back", not back, channel)
    places = {record.where for record in stage.records("publishes", since=since, who=publisher.process.name)}
    stage.expect(f"P publishes at s3, not at {sorted(map(str, places))}", places == {"s3"}, channel)


def different_rings(stage: Stage) -> None:
    """Case 14. Clients and dispatchers compute the ring over different sets of servers.

    Every plan carries the servers of the ring, apart from those that have come since.
    """
    stage.add_server()
    stage.run(0.3)
    channels = [b"ring%d" % number for number in range(8)]
    publishers = [stage.publisher(f"P{number}") for number in range(2)]
    stage.subscriber("S", *channels)
    for channel in channels:
        for publisher in publishers:
            stage.publish(publisher, channel)
    stage.run(0.2)
    here = {record.where for record in stage.records("publishes") if record.channel in channels}
    stage.expect(f"nothing is published at s3: {sorted(map(str, here))}", "s3" not in here, channels[0])


def very_late_publisher(stage: Stage) -> None:
    """Case 15. P keeps its stale entry alive, and D0 has stopped listening.

    A dispatcher observes everything and has the whole plan: it redirects and forwards without a time limit.
    """
    channel = stage.channel_with_subscriber("s1")
    publisher = stage.trusting_publisher("P", channel)
    stage.move(channel, "s2")
    stage.run(20.0)
    stage.publish(publisher, channel, times=3)
    last = stage.records("publishes", who=publisher.process.name, channel=channel)[-1]
    stage.expect(f"P has been redirected to s2, not {last.where}", last.where == "s2", channel)


def two_copies(stage: Stage) -> None:
    """Case 17. Two copies of a message arrive on two connections at the same time.

    One machine sees both, and numbers tell.
    """
    channel = stage.channel_with_subscriber("s1")
    publisher = stage.publisher("P", channel)
    with stage.losing("s1", lambda _, data: isinstance(control_in(data), Marker)):  # so S cannot leave s1
        stage.move(channel, "s2", Phase.ACTIVE)
        both = [stage.cluster.servers[server] for server in ("s1", "s2")]
        stage.wait("S listens at both", lambda: all("S.s0" in server.subscribers(channel) for server in both))
        late = stage.publisher("Q")
        for _ in range(3):
            with stage.held("S", "s1", to_server=False), stage.held("S", "s2", to_server=False):
                stage.publish(publisher, channel)
                stage.publish(late, channel)
                stage.run(0.1)


def overtaken(stage: Stage) -> None:
    """Case 18. m1 goes to H0, P is redirected, m2 goes to H1 and comes to S before m1.

    S holds m2 until m1 has come, also if it has never heard of P before.
    """
    channel = stage.channel_with_subscriber("s1")
    known, unknown = stage.trusting_publisher("P"), stage.trusting_publisher("Q")
    stage.publish(known, channel)
    stage.publish(unknown, channel)
    stage.move(channel, "s2")
    stage.subscriber("T", channel)
    stage.run(0.2)
    with stage.held("agent-s1", "s2", to_server=True):
        for publisher in (known, unknown):
            stage.publish(publisher, channel)
        stage.run(0.1)
        for publisher in (known, unknown):
            stage.publish(publisher, channel)
        stage.run(0.1)
    where = [r.where for r in stage.records("publishes", channel=channel, who="P.p")]
    stage.expect(f"P has been redirected in between: {where}", where[-2:] == ["s1", "s2"], channel)


def inflated_load(stage: Stage) -> None:
    """Case 19. Forwarded copies inflate the load after each plan, and stale publishers get a notice for each message.

    Copies are no publications, and a publisher gets one notice per epoch.
    """
    channel = stage.channel_with_subscriber("s1")
    publisher = stage.trusting_publisher("P", channel)
    stage.move(channel, "s2")
    stage.run(0.6)  # until what was published so far has been reported
    since = stage.world.now
    with stage.held("P", "s1", to_server=False):  # P does not hear that it is redirected
        for _ in range(50):
            publisher.publish(channel)
            stage.run(0.005)
        stage.run(0.6)
    notices = [
        record
        for record in stage.records("publishes", since=since, where="s1")
        if record.channel is not None and record.channel.startswith(INBOX_PREFIX)
    ]
    stage.expect(f"P gets one notice, not {len(notices)}", len(notices) == 1, channel)
    at_new, at_old = (_reported_publications(stage, channel, server, since) for server in ("s2", "s1"))
    stage.expect(f"50 publications are reported at s1, not {at_old}", at_old == 50)
    stage.expect(f"no publication is reported at s2, not {at_new}", at_new == 0)


def hot_channel(stage: Stage) -> None:
    """Case 20. Algorithm 2 never ends when one channel alone exceeds LR_safe, or servers swap it back and forth.

    A move must make the larger load ratio of its two servers smaller.
    """
    hot, small = stage.channel_at("s1", "hot"), stage.channel_at("s1", "small")
    stage.subscriber("S", hot, small)
    publisher = stage.publisher("P")
    for number in range(400):
        publisher.publish(hot, size_bytes=2000)
        if number % 5 == 0:
            publisher.publish(small, size_bytes=500)
        stage.run(0.015)
    epochs = {
        (channel, entry.route.epoch)
        for record in stage.records("moves")
        for channel, entry in record.note.entries.items()
        if channel == hot
    }
    stage.expect(f"the hot channel is moved at most once, not {len(epochs)} times", len(epochs) <= 1)
    stage.expect("the balancer sees the load", bool(stage.records("decides")))


def unknown_publisher(stage: Stage) -> None:
    """Case 21, found by the simulator. S joins H1 between two messages of a P that it has never heard of.

    The first comes round by H0, after the second, which came directly and says nothing of another route, as P always
    published at H1. S must not begin with the second.
    """
    channel, other = stage.channel_at("s2"), stage.channel_at("s2", "other")
    publisher = stage.publisher("P", channel)
    stage.move(channel, "s1")  # P does not hear of it: it publishes nothing
    stage.subscriber("S", channel, other)
    with ExitStack() as later:
        with stage.held("S", "s2", to_server=True):  # S cannot join yet
            stage.move(channel, "s2", Phase.ACTIVE)
            stage.run(0.2)
            later.enter_context(stage.held("agent-s2", "s1", to_server=True))
            stage.publish(publisher, channel)
        stage.wait("S listens at s2", lambda: "S.s0" in stage.cluster.servers["s2"].subscribers(channel))
        stage.publish(publisher, channel)
        stage.run(0.2)


def third_server(stage: Stage) -> None:
    """Case 22, found by the simulator. A stale P publishes at a server that is neither H0 nor H1.

    Its dispatcher's copy reaches H1 before S has joined there, and H0 after S has left: D1's markers do not tell of it.
    """
    channel, other = stage.channel_at("s2"), stage.channel_at("s1", "other")
    publisher = stage.trusting_publisher("P", channel)
    stage.subscriber("S", channel, other)
    stage.move(channel, "s3")  # P does not hear of it: it publishes nothing
    with ExitStack() as later:
        with stage.held("S", "s1", to_server=True):  # S cannot join yet
            stage.move(channel, "s1", Phase.ACTIVE)
            stage.run(0.2)
            stage.publisher("Q", channel)  # lets D2 connect to both
            later.enter_context(stage.held("agent-s2", "s3", to_server=True))
            stage.publish(publisher, channel)
            stage.run(0.1)
        stage.wait("S has joined s1", lambda: "S.s0" in stage.cluster.servers["s1"].subscribers(channel))
        stage.run(0.3)


def drained(stage: Stage) -> None:
    """Case 31. A server is to be stopped, and channels of all kinds are there: busy, idle, moved there, replicated.

    An operator has it drained; the balancer moves all of them away under load, and lets nobody put one there.
    """
    busy, idle, moved = (stage.channel_at("s1", name) for name in ("busy", "idle", "moved"))
    replicated = {
        stage.channel_at("s1", "two"): Assignment(Mode.ALL_SUBSCRIBERS, ("s1", "s2")),
        stage.channel_at("s2", "three"): Assignment(Mode.ALL_PUBLISHERS, ("s1", "s2", "s3")),
    }
    stage.move(moved, "s2")
    stage.move(moved, "s1")
    for channel, assignment in replicated.items():
        stage.change(channel, assignment)
    channels = [busy, moved, *replicated]
    for number in range(3):
        stage.subscriber(f"S{number}", *channels, idle)
    publishers = [stage.publisher(f"P{number}") for number in range(3)]
    stage.cluster.change_server("drain", "s1")
    for number in range(2500):
        publishers[number % 3].publish(channels[number % len(channels)])
        stage.run(0.002)
    left = [channel for channel in (*channels, idle) if "s1" in stage.entry(channel).route.assignment.servers]
    stage.expect(f"nothing is left at s1, not {left}", not left, *left[:1])
    here = [
        channel for channel in map(logical_channel, stage.cluster.servers["s1"].channels()) if is_user_channel(channel)
    ]
    stage.expect(f"nobody listens at s1, not to {here}", not here, *here[:1])
    balancer = stage.cluster.balancer.machine
    assert isinstance(balancer, BalancerMachine)
    stage.wait("the balancer says so", lambda: stage.cluster.left_at("s1") == 0)
    stage.cluster.change(busy, single("s1"))
    stage.wait("the balancer answers", stage.cluster.settled)
    refused = [reason for reason in stage.cluster.moves.refused if "is being drained" in reason]
    stage.expect("nobody can move a channel to s1", len(refused) == 1, busy)


def _listen_only(stage: Stage, channel: bytes, server: str) -> bool:
    return all(bool(model.subscribers(channel)) == (id_ == server) for id_, model in stage.cluster.servers.items())


def _reported_publications(stage: Stage, channel: bytes, server: str, since: float) -> int:
    total = 0
    for record in stage.records("publishes", since=since, where=server, channel=BALANCER_CHANNEL):
        report = _report(record.data)
        if report is not None:
            total += sum(row.publications for row in report.columns.rows() if row.channel == channel)
    return total


def _report(data: bytes | None) -> Report | None:
    try:
        return None if data is None else unpack_report(data)
    except MalformedMessage:
        return None


SCENARIOS: dict[str, Scenario] = {
    "01-moved-twice": Scenario(moved_twice),
    "02-forwarding-loop": Scenario(forwarding_loop),
    "03-different-versions": Scenario(different_versions),
    "04-quiet-channel": Scenario(quiet_channel),
    "08-left-too-early": Scenario(left_too_early),
    "09-left-before-the-forwarded": Scenario(left_before_the_forwarded),
    "10-empty-too-early": Scenario(empty_too_early),
    "11-late-plan": Scenario(late_plan),
    "12-balancer-dies": Scenario(balancer_dies),
    "13-stale-notice": Scenario(stale_notice),
    "14-different-rings": Scenario(different_rings, servers=2),
    "15-very-late-publisher": Scenario(very_late_publisher),
    "17-two-copies": Scenario(two_copies),
    "18-overtaken": Scenario(overtaken),
    "19-inflated-load": Scenario(inflated_load),
    "20-hot-channel": Scenario(hot_channel, outgoing_bytes_per_s_max=LITTLE_BYTES_PER_S),
    "21-unknown-publisher": Scenario(unknown_publisher),
    "22-third-server": Scenario(third_server),
    "31-drained": Scenario(drained),
}
