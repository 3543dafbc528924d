"""Scripts for users who move between brokers: each provokes one fault that one rule of migrations prevents.

U and V are users, who begin at b1; P publishes on a live channel. *Late* is a broker to which nothing comes from Redis
for a while. See ``scenarios``.
"""

from __future__ import annotations

from dataclasses import replace

from dynamoth.plan.plan import Phase
from dynamoth.protocol.control import RouteNotice
from dynamoth_broker.events import Drain
from dynamoth_sim.edge.stage import AT_ONCE_S, EdgeScenario, EdgeStage
from dynamoth_sim.edge.world import SHORT_BROKER_OPTIONS, SHORT_COORDINATOR_OPTIONS, EdgeOptions
from dynamoth_sim.scenarios.stage import control_in

PATIENT = EdgeOptions(broker=replace(SHORT_BROKER_OPTIONS, grace_s=5.0))
"""Brokers that wait for their barriers longer than a link is down here."""

BUSY = EdgeOptions(
    coordinators=1,
    coordinator=replace(SHORT_COORDINATOR_OPTIONS, dry_run=True),
    broker=replace(SHORT_BROKER_OPTIONS, report_s=0.05, capacity_bytes_per_s=100, ratio_accept=0.5),
)
"""Brokers that little traffic fills, and a coordinator that moves nobody."""

UNREAD_MAX = 10
SMALL_BUFFERS = replace(PATIENT, unread_max=UNREAD_MAX)
"""Brokers that wait, and have room for few frames that a user does not read."""

LINK_LOST_S = 0.7
"""Longer than it takes a link to find out that nothing comes."""


def moves(stage: EdgeStage) -> None:
    """U moves from broker to broker while everybody publishes: nothing is lost, and nothing comes twice."""
    logged, live = stage.edge.logged[0], stage.edge.live[0]
    user = stage.user("U", logged, live)
    publisher = stage.publisher("P")
    for to in ("b2", "b3", "b1"):
        stage.ask_to_move(user, to)
        for _ in range(10):
            stage.publish_logged(logged)
            stage.publish(publisher, live.name.encode())
        stage.wait_served(user, to)
    stage.run(AT_ONCE_S)
    stage.expect_received(user, logged, 30)
    stage.expect(f"U has moved 3 times, not {user.moved}", user.moved == 3)
    stage.expect_user_gaps(0, live)


def old_broker_overlaps(stage: EdgeStage) -> None:
    """b1 still delivers to U when b2 does: U gets the same from both, and hands it out once."""
    logged, live = stage.edge.logged[0], stage.edge.live[0]
    stage.warm_up("b2")
    user = stage.user("U", logged, live)
    publisher = stage.publisher("P", live.name.encode())
    with stage.barrier_held("b1", live):
        stage.ask_to_move(user, "b2")
        stage.wait("b2 serves U", lambda: user.moved == 1)
        stage.publish_logged(logged, 3)
        stage.publish(publisher, live.name.encode(), times=3)
        stage.run(AT_ONCE_S)
    stage.wait_served(user, "b2")


def new_broker_is_late(stage: EdgeStage) -> None:
    """b2's SUBSCRIBE takes a while: U stays with b1, which delivers."""
    live = stage.edge.live[0]
    channel = live.name.encode()
    stage.warm_up("b2")
    user, publisher = stage.user("U", live), stage.publisher("P", channel)
    with stage.channel_held("b2", live, to_server=True):
        stage.ask_to_move(user, "b2")
        stage.run(AT_ONCE_S)
        stage.publish(publisher, channel, times=3)
        stage.run(AT_ONCE_S)
    stage.wait_served(user, "b2")
    stage.run(AT_ONCE_S)
    stage.expect_delivered(user, 4)


def old_broker_is_late(stage: EdgeStage) -> None:
    """b1 is late: it has not got what P published before b2 had subscribed, when U leaves it."""
    live = stage.edge.live[0]
    channel = live.name.encode()
    user, publisher = stage.user("U", live), stage.publisher("P", channel)
    stage.run(AT_ONCE_S)
    with stage.channel_held("b1", live, to_server=False):
        stage.publish(publisher, channel)
        stage.ask_to_move(user, "b2")
        stage.wait("b2 serves U", lambda: user.moved == 1)
        stage.run(AT_ONCE_S)
    stage.wait_served(user, "b2")
    stage.run(AT_ONCE_S)
    stage.expect_delivered(user, 2)


def both_brokers_deliver(stage: EdgeStage) -> None:
    """b1 is late. P publishes once before b2 has subscribed, and once after that: U gets both in order."""
    live = stage.edge.live[0]
    channel = live.name.encode()
    user, publisher = stage.user("U", live), stage.publisher("P", channel)
    stage.run(AT_ONCE_S)
    with stage.channel_held("b1", live, to_server=False):
        stage.publish(publisher, channel)
        stage.ask_to_move(user, "b2")
        stage.wait("b2 serves U", lambda: user.moved == 1)
        stage.publish(publisher, channel)
        stage.run(AT_ONCE_S)
        stage.expect_delivered(user, 1)
    stage.wait_served(user, "b2")
    stage.run(AT_ONCE_S)
    stage.expect_delivered(user, 3)


def old_broker_has_no_link(stage: EdgeStage) -> None:
    """b1 has lost its link, with a publication of P, when U leaves it: U gets a gap before ``bye``."""
    live = stage.edge.live[0]
    channel = live.name.encode()
    user, publisher = stage.user("U", live), stage.publisher("P", channel)
    stage.run(AT_ONCE_S)
    heal = stage.cluster.network.part(["b1.s"], [stage.home(live)])
    stage.publish(publisher, channel)
    stage.run(LINK_LOST_S)
    stage.ask_to_move(user, "b2")
    stage.wait("b2 serves U", lambda: user.moved == 1)
    stage.run(AT_ONCE_S)
    heal()
    stage.wait_served(user, "b2")
    stage.publish(publisher, channel)


def channel_moves_first(stage: EdgeStage) -> None:
    """The channel has moved, and b1 has not heard of it: what P publishes at the new server comes late to b1."""
    live = stage.edge.live[0]
    channel, old = live.name.encode(), stage.home(live)
    new = next(server for server in stage.cluster.servers if server != old)
    user = stage.user("U", live)
    with stage.losing(old, lambda name, data: name == channel and isinstance(control_in(data), RouteNotice)):
        stage.move(channel, new, Phase.ACTIVE)
        publisher = stage.publisher("P", channel)
        stage.user("V", live, at="b2")
        with stage.held(f"agent-{new}", old, to_server=True):
            stage.publish(publisher, channel)
            stage.ask_to_move(user, "b2")
            stage.wait("b2 serves U", lambda: user.moved == 1)
            stage.run(AT_ONCE_S)
    stage.wait_served(user, "b2")
    stage.run(AT_ONCE_S)
    stage.expect_delivered(user, 2)


def slow_user_moves(stage: EdgeStage) -> None:
    """U reads nothing for a while, and moves meanwhile: b1 says what it has dropped before it says ``bye``."""
    live = stage.edge.live[0]
    channel = live.name.encode()
    stage.warm_up("b2")
    user, publisher = stage.user("U", live), stage.publisher("P", channel)
    stage.run(AT_ONCE_S)
    with stage.channel_held("b2", live, to_server=True):
        stage.ask_to_move(user, "b2")
        stage.wait("U has been asked to move", lambda: len(user.machine.connections) > 1)
        wire = stage.wire(user)
        wire.hold_down()
        stage.publish(publisher, channel, 2 * UNREAD_MAX)
        stage.run(AT_ONCE_S)
    stage.wait("b2 serves U", lambda: user.moved == 1)
    stage.run(AT_ONCE_S)
    wire.release_down()
    stage.wait_served(user, "b2")
    stage.run(AT_ONCE_S)
    stage.expect_user_gaps(1, live)


def old_broker_dies(stage: EdgeStage) -> None:
    """b1 is late, and dies when U has left it, before ``bye``: U reports a gap."""
    live = stage.edge.live[0]
    channel = live.name.encode()
    user, publisher = stage.user("U", live), stage.publisher("P", channel)
    stage.run(AT_ONCE_S)
    with stage.channel_held("b1", live, to_server=False):
        stage.publish(publisher, channel)
        stage.ask_to_move(user, "b2")
        stage.wait("b2 serves U", lambda: user.moved == 1)
        stage.broker("b1").crash()
        stage.run(AT_ONCE_S)
    stage.wait_served(user, "b2")
    stage.expect_user_gaps(1, live)
    stage.start(stage.broker("b1"))


def old_broker_dies_early(stage: EdgeStage) -> None:
    """b1 is late, and dies when b2 is about to take U: U goes on with b2, and reports a gap."""
    logged, live = stage.edge.logged[0], stage.edge.live[0]
    channel = live.name.encode()
    user, publisher = stage.user("U", logged, live), stage.publisher("P", channel)
    stage.run(AT_ONCE_S)
    with stage.log_held("b2", logged, to_server=False), stage.channel_held("b1", live, to_server=False):
        stage.publish(publisher, channel)
        stage.ask_to_move(user, "b2")
        stage.run(AT_ONCE_S)
        stage.broker("b1").crash()
        stage.run(AT_ONCE_S)
    stage.wait_served(user, "b2")
    stage.expect_user_gaps(1, live)
    stage.start(stage.broker("b1"))


def move_fails(stage: EdgeStage) -> None:
    """b2 cannot subscribe in time: U stays at b1, and moves when it is asked again."""
    live = stage.edge.live[0]
    stage.warm_up("b2")
    user = stage.user("U", live)
    stage.publisher("P", live.name.encode())
    with stage.channel_held("b2", live, to_server=True):
        stage.ask_to_move(user, "b2")
        stage.run(SHORT_BROKER_OPTIONS.move_timeout_s + AT_ONCE_S)
        stage.expect("U is at b1", stage.is_served(user, "b1"))
        stage.move_user(user, "b3")


def first_target_is_gone(stage: EdgeStage) -> None:
    """b2 has just died: U moves to b3, which was named, too."""
    logged = stage.edge.logged[0]
    user = stage.user("U", logged)
    stage.broker("b2").crash()
    stage.ask_to_move(user, "b2", "b3")
    stage.wait_served(user, "b3")
    stage.expect("U was served all the time", user.moved == 1)
    stage.start(stage.broker("b2"))
    stage.publish_logged(logged)


def drained(stage: EdgeStage) -> None:
    """b1 is drained. U's first move fails, so it is asked again."""
    logged, live = stage.edge.logged[0], stage.edge.live[0]
    users = [stage.user(name, logged, live) for name in "UV"]
    process = stage.broker("b1").broker
    assert process is not None
    stage.warm_up("b2", "b3")
    with stage.channel_held("b2", live, to_server=True), stage.channel_held("b3", live, to_server=True):
        process.handle(Drain(100.0))
        stage.run(SHORT_BROKER_OPTIONS.move_timeout_s + AT_ONCE_S)
        stage.expect("nobody could move", all(stage.is_served(user, "b1") or user.moved == 0 for user in users))
    stage.wait("both have moved", lambda: all(user.moved for user in users))
    stage.publish_logged(logged)


def broker_without_the_log(stage: EdgeStage) -> None:
    """b2 does not know that the channel is logged. U moves there and gets a gap; at b3 it gets everything."""
    logged = stage.edge.logged[0]
    broker = stage.broker("b2")
    broker.crash()
    broker.options = replace(broker.options, history=())
    stage.start(broker)
    user = stage.user("U", logged)
    stage.publish_logged(logged)
    stage.move_user(user, "b2")
    stage.run(AT_ONCE_S)
    stage.expect_user_gaps(1, logged)
    stage.publish_logged(logged)
    stage.move_user(user, "b3")
    stage.run(AT_ONCE_S)
    stage.expect_received(user, logged, 2)


def busy_broker(stage: EdgeStage) -> None:
    """b2 has as much traffic as it takes: a newcomer, W, is sent elsewhere; U, who is asked to move there, is taken."""
    logged, live = stage.edge.logged[0], stage.edge.live[0]
    for coordinator in stage.edge.coordinators:
        coordinator.start()
    user = stage.user("U", logged)
    stage.user("V", live, at="b2")
    publisher = stage.publisher("P", live.name.encode())
    stage.publish(publisher, live.name.encode(), times=100)
    control = stage.broker("b2").machine.control
    stage.wait("b2 is busy", lambda: control.traffic_ratio > stage.edge.options.broker.ratio_accept)
    newcomer = stage.edge.add_user("W", [logged], "b2")
    newcomer.start()
    stage.wait_served(newcomer)
    stage.expect("W is not at b2", not stage.is_served(newcomer, "b2"))
    stage.move_user(user, "b2")
    stage.publish_logged(logged)
    stage.run(AT_ONCE_S)
    stage.expect("b2 is still busy", control.traffic_ratio > stage.edge.options.broker.ratio_accept)


MOVING: dict[str, EdgeScenario] = {
    "edge-both-brokers-deliver": EdgeScenario(both_brokers_deliver),
    "edge-broker-without-the-log": EdgeScenario(broker_without_the_log, losses_allowed=True),
    "edge-busy-broker": EdgeScenario(busy_broker, edge=BUSY),
    "edge-channel-moves-first": EdgeScenario(channel_moves_first, edge=PATIENT),
    "edge-drained": EdgeScenario(drained),
    "edge-first-target-is-gone": EdgeScenario(first_target_is_gone),
    "edge-move-fails": EdgeScenario(move_fails),
    "edge-moves-around": EdgeScenario(moves),
    "edge-new-broker-is-late": EdgeScenario(new_broker_is_late),
    "edge-old-broker-dies": EdgeScenario(old_broker_dies, losses_allowed=True),
    "edge-old-broker-dies-early": EdgeScenario(old_broker_dies_early, losses_allowed=True),
    "edge-old-broker-has-no-link": EdgeScenario(old_broker_has_no_link, edge=PATIENT, losses_allowed=True),
    "edge-old-broker-is-late": EdgeScenario(old_broker_is_late),
    "edge-old-broker-overlaps": EdgeScenario(old_broker_overlaps),
    "edge-slow-user-moves": EdgeScenario(slow_user_moves, edge=SMALL_BUFFERS, losses_allowed=True),
}
