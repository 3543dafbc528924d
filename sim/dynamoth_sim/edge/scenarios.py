"""Scripts for brokers and users: each provokes one fault that one rule prevents.

U, V and W are users; b1, b2 and b3 are brokers. P is a backend that publishes on a live channel. A *hole* is a missing
offset. "Soon" is ``AT_ONCE_S``: longer than anything takes here that is not held up.
"""

from __future__ import annotations

from dynamoth.edge.log import Appended
from dynamoth_sim.edge.scenarios_of_moves import MOVING
from dynamoth_sim.edge.stage import AT_ONCE_S, SELDOM_CHECKED, EdgeScenario, EdgeStage
from dynamoth_sim.edge.world import SHORT_BROKER_OPTIONS, EdgeOptions
from dynamoth_user.machine.events import AddSubscription

BACKLOG = 20
"""Publications that a user misses: several pages of the log, and more than a broker keeps by itself."""

UNREAD_MAX = 30
FEW = 5
"""Frames that a broker sends to a full connection, too: pings and gaps."""

RETAINED = 8

FEW_KEPT = EdgeOptions(retained_min=RETAINED, logs_may_fail=True)
LOGS_FAIL = EdgeOptions(logs_may_fail=True)
SMALL_BUFFERS = EdgeOptions(unread_max=UNREAD_MAX)
ONE_BROKER = EdgeOptions(brokers=1)

# An interest begins.


def tip_after_confirmation(stage: EdgeStage) -> None:
    """A publication is appended and published before b1 listens: the tip that b1 begins with includes it."""
    interest = stage.edge.logged[0]
    user = stage.edge.add_user("U", [interest], "b1")
    stage.warm_up("b1")
    with stage.channel_held("b1", interest, to_server=True):
        user.start()
        stage.run(AT_ONCE_S)
        stage.publish_logged(interest)
    stage.wait_served(user, "b1")
    stage.run(AT_ONCE_S)
    stage.expect_received(user, interest, 1)


def published_while_opening(stage: EdgeStage) -> None:
    """A publication comes between the confirmation of the channel and the answer with the tip, which is older."""
    interest = stage.edge.logged[0]
    user = stage.edge.add_user("U", [interest], "b1")
    stage.publish_logged(interest)
    with stage.log_held("b1", interest, to_server=False):
        user.start()
        stage.run(AT_ONCE_S / 3)
        stage.publish_logged(interest)
        stage.run(AT_ONCE_S / 3)
    stage.wait_served(user, "b1")
    stage.run(AT_ONCE_S)
    stage.expect_received(user, interest, 2)


def shared(stage: EdgeStage) -> None:
    """Two users of one interest subscribe at the same moment: b1 subscribes once."""
    interest = stage.edge.logged[0]
    users = [stage.edge.add_user(name, [interest], "b1") for name in "UVW"]
    for user in users:
        user.start()
    for user in users:
        stage.wait_served(user, "b1")
    home = stage.cluster.servers[stage.home(interest)]
    listeners = [each for each in home.subscribers(interest.log_channel) if each.startswith("b1")]
    stage.expect(f"b1 listens once, not as {listeners}", len(listeners) == 1)
    stage.publish_logged(interest)
    stage.run(AT_ONCE_S)
    for user in users:
        stage.expect_received(user, interest, 1)


def lingers(stage: EdgeStage) -> None:
    """U unsubscribes, and subscribes again before b1 has left the channel."""
    first, interest = stage.edge.logged[:2]
    user = stage.user("U", first, interest)
    user.leave(interest)
    stage.run(SHORT_BROKER_OPTIONS.linger_s / 2)
    assert user.process is not None
    user.interests.append(interest)
    user.process.handle(AddSubscription(interest))
    stage.wait_served(user, "b1")
    stage.run(2 * SHORT_BROKER_OPTIONS.linger_s)
    stage.publish_logged(interest)
    stage.run(AT_ONCE_S)
    stage.expect_received(user, interest, 1)


def left_after_a_while(stage: EdgeStage) -> None:
    """U unsubscribes for good: b1 leaves the channel, but not before its time."""
    first, interest = stage.edge.logged[:2]
    user = stage.user("U", first, interest)
    home = stage.cluster.servers[stage.home(interest)]
    user.leave(interest)
    stage.run(SHORT_BROKER_OPTIONS.linger_s / 2)
    stage.expect("b1 still listens", bool(home.subscribers(interest.log_channel)))
    stage.run(SHORT_BROKER_OPTIONS.linger_s)
    stage.expect("b1 has left", not home.subscribers(interest.log_channel))
    stage.publish_logged(first)


# A subscription begins, or falls behind.


def catches_up(stage: EdgeStage) -> None:
    """U comes back to much that it has missed; nothing new is published that would show a hole."""
    interest = stage.edge.logged[0]
    user = stage.user("U", interest)
    stage.user("V", interest)
    user.crash()
    stage.publish_logged(interest, BACKLOG)
    user.start()
    stage.wait_served(user)
    stage.run(AT_ONCE_S)
    stage.expect_received(user, interest, BACKLOG)


def reader_stops(stage: EdgeStage) -> None:
    """U reads nothing for a while: b1 sends it no more than fits, and the rest when it reads again."""
    logged, live = stage.edge.logged[0], stage.edge.live[0]
    user, other = stage.user("U", logged, live), stage.user("V", logged)
    publisher = stage.publisher("P")
    with stage.not_reading(user) as wire:
        stage.publish_logged(logged, 2 * UNREAD_MAX)
        stage.publish(publisher, live.name.encode(), times=5)
        bound = UNREAD_MAX + FEW
        stage.expect(f"at most {bound} frames wait for U, not {wire.unread}", wire.unread <= bound)
        stage.expect_received(other, logged, 2 * UNREAD_MAX)
    stage.run(AT_ONCE_S)
    stage.expect_received(user, logged, 2 * UNREAD_MAX)
    stage.expect_user_gaps(1, live)


def dropped_by_the_log(stage: EdgeStage) -> None:
    """U comes back for more than its log keeps: it is told what is missing."""
    interest = stage.edge.logged[0]
    user = stage.user("U", interest)
    user.crash()
    stage.publish_logged(interest, BACKLOG)
    user.start()
    stage.wait_served(user)
    stage.run(AT_ONCE_S)
    stage.expect_received(user, interest, BACKLOG)
    stage.expect_user_gaps(1, interest)


def gap_is_old(stage: EdgeStage) -> None:
    """U moves from b1 to b2, which finds that its log has dropped what U meanwhile got from b1."""
    interest = stage.edge.logged[0]
    user = stage.user("U", interest)
    with stage.log_held("b2", interest, to_server=True):
        stage.ask_to_move(user, "b2")
        stage.run(0.2)
        stage.publish_logged(interest, BACKLOG)
    stage.wait_served(user, "b2")
    stage.run(AT_ONCE_S)
    stage.expect_received(user, interest, BACKLOG)
    stage.expect_user_gaps(0, interest)


# Publications that do not come.


def publisher_dies(stage: EdgeStage) -> None:
    """A publisher dies between append and publish, and nobody publishes again: b1 compares tips."""
    interest = stage.edge.logged[0]
    user = stage.user("U", interest)
    position = stage.append(interest, 2)
    stage.run(SHORT_BROKER_OPTIONS.tip_check_s + AT_ONCE_S)
    stage.expect_received(user, interest, position.offset)


def hole_on_the_channel(stage: EdgeStage) -> None:
    """A publisher dies between append and publish; the next publication shows that."""
    interest = stage.edge.logged[0]
    user = stage.user("U", interest)
    stage.append(interest, 2)
    stage.publish_logged(interest)
    stage.run(AT_ONCE_S)
    stage.expect_received(user, interest, 3)


def gap_of_the_channel(stage: EdgeStage) -> None:
    """b1 misses a publication, and its Dynamoth client says so: the log has it."""
    interest = stage.edge.logged[0]
    user = stage.user("U", interest)
    stage.publish_logged(interest)
    with stage.channel_held("b1", interest, to_server=False):
        stage.publish_logged(interest)
        stage.cut("b1.s", stage.home(interest))
    stage.run(1.0)
    stage.expect_received(user, interest, 2)


def hole_from_a_broker(stage: EdgeStage) -> None:
    """A frame of U's broker is missing, as no broker should let happen: U asks for it again."""
    interest = stage.edge.logged[0]
    user = stage.user("U", interest)
    position = stage.append(interest, 2)
    stage.forge_data(user, interest, position.offset, "driver", 2)
    stage.run(SHORT_BROKER_OPTIONS.tip_check_s + AT_ONCE_S)
    stage.expect_received(user, interest, position.offset)


def crash_of_the_application(stage: EdgeStage) -> None:
    """U's application dies while publications wait that it has not handled: they come again."""
    interest = stage.edge.logged[0]
    user = stage.user("U", interest)
    stage.append(interest, BACKLOG)
    stage.publish_logged(interest)
    stage.wait("U has received all", lambda: stage.offset(user, interest) == BACKLOG + 1)
    stage.crash_with_positions(user)
    user.start()
    stage.wait_served(user)


# Publishers.


def broker_dies_publishing(stage: EdgeStage) -> None:
    """b2 dies before its append has come to the log: nobody has got the publication, so its offset is free."""
    interest = stage.edge.logged[0]
    user = stage.user("U", interest)
    publisher = stage.user("V", interest, at="b2")
    with stage.log_held("b2", interest, to_server=True):
        publisher.publish(interest)
        stage.run(AT_ONCE_S)
        stage.cut("b2", stage.log_of(interest).id)
    stage.broker("b2").crash()
    stage.publish_logged(interest)
    stage.run(AT_ONCE_S)
    stage.expect_received(user, interest, 1)
    stage.start(stage.broker("b2"))
    stage.wait_served(publisher)


def zombie_writer(stage: EdgeStage) -> None:
    """A writer stands still, another one takes over, and the first one goes on: the log refuses it."""
    interest, other = stage.edge.logged[:2]
    stage.user("U", other)
    stage.execute(interest, b"new:1.", term=2, execution=1)
    late = stage.execute(interest, b"old:1.", term=1, execution=2)
    stage.expect(f"the log refuses an older writer: {late}", isinstance(late, str) and late.startswith("FENCED"))
    again = stage.execute(interest, b"new:1.", term=2, execution=1)
    stage.expect("what was appended before is not appended again", isinstance(again, Appended) and not again.is_new)
    stage.publish_logged(other)


def moves_while_publishing(stage: EdgeStage) -> None:
    """V moves while b1 waits for the answer to an append: the answer comes over the old connection."""
    interest = stage.edge.logged[0]
    user = stage.user("U", interest, at="b3")
    publisher = stage.user("V", interest)
    with stage.log_held("b1", interest, to_server=False):
        publisher.publish(interest)
        stage.ask_to_move(publisher, "b2")
        stage.wait("b2 serves V", lambda: publisher.moved == 1)
        stage.run(AT_ONCE_S)
        stage.expect("V still waits", publisher.is_publishing)
    stage.wait_served(publisher, "b2")
    stage.expect("V's publish has ended", not publisher.is_publishing)
    stage.run(AT_ONCE_S)
    stage.expect_received(user, interest, 1)


# Logs that are lost.


def log_restored(stage: EdgeStage) -> None:
    """The server of a log restarts from an old snapshot, and gives offsets again to other publications."""
    interest = stage.edge.logged[0]
    user = stage.user("U", interest)
    stage.publish_logged(interest, 2)
    server = stage.log_of(interest)
    snapshot = server.snapshot()
    stage.publish_logged(interest, 2)
    stage.run(AT_ONCE_S)
    stage.edge.restart_log(server, snapshot)
    stage.run(0.5)  # everybody knows that the connections are lost
    stage.wait("b3 has its log", lambda: not stage.broker("b3").machine.logs.faults)
    stage.publish_logged(interest, 2)
    stage.run(1.0)
    stage.expect_received(user, interest, 2)
    stage.expect_user_gaps(1, interest)


def log_flushed(stage: EdgeStage) -> None:
    """All keys of a log server are deleted: users are told, and go on with the new log."""
    interest = stage.edge.logged[0]
    user, away = stage.user("U", interest), stage.user("V", interest)
    stage.publish_logged(interest, 2)
    stage.run(AT_ONCE_S)
    away.crash()
    stage.log_of(interest).flush()
    stage.publish_logged(interest)
    stage.run(AT_ONCE_S)
    away.start()
    stage.wait_served(away)
    stage.run(AT_ONCE_S)
    for each in (user, away):
        stage.expect_received(each, interest, 1)
    stage.expect_user_gaps(2, interest)


# Connections and brokers.


def late_connect(stage: EdgeStage) -> None:
    """A connection of U that it has given up comes to b1 late, behind the one that serves U."""
    interest = stage.edge.logged[0]
    user = stage.edge.add_user("U", [interest], "b1")
    user.start()
    stage.world.run_until_true(lambda: bool(user.wires), stage.world.now + 1.0, poll_s=0.0001)
    [late] = user.wires.values()
    late.hold_up()
    stage.wait_served(user)
    late.release_up()
    stage.run(AT_ONCE_S)
    stage.publish_logged(interest)
    stage.run(AT_ONCE_S)
    stage.expect_received(user, interest, 1)


def silent_connection(stage: EdgeStage) -> None:
    """Nothing arrives on U's connection any more, and nobody says so: U and b1 find out by themselves.

    V has a connection on which nothing is published, and keeps it.
    """
    interest = stage.edge.logged[0]
    user, quiet = stage.user("U", interest), stage.user("V", stage.edge.logged[1])
    stage.wire(user).hold()
    options = stage.edge.options
    stage.run(options.broker.ping_s + options.user.silence_s + AT_ONCE_S)
    stage.publish_logged(interest)
    stage.wait_served(user)
    stage.run(AT_ONCE_S)
    stage.expect_received(user, interest, 1)
    stage.run(options.broker.ping_s + options.broker.pong_timeout_s + AT_ONCE_S)
    first = next(iter(stage.edge.brokers.values()))
    left = [each for each in first.machine.sessions.values() if each.name == user.name]
    stage.expect("b1 has forgotten U, who is elsewhere", not left)
    stage.expect("V has heard of b1 all the time", not quiet.machine.counters["connections_silent"])


def live_connection_lost(stage: EdgeStage) -> None:
    """U's connection is lost while P publishes on a live channel: U itself reports the gap."""
    live = stage.edge.live[0]
    user, publisher = stage.user("U", live), stage.publisher("P", live.name.encode())
    stage.run(AT_ONCE_S)
    stage.lose_wire(user)
    stage.publish(publisher, live.name.encode(), times=2)
    stage.run(AT_ONCE_S)
    stage.wait_served(user)
    stage.run(AT_ONCE_S)
    stage.expect_user_gaps(1, live)


EDGE_SCENARIOS: dict[str, EdgeScenario] = {
    "edge-broker-dies-publishing": EdgeScenario(broker_dies_publishing, losses_allowed=True),
    "edge-catches-up": EdgeScenario(catches_up, edge=SELDOM_CHECKED),
    "edge-crash-of-the-application": EdgeScenario(crash_of_the_application),
    "edge-dropped-by-the-log": EdgeScenario(dropped_by_the_log, edge=FEW_KEPT, losses_allowed=True),
    "edge-gap-is-old": EdgeScenario(gap_is_old, edge=FEW_KEPT),
    "edge-gap-of-the-channel": EdgeScenario(gap_of_the_channel, edge=SELDOM_CHECKED),
    "edge-hole-from-a-broker": EdgeScenario(hole_from_a_broker, makes_holes=True),
    "edge-hole-on-the-channel": EdgeScenario(hole_on_the_channel, edge=SELDOM_CHECKED),
    "edge-late-connect": EdgeScenario(late_connect, edge=ONE_BROKER),
    "edge-left-after-a-while": EdgeScenario(left_after_a_while),
    "edge-lingers": EdgeScenario(lingers),
    "edge-live-connection-lost": EdgeScenario(live_connection_lost, losses_allowed=True),
    "edge-log-flushed": EdgeScenario(log_flushed, edge=LOGS_FAIL, losses_allowed=True),
    "edge-log-restored": EdgeScenario(log_restored, edge=LOGS_FAIL, losses_allowed=True),
    "edge-moves-while-publishing": EdgeScenario(moves_while_publishing),
    "edge-published-while-opening": EdgeScenario(published_while_opening, edge=SELDOM_CHECKED),
    "edge-publisher-dies": EdgeScenario(publisher_dies),
    "edge-reader-stops": EdgeScenario(reader_stops, edge=SMALL_BUFFERS, losses_allowed=True),
    "edge-shared": EdgeScenario(shared),
    "edge-silent-connection": EdgeScenario(silent_connection),
    "edge-tip-after-confirmation": EdgeScenario(tip_after_confirmation, edge=SELDOM_CHECKED),
    "edge-zombie-writer": EdgeScenario(zombie_writer),
    **MOVING,
}
"""Every scenario by its name."""
