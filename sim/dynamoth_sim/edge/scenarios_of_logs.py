"""Scripts for the logs of interests: writers that die, servers that lose data, and logs that keep little.

U and V are users; V publishes where the script says so. See ``scenarios``.
"""

from __future__ import annotations

from dynamoth.edge.log import Appended
from dynamoth_broker.logs import CALM_S
from dynamoth_sim.edge.stage import AT_ONCE_S, EdgeScenario, EdgeStage
from dynamoth_sim.edge.world import EdgeOptions
from dynamoth_sim.world.redis import read_only

BACKLOG = 20
"""Publications that a user misses: several pages of the log, and more than a broker keeps by itself."""

RETAINED = 8

FEW_KEPT = EdgeOptions(retained_min=RETAINED, logs_may_fail=True)
LOGS_FAIL = EdgeOptions(logs_may_fail=True)


# Logs that keep little.


def dropped_by_the_log(stage: EdgeStage) -> None:
    """U comes back for more than its log keeps: it gets a gap that names what is missing."""
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
    """All keys of a log server are deleted: users get a gap, and go on with the new log."""
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


def log_refuses(stage: EdgeStage) -> None:
    """The server of a log becomes a replica for a while: brokers say so, and what it has refused is stored later."""
    interest = stage.edge.logged[0]
    user = stage.user("U", interest, is_stored=True)
    publisher = stage.user("V", interest, at="b2")
    stage.publish_by(publisher, interest, 2)
    server, logs = stage.log_of(interest), [stage.broker(name).machine.logs for name in ("b1", "b2")]
    server.refuse = read_only
    stage.publish_by(publisher, interest)
    stage.wait("b1 and b2 say that it refuses", lambda: all(server.id in each.refusals for each in logs))
    stage.expect("U's position is not stored", stage.stored_offset(user, interest) < 2)
    server.refuse = None
    stage.wait("b1 and b2 say that it accepts", lambda: not any(each.refusals for each in logs), 2 * CALM_S)
    stage.expect_stored(user, interest, 2)
    stage.publish_by(publisher, interest)
    stage.run(AT_ONCE_S)
    stage.expect_received(user, interest, 3)
    stage.expect_user_gaps(0, interest)


OF_LOGS: dict[str, EdgeScenario] = {
    "edge-broker-dies-publishing": EdgeScenario(broker_dies_publishing, losses_allowed=True),
    "edge-dropped-by-the-log": EdgeScenario(dropped_by_the_log, edge=FEW_KEPT, losses_allowed=True),
    "edge-gap-is-old": EdgeScenario(gap_is_old, edge=FEW_KEPT),
    "edge-log-flushed": EdgeScenario(log_flushed, edge=LOGS_FAIL, losses_allowed=True),
    "edge-log-refuses": EdgeScenario(log_refuses, losses_allowed=True),
    "edge-log-restored": EdgeScenario(log_restored, edge=LOGS_FAIL, losses_allowed=True),
    "edge-moves-while-publishing": EdgeScenario(moves_while_publishing),
    "edge-zombie-writer": EdgeScenario(zombie_writer),
}
