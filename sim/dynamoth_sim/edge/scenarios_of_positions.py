"""Scripts for stored positions: users who die and come back with nothing but the name of their session.

U is a user whose subscriptions are stored. "Stored" in a script's text: at the log server. See ``scenarios``.
"""

from __future__ import annotations

from dynamoth.edge.frames import Ack, to_wire
from dynamoth.edge.interests import Interest
from dynamoth.edge.publications import Position
from dynamoth_sim.edge.stage import AT_ONCE_S, EdgeScenario, EdgeStage
from dynamoth_sim.edge.users import UserApp

BACKLOG = 20
"""Publications that take U's application about 0.1 s."""

STORED_S = 0.4
"""Within this what was handled is stored, where nothing is held up: twice ``ack_s``, and the ways."""


def _stored_user(stage: EdgeStage, publications: int = 0) -> tuple[UserApp, Interest]:
    """Start U at b1, and wait until that many publications are handled, and their position is stored."""
    interest = stage.edge.logged[0]
    user = stage.user("U", interest, is_stored=True)
    if publications:
        stage.publish_logged(interest, publications)
        stage.run(STORED_S)
    stage.expect_stored(user, interest, publications)
    return user, interest


def _expect_exact(stage: EdgeStage, user: UserApp, interest: Interest, count: int) -> None:
    """Note a failure unless U has handled everything, and nothing twice."""
    stage.expect_received(user, interest, count)
    stage.expect_delivered(user, count)
    stage.expect(f"nothing comes again, not {user.repeated}", user.repeated == 0, interest.name.encode())


def process_dies(stage: EdgeStage) -> None:
    """U dies; much is published; its next process goes on at another broker, behind what was stored."""
    user, interest = _stored_user(stage, 3)
    user.crash()
    stage.broker("b1").crash()
    stage.publish_logged(interest, BACKLOG)
    stage.restart_user(user)
    _expect_exact(stage, user, interest, 3 + BACKLOG)
    stage.start(stage.broker("b1"))


def dies_before_its_first_ack(stage: EdgeStage) -> None:
    """U dies when its subscription is confirmed: what was published since comes to its next process."""
    user, interest = _stored_user(stage)
    user.crash()
    stage.publish_logged(interest, 3)
    stage.restart_user(user)
    _expect_exact(stage, user, interest, 3)


def handler_at_work(stage: EdgeStage) -> None:
    """U dies while publications wait that its application has not handled: they come again."""
    user, interest = _stored_user(stage)
    stage.append(interest, 3 * BACKLOG)
    stage.publish_logged(interest)
    stage.wait("U has received all", lambda: stage.offset(user, interest) == 3 * BACKLOG + 1)
    stage.wait("some of it is stored", lambda: stage.stored_offset(user, interest) > 0)
    user.crash()
    stage.restart_user(user)
    stage.expect_received(user, interest, 3 * BACKLOG + 1)


def acks_cross(stage: EdgeStage) -> None:
    """What U has acknowledged at b1 comes to the log server behind what it has acknowledged at b2, later."""
    user, interest = _stored_user(stage)
    stage.publish_logged(interest, 3)
    stage.run(0.05)
    with stage.log_held("b1", interest, to_server=True):
        stage.run(2 * stage.edge.options.broker.ack_s)
        stage.move_user(user, "b2")
        stage.publish_logged(interest, 3)
        stage.wait("b2 has stored", lambda: stage.stored_offset(user, interest) == 6)
    stage.run(AT_ONCE_S)
    stage.expect_stored(user, interest, 6)
    user.crash()
    stage.restart_user(user)
    _expect_exact(stage, user, interest, 6)


def ack_ahead(stage: EdgeStage) -> None:
    """U acknowledges what was not published yet, as no client should: it would never get that."""
    user, interest = _stored_user(stage, 2)
    epoch = stage.shared("b1", interest).epoch
    stage.wire(user).send_up(to_wire(Ack({interest.id: Position(epoch, 5)})))
    stage.run(STORED_S)
    stage.expect_stored(user, interest, 2)
    user.crash()
    stage.publish_logged(interest, 3)
    stage.restart_user(user)
    _expect_exact(stage, user, interest, 5)


def log_connection_lost(stage: EdgeStage) -> None:
    """b1 loses the connection to the log server before its answer: it stores the position again."""
    user, interest = _stored_user(stage)
    stage.publish_logged(interest, 3)
    stage.run(0.05)
    with stage.log_held("b1", interest, to_server=True):
        stage.run(2 * stage.edge.options.broker.ack_s)
        stage.cut("b1", stage.log_of(interest).id)
    stage.run(1.0)
    stage.expect_stored(user, interest, 3)
    user.crash()
    stage.restart_user(user)
    _expect_exact(stage, user, interest, 3)


def broker_dies(stage: EdgeStage) -> None:
    """b1 dies before it has stored what U has acknowledged: U tells the next broker, though nothing is published."""
    user, interest = _stored_user(stage)
    stage.publish_logged(interest, 3)
    stage.run(0.05)
    with stage.log_held("b1", interest, to_server=True):
        stage.run(2 * stage.edge.options.broker.ack_s)
        stage.cut("b1", stage.log_of(interest).id)
        stage.broker("b1").crash()
    stage.wait_served(user)
    stage.run(STORED_S)
    stage.expect_stored(user, interest, 3)
    user.crash()
    stage.restart_user(user)
    _expect_exact(stage, user, interest, 3)
    stage.start(stage.broker("b1"))


OF_POSITIONS: dict[str, EdgeScenario] = {
    "edge-stored-ack-ahead": EdgeScenario(ack_ahead),
    "edge-stored-acks-cross": EdgeScenario(acks_cross),
    "edge-stored-broker-dies": EdgeScenario(broker_dies, losses_allowed=True),
    "edge-stored-dies-before-its-first-ack": EdgeScenario(dies_before_its_first_ack),
    "edge-stored-handler-at-work": EdgeScenario(handler_at_work),
    "edge-stored-log-connection-lost": EdgeScenario(log_connection_lost),
    "edge-stored-process-dies": EdgeScenario(process_dies, losses_allowed=True),
}
