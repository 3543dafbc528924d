"""Scripts for brokers and users: each provokes one fault that one rule prevents.

U, V and W are users; b1, b2 and b3 are brokers. P is a backend that publishes on a live channel. A *hole* is a missing
offset. "Soon" is ``AT_ONCE_S``: longer than anything takes here that is not held up.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

from dynamoth_broker.events import ChannelGap
from dynamoth_broker.interests import FRAME_BYTES
from dynamoth_sim.edge.scenarios_of_logs import BACKLOG, OF_LOGS
from dynamoth_sim.edge.scenarios_of_moves import MOVING
from dynamoth_sim.edge.scenarios_of_positions import OF_POSITIONS
from dynamoth_sim.edge.scenarios_of_presence import OF_PRESENCE
from dynamoth_sim.edge.stage import AT_ONCE_S, NEVER_S, SELDOM_CHECKED, EdgeScenario, EdgeStage
from dynamoth_sim.edge.world import SHORT_BROKER_OPTIONS, EdgeOptions

UNREAD_MAX = 30
FEW = 5
"""Frames that a broker sends to a full connection, too: pings and gaps."""


LONG = 100
"""Publications that fit in one page."""

BURST = 10
"""Frames that a user who is behind is sent at once."""

SMALL_BUFFERS = EdgeOptions(unread_max=UNREAD_MAX)
LONG_PAGES = EdgeOptions(
    logged=("log1", "log2", "log3", "log4"),
    unread_max=UNREAD_MAX,
    broker=replace(SHORT_BROKER_OPTIONS, tip_check_s=NEVER_S, page_entries=LONG, burst_bytes=BURST * FRAME_BYTES),
)
"""Brokers that read everything at once, and send it bit by bit."""
ONE_BROKER = EdgeOptions(brokers=1)
OFTEN_CHECKED = EdgeOptions(broker=replace(SHORT_BROKER_OPTIONS, tip_check_s=0.1))
LINGERING = EdgeOptions(broker=replace(SHORT_BROKER_OPTIONS, linger_s=2.0, tip_check_s=NEVER_S))

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
    stage.join_user(user, interest)
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


def joined_again(stage: EdgeStage) -> None:
    """U subscribes to an interest that b1 is leaving, while an answer of its log is still under way."""
    first, interest = stage.edge.logged[0], stage.edge.logged[2]
    user = stage.user("U", first, interest)
    process = stage.broker("b1").broker
    assert process is not None
    with stage.log_held("b1", interest, to_server=False):
        process.handle(ChannelGap(interest.log_channel, None, "a link was lost"))
        user.leave(interest)
        stage.run(SHORT_BROKER_OPTIONS.linger_s + 0.001)
        stage.join_user(user, interest)
        stage.run(0.1)
    stage.wait_served(user, "b1")
    stage.publish_logged(interest)
    stage.run(AT_ONCE_S)
    stage.expect_received(user, interest, 1)


def refused_by_redis(stage: EdgeStage) -> None:
    """Redis refuses a channel, and then allows it: b1 does not leave it when the time of the refusal has passed."""
    interest = stage.edge.logged[0]
    home = stage.cluster.servers[stage.home(interest)]
    home.refuse = lambda who, words: "NOPERM" if who == "b1.s" and words[0] == b"SUBSCRIBE" else None
    user = stage.edge.add_user("U", [interest], "b1")
    user.start()
    stage.run(AT_ONCE_S)
    stage.expect("U waits", not stage.is_served(user))
    home.refuse = None
    stage.wait_served(user, "b1")
    stage.run(stage.edge.options.broker.linger_s)
    stage.publish_logged(interest)
    stage.run(AT_ONCE_S)
    stage.expect_received(user, interest, 1)


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


def reader_stops_again(stage: EdgeStage) -> None:
    """U is behind with two interests, reads for a moment, and stops: b1 has read the logs, and sends a bit of them."""
    first, *others = stage.edge.logged
    at_one_server = [first, next(each for each in others if stage.log_of(each) is stage.log_of(first))]
    user = stage.user("U", *at_one_server)
    with ExitStack() as until_read:
        with ExitStack() as until_stopped:
            with stage.not_reading(user):
                stage.publish_logged(first, UNREAD_MAX + 1)
                for interest in at_one_server:
                    stage.append(interest, LONG)
                    stage.publish_logged(interest)
                until_stopped.enter_context(stage.log_held("b1", first, to_server=False))
            stage.run(AT_ONCE_S)
            wire = until_read.enter_context(stage.not_reading(user))
        stage.run(AT_ONCE_S)
        bound = UNREAD_MAX + BURST + FEW
        stage.expect(f"at most {bound} frames wait for U, not {wire.unread}", wire.unread <= bound)
    stage.run(2 * AT_ONCE_S)
    stage.expect_received(user, first, UNREAD_MAX + 1 + LONG + 1)


def subscribes_without_reading(stage: EdgeStage) -> None:
    """U reads nothing, and subscribes to one more interest: nothing of that is sent, either."""
    full, interest = stage.edge.logged[:2]
    user = stage.user("U", full)
    stage.user("V", interest)
    with stage.not_reading(user) as wire:
        stage.publish_logged(full, UNREAD_MAX + FEW)
        stage.join_user(user, interest)
        stage.run(AT_ONCE_S)
        stage.publish_logged(interest, UNREAD_MAX)
        bound = UNREAD_MAX + 2 * FEW
        stage.expect(f"at most {bound} frames wait for U, not {wire.unread}", wire.unread <= bound)
    stage.wait_served(user)
    stage.run(AT_ONCE_S)
    stage.expect_received(user, interest, UNREAD_MAX)


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
    "edge-catches-up": EdgeScenario(catches_up, edge=SELDOM_CHECKED),
    "edge-crash-of-the-application": EdgeScenario(crash_of_the_application),
    "edge-gap-of-the-channel": EdgeScenario(gap_of_the_channel, edge=SELDOM_CHECKED),
    "edge-hole-from-a-broker": EdgeScenario(hole_from_a_broker, makes_holes=True),
    "edge-hole-on-the-channel": EdgeScenario(hole_on_the_channel, edge=SELDOM_CHECKED),
    "edge-joined-again": EdgeScenario(joined_again, edge=OFTEN_CHECKED),
    "edge-late-connect": EdgeScenario(late_connect, edge=ONE_BROKER),
    "edge-left-after-a-while": EdgeScenario(left_after_a_while),
    "edge-lingers": EdgeScenario(lingers),
    "edge-live-connection-lost": EdgeScenario(live_connection_lost, losses_allowed=True),
    "edge-published-while-opening": EdgeScenario(published_while_opening, edge=SELDOM_CHECKED),
    "edge-publisher-dies": EdgeScenario(publisher_dies),
    "edge-reader-stops": EdgeScenario(reader_stops, edge=SMALL_BUFFERS, losses_allowed=True),
    "edge-reader-stops-again": EdgeScenario(reader_stops_again, edge=LONG_PAGES),
    "edge-refused-by-redis": EdgeScenario(refused_by_redis, edge=LINGERING),
    "edge-shared": EdgeScenario(shared),
    "edge-silent-connection": EdgeScenario(silent_connection),
    "edge-subscribes-without-reading": EdgeScenario(subscribes_without_reading, edge=SMALL_BUFFERS),
    "edge-tip-after-confirmation": EdgeScenario(tip_after_confirmation, edge=SELDOM_CHECKED),
    **OF_LOGS,
    **MOVING,
    **OF_POSITIONS,
    **OF_PRESENCE,
}
"""Every scenario by its name."""
